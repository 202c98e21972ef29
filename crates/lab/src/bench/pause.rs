//! T14: what a guest sees while the daemon of its disk is killed, restarted, or taken over from by the next one.

use std::thread::{scope, sleep};
use std::time::Duration;

use cleave_rig::Result;
use cleave_rig::daemon::DaemonProcess;
use itertools::Itertools;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use super::desk::Desk;
use super::load::{LoadWait, RandomLoad};
use super::subject::{ADAPTIVE, ServedDisk};

/// How a daemon leaves its disk to the next one.
#[derive(Clone, Copy)]
enum Change {
    /// `kill -9`, and another one is started at once.
    Killed,
    /// SIGTERM, and another one is started when it has ended.
    Restarted,
    /// Another one is started and takes over.
    TakenOver,
}

/// From the driver's start until the daemon changes.
const BEFORE: Duration = Duration::from_millis(700);
/// What is kept of the requests, in milliseconds from the change.
const KEPT_MS: std::ops::Range<f64> = -50.0..200.0;

impl Change {
    const ALL: [Change; 3] = [Change::Killed, Change::Restarted, Change::TakenOver];

    fn name(self) -> &'static str {
        match self {
            Change::Killed => "kill -9",
            Change::Restarted => "restart",
            Change::TakenOver => "take-over",
        }
    }

    /// Starts the next daemon in the place of one.
    fn carry_out(
        self,
        first: DaemonProcess,
        start: impl Fn() -> Result<DaemonProcess>,
    ) -> Result<DaemonProcess> {
        match self {
            Change::Killed => drop(first),
            Change::Restarted => first.stop()?,
            Change::TakenOver => {
                let next = start()?;
                first.has_left()?;
                return Ok(next);
            }
        }
        start()
    }
}

/// Requests begin at a steady rate, whether or not those before have ended, as those of a guest with many programs do.
pub(super) fn measure(desk: &mut Desk) -> Result {
    let store = ServedDisk::Disk(desk.disk_to_write("pause")?);
    let load = RandomLoad {
        read_percent: 70,
        warm_up: 0.0,
        // It connects again as QEMU does with reconnect-ms=10.
        more: " --rate 1000 --inflight --reconnect 10 --each".to_owned(),
        ..RandomLoad::reads(128, LoadWait::Sleep, 1.5)
    };
    for round in 1..=desk.rounds {
        for change in Change::ALL {
            let case = desk.case("", &store, &load, ADAPTIVE)?;
            let line = case.daemons.concat();
            let (result, dots) = measure_one(desk, &line, &load, change)?;
            let line = json!({
                "round": round, "point": "pause", "subject": change.name(), "command": line, "driver": load.words(),
                "result": result, "dots": dots,
            });
            desk.run.note("pause", &line)?;
        }
    }
    Ok(())
}

fn measure_one(
    desk: &Desk,
    line: &[String],
    load: &RandomLoad,
    change: Change,
) -> Result<(Value, Vec<[f64; 2]>)> {
    let control = desk.socket(0).with_extension("control");
    let control = control.display().to_string();
    // The disk of a busy machine may take longer than the usual two seconds for what is in flight.
    let more = [
        "--take-over",
        "--control",
        &control,
        "--stop-deadline",
        "20",
    ];
    let more = more.map(str::to_owned);
    let line = [line, &more].concat();
    let start = || desk.start(&line, 0);
    let first = start()?;
    let sockets = [first.socket.clone()];
    let (said, changed_ns, next) = scope(|scope| {
        let driver = scope.spawn(|| desk.drive_at(&sockets, &load.words()));
        sleep(BEFORE);
        let changed_ns = now_ns();
        let next = change.carry_out(first, start);
        let said = driver.join().map_err(|_| "the driver's thread panicked")?;
        Ok::<_, String>((said?, changed_ns, next?))
    })?;
    next.stop()?;
    let began_ns = said["began_ns"].as_f64().unwrap_or(f64::NAN);
    let all = said["each_ns"].as_array().into_iter().flatten();
    let dots = all.filter_map(|one| {
        let at_ms = (began_ns + one[0].as_f64()? - changed_ns) / 1e6;
        let took_us = one[1].as_f64()? / 1e3;
        KEPT_MS
            .contains(&at_ms)
            .then_some([at_ms, took_us].map(rounded))
    });
    let dots = dots.sorted_by(|one, other| one[0].total_cmp(&other[0]));
    let dots = dots.collect_vec();
    let has_ended = |dot: &&[f64; 2]| dot[0] + dot[1] / 1e3 < 0.0;
    let (before, after): (Vec<_>, Vec<_>) = dots.iter().partition(has_ended);
    let worst_ms = |some: &[&[f64; 2]]| some.iter().map(|dot| dot[1] / 1e3).fold(0.0, f64::max);
    let result = json!({
        "requests": said["requests"], "failed": said["failed"], "before_ms": worst_ms(&before), "worst_ms": worst_ms(&after),
    });
    Ok((result, dots))
}

/// By the clock of the driver's `began_ns`.
fn now_ns() -> f64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}
