//! The in-flight region, which the frontend keeps.

use std::io::IoSliceMut;
use std::os::unix::fs::FileExt;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::running::Driver;
use super::*;

/// VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD.
pub(super) const INFLIGHT: u64 = 1 << 12;
/// A region for 4 vrings of 256: 16 bytes, 16 for each entry, up to a multiple of 64.
const REGION_BYTES: u64 = 4 * 4160;

pub(super) fn layout(len_bytes: u64, offset: u64, vrings: u16, size: u16) -> Vec<u8> {
    let mut payload = longs(&[len_bytes, offset]);
    payload.extend(vrings.to_ne_bytes());
    payload.extend(size.to_ne_bytes());
    payload.resize(24, 0);
    payload
}

impl Frontend {
    /// Asks for a region. Returns its length, offset and file.
    pub(super) fn region(&mut self, asked: &[u8]) -> (u64, u64, Option<File>) {
        self.send(Req::GET_INFLIGHT_FD, asked, &[]);
        let mut bytes = [0; 64];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(
            &self.stream,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::empty(),
        );
        let count = got.unwrap().bytes;
        assert_eq!(count, 12 + asked.len(), "as long as it was asked");
        assert_eq!(message::word(&bytes, 0), u32::from(Req::GET_INFLIGHT_FD));
        assert_eq!(message::word(&bytes, 8) as usize, asked.len());
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        assert!(fds.len() <= 1);
        let file = fds.pop().map(File::from);
        (message::long(&bytes, 12), message::long(&bytes, 20), file)
    }

    pub(super) fn give(&mut self, payload: &[u8], file: &File) -> Answer {
        self.request_fds(Req::SET_INFLIGHT_FD, payload, &[file.as_fd()])
    }
}

/// A driver may make its vrings larger than the frontend expects. QEMU 10.0 asks for the `queue-size` of its device, and
/// lets the guest use 1024 entries.
#[test]
fn a_region_has_room_for_the_largest_vring_whatever_was_asked_for() {
    let mut frontend = Frontend::with_memory();
    for (padding, size) in [(20, 256), (24, 256), (20, 128), (24, 128), (24, 1)] {
        let asked = layout(0, 0, 4, size);
        let (bytes, offset, file) = frontend.region(&asked[..padding]);
        let file = file.unwrap();
        assert_eq!((bytes, offset), (REGION_BYTES, 0), "{size}");
        assert_eq!(file.metadata().unwrap().len(), REGION_BYTES);
        assert!(file.set_len(0).is_err(), "the file cannot be truncated");
        // It sends the length of the answer and its own size of a vring, as QEMU does.
        assert_eq!(frontend.give(&layout(bytes, 0, 4, size), &file), Ack);
    }
    // More than the device has. The frontend goes on without a region.
    for (vrings, size) in [(5, 256), (4, 257), (4, 96), (0, 256), (4, 0)] {
        let (bytes, _, file) = frontend.region(&layout(0, 0, vrings, size));
        assert_eq!((bytes, file.is_some()), (0, false), "{vrings} {size}");
    }
    assert!(frontend.is_alive());
    frontend.end();
}

