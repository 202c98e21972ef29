//! The OpenAPI document of a node, against what the node answers.
#![allow(clippy::unwrap_used, clippy::panic)] // a mistake in the test ends the test

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cleave_api::Operation;
use cleave_tests::http::{Response, converse, events, events_after, fetch, get};
use cleave_tests::{
    Daemon, Node, Scratch, TIMEOUT, UnresponsiveFs, ignored, is_root, schema, small, wait_until,
};
use serde_json::{Value, json};

/// Method, path, the rest of the URL, body, and the status of the answer. In order: later ones need what earlier ones made.
const CALLS: &[(&str, &str, &str, &str, u16)] = &[
    ("GET", "/v1/openapi.json", "", "", 200),
    ("GET", "/v1/disks", "", "", 200),
    (
        "PUT",
        "/v1/disks/{id}",
        "",
        r#"{"disk":["IMAGE"],"queues":2,"limits":{"iops-total":5000}}"#,
        201,
    ),
    (
        "PUT",
        "/v1/disks/{id}",
        "",
        r#"{"disk":["IMAGE"],"queues":2,"limits":{"iops-total":5000}}"#,
        200,
    ),
    (
        "PUT",
        "/v1/disks/{id}",
        "",
        r#"{"disk":["IMAGE"],"queues":3}"#,
        409,
    ),
    (
        "PUT",
        "/v1/disks/{id}",
        "",
        r#"{"disk":["IMAGE"],"colour":3}"#,
        400,
    ),
    ("GET", "/v1/disks", "", "", 200),
    ("GET", "/v1/disks", "?full=1", "", 200),
    ("GET", "/v1/disks/{id}", "", "", 200),
    (
        "PATCH",
        "/v1/disks/{id}",
        "",
        r#"{"completion":"poll","limits":{"iops-total":0},"on_error":{"write":"hold"}}"#,
        200,
    ),
    (
        "PATCH",
        "/v1/disks/{id}",
        "",
        r#"{"vrings":{"0":"interrupt"},"spin_cpu_total":null,"split":"off"}"#,
        200,
    ),
    (
        "PATCH",
        "/v1/disks/{id}",
        "",
        r#"{"completion":"often"}"#,
        400,
    ),
    ("POST", "/v1/disks/{id}/resize", "", "", 200),
    ("POST", "/v1/disks/{id}/start", "", "", 200),
    ("POST", "/v1/disks/{id}/flush", "", "", 200),
    (
        "POST",
        "/v1/disks/{id}/quiesce",
        "",
        r#"{"seconds":30}"#,
        200,
    ),
    (
        "POST",
        "/v1/disks/{id}/quiesce",
        "",
        r#"{"seconds":30}"#,
        409,
    ),
    (
        "POST",
        "/v1/disks/{id}/quiesce",
        "",
        r#"{"seconds":0}"#,
        400,
    ),
    ("POST", "/v1/disks/{id}/resume", "", "", 200),
    ("POST", "/v1/disks/{id}/fail", "", "", 200),
    (
        "POST",
        "/v1/disks/{id}/snapshot",
        "",
        r#"{"to":"IMAGE.copy"}"#,
        422,
    ),
    ("GET", "/v1/events", "", "", 200),
    ("GET", "/v1/events", "?since=0&boot=another", "", 200),
    ("GET", "/v1/events", "?since=0", "", 400),
    ("GET", "/v1/node", "", "", 200),
    ("GET", "/healthz", "", "", 200),
    ("GET", "/readyz", "", "", 200),
    ("GET", "/metrics", "", "", 200),
    ("DELETE", "/v1/disks/{id}", "?mode=softly", "", 400),
    ("DELETE", "/v1/disks/{id}", "?mode=safe", "", 200),
];

struct Api {
    node: Node,
    document: Value,
}

impl Api {
    fn start() -> Api {
        let node = Node::start();
        let document = node.get("/v1/openapi.json");
        Api { node, document }
    }

    fn ask(&self, method: &str, url: &str, body: &str) -> Response {
        if !url.contains("events") {
            return self.node.ask(method, url, body);
        }
        // They have no end.
        let request = format!("{method} {url} HTTP/1.0\r\nHost: node\r\n\r\n");
        let time = Duration::from_secs(1);
        let answer = converse(self.node.daemon.socket(), request.as_bytes(), time).unwrap();
        Response::parse(&answer).unwrap()
    }

