//! Turning a request into ops.

use std::num::NonZeroU64;

use crate::{Request, Segment, Verb};

/// What an engine does with an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// Store to memory.
    Read,
    /// Memory to store; `durable`: on stable storage before it completes.
    Write {
        /// Write-through (RWF_DSYNC or equal).
        durable: bool,
    },
    /// Completed writes become durable.
    Sync,
    /// Give space back.
    Discard,
    /// Zero a range; `unmap`: space may be given back.
    Zero {
        /// Deallocation allowed.
        unmap: bool,
        /// Write-through.
        durable: bool,
    },
}

/// One I/O for an engine: a range of one leg and the stream of guest memory that goes with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Op<'a> {
    /// What to do.
    pub kind: OpKind,
    /// Offset on the store, in bytes.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Guest memory of reads and writes: `len_bytes` bytes starting `skip_bytes` into the first
    /// segment. The segments may reach beyond the op's end. Empty for the other kinds.
    pub segments: &'a [Segment],
    /// Bytes of `segments[0]` that belong to an earlier op; below `segments[0].len` unless that is 0.
    pub skip_bytes: u32,
}

/// The ops of one request, in order of disk offset; an iterator that owns nothing.
///
/// A request of at most the cut size is one op. A larger one is cut where disk offsets are multiples
/// of the cut size, so that all ops but the first and the last are whole aligned pieces; the guest's
/// segments are cut exactly there too, wherever their own borders lie.
///
/// Worked example, with a cut of 8 KiB: a read of 12 KiB at offset 4 KiB into segments A and B of
/// 6 KiB each. The disk is cut at 8 KiB, which is 4 KiB into the data, inside A:
///
/// | op | `offset_bytes` | `len_bytes` | `segments` | `skip_bytes` | memory |
/// |----|----------------|-------------|------------|--------------|--------|
/// | 1  | 4096           | 4096        | A, B       | 0            | A\[0..4096\] |
/// | 2  | 8192           | 8192        | A, B       | 4096         | A\[4096..6144\], B\[0..6144\] |
///
/// A request of no bytes has no ops, and neither has a get-id: such a request has ended as soon as
/// it is planned. A flush is one op of no bytes.
#[derive(Debug, Clone)]
pub struct Plan<'a> {
    /// `None` when nothing is left.
    kind: Option<OpKind>,
    offset_bytes: u64,
    left_bytes: u64,
    cut_bytes: NonZeroU64,
    segments: &'a [Segment],
    skip_bytes: u32,
}

impl<'a> Plan<'a> {
    /// Longest op. The kernel moves at most 0x7fff_f000 bytes at a time; the largest power of two
    /// below keeps every op but a request's first aligned to any block there is.
    const CUT_BYTES_MAX: NonZeroU64 = NonZeroU64::new(1 << 30).unwrap();

    /// Most ops that a plan yields: a parsed request is shorter than 4 GiB, which are 4 pieces where it
    /// begins at a cut and one more where it does not.
    pub const OPS_MAX: usize = 5;

    /// Plans `request` over `data`, the chain's data segments. `durable`: writes are write-through.
    /// A get-id has no plan. For a read or write `data` must hold at least the request's length,
    /// which it does when both come from the same chain.
    #[inline]
    pub fn new(request: &Request, data: &'a [Segment], durable: bool) -> Plan<'a> {
        Plan::with_cut(request, data, durable, Plan::CUT_BYTES_MAX)
    }

    #[inline]
    fn with_cut(
        request: &Request,
        data: &'a [Segment],
        durable: bool,
        cut_bytes: NonZeroU64,
    ) -> Plan<'a> {
        let kind = match request.verb {
            Verb::Read => OpKind::Read,
            Verb::Write => OpKind::Write { durable },
            Verb::Flush => OpKind::Sync,
            Verb::Discard => OpKind::Discard,
            Verb::WriteZeroes { unmap } => OpKind::Zero { unmap, durable },
            Verb::GetId => return Plan::empty(cut_bytes),
        };
        if request.len_bytes == 0 && kind != OpKind::Sync {
            return Plan::empty(cut_bytes);
        }
        Plan {
            kind: Some(kind),
            offset_bytes: request.offset_bytes,
            left_bytes: request.len_bytes,
            cut_bytes,
            segments: if request.data_bytes() == 0 { &[] } else { data },
            skip_bytes: 0,
        }
    }

