//! A report as the study's figure: throughput against block size, a line for every amount outstanding.

use std::fmt::Write as _;

use cleave_worker::Direction;

use crate::matrix::{Matrix, Measured, ROW_OF_INTEREST};
use crate::report::{Report, Side};
use crate::size::{long, short};

const WIDTH: f64 = 1000.0;
const PANEL_HEIGHT: f64 = 560.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 168.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 66.0;
/// About so many lines across.
const Y_STEPS: f64 = 6.0;

/// From little outstanding to much: dark blue, teal, green, ochre; even steps in lightness, none too
/// pale for white paper.
const PALETTE: [[f64; 3]; 5] = [
    [62.0, 38.0, 120.0],
    [49.0, 104.0, 160.0],
    [33.0, 145.0, 140.0],
    [94.0, 176.0, 80.0],
    [214.0, 176.0, 40.0],
];
/// Of the row that the study looks at.
const EMPHASIS: &str = "#c8102e";

// Writing to a `String` cannot fail, so results of `write!` are dropped below.

/// The figure; a panel for each direction. Complete XML, with no reference to anything outside.
pub fn svg(report: &Report) -> String {
    let height = PANEL_HEIGHT * report.sides.len().max(1) as f64;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"DejaVu Sans, Verdana, sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    for (number, side) in report.sides.iter().enumerate() {
        let _ = writeln!(
            text,
            "<g transform=\"translate(0 {})\">",
            number as f64 * PANEL_HEIGHT
        );
        panel(&mut text, report, side);
        text.push_str("</g>\n");
    }
    text.push_str("</svg>\n");
    text
}

/// From a block size and a rate to a place on the paper.
struct Axes {
    log_min: f64,
    log_max: f64,
    /// MB/s at the top, and between two lines across.
    top: f64,
    step: f64,
}

impl Axes {
    fn of(matrix: &Matrix) -> Axes {
        let logs = || {
            matrix
                .measured
                .iter()
                .map(|m| m.point.block_bytes().max(1).ilog2())
        };
        let fastest = matrix.measured.iter().map(megabytes).fold(0.0, f64::max);
        let step = nice(fastest / Y_STEPS);
        let (min, max) = (logs().min().unwrap_or(9), logs().max().unwrap_or(22));
        Axes {
            log_min: f64::from(min),
            // One size alone still needs an axis.
            log_max: f64::from(max.max(min + 1)),
            top: ((fastest * 1.04 / step).ceil() * step).max(step),
            step,
        }
    }

    fn x(&self, block_bytes: u64) -> f64 {
        let share = (block_bytes.max(1) as f64).log2() - self.log_min;
        LEFT + share / (self.log_max - self.log_min) * (WIDTH - LEFT - RIGHT)
    }

    fn place(&self, m: &Measured) -> (f64, f64) {
        (self.x(m.point.block_bytes()), self.y(megabytes(m)))
    }

    fn y(&self, megabytes: f64) -> f64 {
        let height = PANEL_HEIGHT - TOP - BOTTOM;
        TOP + height * (1.0 - megabytes / self.top)
    }
}

/// The least 1, 2 or 5 times a power of ten that is no less.
fn nice(step: f64) -> f64 {
    let power = 10_f64.powf(step.max(1e-3).log10().floor());
    let times = [1.0, 2.0, 5.0]
        .into_iter()
        .find(|times| times * power >= step);
    times.unwrap_or(10.0) * power
}

fn megabytes(m: &Measured) -> f64 {
    m.bytes_per_second() / 1e6
}

fn panel(text: &mut String, report: &Report, side: &Side) {
    let axes = Axes::of(&side.matrix);
    titles(text, report, side);
    grid(text, &axes);
    let mut sizes: Vec<u64> = side
        .matrix
        .measured
        .iter()
        .map(|m| m.point.outstanding_bytes)
        .collect();
    sizes.dedup();
    let of_interest = |size: &u64| *size == ROW_OF_INTEREST;
    for size in sizes.iter().filter(|size| !of_interest(size)) {
        line(text, &axes, &side.matrix, *size);
    }
    // Last, so that it lies above the others.
    if sizes.iter().any(of_interest) {
        line(text, &axes, &side.matrix, ROW_OF_INTEREST);
        notes(text, &axes, &side.matrix);
    }
    legend(text, &sizes);
}

