//! The right to a disk's bytes, which another host may have: when it is taken, and when it is handed over.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::Receiver;

use cleave_guest::{Inflight, InflightLayout, RegionSpec};
use cleave_tests::Scratch;
use cleave_tests::nbd::{Export, FLUSH, NbdServer, Reaction, WRITE, simple};

use super::dirty::Log;
use super::owner::{comes, member};
use super::running::Driver;
use super::*;
use crate::owner::Claim;
use crate::vrings::UserAddrs;

/// The right to a disk that other hosts may have.
#[derive(Debug, Default)]
struct Hosts {
    /// Another host has the disk.
    is_taken: AtomicBool,
    /// Why the disk can never be had.
    fault: OnceLock<String>,
    asked: AtomicUsize,
    /// The server of the disk, if it has one.
    server: OnceLock<NbdServer>,
    /// For each time that the disk was handed over the number of flushes that its server had done.
    handed: Mutex<Vec<usize>>,
    /// How often it could not be handed over.
    failures: AtomicUsize,
}

impl Possession for Hosts {
    fn hand_over(&self) {
        let flushes = self.server.get().map_or(0, NbdServer::flushes);
        self.handed.lock().unwrap().push(flushes);
    }

    fn hand_over_failed(&self) {
        self.failures.fetch_add(1, Ordering::SeqCst);
    }

    fn is_here(&self) -> bool {
        !self.is_taken.load(Ordering::SeqCst)
    }

    fn take(&self) -> Result<bool, String> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        match self.fault.get() {
            Some(fault) => Err(fault.clone()),
            None => Ok(!self.is_taken.load(Ordering::SeqCst)),
        }
    }

    fn look(&self) -> Option<Receiver<()>> {
        None
    }
}

/// Connects the frontend of a disk that another host has.
fn without_disk() -> (Frontend, Arc<Hosts>) {
    let hosts = Arc::new(Hosts::default());
    hosts.is_taken.store(true, Ordering::SeqCst);
    let owners = Arc::new(Owners::of(hosts.clone()));
    let frontend = Frontend::connect_to(device(), owners);
    (frontend.negotiate().share_memory(), hosts)
}

fn asked_more(hosts: &Hosts) {
    let before = hosts.asked.load(Ordering::SeqCst);
    comes(|| hosts.asked.load(Ordering::SeqCst) > before + 1);
}

#[test]
fn a_vring_starts_when_no_other_host_has_the_disk() {
    let (mut frontend, hosts) = without_disk();
    let mut driver = Driver::new(&frontend, 0);
    frontend.configure(0);
    assert_eq!(
        frontend.request(Req::SET_VRING_ENABLE, &words(&[0, 1])),
        Ack
    );
    assert_eq!(hosts.asked.load(Ordering::SeqCst), 0);
    frontend.send_kick(&driver);
    asked_more(&hosts);
    assert!(frontend.device.modes().is_empty(), "no worker is made yet");
    hosts.is_taken.store(false, Ordering::SeqCst);
    assert_eq!(frontend.answer(Req::SET_VRING_KICK.into()), Ack);
    driver.request();
    // Another vring of it needs no further right, and a stop without a log keeps it.
    let asked = hosts.asked.load(Ordering::SeqCst);
    assert_eq!(frontend.start(1), Ack);
    assert_eq!(hosts.asked.load(Ordering::SeqCst), asked);
    assert!(frontend.base(0).is_some() && frontend.base(1).is_some());
    assert!(hosts.handed.lock().unwrap().is_empty());
}

#[test]
fn a_frontend_that_waits_for_another_host_may_leave() {
    let (mut frontend, hosts) = without_disk();
    let driver = Driver::new(&frontend, 0);
    frontend.configure(0);
    frontend.send_kick(&driver);
    asked_more(&hosts);
    assert!(matches!(frontend.end(), Ending::HungUp));
}

