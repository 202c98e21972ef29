//! `cleave node`: many disks in one process. Each has a socket, a lock, workers and failures of its own; an HTTP interface
//! adds and removes them, and files keep them.

mod api;
mod files;
mod folder;
mod groups;
mod keep;
mod open_files;
mod pools;
mod routes;
mod snapshot;
pub(crate) mod spec;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cleave_disk::DiskSpec;
use cleave_engine::Reactor;
use rustix::fs::{FlockOperation, flock};
use tokio::sync::Semaphore;
use tracing::level_filters::LevelFilter;

use crate::cli::MetricsOptions;
use crate::confine::{self, Confinement, NodeFolders};
use crate::control::{CONNECTIONS_MAX, Server};
use crate::disk_server::Order;
use crate::events::Events;
use crate::failure::Failure;
use crate::log;
use crate::path_lock::PathLock;
use crate::process;
use crate::resize::Watches;
use crate::signals::{SignalRequest, Signals};
use crate::socket::{self, NEW_SOCKET};
use crate::systemd::Manager;
pub(crate) use api::document;
use files::Files;
use groups::Groups;
use keep::{Kept, State};
use open_files::OpenFiles;
pub(crate) use pools::PoolSpec;
use pools::{Pools, taken_cpus};
use spec::DiskFile;

/// Most disks of a node.
const DISKS_MAX: usize = 1024;
/// Longest id.
const ID_CHARS_MAX: usize = 64;
/// Most disks that are opened at once.
const OPENERS_MAX: usize = 64;
/// How long the service manager waits for disks that are being opened.
const READY_TIME: Duration = Duration::from_secs(10);
/// Descriptors of the process itself: the connections of the control socket and of that for metrics, and 224 for all else.
const DESCRIPTORS_OWN: u64 = 224 + 2 * CONNECTIONS_MAX as u64;

/// `cleave node`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeOptions {
    pub(crate) state: PathBuf,
    pub(crate) run: PathBuf,
    pub(crate) control: PathBuf,
    pub(crate) metrics: MetricsOptions,
    /// Folders of images; none: everywhere.
    pub(crate) images: Vec<PathBuf>,
    /// Whether the process is confined.
    pub(crate) sandbox: bool,
    pub(crate) pools: Vec<PoolSpec>,
    /// Whether images of Ceph clusters are served.
    pub(crate) ceph: bool,
    pub(crate) log: LevelFilter,
}

/// All disks, and what they have in common.
#[derive(Debug)]
struct Node {
    files: Files,
    run: PathBuf,
    control: PathBuf,
    /// Folders of images, without links; none: everywhere.
    images: Vec<PathBuf>,
    pools: Pools,
    ceph: bool,
    /// Most descriptors that the process may have.
    descriptors: u64,
    confinement: Confinement,
    groups: Groups,
    watches: Watches,
    disks: Mutex<BTreeMap<String, Arc<Kept>>>,
    /// Held while a disk is changed and its file written.
    changing: tokio::sync::Mutex<()>,
    /// One for each thread that may open a disk.
    openers: Arc<Semaphore>,
    /// The same for threads whose storage does not answer: they must not keep other disks away.
    slow_openers: Arc<Semaphore>,
    events: Arc<Events>,
}

/// Serves until a signal.
pub(crate) fn run(options: &NodeOptions) -> Result<(), Failure> {
    let log = log::start(options.log)
        .map_err(|error| Failure::run(format!("cannot start the log thread: {error}")))?;
    let descriptors = process::raise_descriptor_limit(0)?;
    Reactor::probe().map_err(Failure::input)?;
    let images = images(&options.images)?;
    let files = Files::open(&options.state)?;
    let _state = lock_state(&options.state)?;
    folder::make_run(&options.run).map_err(|error| {
        let run = options.run.display();
        Failure::input(format!(
            "cannot make {run}: {error}: give another folder with --run"
        ))
    })?;
    process::runtime()?.block_on(control(options, files, images, descriptors, &log))
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
        // A file system without locks is no reason not to serve.
        _ => Ok(folder),
    }
}

/// From the signals on.
async fn control(
    options: &NodeOptions,
    files: Files,
    images: Vec<PathBuf>,
    descriptors: u64,
    log: &log::Guard,
) -> Result<(), Failure> {
    let mut signals =
        Signals::catch().map_err(|error| Failure::run(format!("cannot catch signals: {error}")))?;
    let socket = socket::open_private(&options.control)?;
    let metrics = options.metrics.open()?;
    let manager = Arc::new(Manager::from_environment());
    let watches = Watches::default();
    watches.open_all();
    if options.ceph {
        confine::start_ceph(options.sandbox, false, taken_cpus(&options.pools))
            .map_err(|error| Failure::input(format!("--ceph: {error}")))?;
    }
    let confinement = confine(options, log)?;
    let pools = Pools::start(&options.pools, &confinement)?;
    let node = Arc::new(Node {
        files,
        pools,
        ceph: options.ceph,
        run: options.run.clone(),
        control: options.control.clone(),
        images,
        descriptors,
        watches,
        confinement,
        groups: Groups::default(),
        disks: Mutex::default(),
        openers: Arc::new(Semaphore::new(OPENERS_MAX)),
        slow_openers: Arc::new(Semaphore::new(DISKS_MAX)),
        events: Arc::default(),
        changing: tokio::sync::Mutex::default(),
    });
    let kept = node.restore()?;
    let server = Server::start(socket, api::router(node.clone()))?;
    let metrics = metrics.map(|socket| Server::start(socket, api::metrics_router(node.clone())));
    let metrics = metrics.transpose()?;
    manager.watch();
    tokio::spawn(tell_when_ready(node.clone(), manager.clone()));
    let shown = node.control.display();
    tracing::info!("the control socket is {shown}; disks that are kept: {kept}");
    let signal = loop {
        match signals.next().await {
            SignalRequest::Stop(signal) => break signal,
            SignalRequest::CheckSize => node.check_sizes(),
        }
    };
    drop((server, metrics));
    manager.stopping(node.stop_deadline());
    node.stop(signal).await
}

