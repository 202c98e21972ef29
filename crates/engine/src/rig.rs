//! Shared parts of the engine's tests: disks, guest memory, and a driver that checks every byte against a model.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_blk::{Op, OpKind, Segment};
use cleave_disk::{Direct, Disk, DiskSpec, OpenOptions};
use cleave_guest::{Epoch, Memory, RegionSpec};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use tempfile::TempDir;

use crate::reactor::ring::Level;
use crate::{AnyStore, EngineError, Model, Neighbours, Prepared, Reactor, Store, Wait};

pub(crate) const READ: OpKind = OpKind::Read;
pub(crate) const WRITE: OpKind = OpKind::Write { durable: false };
pub(crate) const DURABLE: OpKind = OpKind::Write { durable: true };
pub(crate) const ZERO: OpKind = OpKind::Zero {
    unmap: false,
    durable: false,
};
pub(crate) const UNMAP: OpKind = OpKind::Zero {
    unmap: true,
    durable: false,
};

/// A folder beside the test binary, which is on a real file system even if /tmp is in memory.
pub(crate) fn folder() -> TempDir {
    let exe = std::env::current_exe().unwrap();
    TempDir::new_in(exe.parent().unwrap()).unwrap()
}

pub(crate) fn image(dir: &Path, bytes: u64) -> PathBuf {
    let path = dir.join("image");
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

pub(crate) fn open(path: &Path, direct: Direct) -> Disk {
    let options = OpenOptions {
        direct,
        ..OpenOptions::default()
    };
    Disk::open(&DiskSpec::Path(path.to_owned()), &options).unwrap()
}

pub(crate) fn disk_of(spec: &str) -> Disk {
    let options = OpenOptions::default();
    Disk::open(&spec.parse().unwrap(), &options).unwrap()
}

/// Guest memory and its files: two regions that are adjacent only in the guest.
pub(crate) struct Guest {
    pub(crate) memory: Arc<Memory>,
    pub(crate) files: Vec<File>,
}

pub(crate) const REGION: u64 = 8 << 20;

impl Guest {
    pub(crate) fn new() -> Guest {
        let mut regions = Vec::new();
        let mut files = Vec::new();
        for number in 0..2 {
            let file: File = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap().into();
            ftruncate(&file, REGION).unwrap();
            files.push(file.try_clone().unwrap());
            let guest_addr = number * REGION;
            let user_addr = 0x7f00_0000_0000 + guest_addr;
            regions.push(RegionSpec {
                guest_addr,
                user_addr,
                len_bytes: REGION,
                file_offset: 0,
                file,
            });
        }
        Guest {
            memory: Memory::new(regions).unwrap(),
            files,
        }
    }

    pub(crate) fn put(&self, segments: &[Segment], bytes: &[u8]) {
        assert_eq!(self.memory.copy_out(segments, bytes).unwrap(), bytes.len());
    }

    pub(crate) fn get(&self, segments: &[Segment], len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        assert_eq!(self.memory.copy_in(segments, &mut out).unwrap(), len);
        out
    }
}

pub(crate) fn segment(addr: u64, len: u32) -> Segment {
    Segment { addr, len }
}

pub(crate) fn op(kind: OpKind, offset_bytes: u64, len_bytes: u64, segments: &[Segment]) -> Op<'_> {
    Op {
        kind,
        leg: 0,
        offset_bytes,
        len_bytes,
        segments,
        skip_bytes: 0,
        stripe: None,
    }
}

/// An event of a [`Solo`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Done { token: u64, result: Result<(), i32> },
    Woken { slot: u16 },
}

/// A reactor with one store, and the guest memory of its ops.
#[derive(Debug)]
pub(crate) struct Solo<S: Store> {
    pub(crate) reactor: Reactor,
    stores: [S; 1],
    epoch: Epoch,
}

/// A disk's own store on a ring, which most tests use.
pub(crate) type Uring = Solo<AnyStore>;

impl Uring {
    pub(crate) fn new(
        disk: Arc<Disk>,
        memory: Arc<Memory>,
        ops: u16,
        watches: u16,
        bells: u16,
    ) -> Result<Uring, EngineError> {
        let mut reactor = Reactor::new(&[&disk], ops, watches, bells)?;
        let store = AnyStore::open(&mut reactor, &disk, 0, ops)?;
        Ok(Solo::of(reactor, store, memory))
    }

