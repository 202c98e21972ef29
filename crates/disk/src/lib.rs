//! Opens and probes stores. This crate forbids per-request code and unsafe code: what leaves it is
//! an opened [`Disk`] with its [`Limits`](cleave_blk::Limits); running I/O on it is an engine's work.
#![forbid(unsafe_code)]

mod disk;
mod lock;
mod open;
mod probe;
mod spec;

pub use disk::{Disk, FileKind, Store};
pub use lock::RangeLocks;
pub use open::{Direct, OpenError, OpenOptions};
pub use spec::{DiskSpec, parse_size};
