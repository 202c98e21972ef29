//! Whether a worker that finds nothing to do spins, dozes or sleeps.
//!
//! It is told what each lap did, and now and then the time; it remembers how long the gaps were in which
//! there was nothing to do. While requests come fast enough (`Heat`) and nobody else wants the core
//! (`Crowd`), it spins for as long as pays by what the gaps were lately (`Gaps`), as far as the budget
//! goes. Otherwise it sleeps at once.
//!
//! ```text
//!              did something                       nothing for a few laps
//!   Busy <────────────────────── any ;   Busy ──────────────────────────────> Spin
//!   Spin ──── as long as pays ──> Doze, where the end of the gap can be foreseen, else Asleep
//!   Doze ──── shortly before it ──> Late (spins) ──── after it ──> Asleep
//! ```

use super::{Budget, Crowd, Gaps, HORIZON_NS, Heat, Plan, Response, Waiting};
use crate::Tuning;
use crate::stats::{Mode, Stats, add};

/// Laps without work before it counts as a gap: some microseconds, not worth reading a clock for.
const GRACE_LAPS: u32 = 64;
/// Laps of a spin between two looks at the clock.
const LOOK_LAPS: u32 = 32;

/// Laps that others have the core between two looks at the clock, and where they seem to be there to stay.
const CROWDED_LAPS: u32 = 16;
const STAYING_LAPS: u32 = 128;

/// What one lap did, as far as pacing cares.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Did {
    /// Requests taken.
    pub(crate) arrived: u32,
    /// Ops ended.
    pub(crate) ended: u32,
    /// Ops in flight after it.
    pub(crate) in_flight: u32,
    /// There is more than it took.
    pub(crate) more: bool,
}

impl Did {
    /// It found something to do.
    #[inline]
    pub(crate) fn any(self) -> bool {
        self.arrived + self.ended > 0
    }
}

/// What is in flight while nothing is to be done: whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outlook {
    /// Nothing: the guest's.
    Guest,
    /// Something small, of one page or a few.
    Small,
    /// Nothing smaller than this: above 16 KiB.
    Medium,
    /// A flush or a discard, and nothing of the above.
    Sync,
    /// Only large reads and writes: not worth a spin, they are long in themselves.
    Large,
}

/// Those that spinning is considered for, in the order of their numbers.
const KINDS: [Outlook; OUTLOOKS] = [
    Outlook::Guest,
    Outlook::Small,
    Outlook::Medium,
    Outlook::Sync,
];
const OUTLOOKS: usize = 4;

/// What to do until the next lap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Look again at once.
    Spin,
    /// As `Spin`, but see first whether others want the core, and tell.
    Look,
    /// Ask for kicks, look once more, sleep until then.
    Doze(u64),
    /// Ask for kicks, look once more, sleep.
    Sleep,
}

/// Where in a gap it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Not in one: the last laps did something.
    Busy,
    Spin,
    /// Asleep until `from_ns`; then it would spin until `to_ns`.
    Doze {
        from_ns: u64,
        to_ns: u64,
    },
    /// Spins from one to the other.
    Late {
        from_ns: u64,
        to_ns: u64,
    },
    Asleep,
}

/// Why it does not spin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    Slow,
    Budget,
    Crowded,
}

/// What decisions are made with and counted in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms<'a> {
    pub(crate) tuning: &'a Tuning,
    pub(crate) budget: &'a Budget,
    pub(crate) stats: &'a Stats,
}

/// Decides the pace of one worker's adaptive vrings.
#[derive(Debug)]
pub(crate) struct Pacer {
    /// What a wake-up takes on this host.
    wake_ns: u64,
    heat: Heat,
    response: Response,
    pub(crate) crowd: Crowd,
    gaps: [Gaps; OUTLOOKS],
    plans: [Plan; OUTLOOKS],
    stage: Stage,
    /// Whose turn it was when the gap began.
    outlook: Outlook,
    /// When the gap began.
    since_ns: u64,
    /// Laps without work, as many as 32 bits hold.
    laps: u32,
    /// Requests since the clock was read, and ops that ended.
    arrived: u32,
    ended: u32,
    /// Spinning is considered at all; why not, otherwise.
    spins: Result<(), Reason>,
    /// The budget was found empty: not before it is nearly full again.
    broke: bool,
}

