//! A session that ends in one process and goes on in another, of which the frontend sees nothing.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, channel};

use cleave_guest::RegionSpec;

use super::dirty::Log;
use super::inflight::layout;
use super::owner::comes;
use super::running::Driver;
use super::*;
use crate::HandoverObstacle;

/// The messages that a session was handed over as: number, payload, and how many descriptors.
fn shapes(handover: &Handover) -> Vec<(u32, Vec<u8>, usize)> {
    let shape = |one: &RecordedMessage| (one.request, one.payload.clone(), one.fds.len());
    handover.messages.iter().map(shape).collect()
}

impl Frontend {
    /// Has the session handed over. The frontend stays.
    fn hand_over(self) -> (Frontend, Handover) {
        self.remote.hand_over();
        let Frontend {
            stream,
            remote,
            device,
            owners,
            thread,
            memory,
        } = self;
        let Ending::HandedOver(handover) = thread.join().unwrap() else {
            panic!("it was not handed over");
        };
        let frontend = Frontend {
            stream,
            remote,
            device,
            owners,
            thread: std::thread::spawn(|| Ending::HungUp),
            memory,
        };
        (frontend, *handover)
    }

    /// Goes on with a session on a device of its own, as a process does that has taken it over.
    fn go_on(self, handover: Handover, device: Arc<Device>, owners: Arc<Owners>) -> Frontend {
        let offload = Offload::default();
        let (session, remote) = Session::resume(
            handover,
            device.clone(),
            offload,
            owners.clone(),
            CONFIG,
            || (),
        )
        .unwrap();
        Frontend {
            remote,
            device,
            owners,
            thread: std::thread::spawn(move || session.run()),
            ..self
        }
    }

    fn move_on(self) -> Frontend {
        self.move_to(device())
    }

    pub(super) fn move_to(self, device: Arc<Device>) -> Frontend {
        let (frontend, handover) = self.hand_over();
        frontend.go_on(handover, device, Arc::default())
    }
}

#[test]
fn a_guest_with_running_vrings_sees_nothing_of_it() {
    let mut frontend = Frontend::with_memory();
    let mut drivers: Vec<_> = (0..3).map(|index| frontend.drive(index)).collect();
    let before = frontend.remote.view();
    for round in 0..20 {
        for driver in &mut drivers {
            driver.request();
        }
        let (same, handover) = frontend.hand_over();
        // They come while no process serves the vrings.
        for driver in &mut drivers {
            driver.make();
            driver.kick();
        }
        frontend = same.go_on(handover, device(), Arc::default());
        for driver in &mut drivers {
            driver.finish();
            assert_eq!(usize::from(driver.used()), 2 * (round + 1));
        }
        // With the answer, all that was handed over is in force.
        assert!(frontend.is_alive());
        assert_eq!(frontend.remote.view(), before);
    }
    for (index, driver) in (0..).zip(&drivers) {
        assert!(Driver::signalled(&driver.call) > 0);
        assert_eq!(frontend.base(index), Some((index, 40)));
    }
    frontend.end();
}

/// A table that came first in the process which accepted it may come last here.
#[test]
fn memory_that_was_accepted_needs_no_share_of_what_others_leave() {
    const LARGE: u64 = 15 << 39;
    let mut frontend = Frontend::negotiated();
    frontend.memory = memory_file(LARGE);
    assert_eq!(frontend.add_memory(0, LARGE, USER), Ack);
    let (same, handover) = frontend.hand_over();
    let _others = [LARGE, LARGE - (1 << 38)].map(|len_bytes| {
        let region = RegionSpec {
            guest_addr: 0,
            user_addr: 0,
            len_bytes,
            file_offset: 0,
            file: memory_file(len_bytes),
        };
        cleave_guest::Memory::new(vec![region]).unwrap()
    });
    let mut frontend = same.go_on(handover, device(), Arc::default());
    assert!(frontend.is_alive());
    // New memory is held to the frontend's share, as it was before.
    assert_eq!(frontend.add_memory(LARGE, 4096, USER + LARGE), Nack);
    frontend.end();
}

