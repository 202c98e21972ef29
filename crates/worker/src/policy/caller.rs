//! Decides when a guest is called for published requests.

use crate::Coalesce;

/// The decision about a call for a published batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallDecision {
    /// None: the guest does not want one.
    None,
    /// At once.
    Now,
    /// Later, together with requests that are published until then.
    Later,
}

/// The call that one vring's guest is owed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Caller {
    /// Published requests whose call is held back.
    owed: u32,
    /// When the first of them was published.
    since_ns: u64,
}

impl Caller {
    /// Decides about a batch of `requests` that was published. `wanted`: the guest wants a call for it
    /// (EVENT_IDX, or its flag). `in_flight`: requests of the vring that have not completed. If there are none,
    /// no later batch could share the call, so a lone request never waits.
    #[inline]
    pub(crate) fn published(
        &mut self,
        wanted: bool,
        requests: u32,
        in_flight: u32,
        coalesce: Coalesce,
        now_ns: impl FnOnce() -> u64,
    ) -> CallDecision {
        if !wanted && self.owed == 0 {
            return CallDecision::None;
        }
        if coalesce.us == 0 || in_flight == 0 {
            self.owed = 0;
            return CallDecision::Now;
        }
        self.hold(requests, coalesce, now_ns())
    }

    fn hold(&mut self, requests: u32, coalesce: Coalesce, now_ns: u64) -> CallDecision {
        if self.owed == 0 {
            self.since_ns = now_ns;
        }
        self.owed = self.owed.saturating_add(requests.max(1));
        let enough = coalesce.max > 0 && self.owed >= coalesce.max;
        if enough || self.due_ns(coalesce).is_some_and(|due_ns| now_ns >= due_ns) {
            self.owed = 0;
            return CallDecision::Now;
        }
        CallDecision::Later
    }

    /// Returns since when a call is held back, if one is.
    #[inline]
    pub(crate) fn held_since_ns(&self) -> Option<u64> {
        (self.owed > 0).then_some(self.since_ns)
    }

    /// Returns when the call that is held back is due, if one is.
    #[inline]
    pub(crate) fn due_ns(&self, coalesce: Coalesce) -> Option<u64> {
        (self.owed > 0).then(|| self.since_ns.saturating_add(u64::from(coalesce.us) * 1000))
    }

    /// Notes that the call was made.
    pub(crate) fn clear(&mut self) {
        self.owed = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::CallDecision::{Later, Now};
    use super::*;

    #[test]
    fn each_batch_is_called_as_it_should_be() {
        const NONE: Coalesce = Coalesce { us: 0, max: 0 };
        const TIME: Coalesce = Coalesce { us: 50, max: 0 };
        const BOTH: Coalesce = Coalesce { us: 50, max: 4 };
        // Coalescing, then batches: wanted, requests, in flight, microseconds since the first.
        type Batch = (bool, u32, u32, u64);
        let cases: [(&str, Coalesce, &[Batch], &[CallDecision]); 7] = [
            (
                "exact",
                NONE,
                &[(true, 1, 9, 0), (false, 1, 9, 0)],
                &[Now, CallDecision::None],
            ),
            ("a lone request", TIME, &[(true, 1, 0, 0)], &[Now]),
            (
                "the last of many",
                TIME,
                &[
                    (true, 1, 2, 0),
                    (false, 1, 1, 10),
                    (false, 1, 0, 20),
                    (false, 1, 0, 21),
                ],
                &[Later, Later, Now, CallDecision::None],
            ),
            (
                "time",
                TIME,
                &[(true, 1, 9, 0), (false, 1, 9, 49), (false, 1, 9, 50)],
                &[Later, Later, Now],
            ),
            (
                "number",
                BOTH,
                &[
                    (true, 2, 9, 0),
                    (false, 1, 9, 1),
                    (true, 1, 9, 2),
                    (true, 1, 9, 3),
                ],
                &[Later, Later, Now, Later],
            ),
            ("a batch that is enough", BOTH, &[(true, 4, 9, 0)], &[Now]),
            ("unwanted", BOTH, &[(false, 4, 9, 0)], &[CallDecision::None]),
        ];
        for (name, coalesce, batches, expected) in cases {
            let mut caller = Caller::default();
            let calls: Vec<CallDecision> = batches
                .iter()
                .map(|&(wanted, requests, in_flight, us)| {
                    caller.published(wanted, requests, in_flight, coalesce, || us * 1000)
                })
                .collect();
            assert_eq!(calls, expected, "{name}");
        }
    }

    #[test]
    fn switching_coalescing_off_sends_the_held_call() {
        let mut caller = Caller::default();
        let held = Coalesce { us: 50, max: 0 };
        assert_eq!(caller.published(true, 1, 9, held, || 7000), Later);
        assert_eq!(caller.due_ns(held), Some(57_000));
        assert_eq!(caller.due_ns(Coalesce::default()), Some(7000), "at once");
        caller.clear();
        assert_eq!(caller.due_ns(held), None);
    }
}
