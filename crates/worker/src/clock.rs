//! Readings of clocks.

use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

/// Returns the nanoseconds since this clock's start.
pub(crate) fn nanoseconds(clock: Instant) -> u64 {
    u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the CPU time of the calling thread, or of the whole process.
pub(crate) fn cpu_ns(clock: ClockId) -> u64 {
    let spent = clock_gettime(clock);
    spent.tv_sec as u64 * 1_000_000_000 + spent.tv_nsec as u64
}
