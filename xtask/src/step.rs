//! Steps of a check: each takes one line on the terminal, with its time; the first failure ends the
//! run with what was printed and what to do about it.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Runs `work` under `name`; `remedy` is printed with its failure.
pub(crate) fn step(
    name: &str,
    remedy: &str,
    work: impl FnOnce() -> Result<String, String>,
) -> Result<(), String> {
    let mut terminal = std::io::stdout();
    // A step may run for minutes: somebody who watches sees its name before. In a log one line is enough.
    let is_watched = terminal.is_terminal();
    if is_watched {
        print!("{name:<14} …");
        // A terminal that cannot be flushed shows less; the check itself goes on.
        let _ = terminal.flush();
    }
    let again = if is_watched { "\r" } else { "" };
    let start = Instant::now();
    let done = work();
    let seconds = start.elapsed().as_secs_f64();
    match done {
        Ok(note) => {
            println!("{again}{name:<14} ok   {seconds:6.1} s  {note}");
            Ok(())
        }
        Err(why) => {
            println!("{again}{name:<14} FAIL {seconds:6.1} s");
            Err(format!("{why}\n\n{name} failed. Remedy: {remedy}"))
        }
    }
}

/// A program on a CPU of its own, which dies with us: one that outlived a killed run would spoil the next.
pub(crate) fn pinned(cpu: &str, program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "taskset", "--cpu-list", cpu, program]);
    command
}

/// Runs a program in `folder`, quietly; its output is the error where it fails.
pub(crate) fn quietly(
    folder: &Path,
    words: &[&str],
    environment: &[(&str, &str)],
) -> Result<String, String> {
    let (program, arguments) = words.split_first().ok_or("nothing to run")?;
    let output = Command::new(program)
        .args(arguments)
        .envs(environment.iter().copied())
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot run {program}: {error}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    if output.status.success() {
        return Ok(stdout.into_owned());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(format!(
        "{stdout}{stderr}\n`{}` ended with {}",
        words.join(" "),
        output.status
    ))
}
