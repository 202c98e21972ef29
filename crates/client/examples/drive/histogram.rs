//! Latencies with a precision of one percent, in a fixed amount of memory.

/// The lowest values are exact; above them there are 64 steps for each doubling.
const STEPS: usize = 128;
const DOUBLINGS: usize = 57;

/// A log-linear histogram of nanoseconds.
pub(crate) struct Histogram {
    counts: Vec<u64>,
    sum_ns: u128,
    count: u64,
    max_ns: u64,
}

impl Histogram {
    pub(crate) fn new() -> Histogram {
        Histogram {
            counts: vec![0; STEPS / 2 * (DOUBLINGS + 2)],
            sum_ns: 0,
            count: 0,
            max_ns: 0,
        }
    }

    /// Records one latency.
    pub(crate) fn record(&mut self, ns: u64) {
        self.counts[place(ns)] += 1;
        self.sum_ns += u128::from(ns);
        self.count += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds the counts of another histogram.
    pub(crate) fn merge(mut self, other: Histogram) -> Histogram {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts) {
            *mine += theirs;
        }
        self.sum_ns += other.sum_ns;
        self.count += other.count;
        self.max_ns = self.max_ns.max(other.max_ns);
        self
    }

    pub(crate) fn mean_us(&self) -> f64 {
        self.sum_ns as f64 / self.count.max(1) as f64 / 1e3
    }

    pub(crate) fn max_us(&self) -> f64 {
        self.max_ns as f64 / 1e3
    }

    /// Returns the latency that this share of the requests does not exceed, rounded up to a step.
    pub(crate) fn quantile_us(&self, share: f64) -> f64 {
        let wanted = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (at, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return upper(at).min(self.max_ns) as f64 / 1e3;
            }
        }
        0.0
    }
}

/// Returns the index of the step that counts a value.
fn place(ns: u64) -> usize {
    let bits = 64 - (ns | (STEPS as u64 - 1)).leading_zeros() as usize;
    let doubling = bits - STEPS.ilog2() as usize;
    doubling * (STEPS / 2) + (ns >> doubling) as usize
}

/// Returns the largest value of a step.
fn upper(at: usize) -> u64 {
    if at < STEPS {
        return at as u64;
    }
    let doubling = at / (STEPS / 2) - 1;
    let low = (at - doubling * (STEPS / 2)) as u64;
    // The last step ends at the largest number.
    ((u128::from(low) + 1) << doubling)
        .saturating_sub(1)
        .min(u64::MAX.into()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_in_its_step_to_within_a_percent_or_two() {
        let mut ns = 1u64;
        while ns < u64::MAX / 3 {
            for value in [ns - 1, ns, ns + 1] {
                let top = upper(place(value));
                assert!(top >= value, "{value} above its step's end {top}");
                assert!(
                    (top - value) as f64 <= value as f64 / 63.0,
                    "{value}: {top}"
                );
            }
            ns = ns * 3 / 2 + 1;
        }
        assert!(place(u64::MAX) < Histogram::new().counts.len());
    }

    #[test]
    fn quantiles_count_from_below() {
        let mut all = Histogram::new();
        (1..=100).for_each(|us| all.record(us * 1000));
        let mut other = Histogram::new();
        other.record(5_000_000);
        let all = all.merge(other);
        assert!((all.quantile_us(0.5) / 51.0 - 1.0).abs() < 0.02);
        assert!((all.quantile_us(0.99) / 100.0 - 1.0).abs() < 0.02);
        assert!((all.quantile_us(1.0) - 5000.0).abs() < 1e-9);
        assert!((all.max_us() - 5000.0).abs() < 1e-9);
    }
}
