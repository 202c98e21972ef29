//! The dirty log against guest memory itself. There is no vCPU, so what changes while requests are served was written by the
//! daemon, and every page that changed must be marked: whatever the requests are, and whenever the frontend takes another log.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cleave_blk::spec::{SECTOR_BYTES, feature, request_type as kind};
use cleave_client::message::{VringAddr, protocol};
use cleave_client::{
    Buffer, Client, Descriptor, DeviceOptions, Frontend, GuestMemory, Queue, WriteLog,
};
use cleave_tests::{Case, Daemon, Random, Scratch, header, range, scale, seeded, wait_until};

const DISK: u64 = 64 << 20;
const PAGE: u64 = 4096;
const VRINGS: u16 = 3;
/// Requests of each vring in a round, and memory for each: a table, a header, a status byte, data.
const BATCH: u64 = 8;
const SLOT: u64 = (1 << 20) + (96 << 10);
const DATA_MAX: u64 = 1 << 20;
/// A new log is taken after at most so long.
const PASS_MAX_US: u64 = 10_000;
/// An address that no region has.
const NOWHERE: u64 = 1 << 44;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        every_page_that_changes_is_marked_on_ram,
        every_page_that_changes_is_marked_on_null,
        every_page_that_changes_is_marked_on_a_file,
        every_page_that_changes_is_marked_on_a_buffered_file,
        every_page_that_changes_is_marked_on_a_slow_disk,
    ]
}

fn every_page_that_changes_is_marked_on_ram() {
    check(&["--disk", "ram:64M"]);
}

fn every_page_that_changes_is_marked_on_null() {
    check(&["--disk", "null:64M"]);
}

fn every_page_that_changes_is_marked_on_a_file() {
    on_file("auto");
}

fn every_page_that_changes_is_marked_on_a_buffered_file() {
    on_file("off");
}

fn on_file(direct: &str) {
    let scratch = Scratch::new();
    let image = scratch.image("disk", DISK);
    check(&["--disk", image.to_str().unwrap(), "--direct", direct]);
}

/// Most requests are in flight for several passes.
fn every_page_that_changes_is_marked_on_a_slow_disk() {
    check(&[
        "--disk",
        "model:custom,size=64M,channels=4,page=64K,read_us=2000,write_us=2000,jitter=50%",
    ]);
}

fn check(args: &[&str]) {
    let daemon = Daemon::serve(args);
    let mut random = seeded("dirty");
    let plain = DeviceOptions {
        queues: VRINGS,
        queue_size: 64,
        data_bytes: BATCH * SLOT,
        ..DeviceOptions::default()
    };
    let options = DeviceOptions {
        protocol_features: plain.protocol_features | protocol::LOG_SHMFD,
        ..plain
    };
    for without in [0, feature::EVENT_IDX] {
        let mut client = daemon.open(&DeviceOptions {
            features: !without,
            ..options.clone()
        });
        assert_ne!(client.offered() & feature::LOG_ALL, 0);
        for _ in 0..scale(20) {
            round(&mut client, &mut random, Move::Goes);
            // The guest stays after all, and goes, and stays, under load. What is marked meanwhile means nothing.
            round(&mut client, &mut random, Move::Wavers);
        }
    }
    daemon.finish();
}

/// What the frontend does while a round's requests are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Move {
    /// Takes one log after the other.
    Goes,
    /// Switches the marking of pages off and on, in either order.
    Wavers,
}

/// The frontend's side of all vrings.
struct Switch {
    features: u64,
    plain: Vec<VringAddr>,
    logged: Vec<VringAddr>,
}

impl Switch {
    fn new(client: &Client) -> Switch {
        let vrings = 0..client.queue_count();
        let plain = vrings.clone().map(|index| client.vring_addr(index));
        let logged = vrings.map(|index| client.logged_vring_addr(index));
        Switch {
            features: client.features(),
            plain: plain.collect::<Result<_, _>>().unwrap(),
            logged: logged.collect::<Result<_, _>>().unwrap(),
        }
    }

    fn set_features(&self, frontend: &Frontend, log_all: u64) {
        frontend.set_features(self.features | log_all).unwrap();
    }

    fn set_addrs(frontend: &Frontend, addrs: &[VringAddr]) {
        for addr in addrs {
            frontend.set_vring_addr(*addr).unwrap();
        }
    }

    /// As QEMU and Cloud Hypervisor do it.
    fn on(&self, frontend: &Frontend) {
        self.set_features(frontend, feature::LOG_ALL);
        Switch::set_addrs(frontend, &self.logged);
    }

