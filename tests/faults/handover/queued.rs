//! A VMM connects while the daemon ends, and queues sockets there whose close waits. Nobody reads them any more, and nobody else may
//! wait for them.

use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use cleave_client::Base;
use cleave_tests::{
    Case, Lingering, Requirement, Scratch, Stopwatch, Survivor, TIMEOUT, UnresponsiveFs,
    closes_within, connect, disk_socket, http, outliving, seeded, wait_until,
};
use serde_json::json;

use super::node;
use super::obstacles::{DISK, holding, is_written, write_in_vain};
use super::pauses::Pauses;
use super::service::{Service, terminate};

/// How long the daemon waits for a disk that hangs. The VMM connects meanwhile.
const DEADLINE: Duration = Duration::from_secs(3);
/// Longest time in which it ends after that.
const END_TIME: Duration = Duration::from_secs(3);

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        no_other_disk_waits_for_what_a_vmm_queues_while_its_disk_hangs: Requirement::Fuse,
        no_daemon_waits_for_what_a_vmm_queues_while_its_disk_hangs: Requirement::Fuse,
    ]
}

/// Five sockets that linger.
fn lingering() -> [Lingering; 5] {
    std::array::from_fn(|_| Lingering::new().unwrap())
}

/// Ends a daemon. When it accepts nobody any more, these sockets are queued in connections to `socket`, that of this disk. Returns how
/// long the end took. The other ends of the sockets are open until then.
fn end_with_queued(
    service: &mut Service,
    disk: &Path,
    socket: &Path,
    queued: [Lingering; 5],
) -> Duration {
    let told = service.manager.log().len();
    let took = Stopwatch::start();
    terminate(&mut service.daemon);
    let manager = &service.manager;
    let name = disk.display().to_string();
    let drains = |line: &str| line.contains(&name) && line.contains("finishing the requests");
    let is_told = || manager.log()[told..].lines().any(drains);
    assert!(wait_until(is_told), "{}", manager.log());
    let unread: [TcpStream; 5] = queued.map(|queued| queued.queue(socket).unwrap());
    let ended = service.manager.awaits(&mut service.daemon);
    let took = took.elapsed();
    assert_eq!(ended.code(), Some(1));
    drop(unread);
    took
}

fn no_daemon_waits_for_what_a_vmm_queues_while_its_disk_hangs() {
    let deadline = DEADLINE.as_secs().to_string();
    let (mute, mut service, mut client) = holding(&["--stop-deadline", &deadline]);
    let socket = service.socket();
    let took = end_with_queued(&mut service, &mute.file(), &socket, lingering());
    assert!(took < DEADLINE + END_TIME, "{took:?}");
    mute.release();
    assert!(closes_within(client.frontend().socket(), TIMEOUT));
    service.start_again();
    connect(|| client.reconnect(&socket, &outliving(), Base::Used));
    is_written(&mut client, 0);
}

fn no_other_disk_waits_for_what_a_vmm_queues_while_its_disk_hangs() {
    let mut random = seeded("handover-queued");
    // Its sockets may not wait for a disk.
    let mut service = Service::node_in(Scratch::in_memory());
    let mute = UnresponsiveFs::mount(&service.scratch, DISK).unwrap();
    let body = json!({"disk": [mute.file()], "direct": "on", "stop_deadline": DEADLINE.as_secs()});
    let path = "/v1/disks/a";
    let added = http::fetch(&service.control(), "PUT", path, &body.to_string());
    assert_eq!(added.status, 201, "{}", added.body);
    node::add(&service, "b", &json!({}));
    let mut client = node::open(&service, "a", &outliving());
    let mut other = node::open(&service, "b", &outliving());
    let mut guest = Survivor::new(&mut other);
    mute.hold(true);
    write_in_vain(&mut client, 0);
    assert!(wait_until(|| mute.held() == 1));
    guest.submit(&mut other, &mut random);

    let socket = disk_socket(service.scratch.path(), "a");
    let took = end_with_queued(&mut service, &mute.file(), &socket, lingering());
    assert!(took < DEADLINE + END_TIME, "{took:?}");
    assert_eq!(service.manager.disks(), 1, "b was not left");
    mute.release();
    guest.submit(&mut other, &mut random);
    let told = service.manager.log().len();
    service.start_again();
    guest.await_all(&mut other, true);
    guest.verify(&mut other, true);
    let pauses = Pauses::told_of(1, || service.manager.log()[told..].to_owned());
    assert!(pauses.0[0] < DEADLINE + 2 * END_TIME, "{pauses}");
    connect(|| client.reconnect(&socket, &outliving(), Base::Used));
    is_written(&mut client, 0);
}
