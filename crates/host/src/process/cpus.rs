//! CPUs: which are at hand.

use std::num::NonZero;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Keeps this thread, and those that it starts, off these CPUs, unless no other is left.
pub(crate) fn stay_off(taken: &[usize]) {
    if taken.is_empty() {
        return;
    }
    let left = allowed().unwrap_or_default();
    let left = left.into_iter().filter(|cpu| !taken.contains(cpu));
    let mut set = CpuSet::new();
    left.for_each(|cpu| set.set(cpu));
    if set.count() > 0
        && let Err(error) = sched_setaffinity(None, &set)
    {
        tracing::warn!("cannot keep control threads off the CPUs of pools: {error}");
    }
}

/// The CPUs that this process may run on; `None` where the kernel does not say (more of them than a
/// CPU set holds).
pub(crate) fn allowed() -> Option<Vec<usize>> {
    let set = sched_getaffinity(None).ok()?;
    Some(
        (0..CpuSet::MAX_CPU)
            .filter(|&cpu| set.is_set(cpu))
            .collect(),
    )
}

/// How many CPUs are at hand, at least one.
pub(crate) fn count() -> usize {
    match allowed() {
        Some(cpus) => cpus.len().max(1),
        None => std::thread::available_parallelism().map_or(1, NonZero::get),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_a_cpu() {
        assert!(count() >= 1);
        assert_eq!(allowed().map(|cpus| cpus.is_empty()), Some(false));
    }
}
