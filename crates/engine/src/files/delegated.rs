//! Reads and writes that threads of the kernel (io-wq) run, because the worker's thread would wait or copy for long while it
//! submits them: those of a file that a program serves, and large ones through the page cache if other disks share the
//! thread.
//!
//! Each takes a thread of the kernel for as long as it lasts, so a store has only some of them under way. The others wait
//! here, in their order, for the completion of one that is.

use std::collections::VecDeque;

use cleave_disk::Leg;
use io_uring::squeue::Flags;

use super::Files;
use crate::Reactor;
use crate::reactor::Tenancy;
use crate::table::Step;

/// Most of them under way at a time.
const OPS_MAX: usize = 64;
/// Most bytes that they copy at a time. Copies need CPUs, which other disks need too.
const COPIED_MAX: u64 = 4 << 20;
/// Longest copy at once: a kernel without preemption runs nothing else on that CPU meanwhile.
const COPY_BYTES_MAX: u64 = 512 << 10;
/// Shortest copy that is left to the kernel's threads on a thread that disks share. To hand over a shorter one costs more
/// than it takes.
const COPY_BYTES_MIN: u64 = 128 << 10;

/// What a step may submit at once to the kernel's threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Portion {
    pub(super) bytes: u64,
    /// Those of them that are copied from or to the page cache.
    copied: u64,
}

impl Portion {
    fn copy(bytes: u64) -> Portion {
        Portion {
            bytes,
            copied: bytes,
        }
    }
}

#[derive(Debug)]
pub(super) struct Delegated {
    ops: usize,
    copied: u64,
    /// Ops whose step has yet to be submitted.
    waiting: VecDeque<u16>,
}

/// The length from which on reads and writes of a leg are left to the kernel's threads.
pub(super) fn delegates_from(leg: &Leg, cached: bool, tenancy: Tenancy) -> u64 {
    match (leg.has_server(), tenancy) {
        (true, _) => 0,
        (false, Tenancy::Shared) if cached => COPY_BYTES_MIN,
        (false, Tenancy::Shared | Tenancy::Own) => u64::MAX,
    }
}

impl Delegated {
    pub(super) fn new(room: usize) -> Delegated {
        Delegated {
            ops: 0,
            copied: 0,
            waiting: VecDeque::with_capacity(room),
        }
    }

    fn fits(&self, portion: Portion) -> bool {
        self.ops < OPS_MAX && self.copied + portion.copied <= COPIED_MAX
    }

    /// Counts a portion that is submitted. `false`: others have to complete before.
    pub(super) fn begin(&mut self, portion: Portion) -> bool {
        let fits = self.waiting.is_empty() && self.fits(portion);
        if fits {
            self.count(portion);
        }
        fits
    }

    fn count(&mut self, portion: Portion) {
        self.ops += 1;
        self.copied += portion.copied;
    }

    /// Counts a portion that has completed.
    pub(super) fn end(&mut self, portion: Portion) {
        self.ops = self.ops.saturating_sub(1);
        self.copied = self.copied.saturating_sub(portion.copied);
    }

    /// An op waits for others to complete.
    pub(super) fn wait(&mut self, index: u16) {
        self.waiting.push_back(index);
    }

    /// Nothing is under way or waits.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.ops == 0 && self.waiting.is_empty()
    }

    /// Gives up the ops that wait.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = u16> + '_ {
        self.waiting.drain(..)
    }
}

impl Files {
    /// The bytes that the current step has yet to move. They do not change from its submission to its completion.
    #[inline]
    pub(super) fn step_bytes(&self, index: u16) -> u64 {
        let entry = self.table.get(index);
        match entry.step {
            Step::Direct | Step::Fill | Step::Spill | Step::Zeroes => {
                entry.window.len - entry.moved
            }
            Step::Idle | Step::Range(_) | Step::Sync => 0,
        }
    }

    /// What the current step submits next, if the kernel's threads are to move it.
    #[inline]
    pub(super) fn portion(&self, index: u16) -> Option<Portion> {
        let bytes = self.step_bytes(index);
        let facts = &self.leg(self.table.get(index).leg).facts;
        if bytes == 0 || bytes < facts.delegates_from {
            return None;
        }
        Some(match facts.cached {
            true => Portion::copy(bytes.min(COPY_BYTES_MAX)),
            false => Portion { bytes, copied: 0 },
        })
    }

    /// Counts the completion of a step that may have been delegated.
    #[inline]
    pub(super) fn delegated_completed(&mut self, index: u16) {
        if !self.delegated.is_idle()
            && let Some(portion) = self.portion(index)
        {
            self.table.show_all(index);
            self.delegated.end(portion);
        }
    }

    /// Submits a portion that has been counted.
    pub(super) fn delegate(&mut self, reactor: &mut Reactor, index: u16, portion: Portion) {
        if self.table.get(index).step == Step::Direct {
            self.table.show_first(index, portion.bytes);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_many_ops_nor_many_copied_bytes_are_under_way_at_a_time() {
        let direct = Portion {
            bytes: 1 << 30,
            copied: 0,
        };
        let copy = Portion::copy(COPY_BYTES_MAX);
        for (portion, most) in [(direct, OPS_MAX), (copy, 8)] {
            let mut delegated = Delegated::new(4);
            let begun = (0..1000).take_while(|_| delegated.begin(portion)).count();
            assert_eq!(begun, most, "{portion:?}");
            delegated.end(portion);
            assert!(delegated.begin(portion) && !delegated.begin(portion));
            (0..most).for_each(|_| delegated.end(portion));
            assert!(delegated.is_idle());
        }
    }

    #[test]
    fn an_op_does_not_overtake_those_that_wait() {
        let mut delegated = Delegated::new(4);
        delegated.wait(7);
        assert!(!delegated.begin(Portion::copy(1)) && !delegated.is_idle());
        assert_eq!(delegated.drain().collect::<Vec<_>>(), [7]);
        assert!(delegated.begin(Portion::copy(1)));
    }
}
