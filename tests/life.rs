//! Frontends connect and disconnect, signals end the program, and it never takes a socket or an image from another program.
#![allow(clippy::unwrap_used, clippy::panic)] // shared test code lies outside of #[test] functions

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cleave_client::message::protocol;
use cleave_client::{Client, DeviceOptions, InflightRegion, Notifier, ReapWait, Socket, Workload};
use cleave_tests::{
    Daemon, Lateness, Messages as _, Scratch, Stopwatch, TIMEOUT, closes_within, ensure, exercise,
    flood, is_root, run, run_to_exit, scale, small, unless_late, wait_until,
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

#[test]
fn sigterm_and_sigint_shut_down_cleanly_under_load() {
    for signal in [Signal::TERM, Signal::INT] {
        for (queues, depth, completion) in
            [(4, 32, "interrupt"), (2, 16, "poll"), (0, 0, "interrupt")]
        {
            let scratch = Scratch::new();
            let image = scratch.image("disk", 64 << 20);
            let args = [
                "--disk",
                image.to_str().unwrap(),
                "--completion",
                completion,
            ];
            let mut daemon = Daemon::serve(&args);
            let mut client = daemon.open(&small(queues));
            for queue in client.queues() {
                queue.set_timeout(Duration::from_millis(700));
            }
            std::thread::scope(|scope| {
                let load = scope.spawn(|| {
                    let time = Duration::from_secs(5);
                    let mix = Workload {
                        read_percent: 50,
                        ..Workload::reads(16 << 10, depth, 32 << 20, time)
                    };
                    // Fails with a time-out, because its daemon exits.
                    if queues > 0 {
                        let _ = client.run(&mix, |_| |_| ());
                    }
                });
                std::thread::sleep(Duration::from_millis(100));
                daemon.signal(signal);
                match daemon.wait() {
                    Some((Some(0), took)) if took < Duration::from_secs(2) => {}
                    other => panic!("{signal:?}, {queues} vrings: {other:?}\n{}", daemon.log()),
                }
                assert!(!daemon.socket().exists(), "the socket file remains");
                load.join().unwrap();
            });
        }
    }
}

#[test]
fn an_idle_disk_costs_nothing() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    let mut client = daemon.open(&small(4));
    exercise(&mut client).unwrap();
    daemon.stays_at_rest().unwrap();
    exercise(&mut client).unwrap();
    drop(client);
    daemon.stays_at_rest().unwrap();
    daemon.finish();
}

#[test]
fn polling_spins_only_while_there_is_a_vring() {
    let daemon = Daemon::serve(&["--disk", "ram:64M", "--completion", "poll"]);
    let mut client = daemon.open(&DeviceOptions {
        kick: Notifier::Absent,
        wait: ReapWait::Poll,
        ..small(1)
    });
    exercise(&mut client).unwrap();
    let spins = unless_late("spins", Duration::from_millis(100), |lateness| {
        *lateness = Lateness::start(&[daemon.pid()]);
        ensure(daemon.does_not_spin().is_err(), || {
            "it does not spin".into()
        })
    });
    spins.unwrap();
    drop(client);
    daemon.stays_at_rest().unwrap();
    daemon.finish();
}

#[test]
fn a_worker_per_vring_and_no_child() {
    let daemon = Daemon::serve(&["--disk", "ram:64M", "--workers", "4", "--queues", "4"]);
    let alone = daemon.threads();
    let mut client = daemon.open(&small(4));
    exercise(&mut client).unwrap();
    assert!(
        daemon.threads() >= alone + 4,
        "the number of threads went from {alone} to {}",
        daemon.threads()
    );
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", daemon.pid()));
    assert_eq!(children.unwrap_or_default().trim(), "");
    drop(client);
    daemon.threads_settle_at(alone).unwrap();
    daemon.finish();
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let scratch = Scratch::new();
    let socket = scratch.join("socket");
    drop(UnixListener::bind(&socket).unwrap());
    assert!(socket.exists(), "no stale socket file");
    let other = scratch.image("other", 1 << 20);
    let args = [
        "serve",
        "--socket-path",
        socket.to_str().unwrap(),
        "--disk",
        "ram:64M",
    ];
    let args: Vec<String> = args.into_iter().map(str::to_owned).collect();
    let daemon = Daemon::with_args(scratch, socket.clone(), &args);
    assert!(daemon.log_has("serving"), "{}", daemon.log());
    let mut client = daemon.open(&small(1));
    let rival = [
        "serve",
        "--socket-path",
        socket.to_str().unwrap(),
        "--disk",
        other.to_str().unwrap(),
    ];
    let ended = run_to_exit(&rival);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    exercise(&mut client).unwrap();
    drop(client);
    exercise(&mut daemon.open(&small(1))).unwrap();
    daemon.finish();
    assert!(!socket.exists(), "the socket file remains");
}

