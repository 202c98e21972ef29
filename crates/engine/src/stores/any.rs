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
            Backing::Null { .. } => AnyStore::Null(Box::new(Null::new(disk, ops)?)),
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

/// Forwards methods to the store inside.
macro_rules! forward {
    ($(fn $method:ident($self:ident: $receiver:ty $(, $arg:ident: $kind:ty)*) $(-> $result:ty)?;)+) => {$(
        #[inline]
        fn $method($self: $receiver $(, $arg: $kind)*) $(-> $result)? {
            match $self {
                AnyStore::Files(store) => store.$method($($arg),*),
                AnyStore::Ram(store) => store.$method($($arg),*),
                AnyStore::Null(store) => store.$method($($arg),*),
                AnyStore::Model(store) => store.$method($($arg),*),
                AnyStore::Nbd(store) => store.$method($($arg),*),
                AnyStore::Rbd(store) => store.$method($($arg),*),
            }
        }
    )+};
}

impl Store for AnyStore {
    forward! {
        fn room(self: &Self) -> usize;
        fn in_flight(self: &Self) -> usize;
        fn push(self: &mut Self, reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64);
        fn at_once(self: &mut Self, memory: &Memory, op: &Op<'_>) -> bool;
        fn completed(self: &mut Self, reactor: &mut Reactor, completion: Completion);
        fn polls(self: &Self) -> bool;
        fn reap(self: &mut Self) -> Option<Done>;
        fn is_ready(self: &Self) -> bool;
        fn before_enter(self: &mut Self, reactor: &mut Reactor, wait: Wait) -> Option<Duration>;
        fn after_enter(self: &mut Self);
        fn came_back(self: &mut Self) -> bool;
        fn is_sated(self: &Self) -> bool;
        fn prepare_close(self: &mut Self);
        fn close(self: &mut Self, reactor: &mut Reactor) -> bool;
        fn release_shared(self: &mut Self);
        fn leg_stats(self: &Self) -> Arc<[LegStats]>;
    }
}