    /// Checks that the document has the answer: its status, its type, and a schema that its body fits.
    fn judge(&self, method: &str, path: &str, answer: &Response) -> Result<(), String> {
        let operation = &self.document["paths"][path][method.to_lowercase()];
        let response = &operation["responses"][answer.status.to_string()];
        let content = response["content"]
            .as_object()
            .ok_or("this status is not in the document")?;
        let header = answer.header.to_lowercase();
        let kind = content.keys().find(|kind| header.contains(kind.as_str()));
        let kind = kind.ok_or_else(|| format!("another content type: {header}"))?;
        let fits = |value: &Value| schema::check(&self.document, &content[kind]["schema"], value);
        match kind.as_str() {
            "text/plain" => fits(&json!(answer.body)),
            "application/x-ndjson" => answer
                .body
                .lines()
                .try_for_each(|line| fits(&serde_json::from_str(line).unwrap())),
            _ => fits(&answer.json()),
        }
    }

    /// All that the document has.
    fn operations(&self) -> BTreeSet<(String, String)> {
        let paths = self.document["paths"].as_object().unwrap();
        let of = |(path, methods): (&String, &Value)| -> Vec<_> {
            let methods = methods.as_object().unwrap();
            methods
                .keys()
                .map(|method| (method.to_uppercase(), path.clone()))
                .collect()
        };
        paths.iter().flat_map(of).collect()
    }
}

#[test]
fn every_answer_is_in_the_document() {
    let api = Api::start();
    let image = api.node.daemon.scratch().image("a.img", 1 << 20);
    let mut called = BTreeSet::new();
    for (method, path, query, body, status) in CALLS {
        let url = format!("{}{query}", path.replace("{id}", "d1"));
        let body = body.replace("IMAGE", image.to_str().unwrap());
        if *path == "/v1/disks/{id}/resize" {
            // With all the figures of a disk that was used.
            cleave_tests::exercise(&mut api.node.open("d1", &small(1))).unwrap();
            assert!(wait_until(
                || api.node.disk("d1")["connected"] == json!(false)
            ));
        }
        let answer = api.ask(method, &url, &body);
        assert_eq!(answer.status, *status, "{method} {url}: {}", answer.body);
        let judged = api.judge(method, path, &answer);
        assert_eq!(judged, Ok(()), "{method} {url}: {}", answer.body);
        if !body.is_empty() && answer.status < 300 {
            let taken = &api.document["paths"][path][method.to_lowercase()]["requestBody"]["content"]
                ["application/json"];
            let sent = serde_json::from_str(&body).unwrap();
            assert_eq!(
                schema::check(&api.document, &taken["schema"], &sent),
                Ok(()),
                "{method} {url}: {body}"
            );
        }
        called.insert((method.to_string(), path.to_string()));
    }
    assert_eq!(called, api.operations(), "called, and documented");
    for (method, path) in api
        .operations()
        .iter()
        .filter(|(_, path)| path.contains("{id}"))
    {
        // A PUT adds it, if its body is right.
        let body = if method == "PATCH" { "{}" } else { "" };
        let answer = api.ask(method, &path.replace("{id}", "nobody"), body);
        assert_eq!(
            answer.status,
            if method == "PUT" { 400 } else { 404 },
            "{method} {path}"
        );
        assert_eq!(
            api.judge(method, path, &answer),
            Ok(()),
            "{method} {path}: {}",
            answer.body
        );
        let answer = api.ask(method, &path.replace("{id}", "%ff"), body);
        assert_eq!(answer.status, 400, "{method} {path}");
        assert_eq!(
            api.judge(method, path, &answer),
            Ok(()),
            "{method} {path}: {}",
            answer.body
        );
    }
    api.node.daemon.finish();
}

