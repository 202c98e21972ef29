//! The threads that run workers: one for each worker, or a pool's.

pub(crate) mod contention;
pub(crate) mod cpu;
pub(crate) mod error;
pub(crate) mod handle;
pub(crate) mod pool;
