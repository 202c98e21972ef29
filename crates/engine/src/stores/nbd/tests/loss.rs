//! Connections that are lost, cut off or given up: what is sent again, and when.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::AnyStore;

/// A short handshake of a server.
fn greet(stream: &mut (impl Read + Write), flags: u16) {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
    let mut answer = |read: usize, option: u32, kind: u32, data: &[u8]| {
        stream.read_exact(&mut vec![0; read]).unwrap();
        let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        stream.write_all(&bytes).unwrap();
    };
    let mut info = vec![0, 0];
    info.extend(SIZE.to_be_bytes());
    info.extend(flags.to_be_bytes());
    answer(4 + 16, 8, 0x8000_0001, &[]);
    answer(24, 7, 3, &info);
    answer(0, 7, 1, &[]);
}

/// Serves the first connection at `path` with `first` after the handshake, and lets `server` have the others.
fn instead(
    path: &std::path::Path,
    server: std::path::PathBuf,
    flags: u16,
    first: impl FnOnce(UnixStream) + Send + 'static,
) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        greet(&mut stream, flags);
        std::thread::spawn(move || first(stream));
        for stream in listener.incoming() {
            let (client, to) = (stream.unwrap(), UnixStream::connect(&server).unwrap());
            let (mut from, mut back) = (client.try_clone().unwrap(), to.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut { to }));
            std::thread::spawn(move || std::io::copy(&mut back, &mut { client }));
        }
    });
}

/// Otherwise the op would end while its request waits to be sent. The next op takes its place, and its request would be sent twice,
/// from memory that may be gone by then.
#[test]
fn an_answer_that_begins_before_its_request_is_sent_ends_the_connection() {
    // Several times what a socket takes, and less than a message.
    const LARGE: u64 = 960 << 10;
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("honest"), Export::able(SIZE));
    let (to, step) = channel();
    let (all_sent, is_all_sent) = channel();
    instead(
        &scratch.join("nbd"),
        scratch.join("honest"),
        ABLE,
        move |mut stream| {
            step.recv().unwrap();
            let answer = simple(2 << 16 | 1, 0, &[1; 4096]);
            stream.write_all(&answer[..100]).unwrap();
            step.recv().unwrap();
            // Room for a part of what waits to be sent, then the rest of the answer.
            stream.set_nonblocking(true).unwrap();
            let mut left = LARGE as usize / 3;
            while left > 0
                && let Ok(count) = stream.read(&mut vec![0; left])
            {
                left -= count;
            }
            stream.set_nonblocking(false).unwrap();
            stream.write_all(&answer[100..]).unwrap();
            all_sent.send(()).unwrap();
            // If it read on, the request might be sent whole by now, and its answer be as good as any.
            let _ = step.recv();
        },
    );
    let bench = Bench::with(scratch, server, "&fence=2");
    let mut store = bench.store();
    nothing_ends(&mut store);
    let large = [segment(0, LARGE as u32)];
    store.push(op(PLAIN, 0, LARGE, &large), 1);
    store.push(op(GET, LARGE, 4096, &[segment(1 << 20, 4096)]), 2);
    nothing_ends(&mut store);
    to.send(()).unwrap();
    // The store must see the beginning by itself, and then both the rest and the room at once.
    while bench.state().received_bytes < 100 {
        nothing_ends(&mut store);
    }
    to.send(()).unwrap();
    is_all_sent.recv().unwrap();
    let results = [next_done(&mut store).1, next_done(&mut store).1];
    assert_eq!((results, bench.lost()), ([Ok(()); 2], 1));
    let got = bench.guest.get(&[segment(1 << 20, 4096)], 4096);
    assert!(
        got.iter().all(|byte| *byte == 0),
        "data of the first server"
    );
}

