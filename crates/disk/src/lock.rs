//! Serialises read-modify-write against other writes of the same blocks, across the engines of a disk.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// log2 of the bytes of one region; a typical write touches one or two.
const REGION_SHIFT: u32 = 20;
/// Entries of the table. Regions this many apart share an entry. 4 KiB of memory per disk.
const ENTRIES: usize = 1024;

/// The entry has an exclusive holder.
const EXCLUSIVE: u32 = 1 << 31;
/// The bits below count shared holders: more than all ops of all engines together.
const SHARED_MASK: u32 = (1 << 16) - 1;
/// A holder of the entry will never release it.
const LOST: u32 = 1 << 28;
/// One unit of patience; see `RangeLocks`.
const PATIENCE_ONE: u32 = 1 << 16;
/// The bits that count patience.
const PATIENCE_MASK: u32 = 0xfff << 16;

/// Try-locks over hashed regions of the disk, used only if `offset_align_bytes` > 512, so that a disk of
/// 512-byte blocks pays nothing. A writer that needs no read-modify-write holds its regions shared; a
/// read-modify-write holds them exclusively. Nothing blocks: a failed attempt is repeated later. A waiting
/// exclusive holder keeps new shared holders out, so neither side starves.
///
/// An exclusive attempt that fails leaves *patience* on all its entries: that many shared attempts are
/// refused there, so that the shared holders drain. Every attempt renews the patience. Nobody has to remove
/// it: if the waiter never returns, the refused attempts use it up.
///
/// A holder of which nothing can be said any more marks its entries as *lost*, so that nobody waits for it. It does not release them,
/// because the kernel may still write there.
///
/// An op must take its whole range in one call: an op that held an entry and asked for the same entry again
/// would wait for itself.
pub struct RangeLocks {
    /// In each entry: the EXCLUSIVE and the LOST bit, patience, and the count of shared holders.
    entries: Box<[AtomicU32]>,
}

impl fmt::Debug for RangeLocks {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("RangeLocks").finish_non_exhaustive()
    }
}

impl Default for RangeLocks {
    fn default() -> RangeLocks {
        RangeLocks {
            entries: (0..ENTRIES).map(|_| AtomicU32::new(0)).collect(),
        }
    }
}

/// Taking and releasing. Regions are derived from the byte range.
impl RangeLocks {
    /// Takes a shared lock on every region that the range touches, or on none.
    pub fn try_shared(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        for (taken, entry) in self.touched(offset_bytes, len_bytes).enumerate() {
            if !take_shared(entry) {
                self.touched(offset_bytes, len_bytes)
                    .take(taken)
                    .for_each(give_shared);
                return false;
            }
        }
        true
    }

    /// Takes an exclusive lock on every region that the range touches, or on none.
    pub fn try_exclusive(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        for (taken, entry) in self.touched(offset_bytes, len_bytes).enumerate() {
            if !take_exclusive(entry) {
                self.touched(offset_bytes, len_bytes)
                    .take(taken)
                    .for_each(give_exclusive);
                // On all of them, including free ones; otherwise shared holders could always enter the first while
                // the last drains, and the writer would never get all.
                if !self.is_lost_to_exclusive(offset_bytes, len_bytes) {
                    self.touched(offset_bytes, len_bytes).for_each(ask_patience);
                }
                return false;
            }
        }
        true
    }

    /// Releases a shared lock.
    pub fn release_shared(&self, offset_bytes: u64, len_bytes: u64) {
        self.touched(offset_bytes, len_bytes).for_each(give_shared);
    }

    /// Releases an exclusive lock.
    pub fn release_exclusive(&self, offset_bytes: u64, len_bytes: u64) {
        self.touched(offset_bytes, len_bytes)
            .for_each(give_exclusive);
    }

    /// Notes that whoever holds a lock on this range never releases it.
    pub fn lose(&self, offset_bytes: u64, len_bytes: u64) {
        self.touched(offset_bytes, len_bytes).for_each(|entry| {
            entry.fetch_or(LOST, Ordering::Relaxed);
        });
    }

