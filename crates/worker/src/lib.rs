//! One thread's loop over its vrings. This crate forbids locks and allocation after start, and
//! unsafe code: a worker owns its vrings, engine and slots outright, and control hands ownership
//! over by [`Command`] instead of sharing it.
#![forbid(unsafe_code)]

mod device;
mod handle;

pub use device::{Completion, Device, WorkerConfig};
pub use handle::{Handle, Pending, SpawnError, VringStart};