/// Size of a disk whose guest writes what looks like another format.
const DISK_BYTES: u64 = 1 << 20;

/// The last block of a leg of a stripe.
fn superblock(scratch: &Scratch) -> Vec<u8> {
    let legs = ["leg-0", "leg-1"].map(|name| scratch.image(name, DISK_BYTES));
    let legs = legs.map(|leg| leg.display().to_string());
    let made = run_to_exit(&["stripe", "create", "--force", &legs[0], &legs[1]]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    std::fs::read(&legs[0])
        .unwrap()
        .split_off(DISK_BYTES as usize - 4096)
}

/// A guest may write whatever it likes, and a disk that was served must be served again.
#[test]
fn content_that_a_guest_wrote_does_not_keep_its_disk_from_the_next_daemon() {
    let scratch = Scratch::new();
    let image = scratch.image("image", DISK_BYTES);
    let disk = image.display().to_string();
    let qcow2 = [b"QFI\xfb".as_slice(), &[0; 4092]].concat();
    for (at, block, refusal) in [
        (0, qcow2, "is a qcow2 image"),
        (
            DISK_BYTES - 4096,
            superblock(&scratch),
            "is leg 1 of 2 of a stripe",
        ),
    ] {
        let mut daemon = Daemon::serve(&["--disk", &disk]);
        let mut client = daemon.open(&small(1));
        client.queue(0).write(at, &block).unwrap();
        let next = daemon.succeed().unwrap();
        daemon.abandon();
        assert!(next.log_has("which its guest wrote"), "{}", next.log());
        let mut back = vec![0; 4096];
        next.open(&small(1)).queue(0).read(at, &mut back).unwrap();
        assert_eq!(back, block);
        let socket = daemon.socket().display().to_string();
        let lock = PathBuf::from(format!("{socket}.lock"));
        assert!(lock.exists());
        next.finish();
        assert!(!lock.exists());
        // After an orderly end the disk counts as a new one.
        let line = ["serve", "--socket-path", &socket, "--disk", &disk];
        let refused = run_to_exit(&line);
        assert_eq!(refused.code, Some(2), "{}", refused.stderr);
        assert!(refused.stderr.contains(refusal), "{}", refused.stderr);
        File::options()
            .write(true)
            .open(&image)
            .unwrap()
            .write_all_at(&[0; 4096], at)
            .unwrap();
    }
}

/// The lock tells of the disk that was served: another one is new, and so is one that was never opened.
#[test]
fn a_left_over_lock_vouches_for_no_other_disk() {
    let scratch = Scratch::new();
    let [image, other] = ["image", "other"].map(|name| scratch.image(name, DISK_BYTES));
    let head = File::options().write(true).open(&other).unwrap();
    head.write_all_at(b"QFI\xfb", 0).unwrap();
    let mut daemon = Daemon::serve(&["--disk", &image.display().to_string()]);
    daemon.abandon();
    let socket = daemon.socket().display().to_string();
    let other = other.display().to_string();
    let refuse = || {
        let refused = run_to_exit(&["serve", "--socket-path", &socket, "--disk", &other]);
        assert_eq!(refused.code, Some(2), "{}", refused.stderr);
        assert!(
            refused.stderr.contains("is a qcow2 image"),
            "{}",
            refused.stderr
        );
    };
    let lock = format!("{socket}.lock");
    let left = std::fs::read(&lock).unwrap();
    refuse();
    // A start that fails forgets nothing.
    assert_eq!(std::fs::read(&lock).unwrap(), left);
    // The lock of a daemon that was killed before it had opened its disk.
    std::fs::write(&lock, "").unwrap();
    refuse();
}

#[test]
fn an_image_in_use_is_not_shared() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 64 << 20);
    let disk = image.to_str().unwrap();
    let rival = scratch.join("rival");
    let rival = [
        "serve",
        "--socket-path",
        rival.to_str().unwrap(),
        "--disk",
        disk,
    ];
    let read_only = [&rival[..], &["--read-only"]].concat();
    let daemon = Daemon::serve(&["--disk", disk]);
    for args in [&rival[..], &read_only] {
        let ended = run_to_exit(args);
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(
            ended.stderr.contains(disk) && ended.stderr.contains("in use"),
            "{}",
            ended.stderr
        );
        assert!(!scratch.join("rival").exists(), "a socket file remains");
    }
    daemon.finish();
    let first = Daemon::serve(&["--disk", disk, "--read-only"]);
    let second = Daemon::serve(&["--disk", disk, "--read-only"]);
    exercise(&mut first.open(&small(1))).unwrap();
    exercise(&mut second.open(&small(1))).unwrap();
    let ended = run_to_exit(&rival);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    second.finish();
    first.finish();
    // A lock is released when its holder dies, in whatever way.
    let mut killed = Daemon::serve(&["--disk", disk]);
    killed.abandon();
    Daemon::serve(&["--disk", disk]).finish();
}