/// Returns how many bytes a socket takes that nobody reads from.
fn socket_room() -> u64 {
    let (mut ours, _theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    ours.write(&vec![0; 8 << 20]).unwrap() as u64
}

/// Otherwise nothing would be in flight in the fence, and a guest that ends then would have its worker wait for it.
#[test]
fn an_early_answer_ends_no_op_of_a_connection_that_is_lost() {
    // The rest of it fits into a socket that is empty again.
    let len = (socket_room() * 3 / 2) & !511;
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("honest"), Export::able(SIZE));
    let (to, step) = channel();
    let (all_read, is_all_read) = channel();
    instead(
        &scratch.join("nbd"),
        scratch.join("honest"),
        ABLE,
        move |mut stream| {
            step.recv().unwrap();
            // The answer, and with it what ends the connection. Then there is room for the rest of the request.
            let lie = [simple(1 << 16, 5, &[]), vec![9; 64]].concat();
            stream.write_all(&lie).unwrap();
            stream.set_nonblocking(true).unwrap();
            while stream
                .read(&mut vec![0; 64 << 10])
                .is_ok_and(|count| count > 0)
            {}
            all_read.send(()).unwrap();
            let _ = step.recv();
        },
    );
    let bench = Bench::with(scratch, server, "&fence=2");
    let mut store = bench.store();
    nothing_ends(&mut store);
    store.push(op(PLAIN, 0, len, &[segment(0, len as u32)]), 1);
    nothing_ends(&mut store);
    to.send(()).unwrap();
    is_all_read.recv().unwrap();
    while bench.lost() == 0 {
        nothing_ends(&mut store);
    }
    assert_eq!(store.in_flight(), 1);
    assert_eq!(next_done(&mut store), (1, Ok(())));
}

/// A write that was flushed on another connection than it was answered on may be lost.
#[test]
fn a_durable_write_is_done_again_if_its_connection_is_lost_before_the_flush() {
    let export = Export {
        flags: 1 | 4,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "&fence=2");
    let mut store = bench.store();
    let is_first = std::sync::atomic::AtomicBool::new(true);
    bench.server.react(move |asked| {
        let is_flush = asked.kind == FLUSH;
        match is_flush && is_first.swap(false, std::sync::atomic::Ordering::SeqCst) {
            true => Reaction::Close(Vec::new()),
            false => Reaction::Honest,
        }
    });
    let memory = [segment(0, 512)];
    assert_eq!(run(&mut store, op(DURABLE, 0, 512, &memory)), Ok(()));
    let asked = bench.server.asked();
    let words: Vec<_> = asked
        .iter()
        .map(|asked| (asked.connection, asked.kind))
        .collect();
    // First what was answered, as for any write, and then the op itself.
    let again = [(1, WRITE), (1, WRITE), (1, FLUSH)];
    assert_eq!(words, [&[(0, WRITE), (0, FLUSH)], &again[..]].concat());
}

#[test]
fn the_time_for_a_connection_begins_after_the_fence() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=1&reconnect=4&fence=4");
    let mut store = bench.store();
    once(&bench, |_| Reaction::Dead(Vec::new()));
    let memory = [segment(0, 512)];
    assert_eq!(run(&mut store, op(PLAIN, 0, 512, &memory)), Ok(()));
}

#[test]
fn a_lost_connection_is_missing_from_the_beginning_of_its_fence() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=60&fence=5");
    let mut store = bench.store();
    once(&bench, |_| Reaction::Close(Vec::new()));
    store.push(op(PLAIN, 0, 512, &[segment(0, 512)]), 1);
    let counts = |state: cleave_nbd::NbdState| (state.connected, state.waiting);
    while bench.lost() == 0 {
        nothing_ends(&mut store);
    }
    assert_eq!(counts(bench.state()), (0, 1));
    assert_eq!(next_done(&mut store), (1, Ok(())));
    assert_eq!(counts(bench.state()), (1, 0));
}

/// The server was away for an instant each time.
#[test]
fn the_fence_of_a_later_loss_is_no_part_of_the_time_either() {
    unless_late(|| {
        let result = after_two_losses();
        ensure(result == (Ok(()), 2), || format!("{result:?}"))
    });
}

