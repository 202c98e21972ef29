//! Measures how much others used the CPUs while a suite ran: processes of this machine, and machines on its host.

use std::time::Instant;

use crate::report::DISTURBED;

/// Of one CPU, on average over a suite. Kernel threads that serve the suite's own disk are others too, hence some room.
const OTHERS_MAX: f64 = 0.2;
const STOLEN_MAX: f64 = 0.1;
/// USER_HZ, the unit of these files on every machine that we run on.
const TICKS_PER_SECOND: f64 = 100.0;

/// Usage up to the moment of reading.
pub(super) struct Used {
    at: Instant,
    ticks: Ticks,
}

/// Of CPU time, in ticks.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
struct Ticks {
    /// By all processes.
    all: u64,
    /// By this one, and by those that it started and that have ended.
    own: u64,
    /// By the host, for others than this machine.
    stolen: u64,
}

impl Used {
    /// Looks.
    pub(super) fn now() -> Used {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        Used {
            at: Instant::now(),
            ticks: Ticks::parse(&read("/proc/stat"), &read("/proc/self/stat")),
        }
    }

    /// A remark for the reader about the usage since then, if it matters.
    pub(super) fn complaint(&self) -> Option<String> {
        let now = Used::now();
        let seconds = now.at.duration_since(self.at).as_secs_f64();
        self.ticks.complaint(now.ticks, seconds)
    }
}

impl Ticks {
    fn parse(stat: &str, own: &str) -> Ticks {
        // cpu user nice system idle iowait irq softirq steal …; interrupts are nobody's.
        let fields = stat.lines().next().unwrap_or_default().split_whitespace();
        let cpu: Vec<u64> = fields
            .skip(1)
            .filter_map(|field| field.parse().ok())
            .collect();
        let of = |at: usize| cpu.get(at).copied().unwrap_or(0);
        // utime, stime, cutime, cstime: the 12th to 15th field behind the name in its parentheses.
        let behind = own.rsplit_once(')').map_or("", |(_, behind)| behind);
        let four = behind.split_whitespace().skip(11).take(4);
        Ticks {
            all: of(0) + of(1) + of(2),
            own: four.filter_map(|field| field.parse::<u64>().ok()).sum(),
            stolen: of(7),
        }
    }

    fn complaint(self, now: Ticks, seconds: f64) -> Option<String> {
        let share = |ticks: u64| ticks as f64 / TICKS_PER_SECOND / seconds.max(1e-9);
        let own = now.own.saturating_sub(self.own);
        let others = share(now.all.saturating_sub(self.all).saturating_sub(own));
        let stolen = share(now.stolen.saturating_sub(self.stolen));
        let is_disturbed = others > OTHERS_MAX || stolen > STOLEN_MAX;
        is_disturbed.then(|| {
            format!(
                "{DISTURBED}: other processes used {:.0} % of a CPU, and {:.0} % of one was taken by the host; measure again on a \
                 machine that does nothing else",
                others * 100.0,
                stolen * 100.0
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_used_is_all_less_our_own() {
        let stat = "cpu  100 20 30 9000 5 6 7 8 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        let own = "1 (a b) c) S 2 3 4 5 6 7 8 9 10 11 60 30 5 15 20 0 1";
        let ticks = Ticks::parse(stat, own);
        let wanted = Ticks {
            all: 150,
            own: 110,
            stolen: 8,
        };
        assert_eq!(ticks, wanted);
        let table = [
            // All of it our own; half a CPU somebody else's; a fifth of one stolen.
            (
                Ticks {
                    all: 350,
                    own: 310,
                    stolen: 8,
                },
                false,
            ),
            (
                Ticks {
                    all: 400,
                    own: 310,
                    stolen: 8,
                },
                true,
            ),
            (
                Ticks {
                    all: 350,
                    own: 310,
                    stolen: 28,
                },
                true,
            ),
        ];
        for (now, is_disturbed) in table {
            assert_eq!(ticks.complaint(now, 1.0).is_some(), is_disturbed, "{now:?}");
        }
    }
}