/// What was read of the connection, and what was not, is read by somebody.
#[test]
fn no_message_is_lost_and_none_is_answered_twice() {
    let (stop, stopped) = channel::<()>();
    let mut frontend = Frontend::with_memory();
    let mut asking = frontend.stream.try_clone().unwrap();
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    let mut asks = move |stopped: &Receiver<()>| {
        while stopped.try_recv().is_err() {
            asking.write_all(&words(&[1, 1, 0])).unwrap();
            let mut answer = [0; 20];
            asking.read_exact(&mut answer).unwrap();
            assert_eq!(message::word(&answer, 0), 1);
            count.fetch_add(1, Ordering::SeqCst);
        }
    };
    let asks = std::thread::spawn(move || asks(&stopped));
    for moves in 0..200 {
        // However late its thread is, it asks meanwhile.
        comes(|| asked.load(Ordering::SeqCst) >= moves);
        frontend = frontend.move_on();
    }
    stop.send(()).unwrap();
    asks.join().unwrap();
    assert!(frontend.is_alive(), "an answer too many would show here");
    frontend.end();
}

/// What a session has read of a message cannot be handed over, so it waits for the rest.
#[test]
fn a_message_that_has_begun_is_served_first() {
    let mut frontend = Frontend::with_memory();
    for _ in 0..10 {
        frontend.stream.write_all(&words(&[1, 1])).unwrap();
        // Most likely it has read that afterwards. If it has not, the next session reads all.
        std::thread::sleep(Duration::from_millis(2));
        frontend.remote.hand_over();
        std::thread::sleep(Duration::from_millis(2));
        frontend.stream.write_all(&words(&[0])).unwrap();
        frontend = frontend.move_on();
        assert_eq!(frontend.reply().map(|(request, _)| request), Some(1));
    }
    assert!(frontend.is_alive());
    frontend.end();
}

/// How late the session is is not the frontend's fault.
#[test]
fn a_session_that_is_hurried_before_it_begins_is_handed_over() {
    let mut frontend = Frontend::with_memory();
    let mut driver = frontend.drive(0);
    driver.request();
    let (same, handover) = frontend.hand_over();
    let (session, remote) = Session::resume(
        handover,
        device(),
        Offload::default(),
        Arc::default(),
        CONFIG,
        || (),
    )
    .unwrap();
    remote.hand_over();
    remote.hurry();
    let ending = session.run();
    let Ending::HandedOver(handover) = ending else {
        panic!("{ending:?}")
    };
    let frontend = same.go_on(*handover, device(), Arc::default());
    driver.request();
    frontend.end();
}

/// A frontend that moves the border of a region removes it for a moment.
#[test]
fn memory_that_is_taken_away_comes_back_first() {
    let mut frontend = Frontend::with_memory();
    let mut driver = frontend.drive(0);
    driver.request();
    let removed = longs(&[0, 0, MEM_BYTES, USER, 0]);
    assert_eq!(frontend.request(Req::REM_MEM_REG, &removed), Ack);
    frontend.remote.hand_over();
    driver.make();
    driver.kick();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(frontend.add_memory(0, MEM_BYTES, USER), Ack);
    let frontend = frontend.move_on();
    driver.finish();
    driver.request();
    frontend.end();
}

