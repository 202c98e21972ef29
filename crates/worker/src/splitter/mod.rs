//! Chooses the chunk size that a large request is split into, from observations by the workers of a disk.
//!
//! Requests of one direction and size class form a *cell*. All of them are served with the chunk in force,
//! except during experiments on the live load, which alternate between two chunks (see `cell`). The cost of all
//! large requests is compared, not that of the split ones: requests that are faster only because their ops
//! displace others gain nothing. Nothing here reads a clock or a global random source, so the same observations
//! lead to the same decisions.

mod cell;
mod direction;
mod state;
#[cfg(test)]
mod tests;

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use cleave_blk::Limits;

use cell::{Cell, RunningTotals, SPLIT_OPS_MAX};
pub use direction::DataDirection;
pub use state::{SplitResult, SplitState};

/// Smaller requests are never split: the additional ops would cost more than they could save.
pub const SPLIT_MIN_BYTES: u64 = 32 << 10;
/// Minimum chunk size.
pub const CHUNK_MIN_BYTES: u32 = 4 << 10;
/// Maximum chunk size.
pub const CHUNK_MAX_BYTES: u32 = 4 << 20;
/// Default number of in-flight ops beyond which a solid-state device gets no faster. Vendors give 128 to 256
/// outstanding commands as the peak.
pub const USEFUL_DEPTH_DEFAULT: u32 = 128;

/// Size classes: from 32 KiB, 128 KiB, 512 KiB and 2 MiB.
const CLASSES: usize = 4;
const CELLS: usize = 2 * CLASSES;
/// Number of large writes that are left whole after a small read.
const MIXED_WRITES: u32 = 64;

/// How requests are split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Split {
    /// Never.
    Off,
    /// Always, into chunks of this size.
    Fixed(NonZeroU32),
    /// If it pays, starting from prior knowledge.
    Auto(Prior),
}

/// Knowledge about a device before the first request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prior {
    /// In-flight ops beyond which the device gets no faster.
    pub useful_depth: u32,
    /// Minimum chunk size: at least the device's block size.
    pub chunk_min_bytes: u32,
    /// Never split, and do not experiment: the device is rotational, and a probe found no gain.
    pub never: bool,
    /// The best chunks according to a probe, by direction and request size; 0: whole requests.
    pub measured: Vec<(DataDirection, u64, u32)>,
}

impl Prior {
    /// Makes the knowledge that the device's limits give.
    ///
    /// The rotational flag is ignored: virtio disks of virtual machines, loop devices and many emulated SCSI
    /// disks set it whatever their storage is. A disk that does rotate starts with whole requests and keeps
    /// them, since no chunk proves faster; the experiments cost a few requests. Only a probe can rule out
    /// splitting for good (`never`).
    pub fn from_limits(limits: &Limits) -> Prior {
        Prior {
            useful_depth: USEFUL_DEPTH_DEFAULT,
            chunk_min_bytes: CHUNK_MIN_BYTES
                .max(limits.block_bytes)
                .max(limits.offset_align_bytes)
                .next_power_of_two(),
            never: false,
            measured: Vec::new(),
        }
    }

    /// Returns the best chunk for requests of a cell according to a probe.
    fn chunk_of(&self, direction: DataDirection, class: usize) -> Option<u32> {
        let mut measured = self.measured.iter();
        let found = measured.find(|(way, bytes, _)| {
            *way == direction && *bytes >= SPLIT_MIN_BYTES && class_of(*bytes) == class
        });
        found.map(|(_, _, chunk_bytes)| *chunk_bytes)
    }
}

/// Decides and learns for all workers of a disk. Workers never wait for each other: an observation is dropped
/// if another worker is just adding one.
#[derive(Debug)]
pub struct Splitter {
    split: Split,
    /// Chunk in force for each cell; 0: whole requests.
    chunks: [AtomicU32; CELLS],
    /// Large requests in flight.
    in_flight: AtomicU32,
    /// Number of large writes that are still to be left whole because of small reads.
    mixed: AtomicU32,
    learner: Mutex<Learner>,
}

/// The observations.
#[derive(Debug, Default)]
struct Learner {
    cells: Vec<Cell>,
    account: RunningTotals,
    updated_ns: u64,
}

impl Splitter {
    /// Allocates all that it will ever need.
    pub fn new(split: Split) -> Splitter {
        let mut cells = Vec::new();
        if let Split::Auto(prior) = &split
            && !prior.never
        {
            for direction in DataDirection::ALL {
                let classes = 0..CLASSES;
                cells.extend(classes.map(|class| {
                    let measured = prior.chunk_of(direction, class);
                    Cell::new(prior.chunk_min_bytes, class_bytes(class), measured)
                }));
            }
        }
        let chunk = |number: usize| cells.get(number).map_or(0, Cell::chunk_bytes);
        Splitter {
            split,
            chunks: std::array::from_fn(|number| chunk(number).into()),
            in_flight: AtomicU32::new(0),
            mixed: AtomicU32::new(0),
            learner: Mutex::new(Learner {
                cells,
                ..Learner::default()
            }),
        }
    }

    /// Returns the setting that it was made with.
    pub fn split(&self) -> &Split {
        &self.split
    }

    /// Returns true if it has to be notified of the completion of each large request.
    #[inline]
    pub fn learns(&self) -> bool {
        matches!(&self.split, Split::Auto(prior) if !prior.never)
    }

    /// Notes a request that is too small to be split.
    #[inline]
    pub fn note_small(&self, direction: DataDirection) {
        if direction == DataDirection::Read && self.mixed.load(Ordering::Relaxed) != MIXED_WRITES {
            self.mixed.store(MIXED_WRITES, Ordering::Relaxed);
        }
    }

