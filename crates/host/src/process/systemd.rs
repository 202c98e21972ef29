//! The service manager: the socket that it has made for us (sd_listen_fds(3)), and what it is told (sd_notify(3)).
//!
//! The variables stay in our own environment, because removing one is unsafe code. A process that serves disks starts no program
//! that could take them for its own.

use std::env;
use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process;
use std::time::Duration;

use crate::failure::Failure;

/// Number of the first descriptor that systemd passes.
const FIRST_SOCKET: u32 = 3;

/// How long a message may wait for a manager whose queue is full. The control loop waits meanwhile.
const SEND_MAX: Duration = Duration::from_millis(100);

/// The time between the deadline of a disk and the end of the process: the disk is closed, and the log written.
const STOP_MARGIN: Duration = Duration::from_secs(5);

/// The descriptor of the socket that systemd passed to this process. `None`: it passed none.
pub(crate) fn passed() -> Result<Option<u32>, Failure> {
    let count = match is_ours("LISTEN_PID") {
        Some(true) => number("LISTEN_FDS").unwrap_or(0),
        Some(false) | None => 0,
    };
    match count {
        0 => Ok(None),
        1 => Ok(Some(FIRST_SOCKET)),
        more => Err(Failure::input(format!(
            "systemd passed {more} sockets, and a disk has one: leave one ListenStream= in the socket unit"
        ))),
    }
}

/// The service manager that started this process; without one, nothing is sent.
#[derive(Debug)]
pub(crate) struct Manager {
    channel: Option<UnixDatagram>,
    /// Longest time between two signs of life.
    watchdog: Option<Duration>,
}

impl Manager {
    /// As the environment describes it. Connects now: once the process is confined, it cannot.
    pub(crate) fn from_environment() -> Manager {
        let address = env::var_os("NOTIFY_SOCKET").and_then(|name| address(&name));
        let channel = address.and_then(|address| {
            let socket = UnixDatagram::unbound().ok()?;
            socket.set_write_timeout(Some(SEND_MAX)).ok()?;
            socket.connect_addr(&address).ok()?;
            Some(socket)
        });
        // The variable of another process may have come down to us.
        let is_ours = is_ours("WATCHDOG_PID").unwrap_or(true);
        let interval = number("WATCHDOG_USEC").filter(|usec| is_ours && *usec > 0);
        Manager {
            channel,
            watchdog: interval.map(Duration::from_micros),
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

    /// Sends assignments, one a line. A manager that takes none does not keep a disk from being served.
    pub(crate) fn tell(&self, state: &str) {
        if let Some(socket) = &self.channel {
            let _ = socket.send(state.as_bytes());
        }
    }

    /// Sends a sign of life at half the interval that the manager asks for, from the thread of the control loop: one that
    /// hangs sends none. Without an interval there is no timer, so that an idle daemon sleeps.
    pub(crate) fn watch(&self) {
        let (Some(interval), Some(socket)) = (self.watchdog, &self.channel) else {
            return;
        };
        let Ok(socket) = socket.try_clone() else {
            return;
        };
        tokio::spawn(async move {
            let mut due = tokio::time::interval(interval / 2);
            loop {
                due.tick().await;
                let _ = socket.send(b"WATCHDOG=1");
            }
        });
    }
}

/// A path, or `@` and an abstract name.
fn address(name: &OsStr) -> Option<SocketAddr> {
    match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest).ok(),
        [b'/', ..] => SocketAddr::from_pathname(name).ok(),
        _ => None,
    }
}

/// Returns true if the variable names this process. `None`: it is not set, or is not a number.
fn is_ours(variable: &str) -> Option<bool> {
    Some(number(variable)? == u64::from(process::id()))
}

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok()?.parse().ok()
}