fn titles(text: &mut String, report: &Report, side: &Side) {
    let verb = match side.matrix.direction {
        Direction::Read => "reads",
        Direction::Write => "writes",
    };
    let modelled = if report.modelled {
        " (modelled, not a drive)"
    } else {
        ""
    };
    let partial = if report.partial { " (partial)" } else { "" };
    let _ = writeln!(
        text,
        "<text x=\"{LEFT}\" y=\"30\" font-size=\"18\" font-weight=\"bold\">Random {verb}: {}{modelled}{partial}</text>",
        escaped(&shortened(&report.device.name, 48))
    );
    let _ = writeln!(
        text,
        "<text x=\"{LEFT}\" y=\"52\" fill=\"#555555\">On a line the same bytes are outstanding: as one request at its \
         right end, as ever more and smaller ones to the left.</text>"
    );
    let _ = writeln!(
        text,
        "<text x=\"{LEFT}\" y=\"70\" fill=\"#888888\" font-size=\"11\">cleave {}, Linux {}, {} × {}; each point to \
         ±3 %, or what {:.0} s in all allow</text>",
        escaped(&report.cleave),
        escaped(&report.host.kernel),
        report.host.cpus,
        escaped(&shortened(&report.host.cpu, 48)),
        report.seconds_max,
    );
}

fn grid(text: &mut String, axes: &Axes) {
    let (right, bottom) = (WIDTH - RIGHT, PANEL_HEIGHT - BOTTOM);
    let mut at = 0.0;
    while at <= axes.top + axes.step / 2.0 {
        let y = axes.y(at);
        let colour = if at == 0.0 { "#555555" } else { "#dddddd" };
        let _ = writeln!(
            text,
            "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"{colour}\"/>"
        );
        let digits = usize::from(axes.step < 1.0) * 2;
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{at:.digits$}</text>",
            LEFT - 8.0,
            y + 4.5
        );
        at += axes.step;
    }
    for log in axes.log_min as u32..=axes.log_max as u32 {
        let x = axes.x(1 << log);
        let _ = writeln!(
            text,
            "<path d=\"M{x:.1} {TOP}V{bottom}\" stroke=\"#eeeeee\"/>"
        );
        let _ = writeln!(
            text,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"12\">{}</text>",
            bottom + 19.0,
            short(1 << log)
        );
    }
    let _ = writeln!(
        text,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">Size of one request, bytes</text>",
        (LEFT + right) / 2.0,
        bottom + 46.0
    );
    let _ = writeln!(
        text,
        "<text transform=\"translate(20 {:.1}) rotate(-90)\" text-anchor=\"middle\">Throughput, MB/s</text>",
        (TOP + bottom) / 2.0
    );
}

fn line(text: &mut String, axes: &Axes, matrix: &Matrix, size: u64) {
    let (colour, width, radius) = style(size);
    let (mut path, mut points) = (String::new(), String::new());
    for m in matrix.row(size) {
        let verb = if path.is_empty() { 'M' } else { 'L' };
        let (x, y) = axes.place(m);
        let _ = write!(path, "{verb}{x:.1} {y:.1}");
        let _ = writeln!(
            points,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{colour}\"><title>{} outstanding as {} × {}: \
             {:.1} MB/s, {:.0} IOPS, ±{:.1} %</title></circle>",
            long(size),
            m.point.depth,
            long(m.point.block_bytes()),
            megabytes(m),
            m.requests_per_second(),
            m.error * 100.0,
        );
    }
    let _ = write!(
        text,
        "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-linejoin=\"round\"/>\n\
         {points}"
    );
}

/// What the red line shows, in words at its two ends that matter.
fn notes(text: &mut String, axes: &Axes, matrix: &Matrix) {
    let whole = matrix.row(ROW_OF_INTEREST).find(|m| m.point.depth == 1);
    let best = matrix
        .row(ROW_OF_INTEREST)
        .max_by(|a, b| a.bytes_per_second().total_cmp(&b.bytes_per_second()));
    let (Some(whole), Some(best)) = (whole, best) else {
        return;
    };
    // Where the two ends lie side by side, one note is enough.
    let both = best.point.depth >= 8;
    for (m, is_below) in [(Some(whole), true), (both.then_some(best), false)] {
        let Some(m) = m else { continue };
        let (x, y) = axes.place(m);
        // A line that falls to the left leaves room above its right end.
        let is_below = is_below && both && y < PANEL_HEIGHT - BOTTOM - 40.0;
        let y = if is_below {
            y + 24.0
        } else {
            (y - 12.0).max(TOP + 12.0)
        };
        let _ = writeln!(
            text,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" font-weight=\"bold\" fill=\"{EMPHASIS}\" \
             stroke=\"#ffffff\" stroke-width=\"4\" paint-order=\"stroke\">{} × {}: {:.0} MB/s</text>",
            m.point.depth,
            long(m.point.block_bytes()),
            megabytes(m)
        );
    }
}

