//! Requests of every kind and shape are in flight on every vring while all that may change does: vrings stop and
//! start, memory comes, goes and lies in pieces, the device is reset, the frontend leaves and comes again, and
//! control retunes the workers. What each vring reads is compared with a model, and each waits for its
//! calls asleep, so that one that is lost is found.
#![allow(clippy::unwrap_used, clippy::panic)] // tests: shared steps stand outside of #[test] functions

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleave_blk::spec::{feature, request_type as kind};
use cleave_client::wire::VringAddr;
use cleave_client::{
    Buffer, Client, Doorbell, Frontend, GuestMemory, Options, Queue, RegionPlan, RingLayout, Table,
};
use cleave_tests::{
    Daemon, LoopDevice, PATIENCE, Random, Scratch, header, http, is_root, range, run_to_end, scale,
};

const DISK: u64 = 64 << 20;
/// What a vring has of the disk; parts begin at odd sectors, so that neighbours share blocks.
const PART: u64 = 4 << 20;
const VRINGS: u16 = 4;
/// Requests in flight on each, and guest memory of each request.
const DEPTH: u64 = 12;
const SLOT: u64 = (3 << 20) + 8192;
const LONGEST: u64 = 2 << 20;
/// Where the guest's RAM begins, and what rings have of it; the rest is a region of data, and one that
/// comes and goes.
const RAM: u64 = 0x1_0000_0000;
const RINGS: u64 = 2 << 20;
const DATA: u64 = SLOT * DEPTH * VRINGS as u64;
const WCE_AT: u32 = 32;

/// A request under way.
struct Flying {
    kind: u32,
    /// Its range of the vring's part.
    range: std::ops::Range<usize>,
    pieces: Vec<(u64, usize)>,
    bytes: Vec<u8>,
    status_at: u64,
    slot: u64,
    used_bytes: u32,
}

/// The driver of one vring.
struct Driver<'a> {
    queue: &'a mut Queue,
    random: Random,
    area: u64,
    free: Vec<u64>,
    flying: Vec<Option<Flying>>,
    offset: u64,
    model: Vec<u8>,
    /// Discarded: contents are the store's choice.
    unknown: Vec<bool>,
    indirect: bool,
}

