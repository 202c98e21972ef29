//! A modelled drive on the real clock: bytes in memory, ends when the drive's arithmetic says so.
//!
//! What an op writes is written when it ends, never earlier, so that nothing of it can be seen before; what it
//! reads is copied while it waits for the drive, as a drive's own transfer would be, so that the time which
//! copying takes is not added to the drive's. Ops end in the order in which the drive finishes them. The drive is one for all engines of the disk, behind
//! a lock that is held for moments: a model is no data path, and its lock and its segment lists (which
//! grow to the longest op seen, then no more) are its own exceptions from what an engine promises.
//!
//! Waiting is the ring's, so that kicks and commands end it as ever. A timer is not exact enough for
//! 85 us, so the sleep ends [`SPIN_NS`] before the first end that is possible, and the rest is spun.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleave_blk::{Op, OpKind, Segment};
use cleave_disk::model::{Owner, Shared, Work};
use cleave_disk::{Disk, Store};
use cleave_guest::Memory;
use rustix::time::{ClockId, clock_gettime};

use crate::memory::{Bindings, Generation};
use crate::onspot::{self, Ram};
use crate::{Engine, EngineError, Event, Uring, Wait};

/// What a timer may be late by: this long before an end the sleep is over.
const SPIN_NS: u64 = 60_000;
/// Sleep between two rounds of spinning where the end is later than could be known.
const NAP_NS: u64 = 50_000;
/// Longest sleep of an engine that is dropped and waits for its ops.
const DROP_NAP: Duration = Duration::from_millis(10);

/// An op in the drive.
#[derive(Debug)]
struct Slot {
    token: u64,
    kind: OpKind,
    offset_bytes: u64,
    len_bytes: u64,
    segments: Vec<Segment>,
    skip_bytes: u32,
    generation: Generation,
    /// What came of moving its data, where that is done.
    moved: Option<Result<(), i32>>,
    /// The drive's number of it; `None`: the slot is free.
    number: Option<u32>,
}

impl Slot {
    fn free() -> Slot {
        Slot {
            token: 0,
            kind: OpKind::Sync,
            offset_bytes: 0,
            len_bytes: 0,
            segments: Vec::new(),
            skip_bytes: 0,
            generation: Generation::default(),
            moved: None,
            number: None,
        }
    }

    fn fill(&mut self, op: &Op<'_>, token: u64, generation: Generation) {
        self.token = token;
        self.kind = op.kind;
        self.offset_bytes = op.offset_bytes;
        self.len_bytes = op.len_bytes;
        self.skip_bytes = op.skip_bytes;
        self.generation = generation;
        self.moved = None;
        self.segments.clear();
        // The segments may reach far beyond the op's end.
        let mut left = op.len_bytes.saturating_add(u64::from(op.skip_bytes));
        for segment in op.segments {
            if left == 0 {
                break;
            }
            left = left.saturating_sub(u64::from(segment.len));
            self.segments.push(*segment);
        }
    }

    /// A read in the drive whose data can be copied already.
    fn is_early(&self) -> bool {
        self.number.is_some() && self.moved.is_none() && self.kind == OpKind::Read
    }

    fn op(&self) -> Op<'_> {
        Op {
            kind: self.kind,
            leg: 0,
            offset_bytes: self.offset_bytes,
            len_bytes: self.len_bytes,
            segments: &self.segments,
            skip_bytes: self.skip_bytes,
        }
    }
}

/// Ops on a modelled drive.
#[derive(Debug)]
pub struct Model {
    /// For watches, bells and sleep; it is never given an op.
    ring: Uring,
    disk: Arc<Disk>,
    ram: Ram,
    drive: Arc<Mutex<Shared>>,
    owner: Owner,
    bindings: Bindings,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    /// Tokens of ops that the drive has finished, on their way to `ready`.
    ended: VecDeque<u32>,
    ready: VecDeque<Event>,
    /// Pushed and not yet reported.
    in_flight: usize,
    /// Of those, reads whose data was not copied yet.
    early: usize,
}

