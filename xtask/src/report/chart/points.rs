//! Marks at a place: lines through medians, and dots.

use std::fmt::Write as _;

use super::Series;
use super::frame::{Legend, Plane, Style};
use super::words::{escaped, short};
use crate::report::Spread;

/// Circle, square, triangle, diamond.
pub(super) const SHAPES: usize = 4;

/// Medians joined in the order given, minimum and maximum as a thin upright line.
pub(super) fn lines(
    out: &mut String,
    plane: &Plane,
    legend: &Legend<'_>,
    series: &[Series<(f64, Spread)>],
) {
    for own in series {
        let style = legend.style(&own.name);
        let mut path = String::new();
        for (x, spread) in &own.points {
            let Some((x, y)) = plane.x(*x).zip(plane.y(spread.median)) else {
                continue;
            };
            let verb = if path.is_empty() { 'M' } else { 'L' };
            let _ = write!(path, "{verb}{x:.1} {y:.1}");
            whisker(out, plane, x, spread, style.colour);
        }
        if !path.is_empty() {
            let _ = writeln!(
                out,
                "<path d=\"{path}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.8\" stroke-linejoin=\"round\"/>",
                style.colour
            );
        }
        for (at, spread) in &own.points {
            let Some((x, y)) = plane.x(*at).zip(plane.y(spread.median)) else {
                continue;
            };
            let said = format!(
                "{}, {}: {} ({}–{})",
                own.name,
                short(*at),
                short(spread.median),
                short(spread.min),
                short(spread.max)
            );
            mark(out, x, y, style, 3.6, &said);
        }
    }
}

/// From the minimum to the maximum.
pub(super) fn whisker(out: &mut String, plane: &Plane, x: f64, spread: &Spread, colour: &str) {
    let Some((low, high)) = plane.y(spread.min).zip(plane.y(spread.max)) else {
        return;
    };
    if low - high < 1.0 {
        return;
    }
    let _ = writeln!(
        out,
        "<path d=\"M{x:.1} {low:.1}V{high:.1}M{:.1} {low:.1}h6M{:.1} {high:.1}h6\" stroke=\"{colour}\" \
         stroke-width=\"1.1\" stroke-opacity=\"0.75\"/>",
        x - 3.0,
        x - 3.0
    );
}

/// One for each value.
pub(super) fn dots(
    out: &mut String,
    plane: &Plane,
    legend: &Legend<'_>,
    series: &[Series<(f64, f64)>],
) {
    for own in series {
        let style = legend.style(&own.name);
        for (x, y) in &own.points {
            if let Some((x, y)) = plane.x(*x).zip(plane.y(*y)) {
                mark(out, x, y, style, 2.4, "");
            }
        }
    }
}

/// A shape around a place; `said` appears under the pointer.
pub(super) fn mark(out: &mut String, x: f64, y: f64, style: Style, size: f64, said: &str) {
    let path = match style.shape % SHAPES {
        0 => format!(
            "M{:.1} {y:.1}a{size} {size} 0 1 0 {} 0a{size} {size} 0 1 0 {} 0z",
            x - size,
            2.0 * size,
            -2.0 * size
        ),
        1 => format!(
            "M{:.1} {:.1}h{}v{}h{}z",
            x - size * 0.9,
            y - size * 0.9,
            size * 1.8,
            size * 1.8,
            -size * 1.8
        ),
        2 => format!(
            "M{x:.1} {:.1}L{:.1} {:.1}H{:.1}z",
            y - size * 1.15,
            x + size * 1.1,
            y + size * 0.85,
            x - size * 1.1
        ),
        _ => format!(
            "M{x:.1} {:.1}l{} {}l{} {}l{} {}z",
            y - size * 1.2,
            size * 1.2,
            size * 1.2,
            -size * 1.2,
            size * 1.2,
            -size * 1.2,
            -size * 1.2
        ),
    };
    // What a pointer finds is a value; the legend's own marks have nothing to say and are none.
    let class = if size > 5.0 { "key" } else { "mark" };
    let _ = write!(
        out,
        "<path class=\"{class}\" d=\"{path}\" fill=\"{}\"",
        style.colour
    );
    let _ = match said {
        "" => writeln!(out, "/>"),
        said => writeln!(out, "><title>{}</title></path>", escaped(said)),
    };
}
