//! `--detach`: starts the program again, without this option, and returns when that process serves.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use cleave_api::HttpClient;
use cleave_host::Failure;

use crate::commands::upgrade::node;

const OPTION: &str = "--detach";
/// Longest wait for an answer. The process that is asked may be busy with its end.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two questions.
const PAUSE: Duration = Duration::from_millis(10);

/// A process that goes on when this one returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Detached {
    /// Its options and arguments.
    words: Vec<OsString>,
    /// Its control socket.
    control: PathBuf,
}

impl Detached {
    /// Takes the command line of this process, program name first.
    pub(crate) fn new(line: &[OsString], control: &Path) -> Detached {
        let words = line.iter().skip(1).filter(|word| *word != OPTION);
        Detached {
            words: words.cloned().collect(),
            control: control.to_owned(),
        }
    }
}

/// Starts the process, and waits until it answers at the control socket in place of the one that it takes over from, or ends.
/// Its exit code is this one's: whoever has a unit reloaded judges by it whether a restart helps.
pub(crate) fn run(detached: &Detached) -> Result<(), Failure> {
    let cannot = |error| Failure::run(format!("{OPTION}: cannot start the program again: {error}"));
    let program = env::current_exe().map_err(cannot)?;
    let mut command = Command::new(program);
    command.args(&detached.words).stdin(Stdio::null());
    let mut next = command.spawn().map_err(cannot)?;
    let client = HttpClient::new(&detached.control, PATIENCE);
    loop {
        if let Some(status) = next.try_wait().map_err(cannot)? {
            let line = format!(
                "{OPTION}: process {} has ended ({status}), and has said why",
                next.id()
            );
            return Err(Failure::of_process(line, status));
        }
        if node(&client).is_ok_and(|node| node.pid == next.id()) {
            return Ok(());
        }
        thread::sleep(PAUSE);
    }
}