impl Model {
    /// As [`Uring::new`], for a disk that is modelled. The thread's timers become as exact as they can be.
    pub fn new(
        disk: Arc<Disk>,
        memory: Arc<Memory>,
        ops: u16,
        watches: u16,
        bells: u16,
    ) -> Result<Model, EngineError> {
        let refuse = |remedy, kind: io::ErrorKind| EngineError::Setup {
            remedy,
            source: kind.into(),
        };
        let Store::Model { ram, drive } = disk.store() else {
            let remedy = "this disk is no modelled drive";
            return Err(refuse(remedy, io::ErrorKind::InvalidInput));
        };
        let (ram, drive) = (Ram::new(ram), Arc::clone(drive));
        let ring = Uring::new(Arc::clone(&disk), Arc::clone(&memory), 1, watches, bells)?;
        let owner = lock(&drive).join().ok_or_else(|| {
            let remedy = "this modelled drive has as many workers as it can count";
            refuse(remedy, io::ErrorKind::OutOfMemory)
        })?;
        // Only precision is lost without.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        Ok(Model {
            ring,
            disk,
            ram,
            drive,
            owner,
            bindings: Bindings::new(memory),
            slots: (0..ops).map(|_| Slot::free()).collect(),
            free: (0..ops).rev().collect(),
            ended: VecDeque::with_capacity(usize::from(ops)),
            ready: VecDeque::with_capacity(usize::from(ops)),
            in_flight: 0,
            early: 0,
        })
    }

    /// The drive, to look at it or to change it while it runs.
    pub fn drive(&self) -> MutexGuard<'_, Shared> {
        lock(&self.drive)
    }

    /// Ops that the drive has.
    fn flying(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Takes a place in the table and gives the op to the drive. `Err`: it ends here.
    fn admit(&mut self, op: &Op<'_>, token: u64) -> Result<(), i32> {
        onspot::check(&self.disk, op)?;
        // The owner pushes only while there is room.
        let index = self.free.pop().ok_or(libc::EBUSY)?;
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return Err(libc::EBUSY);
        };
        slot.fill(op, token, self.bindings.acquire());
        let name = (&self.owner, u32::from(index));
        let (work, offset, len) = (work(op.kind), op.offset_bytes, op.len_bytes);
        let mut drive = lock(&self.drive);
        // The clock is read inside: what is submitted later is not earlier.
        slot.number = Some(drive.submit(now_ns(), name, work, offset, len));
        self.early += usize::from(slot.is_early());
        Ok(())
    }

    /// Ends what the drive has finished by now.
    fn collect(&mut self) {
        if self.flying() == 0 {
            return;
        }
        lock(&self.drive).collect(now_ns(), &self.owner, &mut self.ended);
        while let Some(token) = self.ended.pop_front() {
            self.finish(token as u16);
        }
    }

    /// Moves the data of an op, if that is not done, and reports it.
    fn finish(&mut self, index: u16) {
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return;
        };
        let is_early = slot.is_early();
        if slot.number.take().is_none() {
            return;
        }
        self.early -= usize::from(is_early);
        let result = slot
            .moved
            .unwrap_or_else(|| transfer(self.ram, &self.disk, &self.bindings, slot));
        self.bindings.release(slot.generation);
        self.ready.push_back(Event::Done {
            token: slot.token,
            result,
        });
        self.free.push(index);
    }

    /// Collects, and tells the first time at which another op may end. Both under one lock: an op that
    /// has finished and is not collected has no number any more.
    fn collect_and_look(&mut self) -> Option<u64> {
        let floor_ns = {
            let mut drive = lock(&self.drive);
            drive.collect(now_ns(), &self.owner, &mut self.ended);
            if self.ended.is_empty() {
                let numbers = self.slots.iter().filter_map(|slot| slot.number);
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

    /// Uses the time until something may end: copies what one op reads.
    fn copy_early(&mut self) {
        if self.early == 0 {
            return;
        }
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.is_early()) {
            slot.moved = Some(transfer(self.ram, &self.disk, &self.bindings, slot));
            self.early -= 1;
        }
    }

    /// Waits for an event or the deadline.
    fn wait(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let mut spin_until_ns = None;
        loop {
            if !self.ready.is_empty() || self.ring.has_events() {
                return Ok(());
            }
            if self.flying() == 0 {
                return self.ring.enter(Wait::Until(deadline));
            }
            if deadline.is_some_and(|at| at <= Instant::now()) {
                return Ok(());
            }
            let now = now_ns();
            if spin_until_ns.is_some_and(|until| now < until) {
                std::hint::spin_loop();
                self.ring.enter(Wait::No)?;
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
            let nap_ns = match spin_until_ns.take() {
                _ if wake_ns > now => wake_ns.saturating_sub(now_ns()),
                // Spun long enough for an end that does not come: so that a model never holds a CPU.
                Some(_) => NAP_NS,
                None => {
                    spin_until_ns = Some(floor_ns.max(now).saturating_add(SPIN_NS));
                    continue;
                }
            };
            let wake = Instant::now() + Duration::from_nanos(nap_ns);
            let wake = deadline.map_or(wake, |deadline| deadline.min(wake));
            self.ring.enter(Wait::Until(Some(wake)))?;
            self.collect();
        }
    }
}

impl Engine for Model {
    #[inline]
    fn room(&self) -> usize {
        self.slots.len().saturating_sub(self.in_flight)
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn push(&mut self, op: Op<'_>, token: u64) {
        debug_assert!(self.room() > 0);
        self.in_flight += 1;
        if let Err(errno) = self.admit(&op, token) {
            let result = Err(errno);
            self.ready.push_back(Event::Done { token, result });
        }
    }

    fn reap(&mut self) -> Option<Event> {
        if let Some(event) = self.ready.pop_front() {
            self.in_flight -= 1;
            return Some(event);
        }
        self.ring.reap()
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        // Bells first: nobody who was called waits for our spinning.
        self.ring.enter(Wait::No)?;
        self.collect();
        match wait {
            Wait::No => {
                self.copy_early();
                Ok(())
            }
            Wait::Until(deadline) => self.wait(deadline),
        }
    }

    fn watch(&mut self, slot: u16, fd: OwnedFd) {
        self.ring.watch(slot, fd);
    }

    fn unwatch(&mut self, slot: u16) {
        self.ring.unwatch(slot);
    }

    fn set_bell(&mut self, slot: u16, fd: Option<OwnedFd>) {
        self.ring.set_bell(slot, fd);
    }

    #[inline]
    fn ring(&mut self, slot: u16) {
        self.ring.ring(slot);
    }

    fn bind(&mut self, memory: Arc<Memory>) {
        self.bindings.bind(Arc::clone(&memory));
        self.ring.bind(memory);
    }

    fn is_settled(&self) -> bool {
        self.bindings.is_settled()
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        while self.flying() > 0 {
            let floor_ns = self.collect_and_look();
            let left_ns = floor_ns.map_or(0, |floor_ns| floor_ns.saturating_sub(now_ns()));
            std::thread::sleep(Duration::from_nanos(left_ns).min(DROP_NAP));
        }
        lock(&self.drive).leave(&self.owner);
    }
}

/// Moves the data of an op between the drive's bytes and the memory that it was given for.
fn transfer(ram: Ram, disk: &Disk, bindings: &Bindings, slot: &Slot) -> Result<(), i32> {
    match bindings.memory_of(slot.generation) {
        Some(memory) => onspot::ram(ram, disk, memory, &slot.op()),
        None => Err(libc::EFAULT),
    }
}

/// What an op is to the drive. Zeroes are a map update, whether the pages may go or not.
fn work(kind: OpKind) -> Work {
    match kind {
        OpKind::Read => Work::Read,
        OpKind::Write { durable } => Work::Write { buffered: !durable },
        OpKind::Sync => Work::Sync,
        OpKind::Discard | OpKind::Zero { .. } => Work::Map,
    }
}

/// A panic elsewhere leaves the drive as it was between two events, and the worst of it is a wrong time.
fn lock(drive: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    drive.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The clock that all engines of a drive share; never negative.
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests;
