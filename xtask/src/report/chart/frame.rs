//! The picture around the marks: titles, legend, axes, caption.

use std::fmt::Write as _;

use super::axis::Span;
use super::words::{escaped, width, wrapped};
use super::{Axis, Figure, Marks, Panel, Scale, bars, points};

const WIDTH: f64 = 1000.0;
const MARGIN: f64 = 18.0;
const GAP: f64 = 26.0;
const TITLE: f64 = 17.0;
const BODY: f64 = 12.0;
const TICK: f64 = 11.0;
/// Between lines of the body.
const LEAD: f64 = 16.0;
const GREY: &str = "#666666";

/// Told apart on paper and by most eyes; the first two by all.
const PALETTE: [&str; 12] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a5195", "#b8860b", "#56b4e9", "#8c2d04",
    "#444444", "#66a61e", "#e7298a", "#1b4f72",
];

// Writing to a `String` cannot fail, so results of `write!` are dropped in these files.

/// How a series looks.
#[derive(Clone, Copy)]
pub(super) struct Style {
    pub(super) colour: &'static str,
    /// Which shape its marks have.
    pub(super) shape: usize,
}

/// Names of series, each with its look.
pub(super) struct Legend<'a>(Vec<&'a str>);

impl<'a> Legend<'a> {
    fn of(figure: &'a Figure) -> Legend<'a> {
        let mut names = Vec::new();
        for name in figure.panels.iter().flat_map(|panel| panel.marks.names()) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        Legend(names)
    }

    pub(super) fn style(&self, name: &str) -> Style {
        let at = self.0.iter().position(|known| *known == name).unwrap_or(0);
        Style {
            colour: PALETTE[at % PALETTE.len()],
            shape: at % points::SHAPES,
        }
    }
}

/// Where marks may lie.
#[derive(Clone, Copy)]
pub(super) struct Area {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) right: f64,
    pub(super) bottom: f64,
}

/// An area and the scales along it.
pub(super) struct Plane {
    pub(super) area: Area,
    pub(super) x: Span,
    pub(super) y: Span,
}

impl Plane {
    pub(super) fn x(&self, value: f64) -> Option<f64> {
        let share = self.x.share(value)?;
        Some(self.area.left + share * (self.area.right - self.area.left))
    }

    pub(super) fn y(&self, value: f64) -> Option<f64> {
        let share = self.y.share(value)?;
        Some(self.area.bottom - share * (self.area.bottom - self.area.top))
    }
}

pub(super) fn svg(figure: &Figure) -> String {
    let legend = Legend::of(figure);
    let mut body = String::new();
    let mut y = 30.0;
    for line in wrapped(&figure.title, TITLE, WIDTH - 2.0 * MARGIN) {
        text(&mut body, MARGIN, y, TITLE, "font-weight=\"bold\"", &line);
        y += TITLE + 5.0;
    }
    y = lines(&mut body, &figure.subtitle, y, GREY);
    y = draw_legend(&mut body, &legend, y + 4.0);
    y = panels(&mut body, figure, &legend, y);
    y = lines(
        &mut body,
        &format!("How to read: {}", figure.reads),
        y + 10.0,
        "#222222",
    );
    y = lines(
        &mut body,
        &format!("Not shown: {}", figure.hides),
        y,
        "#222222",
    );
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {y:.0}\" width=\"{WIDTH}\" height=\"{y:.0}\" \
         font-family=\"DejaVu Sans, Verdana, sans-serif\" font-size=\"{BODY}\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{body}</svg>\n"
    )
}

/// Wrapped text; where the next begins.
fn lines(out: &mut String, words: &str, mut y: f64, colour: &str) -> f64 {
    for line in wrapped(words, BODY, WIDTH - 2.0 * MARGIN) {
        text(out, MARGIN, y, BODY, &format!("fill=\"{colour}\""), &line);
        y += LEAD;
    }
    y
}

/// One line of text; `more` are attributes.
pub(super) fn text(out: &mut String, x: f64, y: f64, size: f64, more: &str, words: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" {more}>{}</text>",
        escaped(words)
    );
}