/// Gives up what opening and serving disks does not need.
fn confine(options: &NodeOptions, log: &log::Guard) -> Result<Confinement, Failure> {
    if !options.sandbox {
        tracing::warn!(
            "--sandbox off: whoever takes this node over through a fault of it can do all that its user can"
        );
        return Ok(Confinement::none());
    }
    let folders = NodeFolders {
        own: [&options.state, &options.run],
        control: &options.control,
        metrics: options.metrics.path(),
        images: &options.images,
    };
    Confinement::apply_to_node(&folders, log)
}

/// Tells the service manager that the node is ready: each disk that is kept is served or has failed. One whose storage hangs
/// is not waited for.
async fn tell_when_ready(node: Arc<Node>, manager: Arc<Manager>) {
    let all = node.all();
    let settled = async {
        for kept in &all {
            kept.settled(READY_TIME).await;
        }
    };
    // Ready all the same.
    let _ = tokio::time::timeout(READY_TIME, settled).await;
    let is_served = |kept: &&Arc<Kept>| matches!(kept.state(), State::Serving(_));
    let served = all.iter().filter(is_served).count();
    manager.ready(&format!("serving {served} of {} disks", all.len()));
}

/// The limits of each group: those of its first disk that names any. A node that was killed during a change may have written it
/// for some of the disks only.
fn limits_of_groups<'a>(
    files: impl Iterator<Item = &'a DiskFile>,
) -> BTreeMap<String, BTreeMap<String, u64>> {
    let mut of_groups = BTreeMap::new();
    for file in files {
        let values = file.limit_values();
        if let Some(group) = file.limit_group().filter(|_| !values.is_empty()) {
            of_groups.entry(group.to_owned()).or_insert(values);
        }
    }
    of_groups
}

impl Node {
    /// Starts the disks that are kept; how many there are.
    fn restore(self: &Arc<Node>) -> Result<usize, Failure> {
        let found = self.files.load()?;
        let count = found.len();
        let of_groups = limits_of_groups(found.iter().filter_map(|(_, file)| file.as_ref().ok()));
        for (id, file) in found {
            let kept = match file {
                Ok(written) => {
                    let values = written.limit_group().and_then(|group| of_groups.get(group));
                    let file = values.map_or(written.clone(), |values| written.with_limits(values));
                    Kept::start(self, &id, file, Some(written))
                }
                Err(why) => Kept::unread(&id, why),
            };
            self.lock().insert(id, kept);
        }
        let needed = descriptors_needed(&self.lock());
        if needed > self.descriptors {
            tracing::warn!(
                "the disks that are kept may come to need {needed} open files and {} may be: raise LimitNOFILE=, or some of them \
                 cannot be opened, or not by a guest with many vrings",
                self.descriptors
            );
        }
        Ok(count)
    }

    /// Stops all disks side by side, and tells of each that left or lost requests.
    async fn stop(&self, signal: &str) -> Result<(), Failure> {
        let all: Vec<_> = self.all();
        for kept in &all {
            kept.order(Order::Stop(format!("{signal} received"), None));
        }
        let mut lost = 0;
        for kept in &all {
            if let State::Ended(Some(line)) = kept.ended().await {
                tracing::error!("{line}");
                lost += 1;
            }
        }
        match lost {
            0 => Ok(()),
            1 => Err(Failure::run("a disk did not end in order; see the log")),
            _ => Err(Failure::run(format!(
                "{lost} disks did not end in order; see the log"
            ))),
        }
    }

    /// The longest time for which a disk is waited for.
    fn stop_deadline(&self) -> Duration {
        let all = self.all().into_iter();
        let deadlines = all.filter_map(|kept| {
            let service = self.service(&kept.id, &kept.file());
            service.ok().map(|service| service.stop_deadline)
        });
        deadlines.max().unwrap_or_default()
    }

    fn check_sizes(&self) {
        let all = self.all();
        tracing::info!("SIGHUP received: checking the sizes of {} disks", all.len());
        for kept in all {
            kept.order(Order::CheckSize(None));
        }
    }

