//! Checks, tests and set-up of the workspace, run as `cargo xtask COMMAND`. Every developer compiles this program before
//! anything else, so it has few dependencies.
#![forbid(unsafe_code)]

mod book;
mod ci;
mod dist;
mod fuzz;
mod guest;
mod lab;
mod markdown;
mod optimised;
mod sanitize;
mod screens;
mod step;
mod suite;
mod test;
mod tidy;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use cleave_rig::Result;

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
    /// Make the release: a tarball, a .deb and a .rpm with man pages, completions, units and licences, and an image for containers
    ///
    /// Leaves them with SHA256SUMS in target/dist. Source packages are made with --source.
    Dist(dist::DistArgs),
    /// Build the pages of docs/ as a book of HTML, with mdBook, and check all links in it
    ///
    /// Takes `mdbook` from PATH if it is of the pinned version, and else compiles that version in target/tools, once.
    Book(book::BookArgs),
    /// Kill the daemon at random moments, and check every answer and byte of the next one
    Kill(optimised::Kill),
    /// Run the hostile, life cycle and recovery tables against any vhost-user-blk back-end
    ///
    /// Prints a Markdown table. Fails if the back-end fails a row that a specification demands.
    Conform(optimised::Conform),
    /// Run the integration tests against a daemon that AddressSanitizer watches
    Sanitize,
    /// Fuzz the parsers of outside input: chains, requests, messages, superblocks, bodies
    ///
    /// libFuzzer makes the inputs. Those that break something are kept in target/fuzz/finds.
    Fuzz(fuzz::FuzzArgs),
    /// Draw what `cleave top` and `cleave doctor` show on a terminal, as the figures of README
    Screens,
    /// Measure against qemu-storage-daemon and the bare disk
    Bench(lab::LabArgs),
    /// Measure a disk in guests, attached in every way that QEMU knows, at the same load
    GuestBench(lab::LabArgs),
    /// Draw the report of a run again from its raw data; several runs side by side
    Report(lab::LabArgs),
}

fn main() -> ExitCode {
    let line = line(std::env::args_os().collect());
    match run(&cleave_rig::root(), &line, &Cli::parse_from(&line).task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{}", why.trim_end());
            ExitCode::FAILURE
        }
    }
}

/// Turns `help bench` into `bench --help`: the lab says itself which options it has.
fn line(mut words: Vec<OsString>) -> Vec<OsString> {
    if words.get(1).is_some_and(|word| word == "help") {
        words.remove(1);
        words.push("--help".into());
    }
    words
}

fn run(root: &Path, line: &[OsString], task: &Task) -> Result {
    match task {
        Task::Check => ci::run_changed(root),
        Task::Ci => ci::run(root),
        Task::Tidy => ci::run_tidy(root),
        Task::Test(selection) => test::run(root, selection),
        Task::Dist(request) => dist::run(root, request),
        Task::Book(request) => book::run(root, request),
        Task::Kill(request) => optimised::kill(root, request),
        Task::Conform(request) => optimised::conform(root, request),
        Task::Sanitize => sanitize::run(root),
        Task::Fuzz(request) => fuzz::run(root, request),
        Task::Screens => screens::run(root),
        Task::Bench(_) | Task::GuestBench(_) | Task::Report(_) => {
            lab::replace_by(root, line.get(1..).unwrap_or_default())
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;
    use cleave_rig::pages::{Shown, commands_of};

    use super::*;

    #[test]
    fn nonsense_is_refused_and_a_misspelt_word_gets_a_suggestion() {
        <Cli as clap::CommandFactory>::command().debug_assert();
        for (line, said) in [
            ("tdiy", "'tidy'"),
            ("test intgration", "'integration'"),
            ("test guest iopol", "'iopoll'"),
            ("test iopoll", "invalid value"),
            ("test guest --quick", "cannot be used"),
            ("kill --time 3", "'--times'"),
        ] {
            let parsed = Cli::try_parse_from(format!("xtask {line}").split(' '));
            let why = parsed
                .err()
                .map_or(String::new(), |error| error.to_string());
            assert!(why.contains(said), "{line}: {why}");
        }
    }

    #[test]
    fn the_commands_of_the_pages_are_understood() {
        let commands = commands_of(&cleave_rig::root(), "cargo xtask");
        assert!(commands.len() > 50, "only {}", commands.len());
        for command in commands {
            let error =
                Cli::try_parse_from(line(command.words.iter().map(OsString::from).collect())).err();
            let error = error.filter(clap::Error::use_stderr);
            // A sentence may name the beginning of a line.
            let is_begun = |error: &clap::Error| error.kind() == ErrorKind::MissingRequiredArgument;
            let error = error.filter(|error| command.shown != Shown::Sentence || !is_begun(error));
            assert!(error.is_none(), "{}: {error:?}", command.at());
        }
    }
}
