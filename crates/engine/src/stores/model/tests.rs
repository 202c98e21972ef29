//! The model on the real clock. Lower bounds on times are strict, because a slow machine cannot break them;
//! upper bounds are loose enough for a loaded machine.

use std::thread;

use cleave_disk::model::{Drive, ModelSpec};

use super::*;
use crate::rig::*;

const KINDS: &[OpKind] = &[READ, READ, WRITE, WRITE, DURABLE, ZERO, UNMAP, OpKind::Sync];

/// The bytes that a drive of one channel with 100 ms per page reads in a second, which is longer than a
/// loaded machine delays a test.
const A_SECOND: u32 = 10 * 4096;

fn model(disk: &Arc<Disk>, guest: &Guest) -> Solo<Model> {
    Solo::model(disk, &guest.memory, 64).unwrap()
}

fn rig(spec: &str) -> (Arc<Disk>, Guest) {
    (Arc::new(disk_of(spec)), Guest::new())
}

fn drive_of(spec: &str) -> Drive {
    spec.parse::<ModelSpec>().unwrap().drive()
}

/// Fails an attempt that took longer than `limit`, because it then proves nothing.
fn in_time(start: Instant, limit: Duration) -> Result<(), String> {
    let took = start.elapsed();
    cleave_tests::ensure(took <= limit, || format!("took {took:?}"))
}

/// Repeats an attempt that [`in_time`] failed because the machine was late.
fn unless_late(name: &str, limit: Duration, attempt: impl Fn() -> Result<(), String>) {
    cleave_tests::unless_late(name, limit * 9 / 10, |_| attempt()).unwrap();
}

fn taken(model: &mut Solo<Model>, op: Op<'_>) -> (Result<(), i32>, Duration) {
    let start = Instant::now();
    let result = run(model, op);
    (result, start.elapsed())
}

#[test]
fn a_disk_that_is_not_modelled_is_refused() {
    let (disk, _guest) = rig("ram:1M");
    let why = Model::new(disk, 8).unwrap_err().to_string();
    assert!(why.contains("not a modelled drive"), "{why}");
}

#[test]
fn bytes_match_the_model_of_them_with_two_engines_on_one_drive() {
    let spec = "model:custom,size=4M,read_us=20,write_us=40,write_buffer=64K,jitter=50%";
    let (disk, guest) = rig(spec);
    let load = Load {
        ops: 3000,
        depth: 24,
        sectors_max: 300,
        kinds: KINDS,
    };
    let mut engines = [model(&disk, &guest), model(&disk, &guest)];
    check_against_model(&mut engines, &guest, &disk, &load, seed());
}

#[test]
fn no_op_ends_before_its_time() {
    let spec =
        "model:custom,size=1M,read_us=300,write_us=2000,command_us=50,jitter=0,write_buffer=8K";
    let (disk, guest) = rig(spec);
    let mut model = model(&disk, &guest);
    let segments = [segment(0, 65_536)];
    for (kind, len, least_us) in [
        (READ, 4096, 350),
        (READ, 65_536, 650),
        (DURABLE, 4096, 2050),
        (WRITE, 4096, 50),
        (OpKind::Sync, 0, 50),
        (OpKind::Discard, 1 << 20, 50),
    ] {
        let (result, took) = taken(&mut model, op(kind, 0, len, &segments));
        assert_eq!(result, Ok(()), "{kind:?}");
        assert!(
            took >= Duration::from_micros(least_us),
            "{kind:?}: {took:?}"
        );
        assert!(took < Duration::from_secs(60), "{kind:?}: {took:?}");
    }
    // The write that the buffer took drains for 2 ms, and a sync waits for it.
    let start = Instant::now();
    run(&mut model, op(WRITE, 0, 4096, &segments)).unwrap();
    run(&mut model, op(OpKind::Sync, 0, 0, &[])).unwrap();
    assert!(start.elapsed() >= Duration::from_micros(2050));
}

