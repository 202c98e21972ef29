//! Whether requests come fast enough for spinning to be considered at all.

/// Requests that a second takes away. Below this rate the CPU time of sleeping is what counts, and it
/// is as small as it can be; above, latency counts too.
const RATE_MIN: u64 = 1100;
/// What one request is worth.
const REQUEST_NS: u64 = 1_000_000_000 / RATE_MIN;
/// Requests ahead of that rate before it is hot: a handful is no load yet.
const HOT_NS: u64 = 8 * REQUEST_NS;
/// Below this it is cold again. What lies between, and that it is full once it is hot, keeps a rate about
/// the limit from flapping.
const COLD_NS: u64 = 2 * REQUEST_NS;
/// Most that is kept: 44 ms without a request are forgiven, as between two bursts.
const FULL_NS: u64 = 48 * REQUEST_NS;

/// A leaky bucket of requests, measured in time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Heat {
    level_ns: u64,
    at_ns: u64,
    hot: bool,
}

impl Heat {
    /// It is now this time, and so many requests have come since the last.
    #[inline]
    pub(crate) fn pass(&mut self, now_ns: u64, requests: u32) {
        let gone_ns = now_ns.saturating_sub(self.at_ns);
        self.at_ns = now_ns;
        let gained_ns = u64::from(requests) * REQUEST_NS;
        let level_ns = self.level_ns.saturating_sub(gone_ns);
        self.level_ns = level_ns.saturating_add(gained_ns).min(FULL_NS);
        if self.hot {
            self.hot = self.level_ns > COLD_NS;
        } else if self.level_ns >= HOT_NS {
            (self.hot, self.level_ns) = (true, FULL_NS);
        }
    }

    /// Requests come fast enough.
    #[inline]
    pub(crate) fn is_hot(&self) -> bool {
        self.hot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it is hot at the end of a second of requests so far apart, in groups of so many.
    fn hot_after(gap_us: u64, group: u32) -> bool {
        let mut heat = Heat::default();
        for at_us in (0..1_000_000).step_by(gap_us as usize) {
            heat.pass(at_us * 1000, group);
        }
        heat.is_hot()
    }

    #[test]
    fn a_thousand_a_second_are_cold_and_three_thousand_hot() {
        assert!(!hot_after(10_000, 1) && !hot_after(1000, 1) && !hot_after(4000, 4));
        assert!(hot_after(333, 1) && hot_after(10, 1) && hot_after(10_000, 100));
    }

    #[test]
    fn it_cools_within_some_tens_of_milliseconds() {
        let mut heat = Heat::default();
        heat.pass(0, 1000);
        heat.pass(9_000_000, 0);
        assert!(heat.is_hot(), "between two bursts");
        heat.pass(60_000_000, 0);
        assert!(!heat.is_hot());
    }
}
