//! The report of a node, or of a daemon of a single disk, about itself.

use std::ffi::OsStr;

use cleave_tests::http::{events_after, fetch, get};
use cleave_tests::{Daemon, Node, Scratch, UnresponsiveFs, ignored, is_root, wait_until};
use serde_json::{Value, json};

use crate::ram;

#[test]
fn a_node_tells_what_it_is_and_what_it_has_room_for() {
    let scratch = Scratch::in_memory();
    let images = scratch.join("images");
    std::fs::create_dir(&images).unwrap();
    let options = ["--images", images.to_str().unwrap(), "--pool", "fast=0"].map(OsStr::new);
    let node = Node::start_with(scratch, &options);
    let before = node.get("/v1/node");
    let folder = |name: &str| json!(node.daemon.scratch().join(name));
    for (field, value) in [
        ("kind", json!("node")),
        ("pid", json!(node.daemon.pid())),
        ("state", folder("state")),
        ("run", folder("run")),
        ("images", json!([images.canonicalize().unwrap()])),
        ("ceph", json!(false)),
        ("pools", json!([{"name": "fast", "cpus": [0]}])),
        ("disks", json!({"count": 0, "max": 1024})),
    ] {
        assert_eq!(before[field], value, "{field}");
    }
    let (first, ..) = events_after(node.daemon.socket(), "");
    assert_eq!(before["boot"], first["boot"]);
    node.add("d1", &ram());
    let after = node.get("/v1/node");
    assert_eq!(after["disks"]["count"], json!(1));
    let number = |report: &Value, path: &str| report.pointer(path).unwrap().as_f64().unwrap();
    let needed = [&before, &after].map(|report| number(report, "/open_files/needed"));
    assert!(needed[0] < needed[1], "{needed:?}");
    assert!(needed[1] < number(&after, "/open_files/max"));
    assert_eq!(before["start_seconds"], after["start_seconds"]);
    let times = [
        number(&before, "/start_seconds"),
        number(&before, "/now_seconds"),
        number(&after, "/now_seconds"),
    ];
    assert!(times.is_sorted(), "{times:?}");
    node.daemon.finish();
}

#[test]
fn a_single_disk_tells_what_it_is_as_well() {
    let (daemon, control) = Daemon::serve_with_control(&["--disk", "ram:1M"]);
    let node = get(&control, "/v1/node");
    assert_eq!(
        (&node["kind"], &node["pid"], &node["disks"]),
        (
            &json!("disk"),
            &json!(daemon.pid()),
            &json!({"count": 1, "max": 1})
        )
    );
    assert_eq!(node.get("state"), None);
    // Nothing does that is not a service manager.
    assert_eq!(node["keeps"], json!(false));
    let room = &node["open_files"];
    assert!(room["needed"].as_u64() <= room["max"].as_u64(), "{room}");
    for path in ["/healthz", "/readyz"] {
        assert_eq!(fetch(&control, "GET", path, "").body, "ok\n");
    }
    let (_, disks, _) = events_after(&control, "");
    assert_eq!(
        (disks.len(), &disks[0]["state"], &disks[0]["name"]),
        (1, &json!("serving"), &json!("ram:1M"))
    );
    daemon.finish();
}

#[test]
fn a_node_is_not_ready_while_a_disk_is_being_opened() {
    if !is_root() {
        return ignored("needs root, to mount");
    }
    let folder = Scratch::in_memory();
    let server = UnresponsiveFs::mount(&folder, 1 << 20).unwrap();
    let node = Node::start();
    node.add("d0", &ram());
    let body = json!({"disk": [server.file()], "queues": 1});
    let ready = || node.ask("GET", "/readyz", "");
    assert_eq!((ready().status, &*ready().body), (200, "ok\n"));
    server.stop_answering();
    std::thread::scope(|scope| {
        let put = scope.spawn(|| node.put("d1", &body).status);
        assert!(wait_until(|| ready().status == 503));
        let why = ready().error();
        assert!(why.starts_with("1 disk is being opened"), "{why}");
        assert_eq!(node.ask("GET", "/healthz", "").body, "ok\n");
        // Its storage is gone then.
        drop(server);
        assert_eq!(put.join().unwrap(), 422);
    });
    assert_eq!(ready().status, 200);
    node.daemon.finish();
}