#[test]
fn invalid_regions_are_refused() {
    let file = memory_file(REGION_BYTES);
    let good = layout(REGION_BYTES, 0, 4, 256);
    let mut frontend = Frontend::with_memory();
    for (payload, what) in [
        (
            layout(REGION_BYTES - 64, 0, 4, 256),
            "too short for its vrings",
        ),
        (
            layout(REGION_BYTES, 64, 4, 256),
            "beyond the end of its file",
        ),
        (layout(REGION_BYTES, 4, 4, 256), "not aligned"),
        (layout(REGION_BYTES, u64::MAX - 63, 4, 256), "beyond 2^64"),
        (layout(u64::MAX, 1 << 12, 4, 256), "beyond 2^64"),
        (layout(REGION_BYTES, 0, 0, 256), "for no vring"),
        (layout(REGION_BYTES, 0, 4, 0), "for vrings of no size"),
        (
            layout(REGION_BYTES, 0, 4, 96),
            "for vrings of no size there is",
        ),
        (layout(REGION_BYTES, 0, 2, 512), "for longer vrings"),
    ] {
        assert_eq!(frontend.give(&payload, &file), Nack, "{what}");
    }
    let kick = bell();
    let refused = frontend.request_fds(Req::SET_INFLIGHT_FD, &good, &[kick.as_fd()]);
    assert_eq!(refused, Nack, "no memory");
    assert_eq!(frontend.give(&good, &file), Ack);
    assert_eq!(frontend.start(0), Ack);
    assert_eq!(frontend.give(&good, &file), Nack, "a vring runs");
    assert_eq!(frontend.request(Req::SET_INFLIGHT_FD, &good), Closed);
    frontend.end();
    for payload in [&good[..19], &good[..21], &[]] {
        let mut frontend = Frontend::with_memory();
        assert_eq!(frontend.give(payload, &file), Closed);
        frontend.end();
        let mut frontend = Frontend::with_memory();
        assert_eq!(frontend.request(Req::GET_INFLIGHT_FD, payload), Closed);
        frontend.end();
    }
    let mut frontend = Frontend::with_memory();
    frontend.send(
        Req::SET_PROTOCOL_FEATURES,
        &longs(&[PROTOCOL & !INFLIGHT]),
        &[],
    );
    assert_eq!(frontend.give(&good, &file), Closed, "not negotiated");
    frontend.end();
}

/// Writes a region as a daemon leaves it that has taken request 0 of this vring.
fn leave(file: &File, vring: u64) {
    let at = vring * 4160;
    file.write_all_at(&1u16.to_ne_bytes(), at + 8).unwrap();
    file.write_all_at(&256u16.to_ne_bytes(), at + 10).unwrap();
    file.write_all_at(&[1], at + 16).unwrap();
}

/// Returns a frontend that brings a region with a request of vring 2 that an earlier daemon left.
fn left_request() -> (Frontend, Driver, File) {
    let file = memory_file(REGION_BYTES);
    let mut frontend = Frontend::with_memory();
    assert_eq!(frontend.give(&layout(REGION_BYTES, 0, 4, 256), &file), Ack);
    let mut driver = Driver::new(&frontend, 2);
    driver.make();
    leave(&file, 2);
    (frontend, driver, file)
}

#[test]
fn requests_left_by_a_daemon_are_repeated_whatever_base_says() {
    for base in [0, 1, 4711] {
        let (mut frontend, driver, file) = left_request();
        frontend.configure_at(&driver, base);
        assert_eq!(
            frontend.request(Req::SET_VRING_ENABLE, &words(&[2, 1])),
            Ack
        );
        driver.finish();
        // And it stops at the ring's position.
        assert_eq!(frontend.base(2), Some((2, 1)));
        frontend.end();
        let mut in_flight = [7];
        file.read_exact_at(&mut in_flight, 2 * 4160 + 16).unwrap();
        assert_eq!(in_flight, [0]);
    }
}

/// The frontend names a smaller size than the region has room for, and the vring has the larger one.
#[test]
fn a_vring_larger_than_its_frontend_says_is_recovered() {
    let mut frontend = Frontend::with_memory();
    let (bytes, _, file) = frontend.region(&layout(0, 0, 4, 128));
    let file = file.unwrap();
    leave(&file, 2);
    assert_eq!(frontend.give(&layout(bytes, 0, 4, 128), &file), Ack);
    let mut driver = Driver::new(&frontend, 2);
    driver.make();
    frontend.configure_at(&driver, 4711);
    assert_eq!(
        frontend.request(Req::SET_VRING_ENABLE, &words(&[2, 1])),
        Ack
    );
    driver.finish();
    assert_eq!(frontend.base(2), Some((2, 1)));
    frontend.end();
    let mut in_flight = [7];
    file.read_exact_at(&mut in_flight, 2 * 4160 + 16).unwrap();
    assert_eq!(in_flight, [0]);
}

