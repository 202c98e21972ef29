//! Legends: which series have an entry, how it is marked, and its place.

use crate::figure::{Figure, Look, Marks, Series};
use crate::style::Style;
use crate::text::{CAPTION, width};

/// A name and what stands for it in the panels.
pub(crate) struct LegendEntry {
    pub(crate) name: String,
    pub(crate) style: Style,
    pub(crate) mark: LegendMark,
}

/// What stands before a name.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum LegendMark {
    /// For bars.
    Square,
    /// For lines: a piece of line with the point on it.
    Line,
    /// For points that are not joined.
    Point,
}

impl LegendMark {
    /// Returns the room that it takes, with the blank after it.
    pub(crate) fn width(self) -> i32 {
        match self {
            LegendMark::Square | LegendMark::Point => 17,
            LegendMark::Line => 32,
        }
    }
}

pub(crate) type Legend = Vec<LegendEntry>;

/// Returns the series that share the figure's legend.
pub(crate) fn legend(figure: &Figure) -> Legend {
    let mut found = Vec::new();
    for panel in &figure.panels {
        let title = &panel.title;
        match &panel.marks {
            Marks::Lines(series) => add(&mut found, title, series, |own| match own.is_joined() {
                true => LegendMark::Line,
                false => LegendMark::Point,
            }),
            Marks::Dots(series) => add(&mut found, title, series, |_| LegendMark::Point),
            Marks::Bars { series, .. } => add(&mut found, title, series, |_| LegendMark::Square),
            Marks::Stacked { .. } => {}
        }
    }
    let mut others = 0..;
    let entries = found.into_iter();
    let entries = entries.map(|(name, look, mark)| {
        let known = Style::of_subject(&name).filter(|_| look == Look::Distinct);
        let style = known.unwrap_or_else(|| Style::of(look, others.next().unwrap_or(0)));
        LegendEntry { name, style, mark }
    });
    entries.collect()
}

/// Adds the series of a panel that other panels did not have. One of its panel's name needs no other.
fn add<T>(
    found: &mut Vec<(String, Look, LegendMark)>,
    title: &str,
    series: &[Series<T>],
    mark: impl Fn(&Series<T>) -> LegendMark,
) {
    for own in series.iter().filter(|own| own.name != title) {
        match found.iter_mut().find(|(name, ..)| *name == own.name) {
            Some((_, _, known)) if *known == LegendMark::Point => *known = mark(own),
            Some(_) => {}
            None => found.push((own.name.clone(), own.look, mark(own))),
        }
    }
}

/// Returns the parts of a stacked bar, in colours that are not those of series.
pub(crate) fn part_legend(parts: &[Series<f64>]) -> Legend {
    let entries = parts.iter().enumerate();
    let entries = entries.map(|(at, part)| LegendEntry {
        name: part.name.clone(),
        style: Style::of_part(&part.name, at),
        mark: LegendMark::Square,
    });
    entries.collect()
}

/// Returns entries by row, each with its distance from the left.
pub(crate) fn legend_rows(legend: &Legend, room: i32) -> Vec<Vec<(i32, &LegendEntry)>> {
    let (mut rows, mut x) = (Vec::new(), room);
    for entry in legend {
        let own = entry.mark.width() + width(&entry.name, CAPTION) as i32 + 15;
        if x + own > room {
            rows.push(Vec::new());
            x = 0;
        }
        rows.last_mut()
            .into_iter()
            .for_each(|row| row.push((x, entry)));
        x += own;
    }
    rows
}
