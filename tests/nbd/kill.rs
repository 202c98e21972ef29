//! The daemon is killed while it serves the export of a server, and nothing is lost.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleave_client::{Base, Client, Error};
use cleave_tests::nbd::{Export, FLUSH, NbdServer, Reaction, WRITE, simple};
use cleave_tests::{
    Case, Killed, Mount, Requirement, SURVIVOR_DISK_BYTES, Scratch, Survivor, TIMEOUT, connect,
    disk_socket, http, outliving, program_path, run_to_exit, scale, seeded, small, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::servers::{At, QEMU, qemu_nbd, report};

/// Disks of the node.
const DISKS: usize = 4;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_killed_daemon_loses_nothing: QEMU,
        a_killed_node_loses_nothing: QEMU,
        the_next_daemon_waits_for_the_fence,
        an_export_whose_lock_has_no_room_for_a_line_is_not_served: Requirement::Root,
        an_export_is_not_served_beside_a_file_that_is_no_lock,
        the_fence_holds_for_a_guest_that_was_reset_and_over_an_orderly_restart,
        a_flush_fails_if_the_daemon_before_ended_while_its_server_was_away,
        a_loss_is_kept_until_a_flush_has_failed,
        a_loss_is_of_one_export_whatever_its_options,
        a_failed_flush_of_which_no_guest_knows_is_kept,
        a_flush_fails_if_the_daemon_before_gave_up_a_server_that_hangs,
        a_flush_that_is_answered_before_the_daemon_ends_leaves_nothing,
        a_loss_that_the_server_refused_to_mend_is_kept,
    ]
}

fn start(args: &[&std::ffi::OsStr]) -> Killed {
    let mut command = Command::new(program_path());
    command.args(args).args(["--log", "warn"]);
    Killed::start(&mut command)
}

fn a_killed_daemon_loses_nothing() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("image", SURVIVOR_DISK_BYTES);
    let at = At::Unix(scratch.join("nbd"));
    let _server = qemu_nbd(&image, "raw", &at, &[]);
    let (socket, uri) = (scratch.join("socket"), at.uri("", "fence=1"));
    let words = ["serve", "--queues", "4", "--disk", &uri, "--socket-path"].map(str::as_ref);
    let start = || start(&[&words[..], &[socket.as_ref()]].concat());
    let options = outliving();
    let kills = std::env::var("CLEAVE_KILLS").ok();
    let kills = kills.map_or(20, |text| text.parse().unwrap());
    let mut random = seeded("nbd kill");
    let (mut out, begun) = (0, Instant::now());
    let mut daemon = start();
    let mut client = connect(|| Client::open(&socket, &options));
    let mut guest = Survivor::new(&mut client);
    for kill in 0..kills {
        let life = Duration::from_micros(random.below(20_000));
        guest.work(&mut client, &mut random, life);
        daemon.kill();
        out += guest.out();
        daemon = start();
        let base = [Base::Used, Base::Avail][kill % 2];
        connect(|| client.reconnect(&socket, &options, base));
        guest.await_all(&mut client, kill % 2 == 0);
        guest.verify(&mut client, kill % 10 == 9);
    }
    guest.verify(&mut client, true);
    println!(
        "{kills} kills in {} s: {} requests, {out} of them out at a kill and answered after it, 0 lost, 0 twice, {} MiB read back, \
         0 wrong",
        begun.elapsed().as_secs(),
        guest.answered,
        guest.read_bytes >> 20,
    );
}

/// A disk of the node, with its guest.
struct Served {
    id: String,
    client: Client,
    guest: Survivor,
}

