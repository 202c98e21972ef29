//! Submits the steps of an op to the rings.
//!
//! Unsafe because a single host range is read from the table's memory, and because entries are pushed to a ring; the parent
//! module says what keeps the memory that they point to alive.

use std::time::Instant;

use cleave_blk::OpKind;
use cleave_disk::Disk;
use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{opcode, squeue};

use super::Files;
use super::portion::Postponed;
use crate::Reactor;
use crate::ops::step::{FileOp, Method, Step};
use crate::ops::table::Entry;
use crate::reactor::FULL_PAUSE;

/// Most bytes that the kernel moves at once (MAX_RW_COUNT); more makes a short transfer.
const MOVED_AT_ONCE: u64 = 0x7fff_f000;
/// BLOCK_URING_CMD_DISCARD = _IO(0x12, 0), Linux 6.12 (linux/blkdev.h).
const DISCARD_COMMAND: u32 = 0x1200;

impl Files {
    /// Submits the current step, or the rest of it, to its ring.
    pub(super) fn issue(&mut self, reactor: &mut Reactor, index: u16) {
        let Some(portion) = self.hand_over(index) else {
            return self.issue_here(reactor, index);
        };
        match self.delegated.begin(portion) {
            true => self.delegate(reactor, index, portion),
            false => self.delegated.wait(index),
        }
    }

    /// Submits the current step, or a part of it, on this thread. If the lap has no time left for that, it waits for the next one.
    #[inline]
    fn issue_here(&mut self, reactor: &mut Reactor, index: u16) {
        let bytes = self.step_bytes(index);
        let portion = self.delegation(index).own_portion(bytes);
        if portion.copied > 0 && self.lap.is_used_up() {
            return self.put_off.push_back((index, Postponed::Issue));
        }
        self.lap.spend(portion.copied);
        let is_cut = portion.bytes < bytes;
        if is_cut && self.ops.get(index).own.step == Step::Direct {
            self.ops.show_first(index, portion.bytes);
        }
        // A step that moves nothing has a length too.
        let bytes_max = if is_cut { portion.bytes } else { u64::MAX };
        let is_polled = reactor.has_polled_ring() && may_poll(&self.disk, self.ops.get(index));
        let entry = self.submission(index, bytes_max);
        let is_submitted = self.submit(reactor, index, entry, is_polled);
        if !is_submitted {
            self.ops.show_all(index);
        }
        #[cfg(test)]
        self.rig.count(u32::from(is_submitted), portion.bytes);
    }

    /// Queues the entry of the current step. `false`: it will be issued again later.
    #[inline]
    pub(super) fn submit(
        &mut self,
        reactor: &mut Reactor,
        index: u16,
        entry: squeue::Entry,
        is_polled: bool,
    ) -> bool {
        #[cfg(test)]
        if self.rig.refuses() {
            self.delayed.push_back((Instant::now(), index));
            return false;
        }
        let entry = entry.user_data(self.id.user_data(index));
        // SAFETY: see the parent module's documentation: everything that `entry` points to lives until `completed`
        // or `close` has seen its completion.
        let pushed = unsafe { reactor.submit(self.id, &entry, is_polled) };
        if pushed {
            self.submitted += 1;
            self.polled += usize::from(is_polled);
        } else {
            self.delayed.push_back((Instant::now() + FULL_PAUSE, index));
        }
        pushed
    }

    /// The entry for the current step, or for the rest of it, but for at most so many bytes. If memory in several ranges is
    /// moved directly, the table shows no more than these.
    pub(super) fn submission(&self, index: u16, bytes_max: u64) -> squeue::Entry {
        let entry = self.ops.get(index);
        let at = entry.own.window.start + entry.own.moved;
        let left = (entry.own.window.len - entry.own.moved).min(bytes_max);
        // Bounded by the constant, so it fits.
        let len = left.min(MOVED_AT_ONCE) as u32;
        let file = Fixed(self.id.first_file + u32::from(entry.leg));
        let flags = match self.leg(entry.leg).facts.writes_durably(entry.kind) {
            true => libc::RWF_DSYNC,
            false => 0,
        };
        match entry.own.step {
            Step::Direct => self.direct(file, index, at, len, flags),
            Step::Fill => {
                let to = entry
                    .own
                    .buffer
                    .map_or(std::ptr::null_mut(), |b| self.pool.at(b, entry.own.moved));
                opcode::Read::new(file, to, len).offset(at).build()
            }
            Step::Spill => {
                let from = entry
                    .own
                    .buffer
                    .map_or(std::ptr::null_mut(), |b| self.pool.at(b, entry.own.moved));
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
        let (ranges, count) = self.ops.ranges(index);
        let read = self.ops.get(index).kind == OpKind::Read;
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

/// Returns true if the op's current step goes to the polled ring: it must move few bytes past the page cache, and
/// must not be a durable write. A durable write may need a flush, for which the kernel waits by an interrupt.
#[inline]
fn may_poll(disk: &Disk, entry: &Entry<FileOp>) -> bool {
    let moves = matches!(
        entry.own.step,
        Step::Direct | Step::Fill | Step::Spill | Step::Zeroes
    );
    let durable = entry.kind == OpKind::Write { durable: true };
    if !moves || durable || entry.own.plain {
        return false;
    }
    let leg = disk.legs().get(usize::from(entry.leg));
    leg.is_some_and(|leg| leg.polls(entry.own.window.start, entry.own.window.len))
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
