//! The splitter's decisions and the plans that follow from them: their cost, and that they never allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};

use cleave_blk::{Cut, Plan, Request, Segment, Verb};
use cleave_worker::{DataDirection, Prior, Split, Splitter};
use criterion::Criterion;

/// Counts allocations.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is handed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above; `at` came from it.
        unsafe { System.dealloc(at, layout) }
    }
}

const LARGE_BYTES: u64 = 512 << 10;

fn splitter() -> Splitter {
    Splitter::new(Split::Auto(Prior {
        useful_depth: 128,
        chunk_min_bytes: 4096,
        never: false,
        measured: vec![(DataDirection::Read, LARGE_BYTES, 8 << 10)],
    }))
}

/// Passes one request through the splitter from start to completion; its virtual clock advances.
fn large(splitter: &Splitter, now_ns: &mut u64) -> Option<NonZeroU32> {
    let chunk_bytes = splitter.choose(DataDirection::Read, LARGE_BYTES, 0, *now_ns);
    *now_ns += 300_000;
    splitter.ended(DataDirection::Read, LARGE_BYTES, *now_ns, || *now_ns);
    chunk_bytes
}

/// Returns the number of ops in a plan.
fn plan(len_bytes: u64, data: &[Segment], chunk_bytes: Option<NonZeroU32>) -> usize {
    let request = Request {
        verb: Verb::Read,
        offset_bytes: 1 << 20,
        len_bytes,
    };
    let cut = Cut {
        durable: false,
        chunk_bytes,
        stripe: None,
    };
    Plan::new(black_box(&request), data, &cut).count()
}

fn data() -> Vec<Segment> {
    (0..128)
        .map(|page| Segment {
            addr: page << 14,
            len: 4096,
        })
        .collect()
}

/// Exits if deciding or planning allocates.
pub(crate) fn allocates_nothing(_: &mut Criterion) {
    let (splitter, mut now_ns, data) = (splitter(), 0, data());
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    let mut ops = 0;
    for _ in 0..100_000 {
        splitter.note_small(DataDirection::Read);
        let chunk_bytes = large(&splitter, &mut now_ns);
        ops += plan(LARGE_BYTES, &data, chunk_bytes);
        ops += plan(4096, &data, None);
    }
    let allocated = ALLOCATIONS.load(Ordering::Relaxed) - before;
    assert!(
        ops > 100_000 && allocated == 0,
        "{allocated} allocations in {ops} ops"
    );
}

pub(crate) fn decisions(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("splitter");
    let (splitter, mut now_ns) = (splitter(), 0);
    group.bench_function("small request", |bench| {
        bench.iter(|| splitter.note_small(black_box(DataDirection::Read)));
    });
    group.bench_function("large request, chosen and ended", |bench| {
        bench.iter(|| large(&splitter, &mut now_ns));
    });
    let data = data();
    group.bench_function("4 KiB: noted and planned whole", |bench| {
        bench.iter(|| {
            splitter.note_small(black_box(DataDirection::Read));
            plan(4096, &data, None)
        });
    });
    group.bench_function("512 KiB: chosen and planned in 8 KiB", |bench| {
        bench.iter(|| {
            let chunk_bytes = large(&splitter, &mut now_ns);
            plan(LARGE_BYTES, &data, chunk_bytes)
        });
    });
    group.finish();
}
