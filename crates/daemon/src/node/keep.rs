//! A disk of a node from its start to its end: it is opened on a thread of its own, served as a task, and tried again if
//! it cannot be opened.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use cleave_config::DiskConfig;
use cleave_disk::{ContentOrigin, Disk};
use cleave_sandbox::Role;
use cleave_session::Offload;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use super::disks::Node;
use super::folder;
use super::kept::{Kept, State};
use super::open_files::OpenFiles;
use crate::disk_server::{self, DiskServer, Naming, Order};
use crate::failure::Failure;
use crate::path_lock::{Left, PathLock};
use crate::resize::{Watch, Watches};
use crate::service::Service;
use crate::socket::{self, Door};
use crate::source;

/// Pauses between two attempts to open a disk: the first, and the longest.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// How long a disk waits for others that are being opened. One that takes longer is slow, and holds up no others any more.
const OPENER_TIME: Duration = Duration::from_secs(10);
/// How long the end of a disk waits for its files to be closed. Images of a cluster stop waiting for it after two seconds.
const CLOSE_TIME: Duration = Duration::from_secs(3);

/// A disk that is open, with its socket.
struct Opened {
    files: OpenFiles,
    service: Service,
    disk: Arc<Disk>,
    watch: Watch,
    door: Door,
    lock: Option<PathLock>,
}

/// The order that ends a wait.
enum Wanted {
    Stop,
    Start,
}

/// Starts to open and serve a disk. To be called inside the runtime. `written`: the content of its file, if there is one.
pub(super) fn begin(
    node: &Arc<Node>,
    id: &str,
    file: DiskConfig,
    written: Option<DiskConfig>,
) -> Arc<Kept> {
    let needs = node
        .service(id, &file)
        .map(|service| service.descriptors_in_node());
    let (kept, orders) = Kept::new(id, file, written, needs.unwrap_or_default());
    let keeper = tokio::spawn(keep(node.clone(), kept.clone(), orders));
    let watched = kept.clone();
    tokio::spawn(async move {
        // A fault of our own is the end of this disk alone.
        if keeper.await.is_err() {
            let why = format!("{}: internal fault, see the log", watched.id);
            watched.enter(State::Ended(Some(why)));
        }
    });
    kept
}

async fn keep(node: Arc<Node>, kept: Arc<Kept>, mut orders: mpsc::Receiver<Order>) {
    let mut pause = PAUSE_MIN;
    loop {
        enter(&node, &kept, State::Opening);
        let opened = tokio::select! {
            biased;
            () = stop(&mut orders) => break,
            opened = open(&node, &kept) => opened,
        };
        match opened.and_then(|opened| start(&node, &kept, opened)) {
            Ok(serving) => {
                let lost = serve(&node, &kept, serving, &mut orders).await;
                // Containers that have the folder of a disk mounted find the socket there again after a restart.
                if !kept.file().persistent.get().0 {
                    node.remove_folder(&kept.id);
                }
                enter(&node, &kept, State::Ended(lost));
                return;
            }
            Err(failure) => fail(&node, &kept, &failure),
        }
        tokio::select! {
            biased;
            wanted = wanted(&mut orders) => match wanted {
                Wanted::Stop => break,
                Wanted::Start => pause = PAUSE_MIN,
            },
            () = tokio::time::sleep(pause) => pause = (pause * 2).min(PAUSE_MAX),
        }
    }
    enter(&node, &kept, State::Ended(None));
}

/// Puts it into another state, and tells of that.
fn enter(node: &Node, kept: &Kept, state: State) {
    let more = match &state {
        State::Opening | State::Ending => Value::Null,
        State::Serving(status) => {
            let size_bytes = status.entry().size_bytes;
            let socket = node.socket(&kept.id).display().to_string();
            json!({"socket": socket, "size_bytes": size_bytes})
        }
        State::Failed(why) => json!({ "error": why }),
        State::Ended(lost) => json!({ "lost": lost }),
    };
    let name = state.name();
    kept.enter(state);
    node.events.tell(&kept.id, name, more);
}

