//! `cargo xtask bench idle` (T7): what attached disks cost that nobody uses.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::desk::Desk;
use super::draw;
use super::subject::{Store, Subject};
use crate::daemon::Daemon;
use crate::report::{Bar, Recorded, Rounds, Section, Spread, Table};

const SUITE: &str = "idle";
const SUBJECTS: [Subject; 4] = [
    Subject::QSD,
    Subject::INTERRUPT,
    Subject::ADAPTIVE,
    Subject::POLL,
];

/// Disks that were asked a little and are then left alone, all subjects in the same seconds.
pub(super) fn measure(desk: &mut Desk) -> Result<(), String> {
    let (disks, seconds) = desk.effort.pace.pick((16, 10.0), (16, 10.0), (2, 0.3));
    watch(desk, disks, seconds, &SUBJECTS)?;
    let many = desk.effort.pace.pick(Some(256), None, None);
    match many {
        Some(disks) => watch(desk, disks, seconds, &[Subject::ADAPTIVE]),
        None => Ok(()),
    }
}

/// A subject's daemons, and where they listen.
struct Served {
    subject: Subject,
    running: Vec<Daemon>,
    sockets: Vec<PathBuf>,
}

fn serve(desk: &Desk, subject: Subject, disks: u32) -> Result<Served, String> {
    let mut served = Served {
        subject,
        running: Vec::new(),
        sockets: Vec::new(),
    };
    for number in 0..disks {
        let name = subject.name().replace(' ', "-");
        let socket = desk.run.folder().join(format!("{name}-{number}.sock"));
        let command = subject.command(&desk.cleave, &Store::Null, 1, &socket);
        let command = command.ok_or("a disk by itself is always idle")?;
        served.running.push(desk.start(&command, &socket)?);
        served.sockets.push(socket);
    }
    Ok(served)
}

/// All subjects in the same seconds: what idles does not disturb, and what does not is found out.
fn watch(desk: &mut Desk, disks: u32, seconds: f64, subjects: &[Subject]) -> Result<(), String> {
    let served = subjects.iter().map(|subject| serve(desk, *subject, disks));
    let served = served.collect::<Result<Vec<Served>, String>>()?;
    let load = format!("--sleep --depth 1 --idle {seconds}");
    let at: &Desk = desk;
    let results: Vec<Result<Value, String>> = std::thread::scope(|scope| {
        let drivers: Vec<_> = served
            .iter()
            .map(|served| scope.spawn(|| at.drive_all(&served.sockets, &load)))
            .collect();
        let joined = drivers.into_iter().map(|driver| {
            driver
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        joined.collect()
    });
    for (served, result) in served.into_iter().zip(results) {
        let line = json!({
            "round": 1, "point": format!("{disks} disks, {seconds} s"), "subject": served.subject.name(),
            "driver": load, "result": result?,
        });
        desk.run.note(SUITE, &line)?;
        served.running.into_iter().try_for_each(Daemon::stop)?;
    }
    Ok(())
}

/// T7. No figure: a picture of zeroes shows nothing that the table does not.
pub(crate) fn section(run: &Recorded) -> Option<Section> {
    let rounds = Rounds::of(run, SUITE)?;
    let mut verdicts = Vec::new();
    for point in rounds.points() {
        for own in [Subject::ADAPTIVE, Subject::INTERRUPT] {
            let of = |name: &'static str| {
                rounds.spread(&point, own.name(), move |result: &Value| {
                    result[name].as_f64()
                })
            };
            for (name, what) in [("daemon_wakes", "wake-ups"), ("daemon_ticks", "CPU ticks")] {
                if let Some(found) = of(name) {
                    let what = format!("{point} idle, {}: {what}", own.name());
                    let aim = "the same with 256";
                    verdicts.push(
                        draw::verdict("T7", what, Bar::AtMost(0.0), aim, Some(found)).counted(),
                    );
                }
            }
        }
    }
    Some(Section {
        id: SUITE,
        title: "T7 · Idleness".to_owned(),
        notes: vec![
            "A daemon for each disk, each with a frontend attached that asked it 64 requests; 1.5 s later all threads of all \
             daemons are looked at, left alone, and looked at again. Figures are of all daemons together."
                .to_owned(),
        ],
        verdicts,
        tables: vec![table(&rounds)],
        figures: Vec::new(),
    })
}

fn table(rounds: &Rounds<'_>) -> Table {
    let mut rows = Vec::new();
    for point in rounds.points() {
        for subject in rounds.subjects() {
            let of = |name: &'static str, by: f64, digits: usize| {
                let read = move |result: &Value| Some(result[name].as_f64()? / by);
                let found: Option<Spread> = rounds.spread(&point, &subject, read);
                found.map(|found| format!("{:.digits$}", found.median))
            };
            let Some(wakes) = of("daemon_wakes", 1.0, 0) else {
                continue;
            };
            let more = [of("daemon_ticks", 1.0, 0), of("daemon_cpu_ns", 1e6, 3)];
            let mut row = vec![point.clone(), subject.clone(), wakes];
            row.extend(more.map(Option::unwrap_or_default));
            rows.push(row);
        }
    }
    let head = [
        "disks and time",
        "who",
        "wake-ups",
        "CPU ticks of 10 ms",
        "CPU ms",
    ];
    Table {
        title: "What idle disks cost".to_owned(),
        head: head.map(str::to_owned).to_vec(),
        rows,
    }
}
