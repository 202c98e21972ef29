//! What the server of a disk may have lost.

/// The counters of the server when they were last looked at.
#[derive(Debug, Default)]
pub(super) struct ServerLosses {
    pub(super) lossy: u64,
    pub(super) replayed_bytes: u64,
    pub(super) has_lost_data: bool,
}
