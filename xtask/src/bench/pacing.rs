//! `cargo xtask bench pacing` (T6): interrupt, poll and adaptive beside each other, from a hundred requests a
//! second to as many as there can be; in bursts; and with driver and daemon on one core. T7, an idle disk, is a
//! suite of its own.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::desk::{Desk, pinned};
use super::draw::{self, NO_GUEST};
use super::options::Pace;
use super::subject::{Store, Subject};
use crate::daemon::Daemon;
use crate::report::chart::{Axis, Figure, Marks, Panel, Scale, Series};
use crate::report::rounds::{field, said};
use crate::report::{Bar, Recorded, Rounds, Section, Spread, Table, Verdict};

const SUITE: &str = "pacing";
const SUBJECTS: [Subject; 4] = [
    Subject::INTERRUPT,
    Subject::POLL,
    Subject::ADAPTIVE,
    Subject::ANY_RATE,
];
/// Steps of a rate, the last of which is as fast as it goes.
const STEPS: u32 = 10;
const FIRST_RATE: f64 = 100.0;
/// Up to here CPU time is what counts.
const SLOW_RATE: f64 = 1000.0;
/// In flight at most: as many as a guest's driver has by itself.
const DEPTH: u32 = 32;
const BURSTS: &str = "bursts";
const AIM: &str = "the better of both everywhere";

/// One load on a disk.
struct Point {
    name: String,
    disk: &'static str,
    /// Requests a second; none: one after the other, as fast as it goes.
    rate: Option<f64>,
    load: String,
}

impl Point {
    /// Above the lowest rates, those that differ there only are alike.
    fn tells_of(&self, subject: Subject) -> bool {
        subject != Subject::ANY_RATE || self.rate.is_some_and(|rate| rate <= SLOW_RATE)
    }
}

/// Daemons that wait in each way, all serving at once: of those nobody talks to, none costs anything.
struct Ways(Vec<(Subject, Vec<String>, Daemon, PathBuf)>);

impl Ways {
    fn start(desk: &Desk, store: &Store, cpu: &str) -> Result<Ways, String> {
        let mut daemons = Vec::new();
        for subject in SUBJECTS {
            let word = subject.name().replace([' ', ','], "-");
            let socket = desk.run.folder().join(format!("{word}.sock"));
            let command = subject.command(&desk.cleave, store, 1, &socket);
            let mut command = command.ok_or("a disk by itself waits in no way")?;
            // Readers may share a disk.
            command.push("--read-only".to_owned());
            let log = desk.run.folder().join(format!("{word}.log"));
            let daemon = Daemon::start(pinned(cpu, &command), socket.clone(), log)?;
            daemons.push((subject, command, daemon, socket));
        }
        Ok(Ways(daemons))
    }

    /// One figure of each, forth and back.
    fn round(&self, desk: &mut Desk, point: &Point, round: u32) -> Result<(), String> {
        let mut order: Vec<_> = self.0.iter().collect();
        order.retain(|(subject, ..)| point.tells_of(*subject));
        if round % 2 == 1 {
            order.reverse();
        }
        for (subject, command, _, socket) in order {
            let mut result = desk.drive(socket, &point.load)?;
            let percent = result["daemon_cpu_us"]
                .as_f64()
                .zip(result["iops"].as_f64());
            if let Some((cpu_us, iops)) = percent {
                result["daemon_cpu_percent"] = json!(cpu_us * iops / 1e4);
            }
            desk.run.note(
                SUITE,
                &json!({
                    "round": round, "is_warm_up": round == 0, "point": point.name, "subject": subject.name(),
                    "disk": point.disk, "rate": point.rate, "command": command, "driver": point.load,
                    "result": result,
                }),
            )?;
        }
        Ok(())
    }

    fn stop(self) -> Result<(), String> {
        self.0
            .into_iter()
            .try_for_each(|(_, _, daemon, _)| daemon.stop())
    }
}

/// A null disk and a real one, bursts, and one core for both.
pub(super) fn measure(desk: &mut Desk) -> Result<(), String> {
    let daemon_cpu = desk.cpus.daemon.clone();
    let disk = desk.disk(SUITE)?;
    for (name, store) in [("null", Store::Null), ("disk", disk)] {
        let ways = Ways::start(desk, &store, &daemon_cpu)?;
        let points = steps(desk, name, &ways)?;
        rounds(desk, &ways, &points)?;
        if store == Store::Null {
            let bursts = [bursts(desk)];
            rounds(desk, &ways, &bursts)?;
        }
        ways.stop()?;
    }
    let driver_cpu = desk.cpus.driver.clone();
    let ways = Ways::start(desk, &Store::Null, &driver_cpu)?;
    let points = [1, DEPTH].map(|depth| Point {
        name: format!("one core, depth {depth}"),
        disk: "one core",
        rate: None,
        load: load(desk, depth, None),
    });
    rounds(desk, &ways, &points)?;
    ways.stop()
}

