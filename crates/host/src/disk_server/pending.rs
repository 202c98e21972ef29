//! Connections without a session: the frontend has not sent anything yet, or the session before has not ended.
//!
//! A connection alone starts no session, because a VMM may connect long before it plugs the disk in. Their number is
//! bounded, and the oldest one is closed for a new one, so silent connections keep no frontend out. Closing a connection
//! closes the descriptors that are queued in it, which may block; the offload threads do it.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::os::unix::net::UnixStream as StdStream;
use std::task::{Context, Poll};

use cleave_session::Offload;
use rustix::net::{RecvFlags, recv};
use tokio::net::UnixStream;

/// Most pending connections.
const PENDING_MAX: usize = 16;

/// Pending connections, oldest first.
#[derive(Debug)]
pub(crate) struct PendingConnections {
    streams: VecDeque<UnixStream>,
    offload: Offload,
}

impl PendingConnections {
    /// None yet. `offload` closes them.
    pub(crate) fn new(offload: Offload) -> PendingConnections {
        let streams = VecDeque::new();
        PendingConnections { streams, offload }
    }

    /// Adds a connection; returns whether the oldest was closed for it.
    pub(crate) fn add(&mut self, stream: UnixStream) -> bool {
        let full = self.streams.len() >= PENDING_MAX;
        if full {
            self.close_oldest();
        }
        self.streams.push_back(stream);
        full
    }

    /// Closes the oldest, which frees its descriptor.
    pub(crate) fn close_oldest(&mut self) {
        if let Some(oldest) = self.streams.pop_front() {
            self.offload.hang_up(oldest);
        }
    }

    /// Closes all; returns how many there were.
    pub(crate) fn clear(&mut self) -> usize {
        let count = self.streams.len();
        let all = self.streams.drain(..);
        all.for_each(|stream| self.offload.hang_up(stream));
        count
    }

    /// Waits for the first connection with a message, and closes those that the frontend has closed. Never completes while
    /// none is pending; nothing is lost when the future is dropped.
    pub(crate) async fn next_ready(&mut self) -> StdStream {
        poll_fn(|context| self.poll_ready(context)).await
    }

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<StdStream> {
        let mut at = 0;
        while let Some(stream) = self.streams.get(at) {
            if stream.poll_read_ready(context).is_pending() {
                at += 1;
                continue;
            }
            match peek_input(stream) {
                // Readiness was stale: forget it and ask again, which registers us for the next.
                Input::None => {
                    let _ = stream.try_io(tokio::io::Interest::READABLE, || {
                        Err::<(), _>(io::ErrorKind::WouldBlock.into())
                    });
                }
                Input::Message => {
                    let ready = self.streams.remove(at).map(UnixStream::into_std);
                    if let Some(Ok(ready)) = ready {
                        return Poll::Ready(ready);
                    }
                }
                Input::Closed => {
                    let closed = self.streams.remove(at).into_iter();
                    closed.for_each(|stream| self.offload.hang_up(stream));
                }
            }
        }
        Poll::Pending
    }
}

/// State of a pending connection.
enum Input {
    None,
    Message,
    Closed,
}

/// Peeks only, because the session must receive the first message with its descriptors.
fn peek_input(stream: &UnixStream) -> Input {
    let mut byte = [0; 1];
    match recv(stream, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((0, _)) => Input::Closed,
        Ok(_) => Input::Message,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Input::None,
        Err(_) => Input::Closed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::time::Duration;

    fn pair() -> (UnixStream, StdStream) {
        let (ours, theirs) = StdStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (UnixStream::from_std(ours).unwrap(), theirs)
    }

    async fn comes<T>(future: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout(Duration::from_secs(60), future)
            .await
            .ok()
    }

    async fn soon<T>(future: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout(Duration::from_millis(100), future)
            .await
            .ok()
    }

    #[tokio::test]
    async fn the_first_to_send_is_served_first() {
        let mut pending = PendingConnections::new(Offload::default());
        assert!(soon(pending.next_ready()).await.is_none());
        let (first, _silent) = pair();
        let (second, mut theirs) = pair();
        assert!(!pending.add(first) && !pending.add(second));
        assert!(soon(pending.next_ready()).await.is_none());
        theirs.write_all(b"hello").unwrap();
        let mut ready = comes(pending.next_ready()).await.unwrap();
        let mut text = [0; 5];
        ready.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"hello", "peeking consumes nothing");
        assert_eq!(pending.clear(), 1);
    }

    #[tokio::test]
    async fn a_silent_connection_that_closes_is_removed() {
        let mut pending = PendingConnections::new(Offload::default());
        let (ours, theirs) = pair();
        pending.add(ours);
        drop(theirs);
        assert!(soon(pending.next_ready()).await.is_none());
        assert_eq!(pending.clear(), 0);
    }

    #[tokio::test]
    async fn the_oldest_is_closed_when_there_are_too_many() {
        let mut pending = PendingConnections::new(Offload::default());
        let mut theirs = Vec::new();
        for at in 0..100 {
            let (ours, other) = pair();
            assert_eq!(pending.add(ours), at >= PENDING_MAX);
            theirs.push(other);
        }
        theirs.last_mut().unwrap().write_all(b"x").unwrap();
        assert!(comes(pending.next_ready()).await.is_some());
        assert_eq!(pending.clear(), PENDING_MAX - 1);
    }
}
