//! Reads and writes that threads of the kernel (io-wq) run, because the worker's thread would wait or copy for long while it
//! submits them: those of a file that a program serves, and if other disks share the thread large ones, or all of a file
//! ([`Delegation`](super::portion::Delegation)).
//!
//! Each takes a thread of the kernel for as long as it lasts, so a store has only some of them under way. The others wait
//! here, in their order, for the completion of one that is.

use cleave_blk::OpKind;
use io_uring::squeue::Flags;

use super::Files;
use super::portion::{Delegation, Portion};
use crate::Reactor;
use crate::ops::step::Step;
use crate::reactor::Tenancy;

impl Files {
    /// The bytes that the current step has yet to move. They do not change from its submission to its completion.
    #[inline]
    pub(super) fn step_bytes(&self, index: u16) -> u64 {
        let entry = self.ops.get(index);
        match entry.own.step {
            Step::Direct | Step::Fill | Step::Spill | Step::Zeroes => {
                entry.own.window.len - entry.own.moved
            }
            Step::Idle | Step::Range(_) | Step::Sync => 0,
        }
    }

    /// Decides if threads of the kernel run the current step, and notes it. Returns what they get next.
    #[inline]
    pub(super) fn hand_over(&mut self, index: u16) -> Option<Portion> {
        let (delegation, bytes) = (self.delegation(index), self.step_bytes(index));
        let are_apart = match &self.tenancy {
            Tenancy::Own => false,
            Tenancy::Shared(neighbours) => neighbours.are_apart(),
        };
        let entry = self.ops.get_mut(index);
        let is_read = match entry.own.step {
            Step::Direct => entry.kind == OpKind::Read,
            step => step == Step::Fill,
        };
        let own = &mut entry.own;
        own.delegated = delegation.takes(bytes, is_read, are_apart);
        own.delegated.then(|| delegation.portion(bytes))
    }

    #[inline]
    pub(super) fn delegation(&self, index: u16) -> Delegation {
        self.leg(self.ops.get(index).leg).delegation
    }

    /// Returns the part of the current step that threads of the kernel move next.
    fn portion(&self, index: u16) -> Portion {
        self.delegation(index).portion(self.step_bytes(index))
    }

    /// Ends the portion that has completed, if the step was submitted in portions or delegated.
    #[inline]
    pub(super) fn portion_completed(&mut self, index: u16) {
        self.ops.show_all(index);
        if std::mem::take(&mut self.ops.get_mut(index).own.delegated) {
            let portion = self.portion(index);
            self.delegated.end(portion);
        }
    }

    /// Submits a portion that has been counted.
    pub(super) fn delegate(&mut self, reactor: &mut Reactor, index: u16, portion: Portion) {
        if self.ops.get(index).own.step == Step::Direct {
            self.ops.show_first(index, portion.bytes);
        }
        let entry = self.submission(index, portion.bytes).flags(Flags::ASYNC);
        if !self.submit(reactor, index, entry, false) {
            // It is issued anew, maybe by this thread, which moves all of it at once.
            self.ops.show_all(index);
            self.delegated.end(portion);
        }
    }

    /// Submits the steps that waited, as far as they may be under way now.
    #[inline]
    pub(super) fn serve_delegated(&mut self, reactor: &mut Reactor) {
        while let Some(&index) = self.delegated.waiting.front() {
            let portion = self.portion(index);
            if !self.delegated.fits(portion) {
                return;
            }
            self.delegated.waiting.pop_front();
            self.delegated.count(portion);
            self.delegate(reactor, index, portion);
        }
    }
}
