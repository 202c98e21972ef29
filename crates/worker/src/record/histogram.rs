//! Log-linear histograms of times: a bucket is the octave of a value and the bits after its leading one.

use std::array::from_fn;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::counter::add;

/// Times are counted in units of 32 ns; no measurement here is more precise.
const UNIT_LOG: u32 = 5;

/// Eight buckets per octave: the error of a quantile is at most 6 %. Covers 0 to 8.6 s; longer times count as
/// the maximum.
pub(crate) type Fine = Histogram<3, 208>;
/// Four buckets per octave, over the same range.
pub(crate) type Coarse = Histogram<2, 108>;

/// A histogram with `1 << SUB_LOG` buckets per octave and `BUCKETS` in total. It has one writer.
#[derive(Debug)]
pub(crate) struct Histogram<const SUB_LOG: u32, const BUCKETS: usize> {
    counts: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

impl<const SUB_LOG: u32, const BUCKETS: usize> Histogram<SUB_LOG, BUCKETS> {
    pub(crate) fn new() -> Self {
        Histogram {
            counts: from_fn(|_| AtomicU64::new(0)),
            sum_ns: AtomicU64::new(0),
        }
    }

    /// Adds `n` times of `ns` each.
    #[inline]
    pub(crate) fn add(&self, ns: u64, n: u64) {
        if let Some(count) = self.counts.get(bucket_of(ns, SUB_LOG).min(BUCKETS - 1)) {
            add(count, n);
            add(&self.sum_ns, ns.wrapping_mul(n));
        }
    }

    /// Returns a snapshot.
    pub(crate) fn read(&self) -> Distribution {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Distribution {
            sub_log: SUB_LOG,
            counts: self.counts.iter().map(read).collect(),
            sum_ns: read(&self.sum_ns),
        }
    }
}

/// Returns the bucket of a time. The first `1 << sub_log` units have one bucket each; every octave above has as many.
///
/// With four buckets per octave: 0–31 ns is 0, 96–127 ns is 3, 128–159 ns is 4, 224–255 ns is 7, and 256–319 ns
/// is 8.
#[inline]
fn bucket_of(ns: u64, sub_log: u32) -> usize {
    let units = ns >> UNIT_LOG;
    let sub = 1 << sub_log;
    if units < sub {
        return units as usize;
    }
    let octave = units.ilog2() - sub_log;
    // (units >> octave) is in sub..2*sub.
    (u64::from(octave) * sub + (units >> octave)) as usize
}

/// Returns the lower bound of a bucket.
fn start_of(bucket: usize, sub_log: u32) -> u64 {
    let (bucket, sub) = (bucket as u64, 1u64 << sub_log);
    if bucket < sub {
        return bucket << UNIT_LOG;
    }
    let octave = bucket / sub - 1;
    (sub + bucket % sub) << octave << UNIT_LOG
}

/// A snapshot of a histogram.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Distribution {
    sub_log: u32,
    counts: Vec<u64>,
    sum_ns: u64,
}

impl Distribution {
    /// Returns the number of times that were added.
    pub fn count(&self) -> u64 {
        self.counts
            .iter()
            .fold(0, |sum: u64, n| sum.wrapping_add(*n))
    }

    /// Returns the sum of the times.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Returns the mean of the times. `None`: the histogram is empty.
    pub fn mean_ns(&self) -> Option<f64> {
        match self.count() {
            0 => None,
            count => Some(self.sum_ns as f64 / count as f64),
        }
    }

