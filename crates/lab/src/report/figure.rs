//! A view's figures: panels of bars, lines, dots or stacked bars, from raw lines.

use cleave_chart::{Axis, Figure, Marks, Panel, Scale, Series, Spread};
use serde::Deserialize;

use super::rounds::{Rounds, number};

/// A figure, or one for each text that `each` makes of the lines.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FigureView {
    name: String,
    /// May contain `{each}`.
    title: String,
    /// Instead of the section's suite.
    pub(super) suite: Option<String>,
    #[serde(default)]
    each: String,
    /// Appended to the section's subtitle.
    #[serde(default)]
    subtitle: String,
    columns: usize,
    /// How to read the figure, and its limits.
    reads: String,
    hides: String,
    panel: Vec<PanelView>,
}

/// A panel, or one for each text that `each` makes of the lines.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PanelView {
    /// May contain `{each}`.
    title: String,
    #[serde(default)]
    each: String,
    #[serde(default, rename = "where")]
    conditions: Vec<String>,
    kind: Kind,
    /// The horizontal axis: a label, and an expression where `kind` is lines.
    #[serde(default)]
    x: String,
    #[serde(default)]
    at: String,
    #[serde(default = "linear", with = "AxisScale")]
    x_scale: Scale,
    /// The vertical one.
    y: String,
    #[serde(default)]
    of: String,
    #[serde(default = "linear", with = "AxisScale")]
    y_scale: Scale,
    /// Has all panels that `each` makes reach equally far.
    #[serde(default)]
    has_common_y: bool,
    /// A subject that values are divided by, round by round; the rest is shown in per cent above it.
    above: Option<String>,
    /// Two series between whose lines the area is shaded.
    band: Option<[String; 2]>,
    #[serde(default = "point")]
    groups: String,
    #[serde(default = "subject")]
    series: String,
    /// Colours the series by their order, from dark to light.
    #[serde(default)]
    is_ranked: bool,
    /// The parts of stacked bars: `name | expression`.
    #[serde(default)]
    parts: Vec<String>,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Bars,
    Lines,
    Stacked,
    /// Each line's `dots`, its rounds one after the other.
    Dots,
}

#[derive(Deserialize)]
#[serde(remote = "Scale", rename_all = "lowercase")]
enum AxisScale {
    Linear,
    Log2,
    Log10,
    Bytes,
}

fn linear() -> Scale {
    Scale::Linear
}

fn point() -> String {
    "{point}".to_owned()
}

fn subject() -> String {
    "{subject}".to_owned()
}

impl FigureView {
    /// Makes the figures of which something was measured.
    pub(super) fn figures(&self, rounds: &Rounds<'_>, subtitle: &str) -> Vec<Figure> {
        let parts = rounds.divided(&self.each).into_iter().enumerate();
        let figures = parts.map(|(number, (each, rounds))| {
            let name = self.name.replace("{number}", &number.to_string());
            let panels = self.panel.iter().flat_map(|view| view.panels(&rounds));
            Figure {
                name: name.replace("{each}", &each),
                title: self.title.replace("{each}", &each),
                subtitle: format!("{subtitle}{}", self.subtitle),
                columns: self.columns,
                panels: panels.collect(),
                reads: self.reads.clone(),
                hides: self.hides.clone(),
            }
        });
        figures.filter(|figure| !figure.panels.is_empty()).collect()
    }
}

impl PanelView {
    fn panels(&self, rounds: &Rounds<'_>) -> Vec<Panel> {
        let rounds = rounds.only(&self.conditions);
        let values: Vec<f64> = match self.kind {
            Kind::Dots => dots(&rounds).into_iter().map(|dot| dot.1).collect(),
            _ => {
                let lines = rounds.lines.iter();
                lines.filter_map(|line| number(line, &self.of)).collect()
            }
        };
        let most = values.into_iter().fold(0.0, f64::max);
        let most = self.has_common_y.then_some(most);
        let each = rounds.divided(&self.each).into_iter();
        let panels = each.map(|(each, rounds)| {
            let y = Axis::new(&self.y, self.y_scale);
            Panel {
                title: capitalised(&self.title.replace("{each}", &each)),
                x: Axis::new(&self.x, self.x_scale),
                y: match most {
                    Some(most) => y.up_to(most),
                    None => y,
                },
                marks: self.marks(&rounds),
            }
        });
        panels.collect()
    }

