//! How thoroughly a bench measures.

/// How much is asked of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Every point.
    Full,
    /// The points that matter.
    Quick,
    /// One short round with programs built for tests: shows that all of it runs, and nothing else.
    Smoke,
}

impl Pace {
    /// Returns the pace that two options say.
    pub(crate) fn of(is_smoke: bool, is_quick: bool) -> Pace {
        match (is_smoke, is_quick) {
            (true, _) => Pace::Smoke,
            (_, true) => Pace::Quick,
            _ => Pace::Full,
        }
    }

    /// Returns the argument for this pace.
    pub(crate) fn pick<T>(self, full: T, quick: T, smoke: T) -> T {
        match self {
            Pace::Full => full,
            Pace::Quick => quick,
            Pace::Smoke => smoke,
        }
    }
}