impl Pacer {
    /// `wake_ns`: what a wake-up takes on this host.
    pub(crate) fn new(wake_ns: u64) -> Pacer {
        let mut pacer = Pacer {
            wake_ns,
            heat: Heat::default(),
            response: Response::default(),
            crowd: Crowd::default(),
            gaps: std::array::from_fn(|_| Gaps::new()),
            plans: [Plan::default(); OUTLOOKS],
            stage: Stage::Asleep,
            outlook: Outlook::Guest,
            since_ns: 0,
            laps: 0,
            arrived: 0,
            ended: 0,
            spins: Err(Reason::Slow),
            broke: false,
        };
        pacer.set_wake(wake_ns);
        pacer
    }

    /// What a wake-up takes on this host, measured.
    pub(crate) fn set_wake(&mut self, wake_ns: u64) {
        self.wake_ns = wake_ns.clamp(WAKE_MIN_NS, WAKE_MAX_NS);
        for kind in KINDS {
            self.replan(kind);
        }
    }

    /// A lap is over. `None`: [`Pacer::decide`] wants to know the time. Most laps of a busy worker, and
    /// most of a spin, need none.
    #[inline]
    pub(crate) fn turn(&mut self, did: Did, outlook: Outlook) -> Option<Pace> {
        if self.spins == Err(Reason::Crowded) && self.stage == Stage::Asleep {
            // Nothing is learnt on a shared core, and it sleeps in any case: as cheap as interrupts are.
            self.laps = self.laps.wrapping_add(1);
            let look_laps = match self.crowd.until_ns() {
                Some(_) => CROWDED_LAPS,
                None => STAYING_LAPS,
            };
            if !self.laps.is_multiple_of(look_laps) {
                self.arrived = self.arrived.saturating_add(did.arrived);
                self.ended = self.ended.saturating_add(did.ended);
                return Some(match did.more {
                    true => Pace::Spin,
                    false => Pace::Sleep,
                });
            }
        }
        if !did.any() {
            self.laps = self.laps.wrapping_add(1);
            let spins = match self.stage {
                Stage::Busy => self.spins.is_ok() && self.laps < GRACE_LAPS,
                Stage::Spin | Stage::Late { .. } => !self.laps.is_multiple_of(LOOK_LAPS),
                Stage::Doze { .. } | Stage::Asleep => false,
            };
            return spins.then_some(Pace::Spin);
        }
        self.arrived = self.arrived.saturating_add(did.arrived);
        self.ended = self.ended.saturating_add(did.ended);
        let goes_on = did.more || (self.spins.is_ok() && self.plan(outlook).spin_ns > 0);
        if self.stage != Stage::Busy || !goes_on {
            return None;
        }
        if self.laps > 0 {
            self.note(0);
        }
        (self.laps, self.outlook) = (0, outlook);
        Some(Pace::Spin)
    }

    /// What to do now, after a lap of which `turn` could not tell.
    pub(crate) fn decide(
        &mut self,
        did: Did,
        outlook: Outlook,
        now_ns: u64,
        terms: Terms<'_>,
    ) -> Pace {
        let rate_min = terms.tuning.spin_rate_min;
        let (arrived, ended) = (
            std::mem::take(&mut self.arrived),
            std::mem::take(&mut self.ended),
        );
        self.heat.pass(now_ns, arrived, rate_min);
        self.response.pass(now_ns, did.in_flight, arrived, ended);
        if did.any() {
            self.end_gap(now_ns, terms);
            (self.stage, self.outlook, self.laps) = (Stage::Busy, outlook, 0);
        }
        self.judge(now_ns, terms);
        if did.more {
            return Pace::Spin;
        }
        if self.spins.is_err() {
            self.give_up(now_ns, terms);
            return self.sleep(now_ns, terms);
        }
        match self.stage {
            Stage::Busy if did.any() && self.plan(outlook).spin_ns > 0 => Pace::Spin,
            Stage::Busy => self.begin(now_ns, terms),
            // A look would take some of the time of the request that is waited for. It had one when it began.
            Stage::Spin if self.spun_ns(now_ns) < self.plan(self.outlook).spin_ns => Pace::Spin,
            Stage::Spin => {
                self.give_up(now_ns, terms);
                self.doze(now_ns, terms)
            }
            // Something else than what it waits for may wake it.
            Stage::Doze { from_ns, .. } if now_ns < from_ns => Pace::Doze(from_ns),
            Stage::Doze { from_ns, to_ns } => {
                self.learn_wake(now_ns - from_ns);
                let from_ns = now_ns;
                self.stage = Stage::Late { from_ns, to_ns };
                terms.stats.set_mode(Mode::Spins);
                self.go_on(now_ns)
            }
            Stage::Late { to_ns, .. } if now_ns < to_ns => self.go_on(now_ns),
            Stage::Late { .. } => {
                self.give_up(now_ns, terms);
                self.sleep(now_ns, terms)
            }
            Stage::Asleep => Pace::Sleep,
        }
    }

