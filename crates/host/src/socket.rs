//! The socket that frontends come through: made at a path, or inherited.

mod cache_line;
pub(crate) mod hang_up;
mod knock;
pub(crate) mod path_lock;
#[cfg(test)]
mod tests;

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use cleave_session::Offload;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, Stat, accessat, chmod, fchmod, fstat, open};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType, bind, recvmsg, socket_with, sockopt,
};

use crate::failure::Failure;
use crate::process::systemd;
pub(crate) use knock::{Knocking, refuse_served};
use knock::{folder_of, only_we_write_beside, own, refuse_live};
use path_lock::PathLock;

/// Longest path that fits `sockaddr_un` with its terminating zero.
const PATH_BYTES_MAX: usize = 107;

/// Connections to a private socket that may wait to be accepted.
const BACKLOG: i32 = 64;

/// Name of a socket that is being made for a group.
pub const NEW_SOCKET: &str = "new.sock";

/// The socket of the frontends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// Listen on a socket made here.
    Path(PathBuf),
    /// An inherited socket.
    Fd(u32),
}

impl Endpoint {
    /// Returns the path of a socket that is made here.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Endpoint::Path(path) => Some(path),
            Endpoint::Fd(_) => None,
        }
    }

    /// Returns the socket that the service manager has passed to this process, if it has passed one.
    pub fn passed() -> Result<Option<Endpoint>, Failure> {
        Ok(systemd::passed()?.map(Endpoint::Fd))
    }
}

/// A socket of the control interface or of the metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketSettings {
    /// The path of its file.
    pub path: PathBuf,
    /// The group whose members may connect: a name or a number.
    pub group: Option<String>,
}

/// The socket on which frontends connect.
#[derive(Debug)]
pub(crate) enum Door {
    /// Any number of them, one after the other.
    Listening(Listening),
    /// This one.
    Connected(UnixStream),
}

/// A listening socket, and its file if it is ours.
#[derive(Debug)]
pub(crate) struct Listening {
    // Dropped before the listener: while the socket is open its inode cannot be given to another file,
    // so that comparing inodes tells ours from one that took its place.
    file: Option<SocketFile>,
    listener: UnixListener,
}

/// Makes the socket that the operator named, or goes on with the one that the process before has made. `lock`: that of its path.
pub(crate) fn open_door(
    endpoint: &Endpoint,
    lock: Option<&PathLock>,
    listener: Option<OwnedFd>,
) -> Result<Door, Failure> {
    match endpoint {
        Endpoint::Path(path) => {
            let resumed = listener.map(|listener| Listening::resume(path, listener));
            match resumed {
                Some(Ok(resumed)) => Ok(Door::Listening(resumed)),
                // The file has gone.
                Some(Err(_)) | None => {
                    let knocking = match lock {
                        Some(lock) if lock.was_left() && only_we_write_beside(path) => {
                            Knocking::OnLeft
                        }
                        _ => Knocking::AsItIs,
                    };
                    listen(path, None, knocking).map(Door::Listening)
                }
            }
        }
        Endpoint::Fd(number) => inherit(*number, "--fd"),
    }
}

/// The socket that this process was started with, if there is one: the one that --fd names, or the one that systemd has
/// made at the path.
pub(crate) fn inherited(endpoint: &Endpoint) -> Result<Option<Door>, Failure> {
    match endpoint {
        Endpoint::Fd(number) => inherit(*number, "--fd").map(Some),
        Endpoint::Path(path) => match systemd::passed()? {
            Some(number) => passed_at(number, path).map(Some),
            None => Ok(None),
        },
    }
}

/// The endpoint as it is written in messages.
pub(crate) fn name(endpoint: &Endpoint) -> String {
    match endpoint {
        Endpoint::Path(path) => path.display().to_string(),
        Endpoint::Fd(number) => format!("fd {number}"),
    }
}

