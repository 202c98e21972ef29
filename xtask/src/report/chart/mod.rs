//! Figures as values, and as SVG: light, readable on paper, nothing referred to outside.

mod axis;
mod bars;
mod frame;
mod points;
mod words;

use super::Spread;

pub(crate) use words::escaped;

/// One picture: panels side by side or one above the other, one legend for all, and a caption.
pub(crate) struct Figure {
    /// The file's name without its ending.
    pub(crate) name: String,
    pub(crate) title: String,
    /// The machine, the accelerator, "modelled": whatever a reader must not miss.
    pub(crate) subtitle: String,
    /// Panels in a row.
    pub(crate) columns: usize,
    pub(crate) panels: Vec<Panel>,
    /// One sentence on how to read it.
    pub(crate) reads: String,
    /// One sentence on what it does not show.
    pub(crate) hides: String,
}

/// A pair of axes and what is marked between them.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) marks: Marks,
    /// Dashed lines across, at a value, with a word.
    pub(crate) rules: Vec<(f64, String)>,
}

/// An axis; the label names its unit.
#[derive(Clone)]
pub(crate) struct Axis {
    pub(crate) label: String,
    pub(crate) scale: Scale,
    /// Reaches at least as far, so that panels can be compared.
    most: Option<f64>,
}

/// How values lie along an axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scale {
    /// From zero.
    Linear,
    Log10,
    /// Powers of two as numbers.
    Log2,
    /// Powers of two as sizes: 512, 4K, 1M.
    Bytes,
}

/// What a panel holds. Series of one name have one colour in all panels of a figure.
pub(crate) enum Marks {
    /// Medians joined by lines, each with its minimum and maximum.
    Lines(Vec<Series<(f64, Spread)>>),
    /// One dot per interval.
    // The guests' studies draw response time over time with it.
    #[allow(dead_code)]
    Dots(Vec<Series<(f64, f64)>>),
    /// A group for each name, a bar in it for each series; the y axis is linear, x is only a label.
    Bars {
        groups: Vec<String>,
        series: Vec<Series<Option<Spread>>>,
    },
    /// A bar for each name, its parts one above the other.
    Stacked {
        bars: Vec<String>,
        parts: Vec<Series<f64>>,
    },
}

/// Named values.
pub(crate) struct Series<T> {
    pub(crate) name: String,
    pub(crate) points: Vec<T>,
}

impl Axis {
    /// An axis by its label and scale.
    pub(crate) fn new(label: impl Into<String>, scale: Scale) -> Axis {
        Axis {
            label: label.into(),
            scale,
            most: None,
        }
    }

    /// The same, reaching at least as far as this.
    pub(crate) fn up_to(self, most: f64) -> Axis {
        Axis {
            most: Some(most),
            ..self
        }
    }
}

impl<T> Series<T> {
    /// A series by its name.
    pub(crate) fn new(name: impl Into<String>, points: Vec<T>) -> Series<T> {
        Series {
            name: name.into(),
            points,
        }
    }
}

impl Marks {
    fn names(&self) -> Vec<&str> {
        fn of<T>(series: &[Series<T>]) -> Vec<&str> {
            series.iter().map(|series| series.name.as_str()).collect()
        }
        match self {
            Marks::Lines(series) => of(series),
            Marks::Dots(series) => of(series),
            Marks::Bars { series, .. } => of(series),
            Marks::Stacked { parts, .. } => of(parts),
        }
    }
}

