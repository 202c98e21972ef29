//! A simulated engine for tests: same promises as `Uring`, with a seeded order of completion and
//! seeded faults, no threads and no I/O. A run is replayed by its seed, as long as the descriptors
//! that it watches are signalled between the same `enter`s; the clock only bounds a sleep.
//!
//! Time is counted in `enter`s. Each op draws two instants: when its data moves, and, then or later,
//! when it is reported. So the disk may change, and guest memory be written, well before the owner is
//! told, as with a real device.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cleave_blk::{Op, OpKind, Segment};
use cleave_guest::Memory;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;

use crate::{Engine, Event, Wait};

/// Longest sleep of an `enter` that has nothing in flight: the owner looks again, nobody hangs.
const SLEEP_MAX: Duration = Duration::from_millis(10);
/// Most writes that wait to become durable; beyond, the oldest does so by itself.
const UNSYNCED_MAX: usize = 256;

/// What the simulation does to ops.
#[derive(Debug, Clone)]
pub struct SimConfig {
    /// Replays the run.
    pub seed: u64,
    /// Most ops in flight.
    pub ops: usize,
    /// Share of ops that fail, in 1/1000: with EIO, those that write also with ENOSPC. An op that
    /// fails may have moved any beginning of its data.
    pub fail_per_mille: u32,
    /// The n-th op (counted from 0) that fails with EIO whatever `fail_per_mille` says.
    pub fail_at: Option<u64>,
    /// Most `enter`s that an op may stay in flight; at least one.
    pub delay_max: u32,
}

/// The bytes behind a `Sim`: `durable` is what would survive a power cut. A write becomes durable at
/// the latest with a sync that was pushed after its end; by chance earlier.
#[derive(Debug, Default)]
pub struct SimStore {
    /// Contents as reads see them.
    pub now: Vec<u8>,
    /// Contents as of the last sync, plus durable writes.
    pub durable: Vec<u8>,
    /// Writes in between, for the engines alone: starts as `Unsynced::default()`.
    pub unsynced: Unsynced,
    /// Bytes of each leg, which lie one behind the other in `now`; 0: there is one leg.
    pub leg_bytes: usize,
    /// Every op on this leg fails with EIO.
    pub failing_leg: Option<u16>,
    /// Ops on this leg take this many times as long.
    pub slow_leg: Option<(u16, u32)>,
}

/// Writes that a power cut may lose, oldest first.
#[derive(Debug, Default)]
pub struct Unsynced {
    /// Number of the next write.
    next: u64,
    writes: VecDeque<Change>,
}

#[derive(Debug)]
struct Change {
    number: u64,
    range: Range<usize>,
    bytes: Vec<u8>,
}

impl Change {
    fn overlaps(&self, other: &Change) -> bool {
        self.range.start < other.range.end && other.range.start < self.range.end
    }
}

impl SimStore {
    /// Where a leg's bytes lie; empty where there is no such leg.
    fn leg(&self, leg: u16) -> Range<usize> {
        match self.leg_bytes {
            0 if leg == 0 => 0..self.now.len(),
            0 => 0..0,
            bytes => {
                let start = bytes.saturating_mul(leg.into());
                let end = start.saturating_add(bytes);
                start..if end <= self.now.len() { end } else { start }
            }
        }
    }

    fn put(&mut self, offset: usize, bytes: Vec<u8>, durable: bool) {
        if bytes.is_empty() {
            return;
        }
        let range = offset..offset.saturating_add(bytes.len());
        let Some(window) = self.now.get_mut(range.clone()) else {
            return;
        };
        window.copy_from_slice(&bytes);
        let number = self.unsynced.next;
        self.unsynced.next += 1;
        self.unsynced.writes.push_back(Change {
            number,
            range,
            bytes,
        });
        if durable {
            self.harden(|change| change.number == number);
        } else if self.unsynced.writes.len() > UNSYNCED_MAX {
            let oldest = number - UNSYNCED_MAX as u64;
            self.harden(|change| change.number <= oldest);
        }
    }