    fn marks(&self, rounds: &Rounds<'_>) -> Marks {
        let groups = rounds.texts(&self.groups);
        let bars = |own: &Rounds<'_>| {
            let groups = groups.iter().map(|group| own.that_say(&self.groups, group));
            groups.map(|own| self.value(rounds, &own)).collect()
        };
        match self.kind {
            Kind::Bars => Marks::Bars {
                series: self.series(rounds, bars),
                groups,
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
        let all = rounds.divided(&self.series);
        let last = all.len().saturating_sub(1).max(1) as f64;
        let all = all.into_iter().enumerate();
        let all = all.map(|(at, (name, own))| {
            let series = Series::new(&name, points(&own));
            let series = match self.is_ranked {
                true => series.ranked(at as f64 / last),
                false => series,
            };
            match &self.band {
                Some([from, to]) if *from == name => series.shaded_to(to),
                _ => series,
            }
        });
        all.filter(|series| !series.points.is_empty()).collect()
    }

    /// Returns the points of the suite, from left to right.
    fn line(&self, rounds: &Rounds<'_>, own: &Rounds<'_>) -> Vec<(f64, Spread)> {
        let points = own.divided("{point}").into_iter();
        let points = points.filter_map(|(_, here)| {
            Some((here.spread(&self.at)?.median, self.value(rounds, &here)?))
        });
        let mut points: Vec<_> = points.collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        points
    }

    fn value(&self, rounds: &Rounds<'_>, own: &Rounds<'_>) -> Option<Spread> {
        let Some(base) = &self.above else {
            return own.spread(&self.of);
        };
        let base = rounds.at(own.points().first()?, base);
        let ratio = own
            .ratio(&base, &self.of)
            .filter(|_| base.lines != own.lines)?;
        Some(ratio.map(|ratio| (ratio - 1.0) * 100.0))
    }

    fn stacked(&self, rounds: &Rounds<'_>) -> Marks {
        let (bars, owns): (Vec<_>, Vec<_>) = rounds.divided(&self.groups).into_iter().unzip();
        let parts = self.parts.iter().filter_map(|part| part.split_once(" | "));
        let parts = parts.map(|(name, of)| {
            let median = |own: &Rounds<'_>| own.spread(of).map_or(0.0, |spread| spread.median);
            Series::new(name, owns.iter().map(median).collect())
        });
        let is_seen = |part: &Series<f64>| part.points.iter().any(|value| *value > 0.0);
        let parts = parts.filter(is_seen).collect();
        Marks::Stacked { bars, parts }
    }
}

/// Returns a title that may begin with a subject's name.
fn capitalised(title: &str) -> String {
    let mut letters = title.chars();
    let first = letters.next().into_iter().flat_map(char::to_uppercase);
    first.chain(letters).collect()
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::view::SECTIONS;
    use super::*;

    fn views() -> impl Iterator<Item = &'static FigureView> {
        SECTIONS.iter().flat_map(|section| &section.figure)
    }

    #[test]
    fn a_panel_begins_with_a_capital_letter_whatever_it_is_of() {
        let is_small = |title: &str| title.starts_with(char::is_lowercase);
        let panels = views().flat_map(|view| &view.panel);
        for PanelView { title, .. } in panels {
            assert!(!is_small(title), "{title}");
        }
        let line =
            json!({"point": "a", "subject": "split off", "depth": 1, "result": {"mb_s": 1.0}});
        let lines: Vec<&Value> = vec![&line];
        let view = "title = '{each}'\neach = '{subject}'\nkind = 'lines'\nat = 'depth'\ny = 'MB/s'\nof = 'mb_s'";
        let view: PanelView = toml::from_str(view).unwrap();
        let panels = view.panels(&Rounds { lines });
        assert_eq!(panels[0].title, "Split off");
    }

    #[test]
    fn the_matrix_has_the_probes_points_and_the_drivers() {
        // The probe reports megabytes, the driver mebibytes.
        let line = |subject: &str, result| {
            json!({
                "point": "a", "subject": subject, "round": 1, "disk": "p3700 (modelled)", "outstanding_bytes": 524_288,
                "depth": 1, "result": result,
            })
        };
        let lines = [
            line("bare", json!({"mb_s": 104.8576})),
            line("split off", json!({"mib_s": 100.0})),
        ];
        let rounds = Rounds {
            lines: lines.iter().collect(),
        };
        for view in views().filter(|view| view.suite.as_deref() == Some("study-a")) {
            let figures = view.figures(&rounds, "");
            let text = cleave_chart::svg(&figures[0]);
            assert!(!text.contains("nothing was measured"), "{}", view.name);
            assert_eq!(text.matches(": 105 (105–105)").count(), 2, "{}", view.name);
        }
    }

    #[test]
    fn rows_of_a_matrix_are_coloured_by_their_order() {
        let line = |row: u64, depth: u64| {
            json!({
                "point": format!("{row}/{depth}"), "subject": "bare", "disk": "a", "depth": depth,
                "outstanding_bytes": row * 1024, "result": {"mb_s": row},
            })
        };
        let lines = [4, 8, 16].map(|row| [1, 2, 4].map(|depth| line(row, depth)));
        let rounds = Rounds {
            lines: lines.iter().flatten().collect(),
        };
        let view = views().find(|view| view.name == "a-matrix-{number}");
        let text = cleave_chart::svg(&view.unwrap().figures(&rounds, "")[0]);
        // The dark end of the ramp, and not the first colour of series without an order.
        assert!(text.contains("#440154") && !text.contains("#882255"));
    }

    #[test]
    fn a_unit_is_said_once() {
        let panels = views().flat_map(|view| &view.panel);
        for PanelView { title, y, .. } in panels {
            let (title, y) = (title.to_lowercase(), y.to_lowercase());
            let words = y.rsplit(", ").next().unwrap_or(&y).split(' ');
            // "per I/O" of an axis would not bear "I/O" in its title either.
            let words = words.filter(|word| !["per", "of", "thousand", "million"].contains(word));
            for word in words {
                assert!(
                    !title.split([' ', ',']).any(|own| own == word),
                    "{title}: {y}"
                );
            }
        }
    }

    #[test]
    fn a_caption_claims_nothing_that_its_figure_may_deny() {
        for view in views() {
            for claim in ["should", "cannot", "must", "wanted"] {
                assert!(
                    view.reads.split(' ').all(|word| word != claim),
                    "{}: {claim}",
                    view.name
                );
            }
        }
    }

    #[test]
    fn the_studies_figures_say_what_is_counted() {
        let of = |name: &str| views().find(|view| view.name == name).unwrap();
        let is_in_flight = |panel: &PanelView| panel.x == "requests in flight";
        assert!(of("d-tax").panel.iter().all(is_in_flight));
        let has_percentile = |panel: &PanelView| panel.title.starts_with("99th percentile");
        assert!(of("d-depth-1").panel.iter().any(has_percentile));
        let legs = &of("d-legs").reads;
        assert!(legs.contains("what a stripe costs, not what 28 drives gain"));
    }
}
