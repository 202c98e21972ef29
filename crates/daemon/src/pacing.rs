//! The options for how workers wait and when they notify the guest, and the tuning that follows from them.

use clap::{Args, ValueEnum};
use cleave_worker::{Coalesce, Completion, Split, Tuning};

use crate::failure::Failure;

/// `--completion` and what goes with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Args)]
pub(crate) struct PacingArgs {
    /// How a worker waits for the guest and for the disk
    ///
    /// interrupt: it sleeps whenever there is nothing to do. poll: it spins as long as the guest uses its vrings, which
    /// saves the wake-up and costs a CPU; if other threads want that CPU, it sleeps nevertheless. adaptive: it tries
    /// both on the current load, spins if that makes requests faster by enough to be worth the CPU time (--spin-worth),
    /// and sleeps otherwise. An idle disk costs nothing.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Wait::Adaptive)]
    pub(crate) completion: Wait,
    /// Most CPU time that adaptive may spin in vain, in per cent of one core, 0 to 25600
    ///
    /// For the whole disk, however many workers serve it. When it is used up, workers sleep until some has accrued
    /// again. 0: adaptive never spins. Refused beside interrupt and poll, unless --control could change the mode later.
    #[arg(long, value_name = "PCT", default_value_t = Tuning::SPIN_CPU_MAX,
          value_parser = clap::value_parser!(u32).range(0..=SPIN_MAX))]
    pub(crate) spin_cpu_max: u32,
    /// Most CPU time that adaptive may spin at all, in vain or not [default: as much as pays]
    ///
    /// In per cent of one core, 1 to 25600, for all workers of this daemon together. Refused in the same cases as
    /// --spin-cpu-max.
    #[arg(long, value_name = "PCT", value_parser = clap::value_parser!(u32).range(1..=SPIN_MAX))]
    pub(crate) spin_cpu_total: Option<u32>,
    /// Requests a second below which adaptive does not spin, 0 to 1000000000
    ///
    /// Below that rate it costs as little CPU time as interrupt, and each request waits for a wake-up. 0: it spins at
    /// any rate if that pays and budget is left; it still sleeps through gaps of more than a millisecond. Refused in
    /// the same cases as --spin-cpu-max.
    #[arg(long, value_name = "N", default_value_t = Tuning::SPIN_RATE_MIN,
          value_parser = clap::value_parser!(u32).range(0..=SPIN_RATE_MAX))]
    pub(crate) spin_rate_min: u32,
    /// Per cent of a core that adaptive may pay for each per cent that spinning makes the disk faster, 0 to 10000
    ///
    /// With 5 it spends a whole core if that makes the disk a fifth faster, and does not spin for a gain below 5 %.
    /// Gain and cost are measured on the load. 0: it spins only if that costs no more CPU time than sleeping. Refused
    /// in the same cases as --spin-cpu-max.
    #[arg(long, value_name = "N", default_value_t = Tuning::SPIN_WORTH,
          value_parser = clap::value_parser!(u32).range(0..=SPIN_WORTH_MAX))]
    pub(crate) spin_worth: u32,
    /// Longest time that a call to the guest is delayed to merge it with the next, in microseconds, 0 to 10000
    ///
    /// Only while other requests of the vring are in flight: a lone request is never delayed. 0: never.
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = clap::value_parser!(u32).range(0..=COALESCE_US_MAX))]
    pub(crate) coalesce_us: u32,
    /// Most requests whose calls are merged into one, 0 to 32768; 0: as many as complete within --coalesce-us
    ///
    /// Needs --coalesce-us above 0.
    #[arg(long, value_name = "N", default_value_t = 0,
          value_parser = clap::value_parser!(u32).range(0..=COALESCE_MAX_MAX))]
    pub(crate) coalesce_max: u32,
}

/// 256 workers that never rest.
pub(crate) const SPIN_MAX: i64 = 25_600;
/// More than any vring gets: it never spins.
pub(crate) const SPIN_RATE_MAX: i64 = 1_000_000_000;
/// Far beyond any core count: it spins wherever that gains 5 %.
pub(crate) const SPIN_WORTH_MAX: i64 = 10_000;
/// Longer than any guest would thank us for, and far below what it takes for a lost request.
pub(crate) const COALESCE_US_MAX: i64 = 10_000;
/// As many as a vring can have.
pub(crate) const COALESCE_MAX_MAX: i64 = 32_768;

/// `--completion`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Wait {
    Interrupt,
    Poll,
    Adaptive,
}

impl From<Wait> for Completion {
    fn from(wait: Wait) -> Completion {
        match wait {
            Wait::Interrupt => Completion::Interrupt,
            Wait::Poll => Completion::Poll,
            Wait::Adaptive => Completion::Adaptive,
        }
    }
}

/// A limit on the requests of one call means nothing where no call is held back. The error ends where the name of
/// the other option belongs.
pub(crate) fn check_coalescing(us: u32, max: u32) -> Result<(), String> {
    match (us, max) {
        (0, max @ 1..) => Err(format!("{max} has no effect without a time: also set")),
        _ => Ok(()),
    }
}

impl PacingArgs {
    /// Refuses a limit on calls that nothing holds back; a PATCH of the control socket does the same.
    pub(crate) fn refuse_vain_coalescing(&self) -> Result<(), Failure> {
        check_coalescing(self.coalesce_us, self.coalesce_max)
            .map_err(|why| Failure::input(format!("--coalesce-max {why} --coalesce-us")))
    }

    /// Refuses options of adaptive polling if the disk can never be adaptive. `given`: whether an option of
    /// this name stands on the command line.
    pub(crate) fn refuse_idle(
        &self,
        given: impl Fn(&str) -> bool,
        has_control: bool,
    ) -> Result<(), Failure> {
        if self.completion == Wait::Adaptive || has_control {
            return Ok(());
        }
        let idle = [
            ("spin_cpu_max", "--spin-cpu-max"),
            ("spin_cpu_total", "--spin-cpu-total"),
            ("spin_rate_min", "--spin-rate-min"),
            ("spin_worth", "--spin-worth"),
        ];
        match idle.iter().find(|(name, _)| given(name)) {
            None => Ok(()),
            Some((_, option)) => Err(Failure::input(format!(
                "{option} is for --completion adaptive; leave one of the two out"
            ))),
        }
    }

    /// The tuning that workers start with.
    pub(crate) fn tuning(&self, split: Split) -> Tuning {
        Tuning {
            completion: self.completion.into(),
            spin_cpu_max: self.spin_cpu_max,
            spin_cpu_total: self.spin_cpu_total,
            spin_rate_min: self.spin_rate_min,
            spin_worth: self.spin_worth,
            coalesce: Coalesce {
                us: self.coalesce_us,
                max: self.coalesce_max,
            },
            ..Tuning::new(split)
        }
    }
}
