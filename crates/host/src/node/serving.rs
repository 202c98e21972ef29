//! Serving a disk of a node, from the moment when it is open until its image is closed.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use cleave_disk::Disk;
use cleave_sandbox::Role;
use cleave_session::Offload;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

use super::opening::Opened;
use super::shared::Node;
use crate::disk_server::{DiskServer, Naming, Order, Served};
use crate::failure::Failure;
use crate::hosted::disk_host::{Removal, ServerEnd, Work};
use crate::socket::path_lock::{Left, PathLock};
use crate::socket::{self, Door};
use crate::status::DiskStatus;

/// How long the end of a disk waits for its files to be closed. Images of a cluster stop waiting for it after two seconds.
const CLOSE_TIME: Duration = Duration::from_secs(3);
/// Pause between two looks at the syncs of a disk that was given up.
const SYNC_PAUSE: Duration = Duration::from_millis(50);

/// Begins to serve a disk.
pub(super) fn begin(
    node: &Arc<Node>,
    id: &str,
    mut opened: Opened,
    orders: mpsc::Receiver<Order>,
) -> Result<(Arc<DiskStatus>, Work<ServerEnd>), Failure> {
    // Those of its group may have changed while it was opened.
    let config = node.groups.in_force(&opened.service.config);
    opened.service.tuning.limits = config.limits.get().values;
    let group = config.limit_group();
    opened.service.limit_group = group.map(|name| node.groups.shared(name));
    let is_kept = config.persistent.get().0;
    let disk = opened.disk.clone();
    let server = PathLock::copy(opened.lock.as_ref()).and_then(|lock| {
        let takes_over = Some(node.takes_over.subscribe());
        let naming = Naming {
            id: Some(id.to_owned()),
            endpoint: socket::name(&opened.service.endpoint),
            lock,
            events: node.events.clone(),
            manager: node.manager.clone().filter(|_| is_kept),
            until_alone: takes_over.filter(|takes_over| *takes_over.borrow()),
        };
        DiskServer::new(
            opened.service,
            opened.disk,
            &opened.door,
            naming,
            opened.watch,
            // The process is confined already.
            |_, watch| Ok((node.confinement.clone(), watch)),
        )
    });
    let mut server = match server {
        Ok(server) => server,
        Err(failure) => {
            opened.door.close(&Offload::default());
            return Err(failure);
        }
    };
    server.resume(opened.parcel);
    drop(opened.turn);
    let status = server.status();
    let (node, id) = (node.clone(), id.to_owned());
    let ended = async move {
        let end = serve(&node, server, disk, opened.door, opened.lock, orders).await;
        // Containers that have the folder of a disk mounted find the socket there again after a restart.
        if !is_kept {
            node.remove_folder(&id, config.socket_user.as_deref(), Removal::Ended);
        }
        end
    };
    Ok((status, Box::pin(ended)))
}

/// Serves a disk to its end.
async fn serve(
    node: &Arc<Node>,
    mut server: DiskServer,
    disk: Arc<Disk>,
    door: Door,
    lock: Option<PathLock>,
    mut orders: mpsc::Receiver<Order>,
) -> ServerEnd {
    let ended = server.serve(&mut orders, door).await;
    drop(server);
    let passed_back: Work<()> = Box::pin(node.changes.clone().passed_back());
    if let Ok(Served::Given(_)) = ended {
        close(node, disk).await;
        if let Some(lock) = lock {
            lock.leave_to_rings();
        }
        return ServerEnd {
            lost: None,
            back: Some(passed_back),
        };
    }
    // One that is yielded may lose requests too. One that is stopped does not come back, whatever this says.
    let may_come_back = !matches!(ended, Ok(Served::Ended));
    // Before it is noted: one that ends between would leave its line for good.
    let hung = disk.is_syncing().then(|| disk.clone());
    let left = Left::of(&disk, lock.as_ref());
    close(node, disk).await;
    let lost = ended.err().map(|failure| failure.to_string());
    match (lock, &lost) {
        (Some(lock), Some(_)) => drop(tokio::spawn(await_syncs(node.clone(), hung, lock))),
        (Some(lock), None) => lock.end(left),
        (None, _) => {}
    }
    ServerEnd {
        lost,
        back: may_come_back.then_some(passed_back),
    }
}

/// Notes how the syncs ended that were under way when a disk was given up, because this process goes on and learns of it. Whoever opens
/// the disk next at this socket waits for that.
async fn await_syncs(node: Arc<Node>, hung: Option<Arc<Disk>>, lock: PathLock) {
    // Before the first wait, at which the process may end.
    let lock = lock.staying();
    if let Some(disk) = hung {
        while disk.is_syncing() {
            sleep(SYNC_PAUSE).await;
        }
        // The line of a failed one stays, whoever was told: its guest may have ended with the disk.
        if !disk.sync_failed() {
            let _ = Left::of(&disk, Some(&lock));
        }
        close(&node, disk).await;
    }
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