fn legend(text: &mut String, sizes: &[u64]) {
    let x = WIDTH - RIGHT + 24.0;
    let _ = writeln!(
        text,
        "<text x=\"{x}\" y=\"{}\" font-weight=\"bold\">Outstanding</text>",
        TOP + 10.0
    );
    // Most on top, as the lines are.
    for (number, size) in sizes.iter().rev().enumerate() {
        let y = TOP + 34.0 + number as f64 * 22.0;
        let (colour, width, radius) = style(*size);
        let _ = writeln!(
            text,
            "<path d=\"M{x} {y}h30\" stroke=\"{colour}\" stroke-width=\"{width}\"/>\
             <circle cx=\"{}\" cy=\"{y}\" r=\"{radius}\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"{}\">{}</text>",
            x + 15.0,
            x + 40.0,
            y + 4.5,
            long(*size)
        );
    }
}

/// Colour, width of the line and radius of its points.
fn style(size: u64) -> (String, f64, f64) {
    if size == ROW_OF_INTEREST {
        return (EMPHASIS.to_owned(), 3.2, 4.0);
    }
    // 512 B is the beginning of the palette, 4 MiB its end.
    let share = (f64::from(size.max(512).ilog2()) - 9.0) / 13.0;
    let place = share.clamp(0.0, 1.0) * (PALETTE.len() - 1) as f64;
    let at = (place as usize).min(PALETTE.len() - 2);
    let (from, to) = (PALETTE[at], PALETTE[at + 1]);
    let mix = |channel: usize| from[channel] + (to[channel] - from[channel]) * (place - at as f64);
    (
        format!(
            "#{:02x}{:02x}{:02x}",
            mix(0) as u8,
            mix(1) as u8,
            mix(2) as u8
        ),
        1.6,
        2.6,
    )
}

/// The end of a long name says more than its beginning.
fn shortened(name: &str, chars_max: usize) -> String {
    let count = name.chars().count();
    match count > chars_max {
        true => format!(
            "…{}",
            name.chars().skip(count - chars_max + 1).collect::<String>()
        ),
        false => name.to_owned(),
    }
}

/// Text within XML; what XML cannot hold at all becomes a question mark.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
        .replace(
            |c: char| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}'),
            "?",
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::tests::{p3700, recorded};
    use crate::report::tests::report;

    /// Every element is closed in order, every `&` begins an entity, no attribute is open.
    fn check(xml: &str) {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = xml;
        while let Some(at) = rest.find('<') {
            let (before, after) = rest.split_at(at);
            assert!(!before.contains('>'), "stray > in {before}");
            let end = after.find('>').expect("tag without end");
            let tag = &after[1..end];
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            let name = tag
                .trim_start_matches('/')
                .split([' ', '/'])
                .next()
                .unwrap();
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name));
            } else if !tag.ends_with('/') {
                open.push(name);
            }
            rest = &after[end + 1..];
        }
        assert!(open.is_empty(), "{open:?}");
        for entity in xml.split('&').skip(1) {
            let known = ["amp;", "lt;", "gt;", "quot;"];
            assert!(
                known.iter().any(|known| entity.starts_with(known)),
                "{entity:.20}"
            );
        }
        assert!(!xml.contains("NaN") && !xml.contains("inf"), "{xml}");
    }

    #[test]
    fn the_figure_is_well_formed_and_whole() {
        let matrices = vec![
            recorded(Direction::Read, p3700),
            recorded(Direction::Write, |_| 5e8),
        ];
        let mut report = report(matrices);
        report.device.name = "/dev/<a & \"b\">\u{1}".to_owned();
        report.modelled = true;
        let text = svg(&report);
        check(&text);
        assert_eq!(
            text.matches("stroke-linejoin").count(),
            28,
            "14 lines in two panels"
        );
        assert_eq!(text.matches("<title>").count(), 210);
        assert!(text.contains("modelled") && text.contains("&lt;a &amp; &quot;b&quot;&gt;?"));
    }

    #[test]
    fn little_or_nothing_measured_is_still_a_figure() {
        check(&svg(&report(vec![])));
        let mut one = recorded(Direction::Read, p3700);
        one.measured.truncate(1);
        check(&svg(&report(vec![one])));
        check(&svg(&report(vec![recorded(Direction::Read, |_| 1e-3)])));
    }

    #[test]
    fn steps_are_round() {
        for (least, step) in [
            (0.3, 0.5),
            (1.0, 1.0),
            (1.1, 2.0),
            (330.0, 500.0),
            (501.0, 1000.0),
        ] {
            assert!(
                (nice(least) - step).abs() < 1e-9,
                "{least}: {}",
                nice(least)
            );
        }
    }
}
