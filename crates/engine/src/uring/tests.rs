use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use cleave_blk::OpKind;
use cleave_disk::Direct;
use rustix::fs::ftruncate;

use super::rig::*;
use super::*;
use crate::files::Mangle;
use crate::table::{Entry, Step};
use crate::{Engine, Event, Wait};

const DISK_BYTES: u64 = 4 << 20;
/// All kinds but Discard, after which contents are the store's choice.
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
    ops: 3000,
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
    Uring::probe().unwrap();
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
        let text = EngineError::setup(io::Error::from_raw_os_error(errno)).to_string();
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

#[test]
fn neighbours_in_a_block_of_4096_keep_their_bytes_across_two_engines() {
    for direct in [Direct::Auto, Direct::Off] {
        let dir = folder();
        let disk =
            Arc::new(open(&image(dir.path(), DISK_BYTES), direct).with_alignment(4096, 4096));
        let guest = Guest::new();
        let mut engines = [engine(&disk, &guest), engine(&disk, &guest)];
        check_against_model(&mut engines, &guest, &disk, &MANY, seed());
        // Only neighbours: single sectors of few blocks.
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
    assert_eq!(engine.enters(), 0, "done on the spot");
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
fn zeroing_by_writing_is_the_last_resort_and_right() {
    for (direct, unit) in [(Direct::Off, 1), (Direct::Auto, 512), (Direct::Auto, 4096)] {
        let dir = folder();
        let disk = Arc::new(open(&image(dir.path(), DISK_BYTES), direct).with_alignment(unit, 512));
        let guest = Guest::new();
        let mut engine = engine(&disk, &guest);
        let Runner::Files(files) = &mut engine.runner else {
            panic!("a file")
        };
        files.forget_methods();
        check_against_model(&mut [engine], &guest, &disk, &MANY, seed());
        let mut engine = super::tests::engine(&disk, &guest);
        let Runner::Files(files) = &mut engine.runner else {
            panic!("a file")
        };
        files.forget_methods();
        assert_eq!(
            run(&mut engine, op(OpKind::Discard, 0, 4096, &[])),
            Err(libc::EOPNOTSUPP)
        );
    }
}

#[test]
fn ops_outside_the_disk_or_of_a_read_only_one_do_not_reach_it() {
    let (_dir, path, disk, guest) = file_rig(Direct::Off);
    let mut engine = engine(&disk, &guest);
    let segments = [segment(0, 4096)];
    for (offset, len) in [
        (DISK_BYTES, 512),
        (DISK_BYTES - 512, 1024),
        (u64::MAX - 511, 512),
        (u64::MAX, 1),
    ] {
        for kind in [READ, WRITE, ZERO, UNMAP, OpKind::Discard] {
            assert_eq!(
                run(&mut engine, op(kind, offset, len, &segments)),
                Err(libc::EIO),
                "{kind:?}"
            );
        }
    }
    assert_eq!(path.metadata().unwrap().len(), DISK_BYTES);
    drop(engine);
    drop(disk);
    let options = cleave_disk::OpenOptions {
        read_only: true,
        direct: Direct::Off,
        block_bytes: None,
        discard: true,
    };
    let disk = Disk::open(&cleave_disk::DiskSpec::Path(path), &options).unwrap();
    let mut engine = super::tests::engine(&Arc::new(disk), &guest);
    assert_eq!(
        run(&mut engine, op(WRITE, 0, 512, &segments)),
        Err(libc::EROFS)
    );
    assert_eq!(run(&mut engine, op(READ, 0, 512, &segments)), Ok(()));
}

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
        // Shorter than the op: the owner's fault, and no harm.
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
        assert!(engine.is_settled());
    }
}

