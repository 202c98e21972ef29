//! Runs ops. This crate must not know vrings, the protocol or any policy: it takes [`Op`](cleave_blk::Op)s with
//! guest addresses, translates them, and reports each op exactly once. It is one of the daemon's three crates with
//! unsafe code, and the only one that uses io_uring.
//!
//! It has two entry points. A [`Reactor`] belongs to a worker thread: its io_uring, in which the thread
//! sleeps, watches descriptors and calls guests. A [`Store`] is one disk on that thread. Several stores share
//! a reactor; `null.rs` is the smallest complete store.

mod any;
mod area;
mod bell;
mod buffer;
mod error;
mod files;
mod iopoll;
mod legs;
mod memory;
mod model;
mod nbd;
mod null;
mod parts;
mod piece;
mod polled;
mod progress;
mod ram;
mod rbd;
mod reactor;
mod ring;
mod step;
mod store;
mod table;
mod watch;

pub use any::{AnyStore, Visitor};
pub use bell::BellFd;
pub use error::EngineError;
pub use iopoll::probe_iopoll;
pub use legs::{LegStats, LegTotals};
pub use model::Model;
pub use nbd::Nbd;
pub use null::Null;
pub use rbd::Rbd;
pub use reactor::{Completion, Prepared, Reactor, Rest};
pub use ring::{ClosedRing, share_thread};
pub use store::{Done, Event, Store, Wait};

pub(crate) use store::LAP_BYTES_MAX;

#[cfg(test)]
mod rig;
#[cfg(test)]
mod tests;
