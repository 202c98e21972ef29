//! One vring that a worker serves.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};

use cleave_blk::spec::feature;
use cleave_guest::{Epoch, MarkingBudget, Vring, VringError};

use crate::command::{StopWaiter, VringStart};
use crate::policy::Caller;
use crate::record::{Recorder, VringEvent};
use crate::slots::Slots;
use crate::stalls::Stalls;
use crate::{CompletionPolicy, Device};

/// State of a vring with its worker.
#[derive(Debug)]
pub(crate) enum LaneState {
    /// Served.
    Running,
    /// Kept but not served. Requests in flight still complete.
    Disabled,
    /// Its ring is not in the memory table, or the table has other memory at its addresses. Requests in flight
    /// complete in the memory in which they were taken. Then the vring continues where the table in force has
    /// its ring, or waits for a table that has it.
    Resting { enabled: bool },
    /// Broken by the guest: never served again, and kept until control stops it.
    Retired,
    /// Control waits until nothing is in flight, and then for the position.
    Stopping(StopWaiter),
}

/// Limits on the requests that a running vring gives to the disk. Of several that apply it is the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LaneIntake {
    /// All.
    Open,
    /// Only those that were taken before: one of them is held.
    Held,
    /// None, not even again: the disk is quiesced.
    Quiesced,
    /// None until this time: requests that an earlier daemon sent may be under way.
    Unsettled { until_ns: u64 },
}

/// A vring with its requests in flight and its state.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) index: u16,
    pub(crate) vring: Vring,
    pub(crate) slots: Slots,
    pub(crate) features: u64,
    pub(crate) has_kick: bool,
    pub(crate) has_call: bool,
    /// How the worker waits for its requests.
    pub(crate) completion: CompletionPolicy,
    pub(crate) state: LaneState,
    /// Requests that the disk failed and that will be repeated.
    pub(crate) stalls: Stalls,
    /// Requests stay unanswered, and in the in-flight region if there is one: stalled ones, or all because memory is lost.
    pub(crate) left: bool,
    pub(crate) intake: LaneIntake,
    /// Its next request waits for the disk's limits.
    pub(crate) throttled: Option<Throttled>,
    /// While it stops, the requests of an earlier daemon do not wait for the disk's limits.
    pub(crate) hurries: bool,
    /// While it stops, stalled requests are not left behind: control waits until they have ended.
    pub(crate) finishes: bool,
    /// Entries were pushed since the last publish.
    pub(crate) dirty: bool,
    /// Number of entries that were pushed since the last publish.
    pub(crate) pushed: u32,
    /// Used index up to which control waits for the answers to be published.
    owed: Option<u16>,
    pub(crate) caller: Caller,
    pub(crate) record: Recorder,
    call_history: CallHistory,
    /// Position of the first request that this lane takes.
    begins_at: u16,
    /// Kicks without a request, before the first request.
    empty_kicks: u8,
    /// When to warn that guest memory is not shared, unless a request was seen by then.
    pub(crate) doubted_ns: Option<u64>,
}

/// A request that waits in the ring for the disk's limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Throttled {
    /// When it was refused first. `None`: only because another worker had the buckets.
    pub(crate) since_ns: Option<u64>,
    /// When to ask again.
    pub(crate) due_ns: u64,
}

/// Maximum number of inline requests before the guest is shown them, so that it handles them while we work on
/// the next ones. A guest that has to be woken gets few, or it would still be waking up when we run out of
/// work. A guest that is awake gets more, since each publish costs both sides. A lap that pushes ops is not cut
/// short, because one system call submits them all.
const AT_ONCE_ASLEEP: usize = 4;
const AT_ONCE_AWAKE: usize = 16;
/// Consecutive publishes without a call after which the guest counts as awake.
const ASLEEP_PUBLISHES: u8 = 64;

/// A memory of the last calls, which tells whether the guest had to be woken lately.
#[derive(Debug, Default)]
struct CallHistory {
    /// Publishes that are left until the guest counts as awake.
    left: u8,
}