    fn all(&self) -> Vec<Arc<Kept>> {
        self.lock().values().cloned().collect()
    }

    /// The other disks with which this one shares its limits.
    fn others_of_group(&self, kept: &Arc<Kept>) -> Vec<Arc<Kept>> {
        let file = kept.file();
        let group = file.limit_group();
        let is_other = |other: &Arc<Kept>| {
            group.is_some() && other.file().limit_group() == group && !Arc::ptr_eq(other, kept)
        };
        self.all().into_iter().filter(is_other).collect()
    }

    /// Whether this very disk is there, and is to stay.
    fn stays(&self, kept: &Arc<Kept>) -> bool {
        let is_there = self
            .find(&kept.id)
            .is_some_and(|now| Arc::ptr_eq(&now, kept));
        is_there && !kept.is_leaving()
    }

    fn find(&self, id: &str) -> Option<Arc<Kept>> {
        self.lock().get(id).cloned()
    }

    /// Takes this very disk out, and the folder of its socket.
    fn forget(&self, kept: &Arc<Kept>) {
        let mut disks = self.lock();
        if disks
            .get(&kept.id)
            .is_some_and(|now| Arc::ptr_eq(now, kept))
        {
            disks.remove(&kept.id);
            self.remove_folder(&kept.id);
        }
    }

    /// Takes out a disk whose addition failed. `before` is the disk in whose place it was; it comes back if its file is still there.
    fn give_up(&self, kept: &Arc<Kept>, before: Option<Arc<Kept>>) {
        self.forget(kept);
        if let Some(before) = before.filter(|before| before.has_file()) {
            self.lock().entry(before.id.clone()).or_insert(before);
        }
    }

    /// Removes the folder of a socket, unless a lock is held in it, or tells of an NBD disk whose daemon did not end in order. A node
    /// that was killed leaves a socket and a lock behind.
    fn remove_folder(&self, id: &str) {
        // Refused, instead of waited for, where another holds it.
        if let Ok(Some(lock)) = PathLock::take_while(&self.socket(id), &|| false) {
            for stale in [self.socket(id), self.socket(id).with_file_name(NEW_SOCKET)] {
                let _ = fs::remove_file(stale);
            }
            if !lock.left_a_server() {
                lock.remove();
            }
        }
        let _ = fs::remove_dir(self.run.join(id));
    }

    fn socket(&self, id: &str) -> PathBuf {
        self.run.join(id).join("disk.sock")
    }

    /// The service of a disk, or what is wrong with it.
    fn service(&self, id: &str, file: &DiskFile) -> Result<crate::service::Service, String> {
        let mut service = file.service(&self.socket(id), &self.control)?;
        if !self.ceph && service.disk.needs_ceph() {
            return Err(format!(
                "disk: {} needs librbd, which only a node with --ceph loads: start the node with --ceph",
                file.disk.join(" ")
            ));
        }
        self.pools.assign(file, &mut service)?;
        Ok(service)
    }

    /// The file of a disk that the folders of images keep out of reach.
    fn out_of_reach(&self, service: &crate::service::Service) -> Option<PathBuf> {
        if self.images.is_empty() {
            return None;
        }
        // One that cannot be found is for opening to judge.
        let is_outside = |path: &&Path| {
            let found = path.canonicalize();
            found.is_ok_and(|file| !self.images.iter().any(|folder| file.starts_with(folder)))
        };
        let mut files = service.disk.specs().iter().filter_map(DiskSpec::path);
        files.find(is_outside).map(Path::to_owned)
    }

    /// Finds another disk of this node that has one of these files open, and returns the file's path and the name of that disk. Two
    /// disks that only read may share a file.
    fn in_use(&self, id: &str, is_read_only: bool, own: &OpenFiles) -> Option<(PathBuf, String)> {
        let others = self.all().into_iter();
        let mut others = others.filter(|other| other.id != id && other.is_serving());
        others.find_map(|other| {
            let is_shared = is_read_only && other.file().read_only == Some(true);
            let path = own.shared_with(&other.files()).filter(|_| !is_shared)?;
            Some((path.to_owned(), other.id.clone()))
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Kept>>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Descriptors that the process may come to need with these disks.
fn descriptors_needed(disks: &BTreeMap<String, Arc<Kept>>) -> u64 {
    DESCRIPTORS_OWN + disks.values().map(|kept| kept.descriptors).sum::<u64>()
}

/// Whether a disk may be called so: it is the name of a folder and a part of a path.
fn is_id(id: &str) -> bool {
    id.len() <= ID_CHARS_MAX
        && id.starts_with(|first: char| first.is_ascii_alphanumeric())
        && id
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::is_id;

    #[test]
    fn an_id_is_the_name_of_a_file() {
        let longest = "a".repeat(64);
        for id in ["d1", "0", "A_b.c-d", &longest] {
            assert!(is_id(id), "{id}");
        }
        for id in [
            "",
            ".",
            "..",
            "-a",
            "_a",
            "a/b",
            "a b",
            "é",
            &(longest + "a"),
        ] {
            assert!(!is_id(id), "{id}");
        }
    }
}
