//! One thread's loop over its vrings. This crate forbids waiting for locks, allocation after start, and unsafe
//! code. A worker owns its vrings, store and slots outright; control hands ownership over by command instead of
//! sharing it. The workers of a disk share its `Device`: settings, the splitter, the spin budget and the rate limits. A worker that
//! finds the splitter locked continues without it.
//!
//! [`Handle`] is control's side: it starts the thread and sends commands. [`Worker`] is the loop itself,
//! generic over its store, so that a simulation can run it lap by lap.
//!
//! `worker/` is the loop, `lane.rs` one of its vrings, `slots.rs` and `stalls.rs` the requests of a vring. `device/` is
//! what the workers of a disk share, `thread/` where they run, `settings/` what the operator chose. `policy/` and
//! `splitter/` decide, `record/` counts and times.
#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod bench;
mod clock;
mod command;
mod control;
mod counter;
mod device;
mod lane;
mod policy;
pub mod record;
mod settings;
mod slots;
pub mod splitter;
mod stalls;
mod stats;
mod thread;
mod token;
mod wake;
mod worker;

pub use cleave_engine::LegTotals;
pub use command::{Stopped, VringStart};
pub use control::{Commands, Control, Pending};
pub use device::cache_note::CacheNote;
pub use device::incident::Incident;
pub use device::logs::Logs;
pub use device::quota::{Quota, SharedQuota};
pub use device::throttle::{LimitGroup, LimitLevels};
pub use device::{Device, WorkerConfig};
pub use settings::limits::{Limit, LimitKind, RateLimits};
pub use settings::on_error::{ErrorAction, OnError, is_unsent};
pub use settings::tuning::{Coalesce, CompletionPolicy, Tuning};
pub use splitter::{DataDirection, Prior, Split, Splitter};
pub use stats::{Totals, TrialResult, WaitState};
pub use thread::error::SpawnError;
pub use thread::handle::{Handle, reactor};
pub use thread::pool::Pool;
pub use worker::{ALARM_RETIRED, LANES_MAX, Lap, Worker};
