//! Time limits for tests. A shared machine pauses now and then, so a program on it can be late without being at
//! fault.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::lateness::stalled;

/// Longest wait for something that must happen. It exceeds any pause of the machine, whose disk has answered nothing for half a
/// minute at times, and costs nothing when the test passes.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// The time limit in force, in milliseconds.
static LIMIT_MS: AtomicU64 = AtomicU64::new(TIMEOUT.as_millis() as u64);

/// Time limit of the shared steps: [`TIMEOUT`], unless the program has set another.
pub fn time_limit() -> Duration {
    Duration::from_millis(LIMIT_MS.load(Ordering::Relaxed))
}

/// Sets the time limit of the shared steps: shorter for back-ends that are expected to miss it.
pub fn set_time_limit(limit: Duration) {
    LIMIT_MS.store(limit.as_millis() as u64, Ordering::Relaxed);
}

/// Length of the sleeps that a stopwatch counts.
const TICK: Duration = Duration::from_millis(2);

/// Ticks since the first stopwatch was started, counted by a thread that sleeps for one tick at a time.
static TICKS: AtomicU64 = AtomicU64::new(0);

/// Measures an upper bound without what the machine added to it. It counts sleeps of fixed length, and a sleep that the
/// machine prolongs counts once. The time in which any thread waited for a CPU is left out. So it may be too short, and never
/// proves that something took long enough.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch {
    began: u64,
    stalled: Duration,
}

impl Stopwatch {
    /// Starts measuring.
    pub fn start() -> Stopwatch {
        static TICKING: Once = Once::new();
        TICKING.call_once(|| {
            thread::spawn(|| {
                loop {
                    thread::sleep(TICK);
                    TICKS.fetch_add(1, Ordering::Relaxed);
                }
            });
        });
        Stopwatch {
            began: TICKS.load(Ordering::Relaxed),
            stalled: stalled(),
        }
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        let ticks = TICKS.load(Ordering::Relaxed) - self.began;
        let late = stalled().saturating_sub(self.stalled);
        (TICK * u32::try_from(ticks).unwrap()).saturating_sub(late)
    }
}

/// Polls until the condition holds; `false` if [`time_limit`] passes first.
pub fn wait_until(holds: impl FnMut() -> bool) -> bool {
    wait_until_within(time_limit(), holds)
}

/// As [`wait_until`], with another time limit.
pub(crate) fn wait_until_within(limit: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    while !holds() {
        if Instant::now() > end {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}
