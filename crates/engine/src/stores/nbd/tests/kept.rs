//! Changes that were answered and not flushed when the server was lost.

use std::sync::atomic::{AtomicBool, Ordering};

use cleave_disk::SyncFailure;

use super::*;

/// Lets the server lose everything that it was not asked to flush, as a process that ends does.
fn lose_all(bench: &Bench) {
    bench.server.fill(|_| 0);
    bench.server.hang_up();
}

fn put(bench: &Bench, store: &mut Uring, kind: cleave_blk::OpKind, offset: u64, byte: u8) {
    bench.guest.put(&[segment(0, 4096)], &[byte; 4096]);
    let memory = [segment(0, 4096)];
    assert_eq!(run(store, op(kind, offset, 4096, &memory)), Ok(()));
}

/// Two workers of two connections each: the write that is newer went through another connection than the older one.
#[test]
fn a_server_that_lost_what_it_answered_gets_it_again_in_order() {
    let export = Export {
        flags: ABLE | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "&connections=2&fence=1");
    let mut stores = [bench.store(), bench.store()];
    for turn in 0..8 {
        put(&bench, &mut stores[turn % 2], PLAIN, 0, turn as u8 + 1);
    }
    put(&bench, &mut stores[0], PLAIN, 8192, 0x55);
    put(&bench, &mut stores[1], DURABLE, 8192, 0x66);
    assert_eq!(run(&mut stores[1], op(ZERO, 8192, 512, &[])), Ok(()));
    lose_all(&bench);
    // Each worker has to notice that its connections are gone.
    for store in &mut stores {
        store.push(op(SYNC, 0, 0, &[]), 1);
    }
    let mut left = 2;
    let deadline = Instant::now() + Duration::from_secs(30);
    while left > 0 {
        assert!(Instant::now() < deadline, "it never comes back");
        for store in &mut stores {
            let soon = Instant::now() + Duration::from_millis(5);
            store.enter(Wait::Until(Some(soon))).unwrap();
            if let Some(Event::Done { result, .. }) = store.reap() {
                assert_eq!(result, Ok(()));
                left -= 1;
            }
        }
    }
    let bytes = bench.server.bytes();
    assert!(bytes[..4096].iter().all(|byte| *byte == 8));
    assert!(bytes[8192..8704].iter().all(|byte| *byte == 0));
    assert!(bytes[8704..12288].iter().all(|byte| *byte == 0x66));
    let state = bench.state();
    // What was at stake is told later.
    assert_eq!((state.lossy, state.unflushed_bytes), (1, 0));
    assert!(state.lossy_bytes >= 10 * 4096, "{state:?}");
    assert!(state.replayed_bytes >= 10 * 4096 + 512, "{state:?}");
}

/// Each answer may take as long as any other.
#[test]
fn a_server_that_does_them_slowly_gets_them_once() {
    unless_late(|| {
        let got = what_a_slow_server_gets_again();
        ensure(got == (8, 4 * 4096), || format!("{got:?}"))
    });
}

/// Returns the writes that a server was sent which is slow when it gets them again, and the bytes of those.
fn what_a_slow_server_gets_again() -> (usize, u64) {
    let bench = Bench::new(Export::able(SIZE), "&timeout=1&fence=1");
    let mut store = bench.store();
    for at in 0..4 {
        put(&bench, &mut store, PLAIN, at * 8192, 1);
    }
    bench.server.react(|asked| {
        if asked.kind == WRITE {
            std::thread::sleep(Duration::from_millis(400));
        }
        Reaction::Honest
    });
    lose_all(&bench);
    assert_eq!(run(&mut store, op(SYNC, 0, 0, &[])), Ok(()));
    let asked = bench.server.asked();
    let writes = asked.iter().filter(|asked| asked.kind == WRITE).count();
    (writes, bench.state().replayed_bytes)
}

/// Its new process knows nothing of what the old one answered, and a flush on it must not stand for that.
#[test]
fn a_store_that_begins_is_let_in_when_the_others_know_that_the_server_has_gone() {
    let export = Export {
        flags: ABLE | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "&fence=1");
    let mut stores = vec![bench.store()];
    put(&bench, &mut stores[0], PLAIN, 0, 1);
    lose_all(&bench);
    stores.push(bench.store());
    stores[1].push(op(SYNC, 0, 0, &[]), 1);
    nothing_ends(&mut stores[1]);
    assert_eq!(results(&mut stores, 1), [Ok(())]);
    assert!(bench.server.bytes()[..4096].iter().all(|byte| *byte == 1));
}

