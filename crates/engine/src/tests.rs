//! Stores of files, block devices and memory on a real ring.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cleave_blk::OpKind;
use cleave_disk::{Direct, Disk};
use cleave_guest::Epoch;
use io_uring::opcode;
use rustix::fs::ftruncate;

use crate::ops::step::{FileOp, Step};
use crate::ops::table::Entry;
use crate::reactor::ring::{LEVELS, Purpose, Sleep, tag};
use crate::rig::*;
use crate::stores::files::{Files, rig::Mangle};
use crate::{AnyStore, EngineError, Prepared, Reactor, Store, Wait, probe_iopoll};

mod device;
mod faults;
mod memory;
mod polled;
mod signals;
mod sync;

const DISK_BYTES: u64 = 4 << 20;
/// All kinds but Discard, after which the store may return any data.
const KINDS: &[OpKind] = &[
    READ,
    READ,
    WRITE,
    WRITE,
    WRITE,
    ZERO,
    UNMAP,
    DURABLE,
    OpKind::Sync,
];
const MANY: Load = Load {
    ops: 1500,
    depth: 24,
    sectors_max: 300,
    kinds: KINDS,
};

fn engine(disk: &Arc<Disk>, guest: &Guest) -> Uring {
    Uring::new(Arc::clone(disk), Arc::clone(&guest.memory), 32, 4, 4).unwrap()
}

fn file_rig(direct: Direct) -> (tempfile::TempDir, PathBuf, Arc<Disk>, Guest) {
    let dir = folder();
    let path = image(dir.path(), DISK_BYTES);
    let disk = Arc::new(open(&path, direct));
    (dir, path, disk, Guest::new())
}

#[test]
fn a_ring_can_be_made_here() {
    Reactor::probe().unwrap();
}

#[test]
fn errors_name_the_remedy() {
    for (errno, word) in [
        (libc::EPERM, "kernel.io_uring_disabled"),
        (libc::ENOSYS, "kernel.io_uring_disabled"),
        (libc::ENOMEM, "RLIMIT_MEMLOCK"),
        (libc::EMFILE, "RLIMIT_NOFILE"),
        (libc::EINVAL, "5.19"),
    ] {
        let text = EngineError::from(io::Error::from_raw_os_error(errno)).to_string();
        assert!(text.contains(word) && !text.contains('\n'), "{text}");
    }
}

#[test]
fn a_file_through_the_page_cache_matches_the_model() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Off);
    check_against_model(&mut [engine(&disk, &guest)], &guest, &disk, &MANY, seed());
}

#[test]
fn a_direct_file_matches_the_model() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Auto);
    check_against_model(&mut [engine(&disk, &guest)], &guest, &disk, &MANY, seed());
}

/// Some of the ops are longer than what goes to a thread of the kernel at once. All go there while a disk in memory is a neighbour.
#[test]
fn files_on_a_shared_thread_match_the_model() {
    let long = Load {
        ops: 300,
        depth: 4,
        sectors_max: 6000,
        kinds: KINDS,
    };
    let ram = disk_of("ram:1M");
    for direct in [Direct::Auto, Direct::Off] {
        for load in [&MANY, &long] {
            let (_dir, _path, disk, guest) = file_rig(direct);
            let neighbours = Arc::default();
            let memory = guest.memory.clone();
            let engine = Uring::beside(disk.clone(), memory, 32, &neighbours).unwrap();
            let engines = &mut [engine];
            thread::scope(|scope| {
                // Gone when the check has ended, or has failed.
                let is_checking = Arc::new(());
                let checking = Arc::downgrade(&is_checking);
                scope.spawn(|| {
                    let checking = checking;
                    while checking.strong_count() > 0 {
                        drop(Prepared::new(&[&ram], [1, 1, 1], &neighbours).unwrap());
                    }
                });
                check_against_model(engines, &guest, &disk, load, seed());
                drop(is_checking);
            });
        }
    }
}

