//! `cargo xtask bench instructions` as part of a run (T11): the counts, beside those that are kept.

use serde_json::Value;

use super::desk::Desk;
use super::draw;
use super::instructions;
use super::options::Pace;
use crate::report::chart::{Axis, Marks, Panel, Scale, Series};
use crate::report::{Bar, Recorded, Section, Spread, Table};

const SUITE: &str = "instructions";

/// Counts every case; a rise beyond the tolerance is a warning here, and a fault in CI.
pub(super) fn measure(desk: &mut Desk) -> Result<(), String> {
    // A count takes a release build and callgrind; CI runs it by itself.
    if desk.effort.pace == Pace::Smoke {
        return Ok(());
    }
    if let Err(why) = instructions::run(&desk.root, &instructions::Request::default()) {
        desk.run.warn(SUITE, &why)?;
    }
    let folder = desk.root.join("target/bench/instructions");
    for line in Recorded::read(&folder)?.of(SUITE) {
        desk.run.note(SUITE, line)?;
    }
    Ok(())
}

/// T11.
pub(crate) fn section(run: &Recorded) -> Option<Section> {
    let lines = run.of(SUITE);
    if lines.is_empty() {
        return None;
    }
    let number = |line: &Value, name: &str| line[name].as_f64();
    let case = |line: &Value| line["case"].as_str().unwrap_or_default().to_owned();
    let one = |line: &&Value, name: &str| Spread::of(&[number(line, name)?]);
    let panel = Panel {
        title: "instructions per I/O in the worker".to_owned(),
        x: Axis::new("", Scale::Linear),
        y: Axis::new("instructions per I/O", Scale::Linear),
        marks: Marks::Bars {
            groups: lines.iter().map(|line| case(line)).collect(),
            series: vec![
                Series::new(
                    "kept for comparison",
                    lines
                        .iter()
                        .map(|line| one(line, "own_per_io_reference"))
                        .collect(),
                ),
                Series::new(
                    "this revision",
                    lines.iter().map(|line| one(line, "own_per_io")).collect(),
                ),
            ],
        },
    };
    let caption = (
        "lower is better; the same program and input give the same count, so two bars that differ by a per cent do differ",
        "time, caches, the kernel's part, the driver's: only instructions of our own code are counted",
    );
    Some(Section {
        id: SUITE,
        title: "T11 · Instructions per I/O".to_owned(),
        notes: vec![
            "Counted by callgrind on a null disk, 4 KiB reads, one vring. A case's name says how the worker waits, how many \
             requests are in flight, and how chains lie."
                .to_owned(),
        ],
        verdicts: lines
            .iter()
            .map(|line| {
                let change = number(line, "own_per_io").zip(number(line, "own_per_io_reference"));
                let change = change.and_then(|(own, kept)| Spread::of(&[own / kept]));
                let what = format!("instructions per I/O, {} ÷ the kept count", case(line));
                draw::verdict("T11", what, Bar::AtMost(1.02), "falls every release", change).counted()
            })
            .collect(),
        tables: vec![table(&lines)],
        figures: vec![draw::figure(run, "t11-instructions", "Instructions per I/O", vec![panel], caption)],
    })
}

fn table(lines: &[&Value]) -> Table {
    let head = [
        "case",
        "own",
        "C library",
        "kept",
        "to kept",
        "to the last run",
    ];
    let rows = lines.iter().map(|line| {
        let number = |name: &str| line[name].as_f64();
        let said =
            |value: Option<f64>| value.map_or("–".to_owned(), |value| format!("{value:.1}"));
        let change = |base: &str| {
            let pair = number("own_per_io").zip(number(base));
            pair.map_or("–".to_owned(), |(own, base)| {
                format!("{:+.2} %", (own / base - 1.0) * 100.0)
            })
        };
        vec![
            line["case"].as_str().unwrap_or_default().to_owned(),
            said(number("own_per_io")),
            said(number("library_per_io")),
            said(number("own_per_io_reference")),
            change("own_per_io_reference"),
            change("own_per_io_before"),
        ]
    });
    Table {
        title: "Instructions per I/O".to_owned(),
        head: head.map(str::to_owned).to_vec(),
        rows: rows.collect(),
    }
}
