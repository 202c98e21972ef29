//! A node that takes over under a manager is killed, or told to end, before it has all disks. The one before serves them again, so the
//! manager must keep nothing of the other: a frontend would wait for an end of its connection that never comes.

use std::path::PathBuf;
use std::time::Duration;

use cleave_client::{Base, Client};
use cleave_tests::{
    Case, Killed, Random, Survivor, TIMEOUT, closes_within, connect, disk_socket, outliving,
    seeded, wait_until,
};
use serde_json::json;

use super::node::{add, open};
use super::service::{Service, terminate};

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        the_end_of_the_next_node_is_the_end_of_its_connections,
        a_service_that_ends_during_a_take_over_leaves_all_disks,
    ]
}

/// How long a guest works.
const WORK: Duration = Duration::from_millis(50);

/// A disk with its guest.
struct Served {
    socket: PathBuf,
    client: Client,
    guest: Survivor,
}

impl Served {
    fn of(node: &Service, id: &str) -> Served {
        add(node, id, &json!({}));
        let mut client = open(node, id, &outliving());
        Served {
            socket: disk_socket(node.scratch.path(), id),
            guest: Survivor::new(&mut client),
            client,
        }
    }

    fn work(&mut self, random: &mut Random) {
        self.guest.work(&mut self.client, random, WORK);
        self.guest.submit(&mut self.client, random);
    }

    fn verify(&mut self) {
        self.guest.await_all(&mut self.client, true);
        self.guest.verify(&mut self.client, true);
    }

    /// Connects again, when the frontend has seen the end of its connection.
    fn reconnect(&mut self) {
        let Served { socket, client, .. } = self;
        assert!(closes_within(client.frontend().socket(), TIMEOUT));
        connect(|| client.reconnect(socket, &outliving(), Base::Used));
    }
}

/// A node with two disks. `stays` is not taken by the next node until its image is put back.
struct Divided {
    node: Service,
    goes: Served,
    stays: Served,
}

impl Divided {
    fn new() -> Divided {
        let node = Service::node();
        let [goes, stays] = ["goes", "stays"].map(|id| Served::of(&node, id));
        Divided { node, goes, stays }
    }

    /// Puts another file in the place of the image: a node takes the file that is open, and no other.
    fn replace_image(&self) {
        let [image, away, copy] = ["stays", "away", "copy"].map(|id| self.node.scratch.join(id));
        std::fs::copy(&image, &copy).unwrap();
        std::fs::rename(&image, away).unwrap();
        std::fs::rename(copy, image).unwrap();
    }

    fn put_image_back(&self) {
        let [away, image] = ["away", "stays"].map(|id| self.node.scratch.join(id));
        std::fs::rename(away, image).unwrap();
    }

    /// Waits until the manager has both sessions of this process.
    fn keeps_both(&mut self, pid: u32) -> bool {
        let manager = &mut self.node.manager;
        wait_until(|| manager.sessions_of(pid) == 2)
    }

    /// Starts the next node, and waits until it has one disk and works on without the other.
    fn start_taking(&mut self, random: &mut Random) -> Killed {
        let told = self.node.manager.log().len();
        let next = self.node.start_taking();
        let manager = &mut self.node.manager;
        let has_one = wait_until(|| {
            manager.settle();
            manager.log()[told..].contains("was taken over after a pause")
        });
        assert!(has_one, "nothing was taken");
        assert!(self.goes.client.frontend().features().is_ok());
        self.goes.work(random);
        self.stays.work(random);
        next
    }
}

/// How the next node ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Killed,
    Told,
}

fn the_end_of_the_next_node_is_the_end_of_its_connections() {
    let mut random = seeded("interrupted-take-over");
    let mut all = Divided::new();
    for end in [End::Killed, End::Told] {
        let before = all.node.daemon.0.id();
        assert!(all.keeps_both(before));
        all.replace_image();
        let mut next = all.start_taking(&mut random);
        let kept = all.node.manager.sessions_of(next.0.id());
        assert_eq!(kept, 0, "the node before knows nothing of it");
        match end {
            End::Killed => next.kill(),
            End::Told => {
                terminate(&mut next);
                assert_eq!(all.node.manager.awaits(&mut next).code(), Some(1));
            }
        }
        all.node.manager.settle();
        assert_eq!(all.node.manager.disks(), 0);
        all.goes.reconnect();
        all.goes.verify();
        assert!(all.stays.client.frontend().features().is_ok());
        all.stays.verify();
        all.put_image_back();
    }
    // A node that has all disks keeps their sessions, although no frontend sends it anything.
    all.node.take_over();
    let next = all.node.daemon.0.id();
    assert!(all.keeps_both(next), "nothing is kept of it");
    all.goes.work(&mut random);
    all.stays.work(&mut random);
    all.node.daemon.kill();
    all.node.start_again();
    for disk in [&mut all.goes, &mut all.stays] {
        disk.verify();
        assert!(disk.client.frontend().features().is_ok());
    }
}

/// Both nodes are told to end, as by the restart of a service.
fn a_service_that_ends_during_a_take_over_leaves_all_disks() {
    let mut random = seeded("interrupted-service");
    let mut all = Divided::new();
    all.replace_image();
    let mut next = all.start_taking(&mut random);
    all.put_image_back();
    terminate(&mut all.node.daemon);
    terminate(&mut next);
    let Service {
        manager, daemon, ..
    } = &mut all.node;
    assert_eq!(manager.awaits(daemon).code(), Some(0));
    assert_eq!(manager.awaits(&mut next).code(), Some(0));
    assert_eq!(manager.disks(), 2);
    all.goes.guest.submit(&mut all.goes.client, &mut random);
    all.node.start_again();
    for disk in [&mut all.goes, &mut all.stays] {
        disk.verify();
        assert!(disk.client.frontend().features().is_ok());
    }
}
