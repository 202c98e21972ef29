//! When to spin and when to call: arithmetic over observations. Nothing here reads a clock or holds a
//! descriptor; time comes in as an argument.

mod budget;
mod caller;
mod crowd;
mod gaps;
mod heat;
mod pacer;
mod response;

pub(crate) use budget::Budget;
pub(crate) use caller::{Call, Caller};
pub(crate) use crowd::Crowd;
pub(crate) use gaps::{Gaps, HORIZON_NS, Plan, Waiting};
pub(crate) use heat::Heat;
pub(crate) use pacer::{Did, Outlook, Pace, Pacer, Terms};
pub(crate) use response::Response;
