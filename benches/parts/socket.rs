//! End to end over a socket: `cleave serve` in its own process, driven by our client, on disks that take no time. The
//! measurement needs two CPUs; with fewer, driver and daemon wait for each other.

use std::time::Duration;

use cleave_client::{Client, DeviceOptions, Notifier, ReapWait, Stop, Workload};
use cleave_tests::Daemon;
use criterion::{BenchmarkId, Criterion, Throughput};

const DISKS: [&str; 2] = ["null:1G", "ram:64M"];
const SPAN_BYTES: u64 = 64 << 20;
const DEPTHS: [u16; 2] = [1, 32];

/// A name, the daemon's way to wait for the guest, and the guest's way to wait for the daemon.
const WAYS: [(&str, &str, ReapWait); 2] = [
    ("asleep", "interrupt", ReapWait::Sleep),
    ("polling", "poll", ReapWait::Poll),
];

/// 4 KiB random reads; the printed rate counts requests.
pub(crate) fn reads(c: &mut Criterion) {
    let mut group = c.benchmark_group("socket");
    group.throughput(Throughput::Elements(1));
    for disk in DISKS {
        for (name, completion, wait) in WAYS {
            let args = ["--disk", disk, "--completion", completion, "--queues", "1"];
            let daemon = Daemon::serve(&args);
            let bell = match wait {
                ReapWait::Sleep => Notifier::NonBlocking,
                ReapWait::Poll => Notifier::Absent,
            };
            let options = DeviceOptions {
                wait,
                kick: bell,
                call: bell,
                data_bytes: 1 << 20,
                ..DeviceOptions::default()
            };
            let mut client = Client::open(daemon.socket(), &options).unwrap();
            for depth in DEPTHS {
                let id = BenchmarkId::new(format!("{disk} {name}"), format!("depth {depth}"));
                group.bench_function(id, |b| {
                    b.iter_custom(|requests| run(&mut client, depth, requests));
                });
            }
        }
    }
    group.finish();
}

/// Returns the time for so many requests.
fn run(client: &mut Client, depth: u16, requests: u64) -> Duration {
    let load = Workload {
        stop: Stop::Requests(requests),
        ..Workload::reads(4096, depth, SPAN_BYTES, Duration::ZERO)
    };
    let tally = client.queue(0).run(&load, |_| ()).unwrap();
    assert_eq!((tally.requests(), tally.failed), (requests, 0));
    tally.elapsed
}
