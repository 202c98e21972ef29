//! CPU time and wake-ups of a process.

use std::path::Path;
use std::time::Duration;

/// Totals of all threads of a process.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cost {
    /// CPU time from the scheduler, in nanoseconds.
    pub(crate) cpu: Duration,
    /// Sampled by the kernel's tick: accurate only over long times, so only good for a share.
    user_ticks: u64,
    kernel_ticks: u64,
    /// How often a thread gave up its CPU to wait, and so was woken.
    pub(crate) wakes: u64,
    /// How often a thread was preempted.
    pub(crate) preempted: u64,
}

impl Cost {
    /// Reads the cost of a process by its ID. Values that cannot be read count as zero.
    pub(crate) fn of(pid: u32) -> Cost {
        let process = Path::new("/proc").join(pid.to_string());
        let mut cost = Cost::default();
        (cost.user_ticks, cost.kernel_ticks) = ticks(&process);
        for task in std::fs::read_dir(process.join("task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            cost.add_task(&task.path());
        }
        cost
    }

    /// Reads the cost of this process, including threads that have exited, whose wake-ups are in `ended`.
    pub(crate) fn own(ended: Cost) -> Cost {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let (user_ticks, kernel_ticks) = ticks(Path::new("/proc/self"));
        Cost {
            cpu: Duration::new(time.tv_sec as u64, time.tv_nsec as u32),
            user_ticks,
            kernel_ticks,
            ..ended
        }
    }

    /// Reads the cost of the calling thread since its start.
    pub(crate) fn of_this_thread() -> Cost {
        let mut cost = Cost::default();
        cost.add_task(Path::new("/proc/thread-self"));
        cost
    }

    fn add_task(&mut self, task: &Path) {
        let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        let ran = read("schedstat");
        let ns = ran.split_whitespace().next().and_then(|ns| ns.parse().ok());
        self.cpu += Duration::from_nanos(ns.unwrap_or(0));
        for line in read("status").lines() {
            let mut words = line.split_whitespace();
            let (name, count) = (
                words.next(),
                words.next().and_then(|count| count.parse().ok()),
            );
            match name {
                Some("voluntary_ctxt_switches:") => self.wakes += count.unwrap_or(0),
                Some("nonvoluntary_ctxt_switches:") => self.preempted += count.unwrap_or(0),
                _ => {}
            }
        }
    }

    /// Returns the difference from an earlier reading.
    pub(crate) fn since(self, before: Cost) -> Cost {
        Cost {
            cpu: self.cpu.saturating_sub(before.cpu),
            user_ticks: self.user_ticks.saturating_sub(before.user_ticks),
            kernel_ticks: self.kernel_ticks.saturating_sub(before.kernel_ticks),
            wakes: self.wakes.saturating_sub(before.wakes),
            preempted: self.preempted.saturating_sub(before.preempted),
        }
    }

    /// Returns the sum of several processes.
    pub(crate) fn plus(self, other: Cost) -> Cost {
        Cost {
            cpu: self.cpu + other.cpu,
            user_ticks: self.user_ticks + other.user_ticks,
            kernel_ticks: self.kernel_ticks + other.kernel_ticks,
            wakes: self.wakes + other.wakes,
            preempted: self.preempted + other.preempted,
        }
    }

    /// Returns the ticks of 10 ms, user and kernel together.
    pub(crate) fn ticks(&self) -> u64 {
        self.user_ticks + self.kernel_ticks
    }

    /// Returns the share of the CPU time that was spent in user mode; `None` if there are too few samples.
    pub(crate) fn user_share(&self) -> Option<f64> {
        (self.ticks() >= 20).then(|| self.user_ticks as f64 / self.ticks() as f64)
    }
}

/// Returns the private memory of a process in KiB: its own pages, and its share of file pages. Guest memory, which it shares with
/// its frontend, is not included.
pub(crate) fn own_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let own = text.lines().filter_map(|line| {
        let count = line
            .strip_prefix("Pss_Anon:")
            .or(line.strip_prefix("Pss_File:"))?;
        count.split_whitespace().next()?.parse::<u64>().ok()
    });
    own.sum()
}

/// Returns user and kernel ticks of a process.
fn ticks(process: &Path) -> (u64, u64) {
    let text = std::fs::read_to_string(process.join("stat")).unwrap_or_default();
    // The name in parentheses may contain blanks; only the fields after the last parenthesis are regular. utime is
    // field 14, the 12th after the name.
    let behind = text.rsplit_once(')').map_or("", |(_, behind)| behind);
    let mut fields = behind
        .split_whitespace()
        .skip(11)
        .map(|field| field.parse().unwrap_or(0));
    (fields.next().unwrap_or(0), fields.next().unwrap_or(0))
}
