//! Long ops of a store in memory. A part of the oldest one is run in each lap, so that the thread is free for commands and other
//! disks in between.

use std::collections::VecDeque;
use std::io;
use std::ptr;

use cleave_blk::{Op, OpKind};
use cleave_guest::Epoch;

use crate::memory::walk;
use crate::table::{Entry, Table};
use crate::{Done, LAP_BYTES_MAX};

/// The long ops of a store, in their order.
#[derive(Debug)]
pub(crate) struct Parts {
    table: Table,
    queue: VecDeque<u16>,
}

impl Parts {
    /// `ops`: most of them at a time.
    pub(crate) fn new(ops: u16) -> io::Result<Parts> {
        Ok(Parts {
            table: Table::new(ops)?,
            queue: VecDeque::with_capacity(usize::from(ops)),
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Takes an op whose range of the store was checked. `Err`: its memory is not mapped.
    pub(crate) fn push(&mut self, epoch: &Epoch, op: &Op<'_>, token: u64) -> Result<(), i32> {
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
    pub(crate) fn run(
        &mut self,
        mut with: impl FnMut(OpKind, u64, *mut u8, usize),
    ) -> Option<Done> {
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
