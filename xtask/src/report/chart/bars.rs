//! Bars from zero: side by side in groups, or one part above the other.

use std::fmt::Write as _;

use super::frame::{Legend, Plane, text};
use super::points::whisker;
use super::words::{escaped, short, width, wrapped};
use super::{Marks, Series};
use crate::report::Spread;

const NAME: f64 = 11.0;
const VALUE: f64 = 10.0;
/// Of a group's room, what stays empty beside its bars.
const GAP_SHARE: f64 = 0.2;

/// A group for each name.
pub(super) fn grouped(
    out: &mut String,
    plane: &Plane,
    legend: &Legend<'_>,
    groups: &[String],
    series: &[Series<Option<Spread>>],
) {
    let room = room(plane, groups.len());
    let bar = room * (1.0 - GAP_SHARE) / series.len().max(1) as f64;
    // All or none: a number here and there would look like emphasis.
    let mut medians = series.iter().flat_map(|own| own.points.iter().flatten());
    let has_numbers = medians.all(|spread| width(&short(spread.median), VALUE) <= bar + 4.0);
    for (group, name) in groups.iter().enumerate() {
        let left = plane.area.left + room * group as f64;
        for (number, own) in series.iter().enumerate() {
            let Some(Some(spread)) = own.points.get(group) else {
                continue;
            };
            let x = left + room * GAP_SHARE / 2.0 + bar * number as f64;
            let said = format!(
                "{name}, {}: {} ({}–{})",
                own.name,
                short(spread.median),
                short(spread.min),
                short(spread.max)
            );
            let colour = legend.style(&own.name).colour;
            rect(
                out,
                plane,
                x,
                bar * 0.92,
                (0.0, spread.median),
                colour,
                &said,
            );
            whisker(out, plane, x + bar * 0.46, spread, "#222222");
            if has_numbers {
                number_above(out, plane, x + bar * 0.46, spread);
            }
        }
        name_below(out, plane, left, room, name);
    }
}

/// Beside the whisker it could not be read, so above it.
fn number_above(out: &mut String, plane: &Plane, x: f64, spread: &Spread) {
    if let Some(y) = plane.y(spread.max.max(spread.median)) {
        let more = "text-anchor=\"middle\" fill=\"#333333\"";
        text(out, x, y - 4.0, VALUE, more, &short(spread.median));
    }
}

/// A bar for each name.
pub(super) fn stacked(
    out: &mut String,
    plane: &Plane,
    legend: &Legend<'_>,
    bars: &[String],
    parts: &[Series<f64>],
) {
    let room = room(plane, bars.len());
    for (bar, name) in bars.iter().enumerate() {
        let left = plane.area.left + room * bar as f64;
        let mut base = 0.0;
        for part in parts {
            let value = finite(part.points.get(bar));
            let said = format!("{name}, {}: {}", part.name, short(value));
            let colour = legend.style(&part.name).colour;
            let (x, wide) = (left + room * 0.18, room * 0.64);
            rect(out, plane, x, wide, (base, base + value), colour, &said);
            base += value;
        }
        if let Some(y) = plane.y(base) {
            let more = "text-anchor=\"middle\" fill=\"#333333\"";
            text(out, left + room / 2.0, y - 4.0, VALUE, more, &short(base));
        }
        name_below(out, plane, left, room, name);
    }
}

/// How high a stacked bar is.
pub(super) fn height(parts: &[Series<f64>], bar: usize) -> f64 {
    parts.iter().map(|part| finite(part.points.get(bar))).sum()
}

/// How many lines the names under the bars take.
pub(super) fn group_lines(marks: &Marks, room: f64) -> usize {
    let names = match marks {
        Marks::Bars { groups, .. } => groups,
        Marks::Stacked { bars, .. } => bars,
        Marks::Lines(_) | Marks::Dots(_) => return 1,
    };
    let each = room / names.len().max(1) as f64 - 4.0;
    let lines = names.iter().map(|name| wrapped(name, NAME, each).len());
    lines.max().unwrap_or(1)
}

fn finite(value: Option<&f64>) -> f64 {
    value
        .copied()
        .filter(|value| value.is_finite() && *value > 0.0)
        .unwrap_or(0.0)
}

fn room(plane: &Plane, count: usize) -> f64 {
    (plane.area.right - plane.area.left) / count.max(1) as f64
}

fn name_below(out: &mut String, plane: &Plane, left: f64, room: f64, name: &str) {
    for (number, line) in wrapped(name, NAME, room - 4.0).iter().enumerate() {
        let y = plane.area.bottom + 15.0 + 13.0 * number as f64;
        text(
            out,
            left + room / 2.0,
            y,
            NAME,
            "text-anchor=\"middle\"",
            line,
        );
    }
}

fn rect(
    out: &mut String,
    plane: &Plane,
    x: f64,
    width: f64,
    (from, to): (f64, f64),
    colour: &str,
    said: &str,
) {
    let Some((low, high)) = plane.y(from).zip(plane.y(to)) else {
        return;
    };
    let _ = writeln!(
        out,
        "<rect class=\"bar\" x=\"{x:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{colour}\">\
         <title>{}</title></rect>",
        high.min(low),
        width.max(1.0),
        (low - high).abs(),
        escaped(said)
    );
}
