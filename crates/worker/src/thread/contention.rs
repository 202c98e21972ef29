//! Finds out if another thread wants the core that this thread runs on.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::thread::sched_getaffinity;

/// A yield that switches to no other thread takes less than this. Used if the kernel has no schedstat.
const ALONE: Duration = Duration::from_micros(10);

/// Detects contention through the scheduler's counters of one thread.
#[derive(Debug)]
pub(crate) struct CoreContention {
    /// `None`: this kernel has no schedstat.
    schedstat: Option<File>,
}

impl CoreContention {
    /// Observes the calling thread, which must be the one that yields.
    pub(crate) fn of_this_thread() -> CoreContention {
        CoreContention {
            schedstat: File::open("/proc/thread-self/schedstat").ok(),
        }
    }

    /// Yields the core once. Returns whether another thread took it. Three system calls, or one and two clock
    /// reads.
    pub(crate) fn yield_once(&self) -> bool {
        let before = self.timeslices();
        let began = Instant::now();
        yield_core();
        match (before, self.timeslices()) {
            (Some(before), Some(after)) => before != after,
            _ => began.elapsed() > ALONE,
        }
    }

    /// Returns the time for which the thread ran, also to another thread that asks. 0 if the kernel does not tell, or the thread has ended.
    pub(crate) fn ran_ns(&self) -> u64 {
        self.count(0).unwrap_or(0)
    }

    /// Returns the time for which this thread wanted a core and others ran. 0 if the kernel does not tell.
    pub(crate) fn waited_ns(&self) -> u64 {
        self.count(1).unwrap_or(0)
    }

    /// Returns true if this thread may run on one CPU only.
    pub(crate) fn is_bound(&self) -> bool {
        sched_getaffinity(None).is_ok_and(|cpus| cpus.count() == 1)
    }

    /// Returns the number of timeslices that this thread has run. A yield that leaves it on the core does not add one.
    fn timeslices(&self) -> Option<u64> {
        self.count(2)
    }

    /// Reads one of the scheduler's counters: time on a core, time of waiting for one, timeslices.
    fn count(&self, which: usize) -> Option<u64> {
        let mut text = [0; 64];
        let count = self.schedstat.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(text.get(..count)?).ok()?;
        text.split_ascii_whitespace().nth(which)?.parse().ok()
    }
}

/// Yields the core once.
pub(crate) fn yield_core() {
    rustix::thread::sched_yield();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_kernel_counts_timeslices_and_a_sleep_adds_one() {
        let contention = CoreContention::of_this_thread();
        let before = contention.timeslices().unwrap();
        std::thread::sleep(Duration::from_millis(1));
        assert!(contention.timeslices().unwrap() > before);
    }
}
