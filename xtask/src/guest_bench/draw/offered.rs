//! Study C: response time at offered rates, and with 32 requests in flight.

use serde_json::Value;

use super::super::job::{MIXED_DEPTH, rate_name};
use super::super::lines::Lines;
use super::super::subject::{ALL, BASE, Class, Subject};
use super::{bars, log_ms, ms, said, title_of};
use crate::report::chart::{Axis, Figure, Marks, Panel, Scale, Series};
use crate::report::{Bar, Section, Table, Verdict};

/// Whom the dots show one by one: the controllers of the study, and the paravirtual disks beside them.
const SHOWN: [&str; 4] = ["lsi53c895a", "pvscsi", BASE, "cleave-adaptive"];
/// Whom the table of demands judges: as it serves when nobody says how, and with interrupts alone.
const JUDGED: [&str; 2] = ["cleave-adaptive", "cleave"];

pub(super) fn add(lines: &Lines<'_>, section: &mut Section) {
    section.verdicts.extend(verdicts(lines));
    section.tables.push(ratios(lines));
    section.figures.push(over_time(lines));
    section.figures.push(by_class(lines));
    section.figures.push(against_rate(lines));
    section.figures.push(at_depth(lines));
}

fn verdicts(lines: &Lines<'_>) -> Vec<Verdict> {
    let measured = lines.subjects(MIXED_DEPTH);
    let judged = measured.iter().filter(|one| JUDGED.contains(&one.name));
    judged.flat_map(|one| verdicts_of(lines, one)).collect()
}

fn verdicts_of(lines: &Lines<'_>, own: &Subject) -> Vec<Verdict> {
    let judge = |what: &str, point: &str, base: &Subject| Verdict {
        id: "T8",
        what: format!("mean response time {what}, {} ÷ {}", own.title, base.title),
        must: Bar::AtMost(1.0),
        aim: "flat to the limit",
        measured: lines.ratio(point, own.name, base.name, "/mean_us"),
        is_count: false,
        note: if lines.is_translated() {
            "emulated CPU".to_owned()
        } else {
            String::new()
        },
    };
    let mut verdicts: Vec<Verdict> = lines
        .subjects(MIXED_DEPTH)
        .into_iter()
        .filter(|one| one.class == Class::Emulated)
        .map(|one| judge("with 32 in flight", MIXED_DEPTH, one))
        .collect();
    let base = ALL.iter().find(|one| one.name == BASE);
    for (rate, base) in lines.offered().into_iter().zip(base.into_iter().cycle()) {
        verdicts.push(judge(&format!("at {rate}/s"), &name_of(rate), base));
    }
    verdicts
}

/// Everything as a ratio to the base, round by round.
fn ratios(lines: &Lines<'_>) -> Table {
    let mut head = vec!["controller".to_owned()];
    head.extend(["IOPS at depth 32", "mean at depth 32", "p99 at depth 32"].map(str::to_owned));
    for rate in lines.offered() {
        head.extend([format!("mean at {rate}/s"), format!("p99 at {rate}/s")]);
    }
    let row = |subject: &Subject| {
        let ratio = |point: &str, path: &str| said(lines.ratio(point, subject.name, BASE, path));
        let mut row = vec![format!("{} ({})", subject.title, subject.class.name())];
        row.extend(["/iops", "/mean_us", "/p99_us"].map(|path| ratio(MIXED_DEPTH, path)));
        for rate in lines.offered() {
            row.extend(["/mean_us", "/p99_us"].map(|path| ratio(&name_of(rate), path)));
        }
        row
    };
    let measured = ALL
        .iter()
        .filter(|one| lines.at("turn").any(|line| line["subject"] == one.name));
    Table {
        title: "Ratios to virtio-blk in QEMU, mixed 4–64 KiB requests, 60 % reads".to_owned(),
        head,
        rows: measured.map(row).collect(),
    }
}

fn over_time(lines: &Lines<'_>) -> Figure {
    let panel = |rate: u64| {
        let series = SHOWN
            .iter()
            .map(|name| {
                Series::new(
                    title_of(name),
                    dots(lines, rate, |line| line["subject"] == *name),
                )
            })
            .filter(|series| !series.points.is_empty())
            .collect();
        time_panel(rate, series)
    };
    figure(
        lines,
        "guest-over-time",
        "Response time over time at each offered rate",
        lines.offered().into_iter().map(panel).collect(),
        "a dot is the mean of the reads or of the writes of 50 ms, rounds one after the other; lower and narrower is \
         better, and dots that climb show a controller past its limit",
    )
}

