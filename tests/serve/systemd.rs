//! The daemon as a service: it takes the socket that systemd has made, and tells systemd how it is. The tests play
//! systemd, by sd_listen_fds(3) and sd_notify(3).

use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use cleave_client::Client;
use cleave_tests::{Daemon, Scratch, TIMEOUT, exercise, program_path, small, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// A service and the socket for its messages.
struct Service {
    child: Child,
    messages: UnixDatagram,
}

impl Service {
    /// Starts `cleave ARGS`; `passed` becomes its descriptor 3, `address` its NOTIFY_SOCKET.
    fn start(address: &str, passed: Option<&UnixListener>, args: &[&str]) -> Service {
        let messages = match address.strip_prefix('@') {
            Some(name) => {
                UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap()
            }
            None => UnixDatagram::bind(address).unwrap(),
        };
        messages.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut command = command(passed, args);
        command
            .env("NOTIFY_SOCKET", address)
            .env("WATCHDOG_USEC", "400000");
        Service {
            child: command.spawn().unwrap(),
            messages,
        }
    }

    /// The next message, whatever it says.
    fn message(&self) -> String {
        let mut bytes = [0; 4096];
        let length = self.messages.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    }

    /// Waits for a message with this line.
    fn says(&self, line: &str) -> String {
        loop {
            let message = self.message();
            if message.lines().any(|found| found == line) {
                return message;
            }
            assert!(
                message == "WATCHDOG=1" || message.starts_with("STATUS="),
                "{message:?} instead of {line}"
            );
        }
    }

    /// SIGTERM: it announces its end, and ends well.
    fn stop(mut self) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        let stopping = self.says("STOPPING=1");
        // The manager waits for as long as the daemon does for a disk that hangs (2 s here), and a little longer.
        let more = stopping
            .lines()
            .find_map(|line| line.strip_prefix("EXTEND_TIMEOUT_USEC="));
        assert_eq!(more, Some("7000000"), "{stopping}");
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `cleave ARGS`, with a listening socket as descriptor 3 and the variables that say so. Its name is that of the socket unit, as systemd
/// has it by default.
fn command(passed: Option<&UnixListener>, args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let line = match passed {
        Some(_) => {
            "export LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=cleave-a.socket; exec \"$@\" 3<&0 0</dev/null"
        }
        None => "exec \"$@\"",
    };
    command
        .args(["-c", line, "sh"])
        .arg(program_path())
        .args(args);
    command.stdin(match passed {
        Some(listener) => Stdio::from(OwnedFd::from(listener.try_clone().unwrap())),
        None => Stdio::null(),
    });
    command
}

fn client(path: &Path) -> Client {
    Client::open(path, &small(2)).unwrap()
}

#[test]
fn it_is_ready_when_frontends_can_connect_and_gives_signs_of_life() {
    let scratch = Scratch::in_memory();
    let abstract_name = format!("@cleave-test-{}", std::process::id());
    let notify = scratch.join("notify");
    for address in [notify.to_str().unwrap(), &abstract_name] {
        let socket = scratch.join("own");
        let path = socket.to_str().unwrap();
        let args = ["serve", "--socket-path", path, "--disk", "ram:64M"];
        let start = Instant::now();
        let service = Service::start(address, None, &args);
        let ready = service.says("READY=1");
        assert!(ready.contains("STATUS=serving ram:64M"), "{ready}");
        exercise(&mut client(&socket)).unwrap();
        for _ in 0..4 {
            service.says("WATCHDOG=1");
        }
        // They are half of 400 ms apart. Those that waited for us were sent no sooner.
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(590), "four signs in {took:?}");
        service.stop();
        assert!(!socket.exists(), "the socket was the daemon's own");
    }
}

/// A thread that was taken over could write to a socket that is connected, and have systemd kill any process.
#[test]
fn its_socket_for_messages_is_connected_to_nothing() {
    let scratch = Scratch::in_memory();
    let [socket, notify] = ["own", "notify"].map(|name| scratch.join(name));
    let path = socket.to_str().unwrap();
    let args = ["serve", "--socket-path", path, "--disk", "ram:64M"];
    let mut service = Service::start(notify.to_str().unwrap(), None, &args);
    service.says("READY=1");
    // Another socket at the same address: a connection would lead to the one before.
    std::fs::remove_file(&notify).unwrap();
    service.messages = UnixDatagram::bind(&notify).unwrap();
    service.messages.set_read_timeout(Some(TIMEOUT)).unwrap();
    service.says("WATCHDOG=1");
    service.stop();
}

#[test]
fn it_takes_the_socket_that_systemd_has_made() {
    let scratch = Scratch::in_memory();
    let socket = scratch.join("passed");
    let path = socket.to_str().unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    for (turn, named) in [
        &["--socket-path", path][..],
        &["--socket-path", path],
        &[],
        &["--fd", "3"],
    ]
    .into_iter()
    .enumerate()
    {
        // A frontend that comes before its daemon waits.
        let early = UnixStream::connect(&socket).unwrap();
        let args = [&["serve", "--disk", "ram:64M"], named].concat();
        let notify = scratch.join(&format!("notify-{turn}"));
        let service = Service::start(notify.to_str().unwrap(), Some(&listener), &args);
        service.says("READY=1");
        let frontend = cleave_client::Frontend::new(early, TIMEOUT).unwrap();
        let mut first = Client::start(frontend, &small(2)).unwrap();
        exercise(&mut first).unwrap();
        drop(first);
        service.stop();
        assert!(socket.exists(), "the socket is not the daemon's to remove");
    }
}

/// Runs it to its end, which is a refusal in one line.
fn refusal(command: &mut Command) -> String {
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    if !wait_until(|| child.try_wait().unwrap().is_some()) {
        child.kill().unwrap();
    }
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(2), "{said}");
    said
}

