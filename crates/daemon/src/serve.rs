//! `cleave serve`: one disk, and the parts of the process around it.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::Duration;

use cleave_disk::{ContentOrigin, Disk};
use cleave_engine::Reactor;
use cleave_sandbox::Identity;
use tokio::sync::oneshot;
use tracing::level_filters::LevelFilter;

use crate::alone::Alone;
use crate::cli::MetricsOptions;
use crate::confine::{self, Confinement, OneDiskProcess};
use crate::control::{CONNECTIONS_MAX, Server};
use crate::disk_server::{self, DiskServer, Naming, SizeAsker};
use crate::events::Events;
use crate::failure::Failure;
use crate::host::disk::{DiskRequest, HostedDisk};
use crate::host::{Disks, Host, Room, api, life};
use crate::log;
use crate::path_lock::{Left, PathLock};
use crate::process;
use crate::resize::{SizeWatches, Watch};
use crate::service::Service;
use crate::signals::{SignalRequest, Signals};
use crate::socket::{self, Door, Endpoint};
use crate::source;
use crate::systemd::Manager;

/// An opening that takes longer is logged.
const OPEN_SLOW: Duration = Duration::from_secs(5);

/// Descriptors that every daemon may have open, whatever its vrings and workers: the standard streams, the sockets, 16
/// pending, the descriptors of a message, and the runtime with its watches. The connections of the control socket and of that for
/// metrics come on top.
const DESCRIPTORS_OWN: u64 = 96;

/// `cleave serve`: a disk, and the process around it.
#[derive(Debug)]
pub(crate) struct Serve {
    pub(crate) service: Service,
    /// The control socket.
    pub(crate) control: Option<PathBuf>,
    /// The group that may use it too.
    pub(crate) control_group: Option<String>,
    pub(crate) metrics: MetricsOptions,
    /// True if the process is confined.
    pub(crate) sandbox: bool,
    /// The user that it becomes.
    pub(crate) identity: Option<Identity>,
    pub(crate) log: LevelFilter,
    pub(crate) exit_with_parent: Option<u32>,
}

impl Serve {
    /// Descriptors that the process may come to need, with a frontend that uses all that is offered.
    fn descriptors(&self) -> u64 {
        let sockets = [self.control.as_deref(), self.metrics.path()];
        let sockets = sockets.into_iter().flatten().count() as u64;
        DESCRIPTORS_OWN + sockets * CONNECTIONS_MAX as u64 + self.service.descriptors_of_vrings()
    }

    /// What the process gives up, and the files that it needs to the end.
    fn process(&self) -> OneDiskProcess {
        let frontends = match &self.service.endpoint {
            Endpoint::Path(path) => Some(path.clone()),
            Endpoint::Fd(_) => None,
        };
        OneDiskProcess {
            sandbox: self.sandbox,
            identity: self.identity,
            exit_with_parent: self.exit_with_parent,
            sockets: [frontends, self.control.clone()],
            metrics: self.metrics.path().map(Path::to_owned),
        }
    }
}

/// Serves until a signal, or until the only frontend has left.
pub(crate) fn run(mut serve: Serve) -> Result<(), Failure> {
    // Before anything opens a descriptor whose number could be the one that --fd or systemd names.
    let inherited = socket::inherited(&serve.service.endpoint)?;
    let log = log::start(serve.log)
        .map_err(|error| Failure::run(format!("cannot start the log thread: {error}")))?;
    if let Some(parent) = serve.exit_with_parent {
        process::end_with_parent(parent)?;
    }
    let descriptors_own = serve.descriptors();
    let room = Room {
        disks_max: 1,
        descriptors_own,
        descriptors_max: process::raise_descriptor_limit(descriptors_own)?,
    };
    Reactor::probe().map_err(Failure::input)?;
    let manager = Manager::from_environment();
    manager.tell("STATUS=waiting for the disk");
    // Before the disk, and to the end of the process: nothing is served while I/O of a daemon that died is in flight.
    let lock = match &serve.service.endpoint {
        Endpoint::Path(path) if inherited.is_some() => PathLock::take_passed(path)?,
        Endpoint::Path(path) => PathLock::take(path)?,
        Endpoint::Fd(_) => None,
    };
    if serve.service.disk.needs_ceph() {
        confine::start_ceph(serve.sandbox, serve.identity.is_some(), Vec::new())
            .map_err(Failure::input)?;
    }
    if lock
        .as_ref()
        .is_some_and(|lock| lock.was_serving(&serve.service.disk))
    {
        serve.service.open.content = ContentOrigin::Guest;
    }
    let disk = open(&mut serve.service, lock.as_ref())?;
    let is_locked = lock.is_some() || matches!(serve.service.endpoint, Endpoint::Fd(_));
    let outside = Outside {
        inherited,
        manager,
        log: &log,
        room,
    };
    let runtime = process::runtime()?;
    let served = runtime.block_on(control(serve, disk.clone(), is_locked, outside));
    let left = Left::of(&disk, lock.as_ref());
    drop(disk);
    match (&served, lock) {
        (Ok(()), Some(lock)) => lock.end(left),
        (Err(failure), Some(lock)) if failure.is_of_the_run() => lock.leave(),
        _ => {}
    }
    served
}

