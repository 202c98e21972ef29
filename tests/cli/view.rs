//! `cleave stats` and `cleave top`, as somebody at a terminal or a script would use them.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleave_client::Workload;
use cleave_tests::{
    Daemon, Exited, Node, Stopwatch, TIMEOUT, ignored, program_path, run_to_exit, small, wait_until,
};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Action, Winsize, tcflow, tcgetattr, tcsetwinsize};
use serde_json::json;

fn some_load(daemon: &Daemon) {
    let mut client = daemon.open(&small(1));
    for _ in 0..50 {
        client.queue(0).write(0, &[7; 4096]).unwrap();
        client.queue(0).read(0, &mut [0; 4096]).unwrap();
    }
}

#[test]
fn stats_prints_once() {
    let (one, control_one) = Daemon::serve_with_control(&["--disk", "ram:16M", "--serial", "one"]);
    let (two, control_two) = Daemon::serve_with_control(&["--disk", "null:16M", "--serial", "two"]);
    some_load(&one);
    let sockets = [control_one.to_str().unwrap(), control_two.to_str().unwrap()];
    let words = ["stats", sockets[0], sockets[1]];
    let text = run_to_exit(&words);
    assert_eq!(text.code, Some(0), "{}", text.stderr);
    assert!(text.stdout.contains("one: ram:16M") && text.stdout.contains("two: null:16M"));
    assert!(
        text.stdout.contains("write 4K               50"),
        "{}",
        text.stdout
    );
    let json = run_to_exit(&[&words[..], &["--json"]].concat());
    let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(json[0]["totals"]["writes"], 50);
    assert_eq!(json[1]["id"], "two");
    two.finish();
    // The one that is there is shown, and the one that is not is an error.
    let text = run_to_exit(&words);
    assert_eq!(text.code, Some(1));
    assert!(text.stdout.contains("one: ram:16M"));
    assert!(text.stderr.contains("no such socket") && text.stderr.contains(sockets[1]));
    one.finish();
}

/// Starts a node with the disks `a`, whose image is gone, and `b`, which is served.
fn half_served() -> Node {
    let mut node = Node::start();
    let image = node.daemon.scratch().image("a.img", 1 << 20);
    node.add("a", &json!({"disk": [image]}));
    node.add("b", &json!({"disk": ["ram:1M"]}));
    node.daemon.die().unwrap();
    std::fs::remove_file(&image).unwrap();
    let next = node.daemon.start_again().unwrap();
    node.daemon.abandon();
    let node = Node { daemon: next };
    assert!(wait_until(
        || [node.state("a"), node.state("b")] == ["failed", "serving"]
    ));
    node
}

/// A disk that is not served holds nothing, and says nothing.
#[test]
fn held_requests_of_a_node_are_resumed_although_a_disk_of_it_has_failed() {
    let node = half_served();
    let control = node.daemon.socket().to_str().unwrap();
    let said = run_to_exit(&["disk", "resume", "--all", "--control", control]);
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    assert_eq!(said.stdout, "b: no request was held\n");
    let said = run_to_exit(&["disk", "flush", "--control", control]);
    assert_eq!(said.code, Some(2), "{}", said.stderr);
    assert!(said.stderr.contains(" has 2 disks: give the ID of one"));
    node.daemon.finish();
}

/// A disk that has failed is tried again after 1, 2, 4 … s, and is opening for a moment then. What was asked in that moment is asked
/// again.
fn asked<T>(ask: impl Fn() -> T, is_failed: impl Fn(&T) -> bool) -> T {
    let mut said = ask();
    wait_until(|| {
        let is_right = is_failed(&said);
        if !is_right {
            said = ask();
        }
        is_right
    });
    said
}

