//! What is in the way of a hand-over, and what only looks like it.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cleave_client::message::{VERSION, config_space, message, request, vring_state};
use cleave_client::{Base, Client, DeviceOptions, Error};
use cleave_tests::{
    Case, Outcome, Requirement, Scratch, TIMEOUT, UnresponsiveFs, closes_within, connect,
    disk_socket, exercise_queue, http, outliving, scale, seeded, unless_late, wait_until,
};
use rustix::fs::{FlockOperation, flock};

use serde_json::json;

use super::service::{Service, terminate};

pub(super) const DISK: u64 = 8 << 20;
const BLOCK: usize = 4096;
/// Longest life of a process that is told to end while it starts.
const LIFE_MAX_US: u64 = 40_000;

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_disk_in_memory_is_not_handed_over,
        a_quiesced_disk_is_not_handed_over,
        the_next_process_waits_for_the_lock_of_the_one_before,
        a_message_that_has_begun_is_served_first,
        a_frontend_that_hangs_ends_with_its_daemon,
        a_silent_connection_ends_alone,
        a_signal_at_any_moment_loses_nothing,
        a_second_signal_changes_nothing: Requirement::Fuse,
        a_frontend_that_waits_for_its_answer_stays: Requirement::Fuse,
        a_disk_that_hangs_is_not_handed_over: Requirement::Fuse,
        a_held_request_is_repeated_if_its_frontend_keeps_it,
        a_held_request_that_nobody_keeps_ends_with_its_daemon,
    ]
}

fn served(options: &[&str]) -> Service {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    Service::serve_in(scratch, image.to_str().unwrap(), options)
}

/// Its frontend sees the end of the connection, and the next daemon serves it when it connects again.
fn must_connect_again(service: &mut Service, client: Client) {
    service.stop();
    must_connect_again_after(service, client);
}

/// As before, when the daemon has ended.
fn must_connect_again_after(service: &mut Service, mut client: Client) {
    assert_eq!(service.manager.disks(), 0, "it was handed over");
    let log = service.manager.log();
    assert!(
        log.contains("a frontend has to connect again, because"),
        "{log}"
    );
    assert!(closes_within(client.frontend().socket(), TIMEOUT));
    service.start_again();
    exercise_queue(&mut service.open(&outliving()), 0).unwrap();
}

fn a_disk_in_memory_is_not_handed_over() {
    let mut service = Service::serve("ram:8M", &[]);
    let client = service.open(&outliving());
    must_connect_again(&mut service, client);
}

fn a_quiesced_disk_is_not_handed_over() {
    let mut service = served(&[]);
    let client = service.open(&outliving());
    let disks = http::get(&service.control(), "/v1/disks");
    let id = disks[0]["id"].as_str().unwrap();
    let answer = http::fetch(
        &service.control(),
        "POST",
        &format!("/v1/disks/{id}/quiesce"),
        "",
    );
    assert_eq!(answer.status, 200, "{}", answer.body);
    must_connect_again(&mut service, client);
}

/// The socket is alive while a parcel waits, and the rings of the process before may still hold the lock beside it.
fn the_next_process_waits_for_the_lock_of_the_one_before() {
    let mut service = served(&[]);
    let mut client = service.open(&DeviceOptions::default());
    service.stop();
    let held = File::create(service.scratch.join("socket.lock")).unwrap();
    flock(&held, FlockOperation::LockExclusive).unwrap();
    let later = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(held);
    });
    service.start_again();
    later.join().unwrap();
    exercise_queue(&mut client, 0).unwrap();
}

/// The next process could not have the part that was read. So the daemon waits half a second for the rest.
fn a_message_that_has_begun_is_served_first() {
    let served = unless_late("begun-message", Duration::from_millis(100), |_| {
        is_served_with_the_rest()
    });
    served.unwrap();
}

fn is_served_with_the_rest() -> Outcome {
    let mut service = served(&[]);
    let mut client = service.open(&DeviceOptions::default());
    let bytes = message(
        request::GET_CONFIG,
        VERSION,
        &config_space(0, 8, 0, &[0; 8]),
    );
    let (begun, rest) = bytes.split_at(5);
    client.frontend().socket().send_raw(begun, &[]).unwrap();
    // It is read: the daemon has until the rest comes.
    std::thread::sleep(Duration::from_millis(20));
    terminate(&mut service.daemon);
    std::thread::sleep(Duration::from_millis(20));
    let sent = client.frontend().socket().send_raw(rest, &[]);
    assert_eq!(service.manager.awaits(&mut service.daemon).code(), Some(0));
    service.start_again();
    let answer = sent.and_then(|()| client.frontend().socket().recv());
    let answer = answer.map_err(|error| format!("it was not served: {error}"))?;
    assert_eq!(answer.payload[12..20], (DISK / 512).to_le_bytes());
    exercise_queue(&mut client, 0)
}