#[test]
fn the_end_of_a_cut_file_is_an_error_and_what_is_left_is_read() {
    for (direct, unit) in [(Direct::Off, 1), (Direct::Auto, 512), (Direct::Auto, 4096)] {
        let dir = folder();
        let path = image(dir.path(), DISK_BYTES);
        let disk = Arc::new(open(&path, direct).with_alignment(unit, 512));
        let guest = Guest::new();
        let mut engine = engine(&disk, &guest);
        std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(10_240)
            .unwrap();
        let segments = [segment(0, 8192)];
        let mut read = |offset, len| run(&mut engine, op(READ, offset, len, &segments));
        assert_eq!(read(0, 8192), Ok(()));
        assert_eq!(read(8192, 2048), Ok(()), "{direct:?} {unit}");
        assert_eq!(read(8192, 4096), Err(libc::EIO));
        assert_eq!(read(10_240, 512), Err(libc::EIO));
        assert_eq!(read(1 << 20, 512), Err(libc::EIO));
        if unit == 4096 {
            // The old bytes of the block cannot be read, so it is not written back.
            assert_eq!(
                run(&mut engine, op(WRITE, 12_288 + 512, 512, &segments)),
                Err(libc::EIO)
            );
            assert_eq!(path.metadata().unwrap().len(), 10_240);
        }
    }
}

/// A mounted file system of 1 MiB; `None` where that cannot be had.
struct Small(tempfile::TempDir);

