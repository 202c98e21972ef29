//! Measures how much others used the CPUs while a suite ran: processes of this machine, and machines on its host.

use std::time::Instant;

use cleave_rig::daemon::ticks;

use crate::run_folder::DISTURBED;

/// Shares of one CPU, on average over a suite. Kernel threads that serve the suite's own disk count as others too, hence
/// some room.
const OTHERS_MAX: f64 = 0.2;
const STOLEN_MAX: f64 = 0.1;
/// USER_HZ, the unit of these files on every machine that we run on.
const TICKS_PER_SECOND: f64 = 100.0;

/// CPU time up to the moment of reading.
pub(super) struct CpuUsage {
    at: Instant,
    ticks: ForeignTicks,
}

/// Ticks of others on this machine, and those that the host gave to others than this machine.
type ForeignTicks = [u64; 2];

impl CpuUsage {
    /// Reads the counters.
    pub(super) fn now() -> CpuUsage {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        CpuUsage {
            at: Instant::now(),
            ticks: parse(&read("/proc/stat"), &read("/proc/self/stat")),
        }
    }

    /// Returns a remark for the reader about the usage since then, if it matters.
    pub(super) fn complaint(&self) -> Option<String> {
        complaint(
            self.ticks,
            CpuUsage::now().ticks,
            self.at.elapsed().as_secs_f64(),
        )
    }
}

/// Returns the time by all processes, less that of this one and of those that it started and that have ended.
fn parse(stat: &str, own: &str) -> ForeignTicks {
    // cpu user nice system idle iowait irq softirq steal …; the time of interrupts is charged to no process.
    let fields = stat.lines().next().unwrap_or_default().split_whitespace();
    let cpu: Vec<u64> = fields.filter_map(|field| field.parse().ok()).collect();
    // utime, stime, cutime, cstime.
    let own: u64 = ticks(own, &[14, 15, 16, 17])
        .unwrap_or_default()
        .iter()
        .sum();
    let all: u64 = cpu.iter().take(3).sum();
    [all.saturating_sub(own), cpu.get(7).copied().unwrap_or(0)]
}

fn complaint(before: ForeignTicks, now: ForeignTicks, seconds: f64) -> Option<String> {
    let share = |at: usize| {
        now[at].saturating_sub(before[at]) as f64 / TICKS_PER_SECOND / seconds.max(1e-9)
    };
    let (others, stolen) = (share(0), share(1));
    let is_disturbed = others > OTHERS_MAX || stolen > STOLEN_MAX;
    let [others, stolen] = [others, stolen].map(|share| share * 100.0);
    is_disturbed.then(|| {
        format!(
            "{DISTURBED}: other processes used {others:.0} % of a CPU, and {stolen:.0} % of one was taken by the host; \
             measure again on a machine that does nothing else"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_used_all_that_is_not_our_own() {
        let stat = "cpu  100 20 30 9000 5 6 7 8 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        let own = "1 (a b) c) S 2 3 4 5 6 7 8 9 10 11 60 30 5 15 20 0 1";
        let before = parse(stat, own);
        assert_eq!(before, [40, 8]);
        // Nothing but our own; half a CPU of somebody else's; a fifth of one stolen.
        for (now, is_disturbed) in [([40, 8], false), ([90, 8], true), ([40, 28], true)] {
            assert_eq!(
                complaint(before, now, 1.0).is_some(),
                is_disturbed,
                "{now:?}"
            );
        }
    }
}