fn rounds(desk: &mut Desk, ways: &Ways, points: &[Point]) -> Result<(), String> {
    let (first, last) = (desk.effort.pace.pick(0, 1, 1), desk.effort.rounds);
    for round in first..=last {
        for point in points {
            ways.round(desk, point, round)?;
        }
        if desk.effort.pace != Pace::Smoke {
            println!("{SUITE}: {}: round {round} of {last} done", points[0].disk);
        }
    }
    Ok(())
}

/// From a hundred a second in even steps of the logarithm to four fifths of what interrupts can do, then as fast as
/// it goes: beyond that there is no offered load, only a queue.
fn steps(desk: &Desk, disk: &'static str, ways: &Ways) -> Result<Vec<Point>, String> {
    let found = desk.drive(&ways.0[0].3, &load(desk, DEPTH, None))?;
    let most = found["iops"].as_f64().unwrap_or(0.0) * 0.8;
    let step = (most / FIRST_RATE).powf(1.0 / f64::from(STEPS - 2));
    let count = desk.effort.pace.pick(STEPS, STEPS, 2) - 1;
    let mut points: Vec<Point> = (0..count)
        .map(|number| {
            let rate = round_to_two(FIRST_RATE * step.powi(number as i32));
            Point {
                name: format!("{disk}, {rate}/s"),
                disk,
                rate: Some(rate),
                load: load(desk, 4 * DEPTH, Some(rate)),
            }
        })
        .collect();
    points.push(Point {
        name: format!("{disk}, as fast as it goes"),
        disk,
        rate: None,
        load: load(desk, DEPTH, None),
    });
    Ok(points)
}

/// A millisecond at a hundred thousand a second, nine of silence. The driver polls: one that sleeps would be late
/// by more than all that is to be seen.
fn bursts(desk: &Desk) -> Point {
    let seconds = desk.effort.seconds;
    Point {
        name: BURSTS.to_owned(),
        disk: "bursts",
        rate: None,
        load: format!(
            "--poll --seconds {seconds} --warm-up {} --depth {} --bs 4096 --rate 100000 --pulse 1:9",
            seconds / 4.0,
            4 * DEPTH
        ),
    }
}

/// 4 KiB reads by a driver that sleeps, as a guest's does.
fn load(desk: &Desk, depth: u32, rate: Option<f64>) -> String {
    let seconds = desk.effort.seconds;
    let rate = rate.map_or_else(String::new, |rate| format!(" --rate {rate}"));
    format!(
        "--sleep --seconds {seconds} --warm-up {} --depth {depth} --bs 4096{rate}",
        seconds / 10.0
    )
}

/// 1234 as 1200.
fn round_to_two(value: f64) -> f64 {
    let unit = 10_f64.powf(value.max(1.0).log10().floor() - 1.0);
    (value / unit).round() * unit
}

