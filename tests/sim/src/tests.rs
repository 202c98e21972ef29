use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Instant;

use cleave_guest::RegionSpec;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;

use super::store::UNSYNCED_MAX;
use super::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Done { token: u64, result: Result<(), i32> },
    Woken { slot: u16 },
}

/// A reactor with one simulated disk, and the guest memory of its ops.
struct SingleStore {
    reactor: Reactor,
    stores: [Sim; 1],
    epoch: Epoch,
}

impl SingleStore {
    fn new(config: SimConfig, store: Arc<Mutex<SimStore>>, memory: Arc<Memory>) -> SingleStore {
        SingleStore {
            reactor: Reactor::new(&[], 1, 4, 4).unwrap(),
            stores: [Sim::new(config, store)],
            epoch: Epoch::from(memory),
        }
    }

    fn room(&self) -> usize {
        self.stores[0].room()
    }

    fn in_flight(&self) -> usize {
        self.stores[0].in_flight()
    }

    fn push(&mut self, op: Op<'_>, token: u64) {
        self.stores[0].push(&mut self.reactor, &self.epoch, op, token);
    }

    fn enter(&mut self, wait: Wait) -> std::io::Result<()> {
        self.reactor.enter(&mut self.stores, wait)
    }

    fn reap(&mut self) -> Option<Event> {
        Some(match self.reactor.reap(&mut self.stores)? {
            cleave_engine::Event::Done { done, .. } => Event::Done {
                token: done.token,
                result: done.result,
            },
            cleave_engine::Event::Woken { slot } => Event::Woken { slot },
        })
    }
}

const MEMORY: u64 = 1 << 16;
const STORE: usize = 1 << 16;
const GUEST: u64 = 0x10000;

fn memory() -> Arc<Memory> {
    let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(MEMORY).unwrap();
    Memory::new(vec![RegionSpec {
        guest_addr: GUEST,
        user_addr: 0,
        len_bytes: MEMORY,
        file_offset: 0,
        file,
    }])
    .unwrap()
}

fn store() -> Arc<Mutex<SimStore>> {
    Arc::new(Mutex::new(SimStore {
        now: vec![0; STORE],
        durable: vec![0; STORE],
        ..Default::default()
    }))
}

fn config(seed: u64) -> SimConfig {
    println!("seed {seed}");
    SimConfig {
        seed,
        ops: 16,
        fail_per_mille: 0,
        fail_at: None,
        panic_at: None,
        delay_max: 6,
    }
}

fn sim(config: SimConfig) -> (SingleStore, Arc<Mutex<SimStore>>, Arc<Memory>) {
    let (store, memory) = (store(), memory());
    (
        SingleStore::new(config, store.clone(), memory.clone()),
        store,
        memory,
    )
}

fn at(offset: u64, len: u32) -> Segment {
    Segment {
        addr: GUEST + offset,
        len,
    }
}

fn op(kind: OpKind, offset_bytes: u64, segments: &[Segment]) -> Op<'_> {
    Op {
        kind,
        leg: 0,
        offset_bytes,
        len_bytes: segments.iter().map(|segment| u64::from(segment.len)).sum(),
        segments,
        skip_bytes: 0,
        stripe: None,
    }
}

fn bare(kind: OpKind, offset_bytes: u64, len_bytes: u64) -> Op<'static> {
    Op {
        kind,
        leg: 0,
        offset_bytes,
        len_bytes,
        segments: &[],
        skip_bytes: 0,
        stripe: None,
    }
}

const WRITE: OpKind = OpKind::Write { durable: false };
const WRITE_THROUGH: OpKind = OpKind::Write { durable: true };
const EIO: Result<(), i32> = Err(5);
const EFAULT: Result<(), i32> = Err(14);
const ENOSPC: Result<(), i32> = Err(28);

/// Runs one op until it completes.
fn run(sim: &mut SingleStore, op: Op<'_>) -> Result<(), i32> {
    sim.push(op, 77);
    loop {
        sim.enter(Wait::No).unwrap();
        if let Some(Event::Done { token: 77, result }) = sim.reap() {
            return result;
        }
    }
}

/// Events with the lap of each, the store now and durable, and guest memory.
type Trace = (Vec<(u64, Event)>, Vec<u8>, Vec<u8>, Vec<u8>);

