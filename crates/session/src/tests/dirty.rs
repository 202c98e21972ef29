//! The dirty log, in the order of QEMU and in that of Cloud Hypervisor.

use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::running::Driver;
use super::*;

const LOG_ALL: u64 = 1 << 26;
/// VHOST_USER_PROTOCOL_F_LOG_SHMFD.
const LOG_SHMFD: u64 = 1 << 1;
/// Bytes for the pages of the frontend's memory.
const LOG_BYTES: u64 = MEM_BYTES / 4096 / 8;
/// Pages of vring 0: its used ring, its status byte, and the data of all requests.
const USED: u64 = 1;
const STATUS: u64 = 3;
const DATA: u64 = 128;
const NONE: [u64; 0] = [];

/// A log as Cloud Hypervisor makes it: its length is a multiple of nothing.
pub(super) struct Log(pub(super) File);

impl Log {
    pub(super) fn new() -> Log {
        Log(memory_file(LOG_BYTES))
    }

    fn pages(&self) -> Vec<u64> {
        let mut bytes = vec![0; LOG_BYTES as usize];
        self.0.read_exact_at(&mut bytes, 0).unwrap();
        let is_marked = |page: &u64| bytes[(page / 8) as usize] & 1 << (page % 8) != 0;
        (0..8 * LOG_BYTES).filter(is_marked).collect()
    }
}

/// Returns the payload of SET_VRING_ADDR for a running vring, with its used ring in the log or not.
fn logged(index: u32, is_logged: bool) -> Vec<u8> {
    let mut payload = words(&[index, is_logged.into()]);
    let at = USER + u64::from(index) * 0x4000;
    let used = u64::from(index) * 0x4000 + 0x1000;
    let log = if is_logged { used } else { 0 };
    payload.extend(longs(&[at, at + 0x1000, at + 0x2000, log]));
    payload
}

impl Frontend {
    /// Sends SET_LOG_BASE. Each answer is the payload that was sent.
    fn send_log(&mut self, flags: u32, payload: &[u8], file: &File) -> Answer {
        let size = payload.len() as u32;
        self.send_raw(6, flags, size, payload, &[file.as_fd()]);
        match self.reply() {
            None => Closed,
            Some(reply) => {
                assert_eq!(reply, (6, payload.to_vec()));
                Ack
            }
        }
    }

    pub(super) fn put(&mut self, log: &Log) {
        assert_eq!(self.send_log(0x1, &longs(&[LOG_BYTES, 0]), &log.0), Ack);
    }

    /// Replaces a log and returns the pages that were marked in it. All of them: the worker has ended its lap.
    fn pass(&mut self, log: &mut Log) -> Vec<u64> {
        let next = Log::new();
        self.put(&next);
        std::mem::replace(log, next).pages()
    }

    pub(super) fn set_features(&mut self, features: u64) -> Answer {
        self.request(Req::SET_FEATURES, &longs(&[features]))
    }

    fn set_logged(&mut self, index: u32, is_logged: bool) {
        let payload = logged(index, is_logged);
        assert_eq!(self.request(Req::SET_VRING_ADDR, &payload), Ack);
    }
}

#[test]
fn a_log_is_answered_whether_an_acknowledgement_was_asked_for_or_not() {
    let mut frontend = Frontend::negotiated();
    let payload = longs(&[LOG_BYTES, 0]);
    for flags in [0x1, 0x9] {
        let log = Log::new();
        assert_eq!(frontend.send_log(flags, &payload, &log.0), Ack);
    }
    // In a file that has more than the log, at any place.
    let file = memory_file(8192);
    let inside = longs(&[77, 4097]);
    assert_eq!(frontend.send_log(0x9, &inside, &file), Ack);
    // Sealed as QEMU does it.
    let fd = memfd_create("log", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, LOG_BYTES).unwrap();
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    assert_eq!(frontend.send_log(0x9, &payload, &fd.into()), Ack);
    assert!(frontend.is_alive());
}

