//! Table of the requests in flight, indexed by the head of their chain.

use std::num::NonZeroU32;

use cleave_blk::{Outcome, Request, Verb};
use cleave_guest::Epoch;

/// How a large request is split, and when it was planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SplitTiming {
    /// `None`: not split.
    pub(crate) chunk_bytes: Option<NonZeroU32>,
    pub(crate) start_ns: u64,
}

/// A request in flight. It is kept until all its ops have completed.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub(crate) request: Request,
    pub(crate) status_addr: u64,
    /// The memory table in which it was taken. Its data and status go there.
    pub(crate) epoch: Epoch,
    /// Ops that have not completed; at least one.
    pub(crate) ops_left: u32,
    /// A change that ends with a sync if the cache is off by then: it was pushed while the cache was on, or a flush is owed.
    pub(crate) cached: bool,
    /// Set if the request is split, or if the splitter is notified of its completion.
    pub(crate) timing: Option<SplitTiming>,
    /// The failed op with the lowest number, and its errno. The first error by offset decides the status.
    pub(crate) failed: Option<(u32, i32)>,
    /// Position in the order in which the vring's requests were taken.
    pub(crate) order: u64,
}

/// State of a head.
#[derive(Debug, Clone)]
enum Entry {
    Free,
    Busy(Slot),
    /// Its request failed and will be repeated (see `stall`). Holds no memory.
    Stalled,
}

/// A request whose last op has completed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) verb: Verb,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
    pub(crate) status_addr: u64,
    pub(crate) epoch: Epoch,
    pub(crate) outcome: Outcome,
    pub(crate) timing: Option<SplitTiming>,
    /// Errno of the op that decides its status.
    pub(crate) errno: Option<i32>,
    pub(crate) order: u64,
}

impl Ended {
    /// Returns true if the request was cut into several ops by choice, not because of a stripe.
    #[inline]
    pub(crate) fn is_split(&self) -> bool {
        let chunk = self.timing.and_then(|timing| timing.chunk_bytes);
        chunk.is_some_and(|chunk| u64::from(chunk.get()) < self.len_bytes)
    }
}

/// The next step after the completion of an op.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// Wait for the request's other ops.
    Wait,
    /// Sync first. The sync is one more op of the request.
    Sync,
    /// Complete the request.
    End(Ended),
}

/// A fixed table with one entry per head: no allocation, O(1), and it detects a head that is reused in flight.
#[derive(Debug)]
pub(crate) struct Slots {
    table: Box<[Entry]>,
    /// Number of requests that were entered, and of those that were removed, since the vring started.
    filled: u64,
    ended: u64,
}

impl Slots {
    pub(crate) fn new(vring_size: u16) -> Slots {
        Slots {
            table: vec![Entry::Free; usize::from(vring_size)].into_boxed_slice(),
            filled: 0,
            ended: 0,
        }
    }

    /// Returns the number of requests in flight. Stalled requests do not count.
    #[inline]
    pub(crate) fn taken(&self) -> u32 {
        // At most the size of the table, so this does not truncate.
        self.filled.wrapping_sub(self.ended) as u32
    }

    /// Returns true if a request with this head is in flight or stalled.
    #[inline]
    pub(crate) fn is_taken(&self, head: u16) -> bool {
        self.table
            .get(usize::from(head))
            .is_none_or(|entry| !matches!(entry, Entry::Free))
    }

    /// Returns the position in the order for the next request.
    #[inline]
    pub(crate) fn next_order(&self) -> u64 {
        self.filled
    }

    /// Stops timing the requests in flight, because the splitter that chose for them was replaced.
    pub(crate) fn forget_choices(&mut self) {
        for entry in &mut self.table {
            if let Entry::Busy(slot) = entry {
                slot.timing = None;
            }
        }
    }

    /// Enters a request whose ops have been pushed. The head must be free.
    #[inline]
    pub(crate) fn fill(&mut self, head: u16, request: Slot) {
        if let Some(entry) = self.table.get_mut(usize::from(head)) {
            debug_assert!(matches!(entry, Entry::Free) && request.ops_left > 0);
            *entry = Entry::Busy(request);
            self.filled += 1;
        }
    }

    /// Reserves the head of a request that has just ended and will be repeated.
    pub(crate) fn stall(&mut self, head: u16) {
        if let Some(entry @ Entry::Free) = self.table.get_mut(usize::from(head)) {
            *entry = Entry::Stalled;
        }
    }

    /// Frees the head of a stalled request.
    pub(crate) fn unstall(&mut self, head: u16) {
        if let Some(entry @ Entry::Stalled) = self.table.get_mut(usize::from(head)) {
            *entry = Entry::Free;
        }
    }

    /// Gives a repeated request its old position in the order. `false`: it has completed already.
    pub(crate) fn keep_order(&mut self, head: u16, order: u64) -> bool {
        match self.table.get_mut(usize::from(head)) {
            Some(Entry::Busy(slot)) => {
                slot.order = order;
                true
            }
            _ => false,
        }
    }

    /// Returns true if the request with this position in the order is in flight.
    pub(crate) fn has(&self, head: u16, order: u64) -> bool {
        let entry = self.table.get(usize::from(head));
        matches!(entry, Some(Entry::Busy(slot)) if slot.order == order)
    }

