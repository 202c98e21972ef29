//! How long the device takes, without a clock at each request: what is in flight, summed over time, by what
//! ended in that time (Little's law); and how many wake-ups a response pays for where it is slept for.

/// Ops that make a sample.
const SAMPLE: u64 = 64;
/// Less is no sample, however many ended: the first moments of a load.
const SAMPLE_NS: u64 = 200_000;

/// As many came amid others as ended.
const AMID_ALL: u64 = 256;

/// The device's mean response time, lately.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Response {
    mean_ns: u64,
    /// Requests that came while others were in flight, in 1/256 of what ended.
    amid: u64,
    at_ns: u64,
    in_flight: u32,
    /// Op-nanoseconds since the last sample, ended ops, requests that came amid others, and over what time.
    sum_ns: u64,
    ended: u64,
    came_amid: u64,
    over_ns: u64,
}

impl Response {
    /// It is now this time; so many are in flight, and so many came and ended since the last call.
    #[inline]
    pub(crate) fn pass(&mut self, now_ns: u64, in_flight: u32, arrived: u32, ended: u32) {
        if self.in_flight > 0 {
            self.came_amid += u64::from(arrived);
        }
        let gone_ns = now_ns.saturating_sub(self.at_ns);
        // What was in flight between is taken for the mean of the two ends.
        let both = u64::from(self.in_flight) + u64::from(in_flight);
        let sum_ns = gone_ns.saturating_mul(both) / 2;
        self.sum_ns = self.sum_ns.saturating_add(sum_ns);
        self.over_ns += gone_ns;
        self.ended += u64::from(ended);
        (self.at_ns, self.in_flight) = (now_ns, in_flight);
        if self.ended >= SAMPLE && self.over_ns >= SAMPLE_NS {
            self.sample();
        }
    }

    #[cold]
    fn sample(&mut self) {
        let mean_ns = self.sum_ns / self.ended;
        let amid = (AMID_ALL * self.came_amid / self.ended).min(AMID_ALL);
        (self.mean_ns, self.amid) = match self.mean_ns {
            0 => (mean_ns, amid),
            known_ns => ((3 * known_ns + mean_ns) / 4, (3 * self.amid + amid) / 4),
        };
        (self.sum_ns, self.ended, self.came_amid, self.over_ns) = (0, 0, 0, 0);
    }

    /// 0: not known yet, or nothing is ever in flight.
    #[inline]
    pub(crate) fn mean_ns(&self) -> u64 {
        self.mean_ns
    }

    /// What it takes for each wake-up that sleeping for the device puts into a response: the one at its end, and
    /// another at its beginning if it comes amid others, since its guest finds the worker asleep.
    #[inline]
    pub(crate) fn mean_per_wake_ns(&self) -> u64 {
        AMID_ALL * self.mean_ns / (AMID_ALL + self.amid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    /// What is learnt of a device that ends `depth` requests together, `takes_us` after they were begun,
    /// with a pause after that.
    fn learnt(depth: u32, takes_us: u64, pause_us: u64) -> Response {
        let mut response = Response::default();
        let mut now_ns = 0;
        for _ in 0..1000 {
            response.pass(now_ns, depth, depth, 0);
            now_ns += takes_us * US;
            response.pass(now_ns - 1, depth, 0, 0);
            response.pass(now_ns, 0, 0, depth);
            now_ns += pause_us * US;
            response.pass(now_ns - 1, 0, 0, 0);
        }
        response
    }

    #[test]
    fn it_is_what_the_device_takes_at_any_depth_and_load() {
        for (depth, takes_us, pause_us) in [(1, 80, 0), (1, 80, 900), (32, 300, 20), (128, 10, 5)] {
            let response = learnt(depth, takes_us, pause_us);
            let mean_ns = response.mean_ns();
            let is = takes_us * US;
            assert!(
                mean_ns.abs_diff(is) < is / 10,
                "{depth}: {mean_ns} for {is}"
            );
            assert_eq!(response.mean_per_wake_ns(), mean_ns, "all came together");
        }
    }

    #[test]
    fn nothing_in_flight_is_no_device() {
        assert_eq!(learnt(0, 80, 1).mean_ns(), 0);
    }

    #[test]
    fn where_requests_come_amid_others_a_response_pays_for_two_wake_ups() {
        // One in flight at any time and a second one half of it, each for 50 us.
        let mut response = Response::default();
        for n in 0..1000 {
            let now_ns = n * 50 * US;
            response.pass(now_ns, 2, 1, 0);
            response.pass(now_ns + 25 * US, 1, 0, 1);
        }
        let (mean_ns, per_wake_ns) = (response.mean_ns(), response.mean_per_wake_ns());
        assert!(mean_ns.abs_diff(75 * US) < 8 * US, "{mean_ns}");
        assert!(
            per_wake_ns.abs_diff(mean_ns / 2) < US,
            "{per_wake_ns} of {mean_ns}"
        );
    }
}
