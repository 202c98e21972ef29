//! Measures: a closed loop of random requests at every point of the matrix.

mod batches;

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleave_blk::{Cut, Plan, Request, STRIPE_OPS_MAX, Segment, Verb};
use cleave_disk::Disk;
use cleave_engine::{AnyStore, Done, EngineError, Event, Reactor, Store, Wait};
use cleave_guest::{Epoch, MapError, Memory, RegionSpec};
use cleave_worker::DataDirection;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::device::smallest_op;
use crate::judge::doubtful;
use crate::matrix::{Matrix, Measured, Point, points, word};
use batches::Batches;

/// Required precision of a point's mean.
pub(crate) const ERROR_MAX: f64 = 0.03;
/// Maximum sleep, which bounds the delay of a stop.
const LAP_MAX: Duration = Duration::from_millis(50);
/// Interval between two progress reports.
const REPORT_PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of reads per point that are checked for zeroes.
const LOOKED_AT_MAX: usize = 256;
/// Number of bytes of a buffer that are copied at a time to be checked.
const LOOK_BYTES: usize = 64 << 10;

/// How much time the measurement may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Minimum time per point.
    pub point_min: Duration,
    /// Maximum time per point, whether it is known to ±3 % or not.
    pub point_max: Duration,
    /// Time after which the measurement ends with the points that it has.
    pub total: Duration,
}

impl Pace {
    /// Plans a minute in all, including the opening of the disk and the writing of results.
    pub fn quick() -> Pace {
        Pace::within(Duration::from_secs(52))
    }

    /// Plans each point until it is precise, at most five seconds.
    pub fn full(points: usize) -> Pace {
        let point_max = Duration::from_secs(5);
        Pace {
            point_min: Duration::from_millis(500),
            point_max,
            total: point_max.saturating_mul(u32::try_from(points).unwrap_or(u32::MAX)),
        }
    }

    /// Plans as many points as fit into this time.
    pub fn within(total: Duration) -> Pace {
        Pace {
            point_min: (total / 500).min(Duration::from_millis(500)),
            point_max: Duration::from_secs(5),
            total,
        }
    }
}

/// Settings of a measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeSettings {
    /// Each gets a matrix.
    pub directions: Vec<DataDirection>,
    /// The time to take.
    pub pace: Pace,
    /// Seed of the random offsets; not 0.
    pub seed: u64,
}

/// Progress of the measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProbeProgress {
    /// Points that were measured.
    pub done: usize,
    /// All points.
    pub total: usize,
    /// The current point.
    pub now: (DataDirection, Point),
    /// Expected time until the end.
    pub left: Duration,
}

