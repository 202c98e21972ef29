//! What may change while a disk is served.

use std::collections::BTreeMap;

use crate::{OnError, Split};

/// How a worker learns of completions and kicks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Completion {
    /// Sleeps whenever there is nothing to do.
    Interrupt,
    /// Does not sleep while it has a vring to serve.
    Poll,
    /// Spins where the next event comes soon enough to be worth it, and sleeps else.
    #[default]
    Adaptive,
}

impl std::fmt::Display for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Completion::Interrupt => "interrupt",
            Completion::Poll => "poll",
            Completion::Adaptive => "adaptive",
        })
    }
}

/// How far calls to the guest may be held back to become fewer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Coalesce {
    /// Longest that a call waits, in microseconds; 0: no call waits.
    pub us: u32,
    /// Requests whose calls may become one; 0: as many as come in that time.
    pub max: u32,
}

/// What may change while a disk is served, all of it at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tuning {
    /// How workers wait.
    pub completion: Completion,
    /// Vrings that are waited for in another way, by index.
    pub vrings: BTreeMap<u16, Completion>,
    /// Most time that `adaptive` may spin in vain, over all workers, in per cent of one core.
    pub spin_cpu_max: u32,
    /// Most time that `adaptive` may spin at all, in vain or not, over all workers, in per cent of one
    /// core; `None`: as much as pays.
    pub spin_cpu_total: Option<u32>,
    /// Requests a second below which `adaptive` does not spin.
    pub spin_rate_min: u32,
    /// Per cent of a core that `adaptive` may pay for each per cent that it gains.
    pub spin_worth: u32,
    /// How calls are held back.
    pub coalesce: Coalesce,
    /// How large requests are split.
    pub split: Split,
    /// The policy for requests that the disk fails.
    pub on_error: OnError,
}

impl Tuning {
    /// Share of one core that may be spun in vain where nobody says otherwise, in per cent.
    pub const SPIN_CPU_MAX: u32 = 25;
    /// Requests a second below which the CPU time of sleeping is what counts, where nobody says otherwise: it is as
    /// small as it can be. Above, latency counts too.
    pub const SPIN_RATE_MIN: u32 = 1100;

    /// Per cent of a core that a per cent of speed may cost where nobody says otherwise: a core for a fifth.
    pub const SPIN_WORTH: u32 = 5;

    /// Adaptive, as much spinning as is usual, no call held back, errors reported.
    pub fn new(split: Split) -> Tuning {
        Tuning {
            completion: Completion::default(),
            vrings: BTreeMap::new(),
            spin_cpu_max: Tuning::SPIN_CPU_MAX,
            spin_cpu_total: None,
            spin_rate_min: Tuning::SPIN_RATE_MIN,
            spin_worth: Tuning::SPIN_WORTH,
            coalesce: Coalesce::default(),
            split,
            on_error: OnError::default(),
        }
    }

    /// How the vring of this index is waited for.
    pub fn completion_of(&self, vring: u16) -> Completion {
        self.vrings.get(&vring).copied().unwrap_or(self.completion)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vring_of_its_own_mind_differs_from_the_rest() {
        let mut tuning = Tuning::new(Split::Off);
        tuning.vrings.insert(3, Completion::Poll);
        assert_eq!(tuning.completion_of(2), Completion::Adaptive);
        assert_eq!(tuning.completion_of(3), Completion::Poll);
    }
}