/// Its guest has no disk, and somebody has to learn that.
#[test]
fn a_disk_that_is_not_served_is_shown_as_such() {
    let node = half_served();
    let failed = "cleave_disk_state{disk=\"a\",state=\"failed\"} 1\n";
    let metrics = || node.ask("GET", "/metrics", "").body;
    let metrics = asked(metrics, |text| text.contains(failed));
    for line in [
        failed,
        "cleave_disk_state{disk=\"b\",state=\"serving\"} 1\n",
        "# TYPE cleave_disk_state gauge\n",
    ] {
        assert_eq!(metrics.matches(line).count(), 1, "{line}{metrics}");
    }
    let control = node.daemon.socket().to_str().unwrap();
    let is_failed = |said: &Exited| said.code == Some(1);
    let stats = asked(|| run_to_exit(&["stats", control]), is_failed);
    assert_eq!(stats.code, Some(1), "{}", stats.stdout);
    assert!(
        stats.stdout.starts_with("a: ") && stats.stdout.contains("\n  failed: disk "),
        "{}",
        stats.stdout
    );
    assert!(stats.stdout.contains("b: ram:1M\n"), "{}", stats.stdout);
    assert_eq!(stats.stderr, "cleave: a is not served\n");
    let stats = asked(|| run_to_exit(&["stats", control, "--json"]), is_failed);
    assert_eq!(stats.code, Some(1));
    let stats: serde_json::Value = serde_json::from_str(&stats.stdout).unwrap();
    assert_eq!(
        (&stats[0]["state"], &stats[1]["store"]["kind"]),
        (&json!("failed"), &json!("ram"))
    );
    let mut command = top(&[node.daemon.socket()]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // In one picture or another.
    for text in [": 2 disks, 1 not served; CPU ", "\na: failed: disk "] {
        read_until(child.stdout.as_mut().unwrap(), text, 1);
    }
    drop(child.stdin.take());
    assert_eq!(ends(&mut child), Some(0));
    node.daemon.finish();
}

#[test]
fn the_socket_of_a_node_is_the_default() {
    for command in ["top", "stats"] {
        let help = run_to_exit(&[command, "--help"]).stdout;
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            help.contains("without any, /run/cleave/control.sock"),
            "{command}: {help}"
        );
    }
    if std::path::Path::new("/run/cleave/control.sock").exists() {
        return ignored("a node runs here");
    }
    for command in [&["stats"][..], &["disk", "resume"]] {
        let ended = run_to_exit(command);
        assert_eq!(ended.code, Some(1), "{command:?}: {}", ended.stderr);
        let named = "control socket /run/cleave/control.sock: no such socket";
        assert!(
            ended.stderr.contains(named),
            "{command:?}: {}",
            ended.stderr
        );
    }
}

/// The more vrings a guest has used, the longer is the report of its disk.
#[test]
fn stats_shows_a_node_whatever_its_disks_have_to_tell() {
    let node = Node::start();
    let (disks, queues) = (16, 128);
    let body = json!({"disk": ["null:16M"], "queues": queues, "workers": 1, "persistent": false});
    for at in 0..disks {
        let id = format!("d{at}");
        if node.put(&id, &body).status == 507 {
            return ignored("needs more open files");
        }
        let mut client = node.open(&id, &small(queues));
        for queue in client.queues() {
            for kib in [4, 16, 64, 256, 512] {
                let mut data = vec![0; kib << 10];
                queue.write(0, &data).unwrap();
                queue.read(0, &mut data).unwrap();
            }
        }
    }
    let control = node.daemon.socket().to_str().unwrap();
    let mut stats = Command::new(program_path());
    let said = stats.args(["stats", control, "--json"]).output().unwrap();
    let why = String::from_utf8_lossy(&said.stderr);
    assert!(said.status.success(), "{why}");
    println!("{} bytes", said.stdout.len());
    let said: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!(said.as_array().unwrap().len(), disks);
    node.daemon.finish();
}

fn top(sockets: &[&std::path::Path]) -> Command {
    let mut command = Command::new(program_path());
    command.args(["top", "--interval", "0.1"]);
    for socket in sockets {
        command.arg(socket);
    }
    command
}