#[test]
fn what_the_document_does_not_have_is_refused() {
    let api = Api::start();
    let refusal = json!({"$ref": "#/components/schemas/Problem"});
    let paths = api.document["paths"].as_object().unwrap();
    for (path, methods) in paths {
        for method in ["GET", "PUT", "POST", "PATCH", "DELETE"] {
            if methods.get(method.to_lowercase()).is_some() {
                continue;
            }
            let answer = api.ask(method, &path.replace("{id}", "d1"), "");
            assert_eq!(answer.status, 405, "{method} {path}");
            assert_eq!(
                schema::check(&api.document, &refusal, &answer.json()),
                Ok(()),
                "{method} {path}"
            );
        }
    }
    for path in ["/", "/v1", "/v2/disks", "/v1/disks/d1/sleep", "/v1/disk"] {
        let answer = api.ask("GET", path, "");
        assert_eq!(answer.status, 404, "{path}");
        assert_eq!(
            schema::check(&api.document, &refusal, &answer.json()),
            Ok(()),
            "{path}"
        );
    }
    assert_eq!(
        api.document,
        serde_json::from_str::<Value>(include_str!("../docs/openapi.json")).unwrap()
    );
    api.node.daemon.finish();
}

/// The events of a node from now on.
fn listen(node: &Node) -> impl Iterator<Item = Value> + use<> {
    events(node.daemon.socket())
}

/// As an orchestrator does when its host starts.
#[test]
fn every_request_of_a_crowd_is_answered_and_a_listener_stays() {
    let node = Node::start();
    let mut events = listen(&node);
    let body = json!({"disk": ["ram:1M"], "queues": 1, "persistent": false});
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let add = |number: usize| {
            let (node, body) = (&node, &body);
            move || node.put(&format!("d{number}"), body).status
        };
        let asked: Vec<_> = (0..64).map(|number| scope.spawn(add(number))).collect();
        asked.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(statuses, vec![201; 64]);
    assert_eq!(node.get("/v1/disks").as_array().unwrap().len(), 64);
    let serving = events.by_ref().filter(|event| event["event"] == "serving");
    assert_eq!(serving.take(64).count(), 64);
    node.daemon.finish();
}

/// A disk in memory that does not outlive its node.
fn ram() -> Value {
    json!({"disk": ["ram:1M"], "queues": 1, "persistent": false})
}

/// Has an event happen to disk `d1` for each of these values, of which none is that before.
fn change(node: &Node, values: RangeInclusive<u64>) {
    for value in values {
        let body = json!({ "coalesce_us": value }).to_string();
        assert_eq!(node.ask("PATCH", "/v1/disks/d1", &body).status, 200);
    }
}

#[test]
fn events_that_were_lost_are_told_without_another_event() {
    const CHANGES: u64 = 2500;
    let node = Node::start();
    node.add("d1", &ram());
    let (first, _, events) = events_after(node.daemon.socket(), "");
    // More than the socket has room for and the node keeps.
    change(&node, 1..=CHANGES);
    let mut seq = first["seq"].as_u64().unwrap();
    let (mut heard, mut lost) = (0, 0);
    for event in events {
        match event["events"].as_u64() {
            Some(events) => lost += events,
            None => heard += 1,
        }
        seq += event["events"].as_u64().unwrap_or(1);
        assert_eq!(event["seq"], json!(seq));
        if heard + lost == CHANGES {
            break;
        }
    }
    assert_ne!(lost, 0);
    node.daemon.finish();
}

/// The states of all disks, as a program that listens has them when it hears that `last` is served.
fn followed(node: &Node, last: &str) -> BTreeMap<String, String> {
    let (first, disks, events) = events_after(node.daemon.socket(), "");
    let (mut states, mut seq) = (BTreeMap::new(), first["seq"].as_u64().unwrap());
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    for disk in disks {
        assert_eq!(disk["seq"], first["seq"]);
        states.insert(text(&disk["id"]), text(&disk["state"]));
    }
    if states.get(last).is_some_and(|state| state == "serving") {
        return states;
    }
    for event in events {
        seq += 1;
        assert_eq!(event["seq"], json!(seq), "{event}");
        let (disk, name) = (text(&event["disk"]), text(&event["event"]));
        match &*name {
            "opening" | "serving" | "ending" | "ended" => states.insert(disk.clone(), name.clone()),
            "removed" => states.remove(&disk),
            _ => None,
        };
        if disk == last && name == "serving" {
            break;
        }
    }
    states
}

