//! How much the workers of a disk may spin. They share it; it is kept in two words, without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

use super::WINDOW_NS;
use crate::Tuning;

/// A share of time, stored as the moment up to which it is spent. Spending moves that moment forward by the
/// time that it takes to earn as much again, so nothing has to be refilled. What is not used is kept for a window.
#[derive(Debug, Default)]
struct Share {
    spent_until_ns: AtomicU64,
}

impl Share {
    fn left_ns(&self, now_ns: u64, percent: u32) -> u64 {
        let since_ns = now_ns.saturating_sub(self.spent_until_ns.load(Ordering::Relaxed));
        since_ns.min(WINDOW_NS) * u64::from(percent) / 100
    }

    fn spend(&self, now_ns: u64, ns: u64, percent: u32) {
        if percent == 0 {
            return;
        }
        let cost_ns = ns.saturating_mul(100) / u64::from(percent);
        let floor_ns = now_ns.saturating_sub(WINDOW_NS);
        let spend = |until_ns: u64| Some(until_ns.max(floor_ns).saturating_add(cost_ns));
        // Other workers may spend at the same time; each is counted.
        let _ = self
            .spent_until_ns
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend);
    }
}

/// How much the workers of a disk may spin, without finding work and altogether. `now_ns` is a clock that they share.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    vain: Share,
    all: Share,
}

impl Budget {
    /// Returns the nanoseconds that may be spun now, if no work comes.
    pub(crate) fn left_ns(&self, now_ns: u64, tuning: &Tuning) -> u64 {
        // A new budget is full, as if nothing had been spun before.
        let now_ns = now_ns.saturating_add(WINDOW_NS);
        let vain_ns = self.vain.left_ns(now_ns, tuning.spin_cpu_max);
        match tuning.spin_cpu_total {
            Some(percent) => vain_ns.min(self.all.left_ns(now_ns, percent)),
            None => vain_ns,
        }
    }

    /// Returns the nanoseconds in a full budget.
    pub(crate) fn size_ns(tuning: &Tuning) -> u64 {
        let percent = tuning.spin_cpu_max;
        let percent = tuning
            .spin_cpu_total
            .map_or(percent, |all| all.min(percent));
        WINDOW_NS * u64::from(percent) / 100
    }

    /// Charges `spun_ns` of spinning, of which `vain_ns` found no work.
    pub(crate) fn spend(&self, now_ns: u64, spun_ns: u64, vain_ns: u64, tuning: &Tuning) {
        let now_ns = now_ns.saturating_add(WINDOW_NS);
        if vain_ns > 0 {
            self.vain.spend(now_ns, vain_ns, tuning.spin_cpu_max);
        }
        if let Some(percent) = tuning.spin_cpu_total {
            self.all.spend(now_ns, spun_ns, percent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;

    const MS: u64 = 1_000_000;

    fn tuning(spin_cpu_max: u32, spin_cpu_total: Option<u32>) -> Tuning {
        Tuning {
            spin_cpu_max,
            spin_cpu_total,
            ..Tuning::new(Split::Off)
        }
    }

    #[test]
    fn a_spent_budget_refills_at_the_configured_share() {
        let (budget, tuning) = (Budget::default(), tuning(20, None));
        assert_eq!(budget.left_ns(0, &tuning), 10 * MS);
        budget.spend(0, 9 * MS, 4 * MS, &tuning);
        assert_eq!(budget.left_ns(0, &tuning), 6 * MS, "hits are free");
        assert_eq!(budget.left_ns(10 * MS, &tuning), 8 * MS);
        assert_eq!(
            budget.left_ns(900 * MS, &tuning),
            10 * MS,
            "never above the window"
        );
        budget.spend(900 * MS, 30 * MS, 30 * MS, &tuning);
        assert_eq!(budget.left_ns(900 * MS, &tuning), 0);
        // 20 ms too much were spun, and have to be earned first.
        assert_eq!(budget.left_ns(1000 * MS, &tuning), 0);
        assert_eq!(budget.left_ns(1005 * MS, &tuning), MS);
    }

    #[test]
    fn all_spinning_together_has_its_own_limit() {
        let (budget, tuning) = (Budget::default(), tuning(20, Some(50)));
        assert_eq!(Budget::size_ns(&tuning), 10 * MS);
        budget.spend(0, 16 * MS, 0, &tuning);
        assert_eq!(budget.left_ns(0, &tuning), 9 * MS);
    }

    #[test]
    fn a_share_of_zero_allows_no_spinning() {
        let (budget, tuning) = (Budget::default(), tuning(0, None));
        assert_eq!(budget.left_ns(MS, &tuning), 0);
        budget.spend(0, MS, MS, &tuning);
        assert_eq!(budget.left_ns(u64::MAX, &tuning), 0);
    }
}
