//! The tables against any vhost-user-blk back-end that a command line starts. It prints them in Markdown. Each row gets
//! a back-end of its own, so that a row which kills or blocks one does not hide the rest.
//!
//! `docs/conformance/` keeps what it printed for Cleave and for a peer, and `docs/conformance.md` sums that up. A test
//! compares both with the tables.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use cleave_client::Frontend;
use cleave_tests::{Basis, Daemon, Outcome, Row, program_path, set_time_limit, time_limit};

use super::{
    chains, config, descriptors, lifecycle, log, memory, messages, parked, recovery, requests,
    rings,
};

/// Size of the disk, which the tables rely on.
const DISK_BYTES: u64 = 64 << 20;
/// Vrings of the back-end: as many as the tables use.
const QUEUES: u16 = 16;
/// Time limit of each step of a row. A back-end that ignores an attack uses it up.
const STEP_LIMIT: Duration = Duration::from_secs(3);
/// Time limit of a row; then its back-end is killed.
const ROW_LIMIT: Duration = Duration::from_secs(60);
/// Rows that run at a time: most of a row is waiting.
const JOBS: usize = 8;

/// Features that a back-end offers.
struct Offered {
    features: u64,
    protocol_features: u64,
}

enum Verdict {
    Passed,
    Failed(String),
    NotOffered,
}

/// A finished row.
struct Line {
    name: String,
    basis: Option<Basis>,
    verdict: Verdict,
}

/// Prints the tables for the back-end that `template` starts, or the rows whose names contain `only`. The exit status is
/// 1 if a row fails that follows from a specification; rows of our own policy do not count.
pub(super) fn report(template: &str, only: &str) -> ExitCode {
    match run(template, only) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the tables. Returns true if no row failed that follows from a specification.
fn run(template: &str, only: &str) -> Result<bool, String> {
    // A failed row is a line of the table; the text of its panic would only repeat that.
    std::panic::set_hook(Box::new(|_| {}));
    set_time_limit(STEP_LIMIT);
    let offered = offered(template)?;
    println!(
        "# Rows for one back-end\n\nWritten by `cargo xtask conform --daemon '{template}'`.\n"
    );
    let mut all = Vec::new();
    for (title, mut rows) in tables() {
        rows.retain(|row| row.name.contains(only));
        if rows.is_empty() {
            continue;
        }
        let lines = judge_all(template, &offered, rows);
        print_table(title, &lines);
        all.extend(lines);
    }
    let (specified, policy): (Vec<_>, Vec<_>) = all.iter().partition(|line| line.is_specified());
    println!(
        "## All rows\n\nRows that follow from a specification: {}.",
        sum(specified.iter().copied())
    );
    println!("\nRows of our own policy: {}.", sum(policy));
    Ok(!specified
        .iter()
        .any(|line| matches!(line.verdict, Verdict::Failed(_))))
}

fn tables() -> Vec<(&'static str, Vec<Row>)> {
    vec![
        ("Requests", requests::rows()),
        ("Chains", chains::rows()),
        ("Rings", rings::rows()),
        ("Configuration and features", config::rows()),
        ("Messages", messages::rows()),
        ("Descriptors", descriptors::rows()),
        ("Memory", memory::rows()),
        ("Life cycle", lifecycle::rows()),
        ("Promptness", lifecycle::prompt_rows()),
        ("Two frontends", parked::rows()),
        ("Dirty log", log::rows()),
        ("Recovery", recovery::rows()),
    ]
}

fn start(template: &str) -> Result<Daemon, String> {
    Daemon::by_command(template, DISK_BYTES, QUEUES)
}

/// Asks a back-end for its features.
fn offered(template: &str) -> Result<Offered, String> {
    let daemon = start(template)?;
    let ask = || {
        let frontend = Frontend::connect(daemon.socket(), time_limit())?;
        let features = frontend.features()?;
        let protocol_features = frontend.protocol_features()?;
        Ok(Offered {
            features,
            protocol_features,
        })
    };
    ask().map_err(|error: cleave_client::Error| format!("the back-end's features: {error}"))
}

/// Judges rows, several at a time, and returns them in their order.
fn judge_all(template: &str, offered: &Offered, rows: Vec<Row>) -> Vec<Line> {
    let rows = Mutex::new(rows.into_iter().enumerate());
    let lines = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..JOBS {
            scope.spawn(|| {
                loop {
                    let next = rows.lock().unwrap().next();
                    let Some((index, row)) = next else { return };
                    let line = judge(template, offered, row);
                    lines.lock().unwrap().push((index, line));
                }
            });
        }
    });
    let mut lines = lines.into_inner().unwrap();
    lines.sort_by_key(|(index, _)| *index);
    lines.into_iter().map(|(_, line)| line).collect()
}