fn ends(child: &mut Child) -> Option<i32> {
    let mut status = None;
    if wait_until(|| {
        status = child.try_wait().unwrap();
        status.is_some()
    }) {
        return status.and_then(|status| status.code());
    }
    let _ = child.kill();
    panic!("top did not end");
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), signal).unwrap();
}

/// Reads until a text has come so many times; all that was read.
fn read_until(from: &mut impl std::io::Read, text: &str, times: usize) -> String {
    let mut read = String::new();
    let mut piece = [0; 4096];
    let end = Instant::now() + TIMEOUT;
    while read.matches(text).count() < times {
        assert!(Instant::now() < end, "{read}");
        match from.read(&mut piece) {
            Ok(0) | Err(_) => panic!("it ended: {read}"),
            Ok(n) => read.push_str(&String::from_utf8_lossy(&piece[..n])),
        }
    }
    read
}

#[test]
fn top_prints_plain_blocks_where_there_is_no_terminal() {
    let (daemon, control) = Daemon::serve_with_control(&["--disk", "null:16M", "--serial", "disk"]);
    type Quit = fn(&mut Child);
    let ways: [(&str, Quit); 4] = [
        ("end of the input", |child| drop(child.stdin.take())),
        ("q", |child| {
            child.stdin.as_mut().unwrap().write_all(b"xq").unwrap()
        }),
        ("SIGINT", |child| signal(child, Signal::INT)),
        ("SIGTERM", |child| signal(child, Signal::TERM)),
    ];
    for (name, quit) in ways {
        let mut command = top(&[&control]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let text = read_until(child.stdout.as_mut().unwrap(), "disk             read/s", 3);
        assert!(!text.contains('\x1b'), "{text:?}");
        assert!(
            text.contains("\ndisk                  0        0"),
            "{text}"
        );
        quit(&mut child);
        assert_eq!(ends(&mut child), Some(0), "{name}");
    }
    // Nobody reads any more: no complaint.
    let mut command = top(&[&control]);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    read_until(child.stdout.as_mut().unwrap(), "read/s", 1);
    drop(child.stdout.take());
    assert_eq!(ends(&mut child), Some(0));
    let mut complaint = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut complaint)
        .unwrap();
    assert_eq!(complaint, "");
    daemon.finish();
}

/// A terminal of eighty columns: our end and that of a program.
fn terminal() -> (OwnedFd, OwnedFd) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = openpt(flags).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let theirs = rustix::fs::open(name.as_c_str(), flags, Mode::empty()).unwrap();
    let size = Winsize {
        ws_row: 24,
        ws_col: 80,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&theirs, size).unwrap();
    (ours, theirs)
}

#[test]
fn top_draws_on_a_terminal_and_gives_it_back() {
    let (one, control_one) = Daemon::serve_with_control(&["--disk", "ram:16M", "--serial", "one"]);
    let (two, control_two) = Daemon::serve_with_control(&["--disk", "null:16M", "--serial", "two"]);
    type Quit<'a> = &'a dyn Fn(&mut std::fs::File, &Child);
    let type_in = |bytes: &'static [u8]| {
        move |screen: &mut std::fs::File, _: &Child| screen.write_all(bytes).unwrap()
    };
    let ways: [(&str, Quit<'_>); 6] = [
        ("q", &type_in(b"q")),
        ("Ctrl-C", &type_in(b"\x03")),
        ("Ctrl-D", &type_in(b"\x04")),
        ("SIGTERM", &|_, child| signal(child, Signal::TERM)),
        ("SIGHUP", &|_, child| signal(child, Signal::HUP)),
        ("SIGQUIT", &|_, child| signal(child, Signal::QUIT)),
    ];
    for (name, quit) in ways {
        let (ours, theirs) = terminal();
        let before = tcgetattr(&theirs).unwrap();
        let copy = || theirs.as_fd().try_clone_to_owned().unwrap();
        let mut command = top(&[&control_one, &control_two]);
        let mut child = command.stdin(copy()).stdout(copy()).spawn().unwrap();
        let mut screen = std::fs::File::from(ours);
        some_load(&one);
        let drawn = read_until(&mut screen, "\x1b[J", 3);
        assert!(
            drawn.contains("\x1b[?1049h") && drawn.contains("one "),
            "{drawn:?}"
        );
        let raw = tcgetattr(&theirs).unwrap();
        assert_ne!(raw.local_modes, before.local_modes, "{name}");
        quit(&mut screen, &child);
        let last = read_until(&mut screen, "\x1b[?25h\x1b[?1049l", 1);
        // Lines end at the edge, whatever is in a name, and only as long as we draw.
        assert!(
            drawn.contains("\x1b[?7l") && last.contains("\x1b[?7h"),
            "{name}"
        );
        assert_eq!(ends(&mut child), Some(0), "{name}");
        let after = tcgetattr(&theirs).unwrap();
        assert_eq!(after.local_modes, before.local_modes, "{name}");
    }
    two.finish();
    one.finish();
}

