//! Every kind of disk keeps what is written, whatever the request and its descriptors look like.

use cleave_blk::spec::{feature, request_type as kind};
use cleave_client::{Client, DeviceOptions, all_are};
use cleave_tests::{
    Case, Cut, Daemon, LoopDevice, Model, Random, Requirement, Scratch, case, ensure, header,
    scale, seeded, small, stream,
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

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, test) in ON_EVERY_DISK {
        let on = |kind: &'static Kind| {
            let run = || kind.serve(*test);
            case(format!("{name}: {}", kind.name), kind.needs(), run)
        };
        cases.extend(KINDS.iter().map(on));
    }
    cases
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
