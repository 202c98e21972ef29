//! Traces through the pacer: a worker in virtual time, with a guest that asks at given moments and a device
//! that takes given times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use cleave_sim::Random;

use super::*;
use crate::{Completion, Split, Totals};

const US: u64 = 1000;
const MS: u64 = 1000 * US;
const SECOND: u64 = 1000 * MS;
/// Most that a lap takes.
const TAKE_MAX: u32 = 4;
/// What things take in virtual time.
const WAKE_NS: u64 = 30 * US;
const WAKE_CPU_NS: u64 = 10 * US;
const BUSY_LAP_NS: u64 = 400;
const IDLE_LAP_NS: u64 = 150;

/// A time of an exponential distribution.
fn exponential(random: &mut Random, mean_ns: u64) -> u64 {
    let share = (random.draw() >> 11) as f64 / (1u64 << 53) as f64;
    (-(1.0 - share).ln() * mean_ns as f64) as u64
}

/// What a trace came to.
struct Outcome {
    totals: Totals,
    span_ns: u64,
    /// Of the worker.
    cpu_ns: u64,
    requests: u64,
    latency_ns: u64,
    latencies: Vec<u64>,
    /// Time of the last wake-up or lap.
    last_ns: u64,
    /// Most switches within one second.
    switches_max: u64,
}

impl std::fmt::Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (requests, mean_ns) = (self.requests, self.mean_ns());
        let (cpu, totals) = (self.cpu_percent(), self.totals);
        write!(
            f,
            "{requests} requests in {mean_ns} ns, {cpu} % CPU, {totals:?}"
        )
    }
}

impl Outcome {
    fn mean_ns(&self) -> u64 {
        self.latency_ns / self.requests.max(1)
    }

    fn cpu_percent(&self) -> u64 {
        self.cpu_ns * 100 / self.span_ns
    }

    fn p99_ns(&self) -> u64 {
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        sorted[sorted.len() * 99 / 100]
    }

    fn switches(&self) -> u64 {
        let totals = &self.totals;
        totals.switches_fast
            + totals.switches_slow
            + totals.switches_budget
            + totals.switches_crowded
    }
}

/// A guest that asks at these moments, of a device that takes so long for the n-th request.
struct Trace<'a> {
    arrivals: &'a [u64],
    device_ns: &'a dyn Fn(usize) -> u64,
    /// Others want the core at this time.
    crowded: &'a dyn Fn(u64) -> bool,
    large: bool,
}

fn alone(arrivals: &[u64]) -> Trace<'_> {
    Trace {
        arrivals,
        device_ns: &|_| 0,
        crowded: &|_| false,
        large: false,
    }
}

fn tuning() -> Tuning {
    Tuning::new(Split::Off)
}