/// Goes on with the listening socket of a process that serves the path until its disk is taken. The file is that process's till then.
pub(crate) fn shared_door(path: &Path, listener: Option<OwnedFd>) -> Result<Door, Failure> {
    let listener = listener.ok_or_else(|| Failure::run("no socket was sent"))?;
    Listening::shared(path, listener).map(Door::Listening)
}

impl Door {
    /// Returns a copy of the listening socket for the next process, if this one has made it.
    pub(crate) fn copy(&self) -> io::Result<Option<OwnedFd>> {
        match self {
            Door::Listening(listening) if listening.file.is_some() => listening.copy().map(Some),
            _ => Ok(None),
        }
    }

    /// Returns the listening socket, unless there is one connection only.
    pub(crate) fn listening(&self) -> Option<&Listening> {
        match self {
            Door::Listening(listening) => Some(listening),
            Door::Connected(_) => None,
        }
    }

    /// Returns what frontends are accepted from on the runtime at hand, if any number of them may connect.
    pub(crate) fn listener(&self) -> Result<Option<tokio::net::UnixListener>, Failure> {
        let listener = self.listening().map(Listening::listener);
        let cannot = |error| Failure::run(format!("cannot listen: {error}"));
        listener.transpose().map_err(cannot)
    }

    /// Says who removes the file of a socket that this process has made or was given.
    pub(crate) fn set_owner(&mut self, owner: FileOwner) {
        if let Door::Listening(listening) = self {
            listening.set_owner(owner);
        }
    }

    /// Removes the file and closes the socket, in which descriptors of frontends may be queued.
    pub(crate) fn close(self, offload: &Offload) {
        self.close_with((), offload);
    }

    /// Does that, and drops this by the same thread.
    pub(crate) fn close_with<T: Send + 'static>(self, more: T, offload: &Offload) {
        match self {
            Door::Listening(Listening { file, listener }) => {
                drop(file);
                offload.close((more, listener));
            }
            Door::Connected(stream) => offload.close((more, stream)),
        }
    }
}

/// The process that removes the file of a socket at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileOwner {
    Us,
    Another,
}

impl Listening {
    /// Goes on with `given`, if that is the socket of this path, until another process has given it up. Otherwise opens one.
    pub(crate) fn share(
        socket: &SocketSettings,
        given: Option<OwnedFd>,
        open: fn(&SocketSettings) -> Result<Listening, Failure>,
    ) -> Result<Listening, Failure> {
        let Some(listener) = given.map(UnixListener::from) else {
            return open(socket);
        };
        let address = listener.local_addr().ok();
        let bound = address.as_ref().and_then(|address| address.as_pathname());
        match bound == Some(&*socket.path) {
            true => Listening::shared(&socket.path, listener.into()),
            false => open(socket),
        }
    }

    fn shared(path: &Path, listener: OwnedFd) -> Result<Listening, Failure> {
        let cannot = |error| {
            let shown = path.display();
            Failure::run(format!("cannot take socket {shown} over: {error}"))
        };
        let mut shared = Listening::resume(path, listener).map_err(cannot)?;
        shared.set_owner(FileOwner::Another);
        Ok(shared)
    }

    /// Returns a copy of the socket for another process.
    pub(crate) fn copy(&self) -> io::Result<OwnedFd> {
        self.listener.try_clone().map(OwnedFd::from)
    }

    /// Says who removes its file.
    pub(crate) fn set_owner(&mut self, owner: FileOwner) {
        if let Some(file) = &mut self.file {
            file.owner = owner;
        }
    }

    /// Goes on with the socket that the process before has made at this path. Its file goes away with this value.
    pub(crate) fn resume(path: &Path, listener: OwnedFd) -> io::Result<Listening> {
        Ok(Listening {
            file: Some(SocketFile::of(path)?),
            listener: UnixListener::from(listener),
        })
    }

    /// Gives its file to a user and a group.
    pub(crate) fn give_to(&self, user: u32, group: u32) -> io::Result<()> {
        match self.open_file()? {
            Some((opened, _)) => own(&opened, Some(user), Some(group)),
            None => Ok(()),
        }
    }

