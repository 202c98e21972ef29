//! Commands from control that are in progress.

use crate::command::Commands;
use crate::device::registry::Orders;

/// Commands from control that are in progress.
pub(crate) struct CommandInbox {
    pub(crate) commands: Commands,
    /// There may be a command in the queue: handle it before sleeping.
    pub(crate) is_pending: bool,
    /// Number of vrings that control waits for.
    pub(crate) stopping: usize,
    /// Some vring that is not served still holds memory of an earlier table.
    pub(crate) holds_old_memory: bool,
    /// Control asked the worker to exit.
    pub(crate) exiting: bool,
    /// The operator's orders about held requests that were already carried out.
    pub(crate) orders: Orders,
    /// The disk is quiesced, and control waits until nothing is in flight.
    pub(crate) draining: bool,
    /// The flush for the operator that is under way, and the last one that ended.
    pub(crate) syncing: Option<u64>,
    pub(crate) synced: u64,
}

impl CommandInbox {
    pub(crate) fn new(commands: Commands, orders: Orders) -> CommandInbox {
        CommandInbox {
            commands,
            is_pending: true,
            stopping: 0,
            holds_old_memory: false,
            exiting: false,
            // One that is quiesced is so for a new worker too.
            orders: Orders { quiet: 0, ..orders },
            draining: false,
            syncing: None,
            synced: orders.syncs,
        }
    }
}
