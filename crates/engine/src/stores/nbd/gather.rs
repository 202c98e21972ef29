//! When a connection is received from. A server answers requests one by one, and each answer would wake the worker, which sends
//! one more request and calls the guest. Under load the worker therefore leaves the answers in the socket for a while, and then
//! takes several with one system call. The pause is short beside the time that requests take anyway, and nobody sleeps longer for
//! it who has only a few requests in flight.

use std::time::{Duration, Instant};

/// With fewer requests in flight the guest may wait for each of them.
const REQUESTS_MIN: usize = 8;
/// A pause takes at most this part of the time from a request to its answer.
const SHARE: u64 = 4;
const PAUSE_MAX: Duration = Duration::from_micros(100);
/// A pause that brings no more answers than this costs more than it saves.
const ANSWERS_MIN: u64 = 2;
/// A longer time without an answer says nothing about the load.
const GAP_MAX: Duration = Duration::from_millis(1);

/// The load of a connection, as its answers show it.
#[derive(Debug)]
pub(super) struct Gather {
    /// Means over the last answers: the time that they took, and the time between two of them.
    latency_ns: u64,
    gap_ns: u64,
    received_at: Instant,
    answers: u64,
    due: Option<Instant>,
}

impl Gather {
    pub(super) fn new(now: Instant) -> Gather {
        Gather {
            latency_ns: 0,
            gap_ns: nanoseconds(GAP_MAX),
            received_at: now,
            answers: 0,
            due: None,
        }
    }

    /// A request was answered after this time.
    #[inline]
    pub(super) fn answered(&mut self, took: Duration) {
        self.answers += 1;
        self.latency_ns = mean(self.latency_ns, nanoseconds(took));
    }

    /// All that was received by `now` is taken in. `requests`: how many were in flight before.
    #[inline]
    pub(super) fn received(&mut self, now: Instant, requests: usize) {
        let Some(answers) = Some(std::mem::take(&mut self.answers)).filter(|count| *count > 0)
        else {
            return;
        };
        let since = now.saturating_duration_since(self.received_at).min(GAP_MAX);
        self.gap_ns = mean(self.gap_ns, nanoseconds(since) / answers);
        self.received_at = now;
        let pause = Duration::from_nanos(self.latency_ns / SHARE).min(PAUSE_MAX);
        let is_worth = nanoseconds(pause) >= self.gap_ns * ANSWERS_MIN;
        self.due = (requests >= REQUESTS_MIN && is_worth).then(|| now + pause);
    }

    /// The time until the next receive; `None`: it is due.
    #[inline]
    pub(super) fn left(&mut self) -> Option<Duration> {
        let left = self.due?.saturating_duration_since(Instant::now());
        if left.is_zero() {
            self.due = None;
            return None;
        }
        Some(left)
    }

    /// Receives at once.
    pub(super) fn hurry(&mut self) {
        self.due = None;
    }
}

fn mean(mean: u64, value: u64) -> u64 {
    mean - mean / 8 + value / 8
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX / 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pause after many receives of `answers` that come every `gap` and take `took`.
    fn pause(requests: usize, answers: u64, gap_us: u64, took_us: u64) -> Duration {
        let begin = Instant::now();
        let mut gather = Gather::new(begin);
        let mut now = begin;
        for _ in 0..100 {
            now += Duration::from_micros(gap_us * answers);
            (0..answers).for_each(|_| gather.answered(Duration::from_micros(took_us)));
            gather.received(now, requests);
        }
        gather.due.map_or(Duration::ZERO, |due| due - now)
    }

    #[test]
    fn a_pause_is_short_beside_the_requests_and_worth_its_time() {
        let near = |found: Duration, us: u64| {
            let wanted = Duration::from_micros(us);
            assert!(found <= wanted && found * 10 >= wanted * 9, "{found:?}");
        };
        near(pause(32, 1, 10, 320), 80);
        near(pause(32, 5, 10, 320), 80);
        near(pause(128, 1, 10, 1280), 100);
        // A few requests, a slow server, a server far away.
        for (requests, gap_us, took_us) in [(7, 10, 320), (32, 100, 3200), (32, 10, 70)] {
            assert_eq!(pause(requests, 1, gap_us, took_us), Duration::ZERO);
        }
    }

    #[test]
    fn nothing_is_put_off_twice() {
        let begin = Instant::now();
        let mut gather = Gather::new(begin);
        gather.due = Some(begin + Duration::from_secs(60));
        assert!(gather.left().is_some());
        gather.due = Some(begin);
        assert_eq!((gather.left(), gather.due), (None, None));
        gather.received(begin, 32);
        assert_eq!(gather.due, None, "no answer came");
    }
}
