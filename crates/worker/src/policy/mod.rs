//! Policies for spinning, sleeping and calling: arithmetic on observations. Nothing here reads a clock or holds
//! a descriptor; time is an argument.

mod backoff;
mod budget;
mod caller;
mod experiment;
mod pacer;
mod rate;
mod trial;

pub(crate) use backoff::ContentionBackoff;
pub(crate) use budget::Budget;
pub(crate) use caller::{CallDecision, Caller};
pub(crate) use experiment::{Arm, Experiment, ExperimentResult, Gain, Spent, Stretch};
pub(crate) use pacer::{LapWait, LapWork, Pacer, PacerContext, Scheduled};
pub(crate) use rate::RateBucket;
pub(crate) use trial::{Comparison, Trial};

/// Time over which a load is looked at: by windows of a trial and of a rest, by the bucket of requests, and by the budget.
const WINDOW_NS: u64 = 50_000_000;
/// Laps without work, and without a sleep, between two readings of the clock.
pub(crate) const CHECK_LAPS: u32 = 32;
