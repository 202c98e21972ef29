//! A node, that of `cleave node`: many disks in one process. Each has a socket, a lock, workers and failures of its own; an HTTP interface
//! adds and removes them, and files keep them.

mod files;
mod folder;
mod groups;
mod hosting;
mod images;
mod judging;
mod opening;
mod pools;
mod serving;
mod settings;
mod shared;

use std::fmt;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use cleave_engine::Reactor;
use rustix::fs::{FlockOperation, flock};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::timeout;

use crate::failure::Failure;
use crate::handover::link::{Peer, TakenLink};
use crate::handover::merge::{self, MergedParcels};
use crate::handover::offer::{self, Offer};
use crate::handover::parcel::Parcel;
use crate::handover::store;
use crate::hosted::aside::aside;
use crate::hosted::changes::Changes;
use crate::hosted::disk::{HostedDisk, HostedState};
use crate::hosted::{Disks, Host, OwnSockets, Room};
use crate::http::interfaces::{Interfaces, Servers};
use crate::http::scrapes::Scrapes;
use crate::process::confine::{self, Confinement, NodeFolders};
use crate::process::signals::{SignalRequest, Signals};
use crate::process::systemd::Manager;
use crate::process::{self, log};
use crate::resize::SizeWatches;
use crate::socket;
use files::StateFiles;
use groups::Groups;
use hosting::DISKS_MAX;
use judging::Next;
use pools::{Pools, taken_cpus};
pub use settings::{NodeSettings, PoolSettings};
use shared::{DESCRIPTORS_OWN, Node};

/// Most disks that are opened at once.
const OPENERS_MAX: usize = 64;
/// How long the service manager waits for disks that are being opened.
const READY_TIME: Duration = Duration::from_secs(10);
/// Longest wait for the folder of state, and the pause between two attempts to lock it.
const STATE_TIME: Duration = Duration::from_secs(5);
const STATE_PAUSE: Duration = Duration::from_millis(5);
/// Longest wait for the end of the node before, if this one is told to end. The guests of disks that it has are served meanwhile.
const GIVER_TIME: Duration = Duration::from_secs(5);

/// Serves the disks of a node until a signal.
pub fn serve_node(settings: &NodeSettings) -> Result<(), Failure> {
    process::started();
    let log = log::start(settings.log)
        .map_err(|error| Failure::run(format!("cannot start the log thread: {error}")))?;
    let descriptors = process::raise_descriptor_limit(0)?;
    // Before a running node is asked for anything.
    pools::check_all(&settings.pools)?;
    Reactor::probe().map_err(Failure::start)?;
    let images = images::find(&settings.images)?;
    let files = StateFiles::open(&settings.state)?;
    let (mut offer, obstacle) = match offer(settings, images.silent.as_deref()) {
        Err(obstacle) if obstacle.is_obstacle() => (None, Some(obstacle)),
        offer => (offer?, None),
    };
    let state = match (&mut offer, &obstacle) {
        (Some(offer), _) => Some(shared_state(&settings.state, offer.parcel.take_files())?),
        (None, None) => Some(lock_state(&settings.state, STATE_TIME)?),
        (None, Some(_)) => None,
    };
    folder::make_run(&settings.run).map_err(|error| {
        let run = settings.run.display();
        Failure::start(format!(
            "cannot make {run}: {error}: give another folder with --run"
        ))
    })?;
    let given = Given {
        images: images.there,
        descriptors,
        state,
        offer,
    };
    let runtime = process::runtime()?;
    match obstacle {
        None => runtime.block_on(control(settings, files, given, &log)),
        Some(obstacle) => {
            runtime.block_on(judge_restart(settings, files, given, &log))?;
            Err(obstacle)
        }
    }
}

