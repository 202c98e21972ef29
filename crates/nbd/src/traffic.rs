//! Bytes that went to and came from a server, and the requests that wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The counts of all ports.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// By ports that are gone.
    pub(crate) past: [u64; 2],
    pub(crate) ports: Vec<Arc<Traffic>>,
}

/// The bytes that one port moved, and the requests that wait at it. Only its own thread writes here, so that workers do not share
/// a cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Traffic {
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
    pub(crate) held: AtomicU64,
}

impl Traffic {
    pub(crate) fn read(&self) -> [u64; 3] {
        [&self.sent, &self.received, &self.held].map(|counter| counter.load(Ordering::Relaxed))
    }
}
