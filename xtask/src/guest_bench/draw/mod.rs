//! The page's section about guests. All of it comes from the raw lines.

mod apart;
mod offered;
mod several;
mod threads;

use serde_json::Value;

use super::lines::Lines;
use super::subject::{ALL, Subject};
use crate::report::chart::{Axis, Figure, Marks, Panel, Scale, Series};
use crate::report::{Recorded, Section, Spread, Table};

/// The section of a run; none where it has no guests.
pub(crate) fn section(run: &Recorded) -> Option<Section> {
    let lines = Lines::of(run)?;
    let mut section = Section {
        id: "guests",
        title: lines.title("In guests: paravirtual against emulated controllers"),
        ..Section::default()
    };
    section.notes = notes(&lines);
    section.tables.extend(left_out(&lines));
    offered::add(&lines, &mut section);
    several::add(&lines, &mut section);
    apart::add(&lines, &mut section);
    threads::add(&lines, &mut section);
    Some(section)
}

fn notes(lines: &Lines<'_>) -> Vec<String> {
    let mut notes = vec![
        "Each controller has a guest of its own, which boots anew for every round from the same kernel and initramfs and \
         has the same file, filled with random bytes, as its disk. fio runs in the guest; latencies are its own. Subjects \
         take turns in every round, forth and back. Ratios are taken round by round to virtio-blk in the QEMU process \
         (IOThread, io_uring, cache.direct=on)."
            .to_owned(),
        lines.subtitle() + ".",
    ];
    if lines.is_translated() {
        notes.push(
            "The guest's CPU is emulated (TCG): it is several times slower than this machine's, it limits most figures \
             here, and a register access costs no VM exit. So emulated controllers look better than they do with KVM, \
             most at depth 1, and absolute figures mean nothing."
                .to_owned(),
        );
    }
    if let Some(limit) = lines.at("limit").next() {
        notes.push(format!(
            "The slowest controller, {}, takes {:.0} mixed requests (4–64 KiB, 60 % reads) a second with 32 in flight; the \
             offered rates are steps up to that. Arrivals are random (Poisson); up to 64 requests wait in the guest's \
             queue, and a request's clock starts when fio submits it.",
            title_of(limit["subject"].as_str().unwrap_or_default()),
            limit["iops"].as_f64().unwrap_or_default()
        ));
    }
    notes
}

/// Controllers and measurements that are not there, with the reason.
fn left_out(lines: &Lines<'_>) -> Option<Table> {
    let text = |line: &Value, name: &str| line[name].as_str().unwrap_or_default().to_owned();
    let row = |line: &Value, when: String| {
        vec![title_of(&text(line, "subject")), when, text(line, "why")]
    };
    let missing = lines
        .at("missing")
        .map(|line| row(line, "always".to_owned()));
    let trouble = lines.at("trouble").map(|line| {
        let when = match line["round"].as_u64() {
            Some(0) => "calibration".to_owned(),
            round => format!("round {}", round.unwrap_or_default()),
        };
        row(line, when)
    });
    let rows: Vec<Vec<String>> = missing.chain(trouble).collect();
    (!rows.is_empty()).then(|| Table {
        title: "Not measured, and why".to_owned(),
        head: ["controller", "when", "why"].map(str::to_owned).to_vec(),
        rows,
    })
}

fn title_of(name: &str) -> String {
    let known = ALL.iter().find(|one| one.name == name);
    known.map_or(name, |one: &Subject| one.title).to_owned()
}

fn said(spread: Option<Spread>) -> String {
    spread.map_or_else(|| "–".to_owned(), |spread| spread.to_string())
}

fn log_ms(label: &str) -> Axis {
    Axis::new(format!("{label}, ms"), Scale::Log10)
}

/// From microseconds.
fn ms(spread: Spread) -> Spread {
    spread.times(1e-3)
}

/// A group of bars for each name; `x` and `y` label the axes.
fn bars(
    title: &str,
    (x, y): (&str, &str),
    groups: &[String],
    series: Vec<Series<Option<Spread>>>,
) -> Panel {
    let groups = groups.to_vec();
    Panel {
        title: title.to_owned(),
        x: Axis::new(x, Scale::Linear),
        y: Axis::new(y, Scale::Linear),
        marks: Marks::Bars { groups, series },
    }
}

/// `detail` goes under the title; `reads` and `hides` are the caption.
fn figure(
    lines: &Lines<'_>,
    (name, title, detail): (&str, &str, &str),
    panels: Vec<Panel>,
    (reads, hides): (&str, &str),
) -> Figure {
    Figure {
        name: name.to_owned(),
        title: lines.title(title),
        subtitle: format!("{}; {detail}", lines.subtitle()),
        columns: 2,
        panels,
        reads: format!("{reads}."),
        hides: format!("{hides}."),
    }
}