impl<'a> Driver<'a> {
    fn new(queue: &'a mut Queue, seed: u64, indirect: bool) -> Driver<'a> {
        let number = u64::from(queue.index());
        let size = queue.ring().size();
        Driver {
            queue,
            random: Random::new(seed),
            area: RAM + RINGS + number * SLOT * DEPTH,
            free: (0..DEPTH).collect(),
            flying: (0..size).map(|_| None).collect(),
            offset: number * PART + 3 * 512,
            model: vec![0; PART as usize],
            unknown: vec![false; PART as usize],
            indirect,
        }
    }

    fn run(&mut self, stop: &AtomicBool) {
        loop {
            let going = !stop.load(Ordering::Relaxed);
            let burst = if going {
                self.random.below(DEPTH + 1)
            } else {
                0
            };
            for _ in 0..burst {
                self.submit();
            }
            if self.queue.ring().publish() {
                self.queue.ring_kick();
            }
            let mut any = false;
            while let Some(used) = self.queue.ring().reap() {
                self.ended(used.head, used.len);
                any = true;
            }
            match self.free.len() as u64 == DEPTH {
                true if !going => return,
                true => std::thread::sleep(Duration::from_micros(self.random.below(200))),
                false if !any && !self.queue.ring().arm() => {
                    assert!(self.queue.called(PATIENCE), "no call came");
                }
                false => {}
            }
        }
    }

    /// Offers a request on sectors that nothing in flight touches.
    fn submit(&mut self) {
        let Some(&slot) = self.free.last() else {
            return;
        };
        let range = self.draw();
        let what = match self.random.below(32) {
            0..=12 => kind::OUT,
            13..=26 => kind::IN,
            27..=28 => kind::WRITE_ZEROES,
            29 => kind::DISCARD,
            30 => kind::GET_ID,
            _ => kind::FLUSH,
        };
        let apart = |one: &Flying| one.range.end <= range.start || range.end <= one.range.start;
        if !self.flying.iter().flatten().all(apart) {
            return;
        }
        let mut at = self.area + slot * SLOT + 1024;
        let (mut buffers, moved) = self.head(what, &range, &mut at);
        let bytes = match what {
            kind::OUT => self.random.bytes(moved),
            _ => vec![0xa5; moved],
        };
        let pieces = self.data(&bytes, &mut at);
        let writable = what != kind::OUT;
        buffers.extend(pieces.iter().map(|&(addr, len)| Buffer {
            addr,
            len: len as u32,
            writable,
        }));
        let status_at = at + self.random.below(3);
        self.queue.memory().fill(status_at, 1, 0xff);
        buffers.push(Buffer::writable(status_at, 1));
        let table = self.area + slot * SLOT;
        let ring = self.queue.ring();
        let head = match self.indirect {
            true => ring.add_indirect(table, &buffers),
            false => ring.add(&buffers),
        };
        let Some(head) = head else { return };
        self.free.pop();
        self.flying[usize::from(head)] = Some(Flying {
            kind: what,
            range,
            pieces,
            bytes,
            status_at,
            slot,
            used_bytes: 1 + if writable { moved as u32 } else { 0 },
        });
    }

    /// A range of the part, every third on blocks of 4 KiB, every other one behind something in flight.
    fn draw(&mut self) -> std::ops::Range<usize> {
        let unit = if self.random.below(3) == 0 { 4096 } else { 512 };
        let longest = match self.random.below(8) {
            0 => LONGEST,
            1..=3 => 64 << 10,
            _ => 8192,
        };
        let len = unit * (1 + self.random.below(longest / unit));
        let pick = self.random.below(2 * DEPTH) as usize;
        let ends = self.flying.iter().flatten().map(|one| one.range.end as u64);
        let from = match ends.filter(|end| end + len <= PART).nth(pick) {
            Some(end) => end,
            None => unit * self.random.below((PART - len) / unit + 1),
        };
        from as usize..(from + len) as usize
    }

    /// Writes the header, in one piece or several; how many bytes of data follow.
    fn head(
        &mut self,
        what: u32,
        range_of: &std::ops::Range<usize>,
        at: &mut u64,
    ) -> (Vec<Buffer>, usize) {
        let sector = (self.offset + range_of.start as u64) / 512;
        let (bytes, moved) = match what {
            kind::OUT | kind::IN => (header(what, sector).to_vec(), range_of.len()),
            kind::GET_ID => (header(what, 0).to_vec(), 20),
            kind::FLUSH => (header(what, 0).to_vec(), 0),
            _ => {
                let unmap = what == kind::WRITE_ZEROES && self.random.below(2) == 0;
                let range = range(sector, (range_of.len() / 512) as u32, unmap.into());
                ([header(what, 0), range].concat(), 0)
            }
        };
        let most = if self.random.below(4) == 0 { 5 } else { 32 };
        let mut buffers = Vec::new();
        for piece in bytes.chunks(most) {
            self.queue.memory().write(*at, piece);
            buffers.push(Buffer::readable(*at, piece.len() as u32));
            *at += piece.len() as u64 + self.random.below(9);
        }
        (buffers, moved)
    }

    /// Puts data into guest memory, in pieces that are aligned well, a little or not at all.
    fn data(&mut self, bytes: &[u8], at: &mut u64) -> Vec<(u64, usize)> {
        let unit = [4096, 512, 256, 1][self.random.below(4) as usize];
        let most = if self.indirect { 30 } else { 3 };
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < bytes.len() {
            let left = bytes.len() - done;
            let some = (self.random.below(left as u64) as usize + 1).next_multiple_of(unit);
            let take = if pieces.len() == most {
                left
            } else {
                some.min(left)
            };
            *at = (*at + self.random.below(40)).next_multiple_of(unit as u64);
            self.queue.memory().write(*at, &bytes[done..done + take]);
            pieces.push((*at, take));
            *at += take as u64;
            done += take;
        }
        pieces
    }

    fn ended(&mut self, head: u32, used_bytes: u32) {
        let one = self.flying[head as usize].take();
        let one = one.unwrap_or_else(|| panic!("head {head} ended twice"));
        let memory = self.queue.memory();
        let place = self.offset + one.range.start as u64;
        let told = (memory.bytes(one.status_at, 1)[0], used_bytes);
        let what = (one.kind, place, one.range.len());
        assert_eq!(told, (0, one.used_bytes), "kind, place, length {what:?}");
        self.free.push(one.slot);
        let (model, unknown) = (
            &mut self.model[one.range.clone()],
            &mut self.unknown[one.range.clone()],
        );
        match one.kind {
            kind::OUT => {
                model.copy_from_slice(&one.bytes);
                unknown.fill(false);
            }
            kind::WRITE_ZEROES => {
                model.fill(0);
                unknown.fill(false);
            }
            kind::DISCARD => unknown.fill(true),
            kind::IN => {
                let found = one.pieces.iter();
                let found = found.flat_map(|&(addr, len)| memory.bytes(addr, len));
                for (at, byte) in found.enumerate() {
                    let right = unknown[at] || byte == model[at];
                    assert!(right, "byte {at} of {what:?}: {byte}, not {}", model[at]);
                }
            }
            _ => {}
        }
    }
}

/// What the frontend keeps of a vring while its driver works.
struct Wires {
    layout: RingLayout,
    kick: OwnedFd,
    call: OwnedFd,
}

/// The frontend, which changes all that it may.
struct Storm<'a> {
    socket: PathBuf,
    control: PathBuf,
    memory: &'a std::sync::Arc<GuestMemory>,
    options: Options,
    wires: Vec<Wires>,
    /// Where the region of data is cut.
    cuts: Vec<u64>,
    client: Option<Client>,
    has_spare: bool,
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
                // What was kicked meanwhile may be lost.
                rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
            }
            5 => self.reset(),
            6 => self.come_again(),
            _ => self.retune(),
        }
    }

    fn announce(&mut self, vring: u32, base: u32) {
        let Wires { layout, kick, call } = &self.wires[vring as usize];
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

    /// A region that nobody uses comes or goes: all the same a new table for every op.
    fn change_memory(&mut self) {
        let (memory, spare) = (self.memory, self.memory.region(2));
        match self.has_spare {
            true => self.frontend().rem_mem_reg(spare, None).unwrap(),
            false => self.frontend().add_mem_reg(spare, memory.fd(2)).unwrap(),
        }
        self.has_spare = !self.has_spare;
    }

    /// The region of data in pieces that begin and end anywhere.
    fn carve(&mut self) {
        let (memory, region) = (self.memory, self.memory.region(1));
        self.frontend().rem_mem_reg(region, None).unwrap();
        let mut from = 0;
        for to in self.cuts.clone().into_iter().chain([region.len_bytes]) {
            let mut piece = region;
            piece.guest_addr += from;
            piece.user_addr += from;
            piece.file_offset += from;
            piece.len_bytes = to - from;
            self.frontend().add_mem_reg(piece, memory.fd(1)).unwrap();
            from = to;
        }
    }

    /// As QEMU pauses a guest: everything is drained, and goes on where it was.
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

    /// Without a word; what was taken has ended before the next frontend is answered.
    fn come_again(&mut self) {
        self.client = None;
        let frontend = Frontend::connect(&self.socket, PATIENCE).unwrap();
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
        let answer = http::ask(&self.control, "PATCH", "/v1/disks/disk", body);
        assert_eq!(answer.status, 200, "{body}: {}", answer.body);
    }
}

