//! The dirty log: whatever a request is, however it ends and whatever changes meanwhile, every page of guest memory that the
//! worker has written is marked when the guest sees the answer.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;

use cleave_guest::{DirtyLog, VringLog};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::driver::{BASE, Part, USED};
use crate::*;

const PAGE_BYTES: usize = 4096;
/// Bytes of a log for all addresses of the driver's memory.
const LOG_BYTES: u64 = (BASE + (16 << 20)) / PAGE_BYTES as u64 / 8;

struct Log {
    file: std::fs::File,
    log: Arc<DirtyLog>,
}

impl Log {
    fn new() -> Log {
        let file = std::fs::File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(LOG_BYTES).unwrap();
        let log = DirtyLog::map(file.try_clone().unwrap(), 0, LOG_BYTES).unwrap();
        Log { file, log }
    }

    fn vring(&self) -> Option<Box<VringLog>> {
        let log = VringLog::new(self.log.clone(), Some(BASE + USED), true);
        Some(Box::new(log))
    }

    /// Returns the marked pages, counted from the start of the driver's memory.
    fn pages(&self) -> BTreeSet<usize> {
        let mut bytes = vec![0; LOG_BYTES as usize];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        let is_marked = |page: &usize| bytes[page / 8] & 1 << (page % 8) != 0;
        let first = BASE as usize / PAGE_BYTES;
        let marked = (0..8 * bytes.len()).filter(is_marked);
        marked.map(|page| page - first).collect()
    }
}

fn put(bench: &mut Bench, log: &Log) {
    let set = bench.control.set_log(0, log.vring());
    bench.carry_out(set);
}

fn bind(bench: &mut Bench, parts: &[Part]) {
    let regions = parts.iter().map(|part| bench.driver.region(*part));
    let memory = cleave_guest::Memory::new(regions.collect()).unwrap();
    let bound = bench.control.bind(memory);
    bench.carry_out(bound);
}

fn ask(random: &mut Random) -> Ask {
    let sector = random.below(SECTORS + 8);
    let bytes = [1, 512, 4096, 32768][random.below(4) as usize];
    let cut = [100, 512, 4096, 65536][random.below(4) as usize];
    // A chain of direct descriptors has to fit the ring.
    let indirect = random.below(4) > 0 || bytes / cut > 8;
    match random.below(6) {
        0 => Ask::flush(),
        1 => Ask::zero(sector, 8, random.below(2) == 0),
        2 => Ask {
            kind: [request_type::GET_ID, 77][random.below(2) as usize],
            ..Ask::read(sector, 20, 20, indirect)
        },
        3 => Ask::write(sector, vec![7; bytes as usize], cut, indirect),
        _ => Ask::read(sector, bytes, cut, indirect),
    }
}

#[test]
fn every_page_that_changed_is_marked_in_the_logs_that_were_in_force() {
    for seed in seeds(0..20) {
        let mut random = Random::new(seed);
        let config = SimConfig {
            fail_per_mille: 50,
            delay_max: 20,
            ..quiet(seed)
        };
        let mut bench = Bench::new(config, FEATURES);
        for _ in 0..20 {
            let mut log = Log::new();
            put(&mut bench, &log);
            let mut replaced = Vec::new();
            for _ in 0..1 + random.below(8) {
                bench.driver.submit(&ask(&mut random));
            }
            let before = bench.driver.bytes();
            while bench.driver.in_flight() > 0 {
                match random.below(16) {
                    0 => {
                        let next = Log::new();
                        put(&mut bench, &next);
                        let old = std::mem::replace(&mut log, next);
                        replaced.push((old.pages(), old));
                    }
                    1 => bind(&mut bench, &[Part::Rings]),
                    2 => bind(&mut bench, &[Part::Rings, Part::Requests]),
                    _ => drop(bench.lap()),
                }
                bench.driver.collect(|_| 0);
            }
            let mut marked = log.pages();
            for (pages, old) in &replaced {
                assert_eq!(*pages, old.pages(), "seed {seed}: a log after the swap");
                marked.extend(pages);
            }
            let after = bench.driver.bytes();
            let pages = before.chunks(PAGE_BYTES).zip(after.chunks(PAGE_BYTES));
            let changed = pages.enumerate().filter(|(_, (old, new))| old != new);
            for (page, _) in changed {
                assert!(marked.contains(&page), "seed {seed}: page {page:#x}");
            }
            // What the driver alone writes is not marked: descriptors and the available ring.
            let first = marked.first().copied();
            assert_eq!(first, Some(USED as usize / PAGE_BYTES), "seed {seed}");
        }
    }
}

