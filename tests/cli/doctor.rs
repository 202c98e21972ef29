//! `cleave doctor`: what it finds, and that it names the remedy.

use std::fs::{Permissions, create_dir, set_permissions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use cleave_tests::nbd::{Export, NbdServer};
use cleave_tests::{
    Daemon, Node, Scratch, ignored, is_root, program_copy, run, run_to_exit, wait_until,
};
use serde_json::{Value, json};

/// A user without rights, on every system.
const NOBODY: &str = "65534";

/// The findings of one check: level, and text with remedy.
fn findings(output: &str, check: &str) -> Vec<(String, String)> {
    let all: Value = serde_json::from_str(output).unwrap();
    let all = all["findings"].as_array().unwrap();
    let of_check = all.iter().filter(|finding| finding["check"] == check);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    of_check
        .map(|found| {
            let line = format!("{}: {}", text(&found["found"]), text(&found["remedy"]));
            (text(&found["level"]), line)
        })
        .collect()
}

/// Runs it with a question about a socket or a disk: its exit code, and what it found about that.
fn ask(option: &str, path: &Path, more: &[&str]) -> (Option<i32>, Vec<(String, String)>) {
    let path = path.to_str().unwrap();
    let args = [&["doctor", "--json", option, path], more].concat();
    let ended = run_to_exit(&args);
    let check = option.trim_start_matches("--").trim_end_matches("-path");
    (ended.code, findings(&ended.stdout, check))
}

/// Makes a program. Another writes it: a process that was just being started by another test would have this one's descriptor for a
/// moment, and Linux runs no program that is open for writing.
fn install(scratch: &Scratch, name: &str, script: &str) {
    let text = scratch.join("script");
    std::fs::write(&text, script).unwrap();
    let [from, to] = [text, scratch.join(name)].map(|path| path.display().to_string());
    run("install", &["--mode=755", &from, &to]).unwrap();
}

fn allow(path: &Path, mode: u32) {
    set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[test]
fn the_host_is_described_a_finding_a_line() {
    let ended = run_to_exit(&["doctor"]);
    assert_eq!(ended.code, Some(0), "{}{}", ended.stdout, ended.stderr);
    for check in [
        "kernel",
        "io_uring",
        "open files",
        "huge pages",
        "shared memory",
        "confinement",
        "group",
    ] {
        let mut lines = ended.stdout.lines();
        let line = lines.find(|line| line.get(9..).is_some_and(|rest| rest.starts_with(check)));
        let line = line.unwrap_or_else(|| panic!("{check} is not in {}", ended.stdout));
        assert!(
            line.starts_with("OK ") || line.starts_with("warning "),
            "{line}"
        );
    }
    let json = run_to_exit(&["doctor", "--json"]);
    assert_eq!(findings(&json.stdout, "kernel")[0].0, "ok");
}

#[test]
fn a_libvirt_that_forgets_to_reconnect_is_warned_of() {
    let scratch = Scratch::new();
    let ask = |version: &str| {
        let script =
            format!("#!/bin/sh\n[ $1 = --version ] && echo 'libvirtd (libvirt) {version}'\n");
        install(&scratch, "libvirtd", &script);
        let path = std::env::var("PATH").unwrap();
        let output = Command::new(cleave_tests::program_path())
            .args(["doctor", "--json"])
            .env("PATH", format!("{}:{path}", scratch.path().display()))
            .output()
            .unwrap();
        let found = findings(&String::from_utf8(output.stdout).unwrap(), "libvirt");
        (output.status.code(), found)
    };
    let (code, found) = ask("9.0.0");
    assert_eq!((code, found.len()), (Some(0), 1), "{found:?}");
    assert_eq!(found[0].0, "warning");
    for says in ["libvirt 9.0.0 forgets", "attach disks with --config"] {
        assert!(found[0].1.contains(says), "{says} is not in {found:?}");
    }
    let (_, found) = ask("11.3.0");
    assert_eq!(found[0].0, "ok", "{found:?}");
}

#[test]
fn what_is_wrong_with_the_limits_is_a_problem() {
    let program = cleave_tests::program_path();
    let line = format!("ulimit -n 100; {} doctor --json", program.display());
    let output = Command::new("sh").args(["-c", &line]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let found = findings(&String::from_utf8(output.stdout).unwrap(), "open files");
    assert_eq!(found[0].0, "problem");
    assert!(found[0].1.contains("LimitNOFILE="), "{found:?}");
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "cleave: 1 problem was found\n"
    );
}

#[test]
fn a_missing_folder_and_a_missing_image_are_named() {
    let scratch = Scratch::in_memory();
    let folder = scratch.join("none");
    for (option, path, says) in [
        (
            "--socket-path",
            folder.join("socket"),
            format!("{} does not exist", folder.display()),
        ),
        (
            "--socket-path",
            scratch.join("none"),
            format!("{} does not exist: start", folder.display()),
        ),
        (
            "--disk",
            folder.join("image"),
            format!("{} does not exist", folder.display()),
        ),
    ] {
        let (code, found) = ask(option, &path, &["--user", "0"]);
        // As root every folder can be entered.
        let (level, line) = &found[0];
        if is_root() || option == "--disk" {
            assert_eq!((code, level.as_str()), (Some(1), "problem"), "{found:?}");
            assert!(line.contains(&says), "{says} is not in {line}");
        }
    }
}

#[test]
fn a_socket_that_the_vmm_may_not_use_is_a_problem_until_it_may() {
    let scratch = Scratch::in_memory();
    let socket = scratch.join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    allow(&socket, 0o600);
    allow(scratch.path(), 0o700);
    let ask = || ask("--socket-path", &socket, &["--user", NOBODY]);
    let (code, found) = ask();
    assert_eq!((code, found[0].0.as_str()), (Some(1), "problem"));
    let folder = format!("may not enter {} (mode 0700", scratch.path().display());
    assert!(found[0].1.contains(&folder), "{found:?}");
    allow(scratch.path(), 0o755);
    let (_, found) = ask();
    let file = format!("may not write to {} (mode 0600", socket.display());
    assert!(found[0].1.contains(&file), "{found:?}");
    allow(&socket, 0o666);
    let (code, found) = ask();
    assert_eq!((code, found[0].0.as_str()), (Some(0), "ok"), "{found:?}");
    assert!(found[1].1.starts_with("a program listens"), "{found:?}");
    drop(listener);
    // A program that another test starts at this moment has the listener until it is executed.
    assert!(wait_until(|| ask().1[1].0 == "warning"));
}

#[test]
fn an_image_that_every_user_may_read_is_warned_of() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    for (folder, mode, expected) in [
        (0o755, 0o644, true),
        (0o711, 0o604, true),
        (0o755, 0o660, false),
        (0o700, 0o644, false),
    ] {
        allow(scratch.path(), folder);
        allow(&image, mode);
        let (code, found) = ask("--disk", &image, &[]);
        let remedy = format!("chmod o= '{}'", image.display());
        let is_it =
            |(level, line): &(String, String)| level == "warning" && line.ends_with(&remedy);
        assert_eq!(code, Some(0), "{found:?}");
        assert_eq!(
            found.iter().any(is_it),
            expected,
            "{folder:o} {mode:o} {found:?}"
        );
    }
}

#[test]
fn an_image_in_use_is_a_problem_that_names_the_process() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    let (code, found) = ask("--disk", &image, &[]);
    assert_eq!(code, Some(0), "{found:?}");
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    let (code, found) = ask("--disk", &image, &[]);
    assert_eq!(code, Some(1), "{found:?}");
    let held = format!(" [{}])", daemon.pid());
    let is_named = |(level, line): &(String, String)| {
        level == "problem" && line.contains("in use by another cleave (") && line.contains(&held)
    };
    assert!(found.iter().any(is_named), "{held} is not in {found:?}");
    daemon.finish();
    // A reader without locks is not a problem, but worth knowing.
    let _reader = std::fs::File::open(&image).unwrap();
    let (code, found) = ask("--disk", &image, &[]);
    let own = format!("[{}]", std::process::id());
    assert_eq!(code, Some(0), "{found:?}");
    let is_named = |(level, line): &(String, String)| level == "warning" && line.contains(&own);
    assert!(found.iter().any(is_named), "{found:?}");
}

