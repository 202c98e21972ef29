//! RAM disks: ops run during `push`, long ones in parts, one in each lap.
//!
//! Unsafe because both ends of a copy are raw memory: guest memory, which the `Memory` that resolved it keeps
//! mapped during the call, and the store's region, which the disk keeps mapped. The guest and other workers
//! may change either at the same time. Every byte then has one of the values written, as on a real disk, and
//! nothing here depends on the copied data.

use std::io;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use cleave_blk::{Op, OpKind};
use cleave_disk::{Backing, Disk};
use cleave_guest::{Epoch, Memory};
use rustix::mm::Advice;
use vm_memory::MmapRegion;

use super::parts::Parts;
use crate::ops::lap::LapBudget;
use crate::ops::memory::{check, walk};
use crate::ops::progress::Direction;
use crate::ops::queue::{OpQueue, from_ops};
use crate::{LAP_BYTES_MAX, Reactor, Store, Wait};

/// Ops on a RAM disk.
#[derive(Debug)]
pub struct Ram {
    disk: Arc<Disk>,
    bytes: Bytes,
    ops: OpQueue<()>,
    parts: Parts,
}

impl Ram {
    /// For a disk that is in memory. `ops`: most ops in flight.
    pub(crate) fn new(disk: Arc<Disk>, ops: u16) -> io::Result<Ram> {
        let Backing::Ram(region) = disk.backing() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        Ok(Ram {
            bytes: Bytes::new(region),
            ops: OpQueue::new(&disk, ops, 0, ())?,
            parts: Parts::new(ops),
            disk,
        })
    }
}

impl Store for Ram {
    from_ops!(room, in_flight, reap, is_ready);

    #[inline]
    fn push(&mut self, _reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64) {
        if op.len_bytes > LAP_BYTES_MAX {
            let checked = self.bytes.check(&self.disk, &op);
            return self.parts.push(&mut self.ops, epoch, &op, token, checked);
        }
        self.parts.moves(op.len_bytes);
        let result = run(self.bytes, &self.disk, epoch, &op, self.parts.lap());
        self.ops.end(token, result);
    }

    /// An op that fails here is pushed and fails again there; repeating it does no harm.
    #[inline]
    fn at_once(&mut self, memory: &Memory, op: &Op<'_>) -> bool {
        if op.len_bytes > LAP_BYTES_MAX {
            return false;
        }
        self.parts.moves(op.len_bytes);
        run(self.bytes, &self.disk, memory, op, self.parts.lap()).is_ok()
    }

    #[inline]
    fn before_enter(&mut self, _reactor: &mut Reactor, _wait: Wait) -> Option<Duration> {
        let bytes = self.bytes;
        self.parts
            .begin_lap(&mut self.ops, |kind, offset, start, len| {
                // SAFETY: `push` checked that the op's range is in the mapping, and the op's epoch keeps its memory mapped.
                unsafe { bytes.change(kind, offset, start, len) };
            })
    }

    #[inline]
    fn is_sated(&self) -> bool {
        self.parts.is_sated()
    }
}

/// The bytes of a store in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bytes {
    /// First byte; mapped while the store holds the disk.
    pub(crate) start: *mut u8,
    /// Bytes mapped.
    pub(crate) len: u64,
    /// A private mapping becomes zero when its pages are dropped; a shared one keeps its data.
    pub(crate) private: bool,
}

impl Bytes {
    /// The bytes of a region that outlives the store.
    pub(crate) fn new(region: &MmapRegion) -> Bytes {
        // The contents of a disk do not belong in a core dump. If the kernel refuses, nothing breaks.
        // SAFETY: the whole of a mapping that the caller holds; the advice does not change its contents.
        let _ = unsafe {
            rustix::mm::madvise(region.as_ptr().cast(), region.size(), Advice::LinuxDontDump)
        };
        Bytes {
            start: region.as_ptr(),
            len: region.size() as u64,
            private: region.flags() & libc::MAP_PRIVATE != 0,
        }
    }

    /// Checks an op's range as [`check`] does, and that it is in the store.
    #[inline]
    pub(crate) fn check(self, disk: &Disk, op: &Op<'_>) -> Result<u64, i32> {
        let end = check(disk, op)?;
        if end > self.len {
            return Err(libc::EIO);
        }
        Ok(end)
    }

