//! `cleave node`: disks are added, kept, removed and served over its control socket, and one does not feel another.
#![allow(clippy::unwrap_used, clippy::panic)] // shared test code lies outside of #[test] functions

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cleave_client::{Client, message};
use cleave_tests::{
    Daemon, Node, Scratch, Stopwatch, TIMEOUT, UnresponsiveFs, closes_within, exercise, http,
    ignored, is_root, program_path, run_to_exit, scale, small, wait_until,
};
use rustix::fs::OFlags;
use rustix::process::Signal;
use serde_json::{Value, json};

fn ram() -> Value {
    json!({"disk": ["ram:4M"], "queues": 2, "persistent": false})
}

/// Kills it, and starts it again with the same files.
fn killed(mut node: Node, meanwhile: impl FnOnce(&Path)) -> Node {
    node.daemon.die().unwrap();
    meanwhile(node.daemon.scratch().path());
    let next = node.daemon.start_again().unwrap();
    node.daemon.abandon();
    Node { daemon: next }
}

/// A file system that can fall silent, and its folder.
fn mounted() -> Option<(Scratch, UnresponsiveFs)> {
    if !is_root() {
        ignored("needs root, to mount");
        return None;
    }
    let folder = Scratch::in_memory();
    let silent = UnresponsiveFs::mount(&folder, 4 << 20).unwrap();
    Some((folder, silent))
}

/// The commands of docs/node.md, one after the other in a shell.
#[test]
fn the_session_of_the_manual_works_as_it_stands() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("a.img", 1 << 20);
    let manual = include_str!("../docs/node.md");
    let (_, rest) = manual.split_once("```sh\n").unwrap();
    let (session, _) = rest.split_once("```").unwrap();
    let shown = |path: &Path| path.to_str().unwrap().to_owned();
    let (state, run) = (shown(&scratch.join("state")), shown(&scratch.join("run")));
    let session = session
        .replace("/var/lib/cleave", &state)
        .replace("/run/cleave", &run)
        .replace("/var/lib/images/a.img", &shown(&image))
        .replace("cleave node", &format!("{} node", shown(program_path())))
        .replace("cleave stats", &format!("{} stats", shown(program_path())))
        // A person types the second line later than a shell reads it.
        .replace(
            " &\n",
            &format!(" &\nuntil [ -S {run}/control.sock ]; do sleep 0.05; done\n"),
        );
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
fn a_disk_in_use_is_deleted_only_by_force() {
    let node = Node::start();
    node.add("a", &ram());
    node.add("b", &ram());
    let mut client = node.open("a", &small(1));
    exercise(&mut client).unwrap();
    let refused = node.ask("DELETE", "/v1/disks/a", "");
    assert_eq!(refused.status, 409, "{}", refused.body);
    assert!(refused.error().contains("mode=drain"));
    exercise(&mut client).unwrap();
    assert_eq!(node.ask("DELETE", "/v1/disks/a?mode=soft", "").status, 400);
    let gone = node.ask("DELETE", "/v1/disks/a?mode=drain", "");
    assert_eq!((gone.status, &gone.json()["lost"]), (200, &Value::Null));
    assert!(exercise(&mut client).is_err());
    assert!(!node.socket("a").parent().unwrap().exists());
    assert_eq!(node.ask("DELETE", "/v1/disks/a", "").status, 404);
    let mut client = node.open("b", &small(1));
    exercise(&mut client).unwrap();
    assert_eq!(node.ask("DELETE", "/v1/disks/b?mode=hard", "").status, 200);
    node.add("b", &ram());
    assert_eq!(node.ask("DELETE", "/v1/disks/b?mode=safe", "").status, 200);
    node.daemon.finish();
}

#[test]
fn disks_come_back_after_a_kill_and_after_sigterm() {
    let mut node = Node::start();
    let scratch = Scratch::new();
    for id in ["a", "b"] {
        let image = scratch.image(id, 4 << 20);
        node.add(id, &json!({"disk": [image], "queues": 2}));
    }
    node.add("gone", &ram());
    let mut client = node.open("a", &small(1));
    let data = vec![7; 4096];
    client.queue(0).write(8192, &data).unwrap();
    drop(client);
    for _ in 0..2 {
        node = killed(node, |_| {});
        assert!(wait_until(|| ["a", "b"]
            .iter()
            .all(|id| node.state(id) == "serving")));
        let mut back = vec![0; 4096];
        node.open("a", &small(1))
            .queue(0)
            .read(8192, &mut back)
            .unwrap();
        assert_eq!(back, data);
    }
    let disks = node.get("/v1/disks");
    assert_eq!(disks.as_array().unwrap().len(), 2, "{disks}");
    // A second node with the same folder is refused.
    let state = node.daemon.scratch().join("state").display().to_string();
    let other = node.daemon.scratch().join("other").display().to_string();
    let second = run_to_exit(&["node", "--state", &state, "--run", &other]);
    assert_eq!(second.code, Some(2), "{}", second.stderr);
    assert!(
        second.stderr.contains("in use by a running node"),
        "{}",
        second.stderr
    );
    assert_eq!(node.ask("DELETE", "/v1/disks/b", "").status, 200);
    assert!(!node.daemon.scratch().join("state/disks/b.toml").exists());
    assert!(node.daemon.scratch().join("state/disks/a.toml").exists());
    node.daemon.finish();
}

/// Returns true if the process of the node has ended.
fn is_dead(node: &Node) -> bool {
    let stat = format!("/proc/{}/stat", node.daemon.pid());
    std::fs::read_to_string(stat).unwrap().contains(") Z ")
}

