//! How a worker waits: the wait mode of its vrings, the pacer's decision, and calls that are held back
//! meanwhile. This file reads the clock and yields the core.

use std::time::Duration;

use cleave_engine::{Store, Wait};
use rustix::time::{ClockId, clock_gettime};

use crate::Completion;
use crate::accept::nanoseconds;
use crate::contention::{CoreContention, yield_core};
use crate::policy::{Call, Crowd, Did, Pace, Pacer, Terms};
use crate::record::VringEvent;
use crate::stats::{Mode, add};
use crate::worker::{Worker, call_bell};

/// Laps without work before a polling worker first reads the clock, and between later readings.
const POLL_GRACE_LAPS: u32 = 64;
const POLL_LOOK_LAPS: u32 = 1024;
/// Number of checks without a completion after which a polled device is assumed to hang. That is a few
/// milliseconds, or a quarter of a second in an emulated guest where system calls are slow. From then on the
/// worker sleeps between checks, longer each time, up to `NAP_MAX_NS`.
const LATE_LOOKS: u32 = 4 * 1024;
const NAP_STEP_NS: u64 = 50_000;
const NAP_MAX_NS: u64 = 5_000_000;

/// How a worker waits for all its vrings together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Sleep when there is no work.
    #[default]
    Sleep,
    /// Spin if it pays.
    Adapt,
    /// A guest never kicks: poll its ring as far as the budget allows.
    Look,
    /// Poll, but yield the core if another thread wants it.
    Poll,
    /// Never sleep: the vring is configured for polling and its guest never kicks.
    PollAlways,
}

/// State of polling rings whose guests never kick. The worker spins as far as the disk's budget allows, then
/// sleeps between checks, longer each time until there is work.
#[derive(Debug, Default)]
pub(crate) struct Unkicked {
    /// Laps without work.
    idle_laps: u32,
    /// When the spinning began that has not been charged to the budget yet.
    since_ns: Option<u64>,
    naps: u32,
}

/// How a worker waits.
pub(crate) struct Waiting {
    pub(crate) pacer: Pacer,
    /// Keeps a polling worker out of the way of other threads.
    pub(crate) crowd: Crowd,
    pub(crate) wish: Wish,
    pub(crate) contention: CoreContention,
    /// Laps without work, while polling.
    pub(crate) idle_laps: u32,
    /// State for vrings without a kick.
    pub(crate) unkicked: Unkicked,
    /// Checks of a polled device since the last request or completion.
    pub(crate) vain_looks: u32,
    /// Some guest may have been asked for kicks since all were last told that none are needed.
    pub(crate) armed: bool,
    /// When the first call that is held back or the first stalled request is due.
    pub(crate) due_ns: Option<u64>,
}

impl Waiting {
    /// For a worker on this thread.
    pub(crate) fn new() -> Waiting {
        Waiting {
            pacer: Pacer::new(),
            crowd: Crowd::default(),
            wish: Wish::default(),
            contention: CoreContention::of_this_thread(),
            idle_laps: 0,
            unkicked: Unkicked::default(),
            vain_looks: 0,
            armed: true,
            due_ns: None,
        }
    }
}

impl<S: Store> Worker<S> {
    /// Now, on the clock that all workers of the device share.
    #[inline]
    pub(crate) fn now_ns(&self) -> u64 {
        nanoseconds(self.device.began)
    }

    /// Combines the modes of all vrings: the one that demands the most polling decides.
    pub(crate) fn update_wish(&mut self) {
        let wish = |lane: &crate::lane::Lane| match lane.completion {
            _ if !lane.is_running() => Wish::Sleep,
            Completion::Poll if !lane.has_kick => Wish::PollAlways,
            _ if !lane.has_kick => Wish::Look,
            Completion::Interrupt => Wish::Sleep,
            Completion::Adaptive => Wish::Adapt,
            Completion::Poll => Wish::Poll,
        };
        let wishes = self.lanes.iter().flatten().map(wish);
        self.waiting.wish = wishes.max_by_key(|wish| *wish as u8).unwrap_or_default();
        self.meters.stats.set_mode(match self.waiting.wish {
            Wish::Sleep | Wish::Adapt => Mode::Sleeps,
            Wish::Look | Wish::Poll | Wish::PollAlways => Mode::Polls,
        });
    }

