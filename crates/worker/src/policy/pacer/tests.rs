//! Traces for the pacer: a worker in virtual time, with a guest and a device of given speed.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use cleave_sim::Random;

use super::*;
use crate::{Split, Totals};

const US: u64 = 1000;
const MS: u64 = 1000 * US;
const SECOND: u64 = 1000 * MS;
/// Durations in virtual time. A wake-up is slow if it crosses CPUs.
const SLOW_WAKE_NS: u64 = 30 * US;
const QUICK_WAKE_NS: u64 = 5 * US;
const WAKE_CPU_NS: u64 = 10 * US;
const BUSY_LAP_NS: u64 = 400;
const IDLE_LAP_NS: u64 = 300;
/// A longer lap without work, for traces of minutes: such laps take most of the test's own time.
const LONG_IDLE_LAP_NS: u64 = 1500;
/// Time that a guest on the same core needs for a request.
const GUEST_NS: u64 = 20 * US;
/// Timeslice of the scheduler when another thread wants the core.
const SLICE_NS: u64 = 3 * MS;

/// When a guest sends requests.
#[derive(Clone, Copy)]
enum Guest<'a> {
    /// At these times.
    Clock(&'a [u64]),
    /// `depth` at a time, each again `think_ns` after its answer.
    Answers { depth: u32, think_ns: u64 },
}

/// Conditions for a worker.
#[derive(Clone, Copy)]
struct Trace<'a> {
    guest: Guest<'a>,
    device_ns: u64,
    span_ns: u64,
    /// Period in which another thread wants the core for itself.
    competing: (u64, u64),
    /// The guest runs on the same core, so it is woken only when the worker sleeps.
    shares: bool,
    /// Time without a spin after which the scheduler has brought both to one CPU, where wake-ups are quick. 0: they stay apart.
    places_ns: u64,
    /// The worker may run on one CPU only.
    is_bound: bool,
    idle_lap_ns: u64,
}

impl Trace<'_> {
    fn of(guest: Guest<'_>, device_ns: u64, span_ns: u64) -> Trace<'_> {
        Trace {
            guest,
            device_ns,
            span_ns,
            competing: (0, 0),
            shares: false,
            places_ns: 0,
            is_bound: true,
            idle_lap_ns: IDLE_LAP_NS,
        }
    }
}

/// Result of one second of a trace.
#[derive(Default, Debug, Clone, Copy)]
struct Second {
    requests: u64,
    latency_ns: u64,
    cpu_ns: u64,
    trying_ns: u64,
    /// Requests that took longer than a millisecond.
    late: u64,
}

impl Second {
    fn latency_us(self) -> u64 {
        self.latency_ns / self.requests.max(1) / US
    }
}

struct Outcome {
    seconds: Vec<Second>,
    totals: Totals,
    /// Time of the last wake-up or lap.
    last_ns: u64,
}

impl Outcome {
    /// Returns the sum of the seconds from `second` on.
    fn after(&self, second: usize) -> Second {
        let mut sum = Second::default();
        for second in &self.seconds[second..] {
            sum.requests += second.requests;
            sum.latency_ns += second.latency_ns;
            sum.cpu_ns += second.cpu_ns;
            sum.trying_ns += second.trying_ns;
            sum.late += second.late;
        }
        sum
    }
}

fn tuning() -> Tuning {
    Tuning::new(Split::Off)
}

/// Returns the tuning of a worker that always sleeps.
fn asleep() -> Tuning {
    Tuning {
        spin_cpu_max: 0,
        ..tuning()
    }
}