fn judge(template: &str, offered: &Offered, row: Row) -> Line {
    let (name, basis) = (row.name.clone(), row.basis);
    let is_offered = row.protocol_features & !offered.protocol_features == 0
        && row.features & !offered.features == 0;
    let verdict = match is_offered.then(|| judge_alone(template, row)) {
        None => Verdict::NotOffered,
        Some(Ok(())) => Verdict::Passed,
        Some(Err(why)) => Verdict::Failed(why),
    };
    Line {
        name,
        basis,
        verdict,
    }
}

/// Runs a row against a new back-end, and kills that when the time is up.
fn judge_alone(template: &str, row: Row) -> Outcome {
    let mut daemon = start(template)?;
    let (pid, (report, result)) = (daemon.pid(), channel());
    std::thread::spawn(move || {
        let outcome = row.judge(&mut daemon);
        daemon.abandon();
        // Nobody listens if the row took too long.
        let _ = report.send(outcome);
    });
    match result.recv_timeout(ROW_LIMIT) {
        Err(RecvTimeoutError::Timeout) => {
            let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            Err(format!("no result within {ROW_LIMIT:?}"))
        }
        Err(RecvTimeoutError::Disconnected) => Err("the test ended early".into()),
        Ok(outcome) => outcome,
    }
}

/// Prints a table. Rows that differ only in numbers share a line.
fn print_table(title: &str, lines: &[Line]) {
    println!("## {title}\n\n| Row | Basis | Result |\n| --- | --- | --- |");
    let mut groups: Vec<([String; 3], [String; 3], usize)> = Vec::new();
    for line in lines {
        let cells = line.cells();
        let key = cells.clone().map(|cell| without_numbers(&cell));
        match groups.iter_mut().find(|(other, ..)| *other == key) {
            Some((.., count)) => *count += 1,
            None => groups.push((key, cells, 1)),
        }
    }
    for (_, [name, basis, verdict], count) in groups {
        match count {
            1 => println!("| {name} | {basis} | {verdict} |"),
            _ => println!(
                "| {name}, and {} like it | {basis} | {verdict} |",
                count - 1
            ),
        }
    }
    println!("\n{}.\n", sum(lines));
}

/// Says how many rows passed, how many failed, and how many need a feature that is not offered.
fn sum<'a>(lines: impl IntoIterator<Item = &'a Line>) -> String {
    let (mut passed, mut failed, mut not_offered) = (0, 0, 0);
    for line in lines {
        match line.verdict {
            Verdict::Passed => passed += 1,
            Verdict::Failed(_) => failed += 1,
            Verdict::NotOffered => not_offered += 1,
        }
    }
    format!("{passed} passed, {failed} failed, {not_offered} not offered")
}

impl Line {
    fn is_specified(&self) -> bool {
        matches!(self.basis, Some(Basis::Specified(_)))
    }

    /// Name, basis and result as cells of a Markdown table.
    fn cells(&self) -> [String; 3] {
        let verdict = match &self.verdict {
            Verdict::Passed => "passed".to_owned(),
            Verdict::Failed(why) => format!("**failed**: {}", one_line(why)),
            Verdict::NotOffered => "not offered".to_owned(),
        };
        [one_line(&self.name), basis_cell(self.basis), verdict]
    }
}

