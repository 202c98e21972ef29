//! The arguments of `cargo xtask guest-bench`.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use super::subject::{ALL, Subject};

/// How guests are measured, and which.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
pub(super) struct Options {
    #[arg(long, conflicts_with = "smoke")]
    quick: bool,
    #[arg(long)]
    smoke: bool,
    #[arg(long = "accel", default_value = "auto")]
    pub(super) accelerator: Wanted,
    #[arg(long, value_delimiter = ',', value_parser = subject)]
    only: Vec<&'static Subject>,
    /// A kernel's image; a distribution's kernel otherwise.
    #[arg(long, requires = "modules")]
    kernel: Option<PathBuf>,
    /// The folder of that kernel's modules.
    #[arg(long, requires = "kernel")]
    modules: Option<PathBuf>,
    #[arg(long)]
    pub(super) out: Option<PathBuf>,
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
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
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
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

/// Subjects of a smoke run, which only shows that the harness works.
const SMOKE: [&str; 2] = ["ahci", "cleave"];

impl Options {
    pub(super) fn parse_words(words: &[&str]) -> Result<Options, String> {
        Options::try_parse_from(words).map_err(|error| error.to_string())
    }

    pub(super) fn effort(&self) -> Effort {
        match (self.smoke, self.quick) {
            (true, _) => Effort::Smoke,
            (_, true) => Effort::Quick,
            _ => Effort::Whole,
        }
    }

    /// Image and folder of modules.
    pub(super) fn kernel(&self) -> Option<(&PathBuf, &PathBuf)> {
        self.kernel.as_ref().zip(self.modules.as_ref())
    }

    /// In the order of the table, so that the same ones always meet in the same order.
    pub(super) fn subjects(&self) -> Vec<&'static Subject> {
        let is_asked = |one: &&Subject| match (self.only.as_slice(), self.effort()) {
            ([], Effort::Smoke) => SMOKE.contains(&one.name),
            ([], _) => true,
            (only, _) => only.iter().any(|asked| asked.name == one.name),
        };
        ALL.iter().filter(is_asked).collect()
    }

    pub(super) fn plan(&self) -> Plan {
        let mut plan = match self.effort() {
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

fn subject(name: &str) -> Result<&'static Subject, String> {
    ALL.iter().find(|one| one.name == name).ok_or_else(|| {
        let names: Vec<&str> = ALL.iter().map(|one| one.name).collect();
        format!("there are {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read() {
        let words = ["--quick", "--only", "cleave,ide", "--rounds", "7"];
        let options = Options::parse_words(&words).unwrap();
        let names: Vec<&str> = options.subjects().iter().map(|one| one.name).collect();
        assert_eq!(names, ["ide", "cleave"]);
        assert_eq!(
            (options.plan().rounds, options.effort()),
            (7, Effort::Quick)
        );
        let count = |words: &[&str]| Options::parse_words(words).unwrap().subjects().len();
        assert_eq!((count(&[]), count(&["--smoke"])), (ALL.len(), SMOKE.len()));
        let kernel = Options::parse_words(&["--kernel", "a", "--modules", "b"]).unwrap();
        assert!(kernel.kernel().is_some());
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_choices() {
        let why = Options::parse_words(&["--only", "cleave,floppy"]).unwrap_err();
        assert!(
            why.contains("floppy") && why.contains("lsi53c895a"),
            "{why}"
        );
        for line in [
            "--accel xen",
            "--accel",
            "--rounds 0",
            "--kernel bzImage",
            "--modules m",
            "--only ",
            "--fast",
        ] {
            let words: Vec<&str> = line.split(' ').collect();
            assert!(Options::parse_words(&words).is_err(), "{line}");
        }
    }
}
