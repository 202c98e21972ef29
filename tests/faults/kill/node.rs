//! A node is killed while many disks are busy, and each of their guests goes on with the next node.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use cleave_client::{Base, Client, DeviceOptions};
use cleave_tests::{
    Killed, SURVIVOR_DISK_BYTES, Scratch, Survivor, connect, disk_socket, has_listener, http,
    outliving, program_path, scale, seeded, wait_until,
};
use serde_json::json;

use super::recovered::{LIFE_MAX_US, Recovered};

const DISKS: usize = 16;
/// Turns of all guests before a kill, at most.
const TURNS_MAX: u64 = 4;

/// A disk's guest.
struct Served {
    id: String,
    client: Client,
    guest: Survivor,
}

pub(super) fn no_request_of_a_node_is_lost_or_repeated() {
    let mut random = seeded("kill-node");
    let scratch = Scratch::new();
    let mut node = start(&scratch);
    let options = outliving();
    let mut all: Vec<Served> = (0..DISKS)
        .map(|at| add(&scratch, &format!("d{at}"), &options))
        .collect();
    let (kills, begun) = (scale(4), Instant::now());
    let (mut out, mut recovered) = (0, Recovered::default());
    for kill in 0..kills {
        for _ in 0..=random.below(TURNS_MAX) {
            let turn = Duration::from_micros(random.below(LIFE_MAX_US / 4));
            all.iter_mut()
                .for_each(|disk| disk.guest.work(&mut disk.client, &mut random, turn));
        }
        // All disks are busy when it dies.
        all.iter_mut()
            .for_each(|disk| disk.guest.submit(&mut disk.client, &mut random));
        node.kill();
        let killed = Instant::now();
        out += all.iter().map(|disk| disk.guest.out()).sum::<u64>();
        node = start(&scratch);
        let base = [Base::Used, Base::Avail, Base::At(random.draw() as u16)][kill % 3];
        for disk in &mut all {
            let socket = disk_socket(scratch.path(), &disk.id);
            connect(|| disk.client.reconnect(&socket, &options, base));
        }
        for disk in &mut all {
            disk.guest.await_all(&mut disk.client, kill % 2 == 0);
        }
        recovered.0.push(killed.elapsed());
        for disk in &mut all {
            disk.guest.verify(&mut disk.client, (kill + 1) % 100 == 0);
        }
    }
    for disk in &mut all {
        disk.guest.verify(&mut disk.client, true);
    }
    println!(
        "{kills} kills of a node with {DISKS} disks in {} s: {} requests, {out} of them out at a kill and answered after it, 0 lost, \
         0 twice, {} MiB read back, 0 wrong; from a kill until all disks have answered all {:.1} ms (median), {:.1} (worst)",
        begun.elapsed().as_secs(),
        all.iter().map(|disk| disk.guest.answered).sum::<u64>(),
        all.iter().map(|disk| disk.guest.read_bytes).sum::<u64>() >> 20,
        recovered.at(0.5),
        recovered.at(1.0),
    );
    drop(all);
    node.kill();
}

fn start(scratch: &Scratch) -> Killed {
    let mut command = Command::new(program_path());
    command
        .args(["node", "--log", "warn", "--state"])
        .arg(scratch.join("state"))
        .arg("--run")
        .arg(scratch.join("run"));
    Killed::start(&mut command)
}

fn add(scratch: &Scratch, id: &str, options: &DeviceOptions) -> Served {
    let control = scratch.join("run/control.sock");
    assert!(wait_until(|| has_listener(Path::new(&control))));
    let image = scratch.image(id, SURVIVOR_DISK_BYTES);
    // Some bypass the page cache.
    let direct = ["on", "off"][usize::from(id.len().is_multiple_of(2))];
    let body = json!({"disk": [image], "queues": 2, "direct": direct}).to_string();
    let answer = http::fetch(&control, "PUT", &format!("/v1/disks/{id}"), &body);
    assert_eq!(answer.status, 201, "{}", answer.body);
    let socket = disk_socket(scratch.path(), id);
    let mut client = connect(|| Client::open(&socket, options));
    assert!(client.keeps_inflight());
    Served {
        id: id.to_owned(),
        guest: Survivor::new(&mut client),
        client,
    }
}