impl Small {
    fn new() -> Option<Small> {
        let dir = folder();
        let out = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1M", "tmpfs"])
            .arg(dir.path())
            .output();
        match out {
            Ok(out) if out.status.success() => Some(Small(dir)),
            other => {
                println!("not tried: no small file system ({other:?})");
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn no_space_is_reported_and_recovers() {
    let Some(small) = Small::new() else { return };
    let path = image(small.0.path(), DISK_BYTES);
    let ballast = small.0.path().join("ballast");
    std::fs::write(&ballast, vec![1; 900 << 10]).unwrap();
    let disk = Arc::new(open(&path, Direct::Off));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let segments = [segment(0, 512 << 10)];
    for kind in [WRITE, DURABLE] {
        let result = run(&mut engine, op(kind, 0, 512 << 10, &segments));
        assert_eq!(result, Err(libc::ENOSPC), "{kind:?}");
    }
    assert!(!disk.sync_failed());
    std::fs::remove_file(&ballast).unwrap();
    assert_eq!(run(&mut engine, op(WRITE, 0, 512 << 10, &segments)), Ok(()));
    assert_eq!(run(&mut engine, op(OpKind::Sync, 0, 0, &[])), Ok(()));
}

#[test]
fn many_scattered_segments_go_whole() {
    for direct in [Direct::Off, Direct::Auto] {
        let (_dir, _path, disk, guest) = file_rig(direct);
        let mut engine = engine(&disk, &guest);
        // Every second kilobyte, so that nothing merges; and twice the same memory makes more than
        // the kernel takes at once after crossing regions.
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
        // 1024 segments that each cross the border of the regions are 2048 ranges.
        let crossing: Vec<_> = (0..1024).map(|_| segment(REGION - 512, 1024)).collect();
        assert_eq!(
            run(&mut engine, op(READ, 0, 1 << 20, &crossing)),
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

#[test]
fn guest_memory_cut_under_io_fails_the_op_and_nothing_else() {
    for (direct, unit) in [(Direct::Off, 1), (Direct::Auto, 512), (Direct::Auto, 4096)] {
        let dir = folder();
        let disk = Arc::new(open(&image(dir.path(), DISK_BYTES), direct).with_alignment(unit, 512));
        let guest = Guest::new();
        let mut engine = engine(&disk, &guest);
        let far = [segment(REGION + (1 << 20), 8192)];
        guest.put(&far, &[5; 8192]);
        ftruncate(&guest.files[1], 4096).unwrap();
        // Straight: the kernel faults. Through a buffer (offset 512 of 4096): the copy does.
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
    // The first access that meets the hole is the engine's own copy.
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
fn memory_is_kept_for_ops_in_flight_and_let_go_after() {
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
        assert!(!engine.is_settled() && memory.upgrade().is_some());
        engine.push(op(READ, 2 << 20, 4096, &segments), 3);
        let mut results = [
            next_done(&mut engine),
            next_done(&mut engine),
            next_done(&mut engine),
        ];
        results.sort();
        assert_eq!(results, [(1, Ok(())), (2, Ok(())), (3, Ok(()))]);
        assert!(engine.is_settled() && memory.upgrade().is_none());
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
fn a_failed_sync_stays_failed_in_every_engine() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Off);
    let mut engines = [engine(&disk, &guest), engine(&disk, &guest)];
    assert_eq!(run(&mut engines[0], op(OpKind::Sync, 0, 0, &[])), Ok(()));
    disk.mark_sync_failed();
    for engine in &mut engines {
        for token in 0..8 {
            engine.push(op(OpKind::Sync, 0, 0, &[]), token);
        }
        for token in 0..8 {
            assert_eq!(next_done(engine), (token, Err(libc::EIO)));
        }
        let zero = OpKind::Zero {
            unmap: false,
            durable: true,
        };
        assert_eq!(run(engine, op(zero, 0, 4096, &[])), Err(libc::EIO));
    }
}

#[test]
fn syncs_at_once_share_and_all_complete() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Auto);
    let mut engine = engine(&disk, &guest);
    for _ in 0..20 {
        for token in 0..32 {
            engine.push(op(OpKind::Sync, 0, 0, &[]), token);
        }
        let mut tokens: Vec<_> = (0..32).map(|_| next_done(&mut engine)).collect();
        tokens.sort();
        assert_eq!(
            tokens,
            (0..32).map(|token| (token, Ok(()))).collect::<Vec<_>>()
        );
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
fn a_signal_wakes_again_and_again_without_being_read() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    for nonblocking in [true, false] {
        let fd = eventfd(nonblocking);
        engine.watch(2, fd.try_clone().unwrap());
        engine.enter(soon()).unwrap();
        assert_eq!(woken(&mut engine), None);
        for _ in 0..5 {
            let other = fd.try_clone().unwrap();
            let kicker = thread::spawn(move || signal(&other));
            engine.enter(Wait::Until(None)).unwrap();
            assert_eq!(woken(&mut engine), Some(2));
            assert_eq!(woken(&mut engine), None);
            kicker.join().unwrap();
        }
        // A polling owner sees it too.
        signal(&fd);
        engine.enter(Wait::No).unwrap();
        assert_eq!(woken(&mut engine), Some(2));
        assert_eq!(count(&fd), 6, "the counter is not ours to read");
        // Signalled before it is watched: at once.
        signal(&fd);
        engine.watch(2, fd.try_clone().unwrap());
        engine.enter(Wait::Until(None)).unwrap();
        assert_eq!(woken(&mut engine), Some(2));
        engine.unwatch(2);
        engine.enter(Wait::No).unwrap();
        signal(&fd);
        engine.enter(soon()).unwrap();
        assert_eq!(woken(&mut engine), None);
    }
}

#[test]
fn a_replaced_watch_is_the_new_one_only() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let (old, new) = (eventfd(true), eventfd(true));
    for entered in [true, false] {
        count(&new);
        engine.watch(0, old.try_clone().unwrap());
        if entered {
            engine.enter(Wait::No).unwrap();
        }
        engine.watch(0, new.try_clone().unwrap());
        engine.enter(Wait::No).unwrap();
        while woken(&mut engine).is_some() {}
        signal(&old);
        engine.enter(soon()).unwrap();
        assert_eq!(woken(&mut engine), None);
        signal(&new);
        engine.enter(Wait::Until(None)).unwrap();
        assert_eq!(woken(&mut engine), Some(0));
    }
    // Out of range: nothing happens.
    engine.watch(99, eventfd(true));
    engine.unwatch(99);
}

#[test]
fn hostile_kicks_wake_once_and_cost_nothing_after() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    let dir = folder();
    let (pipe_in, pipe_out) = rustix::pipe::pipe().unwrap();
    drop(pipe_out);
    let regular: OwnedFd = std::fs::File::open(image(dir.path(), 4096)).unwrap().into();
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let folder: OwnedFd = std::fs::File::open(dir.path()).unwrap().into();
    let path = rustix::fs::open(
        dir.path(),
        rustix::fs::OFlags::PATH,
        rustix::fs::Mode::empty(),
    )
    .unwrap();
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let full = eventfd(true);
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    for (name, fd) in [
        ("hung-up pipe", pipe_in),
        ("regular file", regular),
        ("/dev/null", null),
        ("folder", folder),
        ("path", path),
        ("epoll", epoll),
        ("full counter", full),
    ] {
        let mut engine = engine(&disk, &guest);
        engine.watch(1, fd);
        let mut wakes = 0;
        for _ in 0..20 {
            engine
                .enter(Wait::Until(Some(Instant::now() + Duration::from_millis(2))))
                .unwrap();
            while woken(&mut engine).is_some() {
                wakes += 1;
            }
        }
        println!("{name}: woken {wakes} times, {} enters", engine.enters());
        assert!(wakes <= 16, "{name}");
        assert!(engine.enters() <= 25, "{name}");
        // The engine goes on.
        let good = eventfd(true);
        engine.watch(0, good.try_clone().unwrap());
        signal(&good);
        engine.enter(Wait::Until(None)).unwrap();
        assert_eq!(woken(&mut engine), Some(0));
    }
}

#[test]
fn a_bell_rings_once_per_enter_whatever_its_flags() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    for nonblocking in [true, false] {
        let mut engine = engine(&disk, &guest);
        let fd = eventfd(nonblocking);
        let flags = rustix::fs::fcntl_getfl(&fd).unwrap();
        engine.set_bell(3, Some(fd.try_clone().unwrap()));
        for _ in 0..5 {
            engine.ring(3);
            engine.ring(3);
            engine.enter(Wait::No).unwrap();
            assert_eq!(count(&fd), 1, "nonblocking {nonblocking}");
            engine.enter(Wait::No).unwrap();
            assert_eq!(count(&fd), 0);
        }
        if nonblocking {
            assert_eq!(engine.enters(), 5, "a bell costs the one enter");
        }
        // Together with a sleep.
        engine.ring(3);
        engine.enter(soon()).unwrap();
        assert_eq!(count(&fd), 1);
        // What was rung before the bell is taken away is not lost.
        engine.ring(3);
        engine.set_bell(3, None);
        engine.ring(3);
        engine.enter(Wait::No).unwrap();
        assert_eq!(count(&fd), 1);
        engine.set_bell(3, Some(fd.try_clone().unwrap()));
        engine.ring(3);
        drop(engine);
        assert_eq!(count(&fd), 1, "nor what was rung before the end");
        assert_eq!(rustix::fs::fcntl_getfl(&fd).unwrap(), flags);
    }
}

#[test]
fn full_and_broken_bells_are_ignored_without_blocking() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    for nonblocking in [true, false] {
        let mut engine = engine(&disk, &guest);
        let full = eventfd(nonblocking);
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        engine.set_bell(0, Some(full.try_clone().unwrap()));
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        drop(reader);
        engine.set_bell(1, Some(writer));
        let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        engine.set_bell(2, Some(null));
        let good = eventfd(nonblocking);
        engine.set_bell(3, Some(good.try_clone().unwrap()));
        for _ in 0..3 {
            for slot in 0..6 {
                engine.ring(slot);
            }
            engine.enter(soon()).unwrap();
            assert_eq!(engine.reap(), None);
            assert_eq!(count(&good), 1);
        }
        assert!(count(&full) >= u64::MAX - 1);
    }
}

/// Each write that the kernel kept would cost its memory, as many as the guest has calls.
#[test]
fn a_full_bell_that_became_blocking_keeps_no_writes() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let fd = eventfd(true);
    engine.set_bell(0, Some(fd.try_clone().unwrap()));
    rustix::fs::fcntl_setfl(&fd, rustix::fs::OFlags::RDWR).unwrap();
    rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    for _ in 0..10 {
        engine.ring(0);
        engine.enter(Wait::No).unwrap();
    }
    assert_eq!(count(&fd), u64::MAX - 1);
    engine.enter(soon()).unwrap();
    assert_eq!(engine.reap(), None);
    assert_eq!(count(&fd), 0, "writes that had waited for room");
}

#[test]
fn a_wait_ends_at_its_deadline_and_with_results() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Off);
    let mut engine = engine(&disk, &guest);
    let start = Instant::now();
    engine
        .enter(Wait::Until(Some(start + Duration::from_millis(30))))
        .unwrap();
    assert!(start.elapsed() >= Duration::from_millis(29));
    engine.enter(Wait::Until(Some(start))).unwrap();
    // A result that is there already: no sleep.
    engine.push(op(READ, 0, 512, &[segment(u64::MAX, 1)]), 5);
    engine.enter(Wait::Until(None)).unwrap();
    assert_eq!(
        engine.reap(),
        Some(Event::Done {
            token: 5,
            result: Err(libc::EFAULT)
        })
    );
    let before = engine.enters();
    for _ in 0..100 {
        engine.enter(Wait::No).unwrap();
    }
    assert_eq!(engine.enters(), before, "nothing to do is no system call");
}