/// A full device is waited for by the thread that submits, which only disks on the same device may feel.
#[test]
fn a_thread_submits_reads_of_files_itself_if_all_its_disks_are_on_one_device() {
    let ram = disk_of("ram:1M");
    for direct in [Direct::Auto, Direct::Off] {
        let (_dir, _path, disk, guest) = file_rig(direct);
        let delegates = |engine: &mut Uring| {
            engine.push(op(READ, 0, 4096, &[segment(0, 4096)]), 7);
            let delegates = files(engine).delegates();
            assert_eq!(next_done(engine), (7, Ok(())));
            delegates
        };
        assert!(!delegates(&mut engine(&disk, &guest)), "{direct:?}");
        let neighbours = Arc::default();
        let memory = guest.memory.clone();
        let mut shared = Uring::beside(disk.clone(), memory, 32, &neighbours).unwrap();
        assert!(!delegates(&mut shared), "{direct:?}");
        let other = Prepared::new(&[&ram], [1, 1, 1], &neighbours).unwrap();
        assert!(delegates(&mut shared), "{direct:?}");
        drop(other);
        assert!(!delegates(&mut shared), "{direct:?}");
    }
}

/// The first part was to be moved by a thread of the kernel, which sees no more of the memory than that.
#[test]
fn a_part_that_the_ring_refused_is_moved_with_the_rest_if_the_neighbour_has_left() {
    let (_dir, path, disk, guest) = file_rig(Direct::Auto);
    let neighbours = Arc::default();
    let memory = guest.memory.clone();
    let mut engine = Uring::beside(disk, memory, 32, &neighbours).unwrap();
    let other = Prepared::new(&[&disk_of("ram:1M")], [1, 1, 1], &neighbours).unwrap();
    let segments = [segment(0, 1 << 20), segment(2 << 20, 1 << 20)];
    let bytes: Vec<u8> = (0..2_u32 << 20).map(|at| (at % 251) as u8).collect();
    guest.put(&segments, &bytes);
    files(&mut engine).refuse_entries(1);
    engine.push(op(WRITE, 0, 2 << 20, &segments), 7);
    drop(other);
    assert_eq!(next_done(&mut engine), (7, Ok(())));
    let written = std::fs::read(&path).unwrap();
    assert!(written[..2 << 20] == bytes, "other memory was written");
}

/// A file system may have the thread that submits wait for its device, and the guest chooses how much it writes at once.
#[test]
fn a_shared_thread_submits_large_direct_writes_in_parts_over_several_laps() {
    const LEN: u64 = 12 << 20;
    const WRITES: u64 = 4;
    let dir = folder();
    let path = image(dir.path(), 16 << 20);
    let disk = Arc::new(open(&path, Direct::Auto));
    if disk.legs()[0].caches_writes() {
        return cleave_tests::ignored("a file there may be written through the page cache");
    }
    let guest = Guest::new();
    let mut engine = Uring::shared(disk, guest.memory.clone(), 32).unwrap();
    // The second one crosses the border of the regions.
    let segments = [(4096, 5), (7 << 20, 4), (12 << 20, 3)].map(|(at, mib)| segment(at, mib << 20));
    let bytes: Vec<u8> = (0..LEN as u32).map(|at| (at % 251) as u8).collect();
    guest.put(&segments, &bytes);
    for token in 0..WRITES {
        engine.push(op(WRITE, 0, LEN, &segments), token);
    }
    let (mut ended, mut laps, deadline) = (0, Vec::new(), Instant::now() + cleave_tests::TIMEOUT);
    while ended < WRITES {
        laps.push(files(&mut engine).take_submitted().1);
        assert!(Instant::now() < deadline, "{laps:?}");
        engine.enter(Wait::Until(Some(deadline))).unwrap();
        while let Some(event) = engine.reap() {
            assert!(
                matches!(event, Event::Done { result: Ok(()), .. }),
                "{event:?}"
            );
            ended += 1;
        }
    }
    laps.push(files(&mut engine).take_submitted().1);
    assert_eq!(laps.iter().sum::<u64>(), WRITES * LEN);
    assert!(laps.iter().all(|bytes| *bytes < 8 << 20), "{laps:?}");
    assert!(std::fs::read(&path).unwrap()[..LEN as usize] == bytes);
    // One that a guest makes by itself is not cut.
    engine.push(op(WRITE, 0, 4 << 20, &segments), 9);
    assert_eq!(next_done(&mut engine), (9, Ok(())));
    assert_eq!(files(&mut engine).take_submitted(), (1, 4 << 20));
}