/// A guest may write whatever it likes. A node judges the content of a disk when it is added.
#[test]
fn content_that_a_guest_wrote_does_not_keep_its_disk_from_the_next_node() {
    let node = Node::start();
    let images = Scratch::new();
    let image = images.image("a", 4 << 20);
    node.add("a", &json!({"disk": [image]}));
    let block = [b"QFI\xfb".as_slice(), &[0; 508]].concat();
    let mut client = node.open("a", &small(1));
    client.queue(0).write(0, &block).unwrap();
    let node = killed(node, |_| {});
    drop(client);
    assert!(wait_until(|| node.state("a") != "opening"));
    assert_eq!(node.state("a"), "serving", "{}", node.disk("a"));
    // After an orderly end too: the node knows its disks.
    node.daemon.signal(Signal::TERM);
    assert!(wait_until(|| is_dead(&node)), "{}", node.daemon.log_tail());
    assert!(!node.socket("a").with_file_name("disk.sock.lock").exists());
    let next = Node {
        daemon: node.daemon.succeed().unwrap(),
    };
    assert!(wait_until(|| next.state("a") != "opening"));
    assert_eq!(next.state("a"), "serving", "{}", next.disk("a"));
    let mut back = vec![0; 512];
    let mut client = next.open("a", &small(1));
    client.queue(0).read(0, &mut back).unwrap();
    assert_eq!(back, block);
    drop(client);
    next.remove("a");
    let refused = next.put("a", &json!({"disk": [image]}));
    assert!(
        refused.body.contains("is a qcow2 image"),
        "{}",
        refused.body
    );
    next.daemon.finish();
}

/// The node knows only of a disk that was opened that what it holds may be its guest's.
#[test]
fn an_image_that_was_never_served_is_judged_when_the_node_starts() {
    let node = Node::start();
    let images = Scratch::new();
    let [raw, qcow2] = ["raw", "qcow2"].map(|name| images.image(name, 4 << 20));
    std::fs::write(&qcow2, [b"QFI\xfb".as_slice(), &[0; 508]].concat()).unwrap();
    node.add("a", &json!({"disk": [raw]}));
    let node = killed(node, |scratch| {
        let disks = scratch.join("state/disks");
        let kept = std::fs::read_to_string(disks.join("a.toml")).unwrap();
        let text = kept.replace(raw.to_str().unwrap(), qcow2.to_str().unwrap());
        assert_ne!(text, kept);
        for id in ["a", "by-hand"] {
            std::fs::write(disks.join(format!("{id}.toml")), &text).unwrap();
        }
    });
    for id in ["a", "by-hand"] {
        assert!(wait_until(|| node.state(id) != "opening"));
        assert!(
            node.disk(id).to_string().contains("is a qcow2 image"),
            "{}",
            node.disk(id)
        );
        assert_eq!(node.state(id), "failed");
        node.remove(id);
    }
    let left = std::fs::read_dir(node.daemon.scratch().join("state/disks")).unwrap();
    assert_eq!(left.count(), 0);
    node.daemon.finish();
}

/// A container that has the folder mounted would not find a new one of the same name.
#[test]
fn the_folder_of_a_kept_disk_outlives_the_node() {
    let node = Node::start();
    let images = Scratch::new();
    let image = images.image("a", 4 << 20);
    node.add("a", &json!({"disk": [image]}));
    node.add("gone", &ram());
    let folder = |id| node.socket(id).parent().unwrap().to_owned();
    let number = || std::fs::metadata(folder("a")).unwrap().ino();
    let before = number();
    node.daemon.signal(Signal::TERM);
    assert!(wait_until(|| is_dead(&node)), "{}", node.daemon.log_tail());
    assert!(!node.socket("a").exists());
    assert!(!folder("gone").exists());
    let next = Node {
        daemon: node.daemon.succeed().unwrap(),
    };
    assert!(wait_until(|| next.state("a") == "serving"));
    assert_eq!(number(), before);
    assert_eq!(next.ask("DELETE", "/v1/disks/a", "").status, 200);
    assert!(!folder("a").exists());
    next.daemon.finish();
}

/// A node that is killed leaves the socket behind, and the next one cannot open the disk.
#[test]
fn nothing_is_left_of_a_disk_that_is_deleted_before_it_was_served_again() {
    let images = Scratch::new();
    let image = images.image("a", 4 << 20);
    let node = Node::start();
    node.add("a", &json!({"disk": [image]}));
    let node = killed(node, |_| std::fs::remove_file(&image).unwrap());
    assert!(wait_until(|| node.state("a") == "failed"));
    assert!(node.socket("a").exists());
    assert_eq!(node.ask("DELETE", "/v1/disks/a", "").status, 200);
    assert!(!node.socket("a").parent().unwrap().exists());
    node.daemon.finish();
}

#[test]
fn a_missing_file_keeps_only_its_own_disk_away() {
    let mut node = Node::start();
    let images = Scratch::new();
    let image = images.image("a", 4 << 20);
    node.add("a", &json!({"disk": [image], "queues": 2}));
    let other = images.image("b", 4 << 20);
    node.add("b", &json!({"disk": [other], "queues": 2}));
    std::fs::rename(&image, images.join("away")).unwrap();
    std::fs::write(
        node.daemon.scratch().join("state/disks/broken.toml"),
        "queues = [",
    )
    .unwrap();
    node = killed(node, |_| {});
    assert!(wait_until(|| node.state("b") == "serving"));
    assert!(wait_until(|| node.state("a") == "failed"));
    let error = node.get("/v1/disks/a")["error"].to_string();
    assert!(error.contains("does not exist"), "{error}");
    assert_eq!(node.state("broken"), "failed");
    // An order for all disks is for those that are served.
    let control = node.daemon.socket().to_str().unwrap();
    let resumed = run_to_exit(&["disk", "resume", "--all", "--control", control]);
    let said = (resumed.code, &*resumed.stdout, &*resumed.stderr);
    assert_eq!(said, (Some(0), "b: no request was held\n", ""));
    exercise(&mut node.open("b", &small(1))).unwrap();
    // By itself, after a pause.
    std::fs::rename(images.join("away"), &image).unwrap();
    assert!(wait_until(|| node.state("a") == "serving"));
    exercise(&mut node.open("a", &small(1))).unwrap();
    assert_eq!(node.ask("DELETE", "/v1/disks/broken", "").status, 200);
    assert!(
        !node
            .daemon
            .scratch()
            .join("state/disks/broken.toml")
            .exists()
    );
    node.daemon.finish();
}