fn a_killed_node_loses_nothing() {
    let scratch = Scratch::in_memory();
    let (state, run) = (scratch.join("state"), scratch.join("run"));
    let words = ["node".as_ref(), "--state".as_ref(), state.as_os_str()];
    let start = || start(&[&words[..], &["--run".as_ref(), run.as_ref()]].concat());
    let options = outliving();
    let mut node = start();
    let control = run.join("control.sock");
    assert!(wait_until(|| cleave_tests::has_listener(&control)));
    let servers = (0..DISKS).map(|number| {
        let image = scratch.image(&format!("image{number}"), SURVIVOR_DISK_BYTES);
        let at = match number % 2 {
            0 => At::Unix(scratch.join(&format!("nbd{number}"))),
            _ => At::tcp(),
        };
        (qemu_nbd(&image, "raw", &at, &[]), at)
    });
    let servers: Vec<_> = servers.collect();
    let add = |(number, (_, at)): (usize, &(_, At))| {
        let id = format!("d{number}");
        let body = json!({"disk": [at.uri("", "fence=1")], "queues": 1}).to_string();
        let answer = http::fetch(&control, "PUT", &format!("/v1/disks/{id}"), &body);
        assert_eq!(answer.status, 201, "{}", answer.body);
        let mut client = connect(|| Client::open(&disk_socket(scratch.path(), &id), &options));
        let guest = Survivor::new(&mut client);
        Served { id, client, guest }
    };
    let mut all: Vec<Served> = servers.iter().enumerate().map(add).collect();
    let mut random = seeded("nbd node kill");
    let (kills, begun, mut out) = (scale(4), Instant::now(), 0);
    for kill in 0..kills {
        for disk in &mut all {
            let life = Duration::from_micros(random.below(5000));
            disk.guest.work(&mut disk.client, &mut random, life);
        }
        // All disks are busy when it dies.
        for disk in &mut all {
            disk.guest.submit(&mut disk.client, &mut random);
        }
        node.kill();
        out += all.iter().map(|disk| disk.guest.out()).sum::<u64>();
        node = start();
        for disk in &mut all {
            let socket = disk_socket(scratch.path(), &disk.id);
            connect(|| disk.client.reconnect(&socket, &options, Base::Used));
            disk.guest.await_all(&mut disk.client, kill % 2 == 0);
            disk.guest.verify(&mut disk.client, kill % 10 == 9);
        }
    }
    all.iter_mut()
        .for_each(|disk| disk.guest.verify(&mut disk.client, true));
    println!(
        "{kills} kills of a node with {DISKS} disks in {} s: {} requests, {out} of them out at a kill and answered after it, 0 lost, \
         0 twice, 0 wrong",
        begun.elapsed().as_secs(),
        all.iter().map(|disk| disk.guest.answered).sum::<u64>(),
    );
}

/// A server may still do what the killed daemon sent, and lets the next one in: qemu-nbd does both. If the next one did the requests
/// again at once, and the guest then wrote something newer, the first attempt could replace that.
fn the_next_daemon_waits_for_the_fence() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(SURVIVOR_DISK_BYTES));
    let (socket, uri) = (scratch.join("socket"), server.uri("&fence=3"));
    let words = [
        "serve",
        "--stop-deadline",
        "60",
        "--disk",
        &uri,
        "--socket-path",
    ]
    .map(str::as_ref);
    let start = || start(&[&words[..], &[socket.as_ref()]].concat());
    let options = outliving();
    let mut daemon = start();
    let mut client = connect(|| Client::open(&socket, &options));
    client.queue(0).write(0, &[1; 512]).unwrap();
    server.react(|_| Reaction::Dead(Vec::new()));
    client.queue(0).set_timeout(Duration::from_millis(300));
    let stuck = client.queue(0).write(0, &[2; 512]);
    assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
    server.react(|_| Reaction::Honest);
    daemon.kill();
    let killed = Instant::now();
    daemon = start();
    connect(|| client.reconnect(&socket, &options, Base::Used));
    client.queue(0).set_timeout(TIMEOUT);
    client.queue(0).wait_used().unwrap();
    assert!(killed.elapsed() >= Duration::from_secs(3), "{killed:?}");
    // Nothing is in flight at the next one, as far as the guest knows.
    daemon.kill();
    let killed = Instant::now();
    let _daemon = start();
    connect(|| client.reconnect(&socket, &options, Base::Used));
    client.queue(0).write(0, &[3; 512]).unwrap();
    assert!(killed.elapsed() >= Duration::from_secs(3), "{killed:?}");
}