/// Returns the result of a request that two connections are lost for, and how many were lost.
fn after_two_losses() -> (Result<(), i32>, u64) {
    let bench = Bench::new(Export::able(SIZE), "&timeout=60&reconnect=2&fence=3");
    let mut store = bench.store();
    let losses = std::sync::atomic::AtomicU64::new(0);
    bench.server.react(
        move |_| match losses.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
            0 | 1 => Reaction::Close(Vec::new()),
            _ => Reaction::Honest,
        },
    );
    let memory = [segment(0, 512)];
    let result = run(&mut store, op(PLAIN, 0, 512, &memory));
    (result, bench.lost())
}

#[test]
fn requests_fail_in_time_after_the_end_of_the_servers_process() {
    let (bench, mut process) = Bench::with_process("&timeout=60&reconnect=1&fence=60");
    let mut store = bench.store();
    bench.server.react(|_| Reaction::Close(Vec::new()));
    nothing_ends(&mut store);
    bench.server.accept(false);
    let begun = Instant::now();
    store.push(op(PLAIN, 0, 512, &[segment(0, 512)]), 1);
    while bench.lost() == 0 {
        nothing_ends(&mut store);
    }
    process.end();
    assert_eq!(next_done(&mut store), (1, Err(libc::ENOTCONN)));
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(30), "{took:?}");
}

/// Linux aborts a connection whose window stays closed for TCP_USER_TIMEOUT, although the server's host answers each probe.
#[test]
fn a_server_that_reads_nothing_while_it_flushes_is_not_lost() {
    unless_late(|| {
        let lost = lost_while_nothing_is_read();
        ensure(lost == 0, || format!("{lost} connections were lost"))
    });
}

/// Returns the connections that were lost while a server flushed and read nothing.
fn lost_while_nothing_is_read() -> u64 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 128 << 10).unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        greet(&mut stream, ABLE);
        let mut request = [0; 28];
        while stream.read_exact(&mut request).is_ok() {
            let cookie = u64::from_be_bytes(request[8..16].try_into().unwrap());
            let len = u32::from_be_bytes(request[24..].try_into().unwrap());
            match u16::from(request[7]) {
                FLUSH => std::thread::sleep(Duration::from_millis(2500)),
                WRITE => stream.read_exact(&mut vec![0; len as usize]).unwrap(),
                _ => return,
            }
            stream.write_all(&simple(cookie, 0, &[])).unwrap();
        }
    });
    let uri = format!("nbd://{at}/?timeout=1&reconnect=1&fence=1");
    let disk = Arc::new(Disk::open(&uri.parse().unwrap(), &OpenOptions::default()).unwrap());
    let guest = Guest::new();
    let mut store = Uring::new(disk.clone(), guest.memory.clone(), 64, 4, 4).unwrap();
    store.push(op(SYNC, 0, 0, &[]), 0);
    let memory = [segment(0, 512 << 10)];
    (1..17).for_each(|number| store.push(op(PLAIN, 0, 512 << 10, &memory), number));
    let results = (0..17).map(|_| next_done(&mut store).1);
    let failed = results.filter(Result::is_err).count();
    let cleave_disk::Backing::Nbd(nbd) = disk.backing() else {
        panic!("another store");
    };
    let lost = nbd.state().lost;
    assert!(failed == 0 || lost > 0, "{failed} requests failed");
    lost
}

#[test]
fn requests_fail_in_time_although_the_server_lets_in_whom_it_turns_away() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=1&reconnect=2&fence=1");
    let mut store = bench.store();
    bench.server.react(|_| Reaction::Close(Vec::new()));
    let memory = [segment(0, 512)];
    let begun = Instant::now();
    store.push(op(PLAIN, 0, 512, &memory), 1);
    assert_eq!(next_done(&mut store), (1, Err(libc::ENOTCONN)));
    assert!(begun.elapsed() >= Duration::from_secs(2));
    let connections = bench.server.connections();
    assert!(connections < 20, "{connections}");
    // One that answers is used again.
    bench.server.react(|_| Reaction::Honest);
    let deadline = Instant::now() + Duration::from_secs(30);
    while run(&mut store, op(PLAIN, 0, 512, &memory)).is_err() {
        assert!(Instant::now() < deadline, "it never comes back");
        let pause = Some(Instant::now() + Duration::from_millis(20));
        store.enter(Wait::Until(pause)).unwrap();
        assert_eq!(store.reap(), None);
    }
}

