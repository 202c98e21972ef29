//! `cargo xtask bench cpu` (T2, study B): what a request costs in CPU time on a real disk.

use serde_json::Value;

use super::desk::Desk;
use super::draw::{self, NO_GUEST, Stage};
use super::interleave::{Point, rounds};
use super::load::{Load, Wait};
use super::subject::Subject;
use crate::report::rounds::{both_cpu_us, field, said};
use crate::report::{Bar, Recorded, Rounds, Section, Spread, Table, Verdict};

const SUITE: &str = "cpu";
const SUBJECTS: [Subject; 6] = [
    Subject::Bare,
    Subject::QSD,
    Subject::QSD_IO_THREAD,
    Subject::INTERRUPT,
    Subject::POLL,
    Subject::ADAPTIVE,
];
const POINT: &str = "depth 32, driver sleeps";
/// A second of a disk says little: its own moods last longer.
const LONGER: f64 = 2.0;

/// 4 KiB random reads of a filled disk, O_DIRECT, one vring.
pub(super) fn measure(desk: &mut Desk) -> Result<(), String> {
    let store = desk.disk(SUITE)?;
    let seconds = desk.effort.seconds * LONGER;
    let depths: &[u32] = desk.effort.pace.pick(&[1, 32, 128], &[32, 128], &[32]);
    let points: Vec<Point> = depths
        .iter()
        .map(|depth| Point {
            name: format!("depth {depth}, driver sleeps"),
            store: store.clone(),
            load: Load::reads(*depth, Wait::Sleep, seconds),
            subjects: desk.with_spdk(&SUBJECTS),
        })
        .collect();
    rounds(desk, SUITE, &points)
}

/// Study B's bars and table, and T2.
pub(crate) fn section(run: &Recorded) -> Option<Section> {
    let rounds = Rounds::of(run, SUITE)?;
    let points = rounds.points();
    let panels = vec![
        draw::bars(&rounds, &points, "requests", "IOPS", field("iops")),
        draw::bars(
            &rounds,
            &points,
            "CPU of both sides",
            "µs per I/O",
            both_cpu_us,
        ),
        draw::bars(
            &rounds,
            &points,
            "the daemon's CPU",
            "µs per I/O",
            field("daemon_cpu_us"),
        ),
        draw::stages(&rounds, POINT),
    ];
    let caption = (
        "higher is better for requests, lower for CPU; the last panel divides a request's CPU time by who spent it: bare fio \
         is a driver without a daemon",
        "what a guest adds: in this run the driver is a process of the host; user and kernel time are told apart by the \
         kernel's tick, so their border is less certain than their sum",
    );
    Some(Section {
        id: SUITE,
        title: "T2, study B · CPU per I/O".to_owned(),
        notes: vec![format!(
            "4 KiB random reads of a filled disk with O_DIRECT, one vring; not shown: {NO_GUEST}. Kernel work that runs \
             in interrupts is charged by the kernel to whoever ran on that CPU, or to nobody."
        )],
        verdicts: verdicts(&rounds),
        tables: vec![
            draw::comparison(&rounds, "A real disk", Subject::Bare.name()),
            stage_table(&rounds),
        ],
        figures: vec![draw::figure(
            run,
            "b-cpu",
            "Study B: requests, and what they cost",
            panels,
            caption,
        )],
    })
}

fn verdicts(rounds: &Rounds<'_>) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let bare = Subject::Bare.name();
    let qsd = draw::peer(rounds, POINT, "daemon_cpu_us", |new, old| new < old);
    for own in [Subject::ADAPTIVE, Subject::INTERRUPT] {
        // The default is judged; what an operator may choose instead stands beside it.
        let judged = |bar| match own {
            Subject::ADAPTIVE => bar,
            _ => Bar::Published,
        };
        let own = own.name();
        let to_qsd = rounds.ratio(POINT, own, qsd, field("daemon_cpu_us"));
        let what = format!("real disk, 4 KiB, depth 32: daemon CPU per I/O, {own} ÷ {qsd}");
        verdicts.push(draw::verdict(
            "T2",
            what,
            judged(Bar::AtMost(0.75)),
            "as little as bare fio",
            to_qsd,
        ));
        // The daemon's beside fio's own, which has no daemon.
        let daemon_or_alone = |result: &Value| {
            let of = |name: &str| result[name].as_f64();
            of("daemon_cpu_us").or_else(|| of("driver_cpu_us"))
        };
        let to_bare = rounds.ratio(POINT, own, bare, daemon_or_alone);
        let what = format!("real disk, 4 KiB, depth 32: daemon CPU per I/O, {own} ÷ {bare}'s own");
        let mut to_bare = draw::verdict("T2", what, judged(Bar::AtMost(1.15)), "≤ 1.0", to_bare);
        to_bare.note = draw::limit(rounds, POINT, [own, bare]);
        verdicts.push(to_bare);
    }
    verdicts
}

/// CPU per I/O by stage, and how often each side is woken for it.
fn stage_table(rounds: &Rounds<'_>) -> Table {
    let head = [
        "point",
        "who",
        "driver user µs",
        "driver kernel µs",
        "daemon user µs",
        "daemon kernel µs",
        "kicks per I/O",
        "calls per I/O",
        "wake-ups per I/O, both sides",
    ];
    let mut rows = Vec::new();
    for point in rounds.points() {
        for subject in rounds.subjects() {
            rows.push(stage_row(rounds, &point, &subject));
        }
    }
    Table {
        title: "CPU per I/O by stage".to_owned(),
        head: head.map(str::to_owned).to_vec(),
        rows,
    }
}

fn stage_row(rounds: &Rounds<'_>, point: &str, subject: &str) -> Vec<String> {
    let told = |spread: Option<Spread>, digits| said(spread, digits);
    let stage = |side, which| told(rounds.spread(point, subject, draw::stage(side, which)), 2);
    let per_request = |name: &'static str| {
        let of = move |result: &Value| Some(result[name].as_f64()? / result["requests"].as_f64()?);
        told(rounds.spread(point, subject, of), 3)
    };
    let wakes = |result: &Value| {
        let of = |name: &str| result[name].as_f64();
        Some((of("driver_wakes_s")? + of("daemon_wakes_s").unwrap_or(0.0)) / of("iops")?)
    };
    vec![
        point.to_owned(),
        subject.to_owned(),
        stage("driver", Stage::User),
        stage("driver", Stage::Kernel),
        stage("daemon", Stage::User),
        stage("daemon", Stage::Kernel),
        per_request("kicks"),
        per_request("calls"),
        told(rounds.spread(point, subject, wakes), 3),
    ]
}
