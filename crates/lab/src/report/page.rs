//! The page: figures within it, nothing fetched from outside, readable where it is copied to.

use cleave_chart::{escaped, svg};
use itertools::Itertools;
use serde_json::Value;

use super::verdict::{Standing, Verdict};
use super::view::{Section, WordTable};
use crate::run_folder::RecordedRun;

const STYLE: &str = "body{font:15px/1.5 'DejaVu Sans',Verdana,sans-serif;color:#222;max-width:1040px;margin:24px auto;\
padding:0 16px}h1{font-size:26px}h2{font-size:20px;margin-top:48px;border-bottom:1px solid #ccc}h3{font-size:15px}\
table{border-collapse:collapse;margin:12px 0;font-size:13px}td,th{border-bottom:1px solid #ddd;padding:4px 10px;\
text-align:left;vertical-align:top}td+td{font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}\
.pass{color:#006b3c;font-weight:bold}.short{color:#b00020;font-weight:bold}.noise{color:#8a5a00}\
.warn{background:#fff4d6;border-left:4px solid #d9a400;padding:6px 12px;margin:8px 0}\
.incomplete{background:#fde0e0;border-left:4px solid #b00020;padding:6px 12px;margin:8px 0}\
figure{margin:20px 0}nav a{margin-right:14px}.wide{overflow-x:auto}";

/// Returns the page of one run, or of several side by side; `drawn` are each run's sections.
pub(super) fn html(runs: &[RecordedRun], drawn: &[Vec<Section>]) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>Cleave: measurements</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n<h1>Cleave: measurements</h1>\n"
    );
    out.extend(runs.iter().map(state));
    out += &verdicts(runs, drawn);
    // Sections of all runs, each once, in the order of the page.
    let all = drawn.iter().flatten().unique_by(|section| &section.id);
    let link = |one: &Section| format!("<a href=\"#{}\">{}</a>", one.id, escaped(&one.title));
    out += &format!("<nav>{}</nav>\n", all.clone().map(link).join(""));
    for Section { id, .. } in all {
        for (run, sections) in runs.iter().zip(drawn) {
            let whose = match runs {
                [_] => String::new(),
                _ => format!(" · {}", run.name()),
            };
            let own = sections.iter().filter(|section| section.id == *id);
            out.extend(own.map(|own| section(&whose, own)));
        }
    }
    out.extend(runs.iter().map(machine));
    out + "</body>\n</html>\n"
}

fn state(run: &RecordedRun) -> String {
    let name = escaped(&run.name());
    let mut out = String::new();
    if !run.is_complete {
        out += &format!(
            "<p class=\"incomplete\"><b>{name}: incomplete.</b> The run ended before everything that was asked for \
             had been measured. The figures that are shown were measured in full.</p>\n"
        );
    }
    if run.torn > 0 {
        out += &format!(
            "<p class=\"incomplete\">{name}: {} lines of the raw data are not JSON and are left out.</p>\n",
            run.torn
        );
    }
    for (suite, text) in &run.warnings {
        let (suite, text) = (escaped(suite), escaped(text));
        out += &format!("<p class=\"warn\">{name}, {suite}: {text}</p>\n");
    }
    out
}

/// Returns the rows T1 to T13, then H1 to H3, with a column for each run.
fn verdicts(runs: &[RecordedRun], drawn: &[Vec<Section>]) -> String {
    let columns = drawn.iter();
    let columns = columns.map(|sections| sections.iter().flat_map(|own| &own.verdicts));
    let columns: Vec<Vec<&Verdict>> = columns.map(Iterator::collect).collect();
    let key = |row: &Verdict| (row.id.clone(), row.what.clone());
    let rows = columns.iter().flatten().unique_by(|row| key(row));
    let place = |id: &str| (!id.starts_with('T'), id[1..].parse().unwrap_or(u32::MAX));
    let rows = rows.sorted_by_key(|row| place(&row.id));
    let rows = rows.collect_vec();
    if rows.is_empty() {
        return String::new();
    }
    let names = runs.iter();
    let names = names.map(|run| format!("<th>{}</th>", escaped(&run.name())));
    let row = |(at, row): (usize, &&&Verdict)| {
        let cells = columns.iter().map(|column| {
            let own = column.iter().find(|verdict| key(verdict) == key(row));
            let text = own.map_or("not measured".to_owned(), |own| measured(own));
            format!("<td>{text}</td>")
        });
        let (id, must, what) = (&row.id, row.must, escaped(&row.what));
        let (aim, cells) = (aim(&rows, at), cells.collect::<String>());
        format!("<tr><td>{id}</td><td>{what}</td><td>{must}</td>{aim}{cells}</tr>\n")
    };
    format!(
        "<h2 id=\"verdicts\">What it must show</h2>\n<p>Each figure is the median of the ratios of rounds that were \
         measured side by side, with the least and the largest of them. \"Within the noise\" means that the rounds \
         lie on both sides of the bar.</p>\n<div class=\"wide\"><table>\n<tr><th></th><th>what</th>\
         <th>must be</th><th>aim</th>{}</tr>\n{}</table></div>\n",
        names.collect::<String>(),
        rows.iter().enumerate().map(row).collect::<String>()
    )
}

/// Returns the cell with the aim of the row at this place. Rows with one aim below each other share the cell.
fn aim(rows: &[&&Verdict], at: usize) -> String {
    let key = |at: usize| rows.get(at).map(|row| (&row.id, &row.aim));
    if at > 0 && key(at - 1) == key(at) {
        return String::new();
    }
    let shared = (at..rows.len()).take_while(|next| key(*next) == key(at));
    let text = escaped(&rows[at].aim);
    format!("<td rowspan=\"{}\">{text}</td>", shared.count())
}

