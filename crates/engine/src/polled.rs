//! The polled ring: it polls the device for the completions of its reads and writes instead of waiting for
//! interrupts (IORING_SETUP_IOPOLL). The plain ring does everything else.
//!
//! The kernel accepts only reads and writes past the page cache here, and may refuse any of them: the queue
//! is full, the device has no polled queue, or a layer between does not support polling. The store then gives
//! the op to the plain ring, and its owner does not notice.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use cleave_blk::{Op, OpKind, Segment};
use cleave_disk::Disk;
use cleave_guest::{Epoch, Memory, RegionSpec};
use io_uring::{cqueue, opcode, squeue};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::param::page_size;

use crate::ring::{ClosedRing, CompletionMode, Level, Ring, RingConfig};
use crate::{AnyStore, EngineError, Event, Reactor, Store, Wait};

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

    /// Whether entries are in flight, so that the ring must be polled.
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

    /// Whether `complete` would return an entry.
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

/// Checks that every leg of a disk can be polled, by reading its first block. The queue limits are not
/// enough: a layer above the device may not support polling although it reports them.
pub fn probe_iopoll(disk: &Arc<Disk>) -> Result<(), EngineError> {
    let unit = u64::from(disk.limits().offset_align_bytes.max(512));
    let epoch = Epoch::from(memory(unit).map_err(EngineError::setup)?);
    let mut reactor = Reactor::new(&[disk], 1, 0, 0)?;
    let mut store = [AnyStore::open(&mut reactor, disk, 0, 1)?];
    let segments = [Segment {
        addr: 0,
        // At most 64 KiB.
        len: unit as u32,
    }];
    let mut outcome = Ok(());
    for (number, leg) in (0..).zip(disk.legs()) {
        let op = Op {
            kind: OpKind::Read,
            leg: number,
            offset_bytes: 0,
            len_bytes: unit,
            segments: &segments,
            skip_bytes: 0,
        };
        store[0].push(&mut reactor, &epoch, op, 0);
        let source = match only_result(&mut reactor, &mut store).map_err(EngineError::setup)? {
            Err(errno) => io::Error::from_raw_os_error(errno),
            Ok(()) if reactor.polled() > u64::from(number) => continue,
            Ok(()) => io::Error::from_raw_os_error(libc::EOPNOTSUPP),
        };
        let name = leg.name().to_owned();
        outcome = Err(EngineError::Iopoll { name, source });
        break;
    }
    reactor.close(&mut store);
    outcome
}

/// Waits for the result of the one op in flight.
fn only_result(reactor: &mut Reactor, store: &mut [AnyStore]) -> io::Result<Result<(), i32>> {
    loop {
        match reactor.reap(store) {
            Some(Event::Done { done, .. }) => return Ok(done.result),
            Some(Event::Woken { .. }) => {}
            None => reactor.enter(store, Wait::Until(None))?,
        }
    }
}

/// Memory of our own that stands in for a guest's.
fn memory(bytes: u64) -> io::Result<Arc<Memory>> {
    let file = memfd_create("cleave-probe", MemfdFlags::CLOEXEC)?;
    let bytes = bytes.next_multiple_of(page_size() as u64);
    ftruncate(&file, bytes)?;
    let region = RegionSpec {
        guest_addr: 0,
        user_addr: 0,
        len_bytes: bytes,
        file_offset: 0,
        file: file.into(),
    };
    Memory::new(vec![region]).map_err(io::Error::other)
}
