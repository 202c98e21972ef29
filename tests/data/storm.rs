//! Requests of every kind and shape are in flight on every vring while everything that can change does: vrings stop
//! and start, memory is added, removed and split elsewhere, the device is reset, the frontend disconnects and
//! reconnects, and the control socket changes the tuning of the workers. Some requests fail: their data lies beyond
//! the end of the disk or of its file, or their memory has been removed. Each vring compares its reads with a model,
//! and sleeps until it is called, so that a lost call is noticed.
//!
//! `CLEAVE_STORM_SECONDS=600 cargo test -p cleave-tests --test data storm::` runs it for ten minutes on each disk.

mod driver;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use cleave_blk::spec::feature;
use cleave_client::message::{RegionBytes, VringAddr};
use cleave_client::{
    Client, DeviceOptions, Frontend, GuestMemory, MemoryMessages, Notifier, Queue, RegionOptions,
    RingLayout,
};
use cleave_tests::{
    Case, Daemon, EndOf, LoopDevice, Messages as _, Random, Requirement, Scratch, TIMEOUT, case,
    http, run_to_exit, scale, seeded, wait_until,
};

use driver::{DEPTH, Driver, RAM, REST, RESTS, RINGS, RUN, SLOT, SPARE};

const DISK: u64 = 64 << 20;
/// Size to which images are truncated while they are served, and the offset from which reads of them fail: a leg of a
/// stripe holds more than its data.
const FILE: u64 = 56 << 20;
const LOST: u64 = 57 << 20;
const VRINGS: u16 = 4;
/// Size of the region of data.
const DATA: u64 = SLOT * DEPTH * VRINGS as u64;
/// A SET_MEM_TABLE carries at most eight regions: the rings, the spare one, and this many of data.
const PIECES_MAX: usize = 6;
const WCE_AT: u32 = 32;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    let (none, loops) = (Requirement::Nothing, Requirement::LoopDevices);
    vec![
        case("nothing_that_changes_harms_ram", none, ram),
        case("nothing_that_changes_harms_a_file", none, || file("auto")),
        case("nothing_that_changes_harms_a_buffered_file", none, || {
            file("off")
        }),
        case("nothing_that_changes_harms_a_stripe", none, stripe),
        case("nothing_that_changes_harms_large_blocks", loops, || {
            large_blocks("auto")
        }),
        case(
            "nothing_that_changes_harms_buffered_large_blocks",
            loops,
            || large_blocks("off"),
        ),
    ]
}

/// The frontend's state of a vring while its driver runs.
struct VringFiles {
    layout: RingLayout,
    kick: OwnedFd,
    call: OwnedFd,
}

/// The frontend, which changes everything that it may.
struct Storm<'a> {
    socket: PathBuf,
    control: PathBuf,
    memory: &'a std::sync::Arc<GuestMemory>,
    options: DeviceOptions,
    wires: Vec<VringFiles>,
    /// Positions at which the region of data is split: in many pieces at first.
    cuts: Vec<u64>,
    first_cuts: Vec<u64>,
    client: Option<Client>,
    has_spare: bool,
    /// State of each driver.
    rests: &'a [AtomicU8],
    random: Random,
}

