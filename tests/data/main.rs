//! A guest reads back what it has written: on every kind of disk, with every ring, in every way of waiting, and while everything
//! changes that may.
#![allow(clippy::unwrap_used, clippy::panic, clippy::too_many_lines)] // a mistake in the test ends the test

mod device;
mod dirty;
mod face;
mod kinds;
mod larger_vrings;
mod pacing;
mod portable;
mod quiet;
mod requests;
mod second_opinion;
mod setup;
mod storm;
mod stripe;

use std::process::ExitCode;

use cleave_tests::{cases_of, run_cases};

fn main() -> ExitCode {
    run_cases(cases_of![
        kinds,
        requests,
        device,
        face,
        setup,
        stripe,
        larger_vrings,
        pacing,
        portable,
        second_opinion,
        quiet,
        dirty,
        storm,
    ])
}
