//! The daemon of the demonstration: a `cleave serve` process of its own, so that its CPU time is told
//! apart from the driver's, and so that what is shown is what an operator runs.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use std::os::unix::process::CommandExt as _;

use cleave_host::Failure;
use rustix::process::{Pid, Signal, kill_process};

/// How long its end may take: `serve` promises two seconds.
const END_MAX: Duration = Duration::from_millis(2500);

/// The variables by which a service manager speaks to this process (sd_notify(3), sd_listen_fds(3)), and not to a daemon that it starts.
const MANAGER_VARIABLES: [&str; 6] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
];

/// Ended when dropped.
#[derive(Debug)]
pub(super) struct Serving {
    child: Child,
    socket: PathBuf,
}

impl Serving {
    /// Starts it; it needs a moment before its socket is there.
    pub(super) fn start(image: &Path, socket: &Path) -> Result<Serving, Failure> {
        let failed = |error| Failure::run(format!("cannot start a daemon of our own: {error}"));
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(program);
        for variable in MANAGER_VARIABLES {
            command.env_remove(variable);
        }
        let child = command
            .args([
                "serve",
                "--exit-with-parent",
                &std::process::id().to_string(),
                "--log",
                "warn",
                "--serial",
                "cleave-demo",
            ])
            .arg("--socket-path")
            .arg(socket)
            .arg("--disk")
            .arg(image)
            .stdin(Stdio::null())
            // Ctrl-C is for us: we end it when we have finished with it.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        Ok(Serving {
            child,
            socket: socket.to_owned(),
        })
    }

    /// Its process.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The socket on which it listens.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns true if the daemon has ended by itself.
    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// The failure to report: that of the daemon if it has ended, else `why`.
    pub(super) fn blame(&mut self, doing: &str, why: &str) -> Failure {
        match self.child.try_wait() {
            Ok(Some(status)) => Failure::run(format!(
                "{doing}: the daemon ended with {status}; its message is above"
            )),
            _ => Failure::run(format!("{doing}: {why}")),
        }
    }

    fn end(&mut self) {
        let Some(id) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) else {
            return;
        };
        // Not yet waited for, so the number is still its own.
        if self.has_ended() || kill_process(id, Signal::TERM).is_err() {
            return;
        }
        let start = Instant::now();
        while !self.has_ended() {
            if start.elapsed() > END_MAX {
                crate::progress::note("the daemon does not end: killing it");
                let _ = self.child.kill();
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.end();
    }
}
