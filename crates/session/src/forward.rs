//! Calls through a pipe or a socket, which user-mode Linux passes in place of eventfds.
//!
//! Both can block a writer in spite of O_NONBLOCK, for example a pipe while another process splices into it;
//! not even SIGKILL ends that wait. So a worker writes an eventfd of ours, and a thread that may stay blocked
//! forwards each signal.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

/// Orders to the thread. Of the changes of a route only the last is kept: the thread may be blocked while the frontend sends one
/// descriptor after another.
#[derive(Default)]
struct Orders {
    /// `None`: the route is removed.
    changes: Vec<(Key, Option<Route>)>,
    is_over: bool,
}

/// A session's thread for such descriptors. It ends with this value, after it has forwarded pending signals.
pub(crate) struct Forwarder {
    orders: Arc<Mutex<Orders>>,
    wake: Arc<OwnedFd>,
}

impl fmt::Debug for Forwarder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Forwarder").finish_non_exhaustive()
    }
}

impl Forwarder {
    pub(crate) fn start(offload: &Offload) -> Result<Forwarder, MessageRefusal> {
        let orders = Arc::new(Mutex::new(Orders::default()));
        let wake = Arc::new(bell()?);
        let (taken, woken) = (orders.clone(), wake.clone());
        offload
            .start(move || forward(&taken, &woken))
            .map_err(|error| {
                MessageRefusal::lost(format!("cannot start the pipe thread: {error}"))
            })?;
        Ok(Forwarder { orders, wake })
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
        set(&mut lock(&self.orders).changes, key, Some(route));
        let _ = write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        lock(&self.orders).is_over = true;
        let _ = write(&self.wake, &1u64.to_ne_bytes());
    }
}

fn lock(orders: &Mutex<Orders>) -> MutexGuard<'_, Orders> {
    orders.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts a value in the place of the one of this key.
fn set<T>(all: &mut Vec<(Key, T)>, key: Key, value: Option<T>) {
    all.retain(|(known, _)| *known != key);
    all.extend(value.map(|value| (key, value)));
}

fn bell() -> Result<OwnedFd, MessageRefusal> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| lost(error.into()))
}

fn lost(error: std::io::Error) -> MessageRefusal {
    MessageRefusal::lost(format!(
        "cannot make an eventfd: {error} (raise LimitNOFILE)"
    ))
}

fn forward(orders: &Mutex<Orders>, wake: &OwnedFd) {
    let mut routes: Vec<(Key, Route)> = Vec::new();
    loop {
        // Read before the orders are taken: a later one writes the eventfd again.
        let _ = read(wake, &mut [0; 8]);
        let Orders { changes, is_over } = std::mem::take(&mut *lock(orders));
        for (key, route) in changes {
            set(&mut routes, key, route);
        }
        for (_, route) in &routes {
            if read(&route.bell, &mut [0; 8]).is_ok() {
                route.to.fd().into_iter().for_each(pass_on);
            }
        }
        if is_over {
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