/// QEMU: log, feature, vrings; when the guest stays, feature and vrings, and the log is never taken away.
#[test]
fn pages_are_marked_in_the_order_of_qemu() {
    let mut frontend = Frontend::with_memory();
    let mut driver = frontend.drive(0);
    let mut log = Log::new();
    driver.request();
    frontend.put(&log);
    driver.request();
    assert_eq!(frontend.pass(&mut log), NONE, "nothing says so");
    assert_eq!(frontend.set_features(FEATURES | LOG_ALL), Ack);
    driver.request();
    assert_eq!(frontend.pass(&mut log), [STATUS, DATA]);
    frontend.set_logged(0, true);
    driver.request();
    assert_eq!(frontend.pass(&mut log), [USED, STATUS, DATA]);
    assert_eq!(
        frontend.remote.view().features,
        Some(FEATURES),
        "bit 26 is none of the guest's"
    );
    assert_eq!(frontend.set_features(FEATURES), Ack);
    driver.request();
    assert_eq!(frontend.pass(&mut log), [USED]);
    frontend.set_logged(0, false);
    // It may have asked for a kick in between.
    frontend.pass(&mut log);
    driver.request();
    assert_eq!(frontend.pass(&mut log), NONE);
    // The vring has gone on all the time.
    assert_eq!(frontend.base(0), Some((0, 6)));
}

/// Cloud Hypervisor: a new log for each pass; at the end the vrings first.
#[test]
fn pages_are_marked_in_the_order_of_cloud_hypervisor() {
    let mut frontend = Frontend::with_memory();
    let mut drivers = [0, 1, 2].map(|index| frontend.drive(index));
    let mut log = Log::new();
    frontend.put(&log);
    assert_eq!(frontend.set_features(FEATURES | LOG_ALL), Ack);
    (0..3).for_each(|index| frontend.set_logged(index, true));
    let mut old: Vec<(Log, Vec<u64>)> = Vec::new();
    for round in 0..30 {
        let next = Log::new();
        for (index, driver) in (0..).zip(&mut drivers) {
            if round >> index & 1 != 0 {
                driver.request();
            }
        }
        frontend.put(&next);
        let done = std::mem::replace(&mut log, next);
        let served = (0..3).filter(|index| round >> index & 1 != 0);
        let ring = |index: u64| [4 * index + USED, 4 * index + STATUS];
        let mut expected: Vec<_> = served.flat_map(ring).collect();
        if !expected.is_empty() {
            expected.push(DATA);
        }
        let pages = done.pages();
        let mut found = pages.clone();
        // A vring that serves nothing may have asked for a kick.
        found.retain(|page| expected.contains(page) || page % 4 != USED);
        assert_eq!(found, expected, "round {round}");
        old.push((done, pages));
    }
    for (log, pages) in old {
        assert_eq!(log.pages(), pages, "written after the answer");
    }
    (0..3).for_each(|index| frontend.set_logged(index, false));
    frontend.pass(&mut log);
    drivers[0].request();
    assert_eq!(frontend.pass(&mut log), [STATUS, DATA]);
    assert_eq!(frontend.set_features(FEATURES), Ack);
    drivers[0].request();
    assert_eq!(frontend.pass(&mut log), NONE);
}

/// The move fails at its end, and the guest goes on here: QEMU has freed the log, sets everything up, and sends the new log only
/// when the vrings run. A guest may acknowledge bit 26 too.
#[test]
fn vrings_start_with_everything_marked_and_no_log() {
    let mut frontend = Frontend::with_memory();
    assert_eq!(frontend.set_features(FEATURES | LOG_ALL), Ack);
    let driver = Driver::new(&frontend, 0);
    frontend.configure_at(&driver, 0);
    frontend.set_logged(0, true);
    let mut driver = driver;
    assert_eq!(
        frontend.request(Req::SET_VRING_ENABLE, &words(&[0, 1])),
        Ack
    );
    driver.request();
    let mut log = Log::new();
    frontend.put(&log);
    driver.request();
    assert_eq!(frontend.pass(&mut log), [USED, STATUS, DATA]);
    // A vring that starts while there is a log marks at once that it asks for kicks.
    assert_eq!(frontend.base(0), Some((0, 2)));
    assert_eq!(frontend.kick_on(&driver), Ack);
    assert_eq!(frontend.pass(&mut log), [USED]);
    // Other features still cannot change.
    let others = FEATURES | feature::EVENT_IDX;
    for features in [others, others | LOG_ALL] {
        assert_eq!(frontend.set_features(features), Nack);
    }
    assert_eq!(frontend.set_features(LOG_ALL), Nack, "a vring runs");
    assert!(frontend.is_alive());
}

