//! Disks are put: as the manual shows, by meaning, and bad input is named.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use cleave_client::Client;
use cleave_tests::{
    Killed, Node, Scratch, exercise, has_listener, ignored, is_root, program_path, small,
    wait_until,
};
use serde_json::{Value, json};

use crate::{killed, ram};

/// The commands of docs/node.md, one after the other in a shell.
#[test]
fn the_session_of_the_manual_works_as_it_stands() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("a.img", 1 << 20);
    let manual = include_str!("../../docs/node.md");
    let (_, rest) = manual.split_once("```sh\n").unwrap();
    let (session, after) = rest.split_once("```").unwrap();
    assert!(!after.contains("```sh"), "only the first block is pasted");
    let shown = |path: &Path| path.to_str().unwrap().to_owned();
    let (state, run) = (shown(&scratch.join("state")), shown(&scratch.join("run")));
    let session = session
        .replace("/var/lib/cleave", &state)
        .replace("/run/cleave", &run)
        .replace("/var/lib/images/a.img", &shown(&image))
        .replace("cleave node", &format!("{} node", shown(program_path())))
        .replace("cleave stats", &format!("{} stats", shown(program_path())));
    let script = format!("{session}\nkill -TERM $!\nwait $!\necho ended $?");
    let said = Command::new("sh").args(["-c", &script]).output().unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&said.stdout),
        String::from_utf8_lossy(&said.stderr),
    );
    let answers = [
        "\"state\": \"serving\"",
        "\"completion\": \"interrupt\"",
        "\"deleted\"",
        "ended 0",
    ];
    for answer in answers {
        assert!(out.contains(answer), "{answer}: {out}\n{err}");
    }
}

#[test]
fn a_put_is_idempotent_by_meaning() {
    let node = Node::start();
    let image = node.daemon.scratch().image("a.img", 4 << 20);
    let body = json!({"disk": [image], "queues": 4, "serial": "a", "on_error": {"write": "hold"},
        "persistent": true});
    let first = node.put("d1", &body);
    assert_eq!(first.status, 201, "{}", first.body);
    let socket = node.socket("d1");
    assert_eq!(first.json()["socket"], socket.to_str().unwrap());
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    exercise(&mut Client::open(&socket, &small(2)).unwrap()).unwrap();
    assert_eq!(node.put("d1", &body).status, 200);
    // The same disk in other words, some of which say a default.
    let respelt = json!({"disk": [image], "queues": "4", "queue_size": 1024, "serial": "a", "on_error": "write=hold,enospc=hold",
        "cache": "writeback", "split": "auto", "limits": {"iops-total": 0}, "read_only": false, "socket_mode": "0660"});
    assert_eq!(node.put("d1", &respelt).status, 200);
    // Nor does a change that is taken back leave another disk.
    for mode in ["poll", "adaptive"] {
        let change = json!({"completion": mode}).to_string();
        assert_eq!(node.ask("PATCH", "/v1/disks/d1", &change).status, 200);
    }
    assert_eq!(node.put("d1", &body).status, 200);
    let mut other = body.clone();
    other["queues"] = json!(8);
    let refused = node.put("d1", &other);
    assert_eq!(refused.status, 409);
    let problem = refused.json();
    assert_eq!(problem["status"], 409);
    assert_eq!(problem["title"], "Conflict");
    assert!(refused.error().starts_with("queues: "), "{problem}");
    assert!(refused.header.contains("application/problem+json"));
    let shown = node.get("/v1/disks/d1");
    let mut changed = body.clone();
    changed["completion"] = json!("adaptive");
    assert_eq!(shown["spec"], changed);
    assert_eq!(
        shown["tuning"]["on_error"],
        "read=report,write=hold,enospc=hold"
    );
    // The same image once more is refused, and nothing of the second disk stays.
    let twice = node.put("d2", &body);
    assert_eq!(twice.status, 422, "{}", twice.body);
    assert_eq!(node.ask("GET", "/v1/disks/d2", "").status, 404);
    node.daemon.finish();
}

