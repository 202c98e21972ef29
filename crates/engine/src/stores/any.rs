//! A store of any kind, chosen once, when the disk is opened on a reactor.

use std::sync::Arc;
use std::time::Duration;

use cleave_blk::Op;
use cleave_disk::{Backing, Disk};
use cleave_guest::{Epoch, Memory};

use super::files::Files;
use super::ram::Ram;
use crate::{Completion, Done, EngineError, LegStats, Model, Nbd, Null, Rbd, Reactor, Store, Wait};

/// A store of any kind that a disk can have.
#[derive(Debug)]
#[expect(missing_docs, reason = "each variant is the kind that it names")]
pub enum AnyStore {
    Files(Box<Files>),
    Ram(Box<Ram>),
    Null(Box<Null>),
    Model(Box<Model>),
    Nbd(Box<Nbd>),
    Rbd(Box<Rbd>),
}

impl AnyStore {
    /// Opens a disk's store on a reactor that was created for it. `worker` is the number of the disk's
    /// worker, which has an open file description of its own; `ops` is the most ops in flight.
    pub fn open(
        reactor: &mut Reactor,
        disk: &Arc<Disk>,
        worker: usize,
        ops: u16,
    ) -> Result<AnyStore, EngineError> {
        let disk = Arc::clone(disk);
        Ok(match disk.backing() {
            Backing::File { .. } => {
                AnyStore::Files(Box::new(Files::new(reactor, disk, worker, ops)?))
            }
            Backing::Ram(_) => AnyStore::Ram(Box::new(Ram::new(disk, ops)?)),
            Backing::Null { zeroes } => {
                let zeroes = *zeroes;
                AnyStore::Null(Box::new(Null::new(disk, zeroes, ops)?))
            }
            Backing::Model { .. } => AnyStore::Model(Box::new(Model::new(disk, ops)?)),
            Backing::Nbd(_) => AnyStore::Nbd(Box::new(Nbd::new(reactor, disk, ops)?)),
            Backing::Rbd(_) => AnyStore::Rbd(Box::new(Rbd::new(reactor, disk, ops)?)),
        })
    }
}

/// A generic operation on a store, compiled for each kind.
pub trait Visitor {
    /// Result of a visit.
    type Output;

    /// Runs the operation.
    fn visit<S: Store + 'static>(self, store: S) -> Self::Output;
}

impl AnyStore {
    /// Passes the store itself to the visitor, so that later calls need no match. A worker, which has only
    /// one store, uses this.
    pub fn visit<V: Visitor>(self, visitor: V) -> V::Output {
        match self {
            AnyStore::Files(store) => visitor.visit(*store),
            AnyStore::Ram(store) => visitor.visit(*store),
            AnyStore::Null(store) => visitor.visit(*store),
            AnyStore::Model(store) => visitor.visit(*store),
            AnyStore::Nbd(store) => visitor.visit(*store),
            AnyStore::Rbd(store) => visitor.visit(*store),
        }
    }
}

/// Forwards a call to the store inside.
macro_rules! inside {
    ($any:expr, $store:ident => $call:expr) => {
        match $any {
            AnyStore::Files($store) => $call,
            AnyStore::Ram($store) => $call,
            AnyStore::Null($store) => $call,
            AnyStore::Model($store) => $call,
            AnyStore::Nbd($store) => $call,
            AnyStore::Rbd($store) => $call,
        }
    };
}

impl Store for AnyStore {
    #[inline]
    fn room(&self) -> usize {
        inside!(self, store => store.room())
    }

    #[inline]
    fn in_flight(&self) -> usize {
        inside!(self, store => store.in_flight())
    }

    #[inline]
    fn push(&mut self, reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64) {
        inside!(self, store => store.push(reactor, epoch, op, token));
    }

    #[inline]
    fn at_once(&mut self, memory: &Memory, op: &Op<'_>) -> bool {
        inside!(self, store => store.at_once(memory, op))
    }

    #[inline]
    fn completed(&mut self, reactor: &mut Reactor, completion: Completion) {
        inside!(self, store => store.completed(reactor, completion));
    }

    #[inline]
    fn polls(&self) -> bool {
        inside!(self, store => store.polls())
    }

    #[inline]
    fn reap(&mut self) -> Option<Done> {
        inside!(self, store => store.reap())
    }

    #[inline]
    fn is_ready(&self) -> bool {
        inside!(self, store => store.is_ready())
    }

    #[inline]
    fn before_enter(&mut self, reactor: &mut Reactor, wait: Wait) -> Option<Duration> {
        inside!(self, store => store.before_enter(reactor, wait))
    }

    #[inline]
    fn after_enter(&mut self) {
        inside!(self, store => store.after_enter());
    }

    #[inline]
    fn came_back(&mut self) -> bool {
        inside!(self, store => store.came_back())
    }

    #[inline]
    fn is_sated(&self) -> bool {
        inside!(self, store => store.is_sated())
    }

    fn prepare_close(&mut self) {
        inside!(self, store => store.prepare_close());
    }

    fn close(&mut self, reactor: &mut Reactor) -> bool {
        inside!(self, store => store.close(reactor))
    }

    fn leg_stats(&self) -> Arc<[LegStats]> {
        inside!(self, store => store.leg_stats())
    }
}
