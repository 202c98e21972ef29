//! This program after an earlier release, and an earlier release after this program, under a service manager that keeps descriptors: what
//! a running guest notices, and that nothing is lost.
//!
//! `CLEAVE_EARLIER` is the program of the earlier release: `cargo xtask test releases` builds it. `CLEAVE_TEST_SCALE` multiplies the
//! rounds, `CLEAVE_TEST_SEED` sets the seed.
#![allow(clippy::unwrap_used, clippy::panic)] // a mistake in the test ends the test

mod downgrade;
mod service;
mod upgrade;

use std::process::ExitCode;

use cleave_tests::{cases_of, run_cases};

fn main() -> ExitCode {
    run_cases(cases_of![upgrade, downgrade])
}
