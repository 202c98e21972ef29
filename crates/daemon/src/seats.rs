//! Frontends that have connected and not yet said anything, or that wait for the one before them to
//! be let go.
//!
//! A connection alone takes no session: a VMM may hold one long before it plugs the disk in, and a
//! thousand silent ones must keep nobody out. The seats are few; the oldest silent guest leaves. To close
//! a connection is to close the descriptors that are queued in it, and those may block.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::os::unix::net::UnixStream as StdStream;
use std::task::{Context, Poll};

use cleave_session::offload;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, recv};
use tokio::net::UnixStream;

/// Most connections that wait.
const SEATS_MAX: usize = 16;

/// Waiting connections, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Seats(VecDeque<UnixStream>);

impl Seats {
    /// Takes a connection; returns whether the oldest had to leave for it.
    pub(crate) fn take(&mut self, stream: UnixStream) -> bool {
        let full = self.0.len() >= SEATS_MAX;
        if full {
            self.free_one();
        }
        self.0.push_back(stream);
        full
    }

    /// Closes the oldest, to have its descriptor for another.
    pub(crate) fn free_one(&mut self) {
        self.0.pop_front().into_iter().for_each(offload::hang_up);
    }

    /// Closes all; returns how many there were.
    pub(crate) fn clear(&mut self) -> usize {
        let count = self.0.len();
        self.0.drain(..).for_each(offload::hang_up);
        count
    }

    /// The first that has something to say. Those that left in silence are let go. Waits for ever
    /// where nobody sits; nothing is lost when the future is dropped.
    pub(crate) async fn speaker(&mut self) -> StdStream {
        poll_fn(|context| self.poll_speaker(context)).await
    }

    fn poll_speaker(&mut self, context: &mut Context<'_>) -> Poll<StdStream> {
        let mut at = 0;
        while let Some(stream) = self.0.get(at) {
            if stream.poll_read_ready(context).is_pending() {
                at += 1;
                continue;
            }
            match said(stream) {
                // Readiness was stale: forget it and ask again, which registers us for the next.
                Said::NothingYet => {
                    let _ = stream.try_io(tokio::io::Interest::READABLE, || {
                        Err::<(), _>(io::ErrorKind::WouldBlock.into())
                    });
                }
                Said::Something => {
                    let speaker = self.0.remove(at).map(UnixStream::into_std);
                    if let Some(Ok(speaker)) = speaker {
                        return Poll::Ready(speaker);
                    }
                }
                Said::Left => self.0.remove(at).into_iter().for_each(offload::hang_up),
            }
        }
        Poll::Pending
    }
}

enum Said {
    NothingYet,
    Something,
    Left,
}

/// Looks without taking anything: the session reads the first message with its descriptors.
fn said(stream: &UnixStream) -> Said {
    let mut byte = [0; 1];
    match recv(stream, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((0, _)) => Said::Left,
        Ok(_) => Said::Something,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Said::NothingYet,
        Err(_) => Said::Left,
    }
}

/// Whether the other end of a connection has closed it.
pub(crate) fn has_left(stream: &StdStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
    // A zero time-out: looks, does not wait.
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    poll(&mut polled, Some(&rustix::time::Timespec::default())).is_ok_and(|n| n > 0)
        && polled.iter().any(|fd| fd.revents().intersects(gone))
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
    async fn who_speaks_first_is_served_first() {
        let mut seats = Seats::default();
        assert!(soon(seats.speaker()).await.is_none());
        let (first, _silent) = pair();
        let (second, mut theirs) = pair();
        assert!(!seats.take(first) && !seats.take(second));
        assert!(soon(seats.speaker()).await.is_none());
        theirs.write_all(b"hello").unwrap();
        let mut speaker = comes(seats.speaker()).await.unwrap();
        let mut text = [0; 5];
        speaker.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"hello", "looking takes nothing");
        assert_eq!(seats.clear(), 1);
    }

    #[tokio::test]
    async fn who_leaves_in_silence_is_let_go() {
        let mut seats = Seats::default();
        let (ours, theirs) = pair();
        seats.take(ours);
        drop(theirs);
        assert!(soon(seats.speaker()).await.is_none());
        assert_eq!(seats.clear(), 0);
    }

    #[tokio::test]
    async fn seats_are_few_and_the_newest_gets_one() {
        let mut seats = Seats::default();
        let mut theirs = Vec::new();
        for at in 0..100 {
            let (ours, other) = pair();
            assert_eq!(seats.take(ours), at >= SEATS_MAX);
            theirs.push(other);
        }
        theirs.last_mut().unwrap().write_all(b"x").unwrap();
        assert!(comes(seats.speaker()).await.is_some());
        assert_eq!(seats.clear(), SEATS_MAX - 1);
    }

    #[test]
    fn a_hang_up_is_seen_at_once_even_behind_unread_bytes() {
        let (ours, mut theirs) = StdStream::pair().unwrap();
        assert!(!has_left(&ours));
        theirs.write_all(b"unread").unwrap();
        assert!(!has_left(&ours));
        drop(theirs);
        assert!(has_left(&ours));
    }
}