#[test]
fn a_vring_without_a_part_cannot_start_and_a_reset_forgets_the_region() {
    let file = memory_file(REGION_BYTES);
    let mut frontend = Frontend::with_memory();
    assert_eq!(frontend.give(&layout(4160, 0, 1, 256), &file), Ack);
    assert_eq!(frontend.start(1), Nack);
    assert_eq!(frontend.request(Req::RESET_DEVICE, &[]), Ack);
    assert_eq!(
        frontend.request(Req::SET_FEATURES, &longs(&[FEATURES])),
        Ack
    );
    assert_eq!(frontend.start(1), Ack);
    assert_eq!(frontend.start(0), Ack);
    frontend.end();
    let mut version = [7; 2];
    file.read_exact_at(&mut version, 8).unwrap();
    assert_eq!(version, [0; 2], "it is another driver's");
}

/// Random bytes: at worst that vring is retired.
#[test]
fn random_bytes_in_a_region_retire_only_its_vring() {
    let file = memory_file(REGION_BYTES);
    file.write_all_at(&[0xa5; REGION_BYTES as usize], 0)
        .unwrap();
    let mut frontend = Frontend::with_memory();
    assert_eq!(frontend.give(&layout(REGION_BYTES, 0, 4, 256), &file), Ack);
    let mut driver = Driver::new(&frontend, 0);
    driver.make();
    frontend.configure_at(&driver, 0);
    assert_eq!(
        frontend.request(Req::SET_VRING_ENABLE, &words(&[0, 1])),
        Ack
    );
    let until = Instant::now() + PATIENCE;
    while frontend.device.totals().retired == 0 {
        assert!(Instant::now() < until, "not retired");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(frontend.is_alive());
    assert_eq!(driver.used(), 0);
    frontend.end();
}

/// They cannot be taken while the ring is not in memory, so they stay in the region: a stop that waited for them would wait
/// without end.
#[test]
fn a_vring_stops_without_its_ring_although_an_earlier_daemon_left_requests() {
    let region = longs(&[0, 0, MEM_BYTES, USER, 0]);
    for asks in [false, true] {
        let (mut frontend, driver, file) = left_request();
        // It is not enabled, so nothing is taken yet.
        frontend.configure_at(&driver, 0);
        assert_eq!(frontend.request(Req::REM_MEM_REG, &region), Ack);
        if asks {
            assert_eq!(frontend.base(2), None, "no position while one is left");
        }
        let thread = frontend.thread;
        drop(frontend.stream);
        let until = Instant::now() + PATIENCE;
        while !thread.is_finished() {
            assert!(Instant::now() < until, "the session hangs");
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut in_flight = [0];
        file.read_exact_at(&mut in_flight, 2 * 4160 + 16).unwrap();
        assert_eq!(in_flight, [1], "the next daemon does it");
    }
}

/// A guest takes what stands in the status byte, which may be that of an earlier request, for the answer. So none is shown to it.
#[test]
fn requests_whose_memory_is_lost_are_left_to_the_next_connection() {
    const DATA: u64 = 0x8_0000;
    let mut frontend = Frontend::with_memory();
    let (bytes, _, file) = frontend.region(&layout(0, 0, 4, 256));
    let file = file.unwrap();
    let region = layout(bytes, 0, 4, 256);
    assert_eq!(frontend.give(&region, &file), Ack);
    let mut driver = frontend.drive(0);
    driver.request();
    // The first of two requests reads into a page that is not there.
    driver.make_two();
    rustix::fs::ftruncate(&frontend.memory, DATA).unwrap();
    driver.kick();
    assert_eq!(frontend.reply(), None);
    let ending = frontend.thread.join().unwrap();
    assert!(matches!(ending, Ending::Lost(_)), "{ending:?}");
    assert_eq!(driver.used(), 1);
    rustix::fs::ftruncate(&frontend.memory, MEM_BYTES).unwrap();
    let mut next = Frontend {
        memory: frontend.memory,
        ..Frontend::negotiated()
    };
    next = next.share_memory();
    assert_eq!(next.give(&region, &file), Ack);
    next.configure_at(&driver, 1);
    assert_eq!(next.request(Req::SET_VRING_ENABLE, &words(&[0, 1])), Ack);
    driver.finish();
    assert_eq!(driver.used(), 3);
}