#[test]
#[allow(clippy::too_many_lines)] // a table
fn bad_input_is_named_in_a_line() {
    let node = Node::start();
    let rows = [
        ("d1", "[]", 400, "JSON"),
        (
            "d1",
            r#"{"disk": ["ram:1M"], "colour": 1}"#,
            400,
            "`colour`",
        ),
        (
            "d1",
            r#"{"disk": ["ram:1M"], "queues": 257}"#,
            400,
            "queues: 257 is not a whole number from 1 to 256",
        ),
        (
            "d1",
            r#"{"disk": ["ram:1M"], "socket_mode": "x"}"#,
            400,
            "socket_mode",
        ),
        (
            "d1",
            r#"{"disk": ["ram:1M"], "socket_group": "no group"}"#,
            422,
            "socket_group",
        ),
        ("d1", r#"{"disk": ["/no/such/file"]}"#, 422, "/no/such/file"),
        (
            "d1",
            r#"{"disk": ["rbd:rbd/web"]}"#,
            400,
            "start the node with --ceph",
        ),
        (
            "d1",
            r#"{"disk": ["rbd:rbd/web,conf=/etc/ceph/b.conf"]}"#,
            400,
            "start the node with --ceph",
        ),
        (
            "d1",
            r#"{"disk": ["rbd:rbd/web,conf=/tmp/a.conf"]}"#,
            400,
            "/tmp/a.conf is not in /etc/ceph",
        ),
        (
            "d1",
            r#"{"disk": ["rbd:rbd/web,conf=/etc/ceph/../../tmp/a.conf"]}"#,
            400,
            "is not in /etc/ceph",
        ),
        // Nobody can make a file of a device: it would be a file in memory.
        (
            "d1",
            r#"{"disk": ["/dev/mapper/none"]}"#,
            422,
            "check the path, and whether the device is attached",
        ),
        (
            "d1",
            r#"{"disk": ["ram:1M"], "queues": []}"#,
            400,
            "queues: invalid type: sequence, expected a whole number",
        ),
        (
            "d1",
            r#"{"disk": ["ram:1M"], "on_error": 3}"#,
            400,
            "on_error: invalid type: integer `3`, expected a policy such as",
        ),
        (
            "d1",
            r#"{"disk": ["ram:1M"], "on_error": "sulk"}"#,
            400,
            "sulk",
        ),
        ("-d1", r#"{"disk": ["ram:1M"]}"#, 400, "id"),
        // The remedy would be to remove it.
        (
            "control.sock",
            r#"{"disk": ["ram:1M"]}"#,
            400,
            "control socket",
        ),
        ("..", r#"{"disk": ["ram:1M"]}"#, 400, "id"),
    ];
    for (id, body, status, named) in rows {
        let answer = node.ask("PUT", &format!("/v1/disks/{id}"), body);
        assert_eq!(answer.status, status, "{body}: {}", answer.body);
        let error = answer.error();
        assert!(error.contains(named), "{body}: {error}");
        assert_eq!(error.lines().count(), 1);
        // Whoever sends a request has no options.
        assert!(!error.contains("--help"), "{body}: {error}");
        assert!(!error.contains("truncate -s 10G /dev"), "{body}: {error}");
    }
    let long = format!("{{\"serial\": \"{}\"}}", "a".repeat(70_000));
    assert_eq!(node.ask("PUT", "/v1/disks/d1", &long).status, 413);
    assert_eq!(node.get("/v1/disks"), json!([]));
    node.daemon.finish();
}

#[test]
fn a_put_has_a_disk_be_as_it_says() {
    let node = Node::start();
    let image = node.daemon.scratch().image("a.img", 1 << 20);
    let put = |body: &Value| node.put("d1", body);
    assert_eq!(put(&json!({"disk": [image], "queues": 2})).status, 201);
    let mut client = node.open("d1", &small(1));
    // What can change while it is served changes, and the guest does not notice.
    let live =
        json!({"disk": [image], "queues": 2, "completion": "poll", "limits": {"iops-total": 9000}});
    assert_eq!(put(&live).status, 200);
    exercise(&mut client).unwrap();
    let disk = node.disk("d1");
    assert_eq!(
        (&disk["spec"], &disk["tuning"]["completion"]),
        (&live, &json!("poll"))
    );
    assert_eq!(disk["tuning"]["limits"], json!({"iops-total": 9000}));
    // All that cannot is listed, and nothing changes.
    let other = json!({"disk": [image], "queues": 3, "serial": "x", "completion": "adaptive"});
    let refused = put(&other);
    assert_eq!(refused.status, 409);
    assert!(
        refused
            .error()
            .starts_with("serial, queues: disk d1 has another value"),
        "{}",
        refused.error()
    );
    assert_eq!(node.disk("d1")["spec"], live);
    drop(client);
    // A disk that has failed is replaced, in the folder that a container has mounted.
    let folder = node.socket("d1").parent().unwrap().to_owned();
    let number = || std::fs::metadata(&folder).unwrap().ino();
    let before = number();
    let away = image.with_file_name("away");
    let node = killed(node, |_| std::fs::rename(&image, &away).unwrap());
    assert!(wait_until(|| node.state("d1") == "failed"));
    let other = json!({"disk": [away], "queues": 3});
    // Refused while the disk is tried again.
    assert!(wait_until(|| node.put("d1", &other).status == 201));
    assert_eq!(number(), before);
    exercise(&mut node.open("d1", &small(1))).unwrap();
    node.daemon.finish();
}

#[test]
fn a_policy_for_errors_is_taken_as_a_text_too() {
    let node = Node::start();
    let by_kind = json!({"read": "hold", "write": "hold", "enospc": "hold"});
    let body = |on_error: &Value| json!({"disk": ["ram:1M"], "on_error": on_error});
    node.add("d1", &body(&json!("hold")));
    assert_eq!(node.disk("d1")["spec"]["on_error"], by_kind);
    assert_eq!(node.put("d1", &body(&by_kind)).status, 200);
    let text = body(&json!("read=retry:5,write=hold"));
    assert_eq!(node.put("d2", &text).status, 201);
    let given = json!({"read": "retry:5", "write": "hold"});
    assert_eq!(node.disk("d2")["spec"]["on_error"], given);
    let node = killed(node, |_| {});
    assert!(wait_until(|| node.state("d1") == "serving"));
    assert_eq!(node.disk("d1")["spec"]["on_error"], by_kind);
    node.daemon.finish();
}

/// A disk that was added later does not make its node younger.
#[test]
fn the_uptime_of_a_node_is_that_of_its_process() {
    let node = Node::start();
    node.add("d1", &ram());
    let uptime = |id: &str| node.disk(id)["process"]["uptime_seconds"].as_f64().unwrap();
    assert!(wait_until(|| uptime("d1") > 0.3));
    node.add("d2", &ram());
    assert!(uptime("d2") > 0.3, "{}", uptime("d2"));
    let metrics = node.ask("GET", "/metrics", "").body;
    let mut lines = metrics.lines();
    let line = lines.find_map(|line| line.strip_prefix("process_start_time_seconds "));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    assert!(now.as_secs_f64() - line.unwrap().parse::<f64>().unwrap() > 0.3);
    node.daemon.finish();
}

/// A unit of `cleave serve` may have its socket in the same folder of all folders.
#[test]
fn the_folder_of_another_daemon_stays_as_it_is() {
    let node = Node::start();
    let socket = node.socket("d1");
    let folder = socket.parent().unwrap();
    std::fs::create_dir(folder).unwrap();
    std::fs::set_permissions(folder, Permissions::from_mode(0o700)).unwrap();
    let mode = || std::fs::metadata(folder).unwrap().mode() & 0o777;
    let mut line = Command::new(program_path());
    line.args(["serve", "--disk", "ram:1M", "--socket-path"])
        .arg(&socket);
    let other = Killed::start(&mut line);
    assert!(wait_until(|| has_listener(&socket)));
    let body = json!({"disk": ["ram:4M"], "persistent": false, "socket_mode": "0666"});
    let refused = node.put("d1", &body);
    assert_eq!(refused.status, 422, "{}", refused.body);
    assert!(refused.error().contains("in use"), "{}", refused.body);
    assert_eq!(mode(), 0o700);
    drop(other);
    node.add("d1", &body);
    assert_eq!(mode(), 0o755);
}

/// Its unit starts again, and learns from the lock that changes are lost, and that its guest may have written what looks like an image.
#[test]
fn what_a_daemon_that_died_has_left_is_not_removed_with_a_refused_disk() {
    let node = Node::start();
    let socket = node.socket("d1");
    let (folder, lock) = (socket.parent().unwrap(), socket.with_extension("sock.lock"));
    std::fs::create_dir(folder).unwrap();
    let served = "served /x\ncache: as set \n".to_owned();
    for text in [format!("{served}changes are lost\n"), served] {
        std::fs::write(&lock, &text).unwrap();
        let refused = node.put("d1", &json!({"disk": [folder.join("none")]}));
        assert_eq!(refused.status, 422, "{}", refused.body);
        assert!(wait_until(
            || node.ask("GET", "/v1/disks/d1", "").status == 404
        ));
        let left = std::fs::read_to_string(&lock).unwrap_or_default();
        assert_eq!(left, text);
    }
    node.add("d1", &ram());
    node.remove("d1");
    assert!(!folder.exists());
    node.daemon.finish();
}

/// Such as one that systemd has made for a unit with `User=`: that user could replace the socket, and the lock beside it.
#[test]
fn the_folder_of_another_user_gets_no_socket() {
    if !is_root() {
        return ignored("not root");
    }
    let node = Node::start();
    let socket = node.socket("d1");
    let folder = socket.parent().unwrap();
    std::fs::create_dir(folder).unwrap();
    std::fs::set_permissions(folder, Permissions::from_mode(0o750)).unwrap();
    std::fs::write(folder.join("theirs"), "").unwrap();
    chown(folder, Some(65534), None).unwrap();
    let refused = node.put("d1", &ram());
    assert_eq!(refused.status, 422, "{}", refused.body);
    let why = "belongs to user 65534";
    assert!(refused.error().contains(why), "{}", refused.body);
    assert!(wait_until(
        || node.ask("GET", "/v1/disks/d1", "").status == 404
    ));
    let entries = std::fs::read_dir(folder).unwrap();
    let names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["theirs"]);
    // Nothing of theirs is in the way of a new folder.
    std::fs::remove_file(folder.join("theirs")).unwrap();
    node.add("d1", &ram());
    assert_eq!(std::fs::metadata(folder).unwrap().uid(), 0);
    exercise(&mut node.open("d1", &small(1))).unwrap();
    node.daemon.finish();
}

/// systemd listens for a unit that does not run, and holds no lock.
#[test]
fn the_socket_of_a_unit_that_does_not_run_stays_as_it_is() {
    let node = Node::start();
    let socket = node.socket("d1");
    let folder = socket.parent().unwrap();
    std::fs::create_dir(folder).unwrap();
    std::fs::set_permissions(folder, Permissions::from_mode(0o700)).unwrap();
    let mode = || std::fs::metadata(folder).unwrap().mode() & 0o777;
    let listener = UnixListener::bind(&socket).unwrap();
    let body = json!({"disk": ["ram:4M"], "persistent": false, "socket_mode": "0666"});
    let missing = json!({"disk": [folder.join("none")], "socket_mode": "0666"});
    for (body, why) in [(&body, "in use"), (&missing, ""), (&body, "in use")] {
        let refused = node.put("d1", body);
        assert_eq!(refused.status, 422, "{}", refused.body);
        assert!(refused.error().contains(why), "{}", refused.body);
        assert_eq!(mode(), 0o700);
        UnixStream::connect(&socket).unwrap();
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 1);
    }
    // A socket on which nobody listens any more is in nobody's way.
    drop(listener);
    // A child that another test starts may have a copy of it for a moment.
    assert!(wait_until(|| node.put("d1", &body).status == 201));
    assert_eq!(mode(), 0o755);
    exercise(&mut node.open("d1", &small(1))).unwrap();
}
