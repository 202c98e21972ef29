//! The views: `views.toml` says of each suite which tables, figures and verdicts its raw lines make. Nothing here knows a
//! suite; the fields of these types are all that a view may ask for.

use std::sync::LazyLock;

use cleave_chart::Figure;
use itertools::{Itertools, iproduct};
use serde::Deserialize;

use super::figure;
use super::rounds::{Rounds, filled, matches, said, said_ratio};
use super::verdict::{Bar, Verdict};
use crate::run_folder::RecordedRun;

/// All sections, in the order of the page.
pub(super) static SECTIONS: LazyLock<Vec<SectionView>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct All {
        section: Vec<SectionView>,
    }
    let all: Result<All, _> = toml::from_str(include_str!("views.toml"));
    #[expect(clippy::panic, reason = "the file is built in, and a test reads it")]
    all.map(|all| all.section)
        .unwrap_or_else(|error| panic!("views.toml: {error}"))
});

/// A section of the page.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SectionView {
    /// The suite whose lines it shows, and the page's anchor.
    pub(super) suite: String,
    title: String,
    /// Shown under the title of each figure, instead of the machine.
    subtitle: Option<String>,
    /// Sentences about the measurement and its method.
    notes: Vec<String>,
    #[serde(default)]
    table: Vec<TableView>,
    #[serde(default)]
    pub(super) figure: Vec<figure::FigureView>,
    #[serde(default)]
    verdict: Vec<VerdictView>,
}

/// A row for each point and subject.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TableView {
    title: String,
    /// Instead of the section's suite.
    suite: Option<String>,
    #[serde(default, rename = "where")]
    conditions: Vec<String>,
    /// The subject that ratios are taken to: see [`base`].
    base: Option<String>,
    /// `head | expression | digits`. Instead of digits: `ratio`, with a base of its own after it if need be; or `text`, of a
    /// template.
    columns: Vec<String>,
}

/// Ratios, or plain figures where there is no base, of subjects at each of the points.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VerdictView {
    id: String,
    #[serde(default, rename = "where")]
    conditions: Vec<String>,
    /// May contain `{point}`, `{own}` and `{base}`.
    what: String,
    own: Vec<String>,
    /// Published and not judged.
    #[serde(default)]
    beside: Vec<String>,
    /// The subject that they are divided by: see [`base`].
    base: Option<String>,
    /// The point of the base, where it is another.
    base_at: Option<String>,
    of: String,
    /// Conditions, and the bar where they hold first.
    #[serde(default)]
    bars: Vec<(String, String)>,
    /// Two subjects, a field, and the bar that their ratio must reach for the row to be judged. The ratio is noted.
    only_if: Option<[String; 4]>,
    #[serde(default)]
    aim: String,
    #[serde(default)]
    is_count: bool,
    /// Names the CPUs that were full on either side.
    #[serde(default)]
    names_full_cpus: bool,
}

/// A section as the page shows it.
#[derive(Default)]
pub(super) struct Section {
    pub(super) id: String,
    pub(super) title: String,
    pub(super) notes: Vec<String>,
    pub(super) verdicts: Vec<Verdict>,
    pub(super) tables: Vec<WordTable>,
    pub(super) figures: Vec<Figure>,
}