    /// Opens its file, if it has one, for changes of owner and mode. They are made by this descriptor and never by the name: whoever
    /// may write to the folder could have put a link to another file there since.
    fn open_file(&self) -> io::Result<Option<(OwnedFd, Stat)>> {
        let Some(file) = &self.file else {
            return Ok(None);
        };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = open(&file.path, flags, Mode::empty())?;
        let found = fstat(&opened)?;
        if (found.st_dev, found.st_ino) != (file.device, file.inode) {
            return Err(io::Error::other("another file took its place"));
        }
        // Its other name may be that of a socket in a folder to which nobody else may write.
        if found.st_nlink != 1 {
            return Err(io::Error::other("the file has another name too"));
        }
        Ok(Some((opened, found)))
    }

    /// Sets the permissions of its file, its user and its group.
    fn give(&self, mode: u32, user: Option<u32>, group: Option<u32>) -> io::Result<()> {
        let Some((opened, found)) = self.open_file()? else {
            return Ok(());
        };
        // In this order: the mode is not for the group that the file has at first, and only its owner may set it.
        if let Some(group) = group.filter(|group| *group != found.st_gid) {
            own(&opened, None, Some(group))?;
        }
        // The umask took bits away when the file was made. A descriptor of this kind has no fchmod().
        if found.st_mode & 0o777 != mode {
            let path = format!("/proc/self/fd/{}", opened.as_raw_fd());
            chmod(path, Mode::from_raw_mode(mode))?;
        }
        if let Some(user) = user.filter(|user| *user != found.st_uid) {
            own(&opened, Some(user), None)?;
        }
        Ok(())
    }

    /// Returns a copy of the socket, to accept from on the runtime at hand.
    pub(crate) fn listener(&self) -> io::Result<tokio::net::UnixListener> {
        let listener = self.listener.try_clone()?;
        listener.set_nonblocking(true)?;
        tokio::net::UnixListener::from_std(listener)
    }
}

/// Opens a control socket: for the user of this process alone, or for the members of its group too.
pub(crate) fn open_control(socket: &SocketSettings) -> Result<Listening, Failure> {
    match &socket.group {
        None => open_private(&socket.path),
        Some(group) => {
            let group = group_number("--control-group", group)?;
            open_shared(&socket.path, Some(group))
        }
    }
}

/// Opens a socket for metrics: for everybody, or for the members of its group.
pub(crate) fn open_metrics(socket: &SocketSettings) -> Result<Listening, Failure> {
    let group = socket.group.as_deref();
    let group = group.map(|group| group_number("--metrics-group", group));
    open_shared(&socket.path, group.transpose()?)
}

/// Opens a socket that only the user of this process may connect to.
fn open_private(path: &Path) -> Result<Listening, Failure> {
    // Held until we listen: between looking, removing a stale file and listening on a new one, another cleave would take
    // our file for a stale one.
    let lock = PathLock::take(path)?;
    let listening = listen(path, Some(Mode::RUSR | Mode::WUSR), Knocking::AsItIs)?;
    if let Some(lock) = lock {
        lock.remove();
    }
    Ok(listening)
}

/// Makes a socket file and listens on it. `mode`: its permissions, else as the umask has it. The path is locked.
fn listen(path: &Path, mode: Option<Mode>, knocking: Knocking) -> Result<Listening, Failure> {
    let shown = path.display();
    check_length(path)?;
    make_room(path, knocking)?;
    let listener = bind_with(path, mode).map_err(|error| {
        Failure::start(format!(
            "cannot make socket {shown}: {error}: {}",
            remedy(&error)
        ))
    })?;
    match SocketFile::of(path) {
        Ok(file) => Ok(Listening {
            file: Some(file),
            listener,
        }),
        Err(error) => Err(Failure::start(format!("socket {shown} went away: {error}"))),
    }
}

