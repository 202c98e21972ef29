//! What the disks of a node have in common.

use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cleave_config::{DiskConfig, Names};
use cleave_disk::DiskSpec;
use tokio::sync::{Semaphore, mpsc, watch};

use super::files::StateFiles;
use super::folder;
use super::groups::Groups;
use super::pools::Pools;
use crate::events::Events;
use crate::failure::Failure;
use crate::handover::link::Peer;
use crate::handover::merge;
use crate::handover::offer::{self, Offer};
use crate::handover::parcel::Parcel;
use crate::hosted::Disks;
use crate::hosted::changes::Changes;
use crate::hosted::disk_host::{Past, Removal};
use crate::http::server::CONNECTIONS_MAX;
use crate::process::confine::Confinement;
use crate::process::systemd::Manager;
use crate::resize::SizeWatches;
use crate::service::Service;
use crate::socket::path_lock::PathLock;
use crate::socket::{self, Endpoint, Knocking, NEW_SOCKET};

/// Descriptors of the process itself: the connections of the control socket and of that for metrics, and 224 for all else.
pub(super) const DESCRIPTORS_OWN: u64 = 224 + 2 * CONNECTIONS_MAX as u64;

/// What the disks of a node have in common. A life holds it, and so it needs itself to begin one.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) me: Weak<Node>,
    /// The process is to end: no disk begins any more.
    pub(super) is_ending: AtomicBool,
    pub(super) files: StateFiles,
    pub(super) state: PathBuf,
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
    pub(super) watches: SizeWatches,
    pub(super) disks: Arc<Disks>,
    /// Changes of the disks, and the process that takes them over meanwhile.
    pub(super) changes: Changes,
    /// One for each thread that may open a disk.
    pub(super) openers: Arc<Semaphore>,
    /// One for each thread whose storage does not answer: such threads must not keep other disks away.
    pub(super) slow_openers: Arc<Semaphore>,
    /// For the disk that is being taken over from a node that runs: side by side, the guests of all would wait for the last.
    pub(super) turn: Arc<Semaphore>,
    pub(super) events: Arc<Events>,
    /// The manager that keeps what belongs to disks for the next process.
    pub(super) manager: Option<Arc<Manager>>,
    /// The process before has left disks to this one, or gives them to it.
    pub(super) inherits: bool,
    /// The parcels that it has left, until their disks are open. There is at most one of each disk.
    pub(super) parcels: Mutex<Vec<Parcel>>,
    /// True while a node that runs gives its disks to this one: if this one dies before it has all of them, that one serves them again.
    pub(super) takes_over: watch::Sender<bool>,
    /// Where the process is sent that has taken all disks of this node.
    pub(super) end_for: mpsc::Sender<Peer>,
}

/// Where configurations of Ceph clusters are, which only the host's administrator writes.
const ETC_CEPH: &str = "/etc/ceph";

/// Returns the configuration that a disk names.
fn ceph_conf(spec: &DiskSpec) -> Option<&Path> {
    match spec {
        DiskSpec::Rbd(rbd) => rbd.place.conf.as_deref(),
        _ => None,
    }
}

fn is_in_etc_ceph(conf: &Path) -> bool {
    let mut parts = conf.components();
    conf.starts_with(ETC_CEPH) && !parts.any(|part| part == Component::ParentDir)
}

/// What the process before has left of a disk that is to be opened. It stays with the node meanwhile: if the node ends, it goes on to the
/// next process. Whatever else keeps the disk from being opened, its frontends see the end of their connections.
#[derive(Debug)]
pub(super) struct LeftDisk {
    /// `None`: it stays with the node for the next opening.
    node: Option<Arc<Node>>,
    id: String,
}

impl LeftDisk {
    pub(super) fn of(node: &Arc<Node>, id: &str) -> LeftDisk {
        let (node, id) = (Some(node.clone()), id.to_owned());
        LeftDisk { node, id }
    }

    /// Has its frontends wait for the next opening: this one has not come to the disk.
    pub(super) fn stay(mut self) {
        self.node = None;
    }
}

impl Drop for LeftDisk {
    fn drop(&mut self) {
        let left = self.node.as_ref().map(|node| node.take_parcel(&self.id));
        merge::close(left.flatten().into_iter().collect());
    }
}

/// Why a disk was not taken over.
pub(super) fn keeps(why: String) -> Failure {
    Failure::run(format!("the node that runs keeps it: {why}"))
}

impl Node {
    /// Descriptors that the process may come to need with its disks.
    pub(super) fn descriptors_needed(&self) -> u64 {
        DESCRIPTORS_OWN + self.disks.descriptors()
    }

