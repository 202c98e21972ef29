use proptest::prelude::*;

use super::*;
use crate::spec::SECTOR_BYTES;
use crate::{OP_CHUNKS_MAX, PLAIN_OPS_MAX};

fn request(verb: Verb, offset_bytes: u64, len_bytes: u64) -> Request {
    Request {
        verb,
        offset_bytes,
        len_bytes,
    }
}

const WHOLE: Cut = Cut {
    durable: false,
    chunk_bytes: None,
    stripe: None,
};
const DURABLE: Cut = Cut {
    durable: true,
    ..WHOLE
};

fn chunks(bytes: u32) -> Cut {
    Cut {
        chunk_bytes: NonZeroU32::new(bytes),
        ..WHOLE
    }
}

fn striped(legs: u16, chunk_bytes: u32) -> Cut {
    Cut {
        stripe: Stripe::new(legs, chunk_bytes),
        ..WHOLE
    }
}

/// Returns leg, offset and length of each op.
fn places(request: &Request, cut: &Cut) -> Vec<(u16, u64, u64)> {
    let data = [Segment {
        addr: 0,
        len: u32::MAX,
    }];
    Plan::new(request, &data, cut)
        .map(|op| (op.leg, op.offset_bytes, op.len_bytes))
        .collect()
}

/// Returns the addresses of a stream's bytes, up to `len_bytes` of them, after the first `skip_bytes`.
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
    let segment = |addr| Segment { addr, len: 10_240 };
    let (a, b) = (segment(0x10000), segment(0x90000));
    let ops: Vec<_> = Plan::new(&request(Verb::Read, 4096, 20_480), &[a, b], &chunks(8192))
        .map(|op| {
            (
                op.offset_bytes,
                op.len_bytes,
                op.segments.to_vec(),
                op.skip_bytes,
            )
        })
        .collect();
    let expected = vec![
        (4096, 4096, vec![a, b], 0),
        (8192, 8192, vec![a, b], 4096),
        (16_384, 8192, vec![b], 2048),
    ];
    assert_eq!(ops, expected);
    assert_eq!(
        places(&request(Verb::Read, 4096, 16_384), &chunks(8192)),
        [(0, 4096, 8192), (0, 12_288, 8192)]
    );
}

#[test]
fn striped_example_of_the_doc() {
    const K: u64 = 1024;
    let cut = striped(3, 64 << 10);
    assert_eq!(
        places(&request(Verb::Read, 32 * K, 320 * K), &cut),
        [
            (0, 32 * K, 32 * K),
            (1, 0, 64 * K),
            (2, 0, 64 * K),
            (0, 64 * K, 64 * K),
            (1, 64 * K, 64 * K),
            (2, 64 * K, 32 * K),
        ]
    );
    for verb in [Verb::Discard, Verb::WriteZeroes { unmap: true }] {
        assert_eq!(
            places(&request(verb, 32 * K, 320 * K), &cut),
            [(0, 32 * K, 96 * K), (1, 0, 128 * K), (2, 0, 96 * K),]
        );
    }
    assert_eq!(
        places(&request(Verb::Flush, 0, 0), &cut),
        [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    );
}

/// 3002 chunks go to three legs in 334 parts, each with three chunks on a leg.
#[test]
fn a_request_of_many_chunks_has_ops_over_several() {
    const K: u64 = 1024;
    let cut = striped(3, 4 << 10);
    let long = request(Verb::Read, 2 * K, 3001 * 4 * K);
    let ops = places(&long, &cut);
    assert_eq!(ops.len(), 1002);
    assert_eq!(
        ops[..4],
        [
            (0, 2 * K, 10 * K),
            (1, 0, 12 * K),
            (2, 0, 12 * K),
            (0, 12 * K, 12 * K)
        ]
    );
    let data = [Segment {
        addr: 1 << 20,
        len: u32::MAX,
    }];
    let op = Plan::new(&long, &data, &cut).nth(1).unwrap();
    let parts: Vec<_> = op
        .chunks(cut.stripe.unwrap())
        .map(|part| (part.offset_bytes, part.skip_bytes))
        .collect();
    assert_eq!(
        parts,
        [(0, 2 << 10), (4 << 10, 14 << 10), (8 << 10, 26 << 10)]
    );
}

#[test]
fn requests_are_cut_at_the_right_offsets() {
    const K: u64 = 1024;
    // chunk, offset, length; lengths of the ops.
    let table: [(u32, u64, u64, &[u64]); 8] = [
        // A chunk or less is never cut.
        (8 << 10, 4 * K, 8 * K, &[8 * K]),
        (8 << 10, 512, 512, &[512]),
        // Cut at multiples if that does not take an extra op.
        (8 << 10, 0, 16 * K, &[8 * K, 8 * K]),
        (8 << 10, 4 * K, 20 * K, &[4 * K, 8 * K, 8 * K]),
        (8 << 10, 4 * K, 12 * K, &[4 * K, 8 * K]),
        // Otherwise cut from the start.
        (8 << 10, 4 * K, 16 * K, &[8 * K, 8 * K]),
        (8 << 10, 4 * K, 24 * K, &[8 * K, 8 * K, 8 * K]),
        // Never cut inside blocks.
        (8 << 10, 512, 16 * K, &[8 * K - 512, 8 * K, 512]),
    ];
    for (chunk, offset, len, lens) in table {
        let found: Vec<_> = places(&request(Verb::Write, offset, len), &chunks(chunk))
            .iter()
            .map(|place| place.2)
            .collect();
        assert_eq!(found, lens, "{chunk} {offset} {len}");
    }
    // The chunk is doubled until 64 ops are enough.
    let lens = places(&request(Verb::Read, 0, 4 << 20), &chunks(8 << 10));
    assert_eq!(lens.len(), 64);
    assert!(lens.iter().all(|place| place.2 == 64 * K));
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
        let ops: Vec<_> =
            Plan::new(&request(verb, 8192, 4096), &data, &Cut { durable, ..WHOLE }).collect();
        let expected = Op {
            kind,
            leg: 0,
            offset_bytes: 8192,
            len_bytes: 4096,
            segments: &data[..segments],
            skip_bytes: 0,
            stripe: None,
        };
        assert_eq!(ops, [expected], "{verb:?}");
    }
}

