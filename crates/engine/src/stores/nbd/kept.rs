//! The changes that the server answered and did not flush, on their way into the disk's list of them (`cleave_nbd`).
//!
//! The list is bounded. When it is half full, this store has the server flush. The flush is an op of the store's own, with an entry
//! of the table that its owner cannot use. A change reserves its room in the list before it is sent; if there is none, it waits until
//! a flush, or another change of this store, has ended. Changes wait in order, so that each of them gets its turn. One of them
//! that finds nothing of this store in the list or under way goes in any case: nothing would end its wait.
//!
//! Unsafe because the data of a write is copied from guest memory.

use std::time::{Duration, Instant};

use cleave_blk::OpKind;
use cleave_nbd::Change;

use super::flight::{Flight, Part, Payload, SendState};
use super::line::Phase;
use super::{Nbd, OWN_FLUSH, cut};
use crate::ops::table::Entry;

/// Longest change whose data is copied at once on a thread that disks share: some hundred microseconds.
const COPY_BYTES_MAX: u64 = 1 << 20;
/// How long after a flush the memory of large copies is held for the next ones.
const COPY_ROOM_TIME: Duration = Duration::from_secs(1);

impl Nbd {
    /// Keeps a change that was answered. It is copied before the guest learns of the answer, while its memory is still the op's.
    pub(super) fn keep(&mut self, index: u16, part: Part) {
        let line = self.flight(index).line;
        let kept = self.line(line).port.keep(|| {
            let data = match part.payload {
                Payload::Guest => self.copy_in(index, part.len).into(),
                Payload::Nothing | Payload::Zeroes => Box::default(),
            };
            // If the frontend took the memory away, this is not what was written. Its session ends.
            let epoch = self.ops.get(index).epoch.as_ref();
            epoch
                .is_none_or(|epoch| !epoch.is_lost())
                .then_some(Change {
                    kind: part.kind,
                    flags: part.flags,
                    offset: part.offset,
                    len: part.len,
                    data,
                })
        });
        let Some(kept) = kept else {
            return;
        };
        self.lap.spend(part.payload_bytes());
        self.kept_end = kept.end;
        if kept.is_much {
            self.flush_kept();
        }
    }

    /// Queues the next request of an op, which is a change, as soon as there is room for it in the list.
    pub(super) fn queue_change(&mut self, index: u16, mut part: Part) {
        if part.payload == Payload::Guest && self.lap.is_bounded() {
            part.len = part.len.min(COPY_BYTES_MAX);
        }
        if self.waiting.is_empty() && self.reserve(index, part) {
            return self.queue(index, part);
        }
        let flight = self.flight_mut(index);
        (flight.sent, flight.part) = (SendState::Full, part);
        self.waiting.push_back(index);
        self.may_have_room |= self.waiting.len() == 1;
    }

    /// Queues the changes that waited and have room now.
    pub(super) fn queue_waiting(&mut self) {
        while let Some(index) = self.waiting.front().copied() {
            let (line, part) = (self.flight(index).line, self.flight(index).part);
            let is_up = self.line(line).phase == Phase::Up;
            if is_up && !self.reserve(index, part) {
                if self.reserved == 0 {
                    self.flush_kept();
                }
                return;
            }
            self.waiting.pop_front();
            match is_up {
                true => self.queue(index, part),
                // It waits for a connection, as others of this one do.
                false => self.flight_mut(index).sent = SendState::Nothing,
            }
        }
    }

    fn reserve(&mut self, index: u16, part: Part) -> bool {
        let alone = (self.reserved == 0).then_some(self.kept_end);
        let data_bytes = match part.payload {
            Payload::Guest => part.len,
            Payload::Nothing | Payload::Zeroes => 0,
        };
        let port = &self.line(self.flight(index).line).port;
        let Some(bytes) = port.reserve(data_bytes, alone) else {
            return false;
        };
        self.flight_mut(index).reserved = bytes;
        self.reserved += bytes;
        true
    }

    /// Gives back the room of a change that is kept now, or is not under way any more.
    pub(super) fn release(&mut self, index: u16) {
        let flight = self.flight_mut(index);
        let (line, bytes) = (flight.line, std::mem::take(&mut flight.reserved));
        if bytes > 0 {
            self.reserved -= bytes;
            self.line(line).port.release(bytes);
        }
        self.may_have_room = true;
    }

    /// Copies the data of the op's current part.
    fn copy_in(&self, index: u16, len: u64) -> Vec<u8> {
        let line = self.flight(index).line;
        let mut data = self.line(line).port.copy_room(len as usize);
        cut(
            self.ops.host_ranges(index),
            self.ops.get(index).pos,
            len,
            |range| {
                // SAFETY: the op's epoch keeps the range mapped. The guest may write there, which it does at the expense of its own
                // data, and guest and daemon memory do not overlap. `cut` passes `len` bytes at most, for which there is room.
                unsafe {
                    let end = data.as_mut_ptr().add(data.len());
                    std::ptr::copy_nonoverlapping(range.iov_base.cast::<u8>(), end, range.iov_len);
                    data.set_len(data.len() + range.iov_len);
                }
                true
            },
        );
        data
    }

    /// A flush has covered the changes before number `end`.
    pub(super) fn drop_kept(&mut self, line: u8, end: u64) {
        let port = &self.line(line).port;
        port.flushed(end);
        self.copy_room_at = port.has_copy_room().then(Instant::now);
    }

    /// Frees the memory for large copies when no flush has come for a while. Returns the time until then.
    pub(super) fn free_copy_room(&mut self) -> Option<Duration> {
        let left = COPY_ROOM_TIME.saturating_sub(self.copy_room_at?.elapsed());
        if !left.is_zero() {
            return Some(left);
        }
        self.copy_room_at = None;
        self.lines.first()?.port.forget_copy_room();
        None
    }

    /// Has the server flush, unless a flush of ours is under way.
    pub(super) fn flush_kept(&mut self) {
        let Some(line) = self.choose_line().filter(|_| !self.is_flushing) else {
            return;
        };
        let flight = Flight::on(line, self.now);
        let flush = Entry::new(OWN_FLUSH, OpKind::Sync, 0, 0, flight);
        let Some(index) = self.ops.take(flush) else {
            return;
        };
        self.is_flushing = true;
        self.line_mut(line).ops += 1;
        self.proceed(index);
    }

    /// Has the server flush, if it has changes that it was not asked to flush. A daemon that replaces this one would not know them, and
    /// this one would write them again after the guest has run elsewhere.
    pub(super) fn flush_at_end(&mut self) {
        let has_link = self.lines.iter().any(|line| line.phase == Phase::Up);
        let unflushed = self.lines.iter().any(|line| line.port.has_unflushed());
        if has_link && unflushed {
            self.flush_kept();
        }
    }
}
