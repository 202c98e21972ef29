//! The page: figures within it, nothing fetched from outside, readable where it is copied to.

use std::fmt::Write as _;

use serde_json::Value;

use super::chart::{self, escaped};
use super::section::{Section, Standing, Table, Verdict};
use super::{Recorded, Spread};

const STYLE: &str = "body{font:15px/1.5 'DejaVu Sans',Verdana,sans-serif;color:#222;max-width:1040px;margin:24px auto;\
padding:0 16px}h1{font-size:26px}h2{font-size:20px;margin-top:48px;border-bottom:1px solid #ccc}h3{font-size:15px}\
table{border-collapse:collapse;margin:12px 0;font-size:13px}td,th{border-bottom:1px solid #ddd;padding:4px 10px;\
text-align:left;vertical-align:top}td+td{font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}\
.pass{color:#006b3c;font-weight:bold}.short{color:#b00020;font-weight:bold}.noise{color:#8a5a00}\
.warn{background:#fff4d6;border-left:4px solid #d9a400;padding:6px 12px;margin:8px 0}\
.incomplete{background:#fde0e0;border-left:4px solid #b00020;padding:6px 12px;margin:8px 0}\
figure{margin:20px 0}nav a{margin-right:14px}.wide{overflow-x:auto}";

// Writing to a `String` cannot fail, so results of `write!` are dropped below.

/// The page of one run, or of several side by side; `drawn` are each run's sections.
pub(super) fn html(runs: &[Recorded], drawn: &[Vec<Section>]) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>Cleave: measurements</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n<h1>Cleave: measurements</h1>\n"
    );
    for run in runs {
        state(&mut out, run);
    }
    verdicts(&mut out, runs, drawn);
    contents(&mut out, drawn);
    for id in ids(drawn) {
        for (run, sections) in runs.iter().zip(drawn) {
            for own in sections.iter().filter(|section| section.id == id) {
                section(&mut out, run, own, runs.len() > 1);
            }
        }
    }
    for run in runs {
        machine(&mut out, run);
    }
    out.push_str("</body>\n</html>\n");
    out
}

/// Sections of all runs, each once, in the order of the page.
fn ids(drawn: &[Vec<Section>]) -> Vec<&'static str> {
    let mut ids = Vec::new();
    for section in drawn.iter().flatten() {
        if !ids.contains(&section.id) {
            ids.push(section.id);
        }
    }
    ids
}

fn state(out: &mut String, run: &Recorded) {
    let name = escaped(&run.name());
    if !run.is_complete {
        let _ = writeln!(
            out,
            "<p class=\"incomplete\"><b>{name}: incomplete.</b> The run ended before all that it was asked for was \
             measured; what is shown was measured in full.</p>"
        );
    }
    if run.torn > 0 {
        let _ = writeln!(
            out,
            "<p class=\"incomplete\">{name}: {} lines of the raw data are no JSON and are left out.</p>",
            run.torn
        );
    }
    for (suite, text) in &run.warnings {
        let _ = writeln!(
            out,
            "<p class=\"warn\">{name}, {}: {}</p>",
            escaped(suite),
            escaped(text)
        );
    }
}