/// Turns a worker through a trace, and on for a second after it.
fn run(trace: &Trace<'_>, tuning: &Tuning) -> Outcome {
    let stats = Stats::default();
    let budget = Budget::default();
    let terms = Terms {
        tuning,
        budget: &budget,
        stats: &stats,
    };
    let mut pacer = Pacer::new(WAKE_NS);
    let mut flight = BinaryHeap::new();
    let (mut next, mut now_ns, mut cpu_ns) = (0, 0, 0);
    let mut latencies = Vec::new();
    let mut switched = Vec::new();
    loop {
        let mut did = Did::default();
        while trace.arrivals.get(next).is_some_and(|at| *at <= now_ns) {
            if did.arrived == TAKE_MAX {
                did.more = true;
                break;
            }
            let device_ns = (trace.device_ns)(next);
            match device_ns {
                0 => latencies.push(now_ns + BUSY_LAP_NS - trace.arrivals[next]),
                _ => flight.push(Reverse((now_ns + device_ns, next))),
            }
            next += 1;
            did.arrived += 1;
        }
        while let Some(Reverse((at, request))) = flight.peek().copied() {
            if at > now_ns {
                break;
            }
            flight.pop();
            did.ended += 1;
            latencies.push(now_ns + BUSY_LAP_NS - trace.arrivals[request]);
        }
        did.in_flight = flight.len() as u32;
        let lap_ns = if did.any() { BUSY_LAP_NS } else { IDLE_LAP_NS };
        (now_ns, cpu_ns) = (now_ns + lap_ns, cpu_ns + lap_ns);
        let outlook = match (flight.is_empty(), trace.large) {
            (true, _) => Outlook::Guest,
            (false, true) => Outlook::Large,
            (false, false) => Outlook::Small,
        };
        let before = totals(&stats);
        let pace = pacer
            .turn(did, outlook)
            .unwrap_or_else(|| pacer.decide(did, outlook, now_ns, terms));
        let pace = match pace {
            Pace::Look => pacer.looked(now_ns, (trace.crowded)(now_ns), terms),
            pace => pace,
        };
        if totals(&stats) != before && switches(&totals(&stats)) != switches(&before) {
            switched.push(now_ns);
        }
        let event = [
            trace.arrivals.get(next).copied(),
            flight.peek().map(|Reverse((at, _))| *at),
        ];
        let event_ns = event.into_iter().flatten().min();
        let wake_ns = match pace {
            Pace::Spin | Pace::Look => continue,
            Pace::Doze(until_ns) => {
                assert!(until_ns > now_ns, "a doze ends later than it begins");
                add(&stats.dozes, 1);
                Some(event_ns.map_or(until_ns, |event_ns| event_ns.min(until_ns)))
            }
            Pace::Sleep => {
                add(&stats.sleeps, 1);
                event_ns
            }
        };
        // The worker arms and looks once more: what is there already is not slept on.
        match wake_ns {
            Some(wake_ns) if wake_ns <= now_ns => {}
            Some(wake_ns) => {
                now_ns = wake_ns + WAKE_NS;
                cpu_ns += WAKE_CPU_NS;
                add(&stats.wakeups, 1);
            }
            None => break,
        }
    }
    let most = |from: &u64| {
        let within = switched
            .iter()
            .filter(|at| (*from..from + SECOND).contains(at));
        within.count() as u64
    };
    Outcome {
        totals: totals(&stats),
        span_ns: now_ns.max(1),
        cpu_ns,
        requests: latencies.len() as u64,
        latency_ns: latencies.iter().sum(),
        latencies,
        last_ns: now_ns,
        switches_max: switched.iter().map(most).max().unwrap_or(0),
    }
}

fn totals(stats: &Stats) -> Totals {
    let mut totals = Totals::default();
    totals.add(stats);
    totals
}

fn switches(totals: &Totals) -> u64 {
    totals.switches_fast + totals.switches_slow + totals.switches_budget + totals.switches_crowded
}

/// What holds for every trace: all is answered, wasted spinning stays within its share (and what was
/// saved up), the mode does not flap, and when the guest falls silent so does the worker, for good.
fn check(name: &str, trace: &Trace<'_>, tuning: &Tuning) -> Outcome {
    let outcome = run(trace, tuning);
    assert_eq!(outcome.requests, trace.arrivals.len() as u64, "{name}");
    let share = u64::from(tuning.spin_cpu_max);
    let saved_ns = Budget::size_ns(tuning);
    // A spin is begun only with as much left as it may waste, give or take one look at the clock.
    let granted_ns = outcome.span_ns / 100 * share + saved_ns + outcome.span_ns / 1000;
    assert!(
        outcome.totals.spin_wasted_ns <= granted_ns,
        "{name}: {outcome:?}"
    );
    assert!(outcome.switches_max <= 100, "{name}: {outcome:?}");
    let last_ns = trace.arrivals.last().copied().unwrap_or(0);
    assert!(
        outcome.last_ns < last_ns + 60 * MS,
        "{name}: it slept for good soon after the last request: {outcome:?}"
    );
    outcome
}

fn even(per_second: u64, time_ns: u64) -> Vec<u64> {
    let gap_ns = SECOND / per_second;
    (1..=time_ns / gap_ns).map(|n| n * gap_ns).collect()
}

fn poisson(per_second: u64, time_ns: u64) -> Vec<u64> {
    let mut random = Random::new(per_second);
    let mut at_ns = 0;
    std::iter::repeat_with(|| {
        at_ns += exponential(&mut random, SECOND / per_second);
        at_ns
    })
    .take_while(|at_ns| *at_ns < time_ns)
    .collect()
}

/// So long on at this rate, so long off.
fn bursts(per_second: u64, on_ns: u64, off_ns: u64, time_ns: u64) -> Vec<u64> {
    let starts = (0..time_ns / (on_ns + off_ns)).map(|n| n * (on_ns + off_ns) + SECOND / 1000);
    starts
        .flat_map(|start| {
            even(per_second, on_ns)
                .into_iter()
                .map(move |at| start + at)
        })
        .collect()
}