#[test]
fn only_transfers_have_a_fast_path() {
    let whole = |verb, len| Plan::whole(&request(verb, 0, len), &[], &WHOLE).is_some();
    for verb in [Verb::Read, Verb::Write] {
        assert!(whole(verb, 512) && whole(verb, 1 << 30), "{verb:?}");
        assert!(!whole(verb, 0) && !whole(verb, (1 << 30) + 512), "{verb:?}");
    }
    let unmap = true;
    for verb in [
        Verb::Flush,
        Verb::Discard,
        Verb::WriteZeroes { unmap },
        Verb::GetId,
    ] {
        assert!(!whole(verb, 512), "{verb:?}");
    }
    let request = request(Verb::Write, 512, 4096);
    let op = Plan::whole(&request, &[], &DURABLE).unwrap();
    assert_eq!(op.kind, OpKind::Write { durable: true });
    assert!(Plan::whole(&request, &[], &chunks(4096)).is_some());
    assert!(Plan::whole(&request, &[], &chunks(2048)).is_none());
}

#[test]
fn a_flush_is_exactly_one_op() {
    let data = [Segment {
        addr: 0x1000,
        len: 512,
    }];
    let mut plan = Plan::new(&request(Verb::Flush, 0, 0), &data, &WHOLE);
    let op = plan.next().unwrap();
    assert_eq!(
        (op.kind, op.len_bytes, op.segments),
        (OpKind::Sync, 0, &[][..])
    );
    assert_eq!(plan.next(), None);
    assert_eq!(plan.next(), None);
}

