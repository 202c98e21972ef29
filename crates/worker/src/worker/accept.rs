//! Turns a chain that was just taken into ops for the store, or completes the request inline.

use std::sync::Arc;

use cleave_blk::spec::{HEADER_BYTES, RANGE_BYTES};
use cleave_blk::{Cut, Gate, Outcome, Plan, Request, Shape, Status, Verb};
use cleave_engine::{Reactor, Store};
use cleave_guest::{Chain, Epoch, TakenChain};

use super::status::write_status_at;
use crate::Device;
use crate::device::throttle::Demand;
use crate::lane::{Lane, Throttled};
use crate::record::{Laps, Recorder};
use crate::slots::{Slot, SplitTiming};
use crate::splitter::{DataDirection, SPLIT_MIN_BYTES, Splitter};
use crate::token::Token;

/// All that accepting a chain needs besides the vring, borrowed from the worker for one batch. Settings that
/// can change at any time (size, cache mode) are read again for each chain: once the frontend has been notified
/// of a change, the change applies to every chain that the guest makes available afterwards.
pub(crate) struct Acceptance<'a, S> {
    pub(crate) reactor: &'a mut Reactor,
    pub(crate) store: &'a mut S,
    pub(crate) device: &'a Device,
    /// The memory table in which requests are taken.
    pub(crate) epoch: &'a Epoch,
    pub(crate) lane_number: u16,
    pub(crate) splitting: &'a mut Splitting,
    /// Requests of this batch that completed inline.
    pub(crate) ended: usize,
    pub(crate) laps: &'a mut Laps,
    /// The record needs details of each request: this lap is timed, or the next read is checked for zeroes.
    pub(crate) watched: bool,
    /// As `watched`, or the vring has a dirty log.
    pub(crate) noted: bool,
    pub(crate) run: InlineRun,
    /// Requests count against the disk's limits.
    pub(crate) is_limited: bool,
}

/// How large requests are split, and the load beside them.
pub(crate) struct Splitting {
    /// Shared by all workers of the disk.
    pub(crate) splitter: Arc<Splitter>,
    /// Requests in flight on all vrings, and those among them that the splitter is notified of.
    pub(crate) requests: u32,
    pub(crate) large: u32,
}

/// Result of one round of acceptance.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Accepted {
    pub(super) chains: usize,
    /// Those on vrings whose completion mode may spin.
    pub(super) awaited: usize,
    /// Those that completed inline.
    pub(super) ended: usize,
    /// A bound of the batch was reached before the ring was empty.
    pub(super) more: bool,
}

/// Result of handling a chain.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begun {
    Yes,
    /// The chain exceeds the disk's limits.
    OverLimit,
    /// Memory is lost, and perhaps what the head was read from.
    Lost,
}

/// Consecutive inline requests of the same type and length, which are counted together.
#[derive(Debug)]
pub(crate) struct InlineRun {
    verb: Verb,
    len_bytes: u64,
    n: u32,
}

impl InlineRun {
    pub(crate) const NONE: InlineRun = InlineRun {
        verb: Verb::Flush,
        len_bytes: 0,
        n: 0,
    };

    /// Counts them. Must be called before they are published: the guest may read the counters as soon as it has
    /// seen its requests complete.
    #[inline]
    pub(crate) fn count(&mut self, record: &mut Recorder) {
        if self.n > 0 {
            record.at_once(self.verb, self.len_bytes, self.n);
            self.n = 0;
        }
    }
}