    /// Makes the chosen writes durable, and of the others those that an overlapping chosen one would
    /// be older than: else they would come over it later and bring old bytes back.
    fn harden(&mut self, wanted: impl Fn(&Change) -> bool) {
        let mut chosen: Vec<Change> = Vec::new();
        let mut left = VecDeque::new();
        for change in self.unsynced.writes.drain(..).rev() {
            if wanted(&change) || chosen.iter().any(|later| later.overlaps(&change)) {
                chosen.push(change);
            } else {
                left.push_front(change);
            }
        }
        self.unsynced.writes = left;
        let len = self.durable.len().max(self.now.len());
        self.durable.resize(len, 0);
        for change in chosen.into_iter().rev() {
            if let Some(window) = self.durable.get_mut(change.range) {
                window.copy_from_slice(&change.bytes);
            }
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to `max`, both included.
    fn up_to(&mut self, max: u64) -> u64 {
        self.next() % max.saturating_add(1).max(1)
    }
}

/// An op in flight: all that its movement needs, so that a replaced memory stays until it has ended.
#[derive(Debug)]
struct Flight {
    token: u64,
    kind: OpKind,
    /// Bytes of the store that move: all, or a beginning where it fails.
    range: Range<usize>,
    segments: Vec<Segment>,
    memory: Arc<Memory>,
    generation: u64,
    result: Result<(), i32>,
    /// Of a sync: writes with smaller numbers had moved when it was pushed,
    covered: u64,
    /// and it is about those to its leg alone.
    leg: Range<usize>,
    moves_at: u64,
    ends_at: u64,
    has_moved: bool,
}

#[derive(Debug)]
struct Watch {
    fd: OwnedFd,
    /// Tells this watch from an earlier one of the slot.
    key: u64,
}

/// The simulated engine.
#[derive(Debug)]
pub struct Sim {
    config: SimConfig,
    store: Arc<Mutex<SimStore>>,
    memory: Arc<Memory>,
    /// Counts `bind`s.
    generation: u64,
    random: Random,
    /// `enter`s so far; a sleep that something in flight ends counts for as many as it takes.
    tick: u64,
    /// Ops so far.
    pushed: u64,
    flights: Vec<Flight>,
    /// What `reap` gives; of an op with the generation of its memory.
    ready: VecDeque<(Event, Option<u64>)>,
    /// Edge-triggered, so that a signal is seen once and its counter left alone.
    epoll: Result<OwnedFd, Errno>,
    watches: BTreeMap<u16, Watch>,
    watched: u64,
    bells: BTreeMap<u16, OwnedFd>,
    rung: BTreeSet<u16>,
}

impl Sim {
    /// Makes one over a store that several engines may share.
    pub fn new(config: SimConfig, store: Arc<Mutex<SimStore>>, memory: Arc<Memory>) -> Sim {
        Sim {
            random: Random(config.seed),
            config,
            store,
            memory,
            generation: 0,
            tick: 0,
            pushed: 0,
            flights: Vec::new(),
            ready: VecDeque::new(),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC),
            watches: BTreeMap::new(),
            watched: 0,
            bells: BTreeMap::new(),
            rung: BTreeSet::new(),
        }
    }

    /// Whether the op is made to fail. Draws as often for every op, so that one more failure does not
    /// change the rest of the run.
    fn fate(&mut self, kind: OpKind) -> Result<(), i32> {
        let number = self.pushed;
        self.pushed += 1;
        let is_unlucky = self.random.up_to(999) < u64::from(self.config.fail_per_mille);
        let errno = match (kind, self.random.up_to(1)) {
            (OpKind::Write { .. } | OpKind::Zero { .. }, 1) => Errno::NOSPC,
            _ => Errno::IO,
        };
        if self.config.fail_at == Some(number) {
            return Err(Errno::IO.raw_os_error());
        }
        if is_unlucky {
            return Err(errno.raw_os_error());
        }
        Ok(())
    }

    /// What the op asks for, where that can be done at all: its place on the store and its memory.
    fn parse(&self, op: &Op<'_>) -> Result<(Range<usize>, Vec<Segment>), Errno> {
        if op.kind == OpKind::Sync {
            return Ok((0..0, Vec::new()));
        }
        let leg = lock(&self.store).leg(op.leg);
        let start = usize::try_from(op.offset_bytes).map_err(|_| Errno::IO)?;
        let len = usize::try_from(op.len_bytes).map_err(|_| Errno::IO)?;
        let start = leg.start.checked_add(start).ok_or(Errno::IO)?;
        let end = start.checked_add(len).ok_or(Errno::IO)?;
        if end > leg.end {
            return Err(Errno::IO);
        }
        let segments = stream(op).ok_or(Errno::FAULT)?;
        if !segments.iter().all(|segment| self.memory.covers(*segment)) {
            return Err(Errno::FAULT);
        }
        Ok((start..end, segments))
    }

    /// One step of time: data moves, ops end in an order of the seed's.
    fn step(&mut self) {
        self.tick += 1;
        for flight in &mut self.flights {
            if !flight.has_moved && flight.moves_at <= self.tick {
                flight.has_moved = true;
                let moved = move_data(flight, &self.store);
                flight.result = flight.result.and(moved);
            }
        }
        self.write_back();
        loop {
            let due = |flight: &Flight| flight.ends_at <= self.tick;
            let count = self.flights.iter().filter(|flight| due(flight)).count();
            let Some(last) = count.checked_sub(1) else {
                break;
            };
            let nth = self.random.up_to(last as u64) as usize;
            let mut indices = (0..self.flights.len()).filter(|&i| due(&self.flights[i]));
            let Some(index) = indices.nth(nth) else {
                break;
            };
            let flight = self.flights.remove(index);
            self.end(&flight);
        }
    }

    /// A disk may write back whatever it likes, whenever it likes.
    fn write_back(&mut self) {
        let (chance, luck) = (self.random.up_to(15), self.random.next());
        if chance != 0 {
            return;
        }
        let mut store = lock(&self.store);
        let count = store.unsynced.writes.len().max(1) as u64;
        let change = store.unsynced.writes.get((luck % count) as usize);
        if let Some(number) = change.map(|change| change.number) {
            store.harden(|change| change.number == number);
        }
    }

    fn end(&mut self, flight: &Flight) {
        if flight.kind == OpKind::Sync {
            // What moved since the push may come along; of a failed sync, anything may.
            let salt = self.random.next();
            let is_lucky = |number: u64| Random(salt ^ number).up_to(1) == 1;
            let (covered, is_done) = (flight.covered, flight.result.is_ok());
            lock(&self.store).harden(|change| {
                let is_ours = flight.leg.contains(&change.range.start);
                is_ours && (is_done && change.number < covered || is_lucky(change.number))
            });
        }
        let event = Event::Done {
            token: flight.token,
            result: flight.result,
        };
        self.ready.push_back((event, Some(flight.generation)));
    }

    /// Collects signals of watched descriptors, in order of slots.
    fn look(&mut self, timeout: Duration) -> io::Result<()> {
        let epoll = self.epoll.as_ref().map_err(|errno| *errno)?;
        let timeout = Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let mut seen: Vec<epoll::Event> = Vec::with_capacity(self.watches.len().max(1));
        match epoll::wait(
            epoll,
            rustix::buffer::spare_capacity(&mut seen),
            Some(&timeout),
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let keys: BTreeSet<u64> = seen.iter().map(|event| { event.data }.u64()).collect();
        for (&slot, watch) in &self.watches {
            if keys.contains(&watch.key) {
                self.ready.push_back((Event::Woken { slot }, None));
            }
        }
        Ok(())
    }

    /// Writes each eventfd that was rung, once; one that is full is left so instead of waited for.
    fn ring_bells(&mut self) {
        for slot in std::mem::take(&mut self.rung) {
            let Some(fd) = self.bells.get(&slot) else {
                continue;
            };
            let mut ready = [PollFd::new(fd, PollFlags::OUT)];
            let polled = poll(&mut ready, Some(&Timespec::default()));
            if polled.is_ok() && ready.iter().any(|fd| fd.revents().contains(PollFlags::OUT)) {
                // A broken descriptor is the frontend's own loss.
                let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
            }
        }
    }
}

impl Engine for Sim {
    fn room(&self) -> usize {
        self.config.ops.saturating_sub(self.in_flight())
    }

    fn in_flight(&self) -> usize {
        let unreported = self.ready.iter().filter(|(_, of_op)| of_op.is_some());
        self.flights.len() + unreported.count()
    }

    fn push(&mut self, op: Op<'_>, token: u64) {
        assert!(self.room() > 0, "pushed without room");
        let parsed = self.parse(&op);
        let fate = self.fate(op.kind);
        let (torn, delay) = (self.random.next(), self.random.next());
        let (leg, failing, slow) = {
            let store = lock(&self.store);
            (store.leg(op.leg), store.failing_leg, store.slow_leg)
        };
        let slowness = slow.map_or(1, |(leg, times)| if leg == op.leg { times } else { 1 });
        let delay = (1 + delay % u64::from(self.config.delay_max.max(1))) * u64::from(slowness);
        let moves_after = 1 + self.random.up_to(delay - 1);
        let result = match &parsed {
            Ok(_) if failing == Some(op.leg) => Err(Errno::IO.raw_os_error()),
            Ok(_) => fate,
            Err(errno) => Err(errno.raw_os_error()),
        };
        let (mut range, segments) = parsed.unwrap_or_default();
        if result.is_err() {
            let len = torn % (range.len() as u64 + 1);
            range.end = range.start + len as usize;
        }
        self.flights.push(Flight {
            token,
            kind: op.kind,
            range,
            segments,
            memory: self.memory.clone(),
            generation: self.generation,
            result,
            covered: lock(&self.store).unsynced.next,
            leg,
            moves_at: self.tick + moves_after,
            ends_at: self.tick + delay,
            has_moved: false,
        });
    }

    fn reap(&mut self) -> Option<Event> {
        self.ready.pop_front().map(|(event, _)| event)
    }

    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        self.ring_bells();
        self.step();
        self.look(Duration::ZERO)?;
        let Wait::Until(deadline) = wait else {
            return Ok(());
        };
        // Asleep, time goes on until something ends: each op does within `delay_max` steps.
        while self.ready.is_empty() && !self.flights.is_empty() {
            self.step();
        }
        if self.ready.is_empty() {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            self.look(left.unwrap_or(SLEEP_MAX).min(SLEEP_MAX))?;
        }
        Ok(())
    }

    fn watch(&mut self, slot: u16, fd: OwnedFd) {
        self.unwatch(slot);
        let Ok(epoll) = &self.epoll else {
            return; // `enter` says so.
        };
        self.watched += 1;
        let data = epoll::EventData::new_u64(self.watched);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        match epoll::add(epoll, &fd, data, flags) {
            Ok(()) => {
                let key = self.watched;
                self.watches.insert(slot, Watch { fd, key });
            }
            // Not a thing that signals, such as a regular file: always readable, said once.
            Err(_) => self.ready.push_back((Event::Woken { slot }, None)),
        }
    }

    fn unwatch(&mut self, slot: u16) {
        if let (Some(watch), Ok(epoll)) = (self.watches.remove(&slot), &self.epoll) {
            // Closing alone would not end it: the frontend holds the same open file.
            let _ = epoll::delete(epoll, &watch.fd);
        }
    }

    fn set_bell(&mut self, slot: u16, fd: Option<OwnedFd>) {
        match fd {
            Some(fd) => self.bells.insert(slot, fd),
            None => self.bells.remove(&slot),
        };
    }

    fn ring(&mut self, slot: u16) {
        if self.bells.contains_key(&slot) {
            self.rung.insert(slot);
        }
    }

    fn bind(&mut self, memory: Arc<Memory>) {
        self.memory = memory;
        self.generation += 1;
    }

    fn is_settled(&self) -> bool {
        let flying = self.flights.iter().map(|flight| flight.generation);
        let ended = self.ready.iter().filter_map(|(_, of_op)| *of_op);
        flying
            .chain(ended)
            .all(|generation| generation == self.generation)
    }
}

impl Drop for Sim {
    /// Waits for what is in flight: the disk has it all afterwards.
    fn drop(&mut self) {
        while !self.flights.is_empty() {
            self.step();
        }
    }
}

/// A test that failed while it held the store must not hide behind a second panic.
fn lock(store: &Mutex<SimStore>) -> MutexGuard<'_, SimStore> {
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The op's own part of its segments; `None` where they are shorter than the op. Ops without data have
/// an empty stream.
fn stream(op: &Op<'_>) -> Option<Vec<Segment>> {
    if !matches!(op.kind, OpKind::Read | OpKind::Write { .. }) {
        return Some(Vec::new());
    }
    let (mut skip, mut left) = (op.skip_bytes, op.len_bytes);
    let mut stream = Vec::new();
    for segment in op.segments {
        let len = u64::from(segment.len.saturating_sub(skip)).min(left);
        if len > 0 {
            stream.push(Segment {
                addr: segment.addr.checked_add(skip.into())?,
                // No more than the segment's own length.
                len: len as u32,
            });
        }
        (skip, left) = (0, left - len);
    }
    (left == 0).then_some(stream)
}

/// Moves the op's data between guest memory and store; a sync's moves at its end.
fn move_data(flight: &Flight, store: &Mutex<SimStore>) -> Result<(), i32> {
    let fault = |_| Errno::FAULT.raw_os_error();
    let (memory, segments) = (&flight.memory, &flight.segments);
    let mut store = lock(store);
    // Its owner may have cut it since the push: end of file inside the disk.
    let Some(window) = store.now.get(flight.range.clone()) else {
        return Err(Errno::IO.raw_os_error());
    };
    let is_ok = flight.result.is_ok();
    let (bytes, is_durable) = match flight.kind {
        OpKind::Sync => return Ok(()),
        OpKind::Read => return memory.copy_out(segments, window).map(drop).map_err(fault),
        OpKind::Write { durable } => {
            let mut bytes = vec![0; window.len()];
            memory.copy_in(segments, &mut bytes).map_err(fault)?;
            (bytes, durable && is_ok)
        }
        OpKind::Discard => (vec![0; window.len()], false),
        OpKind::Zero { durable, .. } => (vec![0; window.len()], durable && is_ok),
    };
    store.put(flight.range.start, bytes, is_durable);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use cleave_guest::RegionSpec;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::MemfdFlags;

    use super::*;

    const MEMORY: u64 = 1 << 16;
    const STORE: usize = 1 << 16;
    const GUEST: u64 = 0x10000;

    fn memory() -> Arc<Memory> {
        let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(MEMORY).unwrap();
        Memory::new(vec![RegionSpec {
            guest_addr: GUEST,
            user_addr: 0,
            len_bytes: MEMORY,
            file_offset: 0,
            file,
        }])
        .unwrap()
    }

    fn store() -> Arc<Mutex<SimStore>> {
        Arc::new(Mutex::new(SimStore {
            now: vec![0; STORE],
            durable: vec![0; STORE],
            ..Default::default()
        }))
    }

    fn config(seed: u64) -> SimConfig {
        println!("seed {seed}");
        SimConfig {
            seed,
            ops: 16,
            fail_per_mille: 0,
            fail_at: None,
            delay_max: 6,
        }
    }

    fn sim(config: SimConfig) -> (Sim, Arc<Mutex<SimStore>>, Arc<Memory>) {
        let (store, memory) = (store(), memory());
        (
            Sim::new(config, store.clone(), memory.clone()),
            store,
            memory,
        )
    }

    fn at(offset: u64, len: u32) -> Segment {
        Segment {
            addr: GUEST + offset,
            len,
        }
    }

    fn op(kind: OpKind, offset_bytes: u64, segments: &[Segment]) -> Op<'_> {
        Op {
            kind,
            leg: 0,
            offset_bytes,
            len_bytes: segments.iter().map(|segment| u64::from(segment.len)).sum(),
            segments,
            skip_bytes: 0,
        }
    }

