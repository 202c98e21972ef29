//! A daemon as a child process: started, watched, ended, and never left behind.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::step::{At, quietly};

/// SIGTERM to exit: the daemon's own promise is two seconds, the rest is a busy test machine's.
const EXIT_LIMIT: Duration = Duration::from_secs(30);
const START_LIMIT: Duration = Duration::from_secs(60);

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
    pub(crate) fn start(
        mut command: Command,
        socket: PathBuf,
        log: PathBuf,
    ) -> Result<Daemon, String> {
        let stdout = File::create(&log).at(&log)?;
        let stderr = stdout.try_clone().at(&log)?;
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        let child = command.spawn().at(command.get_program())?;
        let mut daemon = Daemon { child, log, socket };
        daemon.await_socket()?;
        Ok(daemon)
    }

    /// Names of the daemon's threads.
    pub(crate) fn threads(&self) -> Result<Vec<String>, String> {
        let folder = format!("/proc/{}/task", self.child.id());
        let tasks = std::fs::read_dir(&folder).at(&folder)?.flatten();
        // A thread may end between the listing and the read.
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        Ok(names.map(|name| name.trim().to_owned()).collect())
    }

    /// Its whole log.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Its process.
    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    /// SIGHUP: the daemon checks the size of its image again.
    pub(crate) fn look_again(&self) -> Result<(), String> {
        self.signal("-HUP")
    }

    /// SIGTERM. The daemon must be alive until then, exit soon and cleanly, and never have panicked. A peer must be
    /// alive and is killed: how it ends is not measured.
    pub(crate) fn stop(mut self) -> Result<(), String> {
        if let Some(status) = self.child.try_wait().at("wait")? {
            return Err(self.explain(&format!("ended by itself with {status}")));
        }
        let program = self.program()?;
        if PEERS.iter().any(|peer| program.ends_with(peer)) {
            return Ok(());
        }
        self.signal("-TERM")?;
        let end = Instant::now() + EXIT_LIMIT;
        let status = loop {
            match self.child.try_wait().at("wait")? {
                Some(status) => break status,
                None if Instant::now() > end => return Err(self.explain("ignores SIGTERM")),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        match status.success() && !self.said().contains("panicked") {
            true => Ok(()),
            false => Err(self.explain(&format!("ended with {status}"))),
        }
    }

    /// The file that it runs, whatever started it.
    fn program(&self) -> Result<PathBuf, String> {
        let link = format!("/proc/{}/exe", self.child.id());
        std::fs::read_link(&link).at(&link)
    }

    fn signal(&self, signal: &str) -> Result<(), String> {
        // The shell's own `kill`: a small system has no program of that name.
        let line = format!("kill {signal} {}", self.child.id());
        quietly(Path::new("/"), &["sh", "-c", &line], &[]).map(drop)
    }

    fn await_socket(&mut self) -> Result<(), String> {
        let end = Instant::now() + START_LIMIT;
        let path = self.socket.to_string_lossy().into_owned();
        // Not by connecting: a frontend that connects and leaves is a test of its own.
        while !listens(
            &std::fs::read_to_string("/proc/net/unix").unwrap_or_default(),
            &path,
        ) {
            if let Some(status) = self.child.try_wait().at("wait")? {
                return Err(self.explain(&format!("ended at once with {status}")));
            }
            if Instant::now() > end {
                return Err(self.explain("listens on no socket"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
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
    fn what_is_not_the_peer_has_to_end_well() {
        let folder = std::env::temp_dir().join(format!("xtask-daemon-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let ended = |name: &str| {
            // A copy: of a link, the kernel names the file that it leads to.
            let program = folder.join(name);
            std::fs::copy("/bin/sleep", &program).expect("copied");
            let child = Command::new(program).arg("60").spawn().expect("it runs");
            let [log, socket] = [(); 2].map(|()| PathBuf::new());
            Daemon { child, log, socket }.stop()
        };
        for peer in PEERS {
            assert_eq!(ended(peer), Ok(()));
        }
        assert!(ended("cleave").is_err(), "ended by a signal");
        std::fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn a_socket_listens_when_its_flag_says_so() {
        let sockets = "ffff: 00000002 00000000 00010000 0001 01 123 /tmp/a\n\
            ffff: 00000003 00000000 00000000 0001 03 124 /tmp/b\n\
            ffff: 00000003 00000000 00000000 0001 03 125\n";
        assert!(listens(sockets, "/tmp/a"));
        assert!(!listens(sockets, "/tmp/b"));
        assert!(!listens(sockets, "/tmp/c"));
    }
}