#[test]
fn a_disk_that_can_never_be_had_ends_the_session() {
    let (mut frontend, hosts) = without_disk();
    hosts.fault.set("it is another disk".to_owned()).unwrap();
    assert_eq!(frontend.start(0), Closed);
    let ending = frontend.end();
    assert!(
        matches!(&ending, Ending::Lost(why) if why == "it is another disk"),
        "{ending:?}"
    );
}

/// A session's state on an NBD disk, whose server counts flushes.
struct Bench {
    state: SessionState,
    hosts: Arc<Hosts>,
    owners: Arc<Owners>,
    signals: Arc<SessionSignals>,
    frontend: UnixStream,
    memory: File,
    _scratch: Scratch,
}

impl Bench {
    fn new() -> Bench {
        Bench::of("", |_| ())
    }

    /// `query`: the end of the disk's URI.
    fn of(query: &str, prepare: impl FnOnce(&mut Disk)) -> Bench {
        let scratch = Scratch::new();
        let hosts = Arc::new(Hosts::default());
        let server = NbdServer::start(&scratch.join("nbd"), Export::able(CAPACITY));
        let spec = server.uri(query).parse().unwrap();
        let mut disk = Disk::open(&spec, &OpenOptions::default()).unwrap();
        prepare(&mut disk);
        hosts.server.set(server).unwrap();
        Bench::on(disk, hosts, scratch)
    }

    fn on(disk: Disk, hosts: Arc<Hosts>, scratch: Scratch) -> Bench {
        let owners = Arc::new(Owners::of(hosts.clone()));
        Bench::beside(device_on(disk), owners, hosts, scratch)
    }

    /// One of the sessions of a device.
    fn beside(
        device: Arc<Device>,
        owners: Arc<Owners>,
        hosts: Arc<Hosts>,
        scratch: Scratch,
    ) -> Bench {
        let (stream, frontend) = UnixStream::pair().unwrap();
        let signals = Arc::new(SessionSignals::new().unwrap());
        let claimant = Claimant::new(owners.clone(), signals.clone(), Arc::new(stream));
        let mut state = SessionState::new(device, Offload::default(), &CONFIG, claimant).unwrap();
        let memory = memory_file(MEM_BYTES);
        let region = RegionSpec {
            guest_addr: 0,
            len_bytes: MEM_BYTES,
            user_addr: USER,
            file_offset: 0,
            file: memory.try_clone().unwrap(),
        };
        state.add_memory(region).unwrap();
        Bench {
            state,
            hosts,
            owners,
            signals,
            frontend,
            memory,
            _scratch: scratch,
        }
    }

    fn log(&mut self, is_on: bool) {
        let mut features = FEATURES;
        if is_on {
            let len_bytes = MEM_BYTES / 4096 / 8;
            self.state
                .set_log(memory_file(len_bytes), 0, len_bytes)
                .unwrap();
            features |= feature::LOG_ALL;
        }
        self.state.set_features(features).unwrap();
    }

    fn start(&mut self, index: u64) {
        let at = USER + index * 0x4000;
        let addrs = UserAddrs {
            desc: at,
            used: at + 0x1000,
            avail: at + 0x2000,
            used_log: None,
        };
        self.state.set_vring_size(index, 8).unwrap();
        self.state.set_vring_addrs(index, addrs).unwrap();
        self.state.set_vring_kick(index, None).unwrap();
    }

    fn handed(&self) -> Vec<usize> {
        self.hosts.handed.lock().unwrap().clone()
    }
}

