//! `cargo xtask bench scale` (T9): one disk and many, one vring and many.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::desk::Desk;
use super::draw;
use super::load::{Load, Wait};
use super::options::Pace;
use super::subject::{Store, Subject};
use crate::report::chart::{Axis, Marks, Panel, Scale, Series};
use crate::report::rounds::{field, said, said_ratio};
use crate::report::{Bar, Recorded, Rounds, Section, Table, Verdict};

const SUITE: &str = "scale";
const SUBJECTS: [Subject; 3] = [Subject::QSD, Subject::INTERRUPT, Subject::ADAPTIVE];
const DEPTH: u32 = 32;
const DISKS: [u32; 4] = [1, 4, 16, 64];
const VRINGS: [u32; 5] = [1, 2, 4, 8, 16];
const AIM: &str = "flat to 256";

/// So many daemons with a disk each, driven at once; each with so many vrings.
struct Point {
    disks: u32,
    vrings: u32,
}

impl Point {
    fn name(&self) -> String {
        let many = |count: u32, what: &str| match count {
            1 => format!("1 {what}"),
            count => format!("{count} {what}s"),
        };
        format!(
            "{}, {}",
            many(self.disks, "disk"),
            many(self.vrings, "vring")
        )
    }

    fn all(pace: Pace) -> Vec<Point> {
        let disks = pace.pick(&DISKS[..], &DISKS, &[1, 2]);
        let vrings = pace.pick(&VRINGS[1..], &[4, 16], &[2]);
        let by_disks = disks.iter().map(|disks| Point {
            disks: *disks,
            vrings: 1,
        });
        let by_vrings = vrings.iter().map(|vrings| Point {
            disks: 1,
            vrings: *vrings,
        });
        by_disks.chain(by_vrings).collect()
    }
}

/// 4 KiB reads of null disks, so much in flight that nobody waits for the driver.
pub(super) fn measure(desk: &mut Desk) -> Result<(), String> {
    let effort = desk.effort;
    for round in effort.pace.pick(0, 0, 1)..=effort.rounds {
        for point in Point::all(effort.pace) {
            for subject in SUBJECTS {
                one(desk, &point, subject, round)?;
            }
        }
    }
    Ok(())
}

fn one(desk: &mut Desk, point: &Point, subject: Subject, round: u32) -> Result<(), String> {
    let mut running = Vec::new();
    let mut sockets: Vec<PathBuf> = Vec::new();
    for number in 0..point.disks {
        let socket = desk.run.folder().join(format!("scale-{number}.sock"));
        let command = subject.command(&desk.cleave, &Store::Null, point.vrings, &socket);
        running.push(desk.start(&command.ok_or("no daemon")?, &socket)?);
        sockets.push(socket);
    }
    let load = Load {
        queues: point.vrings,
        ..Load::reads(DEPTH, Wait::Sleep, desk.effort.seconds)
    };
    let result = desk.drive_all(&sockets, &load.words())?;
    for daemon in running {
        daemon.stop()?;
    }
    desk.run.note(
        SUITE,
        &json!({
            "round": round, "is_warm_up": round == 0, "point": point.name(), "subject": subject.name(),
            "disks": point.disks, "vrings": point.vrings, "driver": load.words(), "result": result,
        }),
    )
}

fn own_mib_per_disk(result: &Value) -> Option<f64> {
    Some(result["daemon_own_kib"].as_f64()? / 1024.0 / result["disks"].as_f64()?)
}