#[test]
fn sockets_that_do_not_fit_are_refused() {
    let scratch = Scratch::in_memory();
    let [socket, other] = ["socket", "other"].map(|name| scratch.join(name));
    let listener = UnixListener::bind(&socket).unwrap();
    let other = other.to_str().unwrap();
    let serve = ["serve", "--disk", "ram:64M", "--socket-path", other];
    let said = refusal(&mut command(Some(&listener), &serve));
    let passed = format!(
        "systemd passed the socket {} and --socket-path is {other}",
        socket.display()
    );
    assert!(said.contains(&passed), "{said}");
    let line = "export LISTEN_PID=$$ LISTEN_FDS=2; exec \"$@\"";
    let mut two = Command::new("sh");
    two.args(["-c", line, "sh"]).arg(program_path()).args(serve);
    let said = refusal(&mut two);
    assert!(said.contains("systemd passed 2 sockets"), "{said}");
    let line = "export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$@\" 3<&-";
    let mut closed = Command::new("sh");
    closed.args(["-c", line, "sh"]).arg(program_path());
    let said = refusal(closed.args(serve));
    assert!(said.contains("LISTEN_FDS: 3 is not open"), "{said}");
    // They were passed to another process.
    let mut foreign = Command::new(program_path());
    foreign
        .args(["serve", "--disk", "ram:64M"])
        .envs([("LISTEN_PID", "1"), ("LISTEN_FDS", "1")]);
    assert!(refusal(&mut foreign).contains("no socket: give"));
}

#[test]
fn without_a_watchdog_an_idle_daemon_sleeps() {
    let scratch = Scratch::in_memory();
    let notify = scratch.join("notify");
    let messages = UnixDatagram::bind(&notify).unwrap();
    // WATCHDOG_USEC came down from a process that is watched.
    let prelude = format!(
        "export NOTIFY_SOCKET={} WATCHDOG_USEC=100000 WATCHDOG_PID=1",
        notify.display()
    );
    let daemon = Daemon::serve_after(&prelude, &["--disk", "ram:64M"]);
    daemon.stays_at_rest().unwrap();
    daemon.finish();
    messages.set_nonblocking(true).unwrap();
    let mut bytes = [0; 4096];
    while let Ok(length) = messages.recv(&mut bytes) {
        assert_ne!(&bytes[..length], b"WATCHDOG=1");
    }
}

#[test]
fn a_manager_that_is_gone_is_no_hindrance() {
    let daemon = Daemon::serve_after(
        "export NOTIFY_SOCKET=/nonexistent/notify WATCHDOG_USEC=100000",
        &["--disk", "ram:64M"],
    );
    exercise(&mut daemon.open(&small(2))).unwrap();
    daemon.finish();
}