fn draw_legend(out: &mut String, legend: &Legend<'_>, mut y: f64) -> f64 {
    // A single series is named by the title.
    if legend.0.len() < 2 {
        return y;
    }
    let mut x = MARGIN;
    for name in &legend.0 {
        let room = 30.0 + width(name, BODY);
        if x > MARGIN && x + room > WIDTH - MARGIN {
            (x, y) = (MARGIN, y + LEAD + 3.0);
        }
        points::mark(out, x + 6.0, y - 4.0, legend.style(name), 5.5, "");
        text(out, x + 17.0, y, BODY, "", name);
        x += room;
    }
    y + LEAD
}

fn panels(out: &mut String, figure: &Figure, legend: &Legend<'_>, top: f64) -> f64 {
    let columns = figure.columns.clamp(1, 4);
    let cell = (WIDTH - 2.0 * MARGIN - GAP * (columns - 1) as f64) / columns as f64;
    let height = [390.0, 320.0, 280.0, 240.0][columns - 1];
    let mut y = top;
    for row in figure.panels.chunks(columns) {
        let bottom = row
            .iter()
            .map(|panel| below(panel, cell))
            .fold(0.0, f64::max);
        let above = row
            .iter()
            .map(|panel| above(panel, cell))
            .fold(0.0, f64::max);
        for (column, panel) in row.iter().enumerate() {
            let x = MARGIN + column as f64 * (cell + GAP);
            let area = Area {
                left: x + 62.0,
                top: y + above,
                right: x + cell - 12.0,
                bottom: y + above + height - 90.0,
            };
            draw_panel(out, panel, legend, area, x);
        }
        y += above + height - 90.0 + bottom + 12.0;
    }
    y
}

fn above(panel: &Panel, cell: f64) -> f64 {
    10.0 + LEAD * wrapped(&panel.title, 13.0, cell - 20.0).len() as f64
}

/// What the words under the axis need.
fn below(panel: &Panel, cell: f64) -> f64 {
    let names = bars::group_lines(&panel.marks, cell - 74.0);
    let label = if panel.x.label.is_empty() { 0.0 } else { 22.0 };
    14.0 + names.max(1) as f64 * 13.0 + label
}

fn draw_panel(out: &mut String, panel: &Panel, legend: &Legend<'_>, area: Area, x: f64) {
    let title = wrapped(&panel.title, 13.0, area.right - x - 8.0);
    for (number, line) in title.iter().enumerate() {
        let y = area.top - 10.0 - LEAD * (title.len() - 1 - number) as f64;
        text(out, x + 8.0, y, 13.0, "font-weight=\"bold\"", line);
    }
    let Some(plane) = plane(panel, area) else {
        let (x, y) = (
            (area.left + area.right) / 2.0,
            (area.top + area.bottom) / 2.0,
        );
        text(
            out,
            x,
            y,
            BODY,
            "text-anchor=\"middle\" fill=\"#666666\"",
            "nothing was measured",
        );
        return;
    };
    across(out, &plane, panel);
    match &panel.marks {
        Marks::Lines(series) => {
            upright(out, &plane, panel);
            points::lines(out, &plane, legend, series);
        }
        Marks::Dots(series) => {
            upright(out, &plane, panel);
            points::dots(out, &plane, legend, series);
        }
        Marks::Bars { groups, series } => bars::grouped(out, &plane, legend, groups, series),
        Marks::Stacked { bars, parts } => bars::stacked(out, &plane, legend, bars, parts),
    }
    rules(out, &plane, panel);
    labels(out, &plane, panel, x);
}

