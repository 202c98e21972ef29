//! Bytes that went to and came from a server, and the requests that wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The counts of all ports.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// By ports that are gone.
    pub(super) past: [u64; 2],
    pub(super) ports: Vec<Arc<Traffic>>,
}

/// The bytes that one port moved, and the requests that wait at it. Only its own thread writes here, so that workers do not share
/// a cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Traffic {
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) held: AtomicU64,
}

impl Traffic {
    pub(super) fn read(&self) -> [u64; 3] {
        [&self.sent, &self.received, &self.held].map(|counter| counter.load(Ordering::Relaxed))
    }
}
