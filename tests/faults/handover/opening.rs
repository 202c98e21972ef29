//! A node has the connection of a VMM, which cannot connect again, while it still opens the disk.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use cleave_client::Client;
use cleave_tests::http::{fetch, get};
use cleave_tests::{
    Case, Random, Survivor, closes_within, disk_socket, has_listener, outliving, seeded, wait_until,
};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};

use super::node;
use super::service::Service;

/// How long a connection is watched that must not end.
const QUIET: Duration = Duration::from_millis(300);

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_node_keeps_all_disks_while_one_with_a_frontend_is_opened,
        a_node_that_ends_leaves_the_frontend_of_a_disk_that_is_opened,
        a_frontend_waits_until_the_file_of_its_disk_can_be_read,
    ]
}

/// A node with the disks `a`, which is slow to be opened, and `b`.
struct Scene {
    node: Service,
    control: PathBuf,
    guests: [(Client, Survivor); 2],
    random: Random,
}

impl Scene {
    fn new(name: &str) -> Scene {
        let node = Service::node();
        let mut random = seeded(name);
        let guests = ["a", "b"].map(|id| {
            // Each end waits so long for a disk that cannot be opened.
            node::add(&node, id, &json!({"stop_deadline": 2}));
            let mut client = node::open(&node, id, &outliving());
            let mut guest = Survivor::new(&mut client);
            guest.work(&mut client, &mut random, Duration::from_millis(2));
            guest.await_all(&mut client, true);
            (client, guest)
        });
        Scene {
            control: node.control(),
            node,
            guests,
            random,
        }
    }

    /// Ends the node in this way, and has `a` wait for the last I/O of that one until the lock is dropped.
    fn end_and_lock(&mut self, end: fn(&mut Service)) -> File {
        self.end(end);
        let lock = disk_socket(self.node.scratch.path(), "a").with_file_name("disk.sock.lock");
        let lock = File::options().create(true).append(true).open(lock);
        let lock = lock.unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        lock
    }

    fn end(&mut self, end: fn(&mut Service)) {
        for (client, guest) in &mut self.guests {
            guest.submit(client, &mut self.random);
        }
        end(&mut self.node);
    }

    fn row(&self, id: &str) -> Value {
        let all = get(&self.control, "/v1/disks");
        let mut all = all.as_array().unwrap().iter();
        all.find(|disk| disk["id"] == *id).unwrap().clone()
    }

    /// Starts the next node, which cannot open `a` and has it in this state.
    fn start_next(&mut self, state: &str) {
        self.node.daemon = self.node.manager.start(&self.node.args);
        let serves_b = || has_listener(&self.control) && self.row("b")["state"] == "serving";
        assert!(wait_until(serves_b));
        let a = self.row("a");
        assert_eq!(
            (&a["state"], &a["connected"]),
            (&json!(state), &json!(true)),
            "{a}"
        );
    }

    fn assert_connected(&mut self) {
        let (waits, _) = &mut self.guests[0];
        assert!(
            !closes_within(waits.frontend().socket(), QUIET),
            "it has ended"
        );
    }

    fn verify(&mut self) {
        for (client, guest) in &mut self.guests {
            guest.await_all(client, true);
            guest.verify(client, true);
        }
    }
}

/// Kills it when the manager has the sessions of both disks.
fn kill(node: &mut Service) {
    let pid = node.daemon.0.id();
    assert!(wait_until(|| node.manager.sessions_of(pid) == 2));
    node.daemon.kill();
}

/// The connection would end with the node that has it.
fn a_node_keeps_all_disks_while_one_with_a_frontend_is_opened() {
    let mut scene = Scene::new("node-take-over-opening");
    let lock = scene.end_and_lock(kill);
    scene.start_next("opening");
    for _ in 0..2 {
        let said = scene.node.is_refused();
        assert!(said.contains("disk a"), "{said}");
        assert!(said.contains("until it is opened"), "{said}");
        scene.assert_connected();
        // When the running node has heard of the end of the other one.
        let change = || fetch(&scene.control, "PATCH", "/v1/disks/b", "{}").status;
        assert!(wait_until(|| change() == 200));
    }
    drop(lock);
    scene.verify();
    // Nothing is in the way any more.
    assert!(wait_until(|| scene.row("a")["state"] == "serving"));
    scene.node.take_over();
    for (client, guest) in &mut scene.guests {
        guest.work(client, &mut scene.random, Duration::from_millis(5));
    }
    scene.verify();
}

/// However the node before has ended.
fn a_node_that_ends_leaves_the_frontend_of_a_disk_that_is_opened() {
    for end in [kill, Service::stop] {
        let mut scene = Scene::new("node-ends-opening");
        let lock = scene.end_and_lock(end);
        for _ in 0..2 {
            scene.start_next("opening");
            scene.node.stop();
            assert_eq!(scene.node.manager.disks(), 2, "a disk was not left");
            scene.assert_connected();
        }
        drop(lock);
        scene.node.start_again();
        scene.verify();
    }
}

/// Such as that of the disk itself, on a file system that is away, or that of its limit group, which a later version has written.
fn a_frontend_waits_until_the_file_of_its_disk_can_be_read() {
    for (end, name) in [
        (kill as fn(&mut Service), "disks/a.toml"),
        (Service::stop, "groups/g.toml"),
    ] {
        let mut scene = Scene::new("node-file-away");
        let limits = json!({"group": "g", "iops-total": 1_000_000});
        node::add(&scene.node, "c", &json!({"limits": limits}));
        let folder = scene.node.scratch.join("state");
        let [file, kept] = [name, "kept"].map(|name| folder.join(name));
        scene.end(end);
        let disk = folder.join("disks/a.toml");
        let text = std::fs::read_to_string(&disk).unwrap();
        std::fs::write(&disk, format!("{text}[limits]\ngroup = \"g\"\n")).unwrap();
        std::fs::rename(&file, &kept).unwrap();
        std::os::unix::fs::symlink(folder.join("away"), &file).unwrap();
        scene.start_next("failed");
        scene.assert_connected();
        let said = scene.node.is_refused();
        assert!(said.contains("until it is opened"), "{said}");
        scene.node.stop();
        scene.start_next("failed");
        scene.assert_connected();
        std::fs::rename(&kept, &file).unwrap();
        scene.verify();
        let limits = get(&scene.control, "/v1/disks/a")["tuning"]["limits"].clone();
        assert_eq!(limits, json!({"iops-total": 1_000_000}));
    }
}
