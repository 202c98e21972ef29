//! The bytes that a store may copy on its thread in each lap.

use crate::LAP_BYTES_MAX;
use crate::reactor::Tenancy;

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
            Tenancy::Shared(_) => LapBudget {
                whole: LAP_BYTES_MAX,
                left: LAP_BYTES_MAX,
            },
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
