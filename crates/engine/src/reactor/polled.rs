//! The polled ring: it polls the device for the completions of its reads and writes instead of waiting for
//! interrupts (IORING_SETUP_IOPOLL). The plain ring does everything else.
//!
//! The kernel accepts only reads and writes past the page cache here, and may refuse any of them: the queue
//! is full, the device has no polled queue, or a layer between does not support polling. The store then gives
//! the op to the plain ring, and its owner does not notice.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::mpsc::Sender;

use io_uring::{cqueue, opcode, squeue};

use super::ring::{ClosedRing, CompletionMode, Level, Ring, RingConfig};
use crate::EngineError;

/// The opcodes that the ring accepts.
const OPCODES: [u8; 4] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
];
/// The ring and the number of entries in it.
#[derive(Debug)]
pub(crate) struct Polled {
    ring: Ring,
    /// Entries submitted and not yet completed.
    in_flight: usize,
    /// Completions that succeeded.
    successes: u64,
}

impl Polled {
    /// Has the receiver close the ring.
    pub(crate) fn leave_to(&mut self, heir: Option<Sender<ClosedRing>>) {
        self.ring.leave_to(heir);
    }

    /// Creates the ring with the given number of file slots. It is not enabled yet.
    pub(crate) fn prepare(
        submissions: u32,
        files: u32,
        levels: &[Level],
    ) -> Result<Polled, EngineError> {
        let submissions = submissions.next_power_of_two();
        let ring = Ring::prepare(&RingConfig {
            submissions,
            completions: 2 * submissions,
            files,
            opcodes: &OPCODES,
            levels,
            completion_mode: CompletionMode::Polled,
        })?;
        Ok(Polled {
            ring,
            in_flight: 0,
            successes: 0,
        })
    }

    /// Enables the ring for the calling thread.
    pub(crate) fn enable(&mut self) -> io::Result<()> {
        self.ring.enable()
    }

    /// Puts a file into the table.
    pub(crate) fn set_file(&self, slot: u32, file: &BorrowedFd<'_>) -> io::Result<()> {
        self.ring.set_file(slot, Some(file.as_raw_fd()))
    }

    /// Queues an entry like [`Ring::push`].
    ///
    /// # Safety
    ///
    /// Everything that the entry points to must stay valid until its completion has been seen.
    #[inline]
    pub(crate) unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the caller's promise.
        let pushed = unsafe { self.ring.push(entry) };
        self.in_flight += usize::from(pushed);
        pushed
    }

    /// Returns true if entries are in flight, so that the ring must be polled.
    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        self.in_flight > 0
    }

    /// Submits the queued entries and polls the devices for completions. Makes one system call, or none if
    /// nothing is in flight. Does not wait.
    #[inline]
    pub(crate) fn poll(&mut self) -> io::Result<()> {
        match self.in_flight {
            0 => Ok(()),
            _ => self.ring.submit(),
        }
    }

    /// The next completion, without a system call.
    #[inline]
    pub(crate) fn complete(&mut self) -> Option<cqueue::Entry> {
        if self.in_flight == 0 {
            return None;
        }
        let entry = self.ring.complete()?;
        self.in_flight -= 1;
        Some(entry)
    }

    /// Returns true if `complete` would return an entry.
    pub(crate) fn has_completions(&mut self) -> bool {
        self.in_flight > 0 && self.ring.has_completions()
    }

    /// Counts a completion that succeeded.
    #[inline]
    pub(crate) fn count_success(&mut self) {
        self.successes += 1;
    }

    /// Completions that succeeded.
    pub(crate) fn successes(&self) -> u64 {
        self.successes
    }

    /// How often the kernel was entered.
    pub(crate) fn enters(&self) -> u64 {
        self.ring.enters()
    }
}
