//! The ops of a store from `push` to `reap`: what every store does with them in the same way.

use std::collections::VecDeque;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use cleave_blk::{Op, OpKind};
use cleave_disk::Disk;
use cleave_guest::Epoch;

use super::lap::LapBudget;
use super::legs::{LegStats, Tally};
use super::memory::walk;
use super::table::{Entry, Gathered, Ranges, Table};
use crate::Done;

/// The ops of a store, and what it notes about each (`T`).
///
/// A store passes every op that it is given to [`admit`](OpQueue::admit), and to [`finish`](OpQueue::finish) as soon as nothing
/// touches the op's memory any more; or to [`end`](OpQueue::end) if nothing is left to do for it. Between `admit` and `finish` the
/// op is in the [`Table`], to which this dereferences.
#[derive(Debug)]
pub(crate) struct OpQueue<T> {
    table: Table<T>,
    ops: usize,
    /// Ops pushed and not yet reported.
    in_flight: usize,
    /// Ops completed and not yet reported.
    ended: VecDeque<Done>,
    tally: Tally,
}

impl<T> OpQueue<T> {
    /// `ops`: most ops in flight. `spare`: entries of the table besides, for ops of the store's own. `blank`: see [`Table::new`].
    pub(crate) fn new(disk: &Disk, ops: u16, spare: u16, blank: T) -> io::Result<OpQueue<T>>
    where
        T: Clone,
    {
        Ok(OpQueue {
            table: Table::new(ops.saturating_add(spare), blank)?,
            ops: usize::from(ops),
            in_flight: 0,
            ended: VecDeque::with_capacity(usize::from(ops)),
            tally: Tally::new(disk.legs().len()),
        })
    }

    /// As [`Store::room`](crate::Store::room).
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.ops.saturating_sub(self.in_flight)
    }

    /// As [`Store::in_flight`](crate::Store::in_flight).
    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Ops admitted and not yet finished.
    #[inline]
    pub(crate) fn unfinished(&self) -> usize {
        self.in_flight - self.ended.len()
    }

    /// Adds a pushed op, whose range of its leg was checked, to the table, and translates its addresses, which counts in the lap. `own`
    /// makes the store's part of the entry; it is told of the host ranges if the op moves bytes. `Err`: the op's memory is not mapped.
    #[inline]
    pub(crate) fn admit(
        &mut self,
        lap: &mut LapBudget,
        epoch: &Epoch,
        op: &Op<'_>,
        token: u64,
        (offset, len): (u64, u64),
        own: impl FnOnce(Option<Gathered>) -> T,
    ) -> Result<u16, i32> {
        debug_assert!(self.room() > 0);
        // The owner pushes only while there is room.
        let index = self.table.reserve().ok_or(libc::EBUSY)?;
        let (ranges, gathered) = match op.kind {
            OpKind::Read | OpKind::Write { .. } => {
                let gathered = self.table.gather(index, |gather| {
                    walk(epoch, op, lap, |start, len| gather.add(start, len))
                });
                match gathered {
                    Ok((ranges, gathered)) => (ranges, Some(gathered)),
                    Err(errno) => {
                        self.table.free(index);
                        return Err(errno);
                    }
                }
            }
            OpKind::Sync | OpKind::Discard | OpKind::Zero { .. } => (Ranges::default(), None),
        };
        let entry = Entry {
            leg: op.leg,
            epoch: Some(epoch.clone()),
            begun_ns: self.tally.now_ns(),
            ranges,
            ..Entry::new(token, op.kind, offset, len, own(gathered))
        };
        self.table.fill(index, entry);
        self.in_flight += 1;
        Ok(index)
    }

    /// Ends an admitted op with its result.
    #[inline]
    pub(crate) fn finish(&mut self, index: u16, result: Result<(), i32>) {
        let entry = self.table.get(index);
        let token = entry.token;
        self.tally.ended(entry, result);
        self.table.free(index);
        self.ended.push_back(Done { token, result });
    }

    /// Ends a pushed op that was not admitted.
    #[inline]
    pub(crate) fn end(&mut self, token: u64, result: Result<(), i32>) {
        debug_assert!(self.room() > 0);
        self.in_flight += 1;
        self.ended.push_back(Done { token, result });
    }

    /// As [`Store::is_ready`](crate::Store::is_ready).
    #[inline]
    pub(crate) fn is_ready(&self) -> bool {
        !self.ended.is_empty()
    }

    /// As [`Store::reap`](crate::Store::reap).
    #[inline]
    pub(crate) fn reap(&mut self) -> Option<Done> {
        let done = self.ended.pop_front()?;
        self.in_flight -= 1;
        Some(done)
    }

    /// Reads the clock for the ops that follow, if the legs are counted.
    #[inline]
    pub(crate) fn tick(&mut self) {
        self.tally.tick();
    }

    /// As [`Store::leg_stats`](crate::Store::leg_stats).
    pub(crate) fn leg_stats(&self) -> Arc<[LegStats]> {
        self.tally.stats()
    }
}

impl<T> Deref for OpQueue<T> {
    type Target = Table<T>;

    #[inline]
    fn deref(&self) -> &Table<T> {
        &self.table
    }
}

impl<T> DerefMut for OpQueue<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Table<T> {
        &mut self.table
    }
}

/// Writes the methods of a [`Store`](crate::Store) for which its field `ops` has the answer.
macro_rules! from_ops {
    (room) => {
        #[inline]
        fn room(&self) -> usize {
            self.ops.room()
        }
    };
    (in_flight) => {
        #[inline]
        fn in_flight(&self) -> usize {
            self.ops.in_flight()
        }
    };
    (reap) => {
        #[inline]
        fn reap(&mut self) -> Option<crate::Done> {
            self.ops.reap()
        }
    };
    (is_ready) => {
        #[inline]
        fn is_ready(&self) -> bool {
            self.ops.is_ready()
        }
    };
    (leg_stats) => {
        fn leg_stats(&self) -> std::sync::Arc<[crate::LegStats]> {
            self.ops.leg_stats()
        }
    };
    ($($method:ident),+) => {
        $(from_ops!($method);)+
    };
}
pub(crate) use from_ops;

/// Makes every later sync of the disk fail, because none can vouch for earlier writes any more. `name`: the disk, or its leg; `failed`
/// begins the message.
#[cold]
pub(crate) fn taint_sync(disk: &Disk, name: &str, failed: &str, errno: i32) {
    if !disk.sync_failed() {
        let error = io::Error::from_raw_os_error(errno);
        tracing::error!(
            disk = name,
            %error,
            "{failed} and data may be lost; every flush fails until the disk is reopened"
        );
    }
    disk.mark_sync_failed();
}

/// Returns true if a store that closes could wait for the end of all its I/O.
pub(crate) fn has_closed(disk: &Disk, waited: io::Result<()>) -> bool {
    if let Err(error) = &waited {
        let disk = disk.name();
        tracing::error!(disk, %error, "the io_uring of a worker is broken");
    }
    waited.is_ok()
}
