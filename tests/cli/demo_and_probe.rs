//! `cleave demo` and `cleave probe` from outside: what they print, what they write, what they leave behind.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use cleave_tests::{Daemon, Exited, Scratch, exercise, program_path, run_to_exit, small};
use rustix::process::Signal;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// An image that holds data everywhere.
fn fill(image: &Path) {
    fs::write(image, vec![0x5a; 8 << 20]).unwrap();
}

/// Asserts that it ended as bad input does; what it said.
fn refusal(ended: Exited) -> String {
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    ended.stderr
}

#[test]
fn a_demonstration_verifies_prints_and_cleans_up() {
    // Its daemon has five seconds to listen there.
    let scratch = Scratch::in_memory();
    let output = Command::new(program_path())
        .args(["demo", "--exit", "--seconds", "1", "--size", "16M", "--dir"])
        .arg(scratch.path())
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{told}");
    for part in [
        "read  4K     1",
        "read  4K    32",
        "p99.9",
        "verified before and after",
    ] {
        assert!(table.contains(part), "no {part:?} in {table}");
    }
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

#[test]
fn an_interrupted_demonstration_cleans_up() {
    // The last is a terminal that closes.
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let scratch = Scratch::in_memory();
        let line = ["demo", "--size", "16M", "--dir", text(scratch.path())];
        let mut demo = Daemon::without_socket(&line);
        assert!(demo.log_has("filled with a pattern"));
        demo.signal(signal);
        let (code, _) = demo.wait().expect("it ends");
        assert_eq!(code, Some(1), "{signal:?}");
        assert!(demo.log().contains("interrupted"), "{}", demo.log());
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_probe_that_is_interrupted_leaves_a_partial_result() {
    let scratch = Scratch::new();
    let image = scratch.join("image");
    fill(&image);
    let [json, profile] = ["json", "profile"].map(|name| scratch.join(name));
    let mut probe = Daemon::without_socket(&[
        "probe",
        text(&image),
        "--seconds",
        "60",
        "--json",
        text(&json),
        "--profile",
        text(&profile),
    ]);
    // The first tenth of the points is measured; most of the minute is left.
    assert!(probe.log_has("points"));
    probe.signal(Signal::INT);
    let (code, took) = probe.wait().expect("it ends");
    assert_eq!(code, Some(1));
    assert!(took < Duration::from_secs(5), "{took:?}");
    let log = probe.log();
    for part in ["cleave: interrupted", "512 KiB outstanding", "partial"] {
        assert!(log.contains(part), "no {part:?} in {log}");
    }
    let json = fs::read_to_string(&json).unwrap();
    assert!(json.contains("\"partial\": true"), "{json}");
    assert_eq!(
        fs::read_dir(scratch.path()).unwrap().count(),
        3,
        "the image and the two results"
    );
    // A partial profile is one that can be served from.
    let daemon = Daemon::serve(&["--disk", text(&image), "--profile", text(&profile)]);
    assert!(daemon.log_has("the profile is partial"));
    let in_force = format!("profile {} is in force", text(&profile));
    assert!(daemon.log_has(&in_force), "{}", daemon.log());
    exercise(&mut daemon.open(&small(1))).unwrap();
    daemon.finish();
}

#[test]
fn a_probe_refuses_what_would_mislead_or_destroy() {
    let scratch = Scratch::new();
    let image = scratch.image("image", 8 << 20);
    let probe = |more: &[&str]| refusal(run_to_exit(&[&["probe", text(&image)], more].concat()));
    let thin = probe(&[]);
    assert!(
        thin.contains("only 0 %") && thin.contains("--allow-thin"),
        "{thin}"
    );
    fill(&image);
    let before = fs::read(&image).unwrap();
    let data = probe(&["--writes"]);
    assert!(data.contains("--destructive"), "{data}");
    for option in ["--json", "--profile"] {
        let itself = probe(&[option, text(&image)]);
        assert!(itself.contains("the disk itself"), "{itself}");
    }
    let daemon = Daemon::serve(&["--disk", text(&image)]);
    let busy = probe(&[]);
    let says = "in use by another cleave; stop the daemon that serves it, or probe a copy";
    assert!(busy.contains(says), "{busy}");
    daemon.finish();
    assert!(
        fs::read(&image).unwrap() == before,
        "the disk was written to"
    );
}

#[test]
fn a_probe_prints_json_alone_and_a_profile_is_for_its_disk_alone() {
    let scratch = Scratch::new();
    let [profile, socket] = ["profile", "socket"].map(|name| scratch.join(name));
    let (profile, socket) = (text(&profile), text(&socket));
    let image = scratch.image("image", 8 << 20);
    let ended = run_to_exit(&[
        "probe",
        "ram:1M",
        "--seconds",
        "1",
        "--json",
        "-",
        "--profile",
        profile,
    ]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let json = ended.stdout;
    assert!(json.starts_with("{\n") && json.ends_with("}\n"), "{json}");
    let serve = ["serve", "--socket-path", socket, "--disk", text(&image)];
    // It may be there later.
    let ended = run_to_exit(&[&serve, &["--profile", "/none/p"][..]].concat());
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("/none/p"), "{}", ended.stderr);
    for (more, part) in [
        (&["--profile", profile][..], "is not of disk"),
        (&["--profile", text(&image)], "too long"),
        (&["--split", "off", "--profile", profile], "leave one"),
    ] {
        let told = refusal(run_to_exit(&[&serve, more].concat()));
        assert!(told.contains(part), "{told}");
    }
}

/// As for `cleave serve`: the same command may succeed later.
#[test]
fn a_server_that_is_away_is_no_bad_input() {
    let scratch = Scratch::new();
    let uri = format!("nbd+unix:///?socket={}", text(&scratch.join("none")));
    let ended = run_to_exit(&["probe", &uri]);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("check that the server runs"),
        "{}",
        ended.stderr
    );
}
