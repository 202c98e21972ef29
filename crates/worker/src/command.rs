//! Commands that control sends to a worker.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use cleave_guest::{Journal, Memory, VringError, VringLayout};

/// A vring handed to a worker.
#[derive(Debug)]
pub struct VringStart {
    /// Index in the device.
    pub index: u16,
    /// Where it lies, in the memory that the worker has.
    pub layout: VringLayout,
    /// Available position that it begins at.
    pub base: u16,
    /// Where its requests in flight are written down. Those of a daemon that died are done first, and `base` does not
    /// count then.
    pub journal: Option<Journal>,
    /// Feature bits that the guest acknowledged.
    pub features: u64,
    /// Kick; `None`: the guest never kicks, so its ring is polled.
    pub kick: Option<OwnedFd>,
    /// Call; `None`: the guest polls. Written once when the vring starts.
    pub call: Option<OwnedFd>,
    /// Written when the vring is retired.
    pub err: Option<OwnedFd>,
    /// Disabled vrings are kept and not served.
    pub enabled: bool,
}

/// How a vring stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// All that was taken is answered; this is the position of the next.
    At(u16),
    /// Requests that the disk failed are left in the in-flight region, for whoever serves the vring next.
    Left,
    /// The worker has no such vring.
    Unknown,
}

/// One descriptor of a vring that control may change while it runs.
#[derive(Debug)]
pub(crate) enum Signal {
    Kick(Option<OwnedFd>),
    Call(Option<OwnedFd>),
    Err(Option<OwnedFd>),
}

/// A command and where its answer goes. Answers are sent when the command has been carried out.
#[derive(Debug)]
pub(crate) enum Command {
    Start(Box<VringStart>, SyncSender<Result<(), VringError>>),
    Stop(u16, SyncSender<Stopped>),
    Enable(u16, bool, SyncSender<()>),
    Signal(u16, Signal, SyncSender<()>),
    Bind(Arc<Memory>, SyncSender<()>),
    Pass(SyncSender<()>),
    Exit,
}

/// A worker's inbox: the queue, and the eventfd that says it is not empty.
#[derive(Debug)]
pub struct Commands {
    pub(crate) queue: Receiver<Command>,
    pub(crate) bell: Arc<OwnedFd>,
}
