//! The share of a store's reads and writes that threads of the kernel move at a time, and the ops that wait for their turn.

use std::collections::VecDeque;

use cleave_disk::{FileKind, Leg};

use crate::LAP_BYTES_MAX;
use crate::reactor::Tenancy;

/// Most of them under way at a time.
const OPS_MAX: usize = 64;
/// Most bytes that they copy at a time. Copies need CPUs, which other disks need too.
const COPIED_MAX: u64 = 4 << 20;
/// Longest copy at once: a kernel without preemption runs nothing else on that CPU meanwhile.
const COPY_BYTES_MAX: u64 = 512 << 10;
/// Shortest read or write that is left to the kernel's threads for its length. To hand over a shorter one costs more than it takes.
const DELEGATED_MIN: u64 = 128 << 10;
/// Most bytes at once past the page cache of a file that may have holes, which the kernel fills with zeroes as it submits a read.
const HOLE_BYTES_MAX: u64 = 1 << 20;
/// They count as so many times fewer copied bytes: the device moves what is not a hole, and zeroes take less time than a copy.
const HOLE_SHARE: u64 = 4;
/// Most bytes past the page cache of a file that a thread submits at once if other disks share it. Guests make no longer requests by
/// themselves (Linux 1.25 MiB, in newer versions 4 MiB), so theirs stay whole.
const OWN_BYTES_MAX: u64 = 4 << 20;
/// They count as so many times fewer copied bytes, so that a lap has 4 MiB of them. A file system has the thread wait for the device
/// when that has no free tag; then this bounds the wait.
const OWN_SHARE: u64 = OWN_BYTES_MAX / LAP_BYTES_MAX;

/// Bytes that a step may submit at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Portion {
    pub(super) bytes: u64,
    /// Those of them that are copied from or to the page cache, or as long as that takes.
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

/// The next action of an op that waits for the next lap.
#[derive(Debug, Clone, Copy)]
pub(super) enum Postponed {
    /// Submits its step.
    Issue,
    /// Begins its next step with a copy.
    Proceed,
    /// Takes the result of its step, and copies if that is a success.
    Take(i32),
}

/// Which reads and writes of a leg threads of the kernel run, because the submitting thread would wait or work for long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Delegation {
    /// None.
    Nothing,
    /// All: they wait for the program that serves the file.
    Waits,
    /// Those that copy at least so much from or to the page cache, or may do so.
    Copies { reads_from: u64, writes_from: u64 },
    /// Large reads of what may be a hole, which the kernel fills. Writes are left to this thread, a part in each lap: some kernels
    /// run those of a file one after the other.
    Holes,
}

impl Delegation {
    /// Chooses for a leg.
    pub(super) fn of(leg: &Leg, kind: FileKind, tenancy: &Tenancy) -> Delegation {
        let copies = |reads_from, writes_from| Delegation::Copies {
            reads_from,
            writes_from,
        };
        match (tenancy, kind) {
            _ if leg.is_cached() && leg.has_server() => copies(0, 0),
            _ if leg.has_server() => Delegation::Waits,
            (Tenancy::Shared(_), _) if leg.is_cached() => copies(DELEGATED_MIN, DELEGATED_MIN),
            // Only the file system knows what a write past the page cache does there, and how long the submitting thread waits for it.
            (Tenancy::Shared(_), _) if leg.caches_writes() => copies(DELEGATED_MIN, 0),
            (Tenancy::Shared(_), FileKind::Regular) => Delegation::Holes,
            (Tenancy::Shared(_), FileKind::BlockDevice) | (Tenancy::Own, _) => Delegation::Nothing,
        }
    }

    /// Returns true if threads of the kernel are to run a step that has so many bytes left. `are_apart`: the thread has disks
    /// elsewhere ([`Neighbours`](crate::Neighbours)), which must not wait for a free tag of this device. Only a block device past
    /// the page cache refuses instead of waiting: a file system does not pass that wish on (iomap drops NOWAIT), and neither does
    /// the page cache when it reads ahead.
    #[inline]
    pub(super) fn takes(self, bytes_left: u64, is_read: bool, are_apart: bool) -> bool {
        bytes_left > 0
            && match self {
                Delegation::Nothing => false,
                Delegation::Waits => true,
                Delegation::Copies {
                    reads_from,
                    writes_from,
                } => are_apart || bytes_left >= if is_read { reads_from } else { writes_from },
                Delegation::Holes => are_apart || is_read && bytes_left >= DELEGATED_MIN,
            }
    }