#[test]
fn writes_move_data_at_the_end_and_reads_while_the_drive_works() {
    let limit = Duration::from_secs(1);
    unless_late("moves-at-end", limit, || {
        let (disk, guest) =
            rig("model:custom,size=1M,channels=1,window=16,read_us=100000,write_us=50000,jitter=0");
        let mut model = model(&disk, &guest);
        let (from, to) = ([segment(0, 4096)], [segment(8192, A_SECOND)]);
        guest.put(&from, &[7; 4096]);
        guest.put(&to, &[0xee; A_SECOND as usize]);
        // The drive has one channel, so it does one after the other, however long the machine takes between the two.
        let start = Instant::now();
        model.push(op(READ, 0, u64::from(A_SECOND), &to), 1);
        model.push(op(WRITE, 0, 4096, &from), 2);
        model.enter(Wait::No).unwrap();
        let first = model.reap();
        in_time(start, limit)?;
        assert_eq!(first, None);
        assert_eq!(guest.get(&to, A_SECOND as usize), [0; A_SECOND as usize]);
        // The data was copied once: later changes of the guest's memory by the guest remain.
        guest.put(&to, &[0xee; 4096]);
        // If the guest changes the data before the write is collected, the change is written.
        guest.put(&from, &[8; 4096]);
        assert_eq!(next_done(&mut model), (1, Ok(())));
        assert_eq!(guest.get(&to, 4096), [0xee; 4096]);
        assert_eq!(next_done(&mut model), (2, Ok(())));
        model.store().drive().change(drive_of("custom,read_us=1"));
        run(&mut model, op(READ, 0, 4096, &to)).unwrap();
        assert_eq!(guest.get(&to, 4096), [8; 4096]);
        Ok(())
    });
}

#[test]
fn ops_end_in_the_order_of_the_drive() {
    let (disk, guest) = rig("model:custom,size=1M,read_us=100000,channels=4,window=1,jitter=0");
    let limit = Duration::from_millis(90);
    unless_late("order-of-drive", limit, || {
        let mut model = model(&disk, &guest);
        let segments = [segment(0, 16_384)];
        let start = Instant::now();
        model.push(op(READ, 0, 16_384, &segments), 1);
        model.push(op(READ, 8192, 4096, &segments), 2);
        model.push(op(OpKind::Discard, 65_536, 4096, &[]), 3);
        in_time(start, limit)?;
        assert_eq!((model.in_flight(), model.room()), (3, 61));
        let order = [(); 3].map(|()| next_done(&mut model).0);
        assert_eq!(order, [3, 2, 1]);
        assert_eq!((model.in_flight(), model.room()), (0, 64));
        Ok(())
    });
}

#[test]
fn an_engine_takes_only_its_own() {
    let (disk, guest) = rig("model:custom,size=1M,read_us=1000");
    let (mut one, mut two) = (model(&disk, &guest), model(&disk, &guest));
    let segments = [segment(0, 4096)];
    for token in 0..16 {
        one.push(op(READ, token * 4096, 4096, &segments), token);
        two.push(op(READ, token * 4096, 4096, &segments), 100 + token);
    }
    let mut of_two: Vec<_> = (0..16).map(|_| next_done(&mut two).0).collect();
    let mut of_one: Vec<_> = (0..16).map(|_| next_done(&mut one).0).collect();
    of_one.sort_unstable();
    of_two.sort_unstable();
    assert_eq!(of_one, (0..16).collect::<Vec<_>>());
    assert_eq!(of_two, (100..116).collect::<Vec<_>>());
}

#[test]
fn bad_ops_end_with_their_errno() {
    let (disk, guest) = rig("model:p3700,size=1M");
    let mut model = model(&disk, &guest);
    let (good, hole) = ([segment(0, 4096)], [segment(2 * REGION, 4096)]);
    for (op, errno) in [
        (op(READ, 0, 4096, &hole), libc::EFAULT),
        (op(WRITE, 0, 4096, &hole), libc::EFAULT),
        (op(READ, 1 << 20, 4096, &good), libc::EIO),
        (op(WRITE, (1 << 20) - 512, 4096, &good), libc::EIO),
        (op(READ, u64::MAX, u64::MAX, &good), libc::EIO),
        (op(OpKind::Discard, 0, u64::MAX, &[]), libc::EIO),
        (op(READ, 0, 8192, &good), libc::EINVAL),
    ] {
        assert_eq!(run(&mut model, op), Err(errno), "{op:?}");
    }
    assert_eq!(run(&mut model, op(READ, 0, 4096, &good)), Ok(()));
}

