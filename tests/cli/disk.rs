//! `cleave disk`: the node's disks, from the command line.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use cleave_tests::http::get;
use cleave_tests::{
    Daemon, Exited, Node, Scratch, exercise, program_path, run_to_exit, small, wait_until,
};
use serde_json::{Value, json};

fn run(node: &Node, line: &str) -> Exited {
    run_on(node.daemon.socket(), line)
}

fn run_on(control: &Path, line: &str) -> Exited {
    let control = control.to_str().unwrap();
    let mut words = vec!["disk"];
    words.extend(line.split_whitespace());
    words.extend(["--control", control]);
    run_to_exit(&words)
}

/// Runs a command that is to succeed; what it prints.
fn done(node: &Node, line: &str) -> String {
    let ended = run(node, line);
    assert_eq!(
        (ended.code, &*ended.stderr),
        (Some(0), ""),
        "{line}: {}",
        ended.stdout
    );
    ended.stdout
}

/// Runs a command that is to be refused; the line that says why.
fn refused(node: &Node, line: &str, code: i32) -> String {
    let ended = run(node, line);
    assert_eq!(
        (ended.code, &*ended.stdout),
        (Some(code), ""),
        "{line}: {}",
        ended.stderr
    );
    assert!(
        ended.stderr.starts_with("cleave: ") && ended.stderr.lines().count() == 1,
        "{}",
        ended.stderr
    );
    ended.stderr
}

#[test]
fn a_disk_is_added_shown_changed_and_removed() {
    let node = Node::start();
    let image = node.daemon.scratch().image("a.img", 1 << 20);
    let add = format!(
        "add d1 --disk {} --queues 2 --serial a --on-error write=hold --limit iops-total=5000",
        image.display()
    );
    let socket = node.socket("d1").display().to_string();
    assert_eq!(
        done(&node, &add),
        format!("d1: added; its socket is {socket}\n")
    );
    assert!(done(&node, &add).contains("d1: is there already, with the same options"));
    let other = add.replace("--queues 2", "--queues 3");
    assert!(refused(&node, &other, 1).contains("queues: disk d1 has another value"));
    let spec = json!({
        "disk": [image], "queues": 2, "serial": "a", "on_error": {"write": "hold"}, "limits": {"iops-total": 5000},
    });
    assert_eq!(node.disk("d1")["spec"], spec);

    let list = done(&node, "list");
    assert!(
        list.starts_with("ID  STATE") && list.contains("\nd1  serving  1 MiB  -"),
        "{list}"
    );
    let shown: Value = serde_json::from_str(&done(&node, "show d1 --json")).unwrap();
    assert_eq!(shown["spec"], spec);
    assert_eq!(shown["socket"], json!(socket));
    assert!(done(&node, "show d1").contains("\n    limits              iops-total=5000\n"));

    assert_eq!(
        done(
            &node,
            "set d1 --limit iops-total=0,bps-total=1M --completion interrupt"
        ),
        "d1: changed\n"
    );
    let tuning = &node.disk("d1")["tuning"];
    assert_eq!(
        (&tuning["limits"], &tuning["completion"]),
        (&json!({"bps-total": 1 << 20}), &json!("interrupt"))
    );
    assert_eq!(
        done(&node, "set d1 --on-error read=retry:5"),
        "d1: changed\n"
    );
    assert_eq!(
        node.disk("d1")["spec"]["on_error"],
        json!({"read": "retry:5"})
    );

    let client = node.open("d1", &small(1));
    assert!(refused(&node, "remove d1", 1).contains("a frontend is connected"));
    assert_eq!(done(&node, "remove d1 --mode drain"), "d1: removed\n");
    drop(client);
    assert!(refused(&node, "show d1", 1).contains("no disk `d1`"));
    assert!(image.exists());
    node.daemon.finish();
}

