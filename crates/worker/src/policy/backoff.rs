//! How a polling worker keeps out of the way of other threads that want its core.

/// Interval between two checks for other threads.
const CHECK_EVERY_NS: u64 = 1_000_000;
/// How long the worker does not spin after two successive checks found another thread. The first may have been
/// a kernel thread that is gone by the second. The rest doubles each time that the core is contended again.
const REST_MIN_NS: u64 = 250_000;
const REST_MAX_NS: u64 = 256_000_000;

/// Contention that was seen on this core, and the rest that follows from it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ContentionBackoff {
    /// When the last check was.
    checked_ns: Option<u64>,
    /// No spinning before this time.
    until_ns: u64,
    rest_ns: u64,
    /// The last check found another thread, the one before found none.
    is_suspected: bool,
}

impl ContentionBackoff {
    /// Returns true if a check is due: at the start of a spin, and periodically while it lasts.
    #[inline]
    pub(crate) fn wants_check(&self, now_ns: u64) -> bool {
        self.checked_ns
            .is_none_or(|checked_ns| now_ns.saturating_sub(checked_ns) >= CHECK_EVERY_NS)
    }

    /// Records the result of a check.
    pub(crate) fn checked(&mut self, now_ns: u64, contended: bool) {
        self.checked_ns = Some(now_ns);
        if contended && self.rest_ns == 0 && !self.is_suspected {
            // A thread that stays is found again by an immediate second check.
            (self.is_suspected, self.checked_ns) = (true, None);
            return;
        }
        self.is_suspected = false;
        if contended {
            self.rest_ns = (self.rest_ns * 2).clamp(REST_MIN_NS, REST_MAX_NS);
            self.until_ns = now_ns.saturating_add(self.rest_ns);
            // The rest ends with a check.
            self.checked_ns = None;
        } else {
            self.rest_ns = 0;
        }
    }

    /// Returns true if a rest is or was lately in force, so that the clock has to be read.
    #[inline]
    pub(crate) fn is_resting(&self) -> bool {
        self.rest_ns > 0
    }

    /// Returns when the rest ends. `None`: the contention seems permanent, and a timer for each sleep would slow down the other
    /// threads, perhaps this guest's.
    pub(crate) fn until_ns(&self) -> Option<u64> {
        (self.rest_ns < REST_MAX_NS).then_some(self.until_ns)
    }

    /// Returns true if the worker must not spin now.
    #[inline]
    pub(crate) fn is_contended(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn rests_grow_while_the_core_is_contended_and_end_afterwards() {
        let mut backoff = ContentionBackoff::default();
        assert!(backoff.wants_check(0) && !backoff.is_contended(0));
        let mut now_ns = 0;
        backoff.checked(now_ns, true);
        for rest in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024] {
            assert!(backoff.wants_check(now_ns));
            backoff.checked(now_ns, true);
            assert!(backoff.is_contended(now_ns + rest * MS / 4 - 1));
            let until_ns = (rest < 1024).then_some(now_ns + rest * MS / 4);
            assert_eq!(backoff.until_ns(), until_ns);
            now_ns += rest * MS / 4;
            assert!(!backoff.is_contended(now_ns));
        }
        backoff.checked(now_ns, false);
        assert!(!backoff.wants_check(now_ns + MS - 1) && backoff.wants_check(now_ns + MS));
        now_ns += MS;
        for _ in 0..2 {
            backoff.checked(now_ns, true);
        }
        assert!(backoff.is_contended(now_ns), "still there");
        assert!(!backoff.is_contended(now_ns + MS), "it begins anew");
    }

    #[test]
    fn a_brief_contention_is_ignored() {
        let mut backoff = ContentionBackoff::default();
        for now_ns in (0..10).map(|n| n * MS) {
            backoff.checked(now_ns, true);
            assert!(!backoff.is_contended(now_ns) && !backoff.is_resting());
            assert!(backoff.wants_check(now_ns), "at once");
            backoff.checked(now_ns, false);
            assert!(!backoff.wants_check(now_ns));
        }
    }
}