/// QEMU sends a longer log before it adds memory, and a shorter one after it has removed some.
#[test]
fn memory_must_have_bits_in_the_log_in_force() {
    let mut frontend = Frontend::with_memory();
    let more = |frontend: &mut Frontend| frontend.add_memory(MEM_BYTES, 0x1000, USER + MEM_BYTES);
    let less = longs(&[0, MEM_BYTES, 0x1000, USER + MEM_BYTES, 0]);
    let short = longs(&[LOG_BYTES, 0]);
    let long = longs(&[LOG_BYTES + 1, 0]);
    let file = memory_file(LOG_BYTES + 1);
    let _driver = frontend.drive(0);
    assert_eq!(frontend.set_features(FEATURES | LOG_ALL), Ack);
    assert_eq!(more(&mut frontend), Ack, "there is no log");
    assert_eq!(frontend.request(Req::REM_MEM_REG, &less), Ack);
    assert_eq!(frontend.send_log(0x9, &short, &file), Ack);
    assert_eq!(more(&mut frontend), Nack);
    let mut table = words(&[1, 0]);
    table.extend(longs(&[0x1000, MEM_BYTES, USER, 0]));
    let memory = frontend.memory.try_clone().unwrap();
    let answer = frontend.request_fds(Req::SET_MEM_TABLE, &table, &[memory.as_fd()]);
    assert_eq!(answer, Nack);
    assert_eq!(frontend.send_log(0x9, &long, &file), Ack);
    assert_eq!(more(&mut frontend), Ack);
    // The guest stays, and the log is none any more.
    assert_eq!(frontend.request(Req::REM_MEM_REG, &less), Ack);
    assert_eq!(frontend.send_log(0x9, &short, &file), Ack);
    assert_eq!(frontend.set_features(FEATURES), Ack);
    assert_eq!(more(&mut frontend), Ack);
    // It would be in force again.
    assert_eq!(frontend.set_features(FEATURES | LOG_ALL), Nack);
    assert_eq!(frontend.send_log(0x9, &short, &file), Closed, "too short");
}

/// QEMU never takes a log away. If the guest gets more memory after that, and its driver starts in the middle of the next move,
/// QEMU sends features, memory and vrings before the new log.
#[test]
fn a_log_of_an_earlier_move_keeps_no_guest_from_starting() {
    for grows_first in [true, false] {
        let mut frontend = Frontend::with_memory();
        let log = Log::new();
        frontend.put(&log);
        let more = |frontend: &mut Frontend| {
            let answer = frontend.add_memory(MEM_BYTES, 0x1000, USER + MEM_BYTES);
            assert_eq!(answer, Ack, "{grows_first}");
        };
        if grows_first {
            more(&mut frontend);
        }
        assert_eq!(frontend.set_features(FEATURES | LOG_ALL), Ack);
        if !grows_first {
            more(&mut frontend);
        }
        let mut driver = frontend.drive(0);
        driver.request();
        let next = memory_file(LOG_BYTES + 1);
        let payload = longs(&[LOG_BYTES + 1, 0]);
        assert_eq!(frontend.send_log(0x1, &payload, &next), Ack);
        driver.request();
        assert_eq!(Log(next).pages(), [STATUS, DATA]);
        assert_eq!(log.pages(), NONE);
    }
}

