//! The changes that the server answered and did not flush, on their way into the disk's list of them (`cleave_disk::nbd`).
//!
//! The list is bounded. When it is half full, this store has the server flush; when it is full, further changes wait for that.
//! The flush is an op of the store's own, with an entry of the table that its owner cannot use.
//!
//! Unsafe because the data of a write is copied from guest memory.

use cleave_blk::OpKind;
use cleave_disk::nbd::Change;

use super::line::Phase;
use super::part::{Part, Payload};
use super::{Nbd, Sent, cut};
use crate::table::Entry;

/// The token of that flush. No owner pushes it: a token holds a slot and a part.
pub(super) const TOKEN: u64 = u64::MAX;

impl Nbd {
    /// Keeps a change that was answered. It is copied before the guest learns of the answer, while its memory is still the op's.
    pub(super) fn keep(&mut self, index: u16, part: Part) {
        let line = self.flight(index).line;
        let is_much = self.line(line).port.keep(|| {
            let data = match part.payload {
                Payload::Guest => self.copy_in(index, part.len).into(),
                Payload::Nothing | Payload::Zeroes => Box::default(),
            };
            // If the frontend took the memory away, this is not what was written. Its session ends.
            let epoch = self.table.get(index).epoch.as_ref();
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
        if is_much {
            self.flush_kept();
        }
    }

    /// Copies the data of the op's current part.
    fn copy_in(&self, index: u16, len: u64) -> Vec<u8> {
        let mut data: Vec<u8> = Vec::with_capacity(len as usize);
        cut(
            self.table.host_ranges(index),
            self.table.get(index).pos,
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

    /// Has the server flush, unless a flush of ours is under way.
    pub(super) fn flush_kept(&mut self) {
        let Some(line) = self.choose_line().filter(|_| !self.is_flushing) else {
            return;
        };
        let Some(index) = self.table.take(Entry::new(TOKEN, OpKind::Sync, 0, 0)) else {
            return;
        };
        self.is_flushing = true;
        self.take_off(index, line);
        self.proceed(index);
    }

    /// The ops that waited for the flush send their changes, or wait for the next one.
    pub(super) fn go_on_after_flush(&mut self) {
        for index in 0..self.flights.len() as u16 {
            let flight = self.flight(index);
            if flight.is_used && flight.sent == Sent::Full {
                self.proceed(index);
            }
        }
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
