//! What is another in the next process: options, files, sizes. A guest goes on, or its VMM has to connect again, and it never finds
//! another disk than it knew.

use std::fs::File;

use cleave_client::{Client, DeviceOptions};
use cleave_tests::{
    Case, Messages as _, Scratch, TIMEOUT, closes_within, connect, exercise_queue, http, leave,
    moving,
};

use rustix::fs::{FlockOperation, flock};

use super::service::Service;

const DISK: u64 = 8 << 20;

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_guest_goes_on_with_other_options,
        a_guest_does_not_find_another_device,
        a_guest_does_not_find_another_disk,
        a_socket_may_get_another_disk,
        nothing_stays_at_a_socket_that_is_given_up,
        a_guest_learns_of_another_size,
        a_disk_that_is_active_stays_so,
        a_burst_is_not_had_again,
    ]
}

fn two_queues() -> DeviceOptions {
    DeviceOptions {
        queues: 2,
        ..DeviceOptions::default()
    }
}

fn served() -> (Service, Client) {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let options = ["--direct", "on", "--queues", "4"];
    let service = Service::serve_in(scratch, image.to_str().unwrap(), &options);
    let mut client = service.open(&two_queues());
    exercise_queue(&mut client, 1).unwrap();
    (service, client)
}

/// Replaces the value of an option in the next process, or adds the option.
fn set(service: &mut Service, option: &[&str]) {
    let at = service.args.iter().position(|arg| arg == option[0]);
    match (at, option) {
        (Some(at), [_, value]) => service.args[at + 1] = (*value).to_owned(),
        _ => service
            .args
            .extend(option.iter().map(|word| (*word).to_owned())),
    }
}

fn a_guest_goes_on_with_other_options() {
    let (mut service, mut client) = served();
    for option in [
        &["--direct", "off"][..],
        &["--direct", "on"],
        &["--queues", "2"],
        &["--workers", "1"],
        &["--cache", "writethrough"],
        &["--serial", "other"],
        &["--discard", "off"],
        &["--sandbox", "off"],
    ] {
        service.stop();
        set(&mut service, option);
        service.start_again();
        for queue in 0..2 {
            exercise_queue(&mut client, queue).unwrap_or_else(|why| panic!("{option:?}: {why}"));
        }
    }
}

fn a_guest_does_not_find_another_device() {
    for option in [
        &["--queues", "1"][..],
        &["--queue-size", "16"],
        &["--read-only"],
        &["--block-size", "4K"],
    ] {
        let (mut service, mut client) = served();
        service.stop();
        set(&mut service, option);
        service.start_again();
        let closes = closes_within(client.frontend().socket(), TIMEOUT);
        assert!(closes, "{option:?}");
        let again = DeviceOptions {
            queue_size: 16,
            ..DeviceOptions::default()
        };
        exercise_queue(&mut service.open(&again), 0).unwrap();
    }
}

/// Another file at its path is another disk.
fn a_guest_does_not_find_another_disk() {
    let (mut service, mut client) = served();
    service.stop();
    let other = service.scratch.image("other", DISK);
    std::fs::rename(other, service.scratch.join("disk")).unwrap();
    service.start_again();
    assert!(closes_within(client.frontend().socket(), TIMEOUT));
    exercise_queue(&mut service.open(&two_queues()), 0).unwrap();
}

/// The socket is the same, and what was left of the disk before is not its own.
fn a_socket_may_get_another_disk() {
    let (mut service, mut client) = served();
    service.stop();
    let other = service.scratch.image("other", DISK);
    set(&mut service, &["--disk", other.to_str().unwrap()]);
    service.start_again();
    assert!(closes_within(client.frontend().socket(), TIMEOUT));
    exercise_queue(&mut service.open(&two_queues()), 0).unwrap();
}

fn nothing_stays_at_a_socket_that_is_given_up() {
    let (mut service, mut client) = served();
    service.stop();
    let socket = service.scratch.join("elsewhere");
    set(&mut service, &["--socket-path", socket.to_str().unwrap()]);
    service.start_again();
    assert!(closes_within(client.frontend().socket(), TIMEOUT));
    assert!(!service.socket().exists());
    let mut client = connect(|| Client::open(&socket, &two_queues()));
    exercise_queue(&mut client, 0).unwrap();
}

fn a_guest_learns_of_another_size() {
    let (mut service, mut client) = served();
    let channel = client.frontend().open_backend_channel().unwrap();
    for (bytes, fits) in [(2 * DISK, true), (DISK, false)] {
        service.stop();
        let image = File::options()
            .write(true)
            .open(service.scratch.join("disk"));
        image.unwrap().set_len(bytes).unwrap();
        service.start_again();
        assert!(channel.config_change(TIMEOUT).unwrap(), "it was not told");
        let told = client.refresh_config().unwrap();
        assert_eq!(told.capacity_bytes(), bytes);
        let last = client.queue(0).write(2 * DISK - 4096, &[1; 4096]);
        assert_eq!(last.is_ok(), fits, "{last:?}");
    }
}

/// Otherwise it would be locked here and seem to be free for another host.
fn a_disk_that_is_active_stays_so() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let mut service = Service::serve_in(
        scratch,
        image.to_str().unwrap(),
        &["--start", "inactive", "--serial", "moving"],
    );
    let possession = |service: &Service| {
        let disk = http::get(&service.control(), "/v1/disks/moving");
        disk["possession"].as_str().unwrap().to_owned()
    };
    assert_eq!(possession(&service), "inactive");
    let mut client = service.open(&moving(1));
    exercise_queue(&mut client, 0).unwrap();
    let positions = client.stop().unwrap();
    service.restart();
    assert_eq!(possession(&service), "active");
    client.go_on(&positions).unwrap();
    exercise_queue(&mut client, 0).unwrap();
    leave(&client);
    assert_eq!(possession(&service), "handed-over");
    let held = File::open(image).unwrap();
    flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
}

fn a_burst_is_not_had_again() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let options = [
        "--serial",
        "d",
        "--limit",
        "iops-total=1,iops-total-max=100",
    ];
    let mut service = Service::serve_in(scratch, image.to_str().unwrap(), &options);
    let mut client = service.open(&DeviceOptions::default());
    let throttled = |service: &Service| {
        let report = http::get(&service.control(), "/v1/disks/d");
        report["totals"]["throttled"].as_u64().unwrap() > 0
    };
    let mut read = |service: &Service| {
        client.queue(0).read(0, &mut [0; 512]).unwrap();
        throttled(service)
    };
    let requests = (1..).find(|_| read(&service)).unwrap();
    assert!(requests > 100, "{requests}");
    for next in [Service::take_over, Service::restart] {
        next(&mut service);
        let requests = (1..100).find(|_| read(&service));
        assert!(requests.is_some(), "the limit begins anew");
    }
}