    /// Decides how the next `enter` waits.
    pub(crate) fn pace(&mut self, did: Did) -> Wait {
        let pace = match self.waiting.wish {
            Wish::Sleep => Pace::Sleep,
            Wish::Adapt => self.adapt(did),
            Wish::Look => self.look_at_unkicked(did),
            wish @ (Wish::Poll | Wish::PollAlways) => self.poll(did, wish),
        };
        if did.more || self.inbox.is_pending || self.is_due() {
            return Wait::No;
        }
        let until_ns = match pace {
            Pace::Spin => {
                self.disarm();
                return Wait::No;
            }
            _ if self.store().polls() => match self.look_on(did) {
                None => return Wait::No,
                nap => nap,
            },
            Pace::Doze(until_ns) => Some(until_ns),
            Pace::Sleep => None,
        };
        if self.arm() {
            return Wait::No;
        }
        self.meters.stats.set_mode(Mode::Sleeps);
        add(
            match until_ns {
                Some(_) => &self.meters.stats.dozes,
                None => &self.meters.stats.sleeps,
            },
            1,
        );
        let until_ns = until_ns.into_iter().chain(self.waiting.due_ns).min();
        Wait::Until(until_ns.map(|ns| self.device.began + Duration::from_nanos(ns)))
    }

    /// Polls the device for completions. Polled I/O in flight has to be checked for in every wait mode, because
    /// no interrupt would end a sleep. Other threads get the core between two checks. Returns a time to sleep
    /// until if the device seems to hang, because polling it would cost a core meanwhile.
    #[inline(never)]
    fn look_on(&mut self, did: Did) -> Option<u64> {
        self.poll(did, Wish::PollAlways);
        self.waiting.vain_looks = self.waiting.vain_looks.saturating_add(1);
        if let Some(naps @ 1..) = self.waiting.vain_looks.checked_sub(LATE_LOOKS) {
            let nap_ns = (u64::from(naps) * NAP_STEP_NS).min(NAP_MAX_NS);
            return Some(self.now_ns() + nap_ns);
        }
        self.meters.stats.set_mode(Mode::Polls);
        self.disarm();
        None
    }

    fn adapt(&mut self, did: Did) -> Pace {
        if let Some(pace) = self.waiting.pacer.turn(did) {
            return pace;
        }
        let now_ns = self.now_ns();
        let terms = Terms {
            tuning: &self.tuned.tuning,
            budget: &self.device.budget,
            stats: &self.meters.stats,
        };
        let pacer = &mut self.waiting.pacer;
        pacer.decide(did, now_ns, terms, || cpu_ns(ClockId::ThreadCPUTime))
    }

    /// Polls rings whose guests never kick, within the budget.
    fn look_at_unkicked(&mut self, did: Did) -> Pace {
        let unkicked = &mut self.waiting.unkicked;
        if did.any() {
            *unkicked = Unkicked::default();
            return Pace::Spin;
        }
        unkicked.idle_laps = unkicked.idle_laps.wrapping_add(1);
        if unkicked.naps == 0 && !unkicked.idle_laps.is_multiple_of(POLL_GRACE_LAPS) {
            return Pace::Spin;
        }
        let now_ns = nanoseconds(self.device.began);
        let budget = &self.device.budget;
        if let Some(since_ns) = unkicked.since_ns.replace(now_ns)
            && unkicked.naps == 0
        {
            let spun_ns = now_ns.saturating_sub(since_ns);
            budget.spend(now_ns, spun_ns, spun_ns, &self.tuned.tuning);
        }
        if unkicked.naps == 0 && budget.left_ns(now_ns, &self.tuned.tuning) > 0 {
            return Pace::Spin;
        }
        unkicked.naps = unkicked.naps.saturating_add(1);
        let nap_ns = (u64::from(unkicked.naps) * NAP_STEP_NS).min(NAP_MAX_NS);
        Pace::Doze(now_ns + nap_ns)
    }

    /// Polls, and pauses while other threads want the core: they would wait for whole timeslices, and a guest
    /// among them would be slower than with interrupts.
    #[inline]
    fn poll(&mut self, did: Did, wish: Wish) -> Pace {
        self.waiting.idle_laps = match did.any() {
            true => 0,
            false => self.waiting.idle_laps.wrapping_add(1),
        };
        let crowd = &mut self.waiting.crowd;
        let looks = self.waiting.idle_laps % POLL_LOOK_LAPS == POLL_GRACE_LAPS;
        if !looks && !crowd.rests() {
            return Pace::Spin;
        }
        let now_ns = nanoseconds(self.device.began);
        if !crowd.is_crowded(now_ns) {
            if !looks || !crowd.wants_look(now_ns) {
                return Pace::Spin;
            }
            let others = self.waiting.contention.yield_once();
            let now_ns = nanoseconds(self.device.began);
            crowd.looked(now_ns, others);
            if !crowd.is_crowded(now_ns) {
                return Pace::Spin;
            }
            add(&self.meters.stats.switches_crowded, 1);
        }
        match wish {
            // Nothing would wake it, so it only yields.
            Wish::PollAlways if !did.any() => {
                yield_core();
                Pace::Spin
            }
            Wish::PollAlways => Pace::Spin,
            // The end of the contention is no event, so a timer has to end the sleep.
            _ => crowd.until_ns().map_or(Pace::Sleep, Pace::Doze),
        }
    }

