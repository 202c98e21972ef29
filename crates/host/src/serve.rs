//! A process that serves one disk, that of `cleave serve`, and the parts of the process around the disk.

use std::convert::Infallible;
use std::fmt;
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
use crate::disk_server::{self, DiskServer, Naming, Served, SizeAsker};
use crate::events::Events;
use crate::failure::Failure;
use crate::handover::link::TakenLink;
use crate::handover::merge::{self, LeftParcel, MergedParcels};
use crate::handover::offer::{self, NotOffered, Offer};
use crate::handover::parcel::Parcel;
use crate::handover::store;
use crate::hosted::changes::Changes;
use crate::hosted::disk::{DiskRequest, HostedDisk};
use crate::hosted::disk_host::ServerEnd;
use crate::hosted::{Disks, Host, Room, life};
use crate::http::interfaces::{Interfaces, Servers};
use crate::http::scrapes::Scrapes;
use crate::http::server::CONNECTIONS_MAX;
use crate::process::confine::{self, Confinement, OneDiskProcess};
use crate::process::signals::{SignalRequest, Signals};
use crate::process::systemd::{self, Manager};
use crate::process::{self, log};
use crate::resize::{SizeWatches, Watch};
use crate::service::{DESCRIPTORS_KEPT, Service};
use crate::socket::path_lock::{Left, PathLock};
use crate::socket::{self, Door, Endpoint, FileOwner, SocketSettings};
use crate::source;

/// An opening that takes longer is logged.
const OPEN_SLOW: Duration = Duration::from_secs(5);

/// Longest wait for the judgement of a disk that another process serves.
const JUDGE_TIME: Duration = Duration::from_secs(10);

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
    /// True if the disk is taken over from the process that has the control socket, if one runs.
    pub take_over: bool,
    /// The process with which this one ends.
    pub exit_with_parent: Option<u32>,
}

impl ServeSettings {
    /// Descriptors that the process may come to need, with a frontend that uses all that is offered.
    fn descriptors(&self, service: &Service) -> u64 {
        let sockets = [&self.control, &self.metrics].into_iter().flatten().count() as u64;
        DESCRIPTORS_OWN + sockets * CONNECTIONS_MAX as u64 + service.descriptors_of_vrings()
    }

    /// Returns what another process offers of the same disk, if the disk is to be taken over and a process runs.
    fn offer(&self, service: &Service) -> Result<Option<Offer>, Failure> {
        let Some(control) = self.control.as_ref().filter(|_| self.take_over) else {
            return Ok(None);
        };
        socket::check_groups(self.control.as_ref(), self.metrics.as_ref())?;
        let offered = offer::ask(&control.path, None);
        let stays = |why: NotOffered| self.judge(service, why.failure(goes_on(&why)));
        match offered.map_err(stays)? {
            Some(offer) if offer.parcel.disk.is_of(service) => Ok(Some(offer)),
            Some(offer) => {
                let disk = &offer.parcel.disk;
                Err(not_taken(format!(
                    "it serves {disk}: give this one the same --disk, --stripe and --socket-path"
                )))
            }
            None => {
                let shown = control.path.display();
                tracing::info!("no process runs at {shown}: there is nothing to take over");
                Ok(None)
            }
        }
    }

    /// Locks the path of the socket. If the disk is to be taken over, a program that runs there does not answer at the control socket, as
    /// one of version 0.2.0 does not. A restart ends that one.
    fn lock(&self, path: &Path, service: &Service) -> Result<Option<PathLock>, Failure> {
        PathLock::take(path).map_err(|in_use| match self.take_over {
            true => {
                let obstacle =
                    format!("--take-over: no process answers at the control socket, and {in_use}");
                self.judge(service, Failure::obstacle(obstacle))
            }
            false => in_use,
        })
    }

