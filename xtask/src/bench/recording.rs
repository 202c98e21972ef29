//! `cargo xtask bench recording` (T12): what it costs that a disk's requests are counted and timed, where a
//! request costs least.

use serde_json::json;

use super::desk::Desk;
use super::draw::{self, NO_GUEST};
use super::load::{Load, Wait};
use super::options::Pace;
use super::subject::{Store, Subject};
use crate::report::rounds::field;
use crate::report::{Bar, Recorded, Rounds, Section};

const SUITE: &str = "recording";
const ON: &str = "--stats on";
const OFF: &str = "--stats off";
const LEAST: f64 = 0.98;
/// Until the worker runs, memory is touched and caches are warm: a piece's tenth may be too short for that.
const WARM_UP: f64 = 0.05;

/// Depth, how the driver waits, who serves it: the completion mode that fits such a driver.
const POINTS: [(u32, Wait, Subject, &str); 4] = [
    (
        1,
        Wait::Poll,
        Subject::POLL,
        "depth 1, driver and daemon poll",
    ),
    (1, Wait::Sleep, Subject::ADAPTIVE, "depth 1, driver sleeps"),
    (
        32,
        Wait::Poll,
        Subject::POLL,
        "depth 32, driver and daemon poll",
    ),
    (
        32,
        Wait::Sleep,
        Subject::ADAPTIVE,
        "depth 32, driver sleeps",
    ),
];

/// 4 KiB random reads on one vring of a null disk, recorded or not. Two per cent are to be seen, less than a
/// machine's mood changes within a second, so each round is cut into pieces in which the two take turns.
pub(super) fn measure(desk: &mut Desk) -> Result<(), String> {
    let effort = desk.effort;
    let pieces = effort.pace.pick(8, 5, 1);
    let seconds = effort.seconds / f64::from(pieces);
    // The first is the warm-up.
    for round in effort.pace.pick(0, 0, 1)..=effort.rounds * pieces {
        for (depth, wait, subject, point) in POINTS {
            let load = Load {
                warm_up: WARM_UP.min(seconds),
                ..Load::reads(depth, wait, seconds)
            };
            let order = match round % 2 {
                0 => [ON, OFF],
                _ => [OFF, ON],
            };
            for recording in order {
                measure_one(desk, (subject, recording), (point, &load), round)?;
            }
        }
    }
    if effort.pace != Pace::Smoke {
        println!(
            "{SUITE}: {} pieces of {seconds} s done",
            effort.rounds * pieces
        );
    }
    Ok(())
}

fn measure_one(
    desk: &mut Desk,
    (subject, recording): (Subject, &str),
    (point, load): (&str, &Load),
    round: u32,
) -> Result<(), String> {
    let command = subject.command(&desk.cleave, &Store::Null, load.queues, &desk.socket());
    let mut command = command.ok_or("a disk by itself records nothing")?;
    command.extend(recording.split(' ').map(str::to_owned));
    let result = desk.measure_daemon(&command, &load.words())?;
    desk.run.note(
        SUITE,
        &json!({
            "round": round, "is_warm_up": round == 0, "point": point, "subject": recording,
            "depth": load.depth, "wait": format!("{:?}", load.wait),
            "command": command, "driver": load.words(), "result": result,
        }),
    )
}

/// T12. No figure: pairs of bars that are equal show less than the table.
pub(crate) fn section(run: &Recorded) -> Option<Section> {
    let rounds = Rounds::of(run, SUITE)?;
    let verdict = |(_, _, _, point): &(u32, Wait, Subject, &str)| {
        let what = format!("null disk, 4 KiB, {point}: IOPS {ON} ÷ {OFF}");
        let ratio = rounds.ratio(point, ON, OFF, field("iops"));
        draw::verdict("T12", what, Bar::AtLeast(LEAST), "1.0", ratio)
    };
    Some(Section {
        id: SUITE,
        title: "T12 · What recording costs".to_owned(),
        notes: vec![format!(
            "4 KiB random reads of a disk that touches no data, one vring, driver and daemon pinned to a CPU each, a fresh \
             daemon for each figure, with {ON} (the default) and {OFF} in turns of a fraction of a second. Not shown: {NO_GUEST}."
        )],
        verdicts: POINTS.iter().map(verdict).collect(),
        tables: vec![draw::comparison(&rounds, "Recorded or not", OFF)],
        figures: Vec::new(),
    })
}
