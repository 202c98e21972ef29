//! A panel: its axes, and the marks between them.

use std::ops::Range;

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use crate::axis::{Axis, Ruler, Scale};
use crate::draw::{
    BODY, DrawResult, FAMILY, FONT_SCALE, LEFT, NAME_LEAD, NOTE, Page, PanelBox, Position, RIGHT,
    SMALL, VALUE, has_upright_names, name_lines,
};
use crate::figure::{Look, Marks, Panel, Series, Spread};
use crate::style::{GREY, Style};
use crate::text::{bold_width, printable, short, width};

const GRID: RGBColor = RGBColor(228, 228, 228);
/// The grid shows through.
const BAND: RGBAColor = RGBAColor(102, 102, 102, 0.2);
/// A wider bar does not show more.
const BAR_MAX: f64 = 90.0;
/// The share of a group's room that stays empty beside its bars.
const GAP_SHARE: f64 = 0.2;
/// The share of its width that a bar fills, beside the gap to the next.
const BAR_SHARE: f64 = 0.92;
/// The width of a whisker's ends, with the blanks beside them.
const WHISKER: f64 = 9.0;
/// Pixels between points of one place.
const SHIFT_MAX: i32 = 7;

/// A panel's axes on the page.
struct Plane {
    x: Ruler,
    y: Ruler,
}

impl Plane {
    /// Axes that hold all of a panel; `None` where nothing was measured.
    fn of(panel: &Panel, wide: Range<i32>, high: Range<i32>) -> Option<Plane> {
        let (mut xs, mut ys, mut side) = (Vec::new(), Vec::new(), 0.04);
        let of_spread = |spread: &Spread| [spread.median, spread.min, spread.max];
        match &panel.marks {
            Marks::Lines(series) => {
                let points = || series.iter().flat_map(|own| &own.points);
                // Room for points beside each other.
                if !series.iter().any(Series::is_joined) {
                    side = 0.15;
                }
                xs.extend(points().map(|(x, _)| *x));
                ys.extend(points().flat_map(|(_, spread)| of_spread(spread)));
            }
            Marks::Dots(series) => {
                (xs, ys) = series
                    .iter()
                    .flat_map(|own| own.points.iter().copied())
                    .unzip();
            }
            Marks::Bars { series, .. } => {
                let spreads = series.iter().flat_map(|own| own.points.iter().flatten());
                ys.extend(spreads.flat_map(of_spread));
            }
            Marks::Stacked { bars, parts } => {
                let height = |bar| parts.iter().map(|part| part_value(part, bar)).sum();
                ys.extend(
                    (0..bars.len())
                        .map(height)
                        .filter(|height: &f64| *height > 0.0),
                );
            }
        }
        let is_bars = panel.marks.are_bars();
        // A logarithm would falsify the lengths of bars, and above a bar stands its value.
        let (scale, headroom) = match &panel.marks {
            Marks::Bars { groups, series } => {
                let room = f64::from(wide.end - wide.start) / groups.len().max(1) as f64;
                match Numbers::of(series, bar_width(room, series.len())) {
                    Numbers::Upright => (Scale::Linear, 0.22),
                    Numbers::Level | Numbers::Absent => (Scale::Linear, 0.12),
                }
            }
            Marks::Stacked { .. } => (Scale::Linear, 0.12),
            Marks::Lines(_) | Marks::Dots(_) => (panel.y.scale, 0.05),
        };
        let y = Axis {
            scale,
            ..panel.y.clone()
        };
        ys.iter().find_map(|value| scale.place(*value))?;
        let x = panel.x.ruler(&xs, side, wide);
        let x = if is_bars { x.bare() } else { x };
        Some(Plane {
            x,
            y: y.ruler(&ys, headroom, high),
        })
    }

    fn at(&self, x: f64, y: f64) -> Option<Position> {
        self.x.at(x).zip(self.y.at(y))
    }
}

impl Marks {
    fn are_bars(&self) -> bool {
        matches!(self, Marks::Bars { .. } | Marks::Stacked { .. })
    }
}

/// How the medians of bars are written.
#[derive(Clone, Copy, PartialEq)]
enum Numbers {
    Level,
    /// From below to above, where bars are narrow.
    Upright,
    /// Bars are narrower than a line of text.
    Absent,
}

