//! State of a worker's waiting.

use std::sync::Arc;

use crate::policy::{ContentionBackoff, Pacer};
use crate::thread::contention::CoreContention;

/// How a worker waits for all its vrings together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum WaitMode {
    /// Sleep when there is no work.
    #[default]
    Sleep,
    /// Spin if it pays.
    Adaptive,
    /// A guest never kicks: poll its ring as far as the budget allows.
    PollBudgeted,
    /// Poll, but yield the core if another thread wants it.
    Poll,
    /// Never sleep: the vring is configured for polling and its guest never kicks.
    PollAlways,
}

impl WaitMode {
    /// Combines the modes of two vrings: the one that demands more polling decides. A worker that polls may sleep until a kick while
    /// another thread wants the core, which a guest that never kicks would not end.
    pub(crate) fn and(self, other: WaitMode) -> WaitMode {
        match [self, other] {
            [WaitMode::Poll, WaitMode::PollBudgeted] | [WaitMode::PollBudgeted, WaitMode::Poll] => {
                WaitMode::PollAlways
            }
            _ if self as u8 >= other as u8 => self,
            _ => other,
        }
    }
}

/// State of polling rings whose guests never kick. The worker spins as far as the disk's budget allows, then
/// sleeps between checks, longer each time until there is work.
#[derive(Debug, Default)]
pub(crate) struct BudgetedPolling {
    /// Laps without work.
    pub(crate) idle_laps: u32,
    /// When the spinning began that has not been charged to the budget yet.
    pub(crate) since_ns: Option<u64>,
    pub(crate) sleeps: u32,
}

/// How a worker waits.
pub(crate) struct Waiting {
    pub(crate) pacer: Pacer,
    /// Keeps a polling worker out of the way of other threads.
    pub(crate) backoff: ContentionBackoff,
    pub(crate) mode: WaitMode,
    pub(crate) contention: Arc<CoreContention>,
    /// Laps without work, while polling.
    pub(crate) idle_laps: u32,
    /// State for vrings without a kick.
    pub(crate) budgeted: BudgetedPolling,
    /// Checks of a polled device since the last request or completion.
    pub(crate) empty_checks: u32,
    /// Some guest may have been asked for kicks since kicks were last disabled for all.
    pub(crate) armed: bool,
    /// Some guest has no EVENT_IDX.
    pub(crate) has_flags: bool,
    /// When the first call that is held back, or the first request that is stalled or throttled, is due, or the disk is settled.
    pub(crate) due_ns: Option<u64>,
    /// Stalled requests that are due wait for room in the store.
    pub(crate) for_room: bool,
    /// The next request of some vring waits for the disk's limits.
    pub(crate) throttled: bool,
    /// The thread serves several disks, so that the scheduler's counts are not those of this one.
    is_shared: bool,
}

impl Waiting {
    /// Makes the state of a worker that has this thread for itself.
    pub(crate) fn new() -> Waiting {
        Waiting::on(Arc::new(CoreContention::of_this_thread()), false)
    }

    /// Makes the state of one of the workers of a thread, which share its counters.
    pub(crate) fn beside_others(contention: Arc<CoreContention>) -> Waiting {
        Waiting::on(contention, true)
    }

    /// Returns the counters of the thread if they are those of this worker alone.
    pub(crate) fn own_thread(&self) -> Option<&Arc<CoreContention>> {
        (!self.is_shared).then_some(&self.contention)
    }

    fn on(contention: Arc<CoreContention>, is_shared: bool) -> Waiting {
        Waiting {
            pacer: Pacer::new(),
            backoff: ContentionBackoff::default(),
            mode: WaitMode::default(),
            contention,
            idle_laps: 0,
            budgeted: BudgetedPolling::default(),
            empty_checks: 0,
            armed: true,
            has_flags: false,
            due_ns: None,
            for_room: false,
            throttled: false,
            is_shared,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::WaitMode::{self, Adaptive, Poll, PollAlways, PollBudgeted, Sleep};

    #[test]
    fn a_guest_that_never_kicks_is_polled_beside_one_that_may_be_slept_on() {
        for (modes, together) in [
            (&[][..], Sleep),
            (&[Adaptive, Sleep], Adaptive),
            (&[Adaptive, Poll, Sleep], Poll),
            (&[PollBudgeted, Adaptive], PollBudgeted),
            (&[PollAlways, Poll], PollAlways),
            (&[Poll, PollBudgeted], PollAlways),
            (&[PollBudgeted, Sleep, Poll], PollAlways),
        ] {
            let combined = modes.iter().copied().fold(Sleep, WaitMode::and);
            assert_eq!(combined, together, "{modes:?}");
        }
    }
}