/// Why the measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// No memory for the buffers.
    #[error("no memory to read into: {0}; free some, or raise the limit of the cgroup")]
    Memory(#[source] io::Error),
    /// The memory for the buffers cannot be mapped.
    #[error("no memory to read into: {0}")]
    Map(#[from] MapError),
    /// The engine could not be made.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine failed.
    #[error("io_uring failed: {0}")]
    Enter(#[source] io::Error),
    /// The disk failed a request.
    #[error("a {} of {len_bytes} bytes at {offset_bytes} of {disk} failed: {source}", word(*.direction))]
    Disk {
        /// Name of the disk.
        disk: String,
        /// Read or write.
        direction: DataDirection,
        /// Offset of the request.
        offset_bytes: u64,
        /// Length of the request.
        len_bytes: u64,
        /// The error.
        source: io::Error,
    },
    /// The disk is smaller than a block.
    #[error("disk {0} is too small to be measured; it needs at least one block")]
    TooSmall(String),
}

/// Measures `disk`. Returns the matrices, and whether all points were measured before `stop` was set or the
/// time was over.
pub fn run(
    disk: &Arc<Disk>,
    settings: &ProbeSettings,
    stop: &AtomicBool,
    report: &mut dyn FnMut(&ProbeProgress),
) -> Result<(Vec<Matrix>, bool), RunError> {
    let cut = Cut {
        stripe: disk.stripe(),
        ..Cut::default()
    };
    let points = points(smallest_op(disk), disk.capacity_bytes());
    let stride = u64::from(disk.limits().memory_align_bytes);
    let stride_of = |point: &Point| point.block_bytes().max(stride);
    let memory_bytes = points.iter().map(|p| stride_of(p) * u64::from(p.depth));
    let ops = points.iter().map(|point| ops_of(point, &cut));
    let (Some(memory_bytes), Some(ops)) = (memory_bytes.max(), ops.max()) else {
        return Err(RunError::TooSmall(disk.name().to_owned()));
    };
    let memory = anonymous(memory_bytes)?;
    fill(&memory, memory_bytes, settings.seed);
    let ops = u16::try_from(ops).unwrap_or(u16::MAX);
    let mut reactor = Reactor::new(&[disk], ops, 0, 0)?;
    let store = AnyStore::open(&mut reactor, disk, 0, ops)?;
    let mut bench = Bench {
        reactor,
        store: [store],
        memory: memory.into(),
        disk: Arc::clone(disk),
        cut,
        stride,
        random: settings.seed | 1,
        slots: Vec::new(),
        segments: Vec::new(),
        ended: Vec::new(),
    };
    let mut clock = Clock::new(settings.pace, points.len() * settings.directions.len());
    let mut matrices = Vec::new();
    for &direction in &settings.directions {
        let mut matrix = Matrix::new(direction);
        measure_all(
            &mut matrix,
            &points,
            &mut clock,
            &mut |clock, matrix, point, limit| {
                let mut report = || report(&clock.progress(direction, point));
                report();
                bench.measure(matrix, point, limit, stop, &mut report)
            },
        )?;
        if !matrix.measured.is_empty() {
            matrices.push(matrix);
        }
    }
    Ok((matrices, clock.done == clock.total))
}

/// Measures one point within the given minimum and maximum time. `false`: it was stopped, and nothing was added.
type Measure<'a> =
    dyn FnMut(&Clock, &mut Matrix, Point, (Duration, Duration)) -> Result<bool, RunError> + 'a;

/// Measures the points of a direction, and again those that a doubtful gain depends on. The second result counts.
fn measure_all(
    matrix: &mut Matrix,
    points: &[Point],
    clock: &mut Clock,
    measure: &mut Measure<'_>,
) -> Result<(), RunError> {
    if measure_each(matrix, points, clock, measure)? {
        let again = doubtful(matrix);
        clock.total += again.len();
        measure_each(matrix, &again, clock, measure)?;
    }
    Ok(())
}

/// Measures points in turn. `false`: it was stopped, or the time was over.
fn measure_each(
    matrix: &mut Matrix,
    points: &[Point],
    clock: &mut Clock,
    measure: &mut Measure<'_>,
) -> Result<bool, RunError> {
    for &point in points {
        let Some(limit) = clock.next_limit() else {
            return Ok(false);
        };
        if !measure(clock, matrix, point, limit)? {
            return Ok(false);
        }
        clock.done += 1;
    }
    Ok(true)
}

/// Returns the number of ops in flight at a point. On a stripe a request is one op for each chunk that it touches, up to a limit.
fn ops_of(point: &Point, cut: &Cut) -> u64 {
    let each = cut.stripe.map_or(1, |stripe| {
        let touched = point.block_bytes() / u64::from(stripe.chunk_bytes()) + 2;
        touched.min(STRIPE_OPS_MAX as u64)
    });
    u64::from(point.depth) * each
}

/// Shares the time among the points.
struct Clock {
    pace: Pace,
    start: Instant,
    done: usize,
    total: usize,
}

impl Clock {
    fn new(pace: Pace, total: usize) -> Clock {
        Clock {
            pace,
            start: Instant::now(),
            done: 0,
            total,
        }
    }

    fn points_left(&self) -> u32 {
        u32::try_from(self.total - self.done).unwrap_or(u32::MAX)
    }

    /// Returns minimum and maximum time for the next point. `None`: an eighth more than the whole time has passed. Until then the
    /// remaining points of a slow disk still get a little time each.
    fn next_limit(&self) -> Option<(Duration, Duration)> {
        let (elapsed, total) = (self.start.elapsed(), self.pace.total);
        let least = (total / 8).checked_div(u32::try_from(self.total).ok()?)?;
        let fair = total
            .saturating_sub(elapsed)
            .checked_div(self.points_left())?;
        let most = fair.max(least).min(self.pace.point_max);
        (elapsed < total + total / 8).then(|| (self.pace.point_min.min(most), most))
    }

    fn progress(&self, direction: DataDirection, point: Point) -> ProbeProgress {
        let elapsed = self.start.elapsed();
        let at_most = self.pace.total.saturating_sub(elapsed);
        let at_this_rate = match u32::try_from(self.done) {
            Ok(done) if done > 0 => (elapsed / done).saturating_mul(self.points_left()),
            _ => at_most,
        };
        ProbeProgress {
            done: self.done,
            total: self.total,
            now: (direction, point),
            left: at_this_rate.min(at_most),
        }
    }
}

/// The buffer of one request, at `stride × index` in memory.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    offset_bytes: u64,
    ops_left: u32,
}

struct Bench {
    reactor: Reactor,
    store: [AnyStore; 1],
    memory: Epoch,
    disk: Arc<Disk>,
    cut: Cut,
    stride: u64,
    random: u64,
    slots: Vec<Slot>,
    segments: Vec<Segment>,
    /// Slots whose requests have completed since the last lap.
    ended: Vec<usize>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.reactor.close(&mut self.store);
    }
}

