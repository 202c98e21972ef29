//! The disks of a process: the one disk of `cleave serve`, or all that a node has. [`HostedDisk`] is a disk as requests see it, and
//! [`life`] the task behind it.

pub(crate) mod aside;
pub(crate) mod changes;
pub(crate) mod disk;
pub(crate) mod disk_host;
pub(crate) mod generation;
pub(crate) mod life;
pub(crate) mod open_files;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cleave_api::{NodeSetup, ProblemKind};
use cleave_config::DiskConfig;

use crate::events::Events;
use crate::handover::link::Peer;
use crate::http::scrapes::Scrapes;
use crate::problem::Refusal;
use changes::Changes;
use disk::{DiskRequest, FutureReply, HostedDisk, HostedState, Placed};
use generation::Condition;

/// What the HTTP interface has at hand.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) disks: Arc<Disks>,
    pub(crate) events: Arc<Events>,
    pub(crate) room: Room,
    /// True if the service manager keeps disks for the next process.
    pub(crate) keeps: bool,
    /// Longest time between two signs of life that its manager accepts. One that takes over from another, which its manager has not
    /// started, is told by that one.
    pub(crate) watchdog: Option<Duration>,
    pub(crate) sockets: OwnSockets,
    pub(crate) changes: Changes,
    /// The texts of metrics for each socket. Everybody may read those of the second, and must not hold up a reader of the first.
    pub(crate) control_scrapes: Scrapes,
    pub(crate) metrics_scrapes: Scrapes,
    /// `None`: there is one disk, which the command line describes.
    pub(crate) many: Option<Arc<dyn ManyDisks>>,
}

/// Copies of what a process has besides its disks, for one that takes over from it.
#[derive(Debug, Default)]
pub(crate) struct OwnSockets {
    pub(crate) control: Option<OwnedFd>,
    pub(crate) metrics: Option<OwnedFd>,
    /// The locked folder that keeps the disks of a node.
    pub(crate) state: Option<OwnedFd>,
}

/// What the process has room for.
#[derive(Debug)]
pub(crate) struct Room {
    pub(crate) disks_max: usize,
    /// Descriptors that the process may come to need apart from those of its disks.
    pub(crate) descriptors_own: u64,
    /// Most descriptors that it may have.
    pub(crate) descriptors_max: u64,
}

/// What the host of many disks can do.
pub(crate) trait ManyDisks: std::fmt::Debug + Send + Sync {
    /// Begins the life of a disk that is put as it is described here, and adds it to the list.
    fn begin(
        &self,
        id: &str,
        config: &DiskConfig,
    ) -> Result<(Arc<HostedDisk>, FutureReply<Placed>), Refusal>;

    /// Returns a description with the limits that are in force if it shares those of a group.
    fn with_group_limits(&self, config: &DiskConfig) -> DiskConfig;

    /// Ends the host, because another process serves all of its disks.
    fn end_for(&self, peer: Peer);

    /// Returns how the host was started.
    fn setup(&self) -> NodeSetup;

    /// Returns the folders in which a new file may be made for a client.
    fn bounds(&self) -> FileBounds;
}

/// The folders in which a new file may be made for a client.
#[derive(Debug, Default)]
pub(crate) struct FileBounds {
    /// Folders of images, without links; none: everywhere.
    pub(crate) images: Vec<PathBuf>,
    /// The node's own files and sockets, and the options that name their folders. What a guest wrote must not become one of them.
    pub(crate) own: Vec<(PathBuf, &'static str)>,
}

impl FileBounds {
    /// Returns why no file may be made in this folder, whose path has no links; `None`: one may be.
    pub(crate) fn why_not(&self, folder: &Path) -> Option<String> {
        let is_own = |own: &Path| own.canonicalize().is_ok_and(|own| folder.starts_with(own));
        if let Some((_, option)) = self.own.iter().find(|(own, _)| is_own(own)) {
            return Some(format!("it would be among the node's own files ({option})"));
        }
        let is_inside = self.images.iter().any(|images| folder.starts_with(images));
        (!self.images.is_empty() && !is_inside).then(|| {
            "it is in no folder of --images that was there when this node started".to_owned()
        })
    }
}

/// All disks by their ids.
#[derive(Debug, Default)]
pub(crate) struct Disks(Mutex<BTreeMap<String, Arc<HostedDisk>>>);

impl Host {
    pub(crate) fn find(&self, id: &str) -> Result<Arc<HostedDisk>, Refusal> {
        let found = self.disks.find(id).or_else(|| self.only_disk(id));
        found.ok_or_else(|| {
            let why = format!("no disk `{id}` here: see the list of disks");
            Refusal(ProblemKind::NoSuchDisk, why)
        })
    }

