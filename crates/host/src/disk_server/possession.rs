//! The possession of the disk of a server: the threads that take and release its locks, and the listeners for its changes.

use std::sync::{Arc, OnceLock};
use std::thread;

use cleave_api::EventName;
use cleave_disk::{Disk, OpenOptions};
use cleave_sandbox::Role;
use serde_json::Value;
use tokio::runtime::Handle;

use crate::events::Events;
use crate::possession::{DiskPossession, LockJob};
use crate::process::confine::Confinement;

/// Makes the possession of a disk that was opened with these options. `id`: known when the disk can be shown. To be called
/// inside the runtime.
pub(super) fn of(
    disk: &Arc<Disk>,
    options: &OpenOptions,
    confinement: &Confinement,
    id: Arc<OnceLock<String>>,
    events: Arc<Events>,
) -> Arc<DiskPossession> {
    let tell = move |more: Value| {
        let id = id.get().map_or("", String::as_str);
        events.tell(id, EventName::Possession, more);
    };
    let run = threads(confinement.clone());
    Arc::new(DiskPossession::new(
        disk.clone(),
        options.locking,
        run,
        tell,
    ))
}

/// Starts threads that take and release locks. The control loop does it, because a session may not start a thread of that role.
fn threads(confinement: Confinement) -> impl Fn(LockJob) + Send + Sync {
    let runtime = Handle::current();
    move |job| {
        let confinement = confinement.clone();
        runtime.spawn(async move {
            let thread = thread::Builder::new().name("locks".to_owned());
            // If it cannot be started, the job is dropped, which is noticed where its result is waited for.
            let _ = thread.spawn(move || {
                confinement.thread(Role::Disk);
                job();
            });
        });
    }
}
