//! Study D's many LUNs: the same load on one file, and on a stripe of 28.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::desk::Desk;
use super::draw;
use super::image;
use super::load::{Load, Wait};
use super::tax;
use crate::report::chart::Figure;
use crate::report::rounds::{field, said, said_ratio};
use crate::report::{Recorded, Rounds, Table};

const SUITE: &str = "legs";
const COUNT: u64 = 28;
const ONE: &str = "1 leg";
const MANY: &str = "28 legs";

/// Files of ours: a stripe is made of files that belong to it alone.
pub(super) fn measure(desk: &mut Desk, seconds: f64) -> Result<(), String> {
    let effort = desk.effort;
    let leg_bytes: u64 = effort.pace.pick(64 << 20, 16 << 20, 1 << 20);
    let folder = desk.root.join("target/bench/legs");
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let one = image::random_file(
        &folder.join(format!("one-{}.img", leg_bytes >> 20)),
        leg_bytes * COUNT,
    )?;
    let many: Vec<PathBuf> = (0..COUNT)
        .map(|leg| {
            let name = format!("leg-{}-{leg}.img", leg_bytes >> 20);
            image::random_file(&folder.join(name), leg_bytes)
        })
        .collect::<Result<_, _>>()?;
    for round in effort.pace.pick(0, 0, 1)..=effort.rounds {
        for depth in [20, 64] {
            let load = tax::mixed(4, depth, Wait::Sleep, seconds);
            for (who, disks) in [(ONE, std::slice::from_ref(&one)), (MANY, &many[..])] {
                one_round(desk, (who, disks), &load, round)?;
            }
        }
    }
    Ok(())
}

fn one_round(
    desk: &mut Desk,
    (who, disks): (&str, &[PathBuf]),
    load: &Load,
    round: u32,
) -> Result<(), String> {
    let command = serve(desk, disks);
    let result = desk.measure_daemon(&command, &load.words())?;
    desk.run.note(
        SUITE,
        &json!({
            "round": round, "is_warm_up": round == 0, "point": format!("{} in flight", load.depth), "subject": who,
            "depth": load.depth, "command": command, "driver": load.words(), "result": result,
        }),
    )
}

fn serve(desk: &Desk, disks: &[PathBuf]) -> Vec<String> {
    let mut words = vec![desk.cleave.to_string_lossy().into_owned()];
    words.extend(
        "serve --queues 1 --workers 1 --log warn"
            .split(' ')
            .map(str::to_owned),
    );
    if disks.len() > 1 {
        words.extend("--stripe 64K --stripe-raw".split(' ').map(str::to_owned));
    }
    for disk in disks {
        words.extend(["--disk".to_owned(), disk.to_string_lossy().into_owned()]);
    }
    words.extend([
        "--socket-path".to_owned(),
        desk.socket().to_string_lossy().into_owned(),
    ]);
    words
}

/// 1 against 28 legs, as bars.
pub(super) fn figure(run: &Recorded) -> Option<Figure> {
    let rounds = Rounds::of(run, SUITE)?;
    let points = rounds.points();
    let panels = vec![
        draw::bars(&rounds, &points, "requests", "IOPS", field("iops")),
        draw::bars(
            &rounds,
            &points,
            "mean response time",
            "µs",
            field("mean_us"),
        ),
        draw::bars(
            &rounds,
            &points,
            "the daemon's CPU",
            "µs per I/O",
            field("daemon_cpu_us"),
        ),
    ];
    let mut figure = draw::figure(
        run,
        "d-legs",
        "Study D: one file against a stripe of 28",
        panels,
        (
            "on one physical disk 28 legs cannot be faster; what is to be seen is what they cost",
            "28 drives: all legs are files of one file system",
        ),
    );
    figure.columns = 3;
    Some(figure)
}

/// The same in numbers.
pub(super) fn table(run: &Recorded) -> Option<Table> {
    let rounds = Rounds::of(run, SUITE)?;
    let head = [
        "point",
        "who",
        "kIOPS",
        "mean µs",
        "daemon CPU µs/IO",
        "IOPS to 1 leg",
        "CPU to 1 leg",
    ];
    let mut rows = Vec::new();
    for point in rounds.points() {
        for who in [ONE, MANY] {
            let kilo = |result: &Value| Some(result["iops"].as_f64()? / 1e3);
            rows.push(vec![
                point.clone(),
                who.to_owned(),
                said(rounds.spread(&point, who, kilo), 1),
                said(rounds.spread(&point, who, field("mean_us")), 0),
                said(rounds.spread(&point, who, field("daemon_cpu_us")), 2),
                said_ratio(rounds.ratio(&point, who, ONE, field("iops"))),
                said_ratio(rounds.ratio(&point, who, ONE, field("daemon_cpu_us"))),
            ]);
        }
    }
    Some(Table {
        title: "1 against 28 legs".to_owned(),
        head: head.map(str::to_owned).to_vec(),
        rows,
    })
}
