//! `cargo xtask bench split` (T4, T5): what splitting gains where a drive has inner parallelism, and that it
//! costs nothing where it has none.

use std::path::Path;

use serde_json::{Value, json};

use super::desk::Desk;
use super::draw;
use super::load::{Load, Wait};
use super::matrix;
use super::options::Pace;
use super::subject::{Store, Subject};
use crate::report::rounds::{field, said, said_ratio};
use crate::report::{Bar, Recorded, Rounds, Section, Spread, Table, Verdict};

const SUITE: &str = "split";
pub(super) const BARE: &str = "bare fio";
pub(super) const OFF: &str = "split off";
pub(super) const AUTO: &str = "split auto";

/// A disk, how many requests of 512 KiB are in flight, what the ratio must be, and whether fixed sizes are tried.
struct Point {
    disk: Disk,
    depth: u32,
    least: f64,
    has_fixed: bool,
}

/// The disk that is served.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Disk {
    /// A modelled drive: not this machine's.
    Model(&'static str),
    /// The real disk.
    Real,
}

const REQUEST_BYTES: u32 = 512 << 10;
const POINTS: &[Point] = &[
    point(Disk::Model("model:p3700"), 1, 1.9, true),
    point(Disk::Model("model:p320h"), 1, 1.7, true),
    point(Disk::Model("model:p3700"), 64, 0.98, false),
    point(Disk::Model("model:flat"), 1, 0.98, false),
    point(Disk::Model("model:flat"), 64, 0.98, false),
    point(Disk::Real, 1, 0.98, false),
    point(Disk::Real, 64, 0.98, false),
];

const fn point(disk: Disk, depth: u32, least: f64, has_fixed: bool) -> Point {
    Point {
        disk,
        depth,
        least,
        has_fixed,
    }
}

const LEARN_SECONDS_MAX: f64 = 4.0;
/// Of the best of them `auto` must reach 97 %.
const OF_BEST: f64 = 0.97;

impl Disk {
    /// As the command line takes it.
    pub(super) fn spec(self, real: &Path) -> String {
        match self {
            Disk::Model(spec) => spec.to_owned(),
            Disk::Real => real.to_string_lossy().into_owned(),
        }
    }

    pub(super) fn name(self) -> String {
        match self {
            Disk::Model(spec) => format!("{} (modelled)", spec.trim_start_matches("model:")),
            Disk::Real => "the real disk".to_owned(),
        }
    }
}

impl Point {
    fn name(&self) -> String {
        format!("{}, 512 KiB, depth {}", self.disk.name(), self.depth)
    }

    /// Ways to split, `off` and `auto` first.
    fn ways(&self, pace: Pace) -> Vec<String> {
        let fixed: &[&str] = match self.has_fixed {
            true => pace.pick(
                &["4K", "8K", "16K", "32K", "64K", "128K", "256K"],
                &["8K", "16K", "32K", "64K", "128K"],
                &["64K"],
            ),
            false => &[],
        };
        ["off", "auto"]
            .iter()
            .chain(fixed)
            .map(|way| format!("split {way}"))
            .collect()
    }

    fn load(&self, seconds: f64) -> Load {
        Load {
            block_bytes: REQUEST_BYTES,
            ..Load::reads(self.depth, Wait::Poll, seconds)
        }
    }
}

/// T4 and T5, then the figure of study A.
pub(super) fn measure(desk: &mut Desk) -> Result<(), String> {
    let Store::Disk(real) = desk.disk(SUITE)? else {
        return Err("a null disk is not split".to_owned());
    };
    for point in POINTS {
        measure_point(desk, point, &real)?;
        if desk.effort.pace != Pace::Smoke {
            println!("{SUITE}: {} done", point.name());
        }
    }
    for disk in [Disk::Model("model:p3700"), Disk::Real] {
        matrix::measure(desk, disk, &real)?;
    }
    Ok(())
}

/// All ways are served at once, by a daemon each, and driven in turn; idle ones cost nothing.
fn measure_point(desk: &mut Desk, point: &Point, real: &Path) -> Result<(), String> {
    let effort = desk.effort;
    let load = point.load(effort.seconds);
    // At either pace long enough to see 2 000 large requests on the slowest of the disks but a real one.
    let learn = (effort.seconds * 10.0).min(LEARN_SECONDS_MAX);
    let mut served = Vec::new();
    for way in point.ways(effort.pace) {
        let socket = desk
            .run
            .folder()
            .join(format!("{}.sock", way.replace(' ', "-")));
        let command = serve(desk, &way, &point.disk.spec(real), &socket);
        let daemon = desk.start(&command, &socket)?;
        let seconds = if way == AUTO {
            learn
        } else {
            effort.seconds / 2.0
        };
        desk.drive(&socket, &load.with_seconds(seconds).words())?;
        served.push((way, command, socket, daemon));
    }
    for round in 1..=effort.rounds {
        let mut order: Vec<_> = served.iter().collect();
        if round % 2 == 0 {
            order.reverse();
        }
        for (way, command, socket, _) in order {
            let result = desk.drive(socket, &load.words())?;
            note(desk, point, way, round, (command, &result))?;
        }
        if point.disk == Disk::Real {
            let (command, result) =
                desk.measure(Subject::Bare, &Store::Disk(real.to_owned()), &load)?;
            note(desk, point, BARE, round, (&command, &result))?;
        }
    }
    served
        .into_iter()
        .try_for_each(|(_, _, _, daemon)| daemon.stop())
}

