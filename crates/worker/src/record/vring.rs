//! The record of one vring, which any thread may read.

use std::array::from_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::{Category, Coarse, Distribution, ErrorKind, Fine, Kind};
use crate::Totals;
use crate::counter::add;

/// A stage of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// In the ring while the worker was awake: the maximum time.
    Ring,
    /// From the ring to the store. Sampled.
    Plan,
    /// In the store.
    Device,
    /// From its completion to the used index that publishes it. Sampled.
    Publish,
}

impl Stage {
    /// All stages, in order.
    pub const ALL: [Stage; 4] = [Stage::Ring, Stage::Plan, Stage::Device, Stage::Publish];

    /// Returns its name in output.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Ring => "ring",
            Stage::Plan => "plan",
            Stage::Device => "device",
            Stage::Publish => "publish",
        }
    }
}

/// Events of a vring that are not requests. Each is counted in the field of [`Totals`] with the same name.
#[derive(Debug, Clone, Copy)]
pub(crate) enum VringEvent {
    Kick,
    Call,
    CallSuppressed,
    CallCoalesced,
    Retired,
    Held,
    Redone,
    Throttled,
}

impl VringEvent {
    const COUNT: usize = VringEvent::Throttled as usize + 1;
}

/// Stalled requests of a vring: how many, and the oldest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StalledRequests {
    /// Requests that wait for the operator.
    pub held: u32,
    /// Requests that wait for a retry.
    pub retrying: u32,
    /// The oldest one, or the oldest held one if any is held: `read`, `write`, `discard` or `write-zeroes`.
    pub verb: &'static str,
    /// Its start, in units of 512 bytes.
    pub sector: u64,
    /// The errno of its last failure.
    pub errno: i32,
    /// When it first failed, on the device's clock.
    pub since_ns: u64,
}

/// The verbs, as a record encodes them.
const STALL_VERBS: [&str; 6] = ["read", "write", "discard", "write-zeroes", "flush", "other"];

/// Counters and times of one vring since the daemon started, over all sessions. Aligned so that the records of
/// two workers share no cache line.
#[derive(Debug)]
#[repr(align(64))]
pub struct VringRecord {
    index: u16,
    /// Requests that succeeded, and their bytes.
    done: [[AtomicU64; 2]; Kind::COUNT],
    /// Requests that the store failed.
    pub(super) failed: [AtomicU64; ErrorKind::ALL.len()],
    /// Requests that were refused.
    pub(super) refused: [AtomicU64; ErrorKind::ALL.len()],
    events: [AtomicU64; VringEvent::COUNT],
    /// The parts of [`StalledRequests`]: counts, sector, verb and errno, time.
    stalled: [AtomicU64; 4],
    pub(super) zero_looked: AtomicU64,
    pub(super) zero_found: AtomicU64,
    pub(super) device: [Fine; Kind::COUNT],
    pub(super) split: [Fine; Kind::SPLIT_COUNT],
    pub(super) ring: [Coarse; Kind::COUNT],
    pub(super) plan: [Coarse; Kind::COUNT],
    pub(super) publish: [Coarse; Kind::COUNT],
    pub(super) call: Coarse,
    pub(super) throttle: Coarse,
    begun: Mutex<Arc<[AtomicU64]>>,
}

impl VringRecord {
    pub(super) fn new(index: u16) -> VringRecord {
        VringRecord {
            index,
            done: Default::default(),
            failed: Default::default(),
            refused: Default::default(),
            events: Default::default(),
            stalled: Default::default(),
            zero_looked: AtomicU64::default(),
            zero_found: AtomicU64::default(),
            device: from_fn(|_| Fine::new()),
            split: from_fn(|_| Fine::new()),
            ring: from_fn(|_| Coarse::new()),
            plan: from_fn(|_| Coarse::new()),
            publish: from_fn(|_| Coarse::new()),
            call: Coarse::new(),
            throttle: Coarse::new(),
            begun: Mutex::new(Arc::new([])),
        }
    }

    /// Returns its index in the device.
    pub fn index(&self) -> u16 {
        self.index
    }

    #[inline]
    pub(super) fn count(&self, event: VringEvent) {
        add(&self.events[event as usize], 1);
    }

    /// Counts `n` such requests that succeeded.
    #[inline]
    pub(super) fn ended(&self, kind: Kind, len_bytes: u64, n: u64) {
        if let Some([requests, bytes]) = self.done.get(kind.index()) {
            add(requests, n);
            add(bytes, len_bytes.wrapping_mul(n));
        }
    }

    /// Returns the number of requests of a kind that succeeded, and the bytes that they moved.
    pub fn done(&self, kind: Kind) -> [u64; 2] {
        let done = self.done.get(kind.index());
        done.map_or([0; 2], |done| done.each_ref().map(load))
    }

    /// Returns the number of requests that failed with this kind of error.
    pub fn errors(&self, kind: ErrorKind) -> u64 {
        let both = [&self.failed, &self.refused];
        both.map(|errors| load(&errors[kind as usize])).iter().sum()
    }