    /// As QEMU does it if `feature_first`, else as Cloud Hypervisor does it.
    fn off(&self, frontend: &Frontend, feature_first: bool) {
        if feature_first {
            self.set_features(frontend, 0);
        }
        Switch::set_addrs(frontend, &self.plain);
        if !feature_first {
            self.set_features(frontend, 0);
        }
    }
}

/// Prepares requests on all vrings while none is served, then has them served and compares memory.
fn round(client: &mut Client, random: &mut Random, goes: Move) {
    let memory = client.memory().clone();
    let switch = Switch::new(client);
    let first = WriteLog::new(&memory).unwrap();
    let (frontend, queues) = client.parts();
    frontend.set_log(&first).unwrap();
    switch.on(frontend);
    for vring in 0..VRINGS.into() {
        frontend.set_vring_enable(vring, false).unwrap();
    }
    let rings = |queue: &mut Queue| {
        let layout = queue.ring().layout();
        // Flags, index, entries, event field.
        pages(layout.used, 6 + 8 * u64::from(layout.size))
    };
    let mut allowed: BTreeSet<u64> = queues.iter_mut().flat_map(rings).collect();
    for queue in queues.iter_mut() {
        // They count as new ones: what was marked before belongs to the previous round.
        for slot in 0..BATCH {
            let writable = submit(queue, slot, random);
            allowed.extend(
                writable
                    .into_iter()
                    .flat_map(|(addr, len)| pages(addr, len)),
            );
        }
        queue.ring().publish();
    }
    first.take_pages();
    let before = memory.copy();
    let served = AtomicBool::new(false);
    let mut marked = std::thread::scope(|scope| {
        let passes = Random::new(random.draw());
        let (frontend, served, switch, memory) = (&*frontend, &served, &switch, &memory);
        let passing = scope.spawn(move || match goes {
            Move::Goes => pass(frontend, memory, first, served, passes),
            Move::Wavers => waver(frontend, switch, served, passes),
        });
        // They are served without a kick.
        let is_served = |queue: &mut Queue| {
            let ring = queue.ring();
            ring.used_index() == ring.position()
        };
        let all = wait_until(|| queues.iter_mut().all(is_served));
        served.store(true, Ordering::Release);
        let marked = passing.join().unwrap();
        assert!(all, "requests were not answered");
        marked
    });
    if goes == Move::Goes {
        let changed = memory.changed_pages(&before);
        let missing: Vec<_> = changed.difference(&marked).collect();
        assert!(missing.is_empty(), "written and not marked: {missing:x?}");
        marked.retain(|page| !allowed.contains(page));
        assert!(marked.is_empty(), "marked without a reason: {marked:x?}");
        assert!(
            changed.len() > usize::from(VRINGS),
            "the guest's memory changed"
        );
    }
    for queue in queues {
        let mut answers = 0;
        while queue.ring().reap().is_some() {
            answers += 1;
        }
        assert_eq!(answers, BATCH);
    }
}

fn pages(addr: u64, len_bytes: u64) -> BTreeSet<u64> {
    match len_bytes {
        0 => BTreeSet::new(),
        _ => (addr / PAGE..=addr.saturating_add(len_bytes - 1) / PAGE).collect(),
    }
}

/// Enables the vrings and takes one log after the other until everything is served. Returns all pages that were marked.
fn pass(
    frontend: &Frontend,
    memory: &GuestMemory,
    mut log: WriteLog,
    served: &AtomicBool,
    mut random: Random,
) -> BTreeSet<u64> {
    for vring in 0..VRINGS.into() {
        frontend.set_vring_enable(vring, true).unwrap();
    }
    let mut marked = BTreeSet::new();
    let mut replaced = Vec::new();
    let mut is_last = false;
    while !is_last {
        std::thread::sleep(Duration::from_micros(random.up_to(PASS_MAX_US)));
        // What is marked for the last answers is in the log that is in force now.
        is_last = served.load(Ordering::Acquire);
        // In one pass of two the marks are taken from the log in force, as QEMU does it.
        if !is_last && random.below(2) == 0 {
            marked.extend(log.take_pages());
            continue;
        }
        let next = WriteLog::new(memory).unwrap();
        frontend.set_log(&next).unwrap();
        let old = std::mem::replace(&mut log, next);
        let pages = old.pages();
        marked.extend(&pages);
        replaced.push((old, pages));
    }
    for (log, pages) in replaced {
        assert_eq!(log.pages(), pages, "a log was written after the answer");
    }
    marked
}

