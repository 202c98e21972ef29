//! Decides when a worker reads the clock.

use std::time::Instant;

/// Laps with work, of which the first few are timed if requests complete inline: reading the clock costs a
/// third of such a request. Several successive laps are timed, since the time between two of them bounds how
/// long a chain waited.
const LAPS: u32 = 512;
const TIMED: u32 = 4;
/// One in this many laps after a sleep is timed.
const WOKEN_EVERY: u32 = 4;
/// Number of timed laps between two in which the planning and publishing of a request are timed too.
const PROBED_EVERY: u32 = 8;

/// The clock of one worker, in nanoseconds on its device's clock.
///
/// A lap in which a request is pushed to the store or completes there reads the clock once, when the time is
/// first needed; all its requests are taken and complete at that time. For inline requests only the lap's
/// length is needed: [`TIMED`] laps in [`LAPS`] are timed for all, and one in [`WOKEN_EVERY`] of those after a
/// sleep. A lap without work reads no clock.
#[derive(Debug)]
pub(crate) struct Laps {
    epoch: Instant,
    on: bool,
    now_ns: u64,
    /// `now_ns` was read in this lap.
    fresh: bool,
    /// The previous lap had no work, or the worker has slept since.
    idle: bool,
    /// This lap is timed.
    timed: bool,
    /// A request completed inline in this timed lap.
    spot: bool,
    left: u32,
    woken_left: u32,
    probes_left: u32,
    probe: Probe,
    /// When the request was taken whose planning is timed.
    taken_ns: Option<u64>,
}

/// Which stages of a request are timed in this lap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Probe {
    plan: bool,
    publish: bool,
}

impl Laps {
    pub(crate) fn new(epoch: Instant, on: bool) -> Laps {
        Laps {
            epoch,
            on,
            now_ns: 0,
            fresh: false,
            idle: true,
            timed: on,
            spot: false,
            left: LAPS,
            woken_left: 0,
            probes_left: 0,
            probe: Probe::default(),
            taken_ns: None,
        }
    }

    /// Returns the time of this lap.
    #[inline]
    pub(crate) fn now_ns(&mut self) -> u64 {
        if !self.fresh {
            self.now_ns = self.read();
            self.fresh = true;
        }
        self.now_ns
    }

    /// Reads the clock. Never returns 0.
    pub(crate) fn read(&self) -> u64 {
        let ns = u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX);
        ns.max(1)
    }

    /// Returns true if the length of this lap is to be recorded.
    #[inline]
    pub(crate) fn is_timed(&self) -> bool {
        self.timed
    }

    /// Notes that a request completed inline in a timed lap.
    pub(crate) fn note_spot(&mut self) {
        self.now_ns();
        self.spot = true;
    }

    /// Returns the length of this lap so far, if it is to be recorded.
    #[inline]
    pub(crate) fn length_ns(&self) -> Option<u64> {
        self.spot.then(|| self.read().saturating_sub(self.now_ns))
    }

    /// Returns the time of this lap, if the clock was read.
    #[inline]
    pub(crate) fn known_ns(&self) -> Option<u64> {
        self.fresh.then_some(self.now_ns)
    }

    /// Returns true if the previous lap had no work, or the worker has slept since. A chain that was not in the ring then has
    /// just arrived, or has woken the worker.
    #[inline]
    pub(crate) fn was_idle(&self) -> bool {
        self.idle
    }

    /// Notes that a chain was taken in a timed lap. The first one of some laps is timed by itself.
    #[cold]
    pub(crate) fn taking(&mut self) {
        self.now_ns();
        let wanted = std::mem::take(&mut self.probe.plan);
        // Read again: the lap's time may be that of an earlier completion.
        self.taken_ns = wanted.then(|| self.read());
    }

    /// Returns how long the planning of the current request took, if it is timed.
    pub(crate) fn plan_ns(&mut self) -> Option<u64> {
        let taken_ns = self.taken_ns.take()?;
        Some(self.read().saturating_sub(taken_ns))
    }

    /// Returns true if the publishing of this request is to be timed.
    pub(crate) fn wants_publish(&mut self) -> bool {
        std::mem::take(&mut self.probe.publish)
    }

    /// Notes that a lap with work has ended, and has not slept yet.
    #[inline]
    pub(crate) fn worked(&mut self) {
        if !self.on {
            return;
        }
        self.left = match self.left.checked_sub(1) {
            None | Some(0) => LAPS,
            Some(left) => left,
        };
        let timed = self.left > LAPS - TIMED;
        // The lap after the last timed one still reports when its chains cannot have been in the ring.
        if !timed && !self.timed && !self.fresh {
            self.idle = false;
            return;
        }
        self.next(timed);
        self.idle = false;
    }

    /// Notes that a lap without work has ended.
    #[inline]
    pub(crate) fn idled(&mut self) {
        self.fresh = false;
        self.idle = true;
    }

    /// Notes that the worker has slept.
    pub(crate) fn slept(&mut self) {
        if self.on {
            self.idle = true;
            let timed = self.woken_left == 0;
            self.woken_left = self.woken_left.checked_sub(1).unwrap_or(WOKEN_EVERY - 1);
            self.next(timed);
        }
    }

    fn next(&mut self, timed: bool) {
        self.fresh = false;
        self.spot = false;
        self.timed = timed;
        if timed {
            let probe = self.probes_left == 0;
            self.probes_left = self.probes_left.checked_sub(1).unwrap_or(PROBED_EVERY - 1);
            self.probe = Probe {
                plan: probe,
                publish: probe,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many of `laps` were timed, with or without a sleep after each.
    fn timed(laps: u32, sleep: bool, on: bool) -> u32 {
        let mut clock = Laps::new(Instant::now(), on);
        (0..laps)
            .filter(|_| {
                let timed = clock.is_timed();
                clock.worked();
                if sleep {
                    clock.slept();
                }
                timed
            })
            .count() as u32
    }

    #[test]
    fn few_laps_are_timed_unless_the_worker_sleeps_between() {
        assert_eq!(timed(LAPS * 10, false, true), TIMED * 10);
        assert_eq!(timed(WOKEN_EVERY * 25, true, true), 25 + 1);
        assert_eq!(timed(LAPS * 10, true, false), 0);
    }

    #[test]
    fn a_lap_has_one_time() {
        let mut clock = Laps::new(Instant::now(), true);
        assert_eq!(clock.known_ns(), None);
        let first = clock.now_ns();
        assert!(first > 0 && clock.read() >= first);
        assert_eq!((clock.now_ns(), clock.known_ns()), (first, Some(first)));
        clock.worked();
        assert_eq!((clock.known_ns(), clock.was_idle()), (None, false));
        clock.idled();
        assert!(clock.was_idle());
    }

    #[test]
    fn a_lap_without_inline_requests_has_no_length() {
        let mut clock = Laps::new(Instant::now(), true);
        clock.now_ns();
        assert_eq!(clock.length_ns(), None);
        clock.note_spot();
        assert!(clock.length_ns().is_some());
        clock.worked();
        assert_eq!(clock.length_ns(), None);
    }

    #[test]
    fn planning_is_timed_now_and_then() {
        let mut clock = Laps::new(Instant::now(), true);
        let mut probed = 0;
        for _ in 0..WOKEN_EVERY * PROBED_EVERY * 5 {
            clock.slept();
            for _ in 0..3 {
                clock.taking();
                probed += u32::from(clock.plan_ns().is_some());
            }
        }
        assert_eq!(probed, 5);
    }
}
