//! A modelled drive on the real clock: the data is in memory, and ops complete when the drive's arithmetic says so.
//!
//! A write's data is written when the op completes, so it cannot be seen earlier. A read's data is copied while the
//! op waits for the drive, like a drive's own transfer, so the copy adds no time. Ops complete in the drive's order.
//! All engines of the disk share one drive behind a lock that is held briefly. The lock is an exception to the contract of
//! `Store`, because a model is not a data path.
//!
//! The thread waits in the ring, so kicks and commands still wake it. A timer is too inexact for 85 us, so
//! the sleep ends [`SPIN_NS`] before the earliest possible completion, and the thread spins for the rest.
//!
//! Unsafe because data is moved between the store's bytes and guest memory, which the epoch in an op's entry keeps mapped.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleave_blk::{Op, OpKind};
use cleave_disk::model::{DriveWork, Owner, SharedDrive};
use cleave_disk::{Backing, Disk};
use cleave_guest::Epoch;
use rustix::time::{ClockId, clock_gettime};

use super::parts;
use super::ram::Bytes;
use crate::ops::lap::LapBudget;
use crate::ops::queue::{OpQueue, from_ops};
use crate::ops::table::Entry;
use crate::{EngineError, Reactor, Store, Wait};

/// Largest expected delay of a timer: a sleep ends this long before a completion.
const SPIN_NS: u64 = 60_000;
/// Sleep between two rounds of spinning if a completion is later than predicted.
const SLEEP_NS: u64 = 50_000;
/// Longest sleep of a dropped engine that waits for its ops.
const DROP_SLEEP_MAX: Duration = Duration::from_millis(10);

/// An op in the drive.
#[derive(Debug, Clone, Default)]
struct Driven {
    /// Result of moving its data, once moved.
    moved: Option<Result<(), i32>>,
    /// The drive's number for it. `None`: it is not in the drive.
    number: Option<u32>,
}

/// Returns true for a read in the drive whose data can be copied already.
fn is_early(entry: &Entry<Driven>) -> bool {
    entry.own.number.is_some() && entry.own.moved.is_none() && entry.kind == OpKind::Read
}

/// Ops on a modelled drive.
#[derive(Debug)]
pub struct Model {
    disk: Arc<Disk>,
    bytes: Bytes,
    drive: Arc<Mutex<SharedDrive>>,
    owner: Owner,
    ops: OpQueue<Driven>,
    /// Ops that the drive has completed and that are not finished yet.
    ended: VecDeque<u32>,
    /// Reads among them whose data has not been copied yet.
    early: usize,
}