#[test]
fn the_disk_is_handed_over_after_a_flush_when_the_guest_moves() {
    let mut bench = Bench::new();
    // Without the log nothing moves.
    bench.log(false);
    bench.start(0);
    bench.state.stop_vring(0).unwrap();
    assert!(bench.handed().is_empty());
    // At the last stop only, and once.
    bench.start(0);
    bench.start(1);
    bench.log(true);
    bench.state.stop_vring(0).unwrap();
    assert!(bench.handed().is_empty());
    bench.state.stop_vring(1).unwrap();
    assert_eq!(bench.handed(), [1], "flushed before");
    bench.state.stop_vring(1).unwrap();
    bench.state.stop_all().unwrap();
    assert_eq!(bench.handed(), [1]);
    // Whichever vring stopped while the log was in force.
    bench.log(false);
    bench.start(0);
    bench.start(1);
    bench.log(true);
    bench.state.stop_vring(0).unwrap();
    bench.log(false);
    bench.state.stop_vring(1).unwrap();
    assert_eq!(bench.handed(), [1, 2]);
    // A log that was in force once is forgotten, also if another vring has run all the time.
    bench.start(0);
    bench.start(1);
    bench.log(true);
    bench.state.stop_vring(0).unwrap();
    bench.log(false);
    bench.start(0);
    bench.state.stop_vring(0).unwrap();
    bench.state.stop_vring(1).unwrap();
    assert_eq!(bench.handed(), [1, 2]);
    // QEMU before 8.1 stops all by a reset.
    bench.start(0);
    bench.log(true);
    bench.state.reset().unwrap();
    assert_eq!(bench.handed(), [1, 2, 3]);
}

/// A name, what happens before the connection ends, and the numbers of flushes after which the disk is then handed over.
type Past = (&'static str, fn(&mut Bench), &'static [usize]);

fn check_ends(rows: &[Past]) {
    for (what, past, expected) in rows {
        let mut bench = Bench::new();
        bench.log(false);
        past(&mut bench);
        bench.frontend.shutdown(std::net::Shutdown::Both).unwrap();
        bench.state.finish();
        assert_eq!(bench.handed(), *expected, "{what}");
        if expected.is_empty() && !bench.state.has_owned {
            assert!(bench.state.device.modes().is_empty(), "{what}");
        }
    }
}

/// No message tells that a guest leaves whose driver does not run.
#[test]
fn the_end_of_a_connection_hands_the_disk_over_if_the_guest_has_left_with_no_vring_running() {
    check_ends(&[
        ("a log", |bench| bench.log(true), &[1]),
        (
            "a log that ends before the connection, as with Cloud Hypervisor",
            |bench| {
                bench.log(true);
                bench.log(false);
            },
            &[1],
        ),
        (
            "a log after a reset of the driver",
            |bench| {
                bench.start(1);
                bench.state.reset().unwrap();
                bench.log(true);
            },
            // The first one came with the log.
            &[2],
        ),
        (
            "a move that was told of before",
            |bench| {
                bench.log(true);
                bench.start(0);
                bench.state.stop_vring(0).unwrap();
            },
            &[1],
        ),
    ]);
}

#[test]
fn the_end_of_a_connection_hands_nothing_over_if_the_guest_has_not_left() {
    check_ends(&[
        ("no log", |_| (), &[]),
        (
            "a move that failed before the driver started",
            |bench| {
                bench.log(true);
                bench.log(false);
                bench.start(0);
                bench.state.stop_vring(0).unwrap();
            },
            &[],
        ),
        (
            "a VMM that dies with its guest",
            |bench| {
                bench.log(true);
                bench.start(0);
                bench.start(1);
                bench.state.stop_vring(0).unwrap();
            },
            &[],
        ),
        (
            "a disk of another host",
            |bench| {
                bench.hosts.is_taken.store(true, Ordering::SeqCst);
                bench.log(true);
            },
            &[],
        ),
        (
            "a disk of another frontend",
            |bench| {
                let (other, _frontend) = member(&bench.owners);
                assert_eq!(other.claim(), Ok(Some(Claim::TakenOver)));
                // It stays to the end of the test.
                std::mem::forget(other);
                bench.log(true);
            },
            &[],
        ),
    ]);
}

