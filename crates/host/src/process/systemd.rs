//! The service manager: the socket that it has made for us (sd_listen_fds(3)), and what it is told (sd_notify(3)).
//!
//! The variables stay in our own environment, because removing one is unsafe code. A process that serves disks starts no program
//! that could take them for its own.

use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::io::{self, IoSlice, Read as _};
use std::iter;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::process;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg, sendmsg_addr,
};

use crate::failure::Failure;

/// Number of the first descriptor that systemd passes.
const FIRST_SOCKET: u32 = 3;

/// Begins the names of the descriptors that the manager keeps for the next process of this service.
const KEPT: &str = "cleave-";

/// How long a message may wait for a manager whose queue is full. The control loop waits meanwhile.
const SEND_MAX: Duration = Duration::from_millis(100);

/// Longest wait for a manager to handle what it was told. It may be busy.
const HEARD_MAX: Duration = Duration::from_secs(5);

/// Shortest time between two signs of life.
const WATCH_MIN: Duration = Duration::from_millis(1);

/// The time between the deadline of a disk and the end of the process: the disk is closed, and the log written.
const STOP_MARGIN: Duration = Duration::from_secs(5);

/// The descriptor of the socket that systemd passed to this process. `None`: it passed none.
pub(crate) fn passed() -> Result<Option<u32>, Failure> {
    let (_, sockets) = sorted(received());
    match &sockets[..] {
        [] => Ok(None),
        [one] => Ok(Some(*one)),
        _ => Err(Failure::input(format!(
            "systemd passed {} sockets, and a disk has one: leave one ListenStream= in the socket unit",
            sockets.len()
        ))),
    }
}

/// The descriptors that the manager has kept for this process, with their names.
pub(crate) fn kept() -> Vec<(KeptName, u32)> {
    sorted(received()).0
}

/// Tells what the manager has kept from the sockets that it has made. Those have the name of their unit, such as `cleave-a.socket`, or any
/// other that the operator gave them.
fn sorted(received: Vec<(String, u32)>) -> (Vec<(KeptName, u32)>, Vec<u32>) {
    let (mut kept, mut sockets) = (Vec::new(), Vec::new());
    for (name, number) in received {
        match KeptName::parse(&name) {
            Some(name) => kept.push((name, number)),
            None => sockets.push(number),
        }
    }
    (kept, sockets)
}

/// The descriptors that the manager has passed, with their names.
fn received() -> Vec<(String, u32)> {
    let count = match is_ours("LISTEN_PID") {
        Some(true) => number("LISTEN_FDS").unwrap_or(0),
        Some(false) | None => 0,
    };
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.split(':').chain(iter::repeat(""));
    let named = names.map(str::to_owned).zip(FIRST_SOCKET..);
    named.take(usize::try_from(count).unwrap_or(0)).collect()
}

/// Name of a descriptor that the manager keeps for the next process of this service, which may be of another version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeptName {
    /// A disk that a guest may have used.
    Disk,
    UnusedDisk,
    /// A session, by the number of its process and its own.
    Session(u32, u64),
}

impl KeptName {
    /// Returns the name that is written so. All else is a name of somebody else's.
    fn parse(name: &str) -> Option<KeptName> {
        let parsed = match name.strip_prefix(KEPT)? {
            "disk" => KeptName::Disk,
            "unused-disk" => KeptName::UnusedDisk,
            other => {
                let (process, number) = other.strip_prefix("session-")?.split_once('-')?;
                KeptName::Session(process.parse().ok()?, number.parse().ok()?)
            }
        };
        (parsed.to_string() == name).then_some(parsed)
    }
}

impl fmt::Display for KeptName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeptName::Disk => write!(out, "{KEPT}disk"),
            KeptName::UnusedDisk => write!(out, "{KEPT}unused-disk"),
            KeptName::Session(process, number) => write!(out, "{KEPT}session-{process}-{number}"),
        }
    }
}

/// The service manager that started this process; without one, nothing is sent.
#[derive(Debug)]
pub(crate) struct Manager {
    channel: Option<Arc<NotifyChannel>>,
    watchdog: Option<Duration>,
    /// True if the manager keeps descriptors for the next process of this service.
    has_store: bool,
}

impl Manager {
    /// As the environment describes it. Makes its socket now: once the process is confined, it cannot.
    pub(crate) fn from_environment() -> Manager {
        let channel = env::var_os("NOTIFY_SOCKET").and_then(|name| NotifyChannel::open(&name));
        // The variable of another process may have come down to us.
        let is_ours = is_ours("WATCHDOG_PID").unwrap_or(true);
        let interval = number("WATCHDOG_USEC").filter(|usec| is_ours && *usec > 0);
        Manager {
            channel: channel.map(Arc::new),
            watchdog: interval.map(Duration::from_micros),
            // Before systemd 254 the unit itself sets it.
            has_store: number("FDSTORE").is_some_and(|entries| entries > 0),
        }
    }

    /// Frontends can connect. `status`: what `systemctl status` shows.
    pub(crate) fn ready(&self, status: &str) {
        // A path may hold a line feed, which would begin another assignment.
        let status = status.replace(char::is_control, "?");
        self.tell(&format!("READY=1\nSTATUS={status}"));
    }

    /// The process has been told to end. A disk that hangs is waited for until its deadline; the manager's own time-out may be
    /// earlier, and would kill the process before it can tell what becomes of the requests.
    pub(crate) fn stopping(&self, deadline: Duration) {
        let more_us = (deadline + STOP_MARGIN).as_micros();
        self.tell(&format!(
            "STOPPING=1\nEXTEND_TIMEOUT_USEC={more_us}\nSTATUS=finishing the requests in flight"
        ));
    }

