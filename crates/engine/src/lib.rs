//! Runs ops. This crate forbids knowing vrings, protocol or policy: it is handed [`Op`]s with guest
//! addresses, translates them inside, and reports each exactly once. It is the workspace's second
//! unsafe door on the daemon's side: io_uring is spoken here and nowhere else.

mod area;
mod bell;
mod buffer;
mod files;
mod legs;
mod memory;
mod model;
mod onspot;
mod piece;
mod polled;
mod progress;
mod ring;
mod sim;
mod step;
mod table;
mod uring;
mod watch;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use cleave_blk::Op;
use cleave_guest::Memory;

pub use legs::{LegStats, LegTotals};
pub use model::Model;
pub use sim::{Random, Sim, SimConfig, SimStore};
pub use uring::{EngineError, Uring};

/// Something an engine has to tell its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// An op has ended; its memory and its range of the disk are no longer touched.
    Done {
        /// As given to `push`.
        token: u64,
        /// Whole op done, or the errno that ended it.
        result: Result<(), i32>,
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

/// Runs ops against one disk (all its legs) and one guest memory, on the thread that made it.
///
/// The owner promises to call `push` only while `room() > 0`. The engine promises: each op pushed
/// yields exactly one `Event::Done`, after which it holds no reference to the op's memory; short
/// transfers are continued, EAGAIN and EINTR retried, EOF inside the disk is EIO; reads and writes
/// that the store cannot take as they are go through bounce buffers, sub-block writes through a
/// serialised read-modify-write; no heap allocation and no lock per op. Dropping an engine waits
/// for what is in flight.
pub trait Engine {
    /// How many more ops `push` takes now.
    fn room(&self) -> usize;

    /// Ops pushed and not yet reported.
    fn in_flight(&self) -> usize;

    /// Takes an op. Nothing here fails: a bad address is reported as `Done` with EFAULT.
    fn push(&mut self, op: Op<'_>, token: u64);

    /// Does an op here and now, where this engine can do so without waiting; `true`: done well, and no
    /// event will come of it. `false`: it was not taken, and is to be pushed like any other. Needs no
    /// room.
    #[inline]
    fn at_once(&mut self, _op: &Op<'_>) -> bool {
        false
    }

    /// The next event, without a system call. `None`: nothing until the next `enter`.
    fn reap(&mut self) -> Option<Event>;

    /// Submits what was pushed, rings what was belled, and waits as told: at most one system call,
    /// none where there is nothing to submit, nothing to collect from the kernel and no wait; one more
    /// where ops are polled for. Returns at once when events are ready, and while `polls` unless the wait
    /// has an end. `Err` is our own fault (a broken ring), not the disk's.
    fn enter(&mut self, wait: Wait) -> io::Result<()>;

    /// Ops are in flight that nothing tells the end of: each `enter` asks for it, and none sleeps for ever.
    #[inline]
    fn polls(&self) -> bool {
        false
    }

    /// Reads and writes that were polled for and went well, so far.
    fn polled(&self) -> u64 {
        0
    }

    /// Watches an eventfd (kick or command); each signal wakes `enter` and is an `Event::Woken`.
    /// What cannot be watched is woken once (a file of the wrong kind: a few times), then never.
    /// Replaces what the slot watched. The descriptor's flags and counter are left as they are.
    fn watch(&mut self, slot: u16, fd: OwnedFd);

    /// Forgets a watch; an event already under way may still come.
    fn unwatch(&mut self, slot: u16);

    /// Sets or removes the eventfd that `ring` writes.
    fn set_bell(&mut self, slot: u16, fd: Option<OwnedFd>);

    /// Adds one to the slot's eventfd, at the latest with the next `enter`; several calls before that
    /// count as one. Nothing where the slot has no eventfd. A full or broken descriptor is ignored.
    /// One without O_NONBLOCK costs the next enter a system call of its own.
    fn ring(&mut self, slot: u16);

    /// Ops pushed from now on are translated in `memory`.
    fn bind(&mut self, memory: Arc<Memory>);

    /// No op in flight was translated in an earlier memory.
    fn is_settled(&self) -> bool;

    /// Counters of the disk's legs, where it has several and they are counted: written by this engine
    /// alone.
    fn leg_stats(&self) -> Arc<[LegStats]> {
        Arc::new([])
    }
}