/// Returns the next results of several stores.
fn results(stores: &mut [Uring], count: usize) -> Vec<Result<(), i32>> {
    let mut results = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(30);
    while results.len() < count {
        assert!(Instant::now() < deadline, "{results:?} of {count}");
        for store in &mut *stores {
            let soon = Instant::now() + Duration::from_millis(5);
            store.enter(Wait::Until(Some(soon))).unwrap();
            while let Some(event) = store.reap() {
                if let Event::Done { result, .. } = event {
                    results.push(result);
                }
            }
        }
    }
    results
}

/// Makes stores of a disk that have their connections.
fn connected_stores(bench: &Bench, count: usize) -> Vec<Uring> {
    let mut stores: Vec<Uring> = (0..count).map(|_| bench.store()).collect();
    for store in &mut stores {
        let memory = [segment(0, 512)];
        assert_eq!(run(store, op(GET, 0, 512, &memory)), Ok(()));
    }
    stores
}

/// A server may be told only once of data that its disk has lost, and does the flushes of two connections at the same time.
#[test]
fn no_flush_succeeds_beside_one_that_fails() {
    let export = Export {
        flags: ABLE | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "");
    let mut stores = connected_stores(&bench, 2);
    let is_held = Arc::new(AtomicBool::new(true));
    let (held, is_first) = (is_held.clone(), AtomicBool::new(true));
    bench.server.react(move |asked| {
        if asked.kind != FLUSH || !is_first.swap(false, Ordering::SeqCst) {
            return Reaction::Honest;
        }
        while held.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Reaction::Send(simple(asked.cookie, 5, &[]))
    });
    stores[0].push(op(SYNC, 0, 0, &[]), 1);
    flush_comes(&bench, &mut stores[0]);
    stores[1].push(op(SYNC, 0, 0, &[]), 1);
    nothing_ends(&mut stores[1]);
    is_held.store(false, Ordering::SeqCst);
    assert_eq!(results(&mut stores, 2), [Err(libc::EIO); 2]);
}

#[test]
fn flushes_that_wait_share_the_next_one() {
    let export = Export {
        flags: ABLE | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "");
    let mut stores = connected_stores(&bench, 3);
    let is_held = Arc::new(AtomicBool::new(true));
    bench.server.hold_flushes(&is_held);
    stores[0].push(op(SYNC, 0, 0, &[]), 0);
    flush_comes(&bench, &mut stores[0]);
    for store in &mut stores {
        (1..5).for_each(|number| store.push(op(SYNC, 0, 0, &[]), number));
        nothing_ends(store);
    }
    assert_eq!(bench.server.flushes(), 1);
    is_held.store(false, Ordering::SeqCst);
    assert_eq!(results(&mut stores, 13), [Ok(()); 13]);
    assert_eq!(bench.server.flushes(), 2);
}

/// Its flush may be under way when it is dropped.
#[test]
fn a_store_that_loses_its_connection_in_a_flush_passes_the_turn_on() {
    let export = Export {
        flags: ABLE | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "&fence=1");
    let mut stores = connected_stores(&bench, 2);
    once(&bench, |asked| match asked.kind {
        FLUSH => Reaction::Close(Vec::new()),
        _ => Reaction::Honest,
    });
    for store in &mut stores {
        store.push(op(SYNC, 0, 0, &[]), 1);
    }
    assert_eq!(results(&mut stores, 2), [Ok(()); 2]);
}

/// Nobody learns what the server said to its flush.
#[test]
fn a_store_that_is_left_behind_in_a_flush_passes_the_turn_on_and_fails_later_flushes() {
    let export = Export {
        flags: ABLE | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "");
    let mut stores = connected_stores(&bench, 2);
    once(&bench, |_| Reaction::Send(Vec::new()));
    stores[0].push(op(SYNC, 0, 0, &[]), 1);
    flush_comes(&bench, &mut stores[0]);
    stores[1].push(op(SYNC, 0, 0, &[]), 1);
    nothing_ends(&mut stores[1]);
    let mut lost = stores.remove(0);
    lost.store().release_shared();
    std::mem::forget(lost);
    assert_eq!(next_done(&mut stores[0]), (1, Err(libc::EIO)));
    assert!(bench.disk.sync_failed());
}

