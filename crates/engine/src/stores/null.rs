//! The null disk: reads return zeroes, everything else succeeds. It is the smallest complete store.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use cleave_blk::{Op, OpKind};
use cleave_disk::Disk;
use cleave_guest::{Epoch, Memory};

use super::parts::Ops;
use crate::ops::memory::{check, fill_with_zeroes, walk};
use crate::{Done, LAP_BYTES_MAX, Reactor, Store, Wait};

/// Ops on a null disk.
#[derive(Debug)]
pub struct Null {
    disk: Arc<Disk>,
    /// Whether reads store zeroes. Otherwise they leave their memory unchanged; it must be mapped all the same.
    zeroes: bool,
    ops: Ops,
}

impl Null {
    /// `ops`: most ops in flight.
    pub fn new(disk: Arc<Disk>, zeroes: bool, ops: u16) -> io::Result<Null> {
        Ok(Null {
            disk,
            zeroes,
            ops: Ops::new(ops)?,
        })
    }

    /// Starts an op that may fill too much memory to be run at once.
    #[cold]
    fn push_long(&mut self, epoch: &Epoch, op: &Op<'_>, token: u64) -> Result<(), i32> {
        check(&self.disk, op)?;
        self.ops.start(epoch, op, token)
    }

    #[inline]
    fn run(&mut self, memory: &Memory, op: &Op<'_>) -> Result<(), i32> {
        check(&self.disk, op)?;
        match op.kind {
            OpKind::Read if self.zeroes => {
                self.ops.moves(op.len_bytes);
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
        self.ops.room()
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.ops.in_flight()
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
        self.ops.end(Done { token, result });
    }

    /// An op that fails here is pushed and fails again there; repeating it does no harm.
    #[inline]
    fn at_once(&mut self, memory: &Memory, op: &Op<'_>) -> bool {
        op.len_bytes <= LAP_BYTES_MAX && self.run(memory, op).is_ok()
    }

    #[inline]
    fn reap(&mut self) -> Option<Done> {
        self.ops.reap()
    }

    #[inline]
    fn is_ready(&self) -> bool {
        self.ops.is_ready()
    }

    #[inline]
    fn before_enter(&mut self, _reactor: &mut Reactor, _wait: Wait) -> Option<Duration> {
        let zeroes = self.zeroes;
        self.ops.begin_lap(|kind, _, start, len| {
            if zeroes && kind == OpKind::Read {
                fill_with_zeroes(start, len);
            }
        })
    }

    #[inline]
    fn is_sated(&self) -> bool {
        self.ops.is_sated()
    }
}