#[test]
fn a_frontend_that_comes_back_takes_the_disk_again() {
    let hosts = Arc::new(Hosts::default());
    let owners = Arc::new(Owners::of(hosts.clone()));
    let device = device();
    let connect = || Frontend::connect_to(device.clone(), owners.clone()).negotiate();
    let mut first = connect().share_memory();
    first.put(&Log::new());
    assert_eq!(first.set_features(FEATURES | feature::LOG_ALL), Ack);
    assert!(matches!(first.end(), Ending::HungUp));
    assert_eq!(hosts.handed.lock().unwrap().len(), 1);
    hosts.is_taken.store(true, Ordering::SeqCst);
    let mut second = connect().share_memory();
    let mut driver = Driver::new(&second, 0);
    second.configure(0);
    assert_eq!(second.request(Req::SET_VRING_ENABLE, &words(&[0, 1])), Ack);
    second.send_kick(&driver);
    asked_more(&hosts);
    hosts.is_taken.store(false, Ordering::SeqCst);
    assert_eq!(second.answer(Req::SET_VRING_KICK.into()), Ack);
    driver.request();
}

/// Otherwise the guest would continue elsewhere without what was written here.
#[test]
fn a_disk_whose_log_was_cut_is_not_handed_over_at_the_end() {
    let hosts = Arc::new(Hosts::default());
    let frontend = Frontend::connect_to(device(), Arc::new(Owners::of(hosts.clone())));
    let mut frontend = frontend.negotiate().share_memory();
    let mut drivers = [frontend.drive(0), frontend.drive(1)];
    let log = Log::new();
    frontend.put(&log);
    assert_eq!(frontend.set_features(FEATURES | feature::LOG_ALL), Ack);
    drivers.iter_mut().for_each(Driver::request);
    assert_eq!(frontend.base(0), Some((0, 1)));
    rustix::fs::ftruncate(&log.0, 0).unwrap();
    drivers[1].request();
    drivers[1].request();
    assert_eq!(frontend.base(1), None);
    assert!(matches!(frontend.end(), Ending::Refused(_)));
    assert!(hosts.handed.lock().unwrap().is_empty());
}

/// The workers of an NBD disk whose server is away do not flush for as long as that lasts.
#[test]
fn a_flush_that_is_repeated_ends_with_the_session() {
    let mut bench = Bench::new();
    let is_held = Arc::new(AtomicBool::new(true));
    bench.hosts.server.get().unwrap().hold_flushes(&is_held);
    bench.log(true);
    bench.start(0);
    let device = bench.state.device.clone();
    let mut waiting = Vec::new();
    // Until the worker has room for no other.
    loop {
        match device.sync().remove(0).wait_for(Duration::from_millis(1)) {
            Err(pending) => waiting.push(pending),
            Ok(answer) => {
                assert_eq!(answer, None);
                break;
            }
        }
    }
    bench.signals.hang_up();
    let (done, is_done) = std::sync::mpsc::channel();
    let state = &mut bench.state;
    std::thread::scope(|scope| {
        scope.spawn(move || done.send(state.stop_vring(0)));
        let stopped = is_done.recv_timeout(PATIENCE);
        is_held.store(false, Ordering::SeqCst);
        assert_eq!(stopped, Ok(Err(MessageRefusal::Gone)));
    });
    assert!(bench.handed().is_empty());
}

#[test]
fn a_disk_that_cannot_be_flushed_is_not_handed_over() {
    let mut bench = Bench::new();
    bench.log(true);
    bench.start(0);
    let server = bench.hosts.server.get().unwrap();
    server.react(|asked| match asked.kind {
        FLUSH => Reaction::Send(simple(asked.cookie, 5, &[])),
        _ => Reaction::Honest,
    });
    let refusal = bench.state.stop_vring(0).unwrap_err();
    assert!(matches!(&refusal, MessageRefusal::Lost(why) if why.contains("flushed")));
    assert!(bench.handed().is_empty());
    assert_eq!(bench.hosts.failures.load(Ordering::SeqCst), 1);
}

