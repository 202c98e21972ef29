//! A node, that of `cleave node`: many disks in one process. Each has a socket, a lock, workers and failures of its own; an HTTP interface
//! adds and removes them, and files keep them.

mod files;
mod folder;
mod groups;
mod hosting;
mod opening;
mod pools;
mod serving;
mod settings;
mod shared;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cleave_engine::Reactor;
use rustix::fs::{FlockOperation, flock};
use tokio::sync::Semaphore;

use crate::failure::Failure;
use crate::handover::store;
use crate::hosted::disk::{HostedDisk, HostedState};
use crate::hosted::{Disks, Host, Room};
use crate::http::router;
use crate::http::server::Server;
use crate::process::confine::{self, Confinement, NodeFolders};
use crate::process::signals::{SignalRequest, Signals};
use crate::process::systemd::Manager;
use crate::process::{self, log};
use crate::resize::SizeWatches;
use crate::socket;
use files::StateFiles;
use groups::Groups;
use hosting::DISKS_MAX;
use pools::{Pools, taken_cpus};
pub use settings::{NodeSettings, PoolSettings};
use shared::{DESCRIPTORS_OWN, Node};

/// Most disks that are opened at once.
const OPENERS_MAX: usize = 64;
/// How long the service manager waits for disks that are being opened.
const READY_TIME: Duration = Duration::from_secs(10);

/// Serves the disks of a node until a signal.
pub fn serve_node(settings: &NodeSettings) -> Result<(), Failure> {
    process::started();
    let log = log::start(settings.log)
        .map_err(|error| Failure::run(format!("cannot start the log thread: {error}")))?;
    let descriptors = process::raise_descriptor_limit(0)?;
    Reactor::probe().map_err(Failure::input)?;
    let images = images(&settings.images)?;
    let files = StateFiles::open(&settings.state)?;
    let _state = lock_state(&settings.state)?;
    folder::make_run(&settings.run).map_err(|error| {
        let run = settings.run.display();
        Failure::input(format!(
            "cannot make {run}: {error}: give another folder with --run"
        ))
    })?;
    process::runtime()?.block_on(control(settings, files, images, descriptors, &log))
}

/// The folders of images as the confinement has them from the start: without links. Looked for again with each disk, one whose server
/// has become silent would keep the disks of all other folders away.
fn images(folders: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let found = folders.iter().map(|folder| {
        folder.canonicalize().map_err(|error| {
            Failure::input(format!(
                "--images {}: {error}: make that folder, or name another",
                folder.display()
            ))
        })
    });
    found.collect()
}

/// Refuses a second node with the same files.
fn lock_state(state: &Path) -> Result<File, Failure> {
    let shown = state.display();
    let folder = File::open(state)
        .map_err(|error| Failure::input(format!("cannot open {shown}: {error}")))?;
    match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Failure::input(format!(
            "{shown} is in use by a running node: end that one, or give another folder with --state"
        ))),
        // The node serves on a file system without locks too.
        _ => Ok(folder),
    }
}

/// From the signals on.
async fn control(
    settings: &NodeSettings,
    files: StateFiles,
    images: Vec<PathBuf>,
    descriptors: u64,
    log: &log::Guard,
) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let socket = socket::open_control(&settings.control)?;
    let metrics = settings.metrics.as_ref();
    let metrics = metrics.map(socket::open_metrics).transpose()?;
    let manager = Arc::new(Manager::from_environment());
    // A confined process cannot take descriptors over by their numbers.
    let parcels = store::take(&manager);
    let watches = SizeWatches::default();
    watches.open_all();
    if settings.ceph {
        confine::start_ceph(settings.sandbox, false, taken_cpus(&settings.pools))
            .map_err(|error| Failure::input(format!("--ceph: {error}")))?;
    }
    let confinement = confine(settings, log)?;
    let pools = Pools::start(&settings.pools, &confinement)?;
    let node = Arc::new_cyclic(|me| Node {
        me: me.clone(),
        is_ending: AtomicBool::new(false),
        files,
        state: settings.state.clone(),
        pools,
        ceph: settings.ceph,
        run: settings.run.clone(),
        control: settings.control.path.clone(),
        images,
        descriptors,
        watches,
        confinement,
        groups: Groups::default(),
        disks: Arc::new(Disks::default()),
        openers: Arc::new(Semaphore::new(OPENERS_MAX)),
        slow_openers: Arc::new(Semaphore::new(DISKS_MAX)),
        events: Arc::default(),
        manager: Some(manager.clone()).filter(|manager| manager.has_store()),
        inherits: !parcels.is_empty(),
        parcels: Mutex::new(parcels),
    });
    let kept = node.restore()?;
    let host = Arc::new(Host {
        disks: node.disks.clone(),
        events: node.events.clone(),
        room: Room {
            disks_max: DISKS_MAX,
            descriptors_own: DESCRIPTORS_OWN,
            descriptors_max: descriptors,
        },
        keeps: manager.has_store(),
        many: Some(node.clone()),
    });
    let server = Server::start(socket, router::router(host.clone()))?;
    let metrics = metrics.map(|socket| Server::start(socket, router::metrics_router(host)));
    let metrics = metrics.transpose()?;
    manager.watch();
    tokio::spawn(tell_when_ready(node.clone(), manager.clone()));
    let shown = node.control.display();
    tracing::info!("the control socket is {shown}; disks that are kept: {kept}");
    let signal = loop {
        match signals.next().await {
            SignalRequest::Stop(signal) => break signal,
            SignalRequest::CheckSize => node.check_sizes().await,
        }
    };
    drop((server, metrics));
    manager.stopping(node.stop_deadline());
    node.stop(signal, &manager).await
}

/// Gives up what opening and serving disks does not need.
fn confine(settings: &NodeSettings, log: &log::Guard) -> Result<Confinement, Failure> {
    if !settings.sandbox {
        tracing::warn!(
            "--sandbox off: whoever takes this node over through a fault of it can do all that its user can"
        );
        return Ok(Confinement::none());
    }
    let folders = NodeFolders {
        own: [&settings.state, &settings.run],
        control: &settings.control.path,
        metrics: settings.metrics.as_ref().map(|socket| &*socket.path),
        images: &settings.images,
    };
    Confinement::apply_to_node(&folders, log)
}

/// Tells the service manager that the node is ready: each disk that is kept is served or has failed. One whose storage hangs
/// is not waited for.
async fn tell_when_ready(node: Arc<Node>, manager: Arc<Manager>) {
    let all = node.disks.all();
    let settled = async {
        for disk in &all {
            disk.reaches(|state| !matches!(state, HostedState::Opening | HostedState::Ending))
                .await;
        }
    };
    // Ready all the same.
    let _ = tokio::time::timeout(READY_TIME, settled).await;
    let is_served = |disk: &&Arc<HostedDisk>| matches!(disk.state(), HostedState::Serving(_));
    let served = all.iter().filter(is_served).count();
    manager.ready(&format!("serving {served} of {} disks", all.len()));
}
