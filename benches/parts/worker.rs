//! Batches of 4 KiB reads through a worker, from the available index to the used index, on the caller's thread. The
//! real engine on a null disk shows only the worker's own work and the zeroing of the pages. The simulated engine of
//! the tests adds its own bookkeeping (a copy, a lock and an allocation for each op).

use std::sync::{Arc, Mutex};

use cleave_benches::{Guest, ManualWorker, Place, Signals, null};
use cleave_engine::Store;
use cleave_sim::{Sim, SimConfig, SimStore};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput};

const DEPTHS: [u16; 3] = [1, 32, 256];

/// No delay and no failure; every read of the benchmark is of the first 4 KiB.
fn sim() -> Sim {
    let config = SimConfig {
        seed: 1,
        ops: 512,
        fail_per_mille: 0,
        fail_at: None,
        panic_at: None,
        delay_max: 1,
    };
    let store = SimStore {
        now: vec![0; 4096],
        durable: vec![0; 4096],
        ..SimStore::default()
    };
    Sim::new(config, Arc::new(Mutex::new(store)))
}

/// The printed rate counts requests.
pub(crate) fn turn(c: &mut Criterion) {
    let guest = Guest::new(1);
    let mut group = c.benchmark_group("worker turn");
    for depth in DEPTHS {
        group.throughput(Throughput::Elements(depth.into()));
        let place = Place::Indirect;
        let over_sim = ManualWorker::new(&guest, place, depth, Signals::None, |_, _| sim());
        bench(&mut group, "sim", depth, over_sim);
        let over_null = ManualWorker::new(&guest, place, depth, Signals::None, null);
        bench(&mut group, "null disk", depth, over_null);
    }
    group.finish();
}

/// Measures worker turns with a guest that kicks and is called for each batch, which costs system calls.
pub(crate) fn signalled(c: &mut Criterion) {
    let guest = Guest::new(1);
    let mut group = c.benchmark_group("worker with kicks and calls");
    for depth in DEPTHS {
        group.throughput(Throughput::Elements(depth.into()));
        let turn = ManualWorker::new(&guest, Place::Indirect, depth, Signals::KickAndCall, null);
        bench(&mut group, "null disk", depth, turn);
    }
    group.finish();
}

fn bench<S: Store>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    depth: u16,
    mut turn: ManualWorker<'_, S>,
) {
    group.bench_function(BenchmarkId::new(name, format!("depth {depth}")), |b| {
        b.iter(|| {
            turn.offer();
            turn.serve();
        });
    });
}
