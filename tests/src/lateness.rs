//! Retries of timing tests: such a test is repeated only if the machine was measured to be late, and the result of
//! each attempt is kept.

use std::path::Path;
use std::time::Duration;

/// The test fails after this many late attempts.
const ATTEMPTS: u32 = 3;
/// One tick of `/proc/stat`: USER_HZ is 100 on every architecture that we support.
const TICK: Duration = Duration::from_millis(10);

/// For how long the hypervisor ran other guests while this machine had work, and for how long the threads of some
/// processes waited for a core, since a start time.
#[derive(Debug)]
pub struct Lateness {
    pids: Vec<u32>,
    stolen: Duration,
    waited: Duration,
    /// The lateness at the last note.
    noted: Duration,
}

impl Lateness {
    /// Starts measuring, for this process and `others`.
    pub fn start(others: &[u32]) -> Lateness {
        let mut pids = vec![std::process::id()];
        pids.extend(others);
        Lateness::of(pids)
    }

    /// Starts measuring, for these processes alone.
    pub fn of(pids: Vec<u32>) -> Lateness {
        Lateness {
            stolen: stolen(),
            waited: waited(&pids),
            pids,
            noted: Duration::ZERO,
        }
    }

    /// Notes how late the machine has been, before threads exit whose waits are lost then.
    pub fn note(&mut self) {
        self.noted = self.so_far();
    }

    /// How late the machine has been since the start. The waits of a thread that has exited are lost, unless they were noted, so
    /// the true value may be higher.
    pub fn so_far(&self) -> Duration {
        let waited = waited(&self.pids).saturating_sub(self.waited);
        let now = stolen().saturating_sub(self.stolen) + waited;
        now.max(self.noted)
    }
}

/// Time stolen from all CPUs since boot: the eighth number in the first line of `/proc/stat`.
pub(crate) fn stolen() -> Duration {
    let text = std::fs::read_to_string("/proc/stat").unwrap();
    let ticks = text.split_whitespace().nth(8);
    TICK * ticks.unwrap().parse::<u32>().unwrap()
}

/// For how long, since boot, some thread of this machine waited for a CPU, as the kernel reports it (PSI); zero if it does not.
/// It has the waits of threads that have exited, which their own counters do not show any more.
pub(crate) fn stalled() -> Duration {
    let text = std::fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    let total = text
        .lines()
        .next()
        .and_then(|some| some.split_once("total="));
    Duration::from_micros(
        total
            .and_then(|(_, total)| total.trim().parse().ok())
            .unwrap_or(0),
    )
}

/// Time for which threads of the processes were runnable but not running: the second number of `schedstat`.
fn waited(pids: &[u32]) -> Duration {
    let tasks = pids.iter().map(|pid| format!("/proc/{pid}/task"));
    let tasks = tasks.filter_map(|path| std::fs::read_dir(path).ok());
    let times = tasks.flatten().flatten().filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    Duration::from_nanos(times.sum())
}

/// Runs an attempt. If it fails while [`Lateness`] was at least `least`, the machine is the likely cause and the
/// attempt is repeated; any other failure is final. The attempt may restart the measurement once it knows its
/// processes. Each late failure is kept in a file in `target/late`, even if a later attempt passes. The third failure
/// is final.
///
/// # Errors
/// Returns what each attempt found, and how late the machine was.
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
            return Err(format!(
                "{found}a retry needs a machine that is {least:?} late"
            ));
        }
        std::fs::create_dir_all(folder).unwrap();
        // A name may contain a path.
        let plain = name.replace('/', "-");
        let file = format!("{plain}-{}-{number}.log", std::process::id());
        std::fs::write(folder.join(file), line).unwrap();
    }
    Err(found)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

    use super::*;
    use crate::ensure;

    #[test]
    fn a_failure_in_time_is_not_repeated() {
        let mut attempts = 0;
        // Longer than any delay of the machine.
        let found = unless_late("in-time", Duration::from_secs(3600), |_| {
            attempts += 1;
            Err("wrong".to_owned())
        });
        assert!(found.unwrap_err().contains("wrong"));
        assert_eq!(attempts, 1);
    }

    #[test]
    fn late_failures_are_kept_and_the_third_is_final() {
        for (right_from, is_ok, attempts, kept) in [(3, true, 3, 2), (4, false, 3, 3)] {
            let folder = tempfile::tempdir().unwrap();
            let mut number = 0;
            let name = "late for \"/dev/disk\"";
            let found = unless_late_in(folder.path(), name, Duration::ZERO, |_| {
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
        let is_over = AtomicBool::new(false);
        let spin = || {
            let mut here = CpuSet::new();
            here.set(core);
            sched_setaffinity(None, &here).unwrap();
            while !is_over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        };
        let lateness = Lateness::start(&[]);
        std::thread::scope(|scope| {
            scope.spawn(spin);
            scope.spawn(spin);
            std::thread::sleep(Duration::from_millis(200));
            let late = lateness.so_far();
            // The waits of threads that have ended are lost.
            is_over.store(true, Ordering::Relaxed);
            assert!(late > Duration::from_millis(1), "{late:?}");
        });
    }
}
