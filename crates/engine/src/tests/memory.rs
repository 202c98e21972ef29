//! Guest memory: bad addresses, memory that is cut off, and how long it is kept.

use std::fs::File;

use cleave_blk::spec::SEGMENTS_MAX;
use cleave_blk::{Op, Segment, Stripe};
use cleave_guest::{Memory, RegionSpec};
use rustix::fs::{MemfdFlags, memfd_create};

use super::*;
use crate::LAP_BYTES_MAX;
use crate::ops::lap::LapBudget;
use crate::ops::memory::walk;
use crate::ops::table::RANGES_MAX;

#[test]
fn bad_addresses_are_efault_and_touch_nothing() {
    let guest = Guest::new();
    for spec in ["ram:1M", "null:1M", "file"] {
        let dir = folder();
        let disk = Arc::new(match spec {
            "file" => open(&image(dir.path(), 1 << 20), Direct::Auto),
            spec => disk_of(spec),
        });
        let mut engine = engine(&disk, &guest);
        for (addr, len) in [
            (2 * REGION, 512),
            (2 * REGION - 511, 512),
            (u64::MAX - 10, 512),
            (u64::MAX, 512),
        ] {
            let segments = [segment(addr, len)];
            assert_eq!(
                run(&mut engine, op(READ, 0, 512, &segments)),
                Err(libc::EFAULT),
                "{spec}"
            );
        }
        // Shorter than the op: the owner's fault, without harm.
        let segments = [segment(0, 511)];
        assert_eq!(
            run(&mut engine, op(READ, 0, 512, &segments)),
            Err(libc::EINVAL),
            "{spec}"
        );
        assert_eq!(
            run(&mut engine, op(READ, 0, 512, &[])),
            Err(libc::EINVAL),
            "{spec}"
        );
    }
}

#[test]
fn many_scattered_segments_complete() {
    for direct in [Direct::Off, Direct::Auto] {
        let (_dir, _path, disk, guest) = file_rig(direct);
        let mut engine = engine(&disk, &guest);
        // Every second kilobyte, so that nothing merges. The same memory twice makes more ranges than the
        // kernel takes at once after crossing regions.
        let segments: Vec<_> = (0..1024).map(|at| segment(at * 2048 + 256, 1024)).collect();
        let bytes: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 251) as u8).collect();
        guest.put(&segments, &bytes);
        assert_eq!(
            run(&mut engine, op(WRITE, 4096, 1 << 20, &segments)),
            Ok(())
        );
        guest.put(&segments, &vec![0; 1 << 20]);
        assert_eq!(run(&mut engine, op(READ, 4096, 1 << 20, &segments)), Ok(()));
        assert!(guest.get(&segments, 1 << 20) == bytes, "{direct:?}");
        // 1400 segments that each cross the border of the regions are 2800 ranges.
        let crossing: Vec<_> = (0..1400).map(|_| segment(REGION - 512, 1024)).collect();
        assert_eq!(
            run(&mut engine, op(READ, 0, 1400 << 10, &crossing)),
            Err(libc::EFAULT)
        );
        let fewer = &crossing[..700];
        assert_eq!(
            run(&mut engine, op(READ, 4096, 700 << 10, fewer)),
            Ok(()),
            "1400 ranges bounce"
        );
        assert!(guest.get(&fewer[699..], 1024) == bytes[699 << 10..700 << 10]);
    }
}

/// Guest memory in as many regions as a table can have, each of 1 KiB and adjacent to the next in the guest.
fn shattered() -> Arc<Memory> {
    let file: File = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap().into();
    // No two of them are adjacent in the file, so no two mappings merge.
    ftruncate(&file, 4096 * Memory::REGIONS_MAX as u64).unwrap();
    let regions = (0..Memory::REGIONS_MAX as u64).map(|at| RegionSpec {
        guest_addr: at << 10,
        user_addr: 0x7f00_0000_0000 + (at << 10),
        len_bytes: 1 << 10,
        file_offset: at << 12,
        file: file.try_clone().unwrap(),
    });
    Memory::new(regions.collect()).unwrap()
}