#[test]
fn a_disk_grows_is_flushed_and_quiesced() {
    let node = Node::start();
    let image = node.daemon.scratch().image("a.img", 1 << 20);
    done(&node, &format!("add d1 --disk {}", image.display()));
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.set_len(2 << 20).unwrap();
    assert_eq!(done(&node, "resize d1"), "d1: its size is 2 MiB\n");
    file.set_len(1 << 20).unwrap();
    let short = run(&node, "resize d1");
    assert_eq!(
        (short.code, &*short.stdout),
        (Some(1), "d1: its size is 2 MiB\n")
    );
    assert!(
        short.stderr.starts_with("cleave: d1: has shrunk: 1 MiB"),
        "{}",
        short.stderr
    );
    assert!(done(&node, "show d1").contains("\n  cut off its end       1 MiB\n"));
    file.set_len(2 << 20).unwrap();
    assert_eq!(done(&node, "resize d1"), "d1: its size is 2 MiB\n");
    assert!(done(&node, "flush d1").starts_with("d1: flushed in "));
    let quiet = done(&node, "quiesce d1 --for 60");
    // The program may hear it late.
    let is_told = (30..=60).any(|seconds| quiet.contains(&format!("by itself in {seconds} s")));
    assert!(is_told, "{quiet}");
    assert!(refused(&node, "quiesce d1", 1).contains("quiesced already"));
    for held in ["resume d1 --held", "resume --held", "resume --all"] {
        assert_eq!(done(&node, held), "d1: no request was held\n");
    }
    assert_eq!(
        done(&node, "resume d1"),
        "d1: goes on; no request was held\n"
    );
    let over = run(&node, "resume d1");
    assert_eq!(
        (over.code, &*over.stdout),
        (Some(1), "d1: no request was held\n")
    );
    assert!(
        over.stderr
            .starts_with("cleave: d1: was not quiesced any more"),
        "{}",
        over.stderr
    );
    let shown: Value = serde_json::from_str(&done(&node, "quiesce d1 --json --for 60")).unwrap();
    let token = shown["quiet"].as_str().unwrap();
    assert_eq!(run(&node, "resume d1 --quiet other").code, Some(1));
    assert_eq!(
        done(&node, &format!("resume d1 --quiet {token}")),
        "d1: goes on\n"
    );
    assert_eq!(done(&node, "fail d1"), "d1: no request was held\n");
    let mut client = node.open("d1", &small(1));
    exercise(&mut client).unwrap();
    let cpu_seconds = || node.disk("d1")["pacing"]["cpu_seconds"].as_f64().unwrap();
    // A thread that runs is counted at the next tick.
    assert!(wait_until(|| cpu_seconds() > 0.0));
    let before = cpu_seconds();
    drop(client);
    assert!(cpu_seconds() >= before);
    node.daemon.finish();
}

#[test]
fn an_image_of_another_disk_of_the_node_names_that_disk() {
    let node = Node::start();
    let scratch = Scratch::new();
    let (image, link) = (scratch.image("disk", 1 << 20), scratch.join("link"));
    std::os::unix::fs::symlink(&image, &link).unwrap();
    let [image, link] = [&image, &link].map(|path| path.display().to_string());
    done(&node, &format!("add d1 --disk {image}"));
    for line in [
        format!("add d2 --disk {link}"),
        format!("add d2 --disk {image} --read-only"),
    ] {
        let why = refused(&node, &line, 1);
        assert!(why.contains("is in use by disk d1 of this node"), "{why}");
    }
    done(&node, "remove d1");
    done(&node, &format!("add d2 --disk {image} --read-only"));
    done(&node, &format!("add d3 --disk {link} --read-only"));
    node.daemon.finish();
}

#[test]
fn what_cannot_be_is_refused_in_a_line() {
    let node = Node::start();
    for (line, code, named) in [
        ("add d1 --disk /no/such/file", 1, "/no/such/file"),
        ("add a/b --disk ram:1M", 2, "id: "),
        ("add d1 --disk ram:1M --pool fast", 2, "pool: there is no"),
        ("add d1 --disk ram:1M --socket-mode rw", 2, "--socket-mode"),
        (
            "add d1 --disk ram:1M --persistent perhaps",
            2,
            "--persistent",
        ),
        ("add d1 --disk ram:1M --control /c", 2, "--control"),
        ("set d1", 2, "nothing to set"),
        (
            "set d1 --queues 2",
            2,
            "--queues cannot be changed while the disk is served: remove the disk",
        ),
        ("set d1 --queuez 2", 2, "unexpected argument '--queuez'"),
        ("set d1 --completion poll", 1, "no disk `d1`"),
        ("remove d1 --mode softly", 2, "safe, drain, hard"),
        ("quiesce d1 --for 0", 2, "--for"),
    ] {
        let why = refused(&node, line, code);
        assert!(why.contains(named), "{line}: {why}");
    }
    let control = node.daemon.socket().to_str().unwrap();
    let spaced = [
        "disk",
        "add",
        "b c",
        "--disk",
        "ram:1M",
        "--control",
        control,
    ];
    let spaced = run_to_exit(&spaced);
    assert_eq!(spaced.code, Some(2), "{}", spaced.stderr);
    assert!(
        spaced.stderr.starts_with("cleave: id: "),
        "{}",
        spaced.stderr
    );
    done(&node, "add d1 --disk ram:1M");
    let why = refused(&node, "snapshot d1 /tmp/copy", 2);
    assert!(
        why.contains("a disk in memory has no file to copy: copy its content in the guest"),
        "{why}"
    );
    node.daemon.finish();
    for command in ["list", "events", "show d1"] {
        let mut words = vec!["disk"];
        words.extend(command.split_whitespace());
        words.extend(["--control", "/no/such.sock"]);
        let ended = run_to_exit(&words);
        assert_eq!(ended.code, Some(1));
        assert!(
            ended
                .stderr
                .contains("/no/such.sock: no such socket: is a `cleave serve --control /no/such.sock`, or the node of"),
            "{}",
            ended.stderr
        );
    }
}

