//! A daemon that is killed, and its successor.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use cleave_client::message::protocol;
use cleave_client::{Base, Client, DeviceOptions, Error, InflightKind};
use cleave_tests::{
    Case, Daemon, Requirement, Scratch, TIMEOUT, UnresponsiveFs, flood, has_listener, run_to_exit,
    small, wait_until,
};
use rustix::process::Signal;

const DISK: u64 = 1 << 20;
const BLOCK: usize = 4096;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        nothing_is_served_before_the_writes_of_a_killed_daemon_have_ended: Requirement::Fuse,
        nothing_is_served_before_the_reads_of_a_killed_daemon_have_ended: Requirement::Fuse,
        requests_on_a_hanging_disk_are_left_to_the_next_daemon: Requirement::Fuse,
        a_vring_larger_than_its_frontend_expects_is_recovered: Requirement::Fuse,
        a_vring_without_room_in_its_region_starts_behind_what_is_lost: Requirement::Fuse,
        a_vring_without_room_in_its_region_loses_nothing_in_an_orderly_restart: Requirement::Fuse,
    ]
}

/// A disk whose server holds requests, with a daemon that was killed while they were in flight.
struct Killed {
    mute: UnresponsiveFs,
    daemon: Daemon,
    args: Vec<String>,
}

impl Killed {
    /// Kills a daemon that has one request in flight.
    fn with(options: &[&str], is_write: bool) -> Killed {
        let scratch = Scratch::new();
        let mute = UnresponsiveFs::mount(&scratch, DISK).unwrap();
        let disk = mute.file().display().to_string();
        let mut args = vec!["--direct", "on", "--disk", disk.as_str()];
        args.extend(options);
        let mut daemon = Daemon::serve(&args);
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        let mut client = daemon.open(&small(1));
        mute.hold(true);
        client.queue(0).set_timeout(Duration::from_millis(300));
        let stuck = match is_write {
            true => client.queue(0).write(0, &[b'A'; BLOCK]),
            false => client.queue(0).read(0, &mut [0; BLOCK]),
        };
        assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
        assert!(wait_until(|| mute.held() == 1));
        daemon.abandon();
        Killed { mute, daemon, args }
    }

    /// Starts the next daemon, which waits.
    fn next(&self) -> Daemon {
        let socket = self.daemon.socket().display().to_string();
        let mut all = vec!["serve", "--socket-path", &socket];
        all.extend(self.args.iter().map(String::as_str));
        let next = Daemon::without_socket(&all);
        let waits = next.log_has("waiting for the daemon that served");
        if !waits || has_listener(self.daemon.socket()) {
            // Otherwise it could not exit.
            self.mute.release();
            panic!("the next daemon does not wait: {}", next.log());
        }
        next
    }

    /// The server completes the requests that it held; then the next daemon serves.
    fn let_go(&self, next: &Daemon) {
        self.mute.release();
        let served = wait_until(|| has_listener(self.daemon.socket()));
        assert!(served, "{}", next.log());
    }
}

fn nothing_is_served_before_the_writes_of_a_killed_daemon_have_ended() {
    let killed = Killed::with(&[], true);
    let path = killed.mute.file();
    // Without the lock, a write from the killed daemon overtakes a write that was made after its death.
    killed.mute.hold(false);
    let careless = File::options().write(true).open(&path).unwrap();
    careless.write_all_at(&[b'B'; BLOCK], 0).unwrap();
    drop(careless);
    let next = killed.next();
    // On another socket it is still a disk of another daemon.
    let scratch = Scratch::new();
    let other = scratch.join("other").display().to_string();
    let mut args = vec!["serve", "--socket-path", &other];
    args.extend(killed.args.iter().map(String::as_str));
    let refused = run_to_exit(&args);
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(
        refused.stderr.contains("in use by another cleave"),
        "{}",
        refused.stderr
    );
    killed.let_go(&next);
    let mut client = cleave_client::Client::open(killed.daemon.socket(), &small(1)).unwrap();
    let mut back = [0; BLOCK];
    client.queue(0).read(0, &mut back).unwrap();
    assert!(back == [b'A'; BLOCK], "the old write overtook the new one");
    // With the lock, a write through the next daemon survives.
    client.queue(0).write(0, &[b'C'; BLOCK]).unwrap();
    client.queue(0).read(0, &mut back).unwrap();
    assert!(back == [b'C'; BLOCK]);
    drop(client);
    next.finish();
}

/// The memory that they read into may be reused by then. Several daemons may read one disk, so the lock of the disk
/// does not prevent it.
fn nothing_is_served_before_the_reads_of_a_killed_daemon_have_ended() {
    let killed = Killed::with(&["--read-only"], false);
    let next = killed.next();
    killed.let_go(&next);
    let mut client = cleave_client::Client::open(killed.daemon.socket(), &small(1)).unwrap();
    client.queue(0).read(0, &mut [0; BLOCK]).unwrap();
    drop(client);
    next.finish();
}

