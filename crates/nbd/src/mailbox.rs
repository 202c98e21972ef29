//! Where the dialler leaves the connections that ports ask it for.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::bell::ring;
use crate::disconnect::Disconnect;
use crate::link::Link;
use crate::lock::lock;
use crate::shared::Shared;

/// An order to the dialler.
pub(crate) enum DiallerOrder {
    /// Make a connection for this port.
    Dial(Weak<Mailbox>, Want),
    /// Disconnect the socket of a lost connection.
    Disconnect(Arc<OwnedFd>, Disconnect),
    /// Something has changed: a connection was lost or given up, or the disk is.
    Look,
    /// Run this on the dialler's thread.
    Run(Box<dyn FnOnce() + Send>),
}

/// The number of connections that a store has, for the dialler.
#[derive(Debug, Default)]
pub(crate) struct ConnectionCount(AtomicUsize);

/// One of the connections that stores have. It ends when the store has given the connection up, after the fence.
#[derive(Debug)]
pub(crate) struct Attachment {
    shared: Arc<Shared>,
    store: Arc<ConnectionCount>,
    is_used: bool,
}

impl Attachment {
    /// Records that the store has taken the connection.
    pub(crate) fn begin_use(&mut self) {
        if !std::mem::replace(&mut self.is_used, true) {
            lock(&self.shared.attached).used += 1;
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let mut attached = lock(&self.shared.attached);
        attached.count -= 1;
        attached.used -= usize::from(self.is_used);
        drop(attached);
        self.store.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Where the dialler leaves a connection.
#[derive(Debug)]
pub(crate) struct Mailbox {
    pub(crate) link: Mutex<Option<(Link, Attachment)>>,
    pub(crate) bell: Arc<OwnedFd>,
    pub(crate) store: Arc<ConnectionCount>,
}

impl Mailbox {
    /// Returns true if its store has no connection at all.
    pub(crate) fn is_needy(&self) -> bool {
        self.store.0.load(Ordering::Relaxed) == 0
    }

    /// Leaves a connection. `is_first`: no store has any, and what the server may have lost was written again. Returns false, and
    /// drops it, if it is not the first one and another was lost meanwhile. A store whose connection has ended may not know that yet.
    pub(crate) fn put(&self, shared: &Arc<Shared>, link: Link, is_first: bool) -> bool {
        let mut attached = lock(&shared.attached);
        let has_ended = shared.keeps_changes() && attached.has_ended();
        if !is_first && (attached.is_lossy || has_ended) {
            drop(attached);
            shared.mark_lossy();
            return false;
        }
        attached.is_lossy = false;
        attached.count += 1;
        attached.sockets.retain(|socket| socket.strong_count() > 0);
        attached.sockets.push(Arc::downgrade(&link.socket));
        self.store.0.fetch_add(1, Ordering::Relaxed);
        drop(attached);
        let attachment = Attachment {
            shared: Arc::clone(shared),
            store: Arc::clone(&self.store),
            is_used: false,
        };
        *lock(&self.link) = Some((link, attachment));
        self.ring();
        true
    }

    pub(crate) fn ring(&self) {
        ring(&self.bell);
    }
}

/// Why a connection is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Want {
    First,
    /// In place of one that was lost.
    Next,
    /// In place of one on which the server answered nothing.
    Better,
}
