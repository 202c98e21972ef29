//! Requests in depth, large and across regions of memory; and that the checks would find what is wrong.

use std::time::Duration;

use cleave_blk::spec::{feature, request_type as kind};
use cleave_client::{
    Client, DeviceOptions, DriverRequest, Error, GuestMemory, Layout, MemoryMessages, OffsetOrder,
    ReapWait, RegionOptions, Stop, Verify, Workload, all_are,
};
use cleave_tests::{Case, Daemon, Model, Random, Scratch, TIMEOUT, exercise, scale, seeded, small};

const DISK: u64 = 64 << 20;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        patterns_at_depth_on_many_vrings,
        memory_of_several_regions_that_do_not_touch_on_the_host,
        a_request_of_a_mebibyte_in_pages,
        a_null_disk_reads_zeroes_and_accepts_every_write,
        the_checks_find_a_disk_that_reads_zeroes,
        the_checks_find_a_read_whose_data_went_elsewhere,
    ]
}

fn patterns_at_depth_on_many_vrings() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    for args in [
        &["--disk", "ram:64M"][..],
        &["--disk", image.to_str().unwrap()],
    ] {
        let daemon = Daemon::serve(args);
        for (what, layout, wait, features) in [
            ("direct, asleep", Layout::Direct, ReapWait::Sleep, !0),
            ("indirect, polling", Layout::Indirect, ReapWait::Poll, !0),
            (
                "no event index",
                Layout::Auto,
                ReapWait::Sleep,
                !feature::EVENT_IDX,
            ),
            (
                "bare",
                Layout::Direct,
                ReapWait::Sleep,
                !(feature::EVENT_IDX | feature::INDIRECT_DESC),
            ),
        ] {
            let options = DeviceOptions {
                queues: 4,
                queue_size: 128,
                data_bytes: 16 << 20,
                wait,
                features,
                ..DeviceOptions::default()
            };
            let mut client = daemon.open(&options);
            for block_bytes in [512, 4096, 64 << 10] {
                let span = 16 << 20;
                let fill = Workload {
                    read_percent: 0,
                    order: OffsetOrder::Sequential,
                    stop: Stop::Requests(span / u64::from(block_bytes)),
                    verify: Verify::Pattern(3),
                    layout,
                    ..Workload::reads(block_bytes, 32, span, Duration::ZERO)
                };
                let done = client.queue(0).run(&fill, |_| ());
                let done = done.unwrap_or_else(|e| panic!("{what}, {block_bytes}: {e}"));
                assert_eq!(done.failed, 0, "{what}, {block_bytes}");
                let mix = Workload {
                    read_percent: 50,
                    order: OffsetOrder::Random,
                    stop: Stop::Requests(scale(1000) as u64),
                    ..fill
                };
                let all = client.run(&mix, |_| |_| ());
                let all = all.unwrap_or_else(|e| panic!("{what}, {block_bytes}: {e}"));
                assert!(
                    all.iter().all(|tally| tally.failed == 0),
                    "{what}, {block_bytes}"
                );
            }
        }
        daemon.finish();
    }
}

fn memory_of_several_regions_that_do_not_touch_on_the_host() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    for table in [MemoryMessages::Whole, MemoryMessages::Slots] {
        let at = 0x8000_0000;
        let plans = [
            RegionOptions::new(at, 16 << 20),
            RegionOptions::new(at + (16 << 20), 64 << 10),
            RegionOptions::new(at + (16 << 20) + (64 << 10), 64 << 10),
        ];
        let memory = GuestMemory::new(&plans).unwrap();
        let options = DeviceOptions { table, ..small(1) };
        let frontend = cleave_client::Frontend::connect(daemon.socket(), options.timeout).unwrap();
        let mut client = Client::start_in(frontend, memory, &options).unwrap();
        let memory = client.memory().clone();
        let border = at + (16 << 20) + (64 << 10);
        let bytes = Random::new(5).bytes(8192);
        for shift in [0u64, 1, 511, 4096, 8191] {
            let addr = border - shift;
            memory.write(addr, &bytes);
            let request = DriverRequest {
                kind: kind::OUT,
                sector: 64,
                data: (addr, 8192),
                writable: false,
            };
            let done = client.queue(0).execute(&request).unwrap();
            assert_eq!(
                (done.status, done.used_bytes),
                (0, 1),
                "write, {shift} before the border"
            );
            memory.fill(addr, 8192, 0);
            let request = DriverRequest {
                kind: kind::IN,
                sector: 64,
                data: (addr, 8192),
                writable: true,
            };
            let done = client.queue(0).execute(&request).unwrap();
            assert_eq!(
                (done.status, done.used_bytes),
                (0, 8193),
                "read, {shift} before the border"
            );
            assert!(
                memory.bytes(addr, 8192) == bytes,
                "{shift} before the border"
            );
        }
        drop(client);
    }
    daemon.finish();
}

