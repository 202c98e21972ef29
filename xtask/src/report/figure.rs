//! A view's figures: panels of bars, lines, dots or stacked bars, from raw lines.

use serde::Deserialize;

use super::Spread;
use super::chart::{Axis, Figure, Marks, Panel, Scale, Series};
use super::rounds::{Rounds, number};

/// A figure, or one for each text that `each` makes of the lines.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct View {
    name: String,
    /// With `{each}`.
    title: String,
    /// Instead of the section's suite.
    pub(super) suite: Option<String>,
    each: Option<String>,
    /// Behind the section's.
    #[serde(default)]
    subtitle: String,
    columns: usize,
    /// How it is read, and what it does not show.
    reads: String,
    hides: String,
    panel: Vec<PanelView>,
}

/// A panel, or one for each text that `each` makes of the lines.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PanelView {
    /// With `{each}`.
    title: String,
    each: Option<String>,
    #[serde(default, rename = "where")]
    conditions: Vec<String>,
    kind: Kind,
    /// The horizontal axis: a label, and an expression where `kind` is lines.
    #[serde(default)]
    x: String,
    at: Option<String>,
    #[serde(default)]
    x_scale: AxisScale,
    /// The vertical one.
    y: String,
    of: Option<String>,
    #[serde(default)]
    y_scale: AxisScale,
    /// Whether all panels that `each` makes reach as far.
    #[serde(default)]
    has_common_y: bool,
    /// A subject that values are divided by, round by round; what remains is shown in per cent above it.
    above: Option<String>,
    #[serde(default = "point")]
    groups: String,
    #[serde(default = "subject")]
    series: String,
    /// Of stacked bars: `name | expression`.
    #[serde(default)]
    parts: Vec<String>,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Bars,
    Lines,
    Stacked,
    /// Each line's `dots`, its rounds one behind the other.
    Dots,
}

#[derive(Deserialize, Clone, Copy, Default)]
#[serde(rename_all = "lowercase")]
enum AxisScale {
    #[default]
    Linear,
    Log2,
    Log10,
    Bytes,
}

fn point() -> String {
    "{point}".to_owned()
}

fn subject() -> String {
    "{subject}".to_owned()
}

impl View {
    /// Only those of which something was measured.
    pub(super) fn figures(&self, rounds: &Rounds<'_>, subtitle: &str) -> Vec<Figure> {
        let parts = divided(rounds, self.each.as_deref());
        let figures = parts
            .into_iter()
            .enumerate()
            .map(|(number, (each, rounds))| Figure {
                name: self
                    .name
                    .replace("{number}", &number.to_string())
                    .replace("{each}", &each),
                title: self.title.replace("{each}", &each),
                subtitle: format!("{subtitle}{}", self.subtitle),
                columns: self.columns,
                panels: self
                    .panel
                    .iter()
                    .flat_map(|view| view.panels(&rounds))
                    .collect(),
                reads: self.reads.clone(),
                hides: self.hides.clone(),
            });
        figures.filter(|figure| !figure.panels.is_empty()).collect()
    }
}

/// The lines by the texts of a template; all under an empty text without one.
fn divided<'a>(rounds: &Rounds<'a>, template: Option<&str>) -> Vec<(String, Rounds<'a>)> {
    let Some(template) = template else {
        return vec![(String::new(), rounds.clone())];
    };
    let texts = rounds.texts(template).into_iter();
    texts
        .map(|text| (text.clone(), rounds.that_say(template, &text)))
        .collect()
}

impl PanelView {
    fn panels(&self, rounds: &Rounds<'_>) -> Vec<Panel> {
        let rounds = rounds.only(&self.conditions);
        if rounds.lines.is_empty() {
            return Vec::new();
        }
        let of = self.of.as_deref().unwrap_or_default();
        let values = rounds.lines.iter().filter_map(|line| number(line, of));
        let most = self.has_common_y.then(|| values.fold(0.0, f64::max));
        let each = divided(&rounds, self.each.as_deref()).into_iter();
        each.map(|(each, rounds)| {
            let y = Axis::new(&self.y, self.y_scale.scale());
            Panel {
                title: self.title.replace("{each}", &each),
                x: Axis::new(&self.x, self.x_scale.scale()),
                y: match most {
                    Some(most) => y.up_to(most),
                    None => y,
                },
                marks: self.marks(&rounds),
            }
        })
        .collect()
    }

