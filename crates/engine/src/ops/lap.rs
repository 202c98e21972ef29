//! The bytes that a store may copy on its thread in each lap.

use crate::LAP_BYTES_MAX;
use crate::reactor::Tenancy;

/// Bytes that are copied in about the time in which one host range is looked up: 4096 ranges use a lap up.
const RANGE_BYTES: u64 = 64;

/// The bytes that a store may still copy or zero on its thread before the next enter. On a thread of its own there is no bound:
/// only the disk itself would wait.
#[derive(Debug)]
pub(crate) struct LapBudget {
    whole: u64,
    left: u64,
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
        }
    }

    /// For a store that closes: its owner waits for all that is left.
    pub(crate) fn unlimited() -> LapBudget {
        LapBudget {
            whole: u64::MAX,
            left: u64::MAX,
        }
    }

    /// Returns true if long copies are to be cut.
    pub(crate) fn is_bounded(&self) -> bool {
        self.whole < u64::MAX
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
