//! A guest reads back what it has written, for every kind of disk, ring and request layout.
#![allow(clippy::unwrap_used, clippy::panic, clippy::too_many_lines)] // a mistake in the test ends the test

use std::process::ExitCode;
use std::time::{Duration, Instant};

use cleave_blk::spec::{feature, request_type as kind};
use cleave_client::{
    Buffer, Client, DeviceOptions, DriverRequest, Error, GuestMemory, Layout, MemoryMessages,
    Notifier, OffsetOrder, ReapWait, RegionOptions, Stop, Verify, Workload, all_are,
};
use cleave_tests::{
    Cut, Daemon, Lateness, LoopDevice, Messages as _, Model, Random, Requirement, Scratch, TIMEOUT,
    case, ensure, exercise, exercise_queue, header, range, run_cases, scale, seeded, small, stream,
    unless_late, wait_until,
};

const DISK: u64 = 64 << 20;

/// A kind of disk.
struct Kind {
    name: &'static str,
    store: Store,
    options: &'static [&'static str],
}

#[derive(Clone, Copy)]
enum Store {
    Ram,
    File,
    /// A loop device with this sector size.
    Loop(&'static str),
}

const fn kind_of(name: &'static str, store: Store, options: &'static [&'static str]) -> Kind {
    Kind {
        name,
        store,
        options,
    }
}

const KINDS: &[Kind] = &[
    kind_of("ram", Store::Ram, &[]),
    kind_of("file", Store::File, &["--direct", "auto"]),
    kind_of("buffered file", Store::File, &["--direct", "off"]),
    kind_of(
        "write-through file",
        Store::File,
        &["--cache", "writethrough"],
    ),
    kind_of("4096-byte blocks", Store::File, &["--block-size", "4096"]),
    kind_of("one worker", Store::File, &["--workers", "1"]),
    kind_of("polled", Store::File, &["--completion", "poll"]),
    kind_of("loop device", Store::Loop("512"), &[]),
    kind_of("loop device of 4096-byte sectors", Store::Loop("4096"), &[]),
];

impl Kind {
    fn needs(&self) -> Requirement {
        match self.store {
            Store::Ram | Store::File => Requirement::Nothing,
            Store::Loop(_) => Requirement::LoopDevices,
        }
    }

    /// Serves a new disk of this kind to a test.
    fn serve(&self, test: Test) {
        let scratch = Scratch::new();
        let image = || scratch.image("disk", DISK);
        let mut device = None;
        let path = match self.store {
            Store::Ram => "ram:64M".into(),
            Store::File => image(),
            Store::Loop(sector) => {
                let options = ["--sector-size", sector, "--direct-io=on"];
                let attached = LoopDevice::attach_with(&image(), &options).unwrap();
                device.insert(attached).path.clone()
            }
        };
        let disk = ["--disk", path.to_str().unwrap()];
        let daemon = Daemon::serve(&[&disk, self.options].concat());
        test(self.name, &daemon);
        daemon.finish();
    }
}

/// A test of the disk that a daemon serves; it gets the name of the disk's kind.
type Test = fn(&str, &Daemon);

/// The tests that every kind of disk must pass.
const ON_EVERY_DISK: &[(&str, Test)] = &[
    (
        "random_operations_match_a_model",
        random_operations_match_a_model,
    ),
    (
        "any_descriptor_layout_is_served",
        any_descriptor_layout_is_served,
    ),
    (
        "neighbours_inside_one_block_do_not_undo_each_other",
        neighbours_inside_one_block_do_not_undo_each_other,
    ),
    ("discard_and_write_zeroes", discard_and_write_zeroes),
];

fn main() -> ExitCode {
    let mut cases = Vec::new();
    for (name, test) in ON_EVERY_DISK {
        let on = |kind: &'static Kind| {
            let run = || kind.serve(*test);
            case(format!("{name}: {}", kind.name), kind.needs(), run)
        };
        cases.extend(KINDS.iter().map(on));
    }
    cases.extend(cleave_tests::cases![
        patterns_at_depth_on_many_vrings,
        memory_of_several_regions_that_do_not_touch_on_the_host,
        discard_frees_space_on_the_host,
        the_configuration_matches_the_options,
        a_request_of_a_mebibyte_in_pages,
        a_null_disk_reads_zeroes_and_accepts_every_write,
        the_checks_find_a_disk_that_reads_zeroes,
        the_checks_find_a_read_whose_data_went_elsewhere,
        a_read_only_disk_reads_and_refuses_every_change,
        write_back_is_turned_off_and_on_by_the_guest,
        the_guest_is_notified_of_a_grown_image,
        sighup_checks_the_size_at_once,
        every_way_of_setting_up,
        a_full_call_pipe_does_not_block_other_vrings,
        the_largest_ring,
        one_partial_start_as_firmware_does_it,
    ]);
    run_cases(cases)
}

fn random_operations_match_a_model(name: &str, daemon: &Daemon) {
    let mut random = seeded("random operations");
    let options = DeviceOptions {
        queues: 4,
        ..small(4)
    };
    let mut client = daemon.open(&options);
    assert_eq!(client.config().capacity_bytes(), DISK, "{name}");
    let part = 2 << 20;
    let seeds: Vec<u64> = (0..4).map(|_| random.draw()).collect();
    std::thread::scope(|scope| {
        for ((queue, index), seed) in client.queues().iter_mut().zip(0u64..).zip(seeds) {
            scope.spawn(move || {
                let mut random = Random::new(seed);
                // Parts start at odd sectors, so that adjacent ones share blocks at their borders.
                let mut model = Model::zeroed(index * part + 512 * 3, part as usize);
                for step in 0..scale(150) {
                    let most = if step % 10 == 0 { 1 << 20 } else { 64 << 10 };
                    let done = model.step(queue, &mut random, most);
                    done.unwrap_or_else(|e| panic!("{name}, vring {index}, step {step}: {e}"));
                }
                queue.flush().unwrap();
                model
                    .compare_all(queue)
                    .unwrap_or_else(|e| panic!("{name}, at the end: {e}"));
            });
        }
    });
}

fn any_descriptor_layout_is_served(name: &str, daemon: &Daemon) {
    let mut random = seeded("descriptor layouts");
    for features in [!0, !feature::EVENT_IDX, !feature::INDIRECT_DESC] {
        let mut client = daemon.open(&DeviceOptions {
            features,
            ..small(1)
        });
        let mut model = Model::zeroed(8 << 20, 256 << 10);
        client
            .queue(0)
            .write_zeroes(model.offset, 256 << 10, false)
            .unwrap();
        for round in 0..scale(60) {
            // Indirect tables also without the feature: Windows uses them.
            let cut = Cut {
                pieces: [1, 2, 3, 8, 16, 30][random.below(6) as usize],
                empty: random.below(8) == 0,
                indirect: random.below(2) == 0,
            };
            one_stream(&mut client, &mut model, &mut random, cut)
                .unwrap_or_else(|e| panic!("{name}, round {round}, {cut:?}: {e}"));
        }
    }
}

fn one_stream(
    client: &mut Client,
    model: &mut Model,
    random: &mut Random,
    cut: Cut,
) -> Result<(), String> {
    let sectors = random.below(32) + 1;
    let first = random.below(model.bytes.len() as u64 / 512 - sectors);
    let bytes = first as usize * 512..(first + sectors) as usize * 512;
    let sector = model.offset / 512 + first;
    let queue = client.queue(0);
    if random.below(2) == 0 {
        let data = random.bytes(bytes.len());
        let readable = [&header(kind::OUT, sector)[..], &data].concat();
        let (used, status) = stream(queue, cut, random, &readable, 1).map_err(|e| e.to_string())?;
        ensure(used == 1 && status == [0], || {
            format!("write: used {used}, status {status:?}")
        })?;
        model.bytes[bytes].copy_from_slice(&data);
        return Ok(());
    }
    let room = bytes.len() + 1;
    let (used, out) =
        stream(queue, cut, random, &header(kind::IN, sector), room).map_err(|e| e.to_string())?;
    ensure(used as usize == room && out[room - 1] == 0, || {
        format!("read: used {used}")
    })?;
    ensure(out[..room - 1] == model.bytes[bytes], || {
        "read: wrong data".into()
    })
}

fn neighbours_inside_one_block_do_not_undo_each_other(name: &str, daemon: &Daemon) {
    let mut client = daemon.open(&small(4));
    // Each vring owns every fourth sector of the same blocks, and all vrings rewrite theirs at the same time.
    std::thread::scope(|scope| {
        for (queue, lane) in client.queues().iter_mut().zip(0u64..) {
            scope.spawn(move || {
                for round in 0..scale(40) as u8 {
                    for group in 0..8 {
                        let sector = group * 4 + lane;
                        queue
                            .write(sector * 512, &[round ^ lane as u8; 512])
                            .unwrap();
                    }
                    for group in 0..8 {
                        let mut back = [0; 512];
                        queue.read((group * 4 + lane) * 512, &mut back).unwrap();
                        let right = all_are(&back, round ^ lane as u8);
                        assert!(
                            right,
                            "{name}: lane {lane}, round {round}, {:?}",
                            &back[..4]
                        );
                    }
                }
            });
        }
    });
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

fn discard_and_write_zeroes(name: &str, daemon: &Daemon) {
    let mut client = daemon.open(&small(1));
    let offered = client.offered();
    assert!(offered & feature::WRITE_ZEROES != 0, "{name}");
    let config = client.config().clone();
    assert_eq!(
        (
            config.max_write_zeroes_seg,
            config.max_write_zeroes_sectors > 0
        ),
        (1, true)
    );
    let queue = client.queue(0);
    let bytes = vec![0x5a; 256 << 10];
    queue.write(0, &bytes).unwrap();
    // Odd sectors, so that blocks of 4096 bytes are changed in part.
    for (offset, len, unmap) in [(512 * 3, 512 * 5, false), (64 << 10, 64 << 10, true)] {
        queue.write_zeroes(offset, len, unmap).unwrap();
    }
    let mut wanted = bytes.clone();
    wanted[512 * 3..512 * 8].fill(0);
    wanted[64 << 10..128 << 10].fill(0);
    let mut back = vec![1; wanted.len()];
    queue.read(0, &mut back).unwrap();
    assert!(back == wanted, "{name}: write-zeroes");
    if offered & feature::DISCARD != 0 {
        assert!(
            config.max_discard_seg == 1 && config.max_discard_sectors > 0,
            "{name}"
        );
        queue.discard(128 << 10, 64 << 10).unwrap();
        queue.read(0, &mut back[..128 << 10]).unwrap();
        assert!(
            back[..128 << 10] == wanted[..128 << 10],
            "{name}: discard changed a neighbouring sector"
        );
        queue.read(192 << 10, &mut back[..64 << 10]).unwrap();
        assert!(
            back[..64 << 10] == wanted[192 << 10..],
            "{name}: discard changed a neighbouring sector"
        );
    }
}

fn discard_frees_space_on_the_host() {
    use std::os::unix::fs::MetadataExt;
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    let mut client = daemon.open(&small(1));
    client.queue(0).write(0, &vec![7; 8 << 20]).unwrap();
    client.queue(0).flush().unwrap();
    let before = std::fs::metadata(&image).unwrap().blocks();
    client.queue(0).discard(0, 8 << 20).unwrap();
    client.queue(0).flush().unwrap();
    let after = std::fs::metadata(&image).unwrap().blocks();
    assert!(
        after + (7 << 20) / 512 <= before,
        "{before} blocks, then {after}"
    );
    drop(client);
    daemon.finish();
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap(), "--discard", "off"]);
    let mut client = daemon.open(&small(1));
    assert_eq!(client.offered() & feature::DISCARD, 0);
    let refused = client.queue(0).discard(0, 4096);
    assert!(
        matches!(refused, Err(Error::Status { status: 2, .. })),
        "{refused:?}"
    );
    drop(client);
    daemon.finish();
}

