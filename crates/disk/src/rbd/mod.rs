//! Disks that are images of a Ceph cluster: naming and opening. The I/O of requests is the engine's.

mod open;
mod spec;

pub(crate) use open::{open, probe};
pub use spec::RbdSpec;
