//! Running vrings: what can change meanwhile, how they stop, and what remains afterwards.

use std::os::unix::fs::FileExt;

use super::owner::comes;
use super::*;

/// Distance between two vrings: descriptors, used ring at 0x1000, available ring at 0x2000, headers and status
/// bytes at 0x3000.
const RING: u64 = 0x4000;

/// The guest's driver of one vring, on the memory file. Every request reads one sector.
pub(super) struct Driver {
    memory: File,
    pub(super) index: u32,
    made: u16,
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
    pub(super) err: OwnedFd,
}

impl Driver {
    pub(super) fn new(frontend: &Frontend, index: u32) -> Driver {
        Driver::on(&frontend.memory, index)
    }

    /// The driver of a guest with this memory.
    pub(super) fn on(memory: &File, index: u32) -> Driver {
        Driver {
            memory: memory.try_clone().unwrap(),
            index,
            made: 0,
            kick: bell(),
            call: bell(),
            err: bell(),
        }
    }

    pub(super) fn put(&self, offset: u64, bytes: &[u8]) {
        let at = u64::from(self.index) * RING + offset;
        self.memory.write_all_at(bytes, at).unwrap();
    }

    /// Makes a request available without a kick.
    pub(super) fn make(&mut self) {
        self.add(0, 0x8_0000);
        self.publish();
    }

    /// Makes one available that writes a sector.
    pub(super) fn make_write(&mut self) {
        self.add(0, 0x8_0000);
        self.put(0x3000, &1u32.to_le_bytes());
        // The device reads its data.
        self.put(16 + 12, &1u16.to_le_bytes());
        self.publish();
    }

    /// Makes two available at once. The second one reads into memory beside the rings.
    pub(super) fn make_two(&mut self) {
        self.add(0, 0x8_0000);
        self.add(3, 0x7_0000);
        self.publish();
    }

    /// Makes what was added available. A worker that has just started takes it without a kick.
    fn publish(&self) {
        self.put(0x2002, &self.made.to_le_bytes());
    }

