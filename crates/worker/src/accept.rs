//! From a chain just taken to ops pushed, or to an answer on the spot.

use cleave_blk::spec::{HEADER_BYTES, RANGE_BYTES};
use cleave_blk::{Gate, Outcome, Plan, Request, Segment, Status, Verb};
use cleave_engine::Engine;
use cleave_guest::{Chain, Memory, Taken};

use crate::Device;
use crate::lane::Lane;
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
        Request::parse(head.get(..copied).unwrap_or_default(), shape, gate)
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
        let write_through = self.device.is_write_through(lane.features);
        for op in Plan::new(request, data, write_through) {
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
        let cached = changes && !write_through;
        lane.slots.fill(head, *request, status_addr, ops, cached);
    }
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
