//! What the microbenchmarks share. They measure single pieces of the data path on one thread:
//! `cargo bench -p cleave-benches`, or with `-- --quick` for a look at the order of magnitude.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic)] // A benchmark that cannot be set up has nothing to measure.

mod guest;
mod turn;

use std::time::Duration;

use criterion::Criterion;

pub use guest::{BATCH, Driver, Guest, Place, REGION_BYTES, VRING_SIZE, region_addr};
pub use turn::{Signals, Turn, null};

/// Settings of all groups: about a second per benchmark, so that the whole suite fits into a check
/// of every change. For a comparison of two builds use criterion's `--save-baseline`, `--baseline`
/// and a longer `--measurement-time`.
pub fn settings() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(700))
        .sample_size(50)
        .without_plots()
}
