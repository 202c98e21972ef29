//! Whether requests arrive fast enough for spinning to be considered.

/// Level at which the rate counts as fast: a few requests are not a load yet.
const HOT: u64 = 8;
/// Level at which the rate counts as slow again. The distance to `HOT`, and that the bucket is filled when it
/// becomes fast, keep a rate near the limit from flapping.
const COLD: u64 = 2;
/// Capacity. At the default limit it bridges 42 ms without a request, as between two bursts.
const FULL: u64 = 48;

/// A leaky bucket of requests, with its level kept as time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Heat {
    level_ns: u64,
    at_ns: u64,
    hot: bool,
}

impl Heat {
    /// Adds requests that arrived until `now_ns`. `rate_min` requests per second drain from the bucket; 0:
    /// every rate is fast enough.
    #[inline]
    pub(crate) fn pass(&mut self, now_ns: u64, requests: u32, rate_min: u32) {
        let gone_ns = now_ns.saturating_sub(self.at_ns);
        self.at_ns = now_ns;
        let Some(request_ns) = 1_000_000_000_u64.checked_div(u64::from(rate_min)) else {
            self.hot = true;
            return;
        };
        let gained_ns = u64::from(requests) * request_ns;
        let level_ns = self.level_ns.saturating_sub(gone_ns);
        self.level_ns = level_ns.saturating_add(gained_ns).min(FULL * request_ns);
        if self.hot {
            self.hot = self.level_ns > COLD * request_ns;
        } else if self.level_ns >= HOT * request_ns {
            (self.hot, self.level_ns) = (true, FULL * request_ns);
        }
    }

    /// Whether requests arrive fast enough.
    #[inline]
    pub(crate) fn is_hot(&self) -> bool {
        self.hot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the rate is fast after a second of requests at this interval, in groups of this size.
    fn hot_after(gap_us: u64, group: u32, rate_min: u32) -> bool {
        let mut heat = Heat::default();
        for at_us in (0..1_000_000).step_by(gap_us as usize) {
            heat.pass(at_us * 1000, group, rate_min);
        }
        heat.is_hot()
    }

    #[test]
    fn a_thousand_a_second_are_cold_and_three_thousand_hot() {
        let hot = |gap_us, group| hot_after(gap_us, group, 1100);
        assert!(!hot(10_000, 1) && !hot(1000, 1) && !hot(4000, 4));
        assert!(hot(333, 1) && hot(10, 1) && hot(10_000, 100));
    }

    #[test]
    fn another_least_rate_is_the_limit_and_with_none_it_is_always_hot() {
        assert!(hot_after(10_000, 1, 80) && !hot_after(10_000, 1, 120));
        assert!(!hot_after(10, 1, 200_000) && hot_after(1_000_000, 0, 0));
    }

    #[test]
    fn it_cools_within_some_tens_of_milliseconds() {
        let mut heat = Heat::default();
        heat.pass(0, 1000, 1100);
        heat.pass(9_000_000, 0, 1100);
        assert!(heat.is_hot(), "between two bursts");
        heat.pass(60_000_000, 0, 1100);
        assert!(!heat.is_hot());
    }
}
