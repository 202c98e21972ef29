//! The suites that are not rounds of cases: idle disks, starts, counts of instructions.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use cleave_rig::daemon::DaemonProcess;
use cleave_rig::{At, Result, command};
use itertools::Itertools;
use serde_json::{Value, json};

use super::desk::Desk;
use super::instructions;
use super::load::{LoadWait, RandomLoad};
use super::subject::{ADAPTIVE, INTERRUPT, POLL, QSD, QSD_IO_THREAD, ServedDisk};
use crate::pace::BenchPace;
use crate::run_folder::{RecordedRun, merged};

/// T7: disks that were asked a little and are then left alone, all subjects in the same seconds: idle ones do not disturb
/// each other, and one that is not idle is found out.
pub(super) fn idle(desk: &mut Desk) -> Result {
    let (disks, seconds) = desk.pace.pick((16, 10.0), (16, 10.0), (2, 0.3));
    let all = [QSD, QSD_IO_THREAD, INTERRUPT, ADAPTIVE, POLL];
    watch(desk, disks, seconds, &all)?;
    match desk.pace {
        BenchPace::Full => watch(desk, 256, seconds, &[ADAPTIVE]),
        BenchPace::Quick | BenchPace::Smoke => Ok(()),
    }
}

fn watch(desk: &mut Desk, disks: usize, seconds: f64, subjects: &[&str]) -> Result {
    let mut served = Vec::new();
    let subjects = subjects.iter().filter(|subject| desk.has(subject));
    let subjects: Vec<&str> = subjects.copied().collect();
    for (place, subject) in subjects.iter().enumerate() {
        let line = line(desk, &ServedDisk::Null, subject)?;
        let daemons = (0..disks).map(|number| desk.start(&line, place * disks + number));
        served.push(daemons.collect::<Result<Vec<DaemonProcess>>>()?);
    }
    let load = format!("--sleep --depth 1 --idle {seconds}");
    let at: &Desk = desk;
    let results = std::thread::scope(|scope| {
        let drive = |daemons: &Vec<DaemonProcess>| at.drive(daemons, &load);
        let drivers = served
            .iter()
            .map(|daemons| scope.spawn(move || drive(daemons)));
        let drivers: Vec<_> = drivers.collect();
        let joined = drivers.into_iter().map(|driver| driver.join());
        joined.collect::<std::thread::Result<Vec<Result<Value>>>>()
    });
    let results = results.map_err(|_| "a driver's thread panicked")?;
    for ((subject, daemons), result) in subjects.iter().zip(served).zip(results) {
        let line = json!({
            "round": 1, "point": format!("{disks} disks, {seconds} s"), "subject": subject, "driver": load,
            "result": result?,
        });
        desk.run.note("idle", &line)?;
        daemons.into_iter().try_for_each(DaemonProcess::stop)?;
    }
    Ok(())
}

/// Returns a daemon's command line for a disk with one vring.
fn line(desk: &Desk, store: &ServedDisk, subject: &str) -> Result<Vec<String>> {
    let any = RandomLoad::reads(1, LoadWait::Sleep, 1.0);
    Ok(desk.case("", store, &any, subject)?.daemons.concat())
}

const START_LIMIT: Duration = Duration::from_secs(60);
/// GET_FEATURES, version 1, no payload; the answer is as long as this and eight bytes.
const GET_FEATURES: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

/// T10: from exec to the first answer, and the memory of a daemon at rest. On the real disk, for opening it is part of the
/// start. Round 0, the first start, reads the program from the disk.
pub(super) fn start(desk: &mut Desk) -> Result {
    let store = ServedDisk::Disk(desk.disk("start")?);
    for round in 0..=desk.pace.pick(20, 10, 1) {
        let subjects = [QSD, QSD_IO_THREAD, ADAPTIVE].into_iter();
        let subjects = subjects.filter(|subject| desk.has(subject)).collect_vec();
        for subject in subjects {
            let command = line(desk, &store, subject)?;
            let line = json!({
                "round": round, "is_warm_up": round == 0, "point": "start", "subject": subject, "command": command,
                "result": start_one(desk, &command)?,
            });
            desk.run.note("start", &line)?;
        }
    }
    Ok(())
}

fn start_one(desk: &Desk, line: &[String]) -> Result<Value> {
    let socket = desk.socket(0);
    // The previous listener is gone, and its socket file must not be taken for the next one's.
    let _ = std::fs::remove_file(&socket);
    let log = socket.with_extension("log");
    let mut command = command(&desk.pinned(line, 0));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(std::fs::File::create(&log).at(&log)?);
    let before = Instant::now();
    let mut child = command.spawn().at("taskset")?;
    let answered = await_answer(&socket, before).at("the daemon's first answer");
    let memory = memory(child.id());
    let ended = child.kill().and_then(|()| child.wait());
    ended.at("the daemon's end")?;
    let [listening_ms, answered_ms] = answered?.map(|time| time.as_secs_f64() * 1e3);
    let times = json!({ "listening_ms": listening_ms, "answered_ms": answered_ms });
    Ok(merged(times, &memory))
}

/// Returns when it took a connection, and when it answered its first message.
fn await_answer(socket: &Path, before: Instant) -> std::io::Result<[Duration; 2]> {
    let mut stream = loop {
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(error) if before.elapsed() > START_LIMIT => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_micros(50)),
        }
    };
    let listening = before.elapsed();
    stream.set_read_timeout(Some(START_LIMIT))?;
    stream.write_all(&GET_FEATURES)?;
    stream.read_exact(&mut [0; GET_FEATURES.len() + 8])?;
    Ok([listening, before.elapsed()])
}

/// Resident, and the share of it that is not also somebody else's, in MiB.
fn memory(pid: u32) -> Value {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let mib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.split_whitespace().next()?.parse::<f64>().ok()? / 1024.0)
    };
    json!({ "rss_mib": mib("Rss:"), "pss_mib": mib("Pss:") })
}

/// T11: every case beside the counts that are kept. A rise beyond the tolerance is a warning here, and a fault in CI.
pub(super) fn instructions(desk: &mut Desk) -> Result {
    // A count takes a release build and callgrind; CI runs it by itself.
    if desk.pace == BenchPace::Smoke {
        return Ok(());
    }
    if let Err(why) = instructions::run(&desk.equipment, &instructions::Counting::default()) {
        desk.run.warn("instructions", &why)?;
    }
    let folder = desk.equipment.folder().join("bench/instructions");
    for line in RecordedRun::read(&folder)?.of("instructions") {
        desk.run.note("instructions", line)?;
    }
    Ok(())
}