impl CallHistory {
    #[inline]
    fn published(&mut self, call: bool) {
        self.left = match call {
            true => ASLEEP_PUBLISHES,
            false => self.left.saturating_sub(1),
        };
    }

    #[inline]
    fn at_once_max(&self) -> usize {
        match self.left {
            0 => AT_ONCE_AWAKE,
            _ => AT_ONCE_ASLEEP,
        }
    }
}

impl Lane {
    /// Takes over a vring. The caller gives its descriptors to the reactor.
    pub(crate) fn new(
        start: VringStart,
        vring: Vring,
        completion: CompletionPolicy,
        record: Recorder,
    ) -> Lane {
        Lane {
            index: start.index,
            slots: Slots::new(vring.size()),
            begins_at: vring.base(),
            vring,
            features: start.features,
            has_kick: false,
            has_call: false,
            completion,
            state: if start.enabled {
                LaneState::Running
            } else {
                LaneState::Disabled
            },
            stalls: Stalls::default(),
            left: false,
            intake: LaneIntake::Open,
            throttled: None,
            hurries: false,
            finishes: false,
            dirty: false,
            record,
            call_history: CallHistory::default(),
            empty_kicks: 0,
            doubted_ns: None,
            pushed: 0,
            owed: None,
            caller: Caller::default(),
        }
    }

    /// Notes a kick. Returns true for the second one if the guest has never made a request available in any vring.
    /// This is how guest memory that is not shared looks from here, because the guest writes to its own copy of the
    /// pages. It proves nothing yet: QEMU kicks once or twice, by its version, when it starts a vring.
    pub(crate) fn kicked(&mut self, has_shown: &AtomicBool) -> bool {
        self.record.count(VringEvent::Kick);
        if self.has_shown(has_shown) {
            return false;
        }
        self.empty_kicks = self.empty_kicks.saturating_add(1);
        self.empty_kicks == 2
    }