/// The observable result of 200 random ops.
fn trace(seed: u64) -> Trace {
    let mut random = Random::new(99);
    let (mut sim, store, memory) = sim(SimConfig {
        fail_per_mille: 100,
        ..config(seed)
    });
    memory.copy_out(&[at(0, 64)], &[0xab; 64]).unwrap();
    let mut events = Vec::new();
    for lap in 0..200 {
        if sim.room() > 0 {
            let segments = [at(random.up_to(100) * 512, 512)];
            let offset = random.up_to(100) * 512;
            let op = match random.up_to(4) {
                0 => op(OpKind::Read, offset, &segments),
                1 => op(WRITE, offset, &segments),
                2 => op(WRITE_THROUGH, offset, &segments),
                3 => bare(OpKind::Sync, 0, 0),
                _ => bare(OpKind::Discard, offset, 1024),
            };
            sim.push(op, lap);
        }
        sim.enter(Wait::No).unwrap();
        while let Some(event) = sim.reap() {
            events.push((lap, event));
        }
    }
    drop(sim);
    let mut bytes = vec![0; MEMORY as usize];
    memory.copy_in(&[at(0, MEMORY as u32)], &mut bytes).unwrap();
    let store = lock(&store);
    (events, store.now.clone(), store.durable.clone(), bytes)
}

#[test]
fn a_seed_replays_events_and_bytes() {
    for seed in 0..5 {
        assert_eq!(trace(seed), trace(seed));
    }
    assert_ne!(trace(1).0, trace(2).0);
}

#[test]
fn every_op_ends_once_and_in_time_and_not_in_order() {
    let mut reordered = 0;
    for seed in 0..20 {
        let (mut sim, _, _) = sim(config(seed));
        for token in 0..16 {
            assert_eq!((sim.room(), sim.in_flight()), (16 - token, token));
            sim.push(op(OpKind::Read, 0, &[at(0, 512)]), token as u64);
        }
        assert_eq!(sim.reap(), None, "nothing completes before an enter");
        let mut tokens = Vec::new();
        for _ in 0..6 {
            sim.enter(Wait::No).unwrap();
            while let Some(event) = sim.reap() {
                let Event::Done {
                    token,
                    result: Ok(()),
                } = event
                else {
                    panic!("{event:?}")
                };
                tokens.push(token);
                assert_eq!(sim.in_flight(), 16 - tokens.len());
            }
        }
        assert_eq!(sim.room(), 16);
        reordered += usize::from(!tokens.is_sorted());
        tokens.sort_unstable();
        assert_eq!(tokens, (0..16).collect::<Vec<_>>());
    }
    assert!(reordered > 10);
}

#[test]
fn data_goes_where_segments_and_skip_say_and_nowhere_else() {
    let pattern: Vec<u8> = (0..200).collect();
    let segments = [at(10, 50), at(1000, 0), at(300, 30), at(500, 100)];
    for (skip_bytes, len_bytes) in [(0, 180), (20, 100), (49, 1), (7, 44), (0, 0)] {
        let (mut sim, store, memory) = sim(config(3));
        memory.copy_out(&segments, &pattern).unwrap();
        let piece = |kind| Op {
            kind,
            leg: 0,
            offset_bytes: 512,
            len_bytes,
            segments: &segments,
            skip_bytes,
            stripe: None,
        };
        run(&mut sim, piece(WRITE)).unwrap();
        let wanted = &pattern[skip_bytes as usize..][..len_bytes as usize];
        let mut disk = vec![0; STORE];
        disk[512..512 + wanted.len()].copy_from_slice(wanted);
        assert_eq!(lock(&store).now, disk);

        memory.copy_out(&segments, &[0xee; 180]).unwrap();
        run(&mut sim, piece(OpKind::Read)).unwrap();
        let mut expected = vec![0xee; 180];
        expected[skip_bytes as usize..][..wanted.len()].copy_from_slice(wanted);
        let mut found = vec![0; 180];
        memory.copy_in(&segments, &mut found).unwrap();
        assert_eq!(found, expected);
    }
}

#[test]
fn zero_and_discard_read_back_zero() {
    for kind in [
        OpKind::Discard,
        OpKind::Zero {
            unmap: true,
            durable: false,
        },
        OpKind::Zero {
            unmap: false,
            durable: true,
        },
    ] {
        let (mut sim, store, _) = sim(config(4));
        lock(&store).now.fill(9);
        lock(&store).durable.fill(9);
        run(&mut sim, bare(kind, 512, 1024)).unwrap();
        let store = lock(&store);
        let zeroes: Vec<usize> = (0..STORE).filter(|&i| store.now[i] == 0).collect();
        assert_eq!(zeroes, (512..1536).collect::<Vec<_>>());
        if matches!(kind, OpKind::Zero { durable: true, .. }) {
            assert_eq!(store.durable, store.now);
        }
    }
}