#[test]
fn even_rates_sleep_below_a_thousand_and_spin_above() {
    for (per_second, spins) in [
        (10, false),
        (100, false),
        (1000, false),
        (3000, true),
        (10_000, true),
        (100_000, true),
        (500_000, true),
        (2_000_000, true),
    ] {
        let arrivals = even(per_second, SECOND / 4);
        let name = format!("{per_second}/s");
        let outcome = check(&name, &alone(&arrivals), &tuning());
        let totals = &outcome.totals;
        if spins {
            // What polling would have, but for the start.
            assert!(outcome.mean_ns() < 2 * US, "{name}: {outcome:?}");
            assert!(totals.sleeps < 300, "{name}: {totals:?}");
            assert!(totals.spin_wasted_ns < 2 * MS, "{name}: {totals:?}");
        } else {
            assert_eq!(totals.spin_hit_ns + totals.spin_wasted_ns, 0, "{name}");
            assert_eq!(totals.dozes, 0, "{name}");
            assert_eq!(totals.wakeups, outcome.requests, "{name}");
        }
        assert!(outcome.switches() <= 2, "{name}: {totals:?}");
    }
}

#[test]
fn even_rates_are_met_awake_however_low_where_that_is_wanted() {
    let tuning = Tuning {
        spin_rate_min: 0,
        ..tuning()
    };
    for per_second in [60, 100, 350, 1000] {
        let arrivals = even(per_second, 4 * SECOND);
        let name = format!("{per_second}/s");
        let outcome = check(&name, &alone(&arrivals), &tuning);
        // But for those that it learns from.
        let mut latencies = outcome.latencies.clone();
        latencies.sort_unstable();
        assert!(latencies[latencies.len() * 9 / 10] < US, "{name}");
        assert!(outcome.cpu_percent() < 20, "{name}: {outcome:?}");
    }
    for per_second in [20, 300] {
        let name = format!("{per_second}/s at random");
        check(&name, &alone(&poisson(per_second, SECOND)), &tuning);
    }
}

#[test]
fn it_spins_at_once_when_a_flood_comes() {
    let arrivals: Vec<u64> = (0..50_000).map(|n| SECOND + n * 2 * US).collect();
    let outcome = check("flood", &alone(&arrivals), &tuning());
    assert!(outcome.totals.sleeps < 20, "{outcome:?}");
}

/// A guest that asks for many at once, and for as many again when it has been called: where the worker sleeps
/// between, both wait for each other to wake up.
#[test]
fn it_spins_although_laps_end_before_the_work_does() {
    let arrivals: Vec<u64> = (0..50_000).map(|n| SECOND + n / 32 * 40 * US).collect();
    let outcome = check("groups", &alone(&arrivals), &tuning());
    assert!(outcome.totals.sleeps < 20, "{outcome:?}");
}

#[test]
fn random_arrivals_stay_within_the_budget() {
    for per_second in [10, 100, 1000, 3000, 10_000, 100_000, 1_000_000] {
        let arrivals = poisson(per_second, SECOND / 4);
        let name = format!("poisson {per_second}/s");
        let outcome = check(&name, &alone(&arrivals), &tuning());
        if per_second <= 300 {
            assert_eq!(outcome.totals.spin_wasted_ns, 0, "{name}");
        }
        if per_second >= 10_000 {
            assert!(outcome.mean_ns() < 4 * US, "{name}: {outcome:?}");
        }
    }
}

#[test]
fn a_tight_budget_is_kept_and_an_empty_one_never_spins() {
    let arrivals = poisson(4000, SECOND);
    for spin_cpu_max in [0, 1, 5, 25] {
        let tuning = Tuning {
            spin_cpu_max,
            ..tuning()
        };
        let name = format!("{spin_cpu_max} %");
        let outcome = check(&name, &alone(&arrivals), &tuning);
        if spin_cpu_max == 0 {
            let totals = &outcome.totals;
            assert_eq!((totals.spin_hit_ns, totals.spin_wasted_ns), (0, 0));
        } else {
            assert!(outcome.totals.spin_hit_ns > 0, "{name}");
        }
    }
    let all = Tuning {
        spin_cpu_total: Some(10),
        ..tuning()
    };
    let outcome = check("all", &alone(&even(20_000, SECOND)), &all);
    let spun_ns = outcome.totals.spin_hit_ns + outcome.totals.spin_wasted_ns;
    assert!((70 * MS..120 * MS).contains(&spun_ns), "{outcome:?}");
}

