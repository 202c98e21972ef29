//! How a worker waits: the wait mode of its vrings, and the pacer's decision. This file reads the clock and yields the core.

use std::sync::atomic::Ordering;
use std::time::Duration;

use cleave_engine::{Store, Wait};
use cleave_guest::Asked;
use rustix::time::ClockId;

use super::Worker;
use super::waiting::{BudgetedPolling, WaitMode, Waiting};
use crate::CompletionPolicy;
use crate::clock::{cpu_ns, nanoseconds};
use crate::counter::add;
use crate::lane::Lane;
use crate::policy::{CHECK_LAPS, LapWait, LapWork, PacerContext, Scheduled};
use crate::stats::WaitState;
use crate::thread::contention::yield_core;

/// Number of checks without a completion after which a polled device is assumed to hang. That is a few
/// milliseconds, or a quarter of a second in an emulated guest where system calls are slow. From then on the
/// worker sleeps between checks, longer each time, up to `DEVICE_SLEEP_MAX_NS`.
const HUNG_CHECKS: u32 = 4 * 1024;
const DEVICE_SLEEP_STEP_NS: u64 = 50_000;
const DEVICE_SLEEP_MAX_NS: u64 = 5_000_000;

impl<S: Store> Worker<S> {
    /// Returns the time now, on the clock that all workers of the device share.
    #[inline]
    pub(crate) fn now_ns(&self) -> u64 {
        nanoseconds(self.device.began)
    }

    /// Combines the modes of all vrings.
    #[cold]
    pub(crate) fn update_wait_mode(&mut self) {
        let mode = |lane: &Lane| match lane.completion {
            _ if !lane.is_running() => WaitMode::Sleep,
            CompletionPolicy::Poll if !lane.has_kick => WaitMode::PollAlways,
            _ if !lane.has_kick => WaitMode::PollBudgeted,
            CompletionPolicy::Interrupt => WaitMode::Sleep,
            CompletionPolicy::Adaptive => WaitMode::Adaptive,
            CompletionPolicy::Poll => WaitMode::Poll,
        };
        let mut lanes = self.lanes.iter().flatten();
        self.waiting.has_flags = lanes.any(Lane::kicks_by_flag);
        let modes = self.lanes.iter().flatten().map(mode);
        self.waiting.mode = modes.fold(WaitMode::Sleep, WaitMode::and);
        if self.waiting.mode != WaitMode::Adaptive {
            self.waiting.pacer.leave();
        }
        self.meters.stats.set_mode(match self.waiting.mode {
            WaitMode::Sleep | WaitMode::Adaptive => WaitState::Sleeps,
            WaitMode::PollBudgeted | WaitMode::Poll | WaitMode::PollAlways => WaitState::Polls,
        });
    }

