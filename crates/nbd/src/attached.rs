//! The connections that the stores of a disk have.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use crate::bell::has_ended;

/// The connections that stores have.
///
/// When one is lost, all of them are given up before another is made: the server behind the next one may be another process that
/// knows nothing of what was answered before. What it may lack is written again while no store has a connection, so that nothing
/// newer can be overtaken by it.
#[derive(Debug, Default)]
pub(crate) struct Attached {
    pub(crate) count: usize,
    /// Those of them that a store has taken. One that closes may leave its last one untaken.
    pub(crate) used: usize,
    /// One was lost since the last time that there was none.
    pub(crate) is_lossy: bool,
    pub(crate) sockets: Vec<Weak<OwnedFd>>,
}

impl Attached {
    /// Returns true if no connection may be handed out now.
    pub(crate) fn is_closing(&self) -> bool {
        self.is_lossy && self.count > 0
    }

    /// Returns true if a connection was lost, and none was made since.
    pub(crate) fn is_lossy(&self) -> bool {
        self.is_lossy
    }

    /// Returns true if the server has ended one of them.
    pub(crate) fn has_ended(&self) -> bool {
        let mut live = self.sockets.iter().filter_map(Weak::upgrade);
        live.any(|socket| has_ended(&socket))
    }

    /// Leaves out a connection that is about to end in order.
    pub(crate) fn forget(&mut self, socket: &Arc<OwnedFd>) {
        self.sockets
            .retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(socket)));
    }

    /// Ends every connection, as if the server had closed it, if one was lost. Returns true if so.
    pub(crate) fn cut(&self) -> bool {
        let live = self.sockets.iter().filter(|_| self.is_lossy);
        for socket in live.filter_map(Weak::upgrade) {
            let _ = rustix::net::shutdown(&*socket, rustix::net::Shutdown::Both);
        }
        self.is_lossy
    }
}
