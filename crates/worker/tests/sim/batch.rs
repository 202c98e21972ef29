//! Acceptance lap by lap: settings that change during a batch apply to the chains that follow, and a busy vring
//! leaves room for the others. On a thread that disks share a lap ends by the clock.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cleave_blk::{Op, OpKind, PLAIN_OPS_MAX};
use cleave_engine::{Done, Reactor, Store, Wait};
use cleave_guest::{Epoch, Memory};
use cleave_worker::bench::lap_beside_others;
use cleave_worker::{
    CompletionPolicy, Control, Device, Split, Tuning, VringStart, Worker, reactor,
};

use crate::driver::{Ask, Driver, Part, SIZE};
use crate::{Bench, FEATURES, device, event, quiet, vring};

/// Completes every op at once, and calls a closure in the middle of the first.
pub(crate) struct Meddler {
    /// Number of ops that it has room for.
    pub(crate) ops: usize,
    /// Completes each op inline.
    pub(crate) on_the_spot: bool,
    /// Kind and token of each op.
    pub(crate) pushed: Rc<RefCell<Vec<(OpKind, u64)>>>,
    pub(crate) meddle: Option<Box<dyn FnOnce()>>,
    pub(crate) ended: Vec<u64>,
}

impl Store for Meddler {
    fn room(&self) -> usize {
        self.ops - self.ended.len()
    }
    fn in_flight(&self) -> usize {
        self.ended.len()
    }
    fn push(&mut self, _: &mut Reactor, _: &Epoch, op: Op<'_>, token: u64) {
        self.pushed.borrow_mut().push((op.kind, token));
        self.ended.push(token);
        if let Some(meddle) = self.meddle.take() {
            meddle();
        }
    }
    fn at_once(&mut self, _: &Memory, _: &Op<'_>) -> bool {
        self.on_the_spot
    }
    fn reap(&mut self) -> Option<Done> {
        let token = self.ended.pop()?;
        let result = Ok(());
        Some(Done { token, result })
    }
    fn is_ready(&self) -> bool {
        !self.ended.is_empty()
    }
    fn before_enter(&mut self, _: &mut Reactor, _: Wait) -> Option<Duration> {
        Some(Duration::ZERO)
    }
}

/// A worker that serves a store, and its control.
pub(crate) fn worker_with(
    store: Meddler,
    device: Arc<Device>,
    memory: Arc<Memory>,
) -> (Worker<Meddler>, Control) {
    let (control, commands) = Control::channel().unwrap();
    let alarm = Arc::new(event());
    let reactor = reactor(&device.disk, 64).unwrap();
    let worker = Worker::new(reactor, store, device, memory, commands, alarm);
    (worker.unwrap(), control)
}

/// A vring without calls.
fn silent(index: u16) -> VringStart {
    VringStart {
        call: None,
        ..vring(index)
    }
}

/// The frontend switches the cache off and gets its acknowledgement. The next write that the guest makes
/// available is durable, although the worker was in the middle of a batch.
#[test]
fn a_write_after_the_cache_is_switched_off_is_durable_within_the_same_batch() {
    let device: Arc<Device> = device(cleave_worker::Split::Off);
    let driver = Rc::new(RefCell::new(Driver::new()));
    let memory = driver.borrow().memory();
    let pushed = Rc::default();
    let store = Meddler {
        ops: 64,
        on_the_spot: false,
        pushed: Rc::clone(&pushed),
        meddle: Some(Box::new({
            let (device, driver) = (device.clone(), driver.clone());
            move || {
                device.writeback.store(false, Ordering::Relaxed);
                let ask = Ask::write(8, vec![2; 512], 512, false);
                driver.borrow_mut().submit(&ask).unwrap();
            }
        })),
        ended: Vec::new(),
    };
    let (mut worker, control) = worker_with(store, device, memory);
    let started = control.start(silent(0));
    let ask = Ask::write(0, vec![1; 512], 512, false);
    driver.borrow_mut().submit(&ask).unwrap();
    worker.lap().unwrap();
    started.wait().unwrap().unwrap();
    worker.lap().unwrap();
    let expected = [false, true].map(|durable| OpKind::Write { durable });
    // Followed by the sync for the first write.
    let kinds: Vec<_> = pushed.borrow().iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds[..2], expected);
}