/// Runs a worker through a trace, and until it sleeps for good.
#[allow(clippy::too_many_lines)] // one loop over the events of the trace
fn run(trace: Trace<'_>, tuning: &Tuning) -> Outcome {
    let (stats, budget) = (Stats::default(), Budget::default());
    let context = PacerContext {
        tuning,
        budget: &budget,
        stats: &stats,
    };
    let mut pacer = Pacer::new();
    let mut seconds = vec![Second::default(); (trace.span_ns / SECOND) as usize + 1];
    // Requests that the guest will send, and ops that the device will complete, each with its time.
    let (mut asks, mut flight) = (BinaryHeap::new(), BinaryHeap::new());
    match trace.guest {
        Guest::Clock(moments) => asks.extend(moments.iter().map(|at| Reverse(*at))),
        Guest::Answers { depth, .. } => asks.extend((0..depth).map(|n| Reverse(u64::from(n)))),
    }
    let (mut now_ns, mut cpu_ns, mut slice_ns) = (0_u64, 0_u64, 0_u64);
    let (mut waited_ns, mut is_awake) = (0, false);
    let mut spun_ns: Option<u64> = None;
    loop {
        let mut work = LapWork::default();
        let mut answered = Vec::new();
        while let Some(Reverse((_, asked_ns))) = flight.peek().copied()
            && flight.peek().is_some_and(|Reverse((at, _))| *at <= now_ns)
        {
            flight.pop();
            work.ended += 1;
            answered.push(asked_ns);
        }
        while let Some(Reverse(at)) = asks.peek().copied()
            && at <= now_ns
        {
            asks.pop();
            work.arrived += 1;
            if trace.shares && is_awake && matches!(trace.guest, Guest::Clock(_)) {
                (now_ns, waited_ns) = (now_ns + GUEST_NS, waited_ns + GUEST_NS);
            }
            match trace.device_ns {
                0 => {
                    work.ended += 1;
                    answered.push(at);
                }
                device_ns => flight.push(Reverse((now_ns + device_ns, at))),
            }
        }
        work.in_flight = flight.len() as u32;
        let lap_ns = match work.any() {
            true => BUSY_LAP_NS,
            false => trace.idle_lap_ns,
        };
        (now_ns, cpu_ns, slice_ns) = (now_ns + lap_ns, cpu_ns + lap_ns, slice_ns + lap_ns);
        if (trace.competing.0..trace.competing.1).contains(&now_ns) && slice_ns > SLICE_NS {
            // It has not slept for a whole timeslice, so the other thread gets one now.
            (now_ns, slice_ns) = (now_ns + SLICE_NS, 0);
            waited_ns += SLICE_NS;
        }
        let at = ((now_ns / SECOND) as usize).min(seconds.len() - 1);
        let second = &mut seconds[at];
        second.cpu_ns += lap_ns;
        if pacer.trial.is_under_way() {
            second.trying_ns += lap_ns;
        }
        for asked_ns in &answered {
            second.requests += 1;
            second.latency_ns += now_ns - asked_ns;
            second.late += u64::from(now_ns - asked_ns > MS);
        }
        let pace = pacer.note_lap(work).unwrap_or_else(|| {
            pacer.decide(work, now_ns, context, || Scheduled {
                cpu_ns,
                waited_ns,
                is_bound: trace.is_bound,
            })
        });
        is_awake = pace == LapWait::Spin;
        if is_awake && !work.any() {
            spun_ns = Some(now_ns);
        }
        let is_near = spun_ns.is_none_or(|spun_ns| now_ns > spun_ns + trace.places_ns);
        let wake_place_ns = match trace.places_ns > 0 && is_near {
            true => QUICK_WAKE_NS,
            false => SLOW_WAKE_NS,
        };
        if let Guest::Answers { think_ns, .. } = trace.guest
            && now_ns < trace.span_ns
        {
            let waits_ns = match pace == LapWait::Spin {
                true if trace.shares => SLOW_WAKE_NS,
                false if wake_place_ns == QUICK_WAKE_NS => QUICK_WAKE_NS,
                // Its own wake-up.
                _ if trace.places_ns > 0 => SLOW_WAKE_NS,
                _ => 0,
            };
            let next_ns = now_ns + think_ns + waits_ns;
            asks.extend(answered.iter().map(|_| Reverse(next_ns)));
        }
        let event = [
            asks.peek().map(|Reverse(at)| *at),
            flight.peek().map(|Reverse((at, _))| *at),
        ];
        let event_ns = event.into_iter().flatten().min();
        let wake_ns = match pace {
            LapWait::Spin => continue,
            LapWait::Doze(until_ns) => {
                assert!(until_ns > now_ns, "a doze ends later than it begins");
                Some(event_ns.map_or(until_ns, |event_ns| event_ns.min(until_ns)))
            }
            LapWait::Sleep => event_ns,
        };
        // The worker arms the vrings and checks them once more, so it does not sleep if there is work already.
        match wake_ns {
            Some(wake_ns) if wake_ns <= now_ns => {}
            Some(wake_ns) => {
                if pacer.trial.is_under_way() {
                    second.trying_ns += wake_ns + wake_place_ns - now_ns;
                }
                second.cpu_ns += WAKE_CPU_NS;
                (now_ns, cpu_ns, slice_ns) = (wake_ns + wake_place_ns, cpu_ns + WAKE_CPU_NS, 0);
                pacer.slept();
            }
            None => break,
        }
    }
    let mut totals = Totals::default();
    totals.add(&stats);
    // Spinning without finding work stays within its share and the accumulated budget, give or take one clock reading.
    let granted_ns = now_ns / 100 * u64::from(tuning.spin_cpu_max) + Budget::size_ns(tuning);
    assert!(
        totals.spin_wasted_ns <= granted_ns + now_ns / 1000,
        "{totals:?}"
    );
    Outcome {
        seconds,
        totals,
        last_ns: now_ns,
    }
}