/// A second hand-over sends what the first one sent, but for positions.
#[test]
fn everything_that_a_frontend_has_agreed_is_there_afterwards() {
    let mut frontend = Frontend::with_memory();
    let (bytes, _, file) = frontend.region(&layout(0, 0, 4, 256));
    let file = file.unwrap();
    assert_eq!(frontend.give(&layout(bytes, 0, 4, 256), &file), Ack);
    let (channel, mut theirs) = UnixStream::pair().unwrap();
    let channel = channel.as_fd();
    assert_eq!(
        frontend.request_fds(Req::SET_BACKEND_REQ_FD, &[], &[channel]),
        Ack
    );
    assert_eq!(frontend.request(Req::SET_STATUS, &longs(&[15])), Ack);
    // Write-through, which this device does not have from the start.
    let mut mode = words(&[32, 1, 0]);
    mode.push(0);
    assert_eq!(frontend.request(Req::SET_CONFIG, &mode), Ack);
    let log = memory_file(0x1000);
    let payload = longs(&[0x1000, 0]);
    frontend.send_raw(6, 0x1, 16, &payload, &[log.as_fd()]);
    assert_eq!(frontend.reply().map(|(request, _)| request), Some(6));
    // A driver without FLUSH would be served write-through anyway.
    let features = longs(&[FEATURES | feature::FLUSH | feature::LOG_ALL]);
    assert_eq!(frontend.request(Req::SET_FEATURES, &features), Ack);
    let mut first = frontend.drive(0);
    frontend.configure(1);
    assert_eq!(frontend.request(Req::SET_VRING_KICK, &longs(&[0x101])), Ack);
    first.request();
    assert_eq!(
        frontend.add_memory(MEM_BYTES, 0x2000, USER + MEM_BYTES),
        Ack
    );
    let removed = longs(&[0, MEM_BYTES, 0x2000, USER + MEM_BYTES, 0]);
    assert_eq!(frontend.request(Req::REM_MEM_REG, &removed), Ack);

    let (frontend, handover) = frontend.hand_over();
    let sent = shapes(&handover);
    assert!(handover.owns && handover.writeback == Some(false));
    let (device, owners) = (device(), Arc::default());
    let mut frontend = frontend.go_on(handover, device, owners);
    assert_eq!(frontend.ask_number(Req::GET_STATUS), 15);
    assert_eq!(frontend.config(32, 1).unwrap()[12], 0);
    first.request();
    assert!(frontend.remote.view().vrings[0].recovery);
    frontend.remote.config_changed();
    theirs.read_exact(&mut [0; 12]).unwrap();
    let (frontend, again) = frontend.hand_over();
    let (mut again_sent, mut before) = (shapes(&again), sent);
    let is_base = |one: &(u32, Vec<u8>, usize)| one.0 == u32::from(Req::SET_VRING_BASE);
    for all in [&mut again_sent, &mut before] {
        all.retain(|one| !is_base(one));
    }
    assert_eq!(again_sent, before);
    let mut frontend = frontend.go_on(again, super::device(), Arc::default());
    assert_eq!(frontend.base(0), Some((0, 2)));
    frontend.end();
}

#[test]
fn a_device_that_needs_a_reset_still_needs_it() {
    let mut frontend = Frontend::with_memory();
    let driver = frontend.drive(0);
    // More than the vring can hold.
    driver.put(0x2002, &100u16.to_le_bytes());
    driver.kick();
    Driver::signalled(&driver.err);
    let needs_reset = 0x40;
    assert_eq!(frontend.ask_number(Req::GET_STATUS), needs_reset);
    let mut frontend = frontend.move_on();
    assert_eq!(frontend.ask_number(Req::GET_STATUS), needs_reset);
    frontend.end();
}

#[test]
fn two_frontends_go_on_as_owner_and_parked() {
    let mut first = Frontend::with_memory();
    let mut driver = first.drive(0);
    driver.request();
    let second = Frontend::connect_to(first.device.clone(), first.owners.clone());
    let second = second.negotiate().share_memory();
    let (first, owner) = first.hand_over();
    let (second, parked) = second.hand_over();
    assert!(owner.owns && !parked.owns);
    let (device, owners) = (device(), Arc::<Owners>::default());
    let mut first = first.go_on(owner, device.clone(), owners.clone());
    let mut second = second.go_on(parked, device, owners);
    driver.request();
    assert!(second.is_alive() && !second.remote.owns());
    assert_eq!(first.base(0), Some((0, 2)));
    // Now the guest may move there.
    let mut other = second.drive(1);
    other.request();
    assert!(second.remote.owns());
    first.end();
    second.end();
}

/// A VMM whose guest has left it must not start again beside the other, in whichever process.
#[test]
fn a_frontend_that_was_taken_over_stays_so() {
    let mut first = Frontend::with_memory();
    first.drive(0).request();
    let second = Frontend::connect_to(first.device.clone(), first.owners.clone());
    let mut second = second.negotiate().share_memory();
    assert_eq!(first.base(0), Some((0, 1)));
    let mut driver = second.drive(1);
    driver.request();
    // The guest pauses, or not.
    for is_paused in [false, true] {
        if is_paused {
            assert!(second.base(1).is_some());
        }
        let (left, old) = first.hand_over();
        let (right, new) = second.hand_over();
        assert!(new.owns && !old.owns && old.has_owned);
        let (device, owners) = (device(), Arc::<Owners>::default());
        second = right.go_on(new, device.clone(), owners.clone());
        assert!(second.is_alive() && second.remote.owns());
        first = left.go_on(old, device, owners);
        assert!(first.is_alive() && !first.remote.owns());
        assert!(second.is_alive(), "it was hung up");
    }
    first.configure(0);
    let kick = bell();
    let started = first.request_fds(Req::SET_VRING_KICK, &longs(&[0]), &[kick.as_fd()]);
    assert_eq!(started, Closed);
    assert!(second.is_alive());
    second.end();
}

