//! Images of a Ceph cluster as disks, through the program and a real cluster.
//!
//! `CLEAVE_RBD_KILLS` sets the number of kills (default 5), `CLEAVE_TEST_SEED` the seed.
#![allow(clippy::unwrap_used, clippy::panic)] // a mistake in the test ends the test

mod away;
mod daemons;
mod locked;
mod memory;
mod moves;
mod refused;
mod served;

use std::process::ExitCode;

use cleave_tests::ceph::stop;
use cleave_tests::{cases_of, run_cases};

fn main() -> ExitCode {
    let code = run_cases(cases_of![served, memory, locked, away, refused, moves]);
    stop();
    code
}
