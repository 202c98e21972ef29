//! A descriptor on which a task waits until there is something to read.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Makes a descriptor one to wait on, on the runtime at hand.
#[expect(
    deprecated,
    reason = "its successor is an unsafe fn, for descriptors that may be closed under it; an OwnedFd cannot"
)]
pub(super) fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}