/// A disk whose server is silent holds up neither the others nor the interface, and the end only for its deadline.
#[test]
fn a_hung_disk_is_felt_by_nobody_else() {
    let node = Node::start();
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    let count = 63;
    for at in 0..count {
        node.add(&format!("d{at}"), &ram());
    }
    node.add(
        "hung",
        &json!({"disk": [silent.file()], "queues": 1, "stop_deadline": 1, "direct": "off"}),
    );
    let hung = node.open("hung", &small(1));
    silent.stop_answering();
    let stuck = std::thread::spawn(move || {
        let mut client = hung;
        let _ = client.queue(0).read(0, &mut [0; 4096]);
    });
    assert!(wait_until(|| {
        node.get("/v1/disks/hung")["in_flight"]["requests"] == json!(1)
    }));
    for at in 0..count {
        exercise(&mut node.open(&format!("d{at}"), &small(1))).unwrap();
    }
    let mut daemon = node.daemon;
    let start = Stopwatch::start();
    daemon.signal(Signal::TERM);
    assert!(daemon.log_has("lost: still in flight after 1 s"));
    let took = start.elapsed();
    drop(silent);
    let ended = daemon.wait();
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(ended.unwrap().0, Some(1), "{}", daemon.log_tail());
    stuck.join().unwrap();
}

#[test]
fn adding_and_removing_leaks_nothing_and_disturbs_nobody() {
    let node = Node::start();
    for at in 0..15 {
        node.add(&format!("d{at}"), &ram());
    }
    let mut client = node.open("d0", &small(1));
    let round = |client: &mut Client| {
        node.add("again", &ram());
        exercise(&mut node.open("again", &small(1))).unwrap();
        exercise(client).unwrap();
        let gone = node.ask("DELETE", "/v1/disks/again?mode=drain", "");
        assert_eq!(gone.status, 200, "{}", gone.body);
    };
    (0..5).for_each(|_| round(&mut client));
    let (fds, threads, rss) = (
        node.daemon.fds_at_rest(),
        node.daemon.threads(),
        node.daemon.rss_kib(),
    );
    (0..scale(100)).for_each(|_| round(&mut client));
    node.daemon.fds_settle_at(fds).unwrap();
    node.daemon.threads_settle_at(threads).unwrap();
    node.daemon.settles_small(rss, 2048).unwrap();
    drop(client);
    node.daemon.finish();
}

/// The cost of many disks while nobody uses them. The figures are printed.
#[test]
fn many_idle_disks_wake_nobody() {
    let node = Node::start();
    let before = node.daemon.rss_kib();
    let start = Instant::now();
    // As many as the limit of open files of a small machine allows.
    let count: u32 = 48;
    for at in 0..count {
        let body = json!({"disk": ["ram:1M"], "queues": 1, "workers": 1, "persistent": false});
        node.add(&format!("d{at}"), &body);
    }
    let took = start.elapsed();
    let each = node.daemon.rss_kib().saturating_sub(before) / u64::from(count);
    println!("{count} disks in {took:?}, {each} KiB each");
    assert!(each < 1024, "{each} KiB each");
    let metrics = node.ask("GET", "/metrics", "").body;
    let declared = metrics.matches("# TYPE cleave_connected ").count();
    assert_eq!(declared, 1);
    assert_eq!(
        metrics.matches("\ncleave_connected{").count(),
        count as usize
    );
    let control = node.daemon.socket().display().to_string();
    let mut stats = Command::new(program_path());
    let stats = stats.args(["stats", "--json", &control]).output().unwrap();
    let stats: Value = serde_json::from_slice(&stats.stdout).unwrap();
    assert_eq!(stats.as_array().unwrap().len(), count as usize);
    // Connections of the interface end, and timers with them.
    node.daemon.stays_at_rest().unwrap();
    node.daemon.finish();
}

/// Has the next write of the file of disk `id` wait until the guard is dropped, and fail then: it is a full pipe.
struct SlowFile {
    path: PathBuf,
    /// Where the node's open files are listed.
    open: String,
    _reader: std::fs::File,
}

impl SlowFile {
    fn of(node: &Node, id: &str) -> SlowFile {
        let path = node
            .daemon
            .scratch()
            .join(&format!("state/disks/.{id}.new"));
        cleave_tests::run("mkfifo", &[path.to_str().unwrap()]).unwrap();
        let mut pipe = std::fs::File::options();
        let pipe = pipe.read(true).write(true);
        let pipe = pipe
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(&path);
        let mut reader = pipe.unwrap();
        while reader.write(&[0; 4096]).is_ok() {}
        SlowFile {
            path,
            open: format!("/proc/{}/fd", node.daemon.pid()),
            _reader: reader,
        }
    }

    /// Waits until the node has opened it to write.
    fn is_reached(&self) -> bool {
        wait_until(|| {
            let open = std::fs::read_dir(&self.open).unwrap().flatten();
            let mut names = open.filter_map(|entry| entry.path().read_link().ok());
            names.any(|name| name == self.path)
        })
    }
}