/// Keys are answered although the disks are busy and there are more than fit.
#[test]
fn top_sorts_selects_and_opens_the_disks_of_a_busy_node() {
    let node = Node::start();
    for at in 0..29 {
        let body = json!({"disk": ["null:16M"], "queues": 1, "persistent": false});
        node.add(&format!("d{at:02}"), &body);
    }
    // Limited, for the sake of the machine.
    let body = json!({"disk": ["null:16M"], "persistent": false, "limits": {"iops-total": 5000}});
    node.add("z-busy", &body);
    let done = AtomicBool::new(false);
    let mut client = node.open("z-busy", &small(1));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let load = Workload {
                abort: Some(&done),
                ..Workload::reads(4096, 4, 16 << 20, TIMEOUT)
            };
            client.queue(0).run(&load, |_| {}).unwrap();
        });
        let (ours, theirs) = terminal();
        let copy = || theirs.as_fd().try_clone_to_owned().unwrap();
        let mut command = top(&[node.daemon.socket()]);
        let mut child = command.stdin(copy()).stdout(copy()).spawn().unwrap();
        let mut screen = std::fs::File::from(ours);
        let steps: [(&[u8], &str); 9] = [
            (b"", "1 to 21 of 30, a line each"),
            (b"\x1b[F", "10 to 30 of 30, a line each"),
            (b"\x1b[C", "\x1b[7mread/s\x1b[27m"),
            // Its rate is known with the second look. The terminal puts a return before each line feed.
            (b"", "CPU%\r\r\n\x1b[7mz-busy "),
            (b"\x1b[H", "\x1b[7mz-busy "),
            (b"\r", "requests by their time with the device"),
            (b"\x1b", "1 to 21 of 30, a line each"),
            (b"r", "\x1b[7mz-busy "),
            // Nothing is selected any more. Escape and a letter that are read at once would be another key.
            (b"\x1b", "\nz-busy "),
        ];
        for (typed, shown) in steps {
            screen.write_all(typed).unwrap();
            read_until(&mut screen, shown, 1);
        }
        screen.write_all(b"q").unwrap();
        read_until(&mut screen, "\x1b[?25h\x1b[?1049l", 1);
        assert_eq!(ends(&mut child), Some(0));
        done.store(true, Ordering::Relaxed);
    });
    drop(client);
    node.daemon.finish();
}

