//! All that a guest can change under us: its memory map and its vrings. This crate forbids knowing
//! requests or disks. It is one of the workspace's two unsafe doors on the daemon's side: raw
//! pointers into shared memory live here and nowhere above.

mod chain;
mod memory;
mod sigbus;
mod vring;

pub use chain::{Chain, ChainFault};
pub use memory::{MapError, Memory, RegionSpec, Unmapped};
pub use vring::{Taken, Vring, VringError, VringFault, VringLayout};
