//! Ring entries for the steps of an op.
//!
//! Unsafe because a single host range is read from the table's memory; the parent module says what keeps the
//! memory that entries point to alive.

use cleave_blk::OpKind;
use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{opcode, squeue};

use super::Files;
use crate::table::{Method, Step};

/// Most bytes that the kernel moves at once (MAX_RW_COUNT); more makes a short transfer.
const MOVED_AT_ONCE: u64 = 0x7fff_f000;
/// BLOCK_URING_CMD_DISCARD = _IO(0x12, 0), Linux 6.12 (linux/blkdev.h).
const DISCARD_COMMAND: u32 = 0x1200;

impl Files {
    /// The entry for the current step, or for the rest of it.
    pub(super) fn submission(&self, index: u16) -> squeue::Entry {
        let entry = self.table.get(index);
        let at = entry.window.start + entry.moved;
        let left = entry.window.len - entry.moved;
        // Bounded by the constant, so it fits.
        let len = left.min(MOVED_AT_ONCE) as u32;
        let file = Fixed(self.id.first_file + u32::from(entry.leg));
        let flags = match self.leg(entry.leg).facts.writes_durably(entry.kind) {
            true => libc::RWF_DSYNC,
            false => 0,
        };
        match entry.step {
            Step::Direct => self.direct(file, index, at, len, flags),
            Step::Fill => {
                let to = entry
                    .buffer
                    .map_or(std::ptr::null_mut(), |b| self.pool.at(b, entry.moved));
                opcode::Read::new(file, to, len).offset(at).build()
            }
            Step::Spill => {
                let from = entry
                    .buffer
                    .map_or(std::ptr::null_mut(), |b| self.pool.at(b, entry.moved));
                opcode::Write::new(file, from, len)
                    .offset(at)
                    .rw_flags(flags)
                    .build()
            }
            Step::Zeroes => opcode::Write::new(file, self.pool.zeroes(), len)
                .offset(at)
                .build(),
            Step::Range(method) => ranged(file, method, at, left),
            Step::Idle | Step::Sync => opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build(),
        }
    }

    /// A single range needs no array, which the kernel would have to copy.
    fn direct(&self, file: Fixed, index: u16, at: u64, len: u32, flags: i32) -> squeue::Entry {
        let (ranges, count) = self.table.ranges(index);
        let read = self.table.get(index).kind == OpKind::Read;
        if count == 1 {
            // SAFETY: `ranges` points to `count` initialised ranges.
            let start: *mut u8 = unsafe { (*ranges).iov_base }.cast();
            return match read {
                true => opcode::Read::new(file, start, len).offset(at).build(),
                false => opcode::Write::new(file, start, len)
                    .offset(at)
                    .rw_flags(flags)
                    .build(),
            };
        }
        // At most RANGES_AT_ONCE; otherwise the op bounces.
        let count = count as u32;
        match read {
            true => opcode::Readv::new(file, ranges, count).offset(at).build(),
            false => opcode::Writev::new(file, ranges, count)
                .offset(at)
                .rw_flags(flags)
                .build(),
        }
    }
}

fn ranged(file: Fixed, method: Method, at: u64, len: u64) -> squeue::Entry {
    let mode = match method {
        Method::Command => {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&len.to_ne_bytes());
            return opcode::UringCmd16::new(file, DISCARD_COMMAND)
                .addr(Some(at))
                .cmd(bytes)
                .build();
        }
        Method::Punch => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        Method::ZeroRange => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
    };
    opcode::Fallocate::new(file, len)
        .offset(at)
        .mode(mode)
        .build()
}
