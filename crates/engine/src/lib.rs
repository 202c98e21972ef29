//! Runs ops. This crate must not know vrings, the protocol or any policy: it takes [`Op`](cleave_blk::Op)s with
//! guest addresses, translates them, and reports each op exactly once. It is one of the daemon's three crates with
//! unsafe code, and the only one that uses io_uring.
//!
//! It has two entry points. A [`Reactor`] (`reactor/`) belongs to a worker thread: its io_uring, in which the thread
//! sleeps, watches descriptors and calls guests. A [`Store`] is one disk on that thread (`stores/` has the kinds, `ops/`
//! what they have in common). Several stores share a reactor; `stores/null.rs` is the smallest complete store.
//!
//! | Store | Disk | Where its ops complete |
//! |---|---|---|
//! | `Files` | files and block devices, also as a stripe | in the rings of the reactor |
//! | `Ram` | memory | in `push` or `at_once`; long ones in parts, one in each lap |
//! | [`Null`] | none: reads are zeroes | as those of `Ram` |
//! | [`Model`] | a modelled drive | in its arithmetic; waits by itself, because a timer is too inexact |
//! | [`Nbd`] | the export of an NBD server | in messages on sockets, which go through the ring |
//! | [`Rbd`] | images of a Ceph cluster, also as a stripe | in threads of librbd, which fill an inbox |

mod error;
mod iopoll;
mod ops;
mod reactor;
mod store;
mod stores;

pub use error::EngineError;
pub use iopoll::probe_iopoll;
pub use ops::lap::LapEnd;
pub use ops::legs::{LegStats, LegTotals};
pub use reactor::bell::BellFd;
pub use reactor::neighbours::Neighbours;
pub use reactor::ring::{ClosedRing, share_thread};
pub use reactor::{Completion, Prepared, Reactor, Rest};
pub use store::{Done, Event, Store, Wait};
pub use stores::any::{AnyStore, Visitor};
pub use stores::model::Model;
pub use stores::nbd::Nbd;
pub use stores::null::Null;
pub use stores::rbd::Rbd;

pub(crate) use store::LAP_BYTES_MAX;

#[cfg(test)]
mod rig;
#[cfg(test)]
mod tests;
