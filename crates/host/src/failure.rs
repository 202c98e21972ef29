//! How the program ends when it cannot go on: one line for the operator, and an exit code.

use std::fmt;
use std::process::{ExitCode, ExitStatus};

use cleave_disk::OpenError;

use crate::process::unit;

/// A failure as the operator sees it: one line, with control characters replaced, and an exit code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    line: String,
    kind: FailureKind,
}

/// The meaning of a failure for a service manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FailureKind {
    /// The next attempt fails as well.
    Input,
    /// The program did not come to serve. The next attempt may succeed.
    Start,
    /// The program failed while it ran.
    Run,
    /// A process that runs cannot hand over. A restart gets past that.
    Obstacle,
}

impl Failure {
    /// The exit code of a process that does not take over, because the one that runs cannot hand over.
    pub const OBSTACLE: u8 = 3;

    /// Bad input, which no second attempt cures: the line names the thing and the remedy; exit code 2. A service manager gives the
    /// service up, so this is for the words of the command line, and for a thing that they name and that is of the wrong kind. All that
    /// may be otherwise in a moment is of another kind.
    pub fn input(line: impl fmt::Display) -> Failure {
        Failure::with_kind(line, FailureKind::Input)
    }

    /// Something that may pass keeps the program from serving, such as a lack of memory; exit code 1. A service manager tries again.
    pub(crate) fn start(line: impl fmt::Display) -> Failure {
        Failure::with_kind(line, FailureKind::Start)
    }

    /// Something failed while running; exit code 1.
    pub fn run(line: impl fmt::Display) -> Failure {
        Failure::with_kind(line, FailureKind::Run)
    }

    /// A process that is to be taken over from cannot hand over and goes on; exit code 3. `cleave upgrade` and the package then restart
    /// its unit, as they do for no other code.
    pub(crate) fn obstacle(line: impl fmt::Display) -> Failure {
        Failure::with_kind(line, FailureKind::Obstacle)
    }

    /// A disk that cannot be opened. Bad input, unless it may be there later, or its server may answer: a service manager then tries again.
    pub fn open(error: OpenError) -> Failure {
        let line = unit::explain(&error);
        match error.may_pass() {
            true => Failure::start(line),
            false => Failure::input(line),
        }
    }

    /// The end of another process of this program: exit code 2 or 3 if that was its own, otherwise 1.
    pub fn of_process(line: impl fmt::Display, status: ExitStatus) -> Failure {
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        let kinds = [FailureKind::Input, FailureKind::Obstacle];
        let kind = kinds.into_iter().find(|kind| code == Some(kind.code()));
        Failure::with_kind(line, kind.unwrap_or(FailureKind::Run))
    }

    /// Returns true if the command was running when it failed.
    pub(crate) fn is_of_the_run(&self) -> bool {
        self.kind == FailureKind::Run
    }

    /// Returns true for [`Failure::obstacle`].
    pub(crate) fn is_obstacle(&self) -> bool {
        self.kind == FailureKind::Obstacle
    }

    /// The code that the process ends with.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.kind.code())
    }

    fn with_kind(line: impl fmt::Display, kind: FailureKind) -> Failure {
        // A path may hold a line feed: a log that is read line by line must not be broken by it.
        let line = line
            .to_string()
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect();
        Failure { line, kind }
    }
}

impl FailureKind {
    fn code(self) -> u8 {
        match self {
            FailureKind::Start | FailureKind::Run => 1,
            FailureKind::Input => 2,
            FailureKind::Obstacle => Failure::OBSTACLE,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn is_one_line_whatever_is_in_it() {
        let failure = Failure::input("no file /tmp/a\nb\x1b[31m");
        assert_eq!(failure.to_string(), "no file /tmp/a?b?[31m");
        assert_eq!(failure.exit_code(), ExitCode::from(2));
    }

    /// Nobody restarts a unit, or gives it up, for a code that is not the other process's own.
    #[test]
    fn the_end_of_another_process_is_passed_on() {
        for (raw, code) in [
            (0, 1),
            (1 << 8, 1),
            (2 << 8, 2),
            (3 << 8, 3),
            (4 << 8, 1),
            (9, 1),
        ] {
            let failure = Failure::of_process("it has ended", ExitStatus::from_raw(raw));
            assert_eq!(failure.exit_code(), ExitCode::from(code), "{raw}");
        }
    }
}