    /// Returns the time that this share of the times does not exceed, interpolated within its bucket. `None`: the histogram is
    /// empty.
    pub fn quantile_ns(&self, share: f64) -> Option<f64> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        let rank = share.clamp(0.0, 1.0) * count as f64;
        let mut below = 0.0;
        for (bucket, n) in self.counts.iter().enumerate().filter(|(_, n)| **n > 0) {
            let n = *n as f64;
            let (from, to) = (
                start_of(bucket, self.sub_log),
                start_of(bucket + 1, self.sub_log),
            );
            if below + n >= rank {
                let within = ((rank - below) / n).clamp(0.0, 1.0);
                return Some(from as f64 + (to - from) as f64 * within);
            }
            below += n;
        }
        // Only reached through rounding errors.
        Some(start_of(self.counts.len(), self.sub_log) as f64)
    }

    /// Returns the number of times below a power of two of nanoseconds, from 256 up. Exact, since buckets begin there.
    pub fn below_ns(&self, power: u32) -> u64 {
        let first_above = bucket_of(1 << power, self.sub_log);
        let below = self.counts.iter().take(first_above);
        below.fold(0, |sum: u64, n| sum.wrapping_add(*n))
    }

    /// Returns the buckets that are not empty: lower bound in nanoseconds, and count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        let counts = self.counts.iter().enumerate().filter(|(_, n)| **n > 0);
        counts.map(|(bucket, n)| (start_of(bucket, self.sub_log), *n))
    }

    /// Adds a snapshot of a histogram of the same kind.
    pub fn merge(&mut self, other: &Distribution) {
        debug_assert_eq!(self.sub_log, other.sub_log);
        for (own, other) in self.counts.iter_mut().zip(&other.counts) {
            *own = own.wrapping_add(*other);
        }
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_follow_each_other_without_gap_or_overlap() {
        for (sub_log, buckets) in [(2, 108), (3, 208)] {
            for bucket in 0..buckets {
                let (from, to) = (start_of(bucket, sub_log), start_of(bucket + 1, sub_log));
                assert!(from < to);
                assert_eq!(bucket_of(from, sub_log), bucket);
                assert_eq!(bucket_of(to - 1, sub_log), bucket);
            }
            assert_eq!(start_of(buckets, sub_log), 1 << 33, "both end at 8.6 s");
        }
    }

    #[test]
    fn too_long_times_count_as_the_maximum() {
        let histogram = Coarse::new();
        for ns in [u64::MAX, 1 << 40, 1 << 33] {
            histogram.add(ns, 1);
        }
        let read = histogram.read();
        assert_eq!((read.count(), read.below_ns(33)), (3, 3));
        assert_eq!(read.below_ns(32), 0);
    }

    #[test]
    fn adding_n_is_adding_one_n_times() {
        let (batch, single) = (Fine::new(), Fine::new());
        for (ns, n) in [(0, 3), (31, 1), (32, 9), (5_000, 64), (1 << 35, 2)] {
            batch.add(ns, n);
            (0..n).for_each(|_| single.add(ns, 1));
        }
        assert_eq!(batch.read(), single.read());
        assert_eq!(batch.read().count(), 79);
    }

    #[test]
    fn an_empty_histogram_has_no_mean_and_no_quantile() {
        let read = Fine::new().read();
        assert_eq!((read.count(), read.sum_ns()), (0, 0));
        assert_eq!((read.mean_ns(), read.quantile_ns(0.5)), (None, None));
    }

    fn exact(sorted: &[u64], share: f64) -> f64 {
        let rank = (share * sorted.len() as f64).ceil().max(1.0) as usize;
        sorted[rank - 1] as f64
    }

    proptest! {
        #[test]
        fn quantiles_are_near_the_exact_values(
            logs in prop::collection::vec(0.0f64..32.9, 1..400),
            share in 0.0f64..=1.0,
        ) {
            let mut times: Vec<u64> = logs.iter().map(|log| log.exp2() as u64).collect();
            let (fine, coarse) = (Fine::new(), Coarse::new());
            for ns in &times {
                fine.add(*ns, 1);
                coarse.add(*ns, 1);
            }
            times.sort_unstable();
            let truth = exact(&times, share);
            // One bucket is an eighth or a quarter of the value wide, and at least one unit.
            for (read, width) in [(fine.read(), 0.125), (coarse.read(), 0.25)] {
                let quantile = read.quantile_ns(share).unwrap();
                prop_assert!((quantile - truth).abs() <= truth * width + 32.0, "{quantile} for {truth}");
                prop_assert_eq!(read.sum_ns(), times.iter().sum::<u64>());
            }
        }

        #[test]
        fn a_merge_counts_all_and_powers_of_two_are_exact(
            left in prop::collection::vec(0u64..1 << 34, 0..100),
            right in prop::collection::vec(0u64..1 << 34, 0..100),
            power in 8u32..33,
        ) {
            let (one, two) = (Fine::new(), Fine::new());
            left.iter().for_each(|ns| one.add(*ns, 1));
            right.iter().for_each(|ns| two.add(*ns, 1));
            let mut both = one.read();
            both.merge(&two.read());
            let all = || left.iter().chain(&right);
            prop_assert_eq!(both.count(), all().count() as u64);
            let below = all().filter(|ns| **ns < 1 << power).count() as u64;
            prop_assert_eq!(both.below_ns(power), below);
        }
    }
}
