//! A suite's section of the report: text, tables, figures, and the ratios with their bars.

use super::Spread;
use super::chart::Figure;

/// A suite's part of the page.
#[derive(Default)]
pub(crate) struct Section {
    /// Short and without blanks; the page's anchor.
    pub(crate) id: &'static str,
    pub(crate) title: String,
    /// Sentences: what was measured and how.
    pub(crate) notes: Vec<String>,
    pub(crate) verdicts: Vec<Verdict>,
    pub(crate) tables: Vec<Table>,
    pub(crate) figures: Vec<Figure>,
}

/// Words in rows; the first column names the row.
pub(crate) struct Table {
    pub(crate) title: String,
    pub(crate) head: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

/// A measured ratio beside what it must be.
#[derive(Clone)]
pub(crate) struct Verdict {
    /// `T1` to `T12`.
    pub(crate) id: &'static str,
    /// The two subjects that are divided, and the point at which.
    pub(crate) what: String,
    pub(crate) must: Bar,
    /// The bar, as text.
    pub(crate) aim: &'static str,
    /// None where it could not be measured here; `note` says why.
    pub(crate) measured: Option<Spread>,
    /// Counted and not timed: another round would say the same.
    pub(crate) is_count: bool,
    pub(crate) note: String,
}

/// Fewer rounds are published and not judged.
const JUDGED_ROUNDS_MIN: usize = 5;

/// The bar that the first release must reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bar {
    AtLeast(f64),
    AtMost(f64),
    /// Published, not judged.
    Published,
}

/// How a measured ratio stands to its bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Pass,
    Short,
    /// No bar, no measurement, or one of too few rounds.
    Unjudged,
}

impl Verdict {
    /// The same of a count, which one round settles.
    pub(crate) fn counted(self) -> Verdict {
        Verdict {
            is_count: true,
            ..self
        }
    }

    /// By the median of the rounds.
    pub(crate) fn standing(&self) -> Standing {
        let is_enough = |spread: &Spread| self.is_count || spread.count >= JUDGED_ROUNDS_MIN;
        let Some(spread) = self.measured.filter(is_enough) else {
            return Standing::Unjudged;
        };
        let reached = match self.must {
            Bar::AtLeast(bar) => spread.median >= bar,
            Bar::AtMost(bar) => spread.median <= bar,
            Bar::Published => return Standing::Unjudged,
        };
        match reached {
            true => Standing::Pass,
            false => Standing::Short,
        }
    }

    /// Whether the rounds differ by more than the median differs from the bar: the next run may say otherwise.
    pub(crate) fn is_within_noise(&self) -> bool {
        let bar = match self.must {
            Bar::AtLeast(bar) | Bar::AtMost(bar) => bar,
            Bar::Published => return false,
        };
        self.measured
            .is_some_and(|spread| spread.min < bar && bar < spread.max)
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let standing = match self.standing() {
            Standing::Pass => "pass",
            Standing::Short => "SHORT",
            Standing::Unjudged => "",
        };
        let noise = if self.is_within_noise() {
            ", within the noise"
        } else {
            ""
        };
        let measured = self
            .measured
            .map_or_else(|| "not measured".to_owned(), |spread| spread.to_string());
        write!(
            to,
            "{:<4} {standing:<5} {measured:<22} {:<9} {}{noise}",
            self.id,
            self.must.to_string(),
            self.what
        )
    }
}

impl std::fmt::Display for Bar {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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
            (Bar::AtLeast(3.0), [2.0, 3.0, 4.0], Standing::Pass, true),
            (Bar::AtLeast(3.0), [2.0, 2.9, 2.95], Standing::Short, false),
            (Bar::AtMost(1.15), [1.0, 1.1, 1.2], Standing::Pass, true),
            (Bar::AtMost(1.15), [1.2, 1.3, 1.4], Standing::Short, false),
            (Bar::Published, [1.0, 2.0, 3.0], Standing::Unjudged, false),
        ];
        for (must, [min, median, max], standing, noisy) in table {
            let rounds = [min, min, median, max, max];
            let mut verdict = Verdict {
                id: "T1",
                what: String::new(),
                must,
                aim: "",
                measured: Spread::of(&rounds),
                is_count: false,
                note: String::new(),
            };
            assert_eq!(verdict.standing(), standing, "{must} {rounds:?}");
            assert_eq!(verdict.is_within_noise(), noisy, "{must} {rounds:?}");
            verdict.measured = Spread::of(&rounds[1..4]);
            assert_eq!(verdict.standing(), Standing::Unjudged, "three rounds");
            verdict.is_count = true;
            assert_eq!(verdict.standing(), standing, "a count needs one");
        }
    }
}
