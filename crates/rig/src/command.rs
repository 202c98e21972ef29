//! Command lines as words, and the programs that they run.

use std::fmt::Display;
use std::path::Path;
use std::process::{Command, Stdio};

/// Errors are sentences for a developer.
pub type Result<T = (), E = String> = std::result::Result<T, E>;

/// Splits a command line at its blanks into words. Each `{}` in it stands for the next of the values, which may have
/// blanks of their own.
pub fn words(line: &str, values: &[&dyn Display]) -> Vec<String> {
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
pub const PINNED: &str = "setpriv --pdeathsig KILL taskset --cpu-list {}";

/// Makes a command of its words.
pub fn command(words: &[String]) -> Command {
    let mut command = Command::new(words.first().map_or("", String::as_str));
    command.args(words.iter().skip(1));
    command
}

/// Runs the words of a line in `folder`, quietly; its output is the error where it fails.
pub fn quietly(folder: &Path, line: &str, values: &[&dyn Display]) -> Result<String> {
    execute(folder, &words(line, values))
}

/// Runs a program by its words in `folder`, quietly; its output is the error where it fails.
pub fn execute(folder: &Path, words: &[String]) -> Result<String> {
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

/// Errors that are told with the file or the program that they concern.
pub trait At<T> {
    /// Puts `name` before the error.
    fn at(self, name: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Display> At<T> for Result<T, E> {
    fn at(self, name: impl AsRef<Path>) -> Result<T> {
        self.map_err(|error| format!("{}: {error}", name.as_ref().display()))
    }
}

/// Makes a folder, empty.
pub fn empty_folder(folder: &Path) -> Result {
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