fn the_configuration_matches_the_options() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let path = image.to_str().unwrap();
    let args = [
        "--disk",
        path,
        "--queues",
        "7",
        "--block-size",
        "4096",
        "--serial",
        "cleave-0815",
    ];
    let daemon = Daemon::serve(&args);
    let mut client = daemon.open(&small(1));
    let config = client.config().clone();
    assert_eq!(config.capacity_bytes(), DISK);
    assert_eq!(
        (config.blk_size, config.num_queues, config.writeback),
        (4096, 7, 1)
    );
    assert_eq!(
        config.seg_max, 126,
        "with header and status it fits a vring of 128 without indirect descriptors"
    );
    let needed = feature::VERSION_1
        | feature::EVENT_IDX
        | feature::INDIRECT_DESC
        | feature::MQ
        | feature::SEG_MAX
        | feature::BLK_SIZE
        | feature::TOPOLOGY
        | feature::FLUSH
        | feature::CONFIG_WCE
        | feature::DISCARD
        | feature::WRITE_ZEROES
        | feature::VHOST_USER_PROTOCOL;
    assert_eq!(client.offered() & needed, needed);
    assert_eq!(client.offered() & feature::RO, 0);
    assert_eq!(client.frontend().queue_num().unwrap(), 7);
    assert!(client.frontend().max_mem_slots().unwrap() >= 509);
    assert_eq!(client.queue(0).get_id().unwrap(), b"cleave-0815");
    drop(client);
    daemon.finish();
    let daemon = Daemon::serve(&[
        "--disk",
        path,
        "--serial",
        "twenty-characters-xx",
        "--cache",
        "writethrough",
    ]);
    let mut client = daemon.open(&small(1));
    assert_eq!(client.queue(0).get_id().unwrap(), b"twenty-characters-xx");
    assert_eq!(client.config().writeback, 0);
    drop(client);
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