fn even(per_second: u64, span_ns: u64) -> Vec<u64> {
    let gap_ns = SECOND / per_second;
    (1..=span_ns / gap_ns).map(|n| n * gap_ns).collect()
}

fn poisson(per_second: u64, span_ns: u64) -> Vec<u64> {
    let mut random = Random::new(per_second);
    let mut at_ns = 0;
    let next = || {
        let share = (random.draw() >> 11) as f64 / (1u64 << 53) as f64;
        at_ns += (-(1.0 - share).ln() * (SECOND / per_second) as f64) as u64;
        at_ns
    };
    std::iter::repeat_with(next)
        .take_while(|at_ns| *at_ns < span_ns)
        .collect()
}

#[test]
fn a_slow_load_is_slept_for() {
    for per_second in [10, 100, 1000] {
        let moments = even(per_second, 2 * SECOND);
        let outcome = run(
            Trace::of(Guest::Clock(&moments), 60 * US, 2 * SECOND),
            &tuning(),
        );
        let totals = &outcome.totals;
        let spun_ns = totals.spin_hit_ns + totals.spin_wasted_ns;
        assert_eq!((spun_ns, totals.experiments), (0, 0), "{per_second}/s");
    }
}

/// The wake-up before a request is not saved, because its gap is longer than any spin; the one at its end is.
#[test]
fn with_a_minimum_rate_of_zero_a_slow_load_is_spun_for() {
    let any_rate = Tuning {
        spin_rate_min: 0,
        ..tuning()
    };
    for per_second in [5, 40, 300] {
        let moments = even(per_second, 6 * SECOND);
        let trace = Trace::of(Guest::Clock(&moments), 60 * US, 6 * SECOND);
        let outcome = run(trace, &any_rate);
        let late_us = outcome.after(4).latency_us() - 60;
        assert!(
            late_us < 35,
            "{per_second}/s: {late_us} {:?}",
            outcome.totals
        );
    }
}

/// The guest sends requests by its own clock, so the rate shows nothing; the response time decides.
#[test]
fn a_clocked_load_is_spun_for_if_that_is_worth_its_price() {
    for (per_second, device_us, awake) in [
        (3000, 0, true),
        (20_000, 0, true),
        (3000, 60, true),
        (6000, 60, true),
        // A wake-up is a small part of the response time.
        (3000, 2000, false),
    ] {
        let name = format!("{per_second}/s, {device_us} us");
        let moments = even(per_second, 6 * SECOND);
        let trace = Trace::of(Guest::Clock(&moments), device_us * US, 6 * SECOND);
        let outcome = run(trace, &tuning());
        let late_us = outcome.after(4).latency_us().saturating_sub(device_us);
        assert_eq!(late_us < 10, awake, "{name}: {late_us}");
    }
    // Where the scheduler places the worker, the guest may lose what it gains.
    let moments = even(3000, 6 * SECOND);
    let unbound = Trace {
        is_bound: false,
        ..Trace::of(Guest::Clock(&moments), 60 * US, 6 * SECOND)
    };
    let outcome = run(unbound, &tuning());
    let late_us = outcome.after(4).latency_us().saturating_sub(60);
    assert!(late_us > 20, "{late_us} {:?}", outcome.totals);
    let moments = even(3000, 6 * SECOND);
    let trace = Trace::of(Guest::Clock(&moments), 0, 6 * SECOND);
    let cheap = Tuning {
        spin_worth: 0,
        ..tuning()
    };
    let outcome = run(trace, &cheap);
    let late_us = outcome.after(4).latency_us();
    assert!(late_us > 20, "{late_us} {:?}", outcome.totals);
}