    /// On a thread that other disks may share.
    pub(crate) fn shared(
        disk: Arc<Disk>,
        memory: Arc<Memory>,
        ops: u16,
    ) -> Result<Uring, EngineError> {
        Uring::beside(disk, memory, ops, &Arc::default())
    }

    /// On a thread that it shares with these disks.
    pub(crate) fn beside(
        disk: Arc<Disk>,
        memory: Arc<Memory>,
        ops: u16,
        neighbours: &Arc<Neighbours>,
    ) -> Result<Uring, EngineError> {
        let (heir, _) = std::sync::mpsc::channel();
        let mut reactor = Prepared::new(&[&disk], [ops, 4, 4], neighbours)?.enable(&heir)?;
        let store = AnyStore::open(&mut reactor, &disk, 0, ops)?;
        Ok(Solo::of(reactor, store, memory))
    }

    pub(crate) fn with_queue(
        disk: Arc<Disk>,
        memory: Arc<Memory>,
        slots: [u16; 3],
        submissions: u32,
        levels: &[Level],
    ) -> Result<Uring, EngineError> {
        let mut reactor = Reactor::with_queue(&[&disk], slots, submissions, levels)?;
        let store = AnyStore::open(&mut reactor, &disk, 0, slots[0])?;
        Ok(Solo::of(reactor, store, memory))
    }
}

impl Solo<Model> {
    pub(crate) fn model(
        disk: &Arc<Disk>,
        memory: &Arc<Memory>,
        ops: u16,
    ) -> Result<Self, EngineError> {
        let reactor = Reactor::new(&[disk], ops, 4, 4)?;
        let store = Model::new(Arc::clone(disk), ops)?;
        Ok(Solo::of(reactor, store, Arc::clone(memory)))
    }
}

impl<S: Store> Solo<S> {
    pub(crate) fn of(reactor: Reactor, store: S, memory: Arc<Memory>) -> Solo<S> {
        Solo {
            reactor,
            stores: [store],
            epoch: Epoch::from(memory),
        }
    }

    pub(crate) fn store(&mut self) -> &mut S {
        &mut self.stores[0]
    }

    pub(crate) fn room(&self) -> usize {
        self.stores[0].room()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.stores[0].in_flight()
    }

    pub(crate) fn push(&mut self, op: Op<'_>, token: u64) {
        self.stores[0].push(&mut self.reactor, &self.epoch, op, token);
    }

    pub(crate) fn at_once(&mut self, op: &Op<'_>) -> bool {
        self.stores[0].at_once(&self.epoch, op)
    }

    pub(crate) fn reap(&mut self) -> Option<Event> {
        Some(match self.reactor.reap(&mut self.stores)? {
            crate::Event::Done { store: 0, done } => Event::Done {
                token: done.token,
                result: done.result,
            },
            crate::Event::Done { store, .. } => panic!("store {store}"),
            crate::Event::Woken { slot } => Event::Woken { slot },
        })
    }

    pub(crate) fn enter(&mut self, wait: Wait) -> std::io::Result<()> {
        self.reactor.enter(&mut self.stores, wait)
    }

    pub(crate) fn bind(&mut self, memory: Arc<Memory>) {
        self.epoch = Epoch::from(memory);
    }

    pub(crate) fn watch(&mut self, slot: u16, fd: OwnedFd) {
        self.reactor.watch(slot, fd);
    }

    pub(crate) fn unwatch(&mut self, slot: u16) {
        self.reactor.unwatch(slot);
    }

    pub(crate) fn set_bell(&mut self, slot: u16, fd: Option<OwnedFd>) {
        let made = fd.map(|fd| crate::BellFd::new(fd, false));
        self.reactor.set_bell(slot, made);
    }

    /// As a pool has it.
    pub(crate) fn set_shared_bell(&mut self, slot: u16, fd: OwnedFd) {
        let made = crate::BellFd::new(fd, true);
        self.reactor.set_bell(slot, Some(made));
    }

    pub(crate) fn ring(&mut self, slot: u16) {
        self.reactor.ring(slot);
    }

    pub(crate) fn polls(&self) -> bool {
        self.stores[0].polls()
    }

    pub(crate) fn polled(&self) -> u64 {
        self.reactor.polled()
    }

    pub(crate) fn enters(&self) -> u64 {
        self.reactor.enters()
    }
}

impl<S: Store> Drop for Solo<S> {
    fn drop(&mut self) {
        self.reactor.close(&mut self.stores);
    }
}

