//! All that a guest can change under us: its memory map and its vrings. This crate forbids knowing
//! requests or disks. It is one of the workspace's two unsafe doors on the daemon's side: raw
//! pointers into shared memory live here and nowhere above.
//!
//! What keeps it sound: every pointer into guest memory is made by a [`Memory`] and lives no longer
//! than it; no reference (`&`, `&mut`) to guest memory is ever made, since the guest writes there at
//! any time; whatever is read is copied once and judged on the copy; and a page that vanishes under
//! an access (a cut file) is replaced by zeroes instead of killing the process.

// Guest addresses and lengths are cast to `usize` after they were checked against a mapping.
const _: () = assert!(usize::BITS == 64, "only 64-bit hosts");

mod chain;
mod inflight;
mod mapping;
mod memory;
mod positions;
mod racy;
#[cfg(test)]
mod rig;
mod sigbus;
mod signals;
mod vring;
mod walk;

pub use chain::{Chain, ChainFault};
pub use inflight::{Inflight, InflightError, InflightLayout, Journal, JournalFault};
pub use memory::{Departure, Epoch, MapError, Memory, RegionSpec, Spot, Unmapped};
pub use vring::{Taken, Vring, VringError, VringFault, VringLayout};