/// T9.
pub(crate) fn section(run: &Recorded) -> Option<Section> {
    let rounds = Rounds::of(run, SUITE)?;
    let panels = vec![
        along(
            &rounds,
            ("disks", "vrings"),
            "CPU of the daemons, µs per I/O",
            &field("daemon_cpu_us"),
        ),
        along(
            &rounds,
            ("vrings", "disks"),
            "CPU of the daemon, µs per I/O",
            &field("daemon_cpu_us"),
        ),
        along(
            &rounds,
            ("disks", "vrings"),
            "own memory, MiB per disk",
            &own_mib_per_disk,
        ),
        along(
            &rounds,
            ("disks", "vrings"),
            "all disks together, IOPS",
            &field("iops"),
        ),
    ];
    let caption = (
        "flat or falling is what is wanted of the first three; all daemons share one CPU and all drivers another, so the \
         last panel shows how well wake-ups are shared, not how far many CPUs would go",
        "what many CPUs would do; guest memory, which belongs to the VMM",
    );
    Some(Section {
        id: SUITE,
        title: "T9 · Scale".to_owned(),
        notes: vec![format!(
            "4 KiB random reads of null disks, depth {DEPTH} on each vring, a sleeping driver thread for each vring; \
             one daemon process for each disk, one worker each. Own memory: private pages and the share of shared files' pages."
        )],
        verdicts: verdicts(&rounds),
        tables: vec![table(&rounds)],
        figures: vec![draw::figure(
            run,
            "t9-scale",
            "Many disks, many vrings",
            panels,
            caption,
        )],
    })
}

/// Along one count, where the other is 1.
fn along(
    rounds: &Rounds<'_>,
    (count, other): (&str, &str),
    label: &str,
    of: &dyn Fn(&Value) -> Option<f64>,
) -> Panel {
    let here = rounds.only(|line| line[other] == 1);
    let series = here.subjects().into_iter().map(|subject| {
        let points = here.points().into_iter().filter_map(|point| {
            let is_it = |line: &&&Value| line["point"] == *point;
            let at = here.lines().iter().find(is_it)?[count].as_f64()?;
            Some((at, here.spread(&point, &subject, of)?))
        });
        let mut points: Vec<_> = points.collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series::new(subject, points)
    });
    Panel {
        title: format!("{label}, by {count}"),
        x: Axis::new(count, Scale::Log2),
        y: Axis::new(label, Scale::Linear),
        marks: Marks::Lines(series.collect()),
    }
}

/// The most of each, beside one.
fn verdicts(rounds: &Rounds<'_>) -> Vec<Verdict> {
    let one = Point {
        disks: 1,
        vrings: 1,
    }
    .name();
    let mut verdicts = Vec::new();
    for point in rounds.points().into_iter().filter(|point| *point != one) {
        // The default is judged; what an operator may choose instead stands beside it.
        for (own, bar) in [
            (Subject::ADAPTIVE, Bar::AtMost(1.1)),
            (Subject::INTERRUPT, Bar::Published),
        ] {
            let own = own.name();
            let cpu = rounds.ratio_of((&point, own), (&one, own), field("daemon_cpu_us"));
            let what = format!("{own}, daemon CPU per I/O, {point} ÷ {one}");
            verdicts.push(draw::verdict("T9", what, bar, AIM, cpu));
        }
    }
    let own = Subject::ADAPTIVE.name();
    let most = rounds
        .lines()
        .iter()
        .filter_map(|line| line["disks"].as_u64())
        .max();
    if let Some(disks) = most.and_then(|disks| u32::try_from(disks).ok()) {
        let point = Point { disks, vrings: 1 }.name();
        let memory = rounds.spread(&point, own, own_mib_per_disk);
        let what = format!("{own}, own memory a disk, MiB, {point}");
        verdicts.push(draw::verdict("T9", what, Bar::AtMost(2.0), AIM, memory));
    }
    verdicts
}

fn table(rounds: &Rounds<'_>) -> Table {
    let head = [
        "point",
        "who",
        "kIOPS",
        "daemon CPU µs/IO",
        "to one disk, one vring",
        "own MiB per disk",
    ];
    let one = Point {
        disks: 1,
        vrings: 1,
    }
    .name();
    let mut rows = Vec::new();
    for point in rounds.points() {
        for subject in rounds.subjects() {
            let kilo = |result: &Value| Some(result["iops"].as_f64()? / 1e3);
            let cpu = field("daemon_cpu_us");
            rows.push(vec![
                point.clone(),
                subject.clone(),
                said(rounds.spread(&point, &subject, kilo), 0),
                said(rounds.spread(&point, &subject, cpu), 3),
                said_ratio(rounds.ratio_of((&point, &subject), (&one, &subject), cpu)),
                said(rounds.spread(&point, &subject, own_mib_per_disk), 2),
            ]);
        }
    }
    Table {
        title: "Many disks, many vrings".to_owned(),
        head: head.map(str::to_owned).to_vec(),
        rows,
    }
}