fn check_length(path: &Path) -> Result<(), Failure> {
    let shown = path.display();
    match path.as_os_str().as_bytes().len() {
        0..=PATH_BYTES_MAX => Ok(()),
        length => Err(Failure::input(format!(
            "socket path {shown} has {length} bytes and a socket takes {PATH_BYTES_MAX}: choose a shorter one"
        ))),
    }
}

/// Makes a socket file for a user and a group, and listens on it, or goes on with the listener of the process before. The socket is made
/// under another name and then renamed, so a client that sees the file can connect. The path is locked.
pub(crate) fn listen_for(
    path: &Path,
    mode: u32,
    user: Option<u32>,
    group: u32,
    listener: Option<OwnedFd>,
    knocking: Knocking,
) -> Result<Listening, Failure> {
    let cannot = |error: &io::Error| {
        let (shown, remedy) = (path.display(), remedy(error));
        Failure::start(format!("cannot make socket {shown}: {error}: {remedy}"))
    };
    if let Some(listener) = listener
        && let Ok(resumed) = Listening::resume(path, listener)
        && resumed.give(mode, user, Some(group)).is_ok()
    {
        return Ok(resumed);
    }
    // The name under which it is made is shorter.
    check_length(path)?;
    make_room(path, knocking)?;
    let beside = path.with_file_name(NEW_SOCKET);
    let _ = fs::remove_file(&beside);
    // Not for the group that it has at first: one that connects now would be let in later.
    let private = Some(Mode::RUSR | Mode::WUSR);
    let mut listening = listen(&beside, private, Knocking::AsItIs)?;
    listening
        .give(mode, user, Some(group))
        .map_err(|error| cannot(&error))?;
    fs::rename(&beside, path).map_err(|error| cannot(&error))?;
    let moved = SocketFile::of(path).map_err(|error| cannot(&error))?;
    // The old name is gone, so dropping its guard removes nothing.
    listening.file = Some(moved);
    Ok(listening)
}

/// Opens a socket for everybody, or for the members of a group.
fn open_shared(path: &Path, group: Option<u32>) -> Result<Listening, Failure> {
    let lock = PathLock::take(path)?;
    let mode = match group {
        Some(_) => 0o660,
        None => 0o666,
    };
    // Not for the group that it has at first.
    let listening = listen(path, Some(Mode::RUSR | Mode::WUSR), Knocking::AsItIs)?;
    listening.give(mode, None, group).map_err(|error| {
        let shown = path.display();
        Failure::start(match group {
            Some(group) => format!(
                "cannot give socket {shown} to group {group}: {error}: start cleave as root or with a user of that group"
            ),
            None => format!("cannot set the mode of socket {shown}: {error}"),
        })
    })?;
    if let Some(lock) = lock {
        lock.remove();
    }
    Ok(listening)
}

/// Refuses groups that this machine does not have, before a running process is asked for anything.
pub(crate) fn check_groups(
    control: Option<&SocketSettings>,
    metrics: Option<&SocketSettings>,
) -> Result<(), Failure> {
    for (by, socket) in [("--control-group", control), ("--metrics-group", metrics)] {
        if let Some(group) = socket.and_then(|socket| socket.group.as_ref()) {
            group_number(by, group)?;
        }
    }
    Ok(())
}

/// The number of a group of this machine, which was named by `by`.
pub(crate) fn group_number(by: &str, group: &str) -> Result<u32, Failure> {
    number_of(by, "group", "/etc/group", group)
}

/// The number of a user of this machine, which was named by `by`.
pub(crate) fn user_number(by: &str, user: &str) -> Result<u32, Failure> {
    number_of(by, "user", "/etc/passwd", user)
}