/// After a kill the next daemon would not know of the fence.
fn an_export_whose_lock_has_no_room_for_a_line_is_not_served() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(SURVIVOR_DISK_BYTES));
    let mount = Mount::tmpfs(&scratch, 64 << 10).unwrap();
    let filler = mount.path().join("filler");
    let mut file = File::create(&filler).unwrap();
    while file.write(&[1; 4096]).is_ok() {}
    drop(file);
    let (socket, uri) = (mount.path().join("socket"), server.uri("&fence=3"));
    let words = [
        "serve",
        "--stop-deadline",
        "60",
        "--disk",
        &uri,
        "--socket-path",
    ]
    .map(str::as_ref);
    let line = [&words[..], &[socket.as_ref()]].concat();
    let refused = run_to_exit(&line);
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    let why = "No space left on device (os error 28): after a kill the next daemon would not know that the NBD server";
    assert!(refused.stderr.contains(why), "{}", refused.stderr);
    std::fs::remove_file(&filler).unwrap();
    let daemon = start(&line);
    let mut client = connect(|| Client::open(&socket, &outliving()));
    client.queue(0).write(0, &[1; 512]).unwrap();
    drop(client);
    end(daemon);
}

/// Ends it as an operator does.
fn end(daemon: Killed) {
    ends_with(daemon, 0);
}

/// Ends it as an operator does, and it exits with this code.
fn ends_with(mut daemon: Killed, code: i32) {
    terminate(&daemon);
    assert_eq!(daemon.0.wait().unwrap().code(), Some(code));
}

fn terminate(daemon: &Killed) {
    let pid = Pid::from_raw(daemon.0.id() as i32).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
}

/// The next daemon would not wait for the fence.
fn an_export_is_not_served_beside_a_file_that_is_no_lock() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(1 << 20));
    let (socket, lock) = (scratch.join("socket"), scratch.join("socket.lock"));
    std::fs::write(&lock, "x").unwrap();
    let uri = server.uri("");
    let refused = run_to_exit(&[
        "serve",
        "--disk",
        &uri,
        "--socket-path",
        socket.to_str().unwrap(),
    ]);
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(
        refused.stderr.contains("remove that file"),
        "{}",
        refused.stderr
    );
    assert_eq!(std::fs::read(&lock).unwrap(), b"x");
}

/// A guest that was reset brings no list of what it had asked for. And a daemon that ends in order before the fence of its predecessor
/// is over must not hide from the next one that this one died.
fn the_fence_holds_for_a_guest_that_was_reset_and_over_an_orderly_restart() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(SURVIVOR_DISK_BYTES));
    let (socket, lock) = (scratch.join("socket"), scratch.join("socket.lock"));
    let start = |fence: u32| {
        let uri = server.uri(&format!("&fence={fence}"));
        let words = [
            "serve",
            "--stop-deadline",
            "60",
            "--disk",
            &uri,
            "--socket-path",
        ]
        .map(str::as_ref);
        let daemon = start(&[&words[..], &[socket.as_ref()]].concat());
        assert!(wait_until(|| cleave_tests::has_listener(&socket)));
        daemon
    };
    // A new guest each time.
    let write = || {
        let mut client = connect(|| Client::open(&socket, &small(1)));
        client.queue(0).write(0, &[1; 512]).unwrap();
    };
    let mut daemon = start(2);
    write();
    daemon.kill();
    let killed = Instant::now();
    daemon = start(2);
    write();
    assert!(killed.elapsed() >= Duration::from_secs(2), "{killed:?}");
    daemon.kill();
    // Nobody could wait for this one.
    end(start(600));
    assert!(lock.exists());
    let started = Instant::now();
    daemon = start(2);
    write();
    assert!(started.elapsed() >= Duration::from_secs(2), "{started:?}");
    // After the fence, an orderly end is one.
    end(daemon);
    assert!(!lock.exists());
    let _daemon = start(600);
    write();
}

/// A server of a disk that loses its connections, and the daemons in front of it.
struct Losing {
    server: NbdServer,
    socket: PathBuf,
    control: PathBuf,
    _scratch: Scratch,
}

