//! Policies for spinning, sleeping and calling: arithmetic on observations. Nothing here reads a clock or holds
//! a descriptor; time is an argument.

mod budget;
mod caller;
mod crowd;
mod experiment;
mod heat;
mod pacer;

pub(crate) use budget::Budget;
pub(crate) use caller::{Call, Caller};
pub(crate) use crowd::Crowd;
pub(crate) use experiment::{Arm, Experiment, Finding, Gain, Spent, Stretch};
pub(crate) use heat::Heat;
pub(crate) use pacer::{Did, Pace, Pacer, Terms};
