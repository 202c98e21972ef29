//! How much the kernel copies at once between sockets and memory, for a store on a shared thread.

use super::*;
use crate::AnyStore;
use crate::stores::nbd::line::{Inbound, Line};
use crate::stores::nbd::{MOVED_MAX, Nbd};

const LINES: u64 = 4;

/// A disk with several connections, and a store on a shared thread that has all of them.
fn connected() -> (Bench, Uring) {
    let export = Export {
        flags: ABLE | MULTI,
        ..LONG
    };
    let bench = Bench::new(export, &format!("&connections={LINES}"));
    let mut store = bench.shared();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !lines(&mut store).iter().all(|line| line.receiving) {
        assert!(Instant::now() < deadline, "too few connections");
        let soon = Instant::now() + Duration::from_millis(1);
        store.enter(Wait::Until(Some(soon))).unwrap();
        assert_eq!(store.reap(), None);
    }
    (bench, store)
}

fn nbd(store: &mut Uring) -> &mut Nbd {
    match store.store() {
        AnyStore::Nbd(nbd) => nbd,
        _ => panic!("another store"),
    }
}

fn lines(store: &mut Uring) -> &[Line] {
    &nbd(store).lines
}

/// The sockets may have all that is left of a read for each connection, and one enter would copy that.
#[test]
fn the_receives_of_all_connections_together_are_short_on_a_shared_thread() {
    let (bench, mut store) = connected();
    // The data of each read begins to come.
    bench.server.react(|asked| {
        let begin = data_at(0, &[7; 100]);
        Reaction::Send(chunk_of(asked.cookie, 1, 1, SIZE as u32 + 8, &begin))
    });
    let memory = [segment(0, SIZE as u32)];
    (0..LINES).for_each(|token| store.push(op(GET, 0, SIZE, &memory), token));
    let waits_for_data = |line: &Line| {
        let is_data = matches!(line.inbound, Inbound::Data { left, .. } if left == SIZE - 100);
        line.receiving && is_data
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    while !lines(&mut store).iter().all(waits_for_data) {
        assert!(Instant::now() < deadline, "the data does not begin");
        let soon = Instant::now() + Duration::from_millis(1);
        store.enter(Wait::Until(Some(soon))).unwrap();
        assert_eq!(store.reap(), None);
    }
    let asked = lines(&mut store).iter().map(Line::receive_bytes);
    assert_eq!(asked.sum::<u64>(), MOVED_MAX);
    bench.server.react(|_| Reaction::Honest);
    bench.server.hang_up();
    for _ in 0..LINES {
        assert_eq!(next_done(&mut store).1, Ok(()));
    }
}

#[test]
fn the_messages_of_all_connections_together_are_short_on_a_shared_thread() {
    const LEN: u64 = 1 << 20;
    let (_bench, mut store) = connected();
    let memory = [segment(0, LEN as u32)];
    for number in 0..LINES {
        store.push(op(PLAIN, number * LEN, LEN, &memory), number);
    }
    store.enter(Wait::No).unwrap();
    let sent = lines(&mut store).iter().map(Line::message_bytes);
    let heads = LINES * 28;
    assert_eq!(sent.sum::<u64>(), MOVED_MAX + heads);
    for _ in 0..LINES {
        assert_eq!(next_done(&mut store).1, Ok(()));
    }
}

#[test]
fn a_lap_that_is_used_up_begins_on_one_connection_alone() {
    let (_bench, mut store) = connected();
    let memory = [segment(0, 512)];
    (0..LINES).for_each(|token| store.push(op(GET, 0, 512, &memory), token));
    let sending = |store: &mut Uring| lines(store).iter().filter(|line| line.sending).count();
    nbd(&mut store).lap.exhaust();
    store.enter(Wait::No).unwrap();
    assert_eq!(sending(&mut store), 1);
    // The next lap has its own budget.
    store.enter(Wait::No).unwrap();
    assert_eq!(sending(&mut store), LINES as usize);
    for _ in 0..LINES {
        assert_eq!(next_done(&mut store).1, Ok(()));
    }
}

/// New requests wait for the next lap then, and so do other disks' receives.
#[test]
fn bytes_that_the_kernel_moved_count_in_the_lap() {
    let (bench, mut store) = connected();
    bench.server.fill(|at| (at % 251) as u8 + 1);
    let memory = [segment(0, SIZE as u32)];
    let moved = || bench.state().sent_bytes + bench.state().received_bytes;
    for (kind, token) in [(GET, 0), (PLAIN, 1)] {
        store.push(op(kind, 0, SIZE, &memory), token);
        let (mut done, deadline) = (None, Instant::now() + Duration::from_secs(20));
        while done.is_none() {
            assert!(Instant::now() < deadline, "it does not end");
            store.enter(Wait::Until(Some(deadline))).unwrap();
            let before = moved();
            done = store.reap();
            let counted = LAP_BYTES_MAX - nbd(&mut store).lap.left();
            assert!(counted >= (moved() - before).min(LAP_BYTES_MAX));
        }
        let result = Ok(());
        assert_eq!(done, Some(Event::Done { token, result }));
    }
    assert!(moved() > 2 * SIZE);
    let bytes = bench.guest.get(&memory, SIZE as usize);
    assert!(bytes == bench.server.bytes());
}

#[test]
fn each_byte_is_right_with_several_connections_on_a_shared_thread() {
    let (bench, store) = connected();
    let long = Load {
        ops: 200,
        depth: 8,
        sectors_max: 4000,
        ..MANY
    };
    check_against_model(&mut [store], &bench.guest, &bench.disk, &long, seed());
    assert_eq!(bench.lost(), 0);
}
