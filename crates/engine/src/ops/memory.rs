//! Translates an op's guest addresses to host ranges, after checks.
//!
//! Unsafe because host ranges are raw memory: the `Memory` that resolved them keeps them mapped.

use std::ops::ControlFlow;

use cleave_blk::{Op, OpKind, Segment, Stripe};
use cleave_disk::Disk;
use cleave_guest::Memory;

use super::lap::LapBudget;
use super::piece;
use super::table::RANGES_MAX;

/// Calls `piece` with each host range of the op's memory, in order, and counts them in the lap. `Err`: EFAULT if an address is not
/// mapped or there are more ranges than an op can have, EINVAL if the segments are shorter than the op (our own fault). Ranges before
/// the error have already been reported.
#[inline]
pub(crate) fn walk(
    memory: &Memory,
    op: &Op<'_>,
    lap: &mut LapBudget,
    mut piece: impl FnMut(*mut u8, usize),
) -> Result<(), i32> {
    // Nearly all small ops are one range, which is not worth counting.
    if let ([segment], None) = (op.segments, op.stripe)
        && let Some(addr) = segment.addr.checked_add(u64::from(op.skip_bytes))
        && op.len_bytes > 0
        && u64::from(op.skip_bytes) + op.len_bytes <= u64::from(segment.len)
        && let Some(start) = memory.host_range(addr, op.len_bytes)
    {
        piece(start, op.len_bytes as usize);
        return Ok(());
    }
    walk_counted(memory, op, lap, piece)
}

/// Does what `walk` does, for an op of several ranges.
fn walk_counted(
    memory: &Memory,
    op: &Op<'_>,
    lap: &mut LapBudget,
    mut piece: impl FnMut(*mut u8, usize),
) -> Result<(), i32> {
    let mut ranges = 0;
    let counted = |start, len| {
        if ranges == RANGES_MAX {
            return ControlFlow::Break(());
        }
        ranges += 1;
        piece(start, len);
        ControlFlow::Continue(())
    };
    let walked = match op.stripe {
        None => walk_along(memory, op, counted),
        Some(stripe) => walk_chunks(memory, op, stripe, counted),
    };
    lap.spend_ranges(ranges);
    walked
}

/// Walks along each chunk of an op that covers several.
#[cold]
fn walk_chunks(
    memory: &Memory,
    op: &Op<'_>,
    stripe: Stripe,
    mut piece: impl FnMut(*mut u8, usize) -> ControlFlow<()>,
) -> Result<(), i32> {
    op.chunks(stripe)
        .try_for_each(|chunk| walk_along(memory, &chunk, &mut piece))
}

/// Walks along an op whose memory is contiguous in its segments.
#[inline]
fn walk_along(
    memory: &Memory,
    op: &Op<'_>,
    mut piece: impl FnMut(*mut u8, usize) -> ControlFlow<()>,
) -> Result<(), i32> {
    let mut left = op.len_bytes;
    let mut skip = op.skip_bytes;
    for segment in op.segments {
        if left == 0 {
            break;
        }
        let addr = segment
            .addr
            .checked_add(u64::from(skip))
            .ok_or(libc::EFAULT)?;
        let whole = segment.len.checked_sub(skip).ok_or(libc::EINVAL)?;
        let len = u32::try_from(left).map_or(whole, |left| whole.min(left));
        skip = 0;
        if len == 0 {
            continue;
        }
        memory
            .resolve_until(Segment { addr, len }, &mut piece)
            .map_err(|_unmapped| libc::EFAULT)?;
        left -= u64::from(len);
    }
    if left == 0 { Ok(()) } else { Err(libc::EINVAL) }
}

/// Fills a range that `walk` reported with zeroes.
pub(crate) fn fill_with_zeroes(start: *mut u8, len: usize) {
    // SAFETY: `walk` reports ranges that are mapped and writable while its caller holds the memory.
    unsafe { start.write_bytes(0, len) };
}

/// The end of the op's range, at most that of the disk; of several legs, each ends earlier (`Leg::served_bytes`). The request was
/// checked against capacity and mode much earlier; this is a second check.
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

/// The range of an op on its leg of a remote disk, whose offsets and lengths are multiples of `unit`, a power of two. `Err` is the
/// result of an op that ends here.
pub(crate) fn remote_range(
    disk: &Disk,
    op: &Op<'_>,
    unit: u64,
) -> Result<(u64, u64), Result<(), i32>> {
    if op.kind == OpKind::Sync {
        // A failed flush may have dropped data, and the next one would not report that.
        return match disk.sync_failed() {
            true => Err(Err(libc::EIO)),
            false => Ok((0, 0)),
        };
    }
    let end = check(disk, op).map_err(Err)?;
    if end > disk.leg_bytes(op.leg) {
        return Err(Err(libc::EIO));
    }
    match op.kind {
        _ if op.len_bytes == 0 => Err(Ok(())),
        OpKind::Discard => {
            // A discard is a hint: partial blocks keep their data.
            let unit = unit.max(u64::from(disk.limits().discard_align_bytes));
            piece::inside(op.offset_bytes, op.len_bytes, unit).ok_or(Ok(()))
        }
        // The guest was told of the block.
        _ if (op.offset_bytes | op.len_bytes) & (unit - 1) != 0 => Err(Err(libc::EINVAL)),
        _ => Ok((op.offset_bytes, op.len_bytes)),
    }
}
