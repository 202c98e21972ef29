//! Stores that refuse ops, end transfers early, return EAGAIN or have no space.

use super::*;

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
        ..cleave_disk::OpenOptions::default()
    };
    let disk = Disk::open(&cleave_disk::DiskSpec::Path(path), &options).unwrap();
    let mut engine = super::engine(&Arc::new(disk), &guest);
    assert_eq!(
        run(&mut engine, op(WRITE, 0, 512, &segments)),
        Err(libc::EROFS)
    );
    assert_eq!(run(&mut engine, op(READ, 0, 512, &segments)), Ok(()));
}

#[test]
fn the_end_of_a_cut_file_is_an_error_and_the_rest_is_readable() {
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

/// A mounted file system of 1 MiB; `None` if none is available.
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
                cleave_tests::ignored(&format!("no small file system: {other:?}"));
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

/// Cuts transfers short and has them retried; bytes that were moved but not reported are moved twice.
fn stutter(number: u64, entry: &Entry<FileOp>, result: i32) -> i32 {
    let draw = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let is_transfer = matches!(
        entry.own.step,
        Step::Direct | Step::Fill | Step::Spill | Step::Zeroes
    );
    let is_write = matches!(entry.own.step, Step::Spill | Step::Zeroes)
        || (entry.own.step == Step::Direct && entry.kind != READ);
    match draw % 8 {
        0..=2 if entry.own.step == Step::Sync => -libc::ECANCELED,
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
fn a_busy_range_is_retried_and_a_busy_sync_is_not() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Off);
    for kind in [ZERO, UNMAP, OpKind::Discard, OpKind::Sync] {
        let mut engine = engine(&disk, &guest);
        files(&mut engine).mangle(|number, _, result| match number {
            1..=5 => -libc::EBUSY,
            _ => result,
        });
        let wanted = match kind {
            OpKind::Sync => Err(libc::EBUSY),
            _ => Ok(()),
        };
        let len = if kind == OpKind::Sync { 0 } else { 8192 };
        assert_eq!(run(&mut engine, op(kind, 0, len, &[])), wanted, "{kind:?}");
    }
}

#[test]
fn an_io_without_kernel_memory_is_retried_and_a_sync_is_not() {
    for direct in [Direct::Auto, Direct::Off] {
        let (_dir, _path, disk, guest) = file_rig(direct);
        let short: Mangle = |number, entry, result| match (number, entry.own.step) {
            (1..=5, _) | (_, Step::Sync) => -libc::ENOMEM,
            _ => result,
        };
        for kind in [READ, WRITE, ZERO, UNMAP] {
            let mut engine = engine(&disk, &guest);
            files(&mut engine).mangle(short);
            let segments = [segment(0, 8192)];
            assert_eq!(
                run(&mut engine, op(kind, 0, 8192, &segments)),
                Ok(()),
                "{kind:?}"
            );
        }
        let mut engine = engine(&disk, &guest);
        files(&mut engine).mangle(|number, entry, result| match (number, entry.own.step) {
            (1..=5, Step::Direct) => -libc::ENOMEM,
            _ => result,
        });
        let segments = [segment(0, 8192)];
        assert_eq!(run(&mut engine, op(DURABLE, 0, 8192, &segments)), Ok(()));
        assert_eq!(
            run(&mut engine, op(OpKind::Sync, 0, 0, &[])),
            Ok(()),
            "untainted"
        );
        files(&mut engine).mangle(short);
        let sync = run(&mut engine, op(OpKind::Sync, 0, 0, &[]));
        assert_eq!(sync, Err(libc::ENOMEM));
        assert!(disk.sync_failed());
    }
}

/// Replaces the first result of a step of this kind only.
fn fails_once<const ERRNO: i32>(number: u64, entry: &Entry<FileOp>, result: i32) -> i32 {
    match (number, entry.own.step) {
        (1, Step::Sync) => -ERRNO,
        _ => result,
    }
}

/// The kernel reports a failed write-back once, with the errno of the storage. A second fsync would succeed.
#[test]
fn a_failed_sync_is_not_repeated_whatever_its_errno_is() {
    let failures: [(i32, Mangle); 4] = [
        (libc::EAGAIN, fails_once::<{ libc::EAGAIN }>),
        (libc::EINTR, fails_once::<{ libc::EINTR }>),
        (libc::ENOMEM, fails_once::<{ libc::ENOMEM }>),
        (libc::ECANCELED, fails_once::<{ libc::ECANCELED }>),
    ];
    for (errno, mangle) in failures {
        let (_dir, _path, disk, guest) = file_rig(Direct::Off);
        let mut engine = engine(&disk, &guest);
        files(&mut engine).mangle(mangle);
        // Only with ECANCELED the fsync has not begun.
        let has_begun = errno != libc::ECANCELED;
        let wanted = if has_begun { Err(errno) } else { Ok(()) };
        let sync = op(OpKind::Sync, 0, 0, &[]);
        assert_eq!(run(&mut engine, sync), wanted, "{errno}");
        assert_eq!(disk.sync_failed(), has_begun, "{errno}");
    }
}

#[test]
fn a_store_that_keeps_returning_eagain_costs_no_core() {
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
fn a_store_with_stricter_alignment_than_reported_gets_buffers() {
    let (_dir, _path, disk, guest) = file_rig(Direct::Auto);
    let mut engine = engine(&disk, &guest);
    // Half of it succeeds, then the store refuses; through a buffer it works.
    files(&mut engine).mangle(|number, entry, result| match (entry.own.step, number) {
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

/// A worker of a pool that fails twice is left behind with what it has in flight, and the kernel may still write that.
#[test]
fn ops_fail_that_would_wait_for_a_store_that_was_left_behind() {
    // Parts of blocks exclude each other and whole blocks, as far as they are in the same MiB.
    let (part, whole, elsewhere) = ((512, 512), (8192, 4096), (2 << 20, 512));
    for (left, rows) in [
        (part, [(part, Err(libc::EIO)), (whole, Err(libc::EIO))]),
        (whole, [(part, Err(libc::EIO)), (whole, Ok(()))]),
    ] {
        let dir = folder();
        let disk = open(&image(dir.path(), DISK_BYTES), Direct::Auto).with_alignment(4096, 512);
        let (disk, guest) = (Arc::new(disk), Guest::new());
        let mut lost = engine(&disk, &guest);
        let mut other = engine(&disk, &guest);
        let memory = [segment(0, 4096)];
        lost.push(op(WRITE, left.0, left.1, &memory), 0);
        lost.enter(Wait::No).unwrap();
        // One waits already, and the others come later.
        other.push(op(WRITE, part.0, part.1, &memory), 1);
        other.enter(Wait::No).unwrap();
        assert_eq!(other.reap(), None);
        lost.store().release_shared();
        std::mem::forget(lost);
        assert_eq!(next_done(&mut other), (1, Err(libc::EIO)));
        for ((offset, len), result) in rows {
            let found = run(&mut other, op(WRITE, offset, len, &memory));
            assert_eq!(found, result, "{left:?} {offset}");
        }
        let (offset, len) = elsewhere;
        assert_eq!(run(&mut other, op(WRITE, offset, len, &memory)), Ok(()));
        assert_eq!(run(&mut other, op(READ, 0, 4096, &memory)), Ok(()));
    }
}
