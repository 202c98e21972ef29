//! Compares spinning with sleeping on the live load (docs/design/completion.md).
//!
//! A worker that has just spun pays more for each wake-up than one that has slept for a second, so a way counts only once it has
//! settled. A trial counts the way in force first, then the other. Each kind of load has a verdict of its own.

use super::{Arm, Gain, Spent, WINDOW_NS};

/// Windows of each way in a trial.
const WINDOWS: usize = 5;
/// Time for which a way is counted. A load that begins takes as long to settle. If no window ended for longer, it has paused.
const COUNT_NS: u64 = WINDOWS as u64 * WINDOW_NS;
/// Time until sleeping has settled after a spin.
const SETTLE_NS: u64 = 1_000_000_000;
/// Rest after a new verdict, and after a trial without one. It doubles each time that the verdict stays, up to a limit.
const REST_NS: u64 = 20_000_000_000;
const REST_MAX_NS: u64 = 600_000_000_000;
/// Kinds of load that are remembered.
const KINDS: usize = 6;

/// A kind of load, and what is known of it.
#[derive(Debug, Clone, Copy, Default)]
struct LoadKind {
    /// With each way about as many ops are in flight on average, give or take a factor of 2.5. 0: nothing is known yet.
    depths: [f32; 2],
    /// Plain until the first trial has ended.
    verdict: Arm,
    /// The rest after the verdict, when that was, and when the next trial begins. 0: there was no trial yet.
    rest_ns: u64,
    decided_ns: u64,
    next_ns: u64,
    /// Requests in a nanosecond after the verdict, or since they last changed. 0: not counted yet.
    pace: f32,
    /// The pace has changed since the verdict.
    is_doubtful: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Between two trials.
    Rest,
    /// The way in force is counted.
    Here,
    /// The other way is in force: it settles, and is counted.
    There,
}

/// Trials, one after the other. Until its first verdict each kind of load is slept for.
#[derive(Debug)]
pub(crate) struct Trial {
    step: Step,
    /// When the way that is in force has settled on this load.
    settled_ns: u64,
    /// End of the last window.
    at_ns: u64,
    /// Windows of each way, and how many are counted of the present one.
    windows: [[Spent; WINDOWS]; 2],
    counted: usize,
    kinds: [LoadKind; KINDS],
    kind: usize,
    /// The kind that the next unknown one replaces.
    oldest: usize,
    /// Successive windows of another kind, and of the same kind with another pace.
    strange: u32,
    changed: u32,
}

impl Trial {
    pub(crate) fn new() -> Trial {
        Trial {
            step: Step::Rest,
            settled_ns: 0,
            at_ns: 0,
            windows: [[Spent::default(); WINDOWS]; 2],
            counted: 0,
            kinds: [LoadKind::default(); KINDS],
            kind: 0,
            oldest: 1,
            strange: 0,
            changed: 0,
        }
    }

    /// Returns the way in force now. Plain: sleep. Other: spin.
    #[inline]
    pub(crate) fn arm(&self) -> Arm {
        match (self.step, self.verdict()) {
            (Step::There, Arm::Plain) => Arm::Other,
            (Step::There, Arm::Other) => Arm::Plain,
            (_, verdict) => verdict,
        }
    }

    /// Returns the latest verdict on this kind of load.
    pub(crate) fn verdict(&self) -> Arm {
        self.kinds[self.kind].verdict
    }

    #[inline]
    pub(crate) fn is_under_way(&self) -> bool {
        self.step != Step::Rest
    }

    /// Returns true if `spent`, counted since the last [`pass`](Trial::pass), fills a window.
    #[inline]
    pub(crate) fn wants(&self, spent: &Spent) -> bool {
        spent.wall_ns >= WINDOW_NS && spent.requests > 0
    }

    /// Ends a window. With the last one of a trial it returns the comparison, and the caller [decides](Trial::decide).
    pub(crate) fn pass(&mut self, now_ns: u64, spent: Spent) -> Option<Comparison> {
        let begun_ns = now_ns.saturating_sub(spent.wall_ns);
        let since_ns = now_ns.saturating_sub(self.at_ns);
        self.at_ns = now_ns;
        if since_ns > COUNT_NS {
            self.settled_ns = self.settled_ns.max(now_ns + COUNT_NS);
            self.give_up(now_ns);
            return None;
        }
        let (arm, depth) = (self.arm(), spent.depth());
        let known = &mut self.kinds[self.kind].depths[arm as usize];
        if *known == 0.0 {
            *known = depth;
        }
        self.strange = match is_like(*known, depth) {
            true => 0,
            false => self.strange + 1,
        };
        if self.strange >= 2 {
            self.give_up(now_ns);
            self.become_kind(now_ns, arm, depth);
            return None;
        }
        if begun_ns < self.settled_ns {
            return None;
        }
        if self.step == Step::Rest {
            if self.strange == 0 {
                self.rest(now_ns, spent);
            }
            return None;
        }
        if let Some(window) = self.windows[arm as usize].get_mut(self.counted) {
            *window = spent;
        }
        self.counted += 1;
        if self.counted < WINDOWS {
            return None;
        }
        self.counted = 0;
        if self.step == Step::Here {
            self.step = Step::There;
            self.settle(now_ns);
            return None;
        }
        let [plain, other] = self.windows;
        Some(Comparison { plain, other })
    }

