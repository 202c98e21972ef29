//! A daemon as a child process: started, watched, ended, and never left behind.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::step::quietly;

/// SIGTERM to exit: the daemon's own promise is two seconds, the rest is a busy test machine's.
const EXIT_LIMIT: Duration = Duration::from_secs(30);
const START_LIMIT: Duration = Duration::from_secs(60);

/// A running daemon; killed when dropped.
pub(crate) struct Daemon {
    child: Child,
    log: PathBuf,
    pub(crate) socket: PathBuf,
}

impl Daemon {
    /// Starts it and waits until its socket is there; what it says goes to `log`.
    pub(crate) fn start(
        mut command: Command,
        socket: PathBuf,
        log: PathBuf,
    ) -> Result<Daemon, String> {
        let to = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let also_to = to.try_clone().map_err(|error| error.to_string())?;
        let command = command.stdin(Stdio::null()).stdout(to).stderr(also_to);
        let child = command
            .spawn()
            .map_err(|error| format!("{command:?}: {error}"))?;
        let mut daemon = Daemon { child, log, socket };
        daemon.await_socket()?;
        Ok(daemon)
    }

    /// Names of the daemon's threads.
    pub(crate) fn threads(&self) -> Result<Vec<String>, String> {
        let folder = format!("/proc/{}/task", self.child.id());
        let tasks = std::fs::read_dir(&folder).map_err(|error| format!("{folder}: {error}"))?;
        // A thread may end between the listing and the look.
        let comm = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
        Ok(tasks
            .flatten()
            .filter_map(comm)
            .map(|name| name.trim().to_owned())
            .collect())
    }

    /// Everything that it has said.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Its process.
    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    /// Asks the daemon to look at its image again.
    pub(crate) fn look_again(&self) -> Result<(), String> {
        self.signal("-HUP")
    }

    /// SIGTERM; the daemon must be alive until then, end soon and cleanly, and have kept its head.
    pub(crate) fn stop(mut self) -> Result<(), String> {
        if let Some(status) = self.child.try_wait().map_err(|error| error.to_string())? {
            return Err(self.explain(&format!("ended by itself with {status}")));
        }
        self.signal("-TERM")?;
        let end = Instant::now() + EXIT_LIMIT;
        let status = loop {
            match self.child.try_wait().map_err(|error| error.to_string())? {
                Some(status) => break status,
                None if Instant::now() > end => return Err(self.explain("ignores SIGTERM")),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let said = std::fs::read_to_string(&self.log).unwrap_or_default();
        match status.success() && !said.contains("panicked") {
            true => Ok(()),
            false => Err(self.explain(&format!("ended with {status}"))),
        }
    }

    fn signal(&self, signal: &str) -> Result<(), String> {
        // The shell's own `kill`: a small system has no program of that name.
        let line = format!("kill {signal} {}", self.child.id());
        quietly(Path::new("/"), &["sh", "-c", &line], &[]).map(drop)
    }

    fn await_socket(&mut self) -> Result<(), String> {
        let end = Instant::now() + START_LIMIT;
        // Not by connecting: a frontend that comes and goes is a test of its own.
        while !self.is_listening() {
            if let Some(status) = self.child.try_wait().map_err(|error| error.to_string())? {
                return Err(self.explain(&format!("ended at once with {status}")));
            }
            if Instant::now() > end {
                return Err(self.explain("listens on no socket"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn is_listening(&self) -> bool {
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
        listens(&sockets, &self.socket.to_string_lossy())
    }

    fn explain(&self, what: &str) -> String {
        let said = std::fs::read_to_string(&self.log).unwrap_or_default();
        format!("the daemon {what}; it said:\n{said}")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Already ended, or ending: either way nothing more can be done about it here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a socket of this path accepts connections, by the kernel's list of sockets.
fn listens(sockets: &str, path: &str) -> bool {
    // Num RefCount Protocol Flags Type State Inode Path; the flag is __SO_ACCEPTCON.
    const ACCEPTS: &str = "00010000";
    sockets.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.get(3) == Some(&ACCEPTS) && fields.get(7) == Some(&path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_listens_when_its_flag_says_so() {
        let sockets = "Num RefCount Protocol Flags Type St Inode Path\n\
            ffff: 00000002 00000000 00010000 0001 01 123 /tmp/a\n\
            ffff: 00000003 00000000 00000000 0001 03 124 /tmp/b\n\
            ffff: 00000003 00000000 00000000 0001 03 125\n";
        assert!(listens(sockets, "/tmp/a"));
        assert!(!listens(sockets, "/tmp/b"));
        assert!(!listens(sockets, "/tmp/c"));
    }
}