/// Waits for the next result.
pub(crate) fn next_done<S: Store>(engine: &mut Solo<S>) -> (u64, Result<(), i32>) {
    let deadline = Instant::now() + cleave_tests::TIMEOUT;
    loop {
        while let Some(event) = engine.reap() {
            if let Event::Done { token, result } = event {
                return (token, result);
            }
        }
        assert!(Instant::now() < deadline, "nothing completes");
        // The completion of a polled op does not end a sleep.
        let wait = match engine.polls() {
            true => Wait::No,
            false => Wait::Until(Some(deadline)),
        };
        engine.enter(wait).unwrap();
    }
}

/// Runs one op from push to result.
pub(crate) fn run<S: Store>(engine: &mut Solo<S>, op: Op<'_>) -> Result<(), i32> {
    engine.push(op, 77);
    let (token, result) = next_done(engine);
    assert_eq!((token, engine.in_flight()), (77, 0));
    result
}

pub(crate) fn eventfd(nonblocking: bool) -> OwnedFd {
    use rustix::event::{EventfdFlags, eventfd};
    let flags = if nonblocking {
        EventfdFlags::NONBLOCK
    } else {
        EventfdFlags::empty()
    };
    eventfd(0, flags | EventfdFlags::CLOEXEC).unwrap()
}

