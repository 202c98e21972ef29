//! One disk in detail: where the time of its requests goes, and how it is distributed.

use std::collections::BTreeMap;

use cleave_api::DiskReport;

use super::screen::{away_sheet, cut, micros, sheet};
use crate::commands::remote::Listed;

/// Longest bar, in characters.
const BAR: usize = 40;
/// The stages of a request, in their order.
const STAGES: [&str; 4] = ["ring", "plan", "device", "publish"];

/// Leads back.
const HINT: &str = "(Esc: all disks, q: quit)";

/// Returns the page of a disk, as much of it as there are lines.
pub(super) fn page(report: &DiskReport, lines_max: usize, columns: usize) -> Vec<String> {
    let sheet = sheet(report);
    let mut sheet = sheet.lines();
    // The name is the sheet's first line; it belongs to the top.
    let name = sheet.next().unwrap_or_default();
    let mut lines = vec![format!("{name}   {HINT}")];
    lines.extend(stages(report));
    lines.extend(histogram(report));
    lines.extend(sheet.map(str::to_owned));
    fitted(&lines, lines_max, columns)
}

/// Returns the page of a disk that is not served.
pub(super) fn away_page(away: &Listed, lines_max: usize, columns: usize) -> Vec<String> {
    let lines: Vec<_> = away_sheet(away).lines().map(str::to_owned).collect();
    let [name, rest @ ..] = lines.as_slice() else {
        return Vec::new();
    };
    let lines = [&[format!("{name}   {HINT}")], rest].concat();
    fitted(&lines, lines_max, columns)
}

/// Lines that are too long go on below; how many are missing at the end is said.
fn fitted(lines: &[String], lines_max: usize, columns: usize) -> Vec<String> {
    let wrapped = lines.iter().flat_map(|line| wrapped(line, columns));
    let mut all: Vec<String> = wrapped.collect();
    if all.len() > lines_max {
        let missing = all.len() - lines_max.saturating_sub(1);
        all.truncate(lines_max.saturating_sub(1));
        let more = format!("… {missing} more lines: make the window higher");
        all.extend((lines_max > 0).then(|| cut(&more, columns)));
    }
    all
}

/// A line as several of at most so many columns, cut at spaces where there are any.
fn wrapped(line: &str, columns: usize) -> Vec<String> {
    // The texts of a sheet begin here.
    const INDENT: usize = 12;
    if columns <= 2 * INDENT {
        return vec![cut(line, columns)];
    }
    let mut lines = Vec::new();
    let mut rest: Vec<char> = line.chars().collect();
    while rest.len() > columns {
        let fits = rest.get(..=columns).unwrap_or_default();
        let space = fits.iter().rposition(|c| *c == ' ');
        let end = space.filter(|end| *end > INDENT).unwrap_or(columns);
        let more = rest.split_off(end);
        lines.push(rest.into_iter().collect());
        let text = more.into_iter().skip_while(|c| *c == ' ');
        rest = std::iter::repeat_n(' ', INDENT).chain(text).collect();
    }
    lines.push(rest.into_iter().collect());
    lines
}

/// The mean time of a request in each stage.
fn stages(report: &DiskReport) -> Vec<String> {
    let mean = |stage: &str| {
        let each = report
            .requests
            .iter()
            .filter_map(|row| row.stages.get(stage));
        let (count, sum) = each.fold((0, 0.0), |(count, sum), times| {
            (
                count + times.count,
                sum + times.mean_us * times.count as f64,
            )
        });
        (count > 0).then(|| (stage.to_owned(), sum / count as f64))
    };
    let means: Vec<_> = STAGES.iter().filter_map(|stage| mean(stage)).collect();
    let sum: f64 = means.iter().map(|(_, mean)| mean).sum();
    let line = |(stage, mean): &(String, f64)| {
        let share = mean / sum.max(f64::MIN_POSITIVE);
        format!("  {stage:<8} {:>8} us  {}", micros(*mean), bar(share))
    };
    titled("mean time of a request by stage", means.iter().map(line))
}