fn a_read_only_disk_reads_and_refuses_every_change() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let bytes = Random::new(4).bytes(1 << 20);
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(&image).unwrap(),
        &bytes,
        0,
    )
    .unwrap();
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap(), "--read-only"]);
    // Also from a guest that did not take the feature.
    for features in [!0, !feature::RO] {
        let mut client = daemon.open(&DeviceOptions {
            features,
            ..small(1)
        });
        assert!(client.offered() & feature::RO != 0);
        let queue = client.queue(0);
        let mut back = vec![0; 1 << 20];
        queue.read(0, &mut back).unwrap();
        assert!(back == bytes);
        for refused in [
            queue.write(0, &[1; 4096]),
            queue.discard(0, 4096),
            queue.write_zeroes(0, 4096, true),
        ] {
            assert!(
                matches!(refused, Err(Error::Status { status: 1, .. })),
                "{refused:?}"
            );
        }
        queue.flush().unwrap();
        queue.read(0, &mut back).unwrap();
        assert!(back == bytes);
    }
    assert!(std::fs::read(&image).unwrap()[..1 << 20] == bytes);
    daemon.finish();
}

fn write_back_is_turned_off_and_on_by_the_guest() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    let mut client = daemon.open(&small(2));
    for wanted in [0, 1, 0] {
        client.frontend().set_config(32, &[wanted]).unwrap();
        assert_eq!(client.refresh_config().unwrap().writeback, wanted);
        exercise(&mut client).unwrap();
    }
    drop(client);
    daemon.finish();
}

