//! The next process is killed right after its start: a frontend that keeps its requests and connects again loses nothing, and one that
//! cannot connect again sees the end of its connection. Nobody finds a block that is neither the old one nor the new one.

use std::time::Duration;

use cleave_client::{Base, Buffer, Client, DeviceOptions};
use cleave_tests::{
    Case, SURVIVOR_DISK_BYTES, Scratch, Survivor, TIMEOUT, closes_within, connect, exercise_queue,
    http, outliving, scale, seeded, wait_until,
};

use super::service::Service;

/// Latest moment of the kill.
const LIFE_MAX_US: u64 = 30_000;
pub(super) const BLOCK: usize = 4096;
pub(super) const BLOCKS: u64 = 64;

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_frontend_that_connects_again_loses_nothing,
        a_frontend_that_cannot_sees_its_end,
        a_session_is_kept_once_the_manager_has_time,
    ]
}

fn served() -> Service {
    let scratch = Scratch::new();
    let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
    Service::serve_in(scratch, image.to_str().unwrap(), &["--queues", "4"])
}

/// Starts a process that is killed so much later.
fn start_and_kill(service: &mut Service, life_us: u64) {
    service.daemon = service.manager.start(&service.args);
    std::thread::sleep(Duration::from_micros(life_us));
    service.daemon.kill();
    service.manager.settle();
}

/// Returns true if a daemon serves the connection.
fn is_served(client: &mut Client) -> bool {
    client.frontend().features().is_ok()
}

fn a_frontend_that_connects_again_loses_nothing() {
    let mut random = seeded("handover-killed");
    let mut service = served();
    let options = DeviceOptions {
        queues: 4,
        ..outliving()
    };
    let mut client = service.open(&options);
    let mut guest = Survivor::new(&mut client);
    let (rounds, mut again) = (scale(20), 0);
    for round in 0..rounds {
        let time = Duration::from_micros(random.below(5000));
        guest.work(&mut client, &mut random, time);
        guest.submit(&mut client, &mut random);
        service.stop();
        guest.submit(&mut client, &mut random);
        start_and_kill(&mut service, random.below(LIFE_MAX_US));
        service.start_again();
        if !is_served(&mut client) {
            let base = [Base::Used, Base::Avail][round % 2];
            connect(|| client.reconnect(&service.socket(), &options, base));
            again += 1;
        }
        guest.await_all(&mut client, round % 2 == 0);
        guest.verify(&mut client, false);
    }
    guest.verify(&mut client, true);
    println!("{rounds} processes were killed; the frontend had to connect again after {again}");
}

/// Has all blocks written without waiting for the answers.
pub(super) fn write_all(client: &mut Client, byte: u8) {
    let queue = client.queue(0);
    let (area, _) = queue.data_area();
    let memory = queue.memory();
    for block in 0..BLOCKS {
        let at = area + block * 2 * BLOCK as u64;
        memory.write(at, &cleave_tests::header(1, block * BLOCK as u64 / 512));
        memory.fill(at + BLOCK as u64, BLOCK, byte);
        let chain = [
            Buffer::readable(at, 16),
            Buffer::readable(at + BLOCK as u64, BLOCK as u32),
            Buffer::writable(at + 16, 1),
        ];
        queue.ring().add(&chain).unwrap();
    }
    queue.ring().publish();
    queue.ring_kick();
}

fn a_frontend_that_cannot_sees_its_end() {
    let mut random = seeded("handover-ended");
    let mut service = served();
    let options = DeviceOptions::default();
    let (rounds, mut ended) = (scale(10), 0);
    for round in 0..rounds {
        let mut client = service.open(&options);
        let [old, new] = [2 * round as u8, 2 * round as u8 + 1];
        let whole = vec![old; BLOCK * BLOCKS as usize];
        client.queue(0).write(0, &whole).unwrap();
        write_all(&mut client, new);
        service.stop();
        start_and_kill(&mut service, random.below(LIFE_MAX_US));
        service.start_again();
        if !is_served(&mut client) {
            assert!(closes_within(client.frontend().socket(), TIMEOUT));
            ended += 1;
        }
        // Its requests are done, or they never will be.
        drop(client);
        let mut client = service.open(&options);
        let mut bytes = whole;
        client.queue(0).read(0, &mut bytes).unwrap();
        for block in bytes.chunks(BLOCK) {
            assert!([old, new].contains(&block[0]), "round {round}");
            assert!(block.iter().all(|byte| *byte == block[0]), "a torn block");
        }
    }
    println!("{rounds} processes were killed; the connection ended with {ended}");
}

/// A guest that runs has no reason to send its daemon another message for weeks.
fn a_session_is_kept_once_the_manager_has_time() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
    let mut service = Service::serve_in(scratch, image.to_str().unwrap(), &["--serial", "d"]);
    service.manager.settle();
    service.manager.fill();
    let mut client = service.open(&outliving());
    exercise_queue(&mut client, 0).unwrap();
    let control = service.control();
    let is_kept = || http::get(&control, "/v1/disks/d")["session"]["kept"] == true;
    assert!(!is_kept());
    assert!(service.manager.keeps_one());
    assert!(wait_until(is_kept));
    service.daemon.kill();
    service.start_again();
    exercise_queue(&mut client, 0).unwrap();
}
