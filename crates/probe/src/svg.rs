//! A report as a figure: throughput against request size, with a line for each amount outstanding.

use cleave_chart::{Axis, Figure, Marks, Panel, Scale, Series, Spread};
use cleave_worker::Direction;

use crate::matrix::{Matrix, Measured, OUTSTANDING_MAX, OUTSTANDING_MIN, ROW_OF_INTEREST};
use crate::report::{Report, Side};
use crate::size::long;

/// The figure, with a panel for each direction. Complete XML, with no reference to anything outside.
pub fn svg(report: &Report) -> String {
    let modelled = if report.modelled {
        " (modelled, not a drive)"
    } else {
        ""
    };
    let partial = if report.partial { " (partial)" } else { "" };
    cleave_chart::svg(&Figure {
        name: "probe".to_owned(),
        title: format!("Throughput of {}{modelled}{partial}", report.device.name),
        subtitle: format!(
            "cleave {}, Linux {}, {} × {}; each point to ±3 %, or what {:.0} s in all allow",
            report.cleave, report.host.kernel, report.host.cpus, report.host.cpu, report.seconds_max
        ),
        columns: 1,
        panels: report.sides.iter().map(panel).collect(),
        reads: "the legend gives the bytes outstanding on each line: as one request at its right end, as more and \
                smaller requests to the left."
            .to_owned(),
        hides: "latency, and the CPU time of a request.".to_owned(),
    })
}

fn panel(side: &Side) -> Panel {
    let verb = match side.matrix.direction {
        Direction::Read => "reads",
        Direction::Write => "writes",
    };
    let outstanding = side
        .matrix
        .measured
        .iter()
        .map(|m| m.point.outstanding_bytes);
    let mut sizes: Vec<u64> = outstanding.collect();
    sizes.dedup();
    let series = sizes.into_iter().map(|size| line(&side.matrix, size));
    Panel {
        title: format!("Random {verb}"),
        x: Axis::new("size of one request, bytes", Scale::Bytes),
        y: Axis::new("throughput, MB/s", Scale::Linear),
        marks: Marks::Lines(series.collect()),
    }
}

fn line(matrix: &Matrix, size: u64) -> Series<(f64, Spread)> {
    let row: Vec<&Measured> = matrix.row(size).collect();
    let series = Series::new(long(size), row.iter().map(|m| point(m)).collect());
    let series = series.with_hover(row.iter().map(|m| hover(m)).collect());
    let length = f64::from((OUTSTANDING_MAX / OUTSTANDING_MIN).ilog2());
    let rank = f64::from((size / OUTSTANDING_MIN).max(1).ilog2()) / length;
    match size == ROW_OF_INTEREST {
        true => series.emphasised(notes(&row)),
        false => series.ranked(rank),
    }
}

fn point(m: &Measured) -> (f64, Spread) {
    let rate = megabytes(m);
    let [min, max] = [1.0 - m.error, 1.0 + m.error].map(|share| share.max(0.0) * rate);
    (
        m.point.block_bytes() as f64,
        Spread {
            median: rate,
            min,
            max,
            count: 1,
        },
    )
}

fn megabytes(m: &Measured) -> f64 {
    m.bytes_per_second() / 1e6
}

fn name(m: &Measured) -> String {
    format!("{} × {}", m.point.depth, long(m.point.block_bytes()))
}

fn hover(m: &Measured) -> String {
    format!(
        "{} outstanding as {}: {:.1} MB/s, {:.0} IOPS, ±{:.1} %",
        long(m.point.outstanding_bytes),
        name(m),
        megabytes(m),
        m.requests_per_second(),
        m.error * 100.0,
    )
}

/// One request and, where it lies apart, the best that the row reaches.
fn notes(row: &[&Measured]) -> Vec<(usize, String)> {
    let all = || row.iter().enumerate();
    let whole = all().find(|(_, m)| m.point.depth == 1);
    let best = all().max_by(|a, b| a.1.bytes_per_second().total_cmp(&b.1.bytes_per_second()));
    let best = best.filter(|(_, m)| m.point.depth >= 8);
    let noted = whole.into_iter().chain(best);
    noted
        .map(|(at, m)| (at, format!("{}: {:.0} MB/s", name(m), megabytes(m))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::tests::{p3700, recorded};
    use crate::report::tests::report;

    #[test]
    fn a_figure_has_all_points_and_names_a_model() {
        let matrices = vec![
            recorded(Direction::Read, p3700),
            recorded(Direction::Write, |_| 5e8),
        ];
        let mut report = report(matrices);
        report.device.name = "/dev/<a & \"b\">".to_owned();
        report.modelled = true;
        let text = svg(&report);
        assert_eq!(text.matches("<title>").count(), 210);
        assert!(text.contains("modelled") && text.contains("&lt;a &amp; &quot;b&quot;&gt;"));
        assert!(text.contains("1 × 512 KiB: ") && text.contains("Random writes"));
    }

    #[test]
    fn little_or_nothing_measured_is_still_a_figure() {
        let mut one = recorded(Direction::Read, p3700);
        one.measured.truncate(1);
        for (matrices, points) in [(vec![], 0), (vec![one], 1)] {
            assert_eq!(svg(&report(matrices)).matches("<title>").count(), points);
        }
    }
}
