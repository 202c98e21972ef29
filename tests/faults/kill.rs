//! Kills the daemon at random moments and checks that nothing is lost: each request is answered once, and each sector
//! holds the last write.
//!
//! The client keeps its memory, its vrings and the in-flight region, as a VMM does, and continues with the next daemon.
//!
//! `CLEAVE_KILLS` sets the number of kills of `cleave serve` (default 200), `CLEAVE_TEST_SCALE` multiplies those of a node with 16
//! disks (default 4), `CLEAVE_TEST_SEED` sets the seed.

mod node;
mod recovered;

use std::process::Command;
use std::time::{Duration, Instant};

use cleave_client::{Base, Client, DeviceOptions};
use cleave_tests::{
    Case, Killed, Random, SURVIVOR_DISK_BYTES, Scratch, Survivor, connect, outliving, program_path,
    seeded,
};

use node::no_request_of_a_node_is_lost_or_repeated;
use recovered::{LIFE_MAX_US, Recovered};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        no_request_is_lost_or_repeated,
        no_request_of_a_node_is_lost_or_repeated,
    ]
}

/// Latest moment of a kill after a start, and after the next daemon has received its vrings.
const START_MAX_US: u64 = 20_000;
const AGAIN_MAX_US: u64 = 3000;
/// Kills after which the whole disk is read.
const WHOLE_EVERY: u64 = 100;
/// Kills on one disk; the next disk has another number of vrings.
const ROUND: u64 = 50;

/// Sums over all rounds.
#[derive(Default)]
struct Sums {
    kills: u64,
    requests: u64,
    again: u64,
    read_bytes: u64,
}

fn no_request_is_lost_or_repeated() {
    let kills = std::env::var("CLEAVE_KILLS").ok();
    let kills = kills.map_or(200, |text| text.parse().unwrap());
    let mut random = seeded("kill");
    let (mut sums, mut recovered) = (Sums::default(), Recovered::default());
    let begun = Instant::now();
    while sums.kills < kills {
        let vrings = [1, 4][(sums.kills / ROUND % 2) as usize];
        let left = (kills - sums.kills).min(ROUND);
        round(vrings, left, &mut random, &mut sums, &mut recovered);
        if kills > 1000 {
            println!("{} kills in {} s", sums.kills, begun.elapsed().as_secs());
        }
    }
    println!(
        "{} kills in {} s: {} requests, {} of them out at a kill and answered after it, 0 lost, 0 twice, {} MiB read back, \
         0 wrong; from a kill to the first answer {:.1} ms (median), {:.1} (99 of 100), {:.1} (worst)",
        sums.kills,
        begun.elapsed().as_secs(),
        sums.requests,
        sums.again,
        sums.read_bytes >> 20,
        recovered.at(0.5),
        recovered.at(0.99),
        recovered.at(1.0),
    );
}

/// Runs several kills on one disk.
fn round(vrings: u16, kills: u64, random: &mut Random, sums: &mut Sums, recovered: &mut Recovered) {
    let scratch = Scratch::new();
    let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
    let socket = scratch.join("socket");
    // Some of the requests are split, and some bypass the page cache.
    let start = |random: &mut Random| {
        let direct = ["on", "off"][random.below(2) as usize];
        let split = ["off", "8K"][random.below(2) as usize];
        let mut command = Command::new(program_path());
        command
            .arg("serve")
            .arg("--socket-path")
            .arg(&socket)
            .arg("--disk")
            .arg(&image)
            .args(["--log", "warn", "--direct", direct, "--split", split])
            .args(["--queues", "4"]);
        Killed::start(&mut command)
    };
    let options = DeviceOptions {
        queues: vrings,
        ..outliving()
    };
    let mut daemon = start(random);
    let mut client = connect(|| Client::open(&socket, &options));
    assert!(
        client.keeps_inflight(),
        "the daemon offers no in-flight region"
    );
    let mut guest = Survivor::new(&mut client);
    let end = sums.kills + kills;
    for kill in 0.. {
        if sums.kills >= end {
            break;
        }
        let life = Duration::from_micros(random.below(LIFE_MAX_US));
        guest.work(&mut client, random, life);
        daemon.kill();
        let killed = Instant::now();
        let out = guest.out();
        if random.below(3) == 0 {
            // The guest does not notice.
            guest.submit(&mut client, random);
        }
        let base = [Base::Used, Base::Avail, Base::At(random.draw() as u16)][(kill % 3) as usize];
        daemon = start(random);
        // Some die during their start, and some while they repeat the requests left in flight.
        if random.below(6) == 0 {
            std::thread::sleep(Duration::from_micros(random.below(START_MAX_US)));
            daemon.kill();
            daemon = start(random);
            sums.kills += 1;
        }
        connect(|| client.reconnect(&socket, &options, base));
        if random.below(4) == 0 {
            std::thread::sleep(Duration::from_micros(random.below(AGAIN_MAX_US)));
            daemon.kill();
            daemon = start(random);
            sums.kills += 1;
            connect(|| client.reconnect(&socket, &options, base));
        }
        if guest.out() > 0 {
            guest.await_one(&mut client);
            recovered.0.push(killed.elapsed());
        }
        // Sleep on the call, or poll.
        guest.await_all(&mut client, kill % 2 == 0);
        guest.verify(&mut client, (kill + 1) % WHOLE_EVERY == 0);
        sums.kills += 1;
        sums.again += out;
    }
    guest.verify(&mut client, true);
    sums.requests += guest.answered;
    sums.read_bytes += guest.read_bytes;
    drop(client);
    daemon.kill();
}