    /// Another process of the service goes on in place of this one. Waits until the manager has heard it: from then on it watches that
    /// process.
    pub(crate) fn follow(&self, pid: i32) {
        // One in another PID namespace has no number here.
        if pid > 0 {
            self.tell(&format!("MAINPID={pid}"));
            let _ = self.await_heard();
        }
    }

    /// Waits until the manager has handled what it was told, if it does so in time (sd_notify_barrier(3)).
    fn await_heard(&self) -> io::Result<()> {
        let (mut ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(HEARD_MAX))?;
        self.send("BARRIER=1", &theirs, SendFlags::empty())?;
        drop(theirs);
        // The manager closes the other end.
        ours.read(&mut [0]).map(drop)
    }

    /// Returns true if it keeps descriptors for the next process of this service.
    pub(crate) fn has_store(&self) -> bool {
        self.has_store && self.channel.is_some()
    }

    /// Has a descriptor kept until this service is stopped, or a later process forgets it. It is passed to the next process.
    /// `WouldBlock`: the manager's queue is full.
    pub(crate) fn keep(&self, name: KeptName, fd: impl AsFd) -> io::Result<()> {
        // A socket whose other end is closed is not forgotten.
        let state = format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0");
        self.send(&state, fd, SendFlags::DONTWAIT)
    }

    /// Sends assignments with a descriptor.
    fn send(&self, state: &str, fd: impl AsFd, flags: SendFlags) -> io::Result<()> {
        let channel = self.channel.as_ref();
        let channel = channel.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))?;
        channel.send(state, &[fd.as_fd()], flags)
    }

    /// Has the manager close what it keeps under a name.
    pub(crate) fn forget_kept(&self, name: KeptName) {
        self.tell(&format!("FDSTOREREMOVE=1\nFDNAME={name}"));
    }

    /// Sends assignments, one a line. A manager that takes none does not keep a disk from being served.
    pub(crate) fn tell(&self, state: &str) {
        if let Some(channel) = &self.channel {
            let _ = channel.send(state, &[], SendFlags::empty());
        }
    }

    /// Returns the longest time between two signs of life that the manager accepts.
    pub(crate) fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }

    /// Sends a sign of life at half the interval, from the thread of the control loop: one that hangs sends none. Without an
    /// interval there is no timer, so that an idle daemon sleeps.
    pub(crate) fn watch(&self, interval: Option<Duration>) {
        let (Some(interval), Some(channel)) = (interval, self.channel.clone()) else {
            return;
        };
        tokio::spawn(async move {
            // Another process may have named any interval.
            let mut due = tokio::time::interval((interval / 2).max(WATCH_MIN));
            loop {
                due.tick().await;
                let _ = channel.send("WATCHDOG=1", &[], SendFlags::empty());
            }
        });
    }
}

/// The socket for messages to the manager.
///
/// The socket is connected to nothing, and each message names its address. Otherwise a worker that was taken over could write to it. A
/// manager believes what it is told: it would kill any process that is named as ours.
#[derive(Debug)]
struct NotifyChannel {
    socket: UnixDatagram,
    /// `None`: it is connected, because the address is an abstract one, to which a confined process cannot send.
    to: Option<SocketAddrUnix>,
}

impl NotifyChannel {
    /// Opens the socket to a path, or to `@` and an abstract name. `None`: nobody receives there.
    fn open(name: &OsStr) -> Option<NotifyChannel> {
        let socket = UnixDatagram::unbound().ok()?;
        socket.set_write_timeout(Some(SEND_MAX)).ok()?;
        let to = match name.as_bytes() {
            [b'@', rest @ ..] => {
                let address = SocketAddr::from_abstract_name(rest).ok()?;
                socket.connect_addr(&address).ok()?;
                None
            }
            [b'/', ..] => {
                UnixDatagram::unbound().ok()?.connect(name).ok()?;
                Some(SocketAddrUnix::new(name).ok()?)
            }
            _ => return None,
        };
        Some(NotifyChannel { socket, to })
    }

    /// Sends assignments, with at most one descriptor. By `sendmsg` alone, because a session sends some: the threads that may not make
    /// that call may name no address in another.
    fn send(&self, state: &str, fds: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let bytes = [IoSlice::new(state.as_bytes())];
        let flags = flags | SendFlags::NOSIGNAL;
        match &self.to {
            Some(to) => sendmsg_addr(&self.socket, to, &bytes, &mut control, flags)?,
            None => sendmsg(&self.socket, &bytes, &mut control, flags)?,
        };
        Ok(())
    }
}

/// Returns true if the variable names this process. `None`: it is not set, or is not a number.
fn is_ours(variable: &str) -> Option<bool> {
    Some(number(variable)? == u64::from(process::id()))
}

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::KeptName::{Disk, Session, UnusedDisk};
    use super::sorted;

    #[test]
    fn a_socket_unit_may_have_any_name_but_those_of_what_is_kept() {
        let kept = [
            ("cleave-disk", Disk),
            ("cleave-unused-disk", UnusedDisk),
            ("cleave-session-4711-0", Session(4711, 0)),
        ];
        let others = [
            "cleave-a.socket",
            "cleave-disk.socket",
            "cleave-disk-a",
            "cleave-session-4711-0.socket",
            "cleave-session-a-0",
            "cleave-session-+1-0",
            "cleave@disk.socket",
            "",
        ];
        let names = kept.iter().map(|(name, _)| *name).chain(others);
        let received = names.map(str::to_owned).zip(3..).collect();
        let expected = kept.iter().map(|(_, name)| *name).zip(3..).collect();
        assert_eq!(sorted(received), (expected, (6..14).collect()));
        for (name, parsed) in kept {
            assert_eq!(parsed.to_string(), name, "earlier versions read it");
        }
    }
}