/// Segments that each lie across all of that memory: half a million ranges.
fn across_all() -> (Vec<Segment>, u64) {
    let all = segment(0, (Memory::REGIONS_MAX as u32) << 10);
    (
        vec![all; SEGMENTS_MAX],
        u64::from(all.len) * SEGMENTS_MAX as u64,
    )
}

/// The guest chooses how many ranges there are, and neighbours wait while they are looked up.
#[test]
fn the_look_up_of_too_many_ranges_ends_early_and_counts_in_the_lap() {
    let (memory, (segments, len)) = (shattered(), across_all());
    let mut lap = LapBudget::bounded();
    for (stripe, op_len) in [(None, len), (Stripe::new(2, 64 << 10), len / 4)] {
        lap.renew();
        let mut ranges = 0;
        let op = Op {
            stripe,
            ..op(READ, 0, op_len, &segments)
        };
        let found = walk(&memory, &op, &mut lap, |_, _| ranges += 1);
        assert_eq!((found, ranges), (Err(libc::EFAULT), RANGES_MAX));
        assert!(!lap.is_used_up() && lap.left() < LAP_BYTES_MAX / 2);
    }
}

#[test]
fn requests_that_fail_after_many_look_ups_use_the_lap_up() {
    let (memory, (segments, len)) = (shattered(), across_all());
    let dir = folder();
    let file = open(&image(dir.path(), 1 << 30), Direct::Auto);
    for disk in [file, disk_of("ram:1G"), disk_of("null:1G")] {
        let disk = Arc::new(disk);
        let name = disk.name().to_owned();
        let mut engine = Uring::shared(disk, memory.clone(), 64).unwrap();
        for lap in 0..3 {
            let mut pushed = 0;
            while pushed < 64 && !engine.store().is_sated() {
                engine.push(op(READ, 0, len, &segments), pushed);
                pushed += 1;
            }
            assert_eq!(pushed, 2, "{name} {lap}");
            for _ in 0..2 {
                assert_eq!(next_done(&mut engine).1, Err(libc::EFAULT), "{name}");
            }
            engine.enter(Wait::No).unwrap();
        }
        // A request of many ordinary segments is served, whatever came before.
        let pages: Vec<_> = (0..500).map(|at| segment(at << 10, 1 << 10)).collect();
        assert_eq!(run(&mut engine, op(READ, 0, 500 << 10, &pages)), Ok(()));
    }
}

/// The first access to a page may take long, and no count of bytes knows that.
#[test]
fn copies_that_take_long_are_spread_over_the_laps_of_a_shared_thread() {
    const LEN: u64 = 16 << 10;
    // Half of them use a lap up by their bytes.
    const WRITES: u64 = 2 * LAP_BYTES_MAX / LEN;
    let dir = folder();
    let disk = open(&image(dir.path(), DISK_BYTES), Direct::Auto).with_alignment(4096, 4096);
    let guest = Guest::new();
    let mut engine = Uring::shared(Arc::new(disk), guest.memory.clone(), 64).unwrap();
    files(&mut engine).hurry();
    let memory = [segment(512, LEN as u32)];
    for number in 0..WRITES {
        engine.push(op(WRITE, number * LEN, LEN, &memory), number);
    }
    let at_first = files(&mut engine).take_copied();
    assert!(at_first <= LAP_BYTES_MAX);
    let (mut ended, mut laps, deadline) = (0, Vec::new(), Instant::now() + cleave_tests::TIMEOUT);
    while ended < WRITES {
        assert!(Instant::now() < deadline, "{laps:?}");
        engine.enter(Wait::Until(Some(deadline))).unwrap();
        laps.push(files(&mut engine).take_copied());
        while let Some(event) = engine.reap() {
            assert!(matches!(event, Event::Done { result: Ok(()), .. }));
            ended += 1;
        }
    }
    assert_eq!(at_first + laps.iter().sum::<u64>(), WRITES * LEN);
    assert!(laps.iter().all(|copied| *copied <= LEN), "{laps:?}");
}

