//! Counters and latencies of each leg of a stripe.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cleave_blk::OpKind;

use super::table::Entry;

/// Counters of one leg. One engine writes them with plain loads and stores; any thread may read them.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct LegStats {
    reads: AtomicU64,
    writes: AtomicU64,
    others: AtomicU64,
    bytes: AtomicU64,
    failed: AtomicU64,
    latency_ns: AtomicU64,
    latency_max_ns: AtomicU64,
}

/// The values of [`LegStats`] at one moment, or their sums over engines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LegTotals {
    /// Successful reads.
    pub reads: u64,
    /// Successful writes.
    pub writes: u64,
    /// Successful syncs, discards and zeroings.
    pub others: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Failed ops.
    pub failed: u64,
    /// Sum of the latencies of reads and writes, with the precision of one lap of the worker.
    pub latency_ns: u64,
    /// The longest latency of a read or write.
    pub latency_max_ns: u64,
}

impl LegTotals {
    /// Mean latency of a read or write.
    pub fn latency_mean_ns(&self) -> u64 {
        let moved = self.reads.saturating_add(self.writes);
        self.latency_ns.checked_div(moved).unwrap_or(0)
    }
}

impl std::ops::AddAssign for LegTotals {
    fn add_assign(&mut self, other: LegTotals) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.others += other.others;
        self.bytes += other.bytes;
        self.failed += other.failed;
        self.latency_ns = self.latency_ns.saturating_add(other.latency_ns);
        self.latency_max_ns = self.latency_max_ns.max(other.latency_max_ns);
    }
}

impl LegStats {
    /// Reads all counters.
    pub fn totals(&self) -> LegTotals {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LegTotals {
            reads: read(&self.reads),
            writes: read(&self.writes),
            others: read(&self.others),
            bytes: read(&self.bytes),
            failed: read(&self.failed),
            latency_ns: read(&self.latency_ns),
            latency_max_ns: read(&self.latency_max_ns),
        }
    }

    fn ended(&self, kind: OpKind, len: u64, latency_ns: u64, result: Result<(), i32>) {
        if result.is_err() {
            return add(&self.failed, 1);
        }
        match kind {
            OpKind::Read => add(&self.reads, 1),
            OpKind::Write { .. } => add(&self.writes, 1),
            OpKind::Sync | OpKind::Discard | OpKind::Zero { .. } => return add(&self.others, 1),
        }
        add(&self.bytes, len);
        add(&self.latency_ns, latency_ns);
        if latency_ns > self.latency_max_ns.load(Ordering::Relaxed) {
            self.latency_max_ns.store(latency_ns, Ordering::Relaxed);
        }
    }
}

/// Adds to a counter that only this thread writes, so no locked instruction is needed.
fn add(counter: &AtomicU64, n: u64) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(n);
    counter.store(sum, Ordering::Relaxed);
}

/// An engine's counters. A disk of one leg is not counted here, because the worker's own counters cover it.
///
/// The clock is read once a lap, after the kernel was entered, and every op that is pushed or completes
/// before the next reading gets that time. An op during which the worker sleeps is timed from the lap that
/// submitted it to the lap that reaped it.
#[derive(Debug)]
pub(crate) struct Tally {
    stats: Arc<[LegStats]>,
    start: Instant,
    now_ns: u64,
}

impl Tally {
    pub(crate) fn new(legs: usize) -> Tally {
        let counted = if legs > 1 { legs } else { 0 };
        Tally {
            stats: (0..counted).map(|_| LegStats::default()).collect(),
            start: Instant::now(),
            now_ns: 0,
        }
    }

    pub(crate) fn stats(&self) -> Arc<[LegStats]> {
        self.stats.clone()
    }

    #[inline]
    pub(crate) fn tick(&mut self) {
        if !self.stats.is_empty() {
            self.now_ns = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        }
    }

    #[inline]
    pub(crate) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    #[inline]
    pub(crate) fn ended<T>(&self, entry: &Entry<T>, result: Result<(), i32>) {
        if let Some(leg) = self.stats.get(usize::from(entry.leg)) {
            let latency_ns = self.now_ns.saturating_sub(entry.begun_ns);
            leg.ended(entry.kind, entry.len, latency_ns, result);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_of_one_leg_is_not_counted() {
        let mut tally = Tally::new(1);
        tally.tick();
        assert_eq!((tally.stats().len(), tally.now_ns()), (0, 0));
    }

    #[test]
    fn ops_are_counted_on_their_leg() {
        let mut tally = Tally::new(2);
        tally.now_ns = 5_000;
        let write = OpKind::Write { durable: false };
        for (kind, len, begun_ns, result) in [
            (OpKind::Read, 4096, 1_000, Ok(())),
            (write, 8192, 4_000, Ok(())),
            (OpKind::Sync, 0, 0, Ok(())),
            (OpKind::Read, 512, 0, Err(5)),
        ] {
            let mut entry = Entry::new(0, kind, 0, len, ());
            (entry.leg, entry.begun_ns) = (1, begun_ns);
            tally.ended(&entry, result);
        }
        assert_eq!(tally.stats[0].totals(), LegTotals::default());
        let totals = tally.stats[1].totals();
        assert_eq!((totals.reads, totals.writes, totals.others), (1, 1, 1));
        assert_eq!((totals.bytes, totals.failed), (12_288, 1));
        assert_eq!((totals.latency_ns, totals.latency_max_ns), (5_000, 4_000));
        assert_eq!(totals.latency_mean_ns(), 2_500);
        tally.tick();
        assert_ne!(tally.now_ns(), 5_000);
    }
}