    /// Returns what a node that runs offers of a disk. `None`: none runs, or it does not serve that disk.
    pub(super) fn offered(&self, id: &str, service: &Service) -> Result<Option<Offer>, Failure> {
        if !*self.takes_over.borrow() {
            return Ok(None);
        }
        let offered = offer::ask(&self.control, Some(id));
        match offered.map_err(|why| keeps(why.to_string()))? {
            Some(offer) if !offer.parcel.disk.is_of(service) => {
                Err(keeps(format!("there it is {}", offer.parcel.disk)))
            }
            offer => Ok(offer),
        }
    }

    /// Looks at what the process before has left of a disk, or takes a part of it.
    pub(super) fn left<T>(&self, id: &str, look: impl FnOnce(&mut Parcel) -> T) -> Option<T> {
        let mut parcels = self.parcels.lock().unwrap_or_else(PoisonError::into_inner);
        let mut own = parcels.iter_mut().filter(|parcel| parcel.disk.id == id);
        own.next().map(look)
    }

    /// Returns what the process before has left of a disk.
    pub(super) fn take_parcel(&self, id: &str) -> Option<Parcel> {
        let mut parcels = self.parcels.lock().unwrap_or_else(PoisonError::into_inner);
        let at = parcels.iter().position(|parcel| parcel.disk.id == id)?;
        Some(parcels.swap_remove(at))
    }

    /// Closes what the process before has left of disks that will not be opened: their frontends see the end of their connections.
    pub(super) fn forget_parcels_but(&self, is_opened: impl Fn(&str) -> bool) {
        let mut parcels = self.parcels.lock().unwrap_or_else(PoisonError::into_inner);
        let (kept, left) = std::mem::take(&mut *parcels)
            .into_iter()
            .partition(|parcel| is_opened(&parcel.disk.id));
        *parcels = kept;
        merge::close(left);
    }

    /// Removes the folder of a socket, unless somebody listens there or a lock is held in it, or it tells of an NBD disk whose daemon did
    /// not end in order or of a guest that has switched its write cache off. A disk that was refused leaves what any daemon that died
    /// tells there. A node that was killed leaves a socket and a lock behind, and the socket may have been given to a user. The service
    /// manager may listen for a unit that does not run, without the lock. What is in a folder of another user is not this node's.
    pub(super) fn remove_folder(&self, id: &str, socket_user: Option<&str>, removal: Removal) {
        let user = socket_user.map(|user| socket::user_number("socket_user", user));
        let given_to = user.and_then(Result::ok);
        let folder = self.run.join(id);
        let is_ours = folder::another_owner(&folder).is_ok_and(|other| other.is_none());
        // Refused, instead of waited for, where another holds it.
        if is_ours && let Ok(Some(lock)) = PathLock::take_at_once(&self.socket_path(id)) {
            for stale in [
                self.socket_path(id),
                self.socket_path(id).with_file_name(NEW_SOCKET),
            ] {
                let _ = socket::make_room(&stale, Knocking::OnOwn { given_to });
            }
            // The unit of that name may start again.
            let is_of_another = removal == Removal::Refused && lock.was_left();
            if !is_of_another && !lock.left_a_server() && !lock.tells_of_cache_off() {
                lock.remove();
            }
        }
        let _ = fs::remove_dir(folder);
    }

    /// Removes the folder of a disk that was deleted while a thread opened it, which had its lock or made the folder anew.
    pub(super) fn remove_folder_again(&self, id: &str, config: &DiskConfig, past: Past) {
        let removal = match past {
            Past::Unknown => Removal::Refused,
            Past::CameBack | Past::WasOpen => Removal::Ended,
        };
        if self.disks.find(id).is_none() {
            self.remove_folder(id, config.socket_user.as_deref(), removal);
        }
    }

    pub(super) fn socket_path(&self, id: &str) -> PathBuf {
        self.run.join(id).join("disk.sock")
    }

    /// The service of a disk, or what is wrong with it.
    pub(super) fn service(&self, id: &str, config: &DiskConfig) -> Result<Service, String> {
        let endpoint = Endpoint::Path(self.socket_path(id));
        let service = Service::new(config.clone(), endpoint, Names::Fields);
        let mut service = service.map_err(|failure| failure.to_string())?;
        let mut confs = service.disk.specs().iter().filter_map(ceph_conf);
        if let Some(conf) = confs.find(|conf| !is_in_etc_ceph(conf)) {
            return Err(format!(
                "disk: {} is not in {ETC_CEPH}: a node takes configurations of clusters from there alone, because Ceph's libraries do \
                 what one says, such as to write logs and to load plugins",
                conf.display()
            ));
        }
        if !self.ceph && service.disk.needs_ceph() {
            return Err(format!(
                "disk: {} needs librbd, which only a node with --ceph loads: start the node with --ceph",
                service.disk.line()
            ));
        }
        self.pools.assign(&mut service)?;
        Ok(service)
    }
}