/// A guest that is not aligned as the disk wants it has all of its data copied, also when the buffers are filled all at once.
#[test]
fn a_shared_thread_copies_much_data_over_several_laps() {
    const OPS: u64 = 32;
    const LEN: u64 = 128 << 10;
    let dir = folder();
    let path = dir.path().join("image");
    let bytes: Vec<u8> = (0..DISK_BYTES as u32).map(|at| (at % 251) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let disk = Arc::new(open(&path, Direct::Auto).with_alignment(4096, 4096));
    let guest = Guest::new();
    let mut engine = Uring::shared(disk, guest.memory.clone(), 64).unwrap();
    let memory = |number: u64| [segment(512 + number * LEN, LEN as u32)];
    let deadline = Instant::now() + cleave_tests::TIMEOUT;
    for (kind, whole) in [(READ, true), (WRITE, false)] {
        if kind == WRITE {
            std::fs::write(&path, vec![0; bytes.len()]).unwrap();
        }
        for number in 0..OPS {
            engine.push(op(kind, number * LEN, LEN, &memory(number)), number);
        }
        // The kernel has read all of them before the first is taken.
        while whole && engine.reactor.plain_ring().completions() < OPS as usize {
            assert!(Instant::now() < deadline, "no completions");
            engine.enter(Wait::No).unwrap();
        }
        let (mut ended, mut laps) = (0, Vec::new());
        loop {
            while let Some(event) = engine.reap() {
                assert!(matches!(event, Event::Done { result: Ok(()), .. }));
                ended += 1;
            }
            laps.push(files(&mut engine).take_copied());
            if ended == OPS {
                break;
            }
            assert!(Instant::now() < deadline, "{laps:?}");
            engine.enter(Wait::Until(Some(deadline))).unwrap();
        }
        assert_eq!(laps.iter().sum::<u64>(), OPS * LEN);
        assert!(laps.iter().all(|copied| *copied <= 3 * LEN), "{laps:?}");
        for number in 0..OPS {
            let range = (number * LEN) as usize..((number + 1) * LEN) as usize;
            assert!(guest.get(&memory(number), LEN as usize) == bytes[range]);
        }
    }
    assert!(std::fs::read(&path).unwrap() == bytes);
}

/// Only its file system knows what such a write does, and how long it has the thread wait.
#[test]
fn a_shared_thread_submits_no_write_that_may_go_through_the_page_cache_in_spite_of_o_direct() {
    const DURABLE_ZERO: OpKind = OpKind::Zero {
        unmap: false,
        durable: true,
    };
    let dir = folder();
    let disk = open(&image(dir.path(), DISK_BYTES), Direct::Auto);
    let disk = Arc::new(disk.with_cached_writes());
    if disk.legs()[0].is_cached() {
        return cleave_tests::ignored("no O_DIRECT in the temporary folder");
    }
    let guest = Guest::new();
    let mut own = engine(&disk, &guest);
    let mut shared = Uring::shared(disk, guest.memory.clone(), 32).unwrap();
    files(&mut own).forget_methods();
    files(&mut shared).forget_methods();
    let (aligned, odd) = ([segment(0, 4096)], [segment(1, 4096)]);
    for (kind, memory, delegates) in [
        (WRITE, &aligned[..], true),
        (DURABLE, &aligned, true),
        // Through a buffer.
        (DURABLE, &odd, true),
        (DURABLE_ZERO, &[], true),
        (READ, &aligned, false),
    ] {
        for (engine, delegates) in [(&mut own, false), (&mut shared, delegates)] {
            engine.push(op(kind, 4096, 4096, memory), 7);
            assert_eq!(files(engine).delegates(), delegates, "{kind:?}");
            assert_eq!(next_done(engine), (7, Ok(())), "{kind:?}");
            // An fsync moves nothing.
            let bytes = if delegates { 0 } else { 4096 };
            assert_eq!(files(engine).take_submitted().1, bytes, "{kind:?}");
        }
    }
}

#[test]
fn neighbours_in_a_block_of_4096_keep_their_bytes_across_two_engines() {
    for direct in [Direct::Auto, Direct::Off] {
        let dir = folder();
        let disk =
            Arc::new(open(&image(dir.path(), DISK_BYTES), direct).with_alignment(4096, 4096));
        let guest = Guest::new();
        let mut engines = [engine(&disk, &guest), engine(&disk, &guest)];
        check_against_model(&mut engines, &guest, &disk, &MANY, seed());
        // Only adjacent ranges: single sectors of few blocks.
        let load = Load {
            ops: 4000,
            depth: 32,
            sectors_max: 9,
            kinds: KINDS,
        };
        let disk =
            Arc::new(open(&image(folder().path(), 64 << 10), direct).with_alignment(4096, 512));
        let mut engines = [engine(&disk, &guest), engine(&disk, &guest)];
        check_against_model(&mut engines, &guest, &disk, &load, seed());
    }
}

#[test]
fn more_ops_than_buffers_wait_their_turn() {
    let dir = folder();
    let disk =
        Arc::new(open(&image(dir.path(), 16 << 20), Direct::Auto).with_alignment(4096, 4096));
    let guest = Guest::new();
    let memory = Arc::clone(&guest.memory);
    let mut engine = Uring::new(Arc::clone(&disk), memory, 200, 1, 1).unwrap();
    let segments = [segment(512, 64 << 10)];
    for token in 0..200 {
        engine.push(
            op(READ, token * (64 << 10) + 512, 64 << 10, &segments),
            token,
        );
    }
    let mut tokens: Vec<_> = (0..200).map(|_| next_done(&mut engine)).collect();
    tokens.sort();
    let all: Vec<_> = (0..200).map(|token| (token, Ok(()))).collect();
    assert_eq!(tokens, all);
    let load = Load {
        ops: 6000,
        depth: 128,
        sectors_max: 100,
        kinds: KINDS,
    };
    check_against_model(&mut [engine], &guest, &disk, &load, seed());
}

#[test]
fn a_ram_disk_matches_the_model() {
    let disk = Arc::new(disk_of("ram:4M"));
    let guest = Guest::new();
    check_against_model(&mut [engine(&disk, &guest)], &guest, &disk, &MANY, seed());
    let mut engine = engine(&disk, &guest);
    let segments = [segment(100, 8192)];
    guest.put(&segments, &[7; 8192]);
    assert_eq!(run(&mut engine, op(WRITE, 512, 8192, &segments)), Ok(()));
    assert_eq!(
        run(&mut engine, op(OpKind::Discard, 0, 1 << 20, &[])),
        Ok(())
    );
    assert_eq!(run(&mut engine, op(READ, 512, 8192, &segments)), Ok(()));
    assert_eq!(guest.get(&segments, 8192), [0; 8192]);
    assert_eq!(engine.enters(), 0, "completed without a system call");
}

#[test]
fn the_null_disk_reads_zero_and_enters_no_kernel() {
    let disk = Arc::new(disk_of("null:1G"));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let segments = [segment(REGION - 100, 200)];
    guest.put(&segments, &[7; 200]);
    for kind in [WRITE, DURABLE, ZERO, OpKind::Discard, OpKind::Sync, READ] {
        engine.push(op(kind, 0, 200, &segments), 1);
        engine.enter(Wait::No).unwrap();
        assert_eq!(
            engine.reap(),
            Some(Event::Done {
                token: 1,
                result: Ok(())
            })
        );
    }
    assert_eq!(guest.get(&segments, 200), [0; 200]);
    assert_eq!(engine.enters(), 0);
    assert_eq!(
        run(&mut engine, op(READ, (1 << 30) - 512, 1024, &segments)),
        Err(libc::EIO)
    );
}

#[test]
fn stores_in_memory_run_ops_at_once_and_push_reports_their_errors() {
    let dir = folder();
    let file = open(&image(dir.path(), 1 << 20), Direct::Off);
    let guest = Guest::new();
    for (disk, takes) in [
        (disk_of("ram:1M"), true),
        (disk_of("null:1M"), true),
        (disk_of("null:1M,read-zeroes=off"), true),
        (file, false),
    ] {
        let disk = Arc::new(disk);
        let mut engine = engine(&disk, &guest);
        let (segments, wild) = ([segment(100, 512)], [segment(1 << 40, 512)]);
        assert_eq!(engine.at_once(&op(WRITE, 0, 512, &segments)), takes);
        assert_eq!(engine.reap(), None, "no event follows");
        for (bad, errno) in [
            (op(READ, 1 << 20, 512, &segments), libc::EIO),
            (op(READ, 0, 512, &wild), libc::EFAULT),
        ] {
            assert!(!engine.at_once(&bad));
            assert_eq!(run(&mut engine, bad), Err(errno));
        }
    }
}

#[test]
fn long_ops_of_stores_in_memory_are_run_in_parts_and_move_every_byte() {
    let guest = Guest::new();
    // Across the border of the regions, and at an offset inside of a page.
    let (len, offset) = (5_u64 << 20, 3 << 9);
    let segments = [
        segment(100, 2 << 20),
        segment(REGION - 512, (3 << 20) as u32),
    ];
    let bytes: Vec<u8> = (0..len)
        .map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8)
        .collect();
    for (spec, is_null) in [("ram:16M", false), ("null:16M", true)] {
        let disk = Arc::new(disk_of(spec));
        let mut engine = engine(&disk, &guest);
        guest.put(&segments, &bytes);
        assert!(
            !engine.at_once(&op(WRITE, offset, len, &segments)),
            "{spec}"
        );
        assert_eq!(run(&mut engine, op(WRITE, offset, len, &segments)), Ok(()));
        guest.put(&segments, &vec![7; bytes.len()]);
        assert!(!engine.at_once(&op(READ, offset, len, &segments)));
        assert_eq!(run(&mut engine, op(READ, offset, len, &segments)), Ok(()));
        let zeroes = vec![0; bytes.len()];
        let found = guest.get(&segments, bytes.len());
        assert!(
            found == if is_null { &zeroes } else { &bytes }[..],
            "{spec}"
        );
        assert_eq!(run(&mut engine, op(UNMAP, offset, len, &[])), Ok(()));
        assert_eq!(run(&mut engine, op(READ, offset, len, &segments)), Ok(()));
        assert!(guest.get(&segments, bytes.len()) == zeroes, "{spec}");
        let wild = [segment(1 << 40, 5 << 20)];
        for (bad, errno) in [
            (op(READ, 12 << 20, len, &segments), libc::EIO),
            (op(READ, 0, len, &wild), libc::EFAULT),
        ] {
            assert_eq!(run(&mut engine, bad), Err(errno), "{spec}");
        }
    }
}

