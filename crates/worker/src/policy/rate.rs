//! Decides if requests arrive fast enough for spinning to be considered.

/// Level at which the rate counts as fast: a few requests are not a load yet.
const FAST: u64 = 8;
/// Level at which the rate counts as slow again. The distance to `FAST`, and that the bucket is filled when it
/// becomes fast, keep a rate near the limit from flapping.
const SLOW: u64 = 2;
/// Capacity. At the default limit it bridges 42 ms without a request, as between two bursts.
const CAPACITY: u64 = 48;

/// A leaky bucket of requests, with its level kept as time.
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
        let gained_ns = u64::from(requests) * request_ns;
        let level_ns = self.level_ns.saturating_sub(gone_ns);
        self.level_ns = level_ns
            .saturating_add(gained_ns)
            .min(CAPACITY * request_ns);
        if self.is_fast {
            self.is_fast = self.level_ns > SLOW * request_ns;
        } else if self.level_ns >= FAST * request_ns {
            (self.is_fast, self.level_ns) = (true, CAPACITY * request_ns);
        }
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

    /// Returns true if the rate is fast after a second of requests at this interval, in groups of this size.
    fn fast_after(gap_us: u64, group: u32, rate_min: u32) -> bool {
        let mut bucket = RateBucket::default();
        for at_us in (0..1_000_000).step_by(gap_us as usize) {
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