#[test]
fn what_was_flushed_is_not_sent_again() {
    let bench = Bench::new(Export::able(SIZE), "&fence=1");
    let mut store = bench.store();
    put(&bench, &mut store, PLAIN, 0, 1);
    put(&bench, &mut store, DURABLE, 4096, 2);
    assert_eq!(run(&mut store, op(SYNC, 0, 0, &[])), Ok(()));
    // No older one is kept, so it need not be either.
    put(&bench, &mut store, DURABLE, 8192, 3);
    assert_eq!(bench.state().unflushed_bytes, 0);
    bench.server.hang_up();
    assert_eq!(run(&mut store, op(SYNC, 0, 0, &[])), Ok(()));
    assert_eq!(bench.state().replayed_bytes, 0);
}

#[test]
fn a_server_that_refuses_them_fails_every_flush() {
    let bench = Bench::new(Export::able(SIZE), "&fence=1");
    let mut store = bench.store();
    put(&bench, &mut store, PLAIN, 0, 1);
    bench.server.react(|asked| match asked.kind {
        WRITE => Reaction::Send(simple(asked.cookie, 28, &[])),
        _ => Reaction::Honest,
    });
    lose_all(&bench);
    assert_eq!(run(&mut store, op(SYNC, 0, 0, &[])), Err(libc::EIO));
    assert!(bench.disk.sync_failed());
    assert_eq!(run(&mut store, op(SYNC, 0, 0, &[])), Err(libc::EIO));
}

/// The next daemon has to know of them, however long the server takes.
#[test]
fn changes_that_are_being_sent_again_are_still_owed() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=60&fence=1");
    let mut store = bench.store();
    put(&bench, &mut store, PLAIN, 0, 1);
    bench.server.react(|_| Reaction::Dead(Vec::new()));
    bench.server.hang_up();
    store.push(op(SYNC, 0, 0, &[]), 1);
    while bench.server.asked().len() < 2 {
        nothing_ends(&mut store);
    }
    assert!(bench.disk.owes_changes());
    let unflushed = bench.state().unflushed_bytes;
    assert!(unflushed >= 4096, "{unflushed}");
    bench.disk.abandon();
}

/// The server has got them again, and may be lost once more. Nobody would notice, and the next daemon has to know of them.
#[test]
fn changes_that_were_sent_again_and_not_flushed_are_owed_when_nobody_has_a_connection() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=60&fence=1");
    let mut store = bench.store();
    put(&bench, &mut store, PLAIN, 0, 1);
    let cleave_disk::Backing::Nbd(nbd) = bench.disk.backing() else {
        panic!("another store");
    };
    // The store closes while nobody is greeted.
    bench.server.export(|_| {
        bench.server.hang_up();
        store.push(op(SYNC, 0, 0, &[]), 1);
        while !nbd.is_cut_off() {
            nothing_ends(&mut store);
        }
        drop(store);
    });
    // As a store does that closes before it looks whether it has got a connection.
    let mut port = nbd.ports().unwrap().remove(0);
    port.request();
    assert!(wait_until(|| !nbd.is_cut_off()), "no connection");
    assert!(bench.disk.owes_changes(), "nobody uses the connection");
    drop(port);
    assert!(bench.disk.owes_changes(), "nobody has a connection");
    assert_eq!(written(&bench).len(), 2);
    let mut next = bench.store();
    assert_eq!(run(&mut next, op(SYNC, 0, 0, &[])), Ok(()));
    assert!(!bench.disk.owes_changes());
}

/// Its guest may run on another host by then, and have written there. The next guest does not wait for the fence.
#[test]
fn nothing_is_sent_again_when_a_store_closes_before_its_server_greets() {
    let bench = Bench::new(Export::able(SIZE), "&fence=3600");
    let mut store = bench.store();
    put(&bench, &mut store, PLAIN, 0, 1);
    // Nobody is greeted meanwhile.
    bench.server.export(|_| {
        bench.server.hang_up();
        store.push(op(SYNC, 0, 0, &[]), 1);
        while bench.server.connections() < 2 {
            nothing_ends(&mut store);
        }
        drop(store);
    });
    assert_eq!(run(&mut bench.store(), op(SYNC, 0, 0, &[])), Ok(()));
    assert_eq!(written(&bench), [(0, 1), (2, 1)]);
}