/// Neither a daemon that does not answer nor a terminal that takes nothing holds up the end.
#[test]
fn top_ends_at_once_whoever_hangs() {
    let (daemon, control) = Daemon::serve_with_control(&["--disk", "null:16M", "--serial", "disk"]);
    type Hang<'a> = &'a dyn Fn(&OwnedFd, &mut std::fs::File);
    let hangs: [(&str, Hang<'_>); 3] = [
        ("daemon", &|_, _| daemon.freeze()),
        ("Ctrl-S", &|_, screen| screen.write_all(b"\x13").unwrap()),
        ("terminal", &|theirs, _| {
            tcflow(theirs, Action::OOff).unwrap();
        }),
    ];
    type Quit<'a> = &'a dyn Fn(&mut std::fs::File, &Child);
    let ways: [(&str, Quit<'_>); 3] = [
        ("q", &|screen, _| screen.write_all(b"q").unwrap()),
        ("SIGTERM", &|_, child| signal(child, Signal::TERM)),
        ("SIGHUP", &|_, child| signal(child, Signal::HUP)),
    ];
    // Returns how long top took to end.
    let attempt = |who: &str, hang: Hang<'_>, name: &str, quit: Quit<'_>| {
        let (ours, theirs) = terminal();
        let before = tcgetattr(&theirs).unwrap();
        let copy = || theirs.as_fd().try_clone_to_owned().unwrap();
        let mut command = top(&[&control]);
        let mut child = command.stdin(copy()).stdout(copy()).spawn().unwrap();
        let mut screen = std::fs::File::from(ours);
        read_until(&mut screen, "\x1b[J", 2);
        hang(&theirs, &mut screen);
        // Longer than until it asks and draws again.
        std::thread::sleep(Duration::from_millis(300));
        let watch = Stopwatch::start();
        quit(&mut screen, &child);
        assert_eq!(ends(&mut child), Some(0), "{who}, {name}");
        let took = watch.elapsed();
        let after = tcgetattr(&theirs).unwrap();
        assert_eq!(after.local_modes, before.local_modes, "{who}, {name}");
        assert_eq!(after.input_modes, before.input_modes, "{who}, {name}");
        if who == "daemon" {
            read_until(&mut screen, "\x1b[?1049l", 1);
            daemon.signal(Signal::CONT);
        }
        took
    };
    for (who, hang) in hangs {
        for (name, quit) in ways {
            // A busy machine may hold one up. Each that waits for an answer takes 1.7 s.
            let mut attempts = (0..3).map(|_| attempt(who, hang, name, quit));
            assert!(
                attempts.any(|took| took < Duration::from_secs(1)),
                "{who}, {name}"
            );
        }
    }
    daemon.finish();
}

#[test]
fn top_copes_with_a_daemon_that_goes_and_comes_back() {
    let (mut daemon, control) =
        Daemon::serve_with_control(&["--disk", "null:16M", "--serial", "disk"]);
    let mut command = top(&[&control]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    read_until(&mut out, "\ndisk   ", 2);
    daemon.abandon();
    read_until(&mut out, "nobody listens", 2);
    let socket = daemon.scratch().join("again");
    let words = [
        "serve",
        "--disk",
        "null:16M",
        "--serial",
        "disk",
        "--socket-path",
        socket.to_str().unwrap(),
        "--control",
        control.to_str().unwrap(),
    ];
    let again = Daemon::with_args(cleave_tests::Scratch::new(), socket.clone(), &words);
    read_until(&mut out, "\ndisk   ", 2);
    again.finish();
    read_until(&mut out, "no such socket", 1);
    drop(child.stdin.take());
    assert_eq!(ends(&mut child), Some(0));
}

#[test]
fn a_socket_that_never_answers_is_not_waited_for() {
    let missing = run_to_exit(&["disk", "fail"]);
    assert_eq!(missing.code, Some(2));
    let bad = run_to_exit(&["top", "--control", "x", "--interval", "0"]);
    assert_eq!(bad.code, Some(2));
    let scratch = cleave_tests::Scratch::new();
    let silent = scratch.join("silent");
    let _listener = std::os::unix::net::UnixListener::bind(&silent).unwrap();
    let words = ["stats", "--control", silent.to_str().unwrap()];
    let watch = Stopwatch::start();
    let ended = run_to_exit(&words);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("no answer"), "{}", ended.stderr);
    let took = watch.elapsed();
    assert!(took < Duration::from_secs(6), "{took:?}");
}
