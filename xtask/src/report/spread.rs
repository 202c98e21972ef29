//! Median, minimum and maximum of a few rounds.

use std::fmt;

/// What a handful of rounds came to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Of at least one value; none of them may be unordered.
    pub(crate) fn of(values: &[f64]) -> Option<Spread> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let upper = *sorted.get(middle)?;
        let lower = if sorted.len() % 2 == 1 {
            upper
        } else {
            sorted[middle - 1]
        };
        Some(Spread {
            median: f64::midpoint(lower, upper),
            min: *sorted.first()?,
            max: *sorted.last()?,
        })
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{:.2} ({:.2}–{:.2})", self.median, self.min, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_lies_in_the_middle() {
        let table = [
            (&[3.0][..], (3.0, 3.0, 3.0)),
            (&[9.0, 1.0, 2.0], (2.0, 1.0, 9.0)),
            (&[4.0, 1.0, 2.0, 3.0], (2.5, 1.0, 4.0)),
        ];
        for (values, (median, min, max)) in table {
            assert_eq!(
                Spread::of(values),
                Some(Spread { median, min, max }),
                "{values:?}"
            );
        }
        assert_eq!(Spread::of(&[]), None);
    }
}
