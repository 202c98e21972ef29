//! Waits for descriptors.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Sleeps until a descriptor is ready or until `until`, if it is given.
pub(crate) fn wait(fds: &mut [PollFd<'_>], until: Option<Instant>) -> io::Result<()> {
    let timeout = until.map(|until| {
        let left = until.saturating_duration_since(Instant::now());
        Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        }
    });
    match poll(fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Returns true if a descriptor is readable now.
pub(crate) fn is_readable(fd: impl AsFd) -> bool {
    is_ready(fd, PollFlags::IN)
}

/// Returns true if a descriptor is in one of the states `flags` now.
pub(crate) fn is_ready(fd: impl AsFd, flags: PollFlags) -> bool {
    let mut fds = [PollFd::new(&fd, flags)];
    let _ = wait(&mut fds, Some(Instant::now()));
    fds.iter().any(|fd| fd.revents().intersects(flags))
}
