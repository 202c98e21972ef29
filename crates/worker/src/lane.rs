//! One vring in the hands of a worker.

use std::sync::mpsc::SyncSender;

use cleave_guest::Vring;

use crate::command::VringStart;
use crate::slots::Slots;

/// Where a vring is in its life with a worker.
#[derive(Debug)]
pub(crate) enum State {
    /// Served.
    Running,
    /// Kept, not served; what is in flight still ends.
    Disabled,
    /// Broken by the guest: never served again, kept until control stops it.
    Retired,
    /// Control waits for what is in flight, then for the position.
    Stopping(SyncSender<Option<u16>>),
}

/// A vring, its requests in flight and its life.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) index: u16,
    pub(crate) vring: Vring,
    pub(crate) slots: Slots,
    pub(crate) features: u64,
    pub(crate) has_kick: bool,
    pub(crate) state: State,
    /// Entries were pushed since the last publish.
    pub(crate) dirty: bool,
}

impl Lane {
    /// Takes a vring over; its descriptors have gone to the engine.
    pub(crate) fn new(start: VringStart) -> Lane {
        Lane {
            index: start.index,
            slots: Slots::new(start.vring.size()),
            vring: start.vring,
            features: start.features,
            has_kick: start.kick.is_some(),
            state: if start.enabled {
                State::Running
            } else {
                State::Disabled
            },
            dirty: false,
        }
    }

    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.state, State::Running)
    }

    /// Control waits, and nothing is left to wait for.
    pub(crate) fn is_drained(&self) -> bool {
        matches!(self.state, State::Stopping(_)) && self.slots.taken() == 0 && !self.dirty
    }

    #[inline]
    pub(crate) fn push_used(&mut self, head: u16, used_bytes: u32) {
        self.vring.push_used(head, used_bytes);
        self.dirty = true;
    }
}
