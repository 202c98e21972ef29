//! Commands that control sends to a worker.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use cleave_engine::BellFd;
use cleave_guest::{Journal, Memory, VringError, VringLayout, VringLog};

use crate::wake::signal;

/// A vring that is handed to a worker.
#[derive(Debug)]
pub struct VringStart {
    /// Its index in the device.
    pub index: u16,
    /// Its ring addresses, in the memory that the worker has.
    pub layout: VringLayout,
    /// Available index to start at.
    pub base: u16,
    /// The vring's part of the in-flight region. Requests that an earlier daemon left there are repeated first;
    /// `base` is ignored in that case.
    pub journal: Option<Journal>,
    /// What it marks in the dirty log. `None`: the guest stays on this host.
    pub log: Option<Box<VringLog>>,
    /// Feature bits that the guest acknowledged.
    pub features: u64,
    /// Kick eventfd. `None`: the guest never kicks, so its ring is polled.
    pub kick: Option<OwnedFd>,
    /// Call eventfd. `None`: the guest polls. It is written once when the vring starts.
    pub call: Option<OwnedFd>,
    /// Err eventfd, written when the vring is retired.
    pub err: Option<OwnedFd>,
    /// A vring that is not enabled is kept but not served.
    pub enabled: bool,
}

/// How a vring stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// All requests that were taken are complete. The available index of the next request.
    At(u16),
    /// Requests that the disk failed, or that could not be taken again, are not answered. They remain in the in-flight region, if
    /// there is one, for the next daemon or connection that serves the vring.
    Left,
    /// The worker has no such vring.
    Unknown,
}

/// Control as it waits for a vring to stop.
#[derive(Debug)]
pub(crate) struct StopWaiter {
    done: SyncSender<Stopped>,
    /// An eventfd that is written after the answer. `Some`: it waits for stalled requests too.
    bell: Option<Arc<OwnedFd>>,
}

impl StopWaiter {
    pub(crate) fn new(done: SyncSender<Stopped>, bell: Option<Arc<OwnedFd>>) -> StopWaiter {
        StopWaiter { done, bell }
    }

    /// Returns true if stalled requests are to end first.
    pub(crate) fn is_patient(&self) -> bool {
        self.bell.is_some()
    }

    /// Gives the answer. If nobody waits any more, it is dropped.
    pub(crate) fn reply(&self, stopped: Stopped) {
        let _ = self.done.try_send(stopped);
        self.bell.iter().for_each(|bell| signal(bell));
    }
}

/// A descriptor of a vring, which control may change while the vring runs.
#[derive(Debug)]
pub(crate) enum VringDescriptor {
    Kick(Option<OwnedFd>),
    Call(Option<BellFd>),
    Err(Option<BellFd>),
}

/// A vring that is handed over, and its bells, which are no longer in `start`.
#[derive(Debug)]
pub(crate) struct Handed {
    pub(crate) start: VringStart,
    pub(crate) call: Option<BellFd>,
    pub(crate) err: Option<BellFd>,
}

impl Handed {
    /// Makes the bells on the calling thread.
    pub(crate) fn new(mut start: VringStart, is_shared: bool) -> Handed {
        let bell = |fd| BellFd::new(fd, is_shared);
        let call = start.call.take().map(bell);
        let err = start.err.take().map(bell);
        Handed { start, call, err }
    }
}

/// The channel for the result of a flush.
pub(crate) type SyncWaiter = SyncSender<Result<(), i32>>;

/// A command and the channel for its answer, which is sent when the command has taken effect.
#[derive(Debug)]
pub(crate) enum Command {
    Start(Box<Handed>, SyncSender<Result<(), VringError>>),
    Stop(u16, StopWaiter),
    Enable(u16, bool, SyncSender<()>),
    Signal(u16, VringDescriptor, SyncSender<()>),
    Log(u16, Option<Box<VringLog>>, SyncSender<()>),
    Bind(Arc<Memory>, SyncSender<()>),
    Pass(SyncSender<()>),
    /// The operator wants the store to be flushed.
    Sync(SyncWaiter),
    /// The operator wants the held requests to be repeated.
    Resume,
    /// The operator wants the held requests to fail with I/O errors.
    Fail,
    Exit,
}
