//! CPUs: which are at hand.

use std::fs;
use std::num::NonZero;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::failure::Failure;

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

/// Returns the failure that says this line of a CPU which is not at hand. One that is off may be on later.
pub(crate) fn refuse(cpu: usize, line: String) -> Failure {
    let is_in = |list: &str| {
        let text = fs::read_to_string(format!("/sys/devices/system/cpu/{list}"));
        text.ok().map(|text| lists(&text, cpu))
    };
    match (is_in("possible"), is_in("online")) {
        (Some(true), Some(false)) => Failure::start(line),
        _ => Failure::input(line),
    }
}

/// Returns true if a list of the kernel, such as `0-3,8`, has this CPU.
fn lists(list: &str, cpu: usize) -> bool {
    let number = |text: &str| text.trim().parse::<usize>().ok();
    list.split(',').any(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = number(first).zip(number(last));
        range.is_some_and(|(first, last)| (first..=last).contains(&cpu))
    })
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
    fn lists_of_the_kernel_are_understood() {
        for (list, has, lacks) in [("0-3,8\n", 3, 4), ("8,10-11\n", 8, 9), ("0\n", 0, 1)] {
            assert!(lists(list, has) && !lists(list, lacks), "{list}");
        }
        assert!(!lists("\n", 0));
    }

    #[test]
    fn a_cpu_that_there_never_is_is_bad_input() {
        let refused = refuse(1 << 20, "no such CPU".to_owned());
        assert_eq!(refused.exit_code(), std::process::ExitCode::from(2));
    }

    #[test]
    fn this_process_has_a_cpu() {
        assert!(count() >= 1);
        assert_eq!(allowed().map(|cpus| cpus.is_empty()), Some(false));
    }
}
