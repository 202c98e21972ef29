//! The cost of a request in guest memory: taking and returning chains, and address translation, each next to the
//! `rust-vmm` crates on the same bytes.

use std::hint::black_box;

use cleave_benches::{BATCH, Driver, Guest, Place, REGION_BYTES, region_addr};
use cleave_blk::Segment;
use cleave_blk::spec::feature;
use cleave_guest::{Chain, Vring};
use criterion::measurement::WallTime;
use criterion::{Bencher, BenchmarkGroup, BenchmarkId, Criterion, Throughput};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend};

/// Take, push_used and publish for a batch in a split vring, the only kind that is supported; the printed rate counts
/// chains.
pub(crate) fn vring(c: &mut Criterion) {
    let guest = Guest::new(1);
    let mut group = c.benchmark_group("vring");
    group.throughput(Throughput::Elements(u64::from(BATCH)));
    for (place, name) in [(Place::Direct, "direct"), (Place::Indirect, "indirect")] {
        for descriptors in [1, 3, 16] {
            let shape = format!("{descriptors} {name}");
            group.bench_function(BenchmarkId::new("cleave", &shape), |b| {
                ours(b, &guest, Driver::new(&guest, descriptors, place));
            });
            group.bench_function(BenchmarkId::new("virtio_queue", &shape), |b| {
                theirs(b, &guest, Driver::new(&guest, descriptors, place));
            });
        }
    }
    group.finish();
}

fn ours(b: &mut Bencher<'_>, guest: &Guest, mut driver: Driver<'_>) {
    let memory = guest.memory.clone();
    let mut vring = Vring::new(memory, driver.layout(), feature::EVENT_IDX, 0).unwrap();
    let mut chain = Chain::new();
    let mut heads = Vec::with_capacity(usize::from(BATCH));
    b.iter(|| {
        driver.offer();
        while let Some(taken) = vring.take(&mut chain).unwrap() {
            assert_eq!(taken.fault, None);
            black_box((chain.readable(), chain.writable()));
            heads.push(taken.head);
        }
        for head in heads.drain(..) {
            vring.push_used(head, 1);
        }
        vring.publish()
    });
    driver.check();
}

fn theirs(b: &mut Bencher<'_>, guest: &Guest, mut driver: Driver<'_>) {
    let mem = &guest.mmap;
    let mut queue = driver.queue();
    let mut segments = Vec::with_capacity(64);
    let mut heads = Vec::with_capacity(usize::from(BATCH));
    b.iter(|| {
        driver.offer();
        for chain in queue.iter(mem).unwrap() {
            heads.push(chain.head_index());
            segments.clear();
            segments.extend(chain.map(|descriptor| {
                (
                    descriptor.addr().0,
                    descriptor.len(),
                    descriptor.is_write_only(),
                )
            }));
            black_box(&segments);
        }
        for head in heads.drain(..) {
            queue.add_used(mem, head, 1).unwrap();
        }
        queue.needs_notification(mem).unwrap()
    });
    driver.check();
}

/// Translation of a page: always in the same region as the page before, or in any region.
pub(crate) fn translate(c: &mut Criterion) {
    let mut group = c.benchmark_group("translate");
    for regions in [1, 8, 509] {
        let guest = Guest::new(regions);
        translate_in(&mut group, &guest, regions, "same region", |n| {
            region_addr(regions / 2) + n * 4096 % REGION_BYTES
        });
        if regions > 1 {
            translate_in(&mut group, &guest, regions, "any region", |n| {
                region_addr(scatter(n) % regions) + n * 4096 % REGION_BYTES
            });
        }
    }
    group.finish();
}

/// Returns an order without a short period, so that branch predictors cannot learn it, and identical in each run (multiples of
/// the golden ratio, middle bits).
fn scatter(n: u64) -> u64 {
    n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40
}

fn translate_in(
    group: &mut BenchmarkGroup<'_, WallTime>,
    guest: &Guest,
    regions: u64,
    name: &str,
    addr: impl Fn(u64) -> u64,
) {
    let addrs: Vec<u64> = (1..=4096).map(addr).collect();
    let parameter = format!("{regions} regions, {name}");
    group.throughput(Throughput::Elements(addrs.len() as u64));
    group.bench_function(BenchmarkId::new("cleave", &parameter), |b| {
        b.iter(|| {
            for &addr in black_box(&addrs) {
                let page = Segment { addr, len: 4096 };
                guest
                    .memory
                    .resolve(page, |start, len| {
                        black_box((start, len));
                    })
                    .unwrap();
            }
        });
    });
    group.bench_function(BenchmarkId::new("vm-memory", &parameter), |b| {
        b.iter(|| {
            for &addr in black_box(&addrs) {
                let page = guest.mmap.get_slice(GuestAddress(addr), 4096).unwrap();
                black_box((page.ptr_guard_mut().as_ptr(), page.len()));
            }
        });
    });
}