#[test]
fn a_listener_knows_all_disks_whenever_it_comes() {
    let node = Node::start();
    node.add("d0", &ram());
    let (_, disks, mut events) = events_after(node.daemon.socket(), "");
    let row = &node.get("/v1/disks")[0];
    assert_eq!(disks.len(), 1);
    for (name, value) in row.as_object().unwrap() {
        assert_eq!(disks[0][name], *value, "{name}");
    }
    assert_eq!(disks[0]["disk"], json!("d0"));
    node.add("d1", &ram());
    let opening = events.next().unwrap();
    assert_eq!(
        [&opening["event"], &opening["disk"], &opening["name"]],
        [&json!("opening"), &json!("d1"), &json!("ram:1M")]
    );
    node.remove("d0");
    node.remove("d1");
    let removed = events.filter(|event| event["event"] == "removed");
    assert_eq!(removed.take(2).count(), 2);
    // They come while disks are added and removed.
    std::thread::scope(|scope| {
        let listeners: Vec<_> = (0..8)
            .map(|number: u64| {
                for disk in 0..4 {
                    node.add(&format!("{number}-{disk}"), &ram());
                }
                let listener = scope.spawn(|| followed(&node, "last"));
                node.remove(&format!("{number}-0"));
                listener
            })
            .collect();
        node.add("last", &ram());
        let all = node.get("/v1/disks");
        let all = all.as_array().unwrap().iter();
        let all: BTreeMap<_, _> = all
            .map(|disk| [&disk["id"], &disk["state"]].map(|text| text.as_str().unwrap().to_owned()))
            .map(|[id, state]| (id, state))
            .collect();
        assert_eq!(all.len(), 8 * 3 + 1);
        for listener in listeners {
            assert_eq!(listener.join().unwrap(), all);
        }
    });
    node.daemon.finish();
}

#[test]
fn a_listener_that_comes_back_misses_nothing() {
    let node = Node::start();
    let socket = node.daemon.socket();
    node.add("d1", &ram());
    let (first, disks, events) = events_after(socket, "");
    assert_eq!((first["replayed"].as_bool(), disks.len()), (Some(false), 1));
    drop(events);
    let (seq, boot) = (
        first["seq"].as_u64().unwrap(),
        first["boot"].as_str().unwrap(),
    );
    let back = |seq: u64, boot: &str| events_after(socket, &format!("since={seq}&boot={boot}"));
    change(&node, 1..=3);
    let (again, disks, events) = back(seq, boot);
    assert_eq!(
        (
            &again["replayed"],
            &again["seq"],
            &again["boot"],
            disks.len()
        ),
        (&json!(true), &json!(seq), &json!(boot), 0)
    );
    // And goes on.
    change(&node, 4..=4);
    for (event, number) in events.take(4).zip(seq + 1..) {
        assert_eq!(
            (&event["event"], &event["seq"]),
            (&json!("changed"), &json!(number))
        );
    }
    // Events of another process, and of times to come.
    for (seq, boot) in [(seq, "another"), (seq + 5, boot)] {
        let (first, disks, _) = back(seq, boot);
        assert_eq!((first["replayed"].as_bool(), disks.len()), (Some(false), 1));
    }
    // They are not all kept any more.
    change(&node, 5..=1104);
    let (first, disks, _) = back(seq, boot);
    assert_eq!((&first["replayed"], disks.len()), (&json!(false), 1));
    assert_eq!(first["seq"], json!(seq + 4 + 1100));
    let other = Node::start();
    let (first, ..) = events_after(other.daemon.socket(), "");
    assert_ne!(first["boot"], json!(boot));
    other.daemon.finish();
    node.daemon.finish();
}

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
    let scratch = Scratch::in_memory();
    let control = scratch.join("control");
    let daemon = Daemon::serve(&["--disk", "ram:1M", "--control", control.to_str().unwrap()]);
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

#[test]
fn a_change_that_another_disk_of_the_group_brought_is_told() {
    let node = Node::start();
    let disk = |limits: Value| json!({"disk": ["ram:1M"], "queues": 1, "persistent": false, "limits": limits});
    node.add("a", &disk(json!({"group": "g", "iops-total": 500})));
    node.add("b", &disk(json!({"group": "g"})));
    let before = node.disk("b")["generation"].clone();
    let mut events = listen(&node).filter(|event| event["event"] == "changed");
    let change = r#"{"limits": {"iops-total": 900}}"#;
    assert_eq!(node.ask("PATCH", "/v1/disks/a", change).status, 200);
    let told: Vec<Value> = events.by_ref().take(2).collect();
    let of = |id: &str| told.iter().find(|event| event["disk"] == id).unwrap();
    for id in ["a", "b"] {
        let disk = node.disk(id);
        assert_eq!(of(id)["generation"], disk["generation"]);
        assert_eq!(of(id)["tuning"]["limits"], json!({"iops-total": 900}));
    }
    assert_ne!(of("b")["generation"], before);
    node.daemon.finish();
}

