//! Connections to a server whose negotiation is over.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerPidfd;
use rustix::net::{SendFlags, send};

use crate::bell::is_ready;
use crate::dial::{Call, NbdError, Target};
use crate::handshake::{Export, negotiate};
use crate::{NbdSpec, wire};

/// Longest time for connecting and negotiating.
pub(crate) const DIAL_TIME: Duration = Duration::from_secs(10);
/// Longest time for this on the second and further connections of a disk.
pub(crate) const MORE_TIME: Duration = Duration::from_secs(2);
/// So many times the time-out of the disk, a server may be busy with a slow request, and with what waits for that.
pub const PATIENCE: u32 = 4;

/// A connection whose negotiation is over.
#[derive(Debug)]
pub struct Link {
    /// Blocking, so that an io_uring waits on it. Another owner only shuts it down.
    pub socket: Arc<OwnedFd>,
    /// The server's promises on this connection.
    pub export: Export,
    /// A pidfd of the server's process; `None`: it is not known, as over TCP and before Linux 6.5.
    pub server: Option<OwnedFd>,
}

impl Link {
    pub(crate) fn of(call: Call, export: Export, is_unix: bool) -> Result<Link, NbdError> {
        let server = process_of(call.socket(), is_unix);
        Ok(Link {
            socket: call.into_socket()?,
            export,
            server,
        })
    }

    /// Takes leave of the server, which closes the connection. Only for a connection on which nothing is under way. Its socket then
    /// has room, unless the server answered what it did not read; that server is not told.
    pub(crate) fn part(&self) {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let _ = send(&self.socket, &wire::WireRequest::DISCONNECT.bytes(), flags);
    }

    /// Returns false if it was lost while nobody used it.
    pub(crate) fn is_alive(&self) -> bool {
        !is_ready(&self.socket)
    }
}

/// Returns a pidfd of the process that listens at the other end. `None`: it is not known.
pub(crate) fn process_of(socket: &OwnedFd, is_unix: bool) -> Option<OwnedFd> {
    let process = is_unix.then(|| getsockopt(socket, PeerPidfd).ok());
    // A process that has ended already only made the socket, and left it to another one that serves us: nbdkit does that when it
    // goes to the background.
    process.flatten().filter(|process| !is_ready(process))
}

/// Connects and negotiates.
pub(crate) fn dial(
    targets: &[Target],
    spec: &NbdSpec,
    time: Duration,
) -> Result<(Call, Export), NbdError> {
    let mut call = Call::place(targets, Instant::now() + time, spec.timeout * PATIENCE)?;
    let export = negotiate(&mut call, &spec.export)?;
    Ok((call, export))
}

/// Refuses a connection whose server promises less than on the first one, which the guest was told of.
pub(crate) fn fit(first: &Export, now: &Export, is_read_only: bool) -> Result<(), NbdError> {
    let lacks = |flag| first.has(flag) && !now.has(flag);
    let unfit = |why: &str| Err(NbdError::Unfit(format!("the export has changed: {why}")));
    if now.has(wire::export::READ_ONLY) && !first.has(wire::export::READ_ONLY) && !is_read_only {
        return unfit("it is read-only now");
    }
    if lacks(wire::export::CAN_MULTI_CONN) {
        return unfit("it permits one connection only now");
    }
    if lacks(wire::export::FLUSH) {
        return unfit("it cannot flush now");
    }
    if now.block_min > first.block_min.max(512) {
        return unfit("its smallest block is larger now");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    /// A server may have answered requests that it did not read, so they count as done.
    #[test]
    fn a_server_that_reads_nothing_does_not_keep_us_from_leaving() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        while send(&ours, &[0; 4096], SendFlags::DONTWAIT).is_ok() {}
        let link = Link {
            socket: Arc::new(ours.into()),
            export: Export {
                size_bytes: 0,
                flags: 0,
                block_min: 1,
                payload_max: 1,
                structured: false,
            },
            server: None,
        };
        let (to, parted) = channel();
        thread::spawn(move || {
            link.part();
            to.send(()).unwrap();
        });
        parted.recv_timeout(Duration::from_secs(20)).unwrap();
    }
}
