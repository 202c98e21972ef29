//! Opens and probes stores. This crate forbids I/O of requests and unsafe code: what leaves it is
//! an opened [`Disk`] with its [`Limits`](cleave_blk::Limits); running I/O on it is an engine's work.
//! The arithmetic of a modelled drive is here too, as its state belongs to the disk.
#![forbid(unsafe_code)]

mod disk;
mod format;
mod iopoll;
mod leg;
mod lock;
pub mod model;
mod open;
mod probe;
mod qemu_lock;
mod spec;
mod stripe;
mod superblock;

pub use disk::{Disk, Resized};
pub use iopoll::IopollError;
pub use leg::{Backing, FileKind, Leg};
pub use lock::RangeLocks;
pub use open::{Direct, OpenError, OpenOptions};
pub use spec::{DiskSpec, format_size, parse_size};
pub use stripe::{Created, Overwrite, Shown, StripeError, StripeKind, create_stripe, show_stripe};
