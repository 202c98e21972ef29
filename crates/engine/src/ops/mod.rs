//! Parts that the stores have in common: ops in flight, their memory, and the next step of each.

pub(crate) mod area;
pub(crate) mod buffer;
pub(crate) mod lap;
pub(crate) mod legs;
pub(crate) mod memory;
pub(crate) mod piece;
pub(crate) mod progress;
pub(crate) mod queue;
pub(crate) mod step;
pub(crate) mod table;