    /// Returns what a step that has so many bytes left moves next if this thread submits it.
    #[inline]
    pub(super) fn own_portion(self, bytes_left: u64) -> Portion {
        match self {
            Delegation::Nothing | Delegation::Waits => Portion {
                bytes: bytes_left,
                copied: 0,
            },
            Delegation::Copies { .. } => Portion::copy(bytes_left),
            Delegation::Holes => {
                let bytes = bytes_left.min(OWN_BYTES_MAX);
                let copied = bytes / OWN_SHARE;
                Portion { bytes, copied }
            }
        }
    }

    /// Returns what a step that has so many bytes left submits next to threads of the kernel.
    pub(super) fn portion(self, bytes_left: u64) -> Portion {
        match self {
            Delegation::Nothing | Delegation::Waits => Portion {
                bytes: bytes_left,
                copied: 0,
            },
            Delegation::Copies { .. } => Portion::copy(bytes_left.min(COPY_BYTES_MAX)),
            Delegation::Holes => {
                let bytes = bytes_left.min(HOLE_BYTES_MAX);
                let copied = bytes / HOLE_SHARE;
                Portion { bytes, copied }
            }
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
    #[cfg(test)]
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
    fn short_reads_and_all_writes_are_submitted_directly_unless_disks_are_apart() {
        let copies = |writes_from| Delegation::Copies {
            reads_from: 1 << 17,
            writes_from,
        };
        for (delegation, is_read, long) in [
            (copies(1 << 17), true, true),
            (copies(1 << 17), false, true),
            (copies(0), true, true),
            (Delegation::Holes, true, true),
            (Delegation::Holes, false, false),
            (Delegation::Nothing, true, false),
        ] {
            let is_something = delegation != Delegation::Nothing;
            for (bytes, alone, apart) in [
                (0, false, false),
                ((1 << 17) - 1, false, is_something),
                (1 << 17, long, is_something),
            ] {
                let takes = |apart| delegation.takes(bytes, is_read, apart);
                assert_eq!(
                    (takes(false), takes(true)),
                    (alone, apart),
                    "{delegation:?} {bytes}"
                );
            }
        }
        assert!(Delegation::Waits.takes(1, false, false));
        assert!(copies(0).takes(1, false, false));
    }

    #[test]
    fn a_thread_submits_little_at_once_where_a_file_system_may_have_it_wait() {
        const GIB: u64 = 1 << 30;
        let copies = Delegation::Copies {
            reads_from: GIB,
            writes_from: GIB,
        };
        for (delegation, left, bytes, copied) in [
            (Delegation::Nothing, GIB, GIB, 0),
            (Delegation::Waits, GIB, GIB, 0),
            (copies, 4096, 4096, 4096),
            (Delegation::Holes, 0, 0, 0),
            (Delegation::Holes, 4096, 4096, 256),
            (Delegation::Holes, 4 << 20, 4 << 20, LAP_BYTES_MAX),
            (Delegation::Holes, GIB, 4 << 20, LAP_BYTES_MAX),
        ] {
            let portion = delegation.own_portion(left);
            assert_eq!(portion, Portion { bytes, copied }, "{delegation:?} {left}");
        }
    }

    #[test]
    fn neither_many_ops_nor_many_copied_bytes_are_under_way_at_a_time() {
        let direct = Portion {
            bytes: 1 << 30,
            copied: 0,
        };
        let of = |delegation: Delegation| delegation.portion(1 << 30);
        let copies = Delegation::Copies {
            reads_from: 0,
            writes_from: 0,
        };
        assert_eq!(of(Delegation::Waits), direct);
        for (portion, most) in [
            (direct, OPS_MAX),
            (of(copies), 8),
            (of(Delegation::Holes), 16),
        ] {
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