    /// Returns this reason for which the disk is not taken over, or a stronger one: a restart gets past an obstacle, and would lose a
    /// disk that this process could not serve either.
    fn judge(&self, service: &Service, why: Failure) -> Failure {
        if !why.is_obstacle() {
            return why;
        }
        let path = |socket: &Option<SocketSettings>| socket.as_ref().map(|it| it.path.clone());
        let frontends = self.endpoint.path().map(Path::to_owned);
        let own = [frontends, path(&self.control), path(&self.metrics)];
        let own: Vec<_> = own.into_iter().flatten().collect();
        let (disk, open) = (service.disk.clone(), service.open.clone());
        let lock = self.endpoint.path().and_then(PathLock::of_running);
        let content = match lock.is_some_and(|lock| lock.tells_of(&disk)) {
            true => ContentOrigin::Guest,
            false => ContentOrigin::Unknown,
        };
        let (reply, judged) = std::sync::mpsc::channel();
        let judge = move || {
            let sockets = own.iter().try_for_each(|path| socket::judge_place(path));
            let _ = reply.send(sockets.and_then(|()| source::judge_served(&disk, &open, content)));
        };
        let spawned = thread::Builder::new().name("judge".to_owned()).spawn(judge);
        match spawned.map(|_| judged.recv_timeout(JUDGE_TIME)) {
            Ok(Ok(Ok(()))) => why,
            Ok(Ok(Err(lasting))) => not_taken(lasting),
            Ok(Err(_)) => not_taken(format!("{} does not answer", service.disk.line())),
            Err(error) => not_taken(format!("cannot start a thread: {error}")),
        }
    }

