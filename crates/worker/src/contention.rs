//! Whether anybody else wants the core that this thread runs on.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// A yield that nobody takes up is over sooner than this; where the kernel does not count, that tells.
const ALONE: Duration = Duration::from_micros(10);

/// The scheduler's counts of one thread.
#[derive(Debug)]
pub(crate) struct CoreContention {
    /// `None`: this kernel does not tell.
    schedstat: Option<File>,
}

impl CoreContention {
    /// Of the calling thread, which is the one that has to ask.
    pub(crate) fn of_this_thread() -> CoreContention {
        CoreContention {
            schedstat: File::open("/proc/thread-self/schedstat").ok(),
        }
    }

    /// Gives way once; whether somebody took it. Three system calls, or two clock reads and one.
    pub(crate) fn yield_once(&self) -> bool {
        let before = self.turns();
        let began = Instant::now();
        yield_core();
        match (before, self.turns()) {
            (Some(before), Some(after)) => before != after,
            _ => began.elapsed() > ALONE,
        }
    }

    /// How often this thread was put on a core: not counted where a yield leaves it there.
    fn turns(&self) -> Option<u64> {
        let mut text = [0; 64];
        let count = self.schedstat.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(text.get(..count)?).ok()?;
        text.split_ascii_whitespace().nth(2)?.parse().ok()
    }
}

/// Gives way once.
pub(crate) fn yield_core() {
    rustix::thread::sched_yield();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_kernel_counts_turns_and_a_sleep_is_one() {
        let contention = CoreContention::of_this_thread();
        let before = contention.turns().unwrap();
        std::thread::sleep(Duration::from_millis(1));
        assert!(contention.turns().unwrap() > before);
    }
}
