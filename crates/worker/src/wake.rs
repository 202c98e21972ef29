//! Wakes a thread through an eventfd.

use std::os::fd::OwnedFd;

/// Writes to one of our own eventfds. A failure means that its counter is full, which signals just as well.
pub(crate) fn signal(fd: &OwnedFd) {
    add_to(fd, 1);
}

/// Adds to the counter of an eventfd.
pub(crate) fn add_to(fd: &OwnedFd, count: u64) {
    let _ = rustix::io::write(fd, &count.to_ne_bytes());
}