#[test]
fn impossible_ops_fail_alone_and_move_nothing() {
    let (mut sim, store, memory) = sim(config(5));
    memory.copy_out(&[at(0, 512)], &[7; 512]).unwrap();
    let outside = [Segment {
        addr: 0x100,
        len: 512,
    }];
    let half_outside = [at(MEMORY - 256, 512)];
    let wrapping = [Segment {
        addr: u64::MAX - 10,
        len: 512,
    }];
    let good = [at(0, 512)];
    let short = Op {
        len_bytes: 1024,
        ..op(WRITE, 0, &good)
    };
    for (op, wanted) in [
        (op(WRITE, 0, &outside), EFAULT),
        (op(WRITE, 0, &half_outside), EFAULT),
        (op(OpKind::Read, 0, &half_outside), EFAULT),
        (op(WRITE, 0, &wrapping), EFAULT),
        (
            Op {
                skip_bytes: 100,
                stripe: None,
                ..op(WRITE, 0, &wrapping)
            },
            EFAULT,
        ),
        (short, EFAULT),
        (op(WRITE, STORE as u64 - 256, &good), EIO),
        (op(OpKind::Read, STORE as u64, &good), EIO),
        (op(WRITE, u64::MAX - 100, &good), EIO),
        (bare(OpKind::Discard, 0, u64::MAX), EIO),
        (bare(OpKind::Discard, STORE as u64, 512), EIO),
    ] {
        assert_eq!(run(&mut sim, op), wanted, "{op:?}");
    }
    assert!(lock(&store).now.iter().all(|byte| *byte == 0));
    assert_eq!(run(&mut sim, op(WRITE, 0, &good)), Ok(()));
}

#[test]
fn a_store_that_is_truncated_in_flight_fails_the_op() {
    let (mut sim, store, _) = sim(config(6));
    sim.push(op(WRITE, STORE as u64 - 512, &[at(0, 512)]), 1);
    lock(&store).now.truncate(512);
    sim.enter(Wait::Until(None)).unwrap();
    assert_eq!(
        sim.reap(),
        Some(Event::Done {
            token: 1,
            result: EIO
        })
    );
    assert_eq!(lock(&store).now.len(), 512);
}

#[test]
fn the_nth_op_fails_and_may_be_torn() {
    let mut lengths = BTreeSet::new();
    for seed in 0..40 {
        let (mut sim, store, memory) = sim(SimConfig {
            fail_at: Some(1),
            ..config(seed)
        });
        memory.copy_out(&[at(0, 512)], &[7; 512]).unwrap();
        let segments = [at(0, 512)];
        assert_eq!(run(&mut sim, op(WRITE, 4096, &segments)), Ok(()));
        assert_eq!(run(&mut sim, op(WRITE_THROUGH, 0, &segments)), EIO);
        assert_eq!(run(&mut sim, op(WRITE, 8192, &segments)), Ok(()));
        let store = lock(&store);
        let moved = store.now[..512].iter().filter(|byte| **byte == 7).count();
        assert!(
            store.now[..moved].iter().all(|byte| *byte == 7),
            "a beginning"
        );
        assert!(store.now[512..4096].iter().all(|byte| *byte == 0));
        lengths.insert(moved);
    }
    assert!(lengths.len() > 20, "{lengths:?}");
}

#[test]
fn a_share_of_ops_fails() {
    let (mut sim, _, _) = sim(SimConfig {
        fail_per_mille: 250,
        ..config(8)
    });
    let mut counts = BTreeMap::new();
    for _ in 0..2000 {
        *counts
            .entry(run(&mut sim, op(WRITE, 0, &[at(0, 512)])))
            .or_insert(0) += 1;
    }
    println!("{counts:?}");
    assert!((400..600).contains(&(counts[&EIO] + counts[&ENOSPC])));
    assert!(counts[&EIO] > 150 && counts[&ENOSPC] > 150);
    assert_eq!(counts.len(), 3);
}

