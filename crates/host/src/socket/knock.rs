//! Finds out whether a program listens on a socket, without waiting.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid, chmod, chownat, fstat, open};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;

use crate::failure::Failure;

/// The owner's right to write to a file, which connecting to a socket needs.
const OWNER_WRITES: u32 = 0o200;
/// The rights of all other users to write.
const OTHERS_WRITE: u32 = 0o022;

/// How a process finds out whether a program listens on a socket.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Knocking {
    /// Connect to it.
    AsItIs,
    /// Take its file back for that, if connecting is not permitted and the file belongs to this process or to this user: the process
    /// has the lock of the path, and gives the sockets that it makes there to that user.
    OnOwn { given_to: Option<u32> },
    /// Connect to it. If that is not permitted, nobody listens: it was made by a daemon that died, in a folder to which only this user
    /// may write, and the process has the lock of the path. An operator may have given it to the user of one VMM.
    OnLeft,
}

impl Knocking {
    /// Connects to a socket.
    pub(crate) fn at(self, path: &Path) -> io::Result<()> {
        match (knock(path), self) {
            (Err(error), Knocking::OnOwn { given_to }) if is_denied(&error) => {
                match ReclaimedSocket::of(path, given_to) {
                    Ok(reclaimed) => reclaimed.knock(),
                    Err(_) => Err(error),
                }
            }
            (Err(error), Knocking::OnLeft) if is_denied(&error) => {
                Err(io::ErrorKind::ConnectionRefused.into())
            }
            (knocked, _) => knocked,
        }
    }
}

fn is_denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

/// Returns true if the folder of a socket belongs to this user, and nobody else may write to it.
pub(super) fn only_we_write_beside(socket: &Path) -> bool {
    fs::metadata(folder_of(socket))
        .is_ok_and(|found| found.uid() == geteuid().as_raw() && found.mode() & OTHERS_WRITE == 0)
}

/// Returns the folder of a socket.
pub(super) fn folder_of(socket: &Path) -> &Path {
    let folder = socket.parent();
    let folder = folder.filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Refuses a path at which a program listens: connecting succeeded, or the backlog is full.
pub(crate) fn refuse_live(path: &Path, knocked: io::Result<()>) -> Result<(), Failure> {
    let shown = path.display();
    match knocked {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if is_denied(&error) => Err(Failure::start(format!(
            "{shown} is a socket of another user, which may be in use: remove it if no program listens there, or choose another path"
        ))),
        _ => Err(Failure::start(format!(
            "socket {shown} is in use by a running program: end that one or choose another path"
        ))),
    }
}

/// Refuses a path at which a program listens. What is not a socket is left to others to judge.
pub(crate) fn refuse_served(socket: &Path, knocking: Knocking) -> Result<(), Failure> {
    match owner_of(socket) {
        Some(_) => refuse_live(socket, knocking.at(socket)),
        None => Ok(()),
    }
}

/// Refuses a path at which a program listens, while another process has it locked. If that one is dead and gave its socket to this user,
/// connecting is not permitted and tells nothing; the lock tells when its I/O has ended.
pub(crate) fn refuse_running(socket: &Path, given_to: Option<u32>) -> Result<(), Failure> {
    let Some(owner) = owner_of(socket) else {
        return Ok(());
    };
    match knock(socket) {
        Err(error) if is_denied(&error) && is_own(owner, given_to) => Ok(()),
        knocked => refuse_live(socket, knocked),
    }
}

/// Returns the owner of the socket at this path, if there is one.
fn owner_of(socket: &Path) -> Option<u32> {
    let found = fs::symlink_metadata(socket).ok()?;
    found.file_type().is_socket().then(|| found.uid())
}

/// Returns true for a file of this process, or of the user that it gives its sockets to.
fn is_own(owner: u32, given_to: Option<u32>) -> bool {
    owner == geteuid().as_raw() || Some(owner) == given_to
}

/// Connects without waiting. A blocking `connect` sleeps while the backlog is full, and here it would do so with the path
/// locked and SIGTERM already caught.
pub(crate) fn knock(path: &Path) -> io::Result<()> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, kind, flags, None)?;
    Ok(connect(&socket, &SocketAddrUnix::new(path)?)?)
}

/// The file of a socket to which this process could not connect, and can until this is dropped. Then the file is as it was before, so a
/// program that listens there keeps it.
struct ReclaimedSocket {
    file: OwnedFd,
    found: Stat,
}

impl ReclaimedSocket {
    fn of(path: &Path, given_to: Option<u32>) -> io::Result<ReclaimedSocket> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = open(path, flags, Mode::empty())?;
        let found = fstat(&file)?;
        let is_socket = FileType::from_raw_mode(found.st_mode) == FileType::Socket;
        // Its other name may be that of a socket elsewhere.
        if !is_socket || found.st_nlink != 1 || !is_own(found.st_uid, given_to) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if found.st_uid != geteuid().as_raw() {
            own(&file, Some(geteuid().as_raw()), None)?;
        }
        let reclaimed = ReclaimedSocket { file, found };
        // After that: only the owner may set the mode.
        if found.st_mode & OWNER_WRITES == 0 {
            chmod(
                reclaimed.name(),
                Mode::from_raw_mode(found.st_mode | OWNER_WRITES),
            )?;
        }
        Ok(reclaimed)
    }

    /// Connects to this file, whatever has its name by now.
    fn knock(&self) -> io::Result<()> {
        knock(&self.name())
    }

    fn name(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    fn give_back(&self) -> io::Result<()> {
        if self.found.st_mode & OWNER_WRITES == 0 {
            chmod(self.name(), Mode::from_raw_mode(self.found.st_mode))?;
        }
        if self.found.st_uid != geteuid().as_raw() {
            own(&self.file, Some(self.found.st_uid), None)?;
        }
        Ok(())
    }
}

impl Drop for ReclaimedSocket {
    fn drop(&mut self) {
        if let Err(error) = self.give_back() {
            let user = self.found.st_uid;
            tracing::warn!("cannot give a socket back to user {user}: {error}");
        }
    }
}

/// Changes the owner and the group of an opened file.
pub(super) fn own(file: &OwnedFd, user: Option<u32>, group: Option<u32>) -> io::Result<()> {
    let (user, group) = (user.map(Uid::from_raw), group.map(Gid::from_raw));
    chownat(file, "", user, group, AtFlags::EMPTY_PATH)?;
    Ok(())
}
