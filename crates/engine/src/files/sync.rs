//! Fsync: one at a time on each leg, shared by those who wait for it, and failed for good.

use std::collections::VecDeque;
use std::sync::Arc;

use cleave_disk::Disk;

use super::Files;
use super::ledger::{Moment, Seat};
use crate::table::Step;
use crate::uring::Core;

/// The syncs of one leg. At most one fsync of it by an engine is in the kernel: of two at once, only
/// one may be told of a failure, and the other would vouch for writes that are lost (other engines: see
/// `ledger`). Those that come meanwhile share the next one, which begins after them.
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
    pub(super) fn new(disk: &Arc<Disk>, leg: u16, room: usize) -> Syncs {
        Syncs {
            leader: None,
            followers: VecDeque::with_capacity(room),
            waiting: VecDeque::with_capacity(room),
            seat: Seat::take(disk, leg),
            unsettled: None,
        }
    }

    /// The leader, where the kernel is done with its fsync and it waits for those of other engines.
    pub(super) fn take_unsettled(&mut self) -> Option<u16> {
        self.unsettled.take().and(self.leader.take())
    }
}

impl Files {
    /// Makes durable what has completed.
    pub(super) fn begin_sync(&mut self, core: &mut Core, index: u16) {
        let entry = self.table.get_mut(index);
        entry.step = Step::Idle;
        let leg = entry.leg;
        // Who waits for a buffer does not wait for syncs, of which some may be other engines'.
        if let Some(buffer) = entry.buffer.take() {
            self.pool.give(buffer);
        }
        let syncs = &mut self.leg_mut(leg).syncs;
        if syncs.leader.is_some() {
            syncs.waiting.push_back(index);
        } else {
            self.lead_sync(core, index);
        }
    }

    fn lead_sync(&mut self, core: &mut Core, index: u16) {
        let leg = self.table.get(index).leg;
        self.leg_mut(leg).syncs.leader = Some(index);
        if core.disk.sync_failed() {
            return self.sync_done(core, index, Err(libc::EIO));
        }
        let entry = self.table.get_mut(index);
        entry.step = Step::Sync;
        entry.tries = 0;
        self.leg(leg).syncs.seat.begin();
        self.issue(core, index);
    }

    /// The leader's fsync went well.
    pub(super) fn sync_ended(&mut self, core: &mut Core, leader: u16) {
        let leg = self.table.get(leader).leg;
        let syncs = &mut self.leg_mut(leg).syncs;
        syncs.unsettled = Some(syncs.seat.end());
        self.settle_sync(core, leg);
    }

    /// The leader's fsync failed: nobody's later one vouches for what was written before.
    pub(super) fn sync_failed(&mut self, core: &mut Core, leader: u16, errno: i32) {
        core.taint_sync(errno);
        // Only now: who sees it ended has to see the mark.
        let leg = self.table.get(leader).leg;
        let _ = self.leg(leg).syncs.seat.end();
        self.sync_done(core, leader, Err(errno));
    }

    /// An fsync of some leg went well and waits for others of that leg to end.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.legs.iter().any(|leg| leg.syncs.unsettled.is_some())
    }

    /// Reports fsyncs that went well as soon as they can vouch for the writes before them.
    pub(super) fn settle_syncs(&mut self, core: &mut Core) {
        // At most 64.
        for leg in 0..self.legs.len() as u16 {
            self.settle_sync(core, leg);
        }
    }

    fn settle_sync(&mut self, core: &mut Core, leg: u16) {
        let syncs = &mut self.leg_mut(leg).syncs;
        let (Some(moment), Some(leader)) = (syncs.unsettled, syncs.leader) else {
            return;
        };
        if syncs.seat.all_ended(moment) {
            syncs.unsettled = None;
            self.sync_done(core, leader, Ok(()));
        }
    }

    /// The engine goes without having seen the end of what the kernel does.
    pub(crate) fn abandon(&mut self, core: &Core) {
        if self.legs.iter().any(|leg| leg.syncs.leader.is_some()) {
            core.disk.mark_sync_failed();
        }
        for leg in &self.legs {
            let _ = leg.syncs.seat.end();
        }
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
        let leg = self.table.get(leader).leg;
        self.leg_mut(leg).syncs.leader = None;
        self.finish(core, leader, result);
        while let Some(follower) = self.leg_mut(leg).syncs.followers.pop_front() {
            self.finish(core, follower, result);
        }
        if core.disk.sync_failed() {
            while let Some(waiting) = self.leg_mut(leg).syncs.waiting.pop_front() {
                self.finish(core, waiting, Err(libc::EIO));
            }
        }
        let syncs = &mut self.leg_mut(leg).syncs;
        if let Some(next) = syncs.waiting.pop_front() {
            std::mem::swap(&mut syncs.followers, &mut syncs.waiting);
            self.lead_sync(core, next);
        }
    }
}
