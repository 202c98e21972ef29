//! The null disk: reads return zeroes, everything else succeeds. It is the smallest complete store.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use cleave_blk::{Op, OpKind};
use cleave_disk::{Backing, Disk};
use cleave_guest::{Epoch, Memory};

use super::parts::Parts;
use crate::ops::memory::{check, fill_with_zeroes, walk};
use crate::ops::queue::{OpQueue, from_ops};
use crate::{LAP_BYTES_MAX, Reactor, Store, Wait};

/// Ops on a null disk.
#[derive(Debug)]
pub struct Null {
    disk: Arc<Disk>,
    /// Reads store zeroes. Otherwise they leave their memory unchanged; it must be mapped all the same.
    zeroes: bool,
    ops: OpQueue<()>,
    parts: Parts,
}

impl Null {
    /// For a null disk. `ops`: most ops in flight.
    pub fn new(disk: Arc<Disk>, ops: u16) -> io::Result<Null> {
        let Backing::Null { zeroes } = *disk.backing() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        Ok(Null {
            zeroes,
            ops: OpQueue::new(&disk, ops, 0, ())?,
            parts: Parts::new(ops),
            disk,
        })
    }

    #[inline]
    fn run(&mut self, memory: &Memory, op: &Op<'_>) -> Result<(), i32> {
        check(&self.disk, op)?;
        match op.kind {
            OpKind::Read if self.zeroes => {
                self.parts.moves(op.len_bytes);
                walk(memory, op, self.parts.lap(), fill_with_zeroes)
            }
            OpKind::Read => walk(memory, op, self.parts.lap(), |_, _| ()),
            OpKind::Write { .. } | OpKind::Sync | OpKind::Discard | OpKind::Zero { .. } => Ok(()),
        }
    }
}

impl Store for Null {
    from_ops!(room, in_flight, reap, is_ready);

    #[inline]
    fn push(&mut self, _reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64) {
        if op.len_bytes > LAP_BYTES_MAX {
            let checked = check(&self.disk, &op);
            return self.parts.push(&mut self.ops, epoch, &op, token, checked);
        }
        let result = self.run(epoch, &op);
        self.ops.end(token, result);
    }

    /// An op that fails here is pushed and fails again there; repeating it does no harm.
    #[inline]
    fn at_once(&mut self, memory: &Memory, op: &Op<'_>) -> bool {
        op.len_bytes <= LAP_BYTES_MAX && self.run(memory, op).is_ok()
    }

    #[inline]
    fn before_enter(&mut self, _reactor: &mut Reactor, _wait: Wait) -> Option<Duration> {
        let zeroes = self.zeroes;
        self.parts.begin_lap(&mut self.ops, |kind, _, start, len| {
            if zeroes && kind == OpKind::Read {
                fill_with_zeroes(start, len);
            }
        })
    }

    #[inline]
    fn is_sated(&self) -> bool {
        self.parts.is_sated()
    }
}