    /// Asks all guests for kicks. `true`: a guest had added work before it could see that.
    fn arm(&mut self) -> bool {
        self.waiting.armed = true;
        let mut work = false;
        // If the store is full, completions arrive first, and every lap checks the rings again.
        let has_room = self.has_room();
        for lane in self.lanes.iter_mut().flatten() {
            if lane.is_running() && has_room {
                work |= lane.vring.arm();
            }
        }
        work
    }

    /// Tells all guests that kicks are not needed, unless they know.
    #[inline]
    fn disarm(&mut self) {
        if self.waiting.armed {
            self.waiting.armed = false;
            if matches!(
                self.waiting.wish,
                Wish::Look | Wish::Poll | Wish::PollAlways
            ) {
                // It may have slept because the core was contended.
                self.meters.stats.set_mode(Mode::Polls);
            }
            for lane in self.lanes.iter_mut().flatten() {
                lane.vring.disarm();
            }
        }
    }

    /// Publishes all that was pushed: one index store and at most one call per vring.
    pub(crate) fn publish(&mut self) {
        let coalesce = self.tuned.tuning.coalesce;
        for (slot, lane) in (0..).zip(&mut self.lanes) {
            let Some(lane) = lane else { continue };
            if !lane.dirty {
                continue;
            }
            let requests = lane.pushed;
            let wanted = lane.publish() && lane.has_call;
            let in_flight = lane.slots.taken();
            let now_ns = || nanoseconds(self.device.began);
            let since_ns = lane.caller.held_since_ns();
            match lane
                .caller
                .published(wanted, requests, in_flight, coalesce, now_ns)
            {
                Call::Now => {
                    let held_ns = since_ns.map_or(0, |since_ns| now_ns().saturating_sub(since_ns));
                    lane.record.called(held_ns);
                    self.reactor.ring(call_bell(slot));
                }
                Call::None => lane.record.count(VringEvent::CallSuppressed),
                Call::Later => {
                    lane.record.count(VringEvent::CallCoalesced);
                    let due_ns = lane.caller.due_ns(coalesce);
                    self.waiting.due_ns = self.waiting.due_ns.into_iter().chain(due_ns).min();
                }
            }
            if self.meters.laps.is_timed() {
                lane.record.published(&self.meters.laps);
            }
        }
    }

    /// Sends calls that were held back and repeats stalled requests, if any are due.
    #[inline]
    pub(crate) fn attend_due(&mut self) {
        if self.waiting.due_ns.is_some() {
            self.attend_if_due();
        }
    }

    fn attend_if_due(&mut self) {
        let now_ns = self.now_ns();
        if self.waiting.due_ns.is_none_or(|due_ns| now_ns < due_ns) {
            return;
        }
        self.waiting.due_ns = None;
        self.send_due_calls(now_ns);
        self.redo_due(now_ns);
        // For requests that completed inline.
        self.publish();
    }

    fn send_due_calls(&mut self, now_ns: u64) {
        let coalesce = self.tuned.tuning.coalesce;
        for (slot, lane) in (0..).zip(&mut self.lanes) {
            let Some(lane) = lane else { continue };
            match lane.caller.due_ns(coalesce) {
                Some(due_ns) if due_ns <= now_ns => {
                    let since_ns = lane.caller.held_since_ns().unwrap_or(now_ns);
                    lane.record.called(now_ns.saturating_sub(since_ns));
                    lane.caller.settle();
                    self.reactor.ring(call_bell(slot));
                }
                due_ns => self.waiting.due_ns = self.waiting.due_ns.into_iter().chain(due_ns).min(),
            }
        }
    }
}

/// CPU time of the calling thread, or of the whole process.
pub(crate) fn cpu_ns(clock: ClockId) -> u64 {
    let spent = clock_gettime(clock);
    spent.tv_sec as u64 * 1_000_000_000 + spent.tv_nsec as u64
}