    /// Records the completion of one op. `write_through`: the cache mode now.
    #[inline]
    pub(crate) fn op_ended(
        &mut self,
        head: u16,
        op: u32,
        result: Result<(), i32>,
        write_through: bool,
    ) -> NextStep {
        let Some(entry) = self.table.get_mut(usize::from(head)) else {
            return NextStep::Wait;
        };
        let Entry::Busy(slot) = entry else {
            return NextStep::Wait;
        };
        if let Err(errno) = result
            && slot.failed.is_none_or(|(first, _)| op < first)
        {
            slot.failed = Some((op, errno));
        }
        slot.ops_left -= 1;
        if slot.ops_left > 0 {
            return NextStep::Wait;
        }
        if slot.cached && slot.failed.is_none() && write_through {
            // The cache was switched to write-through meanwhile. Every write that completes from then on must
            // be durable.
            (slot.cached, slot.ops_left) = (false, 1);
            return NextStep::Sync;
        }
        let Entry::Busy(slot) = std::mem::replace(entry, Entry::Free) else {
            return NextStep::Wait;
        };
        self.ended += 1;
        NextStep::End(slot.end())
    }
}

impl Slot {
    fn end(self) -> Ended {
        let errno = self.failed.map(|(_, errno)| errno);
        let outcome = Outcome::ended(&self.request, errno.map_or(Ok(()), Err));
        Ended {
            verb: self.request.verb,
            offset_bytes: self.request.offset_bytes,
            len_bytes: self.request.len_bytes,
            status_addr: self.status_addr,
            epoch: self.epoch,
            outcome,
            timing: self.timing,
            errno,
            order: self.order,
        }
    }
}

#[cfg(test)]
mod tests {
    use cleave_blk::Status;
    use cleave_guest::Memory;

    use super::*;

    /// Returns a read of `len_bytes` in `ops_left` ops.
    fn read(len_bytes: u64, ops_left: u32, status_addr: u64, cached: bool) -> Slot {
        Slot {
            request: Request {
                verb: Verb::Read,
                offset_bytes: 0,
                len_bytes,
            },
            status_addr,
            epoch: Memory::new(Vec::new()).unwrap().into(),
            ops_left,
            cached,
            timing: None,
            failed: None,
            order: 0,
        }
    }

    fn ended(next: NextStep) -> Ended {
        match next {
            NextStep::End(ended) => ended,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_write_in_flight_when_the_cache_is_switched_off_is_synced_before_it_completes() {
        let mut slots = Slots::new(4);
        for (cached, write_through, failed, expected) in [
            (true, true, false, true),
            (true, false, false, false),
            (false, true, false, false),
            (true, true, true, false),
        ] {
            slots.fill(0, read(512, 1, 0, cached));
            let result = if failed { Err(5) } else { Ok(()) };
            let next = slots.op_ended(0, 0, result, write_through);
            assert_eq!(
                next == NextStep::Sync,
                expected,
                "{cached} {write_through} {failed}"
            );
            if expected {
                assert!(slots.is_taken(0));
                let last = ended(slots.op_ended(0, u32::MAX, Err(5), true));
                assert_eq!(last.errno, Some(5), "a sync that fails fails the write");
            }
            assert!(!slots.is_taken(0));
        }
    }

    #[test]
    fn a_request_completes_with_its_last_op() {
        let mut slots = Slots::new(8);
        slots.fill(3, read(4096, 3, 77, false));
        assert!(slots.is_taken(3) && !slots.is_taken(2));
        assert_eq!(slots.op_ended(3, 1, Ok(()), false), NextStep::Wait);
        assert_eq!(slots.op_ended(3, 0, Ok(()), false), NextStep::Wait);
        let ended = ended(slots.op_ended(3, 2, Ok(()), false));
        assert_eq!(
            (ended.status_addr, ended.outcome.used_bytes, ended.errno),
            (77, 4097, None)
        );
        assert_eq!((slots.taken(), slots.is_taken(3)), (0, false));
        assert_eq!(
            slots.op_ended(3, 2, Ok(()), false),
            NextStep::Wait,
            "nothing ends twice"
        );
    }

    #[test]
    fn the_first_error_by_offset_decides_in_any_order_of_completion() {
        let mut slots = Slots::new(1);
        slots.fill(0, read(4096, 3, 0, false));
        assert_eq!(slots.op_ended(0, 2, Err(5), false), NextStep::Wait);
        assert_eq!(slots.op_ended(0, 1, Err(28), false), NextStep::Wait);
        let ended = ended(slots.op_ended(0, 0, Ok(()), false));
        assert_eq!(
            (ended.errno, ended.outcome.status, ended.outcome.used_bytes),
            (Some(28), Status::IoErr, 1)
        );
    }

    #[test]
    fn a_stalled_request_keeps_its_head_and_its_order_and_is_not_in_flight() {
        let mut slots = Slots::new(4);
        slots.fill(2, read(512, 1, 0, false));
        let first = ended(slots.op_ended(2, 0, Err(5), false));
        slots.stall(2);
        assert!(slots.is_taken(2));
        assert_eq!((slots.taken(), slots.next_order()), (0, 1));
        assert_eq!(slots.op_ended(2, 0, Ok(()), false), NextStep::Wait);
        assert!(!slots.keep_order(2, first.order));
        slots.unstall(2);
        assert!(!slots.is_taken(2));
        let again = Slot {
            order: slots.next_order(),
            ..read(512, 1, 0, false)
        };
        slots.fill(2, again);
        assert!(slots.has(2, 1) && slots.keep_order(2, first.order));
        assert!(slots.has(2, first.order) && !slots.has(2, 1));
        let ended = ended(slots.op_ended(2, 0, Ok(()), false));
        assert_eq!((ended.order, slots.taken()), (first.order, 0));
    }

    #[test]
    fn a_head_outside_the_table_counts_as_taken() {
        assert!(Slots::new(4).is_taken(4));
    }
}
