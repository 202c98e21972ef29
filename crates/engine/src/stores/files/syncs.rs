//! The syncs of one leg.

use std::collections::VecDeque;

use cleave_disk::SyncUnderWay;

/// The syncs of one leg. At most one fsync of it is in the kernel, because the kernel reports a failed
/// write-back only once for each open file description: of two fsyncs at once, the other would vouch for lost
/// writes. (Other workers have descriptions of their own.) Ops that arrive meanwhile share the next fsync.
#[derive(Debug)]
pub(super) struct Syncs {
    pub(super) leader: Option<u16>,
    /// The leader's fsync, as the disk counts it.
    pub(super) under_way: Option<SyncUnderWay>,
    pub(super) followers: VecDeque<u16>,
    pub(super) waiting: VecDeque<u16>,
}

impl Syncs {
    pub(super) fn new(room: usize) -> Syncs {
        Syncs {
            leader: None,
            under_way: None,
            followers: VecDeque::with_capacity(room),
            waiting: VecDeque::with_capacity(room),
        }
    }
}