    /// Others were or were not found waiting for the core.
    pub(crate) fn looked(&mut self, now_ns: u64, others: bool, terms: Terms<'_>) -> Pace {
        self.crowd.looked(now_ns, others);
        if !self.crowd.is_crowded(now_ns) {
            return Pace::Spin;
        }
        self.judge(now_ns, terms);
        self.give_up(now_ns, terms);
        self.sleep(now_ns, terms)
    }

    /// A gap begins: nothing was done for some laps, or its plan has no spin.
    fn begin(&mut self, now_ns: u64, terms: Terms<'_>) -> Pace {
        self.since_ns = now_ns;
        let spin_ns = self.plan(self.outlook).spin_ns;
        if spin_ns == 0 {
            return self.doze(now_ns, terms);
        }
        if !self.affords(spin_ns, now_ns, terms) {
            return self.sleep(now_ns, terms);
        }
        self.stage = Stage::Spin;
        terms.stats.set_mode(Mode::Spins);
        self.go_on(now_ns)
    }

    fn go_on(&self, now_ns: u64) -> Pace {
        match self.crowd.wants_look(now_ns) {
            true => Pace::Look,
            false => Pace::Spin,
        }
    }

    /// Sleeps until shortly before the gap's end where that can be foreseen.
    fn doze(&mut self, now_ns: u64, terms: Terms<'_>) -> Pace {
        let Some((from_ns, to_ns)) = self.plan(self.outlook).doze else {
            return self.sleep(now_ns, terms);
        };
        let (from_ns, to_ns) = (self.since_ns + from_ns, self.since_ns + to_ns);
        if from_ns <= now_ns || !self.affords(to_ns - from_ns, now_ns, terms) {
            return self.sleep(now_ns, terms);
        }
        self.stage = Stage::Doze { from_ns, to_ns };
        terms.stats.set_mode(Mode::Sleeps);
        Pace::Doze(from_ns)
    }

    fn sleep(&mut self, now_ns: u64, terms: Terms<'_>) -> Pace {
        if self.stage == Stage::Busy {
            self.since_ns = now_ns;
        }
        self.stage = Stage::Asleep;
        terms.stats.set_mode(Mode::Sleeps);
        Pace::Sleep
    }

    /// Whether the budget has as much left, should the spin be in vain. Found empty, it is left alone
    /// until it is nearly full.
    fn affords(&mut self, spin_ns: u64, now_ns: u64, terms: Terms<'_>) -> bool {
        let left_ns = terms.budget.left_ns(now_ns, terms.tuning);
        if left_ns < spin_ns {
            self.broke = true;
            self.judge(now_ns, terms);
        }
        left_ns >= spin_ns
    }

    /// Whether spinning is to be considered, and counts it when that changes.
    fn judge(&mut self, now_ns: u64, terms: Terms<'_>) {
        if self.broke {
            // Not with the first little that is earned, or it would be spent and gone in no time.
            let size_ns = Budget::size_ns(terms.tuning);
            let enough_ns = (size_ns / 4 * 3).max(size_ns.min(2 * HORIZON_NS));
            self.broke = terms.budget.left_ns(now_ns, terms.tuning) < enough_ns;
        }
        let spins = if self.crowd.is_crowded(now_ns) {
            Err(Reason::Crowded)
        } else if !self.heat.is_hot() {
            Err(Reason::Slow)
        } else if self.broke || Budget::size_ns(terms.tuning) == 0 {
            Err(Reason::Budget)
        } else {
            Ok(())
        };
        let was = std::mem::replace(&mut self.spins, spins);
        let stats = terms.stats;
        match (was, spins) {
            (Ok(()), Err(Reason::Slow)) => add(&stats.switches_slow, 1),
            (Ok(()), Err(Reason::Budget)) => add(&stats.switches_budget, 1),
            (Ok(()), Err(Reason::Crowded)) => add(&stats.switches_crowded, 1),
            (Err(_), Ok(())) => {
                add(&stats.switches_fast, 1);
                // Nobody asked for plans meanwhile.
                KINDS.into_iter().for_each(|kind| self.replan(kind));
            }
            _ => {}
        }
    }