/// A process that took the session over refuses what this one would refuse: here memory that is not there any more.
#[test]
fn what_is_handed_over_is_judged_like_a_frontend() {
    let mut frontend = Frontend::with_memory();
    frontend.drive(0);
    let (frontend, handover) = frontend.hand_over();
    frontend.memory.set_len(0x1000).unwrap();
    let frontend = frontend.go_on(handover, device(), Arc::default());
    let ending = frontend.thread.join().unwrap();
    assert!(matches!(ending, Ending::Lost(_)), "{ending:?}");
}

/// Its guest would misread what it finds.
#[test]
fn a_guest_of_another_device_is_refused() {
    let wider = OpenOptions {
        block_bytes: 4096,
        direct: Direct::Off,
        ..OpenOptions::default()
    };
    let wider = Disk::open(&DiskSpec::Null(CAPACITY), &wider).unwrap();
    for (device, goes_on) in [
        (device_on(wider), false),
        (device_of(&DiskSpec::Null(2 * CAPACITY)), true),
    ] {
        let mut frontend = Frontend::with_memory();
        let mut driver = frontend.drive(0);
        driver.request();
        let (frontend, handover) = frontend.hand_over();
        let mut frontend = frontend.go_on(handover, device, Arc::default());
        assert_eq!(frontend.is_alive(), goes_on);
        if goes_on {
            driver.request();
            let capacity = frontend.config(0, 8).unwrap();
            assert_eq!(message::long(&capacity, 12), 2 * CAPACITY / 512);
        }
        frontend.end();
    }
}

/// Its ring is as broken as before, and what was done is not done again.
#[test]
fn a_retired_vring_is_retired_again_where_it_was() {
    let mut frontend = Frontend::with_memory();
    let mut driver = frontend.drive(0);
    let mut other = frontend.drive(1);
    driver.request();
    // A head outside the table.
    driver.put(0x2006, &9999u16.to_le_bytes());
    driver.put(0x2002, &2u16.to_le_bytes());
    driver.kick();
    assert_eq!(Driver::signalled(&driver.err), 1);
    let mut frontend = frontend.move_on();
    other.request();
    assert_eq!(Driver::signalled(&driver.err), 1);
    assert_eq!(driver.used(), 1, "its request was done again");
    assert_eq!(frontend.ask_number(Req::GET_STATUS), 0x40);
    frontend.end();
}

/// The position before the reset can still be asked for, and the vring begins anew.
#[test]
fn a_vring_that_was_reset_begins_anew() {
    for by_status in [true, false] {
        let mut frontend = Frontend::connect();
        frontend.ask_number(Req::GET_FEATURES);
        let protocol = if by_status {
            PROTOCOL
        } else {
            PROTOCOL & !(1 << 16)
        };
        frontend.send(Req::SET_PROTOCOL_FEATURES, &longs(&[protocol]), &[]);
        assert_eq!(
            frontend.request(Req::SET_FEATURES, &longs(&[FEATURES])),
            Ack
        );
        let mut frontend = frontend.share_memory();
        frontend.drive(0).request();
        frontend.drive(1).request();
        let reset = match by_status {
            true => frontend.request(Req::SET_STATUS, &longs(&[0])),
            false => frontend.request(Req::RESET_DEVICE, &[]),
        };
        assert_eq!(reset, Ack);
        let mut frontend = frontend.move_on();
        for index in 0..2 {
            let disabled = frontend.request(Req::SET_VRING_ENABLE, &words(&[index, 0]));
            assert_eq!(disabled, Ack, "{by_status}");
        }
        assert_eq!(frontend.base(0), Some((0, 1)));
        assert_eq!(
            frontend.request(Req::SET_FEATURES, &longs(&[FEATURES])),
            Ack
        );
        // As a driver that begins anew has it, from a frontend that names no position.
        let mut again = Driver::new(&frontend, 1);
        again.put(0x1002, &[0; 2]);
        again.put(0x2002, &[0; 2]);
        assert_eq!(frontend.request(Req::SET_VRING_NUM, &words(&[1, 8])), Ack);
        assert_eq!(frontend.request(Req::SET_VRING_ADDR, &addrs(1, 0)), Ack);
        assert_eq!(
            frontend.request(Req::SET_VRING_ENABLE, &words(&[1, 1])),
            Ack
        );
        assert_eq!(frontend.kick_on(&again), Ack);
        again.request();
        assert_eq!(frontend.base(1), Some((1, 1)));
        frontend.end();
    }
}