impl Model {
    /// For a modelled disk; `ops`: most ops in flight. Makes the thread's timers as exact as possible.
    pub fn new(disk: Arc<Disk>, ops: u16) -> Result<Model, EngineError> {
        let refuse = |remedy, kind: io::ErrorKind| EngineError::Setup {
            remedy,
            source: kind.into(),
        };
        let Backing::Model { ram, drive } = disk.backing() else {
            let remedy = "this disk is not a modelled drive";
            return Err(refuse(remedy, io::ErrorKind::InvalidInput));
        };
        let (bytes, drive) = (Bytes::new(ram), Arc::clone(drive));
        let queue = OpQueue::new(&disk, ops, 0, Driven::default())?;
        let owner = lock(&drive).join().ok_or_else(|| {
            let remedy = "this modelled drive has its maximum number of workers";
            refuse(remedy, io::ErrorKind::OutOfMemory)
        })?;
        // Without it, only precision is lost.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        Ok(Model {
            ops: queue,
            disk,
            bytes,
            drive,
            owner,
            ended: VecDeque::with_capacity(usize::from(ops)),
            early: 0,
        })
    }

    /// The drive, for inspection or for a change while it runs.
    pub fn drive(&self) -> MutexGuard<'_, SharedDrive> {
        lock(&self.drive)
    }

    /// Adds an op to the queue and gives it to the drive. `Err`: the op ends here.
    fn admit(&mut self, epoch: &Epoch, op: &Op<'_>, token: u64) -> Result<(), i32> {
        let range = (op.offset_bytes, op.len_bytes);
        self.bytes.check(&self.disk, op)?;
        let lap = &mut LapBudget::unlimited();
        let index = self
            .ops
            .admit(lap, epoch, op, token, range, |_memory| Driven::default())?;
        let name = (&self.owner, u32::from(index));
        let mut drive = lock(&self.drive);
        // The clock is read under the lock, so that submission times never decrease.
        let number = drive.submit(now_ns(), name, work(op.kind), range.0, range.1);
        let entry = self.ops.get_mut(index);
        entry.own.number = Some(number);
        self.early += usize::from(is_early(entry));
        Ok(())
    }

    /// Collects the ops that the drive has completed by now.
    fn collect(&mut self) {
        if self.ops.unfinished() == 0 {
            return;
        }
        lock(&self.drive).collect(now_ns(), &self.owner, &mut self.ended);
        while let Some(token) = self.ended.pop_front() {
            self.finish(token as u16);
        }
    }

    /// Moves the data of an op unless that is done, and reports it.
    fn finish(&mut self, index: u16) {
        let entry = self.ops.get_mut(index);
        self.early -= usize::from(is_early(entry));
        entry.own.number = None;
        let moved = entry.own.moved;
        let result = moved.unwrap_or_else(|| self.transfer(index));
        self.ops.finish(index, result);
    }

    /// Moves the data of an op between the drive's bytes and guest memory.
    fn transfer(&mut self, index: u16) -> Result<(), i32> {
        let bytes = self.bytes;
        let change = |kind, offset, start, len| {
            // SAFETY: `admit` checked that the op's range is in the mapping, and the op's epoch keeps its memory mapped.
            unsafe { bytes.change(kind, offset, start, len) };
        };
        // No op is longer than that.
        parts::run(&mut self.ops, index, u64::MAX, change).unwrap_or(Err(libc::EIO))
    }

    /// Collects ops, and returns the earliest time at which another may complete. Both happen under one lock,
    /// because an op that has completed and is not collected has no number any more.
    fn collect_and_look(&mut self) -> Option<u64> {
        let floor_ns = {
            let mut drive = lock(&self.drive);
            drive.collect(now_ns(), &self.owner, &mut self.ended);
            if self.ended.is_empty() {
                let numbers = self.ops.entries().filter_map(|(_, entry)| entry.own.number);
                numbers.filter_map(|number| drive.floor_ns(number)).min()
            } else {
                None
            }
        };
        while let Some(token) = self.ended.pop_front() {
            self.finish(token as u16);
        }
        floor_ns
    }

    /// Uses the waiting time: copies the data of one read.
    fn copy_early(&mut self) {
        if self.early == 0 {
            return;
        }
        let early = self.ops.entries().find(|(_, entry)| is_early(entry));
        if let Some((index, _)) = early {
            let moved = self.transfer(index);
            self.ops.get_mut(index).own.moved = Some(moved);
            self.early -= 1;
        }
    }

    /// Waits for an event or the deadline. `None`: the drive is empty, so the reactor waits.
    fn wait(&mut self, reactor: &mut Reactor, deadline: Option<Instant>) -> io::Result<Option<()>> {
        let mut spin_until_ns = None;
        loop {
            if self.ops.is_ready() || reactor.has_events() {
                return Ok(Some(()));
            }
            if self.ops.unfinished() == 0 {
                return Ok(None);
            }
            if deadline.is_some_and(|at| at <= Instant::now()) {
                return Ok(Some(()));
            }
            let now = now_ns();
            if spin_until_ns.is_some_and(|until| now < until) {
                std::hint::spin_loop();
                reactor.submit_and_sleep(Duration::ZERO)?;
                self.collect();
                continue;
            }
            let Some(floor_ns) = self.collect_and_look() else {
                continue;
            };
            let wake_ns = floor_ns.saturating_sub(SPIN_NS);
            if wake_ns > now && self.early > 0 {
                self.copy_early();
                continue;
            }
            let sleep_ns = match spin_until_ns.take() {
                _ if wake_ns > now => wake_ns.saturating_sub(now_ns()),
                // A completion is later than predicted. Sleep, so that a model never occupies a CPU.
                Some(_) => SLEEP_NS,
                None => {
                    spin_until_ns = Some(floor_ns.max(now).saturating_add(SPIN_NS));
                    continue;
                }
            };
            let sleep = Duration::from_nanos(sleep_ns);
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            reactor.submit_and_sleep(left.map_or(sleep, |left| left.min(sleep)))?;
            self.collect();
        }
    }
}

impl Store for Model {
    from_ops!(room, in_flight, reap, is_ready);

    fn push(&mut self, _reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64) {
        if let Err(errno) = self.admit(epoch, &op, token) {
            self.ops.end(token, Err(errno));
        }
    }

    /// The model waits by itself, more exactly than a timer. The reactor then need not sleep, unless the
    /// drive is empty.
    fn before_enter(&mut self, reactor: &mut Reactor, wait: Wait) -> Option<Duration> {
        // Write the bells first: the guest must not wait while this thread spins.
        let _ = reactor.submit_and_sleep(Duration::ZERO);
        self.collect();
        let waited = match wait {
            Wait::No => {
                self.copy_early();
                return None;
            }
            Wait::Until(deadline) => self.wait(reactor, deadline),
        };
        match waited {
            Ok(None) => None,
            // The error of a broken ring recurs when the reactor enters it.
            Ok(Some(())) | Err(_) => Some(Duration::ZERO),
        }
    }

    fn close(&mut self, _reactor: &mut Reactor) -> bool {
        self.drain();
        true
    }
}

impl Model {
    fn drain(&mut self) {
        while self.ops.unfinished() > 0 {
            let floor_ns = self.collect_and_look();
            let left_ns = floor_ns.map_or(0, |floor_ns| floor_ns.saturating_sub(now_ns()));
            std::thread::sleep(Duration::from_nanos(left_ns).min(DROP_SLEEP_MAX));
        }
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.drain();
        lock(&self.drive).leave(&self.owner);
    }
}

/// The drive's kind of work for an op. Zeroing is a map update, with or without `unmap`.
fn work(kind: OpKind) -> DriveWork {
    match kind {
        OpKind::Read => DriveWork::Read,
        OpKind::Write { durable } => DriveWork::Write { buffered: !durable },
        OpKind::Sync => DriveWork::Sync,
        OpKind::Discard | OpKind::Zero { .. } => DriveWork::Map,
    }
}

/// A panic elsewhere leaves the drive between two events; at worst, a time is wrong.
fn lock(drive: &Mutex<SharedDrive>) -> MutexGuard<'_, SharedDrive> {
    drive.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The clock that all engines of a drive share; it never decreases below zero.
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests;