/// The only vring of a guest that moves runs, and its server is away. `reconnect`: for how many seconds requests wait for it.
fn without_server(reconnect: u32) -> Bench {
    let mut bench = Bench::of(&format!("&reconnect={reconnect}&fence=1"), |_| ());
    bench.log(true);
    bench.start(0);
    let server = bench.hosts.server.get().unwrap();
    // It has a connection, which may not come at once, and loses it.
    let device = bench.state.device.clone();
    comes(|| device.sync().remove(0).wait() == Some(Ok(())));
    server.accept(false);
    server.hang_up();
    comes(|| device.disk.is_cut_off());
    bench
}

/// A server that is killed may have lost what it answered, and no lock keeps the guest from starting at the other host.
#[test]
fn a_guest_leaves_a_server_that_is_away_when_that_is_back() {
    let mut bench = without_server(0);
    let warnings = Warnings::default();
    let (hosts, warned) = (bench.hosts.clone(), warnings.0.clone());
    std::thread::spawn(move || {
        // A flush has found no server.
        comes(|| warned.load(Ordering::SeqCst) > 0);
        hosts.server.get().unwrap().accept(true);
    });
    let stopped = tracing::subscriber::with_default(warnings, || bench.state.stop_vring(0));
    assert_eq!(stopped, Ok((0, 0)));
    assert_eq!(bench.handed(), [2]);
    assert_eq!(bench.hosts.failures.load(Ordering::SeqCst), 0);
}

/// Nothing makes the frontend wait after that, and the copies of what the guest wrote here must not be sent to a server that was lost
/// when the guest writes elsewhere.
#[test]
fn a_guest_whose_driver_was_reset_begins_to_move_when_its_writes_are_durable() {
    let mut bench = Bench::of("&reconnect=0&fence=1", |_| ());
    bench.log(false);
    bench.start(0);
    let device = bench.state.device.clone();
    comes(|| device.sync().remove(0).wait() == Some(Ok(())));
    bench.state.reset().unwrap();
    let hosts = bench.hosts.clone();
    let server = hosts.server.get().unwrap();
    let before = server.flushes();
    bench.log(true);
    assert_eq!(server.flushes(), before + 1);
    // A server that is away is waited for.
    bench.log(false);
    server.accept(false);
    server.hang_up();
    comes(|| device.disk.is_cut_off());
    let warnings = Warnings::default();
    let (warned, away) = (warnings.0.clone(), hosts.clone());
    std::thread::spawn(move || {
        comes(|| warned.load(Ordering::SeqCst) > 0);
        away.server.get().unwrap().accept(true);
    });
    tracing::subscriber::with_default(warnings, || bench.log(true));
    assert_eq!(server.flushes(), before + 2);
    assert_eq!(bench.hosts.failures.load(Ordering::SeqCst), 0);
}

/// Its VMM has connected again, and the workers of the first connection found no server that they could flush. If their changes were sent
/// again later, they would replace what the guest writes on the other host.
#[test]
fn a_guest_that_was_connected_before_begins_to_move_when_its_writes_are_durable() {
    check_earlier_writes(true);
    // Its server is waited for.
    check_earlier_writes(false);
}

