//! Decides if a worker without work spins or sleeps (docs/design/completion.md): it spins if requests arrive fast enough
//! (`RateBucket`), spinning pays (`Trial`) and budget is left (`Budget`), for as long as such gaps lately took (`SpinLength`).

use std::time::Duration;

use super::{Arm, Budget, CHECK_LAPS, Comparison, Gain, RateBucket, Spent, Trial};
use crate::Tuning;
use crate::counter::add;
use crate::stats::{Stats, TrialResult, WaitState};

/// Longest spin.
const SPIN_MAX_NS: u64 = 1_000_000;
/// Minimum gain for which spinning pays.
const GAIN_MIN: f32 = 0.05;
/// Share of the time in which others run on the CPU of a worker that spins, from which on the guest is taken to be one of them.
/// Kernel threads take less: 1.5 % at two million requests a second.
const SHARED_MIN: f32 = 0.02;
/// Assumed duration of a wake-up, where none can be measured. The shortest spin is as long. A request that arrives within twice
/// this time after an answer counts as prompted by it.
const WAKE_NS: u64 = 20_000;

/// The work of one lap, as far as pacing needs it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LapWork {
    /// Requests that were taken.
    pub(crate) arrived: u32,
    /// Ops that completed.
    pub(crate) ended: u32,
    /// Ops in flight after the lap.
    pub(crate) in_flight: u32,
    /// Chains are left that the lap did not take.
    pub(crate) more: bool,
}

impl LapWork {
    /// Returns true if the lap had work.
    #[inline]
    pub(crate) fn any(self) -> bool {
        self.arrived + self.ended > 0
    }
}

/// How to wait for the next lap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LapWait {
    /// Run the next lap at once.
    Spin,
    /// Arm the vrings, check them once more, and sleep until this time.
    Doze(u64),
    /// Arm the vrings, check them once more, and sleep.
    Sleep,
}

/// How long to spin in gaps of one kind.
#[derive(Debug, Clone, Copy, Default)]
struct SpinLength {
    ns: u64,
}

impl SpinLength {
    /// Adapts to a gap of `gap_ns`, which ended during the spin if `hit`. The length doubles if the gap was
    /// short enough to be spun for, and becomes 0 if it was not.
    fn note(&mut self, gap_ns: u64, hit: bool) {
        self.ns = match gap_ns {
            _ if hit => self.ns,
            gap_ns if gap_ns > SPIN_MAX_NS => 0,
            _ => (2 * self.ns).clamp(WAKE_NS, SPIN_MAX_NS),
        };
    }
}

/// The worker's state within a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GapPhase {
    /// Not in a gap: recent laps had work.
    Busy,
    Spin,
    Asleep,
}

/// Why the worker does not spin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    /// Requests arrive too slowly.
    Slow,
    /// Spinning does not pay.
    Vain,
    Budget,
}

/// Settings and counters that a decision needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PacerContext<'a> {
    pub(crate) tuning: &'a Tuning,
    pub(crate) budget: &'a Budget,
    pub(crate) stats: &'a Stats,
}

/// The scheduler's counts for a thread.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Scheduled {
    pub(crate) cpu_ns: u64,
    /// Time for which it waited for a core.
    pub(crate) waited_ns: u64,
    /// True: the thread may run on one CPU only.
    pub(crate) is_bound: bool,
}

/// Decides the pace for a worker's adaptive vrings.
#[derive(Debug)]
pub(crate) struct Pacer {
    rate: RateBucket,
    trial: Trial,
    /// Counted since the last window of the trial.
    spent: Spent,
    /// The thread's counters at that moment. `None`: nothing of this load was reported yet.
    scheduled: Option<Scheduled>,
    /// One for gaps in which the guest is waited for, one for those in which the disk is.
    lengths: [SpinLength; 2],
    phase: GapPhase,
    /// When the gap began, and whether something was in flight.
    since_ns: u64,
    waits_for_disk: bool,
    /// The worker has slept since the last lap.
    has_slept: bool,
    /// Laps without work; wraps.
    laps: u32,
    /// Requests that arrived and ops that completed since the clock was last read.
    arrived: u32,
    ended: u32,
    /// Answers that no request has followed yet, and when the last one was given.
    answers: u32,
    answered_ns: u64,
    /// When the clock was last read, and ops in flight since.
    at_ns: u64,
    in_flight: u32,
    /// `Ok` if spinning is considered; otherwise why it is not.
    spins: Result<(), Reason>,
    /// The budget was found empty. It has to be nearly full before it is used again.
    is_exhausted: bool,
}