/// The guest of a move that failed may have got more memory since then, for which the log of that move has no bits.
#[test]
fn a_log_that_is_too_short_and_not_in_force_is_handed_over() {
    let mut frontend = Frontend::with_memory();
    let mut driver = frontend.drive(0);
    frontend.put(&Log::new());
    for features in [FEATURES | 1 << 26, FEATURES] {
        assert_eq!(
            frontend.request(Req::SET_FEATURES, &longs(&[features])),
            Ack
        );
    }
    let more = frontend.add_memory(MEM_BYTES << 8, MEM_BYTES, USER + (MEM_BYTES << 8));
    assert_eq!(more, Ack);
    let mut frontend = frontend.move_on();
    driver.request();
    let again = frontend.request(Req::SET_FEATURES, &longs(&[FEATURES | 1 << 26]));
    assert_eq!(again, Nack, "it is still there");
    driver.request();
    frontend.end();
}

#[test]
fn a_session_with_too_many_files_cannot_be_handed_over() {
    let mut frontend = Frontend::negotiated();
    for number in 0..MEMORY_FILES_MAX as u64 {
        frontend.memory = memory_file(0x1000);
        assert_eq!(frontend.add_memory(number << 12, 0x1000, number << 12), Ack);
    }
    assert_eq!(frontend.remote.view().obstacle, None);
    // Another region of the last file needs no other descriptor.
    assert_eq!(frontend.add_memory(1 << 30, 0x1000, 1 << 30), Ack);
    assert_eq!(frontend.remote.view().obstacle, None);
    frontend.memory = memory_file(0x1000);
    assert_eq!(frontend.add_memory(1 << 31, 0x1000, 1 << 31), Ack);
    let obstacle = frontend.remote.view().obstacle;
    let is_told = |it: HandoverObstacle| it.why.contains("too many files") && !it.passes;
    assert!(obstacle.is_some_and(is_told));
    frontend.end();
}

/// What a keeper was told: `Some` while it has a session, and how often it had to forget one.
#[derive(Debug, Default)]
struct Told {
    kept: Option<Handover>,
    forgotten: usize,
    /// So many attempts to keep one fail.
    fails: usize,
}

#[derive(Debug, Clone, Default)]
struct Recorder(Arc<Mutex<Told>>);

impl Keeper for Recorder {
    fn keep(&mut self, session: Handover) -> io::Result<()> {
        let mut told = self.0.lock().unwrap();
        if let Some(left) = told.fails.checked_sub(1) {
            told.fails = left;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let before = told.kept.replace(session);
        assert!(before.is_none(), "it was not forgotten");
        Ok(())
    }

    fn forget(&mut self) {
        let mut told = self.0.lock().unwrap();
        told.kept = None;
        told.forgotten += 1;
    }
}

impl Recorder {
    fn has_one(&self) -> bool {
        self.0.lock().unwrap().kept.is_some()
    }