impl Storm<'_> {
    fn frontend(&mut self) -> &mut Frontend {
        self.client.as_mut().unwrap().frontend()
    }

    fn change(&mut self) {
        std::thread::sleep(Duration::from_micros(self.random.below(4000)));
        let vring = self.random.below(VRINGS.into()) as u32;
        match self.random.below(8) {
            0 => {
                let base = self.frontend().vring_base(vring).unwrap();
                self.announce(vring, base);
            }
            1 => {
                self.frontend().set_vring_enable(vring, false).unwrap();
                std::thread::sleep(Duration::from_micros(self.random.below(2000)));
                self.frontend().set_vring_enable(vring, true).unwrap();
            }
            2 => self.change_memory(),
            3 => {
                let mode = [self.random.below(2) as u8];
                self.frontend().set_config(WCE_AT, &mode).unwrap();
            }
            4 => {
                let kick = self.wires[vring as usize].kick.try_clone().unwrap();
                let set = self.frontend().set_vring_kick(vring, Some(kick.as_fd()));
                set.unwrap();
                // Kicks that were sent meanwhile may be lost.
                rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
            }
            5 => self.reset(),
            6 => self.come_again(),
            _ => self.retune(),
        }
    }

    fn announce(&mut self, vring: u32, base: u32) {
        let VringFiles { layout, kick, call } = &self.wires[vring as usize];
        let user = |addr| self.memory.user_addr(addr).unwrap();
        let addrs = VringAddr {
            index: vring,
            flags: 0,
            desc: user(layout.desc),
            used: user(layout.used),
            avail: user(layout.avail),
            log: 0,
        };
        let frontend = self.client.as_mut().unwrap().frontend();
        frontend.set_vring_num(vring, layout.size.into()).unwrap();
        frontend.set_vring_base(vring, base).unwrap();
        frontend.set_vring_addr(addrs).unwrap();
        frontend.set_vring_call(vring, Some(call.as_fd())).unwrap();
        frontend.set_vring_kick(vring, Some(kick.as_fd())).unwrap();
        frontend.set_vring_enable(vring, true).unwrap();
    }

    /// Every kind of change to the memory table.
    fn change_memory(&mut self) {
        match self.random.below(4) {
            0 | 1 => self.turn_spare(),
            2 => self.tell_table(),
            _ => self.move_border(),
        }
    }

    /// Adds or removes the region that some requests read into.
    fn turn_spare(&mut self) {
        let (memory, spare) = (self.memory, self.memory.region(2));
        match self.has_spare {
            true => self.frontend().rem_mem_reg(spare, None).unwrap(),
            false => self.frontend().add_mem_reg(spare, memory.fd(2)).unwrap(),
        }
        self.has_spare = !self.has_spare;
    }

    /// Replaces the whole table in one message, with requests in flight: the same memory, split elsewhere.
    fn tell_table(&mut self) {
        let (memory, random) = (self.memory, &mut self.random);
        if self.cuts.len() >= PIECES_MAX || random.below(4) > 0 {
            let count = random.below(PIECES_MAX as u64) as usize;
            self.cuts = draw_cuts(random, count);
        }
        self.has_spare = random.below(2) == 0;
        let pieces = self.pieces().into_iter().map(|piece| (piece, memory.fd(1)));
        let mut table = vec![(memory.region(0), memory.fd(0))];
        table.extend(pieces);
        if self.has_spare {
            table.push((memory.region(2), memory.fd(2)));
        }
        let (regions, fds): (Vec<_>, Vec<_>) = table.into_iter().unzip();
        self.frontend().set_mem_table(&regions, &fds).unwrap();
    }

    /// Removes two pieces of data and adds them with another border between them. The drivers that use them pause
    /// meanwhile, as a guest does when it gives memory back; the others continue.
    fn move_border(&mut self) {
        let memory = self.memory;
        if self.cuts.is_empty() {
            return;
        }
        let at = self.random.below(self.cuts.len() as u64) as usize;
        let old = self.pieces();
        let start = if at == 0 { 0 } else { self.cuts[at - 1] };
        let end = self.cuts.get(at + 1).copied().unwrap_or(DATA);
        if end - start < 2 {
            return;
        }
        let area = SLOT * DEPTH;
        let vrings = (start / area) as usize..=((end - 1) / area) as usize;
        let rests = &self.rests[vrings];
        for rest in rests {
            rest.store(REST, Ordering::Release);
        }
        let is_at_rest = || rests.iter().all(|one| one.load(Ordering::Acquire) == RESTS);
        assert!(wait_until(is_at_rest), "a driver does not pause");
        self.cuts[at] = start + 1 + self.random.below(end - start - 1);
        let new = self.pieces();
        for piece in &old[at..at + 2] {
            self.frontend().rem_mem_reg(*piece, None).unwrap();
        }
        for piece in &new[at..at + 2] {
            self.frontend().add_mem_reg(*piece, memory.fd(1)).unwrap();
        }
        for rest in rests {
            rest.store(RUN, Ordering::Release);
        }
    }

    /// The region of data, in pieces with arbitrary borders.
    fn pieces(&self) -> Vec<RegionBytes> {
        let region = self.memory.region(1);
        let from = [0].into_iter().chain(self.cuts.iter().copied());
        let to = self.cuts.iter().copied().chain([region.len_bytes]);
        let piece = |(from, to): (u64, u64)| RegionBytes {
            guest_addr: region.guest_addr + from,
            user_addr: region.user_addr + from,
            file_offset: region.file_offset + from,
            len_bytes: to - from,
        };
        from.zip(to).map(piece).collect()
    }

    /// Replaces the region of data by its pieces.
    fn carve(&mut self) {
        let memory = self.memory;
        self.cuts = self.first_cuts.clone();
        self.frontend().rem_mem_reg(memory.region(1), None).unwrap();
        for piece in self.pieces() {
            self.frontend().add_mem_reg(piece, memory.fd(1)).unwrap();
        }
    }

    /// Pauses the guest as QEMU does: everything is drained, and continues from its position.
    fn reset(&mut self) {
        let features = self.client.as_ref().unwrap().features();
        let frontend = self.frontend();
        frontend.set_status(0).unwrap();
        let base = |vring| frontend.vring_base(vring).unwrap();
        let bases: Vec<u32> = (0..VRINGS.into()).map(base).collect();
        frontend.set_features(features).unwrap();
        for (vring, base) in (0..).zip(bases) {
            self.announce(vring, base);
        }
        self.frontend().set_status(15).unwrap();
    }

    /// Disconnects without a message. Requests that were taken have completed before the next frontend gets a reply.
    fn come_again(&mut self) {
        // A daemon that another test starts just now has a copy of the connection for a moment, which would keep it up.
        let stream = self.frontend().socket().stream();
        stream.shutdown(std::net::Shutdown::Both).unwrap();
        self.client = None;
        let frontend = Frontend::connect(&self.socket, TIMEOUT).unwrap();
        let memory = self.memory.clone();
        self.client = Some(Client::start_in(frontend, memory, &self.options).unwrap());
        self.has_spare = true;
        self.carve();
        for vring in 0..VRINGS.into() {
            let at = self.wires[vring as usize].layout.used + 2;
            let used = self.memory.bytes(at, 2);
            self.announce(vring, u16::from_le_bytes([used[0], used[1]]).into());
        }
    }

    fn retune(&mut self) {
        let bodies = [
            r#"{"completion": "poll"}"#,
            r#"{"completion": "interrupt"}"#,
            r#"{"completion": "adaptive"}"#,
            r#"{"coalesce_us": 200, "coalesce_max": 4}"#,
            r#"{"coalesce_us": 0, "coalesce_max": 0}"#,
            r#"{"split": "4K"}"#,
            r#"{"split": "256K"}"#,
            r#"{"split": "auto"}"#,
            r#"{"split": "off"}"#,
        ];
        let body = bodies[self.random.below(bodies.len() as u64) as usize];
        let answer = http::fetch(&self.control, "PATCH", "/v1/disks/disk", body);
        assert_eq!(answer.status, 200, "{body}: {}", answer.body);
    }
}

