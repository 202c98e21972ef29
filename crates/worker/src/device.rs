//! What all workers of a device share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleave_blk::Cut;
use cleave_blk::SPLIT_OPS_MAX;
use cleave_blk::spec::{ID_BYTES, feature};
use cleave_disk::Disk;

use crate::accept::nanoseconds;
use crate::policy::Budget;
use crate::record::{Recording, Records};
use crate::registry::Registry;
use crate::splitter::SplitState;
use crate::{LegTotals, Mode, Split, Splitter, Totals, Tried, Tuning};

/// How workers run, from their start to their end. What may change meanwhile is the [`Tuning`].
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// CPUs that workers are pinned to, round robin; empty: not pinned.
    pub cpus: Vec<usize>,
    /// Most ops in flight per worker.
    pub ops: u16,
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
    /// What its workers learn about splitting outlives them.
    splitter: Mutex<Arc<Splitter>>,
    /// What its vrings did, and how long it took.
    pub records: Records,
    pub(crate) registry: Registry,
    pub(crate) budget: Budget,
    /// The clock that its workers share begins here.
    pub(crate) began: Instant,
}

impl Device {
    /// A disk that no worker serves yet. `writeback`: the cache mode that the guest finds.
    pub fn new(
        disk: Arc<Disk>,
        serial: [u8; ID_BYTES],
        writeback: bool,
        config: WorkerConfig,
        tuning: Tuning,
    ) -> Device {
        Device {
            disk,
            serial,
            writeback: AtomicBool::new(writeback),
            config,
            splitter: Mutex::new(Arc::new(Splitter::new(tuning.split.clone()))),
            records: Records::new(Recording::On),
            registry: Registry::new(tuning),
            budget: Budget::default(),
            began: Instant::now(),
        }
    }

    /// The same, recording or not.
    pub fn recording(mut self, recording: Recording) -> Device {
        self.records = Records::new(recording);
        self
    }

    /// The time that records are told in: since this device was made.
    pub fn now_ns(&self) -> u64 {
        nanoseconds(self.began)
    }

    /// The tuning in force.
    pub fn tuning(&self) -> Arc<Tuning> {
        self.registry.tuning()
    }

    /// Changes the tuning, of the workers that run (which wake for it) and of those to come.
    pub fn tune(&self, tuning: Tuning) {
        let mut splitter = self.lock_splitter();
        if *splitter.split() != tuning.split {
            // Of what the other had learnt, nothing is of use any more.
            *splitter = Arc::new(Splitter::new(tuning.split.clone()));
        }
        drop(splitter);
        self.registry.tune(tuning);
    }

    /// Has held requests done again; how many there were.
    pub fn resume(&self) -> u64 {
        let held = self.records.held();
        self.registry.resume();
        held
    }

    /// Ends held requests as I/O errors; how many there were.
    pub fn fail(&self) -> u64 {
        let held = self.records.held();
        self.registry.fail();
        held
    }

    /// Mode of each running worker: how it waits when it finds nothing to do.
    pub fn modes(&self) -> Vec<Mode> {
        self.registry.modes()
    }

    /// What each running worker last found out about spinning, in the order of [`modes`](Device::modes), and how
    /// long ago.
    pub fn tried(&self) -> Vec<Option<(Tried, Duration)>> {
        let now = self.began.elapsed();
        let ago = |tried: Tried| (tried, now.saturating_sub(tried.at));
        let all = self.registry.tried().into_iter();
        all.map(|tried| tried.map(ago)).collect()
    }

    /// Sums over all workers and vrings that ever ran: never less than before.
    pub fn totals(&self) -> Totals {
        let mut totals = self.registry.totals();
        self.records.add_to(&mut totals);
        totals
    }

    /// What each leg of a stripe did, over all workers that ever ran; empty where the disk has one leg.
    pub fn leg_totals(&self) -> Vec<LegTotals> {
        self.registry.leg_totals()
    }

    /// The splitter of all workers.
    pub(crate) fn splitter(&self) -> Arc<Splitter> {
        self.lock_splitter().clone()
    }

    /// What its splitter does now.
    pub fn split_states(&self) -> Vec<SplitState> {
        self.splitter().states()
    }

    fn lock_splitter(&self) -> MutexGuard<'_, Arc<Splitter>> {
        self.splitter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long its workers may spin now, should it all be in vain, and how long at most.
    pub fn spin_left(&self) -> (Duration, Duration) {
        let tuning = self.tuning();
        let left_ns = self.budget.left_ns(nanoseconds(self.began), &tuning);
        let size_ns = Budget::size_ns(&tuning);
        (Duration::from_nanos(left_ns), Duration::from_nanos(size_ns))
    }

    /// Most ops of a request, split by choice or not.
    pub(crate) fn ops_max(&self, split: &Split) -> usize {
        let by_choice = match split {
            Split::Off => 0,
            Split::Fixed(_) | Split::Auto(_) => SPLIT_OPS_MAX,
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
