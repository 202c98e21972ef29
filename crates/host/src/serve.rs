//! A process that serves one disk, that of `cleave serve`, and the parts of the process around the disk.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::Duration;

use cleave_config::{DiskConfig, Names};
use cleave_disk::{ContentOrigin, Disk};
use cleave_engine::Reactor;
use cleave_sandbox::Identity;
use tokio::sync::oneshot;
use tracing::level_filters::LevelFilter;

use crate::alone::Alone;
use crate::disk_server::{self, DiskServer, Naming, SizeAsker};
use crate::events::Events;
use crate::failure::Failure;
use crate::handover::parcel::{DiskRecord, Parcel};
use crate::handover::store;
use crate::hosted::disk::{DiskRequest, HostedDisk};
use crate::hosted::{Disks, Host, Room, life};
use crate::http::router;
use crate::http::server::{CONNECTIONS_MAX, Server};
use crate::process::confine::{self, Confinement, OneDiskProcess};
use crate::process::signals::{SignalRequest, Signals};
use crate::process::systemd::{self, Manager};
use crate::process::{self, log};
use crate::resize::{SizeWatches, Watch};
use crate::service::{DESCRIPTORS_KEPT, Service};
use crate::socket::path_lock::{Left, PathLock};
use crate::socket::{self, Door, Endpoint, SocketSettings};
use crate::source;

/// An opening that takes longer is logged.
const OPEN_SLOW: Duration = Duration::from_secs(5);

/// Descriptors that every daemon may have open, whatever its vrings and workers: the standard streams, the sockets, 16
/// pending, the descriptors of a message, the runtime with its watches, and what sessions keep for the next process. The connections of
/// the control socket and of that for metrics come on top.
const DESCRIPTORS_OWN: u64 = 96 + DESCRIPTORS_KEPT;

/// A disk, and the process around it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeSettings {
    /// The disk.
    pub config: DiskConfig,
    /// The socket of its frontends.
    pub endpoint: Endpoint,
    /// True if the process ends when the first frontend has left.
    pub once: bool,
    /// The control socket.
    pub control: Option<SocketSettings>,
    /// The socket of the metrics.
    pub metrics: Option<SocketSettings>,
    /// True if the process is confined.
    pub sandbox: bool,
    /// The user that the process becomes: a name or a number.
    pub user: Option<String>,
    /// The group that the process becomes a member of: a name or a number.
    pub group: Option<String>,
    /// The least severe messages that are written.
    pub log: LevelFilter,
    /// The process with which this one ends.
    pub exit_with_parent: Option<u32>,
}

impl ServeSettings {
    /// Descriptors that the process may come to need, with a frontend that uses all that is offered.
    fn descriptors(&self, service: &Service) -> u64 {
        let sockets = [&self.control, &self.metrics].into_iter().flatten().count() as u64;
        DESCRIPTORS_OWN + sockets * CONNECTIONS_MAX as u64 + service.descriptors_of_vrings()
    }

    /// What the process gives up, and the files that it needs to the end.
    fn process(&self, identity: Option<Identity>) -> OneDiskProcess {
        let frontends = match &self.endpoint {
            Endpoint::Path(path) => Some(path.clone()),
            Endpoint::Fd(_) => None,
        };
        let path = |socket: &Option<SocketSettings>| socket.as_ref().map(|it| it.path.clone());
        OneDiskProcess {
            sandbox: self.sandbox,
            identity,
            exit_with_parent: self.exit_with_parent,
            sockets: [frontends, path(&self.control)],
            metrics: path(&self.metrics),
        }
    }
}

