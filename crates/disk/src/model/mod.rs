//! Modelled drives: how long a drive that this machine does not have would take.
//!
//! Arithmetic only: no clock, no I/O, no thread. It is part of the disk because one drive serves all workers
//! of the disk. An engine owns the bytes and reads the clock.

mod drive;
mod shared;
mod spec;
mod timing;

pub use drive::Drive;
pub use shared::{Owner, SharedDrive};
pub use spec::ModelSpec;
pub use timing::{DriveWork, Timing};