    /// Adds the request whose descriptors begin with this one, and which reads into memory at `data`.
    fn add(&mut self, head: u16, data: u64) {
        let at = u64::from(self.index) * RING;
        let descriptor = |addr: u64, len: u32, flags: u16, next: u16| {
            let mut bytes = addr.to_le_bytes().to_vec();
            bytes.extend(len.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend(next.to_le_bytes());
            bytes
        };
        let (header, table) = (0x3000 + 0x20 * u64::from(head), 16 * u64::from(head));
        self.put(table, &descriptor(at + header, 16, 1, head + 1));
        self.put(table + 16, &descriptor(data, 512, 3, head + 2));
        self.put(table + 32, &descriptor(at + header + 16, 1, 2, 0));
        self.put(header, &[0; 16]);
        self.put(header + 16, &[0xff]);
        self.put(0x2004 + 2 * u64::from(self.made % 8), &head.to_le_bytes());
        self.made += 1;
    }

    pub(super) fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    pub(super) fn used(&self) -> u16 {
        let mut bytes = [0; 2];
        let at = u64::from(self.index) * RING + 0x1002;
        self.memory.read_exact_at(&mut bytes, at).unwrap();
        u16::from_le_bytes(bytes)
    }

    /// Waits until all requests have succeeded.
    pub(super) fn finish(&self) {
        let until = Instant::now() + PATIENCE;
        while self.used() != self.made {
            assert!(
                Instant::now() < until,
                "used {} of {}",
                self.used(),
                self.made
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut status = [0];
        let at = u64::from(self.index) * RING + 0x3010;
        self.memory.read_exact_at(&mut status, at).unwrap();
        assert_eq!(status, [0]);
    }

    pub(super) fn request(&mut self) {
        self.make();
        self.kick();
        self.finish();
    }

    /// Waits for a signal and consumes it.
    pub(super) fn signalled(fd: &OwnedFd) -> u64 {
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        wait(&mut fds, Some(Instant::now() + PATIENCE)).unwrap();
        let mut count = [0; 8];
        rustix::io::read(fd, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }
}

impl Frontend {
    /// Starts a vring with all its descriptors, and enables it.
    pub(super) fn drive(&mut self, index: u32) -> Driver {
        let driver = Driver::new(self, index);
        self.configure_with(&driver);
        assert_eq!(
            self.request(Req::SET_VRING_ENABLE, &words(&[index, 1])),
            Ack
        );
        driver
    }

    fn configure_with(&mut self, driver: &Driver) {
        self.configure_at(driver, 0);
    }

    pub(super) fn configure_at(&mut self, driver: &Driver, base: u32) {
        let number = longs(&[driver.index.into()]);
        self.configure(driver.index);
        assert_eq!(
            self.request(Req::SET_VRING_BASE, &words(&[driver.index, base])),
            Ack
        );
        for (request, fd) in [
            (Req::SET_VRING_CALL, &driver.call),
            (Req::SET_VRING_ERR, &driver.err),
            (Req::SET_VRING_KICK, &driver.kick),
        ] {
            assert_eq!(
                self.request_fds(request, &number, &[fd.as_fd()]),
                Ack,
                "{request:?}"
            );
        }
    }

    pub(super) fn kick_on(&mut self, driver: &Driver) -> Answer {
        let number = longs(&[driver.index.into()]);
        self.request_fds(Req::SET_VRING_KICK, &number, &[driver.kick.as_fd()])
    }
}

#[test]
fn a_stopped_vring_continues_at_its_position() {
    let mut frontend = Frontend::with_memory();
    let mut driver = frontend.drive(1);
    for round in 1..=3 {
        (0..20).for_each(|_| driver.request());
        assert_eq!(frontend.base(1), Some((1, round * 20)));
        // Stopped: nothing is served until a kick starts it again at its position.
        driver.make();
        driver.kick();
        assert_eq!(frontend.base(1), Some((1, round * 20)));
        assert_eq!(u32::from(driver.used()), round * 20);
        driver.made -= 1;
        driver.put(0x2002, &driver.made.to_le_bytes());
        assert_eq!(frontend.kick_on(&driver), Ack);
    }
    assert!(Driver::signalled(&driver.call) > 0);
    assert!(matches!(frontend.end(), Ending::HungUp));
}

#[test]
fn a_vring_starts_when_its_last_message_has_arrived() {
    let messages = |driver: &Driver| {
        [
            (Req::SET_VRING_NUM, words(&[driver.index, 8])),
            (Req::SET_VRING_ADDR, addrs(driver.index, 0)),
            (Req::SET_VRING_KICK, longs(&[driver.index.into()])),
        ]
    };
    let orders = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    for order in orders {
        let mut frontend = Frontend::with_memory();
        let mut driver = Driver::new(&frontend, 0);
        assert_eq!(
            frontend.request(Req::SET_VRING_ENABLE, &words(&[0, 1])),
            Ack
        );
        for at in order {
            let (request, payload) = &messages(&driver)[at];
            let kick = driver.kick.as_fd();
            let fds = if at == 2 { &[kick][..] } else { &[] };
            assert_eq!(
                frontend.request_fds(*request, payload, fds),
                Ack,
                "{order:?} {request:?}"
            );
        }
        driver.request();
    }
}

/// Hostile cases 34, 38 and 39.
#[test]
fn a_running_vring_keeps_its_settings() {
    let mut frontend = Frontend::with_memory();
    let mut driver = frontend.drive(0);
    let rows = [
        (Req::SET_VRING_NUM, words(&[0, 8]), Nack),
        (Req::SET_VRING_NUM, words(&[0, 16]), Nack),
        (Req::SET_VRING_BASE, words(&[0, 0]), Nack),
        (Req::SET_VRING_ADDR, addrs(0, 0), Ack),
        (Req::SET_VRING_ADDR, addrs(0, 0x100), Nack),
        (Req::SET_VRING_ADDR, addrs(0, MEM_BYTES), Nack),
        (Req::SET_FEATURES, longs(&[FEATURES]), Ack),
        (
            Req::SET_FEATURES,
            longs(&[FEATURES | feature::EVENT_IDX]),
            Nack,
        ),
        // The other vrings do not run.
        (Req::SET_VRING_NUM, words(&[1, 16]), Ack),
        (Req::SET_VRING_BASE, words(&[1, 3]), Ack),
    ];
    for (request, payload, answer) in rows {
        assert_eq!(
            frontend.request(request, &payload),
            answer,
            "{request:?} {payload:?}"
        );
        driver.request();
    }
    assert!(matches!(frontend.base(0), Some((0, 10))));
    assert_eq!(
        frontend.request(Req::SET_FEATURES, &longs(&[FEATURES | feature::EVENT_IDX])),
        Ack
    );
}

#[test]
fn a_vring_that_is_not_enabled_waits() {
    let mut frontend = Frontend::with_memory();
    let mut driver = Driver::new(&frontend, 0);
    frontend.configure_with(&driver);
    driver.make();
    driver.kick();
    // GET_FEATURES and an ENABLE of another vring pass; nothing is served meanwhile.
    assert!(frontend.is_alive());
    assert_eq!(
        frontend.request(Req::SET_VRING_ENABLE, &words(&[1, 1])),
        Ack
    );
    assert_eq!(driver.used(), 0);
    // The kick arrived long ago, so the ring is checked without one.
    assert_eq!(
        frontend.request(Req::SET_VRING_ENABLE, &words(&[0, 1])),
        Ack
    );
    driver.finish();
    assert_eq!(
        frontend.request(Req::SET_VRING_ENABLE, &words(&[0, 0])),
        Ack
    );
    driver.make();
    driver.kick();
    assert_eq!(frontend.base(0), Some((0, 1)));
    assert_eq!(driver.used(), 1);
}

/// vhost-user "Ring states".
#[test]
fn without_bit_30_vrings_start_enabled() {
    let mut frontend = Frontend::with_memory();
    let features = FEATURES & !feature::VHOST_USER_PROTOCOL;
    assert_eq!(
        frontend.request(Req::SET_FEATURES, &longs(&[features])),
        Ack
    );
    let mut driver = Driver::new(&frontend, 0);
    frontend.configure_with(&driver);
    driver.request();
    frontend.send(Req::SET_VRING_ENABLE, &words(&[0, 1]), &[]);
    assert!(!frontend.is_alive());
}

/// Hostile case 34.
#[test]
fn without_version_1_nothing_starts() {
    let mut frontend = Frontend::with_memory();
    for features in [0, feature::VHOST_USER_PROTOCOL] {
        assert_eq!(
            frontend.request(Req::SET_FEATURES, &longs(&[features])),
            Ack
        );
        assert_eq!(frontend.start(0), Nack);
    }
    assert_eq!(
        frontend.request(Req::SET_FEATURES, &longs(&[FEATURES])),
        Ack
    );
    assert_eq!(frontend.start(0), Ack);
}

#[test]
fn a_vring_without_a_kick_is_polled() {
    let mut frontend = Frontend::with_memory();
    let mut driver = Driver::new(&frontend, 2);
    frontend.configure(2);
    assert_eq!(frontend.request(Req::SET_VRING_KICK, &longs(&[0x102])), Ack);
    assert_eq!(
        frontend.request(Req::SET_VRING_ENABLE, &words(&[2, 1])),
        Ack
    );
    for _ in 0..3 {
        driver.make();
        driver.finish();
    }
}

#[test]
fn descriptors_change_while_a_vring_runs() {
    let mut frontend = Frontend::with_memory();
    let mut driver = frontend.drive(0);
    driver.request();
    driver.kick = bell();
    driver.call = bell();
    let call = driver.call.try_clone().unwrap();
    assert_eq!(frontend.kick_on(&driver), Ack);
    assert_eq!(
        frontend.request_fds(Req::SET_VRING_CALL, &longs(&[0]), &[call.as_fd()]),
        Ack
    );
    assert!(
        Driver::signalled(&driver.call) > 0,
        "written once when it is set"
    );
    driver.request();
    assert!(Driver::signalled(&driver.call) > 0);
}

/// Hostile case 41, except for the checks in the worker.
#[test]
fn memory_changes_under_a_running_vring() {
    let mut frontend = Frontend::with_memory();
    let mut driver = frontend.drive(0);
    driver.request();
    assert_eq!(frontend.add_memory(1 << 30, 0x1000, USER + (1 << 30)), Ack);
    driver.request();
    let mut table = words(&[1, 0]);
    table.extend(longs(&[0, MEM_BYTES, USER, 0]));
    let memory = frontend.memory.try_clone().unwrap();
    for _ in 0..50 {
        assert_eq!(
            frontend.request_fds(Req::SET_MEM_TABLE, &table, &[memory.as_fd()]),
            Ack
        );
        driver.request();
    }
    // Without its memory the vring rests, and writes its err descriptor. The connection goes on. So does the
    // vring when its memory is back, with requests that were made meanwhile, with or without a kick.
    let region = longs(&[0, 0, MEM_BYTES, USER, 0]);
    for _ in 0..2 {
        assert_eq!(frontend.request(Req::REM_MEM_REG, &region), Ack);
        assert!(Driver::signalled(&driver.err) > 0);
        driver.make();
        driver.kick();
        assert_eq!(frontend.add_memory(0, MEM_BYTES, USER), Ack);
        driver.finish();
        driver.request();
    }
    // A vring that was disabled or stopped meanwhile is not served, and keeps its position.
    assert_eq!(frontend.request(Req::REM_MEM_REG, &region), Ack);
    let enable = |enabled| words(&[0, enabled]);
    assert_eq!(frontend.request(Req::SET_VRING_ENABLE, &enable(0)), Ack);
    driver.make();
    assert_eq!(frontend.add_memory(0, MEM_BYTES, USER), Ack);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(driver.used() + 1, driver.made);
    assert_eq!(frontend.request(Req::SET_VRING_ENABLE, &enable(1)), Ack);
    driver.finish();
    assert_eq!(frontend.request(Req::REM_MEM_REG, &region), Ack);
    assert_eq!(frontend.base(0), Some((0, 57)));
    assert_eq!(frontend.add_memory(0, MEM_BYTES, USER), Ack);
    assert_eq!(frontend.kick_on(&driver), Ack);
    driver.request();
}

/// Hostile case 45. QEMU before 8.1 pauses a guest in this way: status 0 first, then GET_VRING_BASE.
#[test]
fn a_reset_stops_all_vrings_and_keeps_their_positions() {
    let resets = [
        (Req::RESET_DEVICE, vec![]),
        (Req::SET_STATUS, longs(&[0])),
        (Req::RESET_OWNER, vec![]),
    ];
    for (request, payload) in resets {
        let mut frontend = Frontend::with_memory();
        let mut drivers: Vec<_> = (0..4).map(|index| frontend.drive(index)).collect();
        for driver in &mut drivers {
            (0..3).for_each(|_| driver.request());
        }
        assert_eq!(frontend.request(request, &payload), Ack);
        for driver in &mut drivers {
            driver.make();
            driver.kick();
        }
        for (index, driver) in (0..).zip(&drivers) {
            assert_eq!(frontend.base(index), Some((index, 3)), "{request:?}");
            assert_eq!(driver.used(), 3, "{request:?}");
        }
        // The memory is still there, and the vring goes on at the reported position.
        assert_eq!(
            frontend.request(Req::SET_FEATURES, &longs(&[FEATURES])),
            Ack
        );
        for driver in &mut drivers {
            frontend.configure_at(driver, 3);
            let enable = words(&[driver.index, 1]);
            assert_eq!(frontend.request(Req::SET_VRING_ENABLE, &enable), Ack);
            driver.finish();
            driver.request();
        }
    }
}

/// A driver that starts afresh after a reset starts at 0, whether or not the frontend says so.
#[test]
fn after_a_reset_a_vring_starts_at_zero() {
    let mut frontend = Frontend::with_memory();
    let mut driver = frontend.drive(0);
    (0..3).for_each(|_| driver.request());
    assert_eq!(frontend.request(Req::RESET_DEVICE, &[]), Ack);
    Driver::signalled(&driver.call);
    driver.made = 0;
    driver.put(0x1000, &[0; 4]);
    driver.put(0x2000, &[0; 4]);
    assert_eq!(
        frontend.request(Req::SET_FEATURES, &longs(&[FEATURES])),
        Ack
    );
    assert_eq!(frontend.request(Req::SET_VRING_NUM, &words(&[0, 8])), Ack);
    assert_eq!(frontend.request(Req::SET_VRING_ADDR, &addrs(0, 0)), Ack);
    assert_eq!(frontend.kick_on(&driver), Ack);
    assert_eq!(
        frontend.request(Req::SET_VRING_ENABLE, &words(&[0, 1])),
        Ack
    );
    driver.request();
    assert_eq!(frontend.base(0), Some((0, 1)));
    assert!(
        Driver::signalled(&driver.call) > 0,
        "the call is still known"
    );
}

#[test]
fn the_guest_is_notified_of_a_change_only_while_it_is_served() {
    let mut frontend = Frontend::with_memory();
    let (theirs, mut ours) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    assert_eq!(
        frontend.request_fds(Req::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]),
        Ack
    );
    let mut heard = |frontend: &mut Frontend| {
        // After two more messages the session has checked its flags.
        assert!(frontend.is_alive() && frontend.is_alive());
        let mut bytes = [0; 64];
        match ours.read(&mut bytes) {
            Ok(count) => {
                assert_eq!(bytes[..count], words(&[2, 1, 0]));
                true
            }
            Err(_) => false,
        }
    };
    frontend.remote.config_changed();
    assert!(!heard(&mut frontend), "nothing runs");
    let driver = Driver::new(&frontend, 0);
    frontend.configure_with(&driver);
    assert!(!heard(&mut frontend), "nothing is enabled");
    assert_eq!(
        frontend.request(Req::SET_VRING_ENABLE, &words(&[0, 1])),
        Ack
    );
    assert!(heard(&mut frontend), "notified late");
    assert!(!heard(&mut frontend), "notified once");
    frontend.remote.config_changed();
    assert!(heard(&mut frontend));
    frontend.base(0);
    frontend.remote.config_changed();
    assert!(!heard(&mut frontend), "stopped");
}

/// virtio 1.3 §2.1.2: the status shows it, and the guest is notified if there is a way.
#[test]
fn a_retired_vring_needs_a_reset() {
    let mut frontend = Frontend::with_memory();
    let (channel, mut ours) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(
        frontend.request_fds(Req::SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]),
        Ack
    );
    let mut other = frontend.drive(1);
    let driver = frontend.drive(0);
    assert_eq!(frontend.request(Req::SET_STATUS, &longs(&[15])), Ack);
    // A head outside the table.
    driver.put(0x2004, &9999u16.to_le_bytes());
    driver.put(0x2002, &1u16.to_le_bytes());
    driver.kick();
    assert_eq!(Driver::signalled(&driver.err), 1);
    assert_eq!(frontend.ask_number(Req::GET_STATUS), 15 | 0x40);
    let mut notice = [0; 12];
    ours.read_exact(&mut notice).unwrap();
    assert_eq!(message::word(&notice, 0), 2, "the configuration changed");
    other.request();
    assert_eq!(frontend.request(Req::SET_STATUS, &longs(&[0])), Ack);
    assert_eq!(frontend.ask_number(Req::GET_STATUS), 0);
}

/// Hostile case 40: the memory file is truncated while a vring runs on it.
#[test]
fn truncated_memory_ends_only_the_connection() {
    let mut frontend = Frontend::with_memory();
    let mut driver = frontend.drive(0);
    driver.request();
    rustix::fs::ftruncate(&frontend.memory, 0).unwrap();
    driver.kick();
    assert_eq!(frontend.reply(), None);
    let ending = frontend.thread.join().unwrap();
    assert!(matches!(ending, Ending::Lost(_)), "{ending:?}");
    // Another connection works.
    let mut frontend = Frontend::with_memory();
    frontend.drive(0).request();
}

/// Hostile case 46.
#[test]
fn a_frontend_that_left_leaves_nothing_behind() {
    if !in_a_process_of_its_own("running::a_frontend_that_left_leaves_nothing_behind") {
        return;
    }
    let round = || {
        let mut frontend = Frontend::with_memory();
        let mut drivers: Vec<_> = (0..4).map(|index| frontend.drive(index)).collect();
        for driver in &mut drivers {
            driver.make();
            driver.kick();
        }
        // A thread that has been joined is in the list for a moment.
        comes(|| workers() == ["cleave-w0", "cleave-w1"]);
        assert!(matches!(frontend.end(), Ending::HungUp));
    };
    round();
    let before = fds_open();
    (0..100).for_each(|_| round());
    fds_settle_at(before);
    comes(|| workers().is_empty());
}

/// Returns the worker threads of this process.
fn workers() -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .filter(|name| name.starts_with("cleave-w"))
        .collect();
    names.sort();
    names
}

#[test]
fn a_tuning_reaches_sleeping_and_busy_workers() {
    use cleave_worker::{Coalesce, WaitState};
    let mut frontend = Frontend::with_memory();
    let mut driver = frontend.drive(0);
    driver.request();
    let device = frontend.device.clone();
    let tuned = |completion| Tuning {
        completion,
        ..Tuning::new(Split::Off)
    };
    let until = Instant::now() + PATIENCE;
    for (completion, mode) in [
        (CompletionPolicy::Poll, WaitState::Polls),
        (CompletionPolicy::Interrupt, WaitState::Sleeps),
        (CompletionPolicy::Poll, WaitState::Polls),
        (CompletionPolicy::Adaptive, WaitState::Sleeps),
    ] {
        device.tune(tuned(completion));
        // There is no kick: only the change wakes it.
        while device.modes()[0] != mode {
            assert!(Instant::now() < until, "{completion} was not adopted");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let completions = [
        CompletionPolicy::Adaptive,
        CompletionPolicy::Poll,
        CompletionPolicy::Interrupt,
    ];
    for round in 0..300u32 {
        device.tune(Tuning {
            coalesce: Coalesce {
                us: round % 2 * 50,
                max: round % 4,
            },
            split: match round % 8 {
                0..4 => Split::Off,
                _ => Split::Fixed(std::num::NonZeroU32::new(4096).unwrap()),
            },
            ..tuned(completions[round as usize % 3])
        });
        driver.request();
    }
    let totals = device.totals();
    assert_eq!(totals.reads, 301);
    assert!(
        totals.switches_tuned > 0 && totals.switches_tuned <= 304,
        "{totals:?}"
    );
}