/// The scales that hold all of a panel; none where nothing was measured.
fn plane(panel: &Panel, area: Area) -> Option<Plane> {
    let (mut xs, mut ys) = (Vec::new(), Vec::new());
    match &panel.marks {
        Marks::Lines(series) => {
            for (x, spread) in series.iter().flat_map(|series| &series.points) {
                xs.push(*x);
                ys.extend([spread.median, spread.min, spread.max]);
            }
        }
        Marks::Dots(series) => {
            for (x, y) in series.iter().flat_map(|series| &series.points) {
                xs.push(*x);
                ys.push(*y);
            }
        }
        Marks::Bars { series, .. } => {
            let spreads = series
                .iter()
                .flat_map(|series| series.points.iter().flatten());
            // Room for the number above the bar.
            ys.extend(spreads.map(|spread| spread.max * 1.04));
        }
        Marks::Stacked { bars, parts } => {
            let heights = (0..bars.len()).map(|bar| bars::height(parts, bar) * 1.04);
            ys.extend(heights.filter(|height| *height != 0.0));
        }
    }
    let is_empty = !ys.iter().any(|y| y.is_finite());
    ys.extend(panel.rules.iter().map(|(at, _)| *at));
    ys.extend(panel.y.most);
    xs.extend(panel.x.most);
    // Bars are compared by their length, which a logarithm would falsify.
    let is_bars = matches!(panel.marks, Marks::Bars { .. } | Marks::Stacked { .. });
    let y_scale = if is_bars {
        Scale::Linear
    } else {
        panel.y.scale
    };
    (!is_empty).then(|| Plane {
        area,
        x: Span::of(panel.x.scale, xs.into_iter()),
        y: Span::of(y_scale, ys.into_iter()),
    })
}

/// Lines across, with the numbers of the y axis.
fn across(out: &mut String, plane: &Plane, panel: &Panel) {
    let Area { left, right, .. } = plane.area;
    for (value, said) in plane.y.ticks() {
        let Some(y) = plane.y(value) else { continue };
        let is_base = value == 0.0 && panel.y.scale == Scale::Linear;
        let colour = if is_base { "#888888" } else { "#e4e4e4" };
        let _ = writeln!(
            out,
            "<path d=\"M{left:.1} {y:.1}H{right:.1}\" stroke=\"{colour}\"/>"
        );
        text(out, left - 6.0, y + 4.0, TICK, "text-anchor=\"end\"", &said);
    }
}

/// Lines upright, with the numbers of the x axis; as many as have room.
fn upright(out: &mut String, plane: &Plane, panel: &Panel) {
    let Area { top, bottom, .. } = plane.area;
    let mut free = f64::NEG_INFINITY;
    for (value, said) in plane.x.ticks() {
        let Some(x) = plane.x(value) else { continue };
        let colour = if panel.x.scale == Scale::Linear {
            "#f2f2f2"
        } else {
            "#ececec"
        };
        let _ = writeln!(
            out,
            "<path d=\"M{x:.1} {top:.1}V{bottom:.1}\" stroke=\"{colour}\"/>"
        );
        let half = width(&said, TICK) / 2.0;
        if x - half > free {
            text(out, x, bottom + 16.0, TICK, "text-anchor=\"middle\"", &said);
            free = x + half + 2.0;
        }
    }
}

fn rules(out: &mut String, plane: &Plane, panel: &Panel) {
    for (value, word) in &panel.rules {
        let Some(y) = plane.y(*value) else { continue };
        let Area { left, right, .. } = plane.area;
        let _ = writeln!(
            out,
            "<path d=\"M{left:.1} {y:.1}H{right:.1}\" stroke=\"#aa0000\" stroke-dasharray=\"5 4\"/>"
        );
        let halo = "text-anchor=\"end\" fill=\"#aa0000\" stroke=\"#ffffff\" stroke-width=\"3\" paint-order=\"stroke\"";
        text(out, right - 4.0, y - 4.0, TICK, halo, word);
    }
}

fn labels(out: &mut String, plane: &Plane, panel: &Panel, x: f64) {
    let Area {
        left,
        top,
        right,
        bottom,
    } = plane.area;
    let middle = "text-anchor=\"middle\"";
    let names = bars::group_lines(&panel.marks, right - left).max(1);
    let below = bottom + 16.0 + names as f64 * 13.0 + 6.0;
    text(
        out,
        (left + right) / 2.0,
        below,
        BODY,
        middle,
        &panel.x.label,
    );
    let _ = writeln!(
        out,
        "<text transform=\"translate({:.1} {:.1}) rotate(-90)\" {middle}>{}</text>",
        x + 12.0,
        (top + bottom) / 2.0,
        escaped(&unit_of(&panel.y))
    );
}

/// A logarithmic axis says so: equal steps are equal ratios there.
fn unit_of(axis: &Axis) -> String {
    match axis.scale {
        Scale::Linear | Scale::Bytes => axis.label.clone(),
        Scale::Log10 | Scale::Log2 => format!("{} (log)", axis.label),
    }
}