fn check_earlier_writes(is_back: bool) {
    let mut bench = Bench::of("&reconnect=0&fence=1", |_| ());
    let (hosts, owners) = (bench.hosts.clone(), bench.owners.clone());
    let server = hosts.server.get().unwrap();
    let device = bench.state.device.clone();
    let mut before = Frontend::connect_to(device.clone(), owners.clone());
    before = before.negotiate().share_memory();
    let features = longs(&[FEATURES | feature::FLUSH]);
    assert_eq!(before.request(Req::SET_FEATURES, &features), Ack);
    let mut driver = before.drive(0);
    driver.make_write();
    driver.kick();
    driver.finish();
    assert!(device.disk.has_unflushed());
    server.accept(false);
    server.hang_up();
    comes(|| device.disk.is_cut_off());
    assert!(matches!(before.end(), Ending::HungUp));
    server.accept(is_back);
    let writes = || {
        let asked = server.asked();
        asked.iter().filter(|asked| asked.kind == WRITE).count()
    };
    assert_eq!((writes(), server.flushes()), (1, 0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A worker looks for the server, and ends when it has flushed.
            comes(|| is_back || !device.modes().is_empty());
            server.accept(true);
        });
        bench.log(true);
    });
    assert_eq!((writes(), server.flushes()), (2, 1));
    assert!(!device.disk.has_unflushed() && device.modes().is_empty());
    // Another session may have the disk, and at the end nothing is written again.
    let mut parked = Frontend::connect_to(device, owners);
    parked = parked.negotiate().share_memory();
    assert_eq!(parked.start(0), Ack);
    assert!(matches!(parked.end(), Ending::HungUp));
    bench.frontend.shutdown(std::net::Shutdown::Both).unwrap();
    bench.state.finish();
    assert_eq!(bench.handed().len(), 1);
    assert_eq!(writes(), 2);
}

/// How a session is told to end, and how it ends.
type Summoned = (fn(&Bench), MessageRefusal);

fn summons() -> [Summoned; 4] {
    [
        (|bench| bench.signals.hang_up(), MessageRefusal::Gone),
        (|bench| bench.signals.hand_over(), MessageRefusal::Gone),
        (
            |bench| bench.frontend.shutdown(std::net::Shutdown::Both).unwrap(),
            MessageRefusal::Gone,
        ),
        (
            |bench| {
                let rung = rustix::io::write(&bench.signals.alarm, &1u64.to_ne_bytes());
                assert_eq!(rung, Ok(8));
            },
            MessageRefusal::lost("a worker failed"),
        ),
    ]
}

/// Requests wait long for the server, or not at all.
#[test]
fn a_session_that_waits_for_its_server_can_be_ended() {
    for (end, expected) in summons() {
        for reconnect in [0, 600] {
            let mut bench = without_server(reconnect);
            end(&bench);
            assert_eq!(bench.state.stop_vring(0), Err(expected.clone()));
            assert!(bench.handed().is_empty());
            assert_eq!(bench.hosts.failures.load(Ordering::SeqCst), 1);
            // Its worker waits for nothing.
            bench.hosts.server.get().unwrap().accept(true);
        }
    }
}

/// Has writes stall by this policy, because the server has no space.
fn stall_writes(device: &Device, server: &NbdServer, on_error: &str) {
    device.tune(Tuning {
        on_error: on_error.parse().unwrap(),
        ..Tuning::clone(&device.tuning())
    });
    server.react(|asked| match asked.kind {
        WRITE => Reaction::Send(simple(asked.cookie, 28, &[])),
        _ => Reaction::Honest,
    });
}

/// The only vring of a guest has a write that is held. With `is_kept` the frontend keeps what is in flight.
fn holding(is_kept: bool) -> Bench {
    stalling("hold", is_kept)
}

/// The only vring of a guest has a write that stalls by this policy.
fn stalling(on_error: &str, is_kept: bool) -> Bench {
    let mut bench = Bench::new();
    let device = bench.state.device.clone();
    stall_writes(&device, bench.hosts.server.get().unwrap(), on_error);
    bench.log(false);
    if is_kept {
        let layout = InflightLayout::new(1, CONFIG.vring_size_max);
        let file = Inflight::create(layout).unwrap();
        bench.state.set_inflight(file, layout).unwrap();
    }
    Driver::on(&bench.memory, 0).make_write();
    bench.start(0);
    bench.state.enable_vring(0, true).unwrap();
    comes(|| !device.records.stalled().is_empty());
    bench
}

