//! The contract of a store with its owner.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_blk::Op;
use cleave_guest::{Epoch, Memory};

use crate::{Completion, LegStats, Reactor};

/// Bytes that a store copies on its thread between two enters, before it asks for a pause ([`Store::is_sated`]). Some thirty
/// microseconds, beside which an enter costs little.
pub(crate) const LAP_BYTES_MAX: u64 = 256 << 10;

/// A completed op. Its memory and its range of the disk are no longer touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// The token that was given to `push`.
    pub token: u64,
    /// `Ok` if the whole op succeeded; otherwise the errno.
    pub result: Result<(), i32>,
}

/// An event that a reactor reports to its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// An op of a store has completed.
    Done {
        /// Index of the store in the slice that the reactor was given.
        store: usize,
        /// The completed op.
        done: Done,
    },
    /// A watched descriptor was signalled. The event may be spurious.
    Woken {
        /// The slot that was given to `watch`.
        slot: u16,
    },
}

/// How long `enter` may sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Submit and check for completions, but do not sleep.
    No,
    /// Sleep until an event arrives, or until the deadline if there is one.
    Until(Option<Instant>),
}

/// Runs ops on one disk (all its legs), on one thread, beside other stores on the same [`Reactor`].
///
/// The owner promises:
/// - to call `push` only while `room() > 0`;
/// - to give every call the same reactor, and that reactor always the same stores: those that submit to it,
///   in the order in which they were made, then the others. Breaking this rule causes a panic, before a
///   completion could end an op of another store;
/// - to `close` the store before it drops it.
///
/// The store promises:
/// - each pushed op yields exactly one [`Done`] and holds its epoch for as long as anything may touch the
///   op's memory;
/// - short transfers are continued; EAGAIN, EINTR and ENOMEM are retried, but not those of an fsync; EOF inside
///   the disk is EIO;
/// - reads and writes that the disk cannot take directly go through bounce buffers, and sub-block writes
///   through a serialised read-modify-write;
/// - no heap allocation and no lock per op, but for NBD (copies of changes that are not flushed), models (their drive) and RBD (what
///   librbd does).
pub trait Store {
    /// How many more ops `push` accepts now.
    fn room(&self) -> usize;

    /// Ops pushed and not yet reported, and those of the store's own, which are not reported.
    fn in_flight(&self) -> usize;

    /// Queues an op. Its addresses are translated in the memory of `epoch`. This call cannot fail: a bad
    /// address is reported as `Done` with EFAULT.
    fn push(&mut self, reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64);

    /// Runs an op immediately if this store can do so without waiting. `true`: the op succeeded, and no event
    /// follows. `false`: the op was not run, and the caller must push it. Needs no room.
    #[inline]
    fn at_once(&mut self, _memory: &Memory, _op: &Op<'_>) -> bool {
        false
    }

    /// Accepts a completion that the reactor received for this store. Only stores that submit entries get one.
    #[inline]
    fn completed(&mut self, _reactor: &mut Reactor, _completion: Completion) {}

    /// Returns true if ops are in flight that complete without an interrupt. While there are, each `enter` polls for
    /// them, and none sleeps without a time limit.
    #[inline]
    fn polls(&self) -> bool {
        false
    }

    /// Takes the next completed op.
    fn reap(&mut self) -> Option<Done>;

    /// Returns true if `reap` would return an op.
    fn is_ready(&self) -> bool;

    /// Runs before the reactor enters the kernel, whether or not it will sleep: retries the ops that are due.
    /// Returns the longest sleep allowed.
    #[inline]
    fn before_enter(&mut self, _reactor: &mut Reactor, _wait: Wait) -> Option<Duration> {
        None
    }

    /// Runs after the reactor has returned from the kernel.
    #[inline]
    fn after_enter(&mut self) {}

    /// Returns true once each time the way to the storage is there again. Ops that failed with ENOTCONN before were not done, and
    /// may succeed now.
    #[inline]
    fn came_back(&mut self) -> bool {
        false
    }

    /// Returns true if the ops of this lap copy so many bytes on this thread that commands, completions and other disks should have
    /// their turn before the next op. False again after the next enter, unless ops that were put off fill the next lap too.
    #[inline]
    fn is_sated(&self) -> bool {
        false
    }

    /// Begins the last work of the store, such as a flush. The work is in flight until it is done or the disk is given up. The owner
    /// calls this when nothing is in flight, and pushes nothing afterwards; a second call does nothing. If it then enters until nothing
    /// is in flight, `close` does not wait for the disk. Without this call the last work is left out.
    #[inline]
    fn prepare_close(&mut self) {}

    /// Waits until no pushed op is in flight. Ops that have not started are dropped, and nothing is
    /// reported. Returns false if that cannot be waited for: the kernel may still do what was asked.
    fn close(&mut self, _reactor: &mut Reactor) -> bool {
        true
    }

    /// Gives up what other stores of the disk wait for. The owner calls this when it neither uses nor drops the store any more, because
    /// nothing can be said of what is in flight.
    #[inline]
    fn release_shared(&mut self) {}

    /// The counters of each leg, for a disk with several. Only this store writes them.
    fn leg_stats(&self) -> Arc<[LegStats]> {
        Arc::new([])
    }
}