impl Bench {
    /// Measures a point. `false`: it was stopped before its end, and nothing was added.
    fn measure(
        &mut self,
        matrix: &mut Matrix,
        point: Point,
        limit: (Duration, Duration),
        stop: &AtomicBool,
        report: &mut dyn FnMut(),
    ) -> Result<bool, RunError> {
        self.lay_out(point);
        let way = matrix.direction;
        for slot in 0..self.slots.len() {
            self.begin(way, point, slot);
        }
        let measured = self.keep_going(way, point, limit, stop, report)?;
        // Requests in flight complete before their memory is used for another point.
        self.drain(way, point)?;
        let Some(measured) = measured else {
            return Ok(false);
        };
        matrix.add(measured);
        if way == DataDirection::Read {
            self.look_for_zeroes(matrix, point)?;
        }
        Ok(true)
    }

    fn drain(&mut self, way: DataDirection, point: Point) -> Result<(), RunError> {
        while self.store[0].in_flight() > 0 {
            self.lap(way, point)?;
        }
        self.ended.clear();
        Ok(())
    }

    /// Runs the closed loop: each completion is followed by a new request, until the rate is known.
    fn keep_going(
        &mut self,
        way: DataDirection,
        point: Point,
        (least, most): (Duration, Duration),
        stop: &AtomicBool,
        report: &mut dyn FnMut(),
    ) -> Result<Option<Measured>, RunError> {
        let start = Instant::now();
        let mut reported = start;
        let mut batches = Batches::new(u64::from(point.depth));
        loop {
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            self.lap(way, point)?;
            let now = Instant::now();
            let elapsed = now - start;
            batches.add(self.ended.len() as u64, elapsed);
            if batches.is_warming()
                && elapsed >= most / 10
                && (batches.seen() >= u64::from(point.depth) || elapsed >= most / 2)
                && !self.ended.is_empty()
            {
                batches.begin(elapsed);
            }
            if batches.elapsed() >= least && batches.error().is_some_and(|e| e <= ERROR_MAX)
                || elapsed >= most && batches.requests() > 0
            {
                return Ok(Some(Measured {
                    point,
                    requests: batches.requests(),
                    elapsed_ns: batches.elapsed().as_nanos() as u64,
                    error: batches.error().unwrap_or(1.0),
                }));
            }
            while let Some(slot) = self.ended.pop() {
                self.begin(way, point, slot);
            }
            if now - reported >= REPORT_PAUSE {
                reported = now;
                report();
            }
        }
    }

    fn lay_out(&mut self, point: Point) {
        let block_bytes = point.block_bytes();
        let stride = block_bytes.max(self.stride);
        let depth = u64::from(point.depth);
        self.slots = vec![Slot::default(); point.depth as usize];
        self.segments = (0..depth)
            .map(|slot| Segment {
                addr: slot * stride,
                len: block_bytes as u32,
            })
            .collect();
        self.ended.clear();
    }

    /// Pushes a request at a random offset. There is room, because the engine was made for the deepest point.
    fn begin(&mut self, way: DataDirection, point: Point, slot: usize) {
        let len_bytes = point.block_bytes();
        let blocks = (self.disk.capacity_bytes() / len_bytes).max(1);
        let offset_bytes = self.next_random() % blocks * len_bytes;
        let request = Request {
            verb: match way {
                DataDirection::Read => Verb::Read,
                DataDirection::Write => Verb::Write,
            },
            offset_bytes,
            len_bytes,
        };
        let (Some(place), Some(segment)) =
            (self.slots.get_mut(slot), self.segments.get(slot..=slot))
        else {
            return;
        };
        place.offset_bytes = offset_bytes;
        place.ops_left = 0;
        for op in Plan::new(&request, segment, &self.cut) {
            place.ops_left += 1;
            let [store] = &mut self.store;
            store.push(&mut self.reactor, &self.memory, op, slot as u64);
        }
    }

