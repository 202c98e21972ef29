//! A disk is taken over under a manager with a store, in whatever state it is: it goes on with the next process, or is refused and goes
//! on with this one.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cleave_client::message::{VERSION, config_space, message, request};
use cleave_client::{Client, DeviceOptions, Error};
use cleave_tests::http;
use cleave_tests::nbd::{Export, NbdServer};
use cleave_tests::{
    Case, Killed, SURVIVOR_DISK_BYTES, Scratch, Survivor, TIMEOUT, closes_within, exercise_queue,
    outliving, scale, seeded, wait_until,
};

use super::obstacles::{cut, held, is_written};
use super::pauses::Pauses;
use super::running::{HELLO, KEPT, READY, asked, frame, received};
use super::service::{Service, terminate};

/// Longest time from the start of the next process to a signal.
const SIGNAL_MAX_US: u64 = 40_000;
const DISK: u64 = 8 << 20;

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        restarts_and_take_overs_follow_one_another,
        a_crash_after_take_overs_finds_one_session,
        a_signal_during_a_take_over_loses_nothing,
        one_of_two_that_take_over_gets_it,
        take_overs_follow_at_once,
        a_process_ends_when_its_manager_has_heard_of_the_next,
        another_file_or_access_is_refused,
        a_held_request_goes_on_if_its_frontend_keeps_it,
        a_held_request_that_nobody_keeps_stays,
        a_message_that_has_begun_stays,
        a_disk_that_hangs_stays,
        a_disk_whose_server_is_away_stays,
    ]
}

fn served(options: &[&str]) -> Service {
    let scratch = Scratch::new();
    let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
    Service::serve_in(scratch, image.to_str().unwrap(), options)
}

fn restarts_and_take_overs_follow_one_another() {
    let mut random = seeded("take-over-store");
    let mut service = served(&["--queues", "4"]);
    let mut client = service.open(&outliving());
    let mut guest = Survivor::new(&mut client);
    let rounds = scale(8);
    for round in 0..rounds {
        guest.work(&mut client, &mut random, Duration::from_millis(5));
        guest.submit(&mut client, &mut random);
        match round % 2 {
            0 => service.take_over(),
            _ => service.restart(),
        }
        guest.await_all(&mut client, round % 4 < 2);
        guest.verify(&mut client, false);
        assert!(service.manager.keeps_one());
    }
    guest.verify(&mut client, true);
    let pauses = Pauses::told_of(rounds, || service.manager.log());
    println!("{rounds} restarts and take-overs: pause {pauses}");
}

fn a_crash_after_take_overs_finds_one_session() {
    let mut random = seeded("take-over-crash");
    let mut service = served(&[]);
    let mut client = service.open(&outliving());
    let mut guest = Survivor::new(&mut client);
    for _ in 0..scale(4) {
        service.take_over();
        service.take_over();
        guest.work(&mut client, &mut random, Duration::from_millis(5));
        assert!(service.manager.keeps_one());
        guest.submit(&mut client, &mut random);
        service.daemon.kill();
        service.start_again();
        guest.await_all(&mut client, true);
        guest.verify(&mut client, false);
    }
    guest.verify(&mut client, true);
}

/// The disk is the next process's, or it is left to the one after.
fn a_signal_during_a_take_over_loses_nothing() {
    let mut random = seeded("take-over-signal");
    let mut service = served(&[]);
    let mut client = service.open(&DeviceOptions::default());
    let mut guest = Survivor::new(&mut client);
    let (rounds, mut left) = (scale(20), 0);
    for round in 0..rounds {
        guest.work(&mut client, &mut random, Duration::from_millis(1));
        guest.submit(&mut client, &mut random);
        let mut next = service.start_taking();
        std::thread::sleep(Duration::from_micros(random.below(SIGNAL_MAX_US)));
        terminate(&mut service.daemon);
        assert_eq!(service.manager.awaits(&mut service.daemon).code(), Some(0));
        match service.manager.disks() {
            0 => service.daemon = next,
            _ => {
                assert!(!service.manager.awaits(&mut next).success());
                service.start_again();
                left += 1;
            }
        }
        guest.await_all(&mut client, round % 2 == 0);
        guest.verify(&mut client, false);
        let sockets = [service.socket(), service.control()];
        assert!(sockets.iter().all(|path| path.exists()));
    }
    guest.verify(&mut client, true);
    println!("{rounds} signals: {left} disks were left to a process after the next");
}

