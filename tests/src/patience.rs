//! Time as tests may judge it. A machine that others use too stops for moments, and what runs on it is late then
//! through no fault of its own.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long is waited for what has to come. Longer than any machine stops, and it costs nothing where it comes.
pub const PATIENCE: Duration = Duration::from_secs(30);

const TICK: Duration = Duration::from_millis(2);

/// Ticks since the first stopwatch was started, by a thread that sleeps for each.
static TICKS: AtomicU64 = AtomicU64::new(0);

/// Measures time, but for that in which the machine stood: a sleep that it prolongs counts as long as it was meant
/// to be. For all that must not take long; up to a tick too short.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch {
    began: u64,
}

impl Stopwatch {
    /// Begins to measure.
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
        }
    }

    /// Since it was started.
    pub fn elapsed(&self) -> Duration {
        let ticks = TICKS.load(Ordering::Relaxed) - self.began;
        TICK * u32::try_from(ticks).unwrap()
    }
}

/// Whether something comes to hold before [`PATIENCE`] ends.
pub fn comes(mut holds: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        if Instant::now() > end {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}