/// Tells why a disk is not served.
fn fail(node: &Node, kept: &Kept, failure: &Failure) {
    tracing::warn!("{}: not served, to be tried again: {failure}", kept.id);
    let why = failure.to_string();
    enter(node, kept, State::Failed(why));
}

/// Waits for an order to stop, or to try again.
async fn wanted(orders: &mut mpsc::Receiver<Order>) -> Wanted {
    loop {
        match orders.recv().await {
            None | Some(Order::Stop(..)) => return Wanted::Stop,
            // Not served, so no frontend is connected.
            Some(Order::StopUnused(reply)) => {
                if reply.send(true).is_ok() {
                    return Wanted::Stop;
                }
            }
            Some(Order::Start) => return Wanted::Start,
            Some(Order::CheckSize(_)) => {}
        }
    }
}

/// Waits for an order to stop.
async fn stop(orders: &mut mpsc::Receiver<Order>) {
    while let Wanted::Start = wanted(orders).await {}
}

/// Opens a disk on a thread of its own. If nobody waits any more, the thread closes what it has opened.
async fn open(node: &Arc<Node>, kept: &Kept) -> Result<Opened, Failure> {
    let opener = tokio::time::timeout(OPENER_TIME, node.openers.clone().acquire_owned());
    let Ok(Ok(opener)) = opener.await else {
        return Err(Failure::run(
            "too many other disks are being opened and do not answer: see why their storage hangs",
        ));
    };
    let opener = Opener::new(opener, node);
    let (reply, mut opened) = oneshot::channel();
    let folder = node.run.join(&kept.id);
    let file = kept.file();
    let mut service = node.service(&kept.id, &file).map_err(Failure::input)?;
    let (comes_back, was_opened) = (kept.comes_back, kept.was_opened());
    let thread = thread::Builder::new().name("open".to_owned());
    let runtime = Handle::current();
    let held = opener.0.clone();
    let slow = source::slow(&service.disk);
    let (node, id) = (node.clone(), kept.id.clone());
    let spawned = thread.spawn(move || {
        let _opener = held;
        let _inside = runtime.enter();
        if let Some(path) = node.out_of_reach(&service) {
            let _ = reply.send(Err(out_of_reach(&path)));
            return;
        }
        // Waiting for the lock would not help.
        let files = OpenFiles::of(&service.disk);
        if let Some((path, user)) = node.in_use(&id, service.open.read_only, &files) {
            let _ = reply.send(Err(in_use(&path, &user)));
            return;
        }
        let is_persistent = file.persistent.get().0;
        let is_noted = is_persistent && comes_back && node.files.was_opened(&id, &file.disk);
        if was_opened || is_noted {
            service.open.content = ContentOrigin::Guest;
        }
        let is_wanted = || !reply.is_closed();
        let opened = open_here(folder, (service, files), &file, &node.watches, &is_wanted);
        // Not of a disk that was deleted meanwhile.
        if is_persistent && !is_noted && opened.is_ok() && !reply.is_closed() {
            node.files.note_opened(&id, &file.disk);
        }
        let _ = reply.send(opened);
    });
    spawned.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
    let failed = |_| Err(Failure::run("internal fault while opening, see the log"));
    let in_time = tokio::time::timeout(OPENER_TIME, &mut opened).await;
    let opened = match in_time {
        Ok(opened) => opened,
        Err(_) => {
            tracing::warn!("{}: {slow}", kept.id);
            drop(opener);
            opened.await
        }
    };
    let opened = opened.unwrap_or_else(failed)?;
    kept.set_opened();
    Ok(opened)
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

fn out_of_reach(path: &Path) -> Failure {
    Failure::input(format!(
        "{} is in no folder of --images, so this node cannot open it: move it, or start the node with its folder",
        path.display()
    ))
}

fn in_use(path: &Path, user: &str) -> Failure {
    Failure::input(format!(
        "disk {} is in use by disk {user} of this node; remove that one, or serve both read-only",
        path.display()
    ))
}

fn open_here(
    folder: PathBuf,
    (mut service, files): (Service, OpenFiles),
    file: &DiskConfig,
    watches: &Watches,
    is_wanted: &dyn Fn() -> bool,
) -> Result<Opened, Failure> {
    let mode = file.socket_mode.get().bits();
    let group = file.socket_group.as_deref();
    let group = group.map(|group| socket::group_number("socket_group", group));
    let group = folder::make(&folder, group.transpose()?, mode)?;
    let path = folder.join("disk.sock");
    let lock = PathLock::take_while(&path, is_wanted)?;
    let disk = disk_server::open(&mut service, lock.as_ref())?;
    let watch = watches.watch(&disk);
    let door = socket::listen_for_group(&path, mode, group)?;
    Ok(Opened {
        files,
        service,
        disk,
        watch,
        door: Door::Listening(door),
        lock,
    })
}

/// A disk that is served.
struct Serving {
    server: DiskServer,
    disk: Arc<Disk>,
    door: Door,
    lock: Option<PathLock>,
}

fn start(node: &Node, kept: &Arc<Kept>, mut opened: Opened) -> Result<Serving, Failure> {
    kept.set_files(std::mem::take(&mut opened.files));
    let file = kept.file();
    let group = file.limit_group();
    // Those of its group may have changed while it was opened.
    opened.service.tuning.limits = file.limits.get().values;
    let is_used = |other: &Arc<Kept>| matches!(other.state(), State::Serving(_) | State::Ending);
    let has_group = node.others_of_group(kept).iter().any(is_used);
    opened.service.limit_group = group.map(|name| match has_group {
        true => node.groups.find(name),
        false => node.groups.begin(name),
    });
    let naming = Naming {
        id: Some(kept.id.clone()),
        endpoint: socket::name(&opened.service.endpoint),
        is_locked: opened.lock.is_some(),
        events: node.events.clone(),
    };
    let disk = opened.disk.clone();
    let server = DiskServer::new(
        opened.service,
        opened.disk,
        &opened.door,
        naming,
        opened.watch,
        // The process is confined already.
        |_, watch| Ok((node.confinement.clone(), watch)),
    )?;
    Ok(Serving {
        server,
        disk,
        door: opened.door,
        lock: opened.lock,
    })
}

/// Serves it to its end. Returns the requests that were left or lost, if there were any.
async fn serve(
    node: &Node,
    kept: &Kept,
    serving: Serving,
    orders: &mut mpsc::Receiver<Order>,
) -> Option<String> {
    let Serving {
        mut server,
        disk,
        door,
        lock,
    } = serving;
    enter(node, kept, State::Serving(server.status()));
    let is_ending = || enter(node, kept, State::Ending);
    let ended = server.serve(orders, door, is_ending).await;
    // The timer of a quiet would keep the image open until its time is over.
    server.status().forget_quiet();
    drop(server);
    let left = Left::of(&disk, lock.as_ref());
    close(node, disk).await;
    let lost = ended.err().map(|failure| failure.to_string());
    match (lock, &lost) {
        (Some(lock), Some(_)) => lock.leave_to_rings(),
        (Some(lock), None) => lock.end(left),
        (None, _) => {}
    }
    lost
}

/// Closes a disk on a thread of its own, because closing a file may wait for its server. The threads that close descriptors of
/// frontends are few: the disks of one lost server would take all of them, and no frontend could leave or come any more. The disk is
/// waited for, so that whoever hears of its end can use its file, device or image at once: the locks of images would otherwise be
/// held until the cluster counts this client as dead.
async fn close(node: &Node, disk: Arc<Disk>) {
    let (held, closed) = oneshot::channel::<()>();
    // Dropped in this order, by the thread.
    let open = Arc::new(Mutex::new(Some((disk, held))));
    let (taken, confinement) = (open.clone(), node.confinement.clone());
    let thread = thread::Builder::new().name("close".to_owned());
    let spawned = thread.spawn(move || {
        confinement.thread(Role::Offload);
        let open = taken.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(open);
    });
    if spawned.is_err() {
        Offload::default().close(open);
    }
    let _ = timeout(CLOSE_TIME, closed).await;
}