    /// What the process gives up, and the files that it needs to the end.
    fn process(&self, identity: Option<Identity>) -> OneDiskProcess {
        let frontends = self.endpoint.path().map(Path::to_owned);
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

/// Why the disk was not taken over.
fn not_taken(why: impl fmt::Display) -> Failure {
    Failure::run(goes_on(why))
}

fn goes_on(why: impl fmt::Display) -> String {
    format!("--take-over: the process that serves the disk goes on: {why}")
}

/// What is in the way of serving a disk. If it is offered, another process serves it.
fn refused(is_offered: bool, failure: Failure) -> Failure {
    match is_offered {
        true => not_taken(failure),
        false => failure,
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
    Reactor::probe().map_err(Failure::start)?;
    let manager = Arc::new(Manager::from_environment());
    let runtime = process::runtime()?;
    // Frontends that were left to this process must not be lost by a signal while it opens their disk: they go on to the next one.
    let signals = match !systemd::kept().is_empty() {
        true => Some(runtime.block_on(async { Signals::catch() })?),
        false => None,
    };
    let mut offer = settings.offer(&service)?;
    let (parcel, surplus) = match &mut offer {
        Some(offer) => (Some(std::mem::take(&mut offer.parcel)), Vec::new()),
        None => left_to_us(&manager, &service),
    };
    manager.tell("STATUS=waiting for the disk");
    // Before the disk, and to the end of the process: nothing is served while I/O of a daemon that died is in flight.
    let is_passed = inherited.is_some() || parcel.as_ref().is_some_and(Parcel::has_listener);
    let lock = match &service.endpoint {
        Endpoint::Path(path) if offer.is_some() => PathLock::of_running(path),
        Endpoint::Path(path) if is_passed => PathLock::take_passed(path, &|| true)?,
        Endpoint::Path(path) => settings.lock(path, &service)?,
        Endpoint::Fd(_) => None,
    };
    if service.disk.needs_ceph() {
        confine::start_ceph(settings.sandbox, identity.is_some(), Vec::new())
            .map_err(Failure::start)?;
    }
    let was_serving = |lock: &PathLock| lock.was_serving(&service.disk);
    if parcel.is_some() || lock.as_ref().is_some_and(was_serving) {
        service.open.content = ContentOrigin::Guest;
    }
    let mut parcel = parcel.unwrap_or_default();
    let disk = match &offer {
        Some(_) => disk_server::open_offered(&mut service, lock.as_ref(), parcel.take_files()),
        None => open(&mut service, lock.as_ref(), &mut parcel),
    };
    let disk = disk.map_err(|failure| refused(offer.is_some(), failure))?;
    let outside = Outside {
        settings,
        process: settings.process(identity),
        inherited,
        signals,
        offer,
        surplus,
        lock: lock.as_ref(),
        manager,
        log: &log,
        room,
    };
    let served = runtime.block_on(control(service, disk.clone(), parcel, outside));
    end(&served, disk, lock);
    match served? {
        Served::Ended | Served::Yielded => Ok(()),
        Served::Given(peer) => peer.check_alive(),
    }
}

/// Closes the disk, and has the lock of its socket tell the next process how this one ends.
fn end(served: &Result<Served, Failure>, disk: Arc<Disk>, lock: Option<PathLock>) {
    // What another process has by now tells of that one.
    let is_ours = !matches!(served, Ok(Served::Given(_)));
    let left = is_ours.then(|| Left::of(&disk, lock.as_ref()));
    drop(disk);
    match (served, lock, left) {
        (Ok(Served::Ended), Some(lock), Some(left)) => lock.end(left),
        (Ok(Served::Given(_)), Some(lock), _) => lock.leave(),
        (Err(failure), Some(lock), _) if failure.is_of_the_run() => lock.leave(),
        _ => {}
    }
}

/// Returns what the process before has left to this one, if that served the same disk at the same socket, and what has to be closed.
/// Whatever else it has left ends here.
fn left_to_us(manager: &Manager, service: &Service) -> (Option<Parcel>, Vec<Parcel>) {
    let (ours, others): (Vec<_>, Vec<_>) = store::take(manager)
        .into_iter()
        .partition(|left| left.parcel.disk.is_of(service));
    let MergedParcels {
        parcels,
        mut surplus,
    } = merge::of_disk(ours);
    for LeftParcel { mut parcel, .. } in others {
        tracing::warn!(
            "{} was left by the process before and is not served by this one: its frontend has to connect again",
            parcel.disk
        );
        merge::hang_up(&parcel);
        // They have the locks, and this process may serve the same files at another socket.
        drop(parcel.take_files());
        socket::remove_stale(Path::new(&parcel.disk.endpoint));
        surplus.push(parcel);
    }
    (parcels.into_iter().next(), surplus)
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
    let disk = disk_server::open(service, lock, left.take_files());
    if let Ok(disk) = &disk
        && disk_server::is_another(service, disk, left)
    {
        left.sessions.clear();
    }
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
    /// What another process offers, which serves the disk until it is taken.
    offer: Option<Offer>,
    /// Parcels of earlier processes that are out of date, or of other disks. They are only closed.
    surplus: Vec<Parcel>,
    lock: Option<&'a PathLock>,
    manager: Arc<Manager>,
    log: &'a log::Guard,
    room: Room,
}

/// Opens the sockets, or goes on with those of the process before.
fn open_sockets(
    service: &Service,
    parcel: &mut Parcel,
    outside: &mut Outside<'_>,
) -> Result<(Interfaces, Door), Failure> {
    let is_offered = outside.offer.is_some();
    let refuse = |failure| refused(is_offered, failure);
    // Before the other socket too: when that one exists, the control socket can be used.
    let settings = outside.settings;
    let (control, metrics) = (settings.control.as_ref(), settings.metrics.as_ref());
    let given = [parcel.control.take(), parcel.metrics.take()];
    let interfaces = Interfaces::open(control, metrics, given).map_err(refuse)?;
    let door = match (outside.inherited.take(), &service.endpoint) {
        (Some(door), _) => door,
        (None, Endpoint::Path(path)) if is_offered => {
            socket::shared_door(path, parcel.listener.pop()).map_err(refuse)?
        }
        (None, endpoint) => socket::open_door(endpoint, outside.lock, parcel.listener.pop())?,
    };
    Ok((interfaces, door))
}

/// Returns how the disk is found and shown.
fn naming(
    service: &Service,
    outside: &Outside<'_>,
    events: Arc<Events>,
) -> Result<Naming, Failure> {
    Ok(Naming {
        id: None,
        endpoint: socket::name(&service.endpoint),
        lock: PathLock::copy(outside.lock)?,
        events,
        manager: Some(outside.manager.clone()).filter(|manager| manager.has_store()),
        // A session begins when the disk is taken, and the process that had it never takes it back.
        until_alone: None,
    })
}

/// From the socket on.
async fn control(
    service: Service,
    disk: Arc<Disk>,
    mut parcel: Parcel,
    mut outside: Outside<'_>,
) -> Result<Served, Failure> {
    // Before the socket file exists: a signal from now on ends in order and removes it.
    let signals = match outside.signals.take() {
        Some(signals) => signals,
        None => Signals::catch()?,
    };
    let is_offered = outside.offer.is_some();
    let watchdog = outside.manager.watchdog().or(parcel.watchdog);
    let (mut interfaces, mut door) = open_sockets(&service, &mut parcel, &mut outside)?;
    let events = Arc::<Events>::default();
    let naming = naming(&service, &outside, events.clone())?;
    let watches = SizeWatches::default();
    let watch = watches.watch(&disk);
    let watched = disk.clone();
    let sockets = [door.listening(), interfaces.control()];
    let confine = |name: &str, watch: Watch| {
        let confinement = Confinement::apply(&outside.process, sockets, name, outside.log)?;
        Ok((confinement, watch.confined(&watched)))
    };
    let name = disk.name().to_owned();
    let config = service.config.clone();
    let deadline = service.stop_deadline();
    let server = DiskServer::new(service, disk, &door, naming, watch, confine);
    let mut server = server.map_err(|failure| refused(is_offered, failure))?;
    // By threads that are confined.
    merge::close(outside.surplus);
    server.serve_connected(&door)?;
    let sockets = interfaces.copies()?;
    // To the end: the process before takes the end of the link for the death of this one.
    let mut link = None;
    if let Some(offer) = outside.offer {
        let taken = offer.take(&watched, outside.lock);
        (parcel, link) = taken.map_err(not_taken)?;
        door.set_owner(FileOwner::Us);
        interfaces.own();
    }
    server.resume(parcel);
    let (disk, served) = live(server, door, config, &events);
    let disks = Arc::new(Disks::default());
    disks.add(disk.clone());
    let host = Arc::new(Host {
        sockets,
        changes: Changes::default(),
        control_scrapes: Scrapes::default(),
        metrics_scrapes: Scrapes::default(),
        disks,
        events,
        room: outside.room,
        keeps: outside.manager.has_store(),
        watchdog,
        many: None,
    });
    let mut servers = Some(interfaces.serve(&host)?);
    let manager = outside.manager;
    manager.watch(watchdog);
    manager.ready(&format!("serving {name}"));
    let lost = |_| Err(Failure::run("internal fault, see the log"));
    let served = tokio::select! {
        served = served => served.unwrap_or_else(lost),
        never = pass_on(signals, &host, &disk, &mut servers, &manager, deadline) => match never {},
    };
    if let Ok(Served::Given(peer)) = &served {
        servers.into_iter().for_each(Servers::leave);
        manager.follow(peer.pid);
        link.into_iter().for_each(TakenLink::outlive_giver);
    }
    served
}

/// Begins the life of the disk. Returns how its server ends.
fn live(
    mut server: DiskServer,
    door: Door,
    config: DiskConfig,
    events: &Arc<Events>,
) -> (Arc<HostedDisk>, oneshot::Receiver<Result<Served, Failure>>) {
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
            ServerEnd::with(lost)
        })
    });
    (disk, served)
}

/// Gives signals to the disk as orders. Nothing is asked any more of a disk that is to end, so its interfaces end then.
async fn pass_on(
    mut signals: Signals,
    host: &Host,
    disk: &HostedDisk,
    servers: &mut Option<Servers>,
    manager: &Arc<Manager>,
    deadline: Duration,
) -> Infallible {
    loop {
        let order = match signals.next().await {
            SignalRequest::Stop(signal) => {
                manager.stopping(deadline);
                match host.changes.are_passed_on() {
                    // The files are the other process's if it takes the disk.
                    true => servers.iter().for_each(Servers::stop),
                    false => drop(servers.take()),
                }
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