impl Pacer {
    pub(crate) fn new() -> Pacer {
        Pacer {
            rate: RateBucket::default(),
            trial: Trial::new(),
            spent: Spent::default(),
            scheduled: None,
            lengths: [SpinLength::default(); 2],
            phase: GapPhase::Asleep,
            since_ns: 0,
            waits_for_disk: false,
            has_slept: false,
            laps: 0,
            arrived: 0,
            ended: 0,
            answers: 0,
            answered_ns: 0,
            at_ns: 0,
            in_flight: 0,
            spins: Err(Reason::Slow),
            is_exhausted: false,
        }
    }

    /// Notes that the tuning has changed: each load is tried again.
    pub(crate) fn retuned(&mut self) {
        self.trial.reconsider();
    }

    /// Notes that others decide how the worker waits from now on. What it spun until now is not charged when it comes back.
    pub(crate) fn leave(&mut self) {
        self.phase = GapPhase::Asleep;
    }

    /// Notes that the worker has slept, beside which reading the clock costs nothing.
    #[inline]
    pub(crate) fn slept(&mut self) {
        self.has_slept = true;
    }

    /// Counts a lap. `None`: [`Pacer::decide`] must be called, which needs the time. Most laps of a busy worker
    /// and most laps of a spin need no clock.
    #[inline]
    pub(crate) fn note_lap(&mut self, work: LapWork) -> Option<LapWait> {
        let tries = self.trial.is_under_way();
        let has_slept = std::mem::take(&mut self.has_slept);
        if work.any() {
            self.spent.laps += 1;
            self.spent.depths += u64::from(work.in_flight.max(work.ended));
            self.arrived = self.arrived.saturating_add(work.arrived);
            self.ended = self.ended.saturating_add(work.ended);
        }
        if self.spins == Err(Reason::Vain) && !tries {
            // As a worker with interrupts does, and as cheap.
            self.laps = self.laps.wrapping_add(1);
            let ends_batch = self.phase == GapPhase::Busy && !work.more;
            let is_check = has_slept || ends_batch || self.laps.is_multiple_of(CHECK_LAPS);
            return (!is_check).then_some(match work.more {
                true => LapWait::Spin,
                false => LapWait::Sleep,
            });
        }
        if !work.any() {
            self.laps = self.laps.wrapping_add(1);
            let spins = match self.phase {
                GapPhase::Busy => self.spins.is_ok() && self.laps < CHECK_LAPS,
                GapPhase::Spin => !self.laps.is_multiple_of(CHECK_LAPS),
                GapPhase::Asleep => false,
            };
            return spins.then_some(LapWait::Spin);
        }
        if tries || self.phase != GapPhase::Busy || self.spins.is_err() {
            return None;
        }
        (self.laps, self.waits_for_disk) = (0, work.in_flight > 0);
        Some(LapWait::Spin)
    }

    /// Decides what to do after a lap for which `note_lap` returned `None`. `scheduled` reads the counters of this
    /// thread.
    pub(crate) fn decide(
        &mut self,
        work: LapWork,
        now_ns: u64,
        context: PacerContext<'_>,
        scheduled: impl FnOnce() -> Scheduled,
    ) -> LapWait {
        let arrived = std::mem::take(&mut self.arrived);
        let ended = std::mem::take(&mut self.ended);
        self.rate.add(now_ns, arrived, context.tuning.spin_rate_min);
        self.count(now_ns, work.in_flight, [arrived, ended]);
        self.account(now_ns, context, scheduled);
        if work.any() {
            self.end_gap(now_ns, context);
            (self.phase, self.laps) = (GapPhase::Busy, 0);
            self.waits_for_disk = work.in_flight > 0;
        }
        self.judge(now_ns, context);
        if work.more {
            return LapWait::Spin;
        }
        if self.spins.is_err() {
            self.end_vain_spin(now_ns, context);
            return self.sleep(now_ns, context);
        }
        let length_ns = self.length().ns;
        match self.phase {
            GapPhase::Busy if work.any() => LapWait::Spin,
            GapPhase::Busy => self.begin(now_ns, context),
            GapPhase::Spin if self.gap_ns(now_ns) < length_ns => LapWait::Spin,
            GapPhase::Spin => {
                self.end_vain_spin(now_ns, context);
                self.sleep(now_ns, context)
            }
            GapPhase::Asleep => LapWait::Sleep,
        }
    }

    /// Begins a gap: some laps had no work.
    fn begin(&mut self, now_ns: u64, context: PacerContext<'_>) -> LapWait {
        self.since_ns = now_ns;
        let length_ns = self.length().ns;
        if length_ns == 0 || !self.has_budget(length_ns, now_ns, context) {
            return self.sleep(now_ns, context);
        }
        self.phase = GapPhase::Spin;
        context.stats.set_mode(WaitState::Spins);
        LapWait::Spin
    }

