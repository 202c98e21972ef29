//! The program itself, as a child.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

const START_LIMIT: Duration = Duration::from_secs(10);

/// A `cleave serve` with one vring and one worker; ends when dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    socket: PathBuf,
}

impl Daemon {
    /// Builds the program beside the benchmarks, unless `CLEAVE_BIN` names one, and starts it.
    pub fn serve(args: &[&str]) -> Daemon {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("cleave-bench-{}-{number}.sock", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let child = Command::new(program())
            .args(["serve", "--queues", "1", "--log", "warn"])
            .args(args)
            .arg("--socket-path")
            .arg(&socket)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut daemon = Daemon { child, socket };
        let end = Instant::now() + START_LIMIT;
        while !cleave_client::is_listened_on(&daemon.socket) {
            let ended = daemon.child.try_wait().unwrap();
            assert!(ended.is_none(), "the daemon ended: {ended:?}");
            assert!(Instant::now() < end, "no socket appeared");
            std::thread::sleep(Duration::from_millis(2));
        }
        daemon
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            // Ended already, or ending.
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

fn program() -> PathBuf {
    if let Some(given) = std::env::var_os("CLEAVE_BIN") {
        return given.into();
    }
    // target/PROFILE/deps/socket-HASH; where the benchmarks are only tried, that is `debug`.
    let own = std::env::current_exe().unwrap();
    let profile = own.ancestors().nth(2).unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--locked", "--package", "cleave-daemon"]);
    if profile.ends_with("release") {
        build.arg("--release");
    }
    build.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    build.arg("--target-dir").arg(profile.parent().unwrap());
    assert!(
        build.status().unwrap().success(),
        "the program does not build"
    );
    profile.join("cleave")
}
