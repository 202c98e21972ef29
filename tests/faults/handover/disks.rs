//! Disks of several kinds: what becomes of their locks, their legs, their servers and their limits.

use std::fs::File;
use std::time::Instant;

use cleave_client::{Client, DeviceOptions};
use cleave_tests::nbd::{Export, NbdServer};
use cleave_tests::{
    Case, SURVIVOR_DISK_BYTES, Scratch, Survivor, TIMEOUT, closes_within, exercise_queue, http,
    seeded, wait_until,
};
use rustix::fs::{FlockOperation, flock};

use super::service::Service;

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_disk_is_locked_until_its_manager_lets_go,
        a_stripe_is_handed_over_with_all_legs,
        an_export_is_handed_over,
        requests_over_a_limit_wait_for_the_next_process,
    ]
}

const RESTARTS: u64 = 8;

fn is_locked(service: &Service) -> bool {
    let image = File::open(service.scratch.join("disk")).unwrap();
    flock(&image, FlockOperation::NonBlockingLockExclusive).is_err()
}

fn a_disk_is_locked_until_its_manager_lets_go() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 8 << 20);
    let mut service = Service::serve_in(scratch, image.to_str().unwrap(), &[]);
    let mut client = service.open(&DeviceOptions::default());
    service.stop();
    assert!(is_locked(&service), "another program could take it");
    // The service is stopped for good.
    service.manager.kept.clear();
    assert!(closes_within(client.frontend().socket(), TIMEOUT));
    assert!(wait_until(|| !is_locked(&service)));
    service.start_again();
    exercise_queue(&mut service.open(&DeviceOptions::default()), 0).unwrap();
}

/// A guest works through some restarts.
fn works_on(service: &mut Service) {
    let mut random = seeded("handover-disks");
    let options = DeviceOptions {
        data_bytes: 16 << 20,
        timeout: TIMEOUT,
        ..DeviceOptions::default()
    };
    let mut client: Client = service.open(&options);
    let mut guest = Survivor::new(&mut client);
    for _ in 0..RESTARTS {
        guest.submit(&mut client, &mut random);
        service.stop();
        assert_eq!(service.manager.disks(), 1, "it was not handed over");
        guest.submit(&mut client, &mut random);
        service.start_again();
        guest.await_all(&mut client, true);
    }
    guest.verify(&mut client, true);
}

fn a_stripe_is_handed_over_with_all_legs() {
    let scratch = Scratch::new();
    let legs = ["a", "b", "c", "d"].map(|leg| scratch.image(leg, SURVIVOR_DISK_BYTES / 4));
    let legs = legs.each_ref().map(|leg| leg.to_str().unwrap());
    let more = [
        "--disk",
        legs[1],
        "--disk",
        legs[2],
        "--disk",
        legs[3],
        "--stripe-raw",
        "--stripe",
        "64K",
    ];
    works_on(&mut Service::serve_in(scratch, legs[0], &more));
}

/// The next process connects to its server anew.
fn an_export_is_handed_over() {
    let scratch = Scratch::new();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(SURVIVOR_DISK_BYTES));
    works_on(&mut Service::serve_in(scratch, &server.uri(""), &[]));
}

/// Nobody waits for them at the end: they are still in the queue.
fn requests_over_a_limit_wait_for_the_next_process() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
    let limit = ["--limit", "iops-total=20"];
    let mut service = Service::serve_in(scratch, image.to_str().unwrap(), &limit);
    let mut random = seeded("handover-limit");
    let mut client = service.open(&DeviceOptions {
        timeout: TIMEOUT,
        ..DeviceOptions::default()
    });
    let mut guest = Survivor::new(&mut client);
    while guest.out() < 20 {
        guest.submit(&mut client, &mut random);
    }
    let begun = Instant::now();
    service.restart();
    println!(
        "{} waited, the restart took {:?}",
        guest.out(),
        begun.elapsed()
    );
    let answer = http::fetch(
        &service.control(),
        "PATCH",
        "/v1/disks/disk",
        r#"{"limits": {"iops-total": 0}}"#,
    );
    assert_eq!(answer.status, 200, "{}", answer.body);
    guest.await_all(&mut client, true);
    guest.verify(&mut client, true);
}