impl Numbers {
    /// Chooses for all bars of a panel, because a number here and there would look like emphasis.
    fn of(series: &[Series<Option<Spread>>], bar: f64) -> Numbers {
        let room = match series.iter().all(has_no_whiskers) {
            true => bar,
            false => beside_whisker(bar),
        };
        let mut medians = series.iter().flat_map(|own| own.points.iter().flatten());
        match medians.all(|spread| width(&short(spread.median), VALUE.0) <= room) {
            true => Numbers::Level,
            false if room >= VALUE.0 => Numbers::Upright,
            false => Numbers::Absent,
        }
    }
}

/// Returns the width of a bar with the gap on its right, in a group that has this room.
fn bar_width(room: f64, count: usize) -> f64 {
    (room * (1.0 - GAP_SHARE) / count.max(1) as f64).min(BAR_MAX)
}

/// Returns the width of the part of a bar on the left of its whisker.
fn beside_whisker(bar: f64) -> f64 {
    bar * BAR_SHARE - WHISKER.max(bar * 0.2)
}

fn has_no_whiskers(series: &Series<Option<Spread>>) -> bool {
    let mut spreads = series.points.iter().flatten();
    spreads.all(|spread| spread.max - spread.min <= f64::EPSILON * spread.max.abs())
}

/// Lines that words must not touch.
type Taken = Vec<(Position, Position)>;
/// Pixels that words cover.
type WordBox = (Range<i32>, Range<i32>);

