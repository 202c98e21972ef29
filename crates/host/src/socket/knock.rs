//! Finds out whether a program listens on a socket, without waiting.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::failure::Failure;

/// Refuses a path at which a program listens: connecting succeeded, or the backlog is full.
pub(crate) fn refuse_live(path: &Path, knocked: io::Result<()>) -> Result<(), Failure> {
    let shown = path.display();
    match knocked {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        _ => Err(Failure::start(format!(
            "socket {shown} is in use by a running program: end that one or choose another path"
        ))),
    }
}

/// Refuses a path at which a program listens. What is not a socket is left to others to judge.
pub(crate) fn refuse_served(socket: &Path) -> Result<(), Failure> {
    let is_socket = |found: fs::Metadata| found.file_type().is_socket();
    match fs::symlink_metadata(socket).is_ok_and(is_socket) {
        true => refuse_live(socket, knock(socket)),
        false => Ok(()),
    }
}

/// Connects without waiting. A blocking `connect` sleeps while the backlog is full, and here it would do so with the path
/// locked and SIGTERM already caught.
pub(crate) fn knock(path: &Path) -> io::Result<()> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, kind, flags, None)?;
    Ok(connect(&socket, &SocketAddrUnix::new(path)?)?)
}