fn basis_cell(basis: Option<Basis>) -> String {
    match basis {
        Some(Basis::Specified(section)) => section.to_owned(),
        Some(Basis::Policy(section)) => format!("policy ({section})"),
        None => "policy".to_owned(),
    }
}

/// A text with each number replaced by `#`.
fn without_numbers(text: &str) -> String {
    let mut words: Vec<&str> = Vec::new();
    for word in text.split_inclusive(|letter: char| !letter.is_alphanumeric() && letter != '.') {
        let is_number = word.starts_with(|letter: char| letter.is_ascii_digit());
        words.push(if is_number { "# " } else { word });
    }
    words.concat()
}

/// The first line of a text as the cell of a table; what follows is the log of a back-end.
fn one_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().replace('|', "\\|")
}

fn our_daemon() -> String {
    let program = program_path().display();
    // Rows that measure the time of a back-end are the same for each disk, and this one adds none.
    format!("{program} serve --socket-path {{socket}} --disk ram:64M --queues {{queues}}")
}

pub(super) fn our_daemon_passes_a_row_of_each_table() {
    let template = our_daemon();
    let offered = offered(&template).unwrap();
    for (title, mut rows) in tables() {
        rows.truncate(1);
        for line in judge_all(&template, &offered, rows) {
            match line.verdict {
                Verdict::Passed => {}
                Verdict::Failed(why) => panic!("{title}: {}: {why}", line.name),
                Verdict::NotOffered => panic!("{title}: {} is not offered", line.name),
            }
        }
    }
}

pub(super) fn a_back_end_that_never_listens_is_reported() {
    let why = offered("false {socket}").err().unwrap();
    assert!(why.contains("exited at start"), "{why}");
}

pub(super) fn a_back_end_that_dies_fails_its_row() {
    let template = our_daemon();
    let row = cleave_tests::row("kills", |daemon| daemon.die());
    let why = judge_alone(&template, row).unwrap_err();
    assert!(why.contains("the daemon exited"), "{why}");
}

/// The recorded runs have the rows of the tables, and the page has their sums: otherwise the runs have to be repeated.
pub(super) fn the_recorded_runs_have_each_row_and_are_summed_up() {
    let page = include_str!("../../docs/conformance.md");
    let rows = tables().into_iter().flat_map(|(_, rows)| rows);
    let rows: BTreeSet<_> = rows
        .map(|row| [without_numbers(&one_line(&row.name)), basis_cell(row.basis)])
        .collect();
    for (name, recorded) in [
        ("cleave", include_str!("../../docs/conformance/cleave.md")),
        (
            "qemu-storage-daemon",
            include_str!("../../docs/conformance/qemu-storage-daemon.md"),
        ),
    ] {
        let seen: BTreeSet<_> = recorded.lines().filter_map(recorded_row).collect();
        let new: Vec<_> = rows.difference(&seen).collect();
        let gone: Vec<_> = seen.difference(&rows).collect();
        assert!(
            new.is_empty() && gone.is_empty(),
            "docs/conformance/{name}.md is out of date: write to it what the command in its first lines prints. \
             It lacks {new:?}, and {gone:?} are rows no more"
        );
        for line in recorded.lines().filter(|line| line.starts_with("Rows ")) {
            let (_, sum) = line.split_once(": ").unwrap();
            let sum = sum.trim_end_matches('.');
            assert!(
                page.contains(sum),
                "docs/conformance.md does not say of {name}: {line}"
            );
        }
    }
}

/// Returns name and basis of a line of a table, without the number of rows that share it.
fn recorded_row(line: &str) -> Option<[String; 2]> {
    let mut cells = line.strip_prefix("| ")?.split(" | ");
    let (name, basis) = (cells.next()?, cells.next()?);
    let name = match name.rsplit_once(", and ") {
        Some((first, rest)) if rest.ends_with(" like it") => first,
        _ => name,
    };
    let is_row = name != "Row" && name != "---";
    is_row.then(|| [without_numbers(name), basis.to_owned()])
}
