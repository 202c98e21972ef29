//! The share of a store's reads and writes that threads of the kernel move at a time, and the ops that wait for their turn.

use std::collections::VecDeque;

use cleave_disk::Leg;

use crate::reactor::Tenancy;

/// Most of them under way at a time.
const OPS_MAX: usize = 64;
/// Most bytes that they copy at a time. Copies need CPUs, which other disks need too.
const COPIED_MAX: u64 = 4 << 20;
/// Longest copy at once: a kernel without preemption runs nothing else on that CPU meanwhile.
pub(super) const COPY_BYTES_MAX: u64 = 512 << 10;
/// Shortest copy that is left to the kernel's threads on a thread that disks share. To hand over a shorter one costs more
/// than it takes.
const COPY_BYTES_MIN: u64 = 128 << 10;

/// Bytes that a step may submit at once to the kernel's threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Portion {
    pub(super) bytes: u64,
    /// Those of them that are copied from or to the page cache.
    pub(super) copied: u64,
}

impl Portion {
    pub(super) fn copy(bytes: u64) -> Portion {
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
    pub(super) waiting: VecDeque<u16>,
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

    pub(super) fn fits(&self, portion: Portion) -> bool {
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

    pub(super) fn count(&mut self, portion: Portion) {
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
