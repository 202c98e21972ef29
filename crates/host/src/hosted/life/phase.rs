//! How far a disk is, and what it waits for.

use std::io;
use std::sync::Arc;

use cleave_config::DiskConfig;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use crate::disk_server::Order;
use crate::hosted::disk::DiskRequest;
use crate::hosted::disk_host::{DiskHost, FileFault, OpenResult, ServerEnd, Work};
use crate::problem::Refusal;
use crate::status::DiskStatus;

/// The file of a disk in the state folder.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum KeptFile {
    Absent,
    Holds(Box<DiskConfig>),
    /// There is one that could not be read, or the last work on it failed.
    Unknown,
}

/// How far a disk is.
pub(super) enum LifePhase<H: DiskHost> {
    Opening {
        opened: Work<OpenResult<H>>,
        /// When requests that wait for it are answered nevertheless.
        patience: Instant,
    },
    Serving(Arc<DiskStatus>, RunningServer),
    /// Told to end. Nothing here may hold the disk, whose image is to be closed.
    Ending(RunningServer, Goal),
    /// Another process has it. The work ends if that process leaves before it has all.
    Given(Work<()>),
    /// Why it could not be opened, or its file not be read, and when it is tried again.
    Failed(String, Instant),
    /// Its file says nothing that is a disk, or may not be read.
    Broken(String),
    /// Its file is being removed.
    Removing,
    /// Why its file could not be removed.
    Left(String),
    /// The end of the task.
    Over(Option<String>),
}

/// The server of the disk.
pub(super) struct RunningServer {
    pub(super) orders: mpsc::Sender<Order>,
    pub(super) ended: Work<ServerEnd>,
}

impl RunningServer {
    /// Returns one that ends with this work, whatever it is ordered.
    pub(super) fn until(work: Work<()>) -> RunningServer {
        let (orders, _) = mpsc::channel(1);
        let ended = Box::pin(async {
            work.await;
            ServerEnd::with(None)
        });
        RunningServer { orders, ended }
    }
}

/// The next step when a disk has ended.
pub(super) enum Goal {
    /// The end of the task.
    Stop,
    /// Its file is removed.
    Delete,
    /// The disk is as it was before the PUT that is refused.
    Undo(Refusal),
}

/// The disk as it was before a PUT whose success is not known yet.
pub(super) struct Before {
    pub(super) was: Was,
    /// The description, which stays in its group until the PUT has succeeded.
    pub(super) config: DiskConfig,
    pub(super) came_back: bool,
    /// The description with the limits that its group had, and then has again, before the PUT brought others.
    pub(super) limits: Option<DiskConfig>,
}

pub(super) enum Was {
    Nothing,
    /// The phases of these names, with their reasons.
    Broken(String),
    Left(String),
    Failed(String),
}

/// Something that has happened.
pub(super) enum LifeEvent<H: DiskHost> {
    Asked(Option<DiskRequest>),
    Opened(OpenResult<H>),
    Ended(ServerEnd),
    PassedBack,
    /// A file was read that could not be read before.
    Read(Box<Result<DiskConfig, FileFault>>),
    Kept(io::Result<()>),
    /// A time has come.
    Due,
}

/// Waits for the end of what a disk does at present; forever if it waits itself.
pub(super) async fn progress<H: DiskHost>(phase: &mut LifePhase<H>) -> LifeEvent<H> {
    match phase {
        LifePhase::Opening { opened, .. } => LifeEvent::Opened(opened.await),
        LifePhase::Serving(_, server) | LifePhase::Ending(server, _) => {
            LifeEvent::Ended((&mut server.ended).await)
        }
        LifePhase::Given(back) => {
            back.await;
            LifeEvent::PassedBack
        }
        _ => std::future::pending().await,
    }
}

pub(super) async fn written(
    writing: &mut Option<(KeptFile, Work<io::Result<()>>)>,
) -> io::Result<()> {
    match writing {
        Some((_, work)) => work.await,
        None => std::future::pending().await,
    }
}

/// Waits for work, if there is any.
pub(super) async fn waited_for<T>(work: &mut Option<Work<T>>) -> T {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}

pub(super) async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}
