//! The daemon under test: cleave, or `qemu-storage-daemon` where the harness itself is in doubt.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::BackendKind;
use crate::step::quietly;

/// SIGTERM to exit: the daemon's own promise is two seconds, the rest is a busy test machine's.
const EXIT_LIMIT: Duration = Duration::from_secs(5);
const START_LIMIT: Duration = Duration::from_secs(10);

/// How a disk is served.
pub(crate) struct BackendSpec<'a> {
    pub(crate) kind: BackendKind,
    /// Built `cleave` program; unused by the stand-in.
    pub(crate) program: &'a Path,
    pub(crate) folder: &'a Path,
    pub(crate) image: &'a Path,
    pub(crate) vrings: u32,
    pub(crate) block_bytes: u32,
    pub(crate) mode: Mode,
}

/// What is special about the daemon of a test.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Plain,
    Poll,
    ReadOnly,
}

/// A running daemon; killed when dropped.
pub(crate) struct Backend {
    child: Child,
    log: PathBuf,
    pub(crate) socket: PathBuf,
}

impl Backend {
    pub(crate) fn start(spec: &BackendSpec<'_>) -> Result<Backend, String> {
        let socket = spec.folder.join("disk.sock");
        let log = spec.folder.join("daemon.log");
        let to = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
        let also_to = to.try_clone().map_err(|error| error.to_string())?;
        let mut command = match spec.kind {
            BackendKind::Cleave => cleave(spec, &socket),
            BackendKind::QemuStorageDaemon => qemu_storage_daemon(spec, &socket),
        };
        let command = command.stdin(Stdio::null()).stdout(to).stderr(also_to);
        let child = command
            .spawn()
            .map_err(|error| format!("{command:?}: {error}"))?;
        let mut backend = Backend { child, log, socket };
        backend.await_socket()?;
        Ok(backend)
    }

    /// The serial number that the guest must see.
    pub(crate) fn serial(kind: BackendKind) -> &'static str {
        match kind {
            BackendKind::Cleave => SERIAL,
            BackendKind::QemuStorageDaemon => "vhost_user_blk",
        }
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

    /// Whether the daemon notices that its image has another size.
    pub(crate) fn can_grow(kind: BackendKind) -> bool {
        // The stand-in would have to be told over its monitor.
        kind == BackendKind::Cleave
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
        quietly(
            Path::new("/"),
            &["kill", signal, &self.child.id().to_string()],
            &[],
        )
        .map(drop)
    }

    fn await_socket(&mut self) -> Result<(), String> {
        let end = Instant::now() + START_LIMIT;
        // Not by connecting: a frontend that comes and goes is a test of its own.
        while !self.socket.exists() {
            if let Some(status) = self.child.try_wait().map_err(|error| error.to_string())? {
                return Err(self.explain(&format!("ended at once with {status}")));
            }
            if Instant::now() > end {
                return Err(self.explain("makes no socket"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn explain(&self, what: &str) -> String {
        let said = std::fs::read_to_string(&self.log).unwrap_or_default();
        format!("the daemon {what}; it said:\n{said}")
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // Already ended, or ending: either way nothing more can be done about it here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const SERIAL: &str = "guest-test-7";

fn cleave(spec: &BackendSpec<'_>, socket: &Path) -> Command {
    let mut command = Command::new(spec.program);
    let vrings = spec.vrings.to_string();
    let block_bytes = spec.block_bytes.to_string();
    command
        .arg("serve")
        .arg("--socket-path")
        .arg(socket)
        .arg("--disk")
        .arg(spec.image);
    command.args([
        "--queues",
        &vrings,
        "--workers",
        &vrings,
        "--serial",
        SERIAL,
    ]);
    command.args(["--block-size", &block_bytes]);
    match spec.mode {
        Mode::Plain => {}
        Mode::Poll => drop(command.args(["--completion", "poll"])),
        Mode::ReadOnly => drop(command.arg("--read-only")),
    }
    command
}

fn qemu_storage_daemon(spec: &BackendSpec<'_>, socket: &Path) -> Command {
    let mut command = Command::new("qemu-storage-daemon");
    let read_only = spec.mode == Mode::ReadOnly;
    let (writable, read_only) = if read_only {
        ("off", "on")
    } else {
        ("on", "off")
    };
    command.arg("--blockdev").arg(format!(
        "driver=file,node-name=image,filename={},discard=unmap,cache.direct=on,aio=io_uring,read-only={read_only}",
        spec.image.display()
    ));
    command.arg("--export").arg(format!(
        "type=vhost-user-blk,id=disk,node-name=image,writable={writable},num-queues={},logical-block-size={},addr.type=unix,addr.path={}",
        spec.vrings,
        spec.block_bytes,
        socket.display()
    ));
    command.args([
        "--chardev",
        "stdio,id=monitor",
        "--monitor",
        "chardev=monitor",
    ]);
    command
}
