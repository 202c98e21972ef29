//! The log: what it names, and that neither a guest nor a reader can make it a burden.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use cleave_client::message::protocol;
use cleave_client::{Client, DeviceOptions, Frontend, InflightRegion};
use cleave_tests::{Daemon, Scratch, TIMEOUT, exercise, run_to_exit, small, wait_until};
use rustix::process::{Pid, Signal};

#[test]
fn an_unread_log_blocks_nothing() {
    use std::process::Command;
    // Its stderr is a pipe that is full before it starts and never read.
    let (reader, mut writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while writer.write(&[b'x'; 4096]).is_ok() {}
    while writer.write(b"x").is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let scratch = Scratch::new();
    let socket = scratch.join("socket");
    let mut child = Command::new(cleave_tests::program_path())
        .args([
            "serve",
            "--disk",
            "ram:64M",
            "--log",
            "trace",
            "--socket-path",
        ])
        .arg(&socket)
        .stderr(writer)
        .spawn()
        .unwrap();
    let enough = Instant::now() + Duration::from_secs(5);
    let mut rounds = 0;
    while rounds <= 10 || rounds < 300 && Instant::now() < enough {
        let mut client = None;
        wait_until(|| {
            client = Client::open(&socket, &small(2)).ok();
            client.is_some()
        });
        let mut client = client.unwrap_or_else(|| panic!("it blocks after {rounds} rounds"));
        exercise(&mut client).unwrap();
        rounds += 1;
    }
    let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    let mut status = None;
    wait_until(|| {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    let Some(status) = status else {
        let _ = child.kill();
        let _ = child.wait();
        panic!("it does not exit while its log is blocked");
    };
    assert_eq!(status.code(), Some(0));
    drop(reader);
}

/// What a guest can make the daemon log: a few lines at once, then one a second.
fn assert_few(daemon: &Daemon, text: &str, since: Instant, sessions: usize) {
    let most = 10 + since.elapsed().as_secs() as usize;
    let lines = daemon.log().matches(text).count();
    assert!(
        (1..=most).contains(&lines) && most < sessions,
        "{lines} lines in {:?}, {sessions} sessions: {}",
        since.elapsed(),
        daemon.log_tail()
    );
}

#[test]
fn a_guest_that_breaks_its_ring_in_each_session_does_not_fill_the_log() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    let (since, sessions) = (Instant::now(), 200);
    for _ in 0..sessions {
        let mut client = daemon.open(&small(1));
        let queue = client.queue(0);
        queue.ring().push(300);
        queue.ring().publish();
        queue.ring_kick();
        assert!(queue.err_signalled(TIMEOUT));
    }
    assert_few(&daemon, "is retired", since, sessions);
    daemon.finish();
}

#[test]
fn a_frontend_that_leaves_a_request_at_each_start_does_not_fill_the_log() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    let plain = small(1);
    let mut client = daemon.open(&DeviceOptions {
        protocol_features: plain.protocol_features | protocol::INFLIGHT_SHMFD,
        ..plain
    });
    exercise(&mut client).unwrap();
    let region = InflightRegion::own(1, 64).unwrap();
    let file = File::from(region.fd.try_clone().unwrap());
    let (since, starts) = (Instant::now(), 1000);
    for _ in 0..starts {
        let base = client.frontend().vring_base(0).unwrap();
        let used = client.queue(0).ring().used_index();
        // A daemon has taken request 0: version 1, 64 entries, the used index, and the first entry is in flight.
        let head = [1, 64, 0, used].map(u16::to_le_bytes).concat();
        file.write_all_at(&head, 8).unwrap();
        file.write_all_at(&[1], 16).unwrap();
        client.frontend().set_inflight(&region).unwrap();
        client.resume_queue(0, base as u16).unwrap();
    }
    assert_few(&daemon, "are done again", since, starts);
    drop(client);
    daemon.finish();
}

#[test]
fn sessions_of_a_stripe_do_not_fill_the_log() {
    let scratch = Scratch::in_memory();
    let legs = ["a", "b"].map(|name| scratch.image(name, 8 << 20).display().to_string());
    let names = legs.each_ref().map(String::as_str);
    let made = run_to_exit(&[&["stripe", "create", "--chunk", "64K"], &names[..]].concat());
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let daemon = Daemon::serve(&["--stripe", "64K", "--disk", names[0], "--disk", names[1]]);
    exercise(&mut daemon.open(&small(1))).unwrap();
    let (since, sessions) = (Instant::now(), 200);
    for _ in 0..sessions {
        daemon.open(&small(1));
    }
    assert_few(&daemon, "legs moved", since, sessions);
    daemon.finish();
}

#[test]
fn the_log_names_the_cache_the_leg_the_session_and_the_signal() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    let path = image.to_str().unwrap();
    for (direct, says) in [("off", "through the page cache"), ("on", "O_DIRECT")] {
        let daemon = Daemon::serve(&["--disk", path, "--direct", direct]);
        let line = format!("serving {path} (1048576 bytes, {says}) at ");
        assert!(daemon.log_has(&line), "{}", daemon.log());
        daemon.finish();
    }
    let legs = ["leg1", "leg2"].map(|name| scratch.image(name, 1 << 20));
    let [leg, other] = legs.each_ref().map(|leg| leg.to_str().unwrap());
    let created = run_to_exit(&["stripe", "create", leg, other]);
    assert_eq!(created.code, Some(0), "{}", created.stderr);
    let raw = format!("raw:{leg}");
    for alone in [&["--disk", leg, "--read-only"][..], &["--disk", &raw]] {
        Daemon::serve(alone).finish();
    }
    let mut daemon = Daemon::serve(&["--disk", "null:1M"]);
    // As QEMU does while it starts: the features, and nothing more.
    drop(
        Frontend::connect(daemon.socket(), TIMEOUT)
            .unwrap()
            .features(),
    );
    assert!(
        wait_until(|| daemon.log_has("the frontend has left without a request")),
        "{}",
        daemon.log()
    );
    let mut client = daemon.open(&small(1));
    client.queue(0).read(0, &mut [0; 512]).unwrap();
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().expect("it ends").0, Some(0));
    for says in [
        "SIGTERM received: finishing the requests in flight",
        "the frontend was disconnected after 1 reads",
    ] {
        assert!(daemon.log_has(says), "{says:?}: {}", daemon.log());
    }
    let log = daemon.log();
    assert!(!log.contains("has left after"), "{log}");
}
