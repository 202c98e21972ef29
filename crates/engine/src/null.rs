//! The null disk: reads return zeroes, everything else succeeds. It is the smallest complete store.

use std::collections::VecDeque;
use std::sync::Arc;

use cleave_blk::{Op, OpKind};
use cleave_disk::Disk;
use cleave_guest::{Epoch, Memory};

use crate::memory::{check, fill_with_zeroes, walk};
use crate::{Done, Reactor, Store};

/// Ops on a null disk.
#[derive(Debug)]
pub struct Null {
    disk: Arc<Disk>,
    /// Whether reads store zeroes. Otherwise they leave their memory unchanged; it must be mapped all the same.
    zeroes: bool,
    ops: usize,
    /// Ops completed and not yet reported.
    ended: VecDeque<Done>,
}

impl Null {
    /// `ops`: most ops in flight.
    pub fn new(disk: Arc<Disk>, zeroes: bool, ops: u16) -> Null {
        Null {
            disk,
            zeroes,
            ops: usize::from(ops),
            ended: VecDeque::with_capacity(usize::from(ops)),
        }
    }

    #[inline]
    fn run(&self, memory: &Memory, op: &Op<'_>) -> Result<(), i32> {
        check(&self.disk, op)?;
        match op.kind {
            OpKind::Read if self.zeroes => walk(memory, op, fill_with_zeroes),
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
        self.ended.len()
    }

    #[inline]
    fn push(&mut self, _reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64) {
        let result = self.run(epoch, &op);
        self.ended.push_back(Done { token, result });
    }

    /// An op that fails here is pushed and fails again there; repeating it does no harm.
    #[inline]
    fn at_once(&mut self, memory: &Memory, op: &Op<'_>) -> bool {
        self.run(memory, op).is_ok()
    }

    #[inline]
    fn reap(&mut self) -> Option<Done> {
        self.ended.pop_front()
    }

    #[inline]
    fn is_ready(&self) -> bool {
        !self.ended.is_empty()
    }
}