/// Returns true if all threads of the daemon sleep.
fn is_asleep(service: &Service) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", service.daemon.0.id())).unwrap();
    let stat = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).ok();
    tasks
        .flatten()
        .filter_map(stat)
        .all(|stat| stat.contains(") S "))
}

/// Sends requests without reading, until there is no room for more and the daemon sleeps: it waits for room for its answers.
fn ask_until_full(service: &Service, mut stream: &UnixStream) {
    stream.set_nonblocking(true).unwrap();
    let asks = message(request::GET_FEATURES, VERSION, &[]).repeat(100);
    let mut at = 0;
    let waits = wait_until(|| match stream.write(&asks[at..]) {
        Ok(count) => {
            at = (at + count) % asks.len();
            false
        }
        Err(_) => is_asleep(service),
    });
    assert!(waits, "it reads on");
}

/// A frontend that does not go on keeps no daemon from its end, as without a manager.
fn a_frontend_that_hangs_ends_with_its_daemon() {
    for hangs in [
        |_: &Service, client: &mut Client| {
            let begun = message(request::GET_CONFIG, VERSION, &[0; 20]);
            client
                .frontend()
                .socket()
                .send_raw(&begun[..5], &[])
                .unwrap();
            std::thread::sleep(Duration::from_millis(20));
        },
        |service: &Service, client: &mut Client| {
            ask_until_full(service, client.frontend().socket().stream());
        },
    ] {
        let mut service = served(&[]);
        let mut client = service.open(&DeviceOptions::default());
        hangs(&service, &mut client);
        service.stop();
        service.start_again();
        client
            .frontend()
            .socket()
            .stream()
            .set_nonblocking(false)
            .unwrap();
        assert!(closes_within(client.frontend().socket(), TIMEOUT));
        exercise_queue(&mut service.open(&outliving()), 0).unwrap();
    }
}

/// A connection that has sent nothing keeps nothing from being handed over.
fn a_silent_connection_ends_alone() {
    let mut service = served(&[]);
    let mut client = service.open(&DeviceOptions::default());
    let mut silent = UnixStream::connect(service.socket()).unwrap();
    assert_eq!(client.frontend().features().unwrap(), client.offered());
    service.restart();
    assert_eq!(silent.read(&mut [0; 1]).unwrap_or(0), 0);
    exercise_queue(&mut client, 0).unwrap();
}

/// A disk whose server holds what is written, and a frontend that has written one block.
pub(super) fn holding(options: &[&str]) -> (UnresponsiveFs, Service, Client) {
    let scratch = Scratch::in_memory();
    let mute = UnresponsiveFs::mount(&scratch, DISK).unwrap();
    let disk = mute.file().display().to_string();
    let options = [&["--direct", "on"], options].concat();
    let service = Service::serve_in(scratch, &disk, &options);
    let mut client = service.open(&outliving());
    mute.hold(true);
    write_in_vain(&mut client, 0);
    assert!(wait_until(|| mute.held() == 1));
    (mute, service, client)
}

/// Writes a block of `A` that is not answered.
pub(super) fn write_in_vain(client: &mut Client, offset: u64) {
    let queue = client.queue(0);
    queue.set_timeout(Duration::from_millis(200));
    let stuck = queue.write(offset, &[b'A'; BLOCK]);
    assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
    queue.set_timeout(TIMEOUT);
}

pub(super) fn is_written(client: &mut Client, offset: u64) {
    client.queue(0).wait_used().unwrap();
    let mut back = [0; BLOCK];
    client.queue(0).read(offset, &mut back).unwrap();
    assert!(back == [b'A'; BLOCK]);
}

