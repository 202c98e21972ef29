use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleave_blk::Op;
use cleave_engine::{Done, Reactor, Store, Wait};
use cleave_guest::{Epoch, Memory};
use rustix::thread::sched_getcpu;

use super::*;
use crate::thread::handle::Runs;
use crate::{Device, Handle, Pending};

/// A store that panics when it is used, with or without something in flight, or whose disk hangs until it is told otherwise.
enum Bad {
    Mistaken,
    /// Set when the store is told to give up what other workers wait for.
    Lost(Arc<AtomicBool>),
    Hanging(Arc<AtomicBool>),
    /// Panics as soon as it has an op, and has it in flight.
    Busy(bool),
}

impl Store for Bad {
    fn room(&self) -> usize {
        1
    }
    fn in_flight(&self) -> usize {
        match self {
            Bad::Mistaken => 0,
            Bad::Lost(_) => 1,
            Bad::Hanging(hangs) => usize::from(hangs.load(Ordering::Relaxed)),
            Bad::Busy(is_busy) => usize::from(*is_busy),
        }
    }
    fn push(&mut self, _: &mut Reactor, _: &Epoch, _: Op<'_>, _: u64) {
        if let Bad::Busy(is_busy) = self {
            *is_busy = true;
        }
    }
    fn reap(&mut self) -> Option<Done> {
        None
    }
    fn is_ready(&self) -> bool {
        false
    }
    fn before_enter(&mut self, _: &mut Reactor, _: Wait) -> Option<Duration> {
        match self {
            Bad::Mistaken | Bad::Lost(_) | Bad::Busy(true) => panic!("told to panic"),
            Bad::Hanging(_) | Bad::Busy(false) => Some(Duration::from_millis(1)),
        }
    }
    fn release_shared(&mut self) {
        if let Bad::Lost(is_released) = self {
            is_released.store(true, Ordering::SeqCst);
        }
    }
}

fn pool(threads: usize) -> Arc<Pool> {
    Pool::new("test", &vec![sched_getcpu(); threads], || ()).unwrap()
}

fn device(pool: &Arc<Pool>) -> Arc<Device> {
    Arc::new(Device::ram().in_pool(Some(pool.clone())))
}

fn event() -> Arc<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Arc::new(eventfd(0, flags).unwrap())
}

fn memory() -> Arc<Memory> {
    Memory::new(Vec::new()).unwrap()
}

/// Starts a worker beside whatever else the pool runs, and its alarm.
fn good(pool: &Arc<Pool>) -> (Handle, Arc<OwnedFd>) {
    let alarm = event();
    let handle = Handle::spawn(0, None, device(pool), memory(), alarm.clone()).unwrap();
    (handle, alarm)
}

fn bad(pool: &Arc<Pool>, store: Bad) -> (Handle, Arc<OwnedFd>) {
    bad_of(pool, device(pool), store)
}

fn bad_of(pool: &Arc<Pool>, device: Arc<Device>, store: Bad) -> (Handle, Arc<OwnedFd>) {
    let alarm = event();
    let placed = pool.place(device, memory(), alarm.clone(), |newcomer, reactor| {
        newcomer.seat(reactor, store)
    });
    let (control, member) = placed.unwrap();
    (Handle::new(control, Runs::InPool(member)), alarm)
}

fn is_rung(alarm: &OwnedFd) -> bool {
    rustix::io::read(alarm, &mut [0; 8]).is_ok()
}