impl Drop for SlowFile {
    fn drop(&mut self) {
        self.is_reached();
        // While the pipe has its reader: without one, the node would wait for it in open.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn is_kept(node: &Node, id: &str) -> bool {
    let file = format!("state/disks/{id}.toml");
    node.daemon.scratch().join(&file).exists()
}

#[test]
fn a_change_after_which_the_disk_could_not_be_opened_is_refused() {
    let node = Node::start();
    node.add(
        "d1",
        &json!({"disk": ["ram:1M"], "coalesce_us": 50, "coalesce_max": 8}),
    );
    let refused = node.ask("PATCH", "/v1/disks/d1", r#"{"coalesce_us": 0}"#);
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(refused.error().contains("coalesce"), "{}", refused.body);
    assert_eq!(node.disk("d1")["spec"]["coalesce_us"], 50);
    let both = r#"{"coalesce_us": 0, "coalesce_max": 0}"#;
    assert_eq!(node.ask("PATCH", "/v1/disks/d1", both).status, 200);
    let node = killed(node, |_| {});
    assert!(wait_until(|| node.state("d1") == "serving"));
    node.daemon.finish();
}

#[test]
fn a_change_that_could_not_be_kept_is_kept_by_the_next_try() {
    let node = Node::start();
    node.add("d1", &json!({"disk": ["ram:1M"]}));
    let in_the_way = node.daemon.scratch().join("state/disks/.d1.new");
    std::fs::create_dir(&in_the_way).unwrap();
    let change = || {
        node.ask(
            "PATCH",
            "/v1/disks/d1",
            r#"{"limits": {"iops-total": 100}}"#,
        )
    };
    assert_eq!(change().status, 500);
    std::fs::remove_dir(&in_the_way).unwrap();
    assert_eq!(change().status, 200);
    let node = killed(node, |_| {});
    assert_eq!(node.disk("d1")["spec"]["limits"]["iops-total"], 100);
    node.daemon.finish();
}

/// A disk that was deleted while its file was being written would come back when the node starts again.
#[test]
fn a_disk_that_is_deleted_while_it_is_added_is_gone() {
    let node = Node::start();
    let body = json!({"disk": ["ram:1M"]});
    let file = SlowFile::of(&node, "d1");
    std::thread::scope(|scope| {
        let added = scope.spawn(|| node.put("d1", &body).status);
        assert!(file.is_reached());
        let gone = scope.spawn(|| node.ask("DELETE", "/v1/disks/d1?mode=hard", "").status);
        assert!(wait_until(|| node.state("d1") == "ended"));
        drop(file);
        assert_eq!(added.join().unwrap(), 409);
        assert_eq!(gone.join().unwrap(), 200);
    });
    assert!(!is_kept(&node, "d1"));
    assert_eq!(node.ask("GET", "/v1/disks/d1", "").status, 404);
    node.daemon.finish();
}

#[test]
fn a_file_that_cannot_be_written_yet_delays_its_own_disk_alone() {
    let node = Node::start();
    node.add("slow", &json!({"disk": ["ram:1M"]}));
    let file = SlowFile::of(&node, "slow");
    std::thread::scope(|scope| {
        let change = r#"{"spin_worth": 9}"#;
        let changed = scope.spawn(|| node.ask("PATCH", "/v1/disks/slow", change).status);
        assert!(file.is_reached());
        node.add("d1", &json!({"disk": ["ram:1M"]}));
        assert_eq!(node.ask("PATCH", "/v1/disks/d1", change).status, 200);
        assert_eq!(node.ask("DELETE", "/v1/disks/d1", "").status, 200);
        assert!(!changed.is_finished());
        drop(file);
        assert_eq!(changed.join().unwrap(), 500);
    });
    node.daemon.finish();
}

#[test]
fn a_file_that_cannot_be_read_stays_in_the_list_when_another_is_put_in_vain() {
    let node = killed(Node::start(), |folder| {
        std::fs::write(folder.join("state/disks/d1.toml"), "queues = [").unwrap();
    });
    let before = node.disk("d1");
    assert_eq!(before["state"], "failed");
    let refused = node.put("d1", &json!({"disk": ["/no/such/file"]}));
    assert_eq!(refused.status, 422, "{}", refused.body);
    let in_the_way = node.daemon.scratch().join("state/disks/.d1.new");
    std::fs::create_dir(&in_the_way).unwrap();
    let refused = node.put("d1", &json!({"disk": ["ram:1M"]}));
    assert_eq!(refused.status, 500, "{}", refused.body);
    assert_eq!(node.disk("d1"), before);
    assert_eq!(node.ask("DELETE", "/v1/disks/d1", "").status, 200);
    assert!(!is_kept(&node, "d1"));
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
    let replaced = node.put("d1", &json!({"disk": [away], "queues": 3}));
    assert_eq!(replaced.status, 201, "{}", replaced.body);
    assert_eq!(number(), before);
    exercise(&mut node.open("d1", &small(1))).unwrap();
    node.daemon.finish();
}

/// A disk that drains is shown as ending, and the operator can end the drain.
#[test]
fn a_disk_that_drains_can_be_ended_at_once() {
    let node = Node::start();
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    let body = json!({"disk": [silent.file()], "queues": 1, "stop_deadline": 50, "direct": "off"});
    node.add("hung", &body);
    let mut client = node.open("hung", &small(1));
    silent.stop_answering();
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _ = client.queue(0).read(0, &mut [0; 4096]);
        });
        assert!(wait_until(
            || node.disk("hung")["in_flight"]["requests"] == json!(1)
        ));
        let drained = scope.spawn(|| node.ask("DELETE", "/v1/disks/hung?mode=drain", ""));
        assert!(wait_until(|| !node.socket("hung").exists()));
        let seen = node.state("hung");
        let ended = node.ask("DELETE", "/v1/disks/hung?mode=hard", "");
        let took = start.elapsed();
        drop(silent);
        assert_eq!((ended.status, seen.as_str()), (200, "ending"));
        assert!(took < Duration::from_secs(20), "{took:?}");
        assert!(ended.json()["lost"].is_string(), "{}", ended.body);
        assert_eq!(drained.join().unwrap().status, 200);
    });
    node.daemon.finish();
}