impl Losing {
    fn new() -> Losing {
        let scratch = Scratch::in_memory();
        let server = NbdServer::start(&scratch.join("nbd"), Export::able(SURVIVOR_DISK_BYTES));
        let [socket, control] = ["socket", "control"].map(|name| scratch.join(name));
        Losing {
            server,
            socket,
            control,
            _scratch: scratch,
        }
    }

    fn start(&self) -> Killed {
        self.serve(&self.server.uri("&fence=1"))
    }

    /// Serves this disk, and returns when it is open.
    fn serve(&self, disk: &str) -> Killed {
        self.serve_until(disk, "60")
    }

    /// Serves this disk with this stop deadline.
    fn serve_until(&self, disk: &str, deadline: &str) -> Killed {
        let words = [
            "serve",
            "--serial",
            "disk",
            "--stop-deadline",
            deadline,
            "--disk",
            disk,
        ]
        .map(str::as_ref);
        let paths = [
            "--socket-path".as_ref(),
            self.socket.as_os_str(),
            "--control".as_ref(),
            self.control.as_ref(),
        ];
        let daemon = start(&[&words[..], &paths].concat());
        assert!(wait_until(|| cleave_tests::has_listener(&self.socket)));
        daemon
    }

    fn open(&self) -> Client {
        connect(|| Client::open(&self.socket, &small(1)))
    }

    /// The server is away.
    fn lose(&self) {
        self.server.accept(false);
        self.server.hang_up();
        let waits = || report(&self.control)["store"]["connections"]["waiting"] != json!(0);
        assert!(wait_until(waits));
    }

    /// A guest writes and does not flush, and the daemon is stopped while the server is away.
    fn end_unflushed(&self) {
        let daemon = self.start();
        let mut client = self.open();
        client.queue(0).write(0, &[1; 512]).unwrap();
        self.lose();
        end(daemon);
        self.server.accept(true);
    }

    fn flush(&self) -> Result<(), Error> {
        self.open().queue(0).flush()
    }

    fn assert_flush_fails(&self) {
        let failed = self.flush();
        let is_failed = matches!(failed, Err(Error::Status { status: 1, .. }));
        assert!(is_failed, "{failed:?}");
    }
}

/// The copies of what the server answered end with the daemon. The server may have lost it and know nothing of that.
fn a_flush_fails_if_the_daemon_before_ended_while_its_server_was_away() {
    let losing = Losing::new();
    losing.end_unflushed();
    let daemon = losing.start();
    losing.assert_flush_fails();
    end(daemon);
    // The guest was told, and nothing more was lost: what it had flushed is not a cause.
    let daemon = losing.start();
    let mut client = losing.open();
    client.queue(0).write(0, &[1; 512]).unwrap();
    client.queue(0).flush().unwrap();
    losing.lose();
    end(daemon);
    losing.server.accept(true);
    let _daemon = losing.start();
    losing.flush().unwrap();
}

/// Daemons that end before a guest has flushed hand the loss on, however they end.
fn a_loss_is_kept_until_a_flush_has_failed() {
    let losing = Losing::new();
    losing.end_unflushed();
    end(losing.start());
    losing.start().kill();
    let daemon = losing.start();
    losing.assert_flush_fails();
    // The fence of the daemon that was killed may last still; that must not fail flushes again.
    end(daemon);
    let _daemon = losing.start();
    losing.flush().unwrap();
}

/// What one server lost must not fail the flushes of a disk on another, and other options do not make another disk.
fn a_loss_is_of_one_export_whatever_its_options() {
    let losing = Losing::new();
    losing.end_unflushed();
    let daemon = losing.serve(&losing.server.uri("&fence=2&connections=2"));
    losing.assert_flush_fails();
    end(daemon);
    losing.end_unflushed();
    let other = NbdServer::start(
        &losing.control.with_file_name("other"),
        Export::able(SURVIVOR_DISK_BYTES),
    );
    let _daemon = losing.serve(&other.uri("&fence=1"));
    losing.flush().unwrap();
}

