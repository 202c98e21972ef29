//! The CPUs that a thread may use.

use cleave_engine::share_thread;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Pins this thread to a CPU. A missing CPU was reported to the operator at start, so here it is only logged.
pub(crate) fn pin(cpu: Option<usize>) {
    let Some(cpu) = cpu else { return };
    let mut set = CpuSet::new();
    set.set(cpu);
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!("cannot pin a worker to CPU {cpu}: {error}");
    }
}

/// Pins this thread to its CPU, and prepares it for the rings of many disks.
pub(crate) fn share(cpu: usize) {
    let reach = sched_getaffinity(None);
    let others = reach.map(|reach| {
        let all = 0..CpuSet::MAX_CPU;
        all.filter(|other| *other != cpu && reach.is_set(*other))
            .collect::<Vec<_>>()
    });
    if let Err(error) = share_thread(&others.unwrap_or_default()) {
        tracing::warn!("a pool's disks may wait for each other: {error}");
    }
    pin(Some(cpu));
}
