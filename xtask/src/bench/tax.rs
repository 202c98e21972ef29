//! `cargo xtask bench tax` (T3, study D): what a request pays for not being on the bare disk.

use serde_json::Value;

use super::desk::Desk;
use super::draw::{self, NO_GUEST};
use super::interleave::{self, Point};
use super::legs;
use super::load::{Load, Wait};
use super::options::Pace;
use super::subject::Subject;
use crate::report::chart::{Axis, Figure, Marks, Panel, Scale, Series};
use crate::report::rounds::field;
use crate::report::{Bar, Recorded, Rounds, Section, Spread, Verdict};

const SUITE: &str = "tax";
const SUBJECTS: [Subject; 4] = [
    Subject::Bare,
    Subject::QSD,
    Subject::QSD_IO_THREAD,
    Subject::ADAPTIVE,
];
const READ_PERCENT: u32 = 60;
/// A second of a disk says little: its own moods last longer.
const LONGER: f64 = 1.5;
const AIM: &str = "≤ 1.01";
const ALONE: [(&str, Wait); 2] = [
    ("depth 1, driver sleeps", Wait::Sleep),
    ("depth 1, driver polls", Wait::Poll),
];

/// Random 60/40 from 2 to 20 in flight, and one at a time.
pub(super) fn measure(desk: &mut Desk) -> Result<(), String> {
    let store = desk.disk_to_write(SUITE)?;
    let seconds = desk.effort.seconds * LONGER;
    let mut points: Vec<Point> = asked(desk.effort.pace)
        .into_iter()
        .map(|(kib, threads)| Point {
            name: name(kib, threads),
            store: store.clone(),
            load: mixed(kib, threads, Wait::Sleep, seconds),
            subjects: desk.with_spdk(&SUBJECTS),
        })
        .collect();
    points.extend(ALONE.map(|(name, wait)| Point {
        name: name.to_owned(),
        store: store.clone(),
        load: mixed(4, 1, wait, seconds),
        subjects: [desk.with_spdk(&SUBJECTS), vec![Subject::POLL]].concat(),
    }));
    interleave::rounds(desk, SUITE, &points)?;
    legs::measure(desk, seconds)
}

/// KiB and threads.
fn asked(pace: Pace) -> Vec<(u32, u32)> {
    let all = [2, 4, 8, 12, 16, 20];
    let both = |threads: &[u32]| {
        let small = threads.iter().map(|threads| (4, *threads));
        small
            .chain(threads.iter().map(|threads| (8, *threads)))
            .collect()
    };
    pace.pick(
        both(&all),
        vec![(4, 2), (4, 8), (4, 20), (8, 2), (8, 20)],
        vec![(4, 2)],
    )
}

fn name(kib: u32, threads: u32) -> String {
    format!("{kib} KiB, {threads} in flight")
}

/// 60 % reads.
pub(super) fn mixed(kib: u32, threads: u32, wait: Wait, seconds: f64) -> Load {
    Load {
        block_bytes: kib << 10,
        read_percent: READ_PERCENT,
        ..Load::reads(threads, wait, seconds)
    }
}

/// T3 and study D.
pub(crate) fn section(run: &Recorded) -> Option<Section> {
    let rounds = Rounds::of(run, SUITE)?;
    let mut figures = vec![by_threads(run, &rounds), alone(run, &rounds)];
    figures.extend(legs::figure(run));
    let mut tables = vec![draw::comparison(
        &rounds,
        "Random, 60 % reads",
        Subject::Bare.name(),
    )];
    tables.extend(legs::table(run));
    Some(Section {
        id: SUITE,
        title: "T3, study D · The tax".to_owned(),
        notes: vec![
            "Random requests, 60 % reads, of a filled disk with O_DIRECT. A thread of the study is a request in flight that is \
             made anew when it ends; one driver thread carries all of them on one vring, and fio one job of the same depth, \
             so that neither side pays for the scheduling of many threads. The tax is the mean response time by that of the bare \
             disk, less one."
                .to_owned(),
        ],
        verdicts: verdicts(&rounds),
        tables,
        figures,
    })
}

