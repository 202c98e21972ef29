//! Disks are kept in the state folder, and come back with the node.

use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use cleave_tests::{Node, Scratch, exercise, run_to_exit, small, wait_until};
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;
use serde_json::json;

use crate::state_file::{SlowFile, is_kept};
use crate::{killed, ram};

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
    assert_eq!(second.code, Some(1), "{}", second.stderr);
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

/// One that was killed has the folder until its last I/O has ended.
#[test]
fn a_folder_of_state_that_is_still_locked_is_waited_for() {
    let scratch = Scratch::in_memory();
    let state = scratch.join("state");
    std::fs::create_dir(&state).unwrap();
    let held = std::fs::File::open(&state).unwrap();
    flock(&held, FlockOperation::LockExclusive).unwrap();
    let in_flight = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        drop(held);
    });
    let node = Node::start_with(scratch, &[]);
    in_flight.join().unwrap();
    node.add("a", &ram());
    node.daemon.finish();
}

/// A file system that is mounted later, say. The file of a disk is read again like a disk is opened again.
#[test]
fn a_disk_whose_file_cannot_be_read_at_the_start_is_served_when_it_can() {
    let node = Node::start();
    node.add("a", &json!({"disk": ["ram:1M"]}));
    let node = killed(node, |folder| {
        let file = folder.join("state/disks/a.toml");
        std::fs::rename(&file, folder.join("a.toml")).unwrap();
        std::os::unix::fs::symlink(folder.join("later"), &file).unwrap();
    });
    assert_eq!(node.state("a"), "failed");
    let started = node.ask("POST", "/v1/disks/a/start", "");
    assert!(
        started.error().contains("a.toml cannot be read"),
        "{}",
        started.body
    );
    let folder = node.daemon.scratch().path();
    std::fs::rename(folder.join("a.toml"), folder.join("later")).unwrap();
    assert!(wait_until(|| node.state("a") == "serving"));
    exercise(&mut node.open("a", &small(1))).unwrap();
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
        // It has no reason while it is tried again.
        let is_refused = || {
            let disk = node.disk(id);
            disk["state"] == "failed" && disk.to_string().contains("is a qcow2 image")
        };
        assert!(wait_until(is_refused), "{}", node.disk(id));
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
    // It has no reason while it is tried again.
    let is_told = || {
        let disk = node.disk("a");
        disk["state"] == "failed" && disk["error"].to_string().contains("does not exist")
    };
    assert!(wait_until(is_told), "{}", node.disk("a"));
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
