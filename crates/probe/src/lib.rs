//! Measures a disk at every size and depth, and judges whether splitting pays. This crate forbids vrings, vhost
//! messages, guests and unsafe code: it runs ops on an opened disk through an engine, in its own memory, and
//! its results are values and text.
//!
//! [`run()`] measures a [`Matrix`] for each direction, and [`judge()`] evaluates it. [`ProbeReport`] holds both and
//! is written as a table or as JSON. A later `serve` starts from a [`Profile`].
#![forbid(unsafe_code)]

mod device;
mod judge;
mod matrix;
mod profile;
mod report;
mod run;
mod size;
mod table;
mod thin;

/// Says what is measured: reads or writes.
pub use cleave_worker::DataDirection;
pub use device::DiskIdentity;
pub use judge::{Judgement, Recommendation, judge};
pub use matrix::{Matrix, Measured, Point, points};
pub use profile::{Profile, ProfileError};
pub use report::{Circumstances, HostFacts, ProbeReport, Side};
pub use run::{Pace, ProbeProgress, ProbeSettings, RunError, run};
pub use table::table;
pub use thin::{Extent, holds_data, stored};
