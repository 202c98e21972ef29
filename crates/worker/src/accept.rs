//! From a chain just taken to ops pushed, or to an answer on the spot.

use std::time::Instant;

use cleave_blk::spec::{HEADER_BYTES, RANGE_BYTES};
use cleave_blk::{Cut, Gate, Outcome, Plan, Request, Segment, Status, Verb};
use cleave_engine::Engine;
use cleave_guest::{Chain, Memory, Taken};

use crate::Device;
use crate::lane::Lane;
use crate::slots::Timing;
use crate::splitter::{Direction, Load, SPLIT_MIN_BYTES, Splitter};
use crate::stats::{Stats, add};
use crate::token::Token;

/// What accepting needs beside the vring: all of it borrowed from the worker for one batch. What may
/// change at any time (size, cache mode) is read anew for each chain: once the frontend has been told
/// of a change, it holds for every chain that the guest makes available, and the batch at hand may
/// take that one too.
pub(crate) struct Acceptance<'a, E> {
    pub(crate) engine: &'a mut E,
    pub(crate) device: &'a Device,
    pub(crate) memory: &'a Memory,
    pub(crate) stats: &'a Stats,
    pub(crate) lane_number: u16,
    pub(crate) splitter: &'a mut Splitter,
    pub(crate) clock: Instant,
    /// Requests in flight on all of the worker's vrings.
    pub(crate) requests: &'a mut u32,
}

impl<E: Engine> Acceptance<'_, E> {
    /// Serves one chain as far as it goes without waiting. The head is free and there is room for a
    /// whole request.
    pub(crate) fn begin(&mut self, lane: &mut Lane, taken: Taken, chain: &mut Chain) {
        let status_addr = chain
            .status_addr()
            .filter(|&addr| self.memory.covers(Segment { addr, len: 1 }));
        let Some(status_addr) = status_addr else {
            // Nowhere to say what is wrong; the chain still goes back.
            add(&self.stats.broken, 1);
            return lane.push_used(taken.head, 0);
        };
        match self.parse(lane, taken, chain) {
            Ok(request) if request.verb == Verb::GetId => {
                let outcome = self.identify(&request, chain);
                lane.push_used(taken.head, answer(self.memory, status_addr, outcome));
            }
            Ok(request) => self.push(lane, taken.head, &request, status_addr, chain),
            Err(status) => {
                add(&self.stats.refused, 1);
                lane.push_used(
                    taken.head,
                    answer(self.memory, status_addr, Outcome::refused(status)),
                );
            }
        }
    }

    /// Copies the header (and a range, if there is one) out once and judges the copy.
    fn parse(&self, lane: &Lane, taken: Taken, chain: &Chain) -> Result<Request, Status> {
        if taken.fault.is_some() {
            return Err(Status::IoErr);
        }
        let shape = chain.shape();
        let mut head = [0; HEADER_BYTES + RANGE_BYTES];
        // A range follows the header only where nothing else does; the data of a write stays alone.
        let head_bytes = if shape.readable_bytes == head.len() as u64 {
            head.len()
        } else {
            HEADER_BYTES
        };
        let head = head.get_mut(..head_bytes).unwrap_or_default();
        let copied = self
            .memory
            .copy_in(chain.readable(), head)
            .map_err(|_| Status::IoErr)?;
        let gate = Gate {
            limits: self.device.disk.limits(),
            capacity_bytes: self.device.disk.capacity_bytes(),
            features: lane.features,
        };
        let head = head.get(..copied).unwrap_or_default();
        let request = Request::parse(head, shape, gate)?;
        // Longer than the guest was told; its ops would not fit the engine.
        match self.device.cut(lane.features).takes(&request) {
            true => Ok(request),
            false => Err(Status::IoErr),
        }
    }

    fn identify(&self, request: &Request, chain: &mut Chain) -> Outcome {
        let len = request.len_bytes as usize;
        let answer = self.device.serial.get(..len).unwrap_or(&self.device.serial);
        match self.memory.copy_out(chain.data_in(), answer) {
            Ok(_) => {
                add(&self.stats.others, 1);
                Outcome::ended(request, Ok(()))
            }
            Err(_) => Outcome::refused(Status::IoErr),
        }
    }

    #[inline]
    fn push(
        &mut self,
        lane: &mut Lane,
        head: u16,
        request: &Request,
        status_addr: u64,
        chain: &mut Chain,
    ) {
        let data = match request.verb {
            Verb::Read => chain.data_in(),
            Verb::Write => chain.data_out(HEADER_BYTES as u64),
            _ => &[],
        };
        let mut ops = 0;
        let timing = self.split(request);
        let cut = Cut {
            chunk_bytes: timing.and_then(|timing| timing.choice.chunk_bytes),
            ..self.device.cut(lane.features)
        };
        for op in Plan::new(request, data, &cut) {
            let token = Token {
                lane: self.lane_number,
                head,
                op: ops,
            };
            self.engine.push(op, token.to_bits());
            ops += 1;
        }
        if ops == 0 {
            // No bytes asked for: done without the store.
            add(&self.stats.others, 1);
            return lane.push_used(
                head,
                answer(self.memory, status_addr, Outcome::ended(request, Ok(()))),
            );
        }
        let changes = !matches!(request.verb, Verb::Read | Verb::Flush);
        let cached = changes && !cut.durable;
        *self.requests += 1;
        lane.slots
            .fill(head, *request, status_addr, ops, cached, timing);
    }
}

impl<E: Engine> Acceptance<'_, E> {
    /// How a read or write is split; small ones are not looked at twice, nor is a clock read for them.
    #[inline]
    fn split(&mut self, request: &Request) -> Option<Timing> {
        let direction = match request.verb {
            Verb::Read => Direction::Read,
            Verb::Write => Direction::Write,
            _ => return None,
        };
        if request.len_bytes < SPLIT_MIN_BYTES {
            self.splitter.note_small(direction);
            return None;
        }
        self.split_large(direction, request.len_bytes)
    }

    fn split_large(&mut self, direction: Direction, len_bytes: u64) -> Option<Timing> {
        let load = Load {
            requests: *self.requests,
            ops: u32::try_from(self.engine.in_flight()).unwrap_or(u32::MAX),
        };
        let start_ns = nanoseconds(self.clock);
        let choice = self.splitter.choose(direction, len_bytes, load, start_ns);
        Some(Timing { choice, start_ns })
    }
}

/// Since the worker's start.
pub(crate) fn nanoseconds(clock: Instant) -> u64 {
    u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Stores the status and tells the used length. A status that lies outside memory by now (its
/// region was removed meanwhile) leaves nothing written that could be vouched for.
#[inline]
pub(crate) fn answer(memory: &Memory, status_addr: u64, outcome: Outcome) -> u32 {
    match memory.store_byte(status_addr, outcome.status as u8) {
        Ok(()) => outcome.used_bytes,
        Err(_) => 0,
    }
}