/// Opens the disk, and has the log say so if that takes long.
fn open(service: &mut Service, lock: Option<&PathLock>) -> Result<Arc<Disk>, Failure> {
    let slow = source::slow(&service.disk);
    let (opened, wait) = std::sync::mpsc::channel::<()>();
    let watch = move || {
        if wait.recv_timeout(OPEN_SLOW) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("{slow}");
        }
    };
    let watch = thread::Builder::new().name("open".to_owned()).spawn(watch);
    let disk = disk_server::open(service, lock);
    drop(opened);
    if let Ok(watch) = watch {
        // It has ended, or does so now.
        let _ = watch.join();
    }
    disk
}

/// The process's connections to the outside, besides its disk, and what it has room for.
struct Outside<'a> {
    /// The socket that the process was started with.
    inherited: Option<Door>,
    manager: Manager,
    log: &'a log::Guard,
    room: Room,
}

/// From the socket on.
async fn control(
    serve: Serve,
    disk: Arc<Disk>,
    is_locked: bool,
    outside: Outside<'_>,
) -> Result<(), Failure> {
    // Before the socket file exists: a signal from now on ends in order and removes it.
    let signals =
        Signals::catch().map_err(|error| Failure::run(format!("cannot catch signals: {error}")))?;
    // Before the other socket too: when that one exists, the control socket can be used.
    let group = serve.control_group.as_deref();
    let opened = serve.control.as_deref();
    let opened = opened.map(|path| socket::open_control(path, group));
    let opened = opened.transpose()?;
    let metrics = serve.metrics.open()?;
    let door = match outside.inherited {
        Some(door) => door,
        None => socket::open_door(&serve.service.endpoint)?,
    };
    let events = Arc::<Events>::default();
    let naming = Naming {
        id: None,
        endpoint: socket::name(&serve.service.endpoint),
        is_locked,
        events: events.clone(),
    };
    let watches = SizeWatches::default();
    let watch = watches.watch(&disk);
    let watched = disk.clone();
    let process = serve.process();
    let confine = |name: &str, watch: Watch| {
        let confinement = Confinement::apply(&process, name, outside.log)?;
        Ok((confinement, watch.confined(&watched)))
    };
    let name = disk.name().to_owned();
    let config = serve.service.config.clone();
    let deadline = serve.service.stop_deadline();
    let mut server = DiskServer::new(serve.service, disk, &door, naming, watch, confine)?;
    server.serve_connected(&door)?;
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
        many: None,
    });
    let control = opened.map(|socket| Server::start(socket, api::router(host.clone())));
    let metrics = metrics.map(|socket| Server::start(socket, api::metrics_router(host)));
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
    manager: Manager,
    deadline: Duration,
) -> Infallible {
    loop {
        let order = match signals.next().await {
            SignalRequest::Stop(signal) => {
                manager.stopping(deadline);
                drop(std::mem::take(&mut servers));
                DiskRequest::Stop(format!("{signal} received"))
            }
            SignalRequest::CheckSize => DiskRequest::CheckSize(Some(SizeAsker::Signal)),
        };
        disk.order(order).await;
    }
}
