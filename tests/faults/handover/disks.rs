//! Disks of several kinds: what becomes of their locks, their legs, their servers and their limits.

use std::fs::File;
use std::time::Instant;

use cleave_client::{Client, DeviceOptions, Error};
use cleave_tests::http::converse;
use cleave_tests::nbd::{Export, NbdServer};
use cleave_tests::{
    Case, Requirement, SURVIVOR_DISK_BYTES, Scratch, Survivor, TIMEOUT, UnresponsiveFs,
    closes_within, exercise_queue, http, outliving, seeded, wait_until,
};
use rustix::fs::{FlockOperation, flock};

use super::service::{Service, terminate};

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_disk_is_locked_until_its_manager_lets_go,
        a_stripe_is_handed_over_with_all_legs,
        an_export_is_handed_over,
        requests_over_a_limit_wait_for_the_next_process,
        a_failed_sync_outlives_its_process: Requirement::Fuse,
        a_failed_sync_of_which_no_guest_knows_is_kept: Requirement::Fuse,
        a_sync_that_fails_at_the_end_of_its_process_is_handed_over: Requirement::Fuse,
    ]
}

const RESTARTS: u64 = 8;
/// Has the operator's flush done.
const FLUSH: &str = "POST /v1/disks/d/flush HTTP/1.0\r\nContent-Length: 0\r\n\r\n";

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

/// The next process goes on after the death of this one.
fn kill(service: &mut Service) {
    assert!(service.manager.keeps_one());
    service.daemon.kill();
    service.start_again();
}

fn assert_flush_fails(client: &mut Client) {
    let failed = client.queue(0).flush();
    let is_refused = matches!(failed, Err(Error::Status { status: 1, .. }));
    assert!(is_refused, "{failed:?}");
}

/// A sync fails for the operator, and the guest is not told. The kernel tells nobody again.
fn a_failed_sync_outlives_its_process() {
    let ways: [fn(&mut Service); 3] = [Service::restart, Service::take_over, kill];
    for next in ways {
        let scratch = Scratch::new();
        let disk = UnresponsiveFs::mount(&scratch, 8 << 20).unwrap();
        let path = disk.file().display().to_string();
        let mut service = Service::serve_in(scratch, &path, &["--serial", "d"]);
        let mut client = service.open(&outliving());
        client.queue(0).write(0, &[1; 4096]).unwrap();
        disk.fail_flush();
        let flush = http::fetch(&service.control(), "POST", "/v1/disks/d/flush", "");
        assert_eq!(flush.status, 500, "{}", flush.body);
        next(&mut service);
        let report = http::get(&service.control(), "/v1/disks/d");
        assert_eq!(report["store"]["sync_failed"], true);
        assert_flush_fails(&mut client);
        // A program that tries again is not told of success either.
        next(&mut service);
        assert_flush_fails(&mut client);
        // The operator starts the daemon anew.
        service.stop();
        service.manager.kept.clear();
        assert!(closes_within(client.frontend().socket(), TIMEOUT));
        service.start_again();
        service
            .open(&outliving())
            .queue(0)
            .flush()
            .expect("it has been told");
    }
}

fn a_sync_that_fails_at_the_end_of_its_process_is_handed_over() {
    let scratch = Scratch::new();
    let disk = UnresponsiveFs::mount(&scratch, 8 << 20).unwrap();
    let path = disk.file().display().to_string();
    let options = ["--serial", "d", "--stop-deadline", "60"];
    let mut service = Service::serve_in(scratch, &path, &options);
    let mut client = service.open(&outliving());
    client.queue(0).write(0, &[1; 4096]).unwrap();
    disk.hold(true);
    let control = service.control();
    let flush = std::thread::spawn(move || converse(&control, FLUSH.as_bytes(), TIMEOUT).map(drop));
    assert!(wait_until(|| disk.held() == 1));
    // No running process can take it over.
    let refusal = service.is_refused();
    assert!(refusal.contains("it is being flushed"), "{refusal}");
    terminate(&mut service.daemon);
    let ends = || service.manager.log().contains("leaving the rest");
    assert!(wait_until(ends));
    disk.fail_flush();
    disk.release();
    assert_eq!(service.manager.awaits(&mut service.daemon).code(), Some(0));
    // Its socket is closed at the end of the process, maybe without an answer.
    let _ = flush.join().unwrap();
    service.start_again();
    assert_flush_fails(&mut client);
}

/// The guest has left, and the next one at that socket has to be told.
fn a_failed_sync_of_which_no_guest_knows_is_kept() {
    let scratch = Scratch::new();
    let disk = UnresponsiveFs::mount(&scratch, 8 << 20).unwrap();
    let path = disk.file().display().to_string();
    let mut service = Service::serve_in(scratch, &path, &["--serial", "d"]);
    disk.fail_flush();
    let flush = http::fetch(&service.control(), "POST", "/v1/disks/d/flush", "");
    assert_eq!(flush.status, 500, "{}", flush.body);
    for is_told in [false, true] {
        service.stop();
        service.manager.kept.clear();
        service.start_again();
        let mut client = service.open(&outliving());
        match is_told {
            false => assert_flush_fails(&mut client),
            true => client.queue(0).flush().unwrap(),
        }
    }
}
