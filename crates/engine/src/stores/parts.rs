//! Long ops of a store in memory. A part of the oldest one is run in each lap, so that the thread is free for commands and other
//! disks in between.

use std::collections::VecDeque;
use std::ptr;
use std::time::Duration;

use cleave_blk::{Op, OpKind};
use cleave_guest::Epoch;

use crate::LAP_BYTES_MAX;
use crate::ops::lap::LapBudget;
use crate::ops::queue::OpQueue;

/// What a store in memory does in a lap: short ops at once, and a part of a long one.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The long ops, in their order.
    long: VecDeque<u16>,
    /// For guest memory that is written or copied, or only looked up.
    lap: LapBudget,
}

impl Parts {
    /// `ops`: most of them at a time.
    pub(crate) fn new(ops: u16) -> Parts {
        Parts {
            long: VecDeque::with_capacity(usize::from(ops)),
            lap: LapBudget::bounded(),
        }
    }

    /// As [`Store::is_sated`](crate::Store::is_sated).
    #[inline]
    pub(crate) fn is_sated(&self) -> bool {
        self.lap.is_used_up()
    }

    /// Counts what an op moves in this lap.
    #[inline]
    pub(crate) fn moves(&mut self, bytes: u64) {
        self.lap.spend(bytes);
    }

    /// The budget of this lap.
    #[inline]
    pub(crate) fn lap(&mut self) -> &mut LapBudget {
        &mut self.lap
    }

    /// Takes an op that is too long to be run at once. `checked`: the check of its range of the store.
    #[cold]
    pub(crate) fn push(
        &mut self,
        ops: &mut OpQueue<()>,
        epoch: &Epoch,
        op: &Op<'_>,
        token: u64,
        checked: Result<u64, i32>,
    ) {
        let range = (op.offset_bytes, op.len_bytes);
        let admitted = checked
            .and_then(|_end| ops.admit(&mut self.lap, epoch, op, token, range, |_memory| ()));
        match admitted {
            Ok(index) => {
                self.long.push_back(index);
                self.lap.exhaust();
            }
            Err(errno) => ops.end(token, Err(errno)),
        }
    }

    /// Begins a lap, with a part of a long op if there is one. `with`: see [`run`]. Returns the time after which there is more to do.
    #[inline]
    pub(crate) fn begin_lap(
        &mut self,
        ops: &mut OpQueue<()>,
        with: impl FnMut(OpKind, u64, *mut u8, usize),
    ) -> Option<Duration> {
        match self.is_sated() {
            true => self.run_part(ops, with),
            false => {
                self.lap.renew();
                None
            }
        }
    }

    #[cold]
    fn run_part(
        &mut self,
        ops: &mut OpQueue<()>,
        with: impl FnMut(OpKind, u64, *mut u8, usize),
    ) -> Option<Duration> {
        self.lap.renew();
        let index = *self.long.front()?;
        if let Some(result) = run(ops, index, LAP_BYTES_MAX, with) {
            ops.finish(index, result);
            self.long.pop_front();
        }
        if !self.long.is_empty() {
            self.lap.exhaust();
        }
        Some(Duration::ZERO)
    }
}

/// Runs the next part of an op of a store in memory, of at most so many bytes. Returns the op's result if that was the last part.
/// `with` gets the op's kind, an offset in the store, and the guest memory that is moved there; for an op that moves nothing only a
/// length. The op's epoch keeps that memory mapped.
pub(crate) fn run<T>(
    ops: &mut OpQueue<T>,
    index: u16,
    bytes_max: u64,
    mut with: impl FnMut(OpKind, u64, *mut u8, usize),
) -> Option<Result<(), i32>> {
    let entry = ops.get_mut(index);
    let (kind, (mut at, left)) = (entry.kind, entry.rest());
    let bytes = left.min(bytes_max);
    entry.pos += bytes;
    match kind {
        OpKind::Read | OpKind::Write { .. } => {
            ops.consume(index, bytes, |start, len| {
                with(kind, at, start, len);
                at += len as u64;
            });
        }
        // The length of a range of memory.
        _ => with(kind, at, ptr::null_mut(), bytes as usize),
    }
    if bytes < left {
        return None;
    }
    // The store may now contain zeroes instead of a lost page, but no success is reported.
    let epoch = ops.get(index).epoch.as_ref();
    let is_lost = epoch.is_some_and(|epoch| epoch.is_lost());
    Some(match kind {
        OpKind::Write { .. } if is_lost => Err(libc::EFAULT),
        _ => Ok(()),
    })
}