    /// Ends a trial with a verdict.
    pub(crate) fn decide(&mut self, now_ns: u64, verdict: Arm) {
        let was = self.arm();
        self.step = Step::Rest;
        let kind = &mut self.kinds[self.kind];
        kind.rest_ns = match kind.verdict == verdict {
            true => (2 * kind.rest_ns).clamp(REST_NS, REST_MAX_NS),
            false => REST_NS,
        };
        kind.verdict = verdict;
        (kind.decided_ns, kind.next_ns) = (now_ns, now_ns + kind.rest_ns);
        (kind.pace, kind.is_doubtful) = (0.0, false);
        if verdict != was {
            self.settle(now_ns);
        }
        (self.strange, self.changed) = (0, 0);
    }

    /// Ends a trial that is under way without a verdict, because the load has changed or paused. The next one is put off, or a load
    /// that never lasts for a trial would be left in the untried way again and again. A verdict from another pace ends as well, or a
    /// load that never lasts for a trial would be spun for without one.
    pub(crate) fn give_up(&mut self, now_ns: u64) {
        let was = self.arm();
        if self.is_under_way() {
            let kind = &mut self.kinds[self.kind];
            kind.next_ns = now_ns + REST_NS;
            if kind.is_doubtful {
                kind.verdict = Arm::Plain;
            }
        }
        self.step = Step::Rest;
        if self.arm() != was {
            self.settle(now_ns);
        }
        (self.strange, self.changed) = (0, 0);
    }

    /// Has each load tried again: what it is judged by has changed.
    pub(crate) fn reconsider(&mut self) {
        self.kinds.iter_mut().for_each(|kind| kind.next_ns = 0);
    }

    /// Passes a window between two trials.
    fn rest(&mut self, now_ns: u64, spent: Spent) {
        // A neighbour on the core lowers it twice: requests become fewer, and the worker waits for the core.
        let pace = spent.requests as f32 / spent.wall_ns.max(1) as f32 * (1.0 - spent.waited());
        let known = &mut self.kinds[self.kind];
        if known.pace == 0.0 {
            known.pace = pace;
        }
        self.changed = match 2.0 * pace > 3.0 * known.pace || 3.0 * pace < 2.0 * known.pace {
            true => self.changed + 1,
            false => 0,
        };
        if self.changed >= 2 {
            known.next_ns = known.next_ns.min(known.decided_ns + REST_NS);
            (known.pace, known.is_doubtful) = (pace, true);
            self.changed = 0;
        }
        if now_ns >= known.next_ns {
            (self.step, self.counted) = (Step::Here, 0);
        }
    }

    /// Notes that the load is of another kind.
    fn become_kind(&mut self, now_ns: u64, arm: Arm, depth: f32) {
        let mut kinds = self.kinds.iter();
        let known = kinds.position(|kind| is_like(kind.depths[arm as usize], depth));
        self.kind = known.unwrap_or(self.oldest);
        if known.is_none() {
            self.oldest = (self.oldest + 1) % KINDS;
            self.kinds[self.kind] = LoadKind::default();
            self.kinds[self.kind].depths[arm as usize] = depth;
        }
        self.settled_ns = self.settled_ns.max(now_ns + COUNT_NS);
        if self.arm() != arm {
            self.settle(now_ns);
        }
    }

    /// Notes that the way in force is another one.
    fn settle(&mut self, now_ns: u64) {
        self.settled_ns = now_ns
            + match self.arm() {
                Arm::Plain => SETTLE_NS,
                Arm::Other => WINDOW_NS,
            };
    }
}

/// Returns true if two depths differ by a factor of 2.5 at most.
fn is_like(known: f32, depth: f32) -> bool {
    depth <= 2.5 * known && known <= 2.5 * depth
}

/// Sleeping and spinning, each in its settled state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Comparison {
    plain: [Spent; WINDOWS],
    other: [Spent; WINDOWS],
}

