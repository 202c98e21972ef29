//! State that the ports, the dialler and the disk share.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::attached::Attached;
use crate::bell::ring;
use crate::dial::{Call, NbdError, Target};
use crate::fence::{Fence, Fences};
use crate::flushes::Flushes;
use crate::handshake::Export;
use crate::link::{Link, dial, fit, process_of};
use crate::lock::lock;
use crate::traffic::Ledger;
use crate::unflushed::Unflushed;
use crate::{NbdSpec, replay, wire};

/// State that the ports, the dialler and the disk share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) spec: NbdSpec,
    pub(crate) name: String,
    pub(crate) targets: Vec<Target>,
    pub(crate) export: Export,
    /// Connections of each store.
    pub(crate) connections: u16,
    pub(crate) workers_max: u16,
    pub(crate) is_read_only: bool,
    pub(crate) opened_at: Instant,
    /// No store gets a connection any more.
    pub(crate) is_abandoned: AtomicBool,
    pub(crate) size_bytes: AtomicU64,
    /// Written when the size has changed, and when the server may have lost changes or was sent them again.
    pub(crate) changed: OwnedFd,
    /// Connections that were made when the disk was opened, for its first stores.
    pub(crate) spares: Mutex<Vec<Link>>,
    pub(crate) attached: Mutex<Attached>,
    pub(crate) waiting: AtomicU64,
    /// Connections that are lost and not given up yet.
    pub(crate) ending: AtomicU64,
    pub(crate) lost: AtomicU64,
    pub(crate) reconnects: AtomicU64,
    pub(crate) fences: Mutex<Fences>,
    pub(crate) unflushed: Mutex<Unflushed>,
    pub(crate) flushes: Arc<Mutex<Flushes>>,
    /// Bytes that the changes under way will occupy in `unflushed`. Added to under its lock.
    pub(crate) reserved_bytes: AtomicU64,
    pub(crate) replayed_bytes: AtomicU64,
    pub(crate) lossy: AtomicU64,
    pub(crate) lossy_bytes: AtomicU64,
    /// The server refused to do again what it had done, or nobody has it any more.
    pub(crate) has_lost_data: AtomicBool,
    /// A flush failed, or data was lost, and no flush of the guest has failed since.
    pub(crate) has_untold_loss: AtomicBool,
    /// Eventfds of ports that are gone, for those to come: a thread that serves a guest can make none.
    pub(crate) bells: Mutex<Vec<Arc<OwnedFd>>>,
    pub(crate) traffic: Mutex<Ledger>,
    /// When a lost connection, a new one, and a guest that left while its server was away were last told of.
    pub(crate) told: [Mutex<Option<Instant>>; 3],
}

/// A connection that was not made.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) error: NbdError,
    /// If changes were sent again on it and may not have been answered.
    pub(crate) fence: Option<Fence>,
}

impl From<NbdError> for Failed {
    fn from(error: NbdError) -> Failed {
        Failed { error, fence: None }
    }
}

impl Shared {
    pub(crate) fn is_unix(&self) -> bool {
        matches!(self.spec.address, crate::Address::Unix(_))
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::SeqCst)
    }

    /// Returns what those changes occupy that the server may lack and was not sent again: it was lost, or nobody sends it anything any
    /// more, or uses a connection to it, and would notice if it lost them.
    pub(crate) fn owed_bytes(&self) -> u64 {
        let attached = lock(&self.attached);
        match attached.is_lossy() || attached.used == 0 || self.is_abandoned() {
            true => lock(&self.unflushed).bytes(),
            false => 0,
        }
    }

    /// Returns true if changes were answered and not flushed.
    pub(crate) fn has_unflushed(&self) -> bool {
        lock(&self.unflushed).bytes() > 0
    }

    /// Returns true if changes are kept until the server has flushed them. A server without flushes has nothing that is not
    /// durable, or cannot make it so.
    pub(crate) fn keeps_changes(&self) -> bool {
        !self.is_read_only && self.export.has(wire::export::FLUSH)
    }

    /// Connects and negotiates. While no store has a connection, the changes that the server may have lost are written again first, as
    /// long as this is wanted: a guest that has left may run on another host, and have written there.
    pub(crate) fn connect(
        &self,
        time: Duration,
        is_alone: bool,
        is_wanted: impl Fn() -> bool,
    ) -> Result<Link, Failed> {
        let (mut call, export) = dial(&self.targets, &self.spec, time)?;
        fit(&self.export, &export, self.is_read_only)?;
        if is_alone {
            self.replay(&mut call, &export, is_wanted)?;
        }
        let size = export.size_bytes;
        if self.size_bytes.swap(size, Ordering::Relaxed) != size {
            ring(&self.changed);
        }
        Ok(Link::of(call, export, self.is_unix())?)
    }

    /// Records that a connection was lost, if changes may have to be written again: all others end before another is made. Returns true
    /// unless that was known.
    pub(crate) fn mark_lossy(&self) -> bool {
        if !self.keeps_changes() {
            return false;
        }
        let is_known = std::mem::replace(&mut lock(&self.attached).is_lossy, true);
        let unflushed = lock(&self.unflushed).bytes();
        if !is_known && unflushed > 0 {
            // Whoever tells of it may come when they have been sent again and flushed.
            self.lossy_bytes.store(unflushed, Ordering::Relaxed);
            self.lossy.fetch_add(1, Ordering::Release);
            ring(&self.changed);
        }
        !is_known
    }

    pub(crate) fn lose_data(&self) {
        self.has_untold_loss.store(true, Ordering::SeqCst);
        self.has_lost_data.store(true, Ordering::SeqCst);
    }

    /// Writes the kept changes again. Nobody adds to them meanwhile, because no store has a connection.
    fn replay(
        &self,
        call: &mut Call,
        export: &Export,
        is_wanted: impl Fn() -> bool,
    ) -> Result<(), Failed> {
        let server = process_of(call.socket(), self.is_unix());
        // Not under the lock: a store that closes must not wait for the server here.
        let kept = lock(&self.unflushed).lend();
        let has_some = !kept.is_empty();
        let is_over = || self.is_abandoned() || !is_wanted();
        // Then none of them is sent, and nobody has to wait until the server cannot apply them any more.
        let was_over = is_over();
        let done = replay::replay(call, export, kept.iter(), self.spec.timeout, is_over);
        lock(&self.unflushed).give_back(kept);
        let done = done.map_err(|error| Failed {
            error,
            fence: (has_some && !was_over).then(|| Fence {
                until: Instant::now() + self.spec.fence,
                server,
            }),
        })?;
        if done.bytes > 0 {
            self.replayed_bytes.fetch_add(done.bytes, Ordering::Relaxed);
            tracing::warn!(
                "{}: {} bytes were answered by the NBD server and not flushed before the connection was lost; they were sent again",
                self.name,
                done.bytes
            );
        }
        if done.refused_bytes > 0 {
            self.lose_data();
            tracing::error!(
                "{}: the NBD server refuses {} of these bytes, and data may be lost; every flush fails until the disk is reopened",
                self.name,
                done.refused_bytes
            );
        }
        if done.bytes + done.refused_bytes > 0 {
            ring(&self.changed);
        }
        Ok(())
    }
}
