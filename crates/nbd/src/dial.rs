//! Connections to a server: a socket, and reads and writes on it that end at a deadline.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with, sockopt,
};

use crate::Address;

/// When an idle connection is probed first, and how often then. It is given up when the time that `Call::place` is told has passed
/// without an answer (TCP_USER_TIMEOUT, which replaces the number of probes).
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBE_EVERY: Duration = Duration::from_secs(10);
/// Pause while the queue of a unix socket is full.
const FULL_PAUSE: Duration = Duration::from_millis(20);

/// Why there is no connection to an NBD server. The messages complete "cannot connect to …: ".
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// The name has no address.
    #[error("cannot find the address of {0}: {1}; check the name, and the name server")]
    Resolve(String, #[source] io::Error),
    /// A system call failed.
    #[error("{0}; check that the server runs and listens there")]
    Io(#[from] io::Error),
    /// The server is too slow, or stuck.
    #[error(
        "the server does not answer; check that it serves another client (qemu-nbd: --shared, --persistent)"
    )]
    Silent,
    /// The server hung up.
    #[error("the server closed the connection; its log may say why")]
    Closed,
    /// The server speaks something else.
    #[error("this is not an NBD server, or a broken one: {0}")]
    Breach(&'static str),
    /// The server is about to end; with its words.
    #[error("the server shuts down{0}")]
    ShutsDown(String),
    /// The server refuses, for this reason.
    #[error("the server refuses: {0}")]
    Refused(String),
    /// The export cannot be served, for this reason.
    #[error("{0}")]
    Unfit(String),
}

impl NbdError {
    /// Returns true if the server may answer later.
    pub fn may_pass(&self) -> bool {
        match self {
            NbdError::Resolve(..)
            | NbdError::Io(_)
            | NbdError::Silent
            | NbdError::Closed
            | NbdError::ShutsDown(_) => true,
            NbdError::Breach(_) | NbdError::Refused(_) | NbdError::Unfit(_) => false,
        }
    }
}

impl From<Errno> for NbdError {
    fn from(errno: Errno) -> NbdError {
        NbdError::Io(errno.into())
    }
}

/// An address that can be connected to without asking anyone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// Looks the address up. Done once, because a confined daemon cannot ask a name server.
pub(crate) fn resolve(address: &Address) -> Result<Vec<Target>, NbdError> {
    match address {
        Address::Unix(path) => {
            let absolute = std::path::absolute(path)?;
            Ok(vec![Target::Unix(absolute)])
        }
        Address::Tcp(host, port) => {
            let failed = |error| NbdError::Resolve(host.clone(), error);
            let found = (host.as_str(), *port).to_socket_addrs().map_err(failed)?;
            let targets: Vec<Target> = found.map(Target::Tcp).collect();
            match targets.is_empty() {
                true => Err(failed(io::ErrorKind::NotFound.into())),
                false => Ok(targets),
            }
        }
    }
}

/// A connected socket, not blocking, and the time at which its negotiation fails.
#[derive(Debug)]
pub(crate) struct Call {
    socket: Arc<OwnedFd>,
    deadline: Instant,
}