/// The rows T1 to T12; a column for each run.
fn verdicts(out: &mut String, runs: &[Recorded], drawn: &[Vec<Section>]) {
    let of = |sections: &'_ [Section]| -> Vec<(&'static str, String)> {
        let all = sections.iter().flat_map(|section| &section.verdicts);
        all.map(|verdict| (verdict.id, verdict.what.clone()))
            .collect()
    };
    let mut rows: Vec<(&'static str, String)> = Vec::new();
    for row in drawn.iter().flat_map(|sections| of(sections)) {
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    if rows.is_empty() {
        return;
    }
    rows.sort_by_key(|(id, _)| {
        id.trim_start_matches('T')
            .parse::<u32>()
            .unwrap_or(u32::MAX)
    });
    out.push_str(
        "<h2 id=\"verdicts\">What it must show</h2>\n<p>Each figure is the median of the ratios of rounds that were measured \
         side by side, with the least and the largest of them. \"Within the noise\" means that the rounds lie on both \
         sides of the bar.</p>\n<div class=\"wide\"><table>\n<tr><th></th><th>what</th><th>must be</th><th>aim</th>",
    );
    for run in runs {
        let _ = write!(out, "<th>{}</th>", escaped(&run.name()));
    }
    out.push_str("</tr>\n");
    for row in &rows {
        verdict_row(out, row, drawn);
    }
    out.push_str("</table></div>\n");
}

fn verdict_row(out: &mut String, row: &(&'static str, String), drawn: &[Vec<Section>]) {
    let found: Vec<Option<&Verdict>> = drawn
        .iter()
        .map(|sections| {
            let mut all = sections.iter().flat_map(|section| &section.verdicts);
            all.find(|verdict| (verdict.id, &verdict.what) == (row.0, &row.1))
        })
        .collect();
    let Some(any) = found.iter().flatten().next() else {
        return;
    };
    let _ = write!(
        out,
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td>",
        row.0,
        escaped(&row.1),
        any.must,
        escaped(any.aim)
    );
    for verdict in found {
        let _ = match verdict {
            Some(verdict) => write!(out, "<td>{}</td>", said(verdict)),
            None => write!(out, "<td>not measured</td>"),
        };
    }
    out.push_str("</tr>\n");
}

fn said(verdict: &Verdict) -> String {
    let measured = verdict.measured.map_or_else(
        || "not measured".to_owned(),
        |spread: Spread| spread.to_string(),
    );
    let standing = match verdict.standing() {
        Standing::Pass => " <span class=\"pass\">pass</span>",
        Standing::Short => " <span class=\"short\">short</span>",
        Standing::Unjudged => "",
    };
    let noise = match verdict.is_within_noise() {
        true => " <span class=\"noise\">within the noise</span>",
        false => "",
    };
    let note = match verdict.note.as_str() {
        "" => String::new(),
        note => format!("<br>{}", escaped(note)),
    };
    format!("{measured}{standing}{noise}{note}")
}

fn contents(out: &mut String, drawn: &[Vec<Section>]) {
    out.push_str("<nav>");
    for id in ids(drawn) {
        let mut all = drawn.iter().flatten();
        let title = all
            .find(|section| section.id == id)
            .map_or("", |section| &section.title);
        let _ = write!(out, "<a href=\"#{id}\">{}</a>", escaped(title));
    }
    out.push_str("</nav>\n");
}

fn section(out: &mut String, run: &Recorded, section: &Section, is_one_of_several: bool) {
    let whose = match is_one_of_several {
        true => format!(" · {}", escaped(&run.name())),
        false => String::new(),
    };
    let _ = writeln!(
        out,
        "<h2 id=\"{}\">{}{whose}</h2>",
        section.id,
        escaped(&section.title)
    );
    for note in &section.notes {
        let _ = writeln!(out, "<p>{}</p>", escaped(note));
    }
    for figure in &section.figures {
        let _ = writeln!(out, "<figure>\n{}</figure>", chart::svg(figure));
    }
    for own in &section.tables {
        table(out, own);
    }
}

fn table(out: &mut String, table: &Table) {
    let _ = writeln!(
        out,
        "<h3>{}</h3>\n<div class=\"wide\"><table>",
        escaped(&table.title)
    );
    let mut row = |cells: &[String], tag: &str| {
        let cells = cells
            .iter()
            .map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell)));
        let _ = writeln!(out, "<tr>{}</tr>", cells.collect::<String>());
    };
    row(&table.head, "th");
    for cells in &table.rows {
        row(cells, "td");
    }
    out.push_str("</table></div>\n");
}

/// On what it was measured, and what was asked for.
fn machine(out: &mut String, run: &Recorded) {
    let _ = writeln!(
        out,
        "<h2>The machine · {}</h2>\n<table>",
        escaped(&run.name())
    );
    let asked = Value::String(run.asked.to_string());
    let pairs = run.environment.as_object().into_iter().flatten();
    for (name, value) in pairs
        .map(|(name, value)| (name.as_str(), value))
        .chain([("asked for", &asked)])
    {
        let value = value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned);
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td></tr>",
            escaped(&name.replace('_', " ")),
            escaped(&value)
        );
    }
    out.push_str("</table>\n");
}

#[cfg(test)]
mod tests {
    use super::super::Bar;
    use super::*;
    use std::path::Path;

    fn recorded(name: &str, text: &str) -> Recorded {
        let folder = std::env::temp_dir().join(format!("xtask-page-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("results.jsonl"), text).unwrap();
        std::fs::write(folder.join("environment.json"), "{\"cpu\":\"a <b>\"}").unwrap();
        let run = Recorded::read(Path::new(&folder)).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        run
    }

    fn sections(median: f64) -> Vec<Section> {
        vec![Section {
            id: "transport",
            title: "The ring alone".to_owned(),
            verdicts: vec![Verdict {
                id: "T1",
                what: "IOPS, depth 32".to_owned(),
                must: Bar::AtLeast(3.0),
                aim: "past it",
                measured: Spread::of(&[median]),
                note: "modelled".to_owned(),
            }],
            tables: vec![Table {
                title: "All <of> it".to_owned(),
                head: vec!["a".to_owned()],
                rows: vec![vec!["1".to_owned()]],
            }],
            ..Section::default()
        }]
    }

    #[test]
    fn runs_stand_side_by_side_and_a_killed_one_says_so() {
        let whole = recorded("whole", "{\"kind\":\"end\"}\n");
        let killed = recorded(
            "killed",
            "{\"kind\":\"warning\",\"suite\":\"cpu\",\"text\":\"thin\"}\n{\"ki",
        );
        let page = html(&[whole, killed], &[sections(3.5), sections(2.0)]);
        for part in [
            "class=\"pass\"",
            "class=\"short\"",
            "incomplete.</b>",
            "thin",
            "a &lt;b&gt;",
            "All &lt;of&gt; it",
        ] {
            assert_eq!(page.matches(part).count().min(1), 1, "{part}");
        }
        assert_eq!(
            page.matches("incomplete.</b>").count(),
            1,
            "only of the killed one"
        );
        assert_eq!(
            page.matches("IOPS, depth 32").count(),
            1,
            "one row for both"
        );
        assert!(!page.contains("http"), "nothing is fetched from outside");
    }

    #[test]
    fn nothing_measured_is_still_a_page() {
        let page = html(&[recorded("empty", "")], &[Vec::new()]);
        assert!(page.ends_with("</html>\n") && !page.contains("What it must show"));
    }
}