#[test]
fn an_earlier_memory_is_held_until_its_ops_have_ended() {
    let (disk, guest) = rig("model:custom,size=1M,read_us=50000,jitter=0");
    let mut model = model(&disk, &guest);
    let (old, new) = (Arc::clone(&guest.memory), Guest::new());
    let segments = [segment(0, 4096)];
    guest.put(&segments, &[0xee; 4096]);
    new.put(&segments, &[0xee; 4096]);
    model.push(op(READ, 0, 4096, &segments), 1);
    model.bind(Arc::clone(&new.memory));
    assert_eq!(Arc::strong_count(&old), 3);
    assert_eq!(next_done(&mut model), (1, Ok(())));
    assert_eq!(Arc::strong_count(&old), 2, "the guest's own, and this one");
    assert_eq!(guest.get(&segments, 4096), [0; 4096]);
    assert_eq!(new.get(&segments, 4096), [0xee; 4096]);
    drop(guest);
    assert_eq!(Arc::strong_count(&old), 1);
}

#[test]
fn a_kick_ends_the_wait_for_a_slow_op() {
    let (disk, guest) = rig("model:custom,size=1M,channels=1,window=16,read_us=100000,jitter=0");
    let limit = Duration::from_secs(1);
    unless_late("kick-ends-wait", limit, || {
        let mut model = model(&disk, &guest);
        let fd = eventfd(true);
        model.watch(3, fd.try_clone().unwrap());
        let start = Instant::now();
        model.push(op(READ, 0, u64::from(A_SECOND), &[segment(0, A_SECOND)]), 1);
        signal(&fd);
        let first = loop {
            model.enter(Wait::Until(None)).unwrap();
            if let Some(event) = model.reap() {
                break event;
            }
        };
        in_time(start, limit)?;
        assert_eq!(first, Event::Woken { slot: 3 });
        model.unwatch(3);
        assert_eq!(next_done(&mut model), (1, Ok(())));
        Ok(())
    });
}

#[test]
fn a_deadline_ends_the_wait_and_a_bell_is_rung_before_it() {
    let (disk, guest) = rig("model:custom,size=1M,channels=1,window=16,read_us=100000,jitter=0");
    let limit = Duration::from_secs(1);
    unless_late("deadline-ends-wait", limit, || {
        let mut model = model(&disk, &guest);
        let bell = eventfd(true);
        model.set_bell(2, Some(bell.try_clone().unwrap()));
        let start = Instant::now();
        model.push(op(READ, 0, u64::from(A_SECOND), &[segment(0, A_SECOND)]), 1);
        model.ring(2);
        let deadline = Instant::now() + Duration::from_millis(5);
        model.enter(Wait::Until(Some(deadline))).unwrap();
        assert!(Instant::now() >= deadline);
        let seen = (model.reap(), count(&bell));
        in_time(start, limit)?;
        assert_eq!(seen, (None, 1));
        Ok(())
    });
}

#[test]
fn dropping_waits_for_what_is_in_flight() {
    let (disk, guest) = rig("model:custom,size=1M,write_us=20000,jitter=0");
    let mut first = model(&disk, &guest);
    let segments = [segment(0, 4096)];
    guest.put(&segments, &[9; 4096]);
    let start = Instant::now();
    first.push(op(WRITE, 0, 4096, &segments), 1);
    drop(first);
    assert!(start.elapsed() >= Duration::from_millis(20));
    guest.put(&segments, &[0; 4096]);
    run(&mut model(&disk, &guest), op(READ, 0, 4096, &segments)).unwrap();
    assert_eq!(guest.get(&segments, 4096), [9; 4096]);
}

#[test]
fn threads_share_a_drive() {
    let (disk, _) = rig("model:custom,size=4M,read_us=50,channels=4");
    let start = Instant::now();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let disk = Arc::clone(&disk);
            thread::spawn(move || {
                let guest = Guest::new();
                let mut model = model(&disk, &guest);
                for _ in 0..100 {
                    // All on the same channel; otherwise the drive would do them at the same time.
                    run(&mut model, op(READ, 0, 4096, &[segment(0, 4096)])).unwrap();
                }
            })
        })
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    assert!(start.elapsed() >= Duration::from_micros(400 * 50 * 95 / 100));
}

#[test]
fn a_change_takes_effect_while_the_drive_runs() {
    let (disk, guest) = rig("model:custom,size=1M,read_us=50,jitter=0");
    let mut model = model(&disk, &guest);
    let segments = [segment(0, 4096)];
    run(&mut model, op(READ, 0, 4096, &segments)).unwrap();
    model
        .store()
        .drive()
        .change(drive_of("custom,read_us=30000,jitter=0"));
    let (_, took) = taken(&mut model, op(READ, 0, 4096, &segments));
    assert!(took >= Duration::from_millis(30), "{took:?}");
}
