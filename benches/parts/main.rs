//! The microbenchmarks, each file a part of the data path. One program, since each would link criterion again.
#![allow(missing_docs)] // Criterion's macros make undocumented public items.
#![allow(clippy::unwrap_used)] // A benchmark that cannot be set up has nothing to measure.

mod blk;
mod guest;
mod policy;
mod socket;
mod splitter;
mod worker;

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};

/// Settings of all groups: about a second for each benchmark, so that the whole suite can check every change. To
/// compare two builds use criterion's `--save-baseline`, `--baseline` and a longer `--measurement-time`.
fn settings() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(700))
        .sample_size(50)
        .without_plots()
}

criterion_group! {
    name = benches;
    config = settings();
    targets = blk::parse, blk::plan, blk::outcome, blk::config,
        guest::vring, guest::translate,
        policy::slots, policy::pacer, policy::histogram,
        socket::reads,
        splitter::allocates_nothing, splitter::decisions,
        worker::turn, worker::signalled
}
criterion_main!(benches);
