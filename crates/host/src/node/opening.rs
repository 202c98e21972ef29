//! Opening the disks of a node, each on a thread of its own, so that one whose storage hangs holds up no other.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use cleave_config::DiskConfig;
use cleave_disk::{ContentOrigin, Disk, DiskSpec};
use cleave_session::Offloaded;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::folder::{self, FolderAccess};
use super::shared::{LeftDisk, Node, keeps};
use crate::disk_server;
use crate::failure::Failure;
use crate::handover::merge;
use crate::handover::offer::Offer;
use crate::handover::parcel::Parcel;
use crate::hosted::aside::aside;
use crate::hosted::disk::HostedState;
use crate::hosted::disk_host::Past;
use crate::hosted::open_files::OpenFiles;
use crate::resize::Watch;
use crate::service::Service;
use crate::socket::path_lock::PathLock;
use crate::socket::{self, Door, FileOwner, Knocking};
use crate::source;

/// How long a disk waits for others that are being opened. One that takes longer is slow, and holds up no others any more.
const OPENER_TIME: Duration = Duration::from_secs(10);

/// A disk that is open, with its socket.
pub(super) struct Opened {
    pub(super) service: Service,
    pub(super) disk: Arc<Disk>,
    pub(super) watch: Watch,
    pub(super) door: Door,
    pub(super) lock: Option<PathLock>,
    /// The rest of the parcel of the process before, such as its sessions.
    pub(super) parcel: Parcel,
    /// Held while the disk is taken over, until it is served again.
    pub(super) turn: Option<OwnedSemaphorePermit>,
}

/// Opens a disk on a thread of its own. If nobody waits any more, the thread closes what it has opened.
pub(super) async fn open(
    node: &Arc<Node>,
    id: &str,
    config: DiskConfig,
    past: Past,
    left: LeftDisk,
) -> Result<(Opened, OpenFiles), Failure> {
    if let Err(failure) = find_limits(node, &config).await {
        left.stay();
        return Err(failure);
    }
    let opener = tokio::time::timeout(OPENER_TIME, node.openers.clone().acquire_owned());
    let Ok(Ok(opener)) = opener.await else {
        return Err(Failure::run(
            "too many other disks are being opened and do not answer: see why their storage hangs",
        ));
    };
    let opener = Opener::new(opener, node);
    let (reply, mut opened) = oneshot::channel();
    // Dropped when the disk has been taken, or is not waited for any more.
    let (_waits, until_taken) = std::sync::mpsc::channel::<()>();
    let slot = Arc::new(Slot::default());
    let filled = slot.clone();
    let service = node.service(id, &config).map_err(Failure::input)?;
    let thread = thread::Builder::new().name("open".to_owned());
    let runtime = Handle::current();
    let held = opener.0.clone();
    let slow = source::slow(&service.disk);
    let (opening, name) = (node.clone(), id.to_owned());
    let spawned = thread.spawn(move || {
        let _opener = held;
        let _inside = runtime.enter();
        let is_wanted = || !reply.is_closed();
        let opened = examine_and_open(&opening, &name, service, &config, past, &is_wanted);
        let is_taken = match opened {
            Err(failure) => reply.send(Err(failure)).is_ok(),
            Ok(opened) => {
                *lock_slot(&filled) = Some(opened);
                let _ = reply.send(Ok(()));
                // Until it is taken, or nobody waits for it any more. Then it is closed here, which may take long.
                let _ = until_taken.recv();
                let untaken = lock_slot(&filled).take();
                untaken.is_none()
            }
        };
        if !is_taken {
            // On the thread that adds disks, so that no new one of that name begins meanwhile.
            runtime.spawn(async move { opening.remove_folder_again(&name, &config, past) });
        }
    });
    spawned.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
    let fault = || Failure::run("internal fault while opening, see the log");
    let in_time = tokio::time::timeout(OPENER_TIME, &mut opened).await;
    let opened = match in_time {
        Ok(opened) => opened,
        Err(_) => {
            tracing::warn!("{id}: {slow}");
            drop(opener);
            opened.await
        }
    };
    opened.unwrap_or_else(|_| Err(fault()))?;
    let (mut opened, files) = lock_slot(&slot).take().ok_or_else(fault)?;
    if let Some(left) = node.take_parcel(id) {
        opened.parcel = left;
        if disk_server::is_another(&opened.service, &opened.disk, &opened.parcel) {
            opened.parcel.sessions = Offloaded::default();
        }
    }
    Ok((opened, files))
}

