//! Frontends connect, disconnect and are killed; one is served at a time, and none leaves anything behind.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use cleave_client::Socket;
use cleave_tests::{
    Daemon, Lateness, Scratch, Stopwatch, TIMEOUT, closes_within, ensure, exercise, flood, is_root,
    scale, small, unless_late, wait_until,
};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};

#[test]
fn repeated_connections_leak_nothing() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    // The first sessions allocate everything that is allocated only once.
    for _ in 0..5 {
        exercise(&mut daemon.open(&small(2))).unwrap();
    }
    let (fds, threads) = (daemon.fds_at_rest(), daemon.threads());
    let rss = daemon.rss_kib();
    let mut slowest = Duration::ZERO;
    for round in 0..scale(200) {
        let watch = Stopwatch::start();
        let mut client = daemon.open(&small(2));
        exercise(&mut client).unwrap_or_else(|what| panic!("round {round}: {what}"));
        slowest = slowest.max(watch.elapsed());
    }
    println!("slowest of all: {slowest:?}");
    assert!(slowest < Duration::from_millis(300), "{slowest:?}");
    daemon.fds_settle_at(fds).unwrap();
    daemon.threads_settle_at(threads).unwrap();
    daemon.settles_small(rss, 1024).unwrap();
    daemon.finish();
}

#[test]
fn the_next_frontend_is_served_at_once() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    for _ in 0..50 {
        let served = unless_late("next-frontend", Duration::from_millis(20), |lateness| {
            let mut client = daemon.open(&small(1));
            exercise(&mut client)?;
            *lateness = Lateness::start(&[daemon.pid()]);
            let start = Instant::now();
            drop(client);
            exercise(&mut daemon.open(&small(1)))?;
            let took = start.elapsed();
            ensure(took < Duration::from_millis(100), || {
                format!("after {took:?}\n{}", daemon.log_tail())
            })
        });
        served.unwrap();
    }
    daemon.finish();
}

#[test]
fn a_second_frontend_is_refused() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    let mut first = daemon.open(&small(2));
    for _ in 0..3 {
        let second = Socket::connect(daemon.socket(), TIMEOUT).unwrap();
        assert!(
            closes_within(&second, TIMEOUT),
            "the second frontend was not refused"
        );
        exercise(&mut first).unwrap();
    }
    assert!(daemon.log_has("second frontend"), "{}", daemon.log());
    drop(first);
    exercise(&mut daemon.open(&small(2))).unwrap();
    daemon.finish();
}

#[test]
fn it_exits_with_its_frontend_under_once() {
    let mut daemon = Daemon::serve(&["--disk", "ram:64M", "--once"]);
    let mut client = daemon.open(&small(2));
    exercise(&mut client).unwrap();
    daemon.alive().unwrap();
    drop(client);
    let (code, took) = daemon.wait().expect("it exits with its frontend");
    assert_eq!(code, Some(0), "{}", daemon.log());
    assert!(took < Duration::from_secs(2));
    assert!(!daemon.socket().exists());
}

/// Value of a key in the unit file.
fn of_unit(key: &str) -> String {
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/../dist/cleave@.service");
    let text = std::fs::read_to_string(unit).unwrap();
    let value = |line: &str| Some(line.strip_prefix(key)?.strip_prefix('=')?.to_owned());
    text.lines().find_map(value).unwrap_or_default()
}

/// Runs as this user and group; the calling thread keeps them.
fn connects_as(user: u32, group: u32, socket: &Path) -> std::io::Result<UnixStream> {
    use rustix::process::{Gid, Uid};
    use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            set_thread_groups(&[])?;
            set_thread_res_gid(group, group, group)?;
            set_thread_res_uid(user, user, user)?;
            UnixStream::connect(socket)
        });
        other.join().unwrap()
    })
}

/// With the folder, group and umask of the unit file, QEMU can connect as libvirt runs it, and no other user can.
#[test]
fn the_service_can_be_reached_by_the_group_of_qemu() {
    if !is_root() {
        return cleave_tests::ignored("not root");
    }
    // The package makes the group; QEMU's user is put into it.
    assert_eq!(of_unit("Group"), "cleave");
    let (qemu, group, other) = (64055, 64056, 64057);
    let scratch = Scratch::new();
    std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let folder = scratch.join("run");
    std::fs::create_dir(&folder).unwrap();
    std::os::unix::fs::chown(&folder, Some(0), Some(group)).unwrap();
    let mode = u32::from_str_radix(&of_unit("RuntimeDirectoryMode"), 8).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(mode)).unwrap();
    let socket = folder.join("disk.sock");
    let line = format!(
        "umask {}; exec setpriv --regid {group} --clear-groups --bounding-set -all --inh-caps -all --no-new-privs \"$@\"",
        of_unit("UMask")
    );
    let mut child = std::process::Command::new("sh")
        .args(["-c", &line, "sh"])
        .arg(cleave_tests::program_path())
        .args(["serve", "--disk", "ram:1M", "--socket-path"])
        .arg(&socket)
        .spawn()
        .unwrap();
    let reached = wait_until(|| connects_as(qemu, group, &socket).is_ok());
    let kept_out = connects_as(other, other, &socket);
    let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(reached, "QEMU cannot connect");
    let kept_out = kept_out.map_err(|error| error.kind());
    assert!(matches!(
        kept_out,
        Err(std::io::ErrorKind::PermissionDenied)
    ));
}

#[test]
fn frontends_killed_in_the_middle_of_their_requests() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 64 << 20);
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    exercise(&mut daemon.open(&small(2))).unwrap();
    let (fds, mut rss) = (daemon.fds_at_rest(), daemon.rss_kib());
    for round in 0..scale(100) {
        // The first floods have it take the memory that it keeps.
        if round == 10 {
            rss = daemon.rss_kib();
        }
        let mut client = daemon.open(&small(2));
        for index in 0..2 {
            flood(client.queue(index), 20, 64 << 10);
        }
        // Memory, sockets and eventfds are closed at once, as when a VMM is killed.
        drop(client);
        if round % 25 == 0 {
            exercise(&mut daemon.open(&small(2))).unwrap_or_else(|what| panic!("{round}: {what}"));
        }
    }
    exercise(&mut daemon.open(&small(2))).unwrap();
    daemon.fds_settle_at(fds).unwrap();
    daemon.settles_small(rss, 1024).unwrap();
    daemon.finish();
}

#[test]
fn waiting_for_free_descriptors_does_not_spin() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    exercise(&mut daemon.open(&small(1))).unwrap();
    let pid = Pid::from_raw(daemon.pid().cast_signed());
    let all = getrlimit(Resource::Nofile);
    let limit = |current: Option<u64>| {
        let maximum = all.maximum;
        prlimit(pid, Resource::Nofile, Rlimit { current, maximum }).unwrap();
    };
    // Not a single connection can be accepted.
    limit(Some(3));
    let waiting = Socket::connect(daemon.socket(), TIMEOUT).unwrap();
    daemon.does_not_spin().unwrap();
    limit(all.maximum);
    // The waiting connection sends nothing, and does not block others.
    exercise(&mut daemon.open(&small(1))).unwrap();
    drop(waiting);
    daemon.finish();
}
