//! The client against another project's daemon, so that it is not verified by ours alone. Ignored if
//! `qemu-storage-daemon` is not installed.

#![allow(clippy::unwrap_used, clippy::panic, clippy::too_many_lines)] // a mistake in the test ends the test

use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use cleave_blk::spec::feature;
use cleave_client::{
    Client, DeviceOptions, Error, Layout, MemoryMessages, Notifier, Offered, OffsetOrder, ReapWait,
    Stop, Verify, Workload,
};
use cleave_tests::{Lateness, Requirement, ensure, run_cases, unless_late};

/// Time limit for anything that must happen.
const TIMEOUT: Duration = Duration::from_secs(60);
const PROGRAM: &str = "/usr/bin/qemu-storage-daemon";
const PEER: Requirement = Requirement::Program(PROGRAM);

fn main() -> ExitCode {
    run_cases(cleave_tests::cases![
        requests_one_at_a_time: PEER,
        every_way_of_setting_up_reads_back_what_was_written: PEER,
        indirect_tables_allow_one_request_per_ring_entry: PEER,
        offered_requests_keep_their_rate: PEER,
        stopping_a_vring_returns_its_position: PEER,
    ])
}

struct Peer {
    process: Child,
    folder: tempfile::TempDir,
}

impl Peer {
    fn start(queues: u16) -> Peer {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk");
        std::fs::File::create(&image)
            .unwrap()
            .set_len(64 << 20)
            .unwrap();
        let socket = folder.path().join("socket");
        let process = Command::new(PROGRAM)
            .arg("--blockdev")
            .arg(format!("driver=file,filename={},node-name=f,discard=unmap", image.display()))
            .args(["--blockdev", "driver=raw,file=f,node-name=d,discard=unmap"])
            .arg("--export")
            .arg(format!(
                "type=vhost-user-blk,id=e,addr.type=unix,addr.path={},node-name=d,writable=on,num-queues={queues}",
                socket.display()
            ))
            .spawn()
            .unwrap();
        let peer = Peer { process, folder };
        let end = Instant::now() + TIMEOUT;
        while !peer.socket().exists() {
            assert!(Instant::now() < end, "qemu-storage-daemon did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        peer
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Connects. The daemon serves one frontend at a time, and needs a moment between two.
    fn open(&self, options: &DeviceOptions) -> Client {
        let end = Instant::now() + TIMEOUT;
        loop {
            match Client::open(&self.socket(), options) {
                Ok(client) => return client,
                Err(error) if Instant::now() > end => panic!("cannot open: {error}"),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn requests_one_at_a_time() {
    let peer = Peer::start(1);
    let mut client = peer.open(&DeviceOptions::default());
    assert_eq!(client.config().capacity_bytes(), 64 << 20);
    let bytes: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 7) as u8).collect();
    let queue = client.queue(0);
    queue.write(4096, &bytes).unwrap();
    queue.flush().unwrap();
    let mut back = vec![0; bytes.len()];
    queue.read(4096, &mut back).unwrap();
    assert!(back == bytes);
    queue.write_zeroes(8192, 4096, true).unwrap();
    queue.read(8192, &mut back[..4096]).unwrap();
    assert!(back[..4096].iter().all(|byte| *byte == 0));
    queue.discard(0, 65536).unwrap();
    assert!(!queue.get_id().unwrap().is_empty());
    let past = client.config().capacity_bytes();
    let refused = client.queue(0).read(past, &mut back[..512]);
    assert!(
        matches!(refused, Err(Error::Status { status: 1, .. })),
        "{refused:?}"
    );
}

fn every_way_of_setting_up_reads_back_what_was_written() {
    let peer = Peer::start(4);
    let base = DeviceOptions {
        queues: 2,
        queue_size: 64,
        data_bytes: 4 << 20,
        ..DeviceOptions::default()
    };
    let without = |bits: u64| DeviceOptions {
        features: !bits,
        ..base.clone()
    };
    let table = [
        ("all", base.clone()),
        ("no event index", without(feature::EVENT_IDX)),
        ("no indirect", without(feature::INDIRECT_DESC)),
        (
            "neither",
            without(feature::EVENT_IDX | feature::INDIRECT_DESC),
        ),
        (
            "memory slots",
            DeviceOptions {
                table: MemoryMessages::Slots,
                ..base.clone()
            },
        ),
        (
            "features first",
            DeviceOptions {
                features_first: true,
                ..base.clone()
            },
        ),
        (
            "polling",
            DeviceOptions {
                wait: ReapWait::Poll,
                ..base.clone()
            },
        ),
        (
            "polling, no event index",
            DeviceOptions {
                wait: ReapWait::Poll,
                ..without(feature::EVENT_IDX)
            },
        ),
        (
            "blocking doorbells",
            DeviceOptions {
                kick: Notifier::Blocking,
                call: Notifier::Blocking,
                ..base.clone()
            },
        ),
    ];
    for (name, options) in table {
        let mut client = peer.open(&options);
        let fill = Workload {
            read_percent: 0,
            order: OffsetOrder::Sequential,
            stop: Stop::Requests((8 << 20) / 4096),
            verify: Verify::Pattern(7),
            ..Workload::reads(4096, 16, 8 << 20, Duration::ZERO)
        };
        let done = client
            .queue(0)
            .run(&fill, |_| ())
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!((done.writes, done.failed), (2048, 0), "{name}");
        let mix = Workload {
            read_percent: 60,
            order: OffsetOrder::Random,
            stop: Stop::Requests(4000),
            ..fill.clone()
        };
        let mut samples = 0;
        let all = client
            .run(&mix, |_| |_| ())
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(
            all.iter()
                .all(|tally| tally.requests() == 4000 && tally.failed == 0),
            "{name}"
        );
        let last = client.queue(1).run(&mix, |_| samples += 1).unwrap();
        assert_eq!(samples, last.requests(), "{name}");
    }
}

fn indirect_tables_allow_one_request_per_ring_entry() {
    let peer = Peer::start(1);
    let options = DeviceOptions {
        queue_size: 64,
        ..DeviceOptions::default()
    };
    let mut client = peer.open(&options);
    let workload = Workload {
        layout: Layout::Indirect,
        stop: Stop::Requests(5000),
        ..Workload::reads(4096, 64, 8 << 20, Duration::ZERO)
    };
    assert_eq!(client.queue(0).run(&workload, |_| ()).unwrap().reads, 5000);
    let direct = Workload {
        layout: Layout::Direct,
        ..workload
    };
    assert!(matches!(
        client.queue(0).run(&direct, |_| ()),
        Err(Error::Full)
    ));
}

fn offered_requests_keep_their_rate() {
    let peer = Peer::start(1);
    let mut client = peer.open(&DeviceOptions::default());
    let workload = Workload {
        offered: Some(Offered {
            per_second: 2000.0,
            burst: 4,
        }),
        stop: Stop::Requests(1000),
        ..Workload::reads(4096, 32, 8 << 20, Duration::ZERO)
    };
    // Never early, and late only by the machine's own delays.
    let keeps = unless_late("offered-rate", Duration::from_millis(40), |lateness| {
        *lateness = Lateness::start(&[peer.process.id()]);
        let done = client.queue(0).run(&workload, |_| ()).unwrap();
        assert!(done.elapsed >= Duration::from_millis(490), "{done:?}");
        let is_behind = done.elapsed >= Duration::from_millis(550) + lateness.so_far();
        ensure(!is_behind, || format!("{done:?}"))
    });
    keeps.unwrap();
}

fn stopping_a_vring_returns_its_position() {
    let peer = Peer::start(1);
    let mut client = peer.open(&DeviceOptions::default());
    for _ in 0..5 {
        client.queue(0).read(0, &mut [0; 512]).unwrap();
    }
    assert_eq!(client.frontend().vring_base(0).unwrap(), 5);
}
