//! The words behind `cargo xtask guest-bench`.

use std::path::PathBuf;

use super::subject::{ALL, Subject};

/// What was asked for.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) effort: Effort,
    pub(super) accelerator: Wanted,
    pub(super) subjects: Vec<&'static Subject>,
    /// Image and folder of modules; a distribution's otherwise.
    pub(super) kernel: Option<(PathBuf, PathBuf)>,
    pub(super) out: Option<PathBuf>,
    rounds: Option<u32>,
}

/// How much of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effort {
    Whole,
    Quick,
    Smoke,
}

/// Which accelerator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wanted {
    Auto,
    Kvm,
    Tcg,
}

/// How long and how often; each of the efforts has one.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) rounds: u32,
    /// Of each figure.
    pub(super) seconds: f64,
    /// Offered rates, in per cent of what the slowest emulated controller takes.
    pub(super) steps: &'static [u32],
    pub(super) threads: &'static [u32],
    pub(super) disk_bytes: u64,
    /// Rounds of guests with several disks: their question is not how much, but whether at all.
    pub(super) together_rounds: u32,
}

/// What a smoke run compares: that the harness works, no more.
const SMOKE: [&str; 2] = ["ahci", "cleave"];

impl Options {
    pub(super) fn parse(words: &[&str]) -> Result<Options, String> {
        let mut options = Options {
            effort: Effort::Whole,
            accelerator: Wanted::Auto,
            subjects: Vec::new(),
            kernel: None,
            out: None,
            rounds: None,
        };
        let (mut image, mut modules) = (None, None);
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().copied().ok_or(format!("{word} needs a value"));
            match *word {
                "--quick" => options.effort = Effort::Quick,
                "--smoke" => options.effort = Effort::Smoke,
                "--accel" => options.accelerator = wanted(value()?)?,
                "--only" => options.subjects = subjects(value()?)?,
                "--kernel" => image = Some(PathBuf::from(value()?)),
                "--modules" => modules = Some(PathBuf::from(value()?)),
                "--out" => options.out = Some(PathBuf::from(value()?)),
                "--rounds" => options.rounds = Some(rounds(value()?)?),
                other => {
                    return Err(format!(
                        "`{other}` is no option of guest-bench; see cargo xtask guest-bench --help"
                    ));
                }
            }
        }
        options.kernel = match (image, modules) {
            (Some(image), Some(modules)) => Some((image, modules)),
            (None, None) => None,
            _ => return Err("--kernel and --modules belong together".to_owned()),
        };
        if options.subjects.is_empty() {
            options.subjects = match options.effort {
                Effort::Smoke => subjects(&SMOKE.join(","))?,
                Effort::Quick | Effort::Whole => ALL.iter().collect(),
            };
        }
        Ok(options)
    }

    pub(super) fn plan(&self) -> Plan {
        let mut plan = match self.effort {
            Effort::Whole => Plan {
                rounds: 5,
                seconds: 3.0,
                steps: &[20, 40, 60, 80, 100],
                threads: &[2, 4, 8, 12, 16, 20],
                disk_bytes: 1 << 30,
                together_rounds: 5,
            },
            Effort::Quick => Plan {
                rounds: 3,
                seconds: 0.8,
                steps: &[33, 67, 100],
                threads: &[2, 8, 20],
                disk_bytes: 256 << 20,
                together_rounds: 1,
            },
            Effort::Smoke => Plan {
                rounds: 1,
                seconds: 0.5,
                steps: &[50],
                threads: &[2],
                disk_bytes: 64 << 20,
                together_rounds: 0,
            },
        };
        plan.rounds = self.rounds.unwrap_or(plan.rounds);
        plan
    }
}

fn wanted(word: &str) -> Result<Wanted, String> {
    match word {
        "auto" => Ok(Wanted::Auto),
        "kvm" => Ok(Wanted::Kvm),
        "tcg" => Ok(Wanted::Tcg),
        _ => Err(format!("--accel takes auto, kvm or tcg, not `{word}`")),
    }
}

fn rounds(word: &str) -> Result<u32, String> {
    let count = word.parse().ok().filter(|count| (1..=100).contains(count));
    count.ok_or(format!("--rounds takes 1 to 100, not `{word}`"))
}

/// In the order of the table, so that the same ones always meet in the same order.
fn subjects(list: &str) -> Result<Vec<&'static Subject>, String> {
    let names: Vec<&str> = list.split(',').filter(|name| !name.is_empty()).collect();
    let known = || {
        let names: Vec<&str> = ALL.iter().map(|subject| subject.name).collect();
        names.join(", ")
    };
    if let Some(name) = names
        .iter()
        .find(|name| ALL.iter().all(|one| one.name != **name))
    {
        return Err(format!(
            "there is no `{name}`; --only takes some of: {}",
            known()
        ));
    }
    if names.is_empty() {
        return Err(format!("--only takes some of: {}", known()));
    }
    Ok(ALL.iter().filter(|one| names.contains(&one.name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_understood() {
        let options =
            Options::parse(&["--quick", "--only", "cleave,ide", "--rounds", "7"]).unwrap();
        let names: Vec<&str> = options.subjects.iter().map(|one| one.name).collect();
        assert_eq!(names, ["ide", "cleave"]);
        assert_eq!((options.plan().rounds, options.effort), (7, Effort::Quick));
        assert_eq!(Options::parse(&[]).unwrap().subjects.len(), ALL.len());
        assert_eq!(
            Options::parse(&["--smoke"]).unwrap().subjects.len(),
            SMOKE.len()
        );
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_choices() {
        let why = Options::parse(&["--only", "cleave,floppy"]).unwrap_err();
        assert!(
            why.contains("`floppy`") && why.contains("lsi53c895a"),
            "{why}"
        );
        let table = [
            &["--accel", "xen"][..],
            &["--accel"],
            &["--rounds", "0"],
            &["--kernel", "bzImage"],
            &["--only", ""],
            &["--fast"],
        ];
        for words in table {
            assert!(Options::parse(words).is_err(), "{words:?}");
        }
    }
}