/// Each cell holds the number of its last write. After a sync, no cell of the durable copy may be older than it was
/// when the sync was pushed, and none may ever go back.
#[test]
fn a_sync_covers_what_ended_before_it_and_nothing_durable_goes_back() {
    let (mut early, mut late) = (0, 0);
    for seed in 0..30 {
        let (store, memory) = (store(), memory());
        // Two engines share the store: a sync of one covers the writes of the other.
        let mut sims = [seed, seed + 1000]
            .map(|seed| SingleStore::new(config(seed), store.clone(), memory.clone()));
        let mut random = Random::new(seed);
        let mut before = vec![0; STORE];
        for number in 1..250_u8 {
            let cells = 1 + random.up_to(300);
            let offset = random.up_to(1000);
            memory.copy_out(&[at(0, 512)], &[number; 512]).unwrap();
            let segments = [at(0, cells as u32)];
            let kind = if random.up_to(9) == 0 {
                WRITE_THROUGH
            } else {
                WRITE
            };
            let which = random.up_to(1) as usize;
            run(&mut sims[which], op(kind, offset, &segments)).unwrap();
            if kind == WRITE_THROUGH {
                let store = lock(&store);
                let range = offset as usize..(offset + cells) as usize;
                assert!(store.durable[range].iter().all(|cell| *cell == number));
            }
            if random.up_to(7) == 0 {
                let pushed = lock(&store).now.clone();
                let which = random.up_to(1) as usize;
                sims[which].push(bare(OpKind::Sync, 0, 0), 1);
                // Another write while the sync is in flight.
                memory.copy_out(&[at(0, 512)], &[number; 512]).unwrap();
                run(&mut sims[1 - which], op(WRITE, 0, &[at(0, 512)])).unwrap();
                while sims[which].reap().is_none() {
                    sims[which].enter(Wait::No).unwrap();
                }
                let store = lock(&store);
                let covered = store
                    .durable
                    .iter()
                    .zip(&pushed)
                    .all(|(now, then)| now >= then);
                assert!(covered, "a sync lost a write");
                late += usize::from(store.durable != store.now);
            }
            let store = lock(&store);
            assert!(
                store
                    .durable
                    .iter()
                    .zip(&before)
                    .all(|(now, then)| now >= then)
            );
            assert!(
                store
                    .durable
                    .iter()
                    .zip(&store.now)
                    .all(|(durable, now)| durable <= now)
            );
            early += usize::from(store.durable != before);
            before.clone_from(&store.durable);
        }
    }
    assert!(early > 0 && late > 0, "early {early}, late {late}");
}

#[test]
fn writes_that_nobody_syncs_are_bounded() {
    let (mut sim, store, _) = sim(config(9));
    for n in 0..1000 {
        run(&mut sim, op(WRITE, n % 100 * 512, &[at(0, 512)])).unwrap();
    }
    assert!(lock(&store).unsynced.writes.len() <= UNSYNCED_MAX);
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn signal(fd: &OwnedFd) {
    rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
}

#[test]
fn a_sleep_ends_with_the_first_event() {
    let (mut sim, _, _) = sim(SimConfig {
        delay_max: 1_000_000,
        ..config(13)
    });
    sim.push(op(OpKind::Read, 0, &[at(0, 512)]), 8);
    sim.enter(Wait::Until(None)).unwrap();
    assert!(matches!(sim.reap(), Some(Event::Done { token: 8, .. })));

    let kick = event();
    sim.reactor.watch(0, kick.try_clone().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| signal(&kick));
        let start = Instant::now();
        while sim.reap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(120), "never woken");
            sim.enter(Wait::Until(None)).unwrap();
        }
    });
    let now = Instant::now();
    sim.enter(Wait::Until(Some(now))).unwrap();
    sim.enter(Wait::Until(Some(now + Duration::from_millis(2))))
        .unwrap();
    sim.enter(Wait::Until(None)).unwrap();
    assert_eq!(sim.reap(), None);
    assert!(now.elapsed() >= Duration::from_millis(2), "it slept");
}

#[test]
fn an_op_keeps_its_memory_until_it_is_reported() {
    let (mut sim, store, old) = sim(config(14));
    old.copy_out(&[at(0, 512)], &[1; 512]).unwrap();
    let new = memory();
    new.copy_out(&[at(0, 512)], &[2; 512]).unwrap();
    sim.push(op(WRITE, 0, &[at(0, 512)]), 1);
    sim.epoch = Epoch::from(new);
    sim.push(op(WRITE, 512, &[at(0, 512)]), 2);
    let mut left = 2;
    let mut is_old_done = false;
    while left > 0 {
        assert_eq!(Arc::strong_count(&old) == 1, is_old_done);
        sim.enter(Wait::No).unwrap();
        while let Some(Event::Done { token, .. }) = sim.reap() {
            is_old_done |= token == 1;
            left -= 1;
        }
    }
    let weak = Arc::downgrade(&old);
    drop(old);
    assert!(weak.upgrade().is_none(), "nothing may hold it any more");
    let store = lock(&store);
    assert_eq!(
        (&store.now[..512], &store.now[512..1024]),
        (&[1; 512][..], &[2; 512][..])
    );
}

#[test]
fn dropping_it_waits_for_what_is_in_flight() {
    let (mut sim, store, memory) = sim(config(15));
    memory.copy_out(&[at(0, 512)], &[3; 512]).unwrap();
    sim.push(op(WRITE_THROUGH, 512, &[at(0, 512)]), 1);
    drop(sim);
    assert_eq!(lock(&store).durable[512..1024], [3; 512]);
}