/// The two overlap, so the server gets them one after the other.
#[test]
fn nothing_more_is_sent_again_when_a_store_closes() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=60&fence=1");
    let mut store = bench.store();
    put(&bench, &mut store, PLAIN, 0, 1);
    put(&bench, &mut store, PLAIN, 0, 2);
    let is_held = Arc::new(AtomicBool::new(true));
    let held = is_held.clone();
    bench.server.react(move |_| {
        while held.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Reaction::Honest
    });
    bench.server.hang_up();
    store.push(op(SYNC, 0, 0, &[]), 1);
    while written(&bench).len() < 3 {
        nothing_ends(&mut store);
    }
    drop(store);
    is_held.store(false, Ordering::SeqCst);
    assert_eq!(run(&mut bench.store(), op(SYNC, 0, 0, &[])), Ok(()));
    assert_eq!(written(&bench), [(0, 1), (0, 2), (1, 1), (2, 1), (2, 2)]);
    assert!(bench.server.bytes()[..4096].iter().all(|byte| *byte == 2));
}

/// Returns the connection and the first byte of each write so far.
fn written(bench: &Bench) -> Vec<(u64, u8)> {
    let asked = bench.server.asked();
    let writes = asked.iter().filter(|asked| asked.kind == WRITE);
    writes
        .map(|asked| (asked.connection, asked.data[0]))
        .collect()
}

/// Has the server lose what it answered, and closes the connection on which it gets that again. Returns when it did the latter.
fn lose_again(bench: &Bench, store: &mut Uring) -> Instant {
    put(bench, store, PLAIN, 0, 1);
    let (to, cut) = channel();
    once(bench, move |_| {
        to.send(Instant::now()).unwrap();
        Reaction::Close(Vec::new())
    });
    lose_all(bench);
    store.push(op(SYNC, 0, 0, &[]), 1);
    loop {
        nothing_ends(store);
        if let Ok(at) = cut.try_recv() {
            return at;
        }
    }
}

/// The server may have them in a queue, and would replace what the guest writes to the same place on the next connection.
#[test]
fn changes_that_were_sent_again_and_not_answered_have_a_fence() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=60&fence=2");
    let mut store = bench.store();
    let cut = lose_again(&bench, &mut store);
    assert_eq!(next_done(&mut store), (1, Ok(())));
    let took = cut.elapsed();
    assert!(took >= Duration::from_secs(2), "{took:?}");
    assert!(bench.server.bytes()[..4096].iter().all(|byte| *byte == 1));
}

#[test]
fn the_fence_of_changes_that_were_sent_again_ends_with_the_servers_process() {
    let (bench, mut process) = Bench::with_process("&timeout=60&fence=60");
    let mut store = bench.store();
    let cut = lose_again(&bench, &mut store);
    process.end();
    assert_eq!(next_done(&mut store), (1, Ok(())));
    let took = cut.elapsed();
    assert!(took >= Duration::from_secs(1), "{took:?}");
    assert!(took < Duration::from_secs(30), "{took:?}");
}

/// A server that ends whenever it gets them.
#[test]
fn requests_fail_in_time_although_the_changes_are_never_answered() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=60&reconnect=3&fence=1");
    let mut store = bench.store();
    put(&bench, &mut store, PLAIN, 0, 1);
    bench.server.react(|_| Reaction::Close(Vec::new()));
    bench.server.hang_up();
    let begun = Instant::now();
    store.push(op(GET, 0, 4096, &[segment(0, 4096)]), 1);
    assert_eq!(next_done(&mut store), (1, Err(libc::ENOTCONN)));
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(3), "{took:?}");
    assert!(took < Duration::from_secs(20), "{took:?}");
}

