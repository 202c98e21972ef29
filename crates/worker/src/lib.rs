//! One thread's loop over its vrings. This crate forbids waiting for locks, allocation after start, and unsafe
//! code. A worker owns its vrings, store and slots outright; control hands ownership over by command instead of
//! sharing it. The workers of a disk share only what they learn about splitting, and a worker that finds the
//! splitter locked goes on without it.
//!
//! [`Handle`] is control's side: it starts the thread and sends commands. [`Worker`] is the loop itself,
//! generic over its store, so that a simulation can run it lap by lap.
#![forbid(unsafe_code)]

mod accept;
#[doc(hidden)]
pub mod bench;
mod clock;
mod command;
mod commands;
mod contention;
mod control;
mod counter;
mod cpu;
mod device;
mod error;
mod handle;
mod inbox;
mod incident;
mod lane;
mod limits;
mod logs;
mod on_error;
mod pacing;
mod policy;
mod pool;
mod quota;
pub mod record;
mod registry;
mod slots;
pub mod splitter;
mod stall;
mod stalls;
mod stats;
mod throttle;
mod token;
mod tuning;
mod waiting;
mod wake;
mod worker;

pub use cleave_engine::LegTotals;
pub use command::{Commands, Stopped, VringStart};
pub use control::{Control, Pending};
pub use device::{Device, WorkerConfig};
pub use error::SpawnError;
pub use handle::{Handle, reactor};
pub use incident::Incident;
pub use limits::{Limit, LimitKind, Limits};
pub use logs::Logs;
pub use on_error::{Action, OnError};
pub use pool::Pool;
pub use quota::{Quota, SharedQuota};
pub use registry::{Synced, Syncing};
pub use splitter::{Direction, Prior, Split, Splitter};
pub use stats::{Mode, Totals, Tried};
pub use throttle::LimitGroup;
pub use tuning::{Coalesce, Completion, Tuning};
pub use worker::{ALARM_RETIRED, LANES_MAX, Lap, Worker};
