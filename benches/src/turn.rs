//! A worker turned by hand, lap by lap on the caller's thread, with a driver that offers batches.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use cleave_blk::spec::feature;
use cleave_disk::{Disk, DiskSpec, OpenOptions};
use cleave_engine::{Null, Reactor, Store};
use cleave_guest::{Inflight, InflightLayout, Journal};
use cleave_worker::{
    Completion, Control, Device, Lap, Split, Tuning, VringStart, Worker, WorkerConfig, reactor,
};
use rustix::event::{EventfdFlags, eventfd};

use crate::{Driver, Guest, Place, VRING_SIZE};

/// What `cleave serve` offers and a Linux guest takes, as far as the data path cares.
const FEATURES: u64 = feature::VERSION_1
    | feature::EVENT_IDX
    | feature::INDIRECT_DESC
    | feature::FLUSH
    | feature::CONFIG_WCE;
const DISK_BYTES: u64 = 1 << 30;
/// Most ops in flight.
const OPS: u16 = 512;
/// A lap may end before the engine has; none needs more.
const LAPS_MAX: u32 = 10_000;

/// How guest and worker hear of each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signals {
    /// Both poll; no eventfd.
    None,
    /// The guest kicks for every batch and is called for every batch, and the worker sleeps in between.
    /// (It is kicked before its turn, or one thread would wait for itself.)
    KickAndCall,
    /// As `None`, and the frontend keeps the requests in flight.
    NoneAndKept,
}

/// A device without a disk that could be slow, as `cleave serve --disk null:1G` makes it.
fn null_device(completion: Completion) -> Arc<Device> {
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
    let serial = *b"turned by hand\0\0\0\0\0\0";
    Arc::new(Device::new(Arc::new(disk), serial, true, config, tuning))
}

/// The store that `cleave serve` has for a null disk.
pub fn null(_: &mut Reactor, disk: &Arc<Disk>) -> Null {
    Null::new(disk.clone(), true, OPS)
}

/// One worker with one vring, and the driver of that vring.
pub struct Turn<'a, S: Store> {
    worker: Worker<S>,
    driver: Driver<'a>,
    kick: Option<OwnedFd>,
    // Its queue stays open, or the worker would take that for the end.
    _control: Control,
}

impl<'a, S: Store> Turn<'a, S> {
    /// Reads of 4 KiB, `depth` (a power of two) at once. `store` makes the disk's store.
    pub fn new(
        guest: &'a Guest,
        place: Place,
        depth: u16,
        signals: Signals,
        store: impl FnOnce(&mut Reactor, &Arc<Disk>) -> S,
    ) -> Turn<'a, S> {
        let completion = match signals {
            Signals::None | Signals::NoneAndKept => Completion::Poll,
            Signals::KickAndCall => Completion::Interrupt,
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
            features: FEATURES,
            kick: kick.as_ref().map(|kick| kick.try_clone().unwrap()),
            call: kick.as_ref().map(|_| event()),
            err: None,
            enabled: true,
        });
        assert_eq!(worker.lap().unwrap(), Lap::Again);
        assert_eq!(started.wait_for(Duration::ZERO).unwrap(), Some(Ok(())));
        Turn {
            worker,
            driver,
            kick,
            _control: control,
        }
    }

    /// The driver's part: makes a batch available.
    pub fn offer(&mut self) {
        if let Some(kick) = &self.kick {
            self.driver.want_call();
            self.driver.offer();
            rustix::io::write(kick, &1_u64.to_ne_bytes()).unwrap();
        } else {
            self.driver.offer();
        }
    }

    /// The worker's part, a lap of it.
    #[inline]
    pub fn lap(&mut self) {
        self.worker.lap().unwrap();
    }

    /// Laps until the batch is used.
    pub fn serve(&mut self) {
        self.serve_by(Turn::lap);
    }

    /// As `serve`, where each lap is `lap`, which must do one.
    pub fn serve_by(&mut self, mut lap: impl FnMut(&mut Turn<'a, S>)) {
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

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}