/// Sorted, distinct positions at which to split the region of data.
fn draw_cuts(random: &mut Random, count: usize) -> Vec<u64> {
    let mut cuts: Vec<u64> = (0..count).map(|_| 1 + random.below(DATA - 1)).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

/// Drives a disk. `images`: files that are truncated while they are served.
fn storm(name: &str, disk: &[String], images: &[&Path]) {
    let random = &mut seeded(name);
    let disk = disk.iter().map(String::as_str);
    let args: Vec<_> = ["--serial", "disk"].into_iter().chain(disk).collect();
    let (daemon, control) = Daemon::serve_with_control(&args);
    let socket = daemon.socket().to_owned();
    let memory = GuestMemory::new(&[
        RegionOptions::new(RAM, RINGS),
        RegionOptions::new(RAM + RINGS, DATA),
        RegionOptions::new(SPARE, 1 << 20),
    ]);
    let memory = memory.unwrap();
    let options = DeviceOptions {
        queues: 0,
        queue_size: [16, 64, 256][random.below(3) as usize],
        data_bytes: 4096,
        base: [0, 65530, 32760][random.below(3) as usize],
        features: [!0, !feature::EVENT_IDX][random.below(2) as usize],
        call: [Notifier::Blocking, Notifier::NonBlocking][random.below(2) as usize],
        table: MemoryMessages::Slots,
        timeout: TIMEOUT,
        ..DeviceOptions::default()
    };
    let frontend = Frontend::connect(&socket, TIMEOUT).unwrap();
    let client = Client::start_in(frontend, memory.clone(), &options).unwrap();
    let start = |vring| client.start_queue(vring, &options).unwrap();
    let mut queues: Vec<Queue> = (0..VRINGS).map(start).collect();
    let wires = queues.iter_mut().map(|queue| VringFiles {
        layout: queue.ring().layout(),
        kick: queue.kick_descriptor().unwrap(),
        call: queue.call_descriptor().unwrap(),
    });
    for image in images {
        let file = File::options().write(true).open(image).unwrap();
        file.set_len(FILE / images.len() as u64).unwrap();
    }
    let lost_from = if images.is_empty() { DISK } else { LOST };
    let rests: Vec<_> = (0..VRINGS).map(|_| AtomicU8::new(RUN)).collect();
    let mut storm = Storm {
        socket,
        control,
        memory: &memory,
        options,
        wires: wires.collect(),
        cuts: Vec::new(),
        first_cuts: draw_cuts(random, 100),
        client: Some(client),
        has_spare: true,
        rests: &rests,
        random: Random::new(random.draw()),
    };
    storm.carve();
    let (changes, served, failed) = drive(&mut storm, &mut queues, lost_from, random);
    println!("{name}: {changes} changes, {served} requests served, {failed} failed as expected");
    assert!(
        served > 0 && failed > 0,
        "{name}: {served} served, {failed} failed"
    );
    drop(storm);
    daemon.finish();
}

/// Changes things while all vrings are driven. Returns the number of changes, and of requests that succeeded and
/// failed.
fn drive(
    storm: &mut Storm<'_>,
    queues: &mut [Queue],
    lost_from: u64,
    random: &mut Random,
) -> (usize, usize, usize) {
    let stop = AtomicBool::new(false);
    let rests = storm.rests;
    std::thread::scope(|scope| {
        let drivers: Vec<_> = queues
            .iter_mut()
            .zip(rests)
            .map(|(queue, rest)| {
                let (seed, indirect) = (random.draw(), random.below(3) > 0);
                let stop = &stop;
                scope.spawn(move || Driver::new(queue, seed, indirect, lost_from).run(stop, rest))
            })
            .collect();
        let (end, until) = (EndOf(&stop), Instant::now() + duration());
        let mut changes = 0;
        while Instant::now() < until && drivers.iter().all(|driver| !driver.is_finished()) {
            storm.change();
            changes += 1;
        }
        drop(end);
        let (mut served, mut failed) = (0, 0);
        for driver in drivers {
            let done = driver.join();
            let done = done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (served, failed) = (served + done.0, failed + done.1);
        }
        (changes, served, failed)
    })
}

/// How long each disk is driven.
fn duration() -> Duration {
    match std::env::var("CLEAVE_STORM_SECONDS") {
        Ok(seconds) => Duration::from_secs(seconds.parse().unwrap()),
        Err(_) => Duration::from_millis(scale(700) as u64),
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn ram() {
    storm("ram", &words(&["--disk", "ram:64M"]), &[]);
}

fn file(direct: &str) {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let args = ["--disk", image.to_str().unwrap(), "--direct", direct];
    storm(&format!("file, direct {direct}"), &words(&args), &[&image]);
}

fn stripe() {
    let scratch = Scratch::new();
    let legs = ["one", "two"].map(|name| scratch.image(name, DISK / 2 + (64 << 10)));
    let paths = legs.each_ref().map(|leg| leg.to_str().unwrap());
    let made = run_to_exit(&[&["stripe", "create", "--chunk", "4K"], &paths[..]].concat());
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let args = ["--stripe", "4K", "--disk", paths[0], "--disk", paths[1]];
    storm(
        "stripe",
        &words(&args),
        &legs.each_ref().map(|leg| leg.as_path()),
    );
}

fn large_blocks(direct: &str) {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    let options = ["--sector-size", "4096", "--direct-io=on"];
    let device = LoopDevice::attach_with(&image, &options).unwrap();
    let args = ["--disk", device.path.to_str().unwrap(), "--direct", direct];
    storm(
        &format!("blocks of 4096, direct {direct}"),
        &words(&args),
        &[],
    );
}