/// Otherwise it would be served again after the next start of the node.
#[test]
fn a_disk_whose_file_cannot_be_removed_stays_in_the_list() {
    let node = Node::start();
    let image = node.daemon.scratch().image("a.img", 1 << 20);
    let body = json!({"disk": [image], "queues": 1});
    node.add("d1", &body);
    let file = node.daemon.scratch().join("state/disks/d1.toml");
    // Not even root removes a folder as a file.
    let obstruct = || {
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
    };
    let delete = || node.ask("DELETE", "/v1/disks/d1", "");
    obstruct();
    for _ in 0..2 {
        let failed = delete();
        assert_eq!(failed.status, 500, "{}", failed.body);
        let why = failed.error();
        assert!(why.contains("cannot be removed"), "{why}");
        let disk = node.disk("d1");
        assert_eq!(
            (&disk["state"], &disk["error"]),
            (&json!("ended"), &json!(why))
        );
    }
    // A disk that cannot be opened does not take its place.
    let missing = json!({"disk": ["/no/such/file"], "queues": 1});
    assert_eq!(node.put("d1", &missing).status, 422);
    assert_eq!(node.state("d1"), "ended");
    std::fs::remove_dir(&file).unwrap();
    assert_eq!(delete().status, 200);
    assert_eq!(delete().status, 404);
    // One that can be opened does.
    node.add("d1", &body);
    obstruct();
    assert_eq!(delete().status, 500);
    std::fs::remove_dir(&file).unwrap();
    node.add("d1", &body);
    assert_eq!(node.state("d1"), "serving");
    assert_eq!(delete().status, 200);
    node.daemon.finish();
}

