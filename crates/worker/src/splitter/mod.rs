//! Which chunk size a large request is split into, now: arithmetic on what the workers of a disk observed.
//!
//! Requests of one direction and size class are a *cell*. All of them are served in the way that is in force, whole or
//! in chunks of one size, but for experiments on the live load: a few requests in another way, a few in this, in turn
//! (`cell`). What all large requests cost is compared, not what the split ones do: one that is quicker only
//! because its ops push aside those beside it has gained nothing. Nothing here reads a clock or draws from a global
//! source: the same observations give the same decisions.

mod cell;
mod state;
#[cfg(test)]
mod tests;

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use cleave_blk::{Limits, Verb};

use cell::{Account, Cell};
pub use state::{SplitState, SplitTried};

/// Requests below this are never split: their ops would cost more than they could save.
pub const SPLIT_MIN_BYTES: u64 = 32 << 10;
/// Smallest chunk considered, and allowed.
pub const CHUNK_MIN_BYTES: u32 = 4 << 10;
/// Largest chunk allowed.
pub const CHUNK_MAX_BYTES: u32 = 4 << 20;
/// Most ops of a request that is split by choice.
const SPLIT_OPS_MAX: u32 = cleave_blk::SPLIT_OPS_MAX as u32;
/// In-flight ops beyond which a solid-state device answers no faster, where nothing better is known:
/// vendors name 128 to 256 outstanding commands as the peak.
pub const USEFUL_DEPTH_DEFAULT: u32 = 128;

/// Size classes: from 32 KiB, 128 KiB, 512 KiB, and from 2 MiB on.
const CLASSES: usize = 4;
const CELLS: usize = 2 * CLASSES;
/// After a small read, this many large writes are left whole.
const MIXED_WRITES: u32 = 64;

/// How requests are split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Split {
    /// Never.
    Off,
    /// Always into this size.
    Fixed(NonZeroU32),
    /// As it pays, starting from what is known.
    Auto(Prior),
}

/// What is known of a device before the first request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prior {
    /// In-flight ops beyond which the device answers no faster.
    pub useful_depth: u32,
    /// Smallest chunk: no op below the device's block.
    pub chunk_min_bytes: u32,
    /// Never split, nor try to: it says that it spins, and a probe found no gain.
    pub never: bool,
    /// Chunks measured by a probe, by direction and size; 0: whole requests were best.
    pub measured: Vec<(Direction, u64, u32)>,
}

impl Prior {
    /// What the device's limits tell.
    ///
    /// That it spins is not among it: virtio disks of virtual machines, loop devices and many emulated
    /// SCSI disks say so of themselves whatever is below them. A disk that does spin starts whole like
    /// every other and stays so, since no chunk proves faster; finding that out costs the few requests
    /// that are tried. Only a probe that measured it may rule splitting out for good (`never`).
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

    /// The chunk that a probe found best for requests of a cell.
    fn chunk_of(&self, direction: Direction, class: usize) -> Option<u32> {
        let mut measured = self.measured.iter();
        let found = measured.find(|(way, bytes, _)| {
            *way == direction && *bytes >= SPLIT_MIN_BYTES && class_of(*bytes) == class
        });
        found.map(|(_, _, chunk_bytes)| *chunk_bytes)
    }
}

/// Which way the data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

impl Direction {
    const ALL: [Direction; 2] = [Direction::Read, Direction::Write];

    /// `None`: no data goes.
    #[inline]
    pub(crate) fn of(verb: Verb) -> Option<Direction> {
        match verb {
            Verb::Read => Some(Direction::Read),
            Verb::Write => Some(Direction::Write),
            _ => None,
        }
    }
}

/// Decides and learns for all workers of a disk. None ever waits for another: what one cannot add to what was learnt
/// because another is just doing so is left out.
#[derive(Debug)]
pub struct Splitter {
    split: Split,
    /// Chunk in force of each cell; 0: whole requests.
    chunks: [AtomicU32; CELLS],
    /// Large requests in flight.
    in_flight: AtomicU32,
    /// Large writes still to be left whole because small reads run beside them.
    mixed: AtomicU32,
    learner: Mutex<Learner>,
}