#[test]
fn a_request_for_which_the_server_hangs_up_fails_in_time_although_others_are_answered() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=60&reconnect=5&fence=1");
    let mut store = bench.store();
    bench.server.react(|asked| match asked.offset {
        0 => Reaction::Close(Vec::new()),
        _ => Reaction::Honest,
    });
    let memory = [segment(0, 512)];
    let begun = Instant::now();
    // The other one comes first on each connection.
    store.push(op(GET, 4096, 512, &[segment(4096, 512)]), 2);
    store.push(op(PLAIN, 0, 512, &memory), 1);
    let mut answered = 0;
    let result = loop {
        match next_done(&mut store) {
            (1, result) => break result,
            other => assert_eq!(other, (2, Ok(()))),
        }
        answered += 1;
        assert!(begun.elapsed() < Duration::from_secs(20), "it never ends");
        store.push(op(GET, 4096, 512, &[segment(4096, 512)]), 2);
    };
    assert_eq!(result, Err(libc::ENOTCONN));
    assert!(answered > 2, "{answered}");
    let connections = bench.server.connections();
    assert!(connections < 50, "{connections}");
}

/// Returns the socket of the store's connection.
fn socket(store: &mut Uring) -> Option<Arc<std::os::fd::OwnedFd>> {
    let AnyStore::Nbd(nbd) = store.store() else {
        panic!("another store");
    };
    nbd.lines[0].link.as_ref().map(|link| link.socket.clone())
}

/// A network that is away must not bring a write when it is back, be it after the fence or shortly before its end: the guest may
/// have written something newer to the same place by then, or does so before the server has done what came late. Before Linux 6.13 a
/// ring keeps the socket for as long as it has other requests; here the test does.
#[test]
fn nothing_of_a_lost_connection_leaves_this_host() {
    for (fence, is_over) in [(1, true), (5, false)] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!(
            "nbd://{}/?timeout=1&reconnect=0&fence={fence}",
            listener.local_addr().unwrap()
        );
        let (to, step) = channel();
        let server = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            drop(listener);
            greet(&mut stream, ABLE);
            step.recv().unwrap();
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes);
            bytes.len() as u64
        });
        let disk = Arc::new(Disk::open(&uri.parse().unwrap(), &OpenOptions::default()).unwrap());
        let cleave_disk::Backing::Nbd(nbd) = disk.backing() else {
            panic!("another store");
        };
        let guest = Guest::new();
        let mut store = Uring::new(disk.clone(), guest.memory.clone(), 64, 4, 4).unwrap();
        let kept = loop {
            nothing_ends(&mut store);
            if let Some(socket) = socket(&mut store) {
                break socket;
            }
        };
        let memory = [segment(0, SIZE as u32)];
        store.push(op(PLAIN, 0, SIZE, &memory), 1);
        let failed = (1, Err(libc::ENOTCONN));
        if is_over {
            assert_eq!(next_done(&mut store), failed);
        } else {
            while nbd.state().lost == 0 || !is_reset(&mut store) {
                nothing_ends(&mut store);
            }
        }
        let sent = nbd.state().sent_bytes;
        to.send(()).unwrap();
        let got = server.join().unwrap();
        assert!(got < sent, "fence {fence}: {got} of {sent} bytes arrived");
        if !is_over {
            assert_eq!(next_done(&mut store), failed);
        }
        drop(kept);
    }
}

/// Returns true if the socket of the store's lost connection was reset, which the thread does that connects.
fn is_reset(store: &mut Uring) -> bool {
    let AnyStore::Nbd(nbd) = store.store() else {
        panic!("another store");
    };
    nbd.lines[0].link.is_none() && nbd.lines[0].disconnect.is_none()
}

