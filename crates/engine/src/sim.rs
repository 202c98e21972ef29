//! A simulated engine for tests: same promises as `Uring`, with a seeded order of completion and
//! seeded faults, no threads, no kernel, no clock. A run is replayed by its seed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use cleave_blk::Op;
use cleave_guest::Memory;

use crate::{Engine, Event, Wait};

/// What the simulation does to ops.
#[derive(Debug, Clone)]
pub struct SimConfig {
    /// Replays the run.
    pub seed: u64,
    /// Most ops in flight.
    pub ops: usize,
    /// Share of ops that fail, in 1/1000, with an errno drawn from EIO, ENOSPC.
    pub fail_per_mille: u32,
    /// The n-th op (counted from 0) that fails with EIO whatever `fail_per_mille` says.
    pub fail_at: Option<u64>,
    /// Most `enter`s that an op may stay in flight.
    pub delay_max: u32,
}

/// The bytes behind a `Sim`: `durable` is what would survive a power cut.
#[derive(Debug, Default)]
pub struct SimStore {
    /// Contents as reads see them.
    pub now: Vec<u8>,
    /// Contents as of the last sync, plus durable writes.
    pub durable: Vec<u8>,
}

/// The simulated engine.
#[derive(Debug)]
pub struct Sim {
    _events: VecDeque<Event>,
}

impl Sim {
    /// Makes one over a store that several engines may share.
    pub fn new(config: SimConfig, store: Arc<Mutex<SimStore>>, memory: Arc<Memory>) -> Sim {
        let _ = (config, store, memory);
        todo!()
    }
}

impl Engine for Sim {
    fn room(&self) -> usize {
        todo!()
    }
    fn in_flight(&self) -> usize {
        todo!()
    }
    fn push(&mut self, _op: Op<'_>, _token: u64) {
        todo!()
    }
    fn reap(&mut self) -> Option<Event> {
        todo!()
    }
    fn enter(&mut self, _wait: Wait) -> io::Result<()> {
        todo!()
    }
    fn watch(&mut self, _slot: u16, _fd: OwnedFd) {
        todo!()
    }
    fn unwatch(&mut self, _slot: u16) {
        todo!()
    }
    fn set_bell(&mut self, _slot: u16, _fd: Option<OwnedFd>) {
        todo!()
    }
    fn ring(&mut self, _slot: u16) {
        todo!()
    }
    fn bind(&mut self, _memory: Arc<Memory>) {
        todo!()
    }
    fn is_settled(&self) -> bool {
        todo!()
    }
}
