//! Frontends connect, disconnect and are killed; the guest of one is served at a time while another is parked, and none leaves
//! anything behind.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use cleave_client::{Client, Frontend, Socket, Workload};
use cleave_tests::{
    Daemon, Lateness, Scratch, Stopwatch, TIMEOUT, closes_within, ensure, exercise, flood, http,
    is_root, scale, small, unless_late, wait_until,
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

/// Connects a frontend beside another, which parks it. One that left before may still seem to be there: a child of another test holds
/// copies of this process's connections until it calls exec.
fn parked(daemon: &Daemon) -> Frontend {
    let mut second = None;
    let is_parked = || {
        let frontend = Frontend::connect(daemon.socket(), TIMEOUT).unwrap();
        second = frontend.features().is_ok().then_some(frontend);
        second.is_some()
    };
    assert!(wait_until(is_parked), "{}", daemon.log());
    second.unwrap()
}

/// The attempt to take the disk's locks is not that frontend's.
#[test]
fn a_parked_frontend_that_leaves_ends_no_wait_for_another_host() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 64 << 20);
    let image = image.to_str().unwrap();
    let other = Daemon::serve(&["--disk", image]);
    let inactive = ["--disk", image, "--start", "inactive"];
    let (daemon, control) = Daemon::serve_with_control(&inactive);
    let mut events = http::events(&control);
    let mut next = |name: &str| events.find(|event| event["event"] == name).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| daemon.open(&small(1)));
        assert_eq!(next("possession")["possession"], "waiting");
        let left = "the parked frontend has left";
        drop(parked(&daemon));
        assert!(wait_until(|| daemon.log_has(left)), "{}", daemon.log());
        other.finish();
        exercise(&mut waiting.join().unwrap()).unwrap();
        let mut told = next("possession")["possession"].clone();
        // A first attempt that takes long is told of before the program that has the disk.
        while told == "waiting" {
            told = next("possession")["possession"].clone();
        }
        assert_eq!(told, "active");
    });
    daemon.finish();
}

/// Runs a client in a thread, which gets its vrings when the other frontend has stopped, and waits until it is in line.
fn in_line<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    daemon: &'scope Daemon,
) -> std::thread::ScopedJoinHandle<'scope, Client> {
    let second = scope.spawn(move || Client::open(daemon.socket(), &small(2)).unwrap());
    let waits = wait_until(|| daemon.log_has("wants to start"));
    assert!(waits, "{}", daemon.log());
    second
}

/// Stops all vrings of a client with two.
fn stop(client: &mut Client) {
    for index in 0..2 {
        client.frontend().vring_base(index).unwrap();
    }
}

#[test]
fn a_third_frontend_is_refused() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    let mut first = daemon.open(&small(2));
    let second = parked(&daemon);
    for _ in 0..3 {
        let third = Socket::connect(daemon.socket(), TIMEOUT).unwrap();
        assert!(
            closes_within(&third, TIMEOUT),
            "the third frontend was not refused"
        );
        exercise(&mut first).unwrap();
        second.features().unwrap();
    }
    assert!(daemon.log_has("third frontend"), "{}", daemon.log());
    drop((first, second));
    exercise(&mut daemon.open(&small(2))).unwrap();
    daemon.finish();
}

#[test]
fn a_parked_frontend_starts_when_the_first_has_stopped() {
    let (daemon, control) = Daemon::serve_with_control(&["--disk", "ram:64M"]);
    let shown = || http::get(&control, "/v1/disks/ram:64M")["session"].clone();
    let mut events = http::events(&control);
    let mut next = || events.next().unwrap()["event"].clone();
    let mut first = daemon.open(&small(2));
    exercise(&mut first).unwrap();
    assert_eq!(next(), "connected");
    assert_eq!(shown()["parked"], false);
    std::thread::scope(|scope| {
        let second = in_line(scope, &daemon);
        assert_eq!(next(), "parked");
        assert_eq!(shown()["parked"], true);
        let metrics = http::fetch(&control, "GET", "/metrics", "").body;
        assert!(metrics.contains("cleave_parked_frontends{disk=\"ram:64M\"} 1"));
        // One vring is enough to keep the disk.
        first.frontend().vring_base(0).unwrap();
        assert!(!second.is_finished());
        stop(&mut first);
        exercise(&mut second.join().unwrap()).unwrap();
        assert_eq!(next(), "taken_over");
        // The one that was first is parked now, and has the disk again when the other has left.
        assert_eq!(next(), "disconnected");
        assert_eq!(next(), "connected");
        assert_eq!(shown()["parked"], false);
    });
    for index in 0..2 {
        let base = first.queue(index).ring().reaped();
        first.resume_queue(index, base).unwrap();
    }
    exercise(&mut first).unwrap();
    assert!(daemon.log_has("has taken over"), "{}", daemon.log());
    daemon.finish();
}