    fn forgotten(&self) -> usize {
        self.0.lock().unwrap().forgotten
    }
}

/// Connects a frontend whose session is kept.
fn kept() -> (Frontend, Recorder) {
    let (frontend, keeper) = not_kept();
    frontend.remote.keep_with(Box::new(keeper.clone()));
    (frontend, keeper)
}

/// Connects a frontend whose session has no keeper, and makes one.
fn not_kept() -> (Frontend, Recorder) {
    let (stream, theirs) = UnixStream::pair().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let (device, owners, keeper) = (device(), Arc::<Owners>::default(), Recorder::default());
    let parts = (device.clone(), Offload::default(), owners.clone());
    let (session, remote) = Session::new(theirs, parts.0, parts.1, parts.2, CONFIG).unwrap();
    let frontend = Frontend {
        stream,
        remote,
        device,
        owners,
        thread: std::thread::spawn(move || session.run()),
        memory: memory_file(MEM_BYTES),
    };
    (frontend.negotiate().share_memory(), keeper)
}

/// Otherwise a message that a dead process has read would be missing in the next one.
#[test]
fn a_session_is_kept_only_while_it_waits_for_its_frontend() {
    let (mut frontend, keeper) = kept();
    let (bytes, _, file) = frontend.region(&layout(0, 0, 4, 256));
    let file = file.unwrap();
    assert_eq!(frontend.give(&layout(bytes, 0, 4, 256), &file), Ack);
    let mut driver = frontend.drive(0);
    for _ in 0..50 {
        comes(|| keeper.has_one());
        driver.request();
        let before = keeper.forgotten();
        assert!(frontend.is_alive());
        assert_eq!(keeper.forgotten(), before + 1, "before the answer");
    }
    comes(|| keeper.has_one());
    let kept = keeper.0.lock().unwrap().kept.take().unwrap();
    let requests: Vec<_> = kept.messages.iter().map(|one| one.request).collect();
    for request in [Req::SET_VRING_CALL, Req::SET_VRING_ERR, Req::SET_VRING_KICK] {
        assert!(requests.contains(&request.into()), "{request:?}");
    }
    assert!(kept.owns);
    frontend.end();
    assert!(!keeper.has_one());
}

/// A running guest has no reason to send another message for weeks.
#[test]
fn a_session_that_could_not_be_kept_is_kept_later() {
    let (mut frontend, keeper) = kept();
    let (bytes, _, file) = frontend.region(&layout(0, 0, 4, 256));
    let file = file.unwrap();
    assert_eq!(frontend.give(&layout(bytes, 0, 4, 256), &file), Ack);
    frontend.drive(0);
    comes(|| keeper.has_one() && frontend.remote.view().kept);
    keeper.0.lock().unwrap().fails = usize::MAX;
    assert!(frontend.is_alive());
    // An attempt after the answer, and one later.
    comes(|| keeper.0.lock().unwrap().fails < usize::MAX - 1);
    assert!(!frontend.remote.view().kept);
    keeper.0.lock().unwrap().fails = 0;
    comes(|| keeper.has_one() && frontend.remote.view().kept);
    frontend.end();
    assert!(!keeper.has_one());
}

/// Its process may have had nobody that could keep it until then.
#[test]
fn a_session_that_waits_is_kept_once_there_is_a_keeper() {
    let (mut frontend, keeper) = not_kept();
    let (bytes, _, file) = frontend.region(&layout(0, 0, 4, 256));
    let file = file.unwrap();
    assert_eq!(frontend.give(&layout(bytes, 0, 4, 256), &file), Ack);
    frontend.drive(0);
    assert!(frontend.is_alive());
    assert!(!frontend.remote.view().kept);
    frontend.remote.keep_with(Box::new(keeper.clone()));
    comes(|| keeper.has_one() && frontend.remote.view().kept);
    // It is forgotten like any other.
    assert!(frontend.is_alive());
    assert_eq!(keeper.forgotten(), 1);
    frontend.end();
    assert!(!keeper.has_one());
}

/// Nobody would know what it has in flight.
#[test]
fn a_session_without_a_region_or_a_vring_is_not_kept() {
    let (mut frontend, keeper) = kept();
    frontend.drive(0);
    assert!(frontend.is_alive());
    let (bytes, _, file) = frontend.region(&layout(0, 0, 4, 256));
    assert_eq!(frontend.base(0), Some((0, 0)));
    let file = file.unwrap();
    assert_eq!(frontend.give(&layout(bytes, 0, 4, 256), &file), Ack);
    frontend.end();
    assert_eq!((keeper.has_one(), keeper.forgotten()), (false, 0));
}
