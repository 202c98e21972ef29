//! Long ops of a store in memory. A part of the oldest one is run in each lap, so that the thread is free for commands and other
//! disks in between.

use std::collections::VecDeque;
use std::io;
use std::ptr;
use std::time::Duration;

use cleave_blk::{Op, OpKind};
use cleave_guest::Epoch;

use crate::ops::memory::walk;
use crate::ops::table::{Entry, Table};
use crate::{Done, LAP_BYTES_MAX};

/// The ops of a store in memory: long ones that are under way, and those that have completed.
#[derive(Debug)]
pub(crate) struct Ops {
    /// Most ops in flight, without those in `parts`.
    room: usize,
    parts: Parts,
    /// Bytes of guest memory written or copied in this lap.
    lap_bytes: u64,
    /// Ops completed and not yet reported.
    ended: VecDeque<Done>,
}

impl Ops {
    /// `ops`: most ops in flight.
    pub(crate) fn new(ops: u16) -> io::Result<Ops> {
        Ok(Ops {
            room: usize::from(ops),
            parts: Parts::new(ops)?,
            lap_bytes: 0,
            ended: VecDeque::with_capacity(usize::from(ops)),
        })
    }

    /// As [`Store::room`](crate::Store::room).
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.room.saturating_sub(self.ended.len())
    }

    /// As [`Store::in_flight`](crate::Store::in_flight).
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.ended.len() + self.parts.len()
    }

    /// As [`Store::is_ready`](crate::Store::is_ready).
    #[inline]
    pub(crate) fn is_ready(&self) -> bool {
        !self.ended.is_empty()
    }

    /// As [`Store::is_sated`](crate::Store::is_sated).
    #[inline]
    pub(crate) fn is_sated(&self) -> bool {
        self.lap_bytes >= LAP_BYTES_MAX
    }

    /// As [`Store::reap`](crate::Store::reap).
    #[inline]
    pub(crate) fn reap(&mut self) -> Option<Done> {
        self.ended.pop_front()
    }

    /// Adds an op that has been run.
    #[inline]
    pub(crate) fn end(&mut self, done: Done) {
        self.ended.push_back(done);
    }

    /// Counts what an op moves in this lap.
    #[inline]
    pub(crate) fn moves(&mut self, bytes: u64) {
        self.lap_bytes += bytes;
    }

    /// Starts an op that is too long to be run at once. Its range of the store was checked.
    #[cold]
    pub(crate) fn start(&mut self, epoch: &Epoch, op: &Op<'_>, token: u64) -> Result<(), i32> {
        self.parts.push(epoch, op, token)?;
        self.room -= 1;
        self.lap_bytes = LAP_BYTES_MAX;
        Ok(())
    }

    /// Begins a lap, with a part of a long op if there is one. `with`: see [`Parts::run`]. Returns the time after which there is
    /// more to do.
    #[inline]
    pub(crate) fn begin_lap(
        &mut self,
        with: impl FnMut(OpKind, u64, *mut u8, usize),
    ) -> Option<Duration> {
        match self.is_sated() {
            true => self.run_part(with),
            false => {
                self.lap_bytes = 0;
                None
            }
        }
    }

    #[cold]
    fn run_part(&mut self, with: impl FnMut(OpKind, u64, *mut u8, usize)) -> Option<Duration> {
        let had_parts = !self.parts.is_empty();
        let done = self.parts.run(with);
        self.room += usize::from(done.is_some());
        self.ended.extend(done);
        self.lap_bytes = match self.parts.is_empty() {
            true => 0,
            false => LAP_BYTES_MAX,
        };
        had_parts.then_some(Duration::ZERO)
    }
}

/// The long ops of a store, in their order.
#[derive(Debug)]
struct Parts {
    table: Table,
    queue: VecDeque<u16>,
}

impl Parts {
    /// `ops`: most of them at a time.
    fn new(ops: u16) -> io::Result<Parts> {
        Ok(Parts {
            table: Table::new(ops)?,
            queue: VecDeque::with_capacity(usize::from(ops)),
        })
    }

    fn len(&self) -> usize {
        self.queue.len()
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Takes an op whose range of the store was checked. `Err`: its memory is not mapped.
    fn push(&mut self, epoch: &Epoch, op: &Op<'_>, token: u64) -> Result<(), i32> {
        let entry = Entry::new(token, op.kind, op.offset_bytes, op.len_bytes);
        // The owner pushes only while there is room.
        let index = self.table.take(entry).ok_or(libc::EBUSY)?;
        if matches!(op.kind, OpKind::Read | OpKind::Write { .. }) {
            let mut gather = self.table.gather(index);
            let walked = walk(epoch, op, |start, len| gather.add(start, len));
            if let Err(errno) = walked.and_then(|()| self.table.gathered(index, gather).map(drop)) {
                self.table.free(index);
                return Err(errno);
            }
        }
        self.table.get_mut(index).epoch = Some(epoch.clone());
        self.queue.push_back(index);
        Ok(())
    }

    /// Runs the next part of the oldest op, and returns the op if it has completed. `with` gets the op's kind, an offset in
    /// the store, and the guest memory that is moved there; for an op that moves nothing only a length. The op's epoch keeps
    /// that memory mapped.
    fn run(&mut self, mut with: impl FnMut(OpKind, u64, *mut u8, usize)) -> Option<Done> {
        let index = *self.queue.front()?;
        let entry = self.table.get_mut(index);
        let (kind, (mut at, left)) = (entry.kind, entry.rest());
        let bytes = left.min(LAP_BYTES_MAX);
        entry.pos += bytes;
        match kind {
            OpKind::Read | OpKind::Write { .. } => {
                self.table.consume(index, bytes, |start, len| {
                    with(kind, at, start, len);
                    at += len as u64;
                });
            }
            // At most LAP_BYTES_MAX.
            _ => with(kind, at, ptr::null_mut(), bytes as usize),
        }
        if bytes < left {
            return None;
        }
        self.queue.pop_front();
        let entry = self.table.get(index);
        // The store may now contain zeroes instead of a lost page, but no success is reported.
        let is_lost = entry.epoch.as_ref().is_some_and(|epoch| epoch.is_lost());
        let result = match kind {
            OpKind::Write { .. } if is_lost => Err(libc::EFAULT),
            _ => Ok(()),
        };
        let token = entry.token;
        self.table.free(index);
        Some(Done { token, result })
    }
}