#[test]
fn a_null_disk_without_read_zeroes_leaves_memory_unchanged() {
    let guest = Guest::new();
    let segments = [segment(REGION - 100, 200)];
    for (spec, byte) in [("null:1M", 0), ("null:1M,read-zeroes=off", 7)] {
        let disk = Arc::new(disk_of(spec));
        let mut engine = engine(&disk, &guest);
        guest.put(&segments, &[7; 200]);
        assert!(engine.at_once(&op(READ, 0, 200, &segments)), "{spec}");
        assert_eq!(guest.get(&segments, 200), [byte; 200], "{spec}");
    }
}

#[test]
fn a_tiny_submission_queue_takes_everything() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Off);
    let memory = Arc::clone(&guest.memory);
    let tiny = Uring::with_queue(Arc::clone(&disk), memory, [64, 1, 1], 2, &LEVELS).unwrap();
    let load = Load {
        ops: 100_000,
        depth: 64,
        sectors_max: 8,
        kinds: &[READ, WRITE, WRITE, ZERO],
    };
    check_against_model(&mut [tiny], &guest, &disk, &load, seed());
}

#[test]
fn a_discard_frees_whole_blocks_only() {
    for direct in [Direct::Off, Direct::Auto] {
        let (_dir, path, disk, guest) = file_rig(direct);
        let mut engine = engine(&disk, &guest);
        let segments = [segment(0, 1 << 20)];
        guest.put(&segments, &[7; 1 << 20]);
        assert_eq!(run(&mut engine, op(WRITE, 0, 1 << 20, &segments)), Ok(()));
        assert_eq!(run(&mut engine, op(OpKind::Sync, 0, 0, &[])), Ok(()));
        let before = path.metadata().unwrap().blocks();
        assert_eq!(
            run(&mut engine, op(OpKind::Discard, 512, (1 << 20) - 512, &[])),
            Ok(())
        );
        assert!(path.metadata().unwrap().blocks() < before, "{direct:?}");
        assert_eq!(run(&mut engine, op(READ, 0, 1 << 20, &segments)), Ok(()));
        let bytes = guest.get(&segments, 1 << 20);
        assert!(bytes[..512].iter().all(|byte| *byte == 7));
        assert!(bytes[4096..].iter().all(|byte| *byte == 0));
        assert_eq!(path.metadata().unwrap().len(), DISK_BYTES, "the size stays");
    }
}