fn measured(verdict: &Verdict) -> String {
    let mut out = verdict.measured.to_string();
    out += match verdict.standing() {
        Standing::Pass => " <span class=\"pass\">pass</span>",
        Standing::Short => " <span class=\"short\">short</span>",
        Standing::Unjudged => "",
    };
    if verdict.is_within_noise() {
        out += " <span class=\"noise\">within the noise</span>";
    }
    if !verdict.note.is_empty() {
        out += &format!("<br>{}", escaped(&verdict.note));
    }
    out
}

fn section(whose: &str, section: &Section) -> String {
    let title = escaped(&format!("{}{whose}", section.title));
    let mut out = format!("<h2 id=\"{}\">{title}</h2>\n", section.id);
    let notes = section.notes.iter();
    out.extend(notes.map(|note| format!("<p>{}</p>\n", escaped(note))));
    let figures = section.figures.iter().map(svg);
    out.extend(figures.map(|svg| format!("<figure>\n{svg}</figure>\n")));
    for WordTable { title, head, rows } in &section.tables {
        let (title, rows) = (escaped(title), table(Some(head), rows));
        out += &format!("<h3>{title}</h3>\n<div class=\"wide\">{rows}</div>\n");
    }
    out
}

fn table(head: Option<&Vec<String>>, rows: &[Vec<String>]) -> String {
    let row = |cells: &Vec<String>, tag: &str| {
        let cells = cells.iter();
        let mut cells = cells.map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell)));
        format!("<tr>{}</tr>\n", cells.join(""))
    };
    let head = head.map(|head| row(head, "th")).unwrap_or_default();
    let rows: String = rows.iter().map(|cells| row(cells, "td")).collect();
    format!("<table>\n{head}{rows}</table>\n")
}

/// Returns the machine that a run was made on, and the arguments of the run.
fn machine(run: &RecordedRun) -> String {
    let asked = [("asked for".to_owned(), &run.asked)];
    let facts = run.environment.as_object().into_iter().flatten();
    let facts = facts.map(|(name, value)| (name.replace('_', " "), value));
    let row = |(name, value): (String, &Value)| {
        let text = value.as_str().map(str::to_owned);
        vec![name, text.unwrap_or_else(|| value.to_string())]
    };
    let rows: Vec<Vec<String>> = facts.chain(asked).map(row).collect();
    let (name, table) = (escaped(&run.name()), table(None, &rows));
    format!("<h2>The machine · {name}</h2>\n{table}")
}

#[cfg(test)]
mod tests {
    use super::super::verdict::Bar;
    use super::*;
    use cleave_chart::Spread;

    fn sections(median: f64) -> Vec<Section> {
        vec![Section {
            id: "transport".to_owned(),
            title: "The ring alone".to_owned(),
            verdicts: vec![Verdict {
                id: "T1".to_owned(),
                what: "IOPS, depth 32".to_owned(),
                must: Bar::AtLeast(3.0),
                aim: "past it".to_owned(),
                measured: Spread::of(&[median; 5]).unwrap(),
                is_count: false,
                note: "modelled".to_owned(),
            }],
            tables: vec![WordTable {
                title: "All <of> it".to_owned(),
                head: vec!["a".to_owned()],
                rows: vec![vec!["1".to_owned()]],
            }],
            ..Section::default()
        }]
    }

    #[test]
    fn runs_stand_side_by_side_and_a_killed_one_says_so() {
        let whole = RecordedRun {
            folder: "b/whole".into(),
            is_complete: true,
            environment: serde_json::json!({"cpu": "a <b>"}),
            ..RecordedRun::default()
        };
        let killed = RecordedRun {
            folder: "b/killed".into(),
            warnings: vec![("cpu".to_owned(), "a thin disk".to_owned())],
            torn: 1,
            ..RecordedRun::default()
        };
        let page = html(&[whole, killed], &[sections(3.5), sections(2.0)]);
        for (part, count) in [
            ("class=\"pass\"", 1),
            ("class=\"short\"", 1),
            ("incomplete.</b>", 1),
            ("a thin disk", 1),
            ("a &lt;b&gt;", 1),
            ("All &lt;of&gt; it", 2),
            ("IOPS, depth 32", 1),
            ("http", 0),
        ] {
            assert_eq!(page.matches(part).count(), count, "{part}");
        }
    }

    #[test]
    fn rows_with_one_aim_share_its_cell() {
        let mut all = sections(3.5);
        for (at, aim) in ["past it", "further", ""].into_iter().enumerate() {
            let mut row = sections(3.5).remove(0).verdicts.remove(0);
            row.what = format!("IOPS, depth {at}");
            row.aim = aim.to_owned();
            all[0].verdicts.push(row);
        }
        let page = html(&[RecordedRun::default()], &[all]);
        for (part, count) in [
            ("<td rowspan=\"2\">past it</td>", 1),
            ("past it", 1),
            ("<td rowspan=\"1\">further</td>", 1),
            ("<td rowspan=\"1\"></td>", 1),
        ] {
            assert_eq!(page.matches(part).count(), count, "{part}");
        }
    }

    #[test]
    fn nothing_measured_is_still_a_page() {
        let page = html(&[RecordedRun::default()], &[Vec::new()]);
        assert!(page.ends_with("</html>\n") && !page.contains("What it must show"));
    }
}