/// The limits that a disk is shown with are those that it has.
#[test]
fn a_group_whose_disks_are_away_keeps_its_limits() {
    let images = Scratch::new();
    let image = images.image("a", 1 << 20);
    let node = Node::start();
    let limits = json!({"group": "g", "iops-total": 1000});
    node.add("a", &json!({"disk": [image], "limits": limits}));
    let node = killed(node, |_| {
        std::fs::rename(&image, images.join("away")).unwrap()
    });
    assert!(wait_until(|| node.state("a") == "failed"));
    let ram = json!({"disk": ["ram:1M"], "limits": {"group": "g"}});
    node.add("b", &ram);
    let of = |id: &str| {
        let disk = node.disk(id);
        (
            disk["tuning"]["limits"].clone(),
            disk["spec"]["limits"].clone(),
        )
    };
    assert_eq!(of("b"), (json!({"iops-total": 1000}), limits.clone()));
    // Zero means no limit, and does not change the others.
    let zero = json!({"disk": ["ram:1M"], "limits": {"group": "g", "iops-total": 0}});
    node.add("c", &zero);
    assert_eq!(of("b"), (json!({"iops-total": 1000}), limits.clone()));
    assert_eq!(of("c"), (json!({"iops-total": 1000}), limits));
    assert_eq!(node.put("c", &zero).status, 200);
    node.daemon.finish();
}

/// Whatever becomes of a disk that brings other limits into its group.
#[test]
fn the_limits_that_a_disk_is_shown_with_are_in_force_although_another_was_added_in_vain() {
    let limits = |iops: u64| json!({"group": "g", "iops-total": iops});
    let node = Node::start();
    node.add("a", &json!({"disk": ["ram:1M"], "limits": limits(1000)}));
    let are_in_force = || {
        let disk = node.disk("a");
        let (shown, in_force) = (&disk["spec"]["limits"], &disk["tuning"]["limits"]);
        assert_eq!(shown["iops-total"], in_force["iops-total"], "{disk}");
        shown["iops-total"].clone()
    };
    // It is served, but its file cannot be written.
    let body = json!({"disk": ["ram:1M"], "limits": limits(500)});
    let file = SlowFile::of(&node, "b");
    std::thread::scope(|scope| {
        let added = scope.spawn(|| node.put("b", &body).status);
        assert!(wait_until(|| node.ask("GET", "/v1/disks/b", "").status
            == 200
            && node.state("b") == "serving"));
        drop(file);
        assert_eq!(added.join().unwrap(), 500);
    });
    are_in_force();
    // A change that cannot be written.
    let in_the_way = node.daemon.scratch().join("state/groups/.g.new");
    std::fs::create_dir(&in_the_way).unwrap();
    node.add("c", &json!({"disk": ["ram:1M"], "limits": {"group": "g"}}));
    let change = r#"{"limits": {"iops-total": 700}}"#;
    assert_eq!(node.ask("PATCH", "/v1/disks/a", change).status, 500);
    std::fs::remove_dir(&in_the_way).unwrap();
    let shown = node.disk("c");
    assert_eq!(shown["spec"]["limits"], limits(700));
    assert_eq!(are_in_force(), 700);
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    // It is still being opened.
    silent.stop_answering();
    let body = json!({"disk": [silent.file()], "limits": limits(300)});
    assert_eq!(node.put("d", &body).status, 202);
    assert_eq!(are_in_force(), 300);
    drop(silent);
    node.daemon.finish();
}

/// The requests of a disk that was given up hold on to it.
#[test]
fn a_group_ends_with_its_last_disk_although_that_hangs() {
    let node = Node::start();
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    let limits = json!({"group": "g", "iops-total": 1000});
    let body = json!({"disk": [silent.file()], "queues": 1, "direct": "off", "limits": limits});
    node.add("hung", &body);
    let mut client = node.open("hung", &small(1));
    silent.stop_answering();
    let stuck = std::thread::spawn(move || {
        let _ = client.queue(0).read(0, &mut [0; 4096]);
    });
    assert!(wait_until(
        || node.disk("hung")["in_flight"]["requests"] == json!(1)
    ));
    let gone = node.ask("DELETE", "/v1/disks/hung?mode=hard", "");
    assert!(gone.json()["lost"].is_string(), "{}", gone.body);
    node.add(
        "next",
        &json!({"disk": ["ram:1M"], "limits": {"group": "g"}}),
    );
    assert_eq!(node.disk("next")["tuning"]["limits"], json!({}));
    drop(silent);
    stuck.join().unwrap();
    node.daemon.finish();
}

#[test]
fn an_image_is_free_when_its_quiesced_disk_is_deleted() {
    let images = Scratch::new();
    let body = json!({"disk": [images.image("a", 1 << 20)]});
    let node = Node::start();
    node.add("a", &body);
    let quiet = node.ask("POST", "/v1/disks/a/quiesce", r#"{"seconds": 60}"#);
    assert_eq!(quiet.status, 200, "{}", quiet.body);
    assert_eq!(node.ask("DELETE", "/v1/disks/a", "").status, 200);
    assert!(wait_until(|| node.put("b", &body).status == 201));
    node.daemon.finish();
}

/// The timer of the quiet would hold the image until its time is over.
#[test]
fn a_quiet_whose_body_comes_after_the_end_of_its_disk_is_refused() {
    let images = Scratch::new();
    let body = json!({"disk": [images.image("a", 1 << 20)]});
    let node = Node::start();
    node.add("a", &body);
    let mut late = UnixStream::connect(node.daemon.socket()).unwrap();
    let quiet = r#"{"seconds": 60}"#;
    let length = quiet.len();
    write!(
        late,
        "POST /v1/disks/a/quiesce HTTP/1.1\r\nHost: node\r\nConnection: close\r\nExpect: 100-continue\r\n\
         Content-Length: {length}\r\n\r\n"
    )
    .unwrap();
    // It is sent when the handler waits for the body.
    let mut told = [0; 12];
    late.read_exact(&mut told).unwrap();
    assert_eq!(&told, b"HTTP/1.1 100");
    assert_eq!(node.ask("DELETE", "/v1/disks/a", "").status, 200);
    late.write_all(quiet.as_bytes()).unwrap();
    let mut answer = String::new();
    late.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("HTTP/1.1 409"), "{answer}");
    node.add("b", &body);
    node.daemon.finish();
}

