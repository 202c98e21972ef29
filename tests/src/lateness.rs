//! Tests that time decides, on a machine that may be late: such a test is repeated only where the machine was measured
//! to be late, and what each attempt found is kept.

use std::path::Path;
use std::time::Duration;

/// After this many late attempts the test has failed.
const ATTEMPTS: u32 = 3;
/// A tick of the times in `/proc/stat` (USER_HZ is 100 on every architecture that we run on).
const TICK: Duration = Duration::from_millis(10);

/// How long the hypervisor ran others while this machine had work, and how long the threads of some processes waited
/// for a core, since a moment.
#[derive(Debug)]
pub struct Lateness {
    pids: Vec<u32>,
    stolen: Duration,
    waited: Duration,
}

impl Lateness {
    /// Measures from now on, of this process and `others`.
    pub fn start(others: &[u32]) -> Lateness {
        let mut pids = vec![std::process::id()];
        pids.extend(others);
        Lateness {
            stolen: stolen(),
            waited: waited(&pids),
            pids,
        }
    }

    /// How late the machine was since then. A thread that has ended takes what it waited with it, so it may be more.
    pub fn so_far(&self) -> Duration {
        let waited = waited(&self.pids).saturating_sub(self.waited);
        stolen().saturating_sub(self.stolen) + waited
    }
}

/// Time stolen from all CPUs since boot: the eighth number of the first line of `/proc/stat`.
pub(crate) fn stolen() -> Duration {
    let text = std::fs::read_to_string("/proc/stat").unwrap();
    let ticks = text.split_whitespace().nth(8);
    TICK * ticks.unwrap().parse::<u32>().unwrap()
}

/// Time that the threads of processes were ready to run and did not: the second number of `schedstat`.
fn waited(pids: &[u32]) -> Duration {
    let tasks = pids.iter().map(|pid| format!("/proc/{pid}/task"));
    let tasks = tasks.filter_map(|path| std::fs::read_dir(path).ok());
    let times = tasks.flatten().flatten().filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    Duration::from_nanos(times.sum())
}

/// Makes an attempt that fails where the machine is late, and repeats it only where that is the reason: where
/// [`Lateness`] was at least `least` while it failed. The attempt gets the measurement, to start it anew once it knows
/// its processes. What a late attempt found is kept in a file below `target/late` whether or not a later one succeeds;
/// the third failure is one of the test.
///
/// # Errors
/// Findings of the attempts, and how late the machine was.
pub fn unless_late(
    name: &str,
    least: Duration,
    attempt: impl FnMut(&mut Lateness) -> Result<(), String>,
) -> Result<(), String> {
    // target/PROFILE/deps/test-HASH
    let own = std::env::current_exe().unwrap();
    let folder = own.ancestors().nth(3).unwrap().join("late");
    unless_late_in(&folder, name, least, attempt)
}

fn unless_late_in(
    folder: &Path,
    name: &str,
    least: Duration,
    mut attempt: impl FnMut(&mut Lateness) -> Result<(), String>,
) -> Result<(), String> {
    let mut found = String::new();
    for number in 1..=ATTEMPTS {
        let mut lateness = Lateness::start(&[]);
        let Err(why) = attempt(&mut lateness) else {
            return Ok(());
        };
        let late = lateness.so_far();
        let line = format!("{name}, attempt {number}: the machine was {late:?} late: {why}\n");
        found.push_str(&line);
        if late < least {
            return Err(format!("{found}it would have to be {least:?} late"));
        }
        std::fs::create_dir_all(folder).unwrap();
        let file = format!("{name}-{}-{number}.log", std::process::id());
        std::fs::write(folder.join(file), line).unwrap();
    }
    Err(found)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

    use super::*;
    use crate::ensure;

    #[test]
    fn a_failure_in_time_is_not_repeated() {
        let mut attempts = 0;
        // Longer than any machine is late.
        let found = unless_late("in-time", Duration::from_secs(3600), |_| {
            attempts += 1;
            Err("wrong".to_owned())
        });
        assert!(found.unwrap_err().contains("wrong"));
        assert_eq!(attempts, 1);
    }

    #[test]
    fn late_failures_are_kept_and_the_third_is_one() {
        for (right_from, is_ok, attempts, kept) in [(3, true, 3, 2), (4, false, 3, 3)] {
            let folder = tempfile::tempdir().unwrap();
            let mut number = 0;
            let found = unless_late_in(folder.path(), "late", Duration::ZERO, |_| {
                number += 1;
                ensure(number >= right_from, || "wrong".to_owned())
            });
            let files = std::fs::read_dir(folder.path()).unwrap().count();
            assert_eq!((found.is_ok(), number, files), (is_ok, attempts, kept));
        }
    }

    #[test]
    fn threads_that_wait_for_a_core_are_seen() {
        let core = sched_getcpu();
        let spin = move || {
            let mut here = CpuSet::new();
            here.set(core);
            sched_setaffinity(None, &here).unwrap();
            let end = Instant::now() + Duration::from_millis(300);
            while Instant::now() < end {
                std::hint::spin_loop();
            }
        };
        let lateness = Lateness::start(&[]);
        std::thread::scope(|scope| {
            scope.spawn(spin);
            scope.spawn(spin);
            std::thread::sleep(Duration::from_millis(200));
            let late = lateness.so_far();
            assert!(late > Duration::from_millis(1), "{late:?}");
        });
    }
}
