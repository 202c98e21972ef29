//! Experiments for the requests of one direction and size class.

use std::time::Duration;

use super::direction::DataDirection;
use super::state::{SplitResult, SplitState};
use crate::policy::{Arm, Experiment, ExperimentResult, Spent, Stretch};

/// Maximum number of ops of a request that is split by choice.
pub(super) const SPLIT_OPS_MAX: u32 = cleave_blk::SPLIT_OPS_MAX as u32;
/// Required saving for each doubling of the number of ops, as a share of the cost of requests.
const GAIN_OF_DOUBLING: f32 = 0.02;
/// A stretch of an experiment.
const STRETCH: Stretch = Stretch {
    requests: 8,
    min_ns: 1_000_000,
    max_ns: 1_000_000_000,
};

/// Running totals over all large requests of a disk: the time that they spend together, and the bytes that they
/// moved. They wrap.
///
/// The time includes requests still in flight. Latencies alone would mislead: if split requests take the device
/// from whole ones, the fast ones complete often, and the starved ones never.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RunningTotals {
    /// Requests in flight, integrated over time.
    spent_ns: u64,
    moved_bytes: u64,
}

impl RunningTotals {
    pub(super) fn spend(&mut self, passed_ns: u64, in_flight: u32) {
        let spent_ns = passed_ns.wrapping_mul(u64::from(in_flight));
        self.spent_ns = self.spent_ns.wrapping_add(spent_ns);
    }

    pub(super) fn move_bytes(&mut self, bytes: u64) {
        self.moved_bytes = self.moved_bytes.wrapping_add(bytes);
    }

    /// Returns the nanoseconds per KiB that requests spent since `start`.
    fn cost_since(&self, start: &RunningTotals) -> f64 {
        let spent_ns = self.spent_ns.wrapping_sub(start.spent_ns) as f64;
        let moved_bytes = self.moved_bytes.wrapping_sub(start.moved_bytes) as f64;
        spent_ns * 1024.0 / moved_bytes.max(1.0)
    }
}

/// The start of a stretch or a window.
#[derive(Debug, Clone, Copy)]
struct StretchStart {
    at_ns: u64,
    account: RunningTotals,
    /// Only set in stretches.
    cpu_ns: u64,
}

#[derive(Debug)]
pub(super) struct Cell {
    experiment: Experiment,
    /// The chunk of each arm. The plain arm has the larger chunk, or whole requests (0).
    pair: [u32; 2],
    /// Number of pairs that were tried against the chunk in force.
    pairs_tried: usize,
    /// Number of experiments that begin without a rest: until every pair was tried, or some chunk was better
    /// than whole requests.
    at_once: usize,
    class_bytes: u64,
    chunk_min_bytes: u64,
    /// Number of all requests, and of those since the start.
    requests: u64,
    counted: u64,
    start: Option<StretchStart>,
    /// Number of requests that have to complete before measuring: they were in flight under another arm, or
    /// beside one that was.
    settle: u32,
    tried: Option<SplitResult>,
}

impl Cell {
    /// Makes a cell. `measured`: the best chunk according to a probe, 0 for whole requests.
    pub(super) fn new(chunk_min_bytes: u32, class_bytes: u64, measured: Option<u32>) -> Cell {
        let fewest = class_bytes / u64::from(SPLIT_OPS_MAX);
        let mut cell = Cell {
            experiment: Experiment::new(STRETCH),
            pair: [0; 2],
            pairs_tried: 0,
            at_once: 0,
            class_bytes,
            chunk_min_bytes: u64::from(chunk_min_bytes).max(fewest),
            requests: 0,
            counted: 0,
            start: None,
            settle: 0,
            tried: None,
        };
        let known_bytes = measured.filter(|bytes| cell.allows((*bytes).into()));
        if measured.is_none() {
            cell.at_once = cell.first_chunks().count();
        }
        cell.set_up(known_bytes.unwrap_or(0));
        cell
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests
    }

    /// Returns the chunk in force; 0: requests stay whole.
    pub(super) fn chunk_bytes(&self) -> u32 {
        self.chunk_of(self.experiment.arm())
    }

