//! What a manager may pass besides a whole parcel: it is refused, and the disk is served all the same.

use std::fs::File;
use std::io::Write as _;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use cleave_client::{Client, DeviceOptions};
use cleave_tests::{Case, Scratch, TIMEOUT, closes_within, exercise_queue, outliving};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg,
    sendmsg,
};
use serde_json::{Value, json};

use super::service::Service;

/// The tests of this file.
pub(super) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        what_is_no_parcel_is_refused,
        a_parcel_that_is_cut_ends_its_frontend,
        a_parcel_is_taken_once,
        a_frontend_that_left_makes_room_for_the_next,
    ]
}

const DISK: u64 = 8 << 20;
/// The kind of a frame with a parcel, and the number of descriptors that go with one byte of it.
const PARCEL: u32 = 4;
const CHUNK: usize = 64;

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
    for chunk in fds.chunks(CHUNK) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(CHUNK))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(chunk));
        let piece = [std::io::IoSlice::new(&[0])];
        sendmsg(&ours, &piece, &mut control, SendFlags::empty()).unwrap();
    }
    kept
}

/// A parcel with this document, and without other descriptors.
fn parcel_of(document: &Value) -> UnixStream {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("document", flags).unwrap());
    file.write_all(document.to_string().as_bytes()).unwrap();
    fcntl_add_seals(
        &file,
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE,
    )
    .unwrap();
    let header = [PARCEL, 2, 1].map(u32::to_le_bytes).concat();
    socket_with(&[&header[..], b"[]"].concat(), &[file.as_fd()])
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
    let log = service.manager.log();
    let refused = log.matches("its frontends have to connect again").count();
    assert_eq!(refused, 4, "{log}");
    assert!(log.contains("version 2, by cleave 9.9"), "{log}");
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