/// Serves a disk until a signal, or until the only frontend has left. Messages name the fields of the disk as options.
pub fn serve_disk(settings: &ServeSettings) -> Result<(), Failure> {
    process::started();
    let identity = Identity::find(settings.user.as_deref(), settings.group.as_deref());
    let identity = identity.map_err(Failure::input)?;
    let config = settings.config.clone();
    let mut service = Service::new(config, settings.endpoint.clone(), Names::Options)?;
    service.once = settings.once;
    // Before anything opens a descriptor whose number could be the one that --fd or systemd names.
    let inherited = socket::inherited(&service.endpoint)?;
    let log = log::start(settings.log)
        .map_err(|error| Failure::run(format!("cannot start the log thread: {error}")))?;
    if let Some(parent) = settings.exit_with_parent {
        process::end_with_parent(parent)?;
    }
    let descriptors_own = settings.descriptors(&service);
    let room = Room {
        disks_max: 1,
        descriptors_own,
        descriptors_max: process::raise_descriptor_limit(descriptors_own)?,
    };
    Reactor::probe().map_err(Failure::input)?;
    let manager = Arc::new(Manager::from_environment());
    let runtime = process::runtime()?;
    // Frontends that were left to this process must not be lost by a signal while it opens their disk: they go on to the next one.
    let signals = match !systemd::kept().is_empty() {
        true => Some(runtime.block_on(async { Signals::catch() })?),
        false => None,
    };
    let parcel = left_to_us(&manager, &service);
    manager.tell("STATUS=waiting for the disk");
    // Before the disk, and to the end of the process: nothing is served while I/O of a daemon that died is in flight.
    let is_passed = inherited.is_some() || parcel.as_ref().is_some_and(Parcel::has_listener);
    let lock = match &service.endpoint {
        Endpoint::Path(path) if is_passed => PathLock::take_passed(path, &|| true)?,
        Endpoint::Path(path) => PathLock::take(path)?,
        Endpoint::Fd(_) => None,
    };
    if service.disk.needs_ceph() {
        confine::start_ceph(settings.sandbox, identity.is_some(), Vec::new())
            .map_err(Failure::input)?;
    }
    let was_serving = |lock: &PathLock| lock.was_serving(&service.disk);
    if parcel.is_some() || lock.as_ref().is_some_and(was_serving) {
        service.open.content = ContentOrigin::Guest;
    }
    let mut parcel = parcel.unwrap_or_default();
    let disk = open(&mut service, lock.as_ref(), &mut parcel)?;
    let is_locked = lock.is_some() || matches!(service.endpoint, Endpoint::Fd(_));
    let outside = Outside {
        settings,
        process: settings.process(identity),
        inherited,
        signals,
        manager,
        log: &log,
        room,
    };
    let served = runtime.block_on(control(service, disk.clone(), is_locked, parcel, outside));
    let left = Left::of(&disk, lock.as_ref());
    drop(disk);
    match (&served, lock) {
        (Ok(()), Some(lock)) => lock.end(left),
        (Err(failure), Some(lock)) if failure.is_of_the_run() => lock.leave(),
        _ => {}
    }
    served
}

/// Returns what the process before has left to this one, if that served the same disk at the same socket. Whatever else it has left
/// ends here.
fn left_to_us(manager: &Manager, service: &Service) -> Option<Parcel> {
    let (ours, others): (Vec<_>, Vec<_>) = store::take(manager)
        .into_iter()
        .partition(|parcel| parcel.disk.is_of(service));
    for parcel in others {
        let DiskRecord {
            storage, endpoint, ..
        } = parcel.disk.clone();
        tracing::warn!(
            "{storage} at {endpoint} was left by the process before and is not served by this one: its frontend has to connect again"
        );
        drop(parcel);
        socket::remove_stale(Path::new(&endpoint));
    }
    ours.into_iter().next()
}

/// Opens the disk, and has the log say so if that takes long.
fn open(
    service: &mut Service,
    lock: Option<&PathLock>,
    left: &mut Parcel,
) -> Result<Arc<Disk>, Failure> {
    let slow = source::slow(&service.disk);
    let (opened, wait) = std::sync::mpsc::channel::<()>();
    let watch = move || {
        if wait.recv_timeout(OPEN_SLOW) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("{slow}");
        }
    };
    let watch = thread::Builder::new().name("open".to_owned()).spawn(watch);
    let disk = disk_server::open(service, lock, left);
    drop(opened);
    if let Ok(watch) = watch {
        // It has ended, or does so now.
        let _ = watch.join();
    }
    disk
}

