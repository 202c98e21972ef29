//! The options of `cleave-lab bench`, and what they ask for.

use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};
use cleave_rig::Result;
use itertools::Itertools;

use super::instructions;
use crate::disk_options::DiskOptions;
use crate::pace::{BenchPace, PaceOptions};

/// Suites, and how they are run.
#[derive(Debug, Clone, Default, Parser)]
pub(crate) struct BenchOptions {
    /// The suites; all of them if none is named
    #[arg(value_name = "SUITE")]
    pub(super) named: Vec<Suite>,
    #[command(flatten)]
    pace: PaceOptions,
    #[command(flatten)]
    pub(super) disk: DiskOptions,
    /// Measure the SPDK that was built in this folder too (transport, cpu, tax)
    #[arg(long, value_name = "DIR")]
    pub(super) spdk: Option<PathBuf>,
    /// Measure, and write to, this image of a Ceph cluster too, as `cleave serve --disk` names it (network)
    #[arg(long, value_name = "rbd:POOL/IMAGE")]
    pub(super) rbd: Option<String>,
    /// Write to this folder instead of one below target/bench or cleave-lab/bench
    #[arg(long, value_name = "DIR")]
    pub(super) out: Option<PathBuf>,
    /// Set the number of rounds
    #[arg(long, value_name = "N")]
    pub(super) rounds: Option<u32>,
    /// Set the length of each round, from 0.05 to 600
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub(super) seconds: Option<f64>,
    #[command(flatten)]
    pub(super) counting: instructions::Counting,
}

/// A question that a suite answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Suite {
    /// Cost of the ring alone
    Transport,
    /// CPU time of a request
    Cpu,
    /// Response time beside the bare disk's
    Tax,
    /// Gain of splitting
    Split,
    /// Interrupt, poll and adaptive at all depths and rates
    Pacing,
    /// Cost of disks that nobody uses
    Idle,
    /// One disk and 64, one vring and 16
    Scale,
    /// Disks of NBD servers and of a Ceph cluster
    Network,
    /// From exec to the first answer
    Start,
    /// What a guest sees of a kill, a restart and an upgrade
    Pause,
    /// Instructions per I/O; alone, it fails when they rise by 2 %
    Instructions,
    /// Cost of counts and times
    Recording,
    /// All of these
    All,
}

impl Suite {
    /// Returns its name on the command line and in the raw lines.
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

impl BenchOptions {
    /// Returns the options for some suites, with results in `out`.
    pub(crate) fn of(suites: Vec<Suite>, disk: DiskOptions, pace: PaceOptions, out: &Path) -> Self {
        BenchOptions {
            named: suites,
            pace,
            disk,
            out: Some(out.to_owned()),
            ..BenchOptions::default()
        }
    }

    /// Returns each suite once, in the order of the arguments.
    pub(super) fn suites(&self) -> Vec<Suite> {
        let all = Suite::value_variants();
        match self.named.is_empty() || self.named.contains(&Suite::All) {
            true => all
                .iter()
                .copied()
                .filter(|suite| *suite != Suite::All)
                .collect(),
            false => self.named.iter().copied().unique().collect(),
        }
    }

    pub(super) fn pace(&self) -> BenchPace {
        self.pace.pace()
    }

    /// Returns the number of rounds. It refuses fewer than make a spread.
    pub(super) fn rounds(&self) -> Result<u32> {
        let least = self.pace().pick(5, 3, 1);
        match self.rounds {
            Some(rounds) if rounds < least => Err(format!(
                "at least {least} rounds: fewer say nothing about the spread"
            )),
            rounds => Ok(rounds.unwrap_or(least)),
        }
    }

    /// Returns the name of the run's folder below `bench`.
    pub(super) fn name(&self) -> String {
        let what = match self.suites().as_slice() {
            [one] => one.name(),
            several if several.len() == Suite::value_variants().len() - 1 => "all".to_owned(),
            _ => "some".to_owned(),
        };
        format!("{what}{}", self.pace().pick("", "-quick", "-smoke"))
    }
}

fn seconds(text: &str) -> Result<f64> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    match (0.05..=600.0).contains(&seconds) {
        true => Ok(seconds),
        false => Err("a round takes 0.05 to 600 seconds".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<BenchOptions> {
        let words = format!("bench {line}");
        BenchOptions::try_parse_from(words.split_whitespace()).map_err(|error| error.to_string())
    }

    #[test]
    fn arguments_are_read_in_any_order() {
        let all = parse("").unwrap();
        assert_eq!((all.rounds(), all.name().as_str()), (Ok(5), "all"));
        assert_eq!(all.suites(), parse("all").unwrap().suites());
        let two = parse("--rounds 9 cpu --quick tax cpu").unwrap();
        assert_eq!(two.suites(), [Suite::Cpu, Suite::Tax]);
        assert_eq!((two.rounds(), two.pace()), (Ok(9), BenchPace::Quick));
        let one = parse("idle --smoke --disk b --allow-thin").unwrap();
        assert_eq!(one.name(), "idle-smoke");
    }

    #[test]
    fn too_little_and_unknown_arguments_are_refused() {
        for line in [
            "--quick --smoke",
            "--rounds",
            "--seconds nan",
            "--seconds 0",
            "--speed 9",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        for line in ["--rounds 4", "--quick --rounds 2"] {
            assert!(parse(line).unwrap().rounds().is_err(), "{line}");
        }
        let why = parse("speed").unwrap_err();
        assert!(why.contains("recording"), "{why}");
    }
}