impl Comparison {
    /// Totals of each way.
    pub(crate) fn totals(&self) -> [Spent; 2] {
        [self.plain, self.other].map(|windows| {
            let mut total = Spent::default();
            windows.into_iter().for_each(|window| total.add(window));
            total
        })
    }

    /// Returns the share of the time between two requests that spinning saves.
    pub(crate) fn of_wall(&self) -> Gain {
        self.gain(|spent| spent.wall_ns as f32 / spent.requests.max(1) as f32)
    }

    /// Returns true if each window of one way had more requests than any of the other.
    pub(crate) fn asks_otherwise(&self) -> bool {
        let rates = |windows: &[Spent; WINDOWS]| {
            sorted(windows, |spent| {
                spent.requests as f32 / spent.wall_ns.max(1) as f32
            })
        };
        let ([slowest, .., fastest], [least, .., most]) = (rates(&self.plain), rates(&self.other));
        fastest < least || most < slowest
    }

    /// Returns the share of the response time that spinning saves. The wake-up before a request is taken cannot be seen. It
    /// counts as much as the one at its end, and `wake_ns` where requests take less than that: those end where they are submitted.
    pub(crate) fn of_response(&self, wake_ns: u64) -> Gain {
        let held = |spent: &Spent| spent.held_ns as f32 / spent.requests.max(1) as f32;
        let asleep = middle(&self.plain, held);
        let wake_ns = wake_ns as f32;
        let wake = match asleep < wake_ns {
            true => wake_ns,
            false => (asleep - middle(&self.other, held)).max(0.0),
        };
        self.gain(|spent| {
            let unseen = spent.unseen as f32 / spent.requests.max(1) as f32;
            held(spent) + unseen * wake
        })
    }

    /// Returns the saving of a cost: of the medians, and of the quartiles that lie closest and farthest.
    fn gain(&self, cost: impl Fn(&Spent) -> f32) -> Gain {
        let [plain, other] = [&self.plain, &self.other].map(|windows| sorted(windows, &cost));
        let share = |from: usize, to: usize| {
            (plain[from] - other[to]) / plain[WINDOWS / 2].max(f32::MIN_POSITIVE)
        };
        let (low, mid, high) = (WINDOWS / 4, WINDOWS / 2, WINDOWS - 1 - WINDOWS / 4);
        Gain {
            share: share(mid, mid),
            spread: (share(low, high), share(high, low)),
        }
    }
}

fn sorted(windows: &[Spent; WINDOWS], cost: impl Fn(&Spent) -> f32) -> [f32; WINDOWS] {
    let mut costs = windows.each_ref().map(cost);
    costs.sort_unstable_by(f32::total_cmp);
    costs
}

