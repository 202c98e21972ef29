//! The options of `cleave-lab guest-bench`, and what they ask for.

use std::path::{Path, PathBuf};

use clap::{Args, Parser, ValueEnum};

use super::subject::{self, ALL, Subject};
use crate::pace::PaceOptions;

/// How guests are measured, and which.
#[derive(Debug, Clone, Parser)]
pub(crate) struct GuestBenchOptions {
    #[command(flatten)]
    pub(super) pace: PaceOptions,
    /// Choose the accelerator; auto boots a guest to see whether KVM works
    #[arg(long = "accel", value_name = "NAME", default_value = "auto")]
    pub(super) accelerator: AcceleratorChoice,
    /// Measure only these ways of attaching the disk
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = subject::find)]
    pub(super) only: Vec<&'static Subject>,
    #[command(flatten)]
    pub(super) kernel: KernelOptions,
    /// Write to this folder
    #[arg(long, value_name = "DIR")]
    pub(super) out: Option<PathBuf>,
    /// Set the number of rounds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(super) rounds: Option<u32>,
}

/// The kernel that guests boot.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct KernelOptions {
    /// Boot this kernel in guests instead of a distribution's
    #[arg(long = "kernel", value_name = "IMAGE", requires = "modules")]
    pub(super) image: Option<PathBuf>,
    /// The folder of that kernel's modules
    #[arg(long, value_name = "DIR", requires = "image")]
    pub(super) modules: Option<PathBuf>,
}

/// The accelerator that the operator asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum AcceleratorChoice {
    Auto,
    Kvm,
    Tcg,
}

/// How long and how often.
#[derive(Debug, Clone)]
pub(super) struct Effort {
    pub(super) rounds: u32,
    /// Duration of each figure.
    pub(super) seconds: f64,
    /// Offered rates, in per cent of the rate that the slowest emulated controller reaches.
    pub(super) steps: &'static [u32],
    pub(super) threads: &'static [u32],
    pub(super) disk_bytes: u64,
    /// Rounds of guests with several disks: their question is not how much, but whether at all.
    pub(super) together_rounds: u32,
}

/// Subjects of a smoke run.
const SMOKE: [&str; 2] = ["ahci", "cleave"];

impl GuestBenchOptions {
    /// Returns the options for all ways of attaching a disk, with results in `out`.
    pub(crate) fn of(pace: PaceOptions, kernel: KernelOptions, out: &Path) -> GuestBenchOptions {
        GuestBenchOptions {
            pace,
            accelerator: AcceleratorChoice::Auto,
            only: Vec::new(),
            kernel,
            out: Some(out.to_owned()),
            rounds: None,
        }
    }

    pub(super) fn subjects(&self) -> Vec<&'static Subject> {
        let is_asked = |one: &&Subject| match (self.only.as_slice(), self.pace.smoke) {
            ([], true) => SMOKE.contains(&one.name.as_str()),
            ([], false) => true,
            (only, _) => only.contains(one),
        };
        ALL.iter().filter(is_asked).collect()
    }

    pub(super) fn effort(&self) -> Effort {
        let pace = self.pace.pace();
        Effort {
            rounds: self.rounds.unwrap_or(pace.pick(5, 3, 1)),
            seconds: pace.pick(3.0, 0.8, 0.5),
            steps: pace.pick(&[20, 40, 60, 80, 100], &[33, 67, 100], &[50]),
            threads: pace.pick(&[2, 4, 8, 12, 16, 20], &[2, 8, 20], &[2]),
            disk_bytes: pace.pick(1024, 256, 64) << 20,
            together_rounds: pace.pick(5, 1, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use cleave_rig::Result;

    use super::*;

    fn parse(line: &str) -> Result<GuestBenchOptions> {
        let words = format!("guest-bench {line}");
        GuestBenchOptions::try_parse_from(words.split_whitespace())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn arguments_are_read() {
        let options = parse("--quick --only cleave,ide --rounds 7").unwrap();
        let names: Vec<&str> = options
            .subjects()
            .iter()
            .map(|one| one.name.as_str())
            .collect();
        assert_eq!((names, options.effort().rounds), (vec!["ide", "cleave"], 7));
        let count = |line: &str| parse(line).unwrap().subjects().len();
        assert_eq!((count(""), count("--smoke")), (ALL.len(), SMOKE.len()));
        assert!(parse("--kernel a --modules b").is_ok());
    }

    #[test]
    fn an_impossible_argument_is_refused_with_the_choices() {
        let why = parse("--only cleave,floppy").unwrap_err();
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
            "--fast",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
