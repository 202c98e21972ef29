//! The bookkeeping of a worker.

use std::hint::black_box;

use cleave_blk::{Request, Verb};
use cleave_worker::bench::{InFlightTable, PacerBench, TimeHistogram};
use criterion::{BenchmarkId, Criterion, Throughput};

const VRING_SIZE: u16 = 256;

/// Requests that start and complete, with a constant number in flight; the printed rate counts requests.
pub(crate) fn slots(c: &mut Criterion) {
    let request = Request {
        verb: Verb::Read,
        offset_bytes: 1 << 30,
        len_bytes: 4096,
    };
    let mut group = c.benchmark_group("slots");
    for (depth, ops) in [(1, 1), (32, 1), (256, 1), (32, 64)] {
        let mut slots = InFlightTable::new(VRING_SIZE);
        group.throughput(Throughput::Elements(u64::from(depth)));
        let name = match ops {
            1 => "whole".to_owned(),
            ops => format!("in {ops} ops"),
        };
        group.bench_function(BenchmarkId::new(name, format!("depth {depth}")), |b| {
            b.iter(|| {
                for head in 0..depth {
                    slots.begin(black_box(head), black_box(request), ops);
                }
                let ended = |head| {
                    (0..ops)
                        .filter(|op| slots.end(black_box(head), *op))
                        .count()
                };
                let ended: usize = (0..depth).map(ended).sum();
                assert_eq!(ended, usize::from(depth));
            });
        });
    }
    group.finish();
}

/// Requests that arrive one by one at an adaptive worker: a name, the number of laps between two requests, the length
/// of a lap, and whether the laps in between are spun.
const PACES: [(&str, u64, u64, bool); 3] = [
    ("a request in every lap", 1, 500, true),
    ("6 us apart, spun", 100, 60, true),
    ("10 ms apart, slept", 2, 5_000_000, false),
];

/// The printed rate counts laps. The clock is simulated, so that every run decides the same.
pub(crate) fn pacer(c: &mut Criterion) {
    let mut group = c.benchmark_group("pacer");
    group.throughput(Throughput::Elements(1));
    for (name, every, lap_ns, is_spun) in PACES {
        let mut pacing = PacerBench::new();
        let mut lap = 0_u64;
        let mut turn = || {
            lap += 1;
            pacing.lap(black_box(u32::from(lap.is_multiple_of(every))), lap_ns)
        };
        for _ in 0..2_000_000 {
            turn();
        }
        let spun = (0..1000).filter(|_| turn()).count();
        assert_eq!(
            spun > 990,
            is_spun,
            "{name}: {spun} of 1000 laps without a sleep"
        );
        group.bench_function(name, |b| b.iter(&mut turn));
    }
    group.finish();
}

/// Recording one time, next to the crate that our client keeps its times in; from 1 us to 1 ms, shuffled.
pub(crate) fn histogram(c: &mut Criterion) {
    let times: Vec<u64> = (1..=1024_u64)
        .map(|n| 1000 + (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44))
        .collect();
    let mut group = c.benchmark_group("histogram");
    group.throughput(Throughput::Elements(times.len() as u64));
    let ours = TimeHistogram::new();
    group.bench_function("cleave", |b| {
        b.iter(|| times.iter().for_each(|ns| ours.add(black_box(*ns))));
    });
    assert!(ours.count() > 0, "nothing was recorded");
    let mut theirs: hdrhistogram::Histogram<u64> = hdrhistogram::Histogram::new(2).unwrap();
    group.bench_function("hdrhistogram", |b| {
        b.iter(|| {
            for ns in &times {
                theirs.record(black_box(*ns)).unwrap();
            }
        });
    });
    group.finish();
}
