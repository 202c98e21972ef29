//! What the service manager keeps between two processes of a service: a parcel for each disk.
//!
//! The descriptors of a parcel wait in a socket, and the manager has that. So each disk is one entry of its store, descriptors that
//! are equal are no concern of it, and when the manager gives up the socket all of them are closed.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::link;
use super::parcel::Parcel;
use crate::process::systemd::{self, Manager};
use crate::socket;

/// A parcel waits in the buffer of its socket, which has room for it.
const TIME: Duration = Duration::from_secs(1);

/// Gives a parcel to the manager, for the next process of this service.
pub(crate) fn keep(manager: &Manager, parcel: Parcel) -> io::Result<()> {
    let packed = parcel.pack().map_err(|failed| failed.1)?;
    let (ours, kept) = UnixStream::pair()?;
    link::send_parcel(ours, &packed, Instant::now() + TIME)?;
    manager.keep(&kept)
}

/// Takes the parcels that the process before has left. The manager forgets them, because a connection that it had open would
/// outlive this process.
pub(crate) fn take(manager: &Manager) -> Vec<Parcel> {
    let kept = systemd::kept();
    if kept.is_empty() {
        return Vec::new();
    }
    let taken = kept.into_iter().filter_map(|number| {
        let parcel = open(number);
        parcel
            .inspect_err(|why| tracing::warn!("{why}: its frontends have to connect again"))
            .ok()
    });
    let taken = taken.collect();
    manager.forget_kept();
    taken
}

fn open(number: u32) -> Result<Parcel, String> {
    let fd: OwnedFd = socket::inherited_fd(number).map_err(|failure| failure.to_string())?;
    let packed = link::receive_parcel(UnixStream::from(fd), Instant::now() + TIME);
    let packed = packed.map_err(|error| {
        format!("what the process before handed over cannot be received: {error}")
    })?;
    Parcel::unpack(packed).map_err(|error| error.to_string())
}
