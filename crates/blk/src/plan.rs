//! Cuts a request into ops.

use std::num::NonZeroU32;

use crate::{Cut, Request, SPLIT_OPS_MAX, STRIPE_OPS_MAX, Segment, Stripe, Verb};

/// The operation of an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// Store to memory.
    Read,
    /// Memory to store.
    Write {
        /// Write-through (RWF_DSYNC or equal).
        durable: bool,
    },
    /// Makes completed writes durable.
    Sync,
    /// Deallocates space.
    Discard,
    /// Zeroes a range.
    Zero {
        /// Space may be deallocated.
        unmap: bool,
        /// Write-through.
        durable: bool,
    },
}

/// One I/O for an engine: a range of one leg, and its guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Op<'a> {
    /// The operation.
    pub kind: OpKind,
    /// Index of the leg; 0 if the disk has only one.
    pub leg: u16,
    /// Offset on the leg, in bytes.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Guest memory of reads and writes: `len_bytes` bytes starting `skip_bytes` into the first segment. The
    /// segments may extend beyond the op's end. Empty for the other kinds.
    pub segments: &'a [Segment],
    /// Bytes of `segments[0]` that belong to an earlier op: 0, or less than `segments[0].len`.
    pub skip_bytes: u32,
    /// Set if the op covers several chunks of a stripe's leg. Between two of them, its memory has those of the other legs: see
    /// [`chunks`](Op::chunks).
    pub stripe: Option<Stripe>,
}

impl<'a> Op<'a> {
    /// Returns the parts of an op over several chunks of a stripe, the memory of each of which is contiguous in the segments.
    pub fn chunks(&self, stripe: Stripe) -> impl Iterator<Item = Op<'a>> {
        let chunk_bytes = u64::from(stripe.chunk_bytes());
        Plan {
            kind: Some(self.kind),
            offset_bytes: self.offset_bytes,
            left_bytes: self.len_bytes,
            piece_bytes: chunk_bytes,
            segments: self.segments,
            skip_bytes: self.skip_bytes,
            leg: self.leg,
            course: Course::Chunks {
                gap_bytes: chunk_bytes * (u64::from(stripe.legs()) - 1),
            },
            ..Plan::empty()
        }
    }
}

/// The ops of one request, as an iterator that owns nothing. Ops of a read or write are in order of the disk offset
/// at which they begin, so of several errors the one of the lowest op is the first by offset.
///
/// # Without a stripe
///
/// A read or write of at most one chunk is one op. A longer one is cut at disk offsets that are multiples of the
/// chunk, so that all ops but the first and the last are whole aligned pieces. If cutting from the request's start
/// needs one op less, it is cut from its start instead, but only if that is a multiple of 4 KiB: otherwise each op
/// would begin and end inside a block of the store. The guest's segments are cut at the same places, wherever their
/// own borders are. If a chunk would give more than [`SPLIT_OPS_MAX`] ops, it is doubled until it does not.
///
/// Example with a chunk of 8 KiB: a read of 20 KiB at offset 4 KiB takes 3 ops either way, and is cut at
/// multiples. Segments A and B are of 10 KiB each.
///
/// | op | `offset_bytes` | `len_bytes` | `segments` | `skip_bytes` | memory |
/// |----|----------------|-------------|------------|--------------|--------|
/// | 0  | 4096           | 4096        | A, B       | 0            | A\[0..4096\] |
/// | 1  | 8192           | 8192        | A, B       | 4096         | A\[4096..10240\], B\[0..2048\] |
/// | 2  | 16384          | 8192        | B          | 2048         | B\[2048..10240\] |
///
/// A read of 16 KiB at 4 KiB would take 3 such ops. Cut from its start it takes 2: 8 KiB at 4 KiB, then 8 KiB
/// at 12 KiB.
///
/// # On a stripe
///
/// No op of a read or write crosses a border of the stripe's chunks. A smaller chunk for splitting cuts those
/// pieces further, at its multiples. A discard or write-zeroes is one range, and so one op, on each leg that
/// it touches. A flush is one op for every leg.
///
/// A read or write of so many chunks that this would give more than [`STRIPE_OPS_MAX`] ops is cut into equal parts,
/// each with the same number of chunks on every leg, as few as possible. A part has one op on each leg, whose memory
/// lies in pieces ([`Op::chunks`]).
///
/// Example with three legs and stripe chunks of 64 KiB: 320 KiB at 32 KiB touch chunks 0 to 5. A read has six
/// ops, on legs 0, 1, 2, 0, 1, 2, the first and the last of 32 KiB. A discard has three: leg 0 from 32 KiB to
/// 128 KiB, leg 1 from 0 to 128 KiB, leg 2 from 0 to 96 KiB.
///
/// A request of no bytes and a get-id have no ops; they are complete as soon as they are planned.
#[derive(Debug, Clone)]
pub struct Plan<'a> {
    /// `None` when nothing is left.
    kind: Option<OpKind>,
    /// Offset of the next op on its leg; for a range on a stripe, the offset of the request.
    offset_bytes: u64,
    left_bytes: u64,
    /// Ops end at offsets that are `phase_bytes` modulo this power of two.
    piece_bytes: u64,
    phase_bytes: u64,
    segments: &'a [Segment],
    skip_bytes: u32,
    leg: u16,
    course: Course,
}