#[test]
fn a_closed_loop_is_spun_for_if_that_raises_its_rate() {
    for (depth, device_us) in [(1, 10), (1, 80), (8, 80)] {
        let name = format!("{depth} at a time, {device_us} us");
        let guest = Guest::Answers {
            depth,
            think_ns: 5 * US,
        };
        let trace = Trace::of(guest, device_us * US, 6 * SECOND);
        let [adaptive, slept] = [tuning(), asleep()].map(|tuning| run(trace, &tuning).after(4));
        let gain = adaptive.requests as f64 / slept.requests as f64;
        assert!(gain > 1.08, "{name}: {gain}");
    }
    // A seventh faster, for nine tenths of a core.
    let guest = Guest::Answers {
        depth: 1,
        think_ns: 5 * US,
    };
    for (spin_worth, spins) in [(5, false), (10, true)] {
        let tuning = Tuning {
            spin_worth,
            ..tuning()
        };
        let trace = Trace::of(guest, 300 * US, 6 * SECOND);
        let cores = run(trace, &tuning).after(4).cpu_ns as f64 / (2 * SECOND) as f64;
        assert_eq!(cores > 0.5, spins, "{spin_worth}: {cores}");
    }
}

/// Where the scheduler brings both to one CPU, sleeping is the better way once it has done so, and the worse one before.
#[test]
fn sleeping_is_judged_where_the_scheduler_settles_it() {
    for (depth, device_us) in [(1, 60), (8, 80), (32, 200)] {
        let guest = Guest::Answers {
            depth,
            think_ns: 5 * US,
        };
        let trace = Trace {
            places_ns: 700 * MS,
            ..Trace::of(guest, device_us * US, 20 * SECOND)
        };
        let [adaptive, slept] = [tuning(), asleep()].map(|tuning| run(trace, &tuning));
        for (from, rate, price) in [(0, 0.95, 1.15), (10, 0.97, 1.1)] {
            let [adaptive, slept] = [&adaptive, &slept].map(|outcome| outcome.after(from));
            let [requests, cpu] = [
                adaptive.requests as f64 / slept.requests as f64,
                adaptive.cpu_ns as f64 / slept.cpu_ns as f64 * slept.requests as f64
                    / adaptive.requests as f64,
            ];
            let case = format!(
                "{depth} at a time, {device_us} us, from {from} s: rate {requests}, CPU {cpu}"
            );
            println!("{case}");
            assert!(requests >= rate && cpu <= price, "{case}");
        }
    }
    for per_second in [3000, 10_000] {
        let moments = poisson(per_second, 20 * SECOND);
        let trace = Trace {
            places_ns: 700 * MS,
            ..Trace::of(Guest::Clock(&moments), 75 * US, 20 * SECOND)
        };
        let [adaptive, slept] = [tuning(), asleep()].map(|tuning| run(trace, &tuning).after(10));
        let [latency, cpu] = [
            adaptive.latency_ns as f64 / slept.latency_ns as f64,
            adaptive.cpu_ns as f64 / slept.cpu_ns as f64,
        ];
        let case = format!("{per_second}/s: latency {latency}, CPU {cpu}");
        println!("{case}");
        assert!(latency <= 1.05 && cpu <= 1.1, "{case}");
    }
}