    /// Notes that a request has completed while `in_flight` were in flight.
    pub(super) fn ended(
        &mut self,
        account: RunningTotals,
        now_ns: u64,
        in_flight: u32,
        cpu_ns: impl FnOnce() -> u64,
    ) {
        self.requests += 1;
        if self.requests == 1 && self.at_once > 0 {
            self.begin(in_flight);
        }
        if self.settle > 0 {
            self.settle -= 1;
            return;
        }
        let tries = self.experiment.is_under_way();
        let Some(start) = self.start else {
            let cpu_ns = if tries { cpu_ns() } else { 0 };
            (self.counted, self.start) = (
                0,
                Some(StretchStart {
                    at_ns: now_ns,
                    account,
                    cpu_ns,
                }),
            );
            return;
        };
        self.counted += 1;
        let mut spent = Spent {
            requests: self.counted,
            wall_ns: now_ns.saturating_sub(start.at_ns),
            ..Spent::default()
        };
        let is_too_few = tries && self.counted < u64::from(in_flight);
        if is_too_few || !self.experiment.wants(&spent) {
            return;
        }
        spent.held_ns = (account.cost_since(&start.account) * self.counted as f64) as u64;
        if tries {
            spent.cpu_ns = cpu_ns().saturating_sub(start.cpu_ns);
        }
        self.start = None;
        let was = self.chunk_bytes();
        if let Some(found) = self.experiment.pass(now_ns, spent) {
            self.judge(&found, now_ns, in_flight);
        }
        if self.chunk_bytes() != was {
            self.measure_anew(in_flight);
        }
    }

    /// Discards the current stretch, and ignores the requests in flight.
    pub(super) fn measure_anew(&mut self, in_flight: u32) {
        (self.start, self.settle) = (None, in_flight);
    }

    pub(super) fn state(&self, direction: DataDirection, class_bytes: u64) -> SplitState {
        SplitState {
            direction,
            class_bytes,
            chunk_bytes: self.chunk_of(self.experiment.verdict()),
            requests: self.requests,
            tried: self.tried,
        }
    }

    fn judge(&mut self, found: &ExperimentResult, now_ns: u64, in_flight: u32) {
        let [plain, other] = self.pair;
        let plain_bytes = match plain {
            0 => self.class_bytes,
            plain => u64::from(plain),
        };
        let doublings = (plain_bytes / u64::from(other).max(1)).max(2).ilog2();
        let needed = GAIN_OF_DOUBLING * doublings as f32;
        let Some(verdict) = found.judge(&found.response, needed, self.experiment.verdict()) else {
            return;
        };
        let gain = &found.response;
        self.tried = Some(SplitResult {
            chunks_bytes: self.pair,
            gain: [gain.share, gain.spread.0, gain.spread.1],
            cores: found.other.cores() - found.plain.cores(),
            at: Duration::from_nanos(now_ns),
        });
        let was = self.chunk_of(self.experiment.verdict());
        self.experiment.decide(now_ns, verdict);
        let now = self.chunk_of(verdict);
        (self.pairs_tried, self.at_once) = match now == was {
            true => (self.pairs_tried + 1, self.at_once.saturating_sub(1)),
            false => (0, 0),
        };
        self.set_up(now);
        if self.at_once > 0 {
            self.begin(in_flight);
        }
    }

    fn begin(&mut self, in_flight: u32) {
        self.experiment.begin();
        self.measure_anew(in_flight);
    }

    /// Chooses the next pair, with this chunk in force.
    fn set_up(&mut self, chunk_bytes: u32) {
        let chunk = u64::from(chunk_bytes);
        let (pair, in_force) = if chunk == 0 {
            let count = self.first_chunks().count().max(1);
            let other = self.first_chunks().nth(self.pairs_tried % count);
            ([0, other.unwrap_or(0)], Arm::Plain)
        } else {
            let (half, double) = (chunk / 2, 2 * chunk);
            let finer = self.allows(half).then_some(([chunk, half], Arm::Plain));
            let coarser = self.allows(double).then_some(([double, chunk], Arm::Other));
            let whole = Some(([0, chunk], Arm::Other));
            let pairs: [_; 3] = [coarser, finer, whole];
            let count = pairs.iter().flatten().count();
            let pair = pairs
                .into_iter()
                .flatten()
                .nth(self.pairs_tried % count.max(1));
            pair.unwrap_or(([0, chunk], Arm::Other))
        };
        self.pair = pair.map(|bytes| u32::try_from(bytes).unwrap_or(0));
        self.experiment.set_arms(in_force);
    }

    /// Chunks to try against whole requests. The smallest first, because a request that gains from pieces
    /// usually gains most from many.
    fn first_chunks(&self) -> impl Iterator<Item = u64> {
        let largest_bytes = self.class_bytes / 2;
        std::iter::successors(Some(self.chunk_min_bytes), |bytes| Some(bytes * 2))
            .take_while(move |bytes| *bytes <= largest_bytes)
    }

    fn allows(&self, chunk_bytes: u64) -> bool {
        chunk_bytes >= self.chunk_min_bytes && chunk_bytes <= self.class_bytes / 2
    }

    fn chunk_of(&self, arm: Arm) -> u32 {
        let [plain, other] = self.pair;
        match arm {
            Arm::Plain => plain,
            Arm::Other => other,
        }
    }
}
