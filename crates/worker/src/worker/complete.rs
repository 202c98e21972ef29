//! Completes requests: from the completion of an op to the used index that the guest sees.

use std::ops::Range;

use cleave_blk::{Op, OpKind};
use cleave_engine::{Event, Store};
use rustix::time::ClockId;

use super::status::write_status;
use super::{COMMAND_WATCH, Publishing, Worker, call_bell};
use crate::DataDirection;
use crate::clock::{cpu_ns, nanoseconds};
use crate::policy::CallDecision;
use crate::record::VringEvent;
use crate::slots::NextStep;
use crate::token::Token;

/// A write that was pushed while the cache was write-back and completes after the switch to write-through is
/// followed by this op. Its op number is beyond all others. On a stripe the legs are synced one after the
/// other, with op numbers counting down from `SYNC_OP`, because there is room for only one op.
const SYNC: Op<'static> = Op {
    kind: OpKind::Sync,
    leg: 0,
    offset_bytes: 0,
    len_bytes: 0,
    segments: &[],
    skip_bytes: 0,
    stripe: None,
};
const SYNC_OP: u32 = u32::MAX;
/// A sync for the operator or for a guest that moves. No lane has this number, because no vring asked for it.
pub(crate) const OPERATOR: Token = Token {
    lane: u16::MAX,
    head: 0,
    op: SYNC_OP,
};

impl<S: Store> Worker<S> {
    /// Collects completions, on a shared thread as many as it has time for; the others keep the worker from resting. Returns how many
    /// ops completed.
    pub(crate) fn reap(&mut self) -> usize {
        let mut ended = 0;
        while let Some(event) = self.reactor.reap(&mut self.store) {
            match event {
                Event::Done { done, .. } => {
                    ended += 1;
                    self.op_ended(Token::from_bits(done.token), done.result);
                    if self.taking.allowance.ends_after(ended) {
                        break;
                    }
                }
                Event::Woken {
                    slot: COMMAND_WATCH,
                } => self.inbox.is_pending = true,
                // A kick only ends the sleep: every lap checks every ring.
                Event::Woken { slot } => self.kicked(slot),
            }
        }
        ended
    }

    fn op_ended(&mut self, token: Token, result: Result<(), i32>) {
        // On a stripe, the sync of the next leg replaces the one that has just completed.
        let synced_leg = SYNC_OP - token.op;
        let last_leg = self.device.disk.legs().len() as u32 - 1;
        if synced_leg < last_leg && result.is_ok() {
            // A disk has at most 64 legs, so this does not truncate.
            let leg = synced_leg as u16 + 1;
            let op = token.op - 1;
            return self.push_sync(leg, Token { op, ..token });
        }
        let Some(Some(lane)) = self.lanes.get_mut(usize::from(token.lane)) else {
            if token.lane == OPERATOR.lane {
                self.sync_ended(result);
            }
            return;
        };
        let write_through = self.device.is_write_through(lane.features);
        let ended = match lane
            .slots
            .op_ended(token.head, token.op, result, write_through)
        {
            NextStep::Wait => return,
            NextStep::End(ended) => ended,
            NextStep::Sync => {
                // There is room: the op that has just completed freed it.
                let token = Token {
                    op: SYNC_OP,
                    ..token
                };
                return self.push_sync(0, token);
            }
        };
        self.splitting.requests = self.splitting.requests.saturating_sub(1);
        let mut exact_ns = None;
        let splitting = &mut self.splitting;
        if let Some(timing) = ended.timing
            && splitting.splitter.learns()
        {
            splitting.large -= 1;
            let now_ns = self.device.now_ns();
            match (DataDirection::of(ended.verb), ended.errno) {
                (Some(direction), None) => {
                    splitting
                        .splitter
                        .ended(direction, ended.len_bytes, now_ns, || {
                            cpu_ns(ClockId::ProcessCPUTime)
                        });
                }
                _ => splitting.splitter.failed(now_ns),
            }
            exact_ns = Some(now_ns.saturating_sub(timing.start_ns));
        }
        if let Some(errno) = ended.errno {
            return self.request_failed(token, &ended, errno);
        }
        lane.record.ended(
            token.head,
            &ended,
            exact_ns,
            &ended.epoch,
            &mut self.meters.laps,
        );
        // Through the epoch in which the request was taken: the table in force may have other memory at this
        // address.
        let Some(used) = write_status(&ended.epoch, ended.status_addr, ended.outcome) else {
            // The table in force may have other memory, which is not lost.
            return self.lose_memory();
        };
        lane.vring.log_answer(&ended.epoch);
        lane.push_used(token.head, used);
    }

    pub(crate) fn push_sync(&mut self, leg: u16, token: Token) {
        let [store] = &mut self.store;
        store.push(
            &mut self.reactor,
            &self.epoch,
            Op { leg, ..SYNC },
            token.to_bits(),
        );
    }

    /// Publishes all that was pushed: one index store and at most one call per vring. If the marking of what was written takes
    /// longer than a lap may (only for a guest that moves), the rest is published in the next one.
    pub(crate) fn publish(&mut self) {
        match self.publishing.first {
            0 => {
                self.publish_of(0..self.lanes.len());
            }
            first => self.publish_from(first),
        }
    }

    /// Does that after the budget was used up. In the next lap this lane comes first.
    #[cold]
    fn publish_from(&mut self, first: usize) {
        if self.publishing.marking.is_used_up() {
            self.waiting.due_ns = Some(0);
            return;
        }
        let lanes = self.lanes.len();
        let first = first.min(lanes);
        self.publishing.first = 0;
        if self.publish_of(first..lanes) {
            self.publish_of(0..first);
        }
    }

    /// Publishes for these lanes. Returns false if the marking has used its budget up.
    #[inline(always)]
    fn publish_of(&mut self, lanes: Range<usize>) -> bool {
        let Publishing { first, marking } = &mut self.publishing;
        let coalesce = self.active.tuning.coalesce;
        // At most `LANES_MAX`.
        let slots = lanes.start as u16..;
        let lanes = self.lanes.get_mut(lanes).unwrap_or_default();
        for (slot, lane) in slots.zip(lanes) {
            let Some(lane) = lane else { continue };
            if !lane.dirty {
                continue;
            }
            let requests = lane.pushed;
            let wanted = lane.publish(marking) && lane.has_call;
            let in_flight = lane.slots.taken();
            let now_ns = || nanoseconds(self.device.began);
            let since_ns = lane.caller.held_since_ns();
            match lane
                .caller
                .published(wanted, requests, in_flight, coalesce, now_ns)
            {
                CallDecision::Now => {
                    let held_ns = since_ns.map_or(0, |since_ns| now_ns().saturating_sub(since_ns));
                    lane.record.called(held_ns);
                    self.reactor.ring(call_bell(slot));
                }
                CallDecision::None => lane.record.count(VringEvent::CallSuppressed),
                CallDecision::Later => {
                    lane.record.count(VringEvent::CallCoalesced);
                    let due_ns = lane.caller.due_ns(coalesce);
                    self.waiting.due_ns = self.waiting.due_ns.into_iter().chain(due_ns).min();
                }
            }
            if self.meters.laps.is_timed() {
                lane.record.published(&self.meters.laps);
            }
            if marking.is_used_up() {
                lane.keep_rest();
                *first = usize::from(slot) + 1;
                self.waiting.due_ns = Some(0);
                return false;
            }
        }
        true
    }
}