/// Spinning saves the worker time that the guest loses, because it cannot run meanwhile.
#[test]
fn a_guest_on_the_same_core_is_slept_for() {
    let guest = Guest::Answers {
        depth: 1,
        think_ns: 5 * US,
    };
    // Two wake-ups per request if the worker sleeps.
    let trace = Trace {
        shares: true,
        ..Trace::of(guest, 5 * MS, 20 * SECOND)
    };
    let [adaptive, slept] = [tuning(), asleep()].map(|tuning| run(trace, &tuning).after(4));
    assert!(
        adaptive.cpu_ns * 100 <= slept.cpu_ns * 115,
        "{adaptive:?} {slept:?}"
    );
    for per_second in [1000, 3000, 20_000] {
        let moments = poisson(per_second, 6 * SECOND);
        let trace = Trace {
            shares: true,
            ..Trace::of(Guest::Clock(&moments), 0, 6 * SECOND)
        };
        let [adaptive, slept] = [tuning(), asleep()].map(|tuning| run(trace, &tuning).after(4));
        let cpu = adaptive.cpu_ns as f64 / slept.cpu_ns as f64;
        assert!(cpu < 1.1, "{per_second}/s: CPU {cpu}");
    }
}

#[test]
fn slow_devices_are_slept_for() {
    for device_us in [1000, 5000] {
        let guest = Guest::Answers {
            depth: 8,
            think_ns: 5 * US,
        };
        let trace = Trace::of(guest, device_us * US, 20 * SECOND);
        let [adaptive, slept] = [tuning(), asleep()].map(|tuning| run(trace, &tuning).after(10));
        let price = adaptive.cpu_ns as f64 / slept.cpu_ns as f64;
        assert!(price < 1.5, "{device_us} us: {price}");
    }
}

/// A thread that slept gets the core as soon as it has work. One that spins has used up its timeslice.
#[test]
fn a_contended_core_is_released_within_a_second_and_spun_on_again_later() {
    let guest = Guest::Answers {
        depth: 1,
        think_ns: 5 * US,
    };
    let trace = Trace {
        competing: (44 * SECOND, 48 * SECOND),
        ..Trace::of(guest, 80 * US, 70 * SECOND)
    };
    let [adaptive, slept] = [tuning(), asleep()].map(|tuning| run(trace, &tuning));
    let rate = |outcome: &Outcome, second: usize| outcome.seconds[second].requests as f64;
    for second in 45..48 {
        let share = rate(&adaptive, second) / rate(&slept, second);
        assert!(share > 0.95, "second {second}: {share}");
    }
    for second in [43, 69] {
        let share = rate(&adaptive, second) / rate(&slept, second);
        assert!(share > 1.2, "second {second}: {share}");
    }
}

/// On a contended core a spin ends with the neighbour's timeslice, in which a request waits.
#[test]
fn a_contended_core_is_spun_on_only_for_more_than_the_neighbour_takes() {
    for (device_us, gains) in [(0, true), (20, false), (60, false)] {
        let guest = Guest::Answers {
            depth: 1,
            think_ns: 5 * US,
        };
        let trace = Trace {
            competing: (0, 20 * SECOND),
            ..Trace::of(guest, device_us * US, 20 * SECOND)
        };
        let [adaptive, slept] = [tuning(), asleep()].map(|tuning| run(trace, &tuning).after(10));
        let late = adaptive.late as f64 / adaptive.requests as f64;
        let rate = adaptive.requests as f64 / slept.requests as f64;
        let case = format!("{device_us} us: {late} of the requests are late, rate {rate}");
        match gains {
            true => assert!(rate > 2.0, "{case}"),
            false => assert!(rate > 0.97 && late < 0.001, "{case}"),
        }
    }
}

#[test]
fn experiments_become_rare_while_the_verdict_stays() {
    for device_us in [80, 2000] {
        let guest = Guest::Answers {
            depth: 8,
            think_ns: 5 * US,
        };
        let trace = Trace {
            idle_lap_ns: LONG_IDLE_LAP_NS,
            ..Trace::of(guest, device_us * US, 200 * SECOND)
        };
        let outcome = run(trace, &tuning());
        let share = outcome.after(50).trying_ns as f64 / (150 * SECOND) as f64;
        println!("{device_us} us: {share}");
        assert!(share < 0.03, "{device_us} us: {share}");
    }
}