/// Two vrings of one worker. The first always has more than the store has room for.
#[test]
fn a_vring_that_fills_the_store_leaves_room_for_the_others() {
    let device = device(cleave_worker::Split::Off);
    let mut driver = Driver::new();
    let memory = driver.memory();
    let pushed = Rc::default();
    let store = Meddler {
        ops: PLAIN_OPS_MAX,
        on_the_spot: false,
        pushed: Rc::clone(&pushed),
        meddle: None,
        ended: Vec::new(),
    };
    let (mut worker, control) = worker_with(store, device, memory);
    // Both use the same ring, so both have the same work.
    for index in 0..2 {
        let _started = control.start(silent(index));
    }
    worker.lap().unwrap();
    for sector in 0..8 {
        driver
            .submit(&Ask::write(sector, vec![1; 512], 512, false))
            .unwrap();
    }
    for _ in 0..8 {
        worker.lap().unwrap();
    }
    let lanes: Vec<_> = pushed
        .borrow()
        .iter()
        .map(|(_, token)| token >> 48)
        .collect();
    assert!(lanes[..4].contains(&1), "{lanes:?}");
}

/// A batch for an idle disk is short, so that the disk gets its first requests early. For inline completion
/// there is no disk to wait, so the batch is as long as for a guest that is awake.
#[test]
fn an_inline_batch_is_not_cut_short_for_an_idle_disk() {
    for (on_the_spot, batch) in [(false, 8), (true, 16)] {
        let mut driver = Driver::new();
        let memory = driver.memory();
        let store = Meddler {
            ops: 4 * PLAIN_OPS_MAX,
            on_the_spot,
            pushed: Rc::default(),
            meddle: None,
            ended: Vec::new(),
        };
        let device = device(cleave_worker::Split::Off);
        let (mut worker, control) = worker_with(store, device, memory);
        let _started = control.start(silent(0));
        worker.lap().unwrap();
        for sector in 0..20 {
            driver.submit(&Ask::read(sector, 512, 512, true)).unwrap();
        }
        worker.lap().unwrap();
        assert_eq!(driver.collect(|_| 512).len(), batch);
    }
}

/// A chain of maximum length has many thousand descriptors. A lap reads a bounded number of them, so that
/// commands and completions do not wait.
#[test]
fn a_lap_reads_a_bounded_number_of_descriptors() {
    let mut bench = Bench::new(quiet(1), FEATURES);
    bench.driver.submit_longest(9);
    let mut used = Vec::new();
    for _ in 0..8 {
        bench.lap();
        used.push(bench.driver.used_index());
    }
    assert_eq!(used, [2, 4, 6, 8, 9, 9, 9, 9]);
}

/// A chain that waits for the disk's limits is read and given back, which takes as long.
#[test]
fn a_chain_that_is_given_back_counts_among_what_a_lap_reads() {
    const ELSEWHERE: u64 = 0x8000_0000;
    let device = device(Split::Off);
    device.tune(Tuning {
        // The next write waits for a minute, longer than any delay of the machine.
        limits: "bps-write=8".parse().unwrap(),
        ..Tuning::clone(&device.tuning())
    });
    let (mut long, mut short) = (Driver::new(), Driver::at(ELSEWHERE));
    let regions = [&long, &short].map(|driver| {
        let parts = [Part::Rings, Part::Requests];
        parts.map(|part| driver.region(part))
    });
    let memory = Memory::new(regions.into_iter().flatten().collect()).unwrap();
    let store = Meddler {
        ops: 64,
        on_the_spot: false,
        pushed: Rc::default(),
        meddle: None,
        ended: Vec::new(),
    };
    let (mut worker, control) = worker_with(store, device, memory);
    let _first = control.start(silent(0));
    let _second = control.start(VringStart {
        layout: Driver::layout_at(ELSEWHERE),
        ..silent(1)
    });
    worker.lap().unwrap();
    long.submit_longest_write(2);
    short.submit(&Ask::read(0, 512, 512, true)).unwrap();
    worker.lap().unwrap();
    assert_eq!((long.used_index(), short.used_index()), (1, 0));
    worker.lap().unwrap();
    assert_eq!((long.used_index(), short.used_index()), (1, 1));
}

/// Longer than a lap on a shared thread goes on with what a guest asks for.
const LONG: Duration = Duration::from_millis(1);

/// Takes each op at once, and lets time pass as an access to a page does that nobody has touched.
struct Lagging {
    /// When the time passes: as an op is pushed, or as it is reaped.
    in_push: bool,
    /// Lane of each op, in their order.
    pushed: Rc<RefCell<Vec<u64>>>,
    ended: Vec<u64>,
}