/// Enables the vrings and switches the log off and on until everything is served.
fn waver(
    frontend: &Frontend,
    switch: &Switch,
    served: &AtomicBool,
    mut random: Random,
) -> BTreeSet<u64> {
    for vring in 0..VRINGS.into() {
        frontend.set_vring_enable(vring, true).unwrap();
    }
    while !served.load(Ordering::Acquire) {
        switch.off(frontend, random.below(2) == 0);
        std::thread::sleep(Duration::from_micros(random.up_to(PASS_MAX_US / 10)));
        switch.on(frontend);
        std::thread::sleep(Duration::from_micros(random.up_to(PASS_MAX_US / 10)));
    }
    switch.off(frontend, random.below(2) == 0);
    BTreeSet::new()
}

/// Makes a request of any kind available, sound or not. Returns the ranges that it lets the device write.
fn submit(queue: &mut Queue, slot: u64, random: &mut Random) -> Vec<(u64, u64)> {
    let memory = queue.memory();
    let at = queue.data_area().0 + slot * SLOT;
    let (table, head_at, data_at) = (at, at + (32 << 10), at + (64 << 10));
    let len = match random.below(4) {
        0 => DATA_MAX - (random.below(256) << 12),
        1 => SECTOR_BYTES * (1 + random.below(128)),
        _ => SECTOR_BYTES * (1 + random.below(16)),
    };
    let end = DISK / SECTOR_BYTES;
    // Some end beyond the disk.
    let sector = random.below(end - DATA_MAX / SECTOR_BYTES + 64);
    let what = match random.below(16) {
        0..=6 => kind::IN,
        7..=9 => kind::OUT,
        10 => kind::FLUSH,
        11 => kind::GET_ID,
        12 => kind::DISCARD,
        13 => kind::WRITE_ZEROES,
        14 => 99,
        _ => kind::IN + 2,
    };
    let mut bytes = header(what, sector).to_vec();
    let (out, len) = match what {
        kind::OUT => (true, len),
        kind::FLUSH => (true, 0),
        kind::GET_ID => (false, 20),
        kind::DISCARD | kind::WRITE_ZEROES => {
            bytes.extend(range(sector, 8, 0));
            (true, 0)
        }
        _ => (false, len),
    };
    memory.write(head_at, &bytes);
    let mut buffers = vec![Buffer::readable(head_at, bytes.len() as u32)];
    // Never the bytes that are read there.
    let data = data_at + random.below(3) * random.below(900);
    memory.write(data, &random.bytes(len as usize));
    let piece = [300, 4096, 65536, len.max(1)][random.below(4) as usize].max(len / 900 + 1);
    for from in (0..len).step_by(piece as usize) {
        buffers.push(Buffer {
            addr: data + from,
            len: piece.min(len - from) as u32,
            writable: !out,
        });
    }
    let status = head_at + 100 + random.below(3 * PAGE);
    memory.write(status, &[0xee]);
    buffers.push(Buffer::writable(status, 1));
    let breaks = random.below(12);
    match breaks {
        // The data is readable although it is to be written, or the reverse.
        0 => buffers
            .iter_mut()
            .skip(1)
            .for_each(|one| one.writable = !one.writable),
        // No status byte.
        1 => drop(buffers.pop()),
        // Data, or a status byte, at no memory.
        2 => buffers.insert(
            1,
            Buffer {
                addr: NOWHERE,
                len: 512,
                writable: !out,
            },
        ),
        3 => buffers.push(Buffer::writable(NOWHERE, 1)),
        // A readable descriptor after the status byte.
        4 => buffers.push(Buffer::readable(head_at, 1)),
        _ => {}
    }
    let writable = buffers.iter().filter(|one| one.writable);
    let writable = writable.map(|one| (one.addr, u64::from(one.len))).collect();
    let ring = queue.ring();
    if buffers.len() <= 4 && random.below(2) == 0 {
        ring.add(&buffers).unwrap();
        return writable;
    }
    let head = ring.add_indirect(table, &buffers).unwrap();
    let last = 16 * (buffers.len() as u64 - 1);
    let loops = Descriptor {
        addr: head_at,
        len: 16,
        flags: NEXT,
        next: 0,
    };
    match breaks {
        // A chain without an end, a table inside a table, and a table at no memory.
        5 => memory.write(table + last, &loops.to_bytes()),
        6 => {
            let inner = Descriptor {
                addr: table,
                flags: INDIRECT | WRITE,
                ..loops
            };
            memory.write(table + last, &inner.to_bytes());
        }
        7 => {
            let len = 16 * buffers.len() as u32;
            let lost = Descriptor {
                addr: NOWHERE,
                len,
                flags: INDIRECT,
                next: 0,
            };
            queue.ring().write_descriptor(head, lost);
        }
        _ => {}
    }
    writable
}
