//! Comparisons with other daemons, interleaved in one run: a ratio of two things is measured side by
//! side, round by round, and quoted as the median of the rounds with its minimum and maximum.

mod desk;
mod environment;
mod ring;
mod split;
mod spread;

use std::path::Path;

/// How long and how often.
#[derive(Debug, PartialEq)]
pub(crate) struct Effort {
    rounds: u32,
    seconds: f64,
}

/// Fewer rounds say nothing about the spread.
const ROUNDS_MIN: u32 = 5;

impl Effort {
    /// Reads the words behind `cargo xtask bench ring`.
    pub(crate) fn parse(words: &[&str]) -> Result<Effort, String> {
        let mut effort = Effort {
            rounds: ROUNDS_MIN,
            seconds: 1.5,
        };
        for pair in words.chunks(2) {
            let bad = || format!("`{}` is no measure of effort", pair.join(" "));
            match pair {
                ["--rounds", count] => effort.rounds = count.parse().map_err(|_| bad())?,
                ["--seconds", seconds] => effort.seconds = seconds.parse().map_err(|_| bad())?,
                _ => return Err(bad()),
            }
        }
        if effort.rounds < ROUNDS_MIN || !(0.1..=600.0).contains(&effort.seconds) {
            return Err(format!(
                "at least {ROUNDS_MIN} rounds, of 0.1 to 600 seconds"
            ));
        }
        Ok(effort)
    }
}

/// The cost of the ring alone.
pub(crate) fn ring(root: &Path, effort: &Effort) -> Result<(), String> {
    ring::run(root, effort)
}

/// Splitting by choice against not splitting.
pub(crate) fn split(root: &Path, effort: &Effort) -> Result<(), String> {
    split::run(root, effort)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effort_has_defaults_and_bounds() {
        let usual = Effort::parse(&[]).unwrap();
        assert_eq!(usual.rounds, ROUNDS_MIN);
        let long = Effort::parse(&["--seconds", "10", "--rounds", "9"]).unwrap();
        assert_eq!((long.rounds, long.seconds), (9, 10.0));
        let refused = [
            &["--rounds", "4"][..],
            &["--rounds"],
            &["--seconds", "nan"],
            &["--seconds", "0"],
            &["--speed", "9"],
        ];
        for words in refused {
            assert!(Effort::parse(words).is_err(), "{words:?}");
        }
    }
}
