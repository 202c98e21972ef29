//! Checks, tests and set-up of the workspace, run as `cargo xtask COMMAND`. Every developer compiles this program before
//! anything else, so it has few dependencies.
#![forbid(unsafe_code)]

mod bench;
mod built;
mod ci;
mod conform;
mod daemon;
mod dist;
mod fuzz;
mod guest;
mod guest_bench;
mod kill;
mod pool;
mod report;
mod sanitize;
mod setup;
mod step;
mod suite;
mod test;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Checks, tests and measurements of this workspace
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check what you changed: house rules, clippy and unit tests of the changed crates
    Check,
    /// Check everything that a commit has to pass: tidy, clippy, documentation
    Ci,
    /// Check what needs no compiler: formatting, licences, dependencies, house rules
    Tidy,
    /// Set the machine up (as root), then run all tests or one part of them
    Test(test::Selection),
    /// Make the release: a tarball, a .deb and a .rpm with man pages, completions, units and licences
    ///
    /// Leaves them with SHA256SUMS in target/dist.
    Dist(dist::Request),
    /// Kill the daemon at random moments, and check every answer and byte of the next one
    Kill(kill::Request),
    /// Run the hostile, life cycle and recovery tables against any vhost-user-blk back-end
    ///
    /// Prints a Markdown table. Fails if the back-end fails a row that a specification demands.
    Conform(conform::Request),
    /// Run the integration tests against a daemon that AddressSanitizer watches
    Sanitize,
    /// Fuzz the parsers of outside input: chains, requests, messages, superblocks, bodies
    ///
    /// libFuzzer makes the inputs. Those that break something are kept in target/fuzz/finds.
    Fuzz(fuzz::Request),
    /// Measure against qemu-storage-daemon and the bare disk
    ///
    /// Leaves raw data, figures and report.html in a folder below target/bench.
    #[command(disable_help_flag = true, override_usage = BENCH_USAGE, after_help = BENCH_OPTIONS)]
    Bench(PassedOn),
    /// Measure a disk in guests, attached in every way that QEMU knows, at the same load
    #[command(override_usage = "cargo xtask guest-bench [OPTIONS]", disable_help_flag = true, after_help = GUEST_BENCH_OPTIONS)]
    GuestBench(PassedOn),
    /// Draw the report of a run again from its raw data; several runs side by side
    #[command(disable_help_flag = true, override_usage = "cargo xtask report DIR...")]
    Report(PassedOn),
}

/// Arguments that a command reads itself.
#[derive(clap::Args)]
struct PassedOn {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

const BENCH_USAGE: &str = "\
cargo xtask bench [transport | cpu | tax | split | pacing | idle | scale | start | recording | all] [OPTIONS]
       cargo xtask bench instructions [--annotate] [--case NAME] [--accept]";

const BENCH_OPTIONS: &str = "\
Options:
      --quick          Measure fewer points and rounds: all suites within ten minutes
      --smoke          Run one short round, which shows that the suites work
      --disk PATH      Use a filled file or device instead of a file below target
      --allow-thin     Accept a disk that was never filled
      --destructive    Let suites that write do so on --disk
      --spdk DIR       Measure the SPDK that was built in this folder too (transport, cpu, tax)
      --out DIR        Write to this folder instead of one below target/bench
      --rounds N       Set the number of rounds
      --seconds S      Set the length of each round

`bench instructions` counts instructions per I/O in the worker with callgrind, and fails when they rise by 2 %:
      --annotate       Show where they are: functions, files, lines
      --case NAME      Count one case only
      --accept         Make these counts the ones to judge by";

const GUEST_BENCH_OPTIONS: &str = "\
Options:
      --quick                      Take ten minutes instead of an hour
      --smoke                      Show only that it works
      --accel auto|kvm|tcg         Choose the accelerator
      --only NAME,...              Measure only these ways of attaching the disk
      --kernel IMAGE --modules DIR Boot this kernel
      --rounds N                   Set the number of rounds
      --out DIR                    Write to this folder";

fn main() -> ExitCode {
    match run(&root(), &Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{}", why.trim_end());
            ExitCode::FAILURE
        }
    }
}

fn run(root: &Path, task: &Task) -> Result<(), String> {
    match task {
        Task::Check => ci::run_changed(root),
        Task::Ci => ci::run(root),
        Task::Tidy => ci::run_tidy(root),
        Task::Test(selection) => test::run(root, selection),
        Task::Dist(request) => dist::run(root, request),
        Task::Kill(request) => kill::run(root, request),
        Task::Conform(request) => conform::run(root, request),
        Task::Sanitize => sanitize::run(root),
        Task::Fuzz(request) => fuzz::run(root, request),
        Task::Bench(passed) => passed.run("bench", |words| match words {
            ["instructions", rest @ ..] => bench::instructions::Request::parse(rest)
                .and_then(|request| bench::instructions::run(root, &request)),
            _ => bench::run(root, words),
        }),
        Task::GuestBench(passed) => {
            passed.run("guest-bench", |words| guest_bench::run(root, words))
        }
        Task::Report(passed) => passed.run("report", report::again),
    }
}

impl PassedOn {
    /// Runs the command, or prints its help, which clap leaves to us here.
    fn run(
        &self,
        name: &str,
        command: impl FnOnce(&[&str]) -> Result<(), String>,
    ) -> Result<(), String> {
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        if !words.contains(&"--help") && !words.contains(&"-h") {
            return command(&words);
        }
        let mut cli = Cli::command();
        let command = cli.find_subcommand_mut(name).ok_or("no such command")?;
        command.print_long_help().map_err(|error| error.to_string())
    }
}

/// The workspace's top folder; xtask is always run by cargo from its own checkout.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Task, String> {
        let parsed = Cli::try_parse_from(format!("cargo-xtask {line}").split_whitespace());
        parsed
            .map(|cli| cli.task)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_commands_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_misspelt_command_or_case_gets_a_suggestion() {
        for (line, meant) in [
            ("tdiy", "'tidy'"),
            ("test intgration", "'integration'"),
            ("test guest iopol", "'iopoll'"),
            ("kill --time 3", "'--times'"),
        ] {
            let why = parse(line).err().unwrap_or_default();
            assert!(why.contains(meant), "{line}: {why}");
        }
    }

    #[test]
    fn arguments_that_make_no_sense_are_refused() {
        for line in [
            "",
            "tidy now",
            "test iopoll",
            "test --against spdk",
            "test guest --quick",
            "kill --seed x",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn the_arguments_of_measurements_are_passed_on_as_they_are() {
        for words in ["all --smoke", "--smoke all", "--out a --rounds 3 cpu"] {
            let Ok(Task::Bench(passed)) = parse(&format!("bench {words}")) else {
                panic!("{words}");
            };
            assert_eq!(passed.words.join(" "), words);
        }
    }
}