    /// Waits for a completion, and puts all completed slots into `ended`.
    fn lap(&mut self, way: DataDirection, point: Point) -> Result<(), RunError> {
        let until = Instant::now() + LAP_MAX;
        self.reactor
            .enter(&mut self.store, Wait::Until(Some(until)))
            .map_err(RunError::Enter)?;
        while let Some(event) = self.reactor.reap(&mut self.store) {
            let Event::Done {
                done: Done { token, result },
                ..
            } = event
            else {
                continue;
            };
            let number = token as usize;
            let Some(slot) = self.slots.get_mut(number) else {
                continue;
            };
            if let Err(errno) = result {
                return Err(RunError::Disk {
                    disk: self.disk.name().to_owned(),
                    direction: way,
                    offset_bytes: slot.offset_bytes,
                    len_bytes: point.block_bytes(),
                    source: io::Error::from_raw_os_error(errno),
                });
            }
            slot.ops_left = slot.ops_left.saturating_sub(1);
            if slot.ops_left == 0 {
                self.ended.push(number);
            }
        }
        Ok(())
    }

    /// Reads again, untimed, and checks the data. The requests that were in flight at the end are not a fair
    /// sample: most of them are slow reads, and reads of holes are fast.
    fn look_for_zeroes(&mut self, matrix: &mut Matrix, point: Point) -> Result<(), RunError> {
        let slots = self.slots.len().min(LOOKED_AT_MAX);
        for slot in 0..slots {
            self.begin(DataDirection::Read, point, slot);
        }
        self.drain(DataDirection::Read, point)?;
        for segment in self.segments.iter().take(slots) {
            matrix.looked_at += 1;
            matrix.only_zeroes += u64::from(is_zero(&self.memory, *segment));
        }
        Ok(())
    }

    /// Draws a number by xorshift64*.
    fn next_random(&mut self) -> u64 {
        next_random(&mut self.random)
    }
}

fn next_random(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
}

/// Stops at the first byte that is not zero, so it costs time only for zeroes.
fn is_zero(memory: &Memory, segment: Segment) -> bool {
    let len_max = LOOK_BYTES.min(segment.len as usize);
    let (mut piece, zeroes) = (vec![0; len_max], vec![0; len_max]);
    let mut done = 0;
    while done < segment.len {
        let here = Segment {
            addr: segment.addr + u64::from(done),
            len: (segment.len - done).min(LOOK_BYTES as u32),
        };
        match memory.copy_in(&[here], &mut piece) {
            Ok(len) if len > 0 && piece.get(..len) == zeroes.get(..len) => done += here.len,
            Ok(_) | Err(_) => return false,
        }
    }
    true
}

/// Maps memory for an engine, at guest address 0.
fn anonymous(len_bytes: u64) -> Result<Arc<Memory>, RunError> {
    let memfd = || -> io::Result<File> {
        let file: File = memfd_create("cleave-probe", MemfdFlags::CLOEXEC)?.into();
        ftruncate(&file, len_bytes)?;
        Ok(file)
    };
    Ok(Memory::new(vec![RegionSpec {
        guest_addr: 0,
        user_addr: 0,
        len_bytes,
        file_offset: 0,
        file: memfd().map_err(RunError::Memory)?,
    }])?)
}

/// Fills the memory with random bytes, which no layer can compress or deduplicate. This also maps every page
/// before anything is timed.
fn fill(memory: &Memory, len_bytes: u64, seed: u64) {
    let mut random = seed | 1;
    let mut piece = vec![0; LOOK_BYTES];
    for addr in (0..len_bytes).step_by(LOOK_BYTES) {
        for word in piece.chunks_exact_mut(4) {
            word.copy_from_slice(&(next_random(&mut random) as u32).to_le_bytes());
        }
        let here = Segment {
            addr,
            len: (len_bytes - addr).min(LOOK_BYTES as u64) as u32,
        };
        // Cannot fail: the memory has this size.
        let _ = memory.copy_out(&[here], &piece);
    }
}

#[cfg(test)]
mod tests;