fn note(
    desk: &mut Desk,
    point: &Point,
    way: &str,
    round: u32,
    (command, result): (&[String], &Value),
) -> Result<(), String> {
    let line = json!({
        "round": round, "point": point.name(), "subject": way, "is_modelled": point.disk != Disk::Real,
        "depth": point.depth, "request_bytes": REQUEST_BYTES, "command": command,
        "driver": point.load(desk.effort.seconds).words(), "result": result,
    });
    desk.run.note(SUITE, &line)
}

/// A daemon that splits so; `way` is `split HOW`.
pub(super) fn serve(desk: &Desk, way: &str, disk: &str, socket: &Path) -> Vec<String> {
    let cleave = desk.cleave.to_string_lossy();
    let mut words = vec![cleave.into_owned()];
    let options = format!("serve --queues 1 --workers 1 --read-only --log warn --{way} --disk");
    words.extend(options.split(' ').map(str::to_owned));
    words.extend([
        disk.to_owned(),
        "--socket-path".to_owned(),
        socket.to_string_lossy().into_owned(),
    ]);
    words
}

/// T4, T5 and study A.
pub(crate) fn section(run: &Recorded) -> Option<Section> {
    let rounds = Rounds::of(run, SUITE)?;
    let mut section = Section {
        id: SUITE,
        title: "T4, T5, study A · Splitting".to_owned(),
        notes: vec![
            "Random reads of 512 KiB, a polling driver. Before it is measured, `split auto` is driven for some seconds and \
             learns. Drives called \"modelled\" are memory that takes as long as such a drive would: they show what a policy \
             does on a drive of that shape, not how fast this machine is."
                .to_owned(),
        ],
        verdicts: POINTS.iter().flat_map(|point| verdicts(&rounds, point)).collect(),
        tables: vec![table(&rounds)],
        figures: Vec::new(),
    };
    section.figures = matrix::figures(run);
    Some(section)
}

fn verdicts(rounds: &Rounds<'_>, point: &Point) -> Vec<Verdict> {
    let name = point.name();
    let faster = rounds.ratio(&name, AUTO, OFF, field("iops"));
    let id = if point.has_fixed { "T4" } else { "T5" };
    let aim = if point.has_fixed {
        "beats bare fio's single request by the same"
    } else {
        "≥ 1.0"
    };
    let mut all = vec![draw::verdict(
        id,
        format!("{name}: throughput, auto ÷ off"),
        Bar::AtLeast(point.least),
        aim,
        faster,
    )];
    if point.has_fixed {
        let best = best_fixed(rounds, &name);
        let ratio = best
            .as_ref()
            .and_then(|best| rounds.ratio(&name, AUTO, best, field("iops")));
        let best = best.unwrap_or_default();
        let what = format!("{name}: throughput, auto ÷ the best fixed size");
        let mut verdict = draw::verdict(id, what, Bar::AtLeast(OF_BEST), aim, ratio);
        verdict.note = format!("best of all tried: {best}");
        all.push(verdict);
    } else {
        // Of latencies the inverse, so that larger is better in both rows.
        let sooner = rounds.ratio(&name, OFF, AUTO, field("mean_us"));
        let what = format!("{name}: mean latency, off ÷ auto");
        all.push(draw::verdict(
            id,
            what,
            Bar::AtLeast(point.least),
            aim,
            sooner,
        ));
    }
    all
}

/// By its median.
fn best_fixed(rounds: &Rounds<'_>, point: &str) -> Option<String> {
    let rate = |subject: &String| {
        let spread: Option<Spread> = rounds.spread(point, subject, field("iops"));
        spread.map(|spread| spread.median)
    };
    let fixed = rounds.subjects().into_iter();
    let fixed = fixed.filter(|subject| {
        subject.starts_with("split ") && ![OFF, AUTO].contains(&subject.as_str())
    });
    let rated = fixed.filter_map(|subject| Some((rate(&subject)?, subject)));
    rated
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, subject)| subject)
}

fn table(rounds: &Rounds<'_>) -> Table {
    let head = [
        "disk",
        "who",
        "MB/s",
        "throughput to off",
        "mean latency to off",
        "mean µs",
        "p99 µs",
    ];
    let mut rows = Vec::new();
    for point in rounds.points() {
        let here = rounds.only(|line| line["point"] == point);
        for subject in here.subjects() {
            let number = |name| said(rounds.spread(&point, &subject, field(name)), 0);
            let ratio = |name| said_ratio(rounds.ratio(&point, &subject, OFF, field(name)));
            let megabytes =
                |result: &Value| Some(result["iops"].as_f64()? * f64::from(REQUEST_BYTES) / 1e6);
            rows.push(vec![
                point.clone(),
                subject.clone(),
                said(rounds.spread(&point, &subject, megabytes), 0),
                ratio("iops"),
                ratio("mean_us"),
                number("mean_us"),
                number("p99_us"),
            ]);
        }
    }
    Table {
        title: "Requests of 512 KiB".to_owned(),
        head: head.map(str::to_owned).to_vec(),
        rows,
    }
}