/// Such an op is part of a long request to a stripe.
#[test]
fn an_op_over_several_chunks_leaves_out_those_of_the_other_leg() {
    for direct in [Direct::Off, Direct::Auto] {
        let (_dir, _path, disk, guest) = file_rig(direct);
        let mut engine = engine(&disk, &guest);
        let segments = [segment(256, 5000), segment(20_000, 40_000)];
        let bytes: Vec<u8> = (0..40_000_u32).map(|at| (at % 251) as u8).collect();
        guest.put(&segments, &bytes);
        let scattered = |kind| Op {
            skip_bytes: 100,
            stripe: Stripe::new(2, 4096),
            ..op(kind, 1024, 12_288, &segments)
        };
        // The rest of the first chunk, two whole ones, and the beginning of another; between them 4096 bytes each.
        let places = [(100, 3072), (7268, 4096), (15_460, 4096), (23_652, 1024)];
        assert_eq!(run(&mut engine, scattered(WRITE)), Ok(()));
        let whole = [segment(100_000, 12_288)];
        assert_eq!(run(&mut engine, op(READ, 1024, 12_288, &whole)), Ok(()));
        let written = places.map(|(at, len)| &bytes[at..at + len]).concat();
        assert!(guest.get(&whole, 12_288) == written, "{direct:?}");
        guest.put(&segments, &[0; 40_000]);
        assert_eq!(run(&mut engine, scattered(READ)), Ok(()));
        let mut read = vec![0; 40_000];
        for (at, len) in places {
            read[at..at + len].copy_from_slice(&bytes[at..at + len]);
        }
        assert!(guest.get(&segments, 40_000) == read, "{direct:?}");
    }
}

#[test]
fn guest_memory_cut_during_io_fails_only_the_op() {
    for (direct, unit) in [(Direct::Off, 1), (Direct::Auto, 512), (Direct::Auto, 4096)] {
        let dir = folder();
        let disk = Arc::new(open(&image(dir.path(), DISK_BYTES), direct).with_alignment(unit, 512));
        let guest = Guest::new();
        let mut engine = engine(&disk, &guest);
        let far = [segment(REGION + (1 << 20), 8192)];
        guest.put(&far, &[5; 8192]);
        ftruncate(&guest.files[1], 4096).unwrap();
        // Without a buffer, the kernel faults; through a buffer (offset 512 of 4096), the copy does.
        for offset in [0, 512] {
            let read = run(&mut engine, op(READ, offset, 8192, &far));
            let write = run(&mut engine, op(WRITE, offset, 8192, &far));
            assert_eq!(write, Err(libc::EFAULT), "{direct:?} {unit} {offset}");
            assert!(read == Err(libc::EFAULT) || read == Ok(()), "{read:?}");
        }
        let other = Guest::new();
        engine.bind(Arc::clone(&other.memory));
        assert_eq!(
            run(&mut engine, op(READ, 0, 8192, &[segment(0, 8192)])),
            Ok(())
        );
        assert_eq!(
            other.get(&[segment(0, 8192)], 8192),
            [0; 8192],
            "nothing of the lost page"
        );
    }
}