#[test]
fn zeroing_by_writing_is_the_last_resort_and_correct() {
    for (direct, unit) in [(Direct::Off, 1), (Direct::Auto, 512), (Direct::Auto, 4096)] {
        let dir = folder();
        let disk = Arc::new(open(&image(dir.path(), DISK_BYTES), direct).with_alignment(unit, 512));
        let guest = Guest::new();
        let mut engine = engine(&disk, &guest);
        let AnyStore::Files(files) = engine.store() else {
            panic!("a file")
        };
        files.forget_methods();
        check_against_model(&mut [engine], &guest, &disk, &MANY, seed());
        let mut engine = super::tests::engine(&disk, &guest);
        let AnyStore::Files(files) = engine.store() else {
            panic!("a file")
        };
        files.forget_methods();
        // A hint that the store cannot take.
        assert_eq!(run(&mut engine, op(OpKind::Discard, 0, 4096, &[])), Ok(()));
    }
}

fn woken(engine: &mut Uring) -> Option<u16> {
    match engine.reap() {
        Some(Event::Woken { slot }) => Some(slot),
        Some(other) => panic!("{other:?}"),
        None => None,
    }
}

fn soon() -> Wait {
    Wait::Until(Some(Instant::now() + Duration::from_millis(50)))
}

#[test]
fn the_ring_refuses_other_opcodes() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let ring = engine.reactor.plain_ring();
    let socket = opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build();
    let unfixed = opcode::PollAdd::new(io_uring::types::Fd(0), 1).build();
    for entry in [socket, unfixed] {
        // SAFETY: neither entry points to memory.
        assert!(unsafe { ring.push(&entry.user_data(tag::IGNORED)) });
        ring.enter(Sleep::Forever, Purpose::Io).unwrap();
        let denied = ring.complete().unwrap();
        assert_eq!(denied.result(), -libc::EACCES);
    }
}