/// A pipe without a writer has no end.
#[test]
fn what_is_no_file_in_the_state_folder_holds_nothing_up() {
    let node = Node::start();
    let node = killed(node, |folder| {
        let pipe = folder.join("state/disks/pipe.toml");
        cleave_tests::run("mkfifo", &[pipe.to_str().unwrap()]).unwrap();
        std::os::unix::fs::symlink("/dev/zero", folder.join("state/disks/zero.toml")).unwrap();
    });
    for id in ["pipe", "zero"] {
        assert_eq!(node.state(id), "failed");
        assert_eq!(
            node.ask("DELETE", &format!("/v1/disks/{id}"), "").status,
            200
        );
    }
    node.daemon.finish();
}

#[test]
fn the_limits_of_a_group_are_kept_once_and_outlive_a_kill() {
    let limits = |iops: u64| json!({"group": "g", "iops-total": iops});
    let node = Node::start();
    for id in ["a", "b"] {
        node.add(id, &json!({"disk": ["ram:1M"], "limits": limits(1000)}));
    }
    let change = r#"{"limits": {"iops-total": 700}}"#;
    assert_eq!(node.ask("PATCH", "/v1/disks/b", change).status, 200);
    let node = killed(node, |folder| {
        let read = |file: &str| std::fs::read_to_string(folder.join("state").join(file)).unwrap();
        assert_eq!(read("groups/g.toml"), "iops-total = 700\n");
        for file in ["disks/a.toml", "disks/b.toml"] {
            assert!(!read(file).contains("iops-total"), "{}", read(file));
        }
    });
    for id in ["a", "b"] {
        assert!(wait_until(|| node.state(id) == "serving"));
        let disk = node.disk(id);
        assert_eq!(disk["spec"]["limits"], limits(700), "{id}");
        assert_eq!(disk["tuning"]["limits"], json!({"iops-total": 700}), "{id}");
    }
    // The file of a group goes with its last disk.
    for (id, is_there) in [("a", true), ("b", false)] {
        node.remove(id);
        let file = node.daemon.scratch().join("state/groups/g.toml");
        assert_eq!(file.exists(), is_there);
    }
    node.daemon.finish();
}

/// Whoever mends the file of the disk, or of the group, finds the limits again.
#[test]
fn a_file_that_cannot_be_read_takes_no_limits_away() {
    let limits = json!({"group": "g", "iops-total": 700});
    let node = Node::start();
    node.add("a", &json!({"disk": ["ram:1M"], "limits": limits}));
    let text = |folder: &Path, file: &str| {
        std::fs::read_to_string(folder.join("state").join(file)).unwrap()
    };
    let put = |folder: &Path, file: &str, text: &str| {
        std::fs::write(folder.join("state").join(file), text).unwrap();
    };
    let mut disk = String::new();
    let node = killed(node, |folder| {
        disk = text(folder, "disks/a.toml");
        put(folder, "disks/a.toml", "queues = [");
    });
    assert_eq!(node.state("a"), "failed");
    let node = killed(node, |folder| {
        put(folder, "disks/a.toml", &disk);
        assert_eq!(text(folder, "groups/g.toml"), "iops-total = 700\n");
        put(folder, "groups/g.toml", "iops-total = 700\nbps-");
    });
    assert!(wait_until(|| node.state("a") == "serving"));
    assert_eq!(node.disk("a")["tuning"]["limits"], json!({}));
    let node = killed(node, |folder| {
        assert_eq!(text(folder, "groups/g.toml"), "iops-total = 700\nbps-");
        put(folder, "groups/g.toml", "iops-total = 700\n");
    });
    assert!(wait_until(|| node.state("a") == "serving"));
    assert_eq!(node.disk("a")["spec"]["limits"], limits);
    node.daemon.finish();
}

/// Each had the limits of its group in its own file, and one disk may speak for all.
#[test]
fn the_disks_of_an_earlier_version_come_back_with_the_limits_of_their_group() {
    let node = killed(Node::start(), |folder| {
        for (id, limits) in [
            ("a", ""),
            ("b", "iops-total = 1000\n"),
            ("c", "iops-total = 2000\n"),
        ] {
            let text = format!("disk = [\"ram:1M\"]\n[limits]\ngroup = \"g\"\n{limits}");
            std::fs::write(folder.join(format!("state/disks/{id}.toml")), text).unwrap();
        }
    });
    for id in ["a", "b", "c"] {
        assert!(wait_until(|| node.state(id) == "serving"));
        let disk = node.disk(id);
        let expected = json!({"group": "g", "iops-total": 1000});
        assert_eq!(disk["spec"]["limits"], expected, "{id}");
        assert_eq!(
            disk["tuning"]["limits"],
            json!({"iops-total": 1000}),
            "{id}"
        );
    }
    node.daemon.finish();
}