/// The figure as complete XML.
pub(crate) fn svg(figure: &Figure) -> String {
    frame::svg(figure)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Every element is closed in order, every `&` begins an entity, no attribute is open, no number is none.
    pub(crate) fn check(xml: &str) {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = xml;
        while let Some(at) = rest.find('<') {
            let (before, after) = rest.split_at(at);
            assert!(!before.contains('>'), "stray > in {before}");
            let end = after.find('>').expect("tag without end");
            let tag = &after[1..end];
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            let name = tag.trim_start_matches('/').split([' ', '/']).next();
            if tag.starts_with('/') {
                assert_eq!(open.pop(), name);
            } else if !tag.ends_with('/') {
                open.extend(name);
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
        assert!(!xml.contains("NaN") && !xml.contains("inf\""), "{xml}");
    }

    fn spread(median: f64) -> Spread {
        Spread {
            median,
            min: median * 0.9,
            max: median * 1.2,
        }
    }

    fn panel(marks: Marks, x: Scale, y: Scale) -> Panel {
        Panel {
            title: "a <panel> & \"more\"".to_owned(),
            x: Axis::new("block size, bytes", x),
            y: Axis::new("MB/s", y),
            marks,
            rules: vec![(1.0, "one".to_owned())],
        }
    }

    fn figure(panels: Vec<Panel>) -> Figure {
        Figure {
            name: "a".to_owned(),
            title: "Throughput <of> it".to_owned(),
            subtitle: "modelled".to_owned(),
            columns: 2,
            panels,
            reads: "Higher is better.".to_owned(),
            hides: "Latency.".to_owned(),
        }
    }

    fn every_kind(value: f64) -> Figure {
        let lines = || {
            Marks::Lines(vec![
                Series::new(
                    "ours",
                    vec![(512.0, spread(value)), (4096.0, spread(value * 3.0))],
                ),
                Series::new("theirs", vec![(512.0, spread(value / 2.0))]),
            ])
        };
        figure(vec![
            panel(lines(), Scale::Bytes, Scale::Linear),
            panel(lines(), Scale::Log10, Scale::Log10),
            panel(
                Marks::Dots(vec![Series::new("ours", vec![(0.0, value), (1.0, 2.0)])]),
                Scale::Linear,
                Scale::Log2,
            ),
            panel(
                Marks::Bars {
                    groups: vec!["depth 1".to_owned(), "depth 32".to_owned()],
                    series: vec![
                        Series::new("ours", vec![Some(spread(value)), None]),
                        Series::new("theirs", vec![None, Some(spread(value))]),
                    ],
                },
                Scale::Linear,
                Scale::Linear,
            ),
            panel(
                Marks::Stacked {
                    bars: vec!["QSD".to_owned(), "Cleave".to_owned()],
                    parts: vec![
                        Series::new("user", vec![value, 1.0]),
                        Series::new("kernel", vec![2.0, value]),
                    ],
                },
                Scale::Linear,
                Scale::Linear,
            ),
        ])
    }

    #[test]
    fn every_kind_of_mark_is_well_formed_and_whole() {
        let text = svg(&every_kind(7.0));
        check(&text);
        // Two lines of two and one point, twice; two dots.
        assert_eq!(text.matches("class=\"mark\"").count(), 3 + 3 + 2);
        // Two bars with values, four parts.
        assert_eq!(text.matches("class=\"bar\"").count(), 2 + 4);
        assert!(text.contains("Higher is better.") && text.contains("modelled"));
        assert!(text.contains("a &lt;panel&gt; &amp; &quot;more&quot;"));
    }

    #[test]
    fn odd_values_and_nothing_at_all_are_still_figures() {
        for value in [0.0, -1.0, 1e-9, 1e12, f64::NAN, f64::INFINITY] {
            check(&svg(&every_kind(value)));
        }
        check(&svg(&figure(Vec::new())));
        let empty = [
            Marks::Lines(Vec::new()),
            Marks::Dots(vec![Series::new("ours", Vec::new())]),
            Marks::Bars {
                groups: Vec::new(),
                series: Vec::new(),
            },
            Marks::Stacked {
                bars: vec!["a".to_owned()],
                parts: Vec::new(),
            },
        ];
        for marks in empty {
            check(&svg(&figure(vec![panel(
                marks,
                Scale::Linear,
                Scale::Log10,
            )])));
        }
    }
}