#[test]
fn the_ring_refuses_what_it_was_not_made_for() {
    let disk = Arc::new(disk_of("null:1M"));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let ring = &mut engine.core.ring;
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

#[test]
fn nothing_leaks_over_many_engines() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Off);
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
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
            (before, open_files())
        });
        let (before, after) = work.join().unwrap();
        // Other tests run beside this one.
        assert!(after < before + 100, "{before} files before, {after} after");
    });
}

/// A loop device over a file; `None` where that cannot be had.
struct Loop {
    device: PathBuf,
    _dir: tempfile::TempDir,
}

impl Loop {
    fn new(block: u32) -> Option<Loop> {
        let dir = folder();
        let path = image(dir.path(), DISK_BYTES);
        let out = Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &block.to_string()])
            .arg(&path)
            .output();
        match out {
            Ok(out) if out.status.success() => {
                let device = String::from_utf8(out.stdout).unwrap().trim().into();
                Some(Loop { device, _dir: dir })
            }
            other => {
                println!("not tried: no loop device of {block} ({other:?})");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.device)
            .status();
    }
}

fn on_loop(block: u32, test: impl Fn(&Path, Direct)) {
    for direct in [Direct::Off, Direct::Auto] {
        if let Some(device) = Loop::new(block) {
            test(&device.device, direct);
        }
    }
}

