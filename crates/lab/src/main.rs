//! Measures the daemon beside others and beside the bare disk, on this machine and in guests, and draws what was measured. This
//! crate forbids the daemon's own crates and unsafe code: it measures programs from outside, ours like any other.
//!
//! `cargo xtask bench`, `guest-bench` and `report` run this program with their own words. The package `cleave-lab` installs it.
#![forbid(unsafe_code)]

mod bench;
mod disk_options;
mod equipment;
mod filled;
mod fio;
mod guest_bench;
mod machine;
mod occupied;
mod offered;
mod pace;
mod parcel;
mod report;
mod run_folder;
mod study;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use cleave_rig::{At, Result};
use equipment::Equipment;

/// Measures Cleave beside other daemons and the bare disk, on this machine and in guests
#[derive(Parser)]
#[command(name = "cleave-lab", bin_name = "cleave-lab", version)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run the studies and comparisons, and pack all results into one file to be sent
    ///
    /// Leaves raw data, figures, report.html and the file in the folder cleave-lab, or target in a checkout.
    Run(study::RunOptions),
    /// Say what would run here and what not, and why: KVM, CPUs, disk, programs of others
    Check {
        #[command(flatten)]
        disk: disk_options::DiskOptions,
    },
    /// Measure against qemu-storage-daemon and the bare disk
    ///
    /// Leaves raw data, figures and report.html in a folder below target/bench; the installed program, below cleave-lab/bench.
    Bench(bench::BenchOptions),
    /// Measure a disk in guests, attached in every way that QEMU knows, at the same load
    GuestBench(guest_bench::GuestBenchOptions),
    /// Draw the report of a run again from its raw data; several runs side by side
    ///
    /// From a file that `cleave probe --json FILE` wrote, draws throughput against block size as FILE.svg.
    Report {
        /// Folders of runs, and files of probes
        #[arg(required_unless_present_any = ["check", "write"], value_name = "PATH")]
        paths: Vec<PathBuf>,
        /// Compare the ratios that the pages of the checkout quote with the runs that are recorded in it
        #[arg(long, conflicts_with = "paths")]
        check: bool,
        /// Put what those runs say into the pages, where it is another ratio
        #[arg(long, conflicts_with_all = ["paths", "check"])]
        write: bool,
    },
    /// Write the man pages to a folder
    #[command(hide = true)]
    WritePages { folder: PathBuf },
}

fn main() -> ExitCode {
    match run(&Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{}", why.trim_end());
            ExitCode::FAILURE
        }
    }
}

fn run(task: &Task) -> Result {
    match task {
        Task::Run(options) => study::run(Equipment::find()?, options),
        Task::Check { disk } => machine::describe(&Equipment::find()?, disk).map(drop),
        Task::Bench(options) => bench::run(&Equipment::find()?, options),
        Task::GuestBench(options) => guest_bench::run(&Equipment::find()?, options),
        Task::WritePages { folder } => {
            clap_mangen::generate_to(<Cli as CommandFactory>::command(), folder).at(folder)
        }
        Task::Report { check: true, .. } => report::quoted::check(Equipment::find()?.sources()?),
        Task::Report { write: true, .. } => report::quoted::write(Equipment::find()?.sources()?),
        Task::Report { paths, .. } => {
            let drawn = report::draw_all(paths)?;
            drawn.iter().for_each(|path| println!("{}", path.display()));
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;
    use cleave_rig::pages::{Shown, commands_of};

    use super::*;

    #[test]
    fn the_commands_go_by_the_names_that_xtask_passes_on() {
        <Cli as CommandFactory>::command().debug_assert();
        for (line, said) in [
            ("bench trnsport", "'transport'"),
            ("run emulaton", "'emulation'"),
            ("check --dsk", "'--disk'"),
            ("guest-bench --smok", "'--smoke'"),
            ("report", "cleave-lab report <PATH>..."),
        ] {
            let parsed = Cli::try_parse_from(format!("lab {line}").split(' '));
            let why = parsed
                .err()
                .map_or(String::new(), |error| error.to_string());
            assert!(why.contains(said), "{line}: {why}");
        }
    }

    #[test]
    fn the_commands_of_the_pages_are_understood() {
        let commands = commands_of(&cleave_rig::root(), "cleave-lab");
        assert!(commands.len() > 30, "only {}", commands.len());
        for command in commands {
            let error = Cli::try_parse_from(&command.words).err();
            let error = error.filter(clap::Error::use_stderr);
            // A sentence may name the beginning of a line.
            let is_begun = |error: &clap::Error| error.kind() == ErrorKind::MissingRequiredArgument;
            let error = error.filter(|error| command.shown != Shown::Sentence || !is_begun(error));
            assert!(error.is_none(), "{}: {error:?}", command.at());
        }
    }
}