/// Returns true if the condition becomes true before the test gives up.
fn becomes(is_so: impl Fn() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        if is_so() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

#[test]
fn a_panic_ends_its_worker_and_no_other_on_the_thread() {
    let pool = pool(1);
    let (first, first_alarm) = good(&pool);
    let (mistaken, alarm) = bad(&pool, Bad::Mistaken);
    let (second, second_alarm) = good(&pool);
    assert!(becomes(|| mistaken.has_ended()));
    assert!(becomes(|| is_rung(&alarm)));
    assert_eq!(mistaken.pass().wait(), None, "a dead worker answers");
    drop(mistaken);
    for (handle, alarm) in [(first, first_alarm), (second, second_alarm)] {
        assert_eq!(handle.pass().wait(), Some(()));
        assert!(!handle.has_ended() && !is_rung(&alarm));
    }
    assert_eq!(pool.workers(), [0]);
}

/// Its control makes bells for such a thread, which no frontend can put to sleep.
#[test]
fn the_thread_of_a_worker_in_a_pool_counts_as_shared() {
    let pool = pool(1);
    let (pooled, _alarm) = good(&pool);
    let alone = Handle::spawn(0, None, Arc::new(Device::ram()), memory(), event()).unwrap();
    assert_eq!((pooled.is_shared, alone.is_shared), (true, false));
}

/// Its session unmaps the guest, which takes too long for a thread that serves others.
#[test]
fn a_worker_that_has_ended_holds_no_memory() {
    let pool = pool(1);
    let memory = memory();
    let worker = Handle::spawn(0, None, device(&pool), memory.clone(), event()).unwrap();
    assert_eq!(worker.pass().wait(), Some(()));
    assert_eq!(Arc::strong_count(&memory), 2);
    drop(worker);
    assert_eq!(Arc::strong_count(&memory), 1);
}

/// Nothing can be said of what it has in flight, so it is left behind; its session ends all the same, and is the last.
#[test]
fn nobody_waits_for_a_worker_that_fails_while_it_winds_down() {
    let pool = pool(1);
    let device = device(&pool);
    let is_released = Arc::new(AtomicBool::new(false));
    let (lost, _alarm) = bad_of(&pool, device.clone(), Bad::Lost(is_released.clone()));
    assert!(becomes(|| lost.has_ended()));
    let (other, alarm) = good(&pool);
    assert_eq!(other.pass().wait(), Some(()));
    let ending = std::thread::spawn(move || lost.pass().wait());
    assert!(becomes(|| ending.is_finished()));
    assert_eq!(ending.join().unwrap(), None);
    assert!(device.is_lost());
    assert!(becomes(|| pool.workers() == [1]));
    assert!(is_released.load(Ordering::SeqCst));
    assert!(!other.has_ended() && !is_rung(&alarm));
}

/// The session of a guest that moves waits for the flush, also while the disk's server is away.
#[test]
fn nobody_waits_for_the_flush_of_a_worker_that_fails() {
    let pool = pool(1);
    let device = device(&pool);
    let (busy, _alarm) = bad_of(&pool, device.clone(), Bad::Busy(false));
    assert_eq!(busy.pass().wait(), Some(()));
    let waiting: Vec<_> = device.sync().into_iter().chain(device.sync()).collect();
    assert_eq!(waiting.len(), 2);
    let ending = std::thread::spawn(move || waiting.into_iter().map(Pending::wait).collect());
    assert!(becomes(|| ending.is_finished()));
    let answers: Vec<Option<_>> = ending.join().unwrap();
    assert_eq!(answers, [None, None]);
    assert!(becomes(|| busy.has_ended()) && device.is_lost());
}

#[test]
fn a_worker_whose_disk_hangs_ends_later_and_delays_no_other() {
    let pool = pool(1);
    let hangs = Arc::new(AtomicBool::new(true));
    let (hanging, _alarm) = bad(&pool, Bad::Hanging(hangs.clone()));
    let ending = std::thread::spawn(move || drop(hanging));
    for _ in 0..100 {
        let (handle, alarm) = good(&pool);
        assert_eq!(handle.pass().wait(), Some(()));
        assert!(!is_rung(&alarm));
    }
    assert!(!ending.is_finished(), "it ended with an op in flight");
    assert_eq!(pool.workers(), [1]);
    hangs.store(false, Ordering::Relaxed);
    ending.join().unwrap();
    assert_eq!(pool.workers(), [0]);
}

#[test]
fn workers_are_spread_over_the_threads() {
    let pool = pool(3);
    let start = |device: &Arc<Device>, number| {
        Handle::spawn(number, None, device.clone(), memory(), event()).unwrap()
    };
    let (one, two) = (device(&pool), device(&pool));
    let _first = start(&one, 0);
    let _second = [0, 1, 2].map(|number| start(&two, number));
    assert_eq!(pool.workers(), [2, 1, 1]);
    // No thread has two workers of a disk while another has none.
    let _third = [1, 2].map(|number| start(&one, number));
    assert_eq!(pool.workers(), [2, 2, 2]);
    let (fourth, _alarm) = good(&pool);
    drop(_second);
    assert_eq!(pool.workers(), [2, 1, 1]);
    drop(fourth);
}

#[test]
fn the_threads_of_a_pool_are_pinned_and_call_the_hook_first() {
    let (told, seen) = channel();
    let hook = move || {
        let name = std::thread::current().name().map(str::to_owned);
        let _ = told.send((name, sched_getcpu()));
    };
    let cpu = sched_getcpu();
    let pool = Pool::new("hooked", &[cpu], hook).unwrap();
    let _worker = good(&pool);
    assert_eq!(seen.try_recv(), Ok((Some("p0-hooked".to_owned()), cpu)));
}
