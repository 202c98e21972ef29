//! What all workers of a device share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cleave_blk::Cut;
use cleave_blk::SPLIT_OPS_MAX;
use cleave_blk::spec::{ID_BYTES, feature};
use cleave_disk::Disk;

use crate::{Split, Splitter, Totals};

/// How a worker learns of completions and kicks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// Sleeps until there is something to do.
    Interrupt,
    /// Never sleeps while it has a vring to serve.
    Poll,
}

/// How workers run.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Interrupt or poll.
    pub completion: Completion,
    /// CPUs that workers are pinned to, round robin; empty: not pinned.
    pub cpus: Vec<usize>,
    /// Most ops in flight per worker.
    pub ops: u16,
    /// How large requests are split.
    pub split: Split,
}

/// One disk as the guest sees it.
#[derive(Debug)]
pub struct Device {
    /// The store.
    pub disk: Arc<Disk>,
    /// Answer to GET_ID, zero-padded.
    pub serial: [u8; ID_BYTES],
    /// Write-back cache mode now (CONFIG_WCE lets the guest change it).
    pub writeback: AtomicBool,
    /// How workers run.
    pub config: WorkerConfig,
    /// What workers that have ended had done; taken by whoever tells of it.
    pub served: Served,
    /// What workers that have ended had learnt about splitting, for those that follow.
    pub learnt: Learnt,
}

/// Splitters of workers that have ended. Locked at a worker's start and end only.
#[derive(Debug, Default)]
pub struct Learnt(Mutex<Vec<Splitter>>);

impl Learnt {
    /// One that has learnt something, where there is one.
    pub(crate) fn take(&self) -> Option<Splitter> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Keeps one for a worker to come. There are never more than workers at one time.
    pub(crate) fn keep(&self, mut splitter: Splitter) {
        splitter.forget_flight();
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(splitter);
    }
}

/// Sums of the counters of workers that have ended. Locked at their end only.
#[derive(Debug, Default)]
pub struct Served(Mutex<Totals>);

impl Served {
    /// Adds a worker's counters.
    pub(crate) fn add(&self, totals: Totals) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) += totals;
    }

    /// All since it was last taken.
    pub fn take(&self) -> Totals {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Device {
    /// Most ops of a request, split by choice or not.
    pub(crate) fn ops_max(&self) -> usize {
        let by_choice = if self.config.split == Split::Off {
            0
        } else {
            SPLIT_OPS_MAX
        };
        self.cut(0).ops_max().max(by_choice)
    }

    /// How requests of a guest that took these features are cut.
    pub(crate) fn cut(&self, features: u64) -> Cut {
        Cut {
            durable: self.is_write_through(features),
            chunk_bytes: None,
            stripe: self.disk.stripe(),
        }
    }

    /// Whether a write must be on stable storage before it completes: the cache is write-through, or
    /// the guest never took FLUSH and so cannot ask for durability (virtio 1.3 §5.2.5).
    pub(crate) fn is_write_through(&self, features: u64) -> bool {
        !self.writeback.load(Ordering::Relaxed) || features & feature::FLUSH == 0
    }
}
