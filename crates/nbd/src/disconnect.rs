//! The end of a socket, whoever else has it open.
//!
//! A TCP socket goes on sending what it has until its last reference is closed, and an io_uring may keep one for long: before Linux
//! 6.13 it releases the files that it was told to release in order, and not before every request that began earlier has ended, such as
//! a watch that lasts as long as its worker. So a lost connection is disconnected, which empties the socket's queue and resets the
//! connection at once. A worker may not make that call, and the thread that connects may.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A socket that is being disconnected.
#[derive(Debug, Clone, Default)]
pub struct Disconnect(Arc<AtomicBool>);

impl Disconnect {
    /// Returns true if nothing that was given to the socket leaves this host any more.
    pub fn is_done(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Records that nothing does.
    pub(crate) fn set_done(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Disconnects the socket of the disk `name`, which is TCP's. Nobody may be waiting on it: some kernels refuse then.
    pub(crate) fn run(&self, socket: &OwnedFd, name: &str) {
        match rustix::net::connect_unspec(socket) {
            Ok(()) => self.set_done(),
            Err(error) => tracing::error!(
                "{name}: a lost connection to the NBD server cannot be reset ({error}), so old writes could still reach the server; \
                 requests of that connection wait until the daemon is restarted"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    /// As a ring may keep one.
    #[test]
    fn a_disconnected_socket_sends_nothing_more_although_somebody_has_it_open() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut theirs = listener.accept().unwrap().0;
        theirs
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut sent = 0;
        while let Ok(count) = ours.write(&[1; 65536]) {
            sent += count;
        }
        let kept = ours.try_clone().unwrap();
        let done = Disconnect::default();
        assert!(!done.is_done());
        done.run(&OwnedFd::from(ours), "test");
        assert!(done.is_done());
        let mut got = Vec::new();
        let ends = theirs.read_to_end(&mut got);
        assert!(got.len() < sent, "{} of {sent} bytes arrived", got.len());
        assert_eq!(
            ends.unwrap_err().kind(),
            std::io::ErrorKind::ConnectionReset
        );
        drop(kept);
    }
}
