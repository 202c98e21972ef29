//! NBD servers as disks, through the program: those that people use, and one that attacks.
//!
//! `CLEAVE_KILLS` sets the number of kills of `cleave serve` (default 20), `CLEAVE_TEST_SCALE` multiplies those of a node.
#![allow(clippy::unwrap_used, clippy::panic)] // a mistake in the test ends the test

mod held;
mod kill;
mod lost;
mod moves;
mod node;
mod served;
mod servers;
mod speed;

use std::process::ExitCode;

use cleave_tests::{cases_of, run_cases};

fn main() -> ExitCode {
    run_cases(cases_of![served, lost, held, kill, node, speed, moves])
}
