//! `cargo xtask bench transport` (T1): a disk that touches no data, so that what is measured is the ring alone.

use super::desk::Desk;
use super::draw::{self, NO_GUEST};
use super::interleave::{Point, rounds};
use super::load::{Load, Wait};
use super::subject::{Store, Subject};
use crate::report::rounds::field;
use crate::report::{Bar, Recorded, Rounds, Section, Verdict};

const SUITE: &str = "transport";
const SUBJECTS: [Subject; 5] = [
    Subject::QSD,
    Subject::QSD_IO_THREAD,
    Subject::INTERRUPT,
    Subject::POLL,
    Subject::ADAPTIVE,
];
const AIM: &str = "past SPDK without its burnt core: 10 M on four cores";

/// Depth, how the driver waits, and what the ratio of rates must be.
const POINTS: [(u32, Wait, &str, f64); 6] = [
    (1, Wait::Sleep, "depth 1, driver sleeps", 1.5),
    (1, Wait::Poll, "depth 1, driver polls", 2.5),
    (32, Wait::Sleep, "depth 32, driver sleeps", 3.0),
    (32, Wait::Poll, "depth 32, driver polls", 3.0),
    (128, Wait::Sleep, "depth 128, driver sleeps", 2.5),
    (128, Wait::Poll, "depth 128, driver polls", 2.5),
];

/// 4 KiB random reads on one vring of a null disk.
pub(super) fn measure(desk: &mut Desk) -> Result<(), String> {
    let seconds = desk.effort.seconds;
    let points = POINTS.map(|(depth, wait, name, _)| Point {
        name: name.to_owned(),
        store: Store::Null,
        load: Load::reads(depth, wait, seconds),
        subjects: desk.with_spdk(&SUBJECTS),
    });
    rounds(desk, SUITE, &points)
}

/// Rates, CPU, and T1.
pub(crate) fn section(run: &Recorded) -> Option<Section> {
    let rounds = Rounds::of(run, SUITE)?;
    let points = rounds.points();
    let kilo = |result: &serde_json::Value| Some(result["iops"].as_f64()? / 1e3);
    let of = |depth: &str| -> Vec<String> {
        points
            .iter()
            .filter(|point| point.starts_with(depth))
            .cloned()
            .collect()
    };
    let (alone, deep) = (of("depth 1,"), [of("depth 32,"), of("depth 128,")].concat());
    let panels = vec![
        draw::bars(
            &rounds,
            &alone,
            "one request at a time",
            "thousand IOPS",
            kilo,
        ),
        draw::bars(&rounds, &deep, "many in flight", "IOPS", field("iops")),
        draw::bars(
            &rounds,
            &alone,
            "daemon's CPU, one at a time",
            "µs per I/O",
            field("daemon_cpu_us"),
        ),
        draw::bars(
            &rounds,
            &deep,
            "daemon's CPU, many in flight",
            "µs per I/O",
            field("daemon_cpu_us"),
        ),
    ];
    let caption = (
        "above, higher is better; below, lower is; each bar is the median of the rounds, its whisker goes from the least \
         to the largest; the disk does nothing, so all of it is the cost of the ring",
        NO_GUEST,
    );
    Some(Section {
        id: SUITE,
        title: "T1 · The ring alone".to_owned(),
        notes: vec![
            "4 KiB random reads of a disk that touches no data, one vring, driver and daemon pinned to a CPU each, \
             a fresh daemon for each figure. A driver that sleeps is woken by the daemon's call, one that polls is not."
                .to_owned(),
        ],
        verdicts: verdicts(&rounds),
        tables: vec![draw::comparison(&rounds, "The ring alone", Subject::QSD.name())],
        figures: vec![draw::figure(run, "t1-transport", "The cost of the ring alone", panels, caption)],
    })
}

fn verdicts(rounds: &Rounds<'_>) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for (_, _, point, least) in POINTS {
        let qsd = draw::peer(rounds, point, "iops", |new, old| new > old);
        for own in [Subject::ADAPTIVE, Subject::INTERRUPT, Subject::POLL] {
            let ratio = rounds.ratio(point, own.name(), qsd, field("iops"));
            let what = format!(
                "null disk, 4 KiB, {point}: IOPS {} ÷ {qsd} null-co",
                own.name()
            );
            // The default is judged; what an operator may choose instead stands beside it.
            let bar = match own {
                Subject::ADAPTIVE => Bar::AtLeast(least),
                _ => Bar::Published,
            };
            verdicts.push(draw::verdict("T1", what, bar, AIM, ratio));
        }
    }
    for (_, _, point, _) in POINTS {
        let own = Subject::ADAPTIVE.name();
        let spdk = Subject::SPDK.name();
        let ratio = rounds.ratio(point, own, spdk, field("iops"));
        if ratio.is_some() {
            let what = format!("null disk, 4 KiB, {point}: IOPS {own} ÷ {spdk}");
            verdicts.push(draw::verdict("T1", what, Bar::Published, "≥ 1.0", ratio));
        }
    }
    verdicts
}