/// An orderly exit does not wait for a disk that hangs, and loses nothing if the frontend keeps the requests in
/// flight.
fn requests_on_a_hanging_disk_are_left_to_the_next_daemon() {
    let scratch = Scratch::new();
    let mute = UnresponsiveFs::mount(&scratch, DISK).unwrap();
    let disk = mute.file().display().to_string();
    let options = ["--direct", "on", "--disk", &disk, "--stop-deadline", "1"];
    let mut daemon = Daemon::serve(&options);
    let socket = daemon.socket().to_owned();
    let mut keeps = small(1);
    keeps.protocol_features |= protocol::INFLIGHT_SHMFD;
    let mut client = daemon.open(&keeps);
    mute.hold(true);
    client.queue(0).set_timeout(Duration::from_millis(300));
    let stuck = client.queue(0).write(0, &[b'A'; BLOCK]);
    assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
    assert!(wait_until(|| mute.held() == 1));
    daemon.signal(Signal::TERM);
    let ended = daemon.wait();
    let log = daemon.log();
    mute.release();
    match ended {
        Some((Some(1), took)) if took < Duration::from_secs(3) => {}
        other => panic!("{other:?}\n{log}"),
    }
    assert!(
        log.contains("1 request is left to the next daemon"),
        "{log}"
    );
    let mut all = vec!["serve", "--socket-path", socket.to_str().unwrap()];
    all.extend(options);
    let next = Daemon::with_args(Scratch::new(), socket.clone(), &all);
    client.reconnect(&socket, &keeps, Base::Avail).unwrap();
    client.queue(0).set_timeout(TIMEOUT);
    client.queue(0).wait_used().unwrap();
    let mut back = [0; BLOCK];
    client.queue(0).read(0, &mut back).unwrap();
    assert!(back == [b'A'; BLOCK]);
    drop(client);
    next.finish();
}

/// A guest with vrings of 64, whose frontend expects 16, and a disk whose server can hold requests.
struct Larger {
    mute: UnresponsiveFs,
    options: DeviceOptions,
    daemon: Daemon,
    client: Client,
}

impl Larger {
    fn new(region: InflightKind) -> Larger {
        let scratch = Scratch::new();
        let mute = UnresponsiveFs::mount(&scratch, DISK).unwrap();
        let disk = mute.file().display().to_string();
        let daemon = Daemon::serve(&["--direct", "on", "--disk", &disk]);
        let plain = small(1);
        let options = DeviceOptions {
            region,
            protocol_features: plain.protocol_features | protocol::INFLIGHT_SHMFD,
            ..plain
        };
        let mut client = daemon.open(&options);
        client.queue(0).write(0, &[b'A'; BLOCK]).unwrap();
        Larger {
            mute,
            options,
            daemon,
            client,
        }
    }

    /// Has the daemon die while the disk holds a write.
    fn die_in_flight(&mut self) {
        self.mute.hold(true);
        let queue = self.client.queue(0);
        queue.set_timeout(Duration::from_millis(300));
        let stuck = queue.write(0, &[b'B'; BLOCK]);
        assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
        assert!(wait_until(|| self.mute.held() == 1));
        queue.set_timeout(TIMEOUT);
        self.daemon.signal(Signal::KILL);
        self.mute.release();
        self.daemon.die().unwrap();
    }

    /// Starts the next daemon and connects to it as QEMU does.
    fn go_on(&mut self) {
        let next = self.daemon.start_again().unwrap();
        self.daemon.abandon();
        self.daemon = next;
        let socket = self.daemon.socket();
        let reconnected = self.client.reconnect(socket, &self.options, Base::Used);
        reconnected.unwrap();
    }
}

fn a_vring_larger_than_its_frontend_expects_is_recovered() {
    let mut guest = Larger::new(InflightKind::For(16));
    guest.die_in_flight();
    guest.go_on();
    guest.client.queue(0).wait_used().unwrap();
    let mut back = [0; BLOCK];
    guest.client.queue(0).read(0, &mut back).unwrap();
    assert!(back == [b'B'; BLOCK]);
    assert!(
        guest.daemon.log_has("1 requests that an earlier daemon"),
        "{}",
        guest.daemon.log()
    );
    drop(guest.client);
    guest.daemon.finish();
}

/// Nobody knows which requests were in flight, so none is repeated, and the guest's later ones are served.
fn a_vring_without_room_in_its_region_starts_behind_what_is_lost() {
    let mut guest = Larger::new(InflightKind::Own(16));
    guest.die_in_flight();
    guest.go_on();
    let lost = "1 requests that an earlier daemon left in flight are lost";
    assert!(guest.daemon.log_has(lost), "{}", guest.daemon.log());
    let before = guest.client.queue(0).ring().used_index();
    guest.client.queue(0).write(4096, &[b'C'; BLOCK]).unwrap();
    let mut back = [0; BLOCK];
    guest.client.queue(0).read(4096, &mut back).unwrap();
    assert!(back == [b'C'; BLOCK]);
    let after = guest.client.queue(0).ring().used_index();
    assert_eq!(
        after.wrapping_sub(before),
        2,
        "the lost one is not answered"
    );
    drop(guest.client);
    guest.daemon.finish();
}

fn a_vring_without_room_in_its_region_loses_nothing_in_an_orderly_restart() {
    let mut guest = Larger::new(InflightKind::Own(16));
    guest.daemon.signal(Signal::TERM);
    assert!(matches!(guest.daemon.wait(), Some((Some(0), _))));
    // The guest goes on meanwhile.
    flood(guest.client.queue(0), 3, BLOCK as u32);
    guest.go_on();
    for _ in 0..3 {
        guest.client.queue(0).wait_used().unwrap();
    }
    assert!(!guest.daemon.log().contains("are lost"));
    drop(guest.client);
    guest.daemon.finish();
}
