//! The computations of a request: header parser, plan, outcome; and the configuration space.

use std::hint::black_box;
use std::num::NonZeroU32;

use cleave_blk::spec::{feature, request_type};
use cleave_blk::{
    Config, Cut, Face, Gate, Limits, Outcome, Plan, Request, Segment, Shape, Stripe, Verb,
};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};

const PAGE_BYTES: u32 = 4096;
const DISK_BYTES: u64 = 1 << 40;

fn limits() -> Limits {
    Limits {
        capacity_bytes: DISK_BYTES,
        block_bytes: 512,
        offset_align_bytes: 512,
        memory_align_bytes: 512,
        read_only: false,
        discard: true,
        discard_align_bytes: 512,
        rotational: false,
    }
}

/// Header and one range, as copied from guest memory.
fn head(kind: u32) -> [u8; 32] {
    let mut head = [0; 32];
    head[..4].copy_from_slice(&kind.to_le_bytes());
    head[8..16].copy_from_slice(&0x1234_5678_u64.to_le_bytes());
    head[16..24].copy_from_slice(&0x1234_5678_u64.to_le_bytes());
    head[24..28].copy_from_slice(&8_u32.to_le_bytes());
    head
}

pub(crate) fn parse(c: &mut Criterion) {
    let limits = limits();
    let gate = Gate {
        limits: &limits,
        capacity_bytes: DISK_BYTES,
        features: feature::DISCARD | feature::WRITE_ZEROES,
    };
    // name, type, bytes of head, readable, writable
    let table = [
        ("read", request_type::IN, 16, 16, 4097),
        ("write", request_type::OUT, 16, 4112, 1),
        ("flush", request_type::FLUSH, 16, 16, 1),
        ("get-id", request_type::GET_ID, 16, 16, 21),
        ("discard", request_type::DISCARD, 32, 32, 1),
        ("write-zeroes", request_type::WRITE_ZEROES, 32, 32, 1),
        ("refused", u32::MAX, 16, 16, 1),
    ];
    let mut group = c.benchmark_group("parse");
    for (name, kind, head_bytes, readable_bytes, writable_bytes) in table {
        let head = head(kind);
        let shape = Shape {
            readable_bytes,
            writable_bytes,
        };
        group.bench_function(name, |b| {
            b.iter(|| {
                let head = black_box(&head[..head_bytes]);
                Request::parse(head, black_box(shape), black_box(gate))
            });
        });
    }
    group.finish();
}

/// Returns a read into separate pages, like those of a guest's page cache.
fn read(len_bytes: u64, segment_bytes: u32) -> (Request, Vec<Segment>) {
    let request = Request {
        verb: Verb::Read,
        offset_bytes: 1 << 30,
        len_bytes,
    };
    let count = len_bytes.div_ceil(u64::from(segment_bytes));
    let segments = (0..count)
        .map(|n| Segment {
            addr: n * 2 * u64::from(segment_bytes),
            len: segment_bytes,
        })
        .collect();
    (request, segments)
}

pub(crate) fn plan(c: &mut Criterion) {
    let cut = |stripe: Option<(u16, u32)>, chunk| Cut {
        durable: false,
        chunk_bytes: NonZeroU32::new(chunk),
        stripe: stripe.and_then(|(legs, bytes)| Stripe::new(legs, bytes)),
    };
    let cuts = [
        ("whole", cut(None, 0)),
        ("chunks of 8KiB", cut(None, 8 << 10)),
        ("chunks of 64KiB", cut(None, 64 << 10)),
        ("4 legs", cut(Some((4, 64 << 10)), 0)),
        ("28 legs", cut(Some((28, 64 << 10)), 0)),
        (
            "28 legs, chunks of 8KiB",
            cut(Some((28, 64 << 10)), 8 << 10),
        ),
    ];
    let sizes = [
        ("4KiB", 4 << 10, PAGE_BYTES),
        ("128KiB", 128 << 10, PAGE_BYTES),
        ("1MiB", 1 << 20, PAGE_BYTES),
    ];
    let mut group = c.benchmark_group("plan");
    for (size, len_bytes, segment_bytes) in sizes {
        for (name, cut) in &cuts {
            bench_plan(
                &mut group,
                &format!("{size}, {name}"),
                read(len_bytes, segment_bytes),
                cut,
            );
        }
    }
    // The largest request, in the most segments: cut at the kernel's limit.
    let largest = read((1 << 32) - 512, 4 << 20);
    bench_plan(&mut group, "4GiB in 1024 segments", largest, &cuts[0].1);
    group.finish();
}

fn bench_plan(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    (request, segments): (Request, Vec<Segment>),
    cut: &Cut,
) {
    group.bench_function(name, |b| {
        b.iter(|| {
            for op in Plan::new(black_box(&request), black_box(&segments), black_box(cut)) {
                black_box(op);
            }
        });
    });
}

pub(crate) fn outcome(c: &mut Criterion) {
    let (request, _) = read(4096, PAGE_BYTES);
    c.bench_function("outcome", |b| {
        b.iter(|| Outcome::ended(black_box(&request), black_box(Ok(()))));
    });
}

pub(crate) fn config(c: &mut Criterion) {
    let config = Config {
        face: Face::V1,
        capacity_bytes: DISK_BYTES,
        block_bytes: 512,
        read_only: false,
        segments_max: 126,
        vrings: 4,
        writeback: true,
    };
    let mut group = c.benchmark_group("config");
    group.bench_function("bytes", |b| b.iter(|| black_box(&config).bytes()));
    group.bench_function("features", |b| b.iter(|| black_box(&config).features()));
    group.finish();
}