    /// Decides like [`Pacer::decide`], for a lap after which the worker sleeps in any case: the time asleep does not count as a
    /// spin.
    pub(crate) fn rest(
        &mut self,
        work: LapWork,
        now_ns: u64,
        context: PacerContext<'_>,
        scheduled: impl FnOnce() -> Scheduled,
    ) -> LapWait {
        let _ = self.decide(work, now_ns, context, scheduled);
        self.end_vain_spin(now_ns, context);
        self.sleep(now_ns, context)
    }

    fn sleep(&mut self, now_ns: u64, context: PacerContext<'_>) -> LapWait {
        if self.phase == GapPhase::Busy {
            self.since_ns = now_ns;
        }
        self.phase = GapPhase::Asleep;
        context.stats.set_mode(WaitState::Sleeps);
        LapWait::Sleep
    }

    /// Returns true if the budget suffices for a spin that finds no work. A budget that was found empty is not used until it is
    /// nearly full.
    fn has_budget(&mut self, spin_ns: u64, now_ns: u64, context: PacerContext<'_>) -> bool {
        let left_ns = context.budget.left_ns(now_ns, context.tuning);
        if left_ns < spin_ns {
            self.is_exhausted = true;
            self.judge(now_ns, context);
        }
        left_ns >= spin_ns
    }

    /// Updates whether spinning is considered, and counts each change.
    fn judge(&mut self, now_ns: u64, context: PacerContext<'_>) {
        if self.is_exhausted {
            // Not as soon as a little is earned, or it would be spent again at once.
            let size_ns = Budget::size_ns(context.tuning);
            let enough_ns = (size_ns / 4 * 3).max(size_ns.min(2 * SPIN_MAX_NS));
            self.is_exhausted = context.budget.left_ns(now_ns, context.tuning) < enough_ns;
        }
        let spins = if !self.rate.is_fast() {
            Err(Reason::Slow)
        } else if self.trial.arm() == Arm::Plain {
            Err(Reason::Vain)
        } else if self.is_exhausted || Budget::size_ns(context.tuning) == 0 {
            Err(Reason::Budget)
        } else {
            Ok(())
        };
        let was = std::mem::replace(&mut self.spins, spins);
        if self.trial.is_under_way() {
            return;
        }
        let stats = context.stats;
        match (was, spins) {
            (Ok(()), Err(Reason::Slow)) => add(&stats.switches_slow, 1),
            (Ok(()), Err(Reason::Budget)) => add(&stats.switches_budget, 1),
            (Err(Reason::Slow | Reason::Budget), Ok(())) => add(&stats.switches_fast, 1),
            _ => {}
        }
    }

    /// Counts what was spent since the clock was last read.
    fn count(&mut self, now_ns: u64, in_flight: u32, [arrived, ended]: [u32; 2]) {
        let gone_ns = now_ns.saturating_sub(self.at_ns);
        if arrived > 0 {
            if now_ns.saturating_sub(self.answered_ns) > 2 * WAKE_NS {
                self.answers = 0;
            }
            let prompted = arrived.min(self.answers);
            self.answers -= prompted;
            self.spent.prompted += u64::from(prompted);
        }
        if ended > 0 {
            (self.answers, self.answered_ns) = (self.answers.saturating_add(ended), now_ns);
        }
        if self.in_flight == 0 {
            self.spent.idle_ns += gone_ns;
            if self.phase == GapPhase::Asleep {
                self.spent.unseen += u64::from(arrived);
            }
        }
        self.spent.wall_ns += gone_ns;
        let held_ns = gone_ns.saturating_mul(self.in_flight.into());
        self.spent.held_ns = self.spent.held_ns.saturating_add(held_ns);
        self.spent.requests += u64::from(ended);
        (self.at_ns, self.in_flight) = (now_ns, in_flight);
    }

