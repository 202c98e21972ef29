//! One vring in the hands of a worker.

use std::sync::mpsc::SyncSender;

use cleave_guest::{Epoch, Vring, VringError};

use crate::Completion;
use crate::command::{Stopped, VringStart};
use crate::policy::Caller;
use crate::record::Recorder;
use crate::slots::Slots;
use crate::stall::Stalls;

/// Where a vring is in its life with a worker.
#[derive(Debug)]
pub(crate) enum State {
    /// Served.
    Running,
    /// Kept, not served; what is in flight still ends.
    Disabled,
    /// Its ring is not in the memory table, or other memory is there. Requests in flight end in the memory
    /// that they were taken in; then the vring goes on where the table in force has it, or waits for one that does.
    Resting { enabled: bool },
    /// Broken by the guest: never served again, kept until control stops it.
    Retired,
    /// Control waits for what is in flight, then for the position.
    Stopping(SyncSender<Stopped>),
}

/// A vring, its requests in flight and its life.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) index: u16,
    pub(crate) vring: Vring,
    pub(crate) slots: Slots,
    pub(crate) features: u64,
    pub(crate) has_kick: bool,
    pub(crate) has_call: bool,
    /// How it is waited for.
    pub(crate) completion: Completion,
    pub(crate) state: State,
    /// Requests that the disk failed and that are to be done again.
    pub(crate) stalls: Stalls,
    /// Stalled requests were left in the in-flight region.
    pub(crate) left: bool,
    /// Takes nothing new, because a request is held.
    pub(crate) is_closed: bool,
    /// Entries were pushed since the last publish.
    pub(crate) dirty: bool,
    /// How many.
    pub(crate) pushed: u32,
    pub(crate) caller: Caller,
    pub(crate) record: Recorder,
    drowse: Drowse,
}

/// Requests done on the spot before the guest is shown them, so that it works on them while we work on
/// the next ones: few for one that has to be woken for them, or it is still waking up when we have run
/// out of work; more for one that is awake, since showing costs both sides. (A lap that pushes ops
/// is not cut short: one system call submits them all.)
const AT_ONCE_ASLEEP: usize = 4;
const AT_ONCE_AWAKE: usize = 16;
/// Publishes without a call that tell a guest which stays awake from one that nods off now and then.
const DROWSY_PUBLISHES: u8 = 64;

/// Whether the guest had to be woken lately.
#[derive(Debug, Default)]
struct Drowse {
    /// Publishes until it counts as awake.
    left: u8,
}

impl Drowse {
    #[inline]
    fn published(&mut self, call: bool) {
        self.left = match call {
            true => DROWSY_PUBLISHES,
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
    /// Takes a vring over; its descriptors go to the reactor.
    pub(crate) fn new(
        start: VringStart,
        vring: Vring,
        completion: Completion,
        record: Recorder,
    ) -> Lane {
        Lane {
            index: start.index,
            slots: Slots::new(vring.size()),
            vring,
            features: start.features,
            has_kick: false,
            has_call: false,
            completion,
            state: if start.enabled {
                State::Running
            } else {
                State::Disabled
            },
            stalls: Stalls::default(),
            left: false,
            is_closed: false,
            dirty: false,
            record,
            drowse: Drowse::default(),
            pushed: 0,
            caller: Caller::default(),
        }
    }

    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state, State::Running) && !self.is_closed
    }

    /// Has requests that stalled, and a ring to read them from again.
    pub(crate) fn can_redo(&self) -> bool {
        matches!(self.state, State::Running | State::Disabled) && self.stalls.waiting() > 0
    }

    /// Whether chains are taken: of a vring that stops those that a daemon before had taken, which count as in flight.
    #[inline]
    pub(crate) fn takes(&self) -> bool {
        match self.state {
            State::Running => !self.is_closed,
            State::Stopping(_) => self.vring.again() > 0,
            _ => false,
        }
    }

    /// Control lets it be served, or not.
    pub(crate) fn enable(&mut self, enable: bool) {
        match &mut self.state {
            // The next lap looks at the ring, kick or no kick.
            State::Running | State::Disabled if enable => self.state = State::Running,
            State::Running | State::Disabled => self.state = State::Disabled,
            State::Resting { enabled } => *enabled = enable,
            State::Retired | State::Stopping(_) => {}
        }
    }

    /// Moves to a changed memory table. `Err`: the ring is not in it, and the vring was not resting yet.
    pub(crate) fn follow(&mut self, epoch: &Epoch) -> Result<(), VringError> {
        let waits = matches!(self.state, State::Resting { .. }) && self.vring.is_detached();
        if (waits || self.vring.is_in(epoch)) && self.vring.attach(epoch).is_ok() {
            self.wake();
            return Ok(());
        }
        let enabled = match self.state {
            State::Running => true,
            State::Disabled => false,
            // A retired vring is not served again, and one that stops only drains.
            State::Resting { .. } | State::Retired | State::Stopping(_) => return Ok(()),
        };
        self.state = State::Resting { enabled };
        self.vring.fits(epoch)
    }

    /// Lets go of memory that is needed no longer: a vring that rests goes on where the table has it.
    pub(crate) fn settle(&mut self, epoch: &Epoch) {
        if !self.can_settle() {
            return;
        }
        let goes_on = matches!(self.state, State::Resting { .. });
        if goes_on && self.vring.attach(epoch).is_ok() {
            self.wake();
        } else {
            self.vring.detach();
        }
    }

    /// Is not served, and has memory all the same.
    pub(crate) fn holds_on(&self) -> bool {
        matches!(self.state, State::Resting { .. } | State::Retired) && !self.vring.is_detached()
    }

    /// Nothing is left that needs the memory.
    pub(crate) fn can_settle(&self) -> bool {
        self.holds_on() && self.has_answered()
    }

    fn has_answered(&self) -> bool {
        self.slots.taken() == 0 && !self.dirty
    }

    /// Ends a rest.
    fn wake(&mut self) {
        if let State::Resting { enabled } = self.state {
            self.state = match enabled {
                true => State::Running,
                false => State::Disabled,
            };
        }
    }

    /// Control waits, and nothing is left to wait for.
    pub(crate) fn is_drained(&self) -> bool {
        matches!(self.state, State::Stopping(_)) && self.has_answered() && self.vring.again() == 0
    }

    /// Most requests to do on the spot before the next publish.
    #[inline]
    pub(crate) fn at_once_max(&self) -> usize {
        self.drowse.at_once_max()
    }

    /// Shows the guest what was pushed; whether it wants a call for that.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        (self.dirty, self.pushed) = (false, 0);
        let call = self.vring.publish();
        self.drowse.published(call);
        call
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
        let mut lane = Drowse::default();
        assert_eq!(lane.at_once_max(), AT_ONCE_AWAKE);
        lane.published(true);
        for _ in 1..DROWSY_PUBLISHES {
            lane.published(false);
            assert_eq!(lane.at_once_max(), AT_ONCE_ASLEEP);
        }
        lane.published(false);
        assert_eq!(lane.at_once_max(), AT_ONCE_AWAKE);
    }
}