/// nbdkit does that when it is told to end.
#[test]
fn a_request_that_a_server_refuses_because_it_shuts_down_needs_no_fence() {
    let refused: fn(u64) -> Vec<u8> = |cookie| simple(cookie, 108, &[]);
    let reactions: [fn(Vec<u8>) -> Reaction; 2] = [Reaction::Close, Reaction::Dead];
    for react in reactions {
        // Longer than an honest server is late: it would have a fence.
        let bench = Bench::new(Export::able(SIZE), "&timeout=3&fence=600");
        let mut store = bench.store();
        once(&bench, move |asked| react(refused(asked.cookie)));
        let memory = [segment(0, 512)];
        assert_eq!(run(&mut store, op(PLAIN, 0, 512, &memory)), Ok(()));
        let asked = bench.server.asked();
        let connections: Vec<u64> = asked.iter().map(|asked| asked.connection).collect();
        assert_eq!((connections, bench.lost()), (vec![0, 1], 1));
    }
    // It refuses one for ever, and goes on with the others.
    let bench = Bench::new(Export::able(SIZE), "&timeout=3&fence=600");
    let mut store = bench.store();
    bench
        .server
        .react(move |asked| match (asked.kind, asked.connection) {
            (WRITE, 0) => Reaction::Send(refused(asked.cookie)),
            _ => Reaction::Honest,
        });
    store.push(op(PLAIN, 0, 512, &[segment(0, 512)]), 1);
    loop {
        store.push(op(GET, 4096, 512, &[segment(4096, 512)]), 2);
        match next_done(&mut store) {
            (1, result) => break assert_eq!(result, Ok(())),
            other => assert_eq!(other, (2, Ok(()))),
        }
        let pause = Some(Instant::now() + Duration::from_millis(50));
        store.enter(Wait::Until(pause)).unwrap();
        assert!(bench.server.asked().len() < 1000, "it never ends");
    }
    while store.in_flight() > 0 {
        assert_eq!(next_done(&mut store).1, Ok(()));
    }
}

/// Whoever serves the guest after that would have its writes replaced by old ones.
#[test]
fn a_disk_that_is_given_up_sends_nothing_more_and_waits_for_nothing() {
    let bench = Bench::new(Export::able(SIZE), "&reconnect=600&fence=1");
    let mut store = bench.store();
    bench.server.accept(false);
    bench.server.hang_up();
    let memory = [segment(0, 512)];
    store.push(op(PLAIN, 0, 512, &memory), 1);
    nothing_ends(&mut store);
    bench.disk.abandon();
    assert_eq!(next_done(&mut store), (1, Err(libc::ENOTCONN)));
    assert_eq!(
        run(&mut store, op(PLAIN, 0, 512, &memory)),
        Err(libc::ENOTCONN)
    );
    // With a server that is slow: what waits to be sent, and the further parts of an op.
    let bench = Bench::new(Export::able(SIZE), QUICK);
    let mut store = bench.store();
    let is_held = Arc::new(AtomicBool::new(true));
    let held = is_held.clone();
    bench.server.react(move |_| {
        while held.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Reaction::Honest
    });
    let large = [segment(0, 960 << 10)];
    store.push(op(ZERO, 0, SIZE, &[]), 0);
    (1..5).for_each(|number| store.push(op(PLAIN, 0, 960 << 10, &large), number));
    nothing_ends(&mut store);
    bench.disk.abandon();
    is_held.store(false, Ordering::SeqCst);
    while store.in_flight() > 0 {
        let _ = next_done(&mut store);
    }
    let asked = bench.server.asked();
    assert!(asked.len() <= 2, "{}", asked.len());
}

/// The server uploads for longer than a request may be unanswered.
#[test]
fn requests_that_wait_for_a_slow_server_are_not_its_to_answer() {
    unless_late(|| {
        let lost = lost_by_a_slow_server();
        ensure(lost == 0, || format!("{lost} connections were lost"))
    });
}

