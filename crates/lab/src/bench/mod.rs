//! Comparisons with other daemons and with the disk itself, interleaved in one run: a ratio of two things is measured
//! side by side, round by round, and quoted as the median of the rounds with its minimum and maximum.

mod cpus;
mod desk;
pub(crate) mod fio;
pub(crate) mod image;
pub(crate) mod instructions;
mod network;
mod others;
mod rest;
mod subject;
mod suites;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Parser, ValueEnum};
use cleave_rig::Result;
use itertools::Itertools;

use crate::report;
use desk::Desk;
use others::Used;
pub(crate) use suites::two_digits;

/// Suites, and how they are run.
#[derive(Debug, Clone, Parser)]
pub(crate) struct Options {
    /// The suites; all of them if none is named
    #[arg(value_name = "SUITE")]
    named: Vec<Suite>,
    /// Measure fewer points and rounds: all suites within ten minutes
    #[arg(long, conflicts_with = "smoke")]
    quick: bool,
    /// Run one short round, which shows that the suites work
    #[arg(long)]
    smoke: bool,
    /// Use a filled file or device instead of a file below target
    #[arg(long, value_name = "PATH")]
    disk: Option<PathBuf>,
    /// Accept a disk that was never filled
    #[arg(long)]
    allow_thin: bool,
    /// Let suites that write do so on --disk
    #[arg(long)]
    destructive: bool,
    /// Measure the SPDK that was built in this folder too (transport, cpu, tax)
    #[arg(long, value_name = "DIR")]
    spdk: Option<PathBuf>,
    /// Measure, and write to, this image of a Ceph cluster too, as `cleave serve --disk` names it (network)
    #[arg(long, value_name = "rbd:POOL/IMAGE")]
    rbd: Option<String>,
    /// Write to this folder instead of one below target/bench
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Set the number of rounds
    #[arg(long, value_name = "N")]
    rounds: Option<u32>,
    /// Set the length of each round, from 0.05 to 600
    #[arg(long, value_name = "S", value_parser = seconds)]
    seconds: Option<f64>,
    #[command(flatten)]
    pub(crate) counting: instructions::Counting,
}

/// A question that a suite answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
enum Suite {
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
    /// Disks behind NBD servers and in a Ceph cluster
    Network,
    /// From exec to the first answer
    Start,
    /// Instructions per I/O; alone, it fails when they rise by 2 %
    Instructions,
    /// Cost of counts and times
    Recording,
    /// All of these
    All,
}

/// How much is asked of each suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Every point.
    Full,
    /// The points that matter.
    Quick,
    /// One short round with programs built for tests: shows that all of it runs, and nothing else.
    Smoke,
}

impl Pace {
    /// The pace that two options say.
    pub(crate) fn of(is_smoke: bool, is_quick: bool) -> Pace {
        match (is_smoke, is_quick) {
            (true, _) => Pace::Smoke,
            (_, true) => Pace::Quick,
            _ => Pace::Full,
        }
    }

    /// Returns the argument for this pace.
    pub(crate) fn pick<T>(self, full: T, quick: T, smoke: T) -> T {
        match self {
            Pace::Full => full,
            Pace::Quick => quick,
            Pace::Smoke => smoke,
        }
    }
}

impl Suite {
    /// The name on the command line and in the raw lines.
    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    fn measure(self, desk: &mut Desk) -> Result {
        match self {
            Suite::Transport => suites::transport(desk),
            Suite::Cpu => suites::cpu(desk),
            Suite::Tax => suites::tax(desk),
            Suite::Split => suites::split(desk),
            Suite::Pacing => suites::pacing(desk),
            Suite::Idle => rest::idle(desk),
            Suite::Scale => suites::scale(desk),
            Suite::Network => network::measure(desk),
            Suite::Start => rest::start(desk),
            Suite::Instructions => rest::instructions(desk),
            Suite::Recording => suites::recording(desk),
            Suite::All => Ok(()),
        }
    }
}

impl Options {
    /// Each suite once, in the order of the arguments.
    fn suites(&self) -> Vec<Suite> {
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

    fn pace(&self) -> Pace {
        Pace::of(self.smoke, self.quick)
    }

    /// Rounds that are enough for a spread; fewer are refused.
    fn rounds(&self) -> Result<u32> {
        let least = self.pace().pick(5, 3, 1);
        match self.rounds {
            Some(rounds) if rounds < least => Err(format!(
                "at least {least} rounds: fewer say nothing about the spread"
            )),
            rounds => Ok(rounds.unwrap_or(least)),
        }
    }

    /// The run's folder below `target/bench`.
    fn name(&self) -> String {
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

/// Measures, and leaves a folder with raw data, figures and a page.
pub(crate) fn run(root: &Path, options: &Options) -> Result {
    if options.named == [Suite::Instructions] {
        return instructions::run(root, &options.counting);
    }
    let mut desk = Desk::set_up(root, options)?;
    let folder = desk.run.folder().to_owned();
    let mut failed = Vec::new();
    for suite in options.suites() {
        if !measure_one(suite, &mut desk)? {
            failed.push(suite.name());
        }
        report::draw(std::slice::from_ref(&folder))?;
    }
    let pace = desk.pace;
    if failed.is_empty() {
        desk.run.finish()?;
    }
    let page = report::draw(std::slice::from_ref(&folder))?;
    if pace != Pace::Smoke {
        report::print_verdicts(&folder)?;
    }
    println!("{}", page.display());
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("ended early: {}", failed.join(", "))),
    }
}

/// Runs a suite; returns whether it came to its end, for one suite's failure says nothing about the others.
fn measure_one(suite: Suite, desk: &mut Desk) -> Result<bool> {
    let name = suite.name();
    println!("{name}");
    let (start, used) = (Instant::now(), Used::now());
    let done = suite.measure(desk);
    let is_judged = desk.pace != Pace::Smoke;
    if let Some(complaint) = used.complaint().filter(|_| is_judged) {
        desk.run.warn(&name, &complaint)?;
    }
    if let Err(why) = &done {
        desk.run.warn(&name, &format!("ended early: {why}"))?;
    }
    println!("{name} took {:.0} s", start.elapsed().as_secs_f64());
    Ok(done.is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options> {
        let words = format!("bench {line}");
        Options::try_parse_from(words.split_whitespace()).map_err(|error| error.to_string())
    }

    #[test]
    fn arguments_are_read_in_any_order() {
        let all = parse("").unwrap();
        assert_eq!((all.rounds(), all.name().as_str()), (Ok(5), "all"));
        assert_eq!(all.suites(), parse("all").unwrap().suites());
        let two = parse("--rounds 9 cpu --quick tax cpu").unwrap();
        assert_eq!(two.suites(), [Suite::Cpu, Suite::Tax]);
        assert_eq!((two.rounds(), two.pace()), (Ok(9), Pace::Quick));
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
