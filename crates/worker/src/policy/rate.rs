//! Decides if requests arrive fast enough for spinning to be considered.

use super::{CHECK_LAPS, WINDOW_NS};

/// A leaky bucket of requests, with its level kept as time. The rate is fast once the bucket is full, and slow again once it is
/// empty, so a rate near the limit does not flap, and a window without a request, as between two bursts, is bridged.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RateBucket {
    level_ns: u64,
    at_ns: u64,
    is_fast: bool,
}

impl RateBucket {
    /// Adds requests that arrived until `now_ns`. `rate_min` requests per second drain from the bucket; 0:
    /// every rate is fast enough.
    #[inline]
    pub(crate) fn add(&mut self, now_ns: u64, requests: u32, rate_min: u32) {
        let gone_ns = now_ns.saturating_sub(self.at_ns);
        self.at_ns = now_ns;
        let Some(request_ns) = 1_000_000_000_u64.checked_div(u64::from(rate_min)) else {
            self.is_fast = true;
            return;
        };
        // A worker reports at once what arrived in all laps between two readings of the clock.
        let full_ns = WINDOW_NS.max(u64::from(CHECK_LAPS) * request_ns);
        let left_ns = self.level_ns.saturating_sub(gone_ns);
        let gained_ns = u64::from(requests) * request_ns;
        self.level_ns = left_ns.saturating_add(gained_ns).min(full_ns);
        self.is_fast = self.level_ns == full_ns || self.is_fast && left_ns > 0;
    }

    /// Returns true if requests arrive fast enough.
    #[inline]
    pub(crate) fn is_fast(&self) -> bool {
        self.is_fast
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns true if the rate is fast after ten seconds of requests at this interval, in groups of this size.
    fn fast_after(gap_us: u64, group: u32, rate_min: u32) -> bool {
        let mut bucket = RateBucket::default();
        for at_us in (0..10_000_000_u64).step_by(gap_us as usize) {
            bucket.add(at_us * 1000, group, rate_min);
        }
        bucket.is_fast()
    }

    #[test]
    fn a_thousand_per_second_are_slow_and_three_thousand_fast() {
        let is_fast = |gap_us, group| fast_after(gap_us, group, 1100);
        assert!(!is_fast(10_000, 1) && !is_fast(1000, 1) && !is_fast(4000, 4));
        assert!(is_fast(333, 1) && is_fast(10, 1) && is_fast(10_000, 100));
    }

    #[test]
    fn the_minimum_rate_is_configurable_and_zero_accepts_every_rate() {
        assert!(fast_after(10_000, 1, 80) && !fast_after(10_000, 1, 120));
        assert!(!fast_after(10, 1, 200_000) && fast_after(1_000_000, 0, 0));
        assert!(fast_after(100_000, 1, 5) && !fast_after(100_000, 1, 11));
    }

    #[test]
    fn a_burst_is_forgotten_within_some_tens_of_milliseconds() {
        let mut bucket = RateBucket::default();
        bucket.add(0, 1000, 1100);
        bucket.add(9_000_000, 0, 1100);
        assert!(bucket.is_fast(), "between two bursts");
        bucket.add(60_000_000, 0, 1100);
        assert!(!bucket.is_fast());
    }
}
