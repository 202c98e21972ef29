//! Commands from control that are in progress.

use std::num::NonZeroU64;
use std::sync::mpsc::SyncSender;

use crate::command::SyncWaiter;
use crate::control::Commands;

/// Maximum number of waiters for a flush. One that finds no place asks again.
pub(crate) const SYNC_WAITERS_MAX: usize = 64;

/// Commands from control that are in progress.
pub(crate) struct CommandInbox {
    pub(crate) commands: Commands,
    /// There may be a command in the queue: handle it before sleeping.
    pub(crate) is_pending: bool,
    /// Number of vrings that control waits for, and of those in `passing`.
    pub(crate) stopping: usize,
    /// Those that wait until the answers that were decided before are published. Each session waits for one at a time.
    pub(crate) passing: Vec<SyncSender<()>>,
    /// Some vring that is not served still holds memory of an earlier table.
    pub(crate) holds_old_memory: bool,
    /// Control asked the worker to exit.
    pub(crate) exiting: bool,
    /// Number of the quiet that was adopted. `None`: the disk is not quiesced.
    pub(crate) quiet: Option<NonZeroU64>,
    /// The disk is quiesced, and control waits until nothing is in flight.
    pub(crate) draining: bool,
    /// Those that wait for the operator's flush that is under way, and for the one after it.
    pub(crate) syncing: Vec<SyncWaiter>,
    pub(crate) sync_next: Vec<SyncWaiter>,
}

impl CommandInbox {
    pub(crate) fn new(commands: Commands) -> CommandInbox {
        CommandInbox {
            commands,
            is_pending: true,
            stopping: 0,
            passing: Vec::new(),
            holds_old_memory: false,
            exiting: false,
            quiet: None,
            draining: false,
            syncing: Vec::with_capacity(SYNC_WAITERS_MAX),
            sync_next: Vec::with_capacity(SYNC_WAITERS_MAX),
        }
    }

    /// Drops those that wait for something: they learn that there will be no answer.
    pub(crate) fn give_up(&mut self) {
        while self.commands.queue.try_recv().is_ok() {}
        self.passing.clear();
        self.syncing.clear();
        self.sync_next.clear();
    }
}
