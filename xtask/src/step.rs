//! The steps of a check: each takes one line on the terminal, with its time; the first failure ends the run with its output
//! and its remedy.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Instant;

use cleave_rig::{Result, execute, words};

/// Runs `work` under `name`; `remedy` is printed with its failure.
pub(crate) fn step(name: &str, remedy: &str, work: impl FnOnce() -> Result<String>) -> Result {
    let mut terminal = std::io::stdout();
    // A step may run for minutes, so a terminal shows its name at once. In a log one line is enough.
    if terminal.is_terminal() {
        print!("{name:<14} …\r");
        // A terminal that cannot be flushed shows less; the check itself goes on.
        let _ = terminal.flush();
    }
    let start = Instant::now();
    let done = work();
    let seconds = start.elapsed().as_secs_f64();
    let verdict = if done.is_ok() { "ok  " } else { "FAIL" };
    let note = done.as_deref().unwrap_or_default();
    println!("{name:<14} {verdict} {seconds:6.1} s  {note}");
    done.map(drop)
        .map_err(|why| format!("{why}\n\n{name} failed. Remedy: {remedy}"))
}

/// Returns the faults, one a line, as an error; `said` where there are none.
pub(crate) fn unless(faults: &[String], said: impl Into<String>) -> Result<String> {
    match faults {
        [] => Ok(said.into()),
        _ => Err(faults.join("\n")),
    }
}

/// Runs a program whose output goes to a file; the error is how it ended.
pub(crate) fn logged(folder: &Path, log: &Path, line: &[String]) -> Result {
    let start = words(
        "sh -c {} {}",
        &[&"exec \"$@\" >\"$0\" 2>&1", &log.display()],
    );
    let ended = execute(folder, &[&start, line].concat());
    let how = |why: String| why.rsplit("` ").next().unwrap_or_default().to_owned();
    ended.map(drop).map_err(how)
}