/// A QEMU with a disk of its own, paused before its guest runs.
struct Qemu(PathBuf);

impl Qemu {
    /// Starts it; `Err`: its error output.
    fn start(folder: &Path, disk: &Path, read_only: bool) -> Result<Qemu, String> {
        let pid_file = folder.join("qemu.pid");
        let access = if read_only { "on" } else { "off" };
        let drive = format!(
            "driver=file,filename={},node-name=d,read-only={access}",
            disk.display()
        );
        let pid = pid_file.to_str().unwrap();
        let line = "-M q35,accel=tcg -nodefaults -display none -S -m 16M -daemonize -pidfile";
        let mut args: Vec<&str> = line.split(' ').collect();
        args.extend([
            pid,
            "-blockdev",
            &drive,
            "-device",
            "virtio-blk-pci,drive=d",
        ]);
        run("qemu-system-x86_64", &args)?;
        Ok(Qemu(pid_file))
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let text = std::fs::read_to_string(&self.0).unwrap_or_default();
        let pid = text.trim().parse().ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            let _ = rustix::process::kill_process(pid, Signal::TERM);
            wait_until(|| rustix::process::test_kill_process(pid).is_err());
        }
    }
}

#[test]
fn an_image_is_shared_with_qemu_only_for_reading() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 64 << 20);
    let disk = image.to_str().unwrap();
    let socket = scratch.join("socket");
    let start = ["serve", "--socket-path", socket.to_str().unwrap()];
    for (qemu_reads, cleave_reads) in [(false, false), (false, true), (true, false)] {
        let access: &[&str] = if cleave_reads { &["--read-only"] } else { &[] };
        let args = [&start[..], &["--disk", disk], access].concat();
        let qemu = Qemu::start(scratch.path(), &image, qemu_reads).unwrap();
        let ended = run_to_exit(&args);
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(
            ended.stderr.contains(disk) && ended.stderr.contains("in use by QEMU"),
            "{}",
            ended.stderr
        );
        drop(qemu);
        let daemon = Daemon::serve(&[&["--disk", disk], access].concat());
        let why = Qemu::start(scratch.path(), &image, qemu_reads).err();
        let why =
            why.unwrap_or_else(|| panic!("QEMU took {disk} too: {qemu_reads} {cleave_reads}"));
        assert!(why.contains("lock"), "{why}");
        exercise(&mut daemon.open(&small(1))).unwrap();
        daemon.finish();
    }
    let qemu = Qemu::start(scratch.path(), &image, true).unwrap();
    let daemon = Daemon::serve(&["--disk", disk, "--read-only"]);
    exercise(&mut daemon.open(&small(1))).unwrap();
    drop(qemu);
    drop(Qemu::start(scratch.path(), &image, true).unwrap());
    daemon.finish();
}

#[test]
fn a_demonstration_runs_as_the_first_process_of_a_container() {
    if !is_root() {
        return cleave_tests::ignored("not root");
    }
    let scratch = Scratch::new();
    let folder = scratch.path().to_str().unwrap();
    let program = cleave_tests::program_path().to_str().unwrap();
    let line = "--pid --fork --mount-proc";
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
    let args: Vec<&str> = line.split(' ').chain([program]).chain(demo).collect();
    run("unshare", &args).unwrap();
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