    /// Returns the one disk of `cleave serve`, if it goes by this name.
    fn only_disk(&self, name: &str) -> Option<Arc<HostedDisk>> {
        if self.many.is_some() {
            return None;
        }
        let is_called = |disk: &Arc<HostedDisk>| matches!(disk.state(), HostedState::Serving(status) if status.is_called(name));
        self.disks.all().into_iter().find(is_called)
    }

    /// Returns a description with the limits that are in force.
    pub(crate) fn in_force(&self, config: &DiskConfig) -> DiskConfig {
        match &self.many {
            Some(many) => many.with_group_limits(config),
            None => config.clone(),
        }
    }

    /// Has a disk be as it is described, whether or not it is there.
    pub(crate) async fn put(
        &self,
        condition: &Condition,
        id: &str,
        config: &DiskConfig,
    ) -> Result<(Arc<HostedDisk>, Placed), Refusal> {
        loop {
            let found = self.disks.find(id).or_else(|| self.only_disk(id));
            let (disk, answer) = match (found.filter(|disk| !disk.is_gone()), &self.many) {
                (Some(disk), _) => {
                    let config = Box::new(config.clone());
                    let put = |reply| DiskRequest::Put(condition.clone(), config, reply);
                    let answer = disk.ask(put).await;
                    (disk, answer)
                }
                (None, Some(_)) if condition.is_set() => {
                    let why = format!("no disk `{id}` here, and If-Match asks for one");
                    return Err(Refusal(ProblemKind::GenerationDiffers, why));
                }
                (None, Some(many)) => {
                    let (disk, answer) = many.begin(id, config)?;
                    let fault = || {
                        Refusal(
                            ProblemKind::InternalFault,
                            "internal fault, see the log".to_owned(),
                        )
                    };
                    return answer
                        .await
                        .unwrap_or_else(|_| Err(fault()))
                        .map(|placed| (disk, placed));
                }
                (None, None) => {
                    let why = "this process serves one disk only: run `cleave node`";
                    return Err(Refusal(ProblemKind::OneDisk, why.to_owned()));
                }
            };
            // A disk that has ended meanwhile leaves its place to a new one.
            if let Some(answer) = answer {
                return answer.map(|placed| (disk, placed));
            }
        }
    }
}

impl Disks {
    pub(crate) fn all(&self) -> Vec<Arc<HostedDisk>> {
        self.lock().values().cloned().collect()
    }

    pub(crate) fn find(&self, id: &str) -> Option<Arc<HostedDisk>> {
        self.lock().get(id).cloned()
    }

    /// Adds a disk in the place of one of its id.
    pub(crate) fn add(&self, disk: Arc<HostedDisk>) {
        self.lock().insert(disk.id.clone(), disk);
    }

    pub(crate) fn remove(&self, id: &str) {
        self.lock().remove(id);
    }

    /// Returns the disks that are served.
    pub(crate) fn served(&self) -> Vec<Arc<HostedDisk>> {
        let is_served = |state| matches!(state, HostedState::Serving(_) | HostedState::Ending);
        let mut all = self.all();
        all.retain(|disk| is_served(disk.state()));
        all
    }

    /// Returns how many descriptors all disks may come to need.
    pub(crate) fn descriptors(&self) -> u64 {
        self.lock()
            .values()
            .map(|disk| disk.shown().descriptors)
            .sum()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<HostedDisk>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