/// How the plan proceeds from leg to leg.
#[derive(Debug, Clone, Copy)]
enum Course {
    /// There is one leg.
    Plain,
    /// Chunk by chunk, from leg to leg.
    Striped(Stripe),
    /// One range of at most `rows` chunks per leg: those that begin with the disk's chunks from `chunk` to before `until`, each of
    /// which is on another leg. Then the next part of the request in the same way.
    Ranges {
        stripe: Stripe,
        chunk: u64,
        until: u64,
        rows: u64,
    },
    /// Chunk by chunk on one leg. In memory so many bytes lie between two of them.
    Chunks { gap_bytes: u64 },
    /// Every leg, starting at the plan's.
    EachLeg { legs: u16 },
}

/// A request that begins on a multiple of this may be cut from its start on. Few stores have a larger block, and there such a cut
/// costs time, not data.
const BLOCK_BYTES: u64 = 4096;

impl<'a> Plan<'a> {
    /// Longest op that moves data. The kernel moves at most 0x7fff_f000 bytes at a time. The largest power of
    /// two below that keeps every op but a request's first aligned to any possible block.
    const PIECE_BYTES_MAX: u64 = 1 << 30;

    /// Plans `request` over `data`, the chain's data segments. A get-id has no ops. For a read or write `data` must hold at least the request's length, which it does
    /// if both come from the same chain.
    #[inline]
    pub fn new(request: &Request, data: &'a [Segment], cut: &Cut) -> Plan<'a> {
        let kind = match request.verb {
            Verb::Read => OpKind::Read,
            Verb::Write => OpKind::Write {
                durable: cut.durable,
            },
            Verb::Flush => OpKind::Sync,
            Verb::Discard => OpKind::Discard,
            Verb::WriteZeroes { unmap } => OpKind::Zero {
                unmap,
                durable: cut.durable,
            },
            Verb::GetId => return Plan::empty(),
        };
        if request.len_bytes == 0 && kind != OpKind::Sync {
            return Plan::empty();
        }
        let moves = request.data_bytes() > 0;
        let mut plan = Plan {
            kind: Some(kind),
            offset_bytes: request.offset_bytes,
            left_bytes: request.len_bytes,
            // A discard or write-zeroes moves no data, so it is not cut.
            piece_bytes: if moves {
                Plan::PIECE_BYTES_MAX
            } else {
                1 << 63
            },
            segments: if moves { data } else { &[] },
            ..Plan::empty()
        };
        match (cut.stripe, cut.chunk_bytes) {
            (Some(stripe), chunk) => plan.distribute(stripe, chunk),
            (None, Some(chunk)) if moves => plan.split(chunk),
            (None, _) => {}
        }
        plan
    }

    /// Returns the only op of a read or write that is not cut, which is the common case: the plan's op without the plan. `None`:
    /// use the plan.
    #[inline]
    pub fn whole(request: &Request, data: &'a [Segment], cut: &Cut) -> Option<Op<'a>> {
        let kind = match request.verb {
            Verb::Read => OpKind::Read,
            Verb::Write => OpKind::Write {
                durable: cut.durable,
            },
            _ => return None,
        };
        let most_bytes = cut.chunk_bytes.map_or(Plan::PIECE_BYTES_MAX, power_of_two);
        let fits = (1..=most_bytes).contains(&request.len_bytes);
        (fits && cut.stripe.is_none()).then_some(Op {
            kind,
            leg: 0,
            offset_bytes: request.offset_bytes,
            len_bytes: request.len_bytes,
            segments: data,
            skip_bytes: 0,
            stripe: None,
        })
    }

    fn empty() -> Plan<'a> {
        Plan {
            kind: None,
            offset_bytes: 0,
            left_bytes: 0,
            piece_bytes: Plan::PIECE_BYTES_MAX,
            phase_bytes: 0,
            segments: &[],
            skip_bytes: 0,
            leg: 0,
            course: Course::Plain,
        }
    }

    /// Chooses where a read or write on one leg is cut.
    #[inline]
    fn split(&mut self, chunk_bytes: NonZeroU32) {
        let chunk_bytes = power_of_two(chunk_bytes);
        // Most requests are not longer than a chunk.
        if self.left_bytes > chunk_bytes {
            self.split_long(chunk_bytes);
        }
    }

    fn split_long(&mut self, chunk_bytes: u64) {
        let (offset, len) = (self.offset_bytes, self.left_bytes);
        let mut piece = chunk_bytes;
        loop {
            let inside = offset & (piece - 1);
            let aligned = inside.saturating_add(len).div_ceil(piece);
            let fewest = len.div_ceil(piece);
            let (phase, count) = match offset % BLOCK_BYTES {
                0 if fewest < aligned => (inside, fewest),
                _ => (0, aligned),
            };
            if count <= SPLIT_OPS_MAX as u64 || piece >= Plan::PIECE_BYTES_MAX {
                self.piece_bytes = piece;
                self.phase_bytes = phase;
                return;
            }
            piece *= 2;
        }
    }

    /// Distributes the request over the legs.
    fn distribute(&mut self, stripe: Stripe, chunk_bytes: Option<NonZeroU32>) {
        match self.kind {
            Some(OpKind::Read | OpKind::Write { .. }) => {
                let chunks = self.chunks_touched(stripe);
                if chunks > STRIPE_OPS_MAX as u64 {
                    let legs = u64::from(stripe.legs());
                    let parts_max = STRIPE_OPS_MAX as u64 / legs;
                    return self.range(stripe, chunks.div_ceil(parts_max * legs));
                }
                self.piece_bytes = self.piece_on(stripe, chunk_bytes);
                (self.leg, self.offset_bytes) = stripe.place(self.offset_bytes);
                self.course = Course::Striped(stripe);
            }
            Some(OpKind::Sync) => {
                self.course = Course::EachLeg {
                    legs: stripe.legs(),
                };
            }
            Some(OpKind::Discard | OpKind::Zero { .. }) => {
                self.range(stripe, self.chunks_touched(stripe));
            }
            None => {}
        }
    }

    /// Returns the number of the stripe's chunks that the request touches. It has bytes.
    fn chunks_touched(&self, stripe: Stripe) -> u64 {
        let last_bytes = self.offset_bytes + (self.left_bytes - 1);
        (last_bytes >> stripe.chunk_shift()) - (self.offset_bytes >> stripe.chunk_shift()) + 1
    }

    /// Distributes the request in ranges of at most `rows` chunks on each leg.
    fn range(&mut self, stripe: Stripe, rows: u64) {
        let chunk = self.offset_bytes >> stripe.chunk_shift();
        let until = chunk + self.chunks_touched(stripe).min(stripe.legs().into());
        self.course = Course::Ranges {
            stripe,
            chunk,
            until,
            rows,
        };
    }

    /// Returns the piece size for a read or write on a stripe: the stripe's chunk, or a smaller one for splitting that gives at
    /// most [`SPLIT_OPS_MAX`] ops.
    fn piece_on(&self, stripe: Stripe, chunk_bytes: Option<NonZeroU32>) -> u64 {
        let whole = u64::from(stripe.chunk_bytes());
        let mut piece = chunk_bytes.map_or(whole, power_of_two).min(whole);
        let count =
            |piece: u64| ((self.offset_bytes & (piece - 1)) + self.left_bytes).div_ceil(piece);
        while piece < whole && count(piece) > SPLIT_OPS_MAX as u64 {
            piece *= 2;
        }
        piece
    }

    /// Returns the longest next op of a read or write.
    #[inline]
    fn to_border(&self) -> u64 {
        let behind = self.offset_bytes.wrapping_sub(self.phase_bytes) & (self.piece_bytes - 1);
        self.piece_bytes - behind
    }

    /// Returns the op of a request that is a range on each leg; continues with the next leg, or with the next part.
    fn next_range(&mut self, stripe: Stripe, chunk: u64, until: u64, rows: u64) -> Option<Op<'a>> {
        let kind = self.kind?;
        let shift = stripe.chunk_shift();
        let legs = u64::from(stripe.legs());
        let (leg, row) = stripe.chunk_place(chunk);
        let end_bytes = self.offset_bytes + self.left_bytes;
        let last = (end_bytes - 1) >> shift;
        let last_here = (last - (last - chunk) % legs).min(chunk + (rows - 1) * legs);
        // All chunks are whole except at the request's own ends.
        let start = match chunk == self.offset_bytes >> shift {
            true => stripe.place(self.offset_bytes).1,
            false => row << shift,
        };
        let end = match last_here == last {
            true => stripe.place(end_bytes - 1).1 + 1,
            false => (stripe.chunk_place(last_here).1 + 1) << shift,
        };
        let op = Op {
            kind,
            leg,
            offset_bytes: start,
            len_bytes: end - start,
            segments: self.segments,
            skip_bytes: self.skip_bytes,
            stripe: (!self.segments.is_empty()).then_some(stripe),
        };
        let (mut next, mut until) = (chunk + 1, until);
        if next == until {
            // The part has a chunk of each leg before `until`, unless the request ends there.
            next = until + (rows - 1) * legs;
            until = (next + legs).min(last + 1);
        }
        if next > last {
            self.kind = None;
        } else {
            self.advance_memory((next << shift) - (chunk << shift).max(self.offset_bytes));
        }
        self.course = Course::Ranges {
            stripe,
            chunk: next,
            until,
            rows,
        };
        Some(op)
    }

