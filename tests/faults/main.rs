//! What a guest sees, and what is left of its data, when something fails: the store, the daemon, or the power.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::too_many_lines
)] // a mistake in the test ends the test

mod cache;
mod crash;
mod given_up;
mod handover;
mod kill;
mod migration;
mod on_error;
mod recovery;
mod storage;

use std::process::ExitCode;

use cleave_tests::{cases_of, run_cases};

fn main() -> ExitCode {
    run_cases(cases_of![
        kill, storage, on_error, cache, crash, recovery, given_up, migration, handover
    ])
}
