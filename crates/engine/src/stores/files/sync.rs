//! Fsync: one at a time on each leg, shared by the ops that wait for it. A failure is permanent.

use super::Files;
use crate::Reactor;
use crate::ops::step::Step;

impl Files {
    /// Starts making completed writes durable.
    pub(super) fn begin_sync(&mut self, reactor: &mut Reactor, index: u16) {
        let entry = self.ops.get_mut(index);
        entry.own.step = Step::Idle;
        let leg = entry.leg;
        // The buffer is not needed during the sync.
        if let Some(buffer) = entry.own.buffer.take() {
            self.pool.give(buffer);
        }
        let syncs = &mut self.leg_mut(leg).syncs;
        if syncs.leader.is_some() {
            syncs.waiting.push_back(index);
        } else {
            self.lead_sync(reactor, index);
        }
    }

    fn lead_sync(&mut self, reactor: &mut Reactor, index: u16) {
        let leg = self.ops.get(index).leg;
        let under_way = self.disk.begin_sync();
        let syncs = &mut self.leg_mut(leg).syncs;
        (syncs.leader, syncs.under_way) = (Some(index), Some(under_way));
        if self.disk.sync_failed() {
            return self.sync_done(reactor, index, Err(libc::EIO));
        }
        let entry = self.ops.get_mut(index);
        entry.own.step = Step::Sync;
        entry.own.tries = 0;
        self.issue(reactor, index);
    }

    /// Handles a failed fsync of the leader: no later one vouches for earlier writes.
    pub(super) fn sync_failed(&mut self, reactor: &mut Reactor, leader: u16, errno: i32) {
        self.taint_sync(errno);
        self.sync_done(reactor, leader, Err(errno));
    }

    /// Ends the fsync of `leader` and the ops that share it. The next fsync covers all ops that arrived since. This
    /// loops instead of recursing, because on a disk whose sync failed any number of ops end at once.
    pub(super) fn sync_done(
        &mut self,
        reactor: &mut Reactor,
        leader: u16,
        result: Result<(), i32>,
    ) {
        // Another worker's fsync may have failed meanwhile for writes that this one would vouch for.
        let result = if self.disk.sync_failed() {
            result.and(Err(libc::EIO))
        } else {
            result
        };
        let leg = self.ops.get(leader).leg;
        let syncs = &mut self.leg_mut(leg).syncs;
        syncs.leader = None;
        // To the end of this function: the next one begins before that, so that the disk is seen without a sync only when none waits.
        let _ended = syncs.under_way.take();
        self.finish(leader, result);
        while let Some(follower) = self.leg_mut(leg).syncs.followers.pop_front() {
            self.finish(follower, result);
        }
        if self.disk.sync_failed() {
            while let Some(waiting) = self.leg_mut(leg).syncs.waiting.pop_front() {
                self.finish(waiting, Err(libc::EIO));
            }
        }
        let syncs = &mut self.leg_mut(leg).syncs;
        if let Some(next) = syncs.waiting.pop_front() {
            std::mem::swap(&mut syncs.followers, &mut syncs.waiting);
            self.lead_sync(reactor, next);
        }
    }
}
