//! Counts and times of a worker's own loop.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cleave_engine::Wait;

use super::accept::Accepted;
use crate::counter::add;
use crate::lane::Lane;
use crate::record::{Laps, RingCheck, RingState};
use crate::stats::Stats;

/// Observes the loop: counts what it did and times some of its laps. Takes no decisions.
pub(crate) struct Meters {
    pub(crate) stats: Arc<Stats>,
    pub(crate) laps: Laps,
}

impl Meters {
    /// Counts a lap. Called at the end of a lap, before its system call. `worked`: the lap accepted or completed something.
    #[inline]
    pub(super) fn lap_ended(&mut self, worked: bool, polled: u64, lanes: &mut [Option<Lane>]) {
        if !worked {
            return self.laps.idled();
        }
        add(&self.stats.laps, 1);
        self.stats.polled.store(polled, Ordering::Relaxed);
        if let Some(ns) = self.laps.length_ns() {
            for lane in lanes.iter_mut().flatten() {
                lane.record.lap_ended(ns);
            }
        }
        self.laps.worked();
    }

    /// Reports to the vring's record whether anything was left in the ring. Nothing is reported for a ring that
    /// is now empty in a lap without a clock reading, which is the most frequent case.
    #[inline]
    pub(super) fn ring_checked(&self, lane: &mut Lane, accepted: Accepted, has_room: bool) {
        let (seen, left) = lane.vring.seen();
        let state = match accepted.more || !has_room || lane.throttled.is_some() {
            true => RingState::Left,
            // A ring that is not served may still hold what was left in it before.
            false if left == 0 && self.laps.known_ns().is_none() => return lane.record.drained(),
            false => RingState::Drained,
        };
        let check = RingCheck {
            seen,
            left,
            state,
            took: accepted.chains > 0,
        };
        lane.record.ring_checked(check, &self.laps);
    }

    /// Counts a sleep. Called when the thread has returned from the kernel.
    #[inline]
    pub(crate) fn entered(&mut self, wait: Wait) {
        if wait != Wait::No {
            add(&self.stats.wakeups, 1);
            self.laps.slept();
        }
    }
}
