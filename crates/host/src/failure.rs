//! How the program ends when it cannot go on: one line for the operator, and an exit code.

use std::fmt;
use std::process::ExitCode;

use cleave_disk::OpenError;

use crate::process::unit;

/// A failure as the operator sees it: one line, with control characters replaced, and an exit code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    line: String,
    code: u8,
}

impl Failure {
    /// Bad input: the line names the thing and the remedy; exit code 2.
    pub fn input(line: impl fmt::Display) -> Failure {
        Failure::with_code(line, 2)
    }

    /// Something failed while running; exit code 1.
    pub fn run(line: impl fmt::Display) -> Failure {
        Failure::with_code(line, 1)
    }

    /// A disk that cannot be opened. Bad input, unless it may be there later, or its server may answer: a service manager then tries again.
    pub fn open(error: OpenError) -> Failure {
        let line = unit::explain(&error);
        match error.may_pass() {
            true => Failure::run(line),
            false => Failure::input(line),
        }
    }

    /// Returns true if the command was running when it failed.
    pub(crate) fn is_of_the_run(&self) -> bool {
        self.code == 1
    }

    /// The code that the process ends with.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }

    fn with_code(line: impl fmt::Display, code: u8) -> Failure {
        // A path may hold a line feed: a log that is read line by line must not be broken by it.
        let line = line
            .to_string()
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect();
        Failure { line, code }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_one_line_whatever_is_in_it() {
        let failure = Failure::input("no file /tmp/a\nb\x1b[31m");
        assert_eq!(failure.to_string(), "no file /tmp/a?b?[31m");
        assert_eq!(failure.exit_code(), ExitCode::from(2));
    }
}
