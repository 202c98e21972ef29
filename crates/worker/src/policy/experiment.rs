//! Compares two ways of doing the same on the live load.
//!
//! Both arms run alternately for some milliseconds, in rounds of four stretches (plain, other, other, plain),
//! so that a drift of the load or of the disk affects both alike. Each round yields one comparison. The
//! quartiles over the rounds are judged after each round, so a clear result ends the experiment early. Then the
//! experiment rests, longer each time that the verdict is confirmed. A load that changes ends the rest.

use super::WINDOW_NS;

/// Maximum number of rounds of an experiment. A quarter of them suffices for a clear result.
const ROUNDS: usize = 8;
/// Rest between two experiments as a multiple of the experiment's duration: the first rest, and the longest.
const REST_MIN: u64 = 4;
const REST_MAX: u64 = 100;

/// How long an arm is tried at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stretch {
    /// Requests of a stretch at high rates. With less than a quarter of them a stretch is void.
    pub(crate) requests: u64,
    pub(crate) min_ns: u64,
    pub(crate) max_ns: u64,
}

/// One of the two ways.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Arm {
    /// The default, which wins where there is no difference.
    #[default]
    Plain,
    /// The alternative, which has to be worth its price.
    Other,
}

/// Work and cost of a stretch of time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Spent {
    pub(crate) requests: u64,
    pub(crate) wall_ns: u64,
    /// Sum of the requests' times in flight.
    pub(crate) held_ns: u64,
    pub(crate) cpu_ns: u64,
    /// Time in which other threads had the core that this one wanted.
    pub(crate) waited_ns: u64,
    /// Time with nothing in flight.
    pub(crate) idle_ns: u64,
    /// Requests that followed soon after an answer, at most one per answer.
    pub(crate) prompted: u64,
    /// Requests that found the worker asleep and nothing in flight.
    pub(crate) unseen: u64,
    /// Laps with work, and the sum of the ops in flight after each of them, or of those that ended in it if they were more.
    pub(crate) laps: u64,
    pub(crate) depths: u64,
}

impl Spent {
    /// Returns the average number of cores that were busy.
    pub(crate) fn cores(&self) -> f32 {
        self.cpu_ns as f32 / self.wall_ns.max(1) as f32
    }

    /// Returns the average number of ops in flight, 1 at least. A stall of the disk in one window changes it little.
    pub(crate) fn depth(&self) -> f32 {
        (self.depths as f32 / self.laps.max(1) as f32).max(1.0)
    }

    /// Returns the share of the time in which this thread waited for a core.
    pub(crate) fn waited(&self) -> f32 {
        self.waited_ns as f32 / self.wall_ns.max(1) as f32
    }

    pub(crate) fn add(&mut self, more: Spent) {
        self.requests += more.requests;
        self.wall_ns += more.wall_ns;
        self.held_ns += more.held_ns;
        self.cpu_ns += more.cpu_ns;
        self.waited_ns += more.waited_ns;
        self.idle_ns += more.idle_ns;
        self.prompted += more.prompted;
        self.unseen += more.unseen;
        self.laps += more.laps;
        self.depths += more.depths;
    }
}

/// The saving of the other arm as a share of the plain arm's cost. Negative if the other arm costs more.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Gain {
    /// Median of the rounds.
    pub(crate) share: f32,
    /// Quartiles of the rounds.
    pub(crate) spread: (f32, f32),
}

/// Results of an experiment so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ExperimentResult {
    pub(crate) rounds: usize,
    /// There will be no further round.
    pub(crate) is_last: bool,
    /// For the time that requests were in flight.
    pub(crate) response: Gain,
    /// Totals of each arm.
    pub(crate) plain: Spent,
    pub(crate) other: Spent,
}

impl ExperimentResult {
    /// Returns the verdict as soon as it is clear: whether the other arm gains at least `needed`. After the last round the median
    /// decides. An arm that is not in force yet (`current` is) must also win three quarters of the rounds.
    pub(crate) fn judge(&self, gain: &Gain, needed: f32, current: Arm) -> Option<Arm> {
        let (low, high) = gain.spread;
        let holds = gain.share >= needed && (current == Arm::Other || low > 0.0);
        match () {
            () if high < needed => Some(Arm::Plain),
            () if low >= needed && self.rounds >= ROUNDS / 2 => Some(Arm::Other),
            () if low >= 2.0 * needed => Some(Arm::Other),
            () if self.is_last && holds => Some(Arm::Other),
            () => self.is_last.then_some(Arm::Plain),
        }
    }
}