/// The daemon that a demonstration starts is not the service.
#[test]
fn a_child_inherits_no_manager() {
    let scratch = Scratch::in_memory();
    let notify = scratch.join("notify");
    let messages = UnixDatagram::bind(&notify).unwrap();
    messages.set_nonblocking(true).unwrap();
    let folder = scratch.path().to_str().unwrap();
    let demo = [
        "demo",
        "--exit",
        "--seconds",
        "1",
        "--size",
        "16M",
        "--dir",
        folder,
    ];
    let mut command = command(None, &demo);
    let ended = command.env("NOTIFY_SOCKET", &notify).output().unwrap();
    assert!(ended.status.success());
    let received = messages.recv(&mut [0; 64]).map_err(|error| error.kind());
    assert_eq!(received, Err(std::io::ErrorKind::WouldBlock));
}

#[test]
fn a_node_is_ready_when_each_disk_is_served_or_has_failed() {
    let scratch = Scratch::in_memory();
    let [state, run, control, notify] =
        ["state", "run", "control", "notify"].map(|name| scratch.join(name));
    std::fs::create_dir_all(state.join("disks")).unwrap();
    for (id, disk) in [("good", "ram:64M"), ("gone", "/nowhere/gone.img")] {
        let file = state.join("disks").join(format!("{id}.toml"));
        std::fs::write(file, format!("disk = [\"{disk}\"]\n")).unwrap();
    }
    let [state, run_shown, control, notify] =
        [&state, &run, &control, &notify].map(|path| path.to_str().unwrap());
    let args = [
        "node",
        "--state",
        state,
        "--run",
        run_shown,
        "--control",
        control,
    ];
    let service = Service::start(notify, None, &args);
    let ready = service.says("READY=1");
    assert!(ready.contains("STATUS=serving 1 of 2 disks"), "{ready}");
    exercise(&mut client(&run.join("good/disk.sock"))).unwrap();
    service.says("WATCHDOG=1");
    service.stop();
}

/// `journalctl -p warning` finds the warnings, and each line has one time, the journal's.
#[test]
fn the_journal_gets_the_severity_of_each_line_and_no_time() {
    // As systemd says it: the device and inode of stderr.
    let journal = "export JOURNAL_STREAM=$(stat -L -c %d:%i /proc/self/fd/2)";
    let args = ["--disk", "ram:64M", "--sandbox", "off"];
    let daemon = Daemon::serve_after(journal, &args);
    let lines = ["<4>WARN ram:64M: --sandbox off", "<6>INFO serving ram:64M"];
    for line in lines {
        assert!(
            wait_until(|| daemon.log_has(line)),
            "{line}: {}",
            daemon.log()
        );
    }
    daemon.finish();
    // Elsewhere a line begins with its time.
    let daemon = Daemon::serve_after("export JOURNAL_STREAM=1:1", &args);
    assert!(
        wait_until(|| daemon.log_has("Z  INFO serving ram:64M")),
        "{}",
        daemon.log()
    );
    daemon.finish();
}

/// The journal takes a number at the start of a line for its severity, and an operator a line for ours.
#[test]
fn a_path_forges_no_line_of_the_log() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("a\n<0>ERROR forged: everything is lost\nb", 4 << 20);
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    assert!(
        wait_until(|| daemon.log_has("a?<0>ERROR forged")),
        "{}",
        daemon.log()
    );
    assert!(
        !daemon.log().lines().any(|line| line.starts_with("<0>")),
        "{}",
        daemon.log()
    );
    daemon.finish();
}

/// Its file system may be mounted later, or its device made.
#[test]
fn an_image_that_is_not_there_is_tried_again() {
    let socket = Scratch::in_memory();
    let path = socket.join("s");
    let line = ["serve", "--socket-path", path.to_str().unwrap(), "--disk"];
    let ended = |disk: &str| cleave_tests::run_to_exit(&[&line[..], &[disk]].concat()).code;
    // RestartPreventExitStatus=2 would keep the disk away after each boot at which its file system is mounted late.
    assert_eq!(ended("/nowhere/late.img"), Some(1));
    assert_eq!(ended("/dev/mapper/late"), Some(1));
    assert_eq!(ended("null:1"), Some(2));
}