/// The guest never flushes.
#[test]
fn so_much_is_kept_and_no_more() {
    let bench = Bench::new(Export::able(SIZE), "&replay=1");
    let mut store = bench.store();
    bench.server.react(|asked| match asked.kind {
        FLUSH => Reaction::After(Duration::from_millis(20)),
        _ => Reaction::Honest,
    });
    let most = write_much(&bench, &mut store, 4);
    assert!(most <= 1 << 20, "{most}");
    let flushes = bench.server.flushes();
    assert!(flushes >= 8, "{flushes}");
    assert_eq!(bench.lost(), 0);
}

/// Pushes 64 writes of 256 KiB, `depth` at a time, all of which succeed. Returns the most bytes that were kept after one of them.
fn write_much(bench: &Bench, store: &mut Uring, depth: u64) -> u64 {
    const PART: u64 = 256 << 10;
    let memory = [segment(0, PART as u32)];
    let (mut pushed, mut done, mut most) = (0, 0, 0);
    while done < 64 {
        while pushed < 64 && pushed < done + depth {
            store.push(op(PLAIN, pushed % 16 * PART, PART, &memory), pushed);
            pushed += 1;
        }
        assert_eq!(next_done(store).1, Ok(()), "after {done} writes");
        done += 1;
        most = most.max(bench.state().unflushed_bytes);
    }
    most
}

/// As many as a guest has in flight are more than may be kept.
#[test]
fn changes_under_way_count_as_kept() {
    let bench = Bench::new(Export::able(SIZE), "&replay=1");
    let mut store = bench.store();
    let most = write_much(&bench, &mut store, 64);
    assert!(most <= 1 << 20, "{most}");
    // One that is larger than all that may be kept goes alone.
    let memory = [segment(0, 3 << 20)];
    for number in 0..4 {
        store.push(op(PLAIN, 0, 3 << 20, &memory), number);
    }
    for _ in 0..4 {
        assert_eq!(next_done(&mut store).1, Ok(()));
        let kept = bench.state().unflushed_bytes;
        assert!(kept <= (3 << 20) + 64, "{kept}");
    }
    assert_eq!(bench.lost(), 0);
}

/// One worker has small writes all the time, the other one a few that are larger than all that may be kept.
#[test]
fn workers_share_what_may_be_kept() {
    const LARGE: u64 = 2 << 20;
    let export = Export {
        flags: ABLE | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "&replay=1");
    let mut stores = [bench.store(), bench.store()];
    let (small, large) = ([segment(0, 128 << 10)], [segment(0, LARGE as u32)]);
    for number in 0..32 {
        stores[0].push(op(PLAIN, 0, 128 << 10, &small), number);
    }
    (0..8).for_each(|number| stores[1].push(op(PLAIN, LARGE, LARGE, &large), number));
    let (mut left, mut most) = (8, 0);
    let deadline = Instant::now() + Duration::from_secs(30);
    while left > 0 {
        assert!(Instant::now() < deadline, "{left} large writes never end");
        for (number, store) in stores.iter_mut().enumerate() {
            let soon = Instant::now() + Duration::from_millis(1);
            store.enter(Wait::Until(Some(soon))).unwrap();
            while let Some(Event::Done { token, result }) = store.reap() {
                assert_eq!(result, Ok(()));
                most = most.max(bench.state().unflushed_bytes);
                match number {
                    0 => store.push(op(PLAIN, 0, 128 << 10, &small), token),
                    _ => left -= 1,
                }
            }
        }
    }
    // Whatever the others have, a worker that has nothing may send one change.
    assert!(most <= (1 << 20) + LARGE + (128 << 10) + 2 * 64, "{most}");
    // A flush of a store's own is in flight as well, and ends without a result. One may wait for that of the other.
    while stores.iter().any(|store| store.in_flight() > 0) {
        for store in &mut stores {
            let soon = Instant::now() + Duration::from_millis(1);
            store.enter(Wait::Until(Some(soon))).unwrap();
            while let Some(Event::Done { result, .. }) = store.reap() {
                assert_eq!(result, Ok(()));
            }
        }
        assert!(Instant::now() < deadline, "its writes never end");
    }
}