/// Locks the folder of state, so that a second node with the same files is refused. One that was killed has it until its last I/O has
/// ended, so it is waited for, at most for so long.
fn lock_state(state: &Path, time: Duration) -> Result<File, Failure> {
    let shown = state.display();
    let folder = File::open(state)
        .map_err(|error| Failure::start(format!("cannot open {shown}: {error}")))?;
    let until = Instant::now() + time;
    let is_taken = || {
        let locked = flock(&folder, FlockOperation::NonBlockingLockExclusive);
        locked == Err(rustix::io::Errno::WOULDBLOCK)
    };
    // The node serves on a file system without locks too.
    while is_taken() {
        if Instant::now() >= until {
            return Err(Failure::start(format!(
                "{shown} is in use by a running node, or by one that has ended and whose disks have not answered yet: end that one, \
                 or give another folder with --state"
            )));
        }
        thread::sleep(STATE_PAUSE);
    }
    Ok(folder)
}

/// Returns the folder that a running node has locked, which has to be this one.
fn shared_state(state: &Path, given: Vec<File>) -> Result<File, Failure> {
    let there = fs::metadata(state).ok();
    let place = |found: &fs::Metadata| (found.dev(), found.ino());
    let is_there = |folder: &File| {
        let found = folder.metadata().ok();
        found.as_ref().map(place) == there.as_ref().map(place)
    };
    given.into_iter().next().filter(is_there).ok_or_else(|| {
        Failure::run(format!(
            "--take-over: the running node goes on: it keeps its disks in another folder than {}",
            state.display()
        ))
    })
}

/// What a node has found before its signals are caught.
struct Given {
    images: Vec<PathBuf>,
    descriptors: u64,
    /// Locked as long as it is open. `None`: another node has it, and goes on.
    state: Option<File>,
    /// What a running node offers besides its disks.
    offer: Option<Offer>,
}

/// From the signals on.
async fn control(
    settings: &NodeSettings,
    files: StateFiles,
    mut given: Given,
    log: &log::Guard,
) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let sockets = given.offer.as_mut().map(|offer| {
        let parcel = &mut offer.parcel;
        [parcel.control.take(), parcel.metrics.take()]
    });
    let (control, metrics) = (Some(&settings.control), settings.metrics.as_ref());
    let mut interfaces = Interfaces::open(control, metrics, sockets.unwrap_or_default())?;
    let manager = Arc::new(Manager::from_environment());
    let inherited = given.offer.as_ref().and_then(|offer| offer.parcel.watchdog);
    let watchdog = manager.watchdog().or(inherited);
    // A confined process cannot take descriptors over by their numbers. A node that runs has what it was left.
    let MergedParcels { parcels, surplus } = match &given.offer {
        Some(_) => MergedParcels::default(),
        None => merge::by_disk(store::take(&manager)),
    };
    let (end_for, mut passed_on) = mpsc::channel(1);
    let node = begin(settings, files, &given, parcels, &manager, end_for, log)?;
    // By threads that are confined.
    merge::close(surplus);
    if given.offer.is_some() {
        node.judge_served(Next::TakesOver).await?;
    }
    let kept = node.restore()?;
    let state = given.state.as_ref();
    let state = state.and_then(|state| state.try_clone().ok());
    let host = Arc::new(Host {
        disks: node.disks.clone(),
        events: node.events.clone(),
        room: Room {
            disks_max: DISKS_MAX,
            descriptors_own: DESCRIPTORS_OWN,
            descriptors_max: given.descriptors,
        },
        sockets: OwnSockets {
            state: state.map(OwnedFd::from),
            ..interfaces.copies()?
        },
        keeps: manager.has_store(),
        watchdog,
        changes: node.changes.clone(),
        control_scrapes: Scrapes::default(),
        metrics_scrapes: Scrapes::default(),
        many: Some(node.clone()),
    });
    manager.watch(watchdog);
    tokio::spawn(tell_when_ready(node.clone(), manager.clone()));
    let shown = node.control.display();
    tracing::info!("the control socket is {shown}; disks that are kept: {kept}");
    let served = host.clone();
    let serve = move || {
        interfaces.own();
        interfaces.serve(&served)
    };
    let (end, servers) = run(&node, &mut signals, &mut passed_on, given.offer, serve).await?;
    finish(end, servers, &node, &manager).await
}

