//! RAM and null disks: done during `push`.
//!
//! Unsafe because both ends of a copy are raw memory: guest memory, which the `Memory` that resolved
//! it keeps mapped for the call, and the store's region, which the disk keeps mapped. Guest and other
//! workers may change either at the same time; every byte then has one of the values written, as on a
//! real disk, and nothing here depends on what is copied.

use cleave_blk::{Op, OpKind};
use cleave_disk::Disk;
use cleave_guest::Memory;
use rustix::mm::Advice;
use vm_memory::MmapRegion;

use crate::memory::walk;

/// A RAM store's bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ram {
    /// First byte; mapped while the engine holds the disk.
    pub(crate) start: *mut u8,
    /// Bytes mapped.
    pub(crate) len: u64,
    /// Dropping its pages makes them zero (a private mapping; a shared one keeps them).
    pub(crate) private: bool,
}

impl Ram {
    /// All bytes of a region that outlives the engine.
    pub(crate) fn new(region: &MmapRegion) -> Ram {
        Ram {
            start: region.as_ptr(),
            len: region.size() as u64,
            private: region.flags() & libc::MAP_PRIVATE != 0,
        }
    }
}

/// Runs an op on the null disk: reads are zeroes (or leave their memory as it is, which must be mapped all
/// the same), everything else is accepted.
#[inline]
pub(crate) fn null(zeroes: bool, disk: &Disk, memory: &Memory, op: &Op<'_>) -> Result<(), i32> {
    check(disk, op)?;
    match op.kind {
        OpKind::Read if zeroes => walk(memory, op, zero_fill),
        OpKind::Read => walk(memory, op, |_, _| ()),
        OpKind::Write { .. } | OpKind::Sync | OpKind::Discard | OpKind::Zero { .. } => Ok(()),
    }
}

fn zero_fill(start: *mut u8, len: usize) {
    // SAFETY: `walk` reports ranges that are mapped and writable while the caller holds the memory.
    unsafe { start.write_bytes(0, len) };
}

/// Runs an op on a RAM disk.
pub(crate) fn ram(ram: Ram, disk: &Disk, memory: &Memory, op: &Op<'_>) -> Result<(), i32> {
    if op.kind == OpKind::Sync {
        return Ok(());
    }
    let end = check(disk, op)?;
    if end > ram.len {
        return Err(libc::EIO);
    }
    // In bounds of a mapping, so it fits.
    let offset = usize::try_from(op.offset_bytes).map_err(|_huge| libc::EIO)?;
    // SAFETY: `offset` ≤ `end` ≤ the length of the mapping.
    let at = unsafe { ram.start.add(offset) };
    match op.kind {
        OpKind::Read => copy(memory, op, at, Direction::ToGuest),
        OpKind::Write { .. } => {
            copy(memory, op, at, Direction::FromGuest)?;
            // Zeroes in place of a lost page are in the store then, but no success is reported.
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

/// The end of the op's range. The request was checked against capacity and mode long before; this is
/// the second guard.
#[inline]
pub(crate) fn check(disk: &Disk, op: &Op<'_>) -> Result<u64, i32> {
    if !matches!(op.kind, OpKind::Read | OpKind::Sync) && disk.limits().read_only {
        return Err(libc::EROFS);
    }
    match op.offset_bytes.checked_add(op.len_bytes) {
        Some(end) if end <= disk.capacity_bytes() => Ok(end),
        _ => Err(libc::EIO),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    ToGuest,
    FromGuest,
}

/// `at` .. `at` + `op.len_bytes` is in the store.
fn copy(memory: &Memory, op: &Op<'_>, mut at: *mut u8, direction: Direction) -> Result<(), i32> {
    walk(memory, op, |start, len| {
        // SAFETY: `walk` reports mapped guest ranges of `op.len_bytes` in sum, so `at` + `len` stays
        // in the checked range. The two mappings are distinct: nobody can be given the store's
        // anonymous memory.
        unsafe {
            match direction {
                Direction::ToGuest => std::ptr::copy_nonoverlapping(at, start, len),
                Direction::FromGuest => std::ptr::copy_nonoverlapping(start, at, len),
            }
            at = at.add(len);
        }
    })
}

/// Zeroes `len` bytes at `at`: whole pages are given back, the edges are written.
fn clear(ram: Ram, at: *mut u8, len: usize) {
    let page = rustix::param::page_size();
    let head = at.addr().wrapping_neg() % page;
    let pages = len.saturating_sub(head) / page * page;
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

/// Whether the pages were replaced by zeroes.
fn drop_pages(at: *mut u8, len: usize) -> bool {
    // SAFETY: whole pages of the store's own private anonymous mapping; they stay mapped and read as
    // zero. Other threads access them as bytes only, without references.
    unsafe { rustix::mm::madvise(at.cast(), len, Advice::LinuxDontNeed) }.is_ok()
}
