//! Which chunk size a large request is split into, now: arithmetic on what the worker observed.
//!
//! A request falls into a *cell*: its direction, its size class (powers of two) and how many requests
//! are in flight beside it. Each cell keeps a running estimate of request latency per byte for not
//! splitting and for every chunk size that makes sense, serves nearly all requests with the one in
//! force, and spends at most one request in fifty on another. Another takes over when it is clearly
//! better over enough samples; not splitting takes over when it is hardly worse. Nothing here reads
//! a clock or draws from a global source: the same observations give the same decisions.

mod board;
mod cell;
mod state;
#[cfg(test)]
mod tests;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cleave_blk::Limits;

pub(crate) use board::Board;
use cell::{Account, Cell, PASSED, Pick};
pub use state::{Reason, SplitState};

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

/// Size classes: 32 KiB, 64 KiB … 4 MiB and above.
const CLASSES: usize = 8;
/// Load classes: alone, 2–3 in flight, 4–7, 8–15, 16 and more.
const LOADS: usize = 5;
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
    /// Chunks measured by a probe, by direction and size class; 0: whole requests were best.
    pub measured: Vec<(Direction, u64, u32)>,
}

impl Prior {
    /// What the device's limits tell.
    ///
    /// That it spins is not among it: virtio disks of virtual machines, loop devices and many emulated
    /// SCSI disks say so of themselves whatever is below them. A disk that does spin starts whole like
    /// every other and stays so, since no chunk proves faster; finding that out costs the few requests
    /// that explore. Only a probe that measured it may rule splitting out for good (`never`).
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
}

/// Which way the data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

/// What is under way when a request is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Requests in flight, without this one.
    pub requests: u32,
    /// Ops in flight on this worker.
    pub ops: u32,
}

/// A decision, kept with the request until it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Size to split into; `None`: whole.
    pub chunk_bytes: Option<NonZeroU32>,
    /// Where the observation goes; `None`: nothing is learnt from this request.
    pub(crate) lesson: Option<Lesson>,
}

/// Which estimate a request adds to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lesson {
    cell: u8,
    arm: u8,
}

impl Choice {
    /// Left whole, and nothing to learn.
    pub const WHOLE: Choice = Choice {
        chunk_bytes: None,
        lesson: None,
    };

    /// Whether the splitter wants to hear how long the request took.
    pub fn is_timed(&self) -> bool {
        self.lesson.is_some()
    }

    /// How many ops it makes of a request.
    fn ops(&self, len_bytes: u64) -> u32 {
        let chunk_bytes = self
            .chunk_bytes
            .map_or(len_bytes, |chunk| chunk.get().into());
        len_bytes.div_ceil(chunk_bytes.max(1)) as u32
    }
}

/// Decides and learns for one worker.
#[derive(Debug)]
pub struct Splitter {
    split: Split,
    cells: Vec<Cell>,
    /// Large writes still to be left whole because small reads run beside them.
    mixed: u32,
    /// Timed requests in flight, what they have cost, and when that was last brought up to date.
    in_flight: u32,
    account: Account,
    updated_ns: u64,
    /// Ops of those requests: this worker's, and those of all workers of the disk.
    ops: u32,
    ops_of_disk: Arc<AtomicU32>,
    /// What it does now, for others to read.
    board: Arc<Board>,
}

impl Splitter {
    /// Allocates all it will ever need.
    pub fn new(split: Split) -> Splitter {
        let cells = match &split {
            Split::Auto(prior) if !prior.never => make_cells(prior),
            _ => Vec::new(),
        };
        Splitter {
            split,
            board: Arc::new(Board::new(cells.len())),
            cells,
            mixed: 0,
            in_flight: 0,
            account: Account::default(),
            updated_ns: 0,
            ops: 0,
            ops_of_disk: Arc::default(),
        }
    }

    /// Shares the drive's useful depth with the splitters that count their ops here too.
    pub(crate) fn sharing(mut self, ops_of_disk: &Arc<AtomicU32>) -> Splitter {
        self.ops_of_disk = ops_of_disk.clone();
        self
    }

    /// Where it shows what it does now.
    pub(crate) fn board(&self) -> Arc<Board> {
        self.board.clone()
    }

    /// What it started from.
    pub fn split(&self) -> &Split {
        &self.split
    }

    /// Takes note of a request too small to be split.
    #[inline]
    pub fn note_small(&mut self, direction: Direction) {
        if direction == Direction::Read {
            self.mixed = MIXED_WRITES;
        }
    }

    /// How to split a request of at least [`SPLIT_MIN_BYTES`] that is about to be planned.
    pub fn choose(
        &mut self,
        direction: Direction,
        len_bytes: u64,
        load: Load,
        now_ns: u64,
    ) -> Choice {
        let choice = match &self.split {
            Split::Off => Choice::WHOLE,
            Split::Fixed(chunk) => Choice {
                chunk_bytes: Some(*chunk),
                lesson: None,
            },
            Split::Auto(_) => self.choose_large(direction, len_bytes, load),
        };
        if choice.is_timed() {
            self.pass_time(now_ns);
            self.in_flight += 1;
            let ops = choice.ops(len_bytes);
            self.ops += ops;
            self.ops_of_disk.fetch_add(ops, Ordering::Relaxed);
        }
        choice
    }

