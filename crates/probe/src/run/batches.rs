//! The error of a mean, estimated from means of batches.

use std::time::Duration;

/// Maximum number of batches. When it is reached, each two successive ones are merged.
const BATCHES_MAX: usize = 64;
/// Minimum number of batches for an estimate.
const BATCHES_MIN: usize = 16;

/// Completed requests in batches of equal count. Times of single requests depend on each other, because they
/// queue in the same device. Means of batches that grow with the measurement are nearly independent.
#[derive(Debug)]
pub(super) struct Batches {
    /// Minimum number of requests per batch.
    size: u64,
    /// Requests and duration of each batch.
    full: Vec<(u64, Duration)>,
    open: u64,
    opened: Duration,
    requests: u64,
    seen: u64,
    /// When counting began, and when the last counted request completed.
    began: Option<Duration>,
    last: Duration,
}

impl Batches {
    /// Makes the batches of a point. `size`: requests of the first batches, as many as are in flight.
    pub(super) fn new(size: u64) -> Batches {
        Batches {
            size: size.max(1),
            full: Vec::with_capacity(BATCHES_MAX),
            open: 0,
            opened: Duration::ZERO,
            requests: 0,
            seen: 0,
            began: None,
            last: Duration::ZERO,
        }
    }

    /// Returns true if nothing is counted yet, because the device's queue still fills.
    pub(super) fn is_warming(&self) -> bool {
        self.began.is_none()
    }

    /// Begins counting. Called when a request has just completed, so that the measured time begins and ends
    /// with a completion.
    pub(super) fn begin(&mut self, at: Duration) {
        self.began = Some(at);
        (self.opened, self.last) = (at, at);
    }

    /// Notes that `ended` requests had completed at `at`.
    pub(super) fn add(&mut self, ended: u64, at: Duration) {
        self.seen += ended;
        if ended == 0 || self.is_warming() {
            return;
        }
        self.requests += ended;
        self.open += ended;
        self.last = at;
        if self.open >= self.size {
            self.full.push((self.open, at.saturating_sub(self.opened)));
            (self.open, self.opened) = (0, at);
        }
        if self.full.len() >= BATCHES_MAX {
            let pair = |pair: &[(u64, Duration)]| {
                pair.iter()
                    .fold((0, Duration::ZERO), |a, b| (a.0 + b.0, a.1 + b.1))
            };
            self.full = self.full.chunks(2).map(pair).collect();
            self.size *= 2;
        }
    }

    /// Returns all completed requests, warm-up included.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// Returns the number of requests that were counted.
    pub(super) fn requests(&self) -> u64 {
        self.requests
    }

    /// Returns the time in which they completed.
    pub(super) fn elapsed(&self) -> Duration {
        self.last.saturating_sub(self.began.unwrap_or(self.last))
    }

    /// Returns half the 95 % confidence interval of the mean time per request, as a share of it. `None`: there are too few
    /// batches.
    pub(super) fn error(&self) -> Option<f64> {
        if self.full.len() < BATCHES_MIN {
            return None;
        }
        let count = self.full.len() as f64;
        let times = || {
            self.full
                .iter()
                .map(|(n, time)| time.as_secs_f64() / *n as f64)
        };
        let mean = times().sum::<f64>() / count;
        let variance = times().map(|t| (t - mean).powi(2)).sum::<f64>() / (count - 1.0);
        Some(2.0 * (variance / count).sqrt() / mean.max(1e-12))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_warm_up_is_not_counted() {
        let mut batches = Batches::new(2);
        batches.add(5, 10 * MS);
        assert_eq!((batches.seen(), batches.requests()), (5, 0));
        batches.begin(10 * MS);
        batches.add(0, 11 * MS);
        batches.add(4, 14 * MS);
        assert_eq!((batches.seen(), batches.requests()), (9, 4));
        assert_eq!(batches.elapsed(), 4 * MS);
        assert_eq!(batches.error(), None, "one batch says nothing");
    }

    #[test]
    fn a_steady_rate_is_known_soon_and_an_unsteady_one_late() {
        let spread = |jitter: &dyn Fn(u32) -> u32, rounds: u32| {
            let mut batches = Batches::new(1);
            batches.begin(Duration::ZERO);
            let mut at = Duration::ZERO;
            for round in 0..rounds {
                at += MS * (10 + jitter(round));
                batches.add(1, at);
            }
            (batches.error().unwrap(), batches.full.len())
        };
        assert_eq!(spread(&|_| 0, 16).0, 0.0);
        // A quarter of the requests take nine times as long: 10, 10, 10, 90 ms.
        let wild = |round: u32| if round * 7 % 13 < 3 { 80 } else { 0 };
        let (few, many) = (spread(&wild, 20).0, spread(&wild, 20_000));
        assert!(few > 0.2, "{few}");
        assert!(many.0 < 0.03 && many.1 < BATCHES_MAX, "{many:?}");
    }
}
