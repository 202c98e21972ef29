//! Access to private parts for the workspace's benchmarks, and for tests of this crate from outside. Not behind a feature, because
//! every crate above would then be compiled twice.

use std::io;
use std::time::Instant;

use cleave_blk::Request;
use cleave_engine::{Rest, Store};
use cleave_guest::{Epoch, Memory};

use crate::policy::{Budget, LapWait, LapWork, Pacer, PacerContext, Scheduled};
use crate::record::Fine;
use crate::slots::{NextStep, Slot, Slots};
use crate::stats::Stats;
use crate::{Split, Tuning, Worker};

/// Makes a lap that begins now, as on the thread of a pool. Returns true if the worker may be left alone after it.
pub fn lap_beside_others<S: Store>(worker: &mut Worker<S>) -> io::Result<bool> {
    let (_lap, rest, _worked) = worker.lap_beside_others(Instant::now())?;
    Ok(rest != Rest::None)
}

/// Requests in flight on one vring.
#[derive(Debug)]
pub struct InFlightTable(Slots, Epoch);

impl InFlightTable {
    /// Makes an empty table for a vring of this size.
    pub fn new(vring_size: u16) -> InFlightTable {
        let memory = Memory::new(Vec::new());
        InFlightTable(
            Slots::new(vring_size),
            memory.unwrap_or_else(|_| unreachable!()).into(),
        )
    }

    /// Begins a request as the worker does: checks that the head is free, then fills its slot.
    #[inline]
    pub fn begin(&mut self, head: u16, request: Request, ops: u32) {
        if !self.0.is_taken(head) {
            let slot = Slot {
                request,
                status_addr: 0,
                epoch: self.1.clone(),
                ops_left: ops,
                cached: false,
                timing: None,
                failed: None,
                order: self.0.next_order(),
            };
            self.0.fill(head, slot);
        }
    }

    /// Ends one op of a request. Returns whether it was the last.
    #[inline]
    pub fn end(&mut self, head: u16, op: u32) -> bool {
        matches!(self.0.op_ended(head, op, Ok(()), false), NextStep::End(_))
    }
}

/// The pacer of an adaptive worker, on a virtual clock.
#[derive(Debug)]
pub struct PacerBench {
    pacer: Pacer,
    tuning: Tuning,
    budget: Budget,
    stats: Stats,
    now_ns: u64,
    sleeps: bool,
}

/// Duration of a wake-up in virtual time.
const WAKE_NS: u64 = 20_000;

impl PacerBench {
    /// Makes a pacer as a worker starts with it, and the default tuning.
    #[expect(clippy::new_without_default, reason = "as the pacer itself")]
    pub fn new() -> PacerBench {
        PacerBench {
            pacer: Pacer::new(),
            tuning: Tuning::new(Split::Off),
            budget: Budget::default(),
            stats: Stats::default(),
            now_ns: 0,
            sleeps: false,
        }
    }

    /// Passes a lap of `lap_ns` (plus a wake-up, if a request ended a sleep) in which so many requests arrived and completed.
    /// Nothing else is in flight. Returns whether the next lap follows without a sleep.
    #[inline]
    pub fn lap(&mut self, requests: u32, lap_ns: u64) -> bool {
        let wakes = self.sleeps && requests > 0;
        self.now_ns += lap_ns + u64::from(wakes) * WAKE_NS;
        if wakes {
            self.pacer.slept();
        }
        let work = LapWork {
            arrived: requests,
            ended: requests,
            in_flight: 0,
            more: false,
        };
        let PacerBench { pacer, now_ns, .. } = self;
        let context = PacerContext {
            tuning: &self.tuning,
            budget: &self.budget,
            stats: &self.stats,
        };
        let pace = match pacer.note_lap(work) {
            Some(pace) => pace,
            None => pacer.decide(work, *now_ns, context, || Scheduled {
                cpu_ns: *now_ns,
                waited_ns: 0,
                is_bound: true,
            }),
        };
        self.sleeps = pace != LapWait::Spin;
        !self.sleeps
    }
}

/// A histogram of times, of the finer kind.
#[derive(Debug)]
pub struct TimeHistogram(Fine);

impl TimeHistogram {
    /// Makes an empty histogram.
    #[expect(clippy::new_without_default, reason = "as the histogram itself")]
    pub fn new() -> TimeHistogram {
        TimeHistogram(Fine::new())
    }

    /// Adds a time.
    #[inline]
    pub fn add(&self, ns: u64) {
        self.0.add(ns, 1);
    }

    /// Returns the number of times that were added.
    pub fn count(&self) -> u64 {
        self.0.read().count()
    }
}