#[test]
fn a_tight_budget_is_kept_and_an_empty_one_never_spins() {
    for (per_second, spin_cpu_max) in [(2000, 25), (4000, 0), (4000, 1), (4000, 25), (100_000, 5)] {
        let moments = poisson(per_second, 3 * SECOND);
        let tuning = Tuning {
            spin_cpu_max,
            ..tuning()
        };
        let trace = Trace::of(Guest::Clock(&moments), 0, 3 * SECOND);
        let totals = run(trace, &tuning).totals;
        let spun_ns = totals.spin_hit_ns + totals.spin_wasted_ns;
        assert_eq!(spun_ns > 0, spin_cpu_max > 0, "{per_second}/s: {totals:?}");
    }
    let all = Tuning {
        spin_cpu_total: Some(10),
        ..tuning()
    };
    let moments = even(20_000, 2 * SECOND);
    let trace = Trace::of(Guest::Clock(&moments), 0, 2 * SECOND);
    let totals = run(trace, &all).totals;
    let spun_ns = totals.spin_hit_ns + totals.spin_wasted_ns;
    assert!(spun_ns < 220 * MS, "{totals:?}");
}

/// Else a slow load would be served now and then by the verdict on one that always has as much in flight.
/// It would otherwise owe the budget for all that time.
#[test]
fn a_process_that_was_stopped_in_a_spin_may_spin_again_soon() {
    let tuning = Tuning {
        spin_cpu_total: Some(50),
        ..tuning()
    };
    let (stats, budget) = (Stats::default(), Budget::default());
    let context = PacerContext {
        tuning: &tuning,
        budget: &budget,
        stats: &stats,
    };
    for ends in [Pacer::end_vain_spin, Pacer::end_gap] {
        let mut pacer = Pacer::new();
        pacer.phase = GapPhase::Spin;
        pacer.since_ns = SECOND;
        ends(&mut pacer, 3600 * SECOND, context);
        let left_ns = budget.left_ns(3601 * SECOND, &tuning);
        assert_eq!(left_ns, Budget::size_ns(&tuning));
    }
}

#[test]
fn a_stall_of_the_disk_is_no_other_depth() {
    let mut pacer = Pacer::new();
    let lap = |arrived, ended, in_flight| LapWork {
        arrived,
        ended,
        in_flight,
        more: false,
    };
    for _ in 0..200 {
        let _ = pacer.note_lap(lap(1, 0, 1));
        let _ = pacer.note_lap(lap(0, 1, 0));
    }
    for waiting in 1..=32 {
        let _ = pacer.note_lap(lap(1, 0, waiting));
    }
    let _ = pacer.note_lap(lap(0, 32, 0));
    let depth = pacer.spent.depth();
    assert!(depth < 2.5, "{depth}");
}

/// Whenever the guest falls silent, also during an experiment, the worker sleeps for good.
#[test]
fn a_silent_guest_is_slept_for_without_a_timer() {
    for span_ms in (10..900).step_by(47) {
        for device_us in [0, 60, 700] {
            let moments = even(5000, span_ms * MS);
            let trace = Trace::of(Guest::Clock(&moments), device_us * US, SECOND);
            let outcome = run(trace, &tuning());
            let over_ns = outcome.last_ns.saturating_sub(span_ms * MS);
            assert!(
                over_ns < 100 * MS,
                "{span_ms} ms, {device_us} us: {over_ns}"
            );
        }
    }
}

/// A guest may kick for days without making a request available.
#[test]
fn the_worker_sleeps_after_any_number_of_wake_ups_without_work() {
    let (stats, budget, tuning) = (Stats::default(), Budget::default(), tuning());
    let context = PacerContext {
        tuning: &tuning,
        budget: &budget,
        stats: &stats,
    };
    let mut pacer = Pacer::new();
    let lap = |pacer: &mut Pacer| {
        let pace = pacer.note_lap(LapWork::default());
        pace.unwrap_or_else(|| pacer.decide(LapWork::default(), 1, context, Scheduled::default))
    };
    assert_eq!(lap(&mut pacer), LapWait::Sleep);
    pacer.laps = u32::MAX - 2 * CHECK_LAPS;
    for _ in 0..4 * CHECK_LAPS {
        assert_eq!(lap(&mut pacer), LapWait::Sleep);
    }
}
