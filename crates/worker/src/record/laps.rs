//! Time as a worker's loop sees it.

use std::time::Instant;

/// Of so many working laps, the first few are timed where requests end on the spot: reading the clock costs
/// a third of such a request. Several in a row, as the time between two tells how long a chain can have
/// waited.
const LAPS: u32 = 512;
const TIMED: u32 = 4;
/// Of laps that follow a sleep, one in so many is timed.
const WOKEN_EVERY: u32 = 4;
/// Timed laps between two in which a request's planning and publishing are timed too.
const PROBED_EVERY: u32 = 8;

/// The clock of one worker, in nanoseconds of its disk's time.
///
/// A lap in which a request goes to the engine, or comes back from it, reads the clock once, when it is first
/// asked for; its requests are taken and end at that time. Requests that end on the spot need no time
/// but their lap's length, and those of [`TIMED`] laps in [`LAPS`] stand for the rest; one in
/// [`WOKEN_EVERY`] of those that follow a sleep is timed too. A lap that finds nothing reads no clock.
#[derive(Debug)]
pub(crate) struct Laps {
    epoch: Instant,
    on: bool,
    now_ns: u64,
    /// `now_ns` is of this lap.
    fresh: bool,
    /// The lap before found nothing, or the worker has slept since.
    idle: bool,
    /// This lap is timed.
    timed: bool,
    /// A request ended on the spot in this timed lap.
    spot: bool,
    left: u32,
    woken_left: u32,
    probes_left: u32,
    probe: Probe,
    /// When the request whose planning is timed was taken.
    taken_ns: Option<u64>,
}

/// What of a request is timed apart in this lap.
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

    /// This lap's time.
    #[inline]
    pub(crate) fn now_ns(&mut self) -> u64 {
        if !self.fresh {
            self.now_ns = self.read();
            self.fresh = true;
        }
        self.now_ns
    }

    /// The time, read anew; never 0.
    pub(crate) fn read(&self) -> u64 {
        let ns = u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX);
        ns.max(1)
    }

    /// Whether this lap's length is wanted.
    #[inline]
    pub(crate) fn is_timed(&self) -> bool {
        self.timed
    }

    /// A request has ended on the spot, in a timed lap.
    pub(crate) fn note_spot(&mut self) {
        self.now_ns();
        self.spot = true;
    }

    /// How long this lap took until now, where that is wanted.
    #[inline]
    pub(crate) fn length_ns(&self) -> Option<u64> {
        self.spot.then(|| self.read().saturating_sub(self.now_ns))
    }

    /// This lap's time, if it has one.
    #[inline]
    pub(crate) fn known_ns(&self) -> Option<u64> {
        self.fresh.then_some(self.now_ns)
    }

    /// Whether the lap before found nothing, or the worker has slept since: what was not there then came a
    /// moment ago, or woke the worker.
    #[inline]
    pub(crate) fn was_idle(&self) -> bool {
        self.idle
    }

    /// A chain was taken, in a timed lap: the time of that is wanted of the first in a lap now and then.
    #[cold]
    pub(crate) fn taking(&mut self) {
        self.now_ns();
        let wanted = std::mem::take(&mut self.probe.plan);
        // The lap's time may be that of an end before.
        self.taken_ns = wanted.then(|| self.read());
    }

    /// How long the planning of the request at hand took until now, where that is wanted.
    pub(crate) fn plan_ns(&mut self) -> Option<u64> {
        let taken_ns = self.taken_ns.take()?;
        Some(self.read().saturating_sub(taken_ns))
    }

    /// Whether to time from the end of this request to its publishing.
    pub(crate) fn wants_publish(&mut self) -> bool {
        std::mem::take(&mut self.probe.publish)
    }

    /// A lap that worked has ended, without having slept so far.
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
        // The last of a few has its successor's chains told when they cannot have been there.
        if !timed && !self.timed && !self.fresh {
            self.idle = false;
            return;
        }
        self.next(timed);
        self.idle = false;
    }

    /// A lap that found nothing has ended.
    #[inline]
    pub(crate) fn idled(&mut self) {
        self.fresh = false;
        self.idle = true;
    }

    /// The worker has slept.
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

    /// How many of so many laps were timed, `sleep` after each or not.
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
    fn a_lap_without_requests_on_the_spot_has_no_length() {
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