#[test]
fn bursts_are_met_awake_and_the_time_between_is_slept() {
    let arrivals = bursts(100_000, MS, 9 * MS, SECOND / 2);
    let outcome = check("bursts", &alone(&arrivals), &tuning());
    assert!(
        outcome.p99_ns() < 2 * US,
        "{} {outcome:?}",
        outcome.p99_ns()
    );
    assert!(outcome.cpu_percent() < 45, "{} %", outcome.cpu_percent());
}

#[test]
fn steps_up_and_down_are_followed() {
    let mut arrivals = Vec::new();
    for per_second in [100, 50_000, 200, 5000, 1_000_000, 10] {
        let from = arrivals.last().copied().unwrap_or(0);
        arrivals.extend(even(per_second, SECOND / 5).into_iter().map(|at| from + at));
    }
    let outcome = check("steps", &alone(&arrivals), &tuning());
    assert!(outcome.switches() <= 12, "{outcome:?}");
}

#[test]
fn fast_devices_are_spun_for_and_slow_ones_slept_for() {
    for (device_us, spins) in [
        (5, true),
        (20, true),
        (80, true),
        (200, true),
        (3000, false),
        (10_000, false),
    ] {
        // One request after the other, as deep as it takes for a rate that counts.
        let depth = (device_us * 4 / 1000).max(1);
        let gap_ns = (device_us * US + 5 * US) / depth;
        let arrivals: Vec<u64> = (1..SECOND / gap_ns).map(|n| n * gap_ns).collect();
        let jitter = |n: usize| device_us * US + (n as u64 * 7919 % 97) * device_us * US / 1000;
        let trace = Trace {
            device_ns: &jitter,
            ..alone(&arrivals)
        };
        let name = format!("device of {device_us} us");
        let outcome = check(&name, &trace, &tuning());
        let late_ns = outcome.mean_ns() - device_us * US;
        if spins {
            assert!(
                late_ns < device_us * US / 10 + 3 * US,
                "{name}: {late_ns} {outcome:?}"
            );
        }
    }
}

#[test]
fn a_slow_even_device_is_dozed_for() {
    let arrivals: Vec<u64> = (1..3000).map(|n| n * 400 * US).collect();
    let trace = Trace {
        device_ns: &|_| 300 * US,
        ..alone(&arrivals)
    };
    let outcome = check("dozing", &trace, &tuning());
    assert!(outcome.totals.dozes > 2000, "{outcome:?}");
    assert!(outcome.mean_ns() < 315 * US, "{outcome:?}");
    assert!(outcome.cpu_percent() < 60, "{outcome:?}");
}

#[test]
fn a_device_of_two_minds_stays_within_the_budget() {
    let arrivals = even(5000, SECOND);
    let trace = Trace {
        device_ns: &|n| if n % 7 == 0 { 5 * MS } else { 60 * US },
        ..alone(&arrivals)
    };
    check("bimodal", &trace, &tuning());
}

#[test]
fn large_requests_alone_are_not_spun_for() {
    let arrivals = even(2000, SECOND);
    let trace = Trace {
        device_ns: &|_| 400 * US,
        large: true,
        ..alone(&arrivals)
    };
    let outcome = run(&trace, &tuning());
    // What is left are the gaps after one has ended and before the next.
    let sleeps = outcome.totals.sleeps + outcome.totals.dozes;
    assert!(sleeps >= arrivals.len() as u64, "{outcome:?}");
}

#[test]
fn a_shared_core_is_left_to_the_others() {
    let arrivals = even(20_000, SECOND);
    let trace = Trace {
        crowded: &|_| true,
        ..alone(&arrivals)
    };
    let outcome = check("crowded", &trace, &tuning());
    let spun_ns = outcome.totals.spin_hit_ns + outcome.totals.spin_wasted_ns;
    assert!(spun_ns < MS, "{outcome:?}");
    // Half a second of company, then alone.
    let trace = Trace {
        crowded: &|now_ns| now_ns < SECOND / 2,
        ..alone(&arrivals)
    };
    let outcome = check("crowded at first", &trace, &tuning());
    assert!(outcome.totals.spin_hit_ns > 100 * MS, "{outcome:?}");
}

