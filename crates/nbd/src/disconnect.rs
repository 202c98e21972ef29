//! The end of a socket, whoever else has it open.
//!
//! A TCP socket goes on sending what it has until its last reference is closed, and an io_uring may keep one for long: before Linux
//! 6.13 it releases the files that it was told to release in order, and not before every request that began earlier has ended, such as
//! a watch that lasts as long as its worker. So a lost connection is disconnected, which empties the socket's queue and resets the
//! connection at once. A worker may not make that call, and the thread that connects may.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pause before a socket that could not be disconnected is tried again.
const PAUSE: Duration = Duration::from_secs(1);

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

    /// Disconnects a socket, which is TCP's. Nobody may be waiting on it: some kernels refuse then.
    fn run(&self, socket: &OwnedFd) -> io::Result<()> {
        rustix::net::connect_unspec(socket)?;
        self.set_done();
        Ok(())
    }
}

/// The sockets of a disk that the kernel has refused to disconnect. They are tried again.
#[derive(Debug, Default)]
pub(crate) struct Refused {
    sockets: Vec<(Arc<OwnedFd>, Disconnect)>,
    next_at: Option<Instant>,
}

impl Refused {
    /// Disconnects a socket of the disk `name`, now or later.
    pub(crate) fn run(
        &mut self,
        socket: Arc<OwnedFd>,
        disconnect: Disconnect,
        name: &str,
        now: Instant,
    ) {
        let Err(error) = disconnect.run(&socket) else {
            return;
        };
        if self.sockets.is_empty() {
            tracing::error!(
                "{name}: a lost connection to the NBD server cannot be reset ({error}), so old writes could still reach the server; \
                 requests of that connection wait until it can; trying again"
            );
        }
        self.sockets.push((socket, disconnect));
        self.next_at.get_or_insert(now + PAUSE);
    }

    /// Tries those again that are due.
    pub(crate) fn run_due(&mut self, name: &str, now: Instant) {
        if self.next_at.is_none_or(|at| now < at) {
            return;
        }
        self.sockets
            .retain(|(socket, disconnect)| disconnect.run(socket).is_err());
        self.next_at = (!self.sockets.is_empty()).then_some(now + PAUSE);
        if self.next_at.is_none() {
            tracing::info!("{name}: all lost connections to the NBD server are reset");
        }
    }

    /// Returns the time until the next attempt; `None`: none is due.
    pub(crate) fn left(&self, now: Instant) -> Option<Duration> {
        self.next_at.map(|at| at.saturating_duration_since(now))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

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
        done.run(&OwnedFd::from(ours)).unwrap();
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

    /// A unix socket can never be disconnected. It takes the place of one that the kernel does not disconnect now.
    #[test]
    fn a_socket_that_cannot_be_disconnected_is_tried_again_after_a_pause() {
        let now = Instant::now();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let other = UnixStream::pair().unwrap().0;
        let (mut refused, done) = (Refused::default(), Disconnect::default());
        assert_eq!(refused.left(now), None);
        refused.run(Arc::new(other.into()), done.clone(), "test", now);
        refused.run_due("test", now);
        assert_eq!(refused.left(now), Some(PAUSE));
        let (mut now, half) = (now + PAUSE, PAUSE / 2);
        refused.run_due("test", now);
        assert_eq!(
            (done.is_done(), refused.left(now + half)),
            (false, Some(half))
        );
        refused.sockets[0].0 = Arc::new(ours.into());
        refused.run_due("test", now + half);
        assert!(!done.is_done());
        now += PAUSE;
        refused.run_due("test", now);
        assert_eq!((done.is_done(), refused.left(now)), (true, None));
    }
}
