//! Runs ops. This crate forbids knowing vrings, protocol or policy: it is handed [`Op`]s with guest
//! addresses, translates them inside, and reports each exactly once. It is the workspace's second
//! unsafe door on the daemon's side: io_uring is spoken here and nowhere else.
//!
//! It has two doors. A [`Reactor`] belongs to a worker thread: its io_uring, in which the thread sleeps,
//! watches descriptors and calls guests. A [`Store`] is one disk on that thread. Several stores share a
//! reactor; `null.rs` shows all that a store needs.

mod any;
mod area;
mod bell;
mod buffer;
mod files;
mod legs;
mod memory;
mod model;
mod null;
mod piece;
mod polled;
mod progress;
mod ram;
mod reactor;
mod ring;
mod step;
mod table;
mod watch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_blk::Op;
use cleave_guest::{Epoch, Memory};

pub use any::{AnyStore, Visitor};
pub use legs::{LegStats, LegTotals};
pub use model::Model;
pub use null::Null;
pub use polled::probe_iopoll;
pub use reactor::{Completion, EngineError, Reactor};

/// The end of an op: its memory and its range of the disk are no longer touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// As given to `push`.
    pub token: u64,
    /// Whole op done, or the errno that ended it.
    pub result: Result<(), i32>,
}

/// Something that a reactor has to tell its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// An op of a store has ended.
    Done {
        /// Index of the store in the slice that the reactor was given.
        store: usize,
        /// Which op, and how.
        done: Done,
    },
    /// A watched descriptor was signalled (may also be spurious).
    Woken {
        /// As given to `watch`.
        slot: u16,
    },
}

/// Whether `enter` may sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Submit and look, do not sleep.
    No,
    /// Sleep until an event, or until the instant if there is one.
    Until(Option<Instant>),
}

/// Runs ops on one disk (all its legs), on one thread, beside other stores on the same [`Reactor`].
///
/// The owner promises:
/// - to call `push` only while `room() > 0`;
/// - to give every call the same reactor, and that reactor always the same stores: those that submit to it, in
///   the order in which they were made, then the others. A store that breaks this is told by a panic, before a
///   completion could end the op of another;
/// - to `close` the store before it drops it.
///
/// The store promises:
/// - each op pushed yields exactly one [`Done`] and holds its epoch for as long as anything may touch the op's
///   memory;
/// - short transfers are continued, EAGAIN, EINTR and ENOMEM retried, EOF inside the disk is EIO;
/// - reads and writes that the disk cannot take as they are go through bounce buffers, sub-block writes through a
///   serialised read-modify-write;
/// - no heap allocation and no lock per op.
pub trait Store {
    /// How many more ops `push` takes now.
    fn room(&self) -> usize;

    /// Ops pushed and not yet reported.
    fn in_flight(&self) -> usize;

    /// Takes an op, whose addresses are translated in the memory of `epoch`. Nothing here fails: a bad
    /// address is reported as `Done` with EFAULT.
    fn push(&mut self, reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64);

    /// Does an op here and now, where this store can do so without waiting; `true`: done well, and no
    /// event will come of it. `false`: it was not taken, and is to be pushed like any other. Needs no
    /// room.
    #[inline]
    fn at_once(&mut self, _memory: &Memory, _op: &Op<'_>) -> bool {
        false
    }

    /// Takes over what the reactor has received for this store. Only for stores that submit to it.
    #[inline]
    fn completed(&mut self, _reactor: &mut Reactor, _completion: Completion) {}

    /// Ops are in flight whose end no interrupt tells: each `enter` asks for it, and none sleeps for ever.
    #[inline]
    fn polls(&self) -> bool {
        false
    }

    /// The next op that has ended.
    fn reap(&mut self) -> Option<Done>;

    /// Whether `reap` has something.
    fn is_ready(&self) -> bool;

    /// Work before the reactor enters the kernel, with or without a sleep: tries again what waits for
    /// time. Returns how long the sleep may be at most.
    #[inline]
    fn before_enter(&mut self, _reactor: &mut Reactor, _wait: Wait) -> Option<Duration> {
        None
    }

    /// Work after it came back from the kernel.
    #[inline]
    fn after_enter(&mut self) {}

    /// Waits until nothing of this store is in flight any more. Ops that have not started are dropped, and
    /// nothing is reported.
    fn close(&mut self, _reactor: &mut Reactor) {}

    /// Counters of the disk's legs, where it has several: written by this store alone.
    fn leg_stats(&self) -> Arc<[LegStats]> {
        Arc::new([])
    }
}

#[cfg(test)]
mod rig;
#[cfg(test)]
mod tests;