    /// A request has ended well that took so long from its planning on; `choice` as it was given.
    pub fn ended(&mut self, choice: Choice, len_bytes: u64, latency_ns: u64, now_ns: u64) {
        let Some(lesson) = choice.lesson else { return };
        self.release(choice, len_bytes, now_ns);
        self.account.moved_kib += len_bytes as f64 / 1024.0;
        if let Some(cell) = self.cells.get_mut(usize::from(lesson.cell)) {
            cell.learn(usize::from(lesson.arm), len_bytes, latency_ns, self.account);
            let number = usize::from(lesson.cell);
            let (direction, class, load) = cell_of(number);
            let state = cell.state(direction, SPLIT_MIN_BYTES << class, load);
            self.board.write(number, &state);
        }
    }

    /// A request has failed. How long that took says nothing about the drive, and the cost of the requests
    /// beside it is measured anew.
    pub fn failed(&mut self, choice: Choice, len_bytes: u64, now_ns: u64) {
        if choice.is_timed() {
            self.release(choice, len_bytes, now_ns);
            self.cells.iter_mut().for_each(Cell::measure_anew);
        }
    }

    /// A timed request is no longer in flight.
    fn release(&mut self, choice: Choice, len_bytes: u64, now_ns: u64) {
        self.pass_time(now_ns);
        self.in_flight = self.in_flight.saturating_sub(1);
        self.release_ops(choice.ops(len_bytes));
    }

    fn release_ops(&mut self, ops: u32) {
        self.ops = self.ops.saturating_sub(ops);
        self.ops_of_disk.fetch_sub(ops, Ordering::Relaxed);
    }

    /// The worker is gone, and with it its clock and what it had in flight.
    pub(crate) fn forget_flight(&mut self) {
        (self.in_flight, self.updated_ns) = (0, 0);
        self.release_ops(self.ops);
    }

    fn pass_time(&mut self, now_ns: u64) {
        // Nothing is in flight when time begins, wherever it begins.
        let passed_ns = now_ns.saturating_sub(self.updated_ns);
        self.account.spent_ns += passed_ns as f64 * f64::from(self.in_flight);
        self.updated_ns = self.updated_ns.max(now_ns);
    }

    /// What it does now and why, one entry for every cell that has seen requests.
    pub fn states(&self) -> Vec<SplitState> {
        let cells = self
            .cells
            .iter()
            .enumerate()
            .filter(|(_, cell)| cell.seen() > 0);
        cells
            .map(|(number, cell)| {
                let (direction, class, load) = cell_of(number);
                cell.state(direction, SPLIT_MIN_BYTES << class, load)
            })
            .collect()
    }

    fn choose_large(&mut self, direction: Direction, len_bytes: u64, load: Load) -> Choice {
        let Split::Auto(prior) = &self.split else {
            return Choice::WHOLE;
        };
        if direction == Direction::Write && self.mixed > 0 {
            // A flood of writes spread over all channels would make the reads beside it wait.
            self.mixed -= 1;
            return Choice::WHOLE;
        }
        let ops_of_disk = self.ops_of_disk.load(Ordering::Relaxed);
        let ops_of_others = ops_of_disk.saturating_sub(self.ops);
        let headroom = prior
            .useful_depth
            .saturating_sub(load.ops.saturating_add(ops_of_others))
            .min(SPLIT_OPS_MAX);
        let number = number_of(direction, len_bytes, load.requests);
        let Some(cell) = self.cells.get_mut(number) else {
            return Choice::WHOLE;
        };
        if headroom < 2 {
            cell.pass();
            let lesson = Lesson {
                cell: number as u8,
                arm: PASSED,
            };
            return Choice {
                chunk_bytes: None,
                lesson: Some(lesson),
            };
        }
        let Pick { chunk_bytes, arm } = cell.pick(len_bytes, headroom);
        Choice {
            chunk_bytes,
            lesson: Some(Lesson {
                cell: number as u8,
                arm,
            }),
        }
    }
}

impl Drop for Splitter {
    /// Another takes its place while its requests are in flight: they no longer count.
    fn drop(&mut self) {
        self.forget_flight();
    }
}

fn make_cells(prior: &Prior) -> Vec<Cell> {
    (0..2 * CLASSES * LOADS)
        .map(|number| {
            let (direction, class, load) = cell_of(number);
            let class_bytes = SPLIT_MIN_BYTES << class;
            let measured = prior.measured.iter().find(|(way, bytes, _)| {
                *way == direction && class_of(*bytes) == class && *bytes >= SPLIT_MIN_BYTES
            });
            Cell::new(
                prior.chunk_min_bytes,
                class_bytes,
                load,
                measured.map(|(_, _, chunk)| *chunk),
            )
        })
        .collect()
}

fn class_of(len_bytes: u64) -> usize {
    let log = (len_bytes / SPLIT_MIN_BYTES).max(1).ilog2() as usize;
    log.min(CLASSES - 1)
}

fn number_of(direction: Direction, len_bytes: u64, requests: u32) -> usize {
    let load = ((requests + 1).ilog2() as usize).min(LOADS - 1);
    let way = usize::from(direction == Direction::Write);
    (way * CLASSES + class_of(len_bytes)) * LOADS + load
}

fn cell_of(number: usize) -> (Direction, usize, usize) {
    let way = if number / LOADS / CLASSES == 0 {
        Direction::Read
    } else {
        Direction::Write
    };
    (way, number / LOADS % CLASSES, number % LOADS)
}