fn number_of(by: &str, what: &str, list: &str, wanted: &str) -> Result<u32, Failure> {
    let named = |line: &str| {
        let mut fields = line.split(':');
        (fields.next() == Some(wanted)).then(|| fields.nth(1)?.parse().ok())?
    };
    let number = wanted.parse().ok();
    let lines = match number {
        Some(_) => String::new(),
        // A confined node keeps the file that it had at its start; whoever adds a name replaces it.
        None => fs::read_to_string(list).map_err(|error| {
            Failure::start(format!(
                "{by}: cannot read {list}, which may have been changed since the node was started: {error}: give the number of \
                 {what} {wanted:?}, or restart the node"
            ))
        })?,
    };
    let known = number.or_else(|| lines.lines().find_map(named));
    // The largest number means "no change" to the kernel.
    known.filter(|number| *number != u32::MAX).ok_or_else(|| {
        Failure::input(format!(
            "{by}: no {what} {wanted:?} in {list}: make it, or give its number"
        ))
    })
}

/// The mode is set on the socket before it has a file, which gets it then: there is no moment at which
/// somebody else could connect.
fn bind_with(path: &Path, mode: Option<Mode>) -> io::Result<UnixListener> {
    let Some(mode) = mode else {
        return UnixListener::bind(path);
    };
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    fchmod(&socket, mode)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "create its folder first",
        io::ErrorKind::PermissionDenied => "choose a folder that this user may write to",
        io::ErrorKind::ReadOnlyFilesystem => {
            "choose a folder on a writable file system, such as /run"
        }
        _ => "choose another path",
    }
}

/// Makes sure that nothing is at the path, if what is there may go.
pub(crate) fn make_room(path: &Path, knocking: Knocking) -> Result<(), Failure> {
    let shown = path.display();
    match fs::symlink_metadata(path) {
        Err(_) => return Ok(()), // nothing there, or `bind` says why not
        Ok(found) if !found.file_type().is_socket() => {
            return Err(Failure::input(format!(
                "{shown} exists and is not a socket: remove it or choose another path"
            )));
        }
        Ok(_) => {}
    }
    match knocking.at(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path)
            .or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })
            .map_err(|error| {
                Failure::start(format!(
                    "cannot replace the stale socket {shown}: {error}: remove it"
                ))
            }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        knocked => refuse_live(path, knocked),
    }
}

/// Refuses a path at which this process could make no socket if the process that has one there had ended. Nothing is made.
pub(crate) fn judge_place(path: &Path) -> Result<(), String> {
    check_length(path).map_err(|failure| failure.to_string())?;
    let shown = path.display();
    if fs::symlink_metadata(path).is_ok_and(|found| !found.file_type().is_socket()) {
        return Err(format!(
            "{shown} exists and is not a socket: remove it or choose another path"
        ));
    }
    let may_make = Access::WRITE_OK | Access::EXEC_OK;
    accessat(CWD, folder_of(path), may_make, AtFlags::EACCESS).map_err(|errno| {
        let error = io::Error::from(errno);
        let remedy = remedy(&error);
        format!("cannot make socket {shown}: {error}: {remedy}")
    })
}

/// Removes the file of a socket that nobody listens on any more.
pub(crate) fn remove_stale(path: &Path) {
    // Refused, instead of waited for, where another daemon has the path.
    if let Ok(Some(_lock)) = PathLock::take_at_once(path) {
        let _ = make_room(path, Knocking::AsItIs);
    }
}

/// A socket file that goes away with this value, unless it is another process's or something else took its place.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
    owner: FileOwner,
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<SocketFile> {
        let found = fs::symlink_metadata(path)?;
        if !found.file_type().is_socket() {
            return Err(io::Error::other("it is not a socket"));
        }
        Ok(SocketFile {
            // The working directory may change; the file stays where it is.
            path: std::path::absolute(path)?,
            device: found.dev(),
            inode: found.ino(),
            owner: FileOwner::Us,
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_there = || {
            fs::symlink_metadata(&self.path)
                .is_ok_and(|found| found.dev() == self.device && found.ino() == self.inode)
        };
        if self.owner == FileOwner::Us
            && is_there()
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!("cannot remove socket {}: {error}", self.path.display());
        }
    }
}

