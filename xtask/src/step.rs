//! Programs that are run, and the steps of a check: each takes one line on the terminal, with its time; the first
//! failure ends the run with its output and its remedy.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Errors are sentences for a developer.
pub(crate) type Result<T = (), E = String> = std::result::Result<T, E>;

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
) -> Result<String> {
    let (program, arguments) = words.split_first().ok_or("nothing to run")?;
    let mut command = Command::new(program);
    command.args(arguments).envs(environment.iter().copied());
    let output = command.current_dir(folder).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("cannot run {program}: {error}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    if output.status.success() {
        return Ok(stdout.into_owned());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let (line, status) = (words.join(" "), output.status);
    Err(format!("{stdout}{stderr}\n`{line}` ended with {status}"))
}

/// The same for a line whose words have no spaces in them.
pub(crate) fn line(folder: &Path, line: &str, environment: &[(&str, &str)]) -> Result<String> {
    quietly(folder, &line.split(' ').collect::<Vec<_>>(), environment)
}

/// The same for a program whose output goes to a file; the error is how it ended.
pub(crate) fn logged(
    folder: &Path,
    log: &Path,
    words: &[&str],
    environment: &[(&str, &str)],
) -> Result {
    let start = [
        "sh",
        "-c",
        "exec \"$@\" >\"$0\" 2>&1",
        &log.to_string_lossy(),
    ];
    let ended = quietly(folder, &[&start, words].concat(), environment);
    let how = |why: String| why.rsplit("` ").next().unwrap_or_default().to_owned();
    ended.map(drop).map_err(how)
}

/// Names the file or the program in an error of the system.
pub(crate) trait At<T> {
    fn at(self, name: impl AsRef<Path>) -> Result<T>;
}

impl<T> At<T> for std::io::Result<T> {
    fn at(self, name: impl AsRef<Path>) -> Result<T> {
        self.map_err(|error| format!("{}: {error}", name.as_ref().display()))
    }
}

/// Makes a folder, empty.
pub(crate) fn empty_folder(folder: &Path) -> Result {
    if folder.exists() {
        std::fs::remove_dir_all(folder).at(folder)?;
    }
    std::fs::create_dir_all(folder).at(folder)
}