/// Finds the limits of the group of a disk, without which it is not opened.
async fn find_limits(node: &Arc<Node>, config: &DiskConfig) -> Result<(), Failure> {
    if node.groups.missing(config).is_none() {
        return Ok(());
    }
    let (node, config) = (node.clone(), config.clone());
    let found = aside("state", move || Ok(node.groups.find(&node.files, &config)));
    let found = found.await.unwrap_or_else(|error| Err(error.to_string()));
    found.map_err(Failure::start)
}

/// Opens a disk that the node can have.
fn examine_and_open(
    node: &Node,
    name: &str,
    mut service: Service,
    config: &DiskConfig,
    past: Past,
    is_wanted: &dyn Fn() -> bool,
) -> Result<(Opened, OpenFiles), Failure> {
    let files = OpenFiles::of(&service.disk);
    check_files(node, name, &service, &files)?;
    let offer = node.offered(name, &service)?;
    let is_left = node.left(name, |parcel| parcel.disk.is_of(&service));
    if is_left == Some(false) {
        merge::close(node.take_parcel(name).into_iter().collect());
    }
    let is_persistent = config.persistent.get().0;
    let is_noted =
        is_persistent && past == Past::CameBack && node.files.was_opened(name, &config.disk);
    if past == Past::WasOpen || is_noted || is_left == Some(true) || offer.is_some() {
        service.open.content = ContentOrigin::Guest;
    }
    let folder = node.run.join(name);
    let opened = match offer {
        Some(offer) => take_here(node, &folder, service, offer)?,
        None => open_here(node, name, &folder, service, config, is_wanted)?,
    };
    // Not of a disk that was deleted meanwhile.
    if is_persistent && !is_noted && is_wanted() {
        node.files.note_opened(name, &config.disk);
    }
    Ok((opened, files))
}

/// Where an opened disk waits to be taken.
type Slot = Mutex<Option<(Opened, OpenFiles)>>;

fn lock_slot(slot: &Slot) -> MutexGuard<'_, Option<(Opened, OpenFiles)>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Refuses files for which waiting for their locks would not help.
fn check_files(node: &Node, id: &str, service: &Service, files: &OpenFiles) -> Result<(), Failure> {
    if let Some(path) = out_of_reach(&node.images, service) {
        return Err(refuse_out_of_reach(&path));
    }
    match in_use(node, id, service.open.read_only, files) {
        Some((path, user)) => Err(refuse_in_use(&path, &user)),
        None => Ok(()),
    }
}

/// Returns the file of a disk that the folders of images keep out of reach. `images`: none means that all files can be reached.
pub(super) fn out_of_reach(images: &[PathBuf], service: &Service) -> Option<PathBuf> {
    if images.is_empty() {
        return None;
    }
    let is_outside = |path: &&Path| match path.canonicalize() {
        Ok(file) => !images.iter().any(|folder| file.starts_with(folder)),
        // One that is not there is for opening to judge. One that is there all the same has no name: a link in `/proc` leads to it, to
        // a guest's memory for one.
        Err(_) => path.metadata().is_ok(),
    };
    let mut files = service.disk.specs().iter().filter_map(DiskSpec::path);
    files.find(is_outside).map(Path::to_owned)
}

/// Finds another disk of this node that has one of these files open, and returns the file's path and the name of that disk. Two
/// disks that only read may share a file.
fn in_use(node: &Node, id: &str, is_read_only: bool, own: &OpenFiles) -> Option<(PathBuf, String)> {
    let others = node.disks.all().into_iter();
    let mut others = others.filter(|other| other.id != id);
    others.find_map(|other| {
        let shown = other.shown();
        let is_shared = is_read_only && shown.config.read_only;
        let is_open = matches!(shown.state, HostedState::Serving(_));
        let path = own.shared_with(&shown.files);
        let path = path.filter(|_| is_open && !is_shared)?;
        Some((path.to_owned(), other.id.clone()))
    })
}

/// The place of a thread that opens a disk, among those of quick disks. When nobody waits for the thread any more, because it is slow
/// or the disk is to end, it takes one of the places for slow disks, for as long as it hangs.
struct Opener(Arc<Mutex<Option<OwnedSemaphorePermit>>>, Arc<Semaphore>);

