//! A measured ratio beside the bar that it must reach.

use std::fmt;

use cleave_chart::Spread;

#[derive(Clone)]
pub(super) struct Verdict {
    /// `T1` to `T13`, `H1` to `H3`.
    pub(super) id: String,
    /// The two subjects that are divided, and the point at which.
    pub(super) what: String,
    pub(super) must: Bar,
    /// The bar that comes after the one of the first release.
    pub(super) aim: String,
    pub(super) measured: Spread,
    /// Counted and not timed: another round would say the same.
    pub(super) is_count: bool,
    pub(super) note: String,
}

/// Fewer rounds are published and not judged.
const JUDGED_ROUNDS_MIN: usize = 5;

/// The bar that the first release must reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Bar {
    AtLeast(f64),
    AtMost(f64),
    /// Published, not judged.
    Published,
}

/// How a measured ratio stands to its bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Pass,
    Short,
    /// No bar, or too few rounds.
    Unjudged,
}

impl Bar {
    /// Reads `≥ 3` or `≤ 1.15`; anything else means that there is no bar.
    pub(super) fn parse(text: &str) -> Bar {
        let number = |sign| text.strip_prefix(sign)?.trim().parse().ok();
        match (number('≥'), number('≤')) {
            (Some(bar), _) => Bar::AtLeast(bar),
            (_, Some(bar)) => Bar::AtMost(bar),
            _ => Bar::Published,
        }
    }

    /// Returns None where there is no bar.
    pub(super) fn is_reached(self, value: f64) -> Option<bool> {
        match self {
            Bar::AtLeast(bar) => Some(value >= bar),
            Bar::AtMost(bar) => Some(value <= bar),
            Bar::Published => None,
        }
    }
}

impl Verdict {
    /// Judges by the median of the rounds.
    pub(super) fn standing(&self) -> Standing {
        if !self.is_count && self.measured.count < JUDGED_ROUNDS_MIN {
            return Standing::Unjudged;
        }
        match self.must.is_reached(self.measured.median) {
            Some(true) => Standing::Pass,
            Some(false) => Standing::Short,
            None => Standing::Unjudged,
        }
    }

    /// Returns true if the rounds differ by more than the median differs from the bar: the next run may say otherwise.
    pub(super) fn is_within_noise(&self) -> bool {
        match self.must {
            Bar::AtLeast(bar) | Bar::AtMost(bar) => {
                self.measured.min < bar && bar < self.measured.max
            }
            Bar::Published => false,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let standing = match self.standing() {
            Standing::Pass => "pass",
            Standing::Short => "SHORT",
            Standing::Unjudged => "",
        };
        let noise = match self.is_within_noise() {
            true => ", within the noise",
            false => "",
        };
        let (must, measured) = (self.must.to_string(), self.measured.to_string());
        let Verdict { id, what, .. } = self;
        write!(
            to,
            "{id:<4} {standing:<5} {measured:<22} {must:<9} {what}{noise}"
        )
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bar::AtLeast(bar) => write!(to, "≥ {bar}"),
            Bar::AtMost(bar) => write!(to, "≤ {bar}"),
            Bar::Published => write!(to, "published"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_goes_by_its_median_and_tells_of_noise() {
        let table = [
            ("≥ 3", [2.0, 3.0, 4.0], Standing::Pass, true),
            ("≥ 3", [2.0, 2.9, 2.95], Standing::Short, false),
            ("≤ 1.15", [1.0, 1.1, 1.2], Standing::Pass, true),
            ("≤ 1.15", [1.2, 1.3, 1.4], Standing::Short, false),
            ("published", [1.0, 2.0, 3.0], Standing::Unjudged, false),
        ];
        for (must, [min, median, max], standing, noisy) in table {
            let rounds = [min, min, median, max, max];
            let mut verdict = Verdict {
                id: "T1".to_owned(),
                what: String::new(),
                must: Bar::parse(must),
                aim: String::new(),
                measured: Spread::of(&rounds).unwrap(),
                is_count: false,
                note: String::new(),
            };
            assert_eq!(verdict.must.to_string(), must);
            assert_eq!(verdict.standing(), standing, "{must} {rounds:?}");
            assert_eq!(verdict.is_within_noise(), noisy, "{must} {rounds:?}");
            verdict.measured = Spread::of(&rounds[1..4]).unwrap();
            assert_eq!(verdict.standing(), Standing::Unjudged, "three rounds");
            verdict.is_count = true;
            assert_eq!(verdict.standing(), standing, "a count needs one");
        }
    }
}