/// Ends a node, and the disks that are left, as the reason asks.
async fn finish(
    end: NodeEnd,
    servers: Option<Servers>,
    node: &Node,
    manager: &Arc<Manager>,
) -> Result<(), Failure> {
    match end {
        NodeEnd::Signal(signal) => {
            match servers {
                // Another process that takes disks over has the sockets, and goes on with them.
                Some(servers) if node.changes.are_passed_on() => servers.leave(),
                servers => drop(servers),
            }
            manager.stopping(node.stop_deadline());
            let why = format!("{signal} received");
            node.stop(&why, Some(manager)).await
        }
        NodeEnd::PassedOn(peer) => {
            servers.into_iter().for_each(Servers::leave);
            manager.follow(peer.pid);
            let why = "another process has all disks that were served";
            node.stop(why, None).await?;
            peer.check_alive()
        }
        // Nothing is left to the manager, whose service is the other node.
        NodeEnd::Kept(why) => {
            let failure = Failure::run(goes_on(&node.control, why));
            node.stop(&failure.to_string(), None).await?;
            Err(failure)
        }
    }
}

/// Makes the node, and confines the process.
fn begin(
    settings: &NodeSettings,
    files: StateFiles,
    given: &Given,
    parcels: Vec<Parcel>,
    manager: &Arc<Manager>,
    end_for: mpsc::Sender<Peer>,
    log: &log::Guard,
) -> Result<Arc<Node>, Failure> {
    let watches = SizeWatches::default();
    watches.open_all();
    if settings.ceph {
        confine::start_ceph(settings.sandbox, false, taken_cpus(&settings.pools))
            .map_err(|error| Failure::start(format!("--ceph: {error}")))?;
    }
    let confinement = confine(settings, &given.images, log)?;
    let pools = Pools::start(&settings.pools, &confinement)?;
    Ok(Arc::new_cyclic(|me| Node {
        me: me.clone(),
        is_ending: AtomicBool::new(false),
        files,
        state: settings.state.clone(),
        pools,
        ceph: settings.ceph,
        run: settings.run.clone(),
        control: settings.control.path.clone(),
        images: given.images.clone(),
        descriptors: given.descriptors,
        watches,
        confinement,
        groups: Groups::default(),
        disks: Arc::new(Disks::default()),
        changes: Changes::default(),
        openers: Arc::new(Semaphore::new(OPENERS_MAX)),
        slow_openers: Arc::new(Semaphore::new(DISKS_MAX)),
        turn: Arc::new(Semaphore::new(1)),
        events: Arc::default(),
        manager: Some(manager.clone()).filter(|manager| manager.has_store()),
        inherits: !parcels.is_empty() || given.offer.is_some(),
        parcels: Mutex::new(parcels),
        takes_over: watch::Sender::new(given.offer.is_some()),
        end_for,
    }))
}

/// Waits for what a running node gives, then serves the interfaces, until the node is to end.
async fn run(
    node: &Node,
    signals: &mut Signals,
    passed_on: &mut mpsc::Receiver<Peer>,
    before: Option<Offer>,
    serve: impl FnOnce() -> Result<Servers, Failure>,
) -> Result<(NodeEnd, Option<Servers>), Failure> {
    let all_given = async {
        match before {
            Some(before) => {
                let waited = aside("take-over", move || Ok(before.await_all()));
                // Without a thread the link ends, and the other node goes on.
                waited.await.unwrap_or_else(|error| Err(error.to_string()))
            }
            None => Ok(None),
        }
    };
    let mut all_given = pin!(all_given);
    let (mut serve, mut servers) = (Some(serve), None);
    // To the end: the node before takes the end of the link for the death of this one.
    let mut link = None;
    loop {
        let end = tokio::select! {
            biased;
            request = signals.next() => match request {
                SignalRequest::Stop(signal) if serve.is_some() => {
                    return Ok((told_early(signal, all_given).await, None));
                }
                SignalRequest::Stop(signal) => NodeEnd::Signal(signal),
                SignalRequest::CheckSize => {
                    node.check_sizes().await;
                    continue;
                }
            },
            Some(peer) = passed_on.recv() => NodeEnd::PassedOn(peer),
            given = &mut all_given, if serve.is_some() => {
                match given {
                    Ok(taken) => link = taken,
                    Err(why) => return Ok((NodeEnd::Kept(why), None)),
                }
                node.takes_over.send_replace(false);
                servers = serve.take().map(|serve| serve()).transpose()?;
                node.open_failed_again().await;
                continue;
            }
        };
        if matches!(end, NodeEnd::PassedOn(_)) {
            link.into_iter().for_each(TakenLink::outlive_giver);
        }
        return Ok((end, servers));
    }
}