    /// Moves to the next leg after an op that is not the last.
    #[inline]
    fn change_leg(&mut self, stripe: Stripe) {
        let chunk = u64::from(stripe.chunk_bytes());
        if self.offset_bytes & (chunk - 1) != 0 {
            return;
        }
        // The end of a chunk: the next one is in the same row of the next leg, or in the next row.
        self.leg += 1;
        if self.leg == stripe.legs() {
            self.leg = 0;
        } else {
            self.offset_bytes -= chunk;
        }
    }

    /// Moves past an op that is not the last.
    fn advance(&mut self, len_bytes: u64) {
        self.offset_bytes = self.offset_bytes.saturating_add(len_bytes);
        self.left_bytes = self.left_bytes.saturating_sub(len_bytes);
        self.advance_memory(len_bytes);
    }

    /// Moves past bytes of the segments.
    fn advance_memory(&mut self, len_bytes: u64) {
        let mut skip_bytes = u64::from(self.skip_bytes).saturating_add(len_bytes);
        while let Some((first, rest)) = self.segments.split_first() {
            let Some(beyond) = skip_bytes.checked_sub(u64::from(first.len)) else {
                break;
            };
            skip_bytes = beyond;
            self.segments = rest;
        }
        // Less than the first segment's length, hence a u32. If the segments have run out (they were shorter
        // than the request, which `new` forbids), there is nothing to skip into.
        self.skip_bytes = if self.segments.is_empty() {
            0
        } else {
            u32::try_from(skip_bytes).unwrap_or(0)
        };
    }
}

