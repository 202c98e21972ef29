//! Children that tests start. Until one has executed its program, it has copies of all descriptors of this process, and keeps the locks
//! of files that another test has closed meanwhile. The start of a child returns a moment too early for that, so its end counts.

use std::io;
use std::process::{Command, Output};
use std::sync::{PoisonError, RwLock};

static RUNNING: RwLock<()> = RwLock::new(());

/// Runs a program to its end.
pub(crate) fn run(command: &mut Command) -> io::Result<Output> {
    let _running = RUNNING.write().unwrap_or_else(PoisonError::into_inner);
    command.output()
}

/// Returns when no child has a copy of what this process has closed.
pub(crate) fn none_run() {
    drop(RUNNING.read().unwrap_or_else(PoisonError::into_inner));
}