#[test]
fn block_devices_match_the_model() {
    for block in [512, 4096] {
        on_loop(block, |device, direct| {
            let disk = Arc::new(open(device, direct));
            println!("{direct:?} {:?}", disk.limits());
            let guest = Guest::new();
            let mut engines = [engine(&disk, &guest), engine(&disk, &guest)];
            check_against_model(&mut engines, &guest, &disk, &MANY, seed());
        });
    }
}

#[test]
fn block_devices_discard_by_command_and_by_hole() {
    on_loop(4096, |device, direct| {
        let disk = Arc::new(open(device, direct));
        let guest = Guest::new();
        for command in [true, false] {
            let mut engine = engine(&disk, &guest);
            let Runner::Files(files) = &mut engine.runner else {
                panic!("a file")
            };
            if !command {
                files.forget_command();
            }
            let segments = [segment(0, 1 << 20)];
            guest.put(&segments, &[7; 1 << 20]);
            assert_eq!(run(&mut engine, op(WRITE, 0, 1 << 20, &segments)), Ok(()));
            assert_eq!(
                run(&mut engine, op(OpKind::Discard, 512, (1 << 20) - 1024, &[])),
                Ok(())
            );
            assert_eq!(run(&mut engine, op(READ, 0, 1 << 20, &segments)), Ok(()));
            let bytes = guest.get(&segments, 1 << 20);
            assert!(
                bytes[..4096].iter().all(|byte| *byte == 7),
                "rounded inwards"
            );
            assert!(
                bytes[4096..(1 << 20) - 4096].iter().all(|byte| *byte == 0),
                "{command}"
            );
            assert!(bytes[(1 << 20) - 4096..].iter().all(|byte| *byte == 7));
        }
    });
}

