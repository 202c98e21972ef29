//! A daemon as a child process: started, watched, ended, and never left behind.

use std::fs::{File, read_link, read_to_string};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::step::{At, Result, quietly};

const START_LIMIT: Duration = Duration::from_secs(60);
/// SIGTERM to exit: the daemon's own promise is two seconds, the rest is a busy test machine's.
const EXIT_LIMIT: Duration = Duration::from_secs(30);

/// The peers. With an I/O thread, QEMU's of version 7.2 deadlocks on SIGTERM when the machine is busy: its main loop
/// waits in `vhost_user_server_stop` with the lock that the thread wants. SPDK's takes seconds.
const PEERS: [&str; 2] = ["qemu-storage-daemon", "vhost"];

/// A running daemon; killed when dropped.
pub(crate) struct Daemon {
    child: Child,
    log: PathBuf,
    pub(crate) socket: PathBuf,
}

impl Daemon {
    /// Starts it and waits until its socket is there; its output goes to `log`.
    pub(crate) fn start(mut command: Command, socket: PathBuf, log: PathBuf) -> Result<Daemon> {
        let stdout = File::create(&log).at(&log)?;
        let stderr = stdout.try_clone().at(&log)?;
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        let child = command.spawn().at(command.get_program())?;
        let mut daemon = Daemon { child, log, socket };
        // Not by connecting: a frontend that connects and leaves is a test of its own. The kernel's list of sockets has
        // the flag __SO_ACCEPTCON and, last, the path.
        let path = format!(" {}", daemon.socket.display());
        let listens = |line: &str| line.contains(" 00010000 ") && line.ends_with(&path);
        let list = || read_to_string("/proc/net/unix").unwrap_or_default();
        match daemon.await_exit(START_LIMIT, || list().lines().any(listens))? {
            Some(how) => Err(daemon.explain(&format!("ended at once with {how}"))),
            None if list().lines().any(listens) => Ok(daemon),
            None => Err(daemon.explain("listens on no socket")),
        }
    }

    /// Names of the daemon's threads.
    pub(crate) fn threads(&self) -> Result<Vec<String>> {
        let folder = format!("/proc/{}/task", self.process());
        let tasks = std::fs::read_dir(&folder).at(&folder)?.flatten();
        // A thread may end between the listing and the read.
        let names = tasks.filter_map(|task| read_to_string(task.path().join("comm")).ok());
        Ok(names.map(|name| name.trim().to_owned()).collect())
    }

    /// Its whole log.
    pub(crate) fn said(&self) -> String {
        read_to_string(&self.log).unwrap_or_default()
    }

    /// Its process.
    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    /// SIGTERM. The daemon must be alive until then, exit soon and cleanly, and never have panicked. A peer must be
    /// alive and is killed: how it ends is not measured.
    pub(crate) fn stop(mut self) -> Result {
        if let Some(how) = self.await_exit(Duration::ZERO, || true)? {
            return Err(self.explain(&format!("ended by itself with {how}")));
        }
        let link = format!("/proc/{}/exe", self.process());
        // The file that it runs, whatever started it.
        let program = read_link(&link).at(&link)?;
        if PEERS.iter().any(|peer| program.ends_with(peer)) {
            return Ok(());
        }
        self.signal("TERM")?;
        match self.await_exit(EXIT_LIMIT, || false)? {
            None => Err(self.explain("ignores SIGTERM")),
            Some(how) if how.success() && !self.said().contains("panicked") => Ok(()),
            Some(how) => Err(self.explain(&format!("ended with {how}"))),
        }
    }

    /// Sends a signal; the shell's own `kill`, for a small system has no program of that name.
    pub(crate) fn signal(&self, name: &str) -> Result {
        let line = format!("kill -{name} {}", self.process());
        quietly(Path::new("/"), &["sh", "-c", &line], &[]).map(drop)
    }

    /// Its exit status, as soon as it has exited; `None` once something else is true, or the time is up.
    fn await_exit(
        &mut self,
        limit: Duration,
        is_enough: impl Fn() -> bool,
    ) -> Result<Option<std::process::ExitStatus>> {
        let end = Instant::now() + limit;
        loop {
            let status = self.child.try_wait().at("wait")?;
            if status.is_some() || is_enough() || Instant::now() > end {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn explain(&self, what: &str) -> String {
        format!("the daemon {what}; its log:\n{}", self.said())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Already ended, or ending: either way nothing more can be done about it here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_a_signal_ends_has_not_ended_well() {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let [log, socket] = [(); 2].map(|()| PathBuf::new());
        assert!(Daemon { child, log, socket }.stop().is_err());
    }
}
