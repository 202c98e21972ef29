//! Named pools: a few threads, each pinned to a CPU, that run the workers of many disks. Nothing of one disk is shared
//! with another but the thread and the sleep. Each worker keeps its own rings, store and vrings, so a fault, a panic or
//! a hanging disk ends or delays its own session only.
//!
//! This file places workers on threads. `start.rs` hands a worker over, `thread.rs` is the loop, `seat.rs` is one worker
//! in it.

mod seat;
mod start;
#[cfg(test)]
mod tests;
mod thread;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleave_engine::Neighbours;
use rustix::event::{EventfdFlags, eventfd};

use crate::thread::contention::CoreContention;
use crate::thread::cpu::share;
use crate::wake::signal;
pub(crate) use start::PoolMember;
use thread::{Admission, Thread};

/// Threads that serve many disks.
#[derive(Debug)]
pub struct Pool {
    name: String,
    cpus: Vec<usize>,
    threads: Vec<Remote>,
    neighbours: Arc<Neighbours>,
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
            neighbours: Arc::default(),
            threads,
        }))
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the CPUs of its threads.
    pub fn cpus(&self) -> &[usize] {
        &self.cpus
    }

    /// Returns the number of workers on each thread.
    pub fn workers(&self) -> Vec<usize> {
        self.lock().iter().map(Vec::len).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Vec<DiskKey>>> {
        self.placed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pool {
    /// Ends the threads: they end with their last worker. They are not waited for, because the last reference may be one of
    /// theirs.
    fn drop(&mut self) {
        for Remote { admissions, bell } in self.threads.drain(..) {
            drop(admissions);
            signal(&bell);
        }
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
    fn take(pool: Arc<Pool>, disk: DiskKey) -> Place {
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
