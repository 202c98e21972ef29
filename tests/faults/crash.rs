//! After a power cut below the running daemon, the disk still keeps every promise that was made to the guest. The
//! guest, the program and the kernel are real. The disk is a file system that records every I/O; `cleave_states`
//! builds the states that a power cut may leave, and checks them.
//!
//! `CLEAVE_STATES_LOG=FILE` keeps the last recording, for `replay-log` of xfstests.

mod disk;

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use cleave_blk::spec::request_type as kind;
use cleave_client::{Buffer, Client};
use cleave_states::{Extent, Layout, Log, Number, SECTOR, Submission, check};
use cleave_tests::{
    Case, Daemon, LoopDevice, Messages as _, Random, Requirement, Scratch, case, header, range,
    run_to_exit, seeded, small, wait_until,
};

use disk::{FileOptions, RecordedDisk};

/// Size of the guest's disk, and the part that half of the requests share.
const SECTORS: u64 = 4096;
const CROWDED: u64 = 96;
const VRINGS: u16 = 2;
/// Requests in flight on each vring, and guest memory for each request.
const DEPTH: u64 = 12;
const SLOT: u64 = 256 << 10;
/// Longest request in sectors: longer than one I/O of the disk.
const LONGEST: u64 = 320;
const REQUESTS: usize = 900;
/// States that a run must reach.
const STATES_MIN: u64 = 10_000;
const WCE_AT: u32 = 32;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    let fuse = Requirement::Fuse;
    vec![
        case("a_file_past_the_page_cache", fuse, || {
            crash("direct", 1, 512, Direct::On, &[]);
        }),
        case("a_file_through_the_page_cache", fuse, || {
            crash("cached", 1, 512, Direct::Off, &[]);
        }),
        case("a_file_of_large_blocks", fuse, || {
            crash("large blocks", 1, 4096, Direct::On, &[]);
        }),
        case("split_requests", fuse, || {
            crash("split", 1, 512, Direct::On, &["--split", "4K"]);
        }),
        case("a_stripe", fuse, || {
            crash("stripe", 4, 512, Direct::On, &[]);
        }),
        case("a_stripe_through_the_page_cache", fuse, || {
            crash("cached stripe", 4, 512, Direct::Off, &[]);
        }),
        // Unlike a file of FUSE, it is trusted to make a write durable by itself.
        case(
            "a_device_past_the_page_cache",
            Requirement::LoopDevices,
            || {
                crash("device", 1, 512, Direct::Device, &[]);
            },
        ),
    ]
}

/// A request in flight.
struct InFlight {
    /// Its number in the log; `None`: a read.
    number: Option<Number>,
    slot: u64,
    status_at: u64,
}

/// A guest that writes, zeroes, discards, flushes and switches its cache at random.
struct Guest<'a> {
    client: Client,
    disk: &'a RecordedDisk,
    /// Block size of the disk's I/O.
    unit: u64,
    /// False on a device, where a discarded sector may keep what it had: the kernel leaves out parts of the device's granules.
    discards: bool,
    random: Random,
    free: Vec<Vec<u64>>,
    flying: Vec<HashMap<u32, InFlight>>,
    write_through: bool,
    asked: usize,
}

impl Guest<'_> {
    fn log<T>(&self, record: impl FnOnce(&mut Log) -> T) -> T {
        record(self.disk.log().as_mut().unwrap())
    }

    fn run(&mut self) {
        while self.asked < REQUESTS {
            if self.random.below(60) == 0 {
                self.switch();
            }
            for vring in 0..usize::from(VRINGS) {
                for _ in 0..self.random.below(4) {
                    self.submit(vring);
                }
                self.publish(vring);
            }
            self.reap_all();
            std::thread::sleep(Duration::from_micros(self.random.below(150)));
        }
        let is_over = wait_until(|| {
            self.reap_all();
            self.flying.iter().all(HashMap::is_empty)
        });
        assert!(is_over, "some requests never completed");
    }

    /// Switches the write cache while requests are in flight.
    fn switch(&mut self) {
        self.write_through = !self.write_through;
        let on = self.write_through;
        if !on {
            self.log(|log| log.write_through(false));
        }
        let mode = [u8::from(!on)];
        self.client.frontend().set_config(WCE_AT, &mode).unwrap();
        self.reap_all();
        if on {
            // The guest may treat every completion that it sees from here on as durable, even for requests that it
            // sent earlier.
            self.log(|log| log.write_through(true));
        }
    }

    fn publish(&mut self, vring: usize) {
        let queue = self.client.queue(vring);
        if queue.ring().publish() {
            queue.ring_kick();
        }
    }

    fn submit(&mut self, vring: usize) {
        let Some(slot) = self.free[vring].pop() else {
            return;
        };
        let random = &mut self.random;
        let longest = [4, 64, LONGEST][random.below(3) as usize];
        let len = 1 + random.below(longest);
        let room = [CROWDED, SECTORS][random.below(2) as usize].max(len + 1);
        let sector = random.below(room - len);
        let bytes = random.bytes(len as usize * SECTOR);
        let what = match random.below(12) {
            0..2 => kind::IN,
            2..8 => kind::OUT,
            8 => kind::WRITE_ZEROES,
            9 if self.discards => kind::DISCARD,
            _ => kind::FLUSH,
        };
        let unmap = what == kind::WRITE_ZEROES && random.below(2) == 0;
        // Aligned or unaligned at random.
        let shift = [0, 512, 16][random.below(3) as usize];
        let sectors = len;
        let ask = match what {
            kind::IN => None,
            kind::OUT => Some(Submission::Write {
                sector,
                bytes: &bytes,
            }),
            kind::WRITE_ZEROES => Some(Submission::Zero { sector, sectors }),
            kind::DISCARD => Some(self.discard(sector, len)),
            _ => Some(Submission::Flush),
        };
        let number = ask.map(|ask| self.log(|log| log.submit(ask)));
        self.asked += usize::from(number.is_some());
        let place = match what {
            kind::IN | kind::OUT => sector,
            _ => 0,
        };
        let queue = self.client.queue(vring);
        let (memory, area) = (queue.memory(), queue.data_area().0 + slot * SLOT);
        let (head_at, status_at, data_at) = (area, area + 64, area + 4096 + shift);
        memory.write(head_at, &header(what, place));
        memory.fill(status_at, 1, 0xff);
        let data = match what {
            kind::OUT => bytes.as_slice(),
            kind::FLUSH => &[],
            kind::IN => &bytes,
            _ => &range(sector, len as u32, unmap.into()),
        };
        memory.write(data_at, data);
        let data = Buffer {
            addr: data_at,
            len: data.len() as u32,
            writable: what == kind::IN,
        };
        let mut buffers = vec![
            Buffer::readable(head_at, 16),
            Buffer::writable(status_at, 1),
        ];
        if data.len > 0 {
            buffers.insert(1, data);
        }
        let head = queue
            .ring()
            .add(&buffers)
            .expect("the ring has room for all slots");
        let flying = InFlight {
            number,
            slot,
            status_at,
        };
        assert!(self.flying[vring].insert(head.into(), flying).is_none());
    }

    /// Effect of a discard: the partial blocks at its ends keep their contents.
    fn discard(&self, sector: u64, len: u64) -> Submission<'static> {
        let unit = self.unit / 512;
        let from = sector.next_multiple_of(unit);
        let sectors = ((sector + len) / unit * unit).saturating_sub(from);
        Submission::Discard {
            sector: from,
            sectors,
        }
    }

    fn reap_all(&mut self) {
        for vring in 0..usize::from(VRINGS) {
            while let Some(used) = self.client.queue(vring).ring().reap() {
                let one = self.flying[vring].remove(&used.head).unwrap();
                let status = self.client.queue(vring).memory().bytes(one.status_at, 1)[0];
                assert_eq!(status, 0, "every request must succeed");
                self.free[vring].push(one.slot);
                if let Some(number) = one.number {
                    self.log(|log| log.complete_request(number, true));
                }
            }
        }
    }
}

