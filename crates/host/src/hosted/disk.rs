//! A disk of a host as its requests see it: what it is to be, its state, and the inbox of the one task that changes either.

use std::sync::Arc;

use cleave_api::{DiskState, ProblemKind};
use cleave_config::{Change, DiskConfig};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot, watch};

use super::generation::{self, Condition};
use super::open_files::OpenFiles;
use crate::disk_server::{Order, SizeAsker};
use crate::problem::Refusal;
use crate::process::systemd::Manager;
use crate::status::DiskStatus;

/// Requests that may wait for a disk. More wait until there is room.
const INBOX_MAX: usize = 64;

/// A disk of a host: the sending end of its inbox, and what its task shows of it.
#[derive(Debug)]
pub(crate) struct HostedDisk {
    pub(crate) id: String,
    /// The socket of the frontends, as it is shown.
    pub(crate) socket: String,
    inbox: mpsc::Sender<DiskRequest>,
    shown: watch::Receiver<HostedStatus>,
}

/// Where the result of a request goes.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, Refusal>>;

/// Where the result of a request comes from.
pub(crate) type FutureReply<T> = oneshot::Receiver<Result<T, Refusal>>;

/// A request to the task of a disk.
#[derive(Debug)]
pub(crate) enum DiskRequest {
    /// Be as this description says.
    Put(Condition, Box<DiskConfig>, Reply<Placed>),
    Change(Condition, Box<Change>, Reply<()>),
    /// Open the disk at once, if it waits to be tried again.
    Start(Reply<()>),
    /// Check the size of the disk, and tell the result to the one that asked, if there is one.
    CheckSize(Option<SizeAsker>),
    /// End, and have no file of it left. The result is the fate of requests that were in flight, if they did not end.
    Delete(Condition, DeleteMode, Reply<Option<String>>),
    /// End, for this reason, and come back with the next host.
    Stop(String),
    /// End for this reason, and leave the frontends to the next process.
    HandOver(String, Arc<Manager>),
    /// Pass an order on to the server of the disk. One that it does not take is dropped.
    Forward(Order),
}

/// How a PUT found the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placed {
    New,
    /// There was one, and it is as the description says now.
    There,
    /// The disk is kept, and its storage has not answered yet.
    Opening,
}

/// How a disk in use is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeleteMode {
    /// Refused while a frontend is connected.
    Safe,
    /// Requests in flight are finished, within the deadline of the disk.
    Drain,
    /// Nothing is waited for.
    Hard,
}

/// The state of a disk, as requests see it. `life.rs` says how one follows another.
#[derive(Debug, Clone)]
pub(crate) enum HostedState {
    Opening,
    Serving(Arc<DiskStatus>),
    Ending,
    /// Why it is not served.
    Failed(String),
    /// The text says which requests were left or lost, or why the disk is still in the list.
    Ended(Option<String>),
}

impl HostedState {
    /// Returns the word for the state.
    pub(crate) fn word(&self) -> DiskState {
        match self {
            HostedState::Opening => DiskState::Opening,
            HostedState::Serving(_) => DiskState::Serving,
            HostedState::Ending => DiskState::Ending,
            HostedState::Failed(_) => DiskState::Failed,
            HostedState::Ended(_) => DiskState::Ended,
        }
    }

    /// Returns what an event says of a change, after which this description is in force.
    pub(crate) fn change_details(&self, config: &DiskConfig) -> Value {
        let mut details = json!({ "generation": generation::of(config) });
        if let HostedState::Serving(status) = self {
            details["tuning"] = serde_json::to_value(status.tuning()).unwrap_or_default();
        }
        details
    }

    /// Returns what an event says of the state, besides its name.
    pub(crate) fn details(&self, socket: &str, config: &DiskConfig) -> Value {
        match self {
            HostedState::Opening => {
                json!({"socket": socket, "name": written_name(config), "serial": written_serial(config)})
            }
            HostedState::Ending => Value::Null,
            HostedState::Serving(status) => {
                json!({"socket": socket, "size_bytes": status.size_bytes()})
            }
            HostedState::Failed(why) => json!({ "error": why }),
            HostedState::Ended(lost) => json!({ "lost": lost }),
        }
    }
}