/// Returns the connections that were lost to a server that is slow and not silent.
fn lost_by_a_slow_server() -> u64 {
    let bench = Bench::new(Export::able(SIZE), QUICK);
    let mut store = bench.store();
    bench
        .server
        .react(|_| Reaction::After(Duration::from_millis(200)));
    let memory = [segment(0, 512 << 10)];
    for number in 0..40 {
        let offset = number % 8 * (512 << 10);
        store.push(op(PLAIN, offset, 512 << 10, &memory), number);
    }
    for _ in 0..40 {
        assert_eq!(next_done(&mut store).1, Ok(()));
    }
    bench.lost()
}

#[test]
fn a_flush_without_a_store_uses_a_connection_of_its_own() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=5");
    bench.disk.sync().unwrap();
    bench.server.hang_up();
    bench.disk.sync().unwrap();
    let asked = bench.server.asked();
    let words: Vec<_> = asked
        .iter()
        .map(|asked| (asked.connection, asked.kind))
        .collect();
    assert_eq!(words, [(0, FLUSH), (1, FLUSH)]);
}

fn client(disk: &Disk) -> &cleave_nbd::NbdClient {
    match disk.backing() {
        cleave_disk::Backing::Nbd(nbd) => nbd,
        _ => panic!("another store"),
    }
}

/// A store that begins meanwhile could be told that all is well.
#[test]
fn nobody_has_the_turn_to_flush_before_a_failure_without_a_store_is_recorded() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=5");
    bench.server.react(|asked| match asked.kind {
        FLUSH => Reaction::Send(simple(asked.cookie, 5, &[])),
        _ => Reaction::Honest,
    });
    let nbd = client(&bench.disk);
    let (synced, turn) = nbd.sync_at_rest().unwrap();
    assert_eq!(synced.unwrap_err().raw_os_error(), Some(libc::EIO));
    let port = nbd.ports().unwrap().pop().unwrap();
    assert!(port.take_turn().is_none());
    drop(turn);
    assert!(port.take_turn().is_some());
    bench.disk.sync().unwrap_err();
    assert!(bench.disk.sync_failed());
}

/// The server may have told of lost data in that answer alone, so a flush of the store cannot vouch for it.
#[test]
fn a_flush_without_a_store_that_is_not_answered_has_a_store_send_its_changes_again() {
    let export = Export {
        flags: ABLE | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "&timeout=5&fence=1");
    let mut store = bench.store();
    let memory = [segment(0, 4096)];
    assert_eq!(run(&mut store, op(PLAIN, 0, 4096, &memory)), Ok(()));
    once(&bench, |_| Reaction::Close(Vec::new()));
    client(&bench.disk).sync_at_rest().unwrap_err();
    assert_eq!(run(&mut store, op(SYNC, 0, 0, &[])), Ok(()));
    let state = bench.state();
    assert!(state.replayed_bytes >= 4096, "{state:?}");
    assert_eq!((state.lossy, state.unflushed_bytes), (1, 0));
}

#[test]
fn a_server_that_shuts_down_has_not_failed_a_flush() {
    let replies: [fn(u64) -> Vec<u8>; 2] = [
        |cookie| simple(cookie, 108, &[]),
        |cookie| chunk(cookie, 1, 0x8001, b"\0\0\0\x6c\0\x03end"),
    ];
    for reply in replies {
        let bench = Bench::new(Export::able(SIZE), "&timeout=5");
        bench
            .server
            .react(move |asked| Reaction::Close(reply(asked.cookie)));
        bench.disk.sync().unwrap_err();
        assert!(!bench.disk.sync_failed());
        bench.server.react(|_| Reaction::Honest);
        bench.disk.sync().unwrap();
    }
}

/// Most connections of a guest that does little have answered nothing yet.
#[test]
fn many_connections_that_are_lost_together_are_made_again_as_soon_as_one() {
    unless_late(|| {
        let results = after_losses_of_all();
        ensure(results == [Ok(()); 2], || format!("{results:?}"))
    });
}