impl Store for Lagging {
    fn room(&self) -> usize {
        64 - self.ended.len()
    }
    fn in_flight(&self) -> usize {
        // Never idle, so that a batch is long.
        1 + self.ended.len()
    }
    fn push(&mut self, _: &mut Reactor, _: &Epoch, _: Op<'_>, token: u64) {
        self.pushed.borrow_mut().push(token >> 48);
        self.ended.push(token);
        if self.in_push {
            pass(LONG);
        }
    }
    fn reap(&mut self) -> Option<Done> {
        let token = self.ended.pop()?;
        if !self.in_push {
            pass(LONG);
        }
        let result = Ok(());
        Some(Done { token, result })
    }
    fn is_ready(&self) -> bool {
        !self.ended.is_empty()
    }
}

/// Keeps the core for so long.
fn pass(time: Duration) {
    let began = Instant::now();
    while began.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// A worker over such a store, and as many requests as its ring holds for each of its vrings, which use that ring together.
fn slow_worker(
    in_push: bool,
    vrings: u16,
    completion: CompletionPolicy,
) -> (Worker<Lagging>, Driver, Rc<RefCell<Vec<u64>>>) {
    let mut driver = Driver::new();
    let pushed = Rc::default();
    let store = Lagging {
        in_push,
        pushed: Rc::clone(&pushed),
        ended: Vec::new(),
    };
    let device = device(Split::Off);
    device.tune(Tuning {
        completion,
        ..Tuning::clone(&device.tuning())
    });
    let (control, commands) = Control::channel().unwrap();
    let (reactor, alarm) = (reactor(&device.disk, 64).unwrap(), Arc::new(event()));
    let memory = driver.memory();
    let mut worker = Worker::new(reactor, store, device, memory, commands, alarm).unwrap();
    for index in 0..vrings {
        let _started = control.start(silent(index));
    }
    worker.lap().unwrap();
    for sector in 0..u64::from(SIZE) {
        driver.submit(&Ask::read(sector, 512, 512, true)).unwrap();
    }
    (worker, driver, pushed)
}

/// Has a worker make laps beside others until it rests. Returns the growth of a count in each of them.
fn laps_until_rest(worker: &mut Worker<Lagging>, mut count: impl FnMut() -> usize) -> Vec<usize> {
    let mut laps = Vec::new();
    for _ in 0..1000 {
        let before = count();
        let rests = lap_beside_others(worker).unwrap();
        laps.push(count() - before);
        if rests {
            return laps;
        }
    }
    panic!("it never rests: {laps:?}");
}

/// A guest in huge pages can have each of its requests touch pages that nobody has touched, which takes long. Other disks of the thread
/// have their turn after a few of them.
#[test]
fn a_lap_beside_other_disks_takes_little_that_takes_long() {
    let (mut own, _driver, pushed) = slow_worker(true, 1, CompletionPolicy::Poll);
    own.lap().unwrap();
    assert_eq!(pushed.borrow().len(), usize::from(SIZE), "nobody waits");
    let (mut worker, mut driver, pushed) = slow_worker(true, 1, CompletionPolicy::Interrupt);
    let taken = laps_until_rest(&mut worker, || pushed.borrow().len());
    assert_eq!(taken.iter().sum::<usize>(), usize::from(SIZE), "{taken:?}");
    assert!(taken.iter().all(|taken| *taken <= 4), "{taken:?}");
    assert_eq!(driver.collect(|_| 512).len(), usize::from(SIZE));
}

#[test]
fn a_lap_that_takes_long_leaves_the_next_one_to_another_vring() {
    let (mut worker, _driver, pushed) = slow_worker(true, 2, CompletionPolicy::Interrupt);
    for served in [&[0][..], &[0, 1]] {
        lap_beside_others(&mut worker).unwrap();
        let mut lanes = pushed.borrow().clone();
        lanes.dedup();
        assert_eq!(lanes, served, "{:?}", pushed.borrow());
    }
}

/// Each answer is a byte in a page that nobody has touched.
#[test]
fn a_lap_beside_other_disks_collects_little_that_takes_long() {
    let (mut worker, driver, _pushed) = slow_worker(false, 1, CompletionPolicy::Interrupt);
    let ended = laps_until_rest(&mut worker, || usize::from(driver.used_index()));
    assert_eq!(ended.iter().sum::<usize>(), usize::from(SIZE), "{ended:?}");
    // What has ended by the begin of the lap, and what ends in it.
    assert!(ended.iter().all(|ended| *ended <= 4 + 4), "{ended:?}");
}
