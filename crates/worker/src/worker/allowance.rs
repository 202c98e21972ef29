//! How many requests a lap may still take and collect. A disk that has its thread for itself needs a count alone, because nobody else
//! waits. On a thread that disks share the clock decides: each access to guest memory may be the first to its page, and the kernel zeroes
//! that page then.

use cleave_engine::LapEnd;

/// Descriptors between two looks at the clock: a few short chains, beside which a look costs little. One chain may have more. Each may
/// refer to a page of its own.
const DESCRIPTORS_PER_LOOK: u32 = 16;
/// Completed ops between two looks. Each stores a status byte, and may copy data.
const ENDED_PER_LOOK: usize = 4;

/// What a worker may still take and collect in this lap.
#[derive(Debug)]
pub(crate) struct LapAllowance {
    /// Descriptors up to the next look at the clock; without a clock, up to the end of the batch.
    descriptors_left: u32,
    end: LapEnd,
}

impl LapAllowance {
    /// For a worker that has its thread for itself, until it is told otherwise.
    pub(crate) fn new() -> LapAllowance {
        LapAllowance {
            descriptors_left: 0,
            end: LapEnd::NEVER,
        }
    }

    /// Begins a lap on a thread of the disk's own, in which so many descriptors may be read.
    #[inline]
    pub(crate) fn renew(&mut self, descriptors: u32) {
        self.descriptors_left = descriptors;
    }

    /// Begins a lap on a thread that disks share.
    pub(crate) fn renew_until(&mut self, end: LapEnd) {
        (self.descriptors_left, self.end) = (DESCRIPTORS_PER_LOOK, end);
    }

    /// Counts descriptors that were read.
    #[inline]
    pub(crate) fn spend(&mut self, descriptors: u32) {
        self.descriptors_left = self.descriptors_left.saturating_sub(descriptors);
    }

    /// Returns true if no further chain is to be taken in this lap.
    #[inline]
    pub(crate) fn is_used_up(&mut self) -> bool {
        self.descriptors_left == 0 && self.look()
    }

    /// Returns true if the last answer was that it is used up. Does not look at the clock.
    #[inline]
    pub(crate) fn was_used_up(&self) -> bool {
        self.descriptors_left == 0
    }

    #[cold]
    fn look(&mut self) -> bool {
        if !self.end.is_bounded() || self.end.has_come() {
            return true;
        }
        self.descriptors_left = DESCRIPTORS_PER_LOOK;
        false
    }

    /// Returns true if no further completion is to be collected in this lap after so many.
    #[inline]
    pub(crate) fn ends_after(&self, ended: usize) -> bool {
        self.end.is_bounded() && ended.is_multiple_of(ENDED_PER_LOOK) && self.end.has_come()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_lap_ends_by_its_count_or_at_a_look_at_the_clock() {
        let hour = Duration::from_secs(3600);
        let now = Instant::now();
        let mut allowance = LapAllowance::new();
        for (end, used_up_after, ends_after) in [
            (LapEnd::NEVER, Some(1000), None),
            (LapEnd::after(now + hour), None, None),
            (LapEnd::after(now - hour), Some(16), Some(4)),
        ] {
            match end.is_bounded() {
                true => allowance.renew_until(end),
                false => allowance.renew(1000),
            }
            let used_up = (1..2000).find(|_| {
                allowance.spend(1);
                allowance.is_used_up()
            });
            let ended = (1..100).find(|ended| allowance.ends_after(*ended));
            assert_eq!((used_up, ended), (used_up_after, ends_after), "{end:?}");
        }
        // Also if nothing more is read.
        assert!(allowance.was_used_up() && allowance.is_used_up());
    }
}
