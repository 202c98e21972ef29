//! What a manager may pass besides a whole parcel: it is refused, and the disk is served all the same.

use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cleave_client::{Base, Client, DeviceOptions};
use cleave_tests::{
    Case, SURVIVOR_DISK_BYTES, Scratch, Survivor, TIMEOUT, closes_within, connect, exercise_queue,
    outliving, seeded, wait_until,
};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde_json::{Value, json};

use super::service::Service;

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        what_is_no_parcel_is_refused,
        a_parcel_of_another_version_costs_its_frontend_a_connection,
        a_parcel_that_is_cut_ends_its_frontend,
        a_parcel_is_taken_once,
        a_frontend_that_left_makes_room_for_the_next,
    ]
}

const DISK: u64 = 8 << 20;
/// The kind of a frame with a parcel, and the number of descriptors that go with one byte of it.
const PARCEL: u32 = 4;
const CHUNK: usize = 64;
/// How long a guest works.
const WORK: Duration = Duration::from_millis(5);

fn served() -> (Service, Client) {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let service = Service::serve_in(scratch, image.to_str().unwrap(), &[]);
    let mut client = service.open(&DeviceOptions::default());
    exercise_queue(&mut client, 0).unwrap();
    (service, client)
}

fn keep(service: &mut Service, fd: impl Into<OwnedFd>) {
    let kept = ("cleave-disk".to_owned(), fd.into());
    service.manager.kept.push(kept);
}

/// A socket in which this waits.
fn socket_with(bytes: &[u8], fds: &[BorrowedFd<'_>]) -> UnixStream {
    let (mut ours, kept) = UnixStream::pair().unwrap();
    ours.write_all(bytes).unwrap();
    send_fds(&ours, fds);
    kept
}

/// Sends the descriptors that end a frame.
pub(super) fn send_fds(into: &UnixStream, fds: &[BorrowedFd<'_>]) {
    for chunk in fds.chunks(CHUNK) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(CHUNK))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(chunk));
        let piece = [std::io::IoSlice::new(&[0])];
        sendmsg(into, &piece, &mut control, SendFlags::empty()).unwrap();
    }
}

/// A sealed file with this document.
pub(super) fn sealed(document: &Value) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("document", flags).unwrap());
    file.write_all(document.to_string().as_bytes()).unwrap();
    fcntl_add_seals(
        &file,
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE,
    )
    .unwrap();
    file
}

/// A parcel with this document, and without other descriptors.
fn parcel_of(document: &Value) -> UnixStream {
    let header = [PARCEL, 2, 1].map(u32::to_le_bytes).concat();
    socket_with(&[&header[..], b"[]"].concat(), &[sealed(document).as_fd()])
}

/// Takes so many bytes out of a socket, with the descriptors that go with them.
fn receive(socket: &OwnedFd, length: usize, fds: &mut Vec<OwnedFd>) -> Vec<u8> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(CHUNK))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; length];
    let mut pieces = [std::io::IoSliceMut::new(&mut bytes)];
    let received = recvmsg(socket, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    assert_eq!(received.bytes, length);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(found) = message {
            fds.extend(found);
        }
    }
    bytes
}

/// Returns a socket with the parcel that waits in this one, but with a document that differs.
fn changed(socket: &OwnedFd, change: impl FnOnce(&mut Value)) -> UnixStream {
    let mut fds = Vec::new();
    let header = receive(socket, 12, &mut fds);
    let [kind, length, count] =
        [0, 4, 8].map(|at| u32::from_le_bytes(header[at..at + 4].try_into().unwrap()) as usize);
    assert_eq!(kind, PARCEL as usize);
    let names = receive(socket, length, &mut fds);
    while fds.len() < count {
        receive(socket, 1, &mut fds);
    }
    let mut document = File::from(fds.remove(0));
    document.rewind().unwrap();
    let mut document = serde_json::from_reader(document).unwrap();
    change(&mut document);
    fds.insert(0, sealed(&document).into());
    let fds: Vec<_> = fds.iter().map(OwnedFd::as_fd).collect();
    socket_with(&[header, names].concat(), &fds)
}

