//! The estimates of one direction, size class and load.

use std::num::NonZeroU32;

use super::state::{Reason, SplitState};
use super::{CHUNK_MAX_BYTES, Direction, SPLIT_OPS_MAX};

/// Whole requests, and chunks of 4 KiB to 4 MiB.
const ARMS: usize = 12;
/// Arm of whole requests.
const WHOLE: u8 = 0;
/// Not an arm: a request that went whole because the device was busy enough. It counts for the cell
/// as a whole, and says nothing of any arm.
pub(super) const PASSED: u8 = ARMS as u8;
/// At most one request in this many explores.
const EXPLORE_EVERY: u32 = 50;
/// … and in this many once every other arm has proved clearly worse.
const EXPLORE_EVERY_SETTLED: u32 = 200;
/// Samples before an arm that is far better may take over …
const SAMPLES_MIN: u32 = 4;
/// … and before one that is a little better may: the noise of a real disk is larger than that.
const SAMPLES_SURE: u32 = 12;
/// Samples after which an arm counts as judged.
const SAMPLES_JUDGED: u32 = 8;
/// Shares of the latency in force at which an arm is a little and far better …
const BETTER: f64 = 0.95;
const FAR_BETTER: f64 = 0.8;
/// … and whole requests take over when they are no slower than this: ties go to fewer ops.
const WHOLE_ENOUGH: f64 = 1.02;
/// Clearly worse: not worth exploring as often.
const WORSE: f64 = 1.10;
/// One sample counts at most this often the estimate: an outlier is a preempted thread, not the device.
const OUTLIER: f64 = 4.0;
/// The device is another when its recent latency leaves this band around the long estimate.
const CHANGED: std::ops::Range<f64> = 0.7..1.4;
/// Requests between two changes of what is in force; a new arm is on trial so long.
const DWELL: u32 = 64;
/// On trial an arm must bring the cost of all requests to this share of what it was: among others left
/// whole, one that is split only takes a larger share of the device, which is no gain.
const KEPT: f64 = 0.95;
/// Requests over which a cost is measured, for each that is in flight: its ends are blurred by those.
const STRETCH: u32 = 64;
/// Requests without another trial after one that failed, at first; doubled each time, so that a cell in
/// which splitting gains nothing comes to rest.
const BARRED: u64 = 500;
/// Most doublings of it.
const BARRED_DOUBLINGS_MAX: u32 = 7;

/// Running totals over all large requests: time spent by all of them together, and what was moved.
///
/// The time counts those still in flight too. Latencies alone would not do: where a split request
/// takes the device from whole ones beside it, the fast ones end often and the starved ones never.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Account {
    /// Requests in flight, integrated over time, in nanoseconds.
    pub(super) spent_ns: f64,
    /// KiB moved by requests that have ended.
    pub(super) moved_kib: f64,
}

impl Account {
    /// Nanoseconds that requests spent for each KiB.
    fn cost_since(self, start: Account) -> f64 {
        (self.spent_ns - start.spent_ns) / (self.moved_kib - start.moved_kib).max(1.0)
    }
}

/// What a cell says of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pick {
    pub(super) chunk_bytes: Option<NonZeroU32>,
    pub(super) arm: u8,
}

/// Running latency estimate of one way to serve requests, in nanoseconds per KiB.
#[derive(Debug, Clone, Copy, Default)]
struct Arm {
    mean: f64,
    samples: u32,
    /// Failed its trial: the others have a turn first.
    failed: bool,
}

impl Arm {
    /// The first samples are averaged; later ones move the estimate by a sixteenth (what is in
    /// force) or an eighth (what is explored rarely, and must follow the device all the same).
    fn add(&mut self, value: f64, weight_min: f64) {
        let value = if self.samples == 0 {
            value
        } else {
            value.min(self.mean * OUTLIER)
        };
        self.samples = self.samples.saturating_add(1);
        let weight = (1.0 / f64::from(self.samples)).max(weight_min);
        self.mean += (value - self.mean) * weight;
    }
}