    /// Decides how the next `enter` waits.
    pub(crate) fn pace(&mut self, work: LapWork) -> Wait {
        let pace = match self.waiting.mode {
            WaitMode::Sleep => LapWait::Sleep,
            WaitMode::Adaptive => self.adapt(work),
            WaitMode::PollBudgeted => self.poll_within_budget(work),
            mode @ (WaitMode::Poll | WaitMode::PollAlways) => self.poll(work, mode),
        };
        if work.more || self.inbox.is_pending || self.can_reply() {
            return Wait::No;
        }
        let until_ns = match pace {
            LapWait::Spin => {
                self.disarm();
                return Wait::No;
            }
            _ if self.store().polls() => match self.poll_device(work) {
                None => return Wait::No,
                sleep => sleep,
            },
            LapWait::Doze(until_ns) => Some(until_ns),
            LapWait::Sleep => None,
        };
        if self.arm() {
            self.disarm_flags();
            return Wait::No;
        }
        self.meters.stats.set_mode(WaitState::Sleeps);
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
    fn poll_device(&mut self, work: LapWork) -> Option<u64> {
        self.poll(work, WaitMode::PollAlways);
        self.waiting.empty_checks = self.waiting.empty_checks.saturating_add(1);
        if let Some(sleeps @ 1..) = self.waiting.empty_checks.checked_sub(HUNG_CHECKS) {
            let sleep_ns = (u64::from(sleeps) * DEVICE_SLEEP_STEP_NS).min(DEVICE_SLEEP_MAX_NS);
            return Some(self.now_ns() + sleep_ns);
        }
        self.meters.stats.set_mode(WaitState::Polls);
        self.disarm();
        None
    }

    fn adapt(&mut self, work: LapWork) -> LapWait {
        // When the next request may go is known, so there is nothing to watch for.
        let rests = self.waiting.throttled && work.in_flight == 0;
        if let Some(pace) = self.waiting.pacer.note_lap(work)
            && !rests
        {
            return pace;
        }
        let now_ns = self.now_ns();
        let context = PacerContext {
            tuning: &self.active.tuning,
            budget: &self.device.budget,
            stats: &self.meters.stats,
        };
        let is_alone = self.waiting.own_thread().is_some();
        let Waiting {
            pacer, contention, ..
        } = &mut self.waiting;
        let scheduled = || Scheduled {
            cpu_ns: match is_alone {
                true => cpu_ns(ClockId::ThreadCPUTime),
                false => context.stats.cpu_ns.load(Ordering::Relaxed),
            },
            waited_ns: contention.waited_ns(),
            is_bound: contention.is_bound(),
        };
        match rests {
            true => pacer.rest(work, now_ns, context, scheduled),
            false => pacer.decide(work, now_ns, context, scheduled),
        }
    }

    /// Polls rings whose guests never kick, within the budget.
    fn poll_within_budget(&mut self, work: LapWork) -> LapWait {
        let budgeted = &mut self.waiting.budgeted;
        if work.any() {
            *budgeted = BudgetedPolling::default();
            return LapWait::Spin;
        }
        budgeted.idle_laps = budgeted.idle_laps.wrapping_add(1);
        if budgeted.sleeps == 0 && !budgeted.idle_laps.is_multiple_of(CHECK_LAPS) {
            return LapWait::Spin;
        }
        let now_ns = nanoseconds(self.device.began);
        let budget = &self.device.budget;
        if let Some(since_ns) = budgeted.since_ns.replace(now_ns)
            && budgeted.sleeps == 0
        {
            let spun_ns = now_ns.saturating_sub(since_ns);
            budget.spend(now_ns, spun_ns, spun_ns, &self.active.tuning);
        }
        if budgeted.sleeps == 0 && budget.left_ns(now_ns, &self.active.tuning) > 0 {
            return LapWait::Spin;
        }
        budgeted.sleeps = budgeted.sleeps.saturating_add(1);
        let sleep_ns = (u64::from(budgeted.sleeps) * DEVICE_SLEEP_STEP_NS).min(DEVICE_SLEEP_MAX_NS);
        LapWait::Doze(now_ns + sleep_ns)
    }

    /// Polls, and pauses while other threads want the core: they would wait for whole timeslices, and a guest
    /// among them would be slower than with interrupts.
    #[inline]
    fn poll(&mut self, work: LapWork, mode: WaitMode) -> LapWait {
        self.waiting.idle_laps = match work.any() {
            true => 0,
            false => self.waiting.idle_laps.wrapping_add(1),
        };
        let backoff = &mut self.waiting.backoff;
        let is_check = self.waiting.idle_laps % CHECK_LAPS == CHECK_LAPS - 1;
        if !is_check && !backoff.is_resting() {
            return LapWait::Spin;
        }
        let now_ns = nanoseconds(self.device.began);
        if !backoff.is_contended(now_ns) {
            if !is_check || !backoff.wants_check(now_ns) {
                return LapWait::Spin;
            }
            let contended = self.waiting.contention.yield_once();
            let now_ns = nanoseconds(self.device.began);
            backoff.checked(now_ns, contended);
            if !backoff.is_contended(now_ns) {
                return LapWait::Spin;
            }
            add(&self.meters.stats.switches_crowded, 1);
        }
        match mode {
            // Nothing would wake it, so it only yields.
            WaitMode::PollAlways if !work.any() => {
                yield_core();
                LapWait::Spin
            }
            WaitMode::PollAlways => LapWait::Spin,
            // The end of the contention is not an event, so a timer has to end the sleep.
            _ => backoff.until_ns().map_or(LapWait::Sleep, LapWait::Doze),
        }
    }

    /// Asks all guests for kicks. `true`: a guest had added work before it could see that.
    fn arm(&mut self) -> bool {
        self.waiting.armed = true;
        // If the store is full, completions arrive first, and every lap checks the rings again.
        if !self.has_room() {
            return false;
        }
        // A throttled one is looked at by the clock.
        let waits = |lane: &Lane| lane.is_running() && lane.throttled.is_none();
        if let [Some(lane)] = &mut self.lanes[..] {
            return waits(lane) && lane.vring.arm();
        }
        let lanes = self.lanes.iter_mut().flatten();
        lanes
            .filter(|lane| waits(lane))
            .for_each(|lane| lane.vring.ask());
        let asked = Asked::all();
        let mut lanes = self.lanes.iter().flatten();
        lanes.any(|lane| waits(lane) && lane.vring.has_come(&asked))
    }

    /// Notes a wait, and disarms the vrings of guests without EVENT_IDX. Called when the thread has returned from the kernel.
    #[inline]
    pub(crate) fn entered(&mut self, wait: Wait) {
        self.meters.entered(wait);
        if wait != Wait::No {
            self.waiting.pacer.slept();
            self.disarm_flags();
        }
    }

    /// Disables kicks for guests without EVENT_IDX while the worker is awake. A guest with EVENT_IDX was asked to kick for one
    /// entry, and does not do so for those that follow.
    #[inline]
    fn disarm_flags(&mut self) {
        if self.waiting.has_flags {
            let lanes = self.lanes.iter_mut().flatten();
            for lane in lanes.filter(|lane| lane.kicks_by_flag()) {
                lane.vring.disarm();
            }
        }
    }

    /// Disables kicks for all guests, unless they are disabled.
    #[inline]
    fn disarm(&mut self) {
        if self.waiting.armed {
            self.waiting.armed = false;
            if matches!(
                self.waiting.mode,
                WaitMode::PollBudgeted | WaitMode::Poll | WaitMode::PollAlways
            ) {
                // It may have slept because the core was contended.
                self.meters.stats.set_mode(WaitState::Polls);
            }
            for lane in self.lanes.iter_mut().flatten() {
                lane.vring.disarm();
            }
        }
    }
}