    /// Returns true if no shared lock on this range can be had any more.
    pub fn is_lost_to_shared(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        const MASK: u32 = LOST | EXCLUSIVE;
        self.touched(offset_bytes, len_bytes)
            .any(|entry| entry.load(Ordering::Relaxed) & MASK == MASK)
    }

    /// Returns true if no exclusive lock on this range can be had any more.
    pub fn is_lost_to_exclusive(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        self.touched(offset_bytes, len_bytes)
            .any(|entry| entry.load(Ordering::Relaxed) & LOST != 0)
    }

    /// Returns the entries of a range, each once, in ascending order. Because the order is always the same, concurrent attempts
    /// on overlapping sets cannot keep refusing each other: the one that got furthest is stopped only by a holder that will
    /// finish.
    fn touched(&self, offset_bytes: u64, len_bytes: u64) -> impl Iterator<Item = &AtomicU32> {
        let (wrapped, first) = touched_ranges(offset_bytes, len_bytes);
        let of = |range: Range<usize>| self.entries.get(range).unwrap_or(&[]).iter();
        of(wrapped).chain(of(first))
    }
}

/// Returns the entries of a byte range as two ascending ranges of indices. Adjacent regions have adjacent entries, so no entry
/// occurs twice unless the range is longer than the table, where it is cut. For example regions 1022..=1025 are entries 0..2 and
/// 1022..1024.
fn touched_ranges(offset_bytes: u64, len_bytes: u64) -> (Range<usize>, Range<usize>) {
    let first = offset_bytes >> REGION_SHIFT;
    let last = offset_bytes.saturating_add(len_bytes.saturating_sub(1)) >> REGION_SHIFT;
    let count = (last - first).saturating_add(1);
    if count >= ENTRIES as u64 {
        return (0..0, 0..ENTRIES);
    }
    let start = (first % ENTRIES as u64) as usize;
    let end = start + count as usize;
    (0..end.saturating_sub(ENTRIES), start..end.min(ENTRIES))
}

// Orderings: taking is Acquire and releasing is Release, so that everything that an op did before it released
// an entry (its completed I/O, its writes to a block cache) happens before the actions of the next holder.
// Other read-modify-write operations on the entry, such as a refused attempt that lowers patience, continue
// the release sequence and do not break that. Refusals and patience carry no data: Relaxed.

fn take_shared(entry: &AtomicU32) -> bool {
    let mut now = entry.load(Ordering::Relaxed);
    loop {
        let refused = now & (EXCLUSIVE | PATIENCE_MASK) != 0 || now & SHARED_MASK == SHARED_MASK;
        let next = match (refused, now & PATIENCE_MASK) {
            (false, _) => now + 1,
            (true, 0) => return false,
            (true, _) => now - PATIENCE_ONE,
        };
        match entry.compare_exchange_weak(now, next, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return !refused,
            Err(seen) => now = seen,
        }
    }
}

fn take_exclusive(entry: &AtomicU32) -> bool {
    let mut now = entry.load(Ordering::Relaxed);
    while now & (EXCLUSIVE | SHARED_MASK) == 0 {
        // This clears the patience. If it was another waiter's, that waiter renews it at its next attempt.
        match entry.compare_exchange_weak(now, EXCLUSIVE, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(seen) => now = seen,
        }
    }
    false
}

fn ask_patience(entry: &AtomicU32) {
    entry.fetch_or(PATIENCE_MASK, Ordering::Relaxed);
}

fn give_shared(entry: &AtomicU32) {
    let was = entry.fetch_sub(1, Ordering::Release);
    debug_assert_ne!(was & SHARED_MASK, 0, "a shared lock released twice");
}

