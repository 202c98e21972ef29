//! Tables and figures that several suites draw.

use serde_json::Value;

use super::subject::Subject;
use crate::report::chart::{Axis, Figure, Marks, Panel, Scale, Series};
use crate::report::rounds::{field, said, said_ratio};
use crate::report::{Bar, Recorded, Rounds, Spread, Table, Verdict};

/// The caveat under every figure of the host's suites.
pub(super) const NO_GUEST: &str = "the guest's own CPU and its interrupts: the driver is a process of the host, pinned to a CPU of its own";

/// Under a title: on what it was measured.
pub(super) fn machine(run: &Recorded) -> String {
    let fact = |name: &str| {
        run.environment[name]
            .as_str()
            .unwrap_or("unknown")
            .to_owned()
    };
    let pace = match run.asked["pace"].as_str() {
        Some("Smoke") => " · SMOKE RUN: its figures say nothing",
        _ => "",
    };
    let kernel = fact("kernel");
    // Behind the release stands when and how it was built.
    let kernel: Vec<&str> = kernel.split(' ').take(2).collect();
    format!(
        "{} · {} CPUs · {} · medians with minimum and maximum of the rounds{pace}",
        fact("cpu"),
        fact("cpus_online"),
        kernel.join(" ")
    )
}

/// Every subject at every point, with its ratios to `base`.
pub(super) fn comparison(rounds: &Rounds<'_>, title: &str, base: &str) -> Table {
    let head = [
        "point",
        "who",
        "kIOPS",
        "mean µs",
        "p99 µs",
        "IOPS ratio",
        "driver CPU µs/IO",
        "daemon CPU µs/IO",
        "daemon CPU ratio",
        "wake-ups/s driver",
        "wake-ups/s daemon",
    ];
    let mut rows = Vec::new();
    for point in rounds.points() {
        let here = rounds.only(|line| line["point"] == point);
        for subject in here.subjects() {
            rows.push(comparison_row(rounds, &point, &subject, base));
        }
    }
    Table {
        title: format!("{title}; ratios to {base}"),
        head: head.map(str::to_owned).to_vec(),
        rows,
    }
}

fn comparison_row(rounds: &Rounds<'_>, point: &str, subject: &str, base: &str) -> Vec<String> {
    let number = |name, digits| said(rounds.spread(point, subject, field(name)), digits);
    let ratio = |name| match subject == base {
        true => "1".to_owned(),
        false => said_ratio(rounds.ratio(point, subject, base, field(name))),
    };
    let kilo = |result: &Value| Some(result["iops"].as_f64()? / 1e3);
    vec![
        point.to_owned(),
        subject.to_owned(),
        said(rounds.spread(point, subject, kilo), 1),
        number("mean_us", 1),
        number("p99_us", 1),
        ratio("iops"),
        number("driver_cpu_us", 3),
        number("daemon_cpu_us", 3),
        ratio("daemon_cpu_us"),
        number("driver_wakes_s", 0),
        number("daemon_wakes_s", 0),
    ]
}

/// A group of bars for each of the points, a bar for each subject.
pub(super) fn bars(
    rounds: &Rounds<'_>,
    points: &[String],
    title: &str,
    label: &str,
    of: impl Fn(&Value) -> Option<f64> + Copy,
) -> Panel {
    let subjects = rounds.subjects();
    let series = subjects.iter().map(|subject| {
        let values = points.iter().map(|point| rounds.spread(point, subject, of));
        Series::new(subject, values.collect())
    });
    Panel {
        title: title.to_owned(),
        x: Axis::new("", Scale::Linear),
        y: Axis::new(label, Scale::Linear),
        marks: Marks::Bars {
            groups: points.to_vec(),
            series: series.collect(),
        },
    }
}

/// Whose time, and where it was spent.
#[derive(Clone, Copy)]
pub(super) enum Stage {
    User,
    Kernel,
    /// Too short for the kernel's tick to tell.
    Untold,
}

