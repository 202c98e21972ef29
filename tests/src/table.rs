//! Tables of named cases against one daemon.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::{Daemon, Outcome, assert_serves};

/// Reason for the behaviour that a row demands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// This section of a specification.
    Specified(&'static str),
    /// Our own policy: the attack breaks this section, which leaves the reaction open, or the section leaves the case
    /// open.
    Policy(&'static str),
}

/// One named case.
pub struct Row {
    /// Its name.
    pub name: String,
    /// Its basis, which [`specified`] or [`policy`] sets.
    pub basis: Option<Basis>,
    /// Protocol features without which the row does not apply.
    pub protocol_features: u64,
    /// Device features without which the row does not apply.
    pub features: u64,
    /// The row kills the daemon and starts its successor itself.
    pub kills: bool,
    check: Box<dyn Fn(&Daemon) -> Outcome + Send>,
}

impl Row {
    /// Sets the section of the specification that demands this behaviour.
    pub fn specified(mut self, section: &'static str) -> Row {
        self.basis = Some(Basis::Specified(section));
        self
    }

    /// Marks the behaviour as our own policy about this section.
    pub fn policy(mut self, section: &'static str) -> Row {
        self.basis = Some(Basis::Policy(section));
        self
    }

    /// Limits the row to daemons that offer these protocol features.
    pub fn with_protocol(mut self, features: u64) -> Row {
        self.protocol_features |= features;
        self
    }

    /// Limits the row to daemons that offer these device features.
    pub fn with_features(mut self, features: u64) -> Row {
        self.features |= features;
        self
    }

    /// Declares that the row kills the daemon.
    pub fn killing(mut self) -> Row {
        self.kills = true;
        self
    }

    /// Runs the row. Afterwards the same process must still run and serve a new client, unless the row killed it.
    pub fn judge(&self, daemon: &mut Daemon) -> Outcome {
        let verdict = catch_unwind(AssertUnwindSafe(|| (self.check)(daemon)));
        let outcome = verdict.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("the test panicked: {}", text.unwrap_or("?")))
        });
        if self.kills {
            return outcome;
        }
        let alive = daemon
            .alive()
            .map_err(|how| format!("the daemon exited: {how}"));
        alive.and(outcome)?;
        assert_serves(daemon).map_err(|what| format!("afterwards: {what}"))
    }
}

/// Makes a case.
pub fn row(name: impl Into<String>, check: impl Fn(&Daemon) -> Outcome + Send + 'static) -> Row {
    Row {
        name: name.into(),
        basis: None,
        protocol_features: 0,
        features: 0,
        kills: false,
        check: Box::new(check),
    }
}

/// Adds rows that follow from this section of a specification.
pub fn specified(rows: &mut Vec<Row>, section: &'static str, add: impl Fn(&mut Vec<Row>)) {
    add_on(rows, Basis::Specified(section), add);
}

/// Adds rows about this section of a specification, which leaves the reaction open.
pub fn policy(rows: &mut Vec<Row>, section: &'static str, add: impl Fn(&mut Vec<Row>)) {
    add_on(rows, Basis::Policy(section), add);
}

fn add_on(rows: &mut Vec<Row>, basis: Basis, add: impl Fn(&mut Vec<Row>)) {
    let from = rows.len();
    add(rows);
    for row in &mut rows[from..] {
        row.basis.get_or_insert(basis);
    }
}

/// Scales a number of rounds by `CLEAVE_TEST_SCALE`.
pub fn scale(rounds: usize) -> usize {
    let factor = std::env::var("CLEAVE_TEST_SCALE")
        .ok()
        .and_then(|text| text.parse().ok());
    rounds * factor.unwrap_or(1usize)
}

/// Runs every row against the same daemon. After a failed row the daemon is restarted, so that one fault does not hide
/// the rest.
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
        let outcome = row.judge(&mut daemon);
        let took = began.elapsed();
        match &outcome {
            Ok(()) => println!("{group}: {} ... ok ({} ms)", row.name, took.as_millis()),
            Err(what) => {
                println!("{group}: {} ... FAILED: {what}", row.name);
                println!("{}", daemon.log_tail());
                failed.push(format!("{}: {what}", row.name));
            }
        }
        if outcome.is_err() || row.kills {
            daemon.abandon();
            daemon = start();
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