impl Page<'_> {
    /// Draws all of a panel but its title.
    pub(crate) fn panel(&mut self, panel: &Panel, cell: &PanelBox) -> DrawResult<()> {
        let (left, right) = (cell.x + LEFT, cell.x + cell.width - RIGHT);
        let (top, bottom) = (cell.y + cell.above, cell.y + cell.above + cell.plot);
        let Some(plane) = Plane::of(panel, left..right, bottom..top) else {
            let middle = ((left + right) / 2, (top + bottom) / 2);
            return self.text(middle, BODY, HPos::Center, "nothing was measured");
        };
        self.axes(panel, &plane, cell)?;
        match &panel.marks {
            Marks::Lines(series) => self.joined(&plane, series),
            Marks::Dots(series) => self.dots(&plane, series),
            Marks::Bars { groups, series } => self.bars(&plane, &panel.title, groups, series),
            Marks::Stacked { bars, parts } => self.stacked(&plane, bars, parts, cell),
        }
    }

    fn axes(&self, panel: &Panel, plane: &Plane, cell: &PanelBox) -> DrawResult<()> {
        let size = (cell.width, cell.plot + cell.below);
        let outer = self
            .root
            .clone()
            .shrink((cell.x, cell.y + cell.above), size);
        let font = |size| (FAMILY, size * FONT_SCALE);
        let mut chart = ChartBuilder::on(&outer)
            .margin_right(RIGHT)
            .x_label_area_size(cell.below)
            .y_label_area_size(LEFT)
            .build_cartesian_2d(plane.x.clone(), plane.y.clone())?;
        let (is_bars, y) = (panel.marks.are_bars(), &panel.y);
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(GREY)
            .set_all_tick_mark_size(3)
            .label_style(font(SMALL.0))
            .axis_desc_style(font(BODY.0))
            .x_desc(printable(&panel.x.label))
            .y_desc(printable(&if is_bars {
                y.label.clone()
            } else {
                y.title()
            }))
            .draw()
    }

    fn joined(&mut self, plane: &Plane, series: &[Series<(f64, Spread)>]) -> DrawResult<()> {
        let mut taken = Vec::new();
        // An emphasised series lies above the others.
        let mut ordered: Vec<_> = series.iter().zip(shifts(plane, series)).collect();
        ordered.sort_by_key(|(own, _)| own.look == Look::Emphasised);
        self.bands(plane, series)?;
        for (own, shift) in &ordered {
            let style = self.style(&own.name);
            let mut line = Vec::new();
            for (number, (x, spread)) in own.points.iter().enumerate() {
                let Some((across, y)) = plane.at(*x, spread.median) else {
                    continue;
                };
                let at = (across + shift, y);
                self.whisker(plane, at.0, spread, (style.colour, 1), &mut taken)?;
                line.push(at);
                let value = || format!("{}, {}: {}", own.name, short(*x), said(spread));
                self.tip(at, &own.hover.get(number).cloned().unwrap_or_else(value));
            }
            taken.extend(line.iter().map(|at| (*at, *at)));
            if own.is_joined() {
                taken.extend(line.windows(2).map(|ends| (ends[0], ends[1])));
                self.path(line.clone(), style.colour, style.stroke)?;
            }
            line.into_iter().try_for_each(|at| self.mark(at, style))?;
        }
        let mut notes = Vec::new();
        for (own, _) in ordered {
            for (number, words) in &own.notes {
                let (x, spread) = own.points[*number];
                let Some(at) = plane.at(x, spread.median) else {
                    continue;
                };
                self.note(plane, at, words, &mut taken, &mut notes)?;
            }
        }
        Ok(())
    }

    /// Shades what lies between two lines: the corners go along one and back along the other.
    fn bands(&self, plane: &Plane, series: &[Series<(f64, Spread)>]) -> DrawResult<()> {
        let line = |own: &Series<(f64, Spread)>| -> Vec<Position> {
            let places = own.points.iter();
            let places = places.filter_map(|(x, spread)| plane.at(*x, spread.median));
            places.collect()
        };
        for own in series {
            let is_other = |other: &&Series<_>| {
                own.shaded_to.as_ref() == Some(&other.name) && own.is_joined() && other.is_joined()
            };
            let Some(other) = series.iter().find(is_other) else {
                continue;
            };
            let corners = line(own).into_iter().chain(line(other).into_iter().rev());
            let corners = corners.collect::<Vec<Position>>();
            self.root.draw(&Polygon::new(corners, BAND))?;
        }
        Ok(())
    }

    /// Draws a line from the minimum to the maximum, where they are apart.
    fn whisker(
        &self,
        plane: &Plane,
        x: i32,
        spread: &Spread,
        (colour, stroke): (RGBColor, u32),
        taken: &mut Taken,
    ) -> DrawResult<()> {
        let ends = plane.y.at(spread.min).zip(plane.y.at(spread.max));
        let Some((low, high)) = ends.filter(|(low, high)| low - high > 2) else {
            return Ok(());
        };
        let bar = |y| vec![(x - 3, y), (x + 3, y)];
        taken.push(((x, low), (x, high)));
        for line in [vec![(x, low), (x, high)], bar(low), bar(high)] {
            self.path(line, colour, stroke)?;
        }
        Ok(())
    }

    /// Draws words about a point, at the nearest place where they touch no line and no other words, and the line from them to the
    /// point crosses no other words either.
    fn note(
        &self,
        plane: &Plane,
        at: Position,
        words: &str,
        taken: &mut Taken,
        notes: &mut Vec<WordBox>,
    ) -> DrawResult<()> {
        let half = bold_width(words, NOTE.0) as i32 / 2 + 4;
        let around = |(x, y): Position| (x - half..x + half, y - 15..y + 7);
        let (wide, high) = (&plane.x.pixels, &plane.y.pixels);
        let leader = |place: Position| {
            let (own_wide, own_high) = around(place);
            let edge = if place.1 < at.1 {
                own_high.end
            } else {
                own_high.start
            };
            let from = (at.0.clamp(own_wide.start, own_wide.end), edge);
            ((edge - at.1).abs() > 12 || !own_wide.contains(&at.0)).then_some((from, at))
        };
        let is_free = |place: &Position| {
            let (own_wide, own_high) = around(*place);
            let is_inside = own_wide.start > wide.start && own_wide.end < wide.end;
            let is_inside = is_inside && own_high.start > high.end && own_high.end < high.start;
            let is_crossed =
                |ends: (Position, Position)| notes.iter().any(|own| crosses(ends, own));
            is_inside
                && !taken.iter().any(|ends| crosses(*ends, &around(*place)))
                && leader(*place).is_none_or(|ends| !is_crossed(ends))
        };
        let steps = (-40..=40).flat_map(|up| (-40..=40).map(move |right| (right * 10, up * 6)));
        let mut places: Vec<Position> = steps.map(|(x, y)| (at.0 + x, at.1 + y)).collect();
        places.sort_by_key(|(x, y)| (x - at.0).pow(2) + 4 * (y - at.1).pow(2));
        let Some((x, y)) = places.into_iter().find(is_free) else {
            return Ok(());
        };
        if let Some((from, to)) = leader((x, y)) {
            self.path(vec![from, to], GREY, 1)?;
            taken.push((from, to));
        }
        let (own_wide, own_high) = around((x, y));
        let rows = own_high.clone().step_by(5);
        taken.extend(rows.map(|y| ((own_wide.start, y), (own_wide.end, y))));
        notes.push((own_wide, own_high));
        self.text((x, y), NOTE, HPos::Center, words)
    }

    fn dots(&mut self, plane: &Plane, series: &[Series<(f64, f64)>]) -> DrawResult<()> {
        for own in series {
            let style = Style {
                size: 2.0,
                ..self.style(&own.name)
            };
            let places = own.points.iter().filter_map(|(x, y)| plane.at(*x, *y));
            places.into_iter().try_for_each(|at| self.mark(at, style))?;
        }
        Ok(())
    }

    fn bars(
        &mut self,
        plane: &Plane,
        title: &str,
        groups: &[String],
        series: &[Series<Option<Spread>>],
    ) -> DrawResult<()> {
        let room = self.names_below(plane, groups)?;
        let bar = bar_width(room, series.len());
        let numbers = Numbers::of(series, bar);
        let middle = match series.iter().all(has_no_whiskers) {
            true => bar * BAR_SHARE / 2.0,
            false => beside_whisker(bar) / 2.0,
        };
        let whisker = match numbers {
            Numbers::Absent => bar * BAR_SHARE / 2.0,
            Numbers::Level | Numbers::Upright => beside_whisker(bar) + WHISKER / 2.0,
        };
        for (number, own) in series.iter().enumerate() {
            // Bars without a name of their own stand for the names below them.
            let shared = (own.name != title).then(|| self.style(&own.name));
            for ((group, name), spread) in groups.iter().enumerate().zip(&own.points) {
                let Some(spread) = spread else { continue };
                let style = shared.unwrap_or_else(|| Style::of_bar(name));
                let x =
                    room * (group as f64 + 0.5) + bar * (number as f64 - series.len() as f64 / 2.0);
                let x = f64::from(plane.x.pixels.start) + x;
                let whose = match own.name == title {
                    true => name.clone(),
                    false => format!("{name}, {}", own.name),
                };
                let tip = format!("{whose}: {}", said(spread));
                let (sides, ends) = ((x, x + bar * BAR_SHARE), (0.0, spread.median));
                self.bar(plane, sides, ends, style.colour, &tip)?;
                // A black line would not be seen on a dark bar.
                for line in [(WHITE, 3), (BLACK, 1)] {
                    let at = (x + whisker) as i32;
                    self.whisker(plane, at, spread, line, &mut Vec::new())?;
                }
                if let Some(end) = plane.y.at(spread.median) {
                    let at = ((x + middle) as i32, end);
                    self.number(numbers, at, spread.median)?;
                }
            }
        }
        Ok(())
    }

    /// Writes a median at the end of its bar.
    fn number(&self, numbers: Numbers, (x, end): Position, value: f64) -> DrawResult<()> {
        let words = short(value);
        match (numbers, value >= 0.0) {
            (Numbers::Level, true) => self.text((x, end - 4), VALUE, HPos::Center, &words),
            (Numbers::Level, false) => self.text((x, end + 13), VALUE, HPos::Center, &words),
            (Numbers::Upright, true) => self.upright((x, end - 4), VALUE, HPos::Left, &words),
            (Numbers::Upright, false) => self.upright((x, end + 4), VALUE, HPos::Right, &words),
            (Numbers::Absent, _) => Ok(()),
        }
    }

    fn stacked(
        &mut self,
        plane: &Plane,
        bars: &[String],
        parts: &[Series<f64>],
        cell: &PanelBox,
    ) -> DrawResult<()> {
        let legend = self.parts(parts, cell)?;
        let room = self.names_below(plane, bars)?;
        for (bar, name) in bars.iter().enumerate() {
            let middle = f64::from(plane.x.pixels.start) + room * (bar as f64 + 0.5);
            let half = (room * (1.0 - GAP_SHARE)).min(BAR_MAX) / 2.0;
            let mut base = 0.0;
            for (part, entry) in parts.iter().zip(&legend) {
                let value = part_value(part, bar);
                let tip = format!("{name}, {}: {}", part.name, short(value));
                let (sides, ends) = ((middle - half, middle + half), (base, base + value));
                self.bar(plane, sides, ends, entry.style.colour, &tip)?;
                base += value;
            }
            if let Some(y) = plane.y.at(base) {
                let at = (middle as i32, y - 5);
                self.text(at, VALUE, HPos::Center, &short(base))?;
            }
        }
        Ok(())
    }

    fn bar(
        &mut self,
        plane: &Plane,
        (left, right): (f64, f64),
        (from, to): (f64, f64),
        colour: RGBColor,
        tip: &str,
    ) -> DrawResult<()> {
        let ends = plane.y.at(from).zip(plane.y.at(to));
        let Some((low, high)) = ends.filter(|(low, high)| low != high) else {
            return Ok(());
        };
        let (left, right) = (left as i32, right.max(left + 1.0) as i32);
        self.tip(((left + right) / 2, high), tip);
        self.root.draw(&Rectangle::new(
            [(left, high), (right, low)],
            colour.filled(),
        ))
    }

    /// Draws names under groups of bars. Returns the room of one group.
    fn names_below(&self, plane: &Plane, groups: &[String]) -> DrawResult<f64> {
        let (pixels, bottom) = (&plane.x.pixels, plane.y.pixels.start);
        let room = f64::from(pixels.end - pixels.start) / groups.len().max(1) as f64;
        let is_upright = has_upright_names(groups, pixels.end - pixels.start);
        for (group, name) in groups.iter().enumerate() {
            let middle = pixels.start + (room * (group as f64 + 0.5)) as i32;
            if is_upright {
                self.upright((middle, bottom + 8), SMALL, HPos::Right, name)?;
                continue;
            }
            let lines = name_lines(name, pixels.end - pixels.start, groups.len());
            for (line, y) in lines
                .iter()
                .zip((bottom + 17..).step_by(NAME_LEAD as usize))
            {
                self.text((middle, y), SMALL, HPos::Center, line)?;
            }
        }
        Ok(room)
    }
}

