//! Refusals of the program: each is one line that names the cause, and leaves nothing behind.

use std::os::unix::net::UnixListener;
use std::path::Path;

use cleave_client::Client;
use cleave_tests::{Daemon, Scratch, is_root, run, run_to_exit, small, wait_until};

use crate::open;

fn files(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = names
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Asserts the form of a refusal: code 2, or 1 for what may pass; one line that names the thing, nothing on stdout, nothing left behind.
fn refused(folder: &Path, name: &str, args: &[&str], says: &str) {
    let before = files(folder);
    let ended = run_to_exit(args);
    let passing = [
        "does not exist",
        "in use by a running program",
        "cannot make socket",
    ];
    let may_pass = passing.iter().any(|part| ended.stderr.contains(part));
    let code = if may_pass { 1 } else { 2 };
    assert_eq!(ended.code, Some(code), "{name}: {}", ended.stderr);
    assert_eq!(
        ended.stderr.trim_end().lines().count(),
        1,
        "{name}: {}",
        ended.stderr
    );
    assert!(
        ended.stderr.starts_with("cleave: ") && ended.stderr.contains(says),
        "{name}: {says:?} is not in {}",
        ended.stderr
    );
    assert_eq!(ended.stdout, "", "{name}");
    assert_eq!(files(folder), before, "{name} left something behind");
    println!("{name} ... ok: {}", ended.stderr.trim_end());
}

/// Images that are not raw, by the bytes that they begin with.
const FORMATS: [(&str, usize, &[u8]); 8] = [
    ("qcow2", 0, b"QFI\xfb"),
    ("QED", 0, b"QED\0"),
    ("VMDK", 0, b"KDMV"),
    ("VMDK", 0, b"COWD"),
    ("VMDK", 0, b"# Disk DescriptorFile"),
    ("VHDX", 0, b"vhdxfile"),
    ("VHD", 0, b"conectix"),
    ("VDI", 64, b"\x7f\x10\xda\xbe"),
];

#[test]
fn an_image_of_another_format_is_served_only_where_raw_is_asked_for() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    let raw = format!("raw:{}", image.display());
    let socket = scratch.join("socket");
    let start = ["--socket-path", socket.to_str().unwrap()];
    let path = image.to_str().unwrap();
    for (format, at, magic) in FORMATS {
        let mut head = [0; 512];
        head[at..at + magic.len()].copy_from_slice(magic);
        std::fs::write(&image, [&head[..], &[0; (1 << 20) - 512]].concat()).unwrap();
        for says in [format, raw.as_str()] {
            let args = [&["serve", "--disk", path], &start[..]].concat();
            refused(scratch.path(), format, &args, says);
            let args = [&["--blk-file", path], &start[..]].concat();
            refused(scratch.path(), format, &args, says);
        }
        let daemon = Daemon::serve(&["--disk", &raw]);
        assert!(
            daemon.log_has(&format!("serving {path}")),
            "{}",
            daemon.log()
        );
        let mut back = [1; 512];
        open(daemon.socket()).queue(0).read(0, &mut back).unwrap();
        assert_eq!(back, head);
        daemon.finish();
    }
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    let [empty, odd] = [scratch.image("empty", 0), scratch.image("odd", 1000)];
    std::fs::create_dir(scratch.join("folder")).unwrap();
    std::os::unix::fs::symlink(scratch.join("nowhere"), scratch.join("dangling")).unwrap();
    run("mkfifo", &[scratch.join("fifo").to_str().unwrap()]).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let (disk, empty, odd) = (text(&image), text(&empty), text(&odd));
    let [missing, folder, dangling, fifo] =
        ["missing", "folder", "dangling", "fifo"].map(|name| text(&scratch.join(name)));
    let socket = text(&scratch.join("socket"));
    let legs = ["leg1", "leg2"].map(|name| text(&scratch.image(name, 1 << 20)));
    let created = run_to_exit(&["stripe", "create", &legs[0], &legs[1]]);
    assert_eq!(created.code, Some(0), "{}", created.stderr);
    let [leg, _] = legs;
    let json = text(&scratch.join("full.json"));
    std::fs::write(&json, "{}").unwrap();
    let odd_qcow2 = format!("raw:{}", scratch.join("qcow2").display());
    std::fs::write(scratch.join("qcow2"), [b"QFI\xfb", &[0; 1001][..]].concat()).unwrap();
    let long = text(&scratch.join(&"x".repeat(120)));
    let nowhere = text(&scratch.join("no/such/folder/socket"));
    let rows: Vec<(&str, Vec<&str>, &str)> = vec![
        ("a missing disk", vec!["--disk", &missing], &missing),
        ("a folder as disk", vec!["--disk", &folder], &folder),
        (
            "a dangling link as disk",
            vec!["--disk", &dangling],
            &dangling,
        ),
        ("a pipe as disk", vec!["--disk", &fifo], &fifo),
        (
            "a character device as disk",
            vec!["--disk", "/dev/null"],
            "/dev/null",
        ),
        ("an empty disk", vec!["--disk", &empty], &empty),
        ("a disk of half a sector", vec!["--disk", &odd], &odd),
        (
            "a disk that is not a multiple of its blocks",
            vec!["--disk", &odd, "--block-size", "4096"],
            &odd,
        ),
        (
            "memory to be polled for",
            vec!["--disk", "ram:1M", "--iopoll", "on"],
            "disk ram:1M has no queue on this host to poll; remove --iopoll",
        ),
        (
            "a page cache to be polled for",
            vec!["--disk", &disk, "--direct", "off", "--iopoll", "on"],
            "which cannot be polled; add --direct on",
        ),
        ("ram of nothing", vec!["--disk", "ram:0"], "ram:0"),
        ("ram of a strange size", vec!["--disk", "ram:12x"], "12x"),
        ("ram of half a sector", vec!["--disk", "ram:1000"], "1000"),
        ("ram without a size", vec!["--disk", "ram:"], "ram:"),
        ("null without a size", vec!["--disk", "null:"], "null:"),
        ("null of nothing", vec!["--disk", "null:0"], "null:0"),
        (
            "two disks",
            vec!["--disk", &disk, "--disk", "null:1G"],
            "one disk",
        ),
        (
            "a size beyond 2^64",
            vec!["--disk", "null:99999999999999T"],
            "99999999999999T",
        ),
        ("no disk", vec![], "--disk"),
        ("an empty disk name", vec!["--disk", ""], "disk"),
        (
            "block size 100",
            vec!["--disk", &disk, "--block-size", "100"],
            "100",
        ),
        (
            "block size 0",
            vec!["--disk", &disk, "--block-size", "0"],
            "0",
        ),
        (
            "block size 128K",
            vec!["--disk", &disk, "--block-size", "128K"],
            "128K",
        ),
        (
            "queues 0",
            vec!["--disk", &disk, "--queues", "0"],
            "--queues",
        ),
        (
            "queues 70000",
            vec!["--disk", &disk, "--queues", "70000"],
            "--queues",
        ),
        (
            "queues -1",
            vec!["--disk", &disk, "--queues=-1"],
            "--queues",
        ),
        (
            "queue size 0",
            vec!["--disk", &disk, "--queue-size", "0"],
            "--queue-size",
        ),
        (
            "queue size 3",
            vec!["--disk", &disk, "--queue-size", "3"],
            "--queue-size",
        ),
        (
            "queue size 65536",
            vec!["--disk", &disk, "--queue-size", "65536"],
            "--queue-size",
        ),
        (
            "workers 0",
            vec!["--disk", &disk, "--workers", "0"],
            "--workers",
        ),
        (
            "a CPU list of letters",
            vec!["--disk", &disk, "--cpus", "a-b"],
            "--cpus",
        ),
        (
            "a CPU that is not there",
            vec!["--disk", &disk, "--cpus", "99999"],
            "99999",
        ),
        (
            "a serial of 21 characters",
            vec!["--disk", &disk, "--serial", "123456789012345678901"],
            "--serial",
        ),
        (
            "an unknown cache mode",
            vec!["--disk", &disk, "--cache", "none"],
            "none",
        ),
        (
            "an unknown completion mode",
            vec!["--disk", &disk, "--completion", "maybe"],
            "maybe",
        ),
        (
            "an unknown log level",
            vec!["--disk", &disk, "--log", "loud"],
            "loud",
        ),
        (
            "an unknown option",
            vec!["--disk", &disk, "--frobnicate"],
            "--frobnicate",
        ),
        ("an option without value", vec!["--disk"], "--disk"),
        (
            "direct that is not a word",
            vec!["--disk", &disk, "--direct", "perhaps"],
            "perhaps",
        ),
        (
            "direct where there is no page cache",
            vec!["--disk", "null:1G", "--direct", "on"],
            "null:1G",
        ),
        (
            "an option of null that does not exist",
            vec!["--disk", "null:1G,read-zeroes=maybe"],
            "`read-zeroes=maybe` is not an option",
        ),
        (
            "control and frontends at one path",
            vec!["--disk", &disk, "--control", &socket],
            "--control and --socket-path are both",
        ),
        (
            "a file of JSON as profile",
            vec!["--disk", &disk, "--profile", &json],
            "give the file that `cleave probe --profile` wrote",
        ),
        (
            "one leg of a stripe",
            vec!["--disk", &leg],
            "is leg 1 of 2 of a stripe; serve all of them",
        ),
        (
            "an odd image of another format, as raw",
            vec!["--disk", &odd_qcow2],
            "not a multiple of 512; convert it: qemu-img",
        ),
    ];
    for (name, rest, says) in &rows {
        let args = [&["serve", "--socket-path", &socket], rest.as_slice()].concat();
        refused(scratch.path(), name, &args, says);
    }
    let busy = text(&scratch.join("file-in-the-way"));
    std::fs::write(&busy, "precious").unwrap();
    let live = text(&scratch.join("live"));
    let _listener = UnixListener::bind(&live).unwrap();
    let rows: Vec<(&str, Vec<&str>, &str)> = vec![
        (
            "a socket path that is too long",
            vec!["serve", "--socket-path", &long, "--disk", &disk],
            "xxx",
        ),
        (
            "a socket path without folder",
            vec!["serve", "--socket-path", &nowhere, "--disk", &disk],
            &nowhere,
        ),
        (
            "a file at the socket path",
            vec!["serve", "--socket-path", &busy, "--disk", &disk],
            &busy,
        ),
        (
            "a folder at the socket path",
            vec!["serve", "--socket-path", &folder, "--disk", &disk],
            &folder,
        ),
        (
            "a live socket",
            vec!["serve", "--socket-path", &live, "--disk", &disk],
            &live,
        ),
        (
            "an empty socket path",
            vec!["serve", "--socket-path", "", "--disk", &disk],
            "socket",
        ),
        (
            "neither socket nor descriptor",
            vec!["serve", "--disk", &disk],
            "--socket-path",
        ),
        (
            "socket and descriptor",
            vec![
                "serve",
                "--socket-path",
                &socket,
                "--fd",
                "0",
                "--disk",
                &disk,
            ],
            "--fd",
        ),
        (
            "a descriptor that is not a socket",
            vec!["serve", "--fd", "0", "--disk", &disk],
            "0",
        ),
        (
            "a descriptor that is not open",
            vec!["serve", "--fd", "977", "--disk", &disk],
            "977",
        ),
        (
            "a descriptor that is not a number",
            vec!["serve", "--fd", "x", "--disk", &disk],
            "--fd",
        ),
        (
            "a descriptor below 0",
            vec!["serve", "--fd=-1", "--disk", &disk],
            "--fd",
        ),
        ("nothing at all", vec![], "cleave serve"),
        ("an unknown command", vec!["frobnicate"], "frobnicate"),
        (
            "conventions without a file",
            vec!["--socket-path", &socket],
            "--blk-file",
        ),
        (
            "conventions without a socket",
            vec!["--blk-file", &disk],
            "--socket-path",
        ),
        (
            "conventions with a missing file",
            vec!["--socket-path", &socket, "--blk-file", &missing],
            &missing,
        ),
    ];
    for (name, args, says) in &rows {
        refused(scratch.path(), name, args, says);
    }
    assert_eq!(std::fs::read(&busy).unwrap(), b"precious");
}

