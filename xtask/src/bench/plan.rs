//! What `cargo xtask bench` is asked for.

use std::path::PathBuf;

use super::Suite;

/// Suites in the order of the page, and how they are run.
#[derive(Debug, PartialEq)]
pub(super) struct Plan {
    pub(super) suites: Vec<Suite>,
    pub(super) effort: Effort,
    /// Where the run goes, instead of a folder of its own below `target/bench`.
    pub(super) out: Option<PathBuf>,
    /// The file or device that is measured, instead of a file that is made.
    pub(super) disk: Option<PathBuf>,
    /// Measure `disk` although it was never filled.
    pub(super) allows_thin: bool,
    /// Run the suites that write on `disk` too.
    pub(super) is_destructive: bool,
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
    /// What is chosen by pace.
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

    fn checked(self) -> Result<Effort, String> {
        let least = Effort::of(self.pace).rounds;
        if self.rounds < least {
            return Err(format!(
                "at least {least} rounds: fewer say nothing about the spread"
            ));
        }
        if !(0.05..=600.0).contains(&self.seconds) {
            return Err("a round takes 0.05 to 600 seconds".to_owned());
        }
        Ok(self)
    }
}

impl Plan {
    /// Reads the words behind `cargo xtask bench`; without the name of a suite, all of them.
    pub(super) fn parse(words: &[&str]) -> Result<Plan, String> {
        let mut plan = Plan {
            suites: Vec::new(),
            effort: Effort::of(Pace::Full),
            out: None,
            disk: None,
            allows_thin: false,
            is_destructive: false,
        };
        let (mut rounds, mut seconds) = (None, None);
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().copied().ok_or(format!("{word} wants a value"));
            match *word {
                "--quick" => plan.effort = Effort::of(Pace::Quick),
                "--smoke" => plan.effort = Effort::of(Pace::Smoke),
                "--out" => plan.out = Some(value()?.into()),
                "--disk" => plan.disk = Some(value()?.into()),
                "--allow-thin" => plan.allows_thin = true,
                "--destructive" => plan.is_destructive = true,
                "--rounds" => rounds = Some(number(value()?)?),
                "--seconds" => seconds = Some(number(value()?)?),
                name => plan.add(name)?,
            }
        }
        if plan.suites.is_empty() {
            plan.add("all")?;
        }
        plan.effort.rounds = rounds.unwrap_or(plan.effort.rounds);
        plan.effort.seconds = seconds.unwrap_or(plan.effort.seconds);
        plan.effort = plan.effort.checked()?;
        Ok(plan)
    }

    fn add(&mut self, name: &str) -> Result<(), String> {
        let named = |suite: &&Suite| name == "all" || suite.name() == name;
        let found: Vec<Suite> = Suite::ALL.iter().filter(named).copied().collect();
        if found.is_empty() {
            let names: Vec<&str> = Suite::ALL.iter().map(|suite| suite.name()).collect();
            return Err(format!("`{name}` is no suite: {} or all", names.join(", ")));
        }
        let new = found
            .into_iter()
            .filter(|suite| !self.suites.contains(suite));
        let new: Vec<Suite> = new.collect();
        self.suites.extend(new);
        Ok(())
    }

    /// The run's folder below `target/bench`.
    pub(super) fn name(&self) -> String {
        let what = match self.suites.as_slice() {
            [one] => one.name(),
            several if several.len() == Suite::ALL.len() => "all",
            _ => "some",
        };
        format!("{what}{}", self.effort.pace.pick("", "-quick", "-smoke"))
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("`{text}` is no number here"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_in_any_order() {
        let all = Plan::parse(&[]).unwrap();
        assert_eq!(all.suites, Suite::ALL);
        assert_eq!((all.effort.rounds, all.name().as_str()), (5, "all"));
        let two = Plan::parse(&["--rounds", "9", "cpu", "--quick", "tax", "cpu"]).unwrap();
        assert_eq!(two.suites, [Suite::Cpu, Suite::Tax]);
        assert_eq!((two.effort.rounds, two.effort.pace), (9, Pace::Quick));
        let one = Plan::parse(&[
            "idle",
            "--smoke",
            "--out",
            "a",
            "--disk",
            "b",
            "--allow-thin",
        ])
        .unwrap();
        assert_eq!(
            (one.name().as_str(), one.out, one.disk),
            ("idle-smoke", Some("a".into()), Some("b".into()))
        );
        assert!(one.allows_thin && !one.is_destructive);
    }

    #[test]
    fn too_little_and_unknown_words_are_refused() {
        let refused = [
            &["--rounds", "4"][..],
            &["--quick", "--rounds", "2"],
            &["--rounds"],
            &["--seconds", "nan"],
            &["--seconds", "0"],
            &["--speed", "9"],
            &["speed"],
        ];
        for words in refused {
            assert!(Plan::parse(words).is_err(), "{words:?}");
        }
    }
}