fn files(engine: &mut Uring) -> &mut Files {
    match engine.store() {
        AnyStore::Files(files) => files,
        _ => panic!("a file"),
    }
}

#[test]
fn several_disks_share_a_reactor_each_with_its_own_guest() {
    let rigs = [file_rig(Direct::Auto), file_rig(Direct::Off)];
    let ram = (Arc::new(disk_of("ram:4M")), Guest::new());
    let disks = [&rigs[0].2, &rigs[1].2, &ram.0];
    let guests = [&rigs[0].3, &rigs[1].3, &ram.1];
    let mut reactor = Reactor::new(&disks.map(|disk| &**disk), 96, 1, 1).unwrap();
    let mut stores: Vec<AnyStore> = disks
        .iter()
        .map(|disk| AnyStore::open(&mut reactor, disk, 0, 32).unwrap())
        .collect();
    let epochs = guests.map(|guest| Epoch::from(Arc::clone(&guest.memory)));
    let memory = [segment(0, 64 << 10)];
    let mut left = [0; 3];
    for (number, store) in stores.iter_mut().enumerate() {
        guests[number].put(&memory, &[number as u8 + 1; 64 << 10]);
        for token in 0..32 {
            let write = op(WRITE, token * (64 << 10), 64 << 10, &memory);
            store.push(&mut reactor, &epochs[number], write, token);
            left[number] += 1;
        }
    }
    while left != [0; 3] {
        match reactor.reap(&mut stores) {
            Some(crate::Event::Done { store, done }) => {
                assert_eq!(done.result, Ok(()));
                left[store] -= 1;
            }
            other => {
                assert_eq!(other, None);
                reactor.enter(&mut stores, Wait::Until(None)).unwrap();
            }
        }
    }
    for (number, (_, path, ..)) in rigs.iter().enumerate() {
        let bytes = std::fs::read(path).unwrap();
        assert!(
            bytes[..2 << 20]
                .iter()
                .all(|byte| *byte == number as u8 + 1)
        );
    }
    // While one store closes, completions of the others are kept.
    for store in [0, 1] {
        for token in 0..32 {
            let read = op(READ, token * 4096, 4096, &memory);
            stores[store].push(&mut reactor, &epochs[store], read, token);
        }
    }
    reactor.enter(&mut stores, Wait::No).unwrap();
    stores[0].close(&mut reactor);
    assert_eq!(
        Arc::strong_count(&guests[0].memory),
        2,
        "its epoch and the guest's own"
    );
    let mut ended = 0;
    while ended < 32 {
        match reactor.reap(&mut stores) {
            Some(crate::Event::Done { store: 1, done }) => {
                ended += usize::from(done.result == Ok(()))
            }
            other => {
                assert_eq!(other, None);
                reactor.enter(&mut stores, Wait::Until(None)).unwrap();
            }
        }
    }
    reactor.close(&mut stores);
}

