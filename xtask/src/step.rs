//! Programs that are run, and the steps of a check: each takes one line on the terminal, with its time; the first
//! failure ends the run with its output and its remedy.

use std::fmt::Display;
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

/// The faults, one a line, as an error; `said` where there are none.
pub(crate) fn unless(faults: &[String], said: impl Into<String>) -> Result<String> {
    match faults {
        [] => Ok(said.into()),
        _ => Err(faults.join("\n")),
    }
}

/// The words of a command line, split at its blanks. Each `{}` in it stands for the next of the values, which may have
/// blanks of their own.
pub(crate) fn words(line: &str, values: &[&dyn Display]) -> Vec<String> {
    let mut values = values.iter();
    let filled = |word: &str| {
        let mut parts = word.split("{}");
        let front = parts.next().unwrap_or_default().to_owned();
        parts.fold(front, |front, rest| match values.next() {
            Some(value) => format!("{front}{value}{rest}"),
            None => front + rest,
        })
    };
    line.split(' ').map(filled).collect()
}

/// A command line before a program's own that pins it to a CPU and kills it with us: a program that outlived a killed
/// run would spoil the next.
pub(crate) const PINNED: &str = "setpriv --pdeathsig KILL taskset --cpu-list {}";

/// The command that these words make.
pub(crate) fn command(words: &[String]) -> Command {
    let mut command = Command::new(words.first().map_or("", String::as_str));
    command.args(words.iter().skip(1));
    command
}

/// Runs the words of a line in `folder`, quietly; its output is the error where it fails.
pub(crate) fn quietly(folder: &Path, line: &str, values: &[&dyn Display]) -> Result<String> {
    execute(folder, &words(line, values))
}

/// The same for words.
pub(crate) fn execute(folder: &Path, words: &[String]) -> Result<String> {
    let line = words.join(" ");
    let mut command = command(words);
    let output = command.current_dir(folder).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("cannot run `{line}`: {error}"))?;
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|out| String::from_utf8_lossy(out));
    match output.status {
        status if status.success() => Ok(stdout.into_owned()),
        status => Err(format!("{stdout}{stderr}\n`{line}` ended with {status}")),
    }
}

/// The same for a program whose output goes to a file; the error is how it ended.
pub(crate) fn logged(folder: &Path, log: &Path, line: &[String]) -> Result {
    let start = words(
        "sh -c {} {}",
        &[&"exec \"$@\" >\"$0\" 2>&1", &log.display()],
    );
    let ended = execute(folder, &[&start, line].concat());
    let how = |why: String| why.rsplit("` ").next().unwrap_or_default().to_owned();
    ended.map(drop).map_err(how)
}

/// Names the file or the program in an error.
pub(crate) trait At<T> {
    fn at(self, name: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Display> At<T> for Result<T, E> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_fills_its_place_blanks_and_all() {
        let found = words("fio --name={}:{} {} -q", &[&"a b", &7, &"{}"]);
        assert_eq!(found, ["fio", "--name=a b:7", "{}", "-q"]);
    }
}