/// Which of the two ways that never change was faster at a point.
fn better(rounds: &Rounds<'_>, point: &str) -> &'static str {
    let mean = |subject: Subject| {
        rounds
            .spread(point, subject.name(), field("mean_us"))
            .map_or(f64::INFINITY, |spread| spread.median)
    };
    match mean(Subject::INTERRUPT) <= mean(Subject::POLL) {
        true => Subject::INTERRUPT.name(),
        false => Subject::POLL.name(),
    }
}

/// T6.
pub(crate) fn section(run: &Recorded) -> Option<Section> {
    let rounds = Rounds::of(run, SUITE)?;
    let stepped = |disk: &'static str| rounds.only(move |line| line["disk"] == disk);
    let (null, disk) = (stepped("null"), stepped("disk"));
    let mut verdicts = Vec::new();
    for steps in [&null, &disk] {
        verdicts.extend(step_verdicts(steps));
    }
    verdicts.extend(other_verdicts(&rounds));
    let figures = [
        (&null, "null", "a disk that does nothing"),
        (&disk, "disk", "a real disk"),
    ];
    Some(Section {
        id: SUITE,
        title: "T6 · Interrupt, poll, adaptive".to_owned(),
        notes: vec![
            "4 KiB random reads at a given rate, on one vring, by a driver that sleeps between (in bursts it polls); \
             latency counts from when a request was due. Driver and daemon have a CPU each, but for the last part, in which \
             they share one. At up to 1,000 requests a second adaptive is bound to the CPU time of interrupt, and so \
             cannot have the latency of poll. With --spin-rate-min 0 (\"any rate\") it may spin there too, for the disk and in \
             gaps of less than a millisecond."
                .to_owned(),
        ],
        verdicts,
        tables: vec![step_table(&rounds)],
        figures: figures
            .into_iter()
            .filter(|(rounds, ..)| !rounds.lines().is_empty())
            .map(|(rounds, name, words)| curves(run, rounds, name, words))
            .collect(),
    })
}

fn rate_of(rounds: &Rounds<'_>, point: &str) -> Option<f64> {
    let line = rounds.lines().iter().find(|line| line["point"] == point)?;
    line["rate"].as_f64()
}

fn step_verdicts(rounds: &Rounds<'_>) -> Vec<Verdict> {
    const MEAN: (&str, &str) = ("mean latency", "mean_us");
    const CPU: (&str, &str) = ("CPU", "daemon_cpu_percent");
    let (interrupt, poll) = (Subject::INTERRUPT.name(), Subject::POLL.name());
    let mut verdicts = Vec::new();
    for point in rounds.points() {
        let mut judge = |(what, of): (&str, &'static str), own: Subject, base: &str, bar: f64| {
            let own = own.name();
            let ratio = rounds.ratio(&point, own, base, field(of));
            let own = own.strip_prefix("cleave ").unwrap_or(own);
            let what = format!("{point}: {what}, {own} ÷ {base}");
            verdicts.push(draw::verdict("T6", what, Bar::AtMost(bar), AIM, ratio));
        };
        let better = better(rounds, &point);
        judge(MEAN, Subject::ADAPTIVE, better, 1.10);
        let is_slow = rate_of(rounds, &point).is_some_and(|rate| rate <= SLOW_RATE);
        if is_slow {
            judge(CPU, Subject::ADAPTIVE, interrupt, 1.15);
        }
        judge(CPU, Subject::ADAPTIVE, poll, 1.01);
        if is_slow {
            judge(MEAN, Subject::ANY_RATE, better, 1.10);
            judge(CPU, Subject::ANY_RATE, poll, 1.01);
        }
    }
    verdicts
}

fn other_verdicts(rounds: &Rounds<'_>) -> Vec<Verdict> {
    let own = Subject::ADAPTIVE.name();
    let (interrupt, poll) = (Subject::INTERRUPT.name(), Subject::POLL.name());
    let mut rows = vec![
        (BURSTS.to_owned(), "p99", poll, "p99_us", Bar::AtMost(1.15)),
        (
            BURSTS.to_owned(),
            "CPU",
            poll,
            "daemon_cpu_percent",
            Bar::AtMost(0.5),
        ),
    ];
    for depth in [1, DEPTH] {
        let point = format!("one core, depth {depth}");
        rows.push((point, "IOPS", interrupt, "iops", Bar::AtLeast(0.97)));
    }
    let row = |(point, what, base, of, bar): (String, &str, &str, &'static str, Bar)| {
        let ratio = rounds.ratio(&point, own, base, field(of))?;
        let what = format!("{point}: {what}, adaptive ÷ {base}");
        Some(draw::verdict("T6", what, bar, AIM, Some(ratio)))
    };
    rows.into_iter().filter_map(row).collect()
}

fn step_table(rounds: &Rounds<'_>) -> Table {
    let head = [
        "point",
        "who",
        "kIOPS",
        "mean µs",
        "p99 µs",
        "mean ÷ better",
        "daemon CPU %",
        "CPU ÷ interrupt",
        "CPU ÷ poll",
        "wake-ups/s daemon",
    ];
    let mut rows = Vec::new();
    for point in rounds.points() {
        for subject in SUBJECTS {
            let own = subject.name();
            if rounds.spread(&point, own, field("iops")).is_none() {
                continue;
            }
            let number = |of, digits| said(rounds.spread(&point, own, field(of)), digits);
            let ratio = |base: &str, of| said(rounds.ratio(&point, own, base, field(of)), 2);
            let kilo = |result: &Value| Some(result["iops"].as_f64()? / 1e3);
            rows.push(vec![
                point.clone(),
                own.to_owned(),
                said(rounds.spread(&point, own, kilo), 1),
                number("mean_us", 1),
                number("p99_us", 1),
                ratio(better(rounds, &point), "mean_us"),
                number("daemon_cpu_percent", 1),
                ratio(Subject::INTERRUPT.name(), "daemon_cpu_percent"),
                ratio(Subject::POLL.name(), "daemon_cpu_percent"),
                number("daemon_wakes_s", 0),
            ]);
        }
    }
    Table {
        title: "Interrupt, poll, adaptive".to_owned(),
        head: head.map(str::to_owned).to_vec(),
        rows,
    }
}

/// Latency and CPU against rate.
fn curves(run: &Recorded, rounds: &Rounds<'_>, name: &str, words: &str) -> Figure {
    let panels = vec![
        curve(
            rounds,
            "latency",
            "mean latency, µs",
            Scale::Log10,
            "mean_us",
        ),
        curve(
            rounds,
            "CPU of the daemon",
            "% of a core",
            Scale::Linear,
            "daemon_cpu_percent",
        ),
    ];
    let caption = (
        "lower is better; the point furthest right is as fast as each goes, at the rate that it reached; adaptive should lie \
         on interrupt at the left and on the lower of the others at the right; \"any rate\" is adaptive with --spin-rate-min 0",
        NO_GUEST,
    );
    let title = format!("Latency and CPU against rate, {words}");
    draw::figure(run, &format!("t6-pacing-{name}"), &title, panels, caption)
}

fn curve(rounds: &Rounds<'_>, title: &str, label: &str, scale: Scale, of: &'static str) -> Panel {
    let series = SUBJECTS.map(|subject| {
        let points = rounds.points().into_iter().filter_map(|point| {
            let reached = rounds.spread(&point, subject.name(), field("iops"))?;
            let value: Spread = rounds.spread(&point, subject.name(), field(of))?;
            Some((rate_of(rounds, &point).unwrap_or(reached.median), value))
        });
        Series::new(subject.name(), points.collect())
    });
    Panel {
        title: title.to_owned(),
        x: Axis::new("requests per second", Scale::Log10),
        y: Axis::new(label, scale),
        marks: Marks::Lines(series.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_said_in_two_digits() {
        for (value, said) in [
            (100.0, 100.0),
            (1234.0, 1200.0),
            (98_765.0, 99_000.0),
            (7.2, 7.2),
        ] {
            assert!((round_to_two(value) - said).abs() < 1e-6, "{value}");
        }
    }

    #[test]
    fn adaptive_is_held_against_the_better_of_the_others() {
        let folder = std::env::temp_dir().join(format!("xtask-pacing-{}", std::process::id()));
        let mut run =
            crate::report::Run::create(&folder, &json!({}), &json!({"rounds": 1})).unwrap();
        for (rate, means) in [
            (100.0, vec![30.0, 10.0, 30.0, 11.0]),
            (5000.0, vec![8.0, 10.0, 9.0]),
        ] {
            for (subject, mean) in SUBJECTS.into_iter().zip(means) {
                let result = json!({"mean_us": mean, "iops": rate, "daemon_cpu_percent": mean});
                let line = json!({"round": 1, "point": format!("null, {rate}/s"), "subject": subject.name(),
                    "disk": "null", "rate": rate, "result": result});
                run.note(SUITE, &line).unwrap();
            }
        }
        let section = section(&Recorded::read(&folder).unwrap()).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let told: Vec<_> = section
            .verdicts
            .iter()
            .map(|verdict| (verdict.what.as_str(), verdict.measured.unwrap().median))
            .collect();
        assert_eq!(
            told,
            [
                ("null, 100/s: mean latency, adaptive ÷ cleave poll", 3.0),
                ("null, 100/s: CPU, adaptive ÷ cleave interrupt", 1.0),
                ("null, 100/s: CPU, adaptive ÷ cleave poll", 3.0),
                (
                    "null, 100/s: mean latency, adaptive, any rate ÷ cleave poll",
                    1.1
                ),
                ("null, 100/s: CPU, adaptive, any rate ÷ cleave poll", 1.1),
                (
                    "null, 5000/s: mean latency, adaptive ÷ cleave interrupt",
                    1.125
                ),
                ("null, 5000/s: CPU, adaptive ÷ cleave poll", 0.9),
            ]
        );
        assert_eq!(
            (section.figures.len(), section.tables[0].rows.len()),
            (1, 7)
        );
    }
}