/// A server that is back may refuse what is sent to it again. Nobody keeps that any more when the daemon has ended.
fn a_loss_that_the_server_refused_to_mend_is_kept() {
    let losing = Losing::new();
    let daemon = losing.start();
    let mut client = losing.open();
    client.queue(0).write(0, &[1; 512]).unwrap();
    losing.server.react(|asked| match asked.kind {
        WRITE => Reaction::Send(simple(asked.cookie, 28, &[])),
        _ => Reaction::Honest,
    });
    losing.server.hang_up();
    assert!(wait_until(
        || report(&losing.control)["store"]["sync_failed"] == json!(true)
    ));
    end(daemon);
    losing.server.react(|_| Reaction::Honest);
    let _daemon = losing.start();
    losing.assert_flush_fails();
}

/// A server tells of what it could not write once: to the daemon's last flush, or to the operator's.
fn a_failed_flush_of_which_no_guest_knows_is_kept() {
    for is_asked in [false, true] {
        let losing = Losing::new();
        let daemon = losing.start();
        let mut client = losing.open();
        client.queue(0).write(0, &[1; 512]).unwrap();
        losing.server.react(|asked| match asked.kind {
            FLUSH => Reaction::Send(simple(asked.cookie, 5, &[])),
            _ => Reaction::Honest,
        });
        if is_asked {
            // The second one fails without the server.
            for _ in 0..2 {
                let answer = http::fetch(&losing.control, "POST", "/v1/disks/disk/flush", "");
                assert_ne!(answer.status, 200, "{}", answer.body);
            }
        }
        end(daemon);
        losing.server.react(|_| Reaction::Honest);
        let daemon = losing.start();
        losing.assert_flush_fails();
        end(daemon);
        let _daemon = losing.start();
        losing.flush().unwrap();
    }
}

/// Has the server answer no flush.
fn hold(losing: &Losing) -> Arc<AtomicBool> {
    let is_held = Arc::new(AtomicBool::new(true));
    losing.server.hold_flushes(&is_held);
    is_held
}

/// The operator starts a server that hangs again, and what it had answered is gone with its memory. The copies of that end with the
/// daemon, and nobody hears the answer to the flush that is under way: the guest's, or the store's own after the guest.
fn a_flush_fails_if_the_daemon_before_gave_up_a_server_that_hangs() {
    for has_guest in [false, true] {
        let losing = Losing::new();
        let uri = losing.server.uri("&fence=1");
        let daemon = losing.serve_until(&uri, "1");
        let options = outliving();
        let mut client = connect(|| Client::open(&losing.socket, &options));
        client.queue(0).write(0, &[1; 512]).unwrap();
        let is_held = hold(&losing);
        if !has_guest {
            drop(client);
            assert!(wait_until(|| losing.server.flushes() > 0));
            ends_with(daemon, 1);
            is_held.store(false, Ordering::SeqCst);
            let daemon = losing.start();
            losing.assert_flush_fails();
            end(daemon);
            let _daemon = losing.start();
            losing.flush().unwrap();
            continue;
        }
        client.queue(0).set_timeout(Duration::from_millis(100));
        let stuck = client.queue(0).flush();
        assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
        ends_with(daemon, 1);
        is_held.store(false, Ordering::SeqCst);
        let _daemon = losing.start();
        connect(|| client.reconnect(&losing.socket, &options, Base::Used));
        client.queue(0).set_timeout(TIMEOUT);
        client.queue(0).wait_used().unwrap();
        let status = client.queue(0).control().1;
        assert_eq!(client.queue(0).memory().bytes(status, 1), [1]);
    }
}

/// One that is merely slow.
fn a_flush_that_is_answered_before_the_daemon_ends_leaves_nothing() {
    let losing = Losing::new();
    let lock = losing.socket.with_file_name("socket.lock");
    let mut daemon = losing.serve_until(&losing.server.uri("&fence=1"), "60");
    let mut client = losing.open();
    client.queue(0).write(0, &[1; 512]).unwrap();
    let is_held = hold(&losing);
    terminate(&daemon);
    assert!(wait_until(|| losing.server.flushes() > 0));
    assert!(lock.exists());
    is_held.store(false, Ordering::SeqCst);
    assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
    assert!(!lock.exists());
    let _daemon = losing.start();
    losing.flush().unwrap();
}