#[test]
fn zeroes_of_a_lost_page_do_not_reach_the_disk() {
    let dir = folder();
    let disk =
        Arc::new(open(&image(dir.path(), DISK_BYTES), Direct::Auto).with_alignment(4096, 512));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let near = [segment(0, 16 << 10)];
    guest.put(&near, &[6; 16 << 10]);
    assert_eq!(run(&mut engine, op(WRITE, 0, 16 << 10, &near)), Ok(()));
    ftruncate(&guest.files[1], 4096).unwrap();
    // The engine's own copy is the first access to the hole.
    let far = [segment(REGION + (1 << 20), 8192)];
    assert_eq!(
        run(&mut engine, op(WRITE, 512, 8192, &far)),
        Err(libc::EFAULT)
    );
    assert!(guest.memory.is_lost());
    let other = Guest::new();
    engine.bind(Arc::clone(&other.memory));
    assert_eq!(run(&mut engine, op(READ, 0, 16 << 10, &near)), Ok(()));
    assert_eq!(other.get(&near, 16 << 10), [6; 16 << 10]);
}

#[test]
fn memory_is_kept_for_ops_in_flight_and_released_after() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Auto);
    let mut engine = engine(&disk, &guest);
    let segments = [segment(0, 1 << 20)];
    for round in 0..50 {
        let old = Guest::new();
        engine.bind(Arc::clone(&old.memory));
        let memory = Arc::downgrade(&old.memory);
        let file = old.files[0].try_clone().unwrap();
        file.write_at(&[round; 4096], 0).unwrap();
        engine.push(op(WRITE, 0, 1 << 20, &segments), 1);
        engine.push(op(READ, 1 << 20, 1 << 20, &segments), 2);
        let next = Guest::new();
        engine.bind(Arc::clone(&next.memory));
        drop(old);
        assert!(memory.upgrade().is_some());
        engine.push(op(READ, 2 << 20, 4096, &segments), 3);
        let mut results = [
            next_done(&mut engine),
            next_done(&mut engine),
            next_done(&mut engine),
        ];
        results.sort();
        assert_eq!(results, [(1, Ok(())), (2, Ok(())), (3, Ok(()))]);
        assert!(memory.upgrade().is_none());
    }
}

#[test]
fn dropping_waits_for_what_is_in_flight() {
    for (direct, unit) in [(Direct::Off, 1), (Direct::Auto, 512), (Direct::Auto, 4096)] {
        let dir = folder();
        let disk = Arc::new(open(&image(dir.path(), DISK_BYTES), direct).with_alignment(unit, 512));
        let guest = Guest::new();
        for round in 0..200 {
            let memory = Arc::clone(&guest.memory);
            let mut engine = Uring::new(Arc::clone(&disk), memory, 128, 1, 1).unwrap();
            let segments = [segment(0, 16 << 10)];
            for token in 0..128 {
                let kind = [READ, WRITE, OpKind::Sync, ZERO][(token % 4) as usize];
                engine.push(
                    op(kind, token * (16 << 10) + 512, 16 << 10, &segments),
                    token,
                );
            }
            if round % 2 == 0 {
                engine.enter(Wait::No).unwrap();
            }
            drop(engine);
            assert_eq!(Arc::strong_count(&guest.memory), 1);
            assert!(
                disk.legs()[0].locks().try_exclusive(0, DISK_BYTES),
                "holds were given back"
            );
            disk.legs()[0].locks().release_exclusive(0, DISK_BYTES);
        }
    }
}

#[test]
fn nothing_leaks_over_many_engines() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Off);
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let leaks = |_| {
        thread::scope(|scope| {
            let work = scope.spawn(|| {
                drop(engine(&disk, &guest));
                let before = open_files();
                for _ in 0..200 {
                    let mut engine = engine(&disk, &guest);
                    engine.watch(0, eventfd(true));
                    engine.set_bell(0, Some(eventfd(true)));
                    assert_eq!(
                        run(&mut engine, op(READ, 0, 512, &[segment(0, 512)])),
                        Ok(())
                    );
                }
                let after = open_files();
                println!("{before} files before, {after} after");
                after >= before + 100
            });
            work.join().unwrap()
        })
    };
    // Other tests run at the same time, some of which open many files.
    assert!(!(0..5).all(leaks));
}