/// On a shared thread the answer to a long write uses a lap up, and that to the flush which makes room is taken in by the next one.
#[test]
fn changes_that_wait_are_sent_when_the_answer_that_makes_room_is_taken_in_late() {
    const PART: u64 = LAP_BYTES_MAX;
    let bench = Bench::new(Export::able(SIZE), "&replay=1&timeout=600");
    let third = std::sync::Mutex::new(Vec::new());
    bench.server.react(move |asked| {
        let mut third = third.lock().unwrap();
        match asked.kind {
            WRITE if asked.offset == 2 * PART => {
                *third = simple(asked.cookie, 0, &[]);
                Reaction::Send(Vec::new())
            }
            FLUSH => {
                let after = simple(asked.cookie, 0, &[]);
                Reaction::Send([std::mem::take(&mut *third), after].concat())
            }
            _ => Reaction::Honest,
        }
    });
    let mut store = bench.shared();
    let memory = [segment(0, PART as u32)];
    (0..5).for_each(|number| store.push(op(PLAIN, number * PART, PART, &memory), number));
    for _ in 0..5 {
        assert_eq!(next_done(&mut store).1, Ok(()));
    }
}

/// Its changes are answered on the next connection, and those that waited for room follow.
#[test]
fn a_full_list_survives_the_loss_of_the_connection() {
    let bench = Bench::new(Export::able(SIZE), "&replay=1&fence=1");
    let mut store = bench.store();
    let (hung, is_hung) = channel();
    let hung = std::sync::Mutex::new(Some(hung));
    bench.server.react(move |asked| {
        if asked.kind == FLUSH
            && let Some(hung) = hung.lock().unwrap().take()
        {
            hung.send(()).unwrap();
            return Reaction::Close(Vec::new());
        }
        Reaction::Honest
    });
    let most = write_much(&bench, &mut store, 64);
    assert!(most <= 1 << 20, "{most}");
    assert_eq!((is_hung.try_recv(), bench.lost()), (Ok(()), 1));
}

/// The flushes of the store's own still make room for further writes.
#[test]
fn writes_go_on_after_a_failed_flush() {
    let fail: [fn(&Bench, &mut Uring); 2] = [
        |bench, store| {
            bench.server.react(|asked| match asked.kind {
                FLUSH => Reaction::Send(simple(asked.cookie, 5, &[])),
                _ => Reaction::Honest,
            });
            assert_eq!(run(store, op(SYNC, 0, 0, &[])), Err(libc::EIO));
            bench.server.react(|_| Reaction::Honest);
        },
        |bench, _| bench.disk.mark_changes_lost(),
    ];
    for fail in fail {
        let bench = Bench::new(Export::able(SIZE), "&replay=1");
        let mut store = bench.store();
        fail(&bench, &mut store);
        write_much(&bench, &mut store, 4);
        let flushes = bench.server.flushes();
        assert!(flushes <= 66, "{flushes}");
    }
}

#[test]
fn a_flush_may_take_longer_than_a_server_may_be_silent() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=1&reconnect=1");
    let mut store = bench.store();
    bench.server.react(|asked| match asked.kind {
        FLUSH => Reaction::After(Duration::from_millis(5500)),
        _ => Reaction::Honest,
    });
    assert_eq!(run(&mut store, op(SYNC, 0, 0, &[])), Ok(()));
    assert_eq!((bench.server.asked().len(), bench.lost()), (1, 0));
}

/// Waits until the server was asked to flush. No op ends meanwhile.
fn flush_comes(bench: &Bench, store: &mut Uring) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while bench.server.flushes() == 0 {
        assert!(Instant::now() < deadline, "it is not asked to flush");
        nothing_ends(store);
    }
}

/// Enters until nothing is in flight.
pub(super) fn end_all(store: &mut Uring) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while store.in_flight() > 0 {
        assert!(Instant::now() < deadline, "it never ends");
        store.enter(Wait::Until(Some(deadline))).unwrap();
        assert!(store.reap().is_none());
    }
}

/// Then nothing of it depends on what becomes of the server.
#[test]
fn a_store_flushes_before_its_end_and_does_not_wait_at_its_end() {
    let bench = Bench::new(Export::able(SIZE), "");
    let mut store = bench.store();
    store.store().prepare_close();
    assert_eq!(store.in_flight(), 0, "there is nothing to flush");
    drop(store);
    let mut store = bench.store();
    put(&bench, &mut store, PLAIN, 0, 1);
    let is_held = Arc::new(AtomicBool::new(true));
    bench.server.hold_flushes(&is_held);
    store.store().prepare_close();
    flush_comes(&bench, &mut store);
    nothing_ends(&mut store);
    assert_eq!((store.in_flight(), bench.server.flushes()), (1, 1));
    is_held.store(false, Ordering::SeqCst);
    end_all(&mut store);
    store.store().prepare_close();
    assert_eq!((store.in_flight(), bench.server.flushes()), (0, 1));
    assert_eq!(bench.state().unflushed_bytes, 0);
}

