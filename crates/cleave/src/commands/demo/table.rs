//! The table at the end, made for eighty columns.

use std::fmt::Write as _;

use super::measure::StepResult;

/// Percentiles shown after the mean.
const QUANTILES: [f64; 3] = [0.5, 0.99, 0.999];

/// Heads of the columns, as wide as `line` makes them.
const HEAD: &str = concat!(
    "                                       latency, us            CPU us per I/O\n",
    "request  depth     IOPS     MB/s   mean    p50    p99  p99.9   daemon  driver",
);

const FOOT: &str = "\
All was verified before and after. Requests of 1M are sequential, of 4K random.
Latency is the driver's, which sleeps while it waits. CPU is user and system
time; the driver's includes making and checking data.";

/// The rows as text.
pub(super) fn render(rows: &[StepResult]) -> String {
    let lines: Vec<String> = rows.iter().map(line).collect();
    format!("\n{HEAD}\n{}\n\n{FOOT}\n", lines.join("\n"))
}

fn line(row: &StepResult) -> String {
    let step = &row.step;
    let kind = if step.read { "read" } else { "write" };
    let size = match step.block_bytes {
        bytes if bytes >= 1 << 20 => format!("{}M", bytes >> 20),
        bytes => format!("{}K", bytes >> 10),
    };
    let seconds = row.tally.elapsed.as_secs_f64().max(1e-9);
    let mut line = format!(
        "{kind:<5} {size:>2} {:>5} {:>8.0} {:>8.1} {:>6}",
        step.depth,
        row.tally.iops(),
        row.tally.bytes as f64 / seconds / 1e6,
        micros(row.latency.mean()),
    );
    for quantile in QUANTILES {
        let ns = row.latency.value_at_quantile(quantile);
        let _ = write!(line, " {:>6}", micros(ns as f64));
    }
    let daemon = row
        .daemon_cpu_us
        .map_or("-".to_owned(), |us| micros(us * 1e3));
    let _ = write!(line, " {daemon:>8} {:>7}", micros(row.driver_cpu_us * 1e3));
    line
}

/// Three digits or so: 1.23, 12.3, 123.
fn micros(ns: f64) -> String {
    match ns / 1e3 {
        us if us < 10.0 => format!("{us:.2}"),
        us if us < 100.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_client::WorkloadTotals;
    use hdrhistogram::Histogram;
    use std::time::Duration;

    #[test]
    fn the_table_fits_eighty_columns() {
        let rows: Vec<StepResult> =
            crate::commands::demo::measure::steps(1 << 30, Duration::from_secs(3))
                .into_iter()
                .map(|step| {
                    let mut latency = Histogram::new_with_bounds(1, 100_000_000_000, 3).unwrap();
                    latency.record(12_345_678).unwrap();
                    let tally = WorkloadTotals {
                        reads: 12_345_678,
                        bytes: 123_456_789_012,
                        elapsed: Duration::from_secs(3),
                        ..WorkloadTotals::default()
                    };
                    StepResult {
                        step,
                        tally,
                        latency,
                        daemon_cpu_us: Some(123.4),
                        driver_cpu_us: 0.123,
                    }
                })
                .collect();
        let text = render(&rows);
        for line in text.lines() {
            assert!(line.chars().count() <= 79, "{}: {line}", line.len());
        }
        assert!(
            text.contains("read  4K    32  4115226  41152.3  12349"),
            "{text}"
        );
    }

    #[test]
    fn micros_keep_about_three_digits() {
        for (ns, text) in [
            (1.0, "0.00"),
            (1234.0, "1.23"),
            (12_345.0, "12.3"),
            (123_456.0, "123"),
        ] {
            assert_eq!(micros(ns), text);
        }
    }
}
