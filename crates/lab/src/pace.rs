//! How thoroughly a bench measures.

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

impl BenchPace {
    /// Returns the pace that two options say.
    pub(crate) fn of(is_smoke: bool, is_quick: bool) -> BenchPace {
        match (is_smoke, is_quick) {
            (true, _) => BenchPace::Smoke,
            (_, true) => BenchPace::Quick,
            _ => BenchPace::Full,
        }
    }

    /// Returns the argument for this pace.
    pub(crate) fn pick<T>(self, full: T, quick: T, smoke: T) -> T {
        match self {
            BenchPace::Full => full,
            BenchPace::Quick => quick,
            BenchPace::Smoke => smoke,
        }
    }
}
