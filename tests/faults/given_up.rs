//! Syncs that are under way when a daemon gives a disk up that hangs, or ends without their results.

use std::path::PathBuf;
use std::time::Duration;

use cleave_client::message::protocol;
use cleave_client::{Base, Client, DeviceOptions, Error};
use cleave_tests::{
    Case, Daemon, Requirement, Scratch, TIMEOUT, UnresponsiveFs, http, small, wait_until,
};
use rustix::process::Signal;

const DISK: u64 = 1 << 20;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_flush_that_hangs_when_its_daemon_ends_fails_at_the_next_one: Requirement::Fuse,
        a_flush_that_ends_in_time_succeeds_and_leaves_nothing: Requirement::Fuse,
        a_flush_of_the_operator_that_nobody_waits_for_fails_those_of_the_guest: Requirement::Fuse,
        a_flush_of_the_operator_that_ends_in_time_fails_nothing: Requirement::Fuse,
    ]
}

/// A disk whose server can hold what it is asked for, and its guest, which has written.
struct Slow {
    disk: UnresponsiveFs,
    daemon: Daemon,
    control: PathBuf,
    client: Client,
    options: DeviceOptions,
    _folder: Scratch,
}

impl Slow {
    fn new(stop_deadline: &str) -> Slow {
        let folder = Scratch::new();
        let disk = UnresponsiveFs::mount(&folder, DISK).unwrap();
        let path = disk.file().display().to_string();
        let args = ["--direct", "off", "--serial", "disk", "--disk", &path];
        let args = [&args[..], &["--stop-deadline", stop_deadline]].concat();
        let (daemon, control) = Daemon::serve_with_control(&args);
        let mut options = small(1);
        options.protocol_features |= protocol::INFLIGHT_SHMFD;
        let mut client = daemon.open(&options);
        client.queue(0).write(0, &[b'A'; 4096]).unwrap();
        disk.hold(true);
        Slow {
            disk,
            daemon,
            control,
            client,
            options,
            _folder: folder,
        }
    }

    /// The guest's flush hangs.
    fn flush(&mut self) {
        self.client.queue(0).set_timeout(Duration::from_millis(100));
        let stuck = self.client.queue(0).flush();
        assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
        assert!(wait_until(|| self.disk.held() == 1));
    }

    /// The operator's flush hangs.
    fn ask_for_flush(&self) -> std::thread::JoinHandle<()> {
        let control = self.control.clone();
        let asked = std::thread::spawn(move || {
            // The daemon ends before it answers.
            let asks =
                b"POST /v1/disks/disk/flush HTTP/1.1\r\nHost: cleave\r\nContent-Length: 0\r\n\r\n";
            let _ = http::converse(&control, asks, TIMEOUT);
        });
        assert!(wait_until(|| self.disk.held() == 1));
        asked
    }

    /// The daemon ends, and the kernel goes on with what it was asked for, which fails.
    fn end_and_fail(&mut self, code: i32) {
        self.daemon.signal(Signal::TERM);
        let has_exited = wait_until(|| self.daemon.is_zombie());
        assert!(has_exited, "{}", self.daemon.log());
        self.disk.fail_flush();
        self.disk.release();
        let ended = self.daemon.wait();
        let log = self.daemon.log();
        assert_eq!(ended.unwrap().0, Some(code), "{log}");
        assert!(log.contains("may be lost, and it was not told"), "{log}");
    }

    fn go_on(&mut self) {
        let next = self.daemon.start_again().unwrap();
        self.daemon = next;
        let socket = self.daemon.socket();
        let reconnected = self.client.reconnect(socket, &self.options, Base::Used);
        reconnected.unwrap();
        self.client.queue(0).set_timeout(TIMEOUT);
    }

    fn lock(&self) -> PathBuf {
        self.daemon.socket().with_file_name("socket.lock")
    }
}

/// The kernel tells of what it could not write once, and the process that it told has ended.
fn a_flush_that_hangs_when_its_daemon_ends_fails_at_the_next_one() {
    let mut slow = Slow::new("1");
    slow.flush();
    slow.end_and_fail(1);
    slow.go_on();
    slow.client.queue(0).wait_used().unwrap();
    let status = slow.client.queue(0).control().1;
    assert_eq!(slow.client.queue(0).memory().bytes(status, 1), [1]);
    // The guest was told, and the disk is opened anew.
    slow.daemon.signal(Signal::TERM);
    assert_eq!(slow.daemon.wait().unwrap().0, Some(0));
    slow.go_on();
    slow.client.queue(0).flush().unwrap();
}

fn a_flush_that_ends_in_time_succeeds_and_leaves_nothing() {
    let mut slow = Slow::new("60");
    slow.flush();
    slow.daemon.signal(Signal::TERM);
    assert!(wait_until(|| !slow.daemon.socket().exists()));
    assert!(slow.lock().exists());
    slow.disk.release();
    let ended = slow.daemon.wait();
    assert_eq!(ended.unwrap().0, Some(0), "{}", slow.daemon.log());
    assert!(!slow.lock().exists());
    slow.client.queue(0).set_timeout(TIMEOUT);
    slow.client.queue(0).wait_used().unwrap();
    let status = slow.client.queue(0).control().1;
    assert_eq!(slow.client.queue(0).memory().bytes(status, 1), [0]);
    slow.go_on();
    slow.client.queue(0).flush().unwrap();
}

fn a_flush_of_the_operator_that_nobody_waits_for_fails_those_of_the_guest() {
    let mut slow = Slow::new("1");
    let asked = slow.ask_for_flush();
    slow.end_and_fail(0);
    asked.join().unwrap();
    slow.go_on();
    let failed = slow.client.queue(0).flush();
    let is_failed = matches!(failed, Err(Error::Status { status: 1, .. }));
    assert!(is_failed, "{failed:?}");
}

fn a_flush_of_the_operator_that_ends_in_time_fails_nothing() {
    let mut slow = Slow::new("60");
    let asked = slow.ask_for_flush();
    slow.daemon.signal(Signal::TERM);
    assert!(wait_until(|| !slow.daemon.socket().exists()));
    let connected = slow.client.frontend().socket();
    assert!(cleave_tests::closes_within(connected, TIMEOUT));
    slow.disk.release();
    let ended = slow.daemon.wait();
    assert_eq!(ended.unwrap().0, Some(0), "{}", slow.daemon.log());
    asked.join().unwrap();
    assert!(!slow.lock().exists());
    slow.go_on();
    slow.client.queue(0).flush().unwrap();
}
