//! `cargo xtask guest-bench`: the same disk in guests, attached in every way there is, at the same offered load. Whatever
//! cannot be measured is named with its reason.

mod fio;
mod guest;
mod lab;
mod rounds;
mod stages;
mod subject;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Parser, ValueEnum};
use cleave_rig::guest::{Accelerator, QEMU};
use cleave_rig::{Result, quietly};
use serde_json::json;

use crate::bench::Pace;
use crate::report::{self, Run};
use guest::{GUEST_CPU, SERVER_CPU};
use lab::Lab;
use rounds::{Rounds, SUITE};
use subject::{ALL, Subject};

/// How guests are measured, and which.
#[derive(Debug, Clone, Parser)]
pub(crate) struct Options {
    /// Take ten minutes instead of an hour
    #[arg(long, conflicts_with = "smoke")]
    quick: bool,
    /// Show only that it works
    #[arg(long)]
    smoke: bool,
    /// Choose the accelerator; auto boots a guest to see whether KVM works
    #[arg(long = "accel", value_name = "NAME", default_value = "auto")]
    accelerator: Wanted,
    /// Measure only these ways of attaching the disk
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = subject::find)]
    only: Vec<&'static Subject>,
    /// Boot this kernel instead of a distribution's
    #[arg(long, value_name = "IMAGE", requires = "modules")]
    kernel: Option<PathBuf>,
    /// The folder of that kernel's modules
    #[arg(long, value_name = "DIR", requires = "kernel")]
    modules: Option<PathBuf>,
    /// Write to this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Set the number of rounds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
}

/// Which accelerator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Wanted {
    Auto,
    Kvm,
    Tcg,
}

/// How long and how often.
#[derive(Debug, Clone)]
struct Effort {
    rounds: u32,
    /// Duration of each figure.
    seconds: f64,
    /// Offered rates, in per cent of the rate that the slowest emulated controller reaches.
    steps: &'static [u32],
    threads: &'static [u32],
    disk_bytes: u64,
    /// Rounds of guests with several disks: their question is not how much, but whether at all.
    together_rounds: u32,
}

/// Subjects of a smoke run.
const SMOKE: [&str; 2] = ["ahci", "cleave"];
/// Fewer rounds say nothing about the spread.
const ROUNDS_MIN: u32 = 5;

impl Options {
    fn subjects(&self) -> Vec<&'static Subject> {
        let is_asked = |one: &&Subject| match (self.only.as_slice(), self.smoke) {
            ([], true) => SMOKE.contains(&one.name.as_str()),
            ([], false) => true,
            (only, _) => only.contains(one),
        };
        ALL.iter().filter(is_asked).collect()
    }

    fn effort(&self) -> Effort {
        let pace = Pace::of(self.smoke, self.quick);
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

/// Measures, and leaves raw data and a page in `target/bench/guest` or where it was told.
pub(crate) fn run(root: &Path, options: &Options) -> Result {
    let lab = Lab::set_up(root, options)?;
    let out = options.out.clone();
    let out = out.unwrap_or_else(|| root.join("target/bench/guest"));
    let (release, accelerator) = (&lab.kernel.release, lab.accelerator.name());
    println!(
        "guest: Linux {release}, accelerator {accelerator}; its CPU on CPU {GUEST_CPU}, all that serves it on CPU {SERVER_CPU}"
    );
    let version = quietly(root, "{} --version", &[&QEMU])?;
    let facts = json!({
        "pinning": { "guest_cpu": GUEST_CPU, "server_cpu": SERVER_CPU }, "accelerator": accelerator,
        "guest_cpu": match lab.accelerator { Accelerator::Kvm => "KVM", Accelerator::Tcg => "emulated CPU" },
        "guest_kernel": release, "qemu": version.lines().next(),
    });
    let environment = report::environment(root, &lab.cleave, &facts);
    let effort = options.effort();
    let asked = json!({
        "rounds": effort.rounds, "seconds": effort.seconds, "disk_bytes": effort.disk_bytes,
        "accelerator": accelerator,
    });
    let mut run = Run::create(&out, &environment, asked)?;
    let start = Instant::now();
    let measured = measure(&lab, options, &mut run);
    // The results so far are shown even if a full disk ended the run.
    let finished = measured.and_then(|gaps| run.finish().map(|_| gaps));
    let page = report::draw(std::slice::from_ref(&out))?;
    let seconds = start.elapsed().as_secs();
    println!("measured for {seconds} s; {}", page.display());
    match finished? {
        // A report with a gap says so and is worth reading; a check that the harness works must not have one.
        gaps if gaps > 0 && options.smoke => Err(format!(
            "{gaps} gaps in what was to be measured; the warnings above name them"
        )),
        _ => Ok(()),
    }
}

/// How many controllers or turns are missing.
fn measure(lab: &Lab, options: &Options, run: &mut Run) -> Result<usize> {
    let effort = options.effort();
    if effort.rounds < ROUNDS_MIN && !options.smoke {
        let rounds = effort.rounds;
        let text = format!(
            "{rounds} rounds tell little of the spread; a figure to be quoted needs {ROUNDS_MIN}"
        );
        run.warn(SUITE, &text)?;
    }
    if lab.accelerator == Accelerator::Tcg {
        run.warn(
            SUITE,
            "the guest's CPU is emulated (TCG): it is several times slower than this machine's, it limits most figures here, and \
             a register access costs no VM exit. So emulated controllers look better than they do with KVM, most at depth 1, \
             and absolute figures mean nothing",
        )?;
    }
    let mut subjects = Vec::new();
    let asked = options.subjects();
    for subject in &asked {
        match lab.lacks(subject) {
            None => subjects.push(*subject),
            Some(why) => run.warn(SUITE, &format!("{} is not measured: {why}", subject.title))?,
        }
    }
    let missing = asked.len() - subjects.len();
    let mut rounds = Rounds {
        lab,
        effort: &effort,
        subjects,
        run,
        troubles: BTreeMap::new(),
    };
    rounds.measure()?;
    Ok(missing + rounds.troubles.values().sum::<usize>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options> {
        let words = format!("guest-bench {line}");
        Options::try_parse_from(words.split_whitespace()).map_err(|error| error.to_string())
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