/// The socket of a `cleave serve` takes the commands for as long as that runs, and has one disk.
#[test]
fn the_disk_of_serve_is_named_or_not() {
    let (daemon, control) = Daemon::serve_with_control(&["--disk", "ram:2M", "--serial", "a"]);
    for (line, code, told) in [
        ("list", 0, "\na   serving  2 MiB"),
        ("show", 0, "a\n  state                 serving\n"),
        ("show a", 0, "a\n  state                 serving\n"),
        ("set --completion poll", 0, "a: changed\n"),
        ("resize", 0, "a: its size is 2 MiB\n"),
        ("flush", 0, "a: flushed in "),
        ("quiesce --for 60", 0, "a: quiesced after "),
        ("resume", 0, "a: goes on; no request was held\n"),
        ("resume --held", 0, "a: no request was held\n"),
        ("resume --all", 0, "a: no request was held\n"),
        ("fail a", 0, "a: no request was held\n"),
        ("fail", 2, "<ID>"),
        ("show b", 1, "no disk `b`"),
        ("snapshot a /tmp/copy", 2, "a disk in memory has no file"),
        ("add b --disk ram:1M", 1, "serves one disk"),
        ("remove a", 1, "end that process"),
    ] {
        let ended = run_on(&control, line);
        let all = ended.stdout.clone() + &ended.stderr;
        assert_eq!(ended.code, Some(code), "{line}: {all}");
        assert!(all.contains(told), "{line}: {all}");
    }
    daemon.finish();
}

