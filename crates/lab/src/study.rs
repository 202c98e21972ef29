//! `cleave-lab run`: the four studies and the comparisons one after the other, and the one file of all results.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use cleave_rig::{At, Result};
use itertools::Itertools;

use crate::bench::{self, BenchOptions, Suite};
use crate::disk_options::DiskOptions;
use crate::equipment::Equipment;
use crate::guest_bench::{self, GuestBenchOptions, KernelOptions};
use crate::machine;
use crate::pace::PaceOptions;
use crate::parcel;
use crate::report;

/// Studies, and how they are run.
#[derive(Debug, Clone, Args)]
pub(crate) struct RunOptions {
    /// The studies and comparisons; all of them if none is named
    #[arg(value_name = "STUDY")]
    named: Vec<Study>,
    #[command(flatten)]
    disk: DiskOptions,
    #[command(flatten)]
    pace: PaceOptions,
    /// Write to this folder instead of cleave-lab, or target in a checkout
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    kernel: KernelOptions,
}

/// A question that an operator asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
enum Study {
    /// Study A: what splitting gains, and whether it ever does harm
    Splitting,
    /// Study B: CPU time of a request; interrupt, poll and adaptive
    Polling,
    /// Study C, and the comparison in guests: paravirtual, emulated, QEMU's own
    #[value(alias = "guests")]
    Emulation,
    /// Study D: response time beside the bare disk's
    Tax,
    /// Comparison with the bare disk: CPU and response time
    Bare,
    /// Comparison with qemu-storage-daemon: ring, CPU, response time, start, idle and many disks
    Daemon,
}

impl Study {
    /// Returns the suites on the host that answer it. The guests' comparison is not one of them.
    fn suites(self) -> &'static [Suite] {
        match self {
            Study::Splitting => &[Suite::Split],
            Study::Polling => &[Suite::Cpu, Suite::Pacing],
            Study::Emulation => &[],
            Study::Tax => &[Suite::Tax],
            Study::Bare => &[Suite::Cpu, Suite::Tax],
            Study::Daemon => &[
                Suite::Transport,
                Suite::Cpu,
                Suite::Tax,
                Suite::Idle,
                Suite::Scale,
                Suite::Start,
            ],
        }
    }
}

impl RunOptions {
    fn studies(&self) -> Vec<Study> {
        match self.named.as_slice() {
            [] => Study::value_variants().to_vec(),
            named => named.iter().copied().unique().collect(),
        }
    }

    /// Returns each suite once.
    fn suites(&self) -> Vec<Suite> {
        let studies = self.studies().into_iter();
        studies
            .flat_map(|study| study.suites().iter().copied())
            .unique()
            .collect()
    }
}

/// Measures all that can be measured here, and packs it. A part that fails does not keep the others from that.
pub(crate) fn run(equipment: Equipment, options: &RunOptions) -> Result {
    // Before a run of an hour, not in it.
    options.disk.check()?;
    let equipment = match &options.out {
        Some(folder) => equipment.leaving_files_in(folder)?,
        None => equipment,
    };
    let folder = equipment.folder().join("run");
    std::fs::create_dir_all(&folder).at(&folder)?;
    let machine = machine::describe(&equipment, &options.disk)?;
    let (mut runs, mut failed) = (Vec::new(), Vec::new());
    let mut note = |run: PathBuf, done: Result| {
        if let Err(why) = done {
            println!("{why}");
            failed.push(why);
        }
        // One of an earlier run, which this one was refused before it began, is not taken for its own.
        runs.push(run);
    };
    let suites = options.suites();
    if !suites.is_empty() {
        let out = folder.join("bench");
        let bench = BenchOptions::of(suites, options.disk.clone(), options.pace, &out);
        note(
            out.clone(),
            begun_anew(&out).and_then(|()| bench::run(&equipment, &bench)),
        );
    }
    if options.studies().contains(&Study::Emulation) {
        let out = folder.join("guest");
        let guests = GuestBenchOptions::of(options.pace, options.kernel.clone(), &out);
        note(
            out.clone(),
            begun_anew(&out).and_then(|()| guest_bench::run(&equipment, &guests)),
        );
    }
    runs.retain(|run| run.join("results.jsonl").is_file());
    if !runs.is_empty() {
        let page = report::draw(&runs)?;
        println!("report: {}", page.display());
    }
    let file = parcel::pack(&folder, &machine, &runs)?;
    println!(
        "{}\nThis file holds all results and is the one to send. Users' folders and disks' serial numbers are left out.",
        file.display()
    );
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "not everything was measured:\n{}",
            failed.join("\n")
        )),
    }
}

/// Removes the results of an earlier run, which would be sent as those of this one if this one does not begin.
fn begun_anew(folder: &std::path::Path) -> Result {
    match folder.join("results.jsonl") {
        old if old.is_file() => std::fs::remove_file(&old).at(&old),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: RunOptions,
    }

    fn parse(line: &str) -> Result<RunOptions> {
        let parsed = Line::try_parse_from(format!("run {line}").split_whitespace());
        parsed
            .map(|line| line.options)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn studies_are_answered_by_suites_each_of_which_runs_once() {
        let suites = |line: &str| parse(line).unwrap().suites();
        assert_eq!(suites("bare tax"), [Suite::Cpu, Suite::Tax]);
        assert_eq!(suites("guests"), []);
        assert_eq!(parse("guests").unwrap().studies(), [Study::Emulation]);
        let all = suites("");
        assert!(
            all.iter().all_unique() && all.contains(&Suite::Pacing),
            "{all:?}"
        );
        let why = parse("taxes").unwrap_err();
        assert!(why.contains("'tax'"), "{why}");
        assert!(parse("--overwrite /dev/sda").is_err(), "names no disk");
    }
}
