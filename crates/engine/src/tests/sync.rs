//! Durability, and the effects of a failed sync.

use super::*;

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
    // The first op has an fsync of its own; the other three share the second fsync, which fails.
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

/// Disks through the page cache, past it, and past it on a file system that may go through it all the same.
fn disks() -> Vec<(tempfile::TempDir, Arc<Disk>)> {
    let file = |direct, is_sure| {
        let dir = folder();
        let disk = open(&image(dir.path(), DISK_BYTES), direct);
        let disk = match is_sure {
            true => disk,
            false => disk.with_cached_writes(),
        };
        (dir, Arc::new(disk))
    };
    vec![
        file(Direct::Off, true),
        file(Direct::Auto, true),
        file(Direct::Auto, false),
    ]
}

#[test]
fn a_durable_write_that_fails_taints_later_syncs_unless_it_was_for_space() {
    for errno in [libc::ENOSPC, libc::EIO] {
        for (_dir, disk) in disks() {
            let mut engine = engine(&disk, &Guest::new());
            files(&mut engine).mangle(match errno {
                libc::EIO => not_durable(&disk),
                _ => |_, _, _| -libc::ENOSPC,
            });
            let segments = [segment(0, 4096)];
            let result = run(&mut engine, op(DURABLE, 0, 4096, &segments));
            assert_eq!(result, Err(errno), "{disk:?}");
            assert_eq!(disk.sync_failed(), errno == libc::EIO, "{disk:?}");
        }
    }
}

/// Fails the part of a durable write that makes it durable: past the page cache the write itself; where it may go through the
/// cache, the fsync after the write.
fn not_durable(disk: &Disk) -> Mangle {
    match disk.legs()[0].caches_writes() {
        false => |_, _, _| -libc::EIO,
        true => |_, entry, result| match entry.own.step {
            Step::Sync => -libc::EIO,
            _ => result,
        },
    }
}

#[test]
fn no_durable_write_succeeds_through_the_page_cache_once_a_sync_failed() {
    for (_dir, disk) in disks() {
        // A write past the cache gets its own failures, whatever was reported to others.
        let wanted = match disk.legs()[0].caches_writes() {
            false => Ok(()),
            true => Err(libc::EIO),
        };
        let guest = Guest::new();
        let mut engines = [engine(&disk, &guest), engine(&disk, &guest)];
        files(&mut engines[0]).mangle(not_durable(&disk));
        let segments = [segment(0, 4096)];
        // The kernel reports a failed write-back to the first write and to no other, not even to those whose
        // pages were lost with it.
        let first = run(&mut engines[0], op(DURABLE, 0, 4096, &segments));
        assert_eq!(first, Err(libc::EIO));
        let second = run(&mut engines[1], op(DURABLE, 4096, 4096, &segments));
        assert_eq!(second, wanted, "{disk:?}");
        // Bounced, in pieces.
        let odd = [segment(1, 1024), segment(4096, 3072)];
        let third = run(&mut engines[1], op(DURABLE, 4096, 4096, &odd));
        assert_eq!(third, wanted, "{disk:?}");
        let cached = OpKind::Write { durable: false };
        let fourth = run(&mut engines[1], op(cached, 4096, 4096, &segments));
        assert_eq!(fourth, Ok(()));
    }
}

#[test]
fn writes_that_wait_for_their_sync_leave_the_buffers_to_others() {
    let dir = folder();
    let path = image(dir.path(), DISK_BYTES);
    let disk = Arc::new(open(&path, Direct::Off).with_alignment(4096, 512));
    let guest = Guest::new();
    let mut engine = engine(&disk, &guest);
    let misaligned = [segment(256, 4096)];
    engine.push(op(DURABLE, 0, 4096, &misaligned), 1);
    let deadline = Instant::now() + cleave_tests::TIMEOUT;
    while !files(&mut engine).is_syncing() {
        assert!(Instant::now() < deadline && engine.reap().is_none());
        engine.enter(soon()).unwrap();
    }
    assert!(files(&mut engine).has_all_buffers());
    assert_eq!(next_done(&mut engine), (1, Ok(())));
}
