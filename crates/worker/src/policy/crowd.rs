//! How a polling worker keeps out of the way of other threads that want its core.

/// Interval between two checks for other threads.
const LOOK_EVERY_NS: u64 = 1_000_000;
/// How long the worker does not spin after two successive checks found another thread. The first may have been
/// a kernel thread that is gone by the second. The rest doubles each time that the core is contended again.
const REST_MIN_NS: u64 = 250_000;
const REST_MAX_NS: u64 = 256_000_000;

/// What was seen of other threads on this core, and until when not to spin.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Crowd {
    /// When the last check was.
    looked_ns: Option<u64>,
    /// No spinning before this time.
    until_ns: u64,
    rest_ns: u64,
    /// The last check found another thread, the one before found none.
    suspects: bool,
}

impl Crowd {
    /// Whether a check is due: at the start of a spin, and periodically while it lasts.
    #[inline]
    pub(crate) fn wants_look(&self, now_ns: u64) -> bool {
        self.looked_ns
            .is_none_or(|looked_ns| now_ns.saturating_sub(looked_ns) >= LOOK_EVERY_NS)
    }

    /// Records the result of a check.
    pub(crate) fn looked(&mut self, now_ns: u64, others: bool) {
        self.looked_ns = Some(now_ns);
        if others && self.rest_ns == 0 && !self.suspects {
            // A thread that stays is found again by an immediate second check.
            (self.suspects, self.looked_ns) = (true, None);
            return;
        }
        self.suspects = false;
        if others {
            self.rest_ns = (self.rest_ns * 2).clamp(REST_MIN_NS, REST_MAX_NS);
            self.until_ns = now_ns.saturating_add(self.rest_ns);
            // The rest ends with a check.
            self.looked_ns = None;
        } else {
            self.rest_ns = 0;
        }
    }

    /// Whether a rest is or was lately in force, so that the clock has to be read.
    #[inline]
    pub(crate) fn rests(&self) -> bool {
        self.rest_ns > 0
    }

    /// When the rest ends. `None`: the contention seems permanent, and a timer for each sleep would slow down
    /// the other threads, perhaps this guest's.
    pub(crate) fn until_ns(&self) -> Option<u64> {
        (self.rest_ns < REST_MAX_NS).then_some(self.until_ns)
    }

    /// Whether the worker must not spin now.
    #[inline]
    pub(crate) fn is_crowded(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn rests_grow_while_others_stay_and_end_when_they_are_gone() {
        let mut crowd = Crowd::default();
        assert!(crowd.wants_look(0) && !crowd.is_crowded(0));
        let mut now_ns = 0;
        crowd.looked(now_ns, true);
        for rest in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024] {
            assert!(crowd.wants_look(now_ns));
            crowd.looked(now_ns, true);
            assert!(crowd.is_crowded(now_ns + rest * MS / 4 - 1));
            let until_ns = (rest < 1024).then_some(now_ns + rest * MS / 4);
            assert_eq!(crowd.until_ns(), until_ns);
            now_ns += rest * MS / 4;
            assert!(!crowd.is_crowded(now_ns));
        }
        crowd.looked(now_ns, false);
        assert!(!crowd.wants_look(now_ns + MS - 1) && crowd.wants_look(now_ns + MS));
        now_ns += MS;
        for _ in 0..2 {
            crowd.looked(now_ns, true);
        }
        assert!(crowd.is_crowded(now_ns), "still there");
        assert!(!crowd.is_crowded(now_ns + MS), "it begins anew");
    }

    #[test]
    fn one_who_passes_is_let_pass() {
        let mut crowd = Crowd::default();
        for now_ns in (0..10).map(|n| n * MS) {
            crowd.looked(now_ns, true);
            assert!(!crowd.is_crowded(now_ns) && !crowd.rests());
            assert!(crowd.wants_look(now_ns), "at once");
            crowd.looked(now_ns, false);
            assert!(!crowd.wants_look(now_ns));
        }
    }
}