fn by_class(lines: &Lines<'_>) -> Figure {
    let panel = |rate: u64| {
        let of = |class: Class| {
            let own = |line: &Value| line["class"] == class.name();
            Series::new(class.name(), dots(lines, rate, own))
        };
        time_panel(rate, vec![of(Class::Emulated), of(Class::Paravirtual)])
    };
    figure(
        lines,
        "guest-over-time-by-class",
        "Response time over time, all emulated against all paravirtual controllers",
        lines.offered().into_iter().map(panel).collect(),
        "a dot is the mean of the reads or of the writes of 50 ms of one controller; all controllers of a class have \
         one colour",
    )
}

fn time_panel(rate: u64, series: Vec<Series<(f64, f64)>>) -> Panel {
    Panel {
        title: format!("{rate} requests/s offered"),
        x: Axis::new("time, s", Scale::Linear),
        y: log_ms("response time"),
        marks: Marks::Dots(series),
    }
}

/// Seconds and milliseconds, each round behind the one before.
fn dots(lines: &Lines<'_>, rate: u64, own: impl Fn(&Value) -> bool) -> Vec<(f64, f64)> {
    let mut found = Vec::new();
    for line in lines.at(&name_of(rate)).filter(|line| own(line)) {
        let round = line["round"].as_f64().unwrap_or(1.0) - 1.0;
        // The round's length is what fio ran, near enough for an axis.
        let length = line["ios"].as_f64().unwrap_or(0.0) / line["iops"].as_f64().unwrap_or(1.0);
        for dot in line["dots"].as_array().into_iter().flatten() {
            if let (Some(at), Some(us)) = (dot[0].as_f64(), dot[1].as_f64()) {
                found.push((round * length + at / 1e3, us / 1e3));
            }
        }
    }
    found
}

fn against_rate(lines: &Lines<'_>) -> Figure {
    let mut panels = Vec::new();
    for (path, what) in [
        ("/mean_us", "mean response time"),
        ("/p99_us", "99th percentile"),
    ] {
        for class in [Class::Emulated, Class::Paravirtual] {
            panels.push(rate_panel(lines, class, path, what));
        }
    }
    figure(
        lines,
        "guest-against-rate",
        "Response time against offered rate, by controller",
        panels,
        "each line is a controller, virtio-blk in QEMU is in all panels; a line that stays flat to the right has room \
         left at that rate",
    )
}

fn rate_panel(lines: &Lines<'_>, class: Class, path: &str, what: &str) -> Panel {
    let is_own = |one: &&Subject| one.class == class || one.name == BASE;
    let line_of = |one: &Subject| {
        let at = |rate: &u64| {
            let point = lines.spread(&name_of(*rate), one.name, path)?;
            #[allow(clippy::cast_precision_loss, reason = "requests a second")]
            Some((*rate as f64, ms(point)))
        };
        Series::new(one.title, lines.offered().iter().filter_map(at).collect())
    };
    let series = ALL.iter().filter(is_own).map(line_of);
    Panel {
        title: format!("{what}, {}", class.name()),
        x: Axis::new("offered requests/s", Scale::Linear),
        y: log_ms(what),
        marks: Marks::Lines(series.filter(|series| !series.points.is_empty()).collect()),
    }
}

fn at_depth(lines: &Lines<'_>) -> Figure {
    let subjects = lines.subjects(MIXED_DEPTH);
    let groups: Vec<String> = subjects.iter().map(|one| one.title.to_owned()).collect();
    let panel = |title: &str, label: &str, path: &str, is_time: bool| {
        let values = subjects.iter().map(|one| {
            let spread = lines.spread(MIXED_DEPTH, one.name, path)?;
            Some(if is_time { ms(spread) } else { spread })
        });
        let series = vec![Series::new(title, values.collect())];
        bars(title, ("controller", label), &groups, series)
    };
    let panels = vec![
        panel("IOPS", "requests/s", "/iops", false),
        panel("mean response time", "ms", "/mean_us", true),
        super::apart::cpu_panel(
            lines,
            MIXED_DEPTH,
            &subjects,
            "CPU time per request by stage",
        ),
    ];
    let mut figure = figure(
        lines,
        "guest-depth-32",
        "32 mixed requests in flight, by controller",
        panels,
        "higher is better for IOPS, lower for response and CPU time",
    );
    figure.columns = 1;
    figure
}

fn figure(lines: &Lines<'_>, name: &str, title: &str, panels: Vec<Panel>, reads: &str) -> Figure {
    let detail = "mixed 4–64 KiB, 60 % reads";
    super::figure(
        lines,
        (name, title, detail),
        panels,
        (reads, lines.caveat()),
    )
}

fn name_of(rate: u64) -> String {
    rate_name(u32::try_from(rate).unwrap_or(u32::MAX))
}