    fn empty(cut_bytes: NonZeroU64) -> Plan<'a> {
        Plan {
            kind: None,
            offset_bytes: 0,
            left_bytes: 0,
            cut_bytes,
            segments: &[],
            skip_bytes: 0,
        }
    }

    /// Moves past an op that is not the last.
    fn advance(&mut self, len_bytes: u64) {
        self.offset_bytes = self.offset_bytes.saturating_add(len_bytes);
        self.left_bytes = self.left_bytes.saturating_sub(len_bytes);
        let mut skip_bytes = u64::from(self.skip_bytes).saturating_add(len_bytes);
        while let Some((first, rest)) = self.segments.split_first() {
            let Some(beyond) = skip_bytes.checked_sub(u64::from(first.len)) else {
                break;
            };
            skip_bytes = beyond;
            self.segments = rest;
        }
        // Below the first segment's length, hence a u32; where the segments have run out (they were
        // shorter than the request, which `new` forbids), there is nothing to skip into.
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
        let kind = self.kind?;
        let mut op = Op {
            kind,
            offset_bytes: self.offset_bytes,
            len_bytes: self.left_bytes,
            segments: self.segments,
            skip_bytes: self.skip_bytes,
        };
        // Most requests end here: no division, no walk along the segments.
        if self.left_bytes <= self.cut_bytes.get() {
            self.kind = None;
        } else {
            op.len_bytes = self.cut_bytes.get() - self.offset_bytes % self.cut_bytes;
            self.advance(op.len_bytes);
        }
        Some(op)
    }
}

