//! Fsync: one at a time, shared by those who wait for it, and failed for good.

use std::collections::VecDeque;

use super::Files;
use crate::table::Step;
use crate::uring::Core;

/// At most one fsync is in the kernel: of two at once, the kernel may tell only one of a failure
/// (the error is per open file and consumed by who sees it first), and the other would vouch for
/// writes that are lost. Those that come meanwhile share the next one, which begins after them.
#[derive(Debug)]
pub(super) struct Syncs {
    pub(super) leader: Option<u16>,
    pub(super) followers: VecDeque<u16>,
    pub(super) waiting: VecDeque<u16>,
}

impl Syncs {
    pub(super) fn new(room: usize) -> Syncs {
        Syncs {
            leader: None,
            followers: VecDeque::with_capacity(room),
            waiting: VecDeque::with_capacity(room),
        }
    }
}

impl Files {
    /// Makes durable what has completed.
    pub(super) fn begin_sync(&mut self, core: &mut Core, index: u16) {
        self.table.get_mut(index).step = Step::Idle;
        if self.syncs.leader.is_some() {
            self.syncs.waiting.push_back(index);
        } else {
            self.lead_sync(core, index);
        }
    }

    fn lead_sync(&mut self, core: &mut Core, index: u16) {
        self.syncs.leader = Some(index);
        if core.disk.sync_failed() {
            return self.sync_done(core, index, Err(libc::EIO));
        }
        let entry = self.table.get_mut(index);
        entry.step = Step::Sync;
        entry.tries = 0;
        self.issue(core, index);
    }

    /// The fsync of `leader` is over: so are those that share it. The next one covers all who came
    /// since. Iterates rather than recurs: a disk whose sync failed answers any number at once.
    pub(super) fn sync_done(&mut self, core: &mut Core, leader: u16, result: Result<(), i32>) {
        // Another engine may have been told of the failure that concerns us too.
        let result = if core.disk.sync_failed() {
            result.and(Err(libc::EIO))
        } else {
            result
        };
        self.syncs.leader = None;
        self.finish(core, leader, result);
        while let Some(follower) = self.syncs.followers.pop_front() {
            self.finish(core, follower, result);
        }
        if core.disk.sync_failed() {
            while let Some(waiting) = self.syncs.waiting.pop_front() {
                self.finish(core, waiting, Err(libc::EIO));
            }
        }
        if let Some(next) = self.syncs.waiting.pop_front() {
            std::mem::swap(&mut self.syncs.followers, &mut self.syncs.waiting);
            self.lead_sync(core, next);
        }
    }
}
