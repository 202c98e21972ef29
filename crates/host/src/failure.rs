//! How the program ends when it cannot go on: one line for the operator, and an exit code.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
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
    /// service up, so this is for the words of the command line, and for a thing that they name and that is of the wrong kind. What may be
    /// otherwise in a moment is of another kind, as far as the error tells.
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
        match error.may_pass() || may_be_attached(&error) {
            true => Failure::start(line),
            false => Failure::input(line),
        }
    }

    /// A file of the command line that cannot be read. Bad input, if this user may not read it or if it is of the wrong kind or too long:
    /// otherwise its file system may be mounted later, or answer, or the host have memory and open files again.
    pub fn unread(line: impl fmt::Display, error: &io::Error) -> Failure {
        match may_be_read_later(error) {
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

/// Returns true unless this user may not read a file, or it is of the wrong kind or too long.
pub(crate) fn may_be_read_later(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, IsADirectory, PermissionDenied};
    let is_lasting = matches!(error.kind(), InvalidInput | IsADirectory | PermissionDenied);
    error.raw_os_error().is_some() && !is_lasting
}

/// Returns true if the disk is a device that is there before it has its bytes or its mode, because it is attached in steps.
fn may_be_attached(error: &OpenError) -> bool {
    let (OpenError::Empty(name, _) | OpenError::NoRead(name) | OpenError::NoWrite(name)) = error
    else {
        return false;
    };
    fs::metadata(name).is_ok_and(|found| found.file_type().is_block_device())
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

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn is_one_line_whatever_is_in_it() {
        let failure = Failure::input("no file /tmp/a\nb\x1b[31m");
        assert_eq!(failure.to_string(), "no file /tmp/a?b?[31m");
        assert_eq!(failure.exit_code(), ExitCode::from(2));
    }

    #[test]
    fn a_file_that_may_be_there_later_is_no_bad_input() {
        for (errno, code) in [
            (Errno::NOENT, 1),
            (Errno::IO, 1),
            (Errno::MFILE, 1),
            (Errno::NFILE, 1),
            (Errno::NOMEM, 1),
            (Errno::STALE, 1),
            (Errno::ACCESS, 2),
            (Errno::ISDIR, 2),
        ] {
            let failure = Failure::unread("it cannot be read", &errno.into());
            assert_eq!(failure.exit_code(), ExitCode::from(code), "{errno}");
        }
        let long = io::Error::other("it is too long");
        assert_eq!(Failure::unread("", &long).exit_code(), ExitCode::from(2));
    }

    #[test]
    fn an_image_without_bytes_is_bad_input() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let name = image.path().display().to_string();
        for error in [
            OpenError::Empty(name.clone(), String::new()),
            OpenError::NoWrite(name),
        ] {
            assert_eq!(Failure::open(error).exit_code(), ExitCode::from(2));
        }
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