/// Returns the end of a node that is told to end while it takes over. If the service ends, the node before ends as well, and the manager
/// gets what this one has. If that one goes on, it opens again what it had given, and whatever the manager had of that would keep it from
/// doing so.
async fn told_early(
    signal: &'static str,
    all_given: impl Future<Output = Result<Option<TakenLink>, String>>,
) -> NodeEnd {
    match timeout(GIVER_TIME, all_given).await {
        Ok(Ok(_)) => NodeEnd::Signal(signal),
        Ok(Err(why)) => NodeEnd::Kept(why),
        Err(_) => NodeEnd::Kept(format!("{signal} received")),
    }
}

/// Why a node ends.
enum NodeEnd {
    Signal(&'static str),
    PassedOn(Peer),
    /// The node from which this one was to take over goes on, for this reason.
    Kept(String),
}

/// Returns what a running node offers besides its disks, if they are to be taken over and one runs. `silent`: a folder of images whose
/// server does not answer. Disks in it cannot be judged and would be lost, so the node that serves them goes on.
fn offer(settings: &NodeSettings, silent: Option<&str>) -> Result<Option<Offer>, Failure> {
    if !settings.take_over {
        return Ok(None);
    }
    socket::check_groups(Some(&settings.control), settings.metrics.as_ref())?;
    let control = &settings.control.path;
    let offered = offer::ask(control, None);
    if let (Ok(Some(_)) | Err(_), Some(why)) = (&offered, silent) {
        return Err(Failure::run(goes_on(control, why)));
    }
    let offer = offered.map_err(|why| why.failure(goes_on(control, &why)))?;
    if offer.is_none() {
        let shown = control.display();
        tracing::info!("no node runs at {shown}: there is nothing to take over");
    }
    Ok(offer)
}

/// Refuses a node that cannot take over from the one that runs, because of an obstacle there, if it could not serve the disks after a
/// restart either: then nobody is to restart the one that runs.
async fn judge_restart(
    settings: &NodeSettings,
    files: StateFiles,
    given: Given,
    log: &log::Guard,
) -> Result<(), Failure> {
    // The running node has its sockets there, so nothing can be made for a trial.
    let sockets = [Some(&settings.control), settings.metrics.as_ref()];
    for socket in sockets.into_iter().flatten() {
        let judged = socket::judge_place(&socket.path);
        judged.map_err(|why| Failure::run(goes_on(&settings.control.path, why)))?;
    }
    let manager = Arc::new(Manager::from_environment());
    let (end_for, _) = mpsc::channel(1);
    let node = begin(settings, files, &given, Vec::new(), &manager, end_for, log)?;
    node.judge_served(Next::Restarts).await
}

/// Why this node does not serve: the one at the control socket does.
fn goes_on(control: &Path, why: impl fmt::Display) -> String {
    let shown = control.display();
    format!("--take-over: the node at {shown} goes on: {why}")
}

/// Gives up what opening and serving disks does not need.
fn confine(
    settings: &NodeSettings,
    images: &[PathBuf],
    log: &log::Guard,
) -> Result<Confinement, Failure> {
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
        images,
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
    let _ = timeout(READY_TIME, settled).await;
    let is_served = |disk: &&Arc<HostedDisk>| matches!(disk.state(), HostedState::Serving(_));
    let served = all.iter().filter(is_served).count();
    manager.ready(&format!("serving {served} of {} disks", all.len()));
}