/// What a vring announces in its ring when it starts is written while the guest moves.
#[test]
fn a_vring_that_starts_with_a_log_marks_its_announcement() {
    let mut bench = Bench::new(quiet(1), FEATURES);
    let stopped = bench.control.stop(0);
    bench.carry_out(stopped);
    let log = Log::new();
    let started = bench.control.start(VringStart {
        log: log.vring(),
        ..vring(0)
    });
    bench.carry_out(started).unwrap();
    let ring = USED as usize / PAGE_BYTES;
    assert_eq!(log.pages().into_iter().collect::<Vec<_>>(), [ring]);
}

/// The chain of an answer is read again when it is marked. One of maximum length is all that a lap may do, however often it publishes.
#[test]
fn answers_that_take_long_to_mark_are_published_lap_by_lap() {
    let mut bench = Bench::new(quiet(1), FEATURES);
    let log = Log::new();
    put(&mut bench, &log);
    bench.driver.submit_longest(9);
    let mut used = Vec::new();
    for _ in 0..10 {
        bench.lap();
        used.push(bench.driver.used_index());
    }
    assert_eq!(used, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]);
}

/// A guest that switches its write cache off takes every answer that comes after that for durable. Those that were decided before
/// come first.
#[test]
fn a_pass_waits_until_the_answers_that_were_decided_before_are_marked() {
    let mut bench = Bench::new(quiet(1), FEATURES);
    let log = Log::new();
    put(&mut bench, &log);
    bench.driver.submit_longest(9);
    // A lap takes two and marks one.
    for _ in 0..4 {
        bench.lap();
    }
    assert_eq!(bench.driver.used_index(), 4);
    // Those that the guest adds meanwhile are not waited for.
    bench.driver.submit_longest(9);
    let mut passed = bench.control.pass();
    let shown = loop {
        bench.lap();
        match passed.wait_for(Duration::ZERO) {
            Ok(answer) => break answer.map(|()| bench.driver.used_index()),
            Err(again) => passed = again,
        }
    };
    assert!(matches!(shown, Some(8..18)), "{shown:?}");
}

#[test]
fn a_vring_does_not_wait_until_all_answers_of_another_are_marked() {
    const ELSEWHERE: u64 = 0x8000_0000;
    let mut bench = Bench::new(quiet(1), FEATURES);
    let mut other = Driver::at(ELSEWHERE);
    let regions = [&bench.driver, &other].map(|driver| {
        let parts = [Part::Rings, Part::Requests];
        parts.map(|part| driver.region(part))
    });
    let memory = cleave_guest::Memory::new(regions.into_iter().flatten().collect()).unwrap();
    let bound = bench.control.bind(memory);
    bench.carry_out(bound);
    let started = bench.control.start(VringStart {
        layout: Driver::layout_at(ELSEWHERE),
        ..vring(1)
    });
    bench.carry_out(started).unwrap();
    let log = Log::new();
    put(&mut bench, &log);
    bench.driver.submit_longest(9);
    other.submit(&Ask::read(0, 512, 512, true)).unwrap();
    for _ in 0..6 {
        bench.lap();
    }
    assert_eq!(other.used_index(), 1);
    assert!(bench.driver.used_index() < 9);
}

#[test]
fn a_stop_waits_until_all_answers_are_marked() {
    let mut bench = Bench::new(quiet(1), FEATURES);
    let log = Log::new();
    put(&mut bench, &log);
    bench.driver.submit_longest(9);
    bench.lap();
    assert_eq!(bench.driver.used_index(), 1);
    let stopped = bench.control.stop(0);
    // A lap marks one of them.
    for _ in 0..4 {
        bench.lap();
    }
    match bench.carry_out(stopped) {
        Stopped::At(base) => assert_eq!(bench.driver.used_index(), base),
        other => panic!("{other:?}"),
    }
}