#[test]
fn an_empty_request_has_no_op() {
    for verb in [
        Verb::Read,
        Verb::Write,
        Verb::Discard,
        Verb::WriteZeroes { unmap: true },
    ] {
        assert_eq!(
            Plan::new(&request(verb, 512, 0), &[], &DURABLE).next(),
            None
        );
    }
    assert_eq!(
        Plan::new(&request(Verb::GetId, 0, 20), &[], &DURABLE).next(),
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
        let ops: Vec<_> = Plan::new(&request(Verb::Read, offset, len), &data, &WHOLE).collect();
        let found: Vec<_> = ops.iter().map(|op| op.len_bytes).collect();
        assert_eq!(found, lens);
        assert!(ops.len() <= PLAIN_OPS_MAX);
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
    let ops: Vec<_> = Plan::new(&request(Verb::Write, 0, 4096), &data, &chunks(1024)).collect();
    assert_eq!(ops.len(), 4);
    for op in &ops[1..] {
        assert_eq!((op.segments, op.skip_bytes), (&[][..], 0));
    }
}

/// Segments of any length, possibly 0, whose sum is a whole number of sectors; the length of a request over
/// their beginning; and an offset.
fn layouts() -> impl Strategy<Value = (Vec<Segment>, u64, u64)> {
    let lens = prop::collection::vec(
        prop_oneof![Just(0u32), Just(512), Just(4096), 1..3000u32, 1..70_000u32],
        0..24,
    );
    (lens, 0..100_000u64, 0..=100u64).prop_map(|(lens, sector, share)| {
        let mut segments: Vec<_> = lens
            .iter()
            .zip(1u64..)
            // Far apart, so that a byte from the wrong segment is detected.
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
        (segments, sector * SECTOR_BYTES, sectors * SECTOR_BYTES)
    })
}

/// Makes no chunk, or one of any size.
fn any_chunk() -> impl Strategy<Value = Option<NonZeroU32>> {
    prop_oneof![
        Just(None),
        (12..=22u32).prop_map(|shift| NonZeroU32::new(1 << shift))
    ]
}

fn any_stripe() -> impl Strategy<Value = Option<Stripe>> {
    let legs = prop_oneof![2..=64u16, 2..6u16];
    prop_oneof![
        Just(None),
        (legs, 12..=22u32).prop_map(|(legs, shift)| Stripe::new(legs, 1 << shift))
    ]
}

fn any_cut() -> impl Strategy<Value = Cut> {
    (any::<bool>(), any_chunk(), any_stripe()).prop_map(|(durable, chunk_bytes, stripe)| Cut {
        durable,
        chunk_bytes,
        stripe,
    })
}

/// Returns the disk offset of a leg's byte.
fn disk_offset(cut: &Cut, leg: u16, offset: u64) -> u64 {
    let Some(stripe) = cut.stripe else {
        assert_eq!(leg, 0);
        return offset;
    };
    let chunk = u64::from(stripe.chunk_bytes());
    (offset / chunk * u64::from(stripe.legs()) + u64::from(leg)) * chunk + offset % chunk
}

proptest! {
    /// Cutting loses nothing: the ops cover the request's range of the disk and its bytes of memory exactly,
    /// in order, without overlap, and within their bounds.
    #[test]
    fn ops_cover_the_request_exactly(
        (segments, offset, len) in layouts(), cut in any_cut(), write in any::<bool>(),
    ) {
        let verb = if write { Verb::Write } else { Verb::Read };
        let request = request(verb, offset, len);
        let mut next = offset;
        let mut memory = Vec::new();
        let mut count = 0;
        for op in Plan::new(&request, &segments, &cut) {
            prop_assert_eq!(disk_offset(&cut, op.leg, op.offset_bytes), next);
            prop_assert!(op.len_bytes > 0);
            if let Some(stripe) = cut.stripe {
                let chunk = u64::from(stripe.chunk_bytes());
                prop_assert_eq!(op.offset_bytes / chunk, (op.offset_bytes + op.len_bytes - 1) / chunk);
            }
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
        prop_assert!(count <= cut.ops_max());
    }

    /// The fast path yields the plan's only op, and covers most requests.
    #[test]
    fn a_whole_op_is_the_plans_only_one(
        (segments, offset, len) in layouts(), cut in any_cut(), write in any::<bool>(),
    ) {
        let verb = if write { Verb::Write } else { Verb::Read };
        let request = request(verb, offset, len);
        let ops: Vec<_> = Plan::new(&request, &segments, &cut).collect();
        match Plan::whole(&request, &segments, &cut) {
            Some(op) => prop_assert_eq!(ops, [op]),
            None => prop_assert!(len == 0 || cut.stripe.is_some() || cut.chunk_bytes.is_some()),
        }
    }

    /// Splitting makes as few ops as the chunk allows (one more if the request begins inside a block), at most 64,
    /// none longer than the chunk unless that was doubled, with borders at its multiples if they cost nothing.
    #[test]
    fn splitting_keeps_its_bounds(
        sector in 0..1u64 << 30, sectors in 1..=1u64 << 20, shift in 12..=22u32,
    ) {
        let (offset, len) = (sector * SECTOR_BYTES, sectors * SECTOR_BYTES);
        let ops = places(&request(Verb::Read, offset, len), &chunks(1 << shift));
        let mut chunk = 1u64 << shift;
        if len <= chunk {
            prop_assert_eq!(ops, [(0, offset, len)]);
            return Ok(());
        }
        let inside_block = offset % 4096 != 0;
        while len.div_ceil(chunk) > 64 || (inside_block && (offset % chunk + len).div_ceil(chunk) > 64) {
            chunk *= 2;
        }
        let (fewest, aligned) = (len.div_ceil(chunk), (offset % chunk + len).div_ceil(chunk));
        let count = ops.len() as u64;
        prop_assert!(count <= 64);
        prop_assert_eq!(count, if inside_block { aligned } else { fewest });
        let is_aligned = count == aligned;
        for op in &ops[1..] {
            prop_assert!(op.2 <= chunk);
            prop_assert_eq!(op.1 % 4096, 0);
            prop_assert!(!is_aligned || op.1 % chunk == 0);
        }
    }

    /// On each leg there is one range, and together they are the request's range, each byte once.
    #[test]
    fn ranges_on_legs_are_the_request(
        legs in 2..=64u16, shift in 12..=22u32, sector in 0..1u64 << 40, sectors in 1..=1u64 << 21,
        chunk in any_chunk(),
    ) {
        let cut = Cut { chunk_bytes: chunk, ..striped(legs, 1 << shift) };
        let (offset, len) = (sector * SECTOR_BYTES, sectors * SECTOR_BYTES);
        let ops = places(&request(Verb::Discard, offset, len), &cut);
        prop_assert!(ops.len() <= usize::from(legs));
        let mut seen: Vec<_> = ops.iter().map(|op| op.0).collect();
        seen.sort_unstable();
        seen.dedup();
        prop_assert_eq!(seen.len(), ops.len());
        // They are as long as the request, and both ends of each range and of each chunk in it are inside the
        // request. Because places are one to one, they are the same set of bytes.
        prop_assert_eq!(ops.iter().map(|op| op.2).sum::<u64>(), len);
        for (leg, start, bytes) in ops {
            let inside = |at| (offset..offset + len).contains(&disk_offset(&cut, leg, at));
            prop_assert!(inside(start) && inside(start + bytes - 1));
        }
    }

    /// With one leg, such a range is not cut, whatever reads are split into.
    #[test]
    fn ranges_of_one_leg_are_whole(
        offset in 0..1u64 << 40, len in 1..1u64 << 32, chunk_bytes in any_chunk(),
    ) {
        let cut = Cut { chunk_bytes, ..WHOLE };
        prop_assert_eq!(places(&request(Verb::Discard, offset, len), &cut), [(0, offset, len)]);
    }

    /// The bounds for the sizes of slots and engines.
    #[test]
    fn no_request_has_more_than_ops_max(
        sector in 0..1u64 << 40, sectors in 0..=(u64::from(u32::MAX) / SECTOR_BYTES), cut in any_cut(),
        verb in prop_oneof![Just(Verb::Read), Just(Verb::Discard), Just(Verb::Flush)],
    ) {
        let mut request = request(verb, sector * SECTOR_BYTES, sectors * SECTOR_BYTES);
        if verb == Verb::Flush {
            request.len_bytes = 0;
        }
        let data = [Segment { addr: 0, len: u32::MAX }];
        let ops: Vec<_> = Plan::new(&request, &data, &cut).collect();
        prop_assert!(ops.len() <= cut.ops_max());
        for op in ops {
            let chunks = op.stripe.map_or(0, |stripe| op.chunks(stripe).count());
            prop_assert!(chunks <= OP_CHUNKS_MAX);
        }
    }

    /// A request of more chunks than there may be ops: the chunks of its ops are the request, each byte once, in its memory and at
    /// its place, and its ops begin in the order of the disk's offsets.
    #[test]
    fn chunks_of_a_long_request_are_the_request(
        legs in 2..=64u16, shift in 12..=14u32, sector in 0..1u64 << 40, sectors in (1u64 << 13)..1 << 18,
        lens in prop::collection::vec(1..40_000_000u32, 1..6),
    ) {
        let cut = striped(legs, 1 << shift);
        let stripe = cut.stripe.unwrap();
        let (offset, len) = (sector * SECTOR_BYTES, sectors * SECTOR_BYTES);
        let mut segments = Vec::new();
        let mut at = 0;
        // The address of a byte is its place in the request.
        for seg_len in lens.into_iter().chain([u32::try_from(len).unwrap()]) {
            segments.push(Segment { addr: at, len: seg_len });
            at += u64::from(seg_len);
        }
        let mut parts = Vec::new();
        let mut begins = Vec::new();
        for op in Plan::new(&request(Verb::Write, offset, len), &segments, &cut) {
            begins.push(disk_offset(&cut, op.leg, op.offset_bytes));
            let mut next = op.offset_bytes;
            for part in op.chunks(stripe) {
                prop_assert_eq!((part.kind, part.leg, part.offset_bytes), (op.kind, op.leg, next));
                next += part.len_bytes;
                let place = disk_offset(&cut, part.leg, part.offset_bytes) - offset;
                prop_assert_eq!(part.segments[0].addr + u64::from(part.skip_bytes), place);
                prop_assert!(part.skip_bytes < part.segments[0].len);
                prop_assert!(part.len_bytes <= u64::from(stripe.chunk_bytes()));
                parts.push((place, part.len_bytes));
            }
            prop_assert_eq!(next, op.offset_bytes + op.len_bytes);
        }
        prop_assert!(begins.is_sorted());
        parts.sort_unstable();
        let mut next = 0;
        for (place, bytes) in parts {
            prop_assert_eq!(place, next);
            next += bytes;
        }
        prop_assert_eq!(next, len);
    }
}
