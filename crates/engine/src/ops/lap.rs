//! How much a store, or its owner, may do on its thread in one lap: a number of bytes, and on a thread that disks share also a time.

use std::time::{Duration, Instant};

use crate::LAP_BYTES_MAX;
use crate::reactor::Tenancy;

/// Bytes that are copied in about the time in which one host range is looked up: 4096 ranges use a lap up.
const RANGE_BYTES: u64 = 64;

/// Longest time for which a lap on a shared thread goes on with what a guest asks for. The first access to a huge page has the kernel
/// zero it (2 MiB take 0.1 to 0.2 ms), so the same bytes can take a thousand times longer than others, and no count of them knows.
const LAP_TIME: Duration = Duration::from_micros(200);

/// The time from which a lap on a shared thread begins nothing more that a guest can make long. On a thread of its own a disk has no
/// such time.
#[derive(Debug, Clone, Copy)]
pub struct LapEnd(Option<Instant>);

impl LapEnd {
    /// For a thread of the disk's own.
    pub const NEVER: LapEnd = LapEnd(None);

    /// For a lap on a shared thread that began at this time.
    #[inline]
    pub fn after(began: Instant) -> LapEnd {
        LapEnd(Some(began + LAP_TIME))
    }

    /// Returns true on a shared thread.
    #[inline]
    pub fn is_bounded(self) -> bool {
        self.0.is_some()
    }

    /// Reads the clock on a shared thread. Returns true if it is the time.
    #[inline]
    pub fn has_come(self) -> bool {
        self.0.is_some_and(|end| Instant::now() >= end)
    }
}

/// The bytes that a store may still copy or zero on its thread before the next enter. On a thread of its own there is no bound:
/// only the disk itself would wait.
#[derive(Debug)]
pub(crate) struct LapBudget {
    whole: u64,
    left: u64,
    /// How long the store itself goes on with what waited for its turn.
    time: Duration,
}

impl LapBudget {
    pub(crate) fn of(tenancy: &Tenancy) -> LapBudget {
        match tenancy {
            Tenancy::Own => LapBudget::unlimited(),
            Tenancy::Shared(_) => LapBudget::bounded(),
        }
    }

    pub(crate) fn bounded() -> LapBudget {
        LapBudget {
            whole: LAP_BYTES_MAX,
            left: LAP_BYTES_MAX,
            time: LAP_TIME,
        }
    }

    /// For a store that closes: its owner waits for all that is left.
    pub(crate) fn unlimited() -> LapBudget {
        LapBudget {
            whole: u64::MAX,
            left: u64::MAX,
            time: LAP_TIME,
        }
    }

    /// Returns true if long copies are to be cut.
    pub(crate) fn is_bounded(&self) -> bool {
        self.whole < u64::MAX
    }

    /// Returns when what begins now has lasted long enough.
    pub(crate) fn end_of_work(&self) -> LapEnd {
        match self.is_bounded() {
            true => LapEnd(Some(Instant::now() + self.time)),
            false => LapEnd::NEVER,
        }
    }

    /// Acts as if all that is done took long.
    #[cfg(test)]
    pub(crate) fn hurry(&mut self) {
        self.time = Duration::ZERO;
    }

    /// Counts bytes that are copied or zeroed. The last ones may exceed the budget.
    #[inline]
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
    }

    /// Counts host ranges of guest memory that were looked up, for an op that failed too.
    #[inline]
    pub(crate) fn spend_ranges(&mut self, ranges: usize) {
        self.spend(RANGE_BYTES * ranges as u64);
    }

    /// Uses the budget up: there is more to do in the next lap.
    #[inline]
    pub(crate) fn exhaust(&mut self) {
        self.left = 0;
    }

    #[inline]
    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    #[inline]
    pub(crate) fn is_used_up(&self) -> bool {
        self.left == 0
    }

    /// Begins the next lap.
    #[inline]
    pub(crate) fn renew(&mut self) {
        self.left = self.whole;
    }
}
