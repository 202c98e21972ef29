//! The settings that can change while a disk is served.

use std::collections::BTreeMap;

use crate::{OnError, RateLimits, Split};

/// How a worker learns of completions and kicks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CompletionPolicy {
    /// Sleeps when it has no work.
    Interrupt,
    /// Never sleeps while it has a vring to serve.
    Poll,
    /// Spins if the next event is expected soon enough to be worth it, and sleeps otherwise.
    #[default]
    Adaptive,
}

impl std::fmt::Display for CompletionPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            CompletionPolicy::Interrupt => "interrupt",
            CompletionPolicy::Poll => "poll",
            CompletionPolicy::Adaptive => "adaptive",
        })
    }
}

/// How long calls to the guest may be held back so that several become one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Coalesce {
    /// Maximum delay of a call in microseconds; 0: calls are not delayed.
    pub us: u32,
    /// Maximum number of requests per call; 0: as many as complete within the delay.
    pub max: u32,
}

/// All settings that can change while a disk is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tuning {
    /// How workers wait.
    pub completion: CompletionPolicy,
    /// Exceptions from `completion`, by vring index.
    pub vrings: BTreeMap<u16, CompletionPolicy>,
    /// Maximum time that `adaptive` may spin without finding work, over all workers, in per cent of one core.
    pub spin_cpu_max: u32,
    /// Maximum time that `adaptive` may spin at all, over all workers, in per cent of one core.
    /// `None`: no limit beside `spin_cpu_max`.
    pub spin_cpu_total: Option<u32>,
    /// Requests per second below which `adaptive` does not spin.
    pub spin_rate_min: u32,
    /// Per cent of a core that `adaptive` may spend for each per cent of gain.
    pub spin_worth: u32,
    /// How calls are held back.
    pub coalesce: Coalesce,
    /// How large requests are split.
    pub split: Split,
    /// The policy for requests that the disk fails.
    pub on_error: OnError,
    /// Requests and bytes a second.
    pub limits: RateLimits,
}

impl Tuning {
    /// Default share of one core that may be spun without finding work, in per cent.
    pub const SPIN_CPU_MAX: u32 = 25;
    /// Default request rate below which `adaptive` does not spin. At such rates CPU time matters more than
    /// latency, and a worker that sleeps uses the least.
    pub const SPIN_RATE_MIN: u32 = 1100;

    /// Default price of a gain: a core for a fifth of the response time.
    pub const SPIN_WORTH: u32 = 5;

    /// Returns the defaults: adaptive, no call held back, errors reported.
    pub fn new(split: Split) -> Tuning {
        Tuning {
            completion: CompletionPolicy::default(),
            vrings: BTreeMap::new(),
            spin_cpu_max: Tuning::SPIN_CPU_MAX,
            spin_cpu_total: None,
            spin_rate_min: Tuning::SPIN_RATE_MIN,
            spin_worth: Tuning::SPIN_WORTH,
            coalesce: Coalesce::default(),
            split,
            on_error: OnError::default(),
            limits: RateLimits::default(),
        }
    }

    /// Returns how the vring of this index is waited for.
    pub fn completion_of(&self, vring: u16) -> CompletionPolicy {
        self.vrings.get(&vring).copied().unwrap_or(self.completion)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vring_can_have_its_own_completion_mode() {
        let mut tuning = Tuning::new(Split::Off);
        tuning.vrings.insert(3, CompletionPolicy::Poll);
        assert_eq!(tuning.completion_of(2), CompletionPolicy::Adaptive);
        assert_eq!(tuning.completion_of(3), CompletionPolicy::Poll);
    }
}