fn the_guest_is_notified_of_a_grown_image() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let daemon = Daemon::serve(&["--disk", image.to_str().unwrap()]);
    let mut client = daemon.open(&small(1));
    let channel = client.frontend().open_backend_channel().unwrap();
    for bytes in [2 * DISK, 3 * DISK] {
        std::fs::File::options()
            .write(true)
            .open(&image)
            .unwrap()
            .set_len(bytes)
            .unwrap();
        assert!(
            channel.config_change(TIMEOUT).unwrap(),
            "the frontend was not notified"
        );
        assert_eq!(client.refresh_config().unwrap().capacity_bytes(), bytes);
        exercise(&mut client).unwrap();
    }
    drop(client);
    let client = daemon.open(&small(1));
    assert_eq!(client.config().capacity_bytes(), 3 * DISK);
    drop(client);
    daemon.finish();
}

/// Returns true if a line of an inotify descriptor's fdinfo describes a watch for writes (IN_MODIFY), not only for files that
/// other programs close.
fn tells_writes(line: &str) -> bool {
    let mask = line
        .split_once(" mask:")
        .map(|(_, rest)| rest.split(' ').next());
    let mask = mask
        .flatten()
        .and_then(|mask| u32::from_str_radix(mask, 16).ok());
    line.starts_with("inotify wd:") && mask.is_some_and(|mask| mask & 2 != 0)
}

