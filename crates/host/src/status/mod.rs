//! A disk that is served, as requests see it: what it does, as a report and as metrics, and what can be asked of it while it runs.
//!
//! This lives on the control loop's thread and only reads what workers write for it, so that nobody who asks slows down a disk.

mod gather;
mod hand_over;
mod metrics;
mod orders;
mod quiet;
#[cfg(test)]
mod tests;
mod usage;

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use cleave_api::{EventName, LastHandOver};
use cleave_config::DiskConfig;
use cleave_session::{Owners, SessionHandle};
use cleave_worker::{Device, Prior, Split};
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::events::Events;
use crate::possession::DiskPossession;
use crate::process::confine::Confinement;
use crate::socket::hang_up::has_left;

pub(crate) use metrics::{DiskMetrics, MetricsText};
#[cfg(test)]
pub(crate) use tests::{connect as connect_for_tests, ram as ram_for_tests};

/// A time in which the disk does not take requests: what asked for it, and when it ends.
#[derive(Debug)]
struct Quiet {
    name: String,
    until: Instant,
    /// How often the guest had moved away when it began.
    departures: u64,
    /// Ends it then.
    timer: AbortHandle,
}

/// What a hand-over of a disk depends on, apart from its state and its sessions.
#[derive(Debug, Default)]
pub(crate) struct HandOverTerms {
    /// All sessions of the disk.
    pub(crate) owners: Arc<Owners>,
    /// An obstacle that stays for as long as the disk is served.
    pub(crate) lasting: Option<&'static str>,
}

/// A session that has begun and not ended.
#[derive(Debug)]
pub(crate) struct CurrentSession {
    pub(crate) remote: SessionHandle,
    /// Its connection. The server of the disk keeps it, because it must not be closed here.
    pub(crate) stream: Weak<UnixStream>,
}

/// The state that the control interface shows: the disk, and its sessions.
#[derive(Debug)]
pub(crate) struct DiskStatus {
    device: Arc<Device>,
    pub(crate) possession: Arc<DiskPossession>,
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
    /// The session of the guest first, then the one that is parked.
    sessions: Mutex<Vec<CurrentSession>>,
    sessions_so_far: AtomicU64,
    /// What the next process would need.
    terms: HandOverTerms,
    /// Set when a session of the process before is served again.
    last_hand_over: OnceLock<LastHandOver>,
    /// Set while the disk does not take requests.
    quiet: Mutex<Option<Quiet>>,
    /// True if the disk is no longer served, or changes hands, and cannot be made quiet. Changed while `quiet` is locked.
    is_barred: AtomicBool,
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
        possession: Arc<DiskPossession>,
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
            possession,
            id: None,
            endpoint,
            vrings,
            auto,
            profile: config
                .profile
                .as_ref()
                .map(|path| path.display().to_string()),
            sessions: Mutex::default(),
            sessions_so_far: AtomicU64::new(0),
            terms: HandOverTerms::default(),
            last_hand_over: OnceLock::new(),
            quiet: Mutex::new(None),
            is_barred: AtomicBool::new(false),
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

    /// Has the disk be handed over on these terms.
    pub(crate) fn handed_over_on(mut self, terms: HandOverTerms) -> DiskStatus {
        self.terms = terms;
        self
    }

    /// Tells of an event.
    pub(crate) fn tell(&self, event: EventName, more: Value) {
        self.events.tell(&self.id(), event, more);
    }

    /// Notes that a session has begun. `all`: those that the disk has now.
    pub(crate) fn begin(&self, all: Vec<CurrentSession>, event: EventName) {
        self.sessions_so_far.fetch_add(1, Ordering::Relaxed);
        *self.lock() = all;
        self.tell(event, Value::Null);
    }

    /// Notes that a session has ended. `left`: those that the disk still has.
    pub(crate) fn end(&self, left: Vec<CurrentSession>, event: EventName) {
        *self.lock() = left;
        self.tell(event, Value::Null);
    }

    /// Returns true while there is a session.
    pub(crate) fn is_connected(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Returns true while a frontend is connected. Its session ends some milliseconds after it has closed the connection.
    pub(crate) fn has_frontend(&self) -> bool {
        let sessions = self.lock();
        let mut streams = sessions
            .iter()
            .filter_map(|session| session.stream.upgrade());
        streams.any(|stream| !has_left(&stream))
    }

    /// Returns true if bytes are missing at the end of the disk.
    pub(crate) fn is_short(&self) -> bool {
        self.device.disk.short_bytes() > 0
    }

    /// The socket of the frontends, as it is shown.
    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Returns the session that has the disk, or else the one that came first, and whether another is parked.
    fn session(&self) -> (Option<SessionHandle>, bool) {
        let sessions = self.lock();
        let owner = sessions.iter().find(|session| session.remote.owns());
        let shown = owner.or(sessions.first());
        let remote = shown.map(|session| session.remote.clone());
        (remote, sessions.len() > 1)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<CurrentSession>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