#[test]
fn durable_writes_are_in_the_file() {
    for (direct, unit) in [(Direct::Off, 1), (Direct::Auto, 4096)] {
        let dir = folder();
        let path = image(dir.path(), DISK_BYTES);
        let disk = Arc::new(open(&path, direct).with_alignment(unit, 512));
        let guest = Guest::new();
        let mut engine = engine(&disk, &guest);
        let segments = [segment(3, 1536)];
        guest.put(&segments, &[9; 1536]);
        assert_eq!(run(&mut engine, op(DURABLE, 512, 1536, &segments)), Ok(()));
        let mut bytes = [0; 2560];
        let file = std::fs::File::open(&path).unwrap();
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(
            bytes[..512] == [0; 512] && bytes[512..2048] == [9; 1536] && bytes[2048..] == [0; 512]
        );
    }
}

fn files(engine: &mut Uring) -> &mut Files {
    match &mut engine.runner {
        Runner::Files(files) => files,
        _ => panic!("a file"),
    }
}

/// Cuts transfers short and has them tried again; what was moved and is not admitted is done twice.
fn stutter(number: u64, entry: &Entry, result: i32) -> i32 {
    let draw = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let is_transfer = matches!(
        entry.step,
        Step::Direct | Step::Fill | Step::Spill | Step::Zeroes
    );
    let is_write = matches!(entry.step, Step::Spill | Step::Zeroes)
        || (entry.step == Step::Direct && entry.kind != READ);
    match draw % 8 {
        0 => -libc::EAGAIN,
        1 => -libc::EINTR,
        2 => -libc::ECANCELED,
        3 if is_transfer && is_write => 0,
        _ if is_transfer && result > 4096 => {
            4096 + i32::try_from(draw).unwrap() % (result - 4096 + 1)
        }
        _ => result,
    }
}

#[test]
fn short_transfers_and_retries_match_the_model() {
    for (direct, unit) in [(Direct::Off, 1), (Direct::Auto, 512), (Direct::Auto, 4096)] {
        let dir = folder();
        let disk = Arc::new(open(&image(dir.path(), DISK_BYTES), direct).with_alignment(unit, 512));
        let guest = Guest::new();
        let mut first = engine(&disk, &guest);
        files(&mut first).mangle(stutter);
        check_against_model(&mut [first], &guest, &disk, &MANY, seed());
        let mut second = engine(&disk, &guest);
        files(&mut second).mangle(stutter);
        let segments = [segment(0, DISK_BYTES as u32)];
        assert_eq!(run(&mut second, op(ZERO, 0, DISK_BYTES, &[])), Ok(()));
        assert_eq!(run(&mut second, op(READ, 0, DISK_BYTES, &segments)), Ok(()));
        files(&mut second).forget_methods();
        check_against_model(&mut [second], &guest, &disk, &MANY, seed());
    }
}