/// How many requests took how long with the device, in powers of two.
fn histogram(report: &DiskReport) -> Vec<String> {
    let mut counts: BTreeMap<u32, u64> = BTreeMap::new();
    let buckets = report.requests.iter().flat_map(|row| &row.device_buckets);
    for (start_ns, count) in buckets.filter(|(_, count)| *count > 0) {
        *counts.entry(start_ns.max(&1).ilog2()).or_default() += count;
    }
    let most = counts.values().copied().max().unwrap_or(0);
    let line = |(power, count): (&u32, &u64)| {
        let from_us = (1_u64 << power) as f64 / 1000.0;
        let share = *count as f64 / most as f64;
        format!("  {:>8} us  {count:>9}  {}", micros(from_us), bar(share))
    };
    titled(
        "requests by their time with the device, from",
        counts.iter().map(line),
    )
}

/// Nothing where there is nothing to show.
fn titled(title: &str, lines: impl Iterator<Item = String>) -> Vec<String> {
    let mut all: Vec<String> = std::iter::once(format!("  {title}")).chain(lines).collect();
    if all.len() == 1 {
        all.clear();
    }
    all
}

/// A bar, in eighths of a character. A share above zero is always visible.
fn bar(share: f64) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * (BAR * 8) as f64).round() as usize;
    let eighths = eighths.max(usize::from(share > 0.0));
    let part = PARTS.get(eighths % 8).copied().unwrap_or_default();
    format!("{}{part}", "█".repeat(eighths / 8))
}

#[cfg(test)]
mod tests {
    use super::super::rates::tests::report;
    use super::*;
    use cleave_api::LatencySummary;

    #[test]
    fn a_bar_is_as_long_as_its_share() {
        for (share, wanted) in [
            (0.0, String::new()),
            (1e-9, "▏".to_owned()),
            (0.5, "█".repeat(20)),
            (0.509_375, "█".repeat(20) + "▍"),
            (7.0, "█".repeat(40)),
            (f64::NAN, String::new()),
        ] {
            assert_eq!(bar(share), wanted, "{share}");
        }
    }

    #[test]
    fn stages_and_times_are_drawn() {
        let mut report = report("a", 5.0, 5, &[(1024, 30), (1152, 10), (65_536, 20), (9, 0)]);
        let times = |mean_us| LatencySummary {
            mean_us,
            ..report.requests[0].stages["device"]
        };
        let ring = times(240.0);
        report.requests[0].stages.insert("ring".to_owned(), ring);
        let page = page(&report, 24, 80);
        let drawn: Vec<&str> = page.iter().take(7).map(String::as_str).collect();
        let expected = [
            "a: /images/a   (Esc: all disks, q: quit)",
            "  mean time of a request by stage",
            &format!("  ring          240 us  {}", "█".repeat(30)),
            &format!("  device       80.0 us  {}", "█".repeat(10)),
            "  requests by their time with the device, from",
            &format!("      1.02 us         40  {}", "█".repeat(40)),
            &format!("      65.5 us         20  {}", "█".repeat(20)),
        ];
        assert_eq!(drawn, expected);
        assert!(page.iter().any(|line| line.starts_with("  frontend")));
        report.requests.clear();
        assert!(super::page(&report, 3, 80).len() == 3);
        assert_eq!(
            super::page(&report, 3, 80)[2],
            "… 11 more lines: make the window higher"
        );
    }

    #[test]
    fn a_long_line_goes_on_below() {
        let report = report("a", 5.0, 5, &[]);
        let page = page(&report, 40, 80);
        let at = page.iter().position(|line| line.starts_with("  waiting"));
        let at = at.unwrap();
        assert_eq!(
            page[at..at + 2],
            [
                "  waiting   adaptive, split auto; 1 sleeps, 2 dozes; spun 0.50 s well and 0.00 s",
                "            in vain"
            ]
        );
        for columns in [1, 24, 25, 40, 80] {
            let long = format!("{} {}", "a".repeat(100), "b c".repeat(30));
            for line in wrapped(&long, columns) {
                assert!(line.chars().count() <= columns, "{columns}: {line}");
            }
        }
        let all = wrapped(&"a".repeat(200), 80).concat();
        assert_eq!(all.matches('a').count(), 200);
    }
}
