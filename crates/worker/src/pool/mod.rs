//! Named pools: a few threads, each pinned to a CPU, that run the workers of many disks. Nothing of one disk is shared
//! with another but the thread and the sleep. Each worker keeps its own rings, store and vrings, so a fault, a panic or
//! a hanging disk ends or delays its own session only.
//!
//! This file is control's side: it places a worker on a thread and hands it over. `thread.rs` is the loop, `member.rs`
//! is one worker in it.

mod member;
#[cfg(test)]
mod tests;
mod thread;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleave_disk::Backing;
use cleave_engine::{AnyStore, ClosedRing, Prepared, Reactor, Store, Visitor, share_thread};
use cleave_guest::Memory;
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::command::Commands;
use crate::contention::CoreContention;
use crate::handle::{self, Runs, SpawnError};
use crate::pacing::Waiting;
use crate::worker::{BELLS, WATCHES, Worker, signal};
use crate::{Control, Device, Handle};
use member::Seat;
use thread::{Admission, Thread};

/// Threads that serve many disks.
#[derive(Debug)]
pub struct Pool {
    name: String,
    cpus: Vec<usize>,
    threads: Vec<Remote>,
    /// For each thread: the disk of each worker that is placed on it.
    placed: Mutex<Vec<Vec<DiskKey>>>,
}

/// Control's side of a thread.
#[derive(Debug)]
struct Remote {
    admissions: Sender<Admission>,
    bell: Arc<OwnedFd>,
}

/// Tells disks apart: the address of the device, which lives for as long as a worker of it is placed.
type DiskKey = usize;

