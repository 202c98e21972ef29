//! A request's head, with a chain of any shape, on a disk of any size and layout: what is parsed lies inside the disk, and its plan
//! is exactly its range, once.
#![no_main]

use std::num::NonZeroU32;

use cleave_blk::{Cut, Gate, Limits, Op, Outcome, Plan, Request, Segment, Shape, Stripe, Verb};
use libfuzzer_sys::fuzz_target;

/// The next bytes of the input; zeroes after its end.
struct Source<'a>(&'a [u8]);

impl Source<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let count = self.0.len().min(N);
        taken[..count].copy_from_slice(&self.0[..count]);
        self.0 = &self.0[count..];
        taken
    }

    fn byte(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

/// Returns the cut, and the disk's bytes on it.
fn cut(source: &mut Source<'_>) -> Cut {
    let flags = source.byte();
    let legs = 2 + u16::from(source.byte() % 63);
    let stripe = Stripe::new(legs, 4096 << (source.byte() % 11)).filter(|_| flags & 1 != 0);
    let chunk = NonZeroU32::new(4096 << (source.byte() % 10)).filter(|_| flags & 2 != 0);
    Cut {
        durable: flags & 4 != 0,
        chunk_bytes: chunk,
        stripe,
    }
}

fn run(input: &[u8]) {
    let mut source = Source(input);
    let cut = cut(&mut source);
    let flags = source.byte();
    // Whole chunks on each leg, and less than 2^63 bytes in all.
    let unit = cut.stripe.map_or(512, |stripe| {
        u64::from(stripe.chunk_bytes()) * u64::from(stripe.legs())
    });
    let capacity_bytes = (source.long() >> 1).max(unit) / unit * unit;
    let limits = Limits {
        capacity_bytes,
        block_bytes: 512 << (flags & 3),
        offset_align_bytes: 512,
        memory_align_bytes: 512,
        read_only: flags & 4 != 0,
        discard: flags & 8 != 0,
        discard_align_bytes: 512,
        rotational: false,
    };
    let gate = Gate {
        limits: &limits,
        capacity_bytes,
        features: source.long(),
    };
    let shape = match flags & 16 {
        0 => Shape {
            readable_bytes: source.long(),
            writable_bytes: source.long(),
        },
        // Mostly the data of one sector or a few.
        _ => Shape {
            readable_bytes: 16 + u64::from(u16::from_le_bytes(source.take())) * 16,
            writable_bytes: 1 + u64::from(u16::from_le_bytes(source.take())) * 512,
        },
    };
    let Ok(request) = Request::parse(source.0, shape, gate) else {
        return;
    };
    let end = request.offset_bytes.checked_add(request.len_bytes);
    assert!(end.is_some_and(|end| end <= capacity_bytes), "{request:?}");
    assert!(!limits.read_only || matches!(request.verb, Verb::Read | Verb::Flush | Verb::GetId));
    for result in [Ok(()), Err(5)] {
        let outcome = Outcome::ended(&request, result);
        assert!(
            u64::from(outcome.used_bytes) <= shape.writable_bytes,
            "{request:?} {outcome:?}"
        );
    }
    if request.verb != Verb::GetId {
        plan(&request, &cut);
    }
}

/// Walks along the plan and along the request, byte for byte of both.
fn plan(request: &Request, cut: &Cut) {
    let moves = matches!(request.verb, Verb::Read | Verb::Write);
    let half = (request.len_bytes / 2) as u32;
    let data = [
        Segment {
            addr: 4096,
            len: half,
        },
        Segment {
            addr: 1 << 40,
            len: (request.len_bytes - u64::from(half)).min(u64::from(u32::MAX)) as u32,
        },
    ];
    let data = if moves { &data[..] } else { &[] };
    let ops: Vec<Op<'_>> = Plan::new(request, data, cut).collect();
    assert!(
        ops.len() <= cut.ops_max(),
        "{} ops of {request:?} {cut:?}",
        ops.len()
    );
    if let Some(whole) = Plan::whole(request, data, cut) {
        assert_eq!(ops, [whole]);
    }
    if request.verb == Verb::Flush {
        let legs = cut.stripe.map_or(1, |stripe| stripe.legs());
        let legs: Vec<u16> = (0..legs).collect();
        assert_eq!(ops.iter().map(|op| op.leg).collect::<Vec<_>>(), legs);
        return;
    }
    let total: u64 = ops.iter().map(|op| op.len_bytes).sum();
    assert_eq!(total, request.len_bytes, "{request:?} {cut:?}");
    if !moves {
        return;
    }
    let mut at = request.offset_bytes;
    for op in parts(&ops, cut) {
        let place = cut.stripe.map_or((0, at), |stripe| stripe.place(at));
        assert_eq!((op.leg, op.offset_bytes), place, "{request:?} {cut:?}");
        if let Some(stripe) = cut.stripe {
            let last = stripe.place(at + op.len_bytes - 1);
            assert_eq!(last, (op.leg, op.offset_bytes + op.len_bytes - 1));
        }
        // The guest's memory that goes with it.
        let inside = at - request.offset_bytes;
        let (segment, skip) = match inside.checked_sub(half.into()) {
            None => (4096, inside),
            Some(beyond) => (1 << 40, beyond),
        };
        assert_eq!(
            (op.segments[0].addr, u64::from(op.skip_bytes)),
            (segment, skip)
        );
        at += op.len_bytes;
    }
}

/// Returns the ops of a read or write, those over several chunks chunk by chunk, in the order of the disk's offsets.
fn parts<'a>(ops: &[Op<'a>], cut: &Cut) -> Vec<Op<'a>> {
    let mut parts = Vec::new();
    for op in ops {
        match op.stripe {
            Some(stripe) => parts.extend(op.chunks(stripe)),
            None => parts.push(*op),
        }
    }
    if let Some(stripe) = cut.stripe {
        let row = |op: &Op<'_>| op.offset_bytes / u64::from(stripe.chunk_bytes());
        parts.sort_by_key(|op| (row(op), op.leg, op.offset_bytes));
    }
    parts
}

fuzz_target!(|input: &[u8]| run(input));
