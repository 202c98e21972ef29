//! All disks of a node, and what they have in common.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cleave_config::{DiskConfig, Names};
use cleave_disk::DiskSpec;
use tokio::sync::Semaphore;

use super::files::Files;
use super::groups::Groups;
use super::kept::{Kept, State};
use super::open_files::OpenFiles;
use super::pools::Pools;
use crate::confine::Confinement;
use crate::control::CONNECTIONS_MAX;
use crate::disk_server::Order;
use crate::events::Events;
use crate::failure::Failure;
use crate::path_lock::PathLock;
use crate::resize::Watches;
use crate::service::Service;
use crate::socket::{Endpoint, NEW_SOCKET};

/// Most disks of a node.
pub(super) const DISKS_MAX: usize = 1024;
/// Descriptors of the process itself: the connections of the control socket and of that for metrics, and 224 for all else.
const DESCRIPTORS_OWN: u64 = 224 + 2 * CONNECTIONS_MAX as u64;

/// All disks, and what they have in common.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) files: Files,
    pub(super) run: PathBuf,
    pub(super) control: PathBuf,
    /// Folders of images, without links; none: everywhere.
    pub(super) images: Vec<PathBuf>,
    pub(super) pools: Pools,
    pub(super) ceph: bool,
    /// Most descriptors that the process may have.
    pub(super) descriptors: u64,
    pub(super) confinement: Confinement,
    pub(super) groups: Groups,
    pub(super) watches: Watches,
    pub(super) disks: Mutex<BTreeMap<String, Arc<Kept>>>,
    /// Held while a disk is changed and its file written.
    pub(super) changing: tokio::sync::Mutex<()>,
    /// One for each thread that may open a disk.
    pub(super) openers: Arc<Semaphore>,
    /// The same for threads whose storage does not answer: they must not keep other disks away.
    pub(super) slow_openers: Arc<Semaphore>,
    pub(super) events: Arc<Events>,
}

impl Node {
    /// Stops all disks side by side, and tells of each that left or lost requests.
    pub(super) async fn stop(&self, signal: &str) -> Result<(), Failure> {
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
    pub(super) fn stop_deadline(&self) -> Duration {
        let deadlines = self.all().into_iter().map(|kept| {
            let seconds = kept.file().stop_deadline.get().get();
            Duration::from_secs(seconds.into())
        });
        deadlines.max().unwrap_or_default()
    }

    pub(super) fn check_sizes(&self) {
        let all = self.all();
        tracing::info!("SIGHUP received: checking the sizes of {} disks", all.len());
        for kept in all {
            kept.order(Order::CheckSize(None));
        }
    }

    pub(super) fn all(&self) -> Vec<Arc<Kept>> {
        self.lock().values().cloned().collect()
    }

    /// The other disks with which this one shares its limits.
    pub(super) fn others_of_group(&self, kept: &Arc<Kept>) -> Vec<Arc<Kept>> {
        let file = kept.file();
        let group = file.limit_group();
        let is_other = |other: &Arc<Kept>| {
            group.is_some() && other.file().limit_group() == group && !Arc::ptr_eq(other, kept)
        };
        self.all().into_iter().filter(is_other).collect()
    }

    /// Whether this very disk is there, and is to stay.
    pub(super) fn stays(&self, kept: &Arc<Kept>) -> bool {
        let is_there = self
            .find(&kept.id)
            .is_some_and(|now| Arc::ptr_eq(&now, kept));
        is_there && !kept.is_leaving()
    }

    pub(super) fn find(&self, id: &str) -> Option<Arc<Kept>> {
        self.lock().get(id).cloned()
    }

    /// Takes this very disk out, and the folder of its socket.
    pub(super) fn forget(&self, kept: &Arc<Kept>) {
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
    pub(super) fn give_up(&self, kept: &Arc<Kept>, before: Option<Arc<Kept>>) {
        self.forget(kept);
        if let Some(before) = before.filter(|before| before.has_file()) {
            self.lock().entry(before.id.clone()).or_insert(before);
        }
    }

    /// Removes the folder of a socket, unless a lock is held in it, or tells of an NBD disk whose daemon did not end in order. A node
    /// that was killed leaves a socket and a lock behind.
    pub(super) fn remove_folder(&self, id: &str) {
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

    pub(super) fn socket(&self, id: &str) -> PathBuf {
        self.run.join(id).join("disk.sock")
    }

    /// The service of a disk, or what is wrong with it.
    pub(super) fn service(&self, id: &str, file: &DiskConfig) -> Result<Service, String> {
        let endpoint = Endpoint::Path(self.socket(id));
        let service = Service::new(file.clone(), endpoint, Names::Fields);
        let mut service = service.map_err(|failure| failure.to_string())?;
        if !self.ceph && service.disk.needs_ceph() {
            return Err(format!(
                "disk: {} needs librbd, which only a node with --ceph loads: start the node with --ceph",
                service.disk.line()
            ));
        }
        self.pools.assign(&mut service)?;
        Ok(service)
    }

    /// The file of a disk that the folders of images keep out of reach.
    pub(super) fn out_of_reach(&self, service: &Service) -> Option<PathBuf> {
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
    pub(super) fn in_use(
        &self,
        id: &str,
        is_read_only: bool,
        own: &OpenFiles,
    ) -> Option<(PathBuf, String)> {
        let others = self.all().into_iter();
        let mut others = others.filter(|other| other.id != id && other.is_serving());
        others.find_map(|other| {
            let is_shared = is_read_only && other.file().read_only;
            let path = own.shared_with(&other.files()).filter(|_| !is_shared)?;
            Some((path.to_owned(), other.id.clone()))
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Kept>>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Descriptors that the process may come to need with these disks.
pub(super) fn descriptors_needed(disks: &BTreeMap<String, Arc<Kept>>) -> u64 {
    DESCRIPTORS_OWN + disks.values().map(|kept| kept.descriptors).sum::<u64>()
}