/// Words in rows; the first column names the row.
pub(super) struct WordTable {
    pub(super) title: String,
    pub(super) head: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

impl SectionView {
    /// Makes the section. `None`: the suite left no lines.
    pub(super) fn section(&self, run: &RecordedRun) -> Option<Section> {
        let rounds = Rounds::of(run, &self.suite)?;
        let of = |suite: &Option<String>| Rounds::of(run, suite.as_ref().unwrap_or(&self.suite));
        let told = |text: &String| filled(text, &run.environment);
        let said_by_run = rounds.lines.iter();
        let said_by_run = said_by_run.filter_map(|line| Some(line["text"].as_str()?.to_owned()));
        let views = self.verdict.iter();
        let mut verdicts = views.flat_map(|view| view.verdicts(&rounds)).collect_vec();
        for verdict in &mut verdicts {
            verdict.what = told(&verdict.what);
            if run.is_disturbed(&self.suite) && !verdict.is_count {
                verdict.must = Bar::Published;
                verdict.note = format!("disturbed: not judged. {}", verdict.note);
            }
        }
        let subtitle = self.subtitle.as_ref().map_or_else(|| machine(run), told);
        let tables = self.table.iter();
        let tables = tables.filter_map(|view| Some(view.table(&of(&view.suite)?)));
        let tables = tables.filter(|table| !table.rows.is_empty());
        let figures = self.figure.iter();
        let figures = figures.filter_map(|view| Some(view.figures(&of(&view.suite)?, &subtitle)));
        Some(Section {
            id: self.suite.clone(),
            title: told(&self.title),
            notes: self.notes.iter().map(told).chain(said_by_run).collect(),
            verdicts,
            tables: tables.collect(),
            figures: figures.flatten().collect(),
        })
    }
}

/// Returns the line under a figure's title: the machine that was measured.
fn machine(run: &RecordedRun) -> String {
    let fact = |name: &str| run.environment[name].as_str().unwrap_or("unknown");
    let pace = match run.asked["pace"].as_str() {
        Some("Smoke") => " · SMOKE RUN: its figures say nothing",
        _ => "",
    };
    // The release is followed by its build, which is left out.
    let kernel = fact("kernel").split(' ').take(2).join(" ");
    let (cpu, cpus) = (fact("cpu"), fact("cpus_online"));
    format!("{cpu} · {cpus} CPUs · {kernel} · medians with least and largest round{pace}")
}

impl TableView {
    fn table(&self, rounds: &Rounds<'_>) -> WordTable {
        let rounds = rounds.only(&self.conditions);
        let columns = self.columns.iter();
        let columns = columns.map(|column| column.split(" | ").collect_vec());
        let columns = columns.collect_vec();
        let mut rows = Vec::new();
        for (point, subject) in iproduct!(rounds.points(), rounds.subjects()) {
            let own = rounds.at(&point, &subject);
            if !own.lines.is_empty() {
                let cells = columns.iter();
                let cells = cells.map(|column| self.cell(&rounds, &own, &point, column));
                let cells = cells.collect_vec();
                rows.push([vec![point, subject], cells].concat());
            }
        }
        let head = columns.iter().filter_map(|column| column.first().copied());
        let head = ["point", "who"].into_iter().chain(head);
        WordTable {
            title: self.title.clone(),
            head: head.map(str::to_owned).collect(),
            rows,
        }
    }

    fn cell(&self, rounds: &Rounds<'_>, own: &Rounds<'_>, point: &str, column: &[&str]) -> String {
        let [_, of, digits, more @ ..] = column else {
            return String::new();
        };
        if *digits == "text" {
            return own.texts(of).join(", ");
        }
        if let Ok(digits) = digits.parse() {
            return said(own.spread(of), digits);
        }
        let asked = more.first().copied().or(self.base.as_deref());
        // A base with `@` is at another point.
        let base = asked.and_then(|asked| match asked.strip_prefix('@') {
            Some(point) => Some(rounds.at(point, &own.subjects().join(""))),
            None => Some(rounds.at(point, &base(asked, rounds, point)?)),
        });
        match base {
            Some(base) if base.lines == own.lines => "1".to_owned(),
            Some(base) => said_ratio(own.ratio(&base, of)),
            None => "–".to_owned(),
        }
    }
}

impl VerdictView {
    fn verdicts(&self, rounds: &Rounds<'_>) -> Vec<Verdict> {
        let points = rounds.only(&self.conditions).points();
        let owns = self.own.iter().chain(&self.beside);
        let all = iproduct!(points, owns);
        let all = all.filter_map(|(point, own)| self.verdict(rounds, &point, own));
        all.collect()
    }

    /// Compares two subjects. `None`: one of the two was not measured.
    fn verdict(&self, rounds: &Rounds<'_>, point: &str, own: &str) -> Option<Verdict> {
        let lines = rounds.at(point, own);
        let mut base_name = String::new();
        let mut sides = vec![lines.clone()];
        let measured = match (&self.base, &self.base_at) {
            (None, None) => lines.spread(&self.of)?,
            (asked, at) => {
                base_name = match asked {
                    Some(asked) => base(asked, rounds, point)?,
                    None => own.to_owned(),
                };
                sides.push(rounds.at(at.as_deref().unwrap_or(point), &base_name));
                lines.ratio(&sides[1], &self.of)?
            }
        };
        let what = self.what.replace("{point}", point).replace("{own}", own);
        let mut verdict = Verdict {
            id: self.id.clone(),
            what: what.replace("{base}", &base_name),
            must: self.bar(&lines, own),
            aim: self.aim.clone(),
            measured,
            is_count: self.is_count,
            note: match self.names_full_cpus {
                true => full_cpus(&sides),
                false => String::new(),
            },
        };
        if let Some([own, base, of, bar]) = &self.only_if {
            let other = rounds.at(point, own).ratio(&rounds.at(point, base), of)?;
            verdict.note = format!("{of}, {own} ÷ {base}: {other}");
            if Bar::parse(bar).is_reached(other.median) == Some(false) {
                verdict.must = Bar::Published;
            }
        }
        Some(verdict)
    }