/// Returns true if the daemon's inotify watches for writes now.
fn is_watching(daemon: &Daemon) -> bool {
    let process = std::path::PathBuf::from(format!("/proc/{}", daemon.pid()));
    let watching = |entry: std::fs::DirEntry| {
        let is_inotify = std::fs::read_link(entry.path())
            .is_ok_and(|to| to == std::path::Path::new("anon_inode:inotify"));
        let info = process.join("fdinfo").join(entry.file_name());
        is_inotify && std::fs::read_to_string(info).is_ok_and(|info| info.lines().any(tells_writes))
    };
    let mut descriptors = std::fs::read_dir(process.join("fd")).unwrap().flatten();
    descriptors.any(watching)
}

fn sighup_checks_the_size_at_once() {
    let scratch = Scratch::new();
    let path = scratch.image("disk", DISK);
    let daemon = Daemon::serve(&["--disk", path.to_str().unwrap()]);
    let mut client = daemon.open(&small(1));
    let channel = client.frontend().open_backend_channel().unwrap();
    let image = std::fs::File::options().write(true).open(&path).unwrap();
    let mut bytes = DISK;
    let mut grow = || {
        bytes += 1 << 20;
        image.set_len(bytes).unwrap();
    };
    let is_told = || channel.config_change(TIMEOUT).unwrap();
    // The daemon does not watch the file for a second after a change. If the test takes longer than that between its
    // two changes, either the signal or the watch may notice the second one.
    let noticed = unless_late("hang-up", Duration::from_millis(500), |lateness| {
        *lateness = Lateness::start(&[daemon.pid()]);
        grow();
        assert!(is_told());
        grow();
        daemon.signal(rustix::process::Signal::HUP);
        assert!(is_told());
        ensure(!is_watching(&daemon), || {
            format!(
                "the signal did not make it check the size\n{}",
                daemon.log_tail()
            )
        })
    });
    noticed.unwrap();
    drop(client);
    daemon.finish();
}

fn every_way_of_setting_up() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    let base = small(2);
    let without = |bits: u64| DeviceOptions {
        features: !bits,
        ..base.clone()
    };
    let table = [
        ("all", base.clone()),
        ("no EVENT_IDX", without(feature::EVENT_IDX)),
        ("no INDIRECT", without(feature::INDIRECT_DESC)),
        (
            "none of EVENT_IDX, INDIRECT, MQ",
            without(feature::EVENT_IDX | feature::INDIRECT_DESC | feature::MQ),
        ),
        (
            "VERSION_1 alone",
            DeviceOptions {
                features: feature::VERSION_1 | feature::VHOST_USER_PROTOCOL,
                ..base.clone()
            },
        ),
        (
            "without bit 30 vrings start enabled",
            without(feature::VHOST_USER_PROTOCOL),
        ),
        (
            "no REPLY_ACK",
            DeviceOptions {
                protocol_features: base.protocol_features & !8,
                ..base.clone()
            },
        ),
        (
            "no protocol feature",
            DeviceOptions {
                protocol_features: 0,
                ..base.clone()
            },
        ),
        (
            "memory by slots",
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
            "blocking eventfds",
            DeviceOptions {
                kick: Notifier::Blocking,
                call: Notifier::Blocking,
                ..base.clone()
            },
        ),
        (
            "calls through a pipe",
            DeviceOptions {
                call: Notifier::Pipe,
                ..base.clone()
            },
        ),
        (
            "no call descriptor",
            DeviceOptions {
                call: Notifier::Absent,
                wait: ReapWait::Poll,
                ..base.clone()
            },
        ),
        (
            "no kick descriptor",
            DeviceOptions {
                kick: Notifier::Absent,
                ..base.clone()
            },
        ),
        (
            "rings of 4",
            DeviceOptions {
                queue_size: 4,
                ..base.clone()
            },
        ),
        (
            "rings of 1024",
            DeviceOptions {
                queue_size: 1024,
                ..base.clone()
            },
        ),
        (
            "from position 65530",
            DeviceOptions {
                base: 65530,
                ..base.clone()
            },
        ),
        (
            "no vring at all",
            DeviceOptions {
                queues: 0,
                ..base.clone()
            },
        ),
    ];
    for (name, options) in table {
        let began = Instant::now();
        let mut client = daemon.open(&options);
        if options.protocol_features & 0x200 == 0 {
            // Without CONFIG the driver does not know the size, but it still reads and writes.
            client.queue(0).write(8192, &[3; 4096]).unwrap();
            let mut back = [0; 4096];
            client.queue(1).read(8192, &mut back).unwrap();
            assert!(back == [3; 4096], "{name}");
            continue;
        }
        for _ in 0..40 {
            exercise(&mut client).unwrap_or_else(|what| panic!("{name}: {what}"));
        }
        println!("{name} ... ok ({} ms)", began.elapsed().as_millis());
    }
    daemon.finish();
}