/// Hostile case 42. No frontend understands a refusal, so each ends the connection.
#[test]
fn invalid_logs_end_the_connection() {
    let file = memory_file(LOG_BYTES);
    let good = longs(&[LOG_BYTES, 0]);
    let sealed = |seal| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create("log", flags).unwrap();
        ftruncate(&fd, LOG_BYTES).unwrap();
        fcntl_add_seals(&fd, seal).unwrap();
        File::from(fd)
    };
    let read_only = {
        use std::os::fd::AsRawFd;
        File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
    };
    let kick = File::from(bell());
    let null = File::open("/dev/zero").unwrap();
    let rows = [
        (longs(&[0, 0]), &file, "no bytes"),
        (
            longs(&[LOG_BYTES - 1, 0]),
            &file,
            "too short for the memory",
        ),
        (longs(&[LOG_BYTES + 1, 0]), &file, "longer than its file"),
        (longs(&[LOG_BYTES, 1]), &file, "beyond its file"),
        (longs(&[LOG_BYTES, u64::MAX]), &file, "beyond 2^64"),
        (longs(&[u64::MAX, 0]), &file, "of 2^64"),
        (longs(&[u64::MAX, LOG_BYTES]), &file, "beyond 2^64"),
        (longs(&[1 << 63, 1 << 63]), &file, "beyond 2^64"),
        (longs(&[LOG_BYTES]), &file, "without an offset"),
        (longs(&[LOG_BYTES, 0, 0]), &file, "with more"),
        (vec![], &file, "nothing"),
        (good.clone(), &read_only, "read-only"),
        (good.clone(), &sealed(SealFlags::WRITE), "sealed"),
        (good.clone(), &sealed(SealFlags::FUTURE_WRITE), "sealed"),
        (good.clone(), &kick, "an eventfd"),
        (good.clone(), &null, "a device"),
    ];
    for (payload, file, what) in rows {
        for flags in [0x1, 0x9] {
            let mut frontend = Frontend::with_memory();
            assert_eq!(frontend.send_log(flags, &payload, file), Closed, "{what}");
            assert!(matches!(frontend.end(), Ending::Refused(_)), "{what}");
        }
    }
    for count in [0, 2, 32] {
        let mut frontend = Frontend::with_memory();
        frontend.send_raw(6, 0x9, 16, &good, &vec![file.as_fd(); count]);
        assert_eq!(frontend.reply(), None, "{count} descriptors");
    }
    let mut frontend = Frontend::with_memory();
    let protocol = longs(&[PROTOCOL & !LOG_SHMFD]);
    frontend.send(Req::SET_PROTOCOL_FEATURES, &protocol, &[]);
    assert_eq!(frontend.send_log(0x9, &good, &file), Closed);
}

/// The marks that are lost would be missing on the other host.
#[test]
fn a_log_that_was_cut_ends_the_connection_before_the_guest_can_leave() {
    let next = Log::new();
    let log_base = longs(&[LOG_BYTES, 0]);
    // QEMU before 8.1 stops the vrings by a reset.
    for stop in [
        Req::GET_VRING_BASE,
        Req::SET_STATUS,
        Req::RESET_OWNER,
        Req::SET_LOG_BASE,
    ] {
        let mut frontend = Frontend::with_memory();
        let mut driver = frontend.drive(0);
        let log = Log::new();
        frontend.put(&log);
        assert_eq!(frontend.set_features(FEATURES | LOG_ALL), Ack);
        driver.request();
        ftruncate(&log.0, 0).unwrap();
        driver.request();
        driver.request();
        let answer = match stop {
            Req::GET_VRING_BASE => frontend.base(0).map_or(Closed, |_| Ack),
            Req::SET_STATUS => frontend.request(stop, &longs(&[0])),
            Req::SET_LOG_BASE => frontend.send_log(0x9, &log_base, &next.0),
            _ => frontend.request(stop, &[]),
        };
        assert_ne!(answer, Ack, "{stop:?}");
        let ending = frontend.end();
        assert!(matches!(ending, Ending::Refused(_)), "{ending:?}");
    }
}

#[test]
fn resets_forget_the_log_and_a_status_of_zero_keeps_it() {
    for (request, payload, kept) in [
        (Req::RESET_DEVICE, vec![], false),
        (Req::RESET_OWNER, vec![], false),
        (Req::SET_STATUS, longs(&[0]), true),
    ] {
        let mut frontend = Frontend::with_memory();
        let mut driver = frontend.drive(0);
        let mut log = Log::new();
        frontend.put(&log);
        assert_eq!(frontend.set_features(FEATURES | LOG_ALL), Ack);
        driver.request();
        assert_eq!(frontend.request(request, &payload), Ack);
        let marked = log.pages();
        assert_eq!(marked, [STATUS, DATA]);
        rustix::fs::ftruncate(&log.0, 0).unwrap();
        rustix::fs::ftruncate(&log.0, LOG_BYTES).unwrap();
        assert_eq!(frontend.set_features(FEATURES | LOG_ALL), Ack);
        frontend.configure_at(&driver, 1);
        let enable = words(&[0, 1]);
        assert_eq!(frontend.request(Req::SET_VRING_ENABLE, &enable), Ack);
        driver.request();
        let expected = if kept { &marked[..] } else { &NONE };
        assert_eq!(frontend.pass(&mut log), expected, "{request:?}");
        driver.request();
        assert_eq!(frontend.pass(&mut log), marked, "{request:?}");
    }
}
