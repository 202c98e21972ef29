//! A worker run lap by lap on a simulated store, against a model of the disk. A seed replays a run:
//! `CLEAVE_SEED=n cargo test -p cleave-worker --test sim`.

// A fault of the test itself ends the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod batch;
mod cache;
mod control;
mod crash;
mod driver;
mod finish;
mod limits;
mod log;
mod loss;
mod model;
mod panic;
mod splitting;
mod stall;
mod table;
mod turmoil;
mod unsettled;
mod wake;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cleave_blk::spec::{feature, request_type, status};
use cleave_disk::{Direct, Disk, DiskSpec, OpenOptions, StripeKind};
use cleave_guest::{Inflight, InflightLayout};
use cleave_sim::{Random, Sim, SimConfig, SimStore};
use cleave_worker::record::{Category, ErrorKind, Kind, Recording, Stage};
use cleave_worker::{
    Coalesce, CompletionPolicy, Control, DataDirection, Device, ErrorAction, Lap,
    Pending as Commanded, Prior, Split, Stopped, Totals, Tuning, VringStart, Worker, WorkerConfig,
    reactor,
};
use driver::{Answer, Ask, DATA_MAX, Driver, SIZE};
use rustix::event::{EventfdFlags, eventfd};

const DISK_BYTES: usize = 1 << 20;
/// Number of legs and chunk size of the striped disk.
const LEGS: usize = 4;
const CHUNK: u32 = 4096;
const SECTORS: u64 = DISK_BYTES as u64 / 512;
const FEATURES: u64 = feature::VERSION_1
    | feature::EVENT_IDX
    | feature::INDIRECT_DESC
    | feature::FLUSH
    | feature::CONFIG_WCE
    | feature::DISCARD
    | feature::WRITE_ZEROES;

fn random_bytes(random: &mut Random, n: usize) -> Vec<u8> {
    (0..n.div_ceil(8))
        .flat_map(|_| random.draw().to_le_bytes())
        .take(n)
        .collect()
}

struct Bench {
    worker: Worker<Sim>,
    control: Control,
    driver: Driver,
    store: Arc<Mutex<SimStore>>,
    device: Arc<Device>,
    alarm: Arc<OwnedFd>,
    err: OwnedFd,
}

/// A vring on the driver's ring, from position 0.
fn vring(index: u16) -> VringStart {
    VringStart {
        index,
        layout: Driver::layout(),
        base: 0,
        journal: None,
        log: None,
        features: FEATURES,
        kick: Some(event()),
        call: Some(event()),
        err: None,
        enabled: true,
    }
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn is_rung(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0; 8]).is_ok()
}

fn device(split: Split) -> Arc<Device> {
    let options = OpenOptions::default();
    device_of(
        Disk::open(&DiskSpec::Ram(DISK_BYTES as u64), &options).unwrap(),
        split,
    )
}