/// A program that is ended with the test.
struct Listener(Child);

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `cleave disk events | grep -m 1 …`: a program that nobody reads from would keep a place of the node's without end.
#[test]
fn events_that_nobody_reads_end_the_program() {
    let node = Node::start();
    node.add("d0", &json!({"disk": ["ram:1M"]}));
    let mut command = Command::new(program_path());
    command
        .args(["disk", "events", "--control"])
        .arg(node.daemon.socket());
    let mut listener = Listener(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(listener.0.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("listening"));
    let disk = lines.next().unwrap().unwrap();
    assert!(
        disk.ends_with("Z d0         is serving: ram:1M, 1 MiB"),
        "{disk}"
    );
    drop(lines);
    node.add("d1", &json!({"disk": ["ram:1M"]}));
    let mut ended = None;
    assert!(wait_until(|| {
        ended = listener.0.try_wait().unwrap();
        ended.is_some()
    }));
    assert_eq!(ended.unwrap().code(), Some(0));
    node.daemon.finish();
}

#[test]
fn events_are_heard_as_they_happen() {
    let node = Node::start();
    let mut command = Command::new(program_path());
    command
        .args(["disk", "events", "--json", "--control"])
        .arg(node.daemon.socket());
    let mut listener = Listener(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(listener.0.stdout.take().unwrap()).lines();
    let mut hear = |expected: &str| {
        let line = lines.next().unwrap().unwrap();
        let event: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(event["event"], json!(expected), "{line}");
        event
    };
    hear("listening");
    node.add("d1", &json!({"disk": ["ram:1M"]}));
    hear("opening");
    let serving = hear("serving");
    assert_eq!(
        (&serving["disk"], &serving["size_bytes"]),
        (&json!("d1"), &json!(1 << 20))
    );
    let client = node.open("d1", &small(1));
    hear("connected");
    done(&node, "set d1 --completion poll");
    assert_eq!(hear("changed")["tuning"]["completion"], json!("poll"));
    done(&node, "quiesce d1 --for 60");
    assert_eq!(hear("quiesced")["seconds"], json!(60));
    done(&node, "resume d1");
    hear("resumed");
    drop(client);
    hear("disconnected");
    node.remove("d1");
    let mut all = vec![hear_any(&mut lines)];
    while all
        .last()
        .is_some_and(|event| event["event"] != json!("ended"))
    {
        all.push(hear_any(&mut lines));
    }
    assert!(
        all.iter().all(|event| event["disk"] == json!("d1")),
        "{all:?}"
    );
    node.daemon.finish();
}

fn hear_any(lines: &mut impl Iterator<Item = std::io::Result<String>>) -> Value {
    serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap()
}

/// A change outlives the node, and so does one of a group for each of its disks.
#[test]
fn changes_are_kept() {
    let mut node = Node::start();
    node.add(
        "a",
        &json!({"disk": ["ram:1M"], "limits": {"group": "g", "iops-total": 500}}),
    );
    node.add("b", &json!({"disk": ["ram:1M"], "limits": {"group": "g"}}));
    node.add("c", &json!({"disk": ["ram:1M"], "completion": "poll"}));
    done(&node, "set b --limit iops-total=900");
    done(&node, "set c --completion interrupt");
    for (round, expected) in [json!({"iops-total": 900}), json!({})]
        .into_iter()
        .enumerate()
    {
        let next = node.daemon.succeed().unwrap();
        node.daemon.abandon();
        node = Node { daemon: next };
        for id in ["a", "b", "c"] {
            assert!(wait_until(|| node.disk(id)["state"] == json!("serving")));
        }
        for id in ["a", "b"] {
            assert_eq!(
                node.disk(id)["tuning"]["limits"],
                expected,
                "{id}, round {round}"
            );
            // A disk that names the group alone still gets the limits that were asked for first.
            assert_eq!(
                node.put(id, &json!({"disk": ["ram:1M"], "limits": {"group": "g"}}))
                    .status,
                200
            );
        }
        assert_eq!(node.disk("c")["tuning"]["completion"], json!("interrupt"));
        done(&node, "set a --limit iops-total=0");
    }
    assert_eq!(
        get(node.daemon.socket(), "/v1/disks/c")["spec"]["completion"],
        json!("interrupt")
    );
    node.daemon.finish();
}

/// The commands of docs/node.md, one after the other in a shell.
#[test]
fn the_commands_of_the_manual_work_as_they_stand() {
    let node = Node::start_with(Scratch::in_memory(), &[]);
    let image = node.daemon.scratch().image("a.img", 1 << 20);
    let manual = include_str!("../../docs/node.md");
    let (_, rest) = manual.split_once("```console\n").unwrap();
    let (session, _) = rest.split_once("```").unwrap();
    let shown = |path: &Path| path.to_str().unwrap().to_owned();
    let commands = session
        .lines()
        .filter_map(|line| line.strip_prefix("$ cleave disk "));
    let mut count = 0;
    for line in commands {
        let line = line.replace("/var/lib/images/a.img", &shown(&image));
        done(&node, &line);
        count += 1;
    }
    assert!(count > 4, "{session}");
    node.daemon.finish();
}

#[test]
fn no_limit_is_left_after_none() {
    let node = Node::start();
    done(
        &node,
        "add d1 --disk ram:1M --limit bps-read=1M,iops-read=9,iops-read-max=20",
    );
    done(&node, "set d1 --limit none --completion poll");
    let disk = node.disk("d1");
    assert_eq!(disk["tuning"]["limits"], json!({}));
    assert_eq!(disk["spec"]["limits"], Value::Null);
    node.daemon.finish();
}

/// A terminal takes U+009B for the beginning of a command, as it does ESC and a bracket.
#[test]
fn no_path_commands_a_terminal() {
    let node = Node::start();
    let image = node.daemon.scratch().image("a\u{9b}2J\u{7f}.img", 1 << 20);
    node.add("d1", &json!({"disk": [image]}));
    for line in ["show d1", "show d1 --json", "list", "list --json"] {
        let text = done(&node, line);
        assert!(text.contains("2J"), "{line}: {text:?}");
        assert!(
            !text.contains(|c: char| c.is_control() && c != '\n'),
            "{line}: {text:?}"
        );
    }
    let shown: Value = serde_json::from_str(&done(&node, "show d1 --json")).unwrap();
    assert_eq!(shown["spec"]["disk"], json!([image]));
    let control = node.daemon.socket().to_str().unwrap();
    let stats = run_to_exit(&["stats", "--json", control]).stdout;
    assert!(!stats.contains('\u{9b}'), "{stats:?}");
    let stats: Value = serde_json::from_str(&stats).unwrap();
    assert_eq!(stats[0]["name"], json!(image));
    node.daemon.finish();
}