/// A VMM that is given no position may guess one and go on at the other host: the request would be lost.
#[test]
fn a_guest_leaves_when_its_held_requests_have_ended() {
    let mend: fn(&Device, &NbdServer) = |_, server| server.react(|_| Reaction::Honest);
    let resume: fn(&Device, &NbdServer) = |device, server| {
        server.react(|_| Reaction::Honest);
        assert_eq!(device.resume(), Some(1));
    };
    let fail: fn(&Device, &NbdServer) = |device, _| assert_eq!(device.fail(), Some(1));
    for (on_error, is_kept, end, failed) in [
        ("hold", true, resume, 0),
        ("hold", true, fail, 1),
        ("hold", false, resume, 0),
        ("retry:600", true, mend, 0),
    ] {
        // QEMU before 8.1 stops all by a reset, and asks for positions after it.
        for is_reset in [false, true] {
            let mut bench = stalling(on_error, is_kept);
            bench.log(true);
            let device = bench.state.device.clone();
            let warnings = Warnings::default();
            let (hosts, warned) = (bench.hosts.clone(), warnings.0.clone());
            let signals = bench.signals.clone();
            std::thread::spawn(move || {
                comes(|| warned.load(Ordering::SeqCst) > 0);
                comes(|| signals.awaits_stalled());
                end(&device, hosts.server.get().unwrap());
            });
            let stopped = tracing::subscriber::with_default(warnings, || {
                if is_reset {
                    bench.state.reset()?;
                }
                bench.state.stop_vring(0)
            });
            assert_eq!(stopped, Ok((0, 1)), "{on_error} {is_kept} {is_reset}");
            assert!(!bench.signals.awaits_stalled());
            assert_eq!(bench.state.device.totals().failed, failed);
            assert_eq!(bench.handed(), [1], "flushed before");
            assert_eq!(bench.hosts.failures.load(Ordering::SeqCst), 0);
        }
    }
}

/// Its VMM would go on elsewhere. In the middle of a message no other process can go on with the session.
#[test]
fn a_disk_whose_guest_waits_for_held_requests_is_not_handed_over() {
    let scratch = Scratch::new();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(CAPACITY));
    let disk = Disk::open(&server.uri("").parse().unwrap(), &OpenOptions::default());
    let device = device_on(disk.unwrap());
    stall_writes(&device, &server, "hold");
    let frontend = Frontend::connect_to(device.clone(), Arc::default());
    let mut frontend = frontend.negotiate().share_memory();
    let mut driver = frontend.drive(0);
    driver.make_write();
    driver.kick();
    comes(|| !device.records.stalled().is_empty());
    let log = Log::new();
    frontend.put(&log);
    assert_eq!(frontend.set_features(FEATURES | feature::LOG_ALL), Ack);
    assert_eq!(frontend.remote.view().obstacle, None);
    frontend.send(Req::GET_VRING_BASE, &words(&[0, 0]), &[]);
    comes(|| frontend.remote.view().obstacle.is_some_and(|it| it.passes));
    assert_eq!(device.fail(), Some(1));
    let (_, position) = frontend.reply().unwrap();
    assert_eq!(message::word(&position, 4), 1);
    assert_eq!(frontend.remote.view().obstacle, None);
    frontend.end();
}

/// Only a guest that moves waits: without a log another process or connection goes on with the request.
#[test]
fn a_guest_that_pauses_does_not_wait_for_its_held_requests() {
    let mut bench = holding(true);
    let refusal = bench.state.stop_vring(0).unwrap_err();
    assert!(matches!(refusal, MessageRefusal::Connection(_)));
    let mut bench = holding(false);
    assert_eq!(bench.state.stop_vring(0), Ok((0, 1)));
    assert_eq!(bench.state.device.totals().failed, 1);
}

