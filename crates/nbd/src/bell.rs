//! Eventfds that threads of a disk ring for each other, and what a descriptor shows without a wait.

use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::NbdError;

pub(crate) fn new_bell() -> Result<OwnedFd, NbdError> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// A full counter signals as well.
pub(crate) fn ring(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

/// Returns true if a descriptor can be read: a socket that has data or is closed, a process that has ended.
pub(crate) fn is_ready(fd: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

/// Returns true if the other end of a socket is closed.
pub(crate) fn has_ended(socket: &OwnedFd) -> bool {
    // An error and a hang-up show in any case.
    let mut polled = [PollFd::new(socket, PollFlags::RDHUP)];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}
