//! The record of one vring: what any thread may read of it.

use std::array::from_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::{Coarse, Distribution, ErrorKind, Fine, Kind};
use crate::stats::add;

/// A part of a request's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// In the ring, while the worker was awake: at most so long.
    Ring,
    /// From the ring to the engine. Sampled.
    Plan,
    /// With the engine.
    Device,
    /// From its end to the used index that shows it. Sampled.
    Publish,
}

impl Stage {
    /// All of them, in order.
    pub const ALL: [Stage; 4] = [Stage::Ring, Stage::Plan, Stage::Device, Stage::Publish];

    /// One word.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Ring => "ring",
            Stage::Plan => "plan",
            Stage::Device => "device",
            Stage::Publish => "publish",
        }
    }
}

/// What one vring did since the daemon started, over all sessions.
#[derive(Debug)]
pub struct VringRecord {
    index: u16,
    pub(super) requests: [AtomicU64; Kind::COUNT],
    pub(super) bytes: [AtomicU64; Kind::COUNT],
    pub(super) errors: [AtomicU64; ErrorKind::ALL.len()],
    pub(super) kicks: AtomicU64,
    pub(super) calls: AtomicU64,
    pub(super) calls_suppressed: AtomicU64,
    pub(super) zero_looked: AtomicU64,
    pub(super) zero_found: AtomicU64,
    pub(super) device: [Fine; Kind::COUNT],
    pub(super) split: [Fine; Kind::SPLIT_COUNT],
    pub(super) ring: [Coarse; Kind::COUNT],
    pub(super) plan: [Coarse; Kind::COUNT],
    pub(super) publish: [Coarse; Kind::COUNT],
    pub(super) call: Coarse,
    begun: Mutex<Arc<[AtomicU64]>>,
}

impl VringRecord {
    pub(super) fn new(index: u16) -> VringRecord {
        VringRecord {
            index,
            requests: zeroes(),
            bytes: zeroes(),
            errors: zeroes(),
            kicks: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            calls_suppressed: AtomicU64::new(0),
            zero_looked: AtomicU64::new(0),
            zero_found: AtomicU64::new(0),
            device: from_fn(|_| Fine::new()),
            split: from_fn(|_| Fine::new()),
            ring: from_fn(|_| Coarse::new()),
            plan: from_fn(|_| Coarse::new()),
            publish: from_fn(|_| Coarse::new()),
            call: Coarse::new(),
            begun: Mutex::new(Arc::new([])),
        }
    }

    /// Its index in the device.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Requests of a kind that ended well.
    pub fn requests(&self, kind: Kind) -> u64 {
        load(&self.requests, kind.index())
    }

    /// Bytes that they moved.
    pub fn bytes(&self, kind: Kind) -> u64 {
        load(&self.bytes, kind.index())
    }

    /// Requests that did not end well.
    pub fn errors(&self, kind: ErrorKind) -> u64 {
        load(&self.errors, kind as usize)
    }

    /// Kicks that woke the worker or were found.
    pub fn kicks(&self) -> u64 {
        self.kicks.load(Ordering::Relaxed)
    }

    /// Calls to the guest.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Published batches for which the guest wanted no call, or has no way to be called.
    pub fn calls_suppressed(&self) -> u64 {
        self.calls_suppressed.load(Ordering::Relaxed)
    }

    /// Reads whose data was looked at, and how many of those held nothing but zeroes.
    pub fn zero_reads(&self) -> (u64, u64) {
        // In this order: never more found than looked at.
        let found = self.zero_found.load(Ordering::Acquire);
        (self.zero_looked.load(Ordering::Relaxed), found)
    }

    /// How long requests of a kind took in a stage, split ones included.
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

    /// How long the engine had those of them that were split; `None`: of this kind none can be.
    pub fn split_times(&self, kind: Kind) -> Option<Distribution> {
        Some(self.split.get(kind.split_index()?)?.read())
    }

    /// How long calls to the guest were held back.
    pub fn call_times(&self) -> Distribution {
        self.call.read()
    }

    /// Requests in flight, and when the oldest of them was taken, in nanoseconds of the disk's time.
    /// Requests that end at once are never seen here.
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

    /// A table for a vring of this size that starts: when the request of each head was taken, 0 where
    /// there is none.
    pub(super) fn begin(&self, vring_size: u16) -> Arc<[AtomicU64]> {
        let table: Arc<[AtomicU64]> = (0..vring_size).map(|_| AtomicU64::new(0)).collect();
        *self.begun.lock().unwrap_or_else(PoisonError::into_inner) = table.clone();
        table
    }
}

fn zeroes<const N: usize>() -> [AtomicU64; N] {
    from_fn(|_| AtomicU64::new(0))
}

fn load(counters: &[AtomicU64], at: usize) -> u64 {
    counters
        .get(at)
        .map_or(0, |count| count.load(Ordering::Relaxed))
}

/// Adds to one of some counters.
#[inline]
pub(super) fn add_at(counters: &[AtomicU64], at: usize, n: u64) {
    if let Some(counter) = counters.get(at) {
        add(counter, n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_small() {
        assert!(size_of::<VringRecord>() <= 64 << 10);
    }
}
