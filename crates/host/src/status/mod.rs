//! A disk that is served, as requests see it: what it does, as a report and as metrics, and what can be asked of it while it runs.
//!
//! This lives on the control loop's thread and only reads what workers write for it, so that nobody who asks slows down a disk.

mod gather;
mod metrics;
mod orders;
mod quiet;
#[cfg(test)]
mod tests;
mod usage;

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use cleave_api::EventName;
use cleave_config::DiskConfig;
use cleave_session::SessionHandle;
use cleave_worker::{Device, Prior, Split};
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::events::Events;
use crate::process::confine::Confinement;
use crate::socket::hang_up::has_left;

pub(crate) use metrics::{DiskMetrics, write as write_metrics};
#[cfg(test)]
pub(crate) use tests::{connect as connect_for_tests, ram as ram_for_tests};

/// A time in which the disk does not take requests: what asked for it, and when it ends.
#[derive(Debug)]
struct Quiet {
    name: String,
    until: Instant,
    /// Ends it then.
    timer: AbortHandle,
}

/// The session that has begun and not ended.
#[derive(Debug)]
struct CurrentSession {
    remote: SessionHandle,
    /// Its connection. The server of the disk keeps it, because it must not be closed here.
    stream: Weak<UnixStream>,
}

/// The state that the control interface shows: the disk, and the current session.
#[derive(Debug)]
pub(crate) struct DiskStatus {
    device: Arc<Device>,
    /// Its id, if that is neither its serial nor a part of its name.
    id: Option<String>,
    /// The socket of the frontends.
    endpoint: String,
    /// Vrings that the disk has.
    vrings: u16,
    /// The initial state of automatic splitting, for a change to `auto`.
    auto: Split,
    /// The profile that this state comes from.
    profile: Option<String>,
    session: Mutex<Option<CurrentSession>>,
    sessions: AtomicU64,
    /// Set while the disk does not take requests.
    quiet: Mutex<Option<Quiet>>,
    /// True when the disk is no longer served, and cannot be made quiet. Changed while `quiet` is locked.
    has_ended: AtomicBool,
    /// For the thread that flushes the disk.
    aside: Arc<Semaphore>,
    /// For the snapshot that is under way.
    copying: Semaphore,
    confinement: Confinement,
    events: Arc<Events>,
}

impl DiskStatus {
    pub(crate) fn new(
        device: Arc<Device>,
        endpoint: String,
        vrings: u16,
        confinement: Confinement,
        config: &DiskConfig,
    ) -> DiskStatus {
        let auto = match &device.tuning().split {
            // With its profile, if there is one.
            auto @ Split::Auto(_) => auto.clone(),
            Split::Off | Split::Fixed(_) => Split::Auto(Prior::from_limits(device.disk.limits())),
        };
        DiskStatus {
            device,
            id: None,
            endpoint,
            vrings,
            auto,
            profile: config
                .profile
                .as_ref()
                .map(|path| path.display().to_string()),
            session: Mutex::new(None),
            sessions: AtomicU64::new(0),
            quiet: Mutex::new(None),
            has_ended: AtomicBool::new(false),
            aside: Arc::new(Semaphore::new(1)),
            copying: Semaphore::new(1),
            confinement,
            events: Arc::default(),
        }
    }

    /// Names the disk `id` instead of after its file.
    pub(crate) fn named(mut self, id: Option<String>) -> DiskStatus {
        self.id = id;
        self
    }

    /// Sends the disk's events to `events`.
    pub(crate) fn telling(mut self, events: Arc<Events>) -> DiskStatus {
        self.events = events;
        self
    }

    /// Tells of an event.
    pub(crate) fn tell(&self, event: EventName, more: Value) {
        self.events.tell(&self.id(), event, more);
    }

    /// Notes that a session has begun on this connection.
    pub(crate) fn begin(&self, remote: SessionHandle, stream: &Arc<UnixStream>) {
        self.sessions.fetch_add(1, Ordering::Relaxed);
        let stream = Arc::downgrade(stream);
        *self.lock() = Some(CurrentSession { remote, stream });
        self.tell(EventName::Connected, Value::Null);
    }

    /// Notes that the session has ended.
    pub(crate) fn end(&self) {
        *self.lock() = None;
        self.tell(EventName::Disconnected, Value::Null);
    }

    /// Returns true while there is a session.
    pub(crate) fn is_connected(&self) -> bool {
        self.lock().is_some()
    }

    /// Returns true while a frontend is connected. Its session ends some milliseconds after it has closed the connection.
    pub(crate) fn has_frontend(&self) -> bool {
        let session = self.lock();
        let stream = session
            .as_ref()
            .and_then(|session| session.stream.upgrade());
        stream.is_some_and(|stream| !has_left(&stream))
    }

    /// The socket of the frontends, as it is shown.
    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    fn session(&self) -> Option<SessionHandle> {
        self.lock().as_ref().map(|session| session.remote.clone())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<CurrentSession>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