/// An experiment that is repeated without end.
#[derive(Debug)]
pub(crate) struct Experiment {
    lasts: Stretch,
    /// The arm in force between experiments.
    verdict: Arm,
    /// Current stretch of the round. `None`: it rests.
    stretch: Option<usize>,
    round: [Spent; 2],
    rounds: [[Spent; 2]; ROUNDS],
    done: usize,
    /// When the next experiment begins.
    next_ns: u64,
    /// Duration of this experiment's stretches, without pauses of the load.
    took_ns: u64,
    /// The rest as a multiple of the experiment's duration, and the end of the shortest rest.
    rest: u64,
    rested_ns: u64,
    /// Requests per second in the first window after the verdict; 0: not known yet.
    rate: u64,
    /// Number of successive windows with a different rate.
    changed: u32,
}

/// The arm of each stretch of a round.
const ROUND: [Arm; 4] = [Arm::Plain, Arm::Other, Arm::Other, Arm::Plain];

impl Experiment {
    /// Makes an experiment that begins at once. The plain arm is in force until the first verdict.
    pub(crate) fn new(lasts: Stretch) -> Experiment {
        Experiment {
            lasts,
            verdict: Arm::Plain,
            stretch: None,
            round: [Spent::default(); 2],
            rounds: [[Spent::default(); 2]; ROUNDS],
            done: 0,
            next_ns: 0,
            took_ns: 0,
            rest: REST_MIN / 2,
            rested_ns: 0,
            rate: 0,
            changed: 0,
        }
    }

    /// Returns the arm to use now.
    #[inline]
    pub(crate) fn arm(&self) -> Arm {
        match self.stretch {
            Some(stretch) => ROUND.get(stretch).copied().unwrap_or_default(),
            None => self.verdict,
        }
    }

    /// Returns the latest verdict.
    pub(crate) fn verdict(&self) -> Arm {
        self.verdict
    }

    #[inline]
    pub(crate) fn is_under_way(&self) -> bool {
        self.stretch.is_some()
    }

    /// Returns true if `spent`, counted since the last [`pass`](Experiment::pass), completes a stretch or a window. A
    /// window also lasts for as many requests as two stretches.
    #[inline]
    pub(crate) fn wants(&self, spent: &Spent) -> bool {
        match self.stretch {
            Some(_) if spent.requests >= self.lasts.requests => spent.wall_ns >= self.lasts.min_ns,
            Some(_) => spent.wall_ns >= self.lasts.max_ns,
            None => spent.wall_ns >= WINDOW_NS && spent.requests >= 2 * self.lasts.requests,
        }
    }

    /// Ends a stretch or a window. With the last stretch of a round it returns the results so far. The next
    /// round follows unless the caller [decides](Experiment::decide).
    pub(crate) fn pass(&mut self, now_ns: u64, spent: Spent) -> Option<ExperimentResult> {
        let Some(stretch) = self.stretch else {
            self.rest(now_ns, spent);
            return None;
        };
        if 4 * spent.requests < self.lasts.requests || spent.wall_ns > 4 * self.lasts.max_ns {
            // The load paused. Until it is back the verdict is in force; the experiment then starts from the beginning.
            (self.stretch, self.next_ns) = (None, now_ns);
            return None;
        }
        self.took_ns += spent.wall_ns;
        let [plain, other] = &mut self.round;
        match ROUND.get(stretch) {
            Some(Arm::Other) => other.add(spent),
            _ => plain.add(spent),
        }
        self.stretch = Some((stretch + 1) % ROUND.len());
        if self.stretch != Some(0) {
            return None;
        }
        if let Some(round) = self.rounds.get_mut(self.done) {
            *round = std::mem::take(&mut self.round);
        }
        self.done += 1;
        (self.done >= ROUNDS / 4).then(|| self.finding())
    }

    /// Ends the experiment with a verdict.
    pub(crate) fn decide(&mut self, now_ns: u64, verdict: Arm) {
        self.rest = match verdict == self.verdict {
            true => (2 * self.rest).min(REST_MAX),
            false => REST_MIN,
        };
        self.verdict = verdict;
        self.rested_ns = now_ns + REST_MIN * self.took_ns;
        (self.stretch, self.next_ns) = (None, now_ns + self.rest * self.took_ns);
        (self.rate, self.changed) = (0, 0);
    }

    /// Ends a window between two experiments.
    fn rest(&mut self, now_ns: u64, spent: Spent) {
        let rate = spent.requests * 1_000_000_000 / spent.wall_ns.max(1);
        if self.rate == 0 {
            self.rate = rate;
        }
        self.changed = match 2 * rate > 3 * self.rate || 3 * rate < 2 * self.rate {
            true => self.changed + 1,
            false => 0,
        };
        if self.changed >= 2 {
            self.next_ns = self.next_ns.min(self.rested_ns);
            (self.rate, self.changed) = (rate, 0);
        }
        if now_ns >= self.next_ns {
            self.begin();
        }
    }