/// What is decided at each point of a gap, for each thing that speaks against spinning.
#[test]
fn decisions() {
    use std::fmt::Write as _;
    let mut table = String::new();
    let stats = Stats::default();
    for (name, hot, percent, crowded) in [
        ("slow", false, 25, false),
        ("fast", true, 25, false),
        ("fast, no budget", true, 0, false),
        ("fast, crowded", true, 25, true),
    ] {
        let tuning = Tuning {
            spin_cpu_max: percent,
            completion: Completion::Adaptive,
            ..tuning()
        };
        for outlook in [
            Outlook::Guest,
            Outlook::Small,
            Outlook::Sync,
            Outlook::Large,
        ] {
            let budget = Budget::default();
            let terms = Terms {
                tuning: &tuning,
                budget: &budget,
                stats: &stats,
            };
            let mut pacer = Pacer::new(WAKE_NS);
            pacer
                .heat
                .pass(0, if hot { 100 } else { 1 }, Tuning::SPIN_RATE_MIN);
            for _ in 0..2 {
                pacer.crowd.looked(0, crowded);
            }
            let did = Did {
                arrived: 1,
                ..Did::default()
            };
            let mut line = String::new();
            let mut lap = |did: Did, now_ns: u64| {
                let pace = pacer
                    .turn(did, outlook)
                    .unwrap_or_else(|| pacer.decide(did, outlook, now_ns, terms));
                write!(line, " {pace:?}").unwrap();
            };
            lap(did, US);
            (0..GRACE_LAPS).for_each(|n| lap(Did::default(), 2 * US + u64::from(n)));
            let mut words: Vec<&str> = line.split_whitespace().collect();
            words.dedup();
            let begun = words.join(" ");
            // Long after what was planned.
            let late = (0..64)
                .filter_map(|_| pacer.turn(Did::default(), outlook))
                .count();
            let end = pacer.decide(Did::default(), outlook, 10 * MS, terms);
            writeln!(
                table,
                "{name}; {outlook:?}: {begun}; then {late} laps, {end:?}"
            )
            .unwrap();
        }
    }
    let expected = "\
slow; Guest: Sleep; then 0 laps, Sleep
slow; Small: Sleep; then 0 laps, Sleep
slow; Sync: Sleep; then 0 laps, Sleep
slow; Large: Sleep; then 0 laps, Sleep
fast; Guest: Spin; then 62 laps, Sleep
fast; Small: Spin; then 62 laps, Sleep
fast; Sync: Spin; then 62 laps, Sleep
fast; Large: Sleep; then 0 laps, Sleep
fast, no budget; Guest: Sleep; then 0 laps, Sleep
fast, no budget; Small: Sleep; then 0 laps, Sleep
fast, no budget; Sync: Sleep; then 0 laps, Sleep
fast, no budget; Large: Sleep; then 0 laps, Sleep
fast, crowded; Guest: Sleep; then 60 laps, Sleep
fast, crowded; Small: Sleep; then 60 laps, Sleep
fast, crowded; Sync: Sleep; then 60 laps, Sleep
fast, crowded; Large: Sleep; then 60 laps, Sleep
";
    assert_eq!(table, expected, "\n{table}");
}

/// A guest may kick for days and never ask for anything.
#[test]
fn any_number_of_wake_ups_without_work_is_slept_after() {
    let (stats, budget, tuning) = (Stats::default(), Budget::default(), tuning());
    let terms = Terms {
        tuning: &tuning,
        budget: &budget,
        stats: &stats,
    };
    for crowded in [false, true] {
        let mut pacer = Pacer::new(WAKE_NS);
        for _ in 0..2 {
            pacer.crowd.looked(0, crowded);
        }
        let turn = |pacer: &mut Pacer| {
            let pace = pacer.turn(Did::default(), Outlook::Guest);
            pace.unwrap_or_else(|| pacer.decide(Did::default(), Outlook::Guest, 1, terms))
        };
        assert_eq!(turn(&mut pacer), Pace::Sleep);
        pacer.laps = u32::MAX - 2 * STAYING_LAPS;
        for _ in 0..4 * STAYING_LAPS {
            assert_eq!(turn(&mut pacer), Pace::Sleep);
        }
    }
}