    /// Adds its counters.
    pub fn add_to(&self, totals: &mut Totals) {
        for kind in Kind::all() {
            let [requests, bytes] = self.done(kind);
            let (requests_sum, bytes_sum) = match kind.way() {
                Category::Read => (&mut totals.reads, &mut totals.read_bytes),
                Category::Write => (&mut totals.writes, &mut totals.write_bytes),
                Category::Flush | Category::Other => (&mut totals.others, &mut 0),
            };
            *requests_sum += requests;
            *bytes_sum += bytes;
        }
        for kind in ErrorKind::ALL {
            totals.failed += load(&self.failed[kind as usize]);
            let refused = match kind {
                ErrorKind::Broken => &mut totals.broken,
                _ => &mut totals.refused,
            };
            *refused += load(&self.refused[kind as usize]);
        }
        let [
            kicks,
            calls,
            suppressed,
            coalesced,
            retired,
            held,
            redone,
            throttled,
        ] = self.events.each_ref().map(load);
        totals.kicks += kicks;
        totals.calls += calls;
        totals.calls_suppressed += suppressed;
        totals.calls_coalesced += coalesced;
        totals.retired += retired;
        totals.held += held;
        totals.redone += redone;
        totals.throttled += throttled;
    }

    #[cold]
    pub(super) fn show_stalled(&self, stalled: Option<StalledRequests>) {
        let words = stalled.map_or([0; 4], |stalled| {
            let verb = STALL_VERBS.iter().position(|verb| *verb == stalled.verb);
            [
                u64::from(stalled.held) << 32 | u64::from(stalled.retrying),
                stalled.sector,
                (verb.unwrap_or_default() as u64) << 32 | u64::from(stalled.errno as u32),
                stalled.since_ns,
            ]
        });
        for (kept, word) in self.stalled.iter().zip(words) {
            kept.store(word, Ordering::Relaxed);
        }
    }

    /// Returns the stalled requests, if there are any. A reader during an update may see parts of two values. They are only
    /// displayed, so this does no harm.
    pub fn stalled(&self) -> Option<StalledRequests> {
        let [counts, sector, fault, since_ns] = self.stalled.each_ref().map(load);
        (counts > 0).then(|| StalledRequests {
            held: (counts >> 32) as u32,
            retrying: counts as u32,
            verb: STALL_VERBS
                .get((fault >> 32) as usize)
                .copied()
                .unwrap_or("other"),
            sector,
            errno: fault as u32 as i32,
            since_ns,
        })
    }

    /// Returns the number of reads whose data was checked, and of those that found only zeroes.
    pub fn zero_reads(&self) -> (u64, u64) {
        // In this order, or more could be found than were checked.
        let found = self.zero_found.load(Ordering::Acquire);
        (self.zero_looked.load(Ordering::Relaxed), found)
    }

    #[cold]
    pub(super) fn found(&self, is_zero: bool) {
        add(&self.zero_looked, 1);
        if is_zero {
            // Stored after the other counter, since readers load them in the opposite order.
            let found = self.zero_found.load(Ordering::Relaxed);
            self.zero_found.store(found + 1, Ordering::Release);
        }
    }

    /// Returns how long requests of a kind took in a stage, split requests included.
    pub fn times(&self, stage: Stage, kind: Kind) -> Distribution {
        let at = kind.index();
        let read = match stage {
            Stage::Ring => self.ring.get(at).map(Coarse::read),
            Stage::Plan => self.plan.get(at).map(Coarse::read),
            Stage::Publish => self.publish.get(at).map(Coarse::read),
            Stage::Device => self.device.get(at).map(Fine::read).map(|mut all| {
                if let Some(split) = self.split_times(kind) {
                    all.merge(&split);
                }
                all
            }),
        };
        read.unwrap_or_else(|| Coarse::new().read())
    }

    /// Returns how long the split requests of this kind took in the store. `None`: this kind is never split.
    pub fn split_times(&self, kind: Kind) -> Option<Distribution> {
        Some(self.split.get(kind.split_index()?)?.read())
    }

    /// Returns how long calls to the guest were held back.
    pub fn call_times(&self) -> Distribution {
        self.call.read()
    }

    /// Returns how long requests waited in the ring for the disk's limits.
    pub fn throttle_times(&self) -> Distribution {
        self.throttle.read()
    }

    /// Returns the number of requests in flight, and when the oldest was taken, on the device's clock. Inline requests never
    /// appear here.
    pub fn in_flight(&self) -> (u32, Option<u64>) {
        let begun = self
            .begun
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let times = begun.iter().map(|time| time.load(Ordering::Relaxed));
        times.filter(|time| *time > 0).fold(
            (0, None),
            |(count, oldest): (u32, Option<u64>), time| {
                let oldest = oldest.map_or(time, |oldest| oldest.min(time));
                (count.saturating_add(1), Some(oldest))
            },
        )
    }

    /// Makes a table for a vring of this size that starts: when the request of each head was taken, or 0.
    pub(super) fn begin(&self, vring_size: u16) -> Arc<[AtomicU64]> {
        let table: Arc<[AtomicU64]> = (0..vring_size).map(|_| AtomicU64::new(0)).collect();
        *self.begun.lock().unwrap_or_else(PoisonError::into_inner) = table.clone();
        table
    }
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_small() {
        assert!(size_of::<VringRecord>() <= 64 << 10);
    }
}