/// A stripe of `LEGS`. Only its layout is used: the data is in the store, leg after leg.
fn striped_device() -> Arc<Device> {
    let options = OpenOptions {
        direct: Direct::Off,
        ..OpenOptions::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let leg = |number: usize| {
        let path = folder.path().join(number.to_string());
        let file = std::fs::File::create(&path).unwrap();
        file.set_len((DISK_BYTES / LEGS) as u64).unwrap();
        DiskSpec::Path(path)
    };
    let legs: Vec<_> = (0..LEGS).map(leg).collect();
    let disk = Disk::open_stripe(&legs, CHUNK, StripeKind::Raw, &options).unwrap();
    assert_eq!(disk.capacity_bytes(), DISK_BYTES as u64);
    device_of(disk, Split::Off)
}

fn device_of(disk: Disk, split: Split) -> Arc<Device> {
    let config = WorkerConfig {
        cpus: Vec::new(),
        ops: 64,
    };
    let tuning = Tuning {
        completion: CompletionPolicy::Poll,
        ..Tuning::new(split)
    };
    let serial = *b"simulated\0\0\0\0\0\0\0\0\0\0\0";
    Arc::new(Device::new(Arc::new(disk), serial, true, config, tuning))
}

impl Bench {
    fn new(config: SimConfig, features: u64) -> Bench {
        Bench::with_split(config, features, Split::Off)
    }

    fn with_split(config: SimConfig, features: u64, split: Split) -> Bench {
        Bench::over(device(split), config, features)
    }

    fn striped(config: SimConfig, features: u64) -> Bench {
        let bench = Bench::over(striped_device(), config, features);
        bench.store.lock().unwrap().leg_bytes = DISK_BYTES / LEGS;
        bench
    }

    fn over(device: Arc<Device>, config: SimConfig, features: u64) -> Bench {
        let store = SimStore {
            now: vec![0; DISK_BYTES],
            durable: vec![0; DISK_BYTES],
            ..Default::default()
        };
        let store = Arc::new(Mutex::new(store));
        let driver = Driver::new();
        let memory = driver.memory();
        let alarm = Arc::new(event());
        let (control, commands) = Control::channel().unwrap();
        let mut worker = Worker::new(
            reactor(&device.disk, 64).unwrap(),
            Sim::new(config, store.clone()),
            device.clone(),
            memory,
            commands,
            alarm.clone(),
        )
        .unwrap();
        let err = event();
        let started = control.start(VringStart {
            features,
            err: Some(err.try_clone().unwrap()),
            ..vring(0)
        });
        worker.lap().unwrap();
        started.wait_for(Duration::ZERO).unwrap().unwrap().unwrap();
        Bench {
            worker,
            control,
            driver,
            store,
            device,
            alarm,
            err,
        }
    }

    fn lap(&mut self) -> Lap {
        self.worker.lap().unwrap()
    }

    fn totals(&self) -> Totals {
        self.device.totals()
    }

    /// Runs laps until a command has taken effect, which takes a few laps at most.
    fn carry_out<T>(&mut self, mut pending: Commanded<T>) -> T {
        for _ in 0..4 {
            self.lap();
            match pending.wait_for(Duration::ZERO) {
                Ok(answer) => return answer.unwrap(),
                Err(again) => pending = again,
            }
        }
        panic!("the command has not taken effect");
    }

    /// Stops the vring, and starts it again with the requests in flight that the region has. Returns how it stopped.
    fn restart_from(&mut self, region: &Inflight) -> Stopped {
        let stopped = self.control.stop(0);
        let stopped = self.carry_out(stopped);
        let started = self.control.start(kept_vring(region));
        self.carry_out(started).unwrap();
        stopped
    }

    /// Submits a request and runs laps until it completes.
    fn ask(&mut self, ask: &Ask) -> Answer {
        let head = self.driver.submit(ask).unwrap();
        for _ in 0..10_000 {
            self.lap();
            if let Some(answer) = self.driver.collect(|_| ask.room).pop() {
                assert_eq!(answer.head, head);
                return answer;
            }
        }
        panic!("no answer to {ask:?}");
    }
}

/// A vring whose requests in flight are kept in this region.
fn kept_vring(region: &Inflight) -> VringStart {
    VringStart {
        // The frontend's value must be ignored.
        base: 4711,
        journal: region.journal(0),
        ..vring(0)
    }
}

/// Makes an in-flight region for the vring.
fn inflight_region() -> Inflight {
    let layout = InflightLayout::new(1, SIZE);
    Inflight::map(Inflight::create(layout).unwrap(), layout).unwrap()
}

fn quiet(seed: u64) -> SimConfig {
    SimConfig {
        seed,
        ops: 64,
        fail_per_mille: 0,
        fail_at: None,
        panic_at: None,
        delay_max: 5,
    }
}

fn seeds(default: std::ops::Range<u64>) -> Vec<u64> {
    match std::env::var("CLEAVE_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
    {
        Some(seed) => vec![seed],
        None => default.collect(),
    }
}

#[test]
fn a_failing_leg_fails_only_requests_that_use_it() {
    let bench = || {
        let bench = Bench::striped(
            SimConfig {
                ops: 2048,
                ..quiet(1)
            },
            FEATURES,
        );
        bench.store.lock().unwrap().failing_leg = Some(2);
        bench
    };
    // A row of the stripe has 32 sectors, 8 per leg. Leg 2 starts at sector 16.
    for (sector, sectors, expected) in [
        (0, 16, status::OK),
        (0, 17, status::IOERR),
        (16, 8, status::IOERR),
        (24, 8, status::OK),
        (24, 24, status::OK),
        (24, 25, status::IOERR),
    ] {
        let mut bench = bench();
        let data = vec![7; sectors as usize * 512];
        for ask in [
            Ask::write(sector, data, 4096, false),
            Ask::read(sector, sectors * 512, 1000, true),
            Ask::zero(sector, sectors, true),
        ] {
            let answer = bench.ask(&ask);
            assert_eq!(answer.status, expected, "{} {sectors} {sector}", ask.kind);
        }
        assert_eq!(bench.ask(&Ask::flush()).status, status::IOERR);
    }
}

#[test]
fn a_slow_leg_delays_only_requests_that_use_it() {
    let mut bench = Bench::striped(
        SimConfig {
            ops: 2048,
            ..quiet(1)
        },
        FEATURES,
    );
    bench.store.lock().unwrap().slow_leg = Some((2, 1000));
    let slow = bench
        .driver
        .submit(&Ask::read(16, 4096, 4096, true))
        .unwrap();
    for n in 0..100 {
        let sector = [0, 8, 24][n % 3];
        let head = bench
            .driver
            .submit(&Ask::read(sector, 4096, 4096, true))
            .unwrap();
        let mut laps = 0;
        while bench
            .driver
            .collect(|_| 4096)
            .pop()
            .map(|answer| answer.head)
            != Some(head)
        {
            bench.lap();
            laps += 1;
            assert!(laps < 50, "held up behind {slow}");
        }
    }
}

/// Recording adds only times; the counts are the same without it.
#[test]
fn requests_are_counted_with_recording_off() {
    for (recording, records) in [(Recording::On, 1), (Recording::Off, 0)] {
        let device = Arc::into_inner(device(Split::Off)).unwrap();
        let config = SimConfig {
            fail_at: Some(3),
            ..quiet(1)
        };
        let mut bench = Bench::over(Arc::new(device.recording(recording)), config, FEATURES);
        for ask in [
            Ask::read(8, 8192, 4096, true),
            Ask::write(8, vec![7; 4096], 4096, false),
            Ask::flush(),
            Ask::read(8, 512, 512, false),
            Ask::read(SECTORS, 512, 512, false),
        ] {
            bench.ask(&ask);
        }
        let totals = bench.totals();
        let ended = [totals.reads, totals.writes, totals.others];
        assert_eq!(ended, [1, 1, 1], "{recording:?}");
        let moved = (totals.read_bytes, totals.write_bytes);
        assert_eq!(moved, (8192, 4096), "{recording:?}");
        let errors = [totals.failed, totals.refused, totals.broken];
        assert_eq!(errors, [1, 1, 0], "{recording:?}");
        assert!(totals.calls + totals.calls_suppressed > 0, "{recording:?}");
        assert_eq!(bench.device.records.all().len(), records);
    }
}

#[test]
fn the_nth_failure_is_reported_to_exactly_the_nth_request() {
    for nth in 0..20 {
        let mut bench = Bench::new(
            SimConfig {
                fail_at: Some(nth),
                ..quiet(nth)
            },
            FEATURES,
        );
        for n in 0..20 {
            let ask = match n % 4 {
                0 => Ask::write(8, vec![7; 4096], 4096, false),
                1 => Ask::read(8, 4096, 4096, true),
                2 => Ask::flush(),
                _ => Ask::zero(8, 8, false),
            };
            let answer = bench.ask(&ask);
            let expected = if n == nth { status::IOERR } else { status::OK };
            assert_eq!(answer.status, expected, "request {n} with failure at {nth}");
        }
        assert_eq!(bench.totals().failed, 1);
    }
}

#[test]
fn duplicate_head_in_flight_retires_the_vring_and_lets_the_first_end() {
    let mut bench = Bench::new(
        SimConfig {
            delay_max: 10,
            ..quiet(1)
        },
        FEATURES,
    );
    let head = bench
        .driver
        .submit(&Ask::read(0, 4096, 4096, true))
        .unwrap();
    bench.driver.submit_raw(head);
    for _ in 0..50 {
        bench.lap();
    }
    assert_eq!(bench.driver.collect(|_| 4096).len(), 1);
    assert_eq!(bench.totals().retired, 1);
    assert!(
        is_rung(&bench.err),
        "the err descriptor notifies the frontend"
    );
    bench
        .driver
        .submit(&Ask::read(0, 4096, 4096, true))
        .unwrap();
    for _ in 0..50 {
        bench.lap();
    }
    assert_eq!(
        bench.driver.collect(|_| 4096).len(),
        0,
        "a retired vring is not served"
    );
    let mut alarms = [0; 8];
    rustix::io::read(&bench.alarm, &mut alarms).unwrap();
    assert_eq!(
        u64::from_ne_bytes(alarms),
        cleave_worker::ALARM_RETIRED,
        "the session goes on"
    );
}