impl<S: Store> Acceptance<'_, S> {
    /// Handles one chain as far as possible without waiting. The head must be free, and the store must have
    /// room for a whole request.
    /// Only where [`is_limited`](Acceptance::is_limited): a request over the limits is left, and its chain must be given back. So must
    /// one whose memory is lost.
    #[inline]
    pub(crate) fn begin(&mut self, lane: &mut Lane, taken: TakenChain, chain: &mut Chain) -> Begun {
        if self.watched && self.laps.is_timed() {
            self.laps.taking();
        }
        let status = chain
            .status_addr()
            .and_then(|addr| Some((addr, self.epoch.spot(addr)?)));
        let Some((status_addr, spot)) = status else {
            // In memory that is lost its status byte is not found, and all of the vring's requests are left.
            if self.epoch.is_lost() {
                return Begun::Lost;
            }
            // The chain has no status byte to report the error in. It still goes back to the guest.
            lane.record.broken();
            lane.push_used(taken.head, 0);
            return Begun::Yes;
        };
        let cut = self.device.cut(lane.features);
        match self.parse(lane, taken, chain) {
            Ok(request) if request.verb == Verb::GetId => {
                let outcome = self.identify(lane, &request, chain);
                lane.answer(taken.head, write_status_at(self.epoch, spot, outcome));
            }
            Ok(request) => {
                if self.is_limited && self.is_over_limit(lane, &request) {
                    return Begun::OverLimit;
                }
                let pushed = self.push(lane, taken.head, &request, status_addr, chain, cut);
                if pushed == Pushed::Ended {
                    self.ended += 1;
                    let outcome = Outcome::ended(&request, Ok(()));
                    lane.answer(taken.head, write_status_at(self.epoch, spot, outcome));
                }
            }
            Err(status) => {
                let used = write_status_at(self.epoch, spot, Outcome::refused(status));
                let Some(used_bytes) = used else {
                    return Begun::Lost;
                };
                lane.record.refused(status);
                lane.push_used(taken.head, used_bytes);
            }
        }
        Begun::Yes
    }

    /// Counts a request against the disk's limits, or notes when to ask again.
    #[cold]
    #[inline(never)]
    fn is_over_limit(&self, lane: &mut Lane, request: &Request) -> bool {
        let Some(demand) = Demand::of(request) else {
            return false;
        };
        let now_ns = self.device.now_ns();
        match self.device.throttle.admit(lane.index, demand, now_ns) {
            Ok(()) => {
                let throttled = lane.throttled.take();
                if let Some(since_ns) = throttled.and_then(|throttled| throttled.since_ns) {
                    lane.record.throttled(now_ns.saturating_sub(since_ns));
                }
                false
            }
            Err(due_ns) => {
                let before = lane.throttled.and_then(|throttled| throttled.since_ns);
                // One that may ask again at once has not met a limit.
                let since_ns = before.or((due_ns > now_ns).then_some(now_ns));
                lane.throttled = Some(Throttled { since_ns, due_ns });
                true
            }
        }
    }

    /// Copies the header (and a range, if there is one) out of guest memory once and parses the copy.
    // Inlined: called once, it costs 32 instructions more for each request.
    #[inline(always)]
    fn parse(&self, lane: &Lane, taken: TakenChain, chain: &Chain) -> Result<Request, Status> {
        if taken.fault.is_some() {
            return Err(Status::IoErr);
        }
        let shape = chain.shape();
        let ranged = shape.readable_bytes == (HEADER_BYTES + RANGE_BYTES) as u64;
        if !ranged && let Some(header) = self.epoch.copy_16(chain.readable()) {
            return self.judge(lane, &header, shape);
        }
        let mut head = [0; HEADER_BYTES + RANGE_BYTES];
        // Only discard and write-zeroes have a range after the header. The data of a write must not be read
        // here.
        let head_bytes = if ranged { head.len() } else { HEADER_BYTES };
        let head = head.get_mut(..head_bytes).unwrap_or_default();
        let copied = self
            .epoch
            .copy_in(chain.readable(), head)
            .map_err(|_| Status::IoErr)?;
        self.judge(lane, head.get(..copied).unwrap_or_default(), shape)
    }

    // Inlined for the reason given at `Request::parse`.
    #[inline(always)]
    fn judge(&self, lane: &Lane, head: &[u8], shape: Shape) -> Result<Request, Status> {
        let gate = Gate {
            limits: self.device.disk.limits(),
            capacity_bytes: self.device.disk.capacity_bytes(),
            features: lane.features,
        };
        Request::parse(head, shape, gate)
    }

    fn identify(&mut self, lane: &mut Lane, request: &Request, chain: &mut Chain) -> Outcome {
        let len = request.len_bytes as usize;
        let answer = self.device.serial.get(..len).unwrap_or(&self.device.serial);
        match self.epoch.copy_out(chain.data_in(), answer) {
            Ok(_) => {
                lane.record.at_once(request.verb, request.len_bytes, 1);
                Outcome::ended(request, Ok(()))
            }
            Err(_) => {
                lane.record.refused(Status::IoErr);
                Outcome::refused(Status::IoErr)
            }
        }
    }

    /// Counts a request that completed inline.
    #[inline]
    fn ended(&mut self, lane: &mut Lane, request: &Request) {
        let run = &mut self.run;
        if run.verb != request.verb || run.len_bytes != request.len_bytes {
            run.count(&mut lane.record);
            (run.verb, run.len_bytes) = (request.verb, request.len_bytes);
        }
        run.n += 1;
    }

    /// Pushes a request to the store, or completes it inline.
    #[inline]
    fn push(
        &mut self,
        lane: &mut Lane,
        head: u16,
        request: &Request,
        status_addr: u64,
        chain: &mut Chain,
        cut: Cut,
    ) -> Pushed {
        let data = match request.verb {
            Verb::Read => chain.data_in(),
            Verb::Write => chain.data_out(HEADER_BYTES as u64),
            _ => &[],
        };
        let timing = self.split(request);
        let cut = Cut {
            chunk_bytes: timing.and_then(|timing| timing.chunk_bytes),
            ..cut
        };
        let whole = Plan::whole(request, data, &cut);
        if self.watched {
            lane.record.planned(request, self.laps);
        }
        // Requests that the splitter times are always pushed, so that they are timed to their completion.
        if timing.is_none()
            && let Some(op) = &whole
            && self.store.at_once(self.epoch, op)
        {
            if self.noted {
                if self.watched {
                    lane.record.watch(request, data, self.epoch, self.laps);
                }
                let is_read = request.verb == Verb::Read;
                let written = if is_read { data } else { &[] };
                lane.vring.log_written(written, status_addr);
            }
            self.ended(lane, request);
            return Pushed::Ended;
        }
        let mut token = Token {
            lane: self.lane_number,
            head,
            op: 0,
        };
        let mut push = |op| {
            self.store
                .push(self.reactor, self.epoch, op, token.to_bits());
            token.op += 1;
        };
        match whole {
            Some(op) => push(op),
            None => Plan::new(request, data, &cut).for_each(push),
        }
        if token.op == 0 {
            // A request for no bytes needs no op.
            lane.record.at_once(request.verb, 0, 1);
            return Pushed::Ended;
        }
        let changes = !matches!(request.verb, Verb::Read | Verb::Flush);
        // A durable one is durable by itself, but not what was answered before the cache was switched off.
        let cached = changes && (!cut.durable || self.device.owes_flush());
        self.splitting.requests += 1;
        let order = lane.slots.next_order();
        lane.slots.fill(
            head,
            Slot {
                request: *request,
                status_addr,
                epoch: self.epoch.clone(),
                ops_left: token.op,
                cached,
                timing,
                failed: None,
                order,
            },
        );
        lane.record.began(head, request, data, self.laps);
        Pushed::UnderWay
    }
}

/// Result of pushing a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pushed {
    /// In flight: its slot waits for its ops.
    UnderWay,
    /// Completed successfully, and counted.
    Ended,
}

impl<S: Store> Acceptance<'_, S> {
    /// Returns how a read or write is split. For small requests no clock is read.
    #[inline]
    fn split(&mut self, request: &Request) -> Option<SplitTiming> {
        let direction = DataDirection::of(request.verb)?;
        if request.len_bytes < SPLIT_MIN_BYTES {
            self.splitting.splitter.note_small(direction);
            return None;
        }
        self.split_large(direction, request.len_bytes)
    }

    fn split_large(&mut self, direction: DataDirection, len_bytes: u64) -> Option<SplitTiming> {
        let splitting = &mut *self.splitting;
        let learns = splitting.splitter.learns();
        let start_ns = self.device.now_ns();
        let beside = splitting.requests.saturating_sub(splitting.large);
        let chunk_bytes = splitting
            .splitter
            .choose(direction, len_bytes, beside, start_ns);
        splitting.large += u32::from(learns);
        (learns || chunk_bytes.is_some()).then_some(SplitTiming {
            chunk_bytes,
            start_ns,
        })
    }
}