impl Opener {
    fn new(place: OwnedSemaphorePermit, node: &Node) -> Opener {
        let place = Arc::new(Mutex::new(Some(place)));
        Opener(place, node.slow_openers.clone())
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        if let Ok(slow) = self.1.clone().try_acquire_owned() {
            let mut place = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            *place = Some(slow);
        }
    }
}

pub(super) fn refuse_out_of_reach(path: &Path) -> Failure {
    Failure::input(format!(
        "{} is in no folder of --images that was there when this node started, so it cannot open it: move it, or start the node \
         with its folder",
        path.display()
    ))
}

fn refuse_in_use(path: &Path, user: &str) -> Failure {
    Failure::input(format!(
        "disk {} is in use by disk {user} of this node; remove that one, or serve both read-only",
        path.display()
    ))
}

/// Opens a disk with what the process before has left of it, of which it takes what it needs.
fn open_here(
    node: &Node,
    name: &str,
    folder: &Path,
    mut service: Service,
    config: &DiskConfig,
    is_wanted: &dyn Fn() -> bool,
) -> Result<Opened, Failure> {
    let mode = config.socket_mode.get().bits();
    let group = config.socket_group.as_deref();
    let group = group.map(|group| socket::group_number("socket_group", group));
    let user = config.socket_user.as_deref();
    let user = user.map(|user| socket::user_number("socket_user", user));
    let (user, group) = (user.transpose()?, group.transpose()?);
    let entry = entry_of(mode, user);
    folder::make(folder, entry)?;
    let path = folder.join("disk.sock");
    let lock = if node.left(name, |left| left.has_listener()) == Some(true) {
        PathLock::take_passed(&path, is_wanted)?
    } else {
        let lock = PathLock::take_while(&path, user, is_wanted)?;
        // The service manager may listen there for a unit that does not run, which has no lock.
        socket::refuse_served(&path, knocking(lock.as_ref(), user))?;
        lock
    };
    let group = folder::give(folder, group, entry)?;
    let files = node.left(name, Parcel::take_files).unwrap_or_default();
    let disk = disk_server::open(&mut service, lock.as_ref(), files)?;
    let watch = node.watches.watch(&disk);
    let listener = node.left(name, |left| left.listener.pop()).flatten();
    let knocking = knocking(lock.as_ref(), user);
    let door = socket::listen_for(&path, mode, user, group, listener, knocking)?;
    Ok(Opened {
        service,
        disk,
        watch,
        door: Door::Listening(door),
        lock,
        parcel: Parcel::default(),
        turn: None,
    })
}

/// Returns how to find out whether a program listens on the socket of a disk. Without the lock its file may be that of a running node.
fn knocking(lock: Option<&PathLock>, given_to: Option<u32>) -> Knocking {
    match lock {
        Some(_) => Knocking::OnOwn { given_to },
        None => Knocking::AsItIs,
    }
}

/// Takes a disk over from a node that serves it until then.
fn take_here(
    node: &Node,
    folder: &Path,
    mut service: Service,
    mut offer: Offer,
) -> Result<Opened, Failure> {
    let path = folder.join("disk.sock");
    // One that hangs holds the others up for no longer than that.
    let turn = tokio::time::timeout(OPENER_TIME, node.turn.clone().acquire_owned());
    let turn = Handle::current().block_on(turn);
    let lock = PathLock::of_running(&path);
    let files = offer.parcel.take_files();
    let disk = disk_server::open_offered(&mut service, lock.as_ref(), files)?;
    let watch = node.watches.watch(&disk);
    let mut door = socket::shared_door(&path, offer.parcel.listener.pop())?;
    let (parcel, _) = offer.take(&disk, lock.as_ref()).map_err(keeps)?;
    door.set_owner(FileOwner::Us);
    Ok(Opened {
        service,
        disk,
        watch,
        door,
        lock,
        parcel,
        turn: turn.ok().and_then(Result::ok),
    })
}

/// Returns who may enter the folder of a socket: it is of use only to users that can reach it.
fn entry_of(socket_mode: u32, user: Option<u32>) -> FolderAccess {
    match (socket_mode & 0o002, user) {
        (0, None) => FolderAccess::Group,
        // The user need not be in the group. Others that enter find a socket that they cannot open.
        (0, Some(_)) => FolderAccess::All,
        _ => FolderAccess::AllAndLook,
    }
}