    /// Reports to the trial when a window is complete.
    fn account(
        &mut self,
        now_ns: u64,
        context: PacerContext<'_>,
        scheduled: impl FnOnce() -> Scheduled,
    ) {
        if !self.rate.is_fast() || Budget::size_ns(context.tuning) == 0 {
            (self.spent, self.scheduled) = (Spent::default(), None);
            self.trial.give_up(now_ns);
            return;
        }
        let Some(before) = self.scheduled else {
            // A load begins or comes back, or the arm has just changed.
            (self.spent, self.scheduled) = (Spent::default(), Some(scheduled()));
            return;
        };
        if !self.trial.wants(&self.spent) {
            return;
        }
        let after = scheduled();
        self.scheduled = Some(after);
        self.spent.cpu_ns = after.cpu_ns.saturating_sub(before.cpu_ns);
        self.spent.waited_ns = after.waited_ns.saturating_sub(before.waited_ns);
        let spent = std::mem::take(&mut self.spent);
        let was = self.trial.arm();
        let current = self.trial.verdict();
        if let Some(found) = self.trial.pass(now_ns, spent) {
            let worth = context.tuning.spin_worth;
            let verdict = verdict(&found, current, worth, after.is_bound);
            self.trial.decide(now_ns, verdict.arm);
            publish(&verdict, now_ns, context.stats);
        }
        match (current, self.trial.verdict()) {
            (Arm::Other, Arm::Plain) => add(&context.stats.switches_vain, 1),
            (Arm::Plain, Arm::Other) => add(&context.stats.switches_fast, 1),
            _ => {}
        }
        if self.trial.arm() != was {
            self.scheduled = None;
        }
    }

    fn length(&mut self) -> &mut SpinLength {
        let [guest, disk] = &mut self.lengths;
        match self.waits_for_disk {
            true => disk,
            false => guest,
        }
    }

    fn gap_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.since_ns)
    }

    /// Returns how long the spin has lasted. A process that was stopped meanwhile did not spin all the time.
    fn spun_ns(&self, now_ns: u64) -> u64 {
        self.gap_ns(now_ns).min(SPIN_MAX_NS)
    }

    /// Ends a spin that found no work.
    fn end_vain_spin(&mut self, now_ns: u64, context: PacerContext<'_>) {
        if self.phase == GapPhase::Spin {
            let spun_ns = self.spun_ns(now_ns);
            add(&context.stats.spin_wasted_ns, spun_ns);
            context
                .budget
                .spend(now_ns, spun_ns, spun_ns, context.tuning);
        }
    }

    /// Ends a gap, because there is work again.
    fn end_gap(&mut self, now_ns: u64, context: PacerContext<'_>) {
        let gap_ns = self.gap_ns(now_ns);
        match self.phase {
            GapPhase::Busy => {}
            GapPhase::Spin => {
                let spun_ns = self.spun_ns(now_ns);
                add(&context.stats.spin_hit_ns, spun_ns);
                context.budget.spend(now_ns, spun_ns, 0, context.tuning);
                self.length().note(gap_ns, true);
            }
            GapPhase::Asleep => self.length().note(gap_ns, false),
        }
    }
}

/// The verdict of a trial, and why.
struct Verdict {
    arm: Arm,
    gain: Gain,
    /// Additional cores that spinning keeps busy.
    cores: f32,
}

/// Decides between spinning and sleeping. A guest that sends its next request after an answer sends more of them if spinning helps it.
/// For a guest with its own clock the response time decides if the worker has a CPU for itself. Elsewhere the guest may lose what the
/// worker gains: its own wake-up crosses CPUs, or waits for the CPU on which the worker spins.
fn verdict(found: &Comparison, current: Arm, spin_worth: u32, is_bound: bool) -> Verdict {
    let [plain, other] = found.totals();
    let is_clocked =
        4 * plain.prompted < 3 * plain.requests || 4 * plain.idle_ns > 3 * plain.wall_ns;
    let wall = found.of_wall();
    let asks_otherwise = wall.share.abs() > GAIN_MIN / 2.0 && found.asks_otherwise();
    let by_response = is_clocked && is_bound && !asks_otherwise;
    let gain = match by_response {
        true => found.of_response(WAKE_NS),
        false => wall,
    };
    let shares = by_response && other.waited() > SHARED_MIN;
    let cores = other.cores() - plain.cores();
    // A neighbour on the core: for as long as it runs, a request waits.
    let waited = other.waited() - plain.waited();
    let needed = (cores / spin_worth as f32).max(GAIN_MIN).max(waited);
    // To begin to spin, the better windows of sleeping have to be beaten as well.
    let pays = gain.share >= needed && (current == Arm::Other || gain.spread.0 > 0.0);
    let arm = if pays && !shares {
        Arm::Other
    } else {
        Arm::Plain
    };
    Verdict { arm, gain, cores }
}

fn publish(verdict: &Verdict, now_ns: u64, stats: &Stats) {
    add(&stats.experiments, 1);
    let (low, high) = verdict.gain.spread;
    stats.set_tried(TrialResult {
        spins: verdict.arm == Arm::Other,
        gain: [verdict.gain.share, low, high],
        cores: verdict.cores,
        at: Duration::from_nanos(now_ns),
    });
}

#[cfg(test)]
mod tests;