impl Call {
    /// Connects to the first target that accepts. Each gets its share of the time, so that a silent one leaves some for the next.
    /// `timeout`: for how long the server's host may be silent on the connection, and the server not read, now or later: Linux
    /// gives up a connection whose window stays closed for so long, although the host answers.
    pub(crate) fn place(
        targets: &[Target],
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Call, NbdError> {
        let mut last = NbdError::Silent;
        for (target, left) in targets.iter().zip((1..=targets.len() as u32).rev()) {
            let now = Instant::now();
            let share = deadline.saturating_duration_since(now) / left;
            match open(target, now + share, timeout) {
                Ok(socket) => return Ok(Call::on(Arc::new(socket), deadline)),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Talks on a socket that is connected already.
    pub(crate) fn on(socket: Arc<OwnedFd>, deadline: Instant) -> Call {
        Call { socket, deadline }
    }

    /// Sets how long the next messages may take together, counted from now.
    pub(crate) fn allow(&mut self, time: Duration) {
        self.deadline = Instant::now() + time;
    }

    /// Reads exactly so many bytes.
    pub(crate) fn read(&mut self, out: &mut [u8]) -> Result<(), NbdError> {
        let mut filled = 0;
        while let Some(rest) = out.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match recv(&self.socket, rest, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(NbdError::Closed),
                Ok((count, _)) => filled += count,
                Err(Errno::AGAIN) => wait(&self.socket, PollFlags::IN, self.deadline)?,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Err(NbdError::Closed),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Reads an array.
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], NbdError> {
        let mut bytes = [0; N];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// Writes all bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), NbdError> {
        let mut sent = 0;
        while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
            match send(
                &self.socket,
                rest,
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            ) {
                Ok(count) => sent += count,
                Err(Errno::AGAIN) => wait(&self.socket, PollFlags::OUT, self.deadline)?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(NbdError::Closed),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// The socket.
    pub(crate) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// The socket, for an io_uring, which waits on it only while it is blocking.
    pub(crate) fn into_socket(self) -> Result<Arc<OwnedFd>, NbdError> {
        let flags = fcntl_getfl(&self.socket)?;
        fcntl_setfl(&self.socket, flags - OFlags::NONBLOCK)?;
        Ok(self.socket)
    }
}

fn open(target: &Target, deadline: Instant, timeout: Duration) -> Result<OwnedFd, NbdError> {
    let family = match target {
        Target::Tcp(SocketAddr::V4(_)) => AddressFamily::INET,
        Target::Tcp(SocketAddr::V6(_)) => AddressFamily::INET6,
        Target::Unix(_) => AddressFamily::UNIX,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    loop {
        let connected = match target {
            Target::Tcp(address) => connect(&socket, address),
            Target::Unix(path) => connect(&socket, &SocketAddrUnix::new(path)?),
        };
        match connected {
            Ok(()) => break,
            Err(Errno::INPROGRESS) => {
                wait(&socket, PollFlags::OUT, deadline)?;
                sockopt::socket_error(&socket)??;
                break;
            }
            Err(Errno::INTR) => {}
            // Too many connections wait to be accepted.
            Err(Errno::AGAIN) if Instant::now() < deadline => thread::sleep(FULL_PAUSE),
            Err(Errno::AGAIN) => return Err(NbdError::Silent),
            Err(errno) => return Err(errno.into()),
        }
    }
    if matches!(target, Target::Tcp(_)) {
        sockopt::set_tcp_nodelay(&socket, true)?;
        // Probes keep the flow known to NATs and firewalls, most of which forget it after some minutes, and tell a host that is gone
        // from one that is busy.
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, PROBE_AFTER)?;
        sockopt::set_tcp_keepintvl(&socket, PROBE_EVERY)?;
        let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&socket, timeout_ms)?;
        // A socket whose last reference is closed drops the data that it has not sent. Otherwise the kernel would go on sending for
        // minutes. A write that arrives when the network is back could replace newer data, written on another connection. A connection
        // that is lost while a store has it is disconnected as well (`disconnect.rs`).
        sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    }
    Ok(socket)
}

pub(crate) fn wait(socket: &OwnedFd, flags: PollFlags, deadline: Instant) -> Result<(), NbdError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(NbdError::Silent);
    }
    let time = Timespec::try_from(left).map_err(|_| NbdError::Silent)?;
    match poll(&mut [PollFd::new(socket, flags)], Some(&time)) {
        Ok(0) => Err(NbdError::Silent),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A host with two addresses (IPv6 and IPv4, say), of which the first drops every packet.
    #[test]
    fn an_address_that_is_silent_leaves_time_for_the_next() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&silent, 0).unwrap();
        let at = silent.local_addr().unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // Its queue is full after the first ones.
        let waiting: Vec<OwnedFd> = (0..4)
            .map(|_| {
                let socket =
                    socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
                let _ = connect(&socket, &at);
                socket
            })
            .collect();
        let good = TcpListener::bind("127.0.0.1:0").unwrap();
        let targets = [at, good.local_addr().unwrap()].map(Target::Tcp);
        // A machine may be so late that the second address has no time left.
        let connects = |seconds| {
            let (begun, time) = (Instant::now(), Duration::from_secs(seconds));
            let call = Call::place(&targets, begun + time, time);
            assert!(begun.elapsed() >= time * 9 / 20, "not silent");
            call.is_ok()
        };
        assert!([2, 20].into_iter().any(connects));
        drop(waiting);
    }
}