    fn spun_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.since_ns)
    }

    /// What a spin that is under way has cost so far; 0: there is none.
    fn cost_ns(&self, now_ns: u64) -> u64 {
        match self.stage {
            Stage::Spin => self.spun_ns(now_ns),
            Stage::Late { from_ns, .. } => now_ns.saturating_sub(from_ns),
            Stage::Busy | Stage::Doze { .. } | Stage::Asleep => 0,
        }
    }

    /// A spin ends and nothing came of it.
    fn give_up(&mut self, now_ns: u64, terms: Terms<'_>) {
        let spun_ns = self.cost_ns(now_ns);
        if spun_ns > 0 {
            add(&terms.stats.spin_wasted_ns, spun_ns);
            terms.budget.spend(now_ns, spun_ns, spun_ns, terms.tuning);
        }
    }

    /// There is something to do again: what the gap was like.
    fn end_gap(&mut self, now_ns: u64, terms: Terms<'_>) {
        let spun_ns = self.cost_ns(now_ns);
        if spun_ns > 0 {
            add(&terms.stats.spin_hit_ns, spun_ns);
            terms.budget.spend(now_ns, spun_ns, 0, terms.tuning);
        }
        let gap_ns = self.spun_ns(now_ns);
        match self.stage {
            Stage::Busy if self.laps == 0 => {}
            Stage::Busy => self.note(0),
            Stage::Spin | Stage::Late { .. } => self.note(gap_ns),
            // Its end was seen only after the wake-up.
            Stage::Doze { .. } | Stage::Asleep => self.note(gap_ns.saturating_sub(self.wake_ns)),
        }
    }

    #[inline]
    fn note(&mut self, gap_ns: u64) {
        // On a shared core it is the neighbours' time that would be learnt.
        if self.spins == Err(Reason::Crowded) {
            return;
        }
        let outlook = self.outlook;
        if let Some(gaps) = self.gaps.get_mut(outlook as usize)
            && gaps.note(gap_ns)
            && self.spins.is_ok()
        {
            self.replan(outlook);
        }
    }

    #[cold]
    fn replan(&mut self, outlook: Outlook) {
        let at = outlook as usize;
        let (waiting, takes_ns) = match outlook {
            Outlook::Guest => (Waiting::Guest, self.response.mean_ns()),
            _ => (Waiting::Device, self.response.mean_per_wake_ns()),
        };
        if let (Some(gaps), Some(plan)) = (self.gaps.get_mut(at), self.plans.get_mut(at)) {
            *plan = gaps.plan(waiting, takes_ns, self.wake_ns);
        }
    }

    #[inline]
    fn plan(&self, outlook: Outlook) -> Plan {
        // `Large` has none.
        self.plans
            .get(outlook as usize)
            .copied()
            .unwrap_or_default()
    }

    /// A doze ended so much later than it should have: that is what a wake-up takes. One figure for sleeps of any
    /// length: a wake-up takes several times as long after a long one, but on a host that sleeps long, after a short one
    /// too (with the lengths told apart, few requests a second were slept for while the disk worked, and it did not pay).
    fn learn_wake(&mut self, late_ns: u64) {
        // Towards the middle one, not the mean: of a hundred wake-ups a few take a whole slice of the
        // scheduler.
        let step_ns = (self.wake_ns / 32).max(1);
        self.wake_ns = match late_ns > self.wake_ns {
            true => (self.wake_ns + step_ns).min(WAKE_MAX_NS),
            false => (self.wake_ns - step_ns).max(WAKE_MIN_NS),
        };
    }
}

/// What a wake-up takes on any host: less is a clock that was read in between, more is somebody else's
/// doing.
const WAKE_MIN_NS: u64 = 2_000;
const WAKE_MAX_NS: u64 = 150_000;

#[cfg(test)]
mod tests;
