//! Shared code of the microbenchmarks. They measure single parts of the data path on one thread: `cargo bench -p
//! cleave-benches`, or with `-- --quick` for a rough figure.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic)] // A benchmark that cannot be set up has nothing to measure.

mod guest;
mod manual;

pub use guest::{BATCH, Driver, Guest, Place, REGION_BYTES, VRING_SIZE, region_addr};
pub use manual::{ManualWorker, Signals, null};
