//! The arguments of `cargo xtask bench`.

use std::path::PathBuf;

use clap::Parser;

use super::Suite;

/// Suites, and how they are run.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
pub(super) struct Options {
    /// Without the name of a suite, or with `all`: all of them.
    #[arg(value_name = "SUITE", value_parser = suites)]
    named: Vec<Suites>,
    #[arg(long, conflicts_with = "smoke")]
    quick: bool,
    #[arg(long)]
    smoke: bool,
    #[arg(long)]
    rounds: Option<u32>,
    #[arg(long)]
    seconds: Option<f64>,
    /// The run's folder, instead of one below `target/bench`.
    #[arg(long)]
    pub(super) out: Option<PathBuf>,
    /// The file or device that is measured, instead of a file that is made.
    #[arg(long)]
    pub(super) disk: Option<PathBuf>,
    /// Measure `disk` although it was never filled.
    #[arg(long)]
    pub(super) allow_thin: bool,
    /// The folder of a built SPDK, which is measured too.
    #[arg(long)]
    pub(super) spdk: Option<PathBuf>,
    /// Run the suites that write on `disk` too.
    #[arg(long)]
    pub(super) destructive: bool,
}

type Suites = &'static [Suite];

fn suites(name: &str) -> Result<Suites, String> {
    if name == "all" {
        return Ok(Suite::ALL);
    }
    let found = Suite::ALL.iter().find(|suite| suite.name() == name);
    found.map(std::slice::from_ref).ok_or_else(|| {
        let names: Vec<&str> = Suite::ALL.iter().map(|suite| suite.name()).collect();
        format!("the suites are {} and all", names.join(", "))
    })
}

/// How long and how often.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Effort {
    pub(crate) pace: Pace,
    pub(crate) rounds: u32,
    pub(crate) seconds: f64,
}

/// How much is asked of each suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Every point.
    Full,
    /// The points that matter, all suites within ten minutes.
    Quick,
    /// One short round with programs built for tests: shows that all of it runs, and nothing else.
    Smoke,
}

impl Pace {
    /// Returns the argument for this pace.
    pub(crate) fn pick<T>(self, full: T, quick: T, smoke: T) -> T {
        match self {
            Pace::Full => full,
            Pace::Quick => quick,
            Pace::Smoke => smoke,
        }
    }
}

impl Effort {
    /// Of a pace: rounds that are enough for a spread, seconds that are enough for a median.
    fn of(pace: Pace) -> Effort {
        Effort {
            pace,
            rounds: pace.pick(5, 3, 1),
            seconds: pace.pick(1.5, 0.4, 0.05),
        }
    }

    fn checked(self) -> Result<(), String> {
        let least = Effort::of(self.pace).rounds;
        if self.rounds < least {
            return Err(format!(
                "at least {least} rounds: fewer say nothing about the spread"
            ));
        }
        if !(0.05..=600.0).contains(&self.seconds) {
            return Err("a round takes 0.05 to 600 seconds".to_owned());
        }
        Ok(())
    }
}

impl Options {
    /// Reads the arguments behind `cargo xtask bench`.
    pub(super) fn parse_words(words: &[&str]) -> Result<Options, String> {
        let options = Options::try_parse_from(words).map_err(|error| error.to_string())?;
        options.effort().checked()?;
        Ok(options)
    }

    /// Each suite once, in the order of the arguments.
    pub(super) fn suites(&self) -> Vec<Suite> {
        let mut suites = Vec::new();
        for suite in self.named.iter().copied().flatten() {
            if !suites.contains(suite) {
                suites.push(*suite);
            }
        }
        if suites.is_empty() {
            suites = Suite::ALL.to_vec();
        }
        suites
    }

    pub(super) fn effort(&self) -> Effort {
        let pace = match (self.smoke, self.quick) {
            (true, _) => Pace::Smoke,
            (_, true) => Pace::Quick,
            _ => Pace::Full,
        };
        let usual = Effort::of(pace);
        Effort {
            pace,
            rounds: self.rounds.unwrap_or(usual.rounds),
            seconds: self.seconds.unwrap_or(usual.seconds),
        }
    }

    /// The run's folder below `target/bench`.
    pub(super) fn name(&self) -> String {
        let what = match self.suites().as_slice() {
            [one] => one.name(),
            several if several.len() == Suite::ALL.len() => "all",
            _ => "some",
        };
        format!("{what}{}", self.effort().pace.pick("", "-quick", "-smoke"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_in_any_order() {
        let all = Options::parse_words(&[]).unwrap();
        assert_eq!(all.suites(), Suite::ALL);
        assert_eq!((all.effort().rounds, all.name().as_str()), (5, "all"));
        let two = ["--rounds", "9", "cpu", "--quick", "tax", "cpu"];
        let two = Options::parse_words(&two).unwrap();
        assert_eq!(two.suites(), [Suite::Cpu, Suite::Tax]);
        assert_eq!((two.effort().rounds, two.effort().pace), (9, Pace::Quick));
        let one = ["idle", "--smoke", "--disk", "b", "--allow-thin"];
        let one = Options::parse_words(&one).unwrap();
        assert_eq!(
            (one.name().as_str(), one.disk.as_deref()),
            ("idle-smoke", Some("b".as_ref()))
        );
        assert!(one.allow_thin && !one.destructive);
    }

    #[test]
    fn too_little_and_unknown_arguments_are_refused() {
        for line in [
            "--rounds 4",
            "--quick --rounds 2",
            "--quick --smoke",
            "--rounds",
            "--seconds nan",
            "--seconds 0",
            "--speed 9",
            "speed",
        ] {
            let words: Vec<&str> = line.split(' ').collect();
            assert!(Options::parse_words(&words).is_err(), "{line}");
        }
        let why = Options::parse_words(&["speed"]).unwrap_err();
        assert!(why.contains("recording"), "{why}");
    }
}
