//! The interface between the life of a disk and its host, which opens and serves storage, keeps files, and has the list of disks.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use cleave_config::DiskConfig;
use serde_json::Value;
use tokio::sync::mpsc;

use super::disk::HostedState;
use super::open_files::OpenFiles;
use crate::disk_server::Order;
use crate::failure::Failure;
use crate::process::systemd::Manager;
use crate::status::DiskStatus;

/// Work that goes on while requests are handled.
pub(crate) type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A host, as the task of a disk uses it.
pub(crate) trait DiskHost: Send + Sync + 'static {
    /// A disk that is open.
    type Opened: Send;

    /// Checks that the host can have a disk of this description. Returns how many descriptors it may come to need.
    fn judge(&self, id: &str, config: &DiskConfig) -> Result<u64, String>;

    /// Reads the file of a disk again, which could not be read.
    fn read(self: Arc<Self>, id: &str) -> Work<Result<DiskConfig, FileFault>>;

    /// Returns true if the process before has left a frontend of a disk, which the next opening has.
    fn has_frontend_left(&self, id: &str) -> bool;

    /// Opens a disk. If the work is dropped, nothing stays open.
    fn open(self: Arc<Self>, id: &str, config: &DiskConfig, past: Past) -> Work<OpenResult<Self>>;

    /// Has the manager keep what the process before has left of a disk that is not open yet, for the next process. When this returns,
    /// an opening does not have it any more.
    fn leave(self: Arc<Self>, id: &str, manager: Arc<Manager>) -> Work<()>;

    /// Begins to serve a disk. The work ends when the disk does and its image is closed.
    fn serve(
        self: Arc<Self>,
        id: &str,
        opened: Self::Opened,
        orders: mpsc::Receiver<Order>,
    ) -> Result<(Arc<DiskStatus>, Work<ServerEnd>), Failure>;

    /// Makes the file of a disk as this description says, durably; `None`: there is to be none. If a group is named, its file is made
    /// as its limits are; if that fails, the file of the disk is the one before.
    fn keep(
        self: Arc<Self>,
        id: &str,
        file: Option<&DiskConfig>,
        group: Option<&str>,
    ) -> Work<io::Result<()>>;

    /// Removes the file of a disk, durably, and that of its group with the last of its disks.
    fn remove(self: Arc<Self>, id: &str, group: Option<&str>) -> Work<io::Result<()>>;

    /// Returns true if the limits of a group have to be written.
    fn is_group_due(&self, group: &str) -> bool;

    /// Notes that a disk of this description is there, or that it is not any more. A group is there as long as its disks.
    fn joins(&self, config: &DiskConfig);
    fn leaves(&self, config: &DiskConfig);

    /// Returns a description with the limits that are in force if it shares those of a group.
    fn with_group_limits(&self, config: &DiskConfig) -> DiskConfig;

    /// Makes the limits of a description those of its group, and puts them in force for all of its disks.
    /// `id`: the disk that brings them.
    fn set_group_limits(&self, id: &str, config: &DiskConfig);

    /// Does that with limits that a refused disk had changed, and has the file of the group written again if it has others by then.
    fn take_limits_back(self: Arc<Self>, id: &str, config: &DiskConfig);

    /// The socket of the frontends of a disk, as it is shown.
    fn socket(&self, id: &str) -> String;

    /// Tells of a state that a disk of this description has entered.
    fn tell(&self, id: &str, state: &HostedState, config: &DiskConfig);

    /// Tells of a change of a disk.
    fn tell_change(&self, id: &str, details: Value);

    /// Takes a disk out of the list, with the folder of its socket, and what the process before has left of it.
    fn forget(&self, id: &str, removal: Removal);
}

/// How the server of a disk has ended.
pub(crate) struct ServerEnd {
    /// The fate of requests that did not end with it.
    pub(crate) lost: Option<String>,
    /// For a disk that another process has: ends when it is this one's again, if that process leaves.
    pub(crate) back: Option<Work<()>>,
}

impl ServerEnd {
    /// Returns the end of a disk that no other process has.
    pub(crate) fn with(lost: Option<String>) -> ServerEnd {
        ServerEnd { lost, back: None }
    }
}

/// The result of opening.
pub(crate) type OpenResult<H> = Result<(<H as DiskHost>::Opened, OpenFiles), Failure>;

/// Why the file of a disk cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileFault {
    /// The host lacks memory or descriptors, or the file system does not give it: it may be read later.
    Passing(String),
    /// Its text does not describe a disk, or this user may not read it.
    Lasting(String),
}

impl FileFault {
    /// Returns the line about it.
    pub(crate) fn line(&self) -> &str {
        let (FileFault::Passing(why) | FileFault::Lasting(why)) = self;
        why
    }
}

/// Why a disk leaves the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removal {
    /// The disk was served, or somebody has deleted it. What is left at its socket is its own.
    Ended,
    /// A new disk could not be opened. What a daemon that died has left at its socket is not its own.
    Refused,
}

/// Knowledge about the content of a disk that is to be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Past {
    /// Nothing.
    Unknown,
    /// The disk was in the state folder when the host started, which may say more.
    CameBack,
    /// The disk was open before, so a guest may have written it.
    WasOpen,
}
