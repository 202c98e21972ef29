//! The process around the disks: what it asks of the kernel and gives up, its log, its signals, and the service manager that started
//! it.

pub(crate) mod confine;
pub(crate) mod cpus;
pub(crate) mod log;
pub(crate) mod signals;
mod start;
pub(crate) mod systemd;
pub(crate) mod unit;

pub use start::{DESCRIPTORS_MIN, runtime};
pub(crate) use start::{
    end_with_parent, lift_locked_memory_limit, raise_descriptor_limit, started,
};