/// The process's connections to the outside, besides its disk, what it gives up, and what it has room for.
struct Outside<'a> {
    settings: &'a ServeSettings,
    process: OneDiskProcess,
    /// The socket that the process was started with.
    inherited: Option<Door>,
    /// If they have been caught already.
    signals: Option<Signals>,
    manager: Arc<Manager>,
    log: &'a log::Guard,
    room: Room,
}

/// From the socket on.
async fn control(
    service: Service,
    disk: Arc<Disk>,
    is_locked: bool,
    mut parcel: Parcel,
    outside: Outside<'_>,
) -> Result<(), Failure> {
    // Before the socket file exists: a signal from now on ends in order and removes it.
    let signals = match outside.signals {
        Some(signals) => signals,
        None => Signals::catch()?,
    };
    // Before the other socket too: when that one exists, the control socket can be used.
    let opened = outside.settings.control.as_ref();
    let opened = opened.map(socket::open_control).transpose()?;
    let metrics = outside.settings.metrics.as_ref();
    let metrics = metrics.map(socket::open_metrics).transpose()?;
    let door = match outside.inherited {
        Some(door) => door,
        None => socket::open_door(&service.endpoint, parcel.listener.take())?,
    };
    let events = Arc::<Events>::default();
    let naming = Naming {
        id: None,
        endpoint: socket::name(&service.endpoint),
        is_locked,
        events: events.clone(),
        manager: Some(outside.manager.clone()).filter(|manager| manager.has_store()),
    };
    let watches = SizeWatches::default();
    let watch = watches.watch(&disk);
    let watched = disk.clone();
    let confine = |name: &str, watch: Watch| {
        let confinement = Confinement::apply(&outside.process, name, outside.log)?;
        Ok((confinement, watch.confined(&watched)))
    };
    let name = disk.name().to_owned();
    let (config, deadline) = (service.config.clone(), service.stop_deadline());
    let mut server = DiskServer::new(service, disk, &door, naming, watch, confine)?;
    server.serve_connected(&door)?;
    server.resume(parcel.sessions, parcel.since);
    let status = server.status();
    let (id, endpoint) = (status.id(), status.endpoint().to_owned());
    let host = Arc::new(Alone {
        endpoint,
        events: events.clone(),
    });
    let (reply, served) = oneshot::channel();
    let disk = life::adopt(&host, &id, config, status, |mut orders| {
        Box::pin(async move {
            let served = server.serve(&mut orders, door).await;
            drop(server);
            let lost = served.as_ref().err().map(ToString::to_string);
            // It is waited for to the end of the process.
            let _ = reply.send(served);
            lost
        })
    });
    let disks = Arc::new(Disks::default());
    disks.add(disk.clone());
    let host = Arc::new(Host {
        disks,
        events,
        room: outside.room,
        keeps: outside.manager.has_store(),
        many: None,
    });
    let control = opened.map(|socket| Server::start(socket, router::router(host.clone())));
    let metrics = metrics.map(|socket| Server::start(socket, router::metrics_router(host)));
    let servers = [control.transpose()?, metrics.transpose()?];
    let manager = outside.manager;
    manager.watch();
    manager.ready(&format!("serving {name}"));
    let lost = |_| Err(Failure::run("internal fault, see the log"));
    tokio::select! {
        served = served => served.unwrap_or_else(lost),
        never = pass_on(signals, &disk, servers, manager, deadline) => match never {},
    }
}

/// Gives signals to the disk as orders. Nothing is asked any more of a disk that is to end, so its interfaces end then.
async fn pass_on(
    mut signals: Signals,
    disk: &HostedDisk,
    mut servers: [Option<Server>; 2],
    manager: Arc<Manager>,
    deadline: Duration,
) -> Infallible {
    loop {
        let order = match signals.next().await {
            SignalRequest::Stop(signal) => {
                manager.stopping(deadline);
                drop(std::mem::take(&mut servers));
                let why = format!("{signal} received");
                match manager.has_store() {
                    true => DiskRequest::HandOver(why, manager.clone()),
                    false => DiskRequest::Stop(why),
                }
            }
            SignalRequest::CheckSize => DiskRequest::CheckSize(Some(SizeAsker::Signal)),
        };
        disk.order(order).await;
    }
}