fn verdicts(rounds: &Rounds<'_>) -> Vec<Verdict> {
    let (own, bare) = (Subject::ADAPTIVE.name(), Subject::Bare.name());
    let mean = field("mean_us");
    let mut verdicts = Vec::new();
    for point in rounds.points() {
        let qsd = draw::peer(rounds, &point, "mean_us", |new, old| new < old);
        let bar = match ALONE.iter().find(|(name, _)| *name == point) {
            Some((_, Wait::Poll)) => Bar::AtMost(1.1),
            Some((_, Wait::Sleep)) => Bar::Published,
            None => Bar::AtMost(1.04),
        };
        let what =
            |base: &str, own: &str| format!("60/40, {point}: mean response time, {own} ÷ {base}");
        let mut to_bare = draw::verdict(
            "T3",
            what(bare, own),
            bar,
            AIM,
            rounds.ratio(&point, own, bare, mean),
        );
        to_bare.note = draw::limit(rounds, &point, [own, bare]);
        let to_qsd = rounds.ratio(&point, own, qsd, mean);
        verdicts.push(to_bare);
        verdicts.push(draw::verdict(
            "T3",
            what(qsd, own),
            Bar::AtMost(1.0),
            AIM,
            to_qsd,
        ));
        let theirs = rounds.ratio(&point, qsd, bare, mean);
        verdicts.push(draw::verdict(
            "T3",
            what(bare, qsd),
            Bar::Published,
            "",
            theirs,
        ));
    }
    verdicts
}

/// Study D: rate, response time and tax against threads, a row for each size.
fn by_threads(run: &Recorded, rounds: &Rounds<'_>) -> Figure {
    let mut panels = Vec::new();
    for kib in [4u64, 8] {
        let here = rounds.only(|line| {
            line["block_bytes"] == kib << 10
                && line["depth"].as_u64().is_some_and(|depth| depth > 1)
        });
        let kilo = |result: &Value| Some(result["iops"].as_f64()? / 1e3);
        panels.push(along(
            &here,
            &format!("{kib} KiB: requests"),
            "thousand IOPS",
            |point, who| here.spread(point, who, kilo),
        ));
        panels.push(along(
            &here,
            &format!("{kib} KiB: response time"),
            "mean, µs",
            |point, who| here.spread(point, who, field("mean_us")),
        ));
        let bare = Subject::Bare.name();
        panels.push(along(
            &here,
            &format!("{kib} KiB: the tax"),
            "more than bare, per cent",
            |point, who| {
                let ratio = here.ratio(point, who, bare, field("mean_us"));
                let more = |ratio: Spread| ratio.map(|value| (value - 1.0) * 100.0);
                ratio.filter(|_| who != bare).map(more)
            },
        ));
    }
    let mut figure = draw::figure(
        run,
        "d-tax",
        "Study D: what a request pays for not being on the bare disk",
        panels,
        (
            "each point is the median of the rounds with the least and the largest; the tax is taken round by round, below zero \
             the daemon answered sooner than bare fio",
            NO_GUEST,
        ),
    );
    figure.columns = 3;
    figure
}

fn along(
    rounds: &Rounds<'_>,
    title: &str,
    label: &str,
    of: impl Fn(&str, &str) -> Option<Spread>,
) -> Panel {
    let depth = |point: &str| {
        let line = rounds.lines().iter().find(|line| line["point"] == *point)?;
        line["depth"].as_f64()
    };
    let series = rounds.subjects().into_iter().map(|who| {
        let points = rounds
            .points()
            .into_iter()
            .filter_map(|point| Some((depth(&point)?, of(&point, &who)?)));
        let mut points: Vec<_> = points.collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series::new(who, points)
    });
    Panel {
        title: title.to_owned(),
        x: Axis::new("threads", Scale::Linear),
        y: Axis::new(label, Scale::Linear),
        marks: Marks::Lines(series.collect()),
    }
}

fn alone(run: &Recorded, rounds: &Rounds<'_>) -> Figure {
    let points = ALONE.map(|(name, _)| name.to_owned());
    let panels = vec![
        draw::bars(
            rounds,
            &points,
            "mean response time",
            "µs",
            field("mean_us"),
        ),
        draw::bars(
            rounds,
            &points,
            "99 of 100 are no slower",
            "µs",
            field("p99_us"),
        ),
    ];
    draw::figure(
        run,
        "d-depth-1",
        "Study D: one request at a time, 4 KiB, 60 % reads",
        panels,
        (
            "lower is better; bare fio waits in the kernel in both groups; a driver that sleeps is woken twice more than fio: the \
             daemon by its kick, it by the daemon's call",
            NO_GUEST,
        ),
    )
}
