//! How far the driver's CPU and the daemon's are from each other. A hypervisor may move them between two requests, and what goes from
//! one to the other then takes three times as long.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::{Value, json};

/// Long enough for a stretch in which neither thread waits for its CPU.
const TIME: Duration = Duration::from_millis(10);
/// Exchanges of a stretch.
const STRETCH: u32 = 100;
/// CPUs with a cache in common are quicker. The virtual machine of the recorded runs had 90 to 110 ns, or 330 to 350 ns.
const NEAR: Duration = Duration::from_nanos(200);

/// Returns what is noted of a measurement, by the times of [`exchange`] before it and after it.
pub(super) fn facts(before: Option<Duration>, after: Option<Duration>) -> Value {
    let Some((before, after)) = before.zip(after) else {
        return Value::Null;
    };
    let distance = match (before < NEAR, after < NEAR) {
        (true, true) => "near",
        (false, false) => "far",
        _ => "changed",
    };
    let times = [before, after].map(|time| time.as_nanos() as u64);
    json!({ "distance": distance, "exchange_ns": times })
}

/// Returns how long a number takes from one CPU to the other and back at best. `None`: these are not two CPUs that this process may
/// use, or they had other work all the time.
pub(super) fn exchange(cpus: [usize; 2]) -> Option<Duration> {
    let (number, is_over) = (AtomicU32::new(0), AtomicBool::new(cpus[0] == cpus[1]));
    thread::scope(|scope| {
        scope.spawn(|| answer(cpus[1], &number, &is_over));
        let asking = scope.spawn(|| {
            let best = ask(cpus[0], &number, &is_over);
            is_over.store(true, Ordering::Relaxed);
            best
        });
        asking.join().ok()?
    })
}

/// Makes each odd number even.
fn answer(cpu: usize, number: &AtomicU32, is_over: &AtomicBool) {
    if !runs_on(cpu) {
        is_over.store(true, Ordering::Relaxed);
    }
    while !is_over.load(Ordering::Relaxed) {
        let seen = number.load(Ordering::Acquire);
        if seen % 2 == 1 {
            number.store(seen.wrapping_add(1), Ordering::Release);
        }
    }
}

/// Makes the number odd again and again, and returns the time of an exchange in the best stretch.
fn ask(cpu: usize, number: &AtomicU32, is_over: &AtomicBool) -> Option<Duration> {
    if !runs_on(cpu) {
        return None;
    }
    let end = Instant::now() + TIME;
    let mut best: Option<Duration> = None;
    loop {
        let start = Instant::now();
        if start > end {
            return best;
        }
        for _ in 0..STRETCH {
            let asked = number.load(Ordering::Acquire).wrapping_add(1);
            number.store(asked, Ordering::Release);
            let mut looks = 0_u32;
            while number.load(Ordering::Acquire) == asked {
                looks += 1;
                // The clock takes as long as some looks.
                if looks.is_multiple_of(1024)
                    && (is_over.load(Ordering::Relaxed) || Instant::now() > end)
                {
                    return best;
                }
            }
        }
        let each = start.elapsed() / STRETCH;
        best = Some(best.map_or(each, |best| best.min(each)));
    }
}

/// Has the calling thread run on this CPU alone. Returns whether it does.
fn runs_on(cpu: usize) -> bool {
    let mut one = CpuSet::new();
    one.set(cpu);
    sched_setaffinity(None, &one).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_has_a_distance_if_it_was_the_same_before_and_after() {
        let time = |nanos| Some(Duration::from_nanos(nanos));
        let table = [
            (time(90), time(110), json!("near")),
            (time(330), time(350), json!("far")),
            (time(90), time(350), json!("changed")),
            (time(350), time(90), json!("changed")),
            (None, time(90), Value::Null),
            (time(90), None, Value::Null),
        ];
        for (before, after, distance) in table {
            assert_eq!(
                facts(before, after)["distance"],
                distance,
                "{before:?}, {after:?}"
            );
        }
    }

    #[test]
    fn one_cpu_and_a_cpu_that_does_not_exist_are_no_pair() {
        assert_eq!(exchange([0, 0]), None);
        assert_eq!(exchange([0, 1023]), None);
        assert_eq!(exchange([1023, 0]), None);
    }
}
