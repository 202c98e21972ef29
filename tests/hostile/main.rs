//! The damage of a hostile guest or frontend is limited to itself: a bad chain fails alone, a bad ring retires its
//! vring, and a bad message closes its connection. Each row is one named attack; after it the same process must serve
//! a new client. `CLEAVE_TEST_ROW=TEXT` runs the rows whose names contain the text. `CLEAVE_TEST_SCALE=N` makes rows
//! that repeat N times longer.
#![allow(clippy::unwrap_used, clippy::panic, clippy::too_many_lines)] // shared test code lies outside of #[test] functions

mod attack;
mod blocking;
mod chains;
mod config;
mod lifecycle;
mod memory;
mod messages;
mod recovery;
mod requests;
mod rings;

use cleave_tests::{Daemon, Scratch, run_rows};

/// A daemon on a file of 64 MiB with two workers; with O_DIRECT if the file system supports it.
fn on_file() -> impl Fn() -> Daemon {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 64 << 20);
    move || {
        let _keep = &scratch;
        Daemon::serve(&["--disk", image.to_str().unwrap(), "--workers", "2"])
    }
}

fn on_ram() -> Daemon {
    Daemon::serve(&["--disk", "ram:64M", "--workers", "2"])
}

#[test]
fn rings() {
    run_rows("rings", on_file(), rings::rows());
}

#[test]
fn rings_on_ram() {
    run_rows("rings on ram", on_ram, rings::rows());
}

#[test]
fn chains() {
    run_rows("chains", on_file(), chains::rows());
}

#[test]
fn requests() {
    run_rows("requests", on_file(), requests::rows());
}

#[test]
fn requests_to_a_read_only_disk() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 64 << 20);
    let start = || Daemon::serve(&["--disk", image.to_str().unwrap(), "--read-only"]);
    run_rows("read-only", start, requests::read_only_rows());
}

#[test]
fn config() {
    run_rows("config", on_ram, config::rows());
}

#[test]
fn messages() {
    run_rows("messages", on_ram, messages::rows());
}

#[test]
fn descriptors() {
    run_rows("descriptors", on_ram, messages::descriptor_rows());
}

#[test]
fn descriptors_that_block() {
    run_rows("blocking", on_ram, blocking::rows());
}

#[test]
fn memory() {
    run_rows("memory", on_file(), memory::rows());
}

#[test]
fn lifecycle() {
    run_rows("life cycle", on_file(), lifecycle::rows());
}

#[test]
fn recovery() {
    run_rows("recovery", on_file(), recovery::rows());
}