/// Two files: on one reactor each, or both on the first.
fn two_files(is_shared: bool) -> ([Reactor; 2], [AnyStore; 2]) {
    let dir = folder();
    let disks = ["a", "b"].map(|name| {
        let folder = dir.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        Arc::new(open(&image(&folder, DISK_BYTES), Direct::Off))
    });
    let both = [&*disks[0], &*disks[1]];
    let mut reactors = [(); 2].map(|()| Reactor::new(&both, 8, 0, 0).unwrap());
    let first = AnyStore::open(&mut reactors[0], &disks[0], 0, 4).unwrap();
    let own = usize::from(!is_shared);
    let second = AnyStore::open(&mut reactors[own], &disks[1], 0, 4).unwrap();
    (reactors, [first, second])
}

#[test]
#[should_panic(expected = "a store on another reactor")]
fn a_store_is_not_taken_by_another_reactor() {
    let guest = Guest::new();
    let ([_, mut other], [mut store, _]) = two_files(false);
    let memory = [segment(0, 4096)];
    let read = op(READ, 0, 4096, &memory);
    let epoch = Epoch::from(Arc::clone(&guest.memory));
    store.push(&mut other, &epoch, read, 0);
}

#[test]
#[should_panic(expected = "a completion of another store")]
fn a_completion_is_not_taken_by_another_store() {
    let guest = Guest::new();
    let ([mut reactor, _], mut stores) = two_files(true);
    let memory = [segment(0, 4096)];
    let epoch = Epoch::from(Arc::clone(&guest.memory));
    for store in &mut stores {
        store.push(&mut reactor, &epoch, op(READ, 0, 4096, &memory), 0);
    }
    stores.swap(0, 1);
    while reactor.reap(&mut stores).is_none() {
        reactor.enter(&mut stores, Wait::Until(None)).unwrap();
    }
}

#[test]
fn every_way_to_set_a_ring_up_works() {
    for level in LEVELS {
        let (_dir, _path, disk, guest) = file_rig(Direct::Auto);
        let make = || {
            let memory = Arc::clone(&guest.memory);
            Uring::with_queue(Arc::clone(&disk), memory, [32, 2, 2], 64, &[level]).unwrap()
        };
        check_against_model(&mut [make()], &guest, &disk, &MANY, seed());
        let mut engine = make();
        let (kick, call) = (eventfd(true), eventfd(true));
        engine.watch(0, kick.try_clone().unwrap());
        engine.set_bell(0, Some(call.try_clone().unwrap()));
        engine.enter(Wait::No).unwrap();
        for _ in 0..3 {
            let other = kick.try_clone().unwrap();
            let kicker = thread::spawn(move || signal(&other));
            engine.ring(0);
            engine.enter(Wait::Until(None)).unwrap();
            assert_eq!(
                (woken(&mut engine), count(&call)),
                (Some(0), 1),
                "{level:?}"
            );
            kicker.join().unwrap();
        }
    }
}

#[test]
fn an_op_larger_than_one_kernel_transfer_completes() {
    let dir = folder();
    let bytes = 5_u64 << 30;
    let disk = Arc::new(open(&image(dir.path(), bytes), Direct::Auto));
    if disk.legs()[0].is_cached() {
        return cleave_tests::ignored(
            "no O_DIRECT in the temporary folder: it would fill the page cache",
        );
    }
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let mark = [segment(0, 4096)];
    guest.put(&mark, &[9; 4096]);
    let len = (2_u64 << 30) + (16 << 20);
    let last = len - 4096;
    assert_eq!(run(&mut engine, op(WRITE, last, 4096, &mark)), Ok(()));
    // The same four megabytes repeatedly: the last copy remains.
    let segments = vec![segment(4 << 20, 4 << 20); (len >> 22) as usize];
    assert_eq!(run(&mut engine, op(READ, 0, len, &segments)), Ok(()));
    let all = guest.get(&segments[..1], 4 << 20);
    let (before, marked) = all.split_at((4 << 20) - 4096);
    assert!(before.iter().all(|byte| *byte == 0));
    assert!(marked.iter().all(|byte| *byte == 9));
    assert_eq!(run(&mut engine, op(UNMAP, 0, bytes, &[])), Ok(()));
    assert_eq!(run(&mut engine, op(READ, last, 4096, &mark)), Ok(()));
    assert_eq!(guest.get(&mark, 4096), [0; 4096]);
}