fn give_exclusive(entry: &AtomicU32) {
    let was = entry.fetch_and(!EXCLUSIVE, Ordering::Release);
    debug_assert_ne!(was & EXCLUSIVE, 0, "an exclusive lock released twice");
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicI64;
    use std::thread;

    use super::*;

    const REGION: u64 = 1 << REGION_SHIFT;

    #[test]
    fn ranges_map_to_entries() {
        for (offset, len, wrapped, first) in [
            (0, 0, 0..0, 0..1),
            (0, 1, 0..0, 0..1),
            (0, REGION, 0..0, 0..1),
            (REGION - 1, 2, 0..0, 0..2),
            (1023 * REGION, REGION, 0..0, 1023..1024),
            (1022 * REGION, 4 * REGION, 0..2, 1022..1024),
            (1024 * REGION, 1, 0..0, 0..1),
            (5 * REGION, 1023 * REGION, 0..4, 5..1024),
            (5 * REGION, 1024 * REGION, 0..0, 0..1024),
            (0, u64::MAX, 0..0, 0..1024),
            (u64::MAX, u64::MAX, 0..0, 1023..1024),
            (u64::MAX - 1, 0, 0..0, 1023..1024),
        ] {
            assert_eq!(
                touched_ranges(offset, len),
                (wrapped, first),
                "{offset} {len}"
            );
        }
    }

    #[test]
    fn shared_and_exclusive_exclude_each_other() {
        let locks = RangeLocks::default();
        assert!(locks.try_shared(0, 4096));
        assert!(locks.try_shared(0, 4096));
        assert!(!locks.try_exclusive(REGION - 1, 2));
        locks.release_shared(0, 4096);
        assert!(!locks.try_exclusive(0, 1));
        locks.release_shared(0, 4096);
        assert!(locks.try_exclusive(0, 1));
        assert!(!locks.try_exclusive(512, 1), "same region");
        assert!(!locks.try_shared(512, 1), "same region");
        assert!(!locks.try_shared(1024 * REGION, 1), "same entry");
        assert!(locks.try_exclusive(2 * REGION, 1), "another region");
        locks.release_exclusive(2 * REGION, 1);
        locks.release_exclusive(0, 1);
    }

    #[test]
    fn a_refused_try_holds_nothing() {
        let locks = RangeLocks::default();
        assert!(locks.try_exclusive(3 * REGION, 1));
        assert!(!locks.try_shared(0, 4 * REGION));
        assert!(!locks.try_exclusive(0, 4 * REGION));
        for region in 0..3 {
            assert!(locks.try_exclusive(region * REGION, 1), "{region}");
        }
    }

    #[test]
    fn a_range_longer_than_the_table_does_not_wait_for_itself() {
        let locks = RangeLocks::default();
        assert!(locks.try_exclusive(7, u64::MAX));
        assert!(!locks.try_shared(12 * REGION, 1));
        locks.release_exclusive(7, u64::MAX);
        assert!(locks.try_shared(0, u64::MAX));
        assert!(locks.try_shared(0, u64::MAX));
        locks.release_shared(0, u64::MAX);
        locks.release_shared(0, u64::MAX);
        assert!(
            locks
                .entries
                .iter()
                .all(|entry| entry.load(Ordering::Relaxed) == 0)
        );
    }

    #[test]
    fn an_exclusive_waiter_keeps_new_shared_holders_out() {
        let locks = RangeLocks::default();
        assert!(locks.try_shared(REGION, 1));
        assert!(!locks.try_exclusive(0, 2 * REGION));
        assert!(!locks.try_shared(REGION, 1), "the contended region");
        assert!(!locks.try_shared(0, 1), "the free region of the same wait");
        locks.release_shared(REGION, 1);
        assert!(locks.try_exclusive(0, 2 * REGION));
        locks.release_exclusive(0, 2 * REGION);
        assert!(locks.try_shared(0, 2 * REGION), "the wait is over");
    }

    #[test]
    fn an_abandoned_wait_expires() {
        let locks = RangeLocks::default();
        assert!(locks.try_shared(0, 1));
        assert!(!locks.try_exclusive(0, 1));
        let refused = (0..10_000).take_while(|_| !locks.try_shared(0, 1)).count();
        assert_eq!(refused, 4095);
    }

    #[test]
    fn count_of_shared_holders_does_not_overflow() {
        let locks = RangeLocks::default();
        for _ in 0..SHARED_MASK {
            assert!(locks.try_shared(0, 1));
        }
        assert!(!locks.try_shared(0, 1));
        locks.release_shared(0, 1);
        assert!(locks.try_shared(0, 1));
    }

    /// Only what can never be had counts as lost, and an attempt to get that keeps nobody else out.
    #[test]
    fn a_lost_lock_is_lost_to_those_that_it_excludes() {
        let locks = RangeLocks::default();
        assert!(locks.try_shared(0, 1) && locks.try_exclusive(REGION, 1));
        locks.lose(0, 1);
        locks.lose(REGION, 1);
        for (offset, len, shared, exclusive) in [
            (0, 1, false, true),
            (REGION, 1, true, true),
            (0, 2 * REGION, true, true),
            (REGION, 2 * REGION, true, true),
            (2 * REGION, 1, false, false),
        ] {
            let lost = (
                locks.is_lost_to_shared(offset, len),
                locks.is_lost_to_exclusive(offset, len),
            );
            assert_eq!(lost, (shared, exclusive), "{offset} {len}");
            assert_eq!(locks.try_exclusive(offset, len), !exclusive);
            if !exclusive {
                locks.release_exclusive(offset, len);
            }
            assert_eq!(locks.try_shared(offset, len), !shared);
            if !shared {
                locks.release_shared(offset, len);
            }
        }
    }

    /// Threads take overlapping locks of both kinds; `inside` shows the holders of each region (> 0: shared,
    /// -1: exclusive). Every thread must finish.
    #[test]
    fn threads_exclude_each_other_and_all_finish() {
        let seed = 0x5eed_0001_u64;
        println!("seed {seed:#x}");
        let locks = RangeLocks::default();
        let inside: Vec<AtomicI64> = (0..4).map(|_| AtomicI64::new(0)).collect();
        thread::scope(|scope| {
            for thread in 0..4 {
                let (locks, inside) = (&locks, &inside);
                scope.spawn(move || {
                    let mut state = seed.wrapping_mul(2 * thread + 1);
                    for _ in 0..2_000 {
                        state = state
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1);
                        let first = (state >> 40) % 4;
                        let count = 1 + (state >> 50) % (4 - first);
                        // Every second time one table length further, so that entries are shared too.
                        let offset = (first + 1024 * ((state >> 60) & 1)) * REGION;
                        let exclusive = (state >> 30).is_multiple_of(3);
                        turn(
                            locks,
                            inside,
                            (offset, first as usize, count as usize),
                            exclusive,
                        );
                    }
                });
            }
        });
        assert!(
            locks
                .entries
                .iter()
                .all(|entry| entry.load(Ordering::Relaxed) & !PATIENCE_MASK == 0)
        );
    }

    fn turn(
        locks: &RangeLocks,
        inside: &[AtomicI64],
        (offset, first, count): (u64, usize, usize),
        exclusive: bool,
    ) {
        let len = count as u64 * REGION;
        let regions = &inside[first..first + count];
        if exclusive {
            while !locks.try_exclusive(offset, len) {
                thread::yield_now();
            }
            for region in regions {
                assert_eq!(region.swap(-1, Ordering::Relaxed), 0, "not alone");
            }
            thread::yield_now();
            for region in regions {
                assert_eq!(region.swap(0, Ordering::Relaxed), -1, "not alone");
            }
            locks.release_exclusive(offset, len);
        } else {
            while !locks.try_shared(offset, len) {
                thread::yield_now();
            }
            for region in regions {
                assert!(region.fetch_add(1, Ordering::Relaxed) >= 0, "not shared");
            }
            thread::yield_now();
            for region in regions {
                assert!(region.fetch_sub(1, Ordering::Relaxed) >= 1, "not shared");
            }
            locks.release_shared(offset, len);
        }
    }
}
