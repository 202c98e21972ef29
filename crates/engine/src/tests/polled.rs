//! The polled ring, and the ops that it refuses.
//!
//! CLEAVE_POLLED_DEVICE names a device with polled queues whose contents may be lost. Without one, a file is
//! treated as if its device had such queues: the kernel then refuses every op (from Linux 6.12 on) or
//! completes it by an interrupt, and the results must be the same.

use super::*;

const POLLED_MANY: Load = Load { ops: 900, ..MANY };

struct Rig {
    disk: Arc<Disk>,
    guest: Guest,
    /// The device supports polling.
    is_real: bool,
    _dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Rig {
        Rig::aligned(1)
    }

    fn aligned(unit: u32) -> Rig {
        let dir = folder();
        let device = std::env::var_os("CLEAVE_POLLED_DEVICE").map(PathBuf::from);
        let is_real = device.is_some();
        let path = device.unwrap_or_else(|| image(dir.path(), DISK_BYTES));
        let disk = open(&path, Direct::Auto).with_alignment(unit, unit);
        let disk = match is_real {
            true => disk.with_iopoll().unwrap(),
            false => disk.with_iopoll_unproven(),
        };
        let rig = Rig {
            disk: Arc::new(disk),
            guest: Guest::new(),
            is_real,
            _dir: dir,
        };
        let all = op(ZERO, 0, rig.disk.capacity_bytes(), &[]);
        assert_eq!(run(&mut rig.engine(), all), Ok(()));
        rig
    }

    fn engine(&self) -> Uring {
        engine(&self.disk, &self.guest)
    }

    fn check(&self, engines: &mut [Uring], load: &Load) {
        check_against_model(engines, &self.guest, &self.disk, load, seed());
    }
}

#[test]
fn a_polled_disk_matches_the_model() {
    for unit in [1, 4096] {
        let rig = Rig::aligned(unit);
        let mut engines = [rig.engine(), rig.engine()];
        rig.check(&mut engines, &POLLED_MANY);
        let polled: u64 = engines.iter().map(Uring::polled).sum();
        println!("{polled} polled, still {}", rig.disk.is_polled());
        // A device that always refuses is no longer polled; one that polls still is.
        assert!(polled > 300 || !rig.is_real && !rig.disk.is_polled());
    }
}

#[test]
fn occasionally_refused_polls_still_complete() {
    // This file's device refuses all of them.
    let always: fn(u64, i32) -> i32 = |number, _| match number % 2 {
        0 => -libc::EAGAIN,
        _ => -libc::EINVAL,
    };
    let at_times: fn(u64, i32) -> i32 = |number, result| match number % 3 {
        0 => -libc::EAGAIN,
        _ if result == -libc::EOPNOTSUPP => -libc::EINVAL,
        _ => result,
    };
    for (mangle, takes_none) in [(always, true), (at_times, false)] {
        let rig = Rig::new();
        let mut engine = rig.engine();
        files(&mut engine).mangle_polled(mangle);
        let mut engines = [engine];
        rig.check(&mut engines, &POLLED_MANY);
        assert!(
            files(&mut engines[0]).polled_seen() > 300,
            "the ring was polled"
        );
        let polled = engines[0].polled();
        // A file's holes are read without its device.
        assert!(polled == 0 || !takes_none);
        assert!(polled > 0 || takes_none || !rig.is_real);
    }
}

#[test]
fn every_way_to_set_a_polled_ring_up_works() {
    for level in LEVELS {
        let rig = Rig::new();
        let memory = Arc::clone(&rig.guest.memory);
        let engine = Uring::with_queue(Arc::clone(&rig.disk), memory, [32, 2, 2], 64, &[level]);
        let mut engine = engine.unwrap();
        files(&mut engine).mangle_polled(|_, result| match result {
            // Polled until the end.
            result if result == -libc::EOPNOTSUPP => -libc::EAGAIN,
            result => result,
        });
        let (kick, call) = (eventfd(true), eventfd(true));
        engine.watch(0, kick.try_clone().unwrap());
        engine.set_bell(0, Some(call.try_clone().unwrap()));
        engine.enter(Wait::No).unwrap();
        // A kick and a bell while an op is polled.
        let segments = [segment(0, 64 << 10)];
        for _ in 0..20 {
            engine.push(op(READ, 0, 64 << 10, &segments), 1);
            assert!(engine.polls(), "{level:?}");
            signal(&kick);
            engine.ring(0);
            let mut events = Vec::new();
            while events.len() < 2 {
                engine.enter(Wait::Until(None)).unwrap();
                events.extend(std::iter::from_fn(|| engine.reap()));
            }
            let done = Event::Done {
                token: 1,
                result: Ok(()),
            };
            assert!(events.contains(&done), "{level:?} {events:?}");
            assert!(events.contains(&Event::Woken { slot: 0 }), "{events:?}");
            assert_eq!((count(&call), engine.polls()), (1, false), "{level:?}");
            let mut bytes = [0; 8];
            rustix::io::read(&kick, &mut bytes).unwrap();
        }
        rig.check(&mut [engine], &POLLED_MANY);
    }
}