fn middle(windows: &[Spent; WINDOWS], cost: impl Fn(&Spent) -> f32) -> f32 {
    sorted(windows, cost)[WINDOWS / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1000 * MS;

    /// A load, as the windows that it fills: requests per second of each way, and ops in flight.
    struct Load {
        rates: [u64; 2],
        depth: u64,
    }

    struct Bench {
        trial: Trial,
        now_ns: u64,
    }

    impl Bench {
        fn new() -> Bench {
            Bench {
                trial: Trial::new(),
                now_ns: 10 * SECOND,
            }
        }

        /// Passes one window. Spinning wins if it has the higher rate.
        fn window(&mut self, load: &Load) -> bool {
            self.now_ns += WINDOW_NS;
            let rate = load.rates[self.trial.arm() as usize];
            let spent = Spent {
                requests: rate * WINDOW_NS / SECOND,
                wall_ns: WINDOW_NS,
                laps: 1,
                depths: load.depth,
                ..Spent::default()
            };
            assert!(self.trial.wants(&spent));
            let found = self.trial.pass(self.now_ns, spent);
            if let Some(found) = &found {
                let verdict = match found.of_wall().share > 0.05 {
                    true => Arm::Other,
                    false => Arm::Plain,
                };
                self.trial.decide(self.now_ns, verdict);
            }
            found.is_some()
        }

        /// Seconds until the next verdict.
        fn verdict(&mut self, load: &Load) -> f64 {
            let begun_ns = self.now_ns;
            while !self.window(load) {
                assert!(self.now_ns - begun_ns < 2 * REST_MAX_NS, "no verdict");
            }
            (self.now_ns - begun_ns) as f64 / SECOND as f64
        }

        fn serve(&mut self, load: &Load, span_ns: u64) {
            for _ in 0..span_ns / WINDOW_NS {
                self.window(load);
            }
        }
    }

    const GAINS: Load = Load {
        rates: [10_000, 15_000],
        depth: 1,
    };
    const LOSES: Load = Load {
        rates: [50_000, 40_000],
        depth: 8,
    };

    #[test]
    fn trials_become_rare_while_the_verdict_stays() {
        for (load, arm) in [(GAINS, Arm::Other), (LOSES, Arm::Plain)] {
            let mut bench = Bench::new();
            let first = bench.verdict(&load);
            assert!(first < 2.0, "{first}");
            assert_eq!(bench.trial.verdict(), arm);
            for rest in [20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0] {
                let took = bench.verdict(&load) - rest;
                assert!((0.5..2.0).contains(&took), "{rest}: {took}");
            }
        }
    }

    /// Sleeping counts from its second second on.
    #[test]
    fn a_way_counts_when_it_has_settled() {
        let mut bench = Bench::new();
        bench.verdict(&GAINS);
        assert_eq!(bench.trial.verdict(), Arm::Other);
        bench.trial.kinds[0].next_ns = 0;
        while bench.trial.arm() == Arm::Other {
            bench.window(&GAINS);
        }
        let asleep_ns = bench.now_ns;
        let unsettled = Load {
            rates: [5000, 15_000],
            depth: 1,
        };
        bench.serve(&unsettled, SECOND);
        assert_eq!(bench.trial.arm(), Arm::Plain, "not counted yet");
        // It is as good as spinning in the end.
        let settled = Load {
            rates: [15_000, 15_000],
            depth: 1,
        };
        bench.verdict(&settled);
        assert_eq!(bench.trial.verdict(), Arm::Plain);
        assert_eq!(bench.now_ns - asleep_ns, SECOND + COUNT_NS);
    }

    #[test]
    fn a_load_that_comes_back_is_served_by_its_own_verdict_at_once() {
        let mut bench = Bench::new();
        for load in [&GAINS, &LOSES] {
            bench.verdict(load);
        }
        for _ in 0..20 {
            for (load, arm) in [(&GAINS, Arm::Other), (&LOSES, Arm::Plain)] {
                bench.serve(load, 2 * WINDOW_NS);
                assert_eq!(bench.trial.arm(), arm);
                bench.serve(load, SECOND);
            }
        }
    }

    #[test]
    fn a_load_that_is_not_known_is_slept_for_until_it_was_tried() {
        let mut bench = Bench::new();
        bench.verdict(&GAINS);
        bench.serve(&LOSES, 4 * WINDOW_NS);
        assert_eq!(bench.trial.arm(), Arm::Plain);
        let took = bench.verdict(&LOSES);
        assert!(took < 2.0, "{took}");
        assert_eq!(bench.trial.verdict(), Arm::Plain);
        // More kinds than are remembered: the oldest are tried again.
        for depth in [1, 4, 16, 64, 256, 1024, 4096] {
            let load = Load { depth, ..LOSES };
            bench.serve(&load, 4 * WINDOW_NS);
            bench.verdict(&load);
        }
        bench.serve(&GAINS, 4 * WINDOW_NS);
        assert_eq!(bench.trial.verdict(), Arm::Plain);
        let took = bench.verdict(&GAINS);
        assert!(took < 2.0, "{took}");
    }

    #[test]
    fn a_rate_that_changes_has_the_load_tried_again_soon() {
        let mut bench = Bench::new();
        for _ in 0..4 {
            bench.verdict(&GAINS);
        }
        bench.serve(&GAINS, 21 * SECOND);
        let slower = Load {
            rates: [9000, 9000],
            depth: 1,
        };
        let took = bench.verdict(&slower);
        assert!(took < 2.0, "{took}");
        assert_eq!(bench.trial.verdict(), Arm::Plain);
    }

    #[test]
    fn a_rate_that_changes_behind_a_pause_is_noticed_too() {
        let mut bench = Bench::new();
        for _ in 0..4 {
            bench.verdict(&GAINS);
        }
        bench.serve(&GAINS, 21 * SECOND);
        bench.now_ns += 300 * MS;
        let slower = Load {
            rates: [9000, 9000],
            depth: 1,
        };
        let took = bench.verdict(&slower);
        assert!(took < 3.0, "{took}");
        assert_eq!(bench.trial.verdict(), Arm::Plain);
    }

    /// Sleeping takes longer to settle than these bursts last.
    #[test]
    fn a_load_of_another_pace_that_never_lasts_for_a_trial_is_slept_for() {
        let mut bench = Bench::new();
        for _ in 0..2 {
            bench.verdict(&GAINS);
        }
        bench.serve(&GAINS, 21 * SECOND);
        let slower = Load {
            rates: [5000, 5000],
            depth: 1,
        };
        for _ in 0..20 {
            bench.serve(&slower, 1500 * MS);
            bench.now_ns += 300 * MS;
        }
        assert_eq!(bench.trial.verdict(), Arm::Plain);
    }

    /// The untried way would otherwise be in force for as long as a pause lasts.
    #[test]
    fn a_pause_ends_a_trial_without_a_verdict() {
        let mut bench = Bench::new();
        while bench.trial.arm() == Arm::Plain {
            bench.window(&GAINS);
        }
        bench.now_ns += 300 * MS;
        assert!(!bench.window(&GAINS));
        assert_eq!(
            (bench.trial.arm(), bench.trial.verdict()),
            (Arm::Plain, Arm::Plain)
        );
        bench.now_ns += 5 * SECOND;
        let took = bench.verdict(&GAINS);
        assert!((15.0..17.0).contains(&took), "it rests: {took}");
        // In the middle of a window, and then in a trial.
        while !bench.trial.is_under_way() {
            bench.window(&GAINS);
        }
        let paused = Spent {
            requests: 400,
            wall_ns: SECOND,
            laps: 1,
            depths: 1,
            ..Spent::default()
        };
        bench.now_ns += SECOND;
        assert!(bench.trial.wants(&paused) && bench.trial.pass(bench.now_ns, paused).is_none());
        assert!(!bench.trial.is_under_way());
    }

    /// Bursts that end before a trial does would be served in the untried way, each of them.
    #[test]
    fn a_load_that_never_lasts_for_a_trial_is_seldom_tried() {
        let mut bench = Bench::new();
        bench.verdict(&GAINS);
        bench.trial.reconsider();
        let mut asleep_ns = 0;
        for _ in 0..20 {
            for _ in 0..20 {
                asleep_ns += u64::from(bench.trial.arm() == Arm::Plain) * WINDOW_NS;
                bench.window(&GAINS);
            }
            bench.now_ns += 300 * MS;
        }
        assert!(asleep_ns < 2 * SECOND, "{asleep_ns}");
        assert_eq!(bench.trial.verdict(), Arm::Other);
    }

    /// Asleep a worker takes requests in large batches, awake one by one.
    #[test]
    fn each_way_has_a_depth_of_its_own() {
        let mut bench = Bench::new();
        let mut verdicts = 0;
        for _ in 0..30 * SECOND / WINDOW_NS {
            let depth = match bench.trial.arm() {
                Arm::Plain => 32,
                Arm::Other => 3,
            };
            verdicts += u64::from(bench.window(&Load { depth, ..GAINS }));
        }
        assert_eq!((verdicts, bench.trial.verdict()), (2, Arm::Other));
    }

    #[test]
    fn a_new_tuning_has_each_load_tried_again() {
        let mut bench = Bench::new();
        for _ in 0..4 {
            bench.verdict(&GAINS);
        }
        bench.trial.reconsider();
        let took = bench.verdict(&GAINS);
        assert!(took < 2.0, "{took}");
    }

    #[test]
    fn noise_of_a_random_load_is_no_other_rate() {
        let compared = |rates: [[u64; WINDOWS]; 2]| {
            let [plain, other] = rates.map(|rates| {
                rates.map(|requests| Spent {
                    requests,
                    wall_ns: WINDOW_NS,
                    ..Spent::default()
                })
            });
            Comparison { plain, other }
        };
        let noisy = compared([[52, 61, 47, 55, 50], [58, 70, 63, 49, 66]]);
        assert!(!noisy.asks_otherwise());
        let apart = compared([[52, 61, 47, 55, 50], [70, 72, 69, 74, 62]]);
        assert!(apart.asks_otherwise());
    }

    #[test]
    fn the_unseen_wake_up_counts_as_much_as_the_seen_one() {
        let window = |held_ns, unseen| Spent {
            requests: 100,
            wall_ns: WINDOW_NS,
            held_ns,
            unseen,
            ..Spent::default()
        };
        let compared = |asleep, awake| Comparison {
            plain: [window(asleep, 100); WINDOWS],
            other: [window(awake, 0); WINDOWS],
        };
        // 100 us of which 20 are the wake-up at the end: 20 more before the beginning.
        let gain = compared(10_000_000, 8_000_000).of_response(1);
        assert!((gain.share - 40.0 / 120.0).abs() < 0.001, "{gain:?}");
        let gain = compared(8_000_000, 8_000_000).of_response(1);
        assert!(gain.share.abs() < 0.001, "{gain:?}");
        let gain = compared(0, 0).of_response(20_000);
        assert!((gain.share - 1.0).abs() < 0.001, "{gain:?}");
    }
}
