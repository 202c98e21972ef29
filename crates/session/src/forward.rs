//! Calls through a pipe or a socket, which user-mode Linux passes in place of eventfds.
//!
//! Both can block a writer in spite of O_NONBLOCK, for example a pipe while another process splices into it;
//! not even SIGKILL ends that wait. So a worker writes an eventfd of ours, and a thread that may stay blocked
//! forwards each signal.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::io::{Errno, read, write};
use rustix::net::{SendFlags, send};

use crate::MessageRefusal;
use crate::fd::{is_ready, wait};
use crate::foreign::Foreign;
use crate::offload::Offload;
use crate::vrings::SignalFd;

/// A vring, and which of its descriptors.
type Key = (u16, SignalFd);

/// Forwards signals of `bell` to the frontend's pipe or socket.
struct Route {
    bell: OwnedFd,
    to: Foreign,
}

/// A session's thread for such descriptors. It ends with this value, after it has forwarded pending signals.
#[derive(Debug)]
pub(crate) struct Forwarder {
    /// `None` only while dropping.
    changes: Option<Sender<(Key, Option<Route>)>>,
    wake: Arc<OwnedFd>,
}

impl Forwarder {
    pub(crate) fn start(offload: &Offload) -> Result<Forwarder, MessageRefusal> {
        let (changes, taken) = channel();
        let wake = Arc::new(bell()?);
        let woken = wake.clone();
        offload
            .start(move || forward(&taken, &woken))
            .map_err(|error| {
                MessageRefusal::lost(format!("cannot start the pipe thread: {error}"))
            })?;
        Ok(Forwarder {
            changes: Some(changes),
            wake,
        })
    }

    /// Forwards signals to `to`. Returns the eventfd to write instead.
    pub(crate) fn add(&self, key: Key, to: Foreign) -> Result<OwnedFd, MessageRefusal> {
        let bell = bell()?;
        let ours = bell.try_clone().map_err(lost)?;
        self.change(key, Some(Route { bell, to }));
        Ok(ours)
    }

    /// Removes a route.
    pub(crate) fn remove(&self, key: Key) {
        self.change(key, None);
    }

    fn change(&self, key: Key, route: Option<Route>) {
        // The thread receives changes until this value is dropped.
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

fn bell() -> Result<OwnedFd, MessageRefusal> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| lost(error.into()))
}

fn lost(error: std::io::Error) -> MessageRefusal {
    MessageRefusal::lost(format!(
        "cannot make an eventfd: {error} (raise LimitNOFILE)"
    ))
}

fn forward(changes: &Receiver<(Key, Option<Route>)>, wake: &OwnedFd) {
    let mut routes: Vec<(Key, Route)> = Vec::new();
    loop {
        // Read before the changes are taken: a later change writes the eventfd again.
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

/// Writes the value that an eventfd would get. A pipe or socket without room still holds signals that were not
/// read.
fn pass_on(to: &OwnedFd) {
    let one = 1u64.to_ne_bytes();
    let sent = send(to, &one, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    if sent == Err(Errno::NOTSOCK) && is_ready(to, PollFlags::OUT) {
        let _ = write(to, &one);
    }
}