/// Takes the socket over that systemd listens on, which has to be the one at this path.
fn passed_at(number: u32, path: &Path) -> Result<Door, Failure> {
    let refuse = |what: &str| {
        Failure::input(format!(
            "systemd passed {what}: give ListenStream= of the socket unit and --socket-path the same path"
        ))
    };
    let Door::Listening(listening) = inherit(number, "LISTEN_FDS:")? else {
        return Err(refuse("a connection and no listening socket"));
    };
    let address = listening.listener.local_addr().ok();
    let bound = address.as_ref().and_then(|address| address.as_pathname());
    let place = |path: &Path| path.canonicalize().ok();
    match bound {
        Some(bound) if place(bound).is_some() && place(bound) == place(path) => {
            Ok(Door::Listening(listening))
        }
        Some(bound) => Err(refuse(&format!(
            "the socket {} and --socket-path is {}",
            bound.display(),
            path.display()
        ))),
        None => Err(refuse("a socket without a path")),
    }
}

/// Takes over a descriptor that the service manager kept for this process, and closes its number: what it holds must end with what is
/// returned. To be called once for each number.
pub(crate) fn inherited_fd(number: u32) -> Result<OwnedFd, Failure> {
    let fd = duplicate(number, |what| {
        Failure::run(format!("descriptor {number} of the service manager {what}"))
    });
    // Nothing else in this process has it: it was passed to the process, and nobody has heard of it but this function.
    let _ = nix::unistd::close(number.cast_signed());
    fd
}

/// Takes over an inherited descriptor, which messages say was named by `by`, and asks it what it is.
fn inherit(number: u32, by: &str) -> Result<Door, Failure> {
    let refuse = |what: &str| Failure::input(format!("{by} {number} {what}"));
    let socket = duplicate(number, refuse)?;
    let unix_stream = sockopt::socket_domain(&socket) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(&socket) == Ok(SocketType::STREAM);
    if !unix_stream {
        return Err(refuse(
            "is not a unix stream socket: pass a listening or a connected one",
        ));
    }
    match sockopt::socket_acceptconn(&socket) {
        Ok(true) => Ok(Door::Listening(Listening {
            file: None,
            listener: UnixListener::from(socket),
        })),
        Ok(false) => {
            let stream = UnixStream::from(socket);
            match stream.peer_addr() {
                Ok(_) => Ok(Door::Connected(stream)),
                Err(_) => Err(refuse(
                    "is a socket that neither listens nor is connected: pass one that does",
                )),
            }
        }
        Err(error) => Err(refuse(&format!(
            "cannot be asked whether it listens: {error}"
        ))),
    }
}

/// A descriptor of ours by number. Taking the number itself over would be unsafe code, because something else in the process might
/// own it; having the kernel send a duplicate from one socket to another is not.
fn duplicate(number: u32, refuse: impl Fn(&str) -> Failure) -> Result<OwnedFd, Failure> {
    let closed = || refuse("is not open: pass the number of an inherited socket");
    let cannot = |error: io::Error| refuse(&format!("cannot be taken over: {error}"));
    let raw = i32::try_from(number).map_err(|_| closed())?;
    let (from, to) = UnixStream::pair().map_err(cannot)?;
    // It was free until now if one of these has it.
    if [from.as_raw_fd(), to.as_raw_fd()].contains(&raw) {
        return Err(closed());
    }
    let copied = [ControlMessage::ScmRights(&[raw])];
    let bytes = [IoSlice::new(&[0])];
    match sendmsg::<()>(from.as_raw_fd(), &bytes, &copied, MsgFlags::empty(), None) {
        Ok(_) => {}
        Err(nix::errno::Errno::EBADF) => return Err(closed()),
        Err(error) => return Err(cannot(error.into())),
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut bytes = [IoSliceMut::new(&mut byte)];
    recvmsg(&to, &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(|error| cannot(error.into()))?;
    let mut received = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    // Without room for another one, it is left out.
    let full = || cannot(rustix::io::Errno::MFILE.into());
    received.next().ok_or_else(full)
}
