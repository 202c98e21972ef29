//! Everything that a guest can change while we use it: its memory map and its vrings. This crate must not
//! know requests or disks. It is one of the daemon's three crates with unsafe code: raw pointers into shared
//! memory are made here. Only the stores of `engine` and `rbd` use them too.
//!
//! The rules that keep it sound: every pointer into guest memory is made by a [`Memory`] and lives no longer
//! than it. No reference (`&`, `&mut`) to guest memory is ever made, because the guest may write there at any
//! time. Everything that is read is copied once, and the copy is checked. A page that vanishes during an
//! access (a cut file) is replaced by zeroes, so the process survives.

// Guest addresses and lengths are cast to `usize` after they were checked against a mapping.
const _: () = assert!(usize::BITS == 64, "only 64-bit hosts");

mod chain;
mod descriptor;
mod dirty;
mod inflight;
mod mapping;
mod memory;
mod positions;
mod racy;
mod region;
#[cfg(test)]
mod rig;
mod room;
mod sigbus;
mod signals;
mod vring;
mod walk;

pub use chain::{Chain, ChainFault};
pub use dirty::{DirtyLog, MarkingBudget, VringLog};
pub use inflight::{Inflight, InflightError, InflightLayout, Journal, JournalFault};
pub use memory::{Departure, Epoch, Memory, Spot, Unmapped};
pub use region::{MapError, RegionSpec};
pub use room::Allowance;
pub use vring::{Asked, TakenChain, Vring, VringError, VringFault, VringLayout};
