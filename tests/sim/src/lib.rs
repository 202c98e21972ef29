//! A simulated disk for tests: it keeps the promises of the real stores, with a seeded order of completion
//! and seeded faults. It forbids threads and I/O. A run is replayed by its seed, as long as the descriptors
//! that its reactor watches are signalled between the same `enter`s; the clock only bounds a sleep.
//!
//! Time is counted in `enter`s. Each op draws two instants: when its data moves, and, then or later,
//! when it is reported. So the disk may change, and guest memory be written, well before the owner is
//! told, as with a real device.
#![forbid(unsafe_code)]

mod store;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cleave_blk::{Op, OpKind, Segment};
use cleave_engine::{Done, Reactor, Store, Wait};
use cleave_guest::{Epoch, Memory};
use cleave_states::{Number, SECTOR};
use rustix::io::Errno;

pub use store::SimStore;

/// Longest sleep of an `enter` that has nothing in flight: the owner looks again, nobody hangs.
const SLEEP_MAX: Duration = Duration::from_millis(1);
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
    /// The n-th op (counted from 0) whose `push` panics, as a mistake of our own would.
    pub panic_at: Option<u64>,
    /// Most `enter`s that an op may stay in flight; at least one.
    pub delay_max: u32,
}

/// Random numbers, also for the tests that drive a [`Sim`]: SplitMix64 (Steele, Lea, Flood
/// 2014), the same numbers for the same seed.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers of this seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Any number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to `max`, both included.
    fn up_to(&mut self, max: u64) -> u64 {
        self.below(max.saturating_add(1))
    }

    /// From 0 to below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n.max(1)
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
    epoch: Epoch,
    result: Result<(), i32>,
    /// Of a sync: writes with smaller numbers had moved when it was pushed,
    covered: u64,
    /// and it is about those to its leg alone.
    leg: Range<usize>,
    moves_at: u64,
    ends_at: u64,
    has_moved: bool,
    /// In the store's log.
    io: Option<Number>,
}

/// The simulated disk.
#[derive(Debug)]
pub struct Sim {
    config: SimConfig,
    store: Arc<Mutex<SimStore>>,
    random: Random,
    /// `enter`s so far; a sleep that something in flight ends counts for as many as it takes.
    tick: u64,
    /// Ops so far.
    pushed: u64,
    flights: Vec<Flight>,
    /// Ended, for `reap`.
    ready: VecDeque<Done>,
}

impl Sim {
    /// Makes one over bytes that several of them may share.
    pub fn new(config: SimConfig, store: Arc<Mutex<SimStore>>) -> Sim {
        Sim {
            random: Random(config.seed),
            config,
            store,
            tick: 0,
            pushed: 0,
            flights: Vec::new(),
            ready: VecDeque::new(),
        }
    }

    /// Whether the op is made to fail. Draws as often for every op, so that one more failure does not
    /// change the rest of the run.
    fn fate(&mut self, kind: OpKind) -> Result<(), i32> {
        let number = self.pushed;
        self.pushed += 1;
        assert!(self.config.panic_at != Some(number), "told to panic");
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
    fn parse(&self, memory: &Memory, op: &Op<'_>) -> Result<(Range<usize>, Vec<Segment>), Errno> {
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
        if !segments.iter().all(|segment| memory.covers(*segment)) {
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
        let (chance, luck) = (self.random.up_to(15), self.random.draw());
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
        if let (Some(io), Some(log), Ok(())) =
            (flight.io, &mut lock(&self.store).log, flight.result)
        {
            log.ended(io);
        }
        if flight.kind == OpKind::Sync {
            // What moved since the push may come along; of a failed sync, anything may.
            let salt = self.random.draw();
            let is_lucky = |number: u64| Random(salt ^ number).up_to(1) == 1;
            let (covered, is_done) = (flight.covered, flight.result.is_ok());
            lock(&self.store).harden(|change| {
                let is_ours = flight.leg.contains(&change.range.start);
                is_ours && (is_done && change.number < covered || is_lucky(change.number))
            });
        }
        self.ready.push_back(Done {
            token: flight.token,
            result: flight.result,
        });
    }
}

impl Store for Sim {
    fn room(&self) -> usize {
        self.config.ops.saturating_sub(self.in_flight())
    }

    fn in_flight(&self) -> usize {
        self.flights.len() + self.ready.len()
    }

    fn push(&mut self, _reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64) {
        assert!(self.room() > 0, "pushed without room");
        let parsed = self.parse(epoch, &op);
        let fate = self.fate(op.kind);
        let (torn, delay) = (self.random.draw(), self.random.draw());
        let (leg, failing, slow, bad, unit) = {
            let store = lock(&self.store);
            let bad = store.failing.clone();
            // A recorded write is of whole sectors.
            let is_whole = store.whole_sectors || store.log.is_some();
            let unit = if is_whole { SECTOR } else { 1 };
            let leg = store.leg(op.leg);
            (leg, store.failing_leg, store.slow_leg, bad, unit)
        };
        if let Some(pushed) = &mut lock(&self.store).pushed {
            pushed.push(op.offset_bytes);
        }
        let touches = |bad: &Range<usize>, range: &Range<usize>| {
            range.start < bad.end && bad.start < range.end
        };
        let slowness = slow.map_or(1, |(leg, times)| if leg == op.leg { times } else { 1 });
        let delay = (1 + delay % u64::from(self.config.delay_max.max(1))) * u64::from(slowness);
        let moves_after = 1 + self.random.up_to(delay - 1);
        let result = match &parsed {
            Ok(_) if failing == Some(op.leg) => Err(Errno::IO.raw_os_error()),
            Ok((range, _)) => match bad {
                Some((bad, errno)) if touches(&bad, range) => Err(errno),
                _ => fate,
            },
            Err(errno) => Err(errno.raw_os_error()),
        };
        let (mut range, segments) = parsed.unwrap_or_default();
        if result.is_err() {
            let len = torn % (range.len() as u64 + 1);
            range.end = range.start + len as usize / unit * unit;
        }
        let io = match (op.kind, &mut lock(&self.store).log) {
            (OpKind::Sync, Some(log)) => Some(log.flush_begins(op.leg.into())),
            _ => None,
        };
        self.flights.push(Flight {
            token,
            kind: op.kind,
            range,
            segments,
            epoch: epoch.clone(),
            result,
            covered: lock(&self.store).unsynced.next,
            leg,
            moves_at: self.tick + moves_after,
            ends_at: self.tick + delay,
            has_moved: false,
            io,
        });
    }

    fn reap(&mut self) -> Option<Done> {
        self.ready.pop_front()
    }

    fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    fn before_enter(&mut self, _reactor: &mut Reactor, wait: Wait) -> Option<Duration> {
        self.step();
        match wait {
            Wait::No => return None,
            Wait::Until(end) => lock(&self.store).waits[usize::from(end.is_none())] += 1,
        }
        // Asleep, time goes on until something ends: each op does within `delay_max` steps.
        while self.ready.is_empty() && !self.flights.is_empty() {
            self.step();
        }
        Some(SLEEP_MAX)
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
fn move_data(flight: &mut Flight, store: &Mutex<SimStore>) -> Result<(), i32> {
    let fault = |_| Errno::FAULT.raw_os_error();
    let (memory, segments) = (&flight.epoch, &flight.segments);
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
    let is_discard = flight.kind == OpKind::Discard;
    flight.io = store.record_change(flight.range.clone(), is_discard, is_durable);
    Ok(())
}

#[cfg(test)]
mod tests;
