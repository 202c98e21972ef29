//! Reads and writes that threads of the kernel (io-wq) run, because the worker's thread would wait or copy for long while it
//! submits them: those of a file that a program serves, and if other disks share the thread all but those of a block device past
//! the page cache ([`Delegation`](super::portion::Delegation)).
//!
//! Each takes a thread of the kernel for as long as it lasts, so a store has only some of them under way. The others wait
//! here, in their order, for the completion of one that is.

use io_uring::squeue::Flags;

use super::Files;
use super::portion::Portion;
use crate::Reactor;
use crate::ops::step::Step;

impl Files {
    /// The bytes that the current step has yet to move. They do not change from its submission to its completion.
    #[inline]
    fn step_bytes(&self, index: u16) -> u64 {
        let entry = self.ops.get(index);
        match entry.own.step {
            Step::Direct | Step::Fill | Step::Spill | Step::Zeroes => {
                entry.own.window.len - entry.own.moved
            }
            Step::Idle | Step::Range(_) | Step::Sync => 0,
        }
    }

    /// What the current step submits next, if the kernel's threads are to move it.
    #[inline]
    pub(super) fn portion(&self, index: u16) -> Option<Portion> {
        let delegation = self.leg(self.ops.get(index).leg).delegation;
        delegation.portion(self.step_bytes(index))
    }

    /// Counts the completion of a step that may have been delegated.
    #[inline]
    pub(super) fn delegated_completed(&mut self, index: u16) {
        if !self.delegated.is_idle()
            && let Some(portion) = self.portion(index)
        {
            self.ops.show_all(index);
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
            self.delegated.end(portion);
        }
    }

    /// Submits the steps that waited, as far as they may be under way now.
    #[inline]
    pub(super) fn serve_delegated(&mut self, reactor: &mut Reactor) {
        while let Some(&index) = self.delegated.waiting.front() {
            let portion = self.portion(index).unwrap_or_default();
            if !self.delegated.fits(portion) {
                return;
            }
            self.delegated.waiting.pop_front();
            self.delegated.count(portion);
            self.delegate(reactor, index, portion);
        }
    }
}
