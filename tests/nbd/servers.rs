//! Servers that people use, and a daemon on one of them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use cleave_client::Workload;
use cleave_tests::http::get;
use cleave_tests::{Daemon, Requirement, Scratch, has_listener, pattern, run_to_exit, wait_until};
use serde_json::Value;

pub(crate) const QEMU: Requirement = Requirement::Program("/usr/bin/qemu-nbd");
pub(crate) const NBDKIT: Requirement = Requirement::Program("/usr/bin/nbdkit");
pub(crate) const NBD_SERVER: Requirement = Requirement::Program("/usr/bin/nbd-server");

pub(crate) const SIZE: u64 = 64 << 20;

/// A server's process.
pub(crate) struct Server {
    pub(crate) child: Child,
    args: Vec<String>,
}

impl Server {
    /// Starts a program and waits until it listens.
    pub(crate) fn start(args: &[&str], at: &At) -> Server {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let child = spawn(&args);
        let server = Server { child, args };
        server.await_listening(at);
        server
    }

    fn await_listening(&self, at: &At) {
        assert!(wait_until(|| at.has_listener()), "{:?}", self.args);
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn restart(&mut self, at: &At) {
        if let At::Unix(path) = at {
            let _ = std::fs::remove_file(path);
        }
        self.child = spawn(&self.args);
        self.await_listening(at);
    }
}

fn spawn(args: &[String]) -> Child {
    let mut command = Command::new(&args[0]);
    command.args(&args[1..]).stdin(Stdio::null());
    command.spawn().unwrap()
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where a server listens.
pub(crate) enum At {
    Unix(PathBuf),
    Tcp(u16),
}

impl At {
    /// A port that is free now.
    pub(crate) fn tcp() -> At {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        At::Tcp(listener.local_addr().unwrap().port())
    }

    pub(crate) fn uri(&self, export: &str, options: &str) -> String {
        match self {
            At::Unix(path) => format!("nbd+unix:///{export}?socket={}&{options}", path.display()),
            At::Tcp(port) => format!("nbd://127.0.0.1:{port}/{export}?{options}"),
        }
    }

    /// Returns true if a server listens there. A connection would use up one that the server permits.
    pub(crate) fn has_listener(&self) -> bool {
        match self {
            At::Unix(path) => has_listener(path),
            At::Tcp(port) => {
                let listens = format!(":{port:04X} 00000000:0000 0A");
                let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
                sockets.contains(&listens)
            }
        }
    }
}

/// qemu-nbd for an image.
pub(crate) fn qemu_nbd(image: &Path, format: &str, at: &At, more: &[&str]) -> Server {
    let image = image.to_str().unwrap();
    let mut args = vec!["qemu-nbd", "--persistent", "-f", format];
    let port;
    match at {
        At::Unix(path) => {
            let _ = std::fs::remove_file(path);
            args.extend(["-k", path.to_str().unwrap()]);
        }
        At::Tcp(number) => {
            port = number.to_string();
            args.extend(["-b", "127.0.0.1", "-p", &port]);
        }
    }
    args.extend(more);
    args.push(image);
    Server::start(&args, at)
}

/// A daemon with a control socket, and the path of that socket.
pub(crate) fn serve(uri: &str, more: &[&str]) -> (Daemon, PathBuf) {
    // Its last flush may take seconds on a late machine. `finish` finds a hang.
    let args = ["--disk", uri, "--serial", "disk", "--stop-deadline", "60"];
    Daemon::serve_with_control_in(Scratch::in_memory(), &[&args, more].concat())
}

pub(crate) fn report(control: &Path) -> Value {
    get(control, "/v1/disks/disk")
}

pub(crate) fn holds(control: &Path) -> bool {
    report(control)["stalled"][0]["held"].as_u64() > Some(0)
}

/// Repeats held requests.
pub(crate) fn resume(control: &Path) -> Option<i32> {
    let control = control.to_str().unwrap();
    run_to_exit(&["disk", "resume", "--held", "--control", control]).code
}

pub(crate) fn load() -> Workload<'static> {
    pattern(16 << 10, 16, 32 << 20, 3000)
}