#[test]
fn a_disk_that_is_served_at_the_socket_in_question_is_well() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    let socket = daemon.socket().to_str().unwrap();
    let (code, found) = ask("--disk", &image, &["--socket-path", socket, "--user", "0"]);
    assert_eq!(code, Some(0), "{found:?}");
    let says = format!("cleave [{}] serves it at {socket}", daemon.pid());
    let is_served = |(level, line): &(String, String)| level == "ok" && line.starts_with(&says);
    assert!(found.iter().any(is_served), "{says:?} is not in {found:?}");
    // Any other process that has it open is worth knowing.
    let _reader = std::fs::File::open(&image).unwrap();
    let (code, found) = ask("--disk", &image, &["--socket-path", socket, "--user", "0"]);
    let own = format!("[{}]", std::process::id());
    assert_eq!(code, Some(0), "{found:?}");
    let is_named = |(level, line): &(String, String)| level == "warning" && line.contains(&own);
    assert!(found.iter().any(is_named), "{found:?}");
}

#[test]
fn partitions_in_blocks_of_another_size_are_named() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    let is_named =
        |(level, line): &(String, String)| level == "warning" && line.contains("--block-size 4096");
    let (code, found) = ask("--disk", &image, &["--user", "0"]);
    assert!(code == Some(0) && !found.iter().any(is_named), "{found:?}");
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.write_all_at(b"EFI PART", 4096).unwrap();
    let (code, found) = ask("--disk", &image, &["--user", "0"]);
    assert!(code == Some(0) && found.iter().any(is_named), "{found:?}");
}