/// Returns the results of two requests for which all connections of a store were lost.
fn after_losses_of_all() -> [Result<(), i32>; 2] {
    let export = Export {
        flags: ABLE | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "&connections=8&reconnect=1&fence=1");
    let mut store = bench.store();
    let memory = [segment(0, 512)];
    assert_eq!(run(&mut store, op(PLAIN, 0, 512, &memory)), Ok(()));
    while bench.state().connected < 8 {
        nothing_ends(&mut store);
    }
    [(); 2].map(|()| {
        bench.server.accept(false);
        bench.server.hang_up();
        store.push(op(PLAIN, 0, 512, &memory), 1);
        nothing_ends(&mut store);
        bench.server.accept(true);
        let (_, result) = next_done(&mut store);
        while bench.state().connected < 8 {
            nothing_ends(&mut store);
        }
        result
    })
}

/// The other connection may have had its turn in the lap in which the request comes to it.
#[test]
fn a_request_of_a_lost_connection_goes_to_the_other_at_once() {
    // Without flushes nothing has to be sent again, so the other connection stays.
    let export = Export {
        flags: 1 | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "&connections=2&timeout=600&reconnect=600");
    let mut store = bench.store();
    for lost in 1..5 {
        bench.server.accept(true);
        let deadline = Instant::now() + Duration::from_secs(30);
        while bench.state().waiting > 0 {
            assert!(Instant::now() < deadline, "{:?}", bench.state());
            nothing_ends(&mut store);
        }
        bench.server.accept(false);
        let is_first = AtomicBool::new(true);
        bench.server.react(move |asked| {
            match asked.offset == 4096 && is_first.swap(false, Ordering::SeqCst) {
                true => Reaction::Close(Vec::new()),
                false => Reaction::Honest,
            }
        });
        for number in 0..2 {
            let memory = [segment(number * 4096, 4096)];
            store.push(op(GET, number * 4096, 4096, &memory), number);
        }
        for _ in 0..2 {
            assert_eq!(next_done(&mut store).1, Ok(()));
        }
        assert_eq!(bench.lost(), lost);
    }
}

#[test]
fn a_further_connection_that_promises_less_than_the_first_is_not_used() {
    let scratch = Scratch::in_memory();
    let less = Export {
        flags: 1 | MULTI,
        ..Export::able(SIZE)
    };
    let server = NbdServer::start(&scratch.join("less"), less);
    let (to, flushed) = channel();
    instead(
        &scratch.join("nbd"),
        scratch.join("less"),
        ABLE | MULTI,
        move |mut stream| {
            let mut request = [0; 28];
            while stream.read_exact(&mut request).is_ok() {
                let cookie = u64::from_be_bytes(request[8..16].try_into().unwrap());
                to.send(request[7]).unwrap();
                stream.write_all(&simple(cookie, 0, &[])).unwrap();
            }
        },
    );
    let bench = Bench::with(scratch, server, "&connections=2");
    let mut store = bench.store();
    assert_eq!(run(&mut store, op(SYNC, 0, 0, &[])), Ok(()));
    assert_eq!(flushed.try_recv(), Ok(FLUSH as u8));
    assert_eq!(bench.server.asked(), []);
}

#[test]
fn a_store_that_closes_does_not_go_on_with_the_parts_of_an_op() {
    let export = Export {
        flags: 1 | 4,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "");
    let mut store = bench.store();
    nothing_ends(&mut store);
    bench
        .server
        .react(|_| Reaction::After(Duration::from_secs(3)));
    store.push(op(ZERO, 0, SIZE, &[]), 1);
    while bench.server.asked().is_empty() {
        nothing_ends(&mut store);
    }
    drop(store);
    let asked = bench.server.asked();
    let kinds: Vec<u16> = asked.iter().map(|asked| asked.kind).collect();
    assert_eq!(kinds, [WRITE]);
}
