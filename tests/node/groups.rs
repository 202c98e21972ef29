//! The limits of a group belong to the group: they are kept once, and end with its last disk.

use std::path::Path;

use cleave_tests::{Node, Scratch, small, wait_until};
use serde_json::json;

use crate::state_file::SlowFile;
use crate::{killed, mounted};

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

/// The client was told that the disk is as before, so the next node must not serve the other image to its guest.
#[test]
fn a_put_that_is_refused_leaves_the_file_of_the_disk_before() {
    let images = Scratch::new();
    let [first, second] = ["first", "second"].map(|name| images.image(name, 1 << 20));
    let node = Node::start();
    node.add("a", &json!({"disk": [first]}));
    let node = killed(node, |_| {
        std::fs::rename(&first, images.join("away")).unwrap();
    });
    assert!(wait_until(|| node.state("a") == "failed"));
    let kept = || {
        let path = node.daemon.scratch().join("state/disks/a.toml");
        std::fs::read_to_string(path).unwrap()
    };
    let before = kept();
    // The other disk can be opened, and its own file written, but not that of its group.
    let in_the_way = node.daemon.scratch().join("state/groups/.g.new");
    std::fs::create_dir(&in_the_way).unwrap();
    let limits = json!({"group": "g", "iops-total": 500});
    let other = json!({"disk": [second], "limits": limits});
    // Refused otherwise while the disk is tried again.
    assert!(wait_until(|| node.put("a", &other).status == 500));
    assert_eq!(kept(), before);
    std::fs::remove_dir(&in_the_way).unwrap();
    assert!(wait_until(|| node.put("a", &other).status == 201));
    assert_ne!(kept(), before);
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
    // Nor does a disk that comes and goes meanwhile.
    let alone = json!({"disk": ["ram:1M"], "limits": {"group": "g"}});
    node.add("b", &alone);
    assert_eq!(node.disk("b")["spec"]["limits"], limits);
    node.remove("b");
    let node = killed(node, |folder| {
        put(folder, "disks/a.toml", &disk);
        assert_eq!(text(folder, "groups/g.toml"), "iops-total = 700\n");
        put(folder, "groups/g.toml", "iops-total = 700\nbps-");
    });
    // Without limits its guest could take what others are to have.
    let said = || node.disk("a")["error"].to_string();
    assert!(
        wait_until(|| said().contains("limits of group g")),
        "{}",
        said()
    );
    let started = node.ask("POST", "/v1/disks/a/start", "");
    assert!(started.body.contains("g.toml"), "{}", started.body);
    assert!(node.put("b", &alone).error().contains("g.toml"));
    let folder = node.daemon.scratch().path();
    assert_eq!(text(folder, "groups/g.toml"), "iops-total = 700\nbps-");
    put(folder, "groups/g.toml", "iops-total = 700\n");
    assert!(wait_until(|| node.state("a") == "serving"));
    let disk = node.disk("a");
    assert_eq!(disk["spec"]["limits"], limits);
    assert_eq!(disk["tuning"]["limits"], json!({"iops-total": 700}));
    node.add("b", &alone);
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
