//! A figure as a value: panels, their axes, and the data.

use std::fmt;

use crate::axis::Axis;

/// Median, minimum and maximum of a few rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The middle one, or the mean of the two in the middle.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// How many they are.
    pub count: usize,
}

impl Spread {
    /// Returns the spread of these values. `None`: there are no values.
    pub fn of(values: &[f64]) -> Option<Spread> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = [sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]];
        let median = f64::midpoint(middle[0], middle[1]);
        Some(Spread {
            median,
            min,
            max,
            count: sorted.len(),
        })
    }

    /// Converts it to another unit.
    #[must_use]
    pub fn times(self, factor: f64) -> Spread {
        self.map(|value| value * factor)
    }

    /// Applies a function that never falls.
    #[must_use]
    pub fn map(self, of: impl Fn(f64) -> f64) -> Spread {
        Spread {
            median: of(self.median),
            min: of(self.min),
            max: of(self.max),
            count: self.count,
        }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{:.2} ({:.2}–{:.2})", self.median, self.min, self.max)
    }
}

/// Panels side by side or one above the other, one legend for all, and a caption.
#[derive(Debug, Clone)]
pub struct Figure {
    /// Name of the file without its extension.
    pub name: String,
    /// Names a modelled drive or an emulated CPU, because a figure may be shown without its page.
    pub title: String,
    /// The machine, and what else a reader must not miss.
    pub subtitle: String,
    /// Panels in a row: two at most, and fewer where the names below bars need the room.
    pub columns: usize,
    /// In reading order.
    pub panels: Vec<Panel>,
    /// One sentence on how to read it.
    pub reads: String,
    /// One sentence on what it does not show.
    pub hides: String,
}

/// A pair of axes and what is drawn between them.
#[derive(Debug, Clone)]
pub struct Panel {
    /// Above the axes.
    pub title: String,
    /// Only the label is used where `marks` are bars.
    pub x: Axis,
    /// Always linear where `marks` are bars, because a logarithm would falsify their lengths.
    pub y: Axis,
    /// The data.
    pub marks: Marks,
}

/// The data of a panel. Series of one name have one colour in all panels of a figure, and a subject of the benchmarks has its own
/// in all figures.
#[derive(Debug, Clone)]
pub enum Marks {
    /// Medians, each with its minimum and maximum. Three and more are joined: a line through two would claim what lies between.
    Lines(Vec<Series<(f64, Spread)>>),
    /// Single values, not joined.
    Dots(Vec<Series<(f64, f64)>>),
    /// A group for each name, with a bar for each series.
    Bars {
        /// Names of the groups.
        groups: Vec<String>,
        /// A value for each group.
        series: Vec<Series<Option<Spread>>>,
    },
    /// A bar for each name, its parts one above the other. These have a legend of their own.
    Stacked {
        /// Names of the bars.
        bars: Vec<String>,
        /// A value for each bar.
        parts: Vec<Series<f64>>,
    },
}

/// Named values.
#[derive(Debug, Clone)]
pub struct Series<T> {
    pub(crate) name: String,
    pub(crate) look: Look,
    /// The values.
    pub points: Vec<T>,
    pub(crate) notes: Vec<(usize, String)>,
    pub(crate) hover: Vec<String>,
    pub(crate) shaded_to: Option<String>,
}

/// How a series stands out from the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Look {
    /// By a colour and a shape of its own.
    Distinct,
    /// By its place on a ramp from dark (0) to light (1).
    Ranked(f64),
    /// Drawn bold and above all others.
    Emphasised,
}

impl Series<(f64, Spread)> {
    /// Returns true if its points are joined by a line.
    pub(crate) fn is_joined(&self) -> bool {
        self.points.len() > 2
    }
}

impl<T> Series<T> {
    /// Makes a series with this name.
    pub fn new(name: impl Into<String>, points: Vec<T>) -> Series<T> {
        Series {
            name: name.into(),
            look: Look::Distinct,
            points,
            notes: Vec::new(),
            hover: Vec::new(),
            shaded_to: None,
        }
    }

    /// Takes its colour from its rank among series that are ordered, from 0 to 1.
    #[must_use]
    pub fn ranked(mut self, rank: f64) -> Series<T> {
        self.look = Look::Ranked(rank);
        self
    }

    /// Draws it bold and above all others, with a note at some of its points.
    #[must_use]
    pub fn emphasised(mut self, notes: Vec<(usize, String)>) -> Series<T> {
        (self.look, self.notes) = (Look::Emphasised, notes);
        self
    }

    /// Adds text that appears under the pointer, for each point, instead of its value alone.
    #[must_use]
    pub fn with_hover(mut self, hover: Vec<String>) -> Series<T> {
        self.hover = hover;
        self
    }

    /// Shades the band between its line and that of another series of the panel, behind all lines.
    #[must_use]
    pub fn shaded_to(mut self, other: impl Into<String>) -> Series<T> {
        self.shaded_to = Some(other.into());
        self
    }
}
