//! Events of a node: whoever listens misses nothing, or hears that something was lost.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use cleave_tests::Node;
use cleave_tests::http::{events, events_after};
use serde_json::{Value, json};

use crate::ram;

/// The events of a node from now on.
pub(crate) fn listen(node: &Node) -> impl Iterator<Item = Value> + use<> {
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