#[test]
fn a_vring_larger_than_allowed_names_the_option() {
    let daemon = Daemon::serve(&["--disk", "null:1M", "--queue-size", "32"]);
    let refused = Client::open(daemon.socket(), &small(1));
    assert!(refused.is_err());
    assert!(
        wait_until(|| daemon.log_has(
            "null:1M: refused: vring 0 has 64 entries and --queue-size allows 32: raise that option"
        )),
        "{}",
        daemon.log()
    );
    daemon.finish();
}

#[test]
fn no_permission_is_named() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    run("chmod", &["755", scratch.path().to_str().unwrap()]).unwrap();
    run("chmod", &["600", image.to_str().unwrap()]).unwrap();
    let probe = run_to_exit(&["--version"]);
    assert_eq!(probe.code, Some(0));
    let program = cleave_tests::program_copy(&scratch);
    let socket = scratch.join("socket");
    // Root may open everything, so it becomes somebody else; anybody else takes its own right away.
    let rights: &[&str] = match is_root() {
        true => &[
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
        ],
        false => {
            run("chmod", &["000", image.to_str().unwrap()]).unwrap();
            &["env"]
        }
    };
    let output = std::process::Command::new(rights[0])
        .args(&rights[1..])
        .arg(program)
        .args(["serve", "--socket-path", socket.to_str().unwrap()])
        .args(["--disk", image.to_str().unwrap()])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    assert!(
        stderr.contains(image.to_str().unwrap()) && stderr.contains("permission"),
        "{stderr}"
    );
}