/// The kernel asks the server of a file for its permissions whenever its watch changes, as a busy disk has it do each second.
#[test]
fn a_busy_disk_that_hangs_does_not_hold_up_the_interface() {
    let node = Node::start();
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    node.add("other", &ram());
    node.add(
        "hung",
        &json!({"disk": [silent.file()], "queues": 1, "stop_deadline": 1, "direct": "off"}),
    );
    let mut client = node.open("hung", &small(1));
    // Nobody waits for its last write, which is not answered.
    std::thread::spawn(move || while client.queue(0).write(0, &[7; 4096]).is_ok() {});
    std::thread::sleep(Duration::from_millis(1500));
    silent.stop_answering();
    // Longer than between two changes of its watch.
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        let asked = Stopwatch::start();
        assert_eq!(node.state("other"), "serving");
        let took = asked.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut daemon = node.daemon;
    daemon.signal(Signal::TERM);
    assert!(daemon.log_has("lost: still in flight after 1 s"));
    drop(silent);
    let _ = daemon.wait();
}

/// As many as may be opened at once.
#[test]
fn disks_whose_server_is_silent_keep_no_other_disk_away() {
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    let node = killed(Node::start(), |folder| {
        let keep = |id: &str, disk: &str| {
            let file = folder.join(format!("state/disks/{id}.toml"));
            std::fs::write(file, format!("disk = [{disk:?}]\n")).unwrap();
        };
        for at in 0..64 {
            keep(&format!("hung{at}"), silent.file().to_str().unwrap());
        }
        keep("other", "ram:1M");
        silent.stop_answering();
    });
    assert!(wait_until(|| node.state("other") == "serving"));
    assert_eq!(node.state("hung0"), "opening");
    let waits = node.daemon.log_has("hung0: still waiting for");
    assert!(waits, "{}", node.daemon.log_tail());
    drop(silent);
    node.daemon.finish();
}

#[test]
fn a_disk_whose_server_has_become_silent_keeps_no_other_disk_away() {
    let Some((mount, silent)) = mounted() else {
        return;
    };
    let node = Node::start();
    node.add("silent", &json!({"disk": [silent.file()]}));
    silent.stop_answering();
    node.add("memory", &ram());
    node.add("image", &json!({"disk": [mount.image("a.img", 1 << 20)]}));
    let log = node.daemon.log();
    assert!(!log.contains("still waiting for"), "{log}");
    drop(silent);
    node.daemon.finish();
}

/// Guests that are served now count for more than those that may need many files.
#[test]
fn a_node_whose_disks_may_come_to_need_too_many_files_serves_them_and_says_so() {
    let folder = Scratch::in_memory();
    std::fs::create_dir_all(folder.join("state/disks")).unwrap();
    for at in 0..20 {
        let file = folder.join(&format!("state/disks/d{at}.toml"));
        std::fs::write(file, "disk = [\"ram:1M\"]\n").unwrap();
    }
    let (program, at) = (program_path().display(), folder.path().display());
    let line = format!(
        "sh -c 'ulimit -n 1024; exec {program} node --state {at}/state --run {at}/run --control {{socket}}'"
    );
    let daemon = Daemon::by_command(&line, 1 << 20, 1).unwrap();
    assert!(daemon.log_has("LimitNOFILE="), "{}", daemon.log());
    let node = Node { daemon };
    let is_served = |at: u32| node.state(&format!("d{at}")) == "serving";
    assert!(wait_until(|| (0..20).all(is_served)));
    node.daemon.finish();
}

/// An image is looked for in each of the folders of --images.
#[test]
fn a_folder_of_images_whose_server_is_silent_keeps_no_disk_of_another_away() {
    let Some((mount, silent)) = mounted() else {
        return;
    };
    let image = mount.image("a.img", 1 << 20);
    let folders = [silent.file(), mount.path().to_owned()];
    let mut options = vec![OsStr::new("--sandbox"), OsStr::new("off")];
    for folder in &folders {
        options.extend([OsStr::new("--images"), folder.as_ref()]);
    }
    let node = Node::start_with(Scratch::in_memory(), &options);
    silent.stop_answering();
    node.add("a", &json!({"disk": [image]}));
    drop(silent);
    node.daemon.finish();
}

/// As many as may be opened at once, and none of them is wanted any more.
#[test]
fn disks_that_are_deleted_while_their_server_is_silent_keep_no_other_disk_away() {
    let node = Node::start();
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    silent.stop_answering();
    let body = json!({"disk": [silent.file()], "persistent": false});
    for at in 0..64 {
        let id = format!("hung{at}");
        std::thread::scope(|scope| {
            let added = scope.spawn(|| node.put(&id, &body).status);
            let path = format!("/v1/disks/{id}");
            assert!(wait_until(|| node.ask("GET", &path, "").status == 200));
            assert_eq!(node.ask("DELETE", &path, "").status, 200);
            assert_eq!(added.join().unwrap(), 409);
        });
    }
    node.add("other", &ram());
    drop(silent);
    node.daemon.finish();
}

/// Few threads close what frontends send, and a frontend that leaves needs one of them.
#[test]
fn disks_that_cannot_be_closed_keep_no_frontend_away() {
    if !is_root() {
        return ignored("needs root, to mount");
    }
    let node = Node::start();
    node.add("other", &ram());
    let folder = Scratch::in_memory();
    // It ends before the node, which could not close its files.
    let silent = UnresponsiveFs::mount_caching(&folder, 4 << 20).unwrap();
    let mut file = std::fs::File::options()
        .write(true)
        .open(silent.file())
        .unwrap();
    // Before the first write alone the kernel asks for an attribute.
    file.write_all(&[7; 4096]).unwrap();
    let ids: Vec<_> = (0..40).map(|at| format!("d{at}")).collect();
    let body = json!({"disk": [silent.file()], "read_only": true, "queues": 1, "direct": "off",
        "persistent": false});
    ids.iter().for_each(|id| node.add(id, &body));
    silent.stop_answering();
    // Into the cache of the kernel, which has the file wait for the server when it is closed.
    let written = std::thread::spawn(move || file.write_all(&[7; 4096]));
    std::thread::sleep(Duration::from_millis(300));
    // Side by side, because each answer waits some seconds for the file to be closed.
    std::thread::scope(|scope| {
        for id in &ids {
            let node = &node;
            scope.spawn(move || {
                let gone = node.ask("DELETE", &format!("/v1/disks/{id}"), "");
                assert_eq!(gone.status, 200, "{}", gone.body);
            });
        }
    });
    for _ in 0..100 {
        exercise(&mut node.open("other", &small(1))).unwrap();
    }
    drop(silent);
    let _ = written.join();
    node.daemon.finish();
}

