//! A simulated disk for tests: it keeps the promises of the real stores, with a completion order and faults that come
//! from a seed. It forbids threads and I/O. The seed replays a run, as long as the descriptors that its reactor
//! watches are signalled between the same `enter`s; the clock only bounds a sleep.
//!
//! Time is counted in `enter`s. Each op draws two instants: when its data moves, and when it is reported, which is
//! then or later. So the disk and guest memory may change well before the owner learns of it, as with a real device.
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

pub use cleave_states::Random;
pub use store::SimStore;

/// Longest sleep of an `enter` with nothing in flight: the owner checks again, so it cannot hang.
const SLEEP_MAX: Duration = Duration::from_millis(1);
/// Parameters of the simulation.
#[derive(Debug, Clone)]
pub struct SimConfig {
    /// The seed that replays the run.
    pub seed: u64,
    /// Most ops in flight.
    pub ops: usize,
    /// Share of ops that fail, in 1/1000: with EIO, and ops that write also with ENOSPC. A failed op may have moved
    /// the first part of its data.
    pub fail_per_mille: u32,
    /// Index (from 0) of an op that fails with EIO regardless of `fail_per_mille`.
    pub fail_at: Option<u64>,
    /// Index (from 0) of an op whose `push` panics, as a bug of ours would.
    pub panic_at: Option<u64>,
    /// Most `enter`s for which an op stays in flight; at least one.
    pub delay_max: u32,
}

/// An op in flight. It holds all that the transfer needs, so memory that is replaced meanwhile stays mapped until the
/// op completes.
#[derive(Debug)]
struct InFlight {
    token: u64,
    kind: OpKind,
    /// Bytes that move: all of them, or a first part if the op fails.
    range: Range<usize>,
    segments: Vec<Segment>,
    epoch: Epoch,
    result: Result<(), i32>,
    /// For a sync: it covers writes with smaller numbers, which had moved when it was pushed,
    covered: u64,
    /// and only on its own leg.
    leg: Range<usize>,
    moves_at: u64,
    ends_at: u64,
    has_moved: bool,
    /// Its number in the log.
    io: Option<Number>,
}

/// The simulated disk.
#[derive(Debug)]
pub struct Sim {
    config: SimConfig,
    store: Arc<Mutex<SimStore>>,
    random: Random,
    /// `enter`s so far; a sleep that an op in flight ends counts for as many as it takes.
    tick: u64,
    /// Ops so far, and those since the last `enter`.
    pushed: u64,
    lap_pushed: u32,
    flights: Vec<InFlight>,
    /// Completed ops, for `reap`.
    ready: VecDeque<Done>,
}

impl Sim {
    /// Makes a disk over bytes that several disks may share.
    pub fn new(config: SimConfig, store: Arc<Mutex<SimStore>>) -> Sim {
        Sim {
            random: Random::new(config.seed),
            config,
            store,
            tick: 0,
            pushed: 0,
            lap_pushed: 0,
            flights: Vec::new(),
            ready: VecDeque::new(),
        }
    }

    /// Decides if the op must fail. Draws equally often for every op, so that one more failure does not change the rest of the
    /// run.
    fn fate(&mut self, kind: OpKind) -> Result<(), i32> {
        let number = self.pushed;
        self.pushed += 1;
        let left = lock(&self.store).count_push();
        assert!(
            self.config.panic_at != Some(number) && left != Some(0),
            "told to panic"
        );
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

    /// The range of the store and the guest memory that the op asks for, if they are valid.
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

    /// One step of time: data moves, and ops complete in an order that the seed decides.
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
            let due = |flight: &InFlight| flight.ends_at <= self.tick;
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

    /// A disk may write back any data at any time.
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

    fn end(&mut self, flight: &InFlight) {
        if let (Some(io), Some(log), Ok(())) =
            (flight.io, &mut lock(&self.store).log, flight.result)
        {
            log.complete_io(io);
        }
        if flight.kind == OpKind::Sync {
            // Data that moved since the push may become durable too; after a failed sync, any data may.
            let salt = self.random.draw();
            let is_lucky = |number: u64| Random::new(salt ^ number).up_to(1) == 1;
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
    fn came_back(&mut self) -> bool {
        std::mem::take(&mut lock(&self.store).came_back)
    }

    fn room(&self) -> usize {
        match lock(&self.store).is_full {
            true => 0,
            false => self.config.ops.saturating_sub(self.in_flight()),
        }
    }

    fn in_flight(&self) -> usize {
        self.flights.len() + self.ready.len()
    }

    fn push(&mut self, _reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64) {
        assert!(self.room() > 0, "pushed without room");
        self.lap_pushed += 1;
        let parsed = self.parse(epoch, &op);
        let fate = self.fate(op.kind);
        let (torn, delay) = (self.random.draw(), self.random.draw());
        let (leg, failing, slow, bad, unit) = {
            let store = lock(&self.store);
            let bad = store.failing.clone();
            // A recorded write consists of whole sectors.
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
            (OpKind::Sync, Some(log)) => Some(log.start_flush(op.leg.into())),
            _ => None,
        };
        self.flights.push(InFlight {
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

    fn is_sated(&self) -> bool {
        let most = lock(&self.store).sated_after;
        most.is_some_and(|most| self.lap_pushed >= most)
    }

    fn before_enter(&mut self, _reactor: &mut Reactor, wait: Wait) -> Option<Duration> {
        self.lap_pushed = 0;
        self.step();
        match wait {
            Wait::No => return None,
            Wait::Until(end) => {
                let is_idle = end.is_none() && self.in_flight() == 0;
                let mut store = lock(&self.store);
                store.waits[usize::from(end.is_none())] += 1;
                store.idle_waits += u64::from(is_idle);
            }
        }
        // While asleep, time advances until an op completes: each op does so within `delay_max` steps.
        while self.ready.is_empty() && !self.flights.is_empty() {
            self.step();
        }
        Some(SLEEP_MAX)
    }
}

impl Drop for Sim {
    /// Waits for all ops in flight; afterwards their data is on the disk.
    fn drop(&mut self) {
        while !self.flights.is_empty() {
            self.step();
        }
    }
}

/// Ignores a poisoned lock: the panic of the test that held it is the one to report.
fn lock(store: &Mutex<SimStore>) -> MutexGuard<'_, SimStore> {
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The op's own range of its segments; `None` if they are shorter than the op. An op without data has an empty
/// stream.
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
                // At most the rest of this segment.
                len: len as u32,
            });
        }
        (skip, left) = (0, left - len);
    }
    (left == 0).then_some(stream)
}

/// Moves the op's data between guest memory and the store; a sync takes effect when it completes.
fn move_data(flight: &mut InFlight, store: &Mutex<SimStore>) -> Result<(), i32> {
    let fault = |_| Errno::FAULT.raw_os_error();
    let (memory, segments) = (&flight.epoch, &flight.segments);
    let mut store = lock(store);
    // The owner may have truncated the store since the push: end of file inside the disk.
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
