//! Acceptance turn by turn: what changes while a batch is taken counts for the chains that come after
//! it, and a busy vring leaves room for the others.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cleave_blk::{Op, OpKind, Plan};
use cleave_engine::{Done, Reactor, Store, Wait};
use cleave_guest::{Epoch, Memory};
use cleave_worker::{Control, Device, VringStart, Worker, reactor};

use crate::driver::{Ask, Driver};
use crate::{Bench, FEATURES, device, event, quiet};

/// Ends every op at once, and does one thing to the world in the middle of the first.
struct Meddler {
    /// Ops that it takes at once.
    ops: usize,
    /// It does each op here and now.
    on_the_spot: bool,
    /// Kind and token of each op.
    pushed: Rc<RefCell<Vec<(OpKind, u64)>>>,
    meddle: Option<Box<dyn FnOnce()>>,
    ended: Vec<u64>,
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

/// A worker that serves a store, and what commands it.
fn worker_with(
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

/// A vring on the driver's ring, from its beginning.
fn vring(index: u16) -> VringStart {
    VringStart {
        index,
        layout: Driver::layout(),
        base: 0,
        journal: None,
        features: FEATURES,
        kick: Some(event()),
        call: None,
        err: None,
        enabled: true,
    }
}

/// The frontend switches the cache off and is answered; the write that the guest makes available
/// after that is durable by itself, though the worker was in the midst of a batch.
#[test]
fn a_write_after_the_cache_went_off_is_durable_within_the_same_batch() {
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
    let started = control.start(vring(0));
    let ask = Ask::write(0, vec![1; 512], 512, false);
    driver.borrow_mut().submit(&ask).unwrap();
    worker.lap().unwrap();
    started.wait().unwrap().unwrap();
    worker.lap().unwrap();
    let expected = [false, true].map(|durable| OpKind::Write { durable });
    // Behind them comes the sync that makes up for the first.
    let kinds: Vec<_> = pushed.borrow().iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds[..2], expected);
}

/// Two vrings of one worker, the first always with more than the engine takes.
#[test]
fn a_vring_that_fills_the_engine_leaves_turns_to_the_others() {
    let device = device(cleave_worker::Split::Off);
    let mut driver = Driver::new();
    let memory = driver.memory();
    let pushed = Rc::default();
    let store = Meddler {
        ops: Plan::OPS_MAX,
        on_the_spot: false,
        pushed: Rc::clone(&pushed),
        meddle: None,
        ended: Vec::new(),
    };
    let (mut worker, control) = worker_with(store, device, memory);
    // Both look at the same ring, so that both have the same work.
    for index in 0..2 {
        let _started = control.start(vring(index));
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

/// An idle drive is to get its first requests soon, so a batch for it is short. One that is done on the spot
/// has no drive to wait for it, and is as long as a guest that is awake makes good use of.
#[test]
fn a_batch_on_the_spot_is_not_cut_short_for_an_idle_drive() {
    for (on_the_spot, batch) in [(false, 8), (true, 16)] {
        let mut driver = Driver::new();
        let memory = driver.memory();
        let store = Meddler {
            ops: 4 * Plan::OPS_MAX,
            on_the_spot,
            pushed: Rc::default(),
            meddle: None,
            ended: Vec::new(),
        };
        let device = device(cleave_worker::Split::Off);
        let (mut worker, control) = worker_with(store, device, memory);
        let _started = control.start(vring(0));
        worker.lap().unwrap();
        for sector in 0..20 {
            driver.submit(&Ask::read(sector, 512, 512, true)).unwrap();
        }
        worker.lap().unwrap();
        assert_eq!(driver.collect(|_| 512).len(), batch);
    }
}

/// Chains as long as can be are many thousand descriptors each: a lap reads a bounded number of them, so that
/// commands and completions do not wait.
#[test]
fn a_lap_reads_no_more_descriptors_than_it_may() {
    let mut bench = Bench::new(quiet(1), FEATURES);
    bench.driver.submit_longest(9);
    let mut used = Vec::new();
    for _ in 0..8 {
        bench.lap();
        used.push(bench.driver.used_index());
    }
    assert_eq!(used, [2, 4, 6, 8, 9, 9, 9, 9]);
}