#[derive(Debug)]
pub(super) struct Cell {
    arms: [Arm; ARMS],
    /// Chunk of each arm as a power of two; `None`: not considered here.
    current: u8,
    chunk_min_log: u8,
    chunk_max_log: u8,
    /// Arm 1 has chunks of this many bytes (log₂).
    first_log: u8,
    reason: Reason,
    seen: u64,
    explored: u64,
    since_explored: u32,
    dwell: u32,
    /// What was in force before, and the cost of all requests then, while a new arm is on trial.
    before: Option<(u8, Option<f64>)>,
    /// Latency of the last few dozen requests of the arm in force.
    recent: Arm,
    /// Cost of all large requests, of this cell and beside it, while the arm in force was served.
    level: Option<f64>,
    /// Where the present stretch of requests began, and how many of this cell have ended in it.
    stretch: Account,
    ended: u32,
    settling: bool,
    stretch_requests: u32,
    /// Trials failed, and how many requests must have been seen before the next.
    trials_failed: u32,
    barred_until: u64,
    noise: u64,
}

impl Cell {
    /// `measured`: the chunk that a probe found best, 0 for whole requests.
    pub(super) fn new(
        chunk_min_bytes: u32,
        class_bytes: u64,
        load: usize,
        measured: Option<u32>,
    ) -> Cell {
        let chunk_max = (class_bytes / 2).min(u64::from(CHUNK_MAX_BYTES)).max(1);
        let chunk_min = u64::from(chunk_min_bytes).max(class_bytes / u64::from(SPLIT_OPS_MAX));
        let first_log = super::CHUNK_MIN_BYTES.ilog2() as u8;
        let mut cell = Cell {
            arms: [Arm::default(); ARMS],
            current: WHOLE,
            chunk_min_log: chunk_min.max(1).next_power_of_two().ilog2() as u8,
            chunk_max_log: chunk_max.ilog2() as u8,
            first_log,
            reason: Reason::Start,
            seen: 0,
            explored: 0,
            since_explored: 0,
            dwell: 0,
            before: None,
            recent: Arm::default(),
            level: None,
            stretch: Account::default(),
            ended: 0,
            settling: true,
            stretch_requests: STRETCH << load,
            trials_failed: 0,
            barred_until: 0,
            noise: class_bytes | 1,
        };
        if let Some(chunk) = measured {
            cell.reason = Reason::Profile;
            let log = chunk.checked_ilog2().map(|log| log as u8);
            cell.current = log
                .filter(|&log| cell.allows(log))
                .map_or(WHOLE, |log| cell.arm_of(log));
        }
        cell
    }

    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// A request that is left whole because the device is busy enough.
    pub(super) fn pass(&mut self) {
        self.seen += 1;
    }

    /// The way to serve a request, of at most `headroom` ops.
    pub(super) fn pick(&mut self, len_bytes: u64, headroom: u32) -> Pick {
        self.seen += 1;
        self.since_explored = self.since_explored.saturating_add(1);
        self.dwell = self.dwell.saturating_sub(1);
        let arm = if self.may_explore() {
            self.explore()
        } else {
            self.current
        };
        let Some(log) = self.log_of(arm) else {
            return Pick {
                chunk_bytes: None,
                arm: WHOLE,
            };
        };
        // The chunk grows until the ops fit under the device's useful depth.
        let least = len_bytes
            .div_ceil(u64::from(headroom))
            .max(1)
            .next_power_of_two()
            .ilog2() as u8;
        let log = log.max(least);
        if u64::from(log) >= 32 || 1 << log >= len_bytes || !self.allows(log) {
            return Pick {
                chunk_bytes: None,
                arm: WHOLE,
            };
        }
        Pick {
            chunk_bytes: NonZeroU32::new(1 << log),
            arm: self.arm_of(log),
        }
    }

