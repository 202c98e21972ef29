//! Places of values along an axis, and its ticks.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};

use crate::text::{TICK, bytes, short, width};

/// An axis; the label names its unit.
#[derive(Debug, Clone)]
pub struct Axis {
    pub(crate) label: String,
    pub(crate) scale: Scale,
    pub(crate) most: Option<f64>,
}

/// How values lie along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// From zero.
    Linear,
    /// Equal steps are equal ratios.
    Log10,
    /// Powers of two as numbers.
    Log2,
    /// Powers of two as sizes: 512, 4K, 1M.
    Bytes,
}

impl Axis {
    /// Makes an axis from its label and scale.
    pub fn new(label: impl Into<String>, scale: Scale) -> Axis {
        Axis {
            label: label.into(),
            scale,
            most: None,
        }
    }

    /// Extends it at least as far as this, so that panels can be compared.
    #[must_use]
    pub fn up_to(self, most: f64) -> Axis {
        let most = Some(most);
        Axis { most, ..self }
    }

    /// Returns the label, with the scale where it is not obvious from the ticks.
    pub(crate) fn title(&self) -> String {
        match self.scale {
            Scale::Linear | Scale::Bytes => self.label.clone(),
            Scale::Log10 | Scale::Log2 => format!("{} (log)", self.label),
        }
    }

    /// Returns the axis on the page, long enough for all of the values. `headroom` is a share of its length, at either end that is not zero.
    pub(crate) fn ruler(&self, values: &[f64], headroom: f64, pixels: Range<i32>) -> Ruler {
        let scale = self.scale;
        let is_linear = scale == Scale::Linear;
        let places = values.iter().copied().chain(self.most);
        let places = places.filter_map(|value| scale.place(value));
        let places: Vec<f64> = places.chain(is_linear.then_some(0.0)).collect();
        let low = places.iter().copied().reduce(f64::min).unwrap_or(0.0);
        let high = places.iter().copied().reduce(f64::max).unwrap_or(0.0);
        // A single value still needs an axis.
        let length = if high - low > 1e-12 { high - low } else { 1.0 };
        let below = if is_linear && low == 0.0 {
            0.0
        } else {
            headroom
        };
        let mut ruler = Ruler {
            scale,
            span: low - below * length..low + length * (1.0 + headroom),
            pixels,
            ticks: Vec::new(),
        };
        ruler.ticks = ruler.ticks_with_room();
        ruler
    }
}

/// An axis on the page.
#[derive(Clone)]
pub(crate) struct Ruler {
    scale: Scale,
    span: Range<f64>,
    /// From the least value to the largest, so that an upright one runs backwards.
    pub(crate) pixels: Range<i32>,
    ticks: Vec<f64>,
}

impl Ruler {
    /// Returns the pixel of a value; `None` for one that the scale cannot show.
    pub(crate) fn at(&self, value: f64) -> Option<i32> {
        let place = self.scale.place(value)?;
        Some(self.map(&place, (self.pixels.start, self.pixels.end)))
    }

    /// Leaves the ticks out, for an axis of names.
    pub(crate) fn bare(mut self) -> Ruler {
        self.ticks.clear();
        self
    }

    /// Returns as many ticks as have room for their words.
    fn ticks_with_room(&self) -> Vec<f64> {
        let is_upright = self.pixels.end < self.pixels.start;
        let fits = |ticks: &Vec<f64>| {
            let words = ticks.iter().map(|place| self.scale.tick(*place));
            let widest = words.map(|words| width(&words, TICK)).fold(0.0, f64::max);
            let room = if is_upright { 32 } else { widest as i32 + 14 };
            let mut gaps = ticks.windows(2).map(|ends| {
                self.map(&ends[1], (0, self.length())) - self.map(&ends[0], (0, self.length()))
            });
            gaps.all(|gap| gap >= room)
        };
        let tries = (2..=20)
            .rev()
            .map(|count| self.scale.ticks(&self.span, count));
        tries.into_iter().find(fits).unwrap_or_default()
    }

    fn length(&self) -> i32 {
        (self.pixels.end - self.pixels.start).abs()
    }
}

/// For the mesh, whose values are places.
impl Ranged for Ruler {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, place: &f64, (from, to): (i32, i32)) -> i32 {
        let share = (place - self.span.start) / (self.span.end - self.span.start);
        from + (f64::from(to - from) * share).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.span.clone()
    }
}

impl ValueFormatter<f64> for Ruler {
    fn format_ext(&self, place: &f64) -> String {
        self.scale.tick(*place)
    }
}

impl Scale {
    /// Returns the position of a value; `None` if the scale cannot show it.
    pub(crate) fn place(self, value: f64) -> Option<f64> {
        let place = match self {
            Scale::Linear => value,
            Scale::Log10 => value.log10(),
            Scale::Log2 | Scale::Bytes => value.log2(),
        };
        place.is_finite().then_some(place)
    }

    /// Returns the value at a place, as text.
    pub(crate) fn tick(self, place: f64) -> String {
        match self {
            Scale::Linear => short(place),
            Scale::Log10 => short(10_f64.powf(place)),
            Scale::Log2 => short(place.exp2()),
            Scale::Bytes => bytes(place.exp2()),
        }
    }

    /// Places of round values, `count` of them at most.
    pub(crate) fn ticks(self, span: &Range<f64>, count: usize) -> Vec<f64> {
        let length = span.end - span.start;
        match self {
            Scale::Linear => multiples(span, nice(length / count as f64)),
            Scale::Log2 | Scale::Bytes => multiples(span, (length / count as f64).ceil().max(1.0)),
            Scale::Log10 => {
                let (low, high) = (10_f64.powf(span.start), 10_f64.powf(span.end));
                let sets = [&[1.0_f64, 2.0, 5.0][..], &[1.0, 3.0], &[1.0]].map(|times| {
                    let decades = multiples(&(span.start.floor()..span.end), 1.0).into_iter();
                    let all =
                        decades.flat_map(|at| times.iter().map(move |times| at + times.log10()));
                    all.filter(|at| span.contains(at)).collect::<Vec<f64>>()
                });
                match sets.into_iter().find(|set| set.len() <= count) {
                    Some(set) if set.len() > 2 || length >= 1.0 => set,
                    // Less than a decade: round steps of the value itself.
                    Some(_) => multiples(&(low..high), nice((high - low) / count as f64))
                        .into_iter()
                        .filter_map(|value| self.place(value))
                        .collect(),
                    None => multiples(span, (length / count as f64).ceil()),
                }
            }
        }
    }
}

fn multiples(span: &Range<f64>, step: f64) -> Vec<f64> {
    let (first, last) = (
        (span.start / step - 1e-9).ceil(),
        (span.end / step + 1e-9).floor(),
    );
    let count = (last - first + 1.0).clamp(0.0, 100.0) as usize;
    (0..count)
        .map(|number| (first + number as f64) * step)
        .collect()
}

/// Returns the least 1, 2 or 5 times a power of ten that is not less.
fn nice(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    let round = [1.0, 2.0, 5.0].map(|times| times * power);
    let found = round
        .into_iter()
        .find(|round| *round >= step * (1.0 - 1e-9));
    found.unwrap_or(10.0 * power)
}
