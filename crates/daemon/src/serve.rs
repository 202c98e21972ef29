//! `cleave serve`: one disk, and the parts of the process around it.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::Duration;

use cleave_disk::{Content, Disk};
use cleave_engine::Reactor;
use tokio::sync::mpsc;

use crate::confine::{self, Confinement, OneDiskProcess};
use crate::control::Server;
use crate::disk_server::{self, DiskServer, Naming, Order, SizeAsker};
use crate::failure::Failure;
use crate::log;
use crate::path_lock::{Left, PathLock};
use crate::process;
use crate::resize::{Watch, Watches};
use crate::service::Service;
use crate::signals::{SignalRequest, Signals};
use crate::socket::{self, Door, Endpoint};
use crate::systemd::Manager;

/// Orders that may wait: signals that came at once.
const ORDERS_MAX: usize = 16;

/// An opening that takes longer is logged.
const OPEN_SLOW: Duration = Duration::from_secs(5);

/// Serves until a signal, or until the only frontend has left.
pub(crate) fn run(mut service: Service) -> Result<(), Failure> {
    // Before anything opens a descriptor whose number could be the one that --fd or systemd names.
    let inherited = socket::inherited(&service.endpoint)?;
    let log = log::start(service.log)
        .map_err(|error| Failure::run(format!("cannot start the log thread: {error}")))?;
    if let Some(parent) = service.exit_with_parent {
        process::end_with_parent(parent)?;
    }
    process::raise_descriptor_limit(service.descriptors())?;
    Reactor::probe().map_err(Failure::input)?;
    let manager = Manager::from_environment();
    manager.tell("STATUS=waiting for the disk");
    // Before the disk, and to the end of the process: nothing is served while I/O of a daemon that died is in flight.
    let lock = match &service.endpoint {
        Endpoint::Path(path) if inherited.is_some() => PathLock::take_passed(path)?,
        Endpoint::Path(path) => PathLock::take(path)?,
        Endpoint::Fd(_) => None,
    };
    if service.disk.needs_ceph() {
        confine::start_ceph(service.sandbox, service.identity.is_some(), Vec::new())
            .map_err(Failure::input)?;
    }
    if lock
        .as_ref()
        .is_some_and(|lock| lock.was_serving(&service.disk))
    {
        service.open.content = Content::Guest;
    }
    let disk = open(&mut service, lock.as_ref())?;
    let is_locked = lock.is_some() || matches!(service.endpoint, Endpoint::Fd(_));
    let outside = Outside {
        inherited,
        manager,
        log: &log,
    };
    let runtime = process::runtime()?;
    let served = runtime.block_on(control(service, disk.clone(), is_locked, outside));
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
    let slow = service.disk.slow();
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

/// The process's connections to the outside, besides its disk.
struct Outside<'a> {
    /// The socket that the process was started with.
    inherited: Option<Door>,
    manager: Manager,
    log: &'a log::Guard,
}

/// From the socket on.
async fn control(
    service: Service,
    disk: Arc<Disk>,
    is_locked: bool,
    outside: Outside<'_>,
) -> Result<(), Failure> {
    let Outside {
        inherited,
        manager,
        log,
    } = outside;
    // Before the socket file exists: a signal from now on ends in order and removes it.
    let signals =
        Signals::catch().map_err(|error| Failure::run(format!("cannot catch signals: {error}")))?;
    // Before the other socket too: when that one exists, the control socket can be used.
    let opened = service.control.as_deref().map(socket::open_private);
    let opened = opened.transpose()?;
    let metrics = service.metrics.open()?;
    let door = match inherited {
        Some(door) => door,
        None => socket::open_door(&service.endpoint)?,
    };
    let naming = Naming {
        id: None,
        endpoint: socket::name(&service.endpoint),
        is_locked,
        events: Arc::default(),
    };
    let watches = Watches::default();
    let watch = watches.watch(&disk);
    let watched = disk.clone();
    let confine = |service: &Service, name: &str, watch: Watch| {
        let frontends = match &service.endpoint {
            Endpoint::Path(path) => Some(path.as_path()),
            Endpoint::Fd(_) => None,
        };
        let process = OneDiskProcess {
            sandbox: service.sandbox,
            identity: service.identity,
            exit_with_parent: service.exit_with_parent,
            sockets: [frontends, service.control.as_deref()],
            metrics: service.metrics.path(),
        };
        let confinement = Confinement::apply(&process, name, log)?;
        Ok((confinement, watch.confined(&watched)))
    };
    let name = disk.name().to_owned();
    let deadline = service.stop_deadline;
    let mut server = DiskServer::new(service, disk, &door, naming, watch, confine)?;
    let control = opened.map(|socket| Server::start(socket, server.status().router()));
    let metrics = metrics.map(|socket| Server::start(socket, server.status().metrics_router()));
    server.add_control([control.transpose()?, metrics.transpose()?]);
    server.serve_connected(&door)?;
    manager.watch();
    manager.ready(&format!("serving {name}"));
    let (orders, mut taken) = mpsc::channel(ORDERS_MAX);
    tokio::select! {
        served = server.serve(&mut taken, door, || ()) => served,
        never = pass_on(signals, orders, manager, deadline) => match never {},
    }
}

/// Gives signals to the disk as orders.
async fn pass_on(
    mut signals: Signals,
    orders: mpsc::Sender<Order>,
    manager: Manager,
    deadline: Duration,
) -> std::convert::Infallible {
    loop {
        let order = match signals.next().await {
            SignalRequest::Stop(signal) => {
                manager.stopping(deadline);
                Order::Stop(format!("{signal} received"), None)
            }
            SignalRequest::CheckSize => Order::CheckSize(Some(SizeAsker::Signal)),
        };
        // Of a disk that is ending already, nothing more is asked.
        let _ = orders.send(order).await;
    }
}