#[test]
fn a_disk_of_a_node_is_well_at_its_own_socket_only() {
    let node = Node::start();
    let scratch = Scratch::new();
    let images = ["vm1", "vm2"].map(|id| {
        let image = scratch.image(id, 1 << 20);
        node.add(id, &json!({ "disk": [image] }));
        image
    });
    let socket = node.socket("vm1");
    let socket = socket.to_str().unwrap();
    let ask = |image| ask("--disk", image, &["--socket-path", socket, "--user", "0"]);
    let (code, found) = ask(&images[0]);
    assert_eq!(code, Some(0), "{found:?}");
    let (code, found) = ask(&images[1]);
    assert_eq!(code, Some(1), "{found:?}");
    let is_refused = |(level, line): &(String, String)| {
        level == "problem" && line.contains("in use by another cleave")
    };
    assert!(found.iter().any(is_refused), "{found:?}");
}

#[test]
fn an_image_that_the_unit_may_not_write_to_is_named() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    allow(&image, 0o600);
    // In place of systemctl, for the unit of a single disk, which is confined, and that of a node, which is not.
    let script = "#!/bin/sh\necho LoadState=loaded\n\
                  case $4 in cleave@*) echo ProtectSystem=strict ;; esac\necho PrivateTmp=no\n";
    install(&scratch, "systemctl", script);
    let ask = |more: &[&str]| {
        let path = format!(
            "{}:{}",
            scratch.path().display(),
            std::env::var("PATH").unwrap()
        );
        let mut command = Command::new(cleave_tests::program_path());
        command.args(["doctor", "--json", "--disk"]).arg(&image);
        let output = command.args(more).env("PATH", path).output().unwrap();
        findings(&String::from_utf8(output.stdout).unwrap(), "disk")
    };
    let found = ask(&[]);
    let edit = format!(
        "the unit cleave@NAME may only read {}: if it is to serve this disk, systemctl edit cleave@, [Service] ReadWritePaths={}",
        image.display(),
        scratch.path().display()
    );
    let warning = ("warning".to_owned(), edit);
    assert!(found.contains(&warning), "{warning:?} is not in {found:?}");
    // A disk without a file of settings is one of the node.
    let found = ask(&["--socket-path", "/run/cleave/no-such-disk/disk.sock"]);
    assert!(found.iter().all(|(level, _)| level == "ok"), "{found:?}");
    let found = ask(&["--socket-path", "/nowhere/disk.sock"]);
    assert!(found.iter().all(|(level, _)| level == "ok"), "{found:?}");
}