    /// Begins the next experiment now.
    pub(crate) fn begin(&mut self) {
        (self.stretch, self.done, self.took_ns) = (Some(0), 0, 0);
        self.round = [Spent::default(); 2];
    }

    /// Gives the arms a new meaning, and puts one of them in force.
    pub(crate) fn set_arms(&mut self, arm: Arm) {
        self.verdict = arm;
    }

    fn finding(&self) -> ExperimentResult {
        let rounds = self.rounds.get(..self.done).unwrap_or_default();
        let mut found = ExperimentResult {
            rounds: self.done,
            is_last: self.done >= ROUNDS,
            response: gain(rounds, |spent| spent.held_ns),
            ..ExperimentResult::default()
        };
        for [plain, other] in rounds {
            found.plain.add(*plain);
            found.other.add(*other);
        }
        found
    }
}

/// Returns the other arm's saving of a cost.
fn gain(rounds: &[[Spent; 2]], cost: impl Fn(&Spent) -> u64) -> Gain {
    let per_request = |spent: &Spent| cost(spent) as f32 / spent.requests.max(1) as f32;
    let mut all = [0.0; ROUNDS];
    let count = rounds.len().min(ROUNDS);
    for (share, [plain, other]) in all.iter_mut().zip(rounds) {
        let (plain, other) = (per_request(plain), per_request(other));
        *share = (plain - other) / plain.max(f32::MIN_POSITIVE);
    }
    let shares = all.get_mut(..count).unwrap_or_default();
    shares.sort_unstable_by(f32::total_cmp);
    let at = |quarter: usize| shares.get(count * quarter / 4).copied().unwrap_or_default();
    Gain {
        share: at(2),
        spread: (at(1), at(3)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const LASTS: Stretch = Stretch {
        requests: 64,
        min_ns: 8 * MS,
        max_ns: 20 * MS,
    };

    /// Runs an experiment. Returns the number of stretches until the verdict, for a load in which `takes` returns the nanoseconds
    /// per request of an arm in a stretch.
    fn find(
        experiment: &mut Experiment,
        now_ns: &mut u64,
        takes: impl Fn(Arm, u64) -> u64,
    ) -> (ExperimentResult, u64) {
        for stretch in 0.. {
            let wall_ns = LASTS.requests * takes(experiment.arm(), stretch);
            *now_ns += wall_ns;
            let spent = Spent {
                requests: LASTS.requests,
                wall_ns,
                held_ns: wall_ns,
                ..Spent::default()
            };
            assert!(experiment.wants(&spent), "a stretch of {wall_ns} ns");
            if let Some(finding) = experiment.pass(*now_ns, spent) {
                return (finding, stretch);
            }
        }
        unreachable!("the loop has no other end")
    }

    fn rest(experiment: &mut Experiment, now_ns: &mut u64, per_second: u64) -> u64 {
        let begun_ns = *now_ns;
        while !experiment.is_under_way() {
            *now_ns += WINDOW_NS;
            let spent = Spent {
                requests: per_second * WINDOW_NS / 1_000_000_000,
                wall_ns: WINDOW_NS,
                ..Spent::default()
            };
            assert!(experiment.pass(*now_ns, spent).is_none());
        }
        *now_ns - begun_ns
    }

    #[test]
    fn a_drift_of_the_load_is_not_a_gain() {
        let mut now_ns = 0_u64;
        let mut experiment = Experiment::new(LASTS);
        rest(&mut experiment, &mut now_ns, 10_000);
        let (found, _) = find(&mut experiment, &mut now_ns, |_, stretch| {
            200_000 + 2000 * stretch
        });
        assert!(found.response.share.abs() < 0.001, "{found:?}");
        let (found, _) = {
            experiment.decide(now_ns, Arm::Plain);
            rest(&mut experiment, &mut now_ns, 10_000);
            find(&mut experiment, &mut now_ns, |arm, stretch| match arm {
                Arm::Plain => 200_000 + 2000 * stretch,
                Arm::Other => 180_000 + 2000 * stretch,
            })
        };
        assert!(
            found.response.spread.0 > 0.07 && found.response.spread.1 < 0.11,
            "{found:?}"
        );
    }

    #[test]
    fn each_round_yields_a_finding_until_the_caller_decides() {
        let mut now_ns = 0_u64;
        let mut experiment = Experiment::new(LASTS);
        rest(&mut experiment, &mut now_ns, 10_000);
        let noise = |_, stretch: u64| 200_000 + stretch * 7919 % 13 * 2000;
        let (found, stretch) = find(&mut experiment, &mut now_ns, noise);
        assert_eq!((found.rounds, found.is_last, stretch), (2, false, 7));
        for rounds in 3..=8 {
            let (found, stretch) = find(&mut experiment, &mut now_ns, noise);
            assert_eq!((found.rounds, stretch), (rounds, 3));
            assert_eq!(found.is_last, rounds == 8);
            let (low, high) = found.response.spread;
            assert!(low < 0.02 && high > -0.02, "{found:?}");
        }
        experiment.decide(now_ns, Arm::Other);
        rest(&mut experiment, &mut now_ns, 10_000);
        assert_eq!(experiment.verdict(), Arm::Other);
    }

    #[test]
    fn a_clear_result_ends_the_experiment_early() {
        use Arm::{Other, Plain};
        for (rounds, low, share, high, current, expected) in [
            (2, -0.1, 0.0, 0.04, Plain, Some(Plain)),
            (2, 0.06, 0.3, 0.3, Plain, None),
            (2, 0.1, 0.3, 0.3, Plain, Some(Other)),
            (4, 0.06, 0.3, 0.3, Plain, Some(Other)),
            (7, 0.04, 0.06, 0.3, Other, None),
            (8, 0.01, 0.06, 0.3, Plain, Some(Other)),
            (8, -0.01, 0.06, 0.3, Plain, Some(Plain)),
            (8, -0.01, 0.06, 0.3, Other, Some(Other)),
            (8, 0.01, 0.04, 0.3, Other, Some(Plain)),
        ] {
            let found = ExperimentResult {
                rounds,
                is_last: rounds == ROUNDS,
                ..ExperimentResult::default()
            };
            let spread = (low, high);
            let verdict = found.judge(&Gain { share, spread }, 0.05, current);
            assert_eq!(verdict, expected, "{rounds} {low} {share} {high}");
        }
    }

    #[test]
    fn rests_grow_with_each_confirmation_and_end_when_the_load_changes() {
        let mut now_ns = 0_u64;
        let mut experiment = Experiment::new(LASTS);
        rest(&mut experiment, &mut now_ns, 10_000);
        let mut rests = Vec::new();
        for _ in 0..7 {
            find(&mut experiment, &mut now_ns, |_, _| 200_000);
            experiment.decide(now_ns, Arm::Plain);
            rests.push(rest(&mut experiment, &mut now_ns, 10_000) / MS);
        }
        for (rest, times) in rests.iter().zip([4, 8, 16, 32, 64, 100, 100]) {
            assert!(rest.abs_diff(times * 103) <= 50, "{rests:?}");
        }
        find(&mut experiment, &mut now_ns, |_, _| 200_000);
        experiment.decide(now_ns, Arm::Plain);
        // The first window measures the usual rate.
        let window = |per_second: u64| Spent {
            requests: per_second / 20,
            wall_ns: WINDOW_NS,
            ..Spent::default()
        };
        for per_second in [10_000, 14_000, 7000, 10_000] {
            now_ns += WINDOW_NS;
            experiment.pass(now_ns, window(per_second));
        }
        // After the shortest rest, two windows decide.
        while now_ns < experiment.rested_ns {
            now_ns += WINDOW_NS;
            experiment.pass(now_ns, window(10_000));
        }
        let until = rest(&mut experiment, &mut now_ns, 5000) / MS;
        assert_eq!(until, 100);
    }

    /// A sparse load would otherwise be served in the untried arm for as long as it lasts.
    #[test]
    fn a_pause_of_the_load_puts_the_verdict_in_force_until_the_load_is_back() {
        let mut now_ns = 0_u64;
        let mut experiment = Experiment::new(LASTS);
        for (requests, wall_ns) in [(1, LASTS.max_ns), (LASTS.requests, 5 * LASTS.max_ns)] {
            rest(&mut experiment, &mut now_ns, 10_000);
            experiment.pass(
                now_ns,
                Spent {
                    requests: LASTS.requests,
                    wall_ns: LASTS.min_ns,
                    ..Spent::default()
                },
            );
            assert_eq!(experiment.arm(), Arm::Other);
            let spent = Spent {
                requests,
                wall_ns,
                ..Spent::default()
            };
            assert!(experiment.wants(&spent) && experiment.pass(now_ns, spent).is_none());
            assert_eq!(experiment.arm(), Arm::Plain);
            assert!(!experiment.is_under_way());
        }
        now_ns += 3_600_000 * MS;
        assert_eq!(rest(&mut experiment, &mut now_ns, 10_000), WINDOW_NS);
        let (_, stretches) = find(&mut experiment, &mut now_ns, |_, _| 200_000);
        assert_eq!(stretches, 7);
        experiment.decide(now_ns, Arm::Plain);
        let rested = rest(&mut experiment, &mut now_ns, 10_000) / MS;
        assert!(rested < 500, "an hour's pause does not count: {rested}");
    }
}
