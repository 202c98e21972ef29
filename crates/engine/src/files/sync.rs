//! Fsync: one at a time, shared by those who wait for it, and failed for good.

use std::collections::VecDeque;
use std::sync::Arc;

use cleave_disk::Disk;

use super::Files;
use super::ledger::{Moment, Seat};
use crate::table::Step;
use crate::uring::Core;

/// At most one fsync of an engine is in the kernel: of two at once, only one may be told of a failure,
/// and the other would vouch for writes that are lost (other engines: see `ledger`). Those that come
/// meanwhile share the next one, which begins after them.
#[derive(Debug)]
pub(super) struct Syncs {
    pub(super) leader: Option<u16>,
    pub(super) followers: VecDeque<u16>,
    pub(super) waiting: VecDeque<u16>,
    seat: Seat,
    /// The leader's fsync went well, and those of other engines that were under way have not ended.
    unsettled: Option<Moment>,
}

impl Syncs {
    pub(super) fn new(disk: &Arc<Disk>, room: usize) -> Syncs {
        Syncs {
            leader: None,
            followers: VecDeque::with_capacity(room),
            waiting: VecDeque::with_capacity(room),
            seat: Seat::take(disk),
            unsettled: None,
        }
    }

    /// An fsync went well and waits for others to end.
    pub(super) fn is_unsettled(&self) -> bool {
        self.unsettled.is_some()
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
        self.syncs.seat.begin();
        self.issue(core, index);
    }

    /// The leader's fsync went well.
    pub(super) fn sync_ended(&mut self, core: &mut Core) {
        self.syncs.unsettled = Some(self.syncs.seat.end());
        self.settle_sync(core);
    }

    /// The leader's fsync failed: nobody's later one vouches for what was written before.
    pub(super) fn sync_failed(&mut self, core: &mut Core, leader: u16, errno: i32) {
        core.taint_sync(errno);
        // Only now: who sees it ended has to see the mark.
        let _ = self.syncs.seat.end();
        self.sync_done(core, leader, Err(errno));
    }

    /// Reports an fsync that went well as soon as it can vouch for the writes before it.
    pub(super) fn settle_sync(&mut self, core: &mut Core) {
        let (Some(moment), Some(leader)) = (self.syncs.unsettled, self.syncs.leader) else {
            return;
        };
        if self.syncs.seat.all_ended(moment) {
            self.syncs.unsettled = None;
            self.sync_done(core, leader, Ok(()));
        }
    }

    /// The engine goes without having seen the end of what the kernel does.
    pub(crate) fn abandon(&mut self, core: &Core) {
        if self.syncs.leader.is_some() {
            core.disk.mark_sync_failed();
        }
        let _ = self.syncs.seat.end();
    }

    /// The fsync of `leader` is over: so are those that share it. The next one covers all who came
    /// since. Iterates rather than recurs: a disk whose sync failed answers any number at once.
    fn sync_done(&mut self, core: &mut Core, leader: u16, result: Result<(), i32>) {
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