#[test]
fn an_error_ends_exactly_the_op_that_has_it() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Auto);
    for kind in [READ, WRITE, ZERO, UNMAP, OpKind::Discard] {
        let mut engine = engine(&disk, &guest);
        files(&mut engine).mangle(|number, _, result| match number % 7 {
            0 => -libc::EIO,
            _ => result,
        });
        let segments = [segment(0, 4096)];
        for token in 1..100 {
            engine.push(op(kind, 0, 4096, &segments), token);
            let wanted = match token % 7 {
                0 => Err(libc::EIO),
                _ => Ok(()),
            };
            assert_eq!(next_done(&mut engine), (token, wanted), "{kind:?}");
        }
    }
    assert!(!disk.sync_failed());
}

#[test]
fn one_failed_fsync_fails_its_followers_and_all_later_ones() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Off);
    let mut engines = [engine(&disk, &guest), engine(&disk, &guest)];
    files(&mut engines[0]).mangle(|number, _, result| match number {
        2 => -libc::EIO,
        _ => result,
    });
    for token in 0..4 {
        engines[0].push(op(OpKind::Sync, 0, 0, &[]), token);
    }
    // The first has an fsync of its own; the second fsync is shared by the other three, and fails.
    let results: Vec<_> = (0..4).map(|_| next_done(&mut engines[0])).collect();
    assert_eq!(results[0], (0, Ok(())));
    assert!(
        results[1..]
            .iter()
            .all(|(_, result)| *result == Err(libc::EIO)),
        "{results:?}"
    );
    for engine in &mut engines {
        assert_eq!(run(engine, op(OpKind::Sync, 0, 0, &[])), Err(libc::EIO));
    }
}

#[test]
fn a_durable_write_that_fails_taints_later_syncs_unless_it_was_for_space() {
    let mangles: [(i32, Mangle); 2] = [
        (libc::ENOSPC, |_, _, _| -libc::ENOSPC),
        (libc::EIO, |_, _, _| -libc::EIO),
    ];
    for (errno, mangle) in mangles {
        let (_dir, _path, disk, guest) = file_rig(Direct::Off);
        let mut engine = engine(&disk, &guest);
        files(&mut engine).mangle(mangle);
        let segments = [segment(0, 4096)];
        let result = run(&mut engine, op(DURABLE, 0, 4096, &segments));
        assert_eq!(result, Err(errno));
        assert_eq!(disk.sync_failed(), errno == libc::EIO);
    }
}

#[test]
fn no_durable_write_succeeds_through_the_page_cache_once_a_sync_failed() {
    for direct in [Direct::Off, Direct::Auto] {
        let (_dir, _path, disk, guest) = file_rig(direct);
        // A write past the cache is told of its own failures, whoever else was told of what.
        let wanted = match disk.store() {
            Store::File { direct: true, .. } => Ok(()),
            _ => Err(libc::EIO),
        };
        let mut engines = [engine(&disk, &guest), engine(&disk, &guest)];
        files(&mut engines[0]).mangle(|_, _, _| -libc::EIO);
        let segments = [segment(0, 4096)];
        // The first is told of a failed write-back; the kernel then tells nobody else of it, not
        // those either whose pages were lost with it.
        let first = run(&mut engines[0], op(DURABLE, 0, 4096, &segments));
        assert_eq!(first, Err(libc::EIO));
        let second = run(&mut engines[1], op(DURABLE, 4096, 4096, &segments));
        assert_eq!(second, wanted, "{direct:?}");
        // Bounced, in pieces.
        let odd = [segment(1, 1024), segment(4096, 3072)];
        let third = run(&mut engines[1], op(DURABLE, 4096, 4096, &odd));
        assert_eq!(third, wanted, "{direct:?}");
        let cached = OpKind::Write { durable: false };
        let fourth = run(&mut engines[1], op(cached, 4096, 4096, &segments));
        assert_eq!(fourth, Ok(()));
    }
}

