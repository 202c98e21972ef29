//! Rates of a disk between two of its reports.

use std::collections::BTreeMap;

use cleave_api::DiskReport;

/// A second's worth.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Rates {
    pub(super) reads: f64,
    pub(super) writes: f64,
    pub(super) others: f64,
    pub(super) bytes: f64,
    /// Median and 99th percentile of the time with the engine; `None`: nothing was timed.
    pub(super) p50_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    /// Requests that began to wait for the disk's limits.
    pub(super) throttled: f64,
    /// Shares of one core: of spinning, of all that the disk's workers did, and of the whole process.
    pub(super) spin: f64,
    pub(super) cpu: f64,
    pub(super) process_cpu: f64,
}

impl Rates {
    /// Between two reports; `None` where the daemon was started anew between them, or no time passed.
    pub(super) fn between(before: &DiskReport, now: &DiskReport) -> Option<Rates> {
        let seconds = now.process.uptime_seconds - before.process.uptime_seconds;
        if before.process.pid != now.process.pid || seconds <= 0.0 {
            return None;
        }
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let share = |now: f64, before: f64| ((now - before) / seconds).max(0.0);
        let (new, old) = (&now.totals, &before.totals);
        let spun = |report: &DiskReport| {
            report.pacing.spin_hit_seconds + report.pacing.spin_wasted_seconds
        };
        let times = times_between(before, now);
        Some(Rates {
            reads: rate(new.reads, old.reads),
            writes: rate(new.writes, old.writes),
            others: rate(new.others, old.others),
            bytes: rate(
                new.read_bytes.saturating_add(new.write_bytes),
                old.read_bytes.saturating_add(old.write_bytes),
            ),
            p50_us: quantile_us(&times, 0.5),
            p99_us: quantile_us(&times, 0.99),
            throttled: rate(new.throttled, old.throttled),
            spin: share(spun(now), spun(before)),
            cpu: share(now.pacing.cpu_seconds, before.pacing.cpu_seconds),
            process_cpu: share(now.process.cpu_seconds, before.process.cpu_seconds),
        })
    }
}

/// Lower bounds of buckets, in nanoseconds, each with its count.
type Times = BTreeMap<u64, u64>;

fn times_between(before: &DiskReport, now: &DiskReport) -> Times {
    let mut times = buckets(now);
    for (start, count) in buckets(before) {
        if let Some(left) = times.get_mut(&start) {
            *left = left.saturating_sub(count);
        }
    }
    times
}

fn buckets(report: &DiskReport) -> Times {
    let mut sum = Times::new();
    let each = report.requests.iter().flat_map(|row| &row.device_buckets);
    for (start, count) in each {
        *sum.entry(*start).or_default() += count;
    }
    sum
}

