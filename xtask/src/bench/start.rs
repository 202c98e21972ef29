//! `cargo xtask bench start` (T10): from exec to the first answer, and what a daemon at rest keeps.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::desk::{Desk, pinned};
use super::draw;
use super::subject::Subject;
use crate::report::rounds::{field, said};
use crate::report::{Bar, Recorded, Rounds, Section, Table};

const SUITE: &str = "start";
const SUBJECTS: [Subject; 2] = [Subject::QSD, Subject::ADAPTIVE];
const LIMIT: Duration = Duration::from_secs(60);
/// GET_FEATURES, version 1, no payload; the answer is as long as this and eight bytes.
const GET_FEATURES: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
const ANSWER_BYTES: usize = GET_FEATURES.len() + 8;

/// On the real disk, for opening it is part of the start.
pub(super) fn measure(desk: &mut Desk) -> Result<(), String> {
    let store = desk.disk(SUITE)?;
    let rounds = desk.effort.pace.pick(20, 10, 1);
    // The first start reads the program from the disk.
    for round in 0..=rounds {
        for subject in SUBJECTS {
            let socket = desk.socket();
            let command = subject.command(&desk.cleave, &store, 1, &socket);
            let command = command.ok_or("a disk by itself does not start")?;
            let result = one(desk, &command, &socket)?;
            desk.run.note(
                SUITE,
                &json!({
                    "round": round, "is_warm_up": round == 0, "point": "start", "subject": subject.name(),
                    "command": command, "result": result,
                }),
            )?;
        }
    }
    Ok(())
}

fn one(desk: &Desk, command: &[String], socket: &Path) -> Result<Value, String> {
    // The previous listener is gone, and its socket file must not be taken for the next one's.
    let _ = std::fs::remove_file(socket);
    let log = std::fs::File::create(desk.run.folder().join("start.log"));
    let log = log.map_err(|error| format!("start.log: {error}"))?;
    let mut command: Command = pinned(&desk.cpus.daemon, command);
    let command = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    let before = Instant::now();
    let mut child = command
        .spawn()
        .map_err(|error| format!("{command:?}: {error}"))?;
    let answered = await_answer(socket, before);
    let memory = memory(child.id());
    let ended = child.kill().and_then(|()| child.wait());
    ended.map_err(|error| error.to_string())?;
    let (listening, answered) = answered?;
    let mut result = json!({
        "listening_ms": listening.as_secs_f64() * 1e3, "answered_ms": answered.as_secs_f64() * 1e3,
    });
    if let (Some(result), Some(memory)) = (result.as_object_mut(), memory.as_object()) {
        result.extend(memory.clone());
    }
    Ok(result)
}

/// When it took a connection, and when it answered its first message.
fn await_answer(socket: &Path, before: Instant) -> Result<(Duration, Duration), String> {
    let told = |error: std::io::Error| format!("the daemon's first answer: {error}");
    let mut stream = loop {
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(error) if before.elapsed() > LIMIT => return Err(told(error)),
            Err(_) => std::thread::sleep(Duration::from_micros(50)),
        }
    };
    let listening = before.elapsed();
    stream.set_read_timeout(Some(LIMIT)).map_err(told)?;
    stream.write_all(&GET_FEATURES).map_err(told)?;
    stream.read_exact(&mut [0; ANSWER_BYTES]).map_err(told)?;
    Ok((listening, before.elapsed()))
}

/// Resident, and the share of it that is not also somebody else's, in MiB.
fn memory(pid: u32) -> Value {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let mib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: f64 = line.split_whitespace().next()?.parse().ok()?;
        Some(kib / 1024.0)
    };
    json!({ "rss_mib": mib("Rss:"), "pss_mib": mib("Pss:") })
}

/// T10.
pub(crate) fn section(run: &Recorded) -> Option<Section> {
    let rounds = Rounds::of(run, SUITE)?;
    let ours = Subject::ADAPTIVE.name();
    let of = |name| rounds.spread("start", ours, field(name));
    let verdicts = vec![
        draw::verdict(
            "T10",
            "exec to the first answer, ms",
            Bar::AtMost(50.0),
            "≤ 10",
            of("answered_ms"),
        ),
        draw::verdict(
            "T10",
            "resident at rest, MiB",
            Bar::AtMost(16.0),
            "≤ 8",
            of("rss_mib"),
        ),
    ];
    let start = ["start".to_owned()];
    let panels = vec![
        draw::bars(
            &rounds,
            &start,
            "exec to the first answer",
            "ms",
            field("answered_ms"),
        ),
        draw::bars(&rounds, &start, "resident at rest", "MiB", field("rss_mib")),
    ];
    let caption = (
        "lower is better; the first answer is that to a frontend's GET_FEATURES, with the disk open",
        "a cold page cache: the programs had been started before",
    );
    let head = [
        "who",
        "listening after ms",
        "answered after ms",
        "RSS MiB",
        "PSS MiB",
    ];
    let row = |subject: &String| {
        let told = |name| said(rounds.spread("start", subject, field(name)), 2);
        vec![
            subject.clone(),
            told("listening_ms"),
            told("answered_ms"),
            told("rss_mib"),
            told("pss_mib"),
        ]
    };
    Some(Section {
        id: SUITE,
        title: "T10 · Start and rest".to_owned(),
        notes: vec![
            "PSS counts pages of files that several processes share, the C library's for instance, by their share; RSS counts \
             them in full."
                .to_owned(),
        ],
        verdicts,
        tables: vec![Table {
            title: "Start and rest".to_owned(),
            head: head.map(str::to_owned).to_vec(),
            rows: rounds.subjects().iter().map(row).collect(),
        }],
        figures: vec![draw::figure(run, "t10-start", "Start and rest", panels, caption)],
    })
}
