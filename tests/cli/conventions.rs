//! The conventions of vhost-user programs, and what `--help` and the pages show.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};

use cleave_client::{Client, Frontend};
use cleave_tests::{
    Daemon, Scratch, TIMEOUT, closes_within, exercise, flood, run_to_exit, small, wait_until,
};
use rustix::process::Signal;

use crate::open;

#[test]
fn help_and_version_are_printed() {
    for args in [
        &["--help"][..],
        &["serve", "--help"],
        &["help", "serve"],
        &["--version"],
        &["-h"],
    ] {
        let ended = run_to_exit(args);
        assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.stderr);
        assert!(
            !ended.stdout.is_empty() && ended.stderr.is_empty(),
            "{args:?}"
        );
    }
    let help = run_to_exit(&["serve", "--help"]).stdout;
    for option in [
        "--socket-path",
        "--fd",
        "--disk",
        "--queues",
        "--queue-size",
        "--workers",
        "--cpus",
        "--read-only",
        "--serial",
        "--face",
        "--block-size",
        "--cache",
        "--direct",
        "--completion",
        "--discard",
        "--log",
        "--once",
    ] {
        assert!(help.contains(option), "{option} is not in the help");
    }
}

#[test]
fn pages_and_completions_are_written() {
    let scratch = Scratch::in_memory();
    let ended = run_to_exit(&["--write-pages", scratch.path().to_str().unwrap()]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let read = |name: &str| std::fs::read_to_string(scratch.join(name)).unwrap();
    for (name, holds) in [
        ("cleave.1", "cleave\\-serve(1)"),
        ("cleave-serve.1", "\\-\\-stop\\-deadline"),
        ("cleave-stripe-create.1", "\\-\\-chunk"),
        ("cleave-doctor.1", ".SH EXAMPLES"),
        ("cleave-upgrade.1", "\\-\\-check"),
        ("cleave.bash", "--socket-path"),
        ("_cleave", "#compdef cleave"),
        ("cleave.fish", "complete -c cleave"),
    ] {
        assert!(read(name).contains(holds), "{holds} is not in {name}");
    }
    assert!(!read("cleave.1").contains("write\\-pages"), "it is hidden");
    assert!(!scratch.join("cleave-help.1").exists());
}

#[test]
fn capabilities_are_those_of_a_block_program() {
    // Other options are ignored beside it (vhost-user "Backend program conventions").
    for args in [
        &["--print-capabilities"][..],
        &["--print-capabilities", "--socket-path", "/nowhere/x"],
    ] {
        let ended = run_to_exit(args);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let json: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(json["type"], "block");
        let features: Vec<_> = json["features"].as_array().unwrap().iter().collect();
        assert!(
            features.iter().any(|feature| *feature == "read-only"),
            "{json}"
        );
        assert!(
            features.iter().any(|feature| *feature == "blk-file"),
            "{json}"
        );
    }
}

#[test]
fn the_conventions_work_without_a_subcommand() {
    for read_only in [false, true] {
        let scratch = Scratch::new();
        let image = scratch.image("disk", 64 << 20);
        let socket = scratch.join("socket");
        let mut args = vec![
            "--socket-path",
            socket.to_str().unwrap(),
            "--blk-file",
            image.to_str().unwrap(),
        ];
        if read_only {
            args.push("--read-only");
        }
        let args: Vec<String> = args.into_iter().map(str::to_owned).collect();
        let daemon = Daemon::with_args(scratch, socket, &args);
        let mut client = daemon.open(&small(2));
        assert_eq!(
            client.offered() & cleave_blk::spec::feature::RO != 0,
            read_only
        );
        exercise(&mut client).unwrap();
        drop(client);
        daemon.finish();
    }
}

#[test]
fn an_inherited_listening_socket() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 64 << 20);
    let disk = image.to_str().unwrap();
    for args in [
        vec!["serve", "--fd", "0", "--disk", disk],
        vec!["--fd", "0", "--blk-file", disk],
    ] {
        let path = scratch.join("inherited");
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let daemon = Daemon::with_stdin(OwnedFd::from(listener), &args);
        for _ in 0..3 {
            let mut client = open(&path);
            exercise(&mut client).unwrap();
        }
        daemon.finish();
        assert!(path.exists(), "the socket file is not ours to remove");
    }
}

#[test]
fn an_inherited_connected_socket_ends_with_its_frontend() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 64 << 20);
    let disk = image.to_str().unwrap();
    for args in [
        vec!["serve", "--fd", "0", "--disk", disk],
        vec!["--fd", "0", "--blk-file", disk],
    ] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut daemon = Daemon::with_stdin(OwnedFd::from(theirs), &args);
        let frontend = Frontend::new(ours, TIMEOUT).unwrap();
        let mut client = Client::start(frontend, &small(2)).unwrap();
        exercise(&mut client).unwrap();
        daemon.alive().unwrap();
        drop(client);
        let (code, _) = daemon.wait().expect("it goes with its frontend");
        assert_eq!(code, Some(0), "{}", daemon.log());
    }
}

#[test]
fn an_inherited_connection_stays_open_until_everything_is_answered() {
    const READS: u16 = 20;
    let (ours, theirs) = UnixStream::pair().unwrap();
    let slow = "model:custom,size=64M,channels=1,window=1,page=64K,read_us=20000,jitter=0";
    let mut args = vec!["serve", "--fd", "0", "--disk", slow];
    args.extend(["--stop-deadline", "60"]);
    let mut daemon = Daemon::with_stdin(OwnedFd::from(theirs), &args);
    let frontend = Frontend::new(ours, TIMEOUT).unwrap();
    let mut client = Client::start(frontend, &small(1)).unwrap();
    exercise(&mut client).unwrap();
    let queue = client.queue(0);
    let before = queue.ring().used_index();
    flood(queue, u64::from(READS), 64 << 10);
    wait_until(|| client.queue(0).ring().used_index() != before);
    daemon.signal(Signal::TERM);
    assert!(closes_within(client.frontend().socket(), TIMEOUT));
    let answered = client.queue(0).ring().used_index().wrapping_sub(before);
    assert_eq!(answered, READS, "{}", daemon.log());
    let (code, _) = daemon.wait().expect("it ends");
    assert_eq!(code, Some(0), "{}", daemon.log());
}