/// Its flush is asked for again when the server is back, and nobody needs to wait for that.
#[test]
fn a_server_that_goes_away_in_a_flush_does_not_keep_a_store_from_its_end() {
    let bench = Bench::new(Export::able(SIZE), "&replay=1&reconnect=600&fence=600");
    let mut store = bench.store();
    let is_held = Arc::new(AtomicBool::new(true));
    bench.server.hold_flushes(&is_held);
    let memory = [segment(0, 64 << 10)];
    for number in 0..8 {
        store.push(op(PLAIN, number * (64 << 10), 64 << 10, &memory), number);
        assert_eq!(next_done(&mut store), (number, Ok(())));
    }
    flush_comes(&bench, &mut store);
    nothing_ends(&mut store);
    assert_eq!((store.in_flight(), bench.server.flushes()), (1, 1));
    bench.server.accept(false);
    bench.server.hang_up();
    end_all(&mut store);
    store.store().prepare_close();
    assert_eq!(store.in_flight(), 0);
    is_held.store(false, Ordering::SeqCst);
}

#[test]
fn a_disk_that_is_given_up_does_not_wait_for_the_last_flush() {
    let bench = Bench::new(Export::able(SIZE), "");
    let mut store = bench.store();
    put(&bench, &mut store, PLAIN, 0, 1);
    let is_held = Arc::new(AtomicBool::new(true));
    bench.server.hold_flushes(&is_held);
    store.store().prepare_close();
    flush_comes(&bench, &mut store);
    nothing_ends(&mut store);
    assert_eq!(bench.server.flushes(), 1);
    assert_eq!(store.in_flight(), 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            bench.disk.abandon();
        });
        end_all(&mut store);
    });
    drop(store);
    assert!(bench.state().unflushed_bytes > 0);
    // Another client of the server must not vouch for it.
    assert_eq!(bench.disk.sync_failure(), Some(SyncFailure::Untold));
    is_held.store(false, Ordering::SeqCst);
}

/// Nobody would hear the answer, if the process ended now: what the server had answered to a process before this one may be lost.
#[test]
fn a_flush_that_is_under_way_may_tell_of_a_loss() {
    let bench = Bench::new(Export::able(SIZE), "");
    let mut store = bench.store();
    let is_held = Arc::new(AtomicBool::new(true));
    bench.server.hold_flushes(&is_held);
    store.push(op(SYNC, 0, 0, &[]), 1);
    flush_comes(&bench, &mut store);
    let is_loss_untold = bench.disk.is_loss_untold();
    is_held.store(false, Ordering::SeqCst);
    assert_eq!(next_done(&mut store), (1, Ok(())));
    assert_eq!((is_loss_untold, bench.disk.is_loss_untold()), (true, false));
}

/// The server had answered them, and is sent nothing any more if it loses them.
#[test]
fn changes_of_a_disk_that_is_given_up_are_owed() {
    let bench = Bench::new(Export::able(SIZE), "");
    let mut store = bench.store();
    put(&bench, &mut store, PLAIN, 0, 1);
    assert!(!bench.disk.is_loss_untold());
    bench.disk.abandon();
    assert!(bench.disk.is_loss_untold());
}

/// A server that refuses, dies or has failed before: the store ends, and does not ask again.
#[test]
fn a_server_that_does_not_flush_does_not_keep_a_store_from_its_end() {
    for reaction in [
        Reaction::Send(Vec::new()),
        Reaction::Close(Vec::new()),
        Reaction::Honest,
    ] {
        let bench = Bench::new(Export::able(SIZE), "&reconnect=600");
        let mut store = bench.store();
        put(&bench, &mut store, PLAIN, 0, 1);
        if reaction == Reaction::Honest {
            bench.disk.mark_sync_failed();
        }
        let reacts = reaction.clone();
        bench.server.react(move |asked| match &reacts {
            Reaction::Send(_) => Reaction::Send(simple(asked.cookie, 28, &[])),
            other => other.clone(),
        });
        store.store().prepare_close();
        end_all(&mut store);
        store.store().prepare_close();
        assert_eq!(
            (store.in_flight(), bench.server.flushes()),
            (0, 1),
            "{reaction:?}"
        );
    }
}