/// CPU time per request of one side in one stage.
pub(super) fn stage(side: &'static str, stage: Stage) -> impl Fn(&Value) -> Option<f64> + Copy {
    move |result: &Value| {
        let cpu = result[format!("{side}_cpu_us")].as_f64()?;
        let user = result[format!("{side}_user_share")].as_f64();
        match stage {
            Stage::User => user.map(|share| cpu * share),
            Stage::Kernel => user.map(|share| cpu * (1.0 - share)),
            Stage::Untold => user.is_none().then_some(cpu),
        }
    }
}

/// CPU per request by side and by user and kernel time, as far as the kernel tells them apart.
pub(super) fn stages(rounds: &Rounds<'_>, point: &str) -> Panel {
    let subjects = rounds.subjects();
    let of = |subject: &String, side, which| {
        let spread: Option<Spread> = rounds.spread(point, subject, stage(side, which));
        spread.map_or(0.0, |spread| spread.median)
    };
    let part = |side: &'static str, which: Stage, kind: &str| {
        let values = subjects.iter().map(|subject| match which {
            // Some rounds may be told apart and others not: then those that are speak for all.
            Stage::Untold if of(subject, side, Stage::Kernel) > 0.0 => 0.0,
            which => of(subject, side, which),
        });
        Series::new(format!("{side} {kind}"), values.collect::<Vec<f64>>())
    };
    let mut parts = Vec::new();
    for side in ["driver", "daemon"] {
        parts.push(part(side, Stage::User, "user"));
        parts.push(part(side, Stage::Kernel, "kernel"));
        parts.push(part(side, Stage::Untold, "user or kernel"));
    }
    parts.retain(|part| part.points.iter().any(|value| *value > 0.0));
    Panel {
        title: format!("CPU per I/O by stage, {point}"),
        x: Axis::new("", Scale::Linear),
        y: Axis::new("CPU, µs per I/O", Scale::Linear),
        marks: Marks::Stacked {
            bars: subjects,
            parts,
        },
    }
}

/// A figure with its caption.
pub(super) fn figure(
    run: &Recorded,
    name: &str,
    title: &str,
    panels: Vec<Panel>,
    (reads, hides): (&str, &str),
) -> Figure {
    Figure {
        name: name.to_owned(),
        title: title.to_owned(),
        subtitle: machine(run),
        columns: panels.len().clamp(1, 2),
        panels,
        reads: reads.to_owned(),
        hides: hides.to_owned(),
    }
}

/// A row of the table T1 to T12.
pub(super) fn verdict(
    id: &'static str,
    what: impl Into<String>,
    must: Bar,
    aim: &'static str,
    measured: Option<Spread>,
) -> Verdict {
    Verdict {
        id,
        what: what.into(),
        must,
        aim,
        measured,
        is_count: false,
        note: String::new(),
    }
}

/// The stronger of the peer's two ways to run at a point: in its main loop, or with an I/O thread.
pub(super) fn peer(
    rounds: &Rounds<'_>,
    point: &str,
    name: &'static str,
    is_better: fn(f64, f64) -> bool,
) -> &'static str {
    let median = |subject: Subject| {
        let spread: Option<Spread> = rounds.spread(point, subject.name(), field(name));
        spread.map(|spread| spread.median)
    };
    match (median(Subject::QSD), median(Subject::QSD_IO_THREAD)) {
        (Some(main), Some(thread)) if is_better(thread, main) => Subject::QSD_IO_THREAD.name(),
        _ => Subject::QSD.name(),
    }
}

/// Share of a CPU. Above, that CPU is the limit, or spins, and what is measured is not the disk alone.
const BUSY: f64 = 0.9;

/// Remark on the two sides of a ratio: the CPUs that were full.
pub(super) fn limit(rounds: &Rounds<'_>, point: &str, subjects: [&str; 2]) -> String {
    let is_full = |who: &str, name| {
        let spread: Option<Spread> = rounds.spread(point, who, field(name));
        spread.is_some_and(|spread| spread.median > BUSY)
    };
    let mut full = Vec::new();
    for who in subjects {
        for (side, name) in [("daemon", "daemon_busy"), ("driver", "driver_busy")] {
            if is_full(who, name) {
                full.push(format!("the {side}'s CPU ({who})"));
            }
        }
    }
    match full.is_empty() {
        true => String::new(),
        false => format!(
            "CPU-bound, or spinning: {}; not the disk alone was measured",
            full.join(", ")
        ),
    }
}
