//! Settings of criterion.

use std::time::Duration;

use criterion::Criterion;

/// Settings of all groups: about a second for each benchmark, so that the whole suite can check every change. To
/// compare two builds use criterion's `--save-baseline`, `--baseline` and a longer `--measurement-time`.
pub(crate) fn settings() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(700))
        .sample_size(50)
        .without_plots()
}