/// The time of the flush is not the silence of a read that is asked late in it.
#[test]
fn a_read_behind_a_long_flush_has_time_of_its_own() {
    unless_late(read_behind_a_long_flush);
}

fn read_behind_a_long_flush() -> Result<(), String> {
    let bench = Bench::new(Export::able(SIZE), "&timeout=1&reconnect=1");
    let mut store = bench.store();
    bench.server.react(|asked| match asked.kind {
        FLUSH => Reaction::After(Duration::from_millis(6500)),
        _ => Reaction::Honest,
    });
    store.push(op(SYNC, 0, 0, &[]), 1);
    let late = Instant::now() + Duration::from_millis(4500);
    while Instant::now() < late {
        store.enter(Wait::Until(Some(late))).unwrap();
        ensure(store.reap().is_none(), || "it has ended".to_owned())?;
    }
    store.push(op(GET, 0, 512, &[segment(0, 512)]), 2);
    let done = [next_done(&mut store), next_done(&mut store)];
    ensure(
        (done, bench.lost()) == ([(1, Ok(())), (2, Ok(()))], 0),
        || format!("{done:?}"),
    )
}

/// qemu-nbd that is started again with a smaller `--shared`.
#[test]
fn requests_move_to_the_connections_that_come_back() {
    let export = Export {
        flags: ABLE | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "&connections=4&reconnect=15");
    let mut stores = [bench.store(), bench.store()];
    let memory = [segment(0, 512)];
    for store in &mut stores {
        assert_eq!(run(store, op(GET, 0, 512, &memory)), Ok(()));
    }
    while bench.state().connected < 8 {
        for store in &mut stores {
            let soon = Instant::now() + Duration::from_millis(5);
            store.enter(Wait::Until(Some(soon))).unwrap();
        }
    }
    bench.server.accept_more(2);
    bench.server.hang_up();
    for store in &mut stores {
        (0..8).for_each(|number| store.push(op(GET, number * 512, 512, &memory), number));
    }
    let mut left = 16;
    let deadline = Instant::now() + Duration::from_secs(30);
    while left > 0 {
        assert!(Instant::now() < deadline, "{left} requests never end");
        for store in &mut stores {
            let soon = Instant::now() + Duration::from_millis(5);
            store.enter(Wait::Until(Some(soon))).unwrap();
            while let Some(Event::Done { result, .. }) = store.reap() {
                assert_eq!(result, Ok(()));
                left -= 1;
            }
        }
    }
    // Each worker has one of the two.
    assert_eq!(bench.state().connected, 2);
}

/// The kernel would give each page of new memory with a fault of its own.
#[test]
fn the_memory_of_large_copies_is_used_again_and_freed_when_no_flush_comes() {
    let bench = Bench::new(Export::able(SIZE), "");
    let mut store = bench.store();
    let has_room = |store: &mut Uring| match store.store() {
        crate::AnyStore::Nbd(nbd) => nbd.lines[0].port.has_copy_room(),
        _ => panic!("another store"),
    };
    let memory = [segment(0, 1 << 20)];
    for _ in 0..3 {
        assert_eq!(run(&mut store, op(PLAIN, 0, 1 << 20, &memory)), Ok(()));
        assert!(!has_room(&mut store), "it was taken");
        assert_eq!(run(&mut store, op(SYNC, 0, 0, &[])), Ok(()));
        assert!(has_room(&mut store));
    }
    let flushed = Instant::now();
    let late = flushed + Duration::from_secs(10);
    while flushed.elapsed() < Duration::from_secs(1) {
        // A store without requests wakes for that by itself.
        store.enter(Wait::Until(Some(late))).unwrap();
        assert_eq!(store.reap(), None);
    }
    assert!(Instant::now() < late);
    store.enter(Wait::No).unwrap();
    assert!(!has_room(&mut store));
}