#[test]
fn an_image_that_the_user_of_the_unit_may_not_open_is_a_problem() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    let ask = |properties: &str| {
        // In place of systemctl.
        let script =
            format!("#!/bin/sh\nprintf 'LoadState=loaded\\nPrivateTmp=no\\n{properties}'\n");
        install(&scratch, "systemctl", &script);
        let path = std::env::var("PATH").unwrap();
        let socket = ["--socket-path", "/run/cleave/no-such-disk/disk.sock"];
        let output = Command::new(cleave_tests::program_path())
            .args(["doctor", "--json"])
            .args(socket)
            .arg("--disk")
            .arg(&image)
            .env("PATH", format!("{}:{path}", scratch.path().display()))
            .output()
            .unwrap();
        findings(&String::from_utf8(output.stdout).unwrap(), "disk")
    };
    allow(scratch.path(), 0o755);
    allow(&image, 0o600);
    let bound = format!("User={NOBODY}\\nCapabilityBoundingSet=\\n");
    let found = ask(&bound);
    let says = "the unit cleave, which runs as ";
    let is_named = |(level, line): &(String, String)| {
        level == "problem" && line.starts_with(says) && line.contains("chown ")
    };
    assert!(found.iter().any(is_named), "{says:?} is not in {found:?}");
    allow(&image, 0o666);
    let found = ask(&bound);
    assert!(
        found.iter().all(|(level, _)| level != "problem"),
        "{found:?}"
    );
    // Modes do not bind it.
    allow(&image, 0o600);
    let found = ask("User=\\nCapabilityBoundingSet=cap_chown cap_dac_override\\n");
    assert!(found.iter().all(|(level, _)| level == "ok"), "{found:?}");
}

#[test]
fn a_listener_whose_socket_was_renamed_is_found() {
    let node = Node::start();
    let scratch = Scratch::new();
    node.add("vm1", &json!({ "disk": [scratch.image("vm1", 1 << 20)] }));
    let socket = node.socket("vm1");
    let (code, found) = ask("--socket-path", &socket, &["--user", "0"]);
    assert_eq!(code, Some(0), "{found:?}");
    assert!(found[1].1.starts_with("a program listens"), "{found:?}");
    // A file that took the name of a socket that is listened on has no listener itself.
    let listener = UnixListener::bind(scratch.join("old")).unwrap();
    std::fs::rename(scratch.join("old"), scratch.join("moved")).unwrap();
    drop(UnixListener::bind(scratch.join("old")).unwrap());
    let (_, found) = ask("--socket-path", &scratch.join("moved"), &["--user", "0"]);
    assert!(found[1].1.starts_with("a program listens"), "{found:?}");
    assert!(wait_until(|| {
        ask("--socket-path", &scratch.join("old"), &["--user", "0"]).1[1].0 == "warning"
    }));
    drop(listener);
}

#[test]
fn a_server_is_asked_for_its_disk() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(64 << 20));
    let ask = |uri: &str| ask("--disk", Path::new(uri), &[]);
    let (code, found) = ask(&server.uri(""));
    assert_eq!(code, Some(0), "{found:?}");
    assert!(found[0].1.contains("its size is 64M"), "{found:?}");
    let (code, found) = ask("nbd+unix:///?socket=/nowhere");
    assert_eq!(code, Some(1), "{found:?}");
    assert!(
        found[0].1.contains("check that the server runs"),
        "{found:?}"
    );
}

#[test]
fn a_folder_that_the_user_may_not_enter_is_named() {
    if !is_root() {
        return ignored("not root");
    }
    let scratch = Scratch::new();
    allow(scratch.path(), 0o755);
    let closed = scratch.join("closed");
    create_dir(&closed).unwrap();
    std::fs::File::create(closed.join("image"))
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    allow(&closed, 0o700);
    let program = program_copy(&scratch);
    let image = closed.join("image");
    let ask = || {
        let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
        let output = Command::new("setpriv")
            .args(nobody)
            .arg(&program)
            .args(["doctor", "--json", "--disk"])
            .arg(&image)
            .output()
            .unwrap();
        let found = findings(&String::from_utf8(output.stdout).unwrap(), "disk");
        (output.status.code(), found)
    };
    let (code, found) = ask();
    let says = format!("may not enter {}", closed.display());
    assert_eq!((code, found.len()), (Some(1), 1), "{found:?}");
    assert!(found[0].1.contains(&says), "{says} is not in {found:?}");
    allow(&closed, 0o755);
    let (code, found) = ask();
    assert_eq!(
        (code, found[0].0.as_str()),
        (Some(1), "problem"),
        "{found:?}"
    );
    assert!(found[0].1.contains("may not read and write"), "{found:?}");
    allow(&image, 0o666);
    assert_eq!(ask().0, Some(0));
}

#[test]
fn a_user_that_does_not_exist_is_bad_input() {
    let ended = run_to_exit(&["doctor", "--user", "no-such-user"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""));
    assert!(ended.stderr.contains("no such user"), "{}", ended.stderr);
}
