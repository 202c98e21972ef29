//! How thoroughly a bench measures.

use clap::Args;

/// How much is asked of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BenchPace {
    /// Every point.
    Full,
    /// The points that matter.
    Quick,
    /// One short round with programs built for tests: shows that all of it runs, and nothing else.
    Smoke,
}

/// The options that say how thoroughly.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct PaceOptions {
    /// Measure fewer points and rounds: ten minutes instead of an hour or more
    #[arg(long, conflicts_with = "smoke")]
    quick: bool,
    /// Run one short round, which shows that it works
    #[arg(long)]
    pub(crate) smoke: bool,
}

impl PaceOptions {
    /// Returns the pace that they say.
    pub(crate) fn pace(self) -> BenchPace {
        match (self.smoke, self.quick) {
            (true, _) => BenchPace::Smoke,
            (_, true) => BenchPace::Quick,
            _ => BenchPace::Full,
        }
    }
}

impl BenchPace {
    /// Returns the argument for this pace.
    pub(crate) fn pick<T>(self, full: T, quick: T, smoke: T) -> T {
        match self {
            BenchPace::Full => full,
            BenchPace::Quick => quick,
            BenchPace::Smoke => smoke,
        }
    }
}