fn storm(name: &str, disk: &[String], random: &mut Random) {
    let scratch = Scratch::new();
    let (socket, control) = (scratch.join("socket"), scratch.join("control"));
    let (at, told) = (socket.to_str().unwrap(), control.to_str().unwrap());
    let args = [
        "serve",
        "--serial",
        "disk",
        "--socket-path",
        at,
        "--control",
        told,
    ];
    let args: Vec<_> = args
        .into_iter()
        .chain(disk.iter().map(String::as_str))
        .collect();
    let daemon = Daemon::with_args(scratch, socket.clone(), &args);
    let memory = GuestMemory::new(&[
        RegionPlan::new(RAM, RINGS),
        RegionPlan::new(RAM + RINGS, DATA),
        RegionPlan::new(RAM << 4, 1 << 20),
    ]);
    let memory = memory.unwrap();
    let options = Options {
        queues: 0,
        queue_size: [16, 64, 256][random.below(3) as usize],
        data_bytes: 4096,
        base: [0, 65530, 32760][random.below(3) as usize],
        features: [!0, !feature::EVENT_IDX][random.below(2) as usize],
        call: [Doorbell::Blocking, Doorbell::NonBlocking][random.below(2) as usize],
        table: Table::Slots,
        patience: PATIENCE,
        ..Options::default()
    };
    let frontend = Frontend::connect(&socket, PATIENCE).unwrap();
    let client = Client::start_in(frontend, memory.clone(), &options).unwrap();
    let start = |vring| client.start_queue(vring, &options).unwrap();
    let mut queues: Vec<Queue> = (0..VRINGS).map(start).collect();
    let wires = queues.iter_mut().map(|queue| Wires {
        layout: queue.ring().layout(),
        kick: queue.kick_descriptor().unwrap(),
        call: queue.call_descriptor().unwrap(),
    });
    let mut cuts: Vec<u64> = (0..100).map(|_| 1 + random.below(DATA - 1)).collect();
    cuts.sort();
    cuts.dedup();
    let mut storm = Storm {
        socket,
        control,
        memory: &memory,
        options,
        wires: wires.collect(),
        cuts,
        client: Some(client),
        has_spare: true,
        random: Random::new(random.word()),
    };
    storm.carve();
    let changes = drive(&mut storm, &mut queues, random);
    println!("{name}: {changes} changes");
    drop(storm);
    daemon.finish();
}

