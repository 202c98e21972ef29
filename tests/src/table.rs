//! Tables of named cases against one daemon.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::{Daemon, assert_serves};

/// What a case found.
pub type Outcome = Result<(), String>;

/// One named case.
pub struct Row {
    name: String,
    check: Box<dyn Fn(&Daemon) -> Outcome>,
}

/// Makes a case.
pub fn row(name: impl Into<String>, check: impl Fn(&Daemon) -> Outcome + 'static) -> Row {
    Row {
        name: name.into(),
        check: Box::new(check),
    }
}

/// A condition and what to say where it does not hold.
pub fn ensure(holds: bool, what: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(what()) }
}

/// Loops of the table run this many times; `CLEAVE_TEST_SCALE` multiplies it.
pub fn scale(rounds: usize) -> usize {
    let factor = std::env::var("CLEAVE_TEST_SCALE")
        .ok()
        .and_then(|text| text.parse().ok());
    rounds * factor.unwrap_or(1usize)
}

/// Runs every row against the same daemon. After each one the daemon must be the same process still, and serve a new
/// client; where it is not, it is started again, so that one fault does not hide the rest.
pub fn run_rows(group: &str, start: impl Fn() -> Daemon, rows: Vec<Row>) {
    let mut daemon = start();
    let only = std::env::var("CLEAVE_TEST_ROW").ok();
    let mut failed = Vec::new();
    let mut count = 0;
    for row in rows {
        if only
            .as_ref()
            .is_some_and(|only| !row.name.contains(only.as_str()))
        {
            continue;
        }
        count += 1;
        let began = Instant::now();
        let outcome = judge(&mut daemon, &row);
        let took = began.elapsed();
        match &outcome {
            Ok(()) => println!("{group}: {} ... ok ({} ms)", row.name, took.as_millis()),
            Err(what) => {
                println!("{group}: {} ... FAILED: {what}", row.name);
                println!("{}", daemon.log_tail());
                daemon.abandon();
                daemon = start();
                failed.push(format!("{}: {what}", row.name));
            }
        }
    }
    println!("{group}: {count} rows, {} failed", failed.len());
    daemon.finish();
    assert!(
        failed.is_empty(),
        "{} of {count} rows:\n{}",
        failed.len(),
        failed.join("\n")
    );
}

fn judge(daemon: &mut Daemon, row: &Row) -> Outcome {
    let verdict = catch_unwind(AssertUnwindSafe(|| (row.check)(daemon)));
    let outcome = verdict.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("the test panicked: {}", text.unwrap_or("?")))
    });
    let alive = daemon
        .alive()
        .map_err(|how| format!("the daemon ended: {how}"));
    alive.and(outcome)?;
    assert_serves(daemon).map_err(|what| format!("afterwards: {what}"))
}
