//! Opens and probes stores. This crate must not do the I/O of requests and has no unsafe code: its result is
//! an opened [`Disk`] with its [`Limits`](cleave_blk::Limits), and an engine runs I/O on it. The arithmetic
//! of a modelled drive is here too, because its state belongs to the disk.
#![forbid(unsafe_code)]

#[cfg(test)]
mod children;
mod detect;
mod disk;
mod format;
mod given;
mod iopoll;
mod leg;
mod lock;
pub mod model;
pub mod nbd;
mod open;
mod qemu_lock;
pub mod rbd;
mod serial;
mod size;
mod spec;
mod stripe;
mod superblock;

pub use cleave_rbd::start_opener;
pub use disk::{Disk, Resized, SyncFailure, SyncUnderWay};
pub use format::other_partition_block;
pub use iopoll::IopollError;
pub use leg::{Backing, Leg};
pub use lock::RangeLocks;
pub use open::{ContentOrigin, Direct, FileKind, Locking, OpenError, OpenOptions};
pub use size::{format_size, parse_size};
pub use spec::DiskSpec;
pub use stripe::{
    Created, Overwrite, StripeError, StripeKind, StripeListing, create_stripe, show_stripe,
};