#[test]
fn a_tiny_polled_queue_takes_everything() {
    let rig = Rig::new();
    let memory = Arc::clone(&rig.guest.memory);
    let tiny = Uring::with_queue(Arc::clone(&rig.disk), memory, [64, 1, 1], 2, &LEVELS);
    let mut tiny = tiny.unwrap();
    files(&mut tiny).mangle_polled(|_, result| match result {
        result if result == -libc::EOPNOTSUPP => -libc::EAGAIN,
        result => result,
    });
    let load = Load {
        ops: 5000,
        depth: 64,
        sectors_max: 8,
        kinds: &[READ, WRITE, WRITE, DURABLE, ZERO, OpKind::Sync],
    };
    rig.check(&mut [tiny], &load);
}

#[test]
fn memory_is_kept_for_polled_ops_and_dropping_waits_for_them() {
    let rig = Rig::new();
    let segments = [segment(0, 64 << 10)];
    for round in 0..30 {
        let mut engine = rig.engine();
        let (old, next) = (Guest::new(), Guest::new());
        engine.bind(Arc::clone(&old.memory));
        let memory = Arc::downgrade(&old.memory);
        for token in 0..16 {
            engine.push(op(READ, token * (64 << 10), 64 << 10, &segments), token);
        }
        // Some ops are only in the queue, some are with the device.
        if round % 2 == 0 {
            engine.enter(Wait::No).unwrap();
        }
        engine.bind(Arc::clone(&next.memory));
        let kept = old.files[0].try_clone().unwrap();
        drop(old);
        assert!(memory.upgrade().is_some());
        if round % 3 == 0 {
            for _ in 0..16 {
                assert_eq!(next_done(&mut engine).1, Ok(()));
            }
            assert!(memory.upgrade().is_none());
        }
        drop(engine);
        assert!(memory.upgrade().is_none(), "nothing holds it");
        let mark = [round as u8 + 1; 4096];
        kept.write_at(&mark, 0).unwrap();
        thread::yield_now();
        let mut after = [0; 4096];
        kept.read_exact_at(&mut after, 0).unwrap();
        assert_eq!(after, mark, "nothing writes it any more");
    }
}

#[test]
fn only_steps_that_move_bytes_are_polled_for() {
    let rig = Rig::new();
    let mut engine = rig.engine();
    let segments = [segment(0, 4096)];
    for (kind, wanted) in [
        (READ, true),
        (WRITE, true),
        (OpKind::Sync, false),
        (UNMAP, false),
        (OpKind::Discard, false),
    ] {
        engine.push(op(kind, 0, 4096, &segments), 5);
        assert_eq!(engine.polls(), wanted, "{kind:?}");
        let (token, result) = next_done(&mut engine);
        assert!(token == 5 && (result == Ok(()) || kind == OpKind::Discard));
    }
    let plain = Arc::new(open(&image(folder().path(), DISK_BYTES), Direct::Auto));
    let mut engine = super::engine(&plain, &rig.guest);
    engine.push(op(READ, 0, 4096, &segments), 5);
    assert!(!engine.polls(), "polling was not requested");
    assert_eq!(next_done(&mut engine), (5, Ok(())));
}

#[test]
fn refusals_in_a_row_end_polling_for_that_leg_and_others_do_not() {
    let (dir, guest) = (folder(), Guest::new());
    let disk = Arc::new(open(&image(dir.path(), DISK_BYTES), Direct::Auto).with_iopoll_unproven());
    let mut engine = engine(&disk, &guest);
    // Seven refusals in a row, twice, with other errors between them.
    files(&mut engine).mangle_polled(|number, _| match number {
        1..=7 | 10..=16 | 20.. => -libc::EOPNOTSUPP,
        8 | 17 => 4096,
        9 | 18 => -libc::EAGAIN,
        _ => -libc::EINVAL,
    });
    let segments = [segment(0, 4096)];
    let mut read = || run(&mut engine, op(READ, 0, 4096, &segments));
    for number in 1..=26 {
        assert_eq!(read(), Ok(()));
        assert!(disk.is_polled(), "{number}");
    }
    assert_eq!(read(), Ok(()));
    assert!(!disk.is_polled());
}

#[test]
fn a_device_that_takes_no_polled_read_is_refused_by_name() {
    let rig = Rig::new();
    match (probe_iopoll(&rig.disk), rig.is_real) {
        (outcome, true) => outcome.unwrap(),
        // Before Linux 6.12 the read completes by an interrupt.
        (Ok(()), false) => println!("not tested: this kernel accepts it without polled queues"),
        (Err(error), false) => {
            let why = error.to_string();
            assert!(why.contains(rig.disk.name()), "{why}");
            assert!(
                why.contains("remove --iopoll") && !why.contains('\n'),
                "{why}"
            );
        }
    }
}