fn a_request_of_a_mebibyte_in_pages() {
    for args in [&["--disk", "ram:64M"][..], &["--disk", "null:64M"]] {
        let daemon = Daemon::serve(args);
        let mut client = daemon.open(&DeviceOptions {
            queue_size: 512,
            ..small(1)
        });
        let mut random = Random::new(9);
        let data = random.bytes(1 << 20);
        let (area, _) = client.queue(0).data_area();
        let memory = client.memory().clone();
        for indirect in [false, true] {
            // Every second page, so that no two are adjacent.
            let pages: Vec<u64> = (0..256)
                .map(|page| area + (1 << 20) + page * 8192)
                .collect();
            let parts = |writable| {
                pages.iter().map(move |addr| cleave_client::Buffer {
                    addr: *addr,
                    len: 4096,
                    writable,
                })
            };
            for (page, bytes) in pages.iter().zip(data.chunks(4096)) {
                memory.write(*page, bytes);
            }
            let queue = client.queue(0);
            let (head, status) = queue.control();
            let [first, last] = [
                cleave_client::Buffer::readable(head, 16),
                cleave_client::Buffer::writable(status, 1),
            ];
            for (request, writable, wanted) in
                [(kind::OUT, false, 1), (kind::IN, true, (1 << 20) + 1)]
            {
                queue.write_header(request, 2048);
                if writable {
                    pages.iter().for_each(|page| memory.fill(*page, 4096, 0xee));
                }
                let all: Vec<_> = [first]
                    .into_iter()
                    .chain(parts(writable))
                    .chain([last])
                    .collect();
                let used = if indirect {
                    queue.chain_through(area, &all)
                } else {
                    queue.chain(&all)
                };
                assert_eq!(used.unwrap().len, wanted);
                assert_eq!(memory.bytes(status, 1), [0]);
            }
            let is_null = args[1].starts_with("null");
            for (page, bytes) in pages.iter().zip(data.chunks(4096)) {
                let wanted = if is_null { &[0; 4096] } else { bytes };
                assert!(memory.bytes(*page, 4096) == wanted, "{args:?}");
            }
        }
        drop(client);
        daemon.finish();
    }
}

fn a_null_disk_reads_zeroes_and_accepts_every_write() {
    let daemon = Daemon::serve(&["--disk", "null:1G"]);
    let mut client = daemon.open(&small(2));
    let queue = client.queue(1);
    queue.write(4096, &[9; 8192]).unwrap();
    let mut back = [9; 8192];
    queue.read(4096, &mut back).unwrap();
    assert!(all_are(&back, 0));
    queue.flush().unwrap();
    queue.write_zeroes(0, 1 << 20, true).unwrap();
    drop(client);
    daemon.finish();
}

/// Tests the checks that other tests rely on, against a disk that forgets writes.
fn the_checks_find_a_disk_that_reads_zeroes() {
    let daemon = Daemon::serve(&["--disk", "null:64M"]);
    let mut client = daemon.open(&small(1));
    let found = exercise(&mut client).unwrap_err();
    assert!(found.contains("read back other data"), "{found}");
    let mut model = Model::zeroed(0, 64 << 10);
    let mut random = seeded("forgotten writes");
    let found = (0..100).find_map(|_| model.step(client.queue(0), &mut random, 4096).err());
    assert!(matches!(found, Some(Error::Verify { .. })), "{found:?}");
    let load = Workload {
        stop: Stop::Requests(1),
        verify: Verify::Pattern(3),
        ..Workload::reads(4096, 1, 1 << 20, Duration::ZERO)
    };
    let found = client.queue(0).run(&load, |_| ());
    assert!(matches!(found, Err(Error::Verify { .. })), "{found:?}");
    drop(client);
    daemon.finish();
}

/// As above, for a read that completes successfully but whose data went elsewhere: the test's own earlier contents of
/// guest memory must not be mistaken for data.
fn the_checks_find_a_read_whose_data_went_elsewhere() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    let regions = [0x8000_0000, 0x1_0000_0000].map(|at| RegionOptions::new(at, 16 << 20));
    let memory = GuestMemory::new(&regions).unwrap();
    let frontend = cleave_client::Frontend::connect(daemon.socket(), TIMEOUT).unwrap();
    let mut client = Client::start_in(frontend, memory.clone(), &small(1)).unwrap();
    exercise(&mut client).unwrap();
    let (area, _) = client.queue(0).data_area();
    let (mut rings, mut data) = (memory.region(0), memory.region(0));
    rings.len_bytes = area - rings.guest_addr;
    data.guest_addr += rings.len_bytes;
    data.user_addr += rings.len_bytes;
    data.len_bytes -= rings.len_bytes;
    let told = [memory.fd(0), memory.fd(1)];
    let table = client.frontend().set_mem_table(&[rings, data], &told);
    table.unwrap();
    let found = exercise(&mut client).unwrap_err();
    assert!(found.contains("read back other data"), "{found}");
    // The slot's buffer still holds the bytes of the write.
    let load = |read_percent| Workload {
        read_percent,
        stop: Stop::Requests(1),
        verify: Verify::Pattern(3),
        ..Workload::reads(4096, 1, 4096, Duration::ZERO)
    };
    client.queue(0).run(&load(0), |_| ()).unwrap();
    let found = client.queue(0).run(&load(100), |_| ());
    assert!(matches!(found, Err(Error::Verify { .. })), "{found:?}");
    drop(client);
    daemon.finish();
}