    /// Returns true if the guest has made a request available in any vring of the device.
    pub(crate) fn has_shown(&self, has_shown: &AtomicBool) -> bool {
        if !has_shown.load(Ordering::Relaxed)
            && (self.vring.base() != self.begins_at || !self.vring.is_empty())
        {
            has_shown.store(true, Ordering::Relaxed);
        }
        has_shown.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state, LaneState::Running) && self.is_open()
    }

    /// Returns true if new requests are taken while it runs.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.intake, LaneIntake::Open)
    }

    /// Returns true if it has stalled requests, and a ring to read them from again.
    pub(crate) fn can_retry(&self) -> bool {
        let is_served = match self.state {
            LaneState::Running | LaneState::Disabled => true,
            LaneState::Stopping(_) => self.finishes,
            LaneState::Resting { .. } | LaneState::Retired => false,
        };
        is_served && self.may_repeat() && self.stalls.waiting() > 0
    }

    /// Returns true if it has a stalled request that may be repeated now.
    pub(crate) fn is_due(&self, now_ns: u64) -> bool {
        let due_ns = self.stalls.due_ns();
        due_ns.is_some_and(|due_ns| due_ns <= now_ns) && self.can_retry()
    }

    /// Returns true if chains are taken. A vring that stops still takes those that an earlier daemon left in flight.
    #[inline]
    pub(crate) fn takes(&self) -> bool {
        match self.state {
            LaneState::Running => self.is_open(),
            LaneState::Stopping(_) => self.vring.again() > 0 && self.may_repeat(),
            _ => false,
        }
    }

    /// Returns true if the disk may be given requests that were taken before, by this daemon or an earlier one.
    fn may_repeat(&self) -> bool {
        matches!(self.intake, LaneIntake::Open | LaneIntake::Held)
    }

    /// Returns true if it is not served because its ring is not in the memory table.
    pub(crate) fn rests(&self) -> bool {
        matches!(self.state, LaneState::Resting { .. })
    }

    /// Opens or closes it, as the quiet in force and its stalled requests have it. Returns true if that is a change.
    pub(crate) fn set_intake(&mut self, quiet: Option<NonZeroU64>) -> bool {
        let was_open = self.is_open();
        self.intake = match self.intake {
            unsettled @ LaneIntake::Unsettled { .. } => unsettled,
            _ if quiet.is_some() => LaneIntake::Quiesced,
            _ if self.stalls.closes() => LaneIntake::Held,
            _ => LaneIntake::Open,
        };
        self.is_open() != was_open
    }

    /// Returns true if the guest looks at a flag, not at an event index, to know whether to kick.
    pub(crate) fn kicks_by_flag(&self) -> bool {
        self.features & feature::EVENT_IDX == 0
    }

    /// Returns true if its next request may not go yet.
    pub(crate) fn is_throttled(&self, device: &Device) -> bool {
        let due_ns = self.throttled.map(|throttled| throttled.due_ns);
        due_ns.is_some_and(|due_ns| device.now_ns() < due_ns)
    }

    /// Gives up the time that the disk's limits have reserved for its next request.
    pub(crate) fn leave_limits(&mut self, device: &Device) {
        if self.throttled.take().is_some() {
            device.throttle.leave(self.index);
        }
    }

    /// Stops it when nothing is in flight any more, for control. Control must not wait for the disk's limits, so what an earlier daemon
    /// left in flight does not either. Its frontend could write such requests into the region again and again, and have them done by a
    /// start and a stop: so that is done once for each vring, and the next time they stay in the region.
    ///
    /// One that waits for stalled requests takes them along only if they can be answered. A resting vring has no ring for that, and
    /// those of a retired one have failed.
    pub(crate) fn stop(&mut self, device: &Device, waiter: StopWaiter) {
        let is_served = matches!(self.state, LaneState::Running | LaneState::Disabled);
        self.finishes = waiter.is_patient() && (is_served || self.finishes);
        self.vring.take_no_more();
        self.leave_limits(device);
        self.hurries |= self.vring.again() > 0 && device.may_hurry(self.index);
        self.state = LaneState::Stopping(waiter);
    }

    /// Starts or stops serving it, for control.
    pub(crate) fn enable(&mut self, enable: bool) {
        match &mut self.state {
            // The next lap checks the ring, so no kick is needed.
            LaneState::Running | LaneState::Disabled if enable => self.state = LaneState::Running,
            LaneState::Running | LaneState::Disabled => self.state = LaneState::Disabled,
            LaneState::Resting { enabled } => *enabled = enable,
            LaneState::Retired | LaneState::Stopping(_) => {}
        }
    }

    /// Moves to a changed memory table. `Err`: the ring is not in the table, and the vring was not resting yet.
    pub(crate) fn rebind(&mut self, epoch: &Epoch) -> Result<(), VringError> {
        let waits = matches!(self.state, LaneState::Resting { .. }) && self.vring.is_detached();
        if (waits || self.vring.is_in(epoch)) && self.vring.attach(epoch).is_ok() {
            self.end_rest();
            return Ok(());
        }
        let enabled = match self.state {
            LaneState::Running => true,
            LaneState::Disabled => false,
            // A retired vring is not served again, and one that stops only drains.
            LaneState::Resting { .. } | LaneState::Retired | LaneState::Stopping(_) => {
                return Ok(());
            }
        };
        self.state = LaneState::Resting { enabled };
        self.vring.fits(epoch)
    }

    /// Releases memory that is no longer needed. A resting vring continues if the table in force has its ring.
    pub(crate) fn release_memory(&mut self, epoch: &Epoch) {
        if !self.can_release_memory() {
            return;
        }
        let goes_on = matches!(self.state, LaneState::Resting { .. });
        if goes_on && self.vring.attach(epoch).is_ok() {
            self.end_rest();
        } else {
            self.vring.detach();
        }
    }

    /// Returns true if it is not served but still holds memory.
    pub(crate) fn holds_unused_memory(&self) -> bool {
        matches!(self.state, LaneState::Resting { .. } | LaneState::Retired)
            && !self.vring.is_detached()
    }

    /// Returns true if it holds memory that none of its requests needs.
    pub(crate) fn can_release_memory(&self) -> bool {
        self.holds_unused_memory() && self.has_answered()
    }

    fn has_answered(&self) -> bool {
        self.slots.taken() == 0 && !self.dirty
    }

    /// Ends a rest.
    fn end_rest(&mut self) {
        if let LaneState::Resting { enabled } = self.state {
            self.state = match enabled {
                true => LaneState::Running,
                false => LaneState::Disabled,
            };
        }
    }

    /// Returns true if control waits for it and nothing is in flight.
    pub(crate) fn is_drained(&self) -> bool {
        // Requests of an earlier daemon cannot be taken from a ring that is away, and while control waits no table brings it
        // back; nor may they go to a disk that is quiesced or not settled. They stay where that daemon left them, as do those that are
        // over the disk's limits. Control that waits for stalled requests also waits for the end of the quiet, and until the disk is
        // settled.
        let is_over_limit = self.throttled.is_some_and(|it| it.since_ns.is_some());
        let may_take =
            !self.vring.is_detached() && (self.may_repeat() || self.finishes) && !is_over_limit;
        let takes_on = may_take && self.vring.again() > 0;
        let is_done = self.has_answered() && self.stalls.waiting() == 0 && !takes_on;
        matches!(self.state, LaneState::Stopping(_)) && is_done
    }

    /// Returns true if requests stay behind in the in-flight region.
    pub(crate) fn leaves_requests(&self) -> bool {
        self.left || self.vring.again() > 0
    }

    /// Returns the maximum number of inline requests before the next publish.
    #[inline]
    pub(crate) fn at_once_max(&self) -> usize {
        self.call_history.at_once_max()
    }

    /// Publishes what was pushed. Returns whether the guest wants a call for it. While the guest moves, a part may be left: see
    /// [`keep_rest`](Lane::keep_rest).
    #[inline]
    pub(crate) fn publish(&mut self, budget: &mut MarkingBudget) -> bool {
        (self.dirty, self.pushed) = (false, 0);
        let call = self.vring.publish_within(budget);
        self.call_history.published(call);
        call
    }

    /// Notes that what the budget did not suffice for is to be published later.
    #[cold]
    pub(crate) fn keep_rest(&mut self) {
        self.pushed = self.vring.added().into();
        self.dirty = self.pushed > 0;
    }

    /// Notes that control waits until the answers that were decided by now are published.
    pub(crate) fn owe(&mut self) {
        self.owed = self.dirty.then(|| self.vring.next_used());
    }

    /// Returns true if some of these are not published, and will be.
    pub(crate) fn owes(&self) -> bool {
        let since = |owed| self.vring.next_used().wrapping_sub(owed);
        self.dirty
            && self
                .owed
                .is_some_and(|owed| self.vring.added() > since(owed))
    }

    /// Answers a request. `None`: its memory is lost, so it is left.
    #[inline]
    pub(crate) fn answer(&mut self, head: u16, used_bytes: Option<u32>) {
        match used_bytes {
            Some(used_bytes) => self.push_used(head, used_bytes),
            None => self.left = true,
        }
    }

    /// Leaves the request that was taken last, and all that would follow, because memory is lost.
    #[cold]
    pub(crate) fn leave(&mut self, head: u16) {
        self.left = true;
        self.vring.leave(head);
    }

    #[inline]
    pub(crate) fn push_used(&mut self, head: u16, used_bytes: u32) {
        self.vring.push_used(head, used_bytes);
        self.dirty = true;
        self.pushed += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_is_called_counts_as_asleep_for_a_while() {
        let mut lane = CallHistory::default();
        assert_eq!(lane.at_once_max(), AT_ONCE_AWAKE);
        lane.published(true);
        for _ in 1..ASLEEP_PUBLISHES {
            lane.published(false);
            assert_eq!(lane.at_once_max(), AT_ONCE_ASLEEP);
        }
        lane.published(false);
        assert_eq!(lane.at_once_max(), AT_ONCE_AWAKE);
    }
}