/// Interpolated within a bucket: those of the first 256 ns are 32 ns wide, the others an eighth of
/// the power of two that they begin at or above.
fn quantile_us(times: &Times, share: f64) -> Option<f64> {
    let count: u64 = times.values().sum();
    if count == 0 {
        return None;
    }
    let rank = share * count as f64;
    let mut below = 0.0;
    let mut last = None;
    for (start, n) in times.iter().filter(|(_, n)| **n > 0) {
        let n = *n as f64;
        let width = (1u64 << start.max(&256).ilog2()) / 8;
        let within = ((rank - below) / n).clamp(0.0, 1.0);
        last = Some((*start as f64 + width as f64 * within) / 1000.0);
        if below + n >= rank {
            break;
        }
        below += n;
    }
    last
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// A report with some numbers in it.
    pub(in crate::commands::view) fn report(
        id: &str,
        uptime: f64,
        reads: u64,
        buckets: &[(u64, u64)],
    ) -> DiskReport {
        let value = json!({
            "id": id, "name": format!("/images/{id}"), "serial": null, "endpoint": "/run/s",
            "store": {"kind": "file", "direct": true, "size_bytes": 1 << 30, "block_bytes": 512, "read_only": false,
                "cache": "writeback", "sync_failed": false},
            "process": {"version": "0", "pid": 7, "uptime_seconds": uptime, "cpu_seconds": uptime / 4.0,
                "resident_bytes": 3 << 20},
            "session": {"connected": true, "count": 1, "features": "0x1", "protocol_features": "0x2",
                "vrings": [{"index": 0, "size": 256, "enabled": true}]},
            "tuning": {"completion": "adaptive", "vrings": {}, "spin_cpu_max": 25, "spin_cpu_total": null,
                "spin_rate_min": 1100, "spin_worth": 5, "coalesce_us": 0, "coalesce_max": 0, "split": "auto"},
            "pacing": {"workers": ["spins", "sleeps"], "sleeps": 1, "dozes": 2, "wakeups": 3,
                "cpu_seconds": uptime / 5.0, "spin_hit_seconds": uptime / 10.0, "spin_wasted_seconds": 0.0,
                "spin_left_seconds": 0.005, "spin_left_max_seconds": 0.01, "switches": {"fast": 1}, "experiments": 1,
                "tried": [{"spins": true, "gain_percent": [22.0, 20.5, 24.0], "price_percent": 40.0,
                    "seconds_ago": 3.2}, null]},
            "totals": {"reads": reads, "writes": 10, "others": 0, "read_bytes": reads * 4096,
                "write_bytes": 0, "failed": 0, "refused": 0, "broken": 0, "retired_vrings": 0, "laps": 1,
                "kicks": 1, "calls": 1, "calls_suppressed": 1, "calls_coalesced": 0},
            "errors": {"store": 0},
            "in_flight": {"requests": 3, "oldest_seconds": 0.002},
            "zero_reads": {"sampled": 10, "zero": 5},
            "recording": true,
            "requests": [{"direction": "read", "size": "4K", "requests": reads, "bytes": reads * 4096,
                "stages": {"device": {"count": 1, "mean_us": 80.0, "p50_us": 79.5, "p90_us": 90.0,
                    "p99_us": 120.25, "p999_us": 1500.0}},
                "device_buckets": buckets}],
            "vrings": [], "splitting": [{"direction": "read", "from_bytes": 524_288, "chunk_bytes": 16384,
                "requests": 900, "tried": {"chunk_bytes": 16384, "against_bytes": 0,
                    "gain_percent": [48.0, 46.0, 50.0], "price_percent": 5.0, "seconds_ago": 9.0}}],
            "legs": []
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn rates_are_of_the_time_between() {
        let before = report("a", 10.0, 1000, &[(1024, 50)]);
        let now = report("a", 12.0, 5000, &[(1024, 50), (65536, 100)]);
        let rates = Rates::between(&before, &now).unwrap();
        assert_eq!((rates.reads, rates.writes), (2000.0, 0.0));
        assert_eq!(rates.bytes, 2000.0 * 4096.0);
        assert!((rates.cpu - 0.2).abs() < 1e-9 && (rates.spin - 0.1).abs() < 1e-9);
        assert!((rates.process_cpu - 0.25).abs() < 1e-9);
        // Of the bucket that begins at 65.536 µs and is an eighth as wide; what was there before does
        // not count.
        assert_eq!(rates.p50_us, Some(65.536 + 4.096));
        assert!(rates.p99_us.unwrap() > 73.0);
    }

    #[test]
    fn without_time_or_requests_there_is_nothing_to_tell() {
        let report = report("a", 10.0, 1000, &[(1024, 50)]);
        assert_eq!(Rates::between(&report, &report), None);
        let mut later = report.clone();
        later.process.uptime_seconds += 1.0;
        let rates = Rates::between(&report, &later).unwrap();
        assert_eq!((rates.reads, rates.p50_us), (0.0, None));
    }

    #[test]
    fn a_daemon_that_was_started_anew_has_no_past() {
        let before = report("a", 10.0, 1000, &[]);
        let mut now = report("a", 20.0, 5, &[]);
        now.process.pid = 8;
        assert_eq!(Rates::between(&before, &now), None);
        assert_eq!(Rates::between(&now, &before), None);
    }
}
