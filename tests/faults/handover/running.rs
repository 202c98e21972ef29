//! A disk is taken over from a process that runs, below a guest whose VMM cannot connect again. Either process may die at any moment:
//! one of them serves the disk then, and nothing is lost.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cleave_client::{Base, Client, DeviceOptions};
use cleave_tests::{
    Case, Daemon, Exited, Killed, Requirement, SURVIVOR_DISK_BYTES, Scratch, Survivor, TIMEOUT,
    connect, freeze, outliving, program_copy, program_path, run_to_exit, seeded, wait_until,
};

use cleave_tests::http::{converse, fetch};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::parcels::{sealed, send_fds};
use super::pauses::Pauses;
use super::service::terminate;
use super::{LIFE_MAX_US, ROUND, WHOLE_EVERY};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        no_request_is_lost_or_repeated_by_take_overs,
        a_process_that_dies_or_falls_silent_takes_nothing,
        a_process_fails_if_the_one_that_took_its_disk_is_dead,
        an_offered_disk_is_locked_by_nobody_else,
        one_process_serves_whichever_is_killed,
        what_cannot_be_taken_over_stays,
        a_raw_stripe_with_another_chunk_stays,
        a_process_of_another_user_gets_nothing: Requirement::Root,
    ]
}

/// The nobody of most systems.
const NOBODY: u32 = 65_534;
/// Longest time after which a process is killed that takes part in a take-over.
const KILL_MAX_US: u64 = 40_000;

/// The files of a daemon, and how it is started.
struct Place {
    socket: PathBuf,
    control: PathBuf,
    log: PathBuf,
    args: Vec<String>,
}

impl Place {
    fn new(scratch: &Scratch, direct: &str) -> Place {
        let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
        let (socket, control) = (scratch.join("socket"), scratch.join("control"));
        let args = [
            "serve",
            "--socket-path",
            socket.to_str().unwrap(),
            "--control",
            control.to_str().unwrap(),
            "--disk",
            image.to_str().unwrap(),
            "--serial",
            "d",
            "--direct",
            direct,
            "--queues",
            "4",
            "--take-over",
        ];
        let args = args.map(str::to_owned).into();
        Place {
            socket,
            control,
            log: scratch.join("log"),
            args,
        }
    }

    fn start(&self) -> Killed {
        let log = File::options().create(true).append(true).open(&self.log);
        let mut command = Command::new(program_path());
        Killed::start(command.args(&self.args).stderr(log.unwrap()))
    }