/// What was observed.
#[derive(Debug, Default)]
struct Learner {
    cells: Vec<Cell>,
    account: Account,
    updated_ns: u64,
}

impl Splitter {
    /// Allocates all it will ever need.
    pub fn new(split: Split) -> Splitter {
        let mut cells = Vec::new();
        if let Split::Auto(prior) = &split
            && !prior.never
        {
            for direction in Direction::ALL {
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

    /// What it started from.
    pub fn split(&self) -> &Split {
        &self.split
    }

    /// Whether it wants to hear of the end of each large request.
    #[inline]
    pub fn learns(&self) -> bool {
        matches!(&self.split, Split::Auto(prior) if !prior.never)
    }

    /// Takes note of a request too small to be split.
    #[inline]
    pub fn note_small(&self, direction: Direction) {
        if direction == Direction::Read && self.mixed.load(Ordering::Relaxed) != MIXED_WRITES {
            self.mixed.store(MIXED_WRITES, Ordering::Relaxed);
        }
    }

    /// Chunk to split a request of at least [`SPLIT_MIN_BYTES`] into that begins now; `None`: it stays whole. `beside`:
    /// requests in flight on this worker that are not large.
    pub fn choose(
        &self,
        direction: Direction,
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
        if direction == Direction::Write && self.takes_turn() {
            // A flood of writes spread over all channels would make the reads beside it wait.
            return None;
        }
        let ops_max = prior.ops_max(beside, others + 1);
        let chunk = self.chunks.get(number_of(direction, len_bytes))?;
        let chunk_bytes = u64::from(chunk.load(Ordering::Relaxed));
        if chunk_bytes == 0 || ops_max < 2 {
            return None;
        }
        // As large as it has to be for so few ops.
        let least_bytes = len_bytes.div_ceil(ops_max.into()).next_power_of_two();
        let chunk_bytes = chunk_bytes.max(least_bytes);
        if chunk_bytes >= len_bytes {
            return None;
        }
        u32::try_from(chunk_bytes).ok().and_then(NonZeroU32::new)
    }

    /// A request has ended well. `cpu_ns`: CPU time of this process, asked for at the ends of stretches.
    pub fn ended(
        &self,
        direction: Direction,
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
            // Whole in either way.
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

    /// A request has failed. How long that took says nothing about the drive, and the cost of the requests
    /// beside it is measured anew.
    pub fn failed(&self, now_ns: u64) {
        let in_flight = self.in_flight.fetch_sub(1, Ordering::Relaxed);
        if let Some(mut learner) = self.try_learner() {
            learner.pass_time(now_ns, in_flight);
            let cells = learner.cells.iter_mut();
            cells.for_each(|cell| cell.measure_anew(in_flight));
        }
    }

    /// So many large requests of a worker will end unseen.
    pub(crate) fn forget(&self, requests: u32) {
        self.in_flight.fetch_sub(requests, Ordering::Relaxed);
    }

    /// What it does now and why, one entry for every cell that has seen requests.
    pub fn states(&self) -> Vec<SplitState> {
        let learner = self.learner.lock().unwrap_or_else(PoisonError::into_inner);
        let numbered = learner.cells.iter().enumerate();
        numbered
            .filter(|(_, cell)| cell.requests() > 0)
            .filter_map(|(number, cell)| {
                let direction = *Direction::ALL.get(number / CLASSES)?;
                Some(cell.state(direction, class_bytes(number % CLASSES)))
            })
            .collect()
    }

    /// Counts one of the large writes that are left whole; `false`: there are none left.
    fn takes_turn(&self) -> bool {
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
    /// Most ops of each of so many large requests: the useful depth, evenly dealt out.
    fn ops_max(&self, beside: u32, large: u32) -> u32 {
        (self.useful_depth.saturating_sub(beside) / large.max(1)).min(SPLIT_OPS_MAX)
    }
}

impl Learner {
    /// So many requests were in flight until now.
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

/// Smallest request of a class.
fn class_bytes(class: usize) -> u64 {
    SPLIT_MIN_BYTES << (2 * class)
}

fn number_of(direction: Direction, len_bytes: u64) -> usize {
    let way = usize::from(direction == Direction::Write);
    way * CLASSES + class_of(len_bytes)
}