impl<'a> Iterator for Plan<'a> {
    type Item = Op<'a>;

    #[inline]
    fn next(&mut self) -> Option<Op<'a>> {
        let mut op = Op {
            kind: self.kind?,
            leg: self.leg,
            offset_bytes: self.offset_bytes,
            len_bytes: self.left_bytes,
            segments: self.segments,
            skip_bytes: self.skip_bytes,
            stripe: None,
        };
        match self.course {
            // Most requests end here, without a division or a walk along the segments.
            Course::Plain if self.left_bytes <= self.piece_bytes => self.kind = None,
            Course::Plain => {
                op.len_bytes = self.to_border();
                self.advance(op.len_bytes);
            }
            Course::Striped(_) if self.left_bytes <= self.to_border() => self.kind = None,
            Course::Striped(stripe) => {
                op.len_bytes = self.to_border();
                self.advance(op.len_bytes);
                self.change_leg(stripe);
            }
            Course::Ranges {
                stripe,
                chunk,
                until,
                rows,
            } => return self.next_range(stripe, chunk, until, rows),
            Course::Chunks { .. } if self.left_bytes <= self.to_border() => self.kind = None,
            Course::Chunks { gap_bytes } => {
                op.len_bytes = self.to_border();
                self.advance(op.len_bytes);
                self.advance_memory(gap_bytes);
            }
            Course::EachLeg { legs } => {
                self.leg += 1;
                if self.leg >= legs {
                    self.kind = None;
                }
            }
        }
        Some(op)
    }
}

/// Rounds a chunk up to a power of two.
#[inline]
fn power_of_two(chunk_bytes: NonZeroU32) -> u64 {
    u64::from(chunk_bytes.get())
        .next_power_of_two()
        .min(Plan::PIECE_BYTES_MAX)
}

impl std::iter::FusedIterator for Plan<'_> {}

#[cfg(test)]
mod tests;
