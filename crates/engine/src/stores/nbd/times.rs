//! The times that the operator chose.

use std::time::{Duration, Instant};

use cleave_nbd::NbdSpec;

/// The times that the operator chose.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub(super) timeout: Duration,
    pub(super) reconnect: Duration,
    pub(super) fence: Duration,
}

/// Least time for the first connection of a store, which needs no more than this to find that the server does not answer.
const FIRST: Duration = Duration::from_secs(10);

impl Times {
    /// When the wait for a store's first connection begins, so that it does not end too soon.
    pub(super) fn first_since(&self, now: Instant) -> Instant {
        now + FIRST.saturating_sub(self.reconnect)
    }

    pub(super) fn of(spec: &NbdSpec) -> Times {
        Times {
            timeout: spec.timeout,
            reconnect: spec.reconnect,
            fence: spec.fence,
        }
    }
}