fn what_is_no_parcel_is_refused() {
    let (mut service, mut client) = served();
    service.stop();
    keep(&mut service, File::open("/dev/zero").unwrap());
    // One in which nothing waits is none.
    keep(&mut service, socket_with(&[], &[]));
    keep(&mut service, socket_with(&[0x5a; 64], &[]));
    keep(&mut service, parcel_of(&json!({"format": "other"})));
    let version = json!({"format": "cleave-hand-over", "version": 2, "cleave": "9.9", "new": 1});
    keep(&mut service, parcel_of(&version));
    service.start_again();
    exercise_queue(&mut client, 0).unwrap();
    let refused = || {
        let log = service.manager.log();
        log.matches("its frontends have to connect again").count()
    };
    wait_until(|| refused() >= 4);
    let log = service.manager.log();
    assert_eq!(refused(), 4, "{log}");
    assert!(log.contains("version 2, by cleave 9.9"), "{log}");
}

/// A process that finds what a later version has left cannot use it. Its frontends see the end of their connections, and those that
/// connect again lose nothing.
fn a_parcel_of_another_version_costs_its_frontend_a_connection() {
    let rows: [(&str, Value, &str); 2] = [
        ("version", json!(2), "version 2, by cleave"),
        ("later", json!(1), "unknown field `later`"),
    ];
    let mut random = seeded("handover-version");
    for (field, value, why) in rows {
        for is_killed in [false, true] {
            let scratch = Scratch::new();
            let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
            let mut service = Service::serve_in(scratch, image.to_str().unwrap(), &[]);
            let mut client = service.open(&outliving());
            let mut guest = Survivor::new(&mut client);
            client.frontend().features().unwrap();
            assert!(service.manager.keeps_one());
            guest.work(&mut client, &mut random, WORK);
            guest.submit(&mut client, &mut random);
            match is_killed {
                true => {
                    service.daemon.kill();
                    service.manager.settle();
                }
                false => service.stop(),
            }
            guest.submit(&mut client, &mut random);
            let [(_, kept)] = &mut service.manager.kept[..] else {
                panic!("it keeps {:?}", service.manager.kept);
            };
            let later = changed(kept, |document| document[field] = value.clone());
            *kept = later.into();
            service.start_again();
            assert!(closes_within(client.frontend().socket(), TIMEOUT));
            let is_told = || service.manager.log().contains(why);
            assert!(wait_until(is_told), "{}", service.manager.log());
            connect(|| client.reconnect(&service.socket(), &outliving(), Base::Used));
            guest.await_all(&mut client, is_killed);
            guest.verify(&mut client, true);
        }
    }
}

/// Takes the beginning of a parcel out of its socket.
fn cut(socket: &OwnedFd) {
    for _ in 0..2 {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(CHUNK))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; 6];
        let mut pieces = [std::io::IoSliceMut::new(&mut bytes)];
        recvmsg(socket, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    }
}

/// The descriptors that are left in it are closed.
fn a_parcel_that_is_cut_ends_its_frontend() {
    let (mut service, mut client) = served();
    service.stop();
    cut(&service.manager.kept[0].1);
    service.start_again();
    assert!(closes_within(client.frontend().socket(), TIMEOUT));
    exercise_queue(&mut service.open(&DeviceOptions::default()), 0).unwrap();
}

fn a_parcel_is_taken_once() {
    let (mut service, mut client) = served();
    service.stop();
    let again = service.manager.kept[0].1.try_clone().unwrap();
    keep(&mut service, again);
    service.start_again();
    exercise_queue(&mut client, 0).unwrap();
    service.restart();
    exercise_queue(&mut client, 0).unwrap();
}

/// Its VMM ends before the next process has started, or while that starts. Nothing of it stays, and the next frontend is served.
fn a_frontend_that_left_makes_room_for_the_next() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let mut service = Service::serve_in(scratch, image.to_str().unwrap(), &[]);
    for round in 0..8 {
        let mut client = service.open(&outliving());
        exercise_queue(&mut client, 0).unwrap();
        service.stop();
        assert_eq!(service.manager.disks(), 1);
        match round % 2 {
            0 => drop(client),
            _ => {
                let leaves = std::thread::spawn(move || drop(client));
                service.start_again();
                leaves.join().unwrap();
                continue;
            }
        }
        service.start_again();
    }
    exercise_queue(&mut service.open(&outliving()), 0).unwrap();
}