    /// Takes in how long a request took, and lets another arm take over where that is due.
    pub(super) fn learn(&mut self, arm: usize, len_bytes: u64, latency_ns: u64, account: Account) {
        self.measure(account);
        let value = latency_ns as f64 * 1024.0 / len_bytes.max(1) as f64;
        let in_force = arm == usize::from(self.current);
        let Some(entry) = self.arms.get_mut(arm) else {
            return;
        };
        entry.add(value, if in_force { 1.0 / 64.0 } else { 1.0 / 8.0 });
        if in_force {
            self.recent.add(value, 1.0 / 16.0);
            self.notice_change();
        }
        self.reconsider();
    }

    /// The stretch at hand tells no cost.
    pub(super) fn measure_anew(&mut self) {
        self.ended = 0;
    }

    pub(super) fn state(&self, direction: Direction, class_bytes: u64, load: usize) -> SplitState {
        let (whole, now) = (
            self.arms[usize::from(WHOLE)],
            self.arms[usize::from(self.current)],
        );
        let known = whole.samples > 0 && now.samples > 0 && now.mean > 0.0;
        SplitState {
            direction,
            class_bytes,
            requests_min: 1 << load,
            chunk_bytes: self.log_of(self.current).map_or(0, |log| 1 << log),
            reason: if self.before.is_some() {
                Reason::Trial
            } else {
                self.reason
            },
            gain: if known { whole.mean / now.mean } else { 1.0 },
            explored: self.explored as f64 / self.seen.max(1) as f64,
            seen: self.seen,
        }
    }

    fn allows(&self, log: u8) -> bool {
        (self.chunk_min_log..=self.chunk_max_log).contains(&log)
    }

    fn arm_of(&self, log: u8) -> u8 {
        log - self.first_log + 1
    }

    fn log_of(&self, arm: u8) -> Option<u8> {
        (arm != WHOLE).then(|| arm - 1 + self.first_log)
    }

    /// Arms worth trying: whole, and the chunks between the device's block and half a request.
    fn candidates(&self) -> impl Iterator<Item = u8> {
        let chunks = self.chunk_min_log..=self.chunk_max_log;
        std::iter::once(WHOLE).chain(chunks.map(|log| self.arm_of(log)))
    }

    /// Never more than the share allows, at moments that no periodic load can fall in step with.
    fn may_explore(&mut self) -> bool {
        let every = if self.is_settled() {
            EXPLORE_EVERY_SETTLED
        } else {
            EXPLORE_EVERY
        };
        if (self.explored + 1) * u64::from(every) > self.seen {
            return false;
        }
        self.noise = self
            .noise
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.since_explored >= every / 2 + (self.noise >> 33) as u32 % every
            || self.since_explored >= every
    }

    /// The arm tried least; among equals the one whose turn it is.
    fn explore(&mut self) -> u8 {
        let current = self.current;
        let turn = self.explored;
        let least = self
            .candidates()
            .filter(|&arm| arm != current)
            .min_by_key(|&arm| {
                (
                    self.arms[usize::from(arm)].samples,
                    u64::from(arm) ^ (turn & 3),
                )
            });
        match least {
            Some(arm) => {
                self.explored += 1;
                self.since_explored = 0;
                arm
            }
            None => current,
        }
    }

    /// Every other arm was tried often enough and is clearly worse.
    fn is_settled(&self) -> bool {
        let now = self.arms[usize::from(self.current)];
        let mut others = self.candidates().filter(|&arm| arm != self.current);
        now.samples >= SAMPLES_JUDGED
            && others.all(|arm| {
                let other = self.arms[usize::from(arm)];
                other.samples >= SAMPLES_JUDGED && other.mean > now.mean * WORSE
            })
    }

