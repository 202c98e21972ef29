//! The range of an op on its leg.

use cleave_blk::{Op, OpKind};
use cleave_disk::Disk;

use crate::ops::piece;
use crate::ops::step::Facts;

/// Returns where the op begins on its leg, and its length; the error is the result of an op that is done without I/O. The request was
/// checked against capacity and mode much earlier; this is a second check.
pub(super) fn range(
    disk: &Disk,
    facts: &Facts,
    op: &Op<'_>,
) -> Result<(u64, u64), Result<(), i32>> {
    if op.kind == OpKind::Sync {
        return Ok((0, 0));
    }
    if op.kind != OpKind::Read && facts.read_only {
        return Err(Err(libc::EROFS));
    }
    match op.offset_bytes.checked_add(op.len_bytes) {
        Some(end) if end <= disk.leg_bytes(op.leg) && i64::try_from(end).is_ok() => {}
        _ => return Err(Err(libc::EIO)),
    }
    match op.kind {
        _ if op.len_bytes == 0 => Err(Ok(())),
        // A discard is a hint: partial blocks keep their data.
        OpKind::Discard => {
            piece::inside(op.offset_bytes, op.len_bytes, facts.discard_unit).ok_or(Ok(()))
        }
        _ => Ok((op.offset_bytes, op.len_bytes)),
    }
}