/// Reads and resets the counter; 0 if nothing was written.
pub(crate) fn count(fd: &OwnedFd) -> u64 {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut polled = [PollFd::new(fd, PollFlags::IN)];
    if poll(&mut polled, Some(&Timespec::default())).unwrap() == 0 {
        return 0;
    }
    let mut bytes = [0; 8];
    rustix::io::read(fd, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

pub(crate) fn signal(fd: &OwnedFd) {
    rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
}

/// Random numbers that a seed reproduces.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }
}

pub(crate) fn seed() -> u64 {
    let seed = std::env::var("CLEAVE_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64);
    println!("replay with CLEAVE_SEED={seed}");
    seed
}

/// Parameters of a model run.
pub(crate) struct Load {
    pub(crate) ops: u64,
    pub(crate) depth: usize,
    pub(crate) sectors_max: u64,
    pub(crate) kinds: &'static [OpKind],
}

struct PendingOp {
    kind: OpKind,
    offset: u64,
    len: u64,
    slot: u64,
    segments: Vec<Segment>,
    skip: u32,
    pushed: bool,
}

/// Runs random ops, never two in flight on the same sectors (but on adjacent ones), and compares every read,
/// and at the end the whole disk, with a model in memory. The disk is zero at first; `discard_zeroes` says
/// whether it reads zero after a discard.
pub(crate) fn check_against_model<S: Store>(
    engines: &mut [Solo<S>],
    guest: &Guest,
    disk: &Disk,
    load: &Load,
    seed: u64,
) {
    let mut random = Random(seed);
    let capacity = disk.capacity_bytes();
    let mut model = vec![0_u8; capacity as usize];
    let mut pending: HashMap<(usize, u64), PendingOp> = HashMap::new();
    let slot_bytes = (2 * REGION / load.depth as u64) & !4095;
    let mut slots: Vec<u64> = (0..load.depth as u64).collect();
    let (mut pushed, mut done) = (0, 0);
    let deadline = Instant::now() + Duration::from_secs(120);
    while done < load.ops {
        assert!(Instant::now() < deadline, "stuck: {done} of {}", load.ops);
        for (at, engine) in engines.iter_mut().enumerate() {
            while pushed < load.ops && !slots.is_empty() && engine.room() > 0 && random.below(8) > 0
            {
                let slot = slots.pop().unwrap();
                let Some(one) = draw(&mut random, &pending, capacity, slot, slot_bytes, load)
                else {
                    slots.push(slot);
                    break;
                };
                begin(engine, guest, &mut model, &one, &mut random, pushed);
                pending.insert((at, pushed), one);
                pushed += 1;
            }
            let wait = match random.below(3) {
                0 => Wait::No,
                _ => Wait::Until(Some(Instant::now() + Duration::from_millis(1))),
            };
            engine.enter(wait).unwrap();
            while let Some(event) = engine.reap() {
                let Event::Done { token, result } = event else {
                    continue;
                };
                let one = pending.remove(&(at, token)).expect("one result per op");
                assert_eq!(
                    result,
                    Ok(()),
                    "{:?} at {} of {}",
                    one.kind,
                    one.offset,
                    one.len
                );
                end(guest, &model, &one);
                slots.push(one.slot);
                done += 1;
            }
        }
    }
    for engine in engines.iter() {
        assert_eq!(engine.in_flight(), 0);
    }
    for offset in (0..capacity).step_by(1 << 20) {
        let len = (capacity - offset).min(1 << 20);
        let segments = [segment(0, len as u32)];
        assert_eq!(
            run(&mut engines[0], op(READ, offset, len, &segments)),
            Ok(())
        );
        compare(
            &guest.get(&segments, len as usize),
            &model,
            offset,
            "at the end",
        );
    }
}

fn draw(
    random: &mut Random,
    pending: &HashMap<(usize, u64), PendingOp>,
    capacity: u64,
    slot: u64,
    slot_bytes: u64,
    load: &Load,
) -> Option<PendingOp> {
    let kind = load.kinds[random.below(load.kinds.len() as u64) as usize];
    let len = 512 * (1 + random.below(load.sectors_max));
    let offset = 512 * random.below((capacity - len) / 512 + 1);
    let free = |one: &PendingOp| offset + len <= one.offset || one.offset + one.len <= offset;
    pending.values().all(free).then_some(())?;
    let (offset, len) = if kind == OpKind::Sync {
        (0, 0)
    } else {
        (offset, len)
    };
    // Guest memory in a slot of its own, at any address, in a few segments of any length.
    let room = slot_bytes - len - 4096;
    let base = slot * slot_bytes
        + if random.below(2) == 0 {
            random.below(room.min(4096))
        } else {
            0
        };
    let skip = if random.below(4) == 0 {
        random.below(512) as u32
    } else {
        0
    };
    let mut segments = Vec::new();
    let (mut addr, mut left) = (base, len + u64::from(skip));
    while left > 0 {
        let most = left.min(1 + random.below(len.max(1)));
        let take = if random.below(2) == 0 {
            most.next_multiple_of(512).min(left)
        } else {
            most
        };
        // The skip is below the first segment.
        let take = if segments.is_empty() {
            take.max(u64::from(skip) + 1).min(left)
        } else {
            take
        };
        segments.push(segment(addr, take as u32));
        addr += take;
        left -= take;
    }
    Some(PendingOp {
        kind,
        offset,
        len,
        slot,
        segments,
        skip,
        pushed: true,
    })
}

fn begin<S: Store>(
    engine: &mut Solo<S>,
    guest: &Guest,
    model: &mut [u8],
    one: &PendingOp,
    random: &mut Random,
    token: u64,
) {
    assert!(one.pushed);
    let range = one.offset as usize..(one.offset + one.len) as usize;
    match one.kind {
        OpKind::Write { .. } => {
            let first = random.below(256) as u8;
            let bytes: Vec<u8> = (0..one.len + u64::from(one.skip))
                .map(|at| {
                    first
                        .wrapping_add((at * 7) as u8)
                        .wrapping_add((at >> 9) as u8)
                })
                .collect();
            guest.put(&one.segments, &bytes);
            model[range].copy_from_slice(&bytes[one.skip as usize..]);
        }
        OpKind::Zero { .. } => model[range].fill(0),
        OpKind::Read => guest.put(
            &one.segments,
            &vec![0xee; one.len as usize + one.skip as usize],
        ),
        OpKind::Sync | OpKind::Discard => {}
    }
    engine.push(
        Op {
            kind: one.kind,
            leg: 0,
            offset_bytes: one.offset,
            len_bytes: one.len,
            segments: if matches!(one.kind, OpKind::Read | OpKind::Write { .. }) {
                &one.segments
            } else {
                &[]
            },
            skip_bytes: one.skip,
            stripe: None,
        },
        token,
    );
}

fn end(guest: &Guest, model: &[u8], one: &PendingOp) {
    if one.kind == OpKind::Read {
        let all = guest.get(&one.segments, one.len as usize + one.skip as usize);
        let (before, bytes) = all.split_at(one.skip as usize);
        assert!(
            before.iter().all(|byte| *byte == 0xee),
            "skipped bytes are unchanged"
        );
        compare(bytes, model, one.offset, "during the run");
    }
}

fn compare(bytes: &[u8], model: &[u8], offset: u64, when: &str) {
    let model = &model[offset as usize..][..bytes.len()];
    // Compare first: searching for the difference takes many times as long, and is needed only for the message.
    if bytes == model {
        return;
    }
    if let Some(at) = bytes.iter().zip(model).position(|(a, b)| a != b) {
        panic!(
            "{when}: byte {} is {} and should be {}",
            offset + at as u64,
            bytes[at],
            model[at]
        );
    }
}
