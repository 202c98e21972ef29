//! Orders to a disk are answered with what became of them.

use std::path::Path;

use cleave_tests::http::{Response, converse};
use cleave_tests::{Node, TIMEOUT, wait_until};
use serde_json::{Value, json};

use crate::events::listen;

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
    assert_eq!(post("quiesce", &json!({"seconds": 3}))["state"], "quiesced");
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