    /// The arm in force has become faster or slower than it was for long: what is known of the others
    /// is of another device.
    fn notice_change(&mut self) {
        // On trial an arm is new to being in force; what it was while explored says little.
        if self.before.is_some() {
            return;
        }
        let now = self.arms[usize::from(self.current)];
        if self.recent.samples < 32 || CHANGED.contains(&(self.recent.mean / now.mean)) {
            return;
        }
        self.arms = [Arm::default(); ARMS];
        let now = &mut self.arms[usize::from(self.current)];
        (now.mean, now.samples) = (self.recent.mean, 1);
        self.recent = Arm::default();
        self.before = None;
    }

    fn reconsider(&mut self) {
        let now = self.arms[usize::from(self.current)];
        if self.dwell > 0 || now.samples < SAMPLES_MIN || self.fails_trial() {
            return;
        }
        let judged = |arm: u8| self.arms[usize::from(arm)];
        let whole = judged(WHOLE);
        let even = whole.samples >= SAMPLES_JUDGED && whole.mean <= now.mean * WHOLE_ENOUGH;
        if self.current != WHOLE && even {
            return self.take_over(WHOLE, Reason::NoGain);
        }
        let better = |arm: &u8| {
            let other = judged(*arm);
            (other.samples >= SAMPLES_SURE && other.mean < now.mean * BETTER)
                || (other.samples >= SAMPLES_MIN && other.mean < now.mean * FAR_BETTER)
        };
        // Without a cost to compare with there could be no trial.
        if self.level.is_none()
            || self.seen < self.barred_until
            || !self.candidates().any(|arm| better(&arm))
        {
            return;
        }
        let open = self
            .candidates()
            .filter(|&arm| !judged(arm).failed)
            .filter(better);
        match open.min_by(|&a, &b| judged(a).mean.total_cmp(&judged(b).mean)) {
            Some(WHOLE) => self.take_over(WHOLE, Reason::NoGain),
            Some(best) => self.take_over(best, Reason::Faster),
            None => self.forgive(),
        }
    }

    fn bar(&mut self) {
        let doublings = self.trials_failed.min(BARRED_DOUBLINGS_MAX);
        self.barred_until = self.seen + (BARRED << doublings);
    }

    /// Nothing beats what is in force but arms that failed: after a while they may be tried again.
    fn forgive(&mut self) {
        self.arms.iter_mut().for_each(|arm| arm.failed = false);
        self.bar();
    }

    /// Closes a stretch of requests, if it is long enough, and takes its cost into the level.
    fn measure(&mut self, account: Account) {
        if self.ended == 0 {
            self.stretch = account;
        }
        self.ended += 1;
        if self.ended <= self.stretch_requests {
            return;
        }
        self.ended = 0;
        let cost = account.cost_since(self.stretch);
        if !std::mem::take(&mut self.settling) {
            self.level = Some(
                self.level
                    .map_or(cost, |level| level + (cost - level) / 4.0),
            );
        }
    }

    /// Ends a trial; `true` when the arm has failed it and what was before is in force again.
    fn fails_trial(&mut self) -> bool {
        if self.level.is_none() {
            return false;
        }
        let Some((arm, mean)) = self.before.take() else {
            return false;
        };
        let kept = match (mean, self.level) {
            (Some(before), Some(now)) => now <= before * KEPT,
            _ => true,
        };
        if kept || self.current == WHOLE {
            return false;
        }
        if let Some(failed) = self.arms.get_mut(usize::from(self.current)) {
            failed.failed = true;
        }
        self.bar();
        self.trials_failed += 1;
        self.take_over(
            arm,
            if arm == WHOLE {
                Reason::NoGain
            } else {
                Reason::Faster
            },
        );
        self.before = None;
        true
    }

    fn take_over(&mut self, arm: u8, reason: Reason) {
        self.before = Some((self.current, self.level));
        // The stretch to come has requests of both kinds in flight: it is measured, and then forgotten.
        self.level = None;
        self.ended = 0;
        self.settling = true;
        self.current = arm;
        self.reason = reason;
        self.dwell = DWELL;
        self.recent = Arm::default();
    }
}