/// A process that is told to end while it starts leaves its frontends to the next one.
fn a_signal_at_any_moment_loses_nothing() {
    let mut random = seeded("handover-early");
    let mut service = served(&[]);
    let mut node = Service::node();
    let image = node.scratch.image("one", DISK);
    let body = json!({"disk": [image]}).to_string();
    assert_eq!(
        http::fetch(&node.control(), "PUT", "/v1/disks/one", &body).status,
        201
    );
    let options = DeviceOptions::default();
    let mut clients = [
        service.open(&options),
        connect(|| Client::open(&disk_socket(node.scratch.path(), "one"), &options)),
    ];
    for (service, client) in [&mut service, &mut node].into_iter().zip(&mut clients) {
        let mut killed = 0;
        for _ in 0..scale(20) {
            service.stop();
            service.daemon = service.manager.start(&service.args);
            std::thread::sleep(Duration::from_micros(random.below(LIFE_MAX_US)));
            terminate(&mut service.daemon);
            let ended = service.manager.awaits(&mut service.daemon);
            // Before it has taken anything, the signal kills it.
            killed += u32::from(ended.code().is_none());
            assert_eq!(service.manager.disks(), 1, "{ended}");
            service.start_again();
            exercise_queue(client, 0).unwrap();
        }
        println!("{killed} were killed by the signal");
    }
}

/// An impatient operator loses nothing.
fn a_second_signal_changes_nothing() {
    let (mute, mut service, mut client) = holding(&["--stop-deadline", "30"]);
    terminate(&mut service.daemon);
    std::thread::sleep(Duration::from_millis(100));
    terminate(&mut service.daemon);
    std::thread::sleep(Duration::from_millis(100));
    mute.release();
    assert_eq!(service.manager.awaits(&mut service.daemon).code(), Some(0));
    service.start_again();
    is_written(&mut client, 0);
}

/// The daemon lets go of frontends that it waits for, not of those that wait for it.
fn a_frontend_that_waits_for_its_answer_stays() {
    let (mute, mut service, mut client) = holding(&["--stop-deadline", "30"]);
    let stop = message(request::GET_VRING_BASE, VERSION, &vring_state(0, 0));
    client.frontend().socket().send_raw(&stop, &[]).unwrap();
    // It is read, and its answer comes after the request.
    std::thread::sleep(Duration::from_millis(20));
    terminate(&mut service.daemon);
    // Longer than a frontend has.
    std::thread::sleep(Duration::from_millis(700));
    mute.release();
    assert_eq!(service.manager.awaits(&mut service.daemon).code(), Some(0));
    service.start_again();
    let stopped = client.frontend().socket().recv().unwrap();
    assert_eq!(stopped.payload[4..8], 1_u32.to_le_bytes());
    client.resume_queue(0, 1).unwrap();
    is_written(&mut client, 0);
}

fn a_disk_that_hangs_is_not_handed_over() {
    let (mute, mut service, mut client) = holding(&["--stop-deadline", "1"]);
    terminate(&mut service.daemon);
    let ended = service.manager.awaits(&mut service.daemon);
    mute.release();
    assert_eq!(ended.code(), Some(1));
    assert_eq!(service.manager.disks(), 0, "it was handed over");
    let log = service.manager.log();
    assert!(
        log.contains("1 request is left to the next daemon"),
        "{log}"
    );
    assert!(closes_within(client.frontend().socket(), TIMEOUT));
    service.start_again();
    connect(|| client.reconnect(&service.socket(), &outliving(), Base::Used));
    is_written(&mut client, 0);
    assert_eq!(client.queue(0).ring().in_flight(), 0);
}

/// A request beyond the end of a file that was cut, which waits for the operator.
pub(super) fn held(options: &DeviceOptions) -> (Service, Client) {
    let service = served(&["--on-error", "hold"]);
    let mut client = service.open(options);
    cut(&service, DISK / 2);
    let is_told = || service.manager.log().contains("has shrunk");
    assert!(wait_until(is_told));
    write_in_vain(&mut client, DISK - BLOCK as u64);
    let is_told = || service.manager.log().contains("is held");
    assert!(wait_until(is_told), "{}", service.manager.log());
    (service, client)
}

pub(super) fn cut(service: &Service, bytes: u64) {
    let image = service.scratch.join("disk");
    File::options()
        .write(true)
        .open(image)
        .unwrap()
        .set_len(bytes)
        .unwrap();
}

fn a_held_request_is_repeated_if_its_frontend_keeps_it() {
    let (mut service, mut client) = held(&outliving());
    service.stop();
    cut(&service, DISK);
    service.start_again();
    is_written(&mut client, DISK - BLOCK as u64);
    assert_eq!(client.queue(0).ring().in_flight(), 0);
}

fn a_held_request_that_nobody_keeps_ends_with_its_daemon() {
    let (mut service, client) = held(&DeviceOptions::default());
    service.stop();
    cut(&service, DISK);
    must_connect_again_after(&mut service, client);
}