/// Changes things while all vrings are driven; how often.
fn drive(storm: &mut Storm<'_>, queues: &mut [Queue], random: &mut Random) -> usize {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let drivers: Vec<_> = queues
            .iter_mut()
            .map(|queue| {
                let (seed, indirect) = (random.word(), random.below(3) > 0);
                let stop = &stop;
                scope.spawn(move || Driver::new(queue, seed, indirect).run(stop))
            })
            .collect();
        let end = Instant::now() + Duration::from_millis(scale(700) as u64);
        let mut changes = 0;
        while Instant::now() < end && drivers.iter().all(|driver| !driver.is_finished()) {
            storm.change();
            changes += 1;
        }
        stop.store(true, Ordering::Relaxed);
        // A panic of any of them is passed on by the scope.
        changes
    })
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[test]
fn nothing_that_changes_harms_what_is_in_flight() {
    let mut random = Random::announced("storm");
    storm("ram", &words(&["--disk", "ram:64M"]), &mut random);
    for direct in ["auto", "off"] {
        let scratch = Scratch::new();
        let image = scratch.image("disk", DISK);
        let args = ["--disk", image.to_str().unwrap(), "--direct", direct];
        storm(
            &format!("file, direct {direct}"),
            &words(&args),
            &mut random,
        );
    }
    let scratch = Scratch::new();
    let legs = ["one", "two"].map(|name| scratch.image(name, DISK / 2 + (64 << 10)));
    let legs = legs.each_ref().map(|leg| leg.to_str().unwrap());
    let made = run_to_end(&[&["stripe", "create", "--chunk", "4K"], &legs[..]].concat());
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let args = ["--stripe", "4K", "--disk", legs[0], "--disk", legs[1]];
    storm("stripe", &words(&args), &mut random);
    if !is_root() {
        println!("skipped: loop devices need root");
        return;
    }
    for direct in ["auto", "off"] {
        let scratch = Scratch::new();
        let image = scratch.image("disk", DISK);
        let options = ["--sector-size", "4096", "--direct-io=on"];
        match LoopDevice::attach_with(&image, &options) {
            Ok(device) => {
                let args = ["--disk", device.path.to_str().unwrap(), "--direct", direct];
                let name = format!("blocks of 4096, direct {direct}");
                storm(&name, &words(&args), &mut random);
            }
            Err(why) => println!("skipped: a loop device of 4096-byte sectors: {why}"),
        }
    }
}
