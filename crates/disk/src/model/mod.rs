//! Modelled drives: how long a drive would take that this machine does not have.
//!
//! Arithmetic only: no clock, no I/O, no thread. It lives with the disk because the drive is one and
//! the workers of a disk are several; who owns the bytes and reads the clock is an engine.

mod drive;
mod shared;
mod spec;
mod timing;

pub use drive::Drive;
pub use shared::{Owner, Shared};
pub use spec::ModelSpec;
pub use timing::{Timing, Work};