#[test]
fn a_session_that_waits_for_held_requests_can_be_ended() {
    for (end, expected) in summons() {
        let mut bench = holding(true);
        bench.log(true);
        end(&bench);
        assert_eq!(bench.state.stop_vring(0), Err(expected));
        assert_eq!(bench.hosts.failures.load(Ordering::SeqCst), 1);
        bench.state.finish();
        assert!(bench.state.vrings.have_left() && !bench.state.vrings.any_running());
        assert!(bench.handed().is_empty());
    }
}

/// The session has ended, and nobody waits for it.
#[test]
fn the_end_of_a_connection_waits_for_no_server() {
    let mut bench = Bench::of("&reconnect=0&fence=1", |_| ());
    bench.log(true);
    let server = bench.hosts.server.get().unwrap();
    server.accept(false);
    server.hang_up();
    bench.frontend.shutdown(std::net::Shutdown::Both).unwrap();
    let warnings = Warnings::default();
    tracing::subscriber::with_default(warnings.clone(), || bench.state.finish());
    assert!(bench.handed().is_empty());
    assert_eq!(bench.hosts.failures.load(Ordering::SeqCst), 1);
    assert_eq!(warnings.0.load(Ordering::SeqCst), 1);
}

/// The server may still write what that daemon sent.
#[test]
fn a_disk_is_handed_over_when_what_a_killed_daemon_sent_has_ended() {
    // A machine may be so late that there is nothing left to wait for.
    let starts_in_time = |fence_seconds: u32| {
        let query = format!("&fence={fence_seconds}");
        let mut bench = Bench::of(&query, Disk::mark_predecessor_died);
        bench.log(true);
        bench.start(0);
        let is_in_time = bench.state.device.unsettled_for().is_some();
        is_in_time.then_some(bench)
    };
    let mut bench = [1, 8, 60].into_iter().find_map(starts_in_time).unwrap();
    bench.state.stop_vring(0).unwrap();
    assert_eq!(bench.handed().len(), 1);
    assert_eq!(bench.state.device.unsettled_for(), None);
}

/// Counts warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// What a killed daemon leaves in the page cache is not seen by the other host.
#[test]
fn a_move_of_a_disk_behind_the_page_cache_is_warned_of_once() {
    for (what, in_file, read_only, expected) in [
        ("a file", true, false, 1),
        ("a file that is not written", true, true, 0),
        ("memory", false, false, 0),
    ] {
        let scratch = Scratch::new();
        let spec = match in_file {
            true => DiskSpec::Path(scratch.image("disk", CAPACITY)),
            false => DiskSpec::Null(CAPACITY),
        };
        let options = OpenOptions {
            direct: Direct::Off,
            read_only,
            ..OpenOptions::default()
        };
        let disk = Disk::open(&spec, &options).unwrap();
        let mut bench = Bench::on(disk, Arc::default(), scratch);
        let warnings = Warnings::default();
        tracing::subscriber::with_default(warnings.clone(), || {
            bench.log(false);
            for _ in 0..2 {
                // Cloud Hypervisor replaces the log for each pass.
                bench.log(true);
            }
        });
        assert_eq!(warnings.0.load(Ordering::SeqCst), expected, "{what}");
    }
}

/// QEMU does not take the mode along.
#[test]
fn a_move_of_a_guest_that_has_switched_its_cache_off_is_warned_of_once() {
    for (mode, runs, expected) in [(1, true, 0), (0, true, 1), (0, false, 1)] {
        let disk = Disk::open(&DiskSpec::Null(CAPACITY), &OpenOptions::default()).unwrap();
        let mut bench = Bench::on(disk, Arc::default(), Scratch::new());
        bench.log(false);
        if runs {
            bench.start(0);
        }
        bench.state.write_config(32, &[mode]).unwrap();
        let warnings = Warnings::default();
        tracing::subscriber::with_default(warnings.clone(), || {
            for _ in 0..2 {
                bench.log(true);
            }
        });
        let warned = warnings.0.load(Ordering::SeqCst);
        assert_eq!(warned, expected, "{mode} {runs}");
    }
}
