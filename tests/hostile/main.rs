//! The damage of a hostile guest or frontend is limited to itself: a bad chain fails alone, a bad ring retires its
//! vring, and a bad message closes its connection. Each row is one named attack; after it the same process must serve
//! a new client. `CLEAVE_TEST_ROW=TEXT` runs the rows whose names contain the text. `CLEAVE_TEST_SCALE=N` makes rows
//! that repeat N times longer.
//!
//! `--daemon 'CMD {socket} {disk} {queues}' [--only TEXT] [--from DIR]` runs the tables against another back-end, which
//! it starts in that folder, and prints them.
#![allow(clippy::unwrap_used, clippy::panic, clippy::too_many_lines)] // shared test code lies outside of #[test] functions

mod attack;
mod blocking;
mod buffers;
mod chain;
mod chains;
mod config;
mod conform;
mod cut_files;
mod descriptors;
mod indirect;
mod lifecycle;
mod log;
mod memory;
mod messages;
mod parked;
mod recovery;
mod regions;
mod requests;
mod rewriting;
mod rings;

use std::process::ExitCode;

use cleave_tests::{Daemon, Scratch, cases, run_cases, run_rows};
use conform::{
    a_back_end_that_dies_fails_its_row, a_back_end_that_never_listens_is_reported,
    our_daemon_passes_a_row_of_each_table, the_recorded_runs_have_each_row_and_are_summed_up,
};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |option: &str| {
        let at = arguments.iter().position(|word| word == option)?;
        arguments.get(at + 1).map(String::as_str)
    };
    if let Some(template) = value("--daemon") {
        // Cargo starts a test in the folder of its package, but the command's paths are relative to the user's folder.
        if let Some(folder) = value("--from")
            && let Err(error) = std::env::set_current_dir(folder)
        {
            eprintln!("{folder}: {error}");
            return ExitCode::FAILURE;
        }
        return conform::report(template, value("--only").unwrap_or_default());
    }
    run_cases(cases![
        rings,
        rings_on_ram,
        chains,
        requests,
        requests_to_a_read_only_disk,
        config,
        messages,
        descriptors,
        descriptors_that_block,
        memory,
        lifecycle,
        promptness,
        two_frontends,
        dirty_log,
        recovery,
        our_daemon_passes_a_row_of_each_table,
        a_back_end_that_never_listens_is_reported,
        a_back_end_that_dies_fails_its_row,
        the_recorded_runs_have_each_row_and_are_summed_up,
    ])
}

/// A daemon on a file of 64 MiB with two workers; with O_DIRECT if the file system supports it.
fn on_file() -> impl Fn() -> Daemon {
    let scratch = Scratch::new();
    move || {
        // On a busy machine the kernel may hold the file of a daemon that was killed for seconds, until its ring has ended.
        let _ = std::fs::remove_file(scratch.join("disk"));
        let image = scratch.image("disk", 64 << 20);
        Daemon::serve(&["--disk", image.to_str().unwrap(), "--workers", "2"])
    }
}

fn on_ram() -> Daemon {
    Daemon::serve(&["--disk", "ram:64M", "--workers", "2"])
}

fn rings() {
    run_rows("rings", on_file(), rings::rows());
}

fn rings_on_ram() {
    run_rows("rings on ram", on_ram, rings::rows());
}

fn chains() {
    run_rows("chains", on_file(), chains::rows());
}

fn requests() {
    run_rows("requests", on_file(), requests::rows());
}

fn requests_to_a_read_only_disk() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 64 << 20);
    let start = || Daemon::serve(&["--disk", image.to_str().unwrap(), "--read-only"]);
    run_rows("read-only", start, requests::read_only_rows());
}

fn config() {
    run_rows("config", on_ram, config::rows());
}

fn messages() {
    run_rows("messages", on_ram, messages::rows());
}

fn descriptors() {
    run_rows("descriptors", on_ram, descriptors::rows());
}

fn descriptors_that_block() {
    run_rows("blocking", on_ram, blocking::rows());
}

fn memory() {
    run_rows("memory", on_file(), memory::rows());
}

fn lifecycle() {
    run_rows("life cycle", on_file(), lifecycle::rows());
}

fn promptness() {
    // These rows measure the daemon's time. A disk would add its own.
    run_rows("life cycle", on_ram, lifecycle::prompt_rows());
}

fn two_frontends() {
    run_rows("two frontends", on_file(), parked::rows());
}

fn dirty_log() {
    run_rows("dirty log", on_file(), log::rows());
}

fn recovery() {
    run_rows("recovery", on_file(), recovery::rows());
}