    fn marks(&self, rounds: &Rounds<'_>) -> Marks {
        match self.kind {
            Kind::Bars => Marks::Bars {
                groups: rounds.texts(&self.groups),
                series: self.series(rounds, |own| {
                    let groups = rounds.texts(&self.groups).into_iter();
                    groups
                        .map(|group| self.value(rounds, &own.that_say(&self.groups, &group)))
                        .collect()
                }),
            },
            Kind::Lines => Marks::Lines(self.series(rounds, |own| self.line(rounds, own))),
            Kind::Dots => Marks::Dots(self.series(rounds, dots)),
            Kind::Stacked => self.stacked(rounds),
        }
    }

    fn series<T>(
        &self,
        rounds: &Rounds<'_>,
        points: impl Fn(&Rounds<'_>) -> Vec<T>,
    ) -> Vec<Series<T>> {
        let all = divided(rounds, Some(&self.series)).into_iter();
        let all = all.map(|(name, own)| Series::new(name, points(&own)));
        all.filter(|series| !series.points.is_empty()).collect()
    }

    /// From left to right, a point of the suite each.
    fn line(&self, rounds: &Rounds<'_>, own: &Rounds<'_>) -> Vec<(f64, Spread)> {
        let at = self.at.as_deref().unwrap_or_default();
        let points = own.points().into_iter().filter_map(|point| {
            let here = own.that_say("{point}", &point);
            Some((here.spread(at)?.median, self.value(rounds, &here)?))
        });
        let mut points: Vec<_> = points.collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        points
    }

    fn value(&self, rounds: &Rounds<'_>, own: &Rounds<'_>) -> Option<Spread> {
        let of = self.of.as_deref().unwrap_or_default();
        let Some(base) = &self.above else {
            return own.spread(of);
        };
        let base = rounds.at(own.points().first()?, base);
        let ratio = own.ratio(&base, of).filter(|_| base.lines != own.lines)?;
        Some(ratio.map(|ratio| (ratio - 1.0) * 100.0))
    }

    fn stacked(&self, rounds: &Rounds<'_>) -> Marks {
        let bars = divided(rounds, Some(&self.groups));
        let parts = self.parts.iter().filter_map(|part| part.split_once(" | "));
        let parts = parts.map(|(name, of)| {
            let median = |own: &Rounds<'_>| own.spread(of).map_or(0.0, |spread| spread.median);
            Series::new(
                name,
                bars.iter()
                    .map(|(_, own)| median(own))
                    .collect::<Vec<f64>>(),
            )
        });
        Marks::Stacked {
            parts: parts
                .filter(|part| part.points.iter().any(|value| *value > 0.0))
                .collect(),
            bars: bars.into_iter().map(|(name, _)| name).collect(),
        }
    }
}

/// Seconds and milliseconds.
fn dots(own: &Rounds<'_>) -> Vec<(f64, f64)> {
    let mut found = Vec::new();
    for line in &own.lines {
        let before = number(line, "round - 1 * seconds").unwrap_or(0.0);
        for dot in line["dots"].as_array().into_iter().flatten() {
            if let (Some(ms), Some(us)) = (dot[0].as_f64(), dot[1].as_f64()) {
                found.push((before + ms / 1e3, us / 1e3));
            }
        }
    }
    found
}

impl AxisScale {
    fn scale(self) -> Scale {
        match self {
            AxisScale::Linear => Scale::Linear,
            AxisScale::Log2 => Scale::Log2,
            AxisScale::Log10 => Scale::Log10,
            AxisScale::Bytes => Scale::Bytes,
        }
    }
}