#[test]
fn a_store_that_never_has_time_costs_no_core_and_others_go_on() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Off);
    let mut engine = engine(&disk, &guest);
    files(&mut engine).mangle(|_, entry, result| match entry.offset {
        0 => -libc::EAGAIN,
        _ => result,
    });
    let segments = [segment(0, 512)];
    engine.push(op(READ, 0, 512, &segments), 1);
    engine.push(op(READ, 512, 512, &segments), 2);
    assert_eq!(next_done(&mut engine), (2, Ok(())));
    let before = engine.enters();
    let end = Instant::now() + Duration::from_millis(500);
    while Instant::now() < end {
        engine.enter(Wait::Until(Some(end))).unwrap();
        assert_eq!(engine.reap(), None);
    }
    let enters = engine.enters() - before;
    assert!(enters < 60, "{enters} enters");
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
fn an_op_of_more_than_the_kernel_moves_at_once_goes_whole() {
    let dir = folder();
    let bytes = 5_u64 << 30;
    let disk = Arc::new(open(&image(dir.path(), bytes), Direct::Auto));
    if matches!(disk.legs()[0].store(), Store::File { direct: false, .. }) {
        println!("not tried: it would fill the page cache");
        return;
    }
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let mark = [segment(0, 4096)];
    guest.put(&mark, &[9; 4096]);
    let len = (2_u64 << 30) + (16 << 20);
    let last = len - 4096;
    assert_eq!(run(&mut engine, op(WRITE, last, 4096, &mark)), Ok(()));
    // The same four megabytes over and over: what stays is the end of the range.
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

#[test]
fn a_store_that_is_pickier_than_it_said_gets_buffers() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Auto);
    let mut engine = engine(&disk, &guest);
    // Half of it, then a refusal; through a buffer it works.
    files(&mut engine).mangle(|number, entry, result| match (entry.step, number) {
        (Step::Direct, 1) => result / 2,
        (Step::Direct, _) => -libc::EINVAL,
        _ => result,
    });
    let segments = [segment(0, 16 << 10), segment(64 << 10, 16 << 10)];
    let bytes: Vec<u8> = (0..32_u32 << 10).map(|at| (at % 249) as u8).collect();
    guest.put(&segments, &bytes);
    assert_eq!(
        run(&mut engine, op(WRITE, 512, 32 << 10, &segments)),
        Ok(())
    );
    guest.put(&segments, &[0; 32 << 10]);
    assert_eq!(run(&mut engine, op(READ, 512, 32 << 10, &segments)), Ok(()));
    assert!(guest.get(&segments, 32 << 10) == bytes);
}

#[test]
fn a_sync_waits_for_those_of_other_engines_and_shares_their_failure() {
    for (result, wanted) in [(0, Ok(())), (-libc::EIO, Err(libc::EIO))] {
        let (_dir, _path, disk, guest) = file_rig(Direct::Off);
        let (mut here, mut there) = (engine(&disk, &guest), engine(&disk, &guest));
        let mangles: [Mangle; 2] = [|_, _, _| 0, |_, _, _| -libc::EIO];
        files(&mut there).mangle(mangles[usize::from(result != 0)]);
        // In the kernel, perhaps ended, and its owner does not look.
        there.push(op(OpKind::Sync, 0, 0, &[]), 1);
        there.enter(Wait::No).unwrap();
        here.push(op(OpKind::Sync, 0, 0, &[]), 2);
        for _ in 0..20 {
            here.enter(soon()).unwrap();
            assert_eq!(here.reap(), None);
        }
        assert_eq!(next_done(&mut there), (1, wanted));
        assert_eq!(next_done(&mut here), (2, wanted));
        // An engine that goes is not waited for.
        let (_dir, _path, disk, guest) = file_rig(Direct::Off);
        let (mut here, mut there) = (engine(&disk, &guest), engine(&disk, &guest));
        there.push(op(OpKind::Sync, 0, 0, &[]), 1);
        there.enter(Wait::No).unwrap();
        drop(there);
        assert_eq!(run(&mut here, op(OpKind::Sync, 0, 0, &[])), Ok(()));
    }
}