    /// Moves bytes between the store and guest memory at `start`, or zeroes a range of the store.
    ///
    /// # Safety
    ///
    /// The range of the store must be in its mapping. For a read or a write, `start` .. `start` + `len` must be guest memory that is
    /// mapped during the call; the two mappings are distinct.
    pub(crate) unsafe fn change(self, kind: OpKind, offset: u64, start: *mut u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let at = self.start.add(offset as usize);
            match kind {
                OpKind::Read => ptr::copy_nonoverlapping(at, start, len),
                OpKind::Write { .. } => ptr::copy_nonoverlapping(start, at, len),
                OpKind::Discard | OpKind::Zero { .. } => clear(self, at, len),
                OpKind::Sync => {}
            }
        }
    }
}

/// Runs an op on a RAM disk.
fn run(
    ram: Bytes,
    disk: &Disk,
    memory: &Memory,
    op: &Op<'_>,
    lap: &mut LapBudget,
) -> Result<(), i32> {
    if op.kind == OpKind::Sync {
        return Ok(());
    }
    ram.check(disk, op)?;
    // Inside a mapping, so it fits.
    let offset = usize::try_from(op.offset_bytes).map_err(|_huge| libc::EIO)?;
    // SAFETY: `offset` ≤ `end` ≤ the length of the mapping.
    let at = unsafe { ram.start.add(offset) };
    match op.kind {
        OpKind::Read => copy(memory, op, at, lap, Direction::ToGuest),
        OpKind::Write { .. } => {
            copy(memory, op, at, lap, Direction::FromGuest)?;
            // The store may now contain zeroes instead of the lost page, but no success is reported.
            if memory.is_lost() {
                Err(libc::EFAULT)
            } else {
                Ok(())
            }
        }
        OpKind::Discard | OpKind::Zero { .. } => {
            clear(
                ram,
                at,
                usize::try_from(op.len_bytes).map_err(|_huge| libc::EIO)?,
            );
            Ok(())
        }
        OpKind::Sync => Ok(()),
    }
}

/// `at` .. `at` + `op.len_bytes` is in the store.
fn copy(
    memory: &Memory,
    op: &Op<'_>,
    mut at: *mut u8,
    lap: &mut LapBudget,
    direction: Direction,
) -> Result<(), i32> {
    walk(memory, op, lap, |start, len| {
        // SAFETY: `walk` reports mapped guest ranges of `op.len_bytes` in total, so `at` + `len` stays in the
        // checked range. The mappings are distinct: the store's anonymous memory is never given to a guest.
        unsafe {
            match direction {
                Direction::ToGuest => std::ptr::copy_nonoverlapping(at, start, len),
                Direction::FromGuest => std::ptr::copy_nonoverlapping(start, at, len),
            }
            at = at.add(len);
        }
    })
}

/// Zeroes `len` bytes at `at`: whole pages are given back to the kernel, partial ones are written.
fn clear(ram: Bytes, at: *mut u8, len: usize) {
    let (head, pages) = whole_pages(at.addr(), len, rustix::param::page_size());
    // SAFETY: all three parts lie in the range that the caller checked.
    unsafe {
        if pages > 0 && ram.private && drop_pages(at.add(head), pages) {
            at.write_bytes(0, head);
            at.add(head + pages).write_bytes(0, len - head - pages);
        } else {
            at.write_bytes(0, len);
        }
    }
}

/// Returns how many bytes of a range come before its first whole page, and how many its whole pages have.
fn whole_pages(addr: usize, len: usize, page_bytes: usize) -> (usize, usize) {
    let head = addr.wrapping_neg() % page_bytes;
    (head, len.saturating_sub(head) / page_bytes * page_bytes)
}

/// Returns true if the pages were replaced by zeroes.
fn drop_pages(at: *mut u8, len: usize) -> bool {
    // SAFETY: whole pages of the store's own private anonymous mapping; they stay mapped and read as
    // zero. Other threads access them as bytes only, without references.
    unsafe { rustix::mm::madvise(at.cast(), len, Advice::LinuxDontNeed) }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_of_a_range_are_found_whatever_a_page_is() {
        for (addr, len, page_bytes, expected) in [
            (0x1_3000, 0x5000, 0x1000, (0, 0x5000)),
            (0x1_3000, 0x5000, 0x4000, (0x1000, 0x4000)),
            (0x1_3000, 0x5000, 0x1_0000, (0xd000, 0)),
            (0x1_3000, 0x2_0000, 0x1_0000, (0xd000, 0x1_0000)),
            (0x1_0001, 0x1_0000, 0x1000, (0xfff, 0xf000)),
            (0x2_0000, 0x3_ffff, 0x4000, (0, 0x3_c000)),
            (0x2_0000, 0, 0x1_0000, (0, 0)),
        ] {
            let found = whole_pages(addr, len, page_bytes);
            assert_eq!(found, expected, "{addr:#x} {len:#x} {page_bytes:#x}");
        }
    }
}
