//! Restarts the daemon under a service manager that keeps descriptors, below a guest whose VMM cannot connect again, and checks that
//! nothing is lost: each request is answered once, and each sector holds the last write.
//!
//! `CLEAVE_RESTARTS` sets the number of restarts of `cleave serve` (default 60), `CLEAVE_TEST_SCALE` multiplies those of a node
//! (default 4, at most 100) and its disks (default 16, at most 64), `CLEAVE_TEST_SEED` sets the seed.

mod all_disks;
mod disks;
mod interrupted;
mod killed;
mod leaks;
mod left_twice;
mod moving;
mod node;
mod obstacles;
mod opening;
mod options;
mod parcels;
mod pauses;
mod queued;
mod running;
mod service;
mod take_over;

use std::time::{Duration, Instant};

use cleave_client::message::protocol;
use cleave_client::{Client, DeviceOptions};
use cleave_tests::{
    Case, Random, SURVIVOR_DISK_BYTES, Scratch, ServiceManager, Survivor, connect, outliving,
    seeded,
};

use node::{
    each_disk_of_a_node_is_left_as_it_is, no_request_of_a_node_is_lost_or_repeated_by_restarts,
};
use pauses::Pauses;
use service::terminate;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    let own = cleave_tests::cases![
        no_request_is_lost_or_repeated_by_restarts,
        no_request_is_lost_or_repeated_by_kills_that_the_vmm_does_not_notice,
        no_request_of_a_node_is_lost_or_repeated_by_restarts,
        each_disk_of_a_node_is_left_as_it_is,
    ];
    own.into_iter()
        .chain(cleave_tests::cases_of![
            all_disks,
            disks,
            interrupted,
            killed,
            leaks,
            left_twice,
            moving,
            obstacles,
            opening,
            options,
            parcels,
            queued,
            running,
            take_over
        ])
        .collect()
}

/// Longest time between two restarts.
const LIFE_MAX_US: u64 = 20_000;
/// Restarts after which the whole disk is read.
const WHOLE_EVERY: u64 = 100;
/// Restarts on one disk; the next has another number of vrings, and another way to keep requests.
const ROUND: u64 = 30;

/// Sums over all rounds.
#[derive(Default)]
struct Sums {
    restarts: u64,
    requests: u64,
    read_bytes: u64,
    /// From the SIGTERM to the first answer of the next daemon.
    waits: Pauses,
}

/// How a daemon ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Ordered,
    Killed,
}

fn no_request_is_lost_or_repeated_by_restarts() {
    restart_often(End::Ordered);
}

fn no_request_is_lost_or_repeated_by_kills_that_the_vmm_does_not_notice() {
    restart_often(End::Killed);
}

fn restart_often(end: End) {
    let restarts = std::env::var("CLEAVE_RESTARTS").ok();
    let restarts = restarts.map_or(60, |text| text.parse().unwrap());
    let mut random = seeded(match end {
        End::Ordered => "handover",
        End::Killed => "handover kill",
    });
    let mut sums = Sums::default();
    while sums.restarts < restarts {
        let number = sums.restarts / ROUND;
        let left = (restarts - sums.restarts).min(ROUND);
        round(end, number, left, &mut random, &mut sums);
    }
    println!(
        "{} restarts, {end:?}: {} requests, 0 lost, 0 twice, {} MiB read back, 0 wrong; from the signal to the first answer of the \
         next daemon {}",
        sums.restarts,
        sums.requests,
        sums.read_bytes >> 20,
        sums.waits,
    );
}

fn round(end: End, number: u64, restarts: u64, random: &mut Random, sums: &mut Sums) {
    let scratch = Scratch::new();
    let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
    let socket = scratch.join("socket");
    let mut manager = ServiceManager::empty();
    let direct = ["on", "off"][(number % 2) as usize];
    let args = [
        "serve",
        "--socket-path",
        socket.to_str().unwrap(),
        "--disk",
        image.to_str().unwrap(),
        "--direct",
        direct,
        "--queues",
        "4",
        "--log",
        "warn",
        "--stop-deadline",
        "60",
    ];
    let mut daemon = manager.start(&args);
    let options = DeviceOptions {
        queues: [1, 4][(number % 2) as usize],
        ..match number % 3 {
            0 if end == End::Ordered => DeviceOptions {
                protocol_features: DeviceOptions::default().protocol_features,
                ..outliving()
            },
            _ => outliving(),
        }
    };
    let mut client = connect(|| Client::open(&socket, &options));
    let mut guest = Survivor::new(&mut client);
    let keeps = options.protocol_features & protocol::INFLIGHT_SHMFD != 0;
    // For the case that it is killed, if the VMM knows what is in flight then.
    let is_kept = |manager: &mut ServiceManager| !keeps || manager.keeps_one();
    client.frontend().features().unwrap();
    assert!(is_kept(&mut manager));
    for restart in 0..restarts {
        let life = Duration::from_micros(random.below(LIFE_MAX_US));
        guest.work(&mut client, random, life);
        let begun = Instant::now();
        match end {
            End::Ordered => terminate(&mut daemon),
            End::Killed => daemon.kill(),
        }
        if restart % 2 == 0 {
            // The guest does not notice.
            guest.submit(&mut client, random);
        }
        let ended = manager.awaits(&mut daemon);
        assert_eq!(ended.code(), (end == End::Ordered).then_some(0));
        let left = match end {
            End::Ordered => manager.disks(),
            End::Killed => manager.kept.len(),
        };
        assert_eq!(left, 1, "nothing was handed over");
        assert!(socket.exists());
        daemon = manager.start(&args);
        if guest.out() > 0 {
            guest.await_one(&mut client);
            sums.waits.0.push(begun.elapsed());
        }
        // Sleep on the call, or poll.
        guest.await_all(&mut client, restart % 2 == 0);
        guest.verify(&mut client, (restart + 1) % WHOLE_EVERY == 0);
        manager.hears("READY=1");
        assert!(is_kept(&mut manager));
        sums.restarts += 1;
    }
    guest.verify(&mut client, true);
    sums.requests += guest.answered;
    sums.read_bytes += guest.read_bytes;
    // Nothing is left of the connection that the manager or the daemon would hold.
    drop(client);
    terminate(&mut daemon);
    assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
}
