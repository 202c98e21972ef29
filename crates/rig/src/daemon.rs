//! A daemon as a child process: started, watched, ended, and never left behind.

use std::fs::{File, read_link, read_to_string, remove_file, symlink_metadata};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::command::{At, Result, command, quietly};

const START_LIMIT: Duration = Duration::from_secs(60);
/// SIGTERM to exit: the daemon's own promise is two seconds, the rest is a busy test machine's.
const EXIT_LIMIT: Duration = Duration::from_secs(120);

/// The peers. With an I/O thread, QEMU's of version 7.2 deadlocks on SIGTERM when the machine is busy: its main loop
/// waits in `vhost_user_server_stop` with the lock that the thread wants. SPDK's takes seconds.
const PEERS: [&str; 2] = ["qemu-storage-daemon", "vhost"];

/// Returns true if a process listens on a socket of this path, whose file is there a moment before. Does not connect: to the process
/// that would be a frontend which leaves, or the only one that it waits for.
pub fn has_listener(path: &Path) -> bool {
    // The kernel's list of sockets has the flag __SO_ACCEPTCON and, last, the path.
    let path = format!(" {}", path.display());
    let listens = |line: &str| line.contains(" 00010000 ") && line.ends_with(&path);
    let list = read_to_string("/proc/net/unix").unwrap_or_default();
    list.lines().any(listens)
}

/// A running daemon; killed when dropped.
pub struct DaemonProcess {
    child: Child,
    /// The socket on which it serves its disk.
    pub socket: PathBuf,
}

impl DaemonProcess {
    /// Starts a daemon and waits until its socket is there; its output goes to a log beside the socket.
    pub fn start(words: &[String], socket: PathBuf) -> Result<DaemonProcess> {
        let path = socket.clone();
        DaemonProcess::start_until(words, socket, || has_listener(&path))
    }

    /// Starts a daemon and waits until it is ready. A daemon without a socket has some other file there.
    pub fn start_until(
        words: &[String],
        socket: PathBuf,
        is_ready: impl Fn() -> bool,
    ) -> Result<DaemonProcess> {
        let log = socket.with_extension("log");
        let stdout = File::create(&log).at(&log)?;
        let stderr = stdout.try_clone().at(&log)?;
        let mut command = command(words);
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        let child = command.spawn().at(command.get_program())?;
        let mut daemon = DaemonProcess { child, socket };
        match daemon.await_exit(START_LIMIT, &is_ready)? {
            Some(how) => Err(daemon.explain(&format!("ended at once with {how}"))),
            None if is_ready() => Ok(daemon),
            None => Err(daemon.explain("listens on no socket")),
        }
    }

    /// Returns the names of its threads.
    pub fn threads(&self) -> Vec<String> {
        let threads = threads(self.process()).into_iter();
        threads.map(|(_, name)| name).collect()
    }

    /// Returns its whole log.
    pub fn said(&self) -> String {
        read_to_string(self.socket.with_extension("log")).unwrap_or_default()
    }

    /// Returns its process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Sends it SIGTERM. The daemon must be alive until then, exit soon and cleanly, and never have panicked. A peer must be
    /// alive and is killed: how it ends is not measured.
    pub fn stop(mut self) -> Result {
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

    /// Waits until it has ended by itself, because another process serves at its socket. That stays.
    pub fn has_left(mut self) -> Result {
        let ended = self.await_exit(EXIT_LIMIT, || false)?;
        match ended {
            Some(how) if how.success() => {
                self.socket = PathBuf::new();
                Ok(())
            }
            Some(how) => Err(self.explain(&format!("ended with {how}"))),
            None => Err(self.explain("goes on beside the one that took over")),
        }
    }

    /// Sends it a signal, by the shell's own `kill`: a small system has no program of that name.
    pub fn signal(&self, name: &str) -> Result {
        let line = format!("kill -{name} {}", self.process());
        quietly(Path::new("/"), "sh -c {}", &[&line]).map(drop)
    }

    /// Returns its exit status as soon as it has exited; `None` once something else is true, or the time is up.
    fn await_exit(
        &mut self,
        limit: Duration,
        is_enough: impl Fn() -> bool,
    ) -> Result<Option<ExitStatus>> {
        let end = Instant::now() + limit;
        loop {
            let status = self.child.try_wait().at("wait")?;
            if status.is_some() || is_enough() || Instant::now() > end {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn explain(&self, what: &str) -> String {
        format!("the daemon {what}; its log:\n{}", self.said())
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        // Already ended, or ending: either way nothing more can be done about it here.
        let _ = self.child.kill();
        let _ = self.child.wait();
        // A benchmark starts hundreds of daemons in one folder: what says nothing is not kept.
        let is_socket = |found: std::fs::Metadata| found.file_type().is_socket();
        if symlink_metadata(&self.socket).is_ok_and(is_socket) {
            let _ = remove_file(&self.socket);
        }
        let log = self.socket.with_extension("log");
        if symlink_metadata(&log).is_ok_and(|found| found.is_file() && found.len() == 0) {
            let _ = remove_file(&log);
        }
    }
}

/// Returns the ids and names of a process's threads. A thread may end between the listing and the read.
pub fn threads(process: u32) -> Vec<(String, String)> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task"));
    let named = |task: std::fs::DirEntry| {
        let name = read_to_string(task.path().join("comm")).ok()?;
        let id = task.file_name().to_string_lossy().into_owned();
        Some((id, name.trim_end().to_owned()))
    };
    let tasks = tasks.into_iter().flatten().flatten();
    tasks.filter_map(named).collect()
}

/// Returns a process's or a thread's CPU time so far, in ticks: the fields of proc_pid_stat(5) with these numbers. Field 2, the
/// name, may hold blanks and brackets.
pub fn ticks(stat: &str, fields: &[usize]) -> Option<Vec<u64>> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    let all: Vec<&str> = behind_name.split_whitespace().collect();
    let field = |number: &usize| all.get(number - 3)?.parse().ok();
    fields.iter().map(field).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_a_signal_ends_has_not_ended_well() {
        let child = command(&["sleep".to_owned(), "60".to_owned()])
            .spawn()
            .unwrap();
        let socket = PathBuf::new();
        assert!(DaemonProcess { child, socket }.stop().is_err());
    }

    #[test]
    fn a_daemon_leaves_neither_a_socket_nor_an_empty_log() {
        let folder = std::env::temp_dir().join(format!("cleave-daemon-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let files = || std::fs::read_dir(&folder).unwrap().count();
        let start = |line: &str| {
            let socket = folder.join("disk.sock");
            let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            let words = ["sh", "-c", line].map(str::to_owned);
            let said = folder.join("disk.log");
            let is_ready = || {
                !line.starts_with("echo")
                    || read_to_string(&said).is_ok_and(|said| !said.is_empty())
            };
            DaemonProcess::start_until(&words, socket, is_ready).unwrap()
        };
        let daemon = start("exec sleep 60");
        assert_eq!(files(), 2);
        drop(daemon);
        assert_eq!(files(), 0);
        // What a daemon said is kept.
        drop(start("echo why; exec sleep 60"));
        assert_eq!(files(), 1);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let stat = "7 (CPU 0) (TCG) S 1 1 1 0 -1 4 1 0 0 0 250 31 0 0 20 0 4 0 9 1";
        assert_eq!(ticks(stat, &[14, 15]), Some(vec![250, 31]));
        assert_eq!(ticks(stat, &[14, 43]), None);
    }
}