    fn bare(kind: OpKind, offset_bytes: u64, len_bytes: u64) -> Op<'static> {
        Op {
            kind,
            leg: 0,
            offset_bytes,
            len_bytes,
            segments: &[],
            skip_bytes: 0,
        }
    }

    const WRITE: OpKind = OpKind::Write { durable: false };
    const WRITE_THROUGH: OpKind = OpKind::Write { durable: true };
    const EIO: Result<(), i32> = Err(5);
    const EFAULT: Result<(), i32> = Err(14);
    const ENOSPC: Result<(), i32> = Err(28);

    /// Runs one op to its end.
    fn run(sim: &mut Sim, op: Op<'_>) -> Result<(), i32> {
        sim.push(op, 77);
        loop {
            sim.enter(Wait::No).unwrap();
            if let Some(Event::Done { token: 77, result }) = sim.reap() {
                return result;
            }
        }
    }

    /// Events with the lap of each; the store now and durable; guest memory.
    type Trace = (Vec<(u64, Event)>, Vec<u8>, Vec<u8>, Vec<u8>);

    /// What 200 random ops look like from outside.
    fn trace(seed: u64) -> Trace {
        let mut random = Random(99);
        let (mut sim, store, memory) = sim(SimConfig {
            fail_per_mille: 100,
            ..config(seed)
        });
        memory.copy_out(&[at(0, 64)], &[0xab; 64]).unwrap();
        let mut events = Vec::new();
        for lap in 0..200 {
            if sim.room() > 0 {
                let segments = [at(random.up_to(100) * 512, 512)];
                let offset = random.up_to(100) * 512;
                let op = match random.up_to(4) {
                    0 => op(OpKind::Read, offset, &segments),
                    1 => op(WRITE, offset, &segments),
                    2 => op(WRITE_THROUGH, offset, &segments),
                    3 => bare(OpKind::Sync, 0, 0),
                    _ => bare(OpKind::Discard, offset, 1024),
                };
                sim.push(op, lap);
            }
            sim.enter(Wait::No).unwrap();
            while let Some(event) = sim.reap() {
                events.push((lap, event));
            }
        }
        drop(sim);
        let mut bytes = vec![0; MEMORY as usize];
        memory.copy_in(&[at(0, MEMORY as u32)], &mut bytes).unwrap();
        let store = lock(&store);
        (events, store.now.clone(), store.durable.clone(), bytes)
    }

    #[test]
    fn a_seed_replays_events_and_bytes() {
        for seed in 0..5 {
            assert_eq!(trace(seed), trace(seed));
        }
        assert_ne!(trace(1).0, trace(2).0);
    }

    #[test]
    fn every_op_ends_once_and_in_time_and_not_in_order() {
        let mut reordered = 0;
        for seed in 0..20 {
            let (mut sim, _, _) = sim(config(seed));
            for token in 0..16 {
                assert_eq!((sim.room(), sim.in_flight()), (16 - token, token));
                sim.push(op(OpKind::Read, 0, &[at(0, 512)]), token as u64);
            }
            assert_eq!(sim.reap(), None, "nothing ends before an enter");
            let mut tokens = Vec::new();
            for _ in 0..6 {
                sim.enter(Wait::No).unwrap();
                while let Some(event) = sim.reap() {
                    let Event::Done {
                        token,
                        result: Ok(()),
                    } = event
                    else {
                        panic!("{event:?}")
                    };
                    tokens.push(token);
                    assert_eq!(sim.in_flight(), 16 - tokens.len());
                }
            }
            assert_eq!(sim.room(), 16);
            reordered += usize::from(!tokens.is_sorted());
            tokens.sort_unstable();
            assert_eq!(tokens, (0..16).collect::<Vec<_>>());
        }
        assert!(reordered > 10);
    }

    #[test]
    fn data_goes_where_segments_and_skip_say_and_nowhere_else() {
        let pattern: Vec<u8> = (0..200).collect();
        let segments = [at(10, 50), at(1000, 0), at(300, 30), at(500, 100)];
        for (skip_bytes, len_bytes) in [(0, 180), (20, 100), (49, 1), (7, 44), (0, 0)] {
            let (mut sim, store, memory) = sim(config(3));
            memory.copy_out(&segments, &pattern).unwrap();
            let piece = |kind| Op {
                kind,
                leg: 0,
                offset_bytes: 512,
                len_bytes,
                segments: &segments,
                skip_bytes,
            };
            run(&mut sim, piece(WRITE)).unwrap();
            let wanted = &pattern[skip_bytes as usize..][..len_bytes as usize];
            let mut disk = vec![0; STORE];
            disk[512..512 + wanted.len()].copy_from_slice(wanted);
            assert_eq!(lock(&store).now, disk);

            memory.copy_out(&segments, &[0xee; 180]).unwrap();
            run(&mut sim, piece(OpKind::Read)).unwrap();
            let mut expected = vec![0xee; 180];
            expected[skip_bytes as usize..][..wanted.len()].copy_from_slice(wanted);
            let mut found = vec![0; 180];
            memory.copy_in(&segments, &mut found).unwrap();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn zero_and_discard_read_back_zero() {
        for kind in [
            OpKind::Discard,
            OpKind::Zero {
                unmap: true,
                durable: false,
            },
            OpKind::Zero {
                unmap: false,
                durable: true,
            },
        ] {
            let (mut sim, store, _) = sim(config(4));
            lock(&store).now.fill(9);
            lock(&store).durable.fill(9);
            run(&mut sim, bare(kind, 512, 1024)).unwrap();
            let store = lock(&store);
            let zeroes: Vec<usize> = (0..STORE).filter(|&i| store.now[i] == 0).collect();
            assert_eq!(zeroes, (512..1536).collect::<Vec<_>>());
            if matches!(kind, OpKind::Zero { durable: true, .. }) {
                assert_eq!(store.durable, store.now);
            }
        }
    }

    #[test]
    fn impossible_ops_fail_alone_and_move_nothing() {
        let (mut sim, store, memory) = sim(config(5));
        memory.copy_out(&[at(0, 512)], &[7; 512]).unwrap();
        let outside = [Segment {
            addr: 0x100,
            len: 512,
        }];
        let half_outside = [at(MEMORY - 256, 512)];
        let wrapping = [Segment {
            addr: u64::MAX - 10,
            len: 512,
        }];
        let good = [at(0, 512)];
        let short = Op {
            len_bytes: 1024,
            ..op(WRITE, 0, &good)
        };
        for (op, wanted) in [
            (op(WRITE, 0, &outside), EFAULT),
            (op(WRITE, 0, &half_outside), EFAULT),
            (op(OpKind::Read, 0, &half_outside), EFAULT),
            (op(WRITE, 0, &wrapping), EFAULT),
            (
                Op {
                    skip_bytes: 100,
                    ..op(WRITE, 0, &wrapping)
                },
                EFAULT,
            ),
            (short, EFAULT),
            (op(WRITE, STORE as u64 - 256, &good), EIO),
            (op(OpKind::Read, STORE as u64, &good), EIO),
            (op(WRITE, u64::MAX - 100, &good), EIO),
            (bare(OpKind::Discard, 0, u64::MAX), EIO),
            (bare(OpKind::Discard, STORE as u64, 512), EIO),
        ] {
            assert_eq!(run(&mut sim, op), wanted, "{op:?}");
        }
        assert!(lock(&store).now.iter().all(|byte| *byte == 0));
        assert_eq!(run(&mut sim, op(WRITE, 0, &good)), Ok(()));
    }

    #[test]
    fn a_store_that_is_cut_in_flight_is_an_error() {
        let (mut sim, store, _) = sim(config(6));
        sim.push(op(WRITE, STORE as u64 - 512, &[at(0, 512)]), 1);
        lock(&store).now.truncate(512);
        sim.enter(Wait::Until(None)).unwrap();
        assert_eq!(
            sim.reap(),
            Some(Event::Done {
                token: 1,
                result: EIO
            })
        );
        assert_eq!(lock(&store).now.len(), 512);
    }

    #[test]
    fn the_nth_op_fails_and_may_be_torn() {
        let mut lengths = BTreeSet::new();
        for seed in 0..40 {
            let (mut sim, store, memory) = sim(SimConfig {
                fail_at: Some(1),
                ..config(seed)
            });
            memory.copy_out(&[at(0, 512)], &[7; 512]).unwrap();
            let segments = [at(0, 512)];
            assert_eq!(run(&mut sim, op(WRITE, 4096, &segments)), Ok(()));
            assert_eq!(run(&mut sim, op(WRITE_THROUGH, 0, &segments)), EIO);
            assert_eq!(run(&mut sim, op(WRITE, 8192, &segments)), Ok(()));
            let store = lock(&store);
            let moved = store.now[..512].iter().filter(|byte| **byte == 7).count();
            assert!(
                store.now[..moved].iter().all(|byte| *byte == 7),
                "a beginning"
            );
            assert!(store.now[512..4096].iter().all(|byte| *byte == 0));
            lengths.insert(moved);
        }
        assert!(lengths.len() > 20, "{lengths:?}");
    }

    #[test]
    fn a_share_of_ops_fails() {
        let (mut sim, _, _) = sim(SimConfig {
            fail_per_mille: 250,
            ..config(8)
        });
        let mut counts = BTreeMap::new();
        for _ in 0..2000 {
            *counts
                .entry(run(&mut sim, op(WRITE, 0, &[at(0, 512)])))
                .or_insert(0) += 1;
        }
        println!("{counts:?}");
        assert!((400..600).contains(&(counts[&EIO] + counts[&ENOSPC])));
        assert!(counts[&EIO] > 150 && counts[&ENOSPC] > 150);
        assert_eq!(counts.len(), 3);
    }

    /// Every cell holds the number of the last write to it. After a sync no cell of the durable copy is
    /// older than it was when the sync was pushed; none ever goes back.
    #[test]
    fn a_sync_covers_what_ended_before_it_and_nothing_durable_goes_back() {
        let (mut early, mut late) = (0, 0);
        for seed in 0..30 {
            let (store, memory) = (store(), memory());
            // Two engines share the store: a sync of one covers writes of the other.
            let mut sims = [seed, seed + 1000]
                .map(|seed| Sim::new(config(seed), store.clone(), memory.clone()));
            let mut random = Random(seed);
            let mut before = vec![0; STORE];
            for number in 1..250_u8 {
                let cells = 1 + random.up_to(300);
                let offset = random.up_to(1000);
                memory.copy_out(&[at(0, 512)], &[number; 512]).unwrap();
                let segments = [at(0, cells as u32)];
                let kind = if random.up_to(9) == 0 {
                    WRITE_THROUGH
                } else {
                    WRITE
                };
                let which = random.up_to(1) as usize;
                run(&mut sims[which], op(kind, offset, &segments)).unwrap();
                if kind == WRITE_THROUGH {
                    let store = lock(&store);
                    let range = offset as usize..(offset + cells) as usize;
                    assert!(store.durable[range].iter().all(|cell| *cell == number));
                }
                if random.up_to(7) == 0 {
                    let pushed = lock(&store).now.clone();
                    let which = random.up_to(1) as usize;
                    sims[which].push(bare(OpKind::Sync, 0, 0), 1);
                    // Another write while the sync is under way.
                    memory.copy_out(&[at(0, 512)], &[number; 512]).unwrap();
                    run(&mut sims[1 - which], op(WRITE, 0, &[at(0, 512)])).unwrap();
                    while sims[which].reap().is_none() {
                        sims[which].enter(Wait::No).unwrap();
                    }
                    let store = lock(&store);
                    let covered = store
                        .durable
                        .iter()
                        .zip(&pushed)
                        .all(|(now, then)| now >= then);
                    assert!(covered, "a sync lost a write");
                    late += usize::from(store.durable != store.now);
                }
                let store = lock(&store);
                assert!(
                    store
                        .durable
                        .iter()
                        .zip(&before)
                        .all(|(now, then)| now >= then)
                );
                assert!(
                    store
                        .durable
                        .iter()
                        .zip(&store.now)
                        .all(|(durable, now)| durable <= now)
                );
                early += usize::from(store.durable != before);
                before.clone_from(&store.durable);
            }
        }
        assert!(early > 0 && late > 0, "early {early}, late {late}");
    }

    #[test]
    fn writes_that_nobody_syncs_are_bounded() {
        let (mut sim, store, _) = sim(config(9));
        for n in 0..1000 {
            run(&mut sim, op(WRITE, n % 100 * 512, &[at(0, 512)])).unwrap();
        }
        assert!(lock(&store).unsynced.writes.len() <= UNSYNCED_MAX);
    }

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    fn signal(fd: &OwnedFd) {
        rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
    }

    fn count(fd: &OwnedFd) -> Option<u64> {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes)
            .ok()
            .map(|_| u64::from_ne_bytes(bytes))
    }

    fn reaped(sim: &mut Sim) -> Vec<Event> {
        sim.enter(Wait::No).unwrap();
        std::iter::from_fn(|| sim.reap()).collect()
    }

    #[test]
    fn each_signal_wakes_once_and_its_counter_is_left() {
        let (mut sim, _, _) = sim(config(10));
        let (kick, other) = (event(), event());
        sim.watch(3, kick.try_clone().unwrap());
        sim.watch(1, other.try_clone().unwrap());
        assert_eq!(reaped(&mut sim), []);
        for _ in 0..3 {
            signal(&kick);
            assert_eq!(reaped(&mut sim), [Event::Woken { slot: 3 }]);
            assert_eq!(reaped(&mut sim), []);
        }
        signal(&kick);
        signal(&other);
        assert_eq!(
            reaped(&mut sim),
            [Event::Woken { slot: 1 }, Event::Woken { slot: 3 }]
        );
        assert_eq!(count(&kick), Some(4));
    }

    #[test]
    fn a_watch_is_replaced_and_forgotten() {
        let (mut sim, _, _) = sim(config(11));
        let (old, new) = (event(), event());
        sim.watch(0, old.try_clone().unwrap());
        signal(&new);
        sim.watch(0, new.try_clone().unwrap());
        assert_eq!(
            reaped(&mut sim),
            [Event::Woken { slot: 0 }],
            "signalled before"
        );
        signal(&old);
        assert_eq!(reaped(&mut sim), []);
        sim.unwatch(0);
        sim.unwatch(7);
        signal(&new);
        assert_eq!(reaped(&mut sim), []);
        sim.watch(2, File::open("/proc/self/exe").unwrap().into());
        assert_eq!(
            reaped(&mut sim),
            [Event::Woken { slot: 2 }],
            "no thing to wait for"
        );
        assert_eq!(reaped(&mut sim), []);
    }

    #[test]
    fn bells_ring_once_for_many_calls_and_never_block() {
        let (mut sim, _, _) = sim(config(12));
        let bell = event();
        sim.set_bell(5, Some(bell.try_clone().unwrap()));
        for _ in 0..3 {
            sim.ring(5);
            sim.ring(6);
        }
        assert_eq!(count(&bell), None, "not before the enter");
        reaped(&mut sim);
        reaped(&mut sim);
        assert_eq!(count(&bell), Some(1));
        sim.ring(5);
        sim.set_bell(5, None);
        reaped(&mut sim);
        assert_eq!(count(&bell), None);
        // Blocking and full: a write would wait for ever.
        let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        sim.set_bell(5, Some(full));
        sim.ring(5);
        reaped(&mut sim);
        // Closed at its other end.
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        drop(reader);
        sim.set_bell(5, Some(writer));
        sim.ring(5);
        reaped(&mut sim);
    }

    #[test]
    fn a_sleep_ends_with_the_first_event() {
        let (mut sim, _, _) = sim(SimConfig {
            delay_max: 1_000_000,
            ..config(13)
        });
        sim.push(op(OpKind::Read, 0, &[at(0, 512)]), 8);
        sim.enter(Wait::Until(None)).unwrap();
        assert!(matches!(sim.reap(), Some(Event::Done { token: 8, .. })));

        let kick = event();
        sim.watch(0, kick.try_clone().unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| signal(&kick));
            let start = Instant::now();
            while sim.reap().is_none() {
                assert!(start.elapsed() < Duration::from_secs(20), "never woken");
                sim.enter(Wait::Until(None)).unwrap();
            }
        });
        let now = Instant::now();
        sim.enter(Wait::Until(Some(now))).unwrap();
        sim.enter(Wait::Until(Some(now + Duration::from_millis(2))))
            .unwrap();
        sim.enter(Wait::Until(None)).unwrap();
        assert_eq!(sim.reap(), None);
        assert!(now.elapsed() >= Duration::from_millis(11), "it slept");
    }

    #[test]
    fn an_op_keeps_its_memory_until_it_is_reported() {
        let (mut sim, store, old) = sim(config(14));
        old.copy_out(&[at(0, 512)], &[1; 512]).unwrap();
        let new = memory();
        new.copy_out(&[at(0, 512)], &[2; 512]).unwrap();
        assert!(sim.is_settled());
        sim.push(op(WRITE, 0, &[at(0, 512)]), 1);
        assert!(sim.is_settled(), "no earlier memory");
        sim.bind(new);
        sim.push(op(WRITE, 512, &[at(0, 512)]), 2);
        let mut left = 2;
        let mut is_old_done = false;
        while left > 0 {
            assert_eq!(sim.is_settled(), is_old_done);
            sim.enter(Wait::No).unwrap();
            assert_eq!(sim.is_settled(), is_old_done, "not before it is reported");
            while let Some(Event::Done { token, .. }) = sim.reap() {
                is_old_done |= token == 1;
                left -= 1;
            }
        }
        let weak = Arc::downgrade(&old);
        drop(old);
        assert!(weak.upgrade().is_none(), "nothing holds it any more");
        let store = lock(&store);
        assert_eq!(
            (&store.now[..512], &store.now[512..1024]),
            (&[1; 512][..], &[2; 512][..])
        );
    }

    #[test]
    fn dropping_it_waits_for_what_is_in_flight() {
        let (mut sim, store, memory) = sim(config(15));
        memory.copy_out(&[at(0, 512)], &[3; 512]).unwrap();
        sim.push(op(WRITE_THROUGH, 512, &[at(0, 512)]), 1);
        drop(sim);
        assert_eq!(lock(&store).durable[512..1024], [3; 512]);
    }
}