#[test]
fn a_first_frontend_that_starts_again_keeps_the_disk() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    let mut first = daemon.open(&small(2));
    let second = parked(&daemon);
    exercise(&mut first).unwrap();
    stop(&mut first);
    for index in 0..2 {
        let base = first.queue(index).ring().reaped();
        first.resume_queue(index, base).unwrap();
    }
    assert!(closes_within(second.socket(), TIMEOUT), "{}", daemon.log());
    exercise(&mut first).unwrap();
    assert!(
        daemon.log_has("started its vrings again"),
        "{}",
        daemon.log()
    );
    daemon.finish();
}

#[test]
fn parked_frontends_that_come_and_go_leave_the_first_alone() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    let mut first = daemon.open(&small(2));
    // The first of them has everything allocated that is allocated only once.
    drop(parked(&daemon));
    let (fds, threads) = (daemon.fds_at_rest(), daemon.threads());
    let (since, mut served) = (Instant::now(), 0);
    std::thread::scope(|scope| {
        let others = scope.spawn(|| (0..scale(200)).for_each(|_| drop(parked(&daemon))));
        while !others.is_finished() {
            let reads = Workload::reads(4096, 4, 1 << 20, Duration::from_millis(20));
            let totals = first.queue(0).run(&reads, |_| ()).unwrap();
            assert_eq!(totals.failed, 0);
            served += totals.reads;
        }
        others.join().unwrap();
    });
    assert!(served > 0);
    first.frontend().features().unwrap();
    daemon.fds_settle_at(fds).unwrap();
    daemon.threads_settle_at(threads).unwrap();
    let lines = daemon.log().matches("parked").count();
    // Some at once, and then one a second of each kind.
    let most = 60 + 3 * since.elapsed().as_secs() as usize;
    assert!(lines < most, "{lines} lines\n{}", daemon.log_tail());
    exercise(&mut first).unwrap();
    daemon.finish();
}

#[test]
fn a_parked_frontend_keeps_the_daemon_up_under_once() {
    let mut daemon = Daemon::serve(&["--disk", "ram:64M", "--once"]);
    let mut first = daemon.open(&small(2));
    drop(parked(&daemon));
    // Until then the next one would be turned away.
    let left = daemon.log_has("the parked frontend has left");
    assert!(left, "{}", daemon.log());
    exercise(&mut first).unwrap();
    daemon.alive().unwrap();
    std::thread::scope(|scope| {
        let second = in_line(scope, &daemon);
        drop(first);
        exercise(&mut second.join().unwrap()).unwrap();
    });
    let (code, _) = daemon.wait().expect("it exits when both have left");
    assert_eq!(code, Some(0), "{}", daemon.log());
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

/// With the folder, group and umask of the unit file, QEMU can connect as libvirt runs it, and no other user can. The control socket
/// is for neither.
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
    let [socket, control] = ["disk.sock", "control.sock"].map(|name| folder.join(name));
    let line = format!(
        "umask {}; exec setpriv --regid {group} --clear-groups --bounding-set -all --inh-caps -all --no-new-privs \"$@\"",
        of_unit("UMask")
    );
    let mut child = std::process::Command::new("sh")
        .args(["-c", &line, "sh"])
        .arg(cleave_tests::program_path())
        .args(["serve", "--disk", "ram:1M", "--socket-path"])
        .args([
            socket.as_os_str(),
            "--control".as_ref(),
            control.as_os_str(),
        ])
        .spawn()
        .unwrap();
    let reached = wait_until(|| connects_as(qemu, group, &socket).is_ok());
    // The control socket is there by then.
    let kept_out = [
        connects_as(other, other, &socket),
        connects_as(qemu, group, &control),
        connects_as(other, other, &control),
    ];
    let owner_reaches = UnixStream::connect(&control);
    let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(reached, "QEMU cannot connect");
    owner_reaches.unwrap();
    for attempt in kept_out {
        assert_eq!(
            attempt.unwrap_err().kind(),
            std::io::ErrorKind::PermissionDenied
        );
    }
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