/// How the daemon uses the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direct {
    On,
    Off,
    /// Past it, on a loop device over the file.
    Device,
}

/// Runs the daemon with these options on recorded files.
fn crash(name: &str, files: u64, unit: u64, direct: Direct, options: &[&str]) {
    let cached = direct == Direct::Off;
    let random = &mut seeded(name);
    let scratch = Scratch::new();
    let is_stripe = files > 1;
    // A leg ends with its superblock.
    let bytes = SECTORS / files * 512 + if is_stripe { 4096 } else { 0 };
    let disk = RecordedDisk::mount(
        &scratch,
        FileOptions {
            files,
            bytes,
            unit,
            cached,
            seed: random.draw(),
        },
    );
    let mut paths = disk.paths();
    let device = (direct == Direct::Device).then(|| {
        let file = Path::new(&paths[0]);
        LoopDevice::attach_with(file, &["--direct-io=on"]).unwrap()
    });
    if let Some(device) = &device {
        paths = vec![device.path.display().to_string()];
    }
    let mut args = vec!["--direct", if cached { "off" } else { "on" }];
    args.extend(options);
    if is_stripe {
        let legs: Vec<&str> = paths.iter().map(String::as_str).collect();
        let made = run_to_exit(&[&["stripe", "create", "--chunk", "4K"], &legs[..]].concat());
        assert_eq!(made.code, Some(0), "{}", made.stderr);
        args.extend(["--stripe", "4K"]);
    }
    args.extend(paths.iter().flat_map(|path| ["--disk", path]));
    let daemon = Daemon::serve(&args);
    let layout = Layout {
        legs: files,
        leg_sectors: bytes / 512,
        chunk_sectors: if is_stripe { 8 } else { SECTORS },
        sectors: SECTORS,
    };
    disk.record(Log::new(layout));
    let mut queues = small(VRINGS);
    queues.data_bytes = SLOT * DEPTH;
    let client = daemon.open(&queues);
    assert_eq!(client.config().capacity_bytes(), SECTORS * 512);
    let slots = || (0..DEPTH).collect();
    let mut guest = Guest {
        client,
        disk: &disk,
        unit,
        discards: device.is_none(),
        random: Random::new(random.draw()),
        free: vec![slots(), slots()],
        flying: vec![HashMap::new(), HashMap::new()],
        write_through: false,
        asked: 0,
    };
    guest.run();
    drop(guest);
    daemon.finish();
    let log = disk.log().take().unwrap();
    if let Some(path) = std::env::var_os("CLEAVE_STATES_LOG") {
        let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
        log.save(&mut file).unwrap();
    }
    let extent = Extent {
        subsets: 20_000 / log.len().1 + 1,
        cached_above: cached,
    };
    let checked =
        check(&log, extent, &mut |n| random.below(n)).unwrap_or_else(|lost| panic!("{lost}"));
    println!("{name}: {:?} requests and I/O, {checked:?}", log.len());
    assert!(checked.states >= STATES_MIN, "{checked:?}");
    assert!(
        checked.lossy > STATES_MIN / 4 && checked.torn > STATES_MIN / 10,
        "{checked:?}"
    );
    assert!(checked.epochs > 20 && checked.promises > 50, "{checked:?}");
}
