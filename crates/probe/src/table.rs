//! A report as text.

use std::fmt::Write as _;

use crate::matrix::{Matrix, ROW_OF_INTEREST, word};
use crate::report::{ProbeReport, sentences};
use crate::size::{long, short};

/// Assumed width of a terminal.
const WIDTH: usize = 100;
/// Width of the first column, and of each depth.
const LABEL_WIDTH: usize = 8;
const CELL_WIDTH: usize = 6;

// Writing to a `String` cannot fail, so results of `write!` are dropped below.

/// Returns the matrices, the row of 512 KiB, and their judgement.
pub fn table(report: &ProbeReport) -> String {
    let mut text = String::new();
    let device = &report.device;
    let _ = writeln!(
        text,
        "{}: {}, {} bytes, smallest op {}",
        device.name, device.kind, device.size_bytes, device.block_bytes
    );
    let host = &report.host;
    let _ = writeln!(
        text,
        "cleave {}, Linux {}, {} × {}",
        report.cleave, host.kernel, host.cpus, host.cpu
    );
    for side in &report.sides {
        matrix(&mut text, &side.matrix);
        row(&mut text, &side.matrix);
        text.push('\n');
        for sentence in sentences(&side.judgement, side.matrix.direction) {
            let _ = writeln!(text, "{sentence}");
        }
    }
    let doubts = report.doubts();
    if !doubts.is_empty() {
        text.push('\n');
    }
    for doubt in doubts {
        let _ = writeln!(text, "Note: {doubt}");
    }
    text
}

/// Writes a line for each number of bytes outstanding and a column for each depth, in several parts if it is too wide.
fn matrix(text: &mut String, matrix: &Matrix) {
    let _ = writeln!(
        text,
        "\nRandom {}s, MB/s; down: bytes outstanding; across: requests in flight",
        word(matrix.direction)
    );
    let mut depths: Vec<u32> = matrix.measured.iter().map(|m| m.point.depth).collect();
    depths.sort_unstable();
    depths.dedup();
    let mut sizes: Vec<u64> = matrix
        .measured
        .iter()
        .map(|m| m.point.outstanding_bytes)
        .collect();
    sizes.dedup();
    for part in depths.chunks((WIDTH - LABEL_WIDTH) / CELL_WIDTH) {
        let _ = write!(text, "{:>LABEL_WIDTH$}", "");
        for depth in part {
            let _ = write!(text, "{depth:>CELL_WIDTH$}");
        }
        text.push('\n');
        for size in &sizes {
            line(text, matrix, *size, part);
        }
    }
}

fn line(text: &mut String, matrix: &Matrix, size: u64, depths: &[u32]) {
    let cell = |depth: &u32| {
        let found = matrix.row(size).find(|m| m.point.depth == *depth);
        found.map(|m| rate(m.bytes_per_second()))
    };
    let cells: Vec<Option<String>> = depths.iter().map(cell).collect();
    let Some(last) = cells.iter().rposition(Option::is_some) else {
        return;
    };
    let _ = write!(text, "{:>LABEL_WIDTH$}", short(size));
    for cell in cells.iter().take(last + 1) {
        let _ = write!(text, "{:>CELL_WIDTH$}", cell.as_deref().unwrap_or(""));
    }
    text.push('\n');
}

/// Writes MB/s in five characters.
fn rate(bytes_per_second: f64) -> String {
    let mb = bytes_per_second / 1e6;
    match mb {
        _ if mb < 9.995 => format!("{mb:.2}"),
        _ if mb < 99.95 => format!("{mb:.1}"),
        _ if mb < 99_999.5 => format!("{mb:.0}"),
        _ => format!("{:.0}G", (mb / 1e3).min(9999.0)),
    }
}

/// Writes the row that the study discusses, in full.
fn row(text: &mut String, matrix: &Matrix) {
    let mut points = matrix.row(ROW_OF_INTEREST).peekable();
    let Some(first) = points.peek().map(|m| m.bytes_per_second()) else {
        return;
    };
    let _ = writeln!(
        text,
        "\nThe same {} outstanding, in ever more requests\n{:>8} {:>9} {:>9} {:>10} {:>11} {:>7} {:>8}",
        long(ROW_OF_INTEREST),
        "depth",
        "request",
        "MB/s",
        "IOPS",
        "latency µs",
        "±",
        "gain"
    );
    for m in points {
        let _ = writeln!(
            text,
            "{:>8} {:>9} {:>9} {:>10.0} {:>11.1} {:>5.1} % {:>7.2}×",
            m.point.depth,
            long(m.point.block_bytes()),
            rate(m.bytes_per_second()),
            m.requests_per_second(),
            m.latency_us(),
            m.error.min(1.0) * 100.0,
            m.bytes_per_second() / first.max(1.0),
        );
    }
}

#[cfg(test)]
mod tests {
    use cleave_worker::DataDirection;

    use super::*;
    use crate::judge::tests::{p3700, recorded};
    use crate::report::tests::report;

    #[test]
    fn rates_have_five_characters() {
        for (rate_bytes, shown) in [
            (0.0, "0.00"),
            (1.234e6, "1.23"),
            (9.999e6, "10.0"),
            (99.94e6, "99.9"),
            (99.96e6, "100"),
            (1.9701e9, "1970"),
            (9.99994e10, "99999"),
            (1e11, "100G"),
        ] {
            assert_eq!(rate(rate_bytes), shown);
        }
    }

    #[test]
    fn the_table_fits_and_shows_all() {
        let matrices = vec![
            recorded(DataDirection::Read, p3700),
            recorded(DataDirection::Write, |_| 2e11),
        ];
        let text = table(&report(matrices));
        for line in text.lines().skip(2) {
            assert!(line.chars().count() <= WIDTH, "{line}");
        }
        for part in [
            "Random reads",
            "Random writes",
            "8192",
            "512 KiB outstanding",
            "Splitting reads pays",
        ] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        let row = text
            .lines()
            .find(|line| line.trim_start().starts_with("512K"))
            .unwrap();
        assert_eq!(
            row.split_whitespace().count(),
            12,
            "its depths are 1 … 1024: {row}"
        );
    }

    #[test]
    fn a_partial_matrix_is_displayed() {
        let mut matrix = recorded(DataDirection::Read, p3700);
        matrix
            .measured
            .retain(|m| m.point.outstanding_bytes == 4096);
        let mut report = report(vec![matrix]);
        report.partial = true;
        let text = table(&report);
        assert!(
            text.contains("partial") && text.contains("Too little"),
            "{text}"
        );
    }
}
