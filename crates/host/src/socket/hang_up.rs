//! Finds out whether the other end of a connection has closed it, without waiting.

use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, poll};

/// Returns true if the other end of a connection has closed it.
pub(crate) fn has_left(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
    // With a zero time-out, poll does not wait.
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    poll(&mut polled, Some(&rustix::time::Timespec::default())).is_ok_and(|n| n > 0)
        && polled.iter().any(|fd| fd.revents().intersects(gone))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn a_hang_up_is_seen_at_once_even_behind_unread_bytes() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        assert!(!has_left(&ours));
        theirs.write_all(b"unread").unwrap();
        assert!(!has_left(&ours));
        drop(theirs);
        assert!(has_left(&ours));
    }
}