    /// Returns true once the server of the disk has answered, false if the process has ended before.
    fn serves(&self, daemon: &mut Killed) -> bool {
        let request = "POST /v1/disks/d/resize HTTP/1.0\r\nContent-Length: 0\r\n\r\n";
        let end = Instant::now() + TIMEOUT;
        while Instant::now() < end {
            if daemon.0.try_wait().unwrap().is_some() {
                return false;
            }
            let answer = converse(&self.control, request.as_bytes(), TIMEOUT);
            if answer.is_ok_and(|answer| answer.contains(" 200 OK")) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("the daemon neither serves nor ends")
    }

    /// So many pauses of the guest.
    fn pauses(&self, count: usize) -> Pauses {
        Pauses::told_of(count, || std::fs::read_to_string(&self.log).unwrap())
    }

    fn are_there(&self) -> bool {
        let lock = self.socket.with_file_name("socket.lock");
        [&self.socket, &self.control, &lock]
            .iter()
            .all(|path| path.exists())
    }
}

fn no_request_is_lost_or_repeated_by_take_overs() {
    let restarts = std::env::var("CLEAVE_RESTARTS").ok();
    let restarts = restarts.map_or(60, |text| text.parse().unwrap());
    let mut random = seeded("take-over");
    let (mut done, mut requests) = (0, 0);
    let (mut waits, mut pauses) = (Pauses::default(), Pauses::default());
    while done < restarts {
        let scratch = Scratch::new();
        let place = Place::new(&scratch, ["on", "off"][(done / ROUND % 2) as usize]);
        let mut daemon = place.start();
        let options = DeviceOptions {
            queues: [1, 4][(done / ROUND % 2) as usize],
            ..outliving()
        };
        let mut client = connect(|| Client::open(&place.socket, &options));
        let mut guest = Survivor::new(&mut client);
        let round = ROUND.min(restarts - done);
        for restart in 0..round {
            let life = Duration::from_micros(random.below(LIFE_MAX_US));
            guest.work(&mut client, &mut random, life);
            let mut next = place.start();
            // Until the old one has ended, and the guest works on.
            while daemon.0.try_wait().unwrap().is_none() {
                // A disk that takes longer than a guest may wait stays, and is asked for again.
                if next.0.try_wait().unwrap().is_some() {
                    next = place.start();
                }
                guest.submit(&mut client, &mut random);
                if guest.out() > 0 {
                    let begun = Instant::now();
                    guest.await_one(&mut client);
                    waits.0.push(begun.elapsed());
                }
            }
            assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
            assert!(place.are_there());
            assert!(place.serves(&mut next), "the next daemon has ended");
            guest.await_all(&mut client, restart % 2 == 0);
            guest.verify(&mut client, (restart + 1) % WHOLE_EVERY == 0);
            daemon = next;
            done += 1;
        }
        guest.verify(&mut client, true);
        requests += guest.answered;
        pauses.0.extend(place.pauses(round as usize).0);
        drop(client);
        terminate(&mut daemon);
        assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
        assert!(!place.socket.exists() && !place.control.exists());
    }
    println!(
        "{done} take-overs: {requests} requests, 0 lost, 0 twice; pause {pauses}; an answer came, while one process gave the disk to \
         the next, after {waits}"
    );
}

/// A frame of the link without descriptors: its kind, and its bytes.
pub(super) fn frame(kind: u32, bytes: &[u8]) -> Vec<u8> {
    let header = [kind, bytes.len() as u32, 0].map(u32::to_le_bytes);
    [header.as_flattened(), bytes].concat()
}

pub(super) const HELLO: u32 = 1;
pub(super) const READY: u32 = 3;
pub(super) const PARCEL: u32 = 4;
pub(super) const TAKEN: u32 = 5;
pub(super) const KEPT: u32 = 6;

/// What another process does.
type Step<'a> = &'a dyn Fn(&mut UnixStream);

/// Asks for a disk or a node, up to the switch of the protocol.
pub(super) fn asked(control: &Path, target: &str) -> UnixStream {
    let mut stream = UnixStream::connect(control).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let request = format!(
        "POST {target} HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: cleave-hand-over\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        answer.push(byte[0]);
    }
    assert!(
        answer.starts_with(b"HTTP/1.1 101 "),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    stream
}

/// Receives a frame without its descriptors, and returns its kind.
pub(super) fn received(stream: &mut UnixStream) -> u32 {
    let mut header = [[0; 4]; 3];
    stream.read_exact(header.as_flattened_mut()).unwrap();
    let [kind, length, count] = header.map(u32::from_le_bytes);
    let mut rest = vec![0; (length + count.div_ceil(64)) as usize];
    stream.read_exact(&mut rest).unwrap();
    kind
}

fn a_process_that_dies_or_falls_silent_takes_nothing() {
    let mut random = seeded("take-over-steps");
    let scratch = Scratch::new();
    let place = Place::new(&scratch, "on");
    let mut daemon = place.start();
    let options = outliving();
    let mut client = connect(|| Client::open(&place.socket, &options));
    let mut guest = Survivor::new(&mut client);
    let version = 1_u32.to_le_bytes();
    // How far the other process comes, and what it says then.
    let steps: [(&str, Step<'_>); 7] = [
        ("says nothing", &|_| {}),
        ("has another version", &|stream| {
            stream
                .write_all(&frame(HELLO, &9_u32.to_le_bytes()))
                .unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
        }),
        ("leaves before it is ready", &|stream| {
            stream.write_all(&frame(HELLO, &version)).unwrap();
            assert_eq!(received(stream), 2);
        }),
        ("takes at once", &|stream| {
            stream.write_all(&frame(HELLO, &version)).unwrap();
            assert_eq!(received(stream), 2);
            stream.write_all(&frame(TAKEN, &[])).unwrap();
            // Otherwise it would take the end of the link for a death.
            assert_eq!(received(stream), KEPT);
        }),
        ("leaves before the sessions", &|stream| {
            stream.write_all(&frame(HELLO, &version)).unwrap();
            stream.write_all(&frame(READY, &[])).unwrap();
        }),
        ("leaves with the sessions", &|stream| {
            stream.write_all(&frame(HELLO, &version)).unwrap();
            assert_eq!(received(stream), 2);
            stream.write_all(&frame(READY, &[])).unwrap();
            assert_eq!(received(stream), 4);
        }),
        ("takes too late", &|stream| {
            stream.write_all(&frame(HELLO, &version)).unwrap();
            assert_eq!(received(stream), 2);
            stream.write_all(&frame(READY, &[])).unwrap();
            assert_eq!(received(stream), 4);
            // Until the other side has given up.
            assert_eq!(received(stream), KEPT);
            assert!(stream.write_all(&frame(TAKEN, &[])).is_err());
        }),
    ];
    for (what, step) in steps {
        guest.work(&mut client, &mut random, Duration::from_millis(5));
        // A disk that takes longer than a guest may wait would stay.
        guest.await_all(&mut client, true);
        let mut stream = asked(&place.control, "/v1/take-over");
        step(&mut stream);
        drop(stream);
        guest.work(&mut client, &mut random, Duration::from_millis(20));
        guest.await_all(&mut client, true);
        guest.verify(&mut client, false);
        assert!(place.serves(&mut daemon), "a process that {what}");
        assert!(place.are_there(), "a process that {what}");
    }
    guest.verify(&mut client, true);
    // One that does it right gets it.
    let mut next = place.start();
    assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
    guest.work(&mut client, &mut random, Duration::from_millis(20));
    guest.await_all(&mut client, true);
    guest.verify(&mut client, true);
    drop(client);
    terminate(&mut next);
    assert_eq!(next.0.wait().unwrap().code(), Some(0));
}

/// Its manager starts the service again only then.
fn a_process_fails_if_the_one_that_took_its_disk_is_dead() {
    let mut random = seeded("take-over-dead");
    let scratch = Scratch::new();
    let place = Place::new(&scratch, "on");
    let mut daemon = place.start();
    let options = outliving();
    let mut client = connect(|| Client::open(&place.socket, &options));
    let mut guest = Survivor::new(&mut client);
    guest.work(&mut client, &mut random, Duration::from_millis(5));
    // A disk that takes longer than a guest may wait would stay.
    guest.await_all(&mut client, true);
    let mut stream = asked(&place.control, "/v1/take-over");
    stream
        .write_all(&frame(HELLO, &1_u32.to_le_bytes()))
        .unwrap();
    assert_eq!(received(&mut stream), 2);
    stream.write_all(&frame(READY, &[])).unwrap();
    assert_eq!(received(&mut stream), 4);
    // Both have happened when it looks.
    freeze(&daemon.0);
    stream.write_all(&frame(TAKEN, &[])).unwrap();
    // A child that another test starts may have a copy of it for a moment.
    stream.shutdown(Shutdown::Both).unwrap();
    signal(&daemon, Signal::CONT);
    assert_eq!(daemon.0.wait().unwrap().code(), Some(1));
    let log = std::fs::read_to_string(&place.log).unwrap();
    assert!(log.contains("until this daemon is started again"), "{log}");
    let mut next = place.start();
    connect(|| client.reconnect(&place.socket, &options, Base::Used));
    guest.await_all(&mut client, true);
    guest.verify(&mut client, true);
    drop(client);
    terminate(&mut next);
    assert_eq!(next.0.wait().unwrap().code(), Some(0));
}

pub(super) fn signal(daemon: &Killed, signal: Signal) {
    let pid = Pid::from_raw(daemon.0.id().cast_signed()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Plays the process that is asked: accepts the other one, up to its greeting.
pub(super) fn asked_by_another(control: &UnixListener) -> UnixStream {
    let switch =
        "101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: cleave-hand-over\r\n\r\n";
    let mut stream = answered(control, switch);
    assert_eq!(received(&mut stream), HELLO);
    stream
}

/// Accepts a connection, and answers its first request.
pub(super) fn answered(control: &UnixListener, answer: &str) -> UnixStream {
    let (mut stream, _) = control.accept().unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        request.push(byte[0]);
    }
    stream
        .write_all(format!("HTTP/1.1 {answer}").as_bytes())
        .unwrap();
    stream
}

/// Sends what a process prepares itself with. The document has the places of the descriptors as their names.
pub(super) fn send_offer(mut stream: &UnixStream, document: &Value, fds: &[BorrowedFd<'_>]) {
    let document = sealed(document);
    let names: Vec<_> = (0..fds.len()).map(|at| at.to_string()).collect();
    let names = serde_json::to_vec(&names).unwrap();
    let header = [2, names.len() as u32, 1 + fds.len() as u32].map(u32::to_le_bytes);
    stream.write_all(header.as_flattened()).unwrap();
    stream.write_all(&names).unwrap();
    send_fds(stream, &[&[document.as_fd()], fds].concat());
}

/// Plays a process whose guest leaves for another host while the next process gets ready: nothing keeps that host from the disk.
fn an_offered_disk_is_locked_by_nobody_else() {
    let scratch = Scratch::new();
    let place = Place::new(&scratch, "off");
    let image = scratch.join("disk");
    let open = || File::options().read(true).write(true).open(&image).unwrap();
    let control = UnixListener::bind(&place.control).unwrap();
    let listener = UnixListener::bind(&place.socket).unwrap();
    let mut next = place.start();
    let mut stream = asked_by_another(&control);
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let document = json!({
        "format": "cleave-hand-over", "version": 1, "cleave": "0.3.0",
        "disk": {"id": "d", "storage": path(&image), "endpoint": path(&place.socket), "identities": []},
        "files": ["0"], "listener": "1", "control": "2", "metrics": null, "watchdog_ns": null, "since_ns": null,
        "limit_levels": null, "sessions": [],
    });
    let released = open();
    let fds = [released.as_fd(), listener.as_fd(), control.as_fd()];
    send_offer(&stream, &document, &fds);
    assert_eq!(received(&mut stream), READY);
    let other = open();
    flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
    stream
        .write_all(&frame(KEPT, b"another host has it"))
        .unwrap();
    assert_eq!(next.0.wait().unwrap().code(), Some(1));
    let log = std::fs::read_to_string(&place.log).unwrap();
    assert!(log.contains("goes on: another host has it"), "{log}");
}

fn one_process_serves_whichever_is_killed() {
    let mut random = seeded("take-over-kills");
    let scratch = Scratch::new();
    let place = Place::new(&scratch, "on");
    let options = outliving();
    let mut daemon = place.start();
    let mut client = connect(|| Client::open(&place.socket, &options));
    let mut guest = Survivor::new(&mut client);
    let (mut kept, mut lost, mut again) = (0, 0, 0);
    for round in 0..30 {
        guest.work(&mut client, &mut random, Duration::from_millis(2));
        let next = place.start();
        let pause = Instant::now() + Duration::from_micros(random.below(KILL_MAX_US));
        while Instant::now() < pause {
            guest.submit(&mut client, &mut random);
            std::thread::sleep(Duration::from_micros(100));
        }
        let mut left = match round % 2 {
            0 => {
                drop(daemon);
                next
            }
            _ => {
                drop(next);
                daemon
            }
        };
        if !place.serves(&mut left) {
            // It was the other one that had the disk, or this one had not heard yet all that it needs.
            left = place.start();
            again += 1;
        }
        assert!(place.serves(&mut left));
        // Its end may come a little later than the answer of the interface.
        match client.frontend().features() {
            Err(_) => {
                connect(|| client.reconnect(&place.socket, &options, Base::Used));
                lost += 1;
            }
            Ok(_) => kept += 1,
        }
        guest.await_all(&mut client, round % 3 == 0);
        guest.verify(&mut client, false);
        daemon = left;
    }
    guest.verify(&mut client, true);
    println!("30 kills: {kept} connections kept, {lost} made again, {again} daemons started again");
    drop(client);
    terminate(&mut daemon);
    assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
}

/// Runs a process that is to take a disk over and must not, and ends with this code: 3 if a restart gets past the reason.
fn refused(args: &[&str], expected: i32) -> String {
    let Exited { code, stderr, .. } = run_to_exit(&[args, &["--take-over"]].concat());
    assert_eq!(code, Some(expected), "{stderr}");
    stderr
}

/// Its guest would find its blocks at other places.
fn a_raw_stripe_with_another_chunk_stays() {
    let scratch = Scratch::new();
    let legs = ["a", "b"].map(|leg| scratch.image(leg, 1 << 20));
    let [first, second] = legs.each_ref().map(|leg| leg.to_str().unwrap());
    let of_chunk = |chunk| {
        [
            "--disk",
            first,
            "--disk",
            second,
            "--stripe-raw",
            "--stripe",
            chunk,
        ]
    };
    let (daemon, control) = Daemon::serve_with_control(&of_chunk("64K"));
    let mut client = daemon.open(&outliving());
    let sockets = [daemon.socket(), &control].map(|socket| socket.to_str().unwrap());
    let own = [
        "serve",
        "--socket-path",
        sockets[0],
        "--control",
        sockets[1],
    ];
    let why = refused(&[&own[..], &of_chunk("128K")].concat(), 1);
    assert!(why.contains("a stripe of 64K without superblocks"), "{why}");
    cleave_tests::exercise(&mut client).unwrap();
    drop(client);
    daemon.finish();
}

fn what_cannot_be_taken_over_stays() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    let (image, other) = (image.to_str().unwrap(), scratch.image("other", 1 << 20));
    for disk in ["ram:1M", image] {
        let (daemon, control) = Daemon::serve_with_control(&["--disk", disk, "--serial", "d"]);
        let socket = daemon.socket().to_str().unwrap();
        let same = |disk| {
            [
                "serve",
                "--socket-path",
                socket,
                "--control",
                control.to_str().unwrap(),
                "--disk",
                disk,
            ]
        };
        let client = daemon.open(&outliving());
        let expected = if disk == "ram:1M" { 3 } else { 1 };
        let why = refused(&same(other.to_str().unwrap()), expected);
        let said = match disk {
            "ram:1M" => "in the memory of this process",
            _ => "give this one the same --disk",
        };
        assert!(why.contains(said), "{why}");
        // A restart would end that, also where another obstacle lasts.
        let ask = |what: &str, body: &str| {
            let path = format!("/v1/disks/d/{what}");
            let answer = fetch(&control, "POST", &path, body);
            assert_eq!(answer.status, 200, "{}", answer.body);
        };
        ask("quiesce", r#"{"seconds": 60}"#);
        let why = refused(&same(disk), 1);
        assert!(why.contains("it is quiesced"), "{why}");
        ask("resume", "");
        drop(client);
        cleave_tests::exercise(&mut daemon.open(&outliving())).unwrap();
        daemon.finish();
    }
    // A process that knows nothing of this, such as an earlier version.
    let control = scratch.join("earlier");
    let listener = UnixListener::bind(&control).unwrap();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 4096]).unwrap();
        let answer = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
        stream.write_all(answer.as_bytes()).unwrap();
    });
    let socket = scratch.join("socket");
    let line = [
        "serve",
        "--socket-path",
        socket.to_str().unwrap(),
        "--control",
        control.to_str().unwrap(),
        "--disk",
        image,
    ];
    let why = refused(&line, 3);
    assert!(why.contains("status 404"), "{why}");
    answering.join().unwrap();
    // Another that does not even answer there, and has the last copy of a file that was deleted.
    let serving = Daemon::serve(&["--disk", image]);
    let there = serving.socket().to_str().unwrap();
    let line = line.map(|word| {
        if word == socket.to_str().unwrap() {
            there
        } else {
            word
        }
    });
    let why = refused(&line, 3);
    assert!(
        why.contains("no process answers at the control socket"),
        "{why}"
    );
    std::fs::remove_file(image).unwrap();
    let why = refused(&line, 1);
    assert!(why.contains("cannot be found"), "{why}");
    serving.finish();
}

fn a_process_of_another_user_gets_nothing() {
    let scratch = Scratch::new();
    let program = program_copy(&scratch);
    let group = NOBODY.to_string();
    let (daemon, control) =
        Daemon::serve_with_control(&["--disk", "null:1M", "--control-group", &group]);
    let mut theirs = Command::new(program);
    theirs
        .args(["serve", "--take-over", "--disk", "null:1M", "--socket-path"])
        .arg(daemon.socket())
        .arg("--control")
        .arg(&control)
        .uid(NOBODY)
        .gid(NOBODY);
    let mut theirs = Killed::start(&mut theirs);
    assert_eq!(theirs.0.wait().unwrap().code(), Some(1));
    assert!(
        wait_until(|| daemon.log_has("is of user 65534")),
        "{}",
        daemon.log()
    );
    daemon.finish();
}