/// Returns how far to the right each series lies: without lines, points of one place would hide each other and their whiskers.
fn shifts(plane: &Plane, series: &[Series<(f64, Spread)>]) -> Vec<i32> {
    let points = series.iter().flat_map(|own| &own.points);
    let mut places: Vec<i32> = points.filter_map(|(x, _)| plane.x.at(*x)).collect();
    places.sort_unstable();
    places.dedup();
    let gaps = places.windows(2).map(|ends| ends[1] - ends[0]);
    let count = series.len() as i32;
    let step = match series.iter().any(Series::is_joined) {
        true => 0,
        false => SHIFT_MAX.min(gaps.min().unwrap_or(i32::MAX) / (count + 1)),
    };
    (0..count)
        .map(|at| (2 * at - count + 1) * step / 2)
        .collect()
}

/// Returns true if a line passes through a box.
fn crosses(((x, y), (to_x, to_y)): (Position, Position), (wide, high): &WordBox) -> bool {
    let steps = ((to_x - x).abs().max((to_y - y).abs()) / 3).max(1);
    let part = |from: i32, to: i32, step: i32| from + (to - from) * step / steps;
    (0..=steps)
        .any(|step| wide.contains(&part(x, to_x, step)) && high.contains(&part(y, to_y, step)))
}

fn part_value(part: &Series<f64>, bar: usize) -> f64 {
    let value = part.points.get(bar).copied();
    value
        .filter(|value| value.is_finite() && *value > 0.0)
        .unwrap_or(0.0)
}

fn said(spread: &Spread) -> String {
    let [median, min, max] = [spread.median, spread.min, spread.max].map(short);
    format!("{median} ({min}–{max})")
}