fn the_largest_ring() {
    let daemon = Daemon::serve(&["--disk", "null:64M", "--queue-size", "32768"]);
    let options = DeviceOptions {
        queue_size: 32768,
        data_bytes: 64 << 20,
        ..small(1)
    };
    let mut client = daemon.open(&options);
    let workload = Workload {
        stop: Stop::Requests(scale(60_000) as u64),
        ..Workload::reads(512, 10_000, 32 << 20, Duration::ZERO)
    };
    assert_eq!(client.queue(0).run(&workload, |_| ()).unwrap().failed, 0);
    drop(client);
    daemon.finish();
}

fn one_partial_start_as_firmware_does_it() {
    let daemon = Daemon::serve(&["--disk", "ram:64M", "--queues", "8"]);
    let mut client = daemon.open(&small(1));
    exercise(&mut client).unwrap();
    // The operating system starts the remaining vrings later.
    let all = range(0, 1, 0);
    assert_eq!(all.len(), 16);
    for index in 1..8 {
        let mut queue = client
            .start_queue(
                index,
                &DeviceOptions {
                    data_bytes: 64 << 10,
                    queue_size: 16,
                    ..small(1)
                },
            )
            .unwrap();
        queue
            .write(u64::from(index) * 4096, &[index as u8; 4096])
            .unwrap();
    }
    exercise(&mut client).unwrap();
    drop(client);
    daemon.finish();
}

/// User-mode Linux uses a pipe for calls. A full pipe must not block the worker, which serves other vrings too.
fn a_full_call_pipe_does_not_block_other_vrings() {
    let daemon = Daemon::serve(&["--disk", "ram:16M", "--workers", "1"]);
    let mut client = daemon.open(&DeviceOptions {
        features: !feature::EVENT_IDX,
        call: Notifier::Pipe,
        ..small(2)
    });
    let queue = client.queue(0);
    let call = queue.call_descriptor().unwrap();
    rustix::pipe::fcntl_setpipe_size(&call, 4096).unwrap();
    // The call for the vring's start may be in the pipe already.
    let flags = rustix::fs::fcntl_getfl(&call).unwrap();
    rustix::fs::fcntl_setfl(&call, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&call, &[0]).is_ok() {}
    rustix::fs::fcntl_setfl(&call, flags).unwrap();
    let (header_at, _) = queue.data_area();
    queue.memory().write(header_at, &header(kind::FLUSH, 0));
    let request = [
        Buffer::readable(header_at, 16),
        Buffer::writable(header_at + 16, 1),
    ];
    for _ in 0..20 {
        // The ring asks for a call, and the pipe has no room for it.
        client.queue(0).ring().arm();
        client.queue(0).ring().add(&request).unwrap();
        client.queue(0).ring().publish();
        client.queue(0).ring_kick();
        assert!(
            wait_until(|| client.queue(0).ring().reap().is_some()),
            "no answer"
        );
        exercise_queue(&mut client, 1).unwrap();
    }
    drop(client);
    daemon.finish();
}