impl std::iter::FusedIterator for Plan<'_> {}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spec::SECTOR_BYTES;

    fn request(verb: Verb, offset_bytes: u64, len_bytes: u64) -> Request {
        Request {
            verb,
            offset_bytes,
            len_bytes,
        }
    }

    fn cut(bytes: u64) -> NonZeroU64 {
        NonZeroU64::new(bytes).unwrap()
    }

    /// Where each byte of a stream lies, up to `len_bytes` of them, after the first `skip_bytes`.
    fn flatten(segments: &[Segment], skip_bytes: u32, len_bytes: u64) -> Vec<u64> {
        segments
            .iter()
            .flat_map(|segment| (0..u64::from(segment.len)).map(|at| segment.addr + at))
            .skip(skip_bytes as usize)
            .take(len_bytes as usize)
            .collect()
    }

    #[test]
    fn worked_example_of_the_doc() {
        let a = Segment {
            addr: 0x10000,
            len: 6144,
        };
        let b = Segment {
            addr: 0x90000,
            len: 6144,
        };
        let request = request(Verb::Read, 4096, 12288);
        let ops: Vec<_> = Plan::with_cut(&request, &[a, b], false, cut(8192))
            .map(|op| {
                (
                    op.offset_bytes,
                    op.len_bytes,
                    op.segments.to_vec(),
                    op.skip_bytes,
                )
            })
            .collect();
        let expected = vec![(4096, 4096, vec![a, b], 0), (8192, 8192, vec![a, b], 4096)];
        assert_eq!(ops, expected);
    }

    #[test]
    fn each_verb_has_its_op() {
        let data = [Segment {
            addr: 0x1000,
            len: 4096,
        }];
        let table = [
            (Verb::Read, false, OpKind::Read, 1),
            (Verb::Read, true, OpKind::Read, 1),
            (Verb::Write, false, OpKind::Write { durable: false }, 1),
            (Verb::Write, true, OpKind::Write { durable: true }, 1),
            (Verb::Discard, true, OpKind::Discard, 0),
            (
                Verb::WriteZeroes { unmap: true },
                false,
                OpKind::Zero {
                    unmap: true,
                    durable: false,
                },
                0,
            ),
            (
                Verb::WriteZeroes { unmap: false },
                true,
                OpKind::Zero {
                    unmap: false,
                    durable: true,
                },
                0,
            ),
        ];
        for (verb, durable, kind, segments) in table {
            let ops: Vec<_> = Plan::new(&request(verb, 8192, 4096), &data, durable).collect();
            let expected = Op {
                kind,
                offset_bytes: 8192,
                len_bytes: 4096,
                segments: &data[..segments],
                skip_bytes: 0,
            };
            assert_eq!(ops, [expected], "{verb:?}");
        }
    }

    #[test]
    fn a_flush_is_one_op_and_never_again() {
        let data = [Segment {
            addr: 0x1000,
            len: 512,
        }];
        let mut plan = Plan::new(&request(Verb::Flush, 0, 0), &data, false);
        let op = plan.next().unwrap();
        assert_eq!(
            (op.kind, op.len_bytes, op.segments),
            (OpKind::Sync, 0, &[][..])
        );
        assert_eq!(plan.next(), None);
        assert_eq!(plan.next(), None);
    }

    #[test]
    fn nothing_to_do_has_no_op() {
        for verb in [
            Verb::Read,
            Verb::Write,
            Verb::Discard,
            Verb::WriteZeroes { unmap: true },
        ] {
            assert_eq!(Plan::new(&request(verb, 512, 0), &[], true).next(), None);
        }
        assert_eq!(
            Plan::new(&request(Verb::GetId, 0, 20), &[], true).next(),
            None
        );
    }

    #[test]
    fn the_largest_request_is_cut_where_the_kernel_would() {
        const GIB: u64 = 1 << 30;
        let len = (1 << 32) - 512;
        let data = [Segment {
            addr: 0,
            len: u32::try_from(len).unwrap(),
        }];
        // offset; lengths of the ops.
        let table: [(u64, &[u64]); 3] = [
            (0, &[GIB, GIB, GIB, GIB - 512]),
            (512, &[GIB - 512, GIB, GIB, GIB]),
            (GIB - 512, &[512, GIB, GIB, GIB, GIB - 1024]),
        ];
        for (offset, lens) in table {
            let ops: Vec<_> = Plan::new(&request(Verb::Read, offset, len), &data, false).collect();
            let found: Vec<_> = ops.iter().map(|op| op.len_bytes).collect();
            assert_eq!(found, lens);
            assert!(ops.len() <= Plan::OPS_MAX);
            for op in ops {
                assert_eq!(u64::from(op.skip_bytes), op.offset_bytes - offset);
            }
        }
    }

    #[test]
    fn segments_that_run_out_skip_nothing() {
        let data = [Segment {
            addr: 0x1000,
            len: 512,
        }];
        let ops: Vec<_> =
            Plan::with_cut(&request(Verb::Write, 0, 4096), &data, false, cut(1024)).collect();
        assert_eq!(ops.len(), 4);
        for op in &ops[1..] {
            assert_eq!((op.segments, op.skip_bytes), (&[][..], 0));
        }
    }

    /// Segments of any length, none among them, whose sum is a whole number of sectors; a request
    /// over a beginning of them, an offset, and a cut.
    fn layouts() -> impl Strategy<Value = (Vec<Segment>, u64, u64, u64)> {
        let lens = prop::collection::vec(
            prop_oneof![Just(0u32), Just(512), Just(4096), 1..3000u32],
            0..24,
        );
        (lens, 0..1000u64, 0..=100u64, 1..40u64).prop_map(|(lens, sector, share, cut_sectors)| {
            let mut segments: Vec<_> = lens
                .iter()
                .zip(1u64..)
                // Far apart, so that a byte taken from the wrong segment is seen.
                .map(|(len, n)| Segment {
                    addr: n << 20,
                    len: *len,
                })
                .collect();
            let sum: u64 = lens.iter().map(|len| u64::from(*len)).sum();
            let missing = sum.next_multiple_of(SECTOR_BYTES) - sum;
            segments.push(Segment {
                addr: 1 << 40,
                len: u32::try_from(missing).unwrap(),
            });
            let sectors = (sum + missing) / SECTOR_BYTES * share / 100;
            let bytes = |sectors| sectors * SECTOR_BYTES;
            (segments, bytes(sector), bytes(sectors), bytes(cut_sectors))
        })
    }

    proptest! {
        /// Splitting changes nothing: the ops cover the request's range of the disk and
        /// its bytes of memory exactly, in order, without overlap.
        #[test]
        fn ops_cover_the_request_exactly(
            (segments, offset, len, cut_bytes) in layouts(),
            write in any::<bool>(),
        ) {
            let verb = if write { Verb::Write } else { Verb::Read };
            let request = request(verb, offset, len);
            let mut next = offset;
            let mut memory = Vec::new();
            let mut count = 0;
            for op in Plan::with_cut(&request, &segments, false, cut(cut_bytes)) {
                prop_assert_eq!(op.offset_bytes, next);
                prop_assert!(op.len_bytes > 0 && op.len_bytes <= cut_bytes);
                prop_assert!(next == offset || next % cut_bytes == 0);
                let first = op.segments[0].len;
                prop_assert!(op.skip_bytes < first || (first == 0 && op.skip_bytes == 0));
                let bytes = flatten(op.segments, op.skip_bytes, op.len_bytes);
                prop_assert_eq!(bytes.len() as u64, op.len_bytes);
                memory.extend(bytes);
                next += op.len_bytes;
                count += 1;
            }
            prop_assert_eq!(next, offset + len);
            prop_assert_eq!(memory, flatten(&segments, 0, len));
            prop_assert!(count <= len / cut_bytes + 2);
        }

        /// What has no memory is cut at the same places.
        #[test]
        fn ranges_are_covered_exactly(
            offset in 0..1u64 << 40,
            len in 1..1u64 << 32,
            cut_bytes in (1u64 << 24)..1 << 31,
        ) {
            let mut next = offset;
            let request = request(Verb::Discard, offset, len);
            for op in Plan::with_cut(&request, &[], false, cut(cut_bytes)) {
                prop_assert_eq!(op.offset_bytes, next);
                prop_assert!(op.len_bytes > 0 && op.len_bytes <= cut_bytes);
                prop_assert!(op.segments.is_empty() && op.skip_bytes == 0);
                next += op.len_bytes;
            }
            prop_assert_eq!(next, offset + len);
        }

        /// The bound that slots and engines are sized by.
        #[test]
        fn no_parsed_request_has_more_than_ops_max(
            sector in 0..1u64 << 40,
            sectors in 0..=(u64::from(u32::MAX) / SECTOR_BYTES),
        ) {
            let request = request(Verb::Discard, sector * SECTOR_BYTES, sectors * SECTOR_BYTES);
            prop_assert!(Plan::new(&request, &[], false).count() <= Plan::OPS_MAX);
        }
    }
}