#[test]
fn a_change_is_refused_if_somebody_else_was_faster() {
    let node = Node::start();
    let body = json!({"disk": ["ram:1M"], "queues": 1, "labels": {"owner": "web"}});
    node.add("d1", &body);
    let disk = node.disk("d1");
    assert_eq!(disk["labels"], body["labels"]);
    assert_eq!(node.get("/v1/disks")[0]["labels"], body["labels"]);
    let ask = |method: &str, generation: &str, body: &str| {
        let request = format!(
            "{method} /v1/disks/d1 HTTP/1.0\r\nHost: node\r\nIf-Match: {generation}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = converse(node.daemon.socket(), request.as_bytes(), TIMEOUT).unwrap();
        Response::parse(&answer).unwrap()
    };
    let first = format!("\"{}\"", disk["generation"].as_str().unwrap());
    let change = r#"{"spin_worth": 7, "labels": {"owner": "db"}}"#;
    let changed = ask("PATCH", &first, change);
    assert_eq!(changed.status, 200, "{}", changed.body);
    let second = format!("\"{}\"", changed.json()["generation"].as_str().unwrap());
    assert!(
        changed.header.contains(&format!("etag: {second}")),
        "{}",
        changed.header
    );
    assert_ne!(second, first);
    for (method, sent) in [
        ("PATCH", change),
        ("PUT", &body.to_string()),
        ("DELETE", ""),
    ] {
        let late = ask(method, &first, sent);
        assert_eq!(late.status, 412, "{method}: {}", late.body);
        assert_eq!(late.json()["type"], "urn:cleave:generation-differs");
    }
    assert_eq!(node.disk("d1")["labels"], json!({"owner": "db"}));
    let listed = |query: &str| {
        node.get(&format!("/v1/disks?{query}"))
            .as_array()
            .unwrap()
            .len()
    };
    assert_eq!(
        (listed("label=owner%3Ddb"), listed("label=owner=web&full=1")),
        (1, 0)
    );
    for query in ["label=owner", "full=true", "lable=a=b", "full=1&full=1"] {
        let refused = node.ask("GET", &format!("/v1/disks?{query}"), "");
        assert_eq!(refused.status, 400, "{query}: {}", refused.body);
    }
    assert_eq!(ask("PATCH", "second", change).status, 400);
    // Taken back, it is the first generation again; and an equal description changes nothing.
    let back = ask("PUT", &second, &body.to_string()).json();
    assert_eq!(back["generation"], disk["generation"]);
    assert_eq!(ask("DELETE", "*", "").status, 200);
    assert_eq!(ask("PUT", "*", &body.to_string()).status, 412);
    node.daemon.finish();
}

/// How often the node has this file open.
fn opened(node: &Node, file: &Path) -> usize {
    let folder = format!("/proc/{}/fd", node.daemon.pid());
    let links = std::fs::read_dir(folder).unwrap();
    let links = links.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    links.filter(|link| link == file).count()
}

#[test]
fn a_disk_that_is_deleted_has_closed_its_image() {
    let node = Node::start();
    let image = node.daemon.scratch().image("a.img", 1 << 20);
    let image = image.canonicalize().unwrap();
    let body = json!({"disk": [image], "queues": 1, "persistent": false});
    for _ in 0..300 {
        node.add("d1", &body);
        assert_ne!(opened(&node, &image), 0);
        assert_eq!(node.ask("DELETE", "/v1/disks/d1", "").status, 200);
        assert_eq!(opened(&node, &image), 0);
    }
    node.daemon.finish();
}

/// A copy that was taken below the disk is good only if the disk was quiet until then.
#[test]
fn a_resume_says_whether_the_disk_was_quiet_until_then() {
    let node = Node::start();
    node.add(
        "d1",
        &json!({"disk": ["ram:1M"], "queues": 1, "persistent": false}),
    );
    let post = |what: &str, body: &Value| {
        let answer = node.ask("POST", &format!("/v1/disks/d1/{what}"), &body.to_string());
        assert_eq!(answer.status, 200, "{what} {body}: {}", answer.body);
        answer.json()
    };
    let quiesce = || post("quiesce", &json!({"seconds": 60}))["quiet"].clone();
    let is_quiet = || !node.disk("d1")["quiesced_seconds"].is_null();
    let (over, lasted) = (
        json!({"requests": 0, "quiesced": false}),
        json!({"requests": 0, "quiesced": true}),
    );
    quiesce();
    assert_eq!(post("resume", &json!({})), lasted);
    assert_eq!(post("resume", &json!({})), over);
    // A second backup takes the place of the first, whose time was over.
    let first = quiesce();
    post("resume", &json!({}));
    let second = quiesce();
    assert_ne!(first, second);
    assert_eq!(post("resume", &json!({ "quiet": first })), over);
    assert!(is_quiet());
    // Held requests are another matter.
    assert_eq!(post("resume", &json!({"held": true})), over);
    assert!(is_quiet());
    assert_eq!(post("resume", &json!({ "quiet": second })), lasted);
    assert!(!is_quiet());
    let both = json!({"quiet": "a", "held": true}).to_string();
    assert_eq!(node.ask("POST", "/v1/disks/d1/resume", &both).status, 400);
    assert_eq!(post("quiesce", &json!({"seconds": 1}))["state"], "quiesced");
    assert!(wait_until(|| !is_quiet()));
    assert_eq!(post("resume", &json!({})), over);
    node.daemon.finish();
}

/// The size that is told in the answer to a resize, how much of it is missing, and the status.
fn resized(node: &Node, id: &str) -> (u16, Value, Value) {
    let answer = node.ask("POST", &format!("/v1/disks/{id}/resize"), "");
    let disk = answer.json();
    let short = disk["store"]["short_bytes"].clone();
    (answer.status, disk["size_bytes"].clone(), short)
}

fn set_len(image: &Path, bytes: u64) {
    let file = std::fs::File::options().write(true).open(image).unwrap();
    file.set_len(bytes).unwrap();
}

fn short_of(node: &Node, id: &str) -> String {
    let metrics = node.ask("GET", "/metrics", "").body;
    let name = format!("cleave_disk_short_bytes{{disk=\"{id}\"}} ");
    let mut found = metrics.lines().filter_map(|line| line.strip_prefix(&name));
    found.next().unwrap_or_default().to_owned()
}

#[test]
fn a_resize_answers_with_what_was_found() {
    let node = Node::start();
    let image = node.daemon.scratch().image("a.img", 4 << 20);
    node.add("d1", &json!({"disk": [image]}));
    let mut events = listen(&node);
    for (bytes, told, short) in [
        (8 << 20, 8 << 20, 0),
        (8 << 20, 8 << 20, 0),
        (6 << 20, 8 << 20, 2 << 20),
        (8 << 20, 8 << 20, 0),
        (9 << 20, 9 << 20, 0),
    ] {
        set_len(&image, bytes);
        let expected = (200, json!(told), json!(short));
        assert_eq!(resized(&node, "d1"), expected, "{bytes}");
        assert_eq!(short_of(&node, "d1"), short.to_string(), "{bytes}");
    }
    let mut heard = || {
        let event = events.find(|event| event["event"] == "resized").unwrap();
        (event["size_bytes"].as_u64(), event["short_bytes"].as_u64())
    };
    for (told, short) in [(8 << 20, 0), (8 << 20, 2 << 20), (8 << 20, 0), (9 << 20, 0)] {
        assert_eq!(heard(), (Some(told), Some(short)));
    }
    let logged = node.daemon.log_has("a.img: is as large as before again");
    assert!(logged, "{}", node.daemon.log());
    node.daemon.finish();
}

/// The generator whose client drives a node, pinned so that a new one does not change what is tested.
const GENERATOR: &str = "openapi-python-client==0.29.0";

/// Runs a program to its end. The error is what it printed.
fn run_program(command: &mut Command) -> Result<String, String> {
    let ended = command.output().map_err(|error| error.to_string())?;
    let printed = [ended.stdout, ended.stderr].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    match ended.status.success() {
        true => Ok(printed),
        false => Err(format!("{command:?}: {printed}")),
    }
}

/// Installs the generator below the target folder. Returns the folder of its programs, or why there is none.
fn install_generator() -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(GENERATOR);
    let programs = folder.join("bin");
    if programs.join("openapi-python-client").exists() {
        return Ok(programs);
    }
    run_program(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    let mut pip = Command::new(programs.join("pip"));
    run_program(pip.args([
        "install",
        "--quiet",
        "--timeout",
        "20",
        "--retries",
        "1",
        GENERATOR,
    ]))?;
    Ok(programs)
}

/// `putDisk` as the module of a Python package: `put_disk`.
fn module_name(operation: &str) -> String {
    let each = operation.chars().map(|c| match c.is_ascii_uppercase() {
        true => format!("_{}", c.to_ascii_lowercase()),
        false => c.to_string(),
    });
    each.collect()
}

#[test]
fn a_generated_client_has_every_operation_and_drives_a_node() {
    let programs = match install_generator() {
        Ok(programs) => programs,
        Err(why) => {
            // Past the capture of the test runner.
            let _ = writeln!(std::io::stderr(), "skipped: {GENERATOR}: {why}");
            return;
        }
    };
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
    let scratch = Scratch::in_memory();
    let client = scratch.join("cleave_node");
    let path = std::env::var("PATH").unwrap_or_default();
    let mut generate = Command::new(programs.join("openapi-python-client"));
    generate
        .args(["generate", "--meta", "none", "--fail-on-warning", "--path"])
        .arg(document)
        .arg("--output-path")
        .arg(&client)
        // It formats what it has written with a program beside it.
        .env("PATH", format!("{}:{path}", programs.display()));
    let printed = run_program(&mut generate).unwrap();
    for word in ["will not be generated", "nsupported", "WARNING"] {
        assert!(!printed.contains(word), "{printed}");
    }
    let document: Value = serde_json::from_str(include_str!("../docs/openapi.json")).unwrap();
    let methods = document["paths"].as_object().unwrap().values();
    let operations: Vec<_> = methods
        .flat_map(|methods| methods.as_object().unwrap().values())
        .collect();
    assert_eq!(operations.len(), Operation::ALL.len());
    for operation in operations {
        let name = module_name(operation["operationId"].as_str().unwrap());
        let folder = client
            .join("api")
            .join(operation["tags"][0].as_str().unwrap());
        assert!(folder.join(format!("{name}.py")).exists(), "{name}");
    }
    let node = Node::start();
    let mut drive = Command::new(programs.join("python"));
    drive
        .arg("-B")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/generated_client.py"))
        .arg(node.daemon.socket())
        .env("PYTHONPATH", scratch.path());
    run_program(&mut drive).unwrap_or_else(|why| panic!("{why}\n{}", node.daemon.log_tail()));
    node.daemon.finish();
}
