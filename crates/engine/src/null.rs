//! The null disk: reads return zeroes, everything else succeeds. It is the smallest complete store.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use cleave_blk::{Op, OpKind};
use cleave_disk::Disk;
use cleave_guest::{Epoch, Memory};

use crate::memory::{check, fill_with_zeroes, walk};
use crate::parts::Parts;
use crate::{Done, LAP_BYTES_MAX, Reactor, Store, Wait};

/// Ops on a null disk.
#[derive(Debug)]
pub struct Null {
    disk: Arc<Disk>,
    /// Whether reads store zeroes. Otherwise they leave their memory unchanged; it must be mapped all the same.
    zeroes: bool,
    /// Most ops in flight, without those in `parts`.
    ops: usize,
    parts: Parts,
    /// Bytes of guest memory filled in this lap.
    lap_bytes: u64,
    /// Ops completed and not yet reported.
    ended: VecDeque<Done>,
}

impl Null {
    /// `ops`: most ops in flight.
    pub fn new(disk: Arc<Disk>, zeroes: bool, ops: u16) -> io::Result<Null> {
        Ok(Null {
            disk,
            zeroes,
            ops: usize::from(ops),
            parts: Parts::new(ops)?,
            lap_bytes: 0,
            ended: VecDeque::with_capacity(usize::from(ops)),
        })
    }

    /// Starts an op that may fill too much memory to be run at once.
    #[cold]
    fn push_long(&mut self, epoch: &Epoch, op: &Op<'_>, token: u64) -> Result<(), i32> {
        check(&self.disk, op)?;
        self.parts.push(epoch, op, token)?;
        self.ops -= 1;
        self.lap_bytes = LAP_BYTES_MAX;
        Ok(())
    }

    /// Runs a part of a long op, if there is one.
    #[cold]
    fn run_part(&mut self) -> Option<Duration> {
        if self.parts.is_empty() {
            self.lap_bytes = 0;
            return None;
        }
        let zeroes = self.zeroes;
        let done = self.parts.run(|kind, _, start, len| {
            if zeroes && kind == OpKind::Read {
                fill_with_zeroes(start, len);
            }
        });
        self.ops += usize::from(done.is_some());
        self.ended.extend(done);
        self.lap_bytes = if self.parts.is_empty() {
            0
        } else {
            LAP_BYTES_MAX
        };
        Some(Duration::ZERO)
    }

    #[inline]
    fn run(&mut self, memory: &Memory, op: &Op<'_>) -> Result<(), i32> {
        check(&self.disk, op)?;
        match op.kind {
            OpKind::Read if self.zeroes => {
                self.lap_bytes += op.len_bytes;
                walk(memory, op, fill_with_zeroes)
            }
            OpKind::Read => walk(memory, op, |_, _| ()),
            OpKind::Write { .. } | OpKind::Sync | OpKind::Discard | OpKind::Zero { .. } => Ok(()),
        }
    }
}

impl Store for Null {
    #[inline]
    fn room(&self) -> usize {
        self.ops.saturating_sub(self.ended.len())
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.ended.len() + self.parts.len()
    }

    #[inline]
    fn push(&mut self, _reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64) {
        let result = match op.len_bytes > LAP_BYTES_MAX {
            false => self.run(epoch, &op),
            true => match self.push_long(epoch, &op, token) {
                Ok(()) => return,
                failed => failed,
            },
        };
        self.ended.push_back(Done { token, result });
    }

    /// An op that fails here is pushed and fails again there; repeating it does no harm.
    #[inline]
    fn at_once(&mut self, memory: &Memory, op: &Op<'_>) -> bool {
        op.len_bytes <= LAP_BYTES_MAX && self.run(memory, op).is_ok()
    }

    #[inline]
    fn reap(&mut self) -> Option<Done> {
        self.ended.pop_front()
    }

    #[inline]
    fn is_ready(&self) -> bool {
        !self.ended.is_empty()
    }

    #[inline]
    fn before_enter(&mut self, _reactor: &mut Reactor, _wait: Wait) -> Option<Duration> {
        if self.lap_bytes >= LAP_BYTES_MAX {
            return self.run_part();
        }
        self.lap_bytes = 0;
        None
    }

    #[inline]
    fn is_sated(&self) -> bool {
        self.lap_bytes >= LAP_BYTES_MAX
    }
}
