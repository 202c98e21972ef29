//! A node is restarted while many disks are busy, and their guests, whose VMMs cannot connect again, notice a pause.

use std::time::{Duration, Instant};

use cleave_client::{Client, DeviceOptions};
use cleave_tests::{
    Random, SURVIVOR_DISK_BYTES, Survivor, TIMEOUT, closes_within, connect, disk_socket,
    exercise_queue, http, outliving, prepared, scale, seeded,
};
use serde_json::{Value, json};

use super::pauses::Pauses;
use super::service::{Service, terminate};

const DISKS: usize = 16;
/// Messages that fit into the queue of a manager, by default (`net.unix.max_dgram_qlen`).
const QUEUE_MAX: usize = 10;
/// How long the manager reads nothing.
const MANAGER_LATE: Duration = Duration::from_millis(500);
/// Turns of all guests before a restart, at most, and the longest turn of one.
const TURNS_MAX: u64 = 4;
const TURN_MAX_US: u64 = 1500;

/// A disk's guest.
struct Served {
    client: Client,
    guest: Survivor,
}

pub(super) fn add(node: &Service, id: &str, more: &Value) {
    let image = node.scratch.image(id, SURVIVOR_DISK_BYTES);
    let mut body = json!({"disk": [image], "queues": 2, "stop_deadline": 60});
    let fields = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(fields);
    let path = format!("/v1/disks/{id}");
    let answer = http::fetch(&node.control(), "PUT", &path, &body.to_string());
    assert_eq!(answer.status, 201, "{}", answer.body);
}

pub(super) fn open(node: &Service, id: &str, options: &DeviceOptions) -> Client {
    let socket = disk_socket(node.scratch.path(), id);
    connect(|| Client::open(&socket, options))
}

pub(super) fn no_request_of_a_node_is_lost_or_repeated_by_restarts() {
    let disks = scale(DISKS).min(64);
    let restarts = scale(4).min(100);
    let mut random = seeded("handover-node");
    let mut node = Service::node();
    let mut all: Vec<Served> = (0..disks)
        .map(|at| {
            let id = format!("d{at}");
            add(&node, &id, &setup(at));
            let mut client = open(&node, &id, &options(at));
            Served {
                guest: Survivor::new(&mut client),
                client,
            }
        })
        .collect();
    let (begun, mut pauses, mut seen) = (Instant::now(), Pauses::default(), Pauses::default());
    for restart in 0..restarts {
        work(&mut all, &mut random);
        let told = node.manager.log().len();
        let before = Instant::now();
        node.stop();
        assert_eq!(
            node.manager.disks(),
            disks,
            "a disk was not left to the next node"
        );
        for disk in all.iter_mut().step_by(2) {
            disk.guest.submit(&mut disk.client, &mut random);
        }
        node.start_again();
        for disk in &mut all {
            disk.guest.await_all(&mut disk.client, restart % 2 == 0);
        }
        seen.0.push(before.elapsed());
        for disk in &mut all {
            disk.guest
                .verify(&mut disk.client, (restart + 1) % 100 == 0);
        }
        let log = || node.manager.log()[told..].to_owned();
        pauses.0.extend(Pauses::told_of(disks, log).0);
    }
    for disk in &mut all {
        disk.guest.verify(&mut disk.client, true);
    }
    println!(
        "{restarts} restarts of a node with {disks} disks in {} s: {} requests, 0 lost, 0 twice, {} MiB read back, 0 wrong; pause of \
         a disk {pauses}; from SIGTERM until all disks have answered all {seen}",
        begun.elapsed().as_secs(),
        all.iter().map(|disk| disk.guest.answered).sum::<u64>(),
        all.iter().map(|disk| disk.guest.read_bytes).sum::<u64>() >> 20,
    );
}

/// Some disks bypass the page cache, and some are in a pool.
fn setup(at: usize) -> Value {
    let direct = ["on", "off"][at % 2];
    match at % 4 < 2 {
        true => json!({"direct": direct}),
        false => json!({"direct": direct, "pool": "shared"}),
    }
}

/// Some frontends keep the requests in flight.
fn options(at: usize) -> DeviceOptions {
    DeviceOptions {
        queues: 1 + (at % 2) as u16,
        protocol_features: [outliving(), DeviceOptions::default()][at / 4 % 2].protocol_features,
        data_bytes: 16 << 20,
        ..outliving()
    }
}

fn work(all: &mut [Served], random: &mut Random) {
    for _ in 0..=random.below(TURNS_MAX) {
        let turn = Duration::from_micros(random.below(TURN_MAX_US));
        for disk in &mut *all {
            disk.guest.work(&mut disk.client, random, turn);
        }
    }
    // All disks are busy when it ends.
    for disk in all {
        disk.guest.submit(&mut disk.client, random);
    }
}

/// Each disk is left in its own state, to a manager that is busy and whose queue is short.
pub(super) fn each_disk_of_a_node_is_left_as_it_is() {
    let mut random = seeded("handover-each");
    let mut node = Service::node();
    let options = outliving();
    let ids = ["plain", "gone", "lost", "broken", "idle", "two"];
    let more = |id| match id {
        "gone" => json!({"persistent": false}),
        _ => json!({}),
    };
    ids.iter().for_each(|id| add(&node, id, &more(*id)));
    (0..QUEUE_MAX).for_each(|at| add(&node, &format!("more{at}"), &json!({})));
    let mut plain = open(&node, "plain", &options);
    let mut guest = Survivor::new(&mut plain);
    let left = ["gone", "lost", "broken"].map(|id| open(&node, id, &options));
    let mut owner = open(&node, "two", &options);
    let mut moves = Survivor::new(&mut owner);
    let socket = disk_socket(node.scratch.path(), "two");
    let mut parked = prepared(&socket, &owner, &options);
    moves.submit(&mut owner, &mut random);
    guest.submit(&mut plain, &mut random);

    terminate(&mut node.daemon);
    std::thread::sleep(MANAGER_LATE);
    node.stop();
    assert_eq!(node.manager.disks(), ids.len() - 1 + QUEUE_MAX);
    std::fs::remove_file(node.scratch.join("lost")).unwrap();
    let file = node.scratch.join("state/disks/broken.toml");
    std::fs::write(file, "disk = 7").unwrap();
    let idle = disk_socket(node.scratch.path(), "idle");
    let waits = std::thread::spawn(move || Client::open(&idle, &outliving()));
    guest.submit(&mut plain, &mut random);
    node.start_again();

    for mut client in left {
        let socket = client.frontend().socket();
        assert!(closes_within(socket, TIMEOUT), "nobody serves it");
    }
    guest.await_all(&mut plain, true);
    guest.verify(&mut plain, true);
    exercise_queue(&mut waits.join().unwrap().unwrap(), 0).unwrap();
    moves.await_all(&mut owner, true);
    let positions = owner.stop().unwrap();
    parked.take_over(&mut owner, &positions).unwrap();
    moves.work(&mut parked, &mut random, Duration::from_millis(20));
    moves.await_all(&mut parked, true);
    moves.verify(&mut parked, true);
    let answer = http::fetch(&node.control(), "GET", "/v1/disks", "").json();
    let state = |id: &str| {
        let mut disks = answer.as_array().unwrap().iter();
        let disk = disks.find(|disk| disk["id"] == id);
        disk.map(|disk| disk["state"].as_str().unwrap().to_owned())
    };
    let states = ids.map(state);
    let expected = ["serving", "", "failed", "failed", "serving", "serving"];
    assert_eq!(states.map(Option::unwrap_or_default), expected);
}
