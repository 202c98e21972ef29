//! The program never takes a socket or an image from another program.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use cleave_tests::{
    Daemon, Mount, Scratch, exercise, ignored, is_root, run, run_to_exit, small, wait_until,
};
use rustix::process::{Pid, Signal};

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
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
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

/// A full tmpfs has room for the names of a socket and its lock, and for no line. It takes any length of zeroes.
#[test]
fn a_lock_without_room_for_its_line_is_of_use_to_the_next_daemon() {
    if !is_root() {
        return ignored("needs root, to mount");
    }
    let scratch = Scratch::in_memory();
    let mount = Mount::tmpfs(&scratch, 64 << 10).unwrap();
    let filler = mount.path().join("filler");
    let mut file = File::create(&filler).unwrap();
    while file.write(&[1; 4096]).is_ok() {}
    drop(file);
    let [socket, lock] = ["socket", "socket.lock"].map(|name| mount.path().join(name));
    let line = [
        "serve",
        "--socket-path",
        socket.to_str().unwrap(),
        "--disk",
        "ram:1M",
    ];
    let mut daemon = Daemon::with_args(Scratch::in_memory(), socket.clone(), &line);
    let told = [
        "socket.lock cannot be written: No space left",
        "make room there",
    ];
    for part in told {
        assert!(daemon.log_has(part), "{part}: {}", daemon.log());
    }
    assert_eq!(std::fs::read(&lock).unwrap(), b"");
    daemon.die().unwrap();
    let next = daemon.start_again().unwrap();
    daemon.abandon();
    daemon = next;
    std::fs::remove_file(&filler).unwrap();
    // As that one left it, and as version 0.4.0 did.
    for zeroes in [0, 40] {
        daemon.die().unwrap();
        std::fs::write(&lock, vec![0; zeroes]).unwrap();
        let next = daemon.start_again().unwrap();
        daemon.abandon();
        daemon = next;
        let text = std::fs::read_to_string(&lock).unwrap();
        assert!(text.starts_with("served ram:1M\n"), "{zeroes}: {text:?}");
    }
    daemon.finish();
    assert!(!lock.exists());
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
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
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
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
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
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
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
