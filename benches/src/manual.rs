//! A worker that the caller's thread runs lap by lap, with a driver that sends batches.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use cleave_blk::spec::feature;
use cleave_disk::{Disk, DiskSpec, OpenOptions};
use cleave_engine::{Null, Reactor, Store};
use cleave_guest::{DirtyLog, Inflight, InflightLayout, Journal, VringLog};
use cleave_worker::{
    CompletionPolicy, Control, Device, Lap, Split, Tuning, VringStart, Worker, WorkerConfig,
    reactor,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::{Driver, Guest, Place, VRING_SIZE};

/// The features of `cleave serve` that a Linux guest accepts, as far as the data path is concerned.
const FEATURES: u64 = feature::VERSION_1
    | feature::EVENT_IDX
    | feature::INDIRECT_DESC
    | feature::FLUSH
    | feature::CONFIG_WCE;
const DISK_BYTES: u64 = 1 << 30;
/// Most ops in flight.
const OPS: u16 = 512;
/// A lap may return before the engine is done; no batch needs more laps than this.
const LAPS_MAX: u32 = 10_000;

/// How guest and worker notify each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signals {
    /// Both poll; no eventfd.
    None,
    /// The guest kicks and is called for every batch, and the worker sleeps in between. The kick precedes the lap,
    /// because a single thread cannot wait for itself.
    KickAndCall,
    /// As `None`, with an in-flight region.
    NoneAndKept,
    /// As `None`, while the guest moves: what is written is marked in a dirty log.
    NoneAndLogged,
}

/// Makes a device that never waits for its disk, as `cleave serve --disk null:1G` makes it.
fn null_device(completion: CompletionPolicy) -> Arc<Device> {
    let options = OpenOptions::default();
    let disk = Disk::open(&DiskSpec::Null(DISK_BYTES), &options).unwrap();
    let config = WorkerConfig {
        cpus: Vec::new(),
        ops: OPS,
    };
    let tuning = Tuning {
        completion,
        ..Tuning::new(Split::Off)
    };
    let serial = *b"manual laps\0\0\0\0\0\0\0\0\0";
    Arc::new(Device::new(Arc::new(disk), serial, true, config, tuning))
}

/// Returns the store that `cleave serve` uses for a null disk.
pub fn null(_: &mut Reactor, disk: &Arc<Disk>) -> Null {
    Null::new(disk.clone(), OPS).unwrap()
}

/// One worker with one vring, and the driver of that vring.
pub struct ManualWorker<'a, S: Store> {
    worker: Worker<S>,
    driver: Driver<'a>,
    kick: Option<OwnedFd>,
    // The channel's sender stays open; otherwise the worker would shut down.
    _control: Control,
}

impl<'a, S: Store> ManualWorker<'a, S> {
    /// Reads of 4 KiB, `depth` (a power of two) at a time. `store` makes the disk's store.
    pub fn new(
        guest: &'a Guest,
        place: Place,
        depth: u16,
        signals: Signals,
        store: impl FnOnce(&mut Reactor, &Arc<Disk>) -> S,
    ) -> ManualWorker<'a, S> {
        let completion = match signals {
            Signals::KickAndCall => CompletionPolicy::Interrupt,
            _ => CompletionPolicy::Poll,
        };
        let device = null_device(completion);
        let driver = Driver::with_batch(guest, 3, place, depth);
        let memory = guest.memory.clone();
        let (control, commands) = Control::channel().unwrap();
        let mut reactor = reactor(&device.disk, OPS).unwrap();
        let store = store(&mut reactor, &device.disk);
        let alarm = Arc::new(event());
        let worker = Worker::new(reactor, store, device, memory, commands, alarm);
        let mut worker = worker.unwrap();
        let kick = (signals == Signals::KickAndCall).then(event);
        let started = control.start(VringStart {
            index: 0,
            layout: driver.layout(),
            base: 0,
            journal: (signals == Signals::NoneAndKept).then(journal),
            log: (signals == Signals::NoneAndLogged).then(|| log(&driver)),
            features: FEATURES,
            kick: kick.as_ref().map(|kick| kick.try_clone().unwrap()),
            call: kick.as_ref().map(|_| event()),
            err: None,
            enabled: true,
        });
        assert_eq!(worker.lap().unwrap(), Lap::Again);
        assert_eq!(started.wait_for(Duration::ZERO).unwrap(), Some(Ok(())));
        ManualWorker {
            worker,
            driver,
            kick,
            _control: control,
        }
    }

    /// The driver's side: makes a batch available.
    pub fn offer(&mut self) {
        if let Some(kick) = &self.kick {
            self.driver.want_call();
            self.driver.offer();
            rustix::io::write(kick, &1_u64.to_ne_bytes()).unwrap();
        } else {
            self.driver.offer();
        }
    }

    /// The worker's side: one lap.
    #[inline]
    pub fn lap(&mut self) {
        self.worker.lap().unwrap();
    }

    /// Runs laps until the batch is used.
    pub fn serve(&mut self) {
        self.serve_by(ManualWorker::lap);
    }

    /// As `serve`, but calls `lap` for each lap; it must run exactly one.
    pub fn serve_by(&mut self, mut lap: impl FnMut(&mut ManualWorker<'a, S>)) {
        for _ in 0..LAPS_MAX {
            lap(self);
            if self.driver.is_done() {
                return;
            }
        }
        panic!("{LAPS_MAX} laps and the batch is not used");
    }
}

fn journal() -> Journal {
    let layout = InflightLayout::new(1, VRING_SIZE);
    let region = Inflight::create(layout).unwrap();
    let region = Inflight::map(region, layout).unwrap();
    region.journal(0).unwrap()
}

/// Makes a log as a frontend does, which clears it from time to time: here all bits stay set after the first batch.
fn log(driver: &Driver<'_>) -> Box<VringLog> {
    // A bit for each page of a guest of 1 GiB.
    const BYTES: u64 = 1 << 15;
    let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(BYTES).unwrap();
    let log = DirtyLog::map(file, 0, BYTES).unwrap();
    Box::new(VringLog::new(log, Some(driver.layout().used_addr), true))
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}
