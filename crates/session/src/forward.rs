//! Calls by pipe or socket, which user-mode Linux passes in place of eventfds.
//!
//! Both can block whoever writes them, in spite of O_NONBLOCK: a pipe while somebody else splices into
//! it, where not even SIGKILL ends the wait. So a worker writes an eventfd of ours, and a thread that
//! may be lost passes each signal on.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::io::{Errno, read, write};
use rustix::net::{SendFlags, send};

use crate::control::Wire;
use crate::foreign::Foreign;
use crate::intake::{is_ready, wait};
use crate::{Refusal, offload};

/// A vring and which of its descriptors.
type Key = (u16, Wire);

/// Signals of `bell` go to the frontend's pipe or socket.
struct Route {
    bell: OwnedFd,
    to: Foreign,
}

/// A session's thread for such descriptors; ends with this value, after it has passed on what is pending.
#[derive(Debug)]
pub(crate) struct Forwarder {
    /// `None` only while dropping.
    changes: Option<Sender<(Key, Option<Route>)>>,
    wake: Arc<OwnedFd>,
}

impl Forwarder {
    pub(crate) fn start() -> Result<Forwarder, Refusal> {
        let (changes, taken) = channel();
        let wake = Arc::new(bell()?);
        let woken = wake.clone();
        offload::start(move || forward(&taken, &woken))
            .map_err(|error| Refusal::lost(format!("no thread for calls by pipe: {error}")))?;
        Ok(Forwarder {
            changes: Some(changes),
            wake,
        })
    }

    /// Passes signals on to `to`; the eventfd to write instead.
    pub(crate) fn add(&self, key: Key, to: Foreign) -> Result<OwnedFd, Refusal> {
        let bell = bell()?;
        let ours = bell.try_clone().map_err(lost)?;
        self.change(key, Some(Route { bell, to }));
        Ok(ours)
    }

    /// Forgets what was added.
    pub(crate) fn remove(&self, key: Key) {
        self.change(key, None);
    }

    fn change(&self, key: Key, route: Option<Route>) {
        // The thread takes changes until this value goes.
        let _ = self
            .changes
            .as_ref()
            .map(|changes| changes.send((key, route)));
        let _ = write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.changes = None;
        let _ = write(&self.wake, &1u64.to_ne_bytes());
    }
}

fn bell() -> Result<OwnedFd, Refusal> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| lost(error.into()))
}

fn lost(error: std::io::Error) -> Refusal {
    Refusal::lost(format!("no eventfd: {error} (raise LimitNOFILE)"))
}

fn forward(changes: &Receiver<(Key, Option<Route>)>, wake: &OwnedFd) {
    let mut routes: Vec<(Key, Route)> = Vec::new();
    loop {
        // Emptied before the changes are taken: a later one has a write of its own.
        let _ = read(wake, &mut [0; 8]);
        let over = loop {
            match changes.try_recv() {
                Ok((key, route)) => {
                    routes.retain(|(known, _)| *known != key);
                    routes.extend(route.map(|route| (key, route)));
                }
                Err(ended) => break ended == TryRecvError::Disconnected,
            }
        };
        for (_, route) in &routes {
            if read(&route.bell, &mut [0; 8]).is_ok() {
                route.to.fd().into_iter().for_each(pass_on);
            }
        }
        if over {
            return;
        }
        let bells = routes.iter().map(|(_, route)| &route.bell);
        let fds = bells.chain([wake]).map(|fd| PollFd::new(fd, PollFlags::IN));
        let _ = wait(&mut fds.collect::<Vec<_>>(), None);
    }
}

/// Writes what an eventfd would be written. One that has no room holds signals that nobody has read.
fn pass_on(to: &OwnedFd) {
    let one = 1u64.to_ne_bytes();
    let sent = send(to, &one, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    if sent == Err(Errno::NOTSOCK) && is_ready(to, PollFlags::OUT) {
        let _ = write(to, &one);
    }
}
