//! The polled ring: reads and writes whose end the device is asked for instead of telling it by an
//! interrupt (IORING_SETUP_IOPOLL). It stands beside the plain ring, which does all else.
//!
//! The kernel takes nothing here but reads and writes past the page cache, and of those it may refuse
//! any: the queue has no room that it could wait for, the device no polled queue, a layer between no
//! polling. Such an op is done by the plain ring, and its owner never hears of it.

use std::io;
use std::sync::Arc;

use cleave_blk::{Op, OpKind, Segment};
use cleave_disk::Disk;
use cleave_guest::{Memory, RegionSpec};
use io_uring::{cqueue, opcode, squeue};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::param::page_size;

use crate::ring::{Ends, FIRST_LEG_SLOT, Level, Plan, Ring};
use crate::uring::files;
use crate::{Engine, EngineError, Event, Uring, Wait};

/// What it takes.
const OPCODES: [u8; 4] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
];
/// EOPNOTSUPP in a row after which a leg is not polled any more. One may come of what an op looks like.
const REFUSALS_MAX: u32 = 8;

/// The ring, and what is in it.
#[derive(Debug)]
pub(crate) struct Polled {
    ring: Ring,
    /// Entries that it has and has not completed.
    flying: usize,
    /// Completions that went well.
    ended: u64,
    /// EOPNOTSUPP of each leg since one of it did.
    refusals: Box<[u32]>,
    #[cfg(test)]
    mangle: Option<Mangle>,
    #[cfg(test)]
    seen: u64,
}

/// Puts another result in place of the kernel's, given a running number.
#[cfg(test)]
pub(crate) type Mangle = fn(u64, i32) -> i32;

impl Polled {
    /// Makes the ring for the legs of a disk that are polled for; `None` where there is none.
    pub(crate) fn new(
        disk: &Disk,
        submissions: u32,
        levels: &[Level],
    ) -> Result<Option<Polled>, EngineError> {
        if !disk.is_polled() {
            return Ok(None);
        }
        let legs = files(disk);
        let submissions = submissions.next_power_of_two();
        let ring = Ring::new(&Plan {
            submissions,
            completions: 2 * submissions,
            // A stripe has at most 64.
            files: FIRST_LEG_SLOT + legs.len() as u32,
            legs: &legs,
            opcodes: &OPCODES,
            levels,
            ends: Ends::Asked,
        })?;
        Ok(Some(Polled {
            ring,
            flying: 0,
            ended: 0,
            refusals: vec![0; disk.legs().len()].into_boxed_slice(),
            #[cfg(test)]
            mangle: None,
            #[cfg(test)]
            seen: 0,
        }))
    }

    /// Queues an entry, as [`Ring::push`] does.
    ///
    /// # Safety
    ///
    /// As there: everything that the entry points to stays valid until its completion was seen.
    #[inline]
    pub(crate) unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the caller's promise.
        let pushed = unsafe { self.ring.push(entry) };
        self.flying += usize::from(pushed);
        pushed
    }

    /// Entries are in flight: somebody has to look.
    #[inline]
    pub(crate) fn is_flying(&self) -> bool {
        self.flying > 0
    }

    /// Submits what is queued and asks the devices what they have ended: one system call, none where
    /// nothing is in flight. Does not wait.
    #[inline]
    pub(crate) fn look(&mut self) -> io::Result<()> {
        match self.flying {
            0 => Ok(()),
            _ => self.ring.submit(),
        }
    }

    /// The next completion, without a system call.
    #[inline]
    pub(crate) fn complete(&mut self) -> Option<cqueue::Entry> {
        if self.flying == 0 {
            return None;
        }
        let entry = self.ring.complete()?;
        self.flying -= 1;
        Some(entry)
    }

    /// Whether `complete` has something.
    pub(crate) fn has_completions(&mut self) -> bool {
        self.flying > 0 && self.ring.has_completions()
    }

    /// What a completion's result means for those to come on its leg, and whether the plain ring has to
    /// do this one.
    #[inline]
    pub(crate) fn judge(&mut self, disk: &Disk, leg: u16, result: i32) -> Verdict {
        let refusals = self.refusals.get_mut(usize::from(leg));
        match result.checked_neg() {
            Some(libc::EOPNOTSUPP) => {
                if let Some(refusals) = refusals {
                    *refusals += 1;
                    if *refusals >= REFUSALS_MAX {
                        leave(disk, leg);
                    }
                }
                Verdict::Refused
            }
            // No room in the queue that could be waited for; or not this range, or not so.
            Some(libc::EAGAIN | libc::EINVAL) => Verdict::Refused,
            Some(1..) => Verdict::Taken,
            _ => {
                if let Some(refusals) = refusals {
                    *refusals = 0;
                }
                self.ended += 1;
                Verdict::Taken
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn mangle(&mut self, mangle: Mangle) {
        self.mangle = Some(mangle);
    }

    #[cfg(test)]
    pub(crate) fn mangled(&mut self, result: i32) -> i32 {
        self.seen += 1;
        self.mangle
            .map_or(result, |mangle| mangle(self.seen, result))
    }

    /// Completions, refused ones too.
    #[cfg(test)]
    pub(crate) fn seen(&self) -> u64 {
        self.seen
    }

    /// Completions that went well.
    pub(crate) fn ended(&self) -> u64 {
        self.ended
    }

    /// How often the kernel was entered.
    pub(crate) fn enters(&self) -> u64 {
        self.ring.enters()
    }
}

/// Who answers for a completion of the polled ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The device, well or not.
    Taken,
    /// Nobody: it was not done.
    Refused,
}

#[cold]
fn leave(disk: &Disk, leg: u16) {
    let Some(leg) = disk.legs().get(usize::from(leg)) else {
        return;
    };
    if leg.leave_polling() {
        tracing::warn!(
            disk = leg.name(),
            "its device refuses to be polled; served by interrupts from here on"
        );
    }
}

impl Uring {
    /// Whether every leg of a disk can be polled for: reads a block of each. What a device states is not
    /// all, since a layer above it may not pass that on.
    pub fn probe_iopoll(disk: &Arc<Disk>) -> Result<(), EngineError> {
        let unit = u64::from(disk.limits().offset_align_bytes.max(512));
        let memory = memory(unit).map_err(EngineError::setup)?;
        let mut engine = Uring::new(Arc::clone(disk), memory, 1, 0, 0)?;
        let segments = [Segment {
            addr: 0,
            // At most 64 KiB.
            len: unit as u32,
        }];
        for (number, leg) in (0..).zip(disk.legs()) {
            engine.push(
                Op {
                    kind: OpKind::Read,
                    leg: number,
                    offset_bytes: 0,
                    len_bytes: unit,
                    segments: &segments,
                    skip_bytes: 0,
                },
                0,
            );
            let source = match engine.only_result().map_err(EngineError::setup)? {
                Err(errno) => io::Error::from_raw_os_error(errno),
                Ok(()) if engine.polled() > u64::from(number) => continue,
                Ok(()) => io::Error::from_raw_os_error(libc::EOPNOTSUPP),
            };
            let name = leg.name().to_owned();
            return Err(EngineError::Iopoll { name, source });
        }
        Ok(())
    }

    /// The result of the one op in flight.
    fn only_result(&mut self) -> io::Result<Result<(), i32>> {
        loop {
            match self.reap() {
                Some(Event::Done { result, .. }) => return Ok(result),
                Some(Event::Woken { .. }) => {}
                None => self.enter(Wait::Until(None))?,
            }
        }
    }
}

/// A guest's memory of our own.
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