impl Pool {
    /// Starts a thread on each of these CPUs. Each calls `at_start` before it serves anything; its rings are made by
    /// other threads, so it can be confined by then.
    pub fn new(
        name: &str,
        cpus: &[usize],
        at_start: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Arc<Pool>> {
        let at_start = Arc::new(at_start);
        let threads = (0..).zip(cpus).map(|(number, cpu)| {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            let bell = Arc::new(eventfd(0, flags)?);
            let (admissions, taken) = channel();
            let epoll = thread::epoll(&bell)?;
            let (cpu, at_start, called) = (*cpu, at_start.clone(), bell.clone());
            let spawned = std::thread::Builder::new().name(format!("p{number}-{name}"));
            spawned.spawn(move || {
                share(cpu);
                let contention = CoreContention::of_this_thread();
                at_start();
                Thread::new(epoll, called, taken).run(&Arc::new(contention));
            })?;
            Ok(Remote { admissions, bell })
        });
        let threads: Vec<_> = threads.collect::<io::Result<_>>()?;
        Ok(Arc::new(Pool {
            name: name.to_owned(),
            cpus: cpus.to_vec(),
            placed: Mutex::new(vec![Vec::new(); threads.len()]),
            threads,
        }))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The CPUs of its threads.
    pub fn cpus(&self) -> &[usize] {
        &self.cpus
    }

    /// Number of workers on each thread.
    pub fn workers(&self) -> Vec<usize> {
        self.lock().iter().map(Vec::len).collect()
    }

    /// Starts worker `number` of a disk on one of the threads. The rest is as for [`Handle::spawn`].
    pub(crate) fn start(
        self: &Arc<Self>,
        number: usize,
        device: Arc<Device>,
        memory: Arc<Memory>,
        alarm: Arc<OwnedFd>,
    ) -> Result<Handle, SpawnError> {
        if matches!(device.disk.backing(), Backing::Model { .. }) {
            let why = "a modelled disk waits by itself, so no pool serves it";
            return Err(io::Error::other(why).into());
        }
        self.place(device, memory, alarm, move |newcomer, reactor| {
            newcomer.open(number, reactor)
        })
    }

    /// Makes the rings of a worker here, because that takes time, and has `seat` make the worker on its thread.
    fn place(
        self: &Arc<Self>,
        device: Arc<Device>,
        memory: Arc<Memory>,
        alarm: Arc<OwnedFd>,
        seat: impl FnOnce(Newcomer, Reactor) -> Result<Seat, SpawnError> + Send + 'static,
    ) -> Result<Handle, SpawnError> {
        let (control, commands) = Control::channel()?;
        let prepared = Prepared::new(&[&device.disk], handle::ops(&device), WATCHES, BELLS)?;
        let place = Place::take(self.clone(), &device);
        let held = device.clone();
        let (made, outcome) = sync_channel(1);
        let (leaves, gone) = channel();
        let has_ended = Arc::new(AtomicBool::new(false));
        let shared = has_ended.clone();
        let admission: Admission = Box::new(move |contention| {
            let reactor = prepared.enable(&leaves).map_err(SpawnError::from);
            let newcomer = Newcomer {
                device,
                memory,
                commands,
                alarm,
                contention: contention.clone(),
                has_ended: shared,
                leaves,
            };
            let (seat, answer) = match reactor.and_then(|reactor| seat(newcomer, reactor)) {
                Ok(seat) => (Some(seat), Ok(())),
                Err(error) => (None, Err(error)),
            };
            // The caller waits for this single answer.
            let _ = made.send(answer);
            seat
        });
        let ended = || SpawnError::Thread(io::Error::other("the pool's thread has ended"));
        let remote = self.threads.get(place.thread).ok_or_else(ended)?;
        remote.admissions.send(admission).map_err(|_| ended())?;
        signal(&remote.bell);
        outcome.recv().map_err(|_| ended())??;
        let runs = Runs::InPool(Member {
            has_ended,
            gone,
            _device: held,
            _place: place,
        });
        Ok(Handle::new(control, runs))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Vec<DiskKey>>> {
        self.placed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pool {
    /// Its threads end with their last worker. They are not waited for, because the last reference may be one of
    /// theirs.
    fn drop(&mut self) {
        for Remote { admissions, bell } in self.threads.drain(..) {
            drop(admissions);
            signal(&bell);
        }
    }
}

/// Pins this thread to its CPU, and prepares it for the rings of many disks.
fn share(cpu: usize) {
    let reach = sched_getaffinity(None);
    let others = reach.map(|reach| {
        let all = 0..CpuSet::MAX_CPU;
        all.filter(|other| *other != cpu && reach.is_set(*other))
            .collect::<Vec<_>>()
    });
    if let Err(error) = share_thread(&others.unwrap_or_default()) {
        tracing::warn!("a pool's disks may wait for each other: {error}");
    }
    handle::pin(Some(cpu));
}

/// Control's side of a worker in a pool.
#[derive(Debug)]
pub(crate) struct Member {
    has_ended: Arc<AtomicBool>,
    /// Receives the rings of the worker, and is disconnected when the worker is gone.
    gone: Receiver<ClosedRing>,
    /// Keeps the pool's thread from dropping the last reference.
    _device: Arc<Device>,
    _place: Place,
}

impl Member {
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Waits until the worker is gone, and closes its rings.
    pub(crate) fn wait(&self) {
        self.gone.iter().for_each(drop);
    }
}

/// A worker's place on a thread.
#[derive(Debug)]
struct Place {
    pool: Arc<Pool>,
    thread: usize,
    disk: DiskKey,
}

impl Place {
    /// Takes a place on the thread that has the fewest workers of this disk, and among those on the one that has the
    /// fewest at all.
    fn take(pool: Arc<Pool>, device: &Arc<Device>) -> Place {
        let disk: DiskKey = Arc::as_ptr(device).addr();
        let mut placed = pool.lock();
        let load =
            |on: &Vec<DiskKey>| (on.iter().filter(|other| **other == disk).count(), on.len());
        let least = (0..).zip(placed.iter_mut()).min_by_key(|(_, on)| load(on));
        let thread = least.map_or(0, |(thread, on)| {
            on.push(disk);
            thread
        });
        drop(placed);
        Place { pool, thread, disk }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut placed = self.pool.lock();
        if let Some(on) = placed.get_mut(self.thread)
            && let Some(at) = on.iter().position(|other| *other == self.disk)
        {
            on.swap_remove(at);
        }
    }
}

/// All that a worker needs at its start, on its thread.
struct Newcomer {
    device: Arc<Device>,
    memory: Arc<Memory>,
    commands: Commands,
    alarm: Arc<OwnedFd>,
    contention: Arc<CoreContention>,
    has_ended: Arc<AtomicBool>,
    leaves: Sender<ClosedRing>,
}

impl Newcomer {
    /// Opens the store of worker `number` and makes the worker.
    fn open(self, number: usize, mut reactor: Reactor) -> Result<Seat, SpawnError> {
        let ops = handle::ops(&self.device);
        let store = AnyStore::open(&mut reactor, &self.device.disk, number, ops)?;
        let newcomer = self;
        store.visit(MakeSeat { newcomer, reactor })
    }

    /// Makes the worker over a store.
    fn seat<S: Store + 'static>(self, reactor: Reactor, store: S) -> Result<Seat, SpawnError> {
        let alarm = self.alarm.clone();
        let worker = Worker::with(
            reactor,
            store,
            self.device,
            self.memory,
            self.commands,
            self.alarm,
            Waiting::beside_others(self.contention),
        );
        let worker = Box::new(worker?);
        Ok(Seat::new(worker, alarm, self.has_ended, self.leaves))
    }
}

/// Makes a worker once there is a store.
struct MakeSeat {
    newcomer: Newcomer,
    reactor: Reactor,
}

impl Visitor for MakeSeat {
    type Output = Result<Seat, SpawnError>;

    fn visit<S: Store + 'static>(self, store: S) -> Result<Seat, SpawnError> {
        self.newcomer.seat(self.reactor, store)
    }
}