/// Orders wait in a queue, and nobody repeats one to end.
#[test]
fn a_disk_ends_although_it_is_given_very_many_other_orders() {
    let node = Node::start();
    let is_over = AtomicBool::new(false);
    let orders = "POST /v1/disks/d/resize HTTP/1.1\r\nHost: node\r\n\r\n".repeat(100);
    std::thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                let mut flood = UnixStream::connect(node.daemon.socket()).unwrap();
                let mut answers = flood.try_clone().unwrap();
                scope.spawn(move || std::io::copy(&mut answers, &mut std::io::sink()));
                while !is_over.load(Ordering::Relaxed) {
                    if flood.write_all(orders.as_bytes()).is_err() {
                        break;
                    }
                }
                let _ = flood.shutdown(Shutdown::Both);
            });
        }
        let gone = (0..3).map(|_| {
            node.add("d", &ram());
            std::thread::sleep(Duration::from_millis(50));
            let path = "/v1/disks/d?mode=drain";
            let request =
                format!("DELETE {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
            let time = Duration::from_secs(20);
            let answer = http::converse(node.daemon.socket(), request.as_bytes(), time);
            answer.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
        });
        let all = gone.take_while(|is_gone| *is_gone).count();
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(all, 3);
    });
    node.daemon.finish();
}

/// Descriptors whose close waits until `let_go`: a pipe, opened so many times, into which a thread splices while there is nothing to
/// splice.
struct HeldPipe {
    feed: UnixStream,
    holder: std::thread::JoinHandle<()>,
    opened: Vec<File>,
}

impl HeldPipe {
    fn new(count: usize) -> HeldPipe {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let opened = (0..count).map(|_| File::open(&path).unwrap()).collect();
        drop(reader);
        let (source, feed) = UnixStream::pair().unwrap();
        let (sender, thread) = std::sync::mpsc::channel();
        let holder = std::thread::spawn(move || {
            sender.send(rustix::thread::gettid()).unwrap();
            let flags = rustix::pipe::SpliceFlags::empty();
            let _ = rustix::pipe::splice(source, None, &writer, None, 4096, flags);
        });
        let stat = format!(
            "/proc/self/task/{}/stat",
            thread.recv().unwrap().as_raw_nonzero()
        );
        assert!(wait_until(|| std::fs::read_to_string(&stat)
            .unwrap()
            .contains(") S ")));
        HeldPipe {
            feed,
            holder,
            opened,
        }
    }

    fn let_go(mut self) {
        self.feed.write_all(b"x").unwrap();
        self.holder.join().unwrap();
    }
}

/// They cost that disk its frontend, and nobody else anything.
#[test]
fn descriptors_that_cannot_be_closed_are_felt_by_the_disk_they_came_to() {
    let node = Node::start();
    node.add("a", &ram());
    node.add("b", &ram());
    let mut hostile = node.open("a", &small(1));
    let mut neighbour = node.open("b", &small(1));
    let mut held = HeldPipe::new(128);
    // It owns the last copy of each then.
    node.daemon.signal(Signal::STOP);
    let kick = message::message(
        message::request::SET_VRING_KICK,
        message::VERSION | message::FLAG_NEED_REPLY,
        &[0; 8],
    );
    for file in held.opened.drain(..) {
        let socket = hostile.frontend().socket();
        socket.send_raw(&kick, &[file.as_fd()]).unwrap();
    }
    node.daemon.signal(Signal::CONT);
    assert!(closes_within(hostile.frontend().socket(), TIMEOUT));
    assert!(
        node.daemon.log_has("block all threads that close them"),
        "{}",
        node.daemon.log()
    );
    // A neighbour sends descriptors, leaves, and comes again.
    let call = neighbour.queue(0).call_descriptor().unwrap();
    let said = neighbour.frontend().set_vring_call(0, Some(call.as_fd()));
    said.unwrap();
    exercise(&mut neighbour).unwrap();
    drop(neighbour);
    exercise(&mut node.open("b", &small(1))).unwrap();
    // The door of the first one opens when they are closed.
    drop(hostile);
    let early = UnixStream::connect(node.socket("a")).unwrap();
    assert!(
        node.daemon.log_has("no frontend is accepted"),
        "{}",
        node.daemon.log()
    );
    held.let_go();
    drop(early);
    exercise(&mut node.open("a", &small(1))).unwrap();
    node.daemon.finish();
}

#[test]
fn a_check_of_the_size_that_hangs_is_answered_with_accepted() {
    let node = Node::start();
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    node.add(
        "hung",
        &json!({"disk": [silent.file()], "queues": 1, "stop_deadline": 1, "direct": "off"}),
    );
    silent.stop_answering();
    let answer = node.ask("POST", "/v1/disks/hung/resize", "");
    assert_eq!(answer.status, 202, "{}", answer.body);
    drop(silent);
    // The check that hung has failed with its server, and the next one begins.
    let mut answer = None;
    assert!(wait_until(|| {
        let again = node.ask("POST", "/v1/disks/hung/resize", "");
        answer = Some(again.status);
        again.status == 500
    }));
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