    /// Chooses the chunk for a request of at least [`SPLIT_MIN_BYTES`] that begins now. `None`: it stays whole.
    /// `beside`: requests in flight on this worker that are not large.
    pub fn choose(
        &self,
        direction: DataDirection,
        len_bytes: u64,
        beside: u32,
        now_ns: u64,
    ) -> Option<NonZeroU32> {
        let prior = match &self.split {
            Split::Off => return None,
            Split::Fixed(chunk_bytes) => return Some(*chunk_bytes),
            Split::Auto(prior) if prior.never => return None,
            Split::Auto(prior) => prior,
        };
        let others = self.in_flight.fetch_add(1, Ordering::Relaxed);
        if let Some(mut learner) = self.try_learner() {
            learner.pass_time(now_ns, others);
        }
        if direction == DataDirection::Write && self.leave_whole() {
            // A flood of writes spread over all channels would delay the reads beside it.
            return None;
        }
        let ops_max = prior.ops_max(beside, others + 1);
        let chunk = self.chunks.get(number_of(direction, len_bytes))?;
        let chunk_bytes = u64::from(chunk.load(Ordering::Relaxed));
        if chunk_bytes == 0 || ops_max < 2 {
            return None;
        }
        // The smallest chunk that results in at most `ops_max` ops.
        let least_bytes = len_bytes.div_ceil(ops_max.into()).next_power_of_two();
        let chunk_bytes = chunk_bytes.max(least_bytes);
        if chunk_bytes >= len_bytes {
            return None;
        }
        u32::try_from(chunk_bytes).ok().and_then(NonZeroU32::new)
    }

    /// Notes that a request has succeeded. `cpu_ns`: CPU time of this process, read at the ends of stretches.
    pub fn ended(
        &self,
        direction: DataDirection,
        len_bytes: u64,
        now_ns: u64,
        cpu_ns: impl FnOnce() -> u64,
    ) {
        let in_flight = self.in_flight.fetch_sub(1, Ordering::Relaxed);
        let Some(mut learner) = self.try_learner() else {
            return;
        };
        learner.pass_time(now_ns, in_flight);
        learner.account.move_bytes(len_bytes);
        let Split::Auto(prior) = &self.split else {
            return;
        };
        if prior.ops_max(0, in_flight) < 2 {
            // The chunk is not smaller than the request, so either arm leaves it whole.
            return;
        }
        let number = number_of(direction, len_bytes);
        let account = learner.account;
        if let Some(cell) = learner.cells.get_mut(number)
            && let Some(chunk) = self.chunks.get(number)
        {
            cell.ended(account, now_ns, in_flight, cpu_ns);
            chunk.store(cell.chunk_bytes(), Ordering::Relaxed);
        }
    }

    /// Notes that a request has failed. Its time says nothing about the disk, so it is ignored, and the cost of the requests
    /// beside it is measured again.
    pub fn failed(&self, now_ns: u64) {
        let in_flight = self.in_flight.fetch_sub(1, Ordering::Relaxed);
        if let Some(mut learner) = self.try_learner() {
            learner.pass_time(now_ns, in_flight);
            let cells = learner.cells.iter_mut();
            cells.for_each(|cell| cell.measure_anew(in_flight));
        }
    }

    /// Notes that the completion of this many large requests of a worker will not be reported.
    pub(crate) fn forget(&self, requests: u32) {
        self.in_flight.fetch_sub(requests, Ordering::Relaxed);
    }

    /// Returns the state of every cell that has seen requests.
    pub fn states(&self) -> Vec<SplitState> {
        let learner = self.learner.lock().unwrap_or_else(PoisonError::into_inner);
        let numbered = learner.cells.iter().enumerate();
        numbered
            .filter(|(_, cell)| cell.requests() > 0)
            .filter_map(|(number, cell)| {
                let direction = *DataDirection::ALL.get(number / CLASSES)?;
                Some(cell.state(direction, class_bytes(number % CLASSES)))
            })
            .collect()
    }

    /// Counts one of the large writes that are left whole. `false`: there are none left.
    fn leave_whole(&self) -> bool {
        let one_less = |left: u32| left.checked_sub(1);
        self.mixed
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
            .is_ok()
    }

    fn try_learner(&self) -> Option<MutexGuard<'_, Learner>> {
        match self.learner.try_lock() {
            Ok(learner) => Some(learner),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl Prior {
    /// Returns the maximum number of ops for each of `large` requests: the useful depth, shared equally.
    fn ops_max(&self, beside: u32, large: u32) -> u32 {
        (self.useful_depth.saturating_sub(beside) / large.max(1)).min(SPLIT_OPS_MAX)
    }
}

impl Learner {
    /// Accounts for the time until now, in which `in_flight` requests were in flight.
    fn pass_time(&mut self, now_ns: u64, in_flight: u32) {
        let passed_ns = now_ns.saturating_sub(self.updated_ns);
        self.account.spend(passed_ns, in_flight);
        self.updated_ns = self.updated_ns.max(now_ns);
    }
}

fn class_of(len_bytes: u64) -> usize {
    let log = (len_bytes / SPLIT_MIN_BYTES).max(1).ilog2() as usize;
    (log / 2).min(CLASSES - 1)
}

/// Returns the minimum request size of a class.
fn class_bytes(class: usize) -> u64 {
    SPLIT_MIN_BYTES << (2 * class)
}

fn number_of(direction: DataDirection, len_bytes: u64) -> usize {
    let way = usize::from(direction == DataDirection::Write);
    way * CLASSES + class_of(len_bytes)
}