    fn bar(&self, lines: &Rounds<'_>, own: &str) -> Bar {
        let held = |condition: &String| lines.only(std::slice::from_ref(condition)).lines;
        let mut bars = self.bars.iter();
        let first = bars.find(|(condition, _)| !held(condition).is_empty());
        match first {
            Some((_, bar)) if self.own.iter().any(|judged| judged == own) => Bar::parse(bar),
            _ => Bar::Published,
        }
    }
}

/// Returns the subject at a point that others are compared with: by its name, or the one that is best there, as in `most iops of
/// qemu*|spdk`; none where nothing fits.
pub(super) fn base(asked: &str, rounds: &Rounds<'_>, point: &str) -> Option<String> {
    let (sign, rest) = match asked.split_once(' ') {
        Some(("most", rest)) => (-1.0, rest),
        Some(("least", rest)) => (1.0, rest),
        _ => return Some(asked.to_owned()),
    };
    let (of, patterns) = rest.split_once(" of ")?;
    let named = rounds.subjects().into_iter();
    let named = named.filter(|name| matches(name, patterns));
    let rated = named.filter_map(|name| {
        let spread = rounds.at(point, &name).spread(of)?;
        Some((sign * spread.median, name))
    });
    let best = rated.min_by(|one, other| one.0.total_cmp(&other.0));
    best.map(|(_, name)| name)
}

/// Share of a CPU. Above, that CPU is the limit, or spins, and what is measured is not the disk alone.
const FULL: f64 = 0.9;

/// Remark on the two sides of a ratio: the CPUs that were full.
fn full_cpus(sides: &[Rounds<'_>]) -> String {
    let whose = [("daemon", "daemon_busy"), ("driver", "driver_busy")];
    let full = iproduct!(sides, whose)
        .filter(|(side, (_, of))| side.spread(of).is_some_and(|busy| busy.median > FULL));
    let named = |(side, (whose, _)): (&Rounds<'_>, (&str, &str))| {
        format!("the {whose}'s CPU ({})", side.subjects().join(""))
    };
    let full = full.map(named).join(", ");
    match full.is_empty() {
        true => full,
        false => format!("CPU-bound, or spinning: {full}; not the disk alone was measured"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn line(point: &str, subject: &str, mean: f64, iops: f64) -> Value {
        json!({"point": point, "subject": subject, "round": 1, "result": {"mean_us": mean, "iops": iops}})
    }

    #[test]
    fn ours_is_held_against_the_better_of_the_others_at_each_point() {
        let lines = [
            line("slow", "interrupt", 30.0, 1.0),
            line("slow", "poll", 10.0, 3.0),
            line("slow", "ours", 20.0, 6.0),
            line("fast", "interrupt", 8.0, 5.0),
            line("fast", "poll", 10.0, 4.0),
            line("fast", "ours", 12.0, 5.0),
        ];
        let rounds = Rounds {
            lines: lines.iter().collect(),
        };
        let told = |view: &str| -> Vec<(String, f64)> {
            let view: VerdictView = toml::from_str(view).unwrap();
            let verdicts = view.verdicts(&rounds).into_iter();
            verdicts
                .map(|row| (row.what, row.measured.median))
                .collect()
        };
        let better = "id = 'T6'\nwhat = '{point}: {own} ÷ {base}'\nown = ['ours', 'absent']\nof = 'mean_us'\n";
        assert_eq!(
            told(&format!("{better}base = 'least mean_us of interrupt|po*'")),
            [
                ("slow: ours ÷ poll".to_owned(), 2.0),
                ("fast: ours ÷ interrupt".to_owned(), 1.5)
            ]
        );
        assert_eq!(
            told(&format!("{better}base_at = 'slow'\nwhere = ['point=fast']")),
            [("fast: ours ÷ ours".to_owned(), 0.6)]
        );
    }

    #[test]
    fn a_row_is_judged_only_where_another_ratio_reaches_its_bar() {
        let lines = [
            line("gains", "interrupt", 30.0, 1.0),
            line("gains", "poll", 10.0, 3.0),
            line("even", "interrupt", 8.0, 5.0),
            line("even", "poll", 8.0, 5.0),
            line("unknown", "poll", 8.0, 5.0),
        ];
        let rounds = Rounds {
            lines: lines.iter().collect(),
        };
        let view = "id = 'H2'\nwhat = '{point}'\nown = ['poll']\nof = 'mean_us'\nbars = [['point=*', '≤ 1.1']]\n\
             only_if = ['poll', 'interrupt', 'iops', '≤ 1.1']";
        let view: VerdictView = toml::from_str(view).unwrap();
        let rows = view.verdicts(&rounds).into_iter();
        let rows = rows.map(|row| (row.what, row.must, row.note)).collect_vec();
        let row = |what: &str, must, gain: &str| {
            (
                what.to_owned(),
                must,
                format!("iops, poll ÷ interrupt: {gain}"),
            )
        };
        assert_eq!(
            rows,
            [
                row("gains", Bar::Published, "3.00 (3.00–3.00)"),
                row("even", Bar::AtMost(1.1), "1.00 (1.00–1.00)"),
            ]
        );
    }

    #[test]
    fn the_views_can_be_read() {
        assert_eq!(SECTIONS.len(), 13);
    }
}