/// Returns the storage of a disk as it was named; for a stripe its first leg.
pub(crate) fn written_name(config: &DiskConfig) -> String {
    let first = config.disk.first();
    first.map(ToString::to_string).unwrap_or_default()
}

/// Returns the serial number that was given to a disk.
pub(crate) fn written_serial(config: &DiskConfig) -> Option<String> {
    config.serial.written().map(ToString::to_string)
}

/// What a disk is to be, and how far it is.
#[derive(Debug, Clone)]
pub(crate) struct HostedStatus {
    pub(crate) state: HostedState,
    pub(crate) config: DiskConfig,
    /// The files and devices that it had when it was opened.
    pub(crate) files: OpenFiles,
    /// Descriptors that it may come to need.
    pub(crate) descriptors: u64,
    /// True if a frontend that the process before has left waits until it is opened.
    pub(crate) is_awaited: bool,
    /// True once the first attempt to open it is over: it was opened, or could not be.
    pub(crate) is_settled: bool,
}

impl HostedStatus {
    pub(super) fn enter(&mut self, state: HostedState, is_awaited: bool) {
        self.is_awaited = is_awaited;
        self.is_settled |= !matches!(state, HostedState::Opening);
        self.state = state;
    }
}

impl HostedDisk {
    /// Makes the handle of a disk, and the ends of it that its task has.
    pub(crate) fn new(
        id: &str,
        socket: String,
        shown: HostedStatus,
    ) -> (
        Arc<HostedDisk>,
        mpsc::Receiver<DiskRequest>,
        watch::Sender<HostedStatus>,
    ) {
        let (inbox, taken) = mpsc::channel(INBOX_MAX);
        let (show, shown) = watch::channel(shown);
        let disk = HostedDisk {
            id: id.to_owned(),
            socket,
            inbox,
            shown,
        };
        (Arc::new(disk), taken, show)
    }

    /// Asks the task of the disk. `None`: it has ended.
    pub(crate) async fn ask<T>(
        &self,
        request: impl FnOnce(Reply<T>) -> DiskRequest,
    ) -> Option<Result<T, Refusal>> {
        let (reply, answer) = oneshot::channel();
        self.inbox.send(request(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Asks the task of a disk that is to be there.
    pub(crate) async fn ask_present<T>(
        &self,
        request: impl FnOnce(Reply<T>) -> DiskRequest,
    ) -> Result<T, Refusal> {
        let gone = || {
            let why = format!("no disk `{}` here: see the list of disks", self.id);
            Refusal(ProblemKind::NoSuchDisk, why)
        };
        self.ask(request).await.ok_or_else(gone)?
    }

    /// Gives an order whose result nobody waits for.
    pub(crate) async fn order(&self, order: DiskRequest) {
        // A disk that has ended needs none.
        let _ = self.inbox.send(order).await;
    }

    /// Returns true once its task has ended, which takes no more requests.
    pub(crate) fn is_gone(&self) -> bool {
        self.inbox.is_closed()
    }

    /// Waits for the end of its task.
    pub(crate) async fn gone(&self) {
        self.inbox.closed().await;
    }

    pub(crate) fn shown(&self) -> watch::Ref<'_, HostedStatus> {
        self.shown.borrow()
    }

    pub(crate) fn state(&self) -> HostedState {
        self.shown().state.clone()
    }

    /// Waits until its state is one that `is_meant` takes, or its task has ended.
    pub(crate) async fn reaches(&self, is_meant: impl Fn(&HostedState) -> bool) -> HostedState {
        let mut shown = self.shown.clone();
        // An error says that the task has ended: no other state follows.
        let _ = shown.wait_for(|shown| is_meant(&shown.state)).await;
        self.state()
    }
}