fn one_of_two_that_take_over_gets_it() {
    let mut random = seeded("take-over-two");
    let mut service = served(&[]);
    let mut client = service.open(&DeviceOptions::default());
    let mut guest = Survivor::new(&mut client);
    for round in 0..scale(6) {
        let mut both = [service.start_taking(), service.start_taking()];
        guest.work(&mut client, &mut random, Duration::from_millis(1));
        let ended = |one: &mut Killed| one.0.try_wait().unwrap();
        while ended(&mut service.daemon).is_none() {
            service.manager.settle();
            // Both are refused if the disk takes longer than a guest may wait.
            if both.iter_mut().filter_map(ended).count() == 2 {
                both[0] = service.start_taking();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(service.manager.awaits(&mut service.daemon).code(), Some(0));
        // The other one is refused, unless it came when the disk had been taken: then it takes over from the first.
        assert!(wait_until(|| {
            // A process that ends waits for its manager.
            service.manager.settle();
            both.iter_mut().filter_map(ended).count() == 1
        }));
        let [first, second] = both;
        let mut left = vec![first, second];
        left.retain_mut(|one| ended(one).is_none());
        service.daemon = left.pop().unwrap();
        guest.await_all(&mut client, round % 2 == 0);
        guest.verify(&mut client, false);
    }
    guest.verify(&mut client, true);
}

/// The next one asks while the one before has just taken the disk.
fn take_overs_follow_at_once() {
    let mut random = seeded("take-over-row");
    let mut service = served(&[]);
    let mut client = service.open(&DeviceOptions::default());
    let mut guest = Survivor::new(&mut client);
    for round in 0..scale(20) {
        guest.submit(&mut client, &mut random);
        service.take_over();
        if round % 5 == 0 {
            guest.await_all(&mut client, true);
            guest.verify(&mut client, false);
        }
    }
    guest.await_all(&mut client, true);
    guest.verify(&mut client, true);
}

/// A manager that does not know the next process yet would not notice its death.
fn a_process_ends_when_its_manager_has_heard_of_the_next() {
    let mut service = served(&[]);
    let next = service.start_taking();
    service.manager.hears(&format!("MAINPID={}", next.0.id()));
    service.manager.hears("BARRIER=1");
    assert_eq!(service.manager.awaits(&mut service.daemon).code(), Some(0));
    service.daemon = next;
    service.stop();
}

fn another_file_or_access_is_refused() {
    let mut service = served(&[]);
    let mut client = service.open(&DeviceOptions::default());
    service.args.push("--read-only".to_owned());
    let why = service.is_refused();
    assert!(why.contains("the running daemon may write to it"), "{why}");
    service.args.pop();
    let image = service.scratch.join("disk");
    std::fs::rename(&image, service.scratch.join("away")).unwrap();
    service.scratch.image("disk", SURVIVOR_DISK_BYTES);
    let why = service.is_refused();
    assert!(why.contains("serves another file"), "{why}");
    exercise_queue(&mut client, 0).unwrap();
    std::fs::rename(service.scratch.join("away"), &image).unwrap();
    service.take_over();
    exercise_queue(&mut client, 0).unwrap();
}

fn a_held_request_goes_on_if_its_frontend_keeps_it() {
    let (mut service, mut client) = held(&outliving());
    // Nobody has told the first one to try again.
    cut(&service, DISK);
    service.take_over();
    is_written(&mut client, DISK - 4096);
    assert_eq!(client.queue(0).ring().in_flight(), 0);
}

fn a_held_request_that_nobody_keeps_stays() {
    let (mut service, mut client) = held(&DeviceOptions::default());
    let why = service.is_refused();
    assert!(
        why.contains("requests are held that the frontend does not keep"),
        "{why}"
    );
    cut(&service, DISK);
    resume(&service);
    is_written(&mut client, DISK - 4096);
    service.take_over();
    is_written_again(&mut client);
}

fn resume(service: &Service) {
    let id = http::get(&service.control(), "/v1/disks")[0]["id"].clone();
    let path = format!("/v1/disks/{}/resume", id.as_str().unwrap());
    let answer = http::fetch(&service.control(), "POST", &path, "");
    assert_eq!(answer.status, 200, "{}", answer.body);
}

fn is_written_again(client: &mut Client) {
    let mut back = [0; 4096];
    client.queue(0).read(DISK - 4096, &mut back).unwrap();
    assert!(back == [b'A'; 4096]);
}

/// The frontend goes on when it likes; no other process could read the rest.
fn a_message_that_has_begun_stays() {
    // A frontend that sends no more for five seconds is let go, and none of them may be the disk's.
    let scratch = Scratch::in_memory();
    let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
    let mut service = Service::serve_in(scratch, image.to_str().unwrap(), &[]);
    let mut client = service.open(&DeviceOptions::default());
    let payload = config_space(0, 8, 0, &[0; 8]);
    let bytes = message(request::GET_CONFIG, VERSION, &payload);
    let (begun, rest) = bytes.split_at(5);
    client.frontend().socket().send_raw(begun, &[]).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    // Not by a program, which may start late.
    // A session that has not read the beginning yet is offered, and goes on when the link ends.
    let is_kept = || {
        let mut link = asked(&service.control(), "/v1/take-over");
        link.write_all(&frame(HELLO, &1_u32.to_le_bytes())).unwrap();
        assert_eq!(received(&mut link), 2);
        link.write_all(&frame(READY, &[])).unwrap();
        received(&mut link) == KEPT
    };
    assert!(wait_until(is_kept));
    let is_told = || service.manager.log().contains("are not finished in time");
    assert!(wait_until(is_told), "{}", service.manager.log());
    exercise_queue(&mut client, 0).unwrap();
    client.frontend().socket().send_raw(rest, &[]).unwrap();
    let answer = client.frontend().socket().recv().unwrap();
    assert_eq!(
        answer.payload[12..20],
        (SURVIVOR_DISK_BYTES / 512).to_le_bytes()
    );
    exercise_queue(&mut client, 0).unwrap();
    service.take_over();
    exercise_queue(&mut client, 0).unwrap();
}

fn a_disk_that_hangs_stays() {
    let scratch = Scratch::new();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(DISK));
    let mut service = Service::serve(&server.uri(""), &[]);
    let mut client = service.open(&DeviceOptions::default());
    client.queue(0).write(0, &[b'A'; 4096]).unwrap();
    let hangs = Arc::new(AtomicBool::new(true));
    server.hold_flushes(&hangs);
    client.queue(0).set_timeout(Duration::from_millis(200));
    let stuck = client.queue(0).flush();
    assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
    let why = service.is_refused();
    assert!(why.contains("are not finished in time"), "{why}");
    hangs.store(false, Ordering::Relaxed);
    client.queue(0).set_timeout(TIMEOUT);
    client.queue(0).wait_used().unwrap();
    exercise_queue(&mut client, 0).unwrap();
    service.take_over();
    exercise_queue(&mut client, 0).unwrap();
}

fn a_disk_whose_server_is_away_stays() {
    let scratch = Scratch::new();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(DISK));
    let mut service = Service::serve(&server.uri(""), &[]);
    let mut client = service.open(&outliving());
    exercise_queue(&mut client, 0).unwrap();
    service.take_over();
    exercise_queue(&mut client, 0).unwrap();
    server.accept(false);
    server.hang_up();
    let mut why = String::new();
    assert!(wait_until(|| {
        why = service.is_refused();
        why.contains("it waits for its server")
    }));
    server.accept(true);
    exercise_queue(&mut client, 0).unwrap();
    service.take_over();
    exercise_queue(&mut client, 0).unwrap();
    assert!(!closes_within(
        client.frontend().socket(),
        Duration::from_millis(1)
    ));
    drop(client);
    service.stop();
}
