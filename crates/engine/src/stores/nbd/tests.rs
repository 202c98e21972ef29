//! The store against servers that behave, that vanish, and that attack. Each test is a guest of one worker, without the program.

mod kept;
mod loss;
mod portions;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use cleave_disk::{Disk, OpenOptions};
use cleave_tests::nbd::{
    ABLE, Asked, Export, FLUSH, MULTI, NbdServer, READ, Reaction, WRITE, chunk, chunk_of, data_at,
    simple,
};
use cleave_tests::{Scratch, ensure, wait_until};

use crate::rig::{
    DURABLE, Event, Guest, Load, REGION, UNMAP, Uring, WRITE as PLAIN, ZERO, check_against_model,
    next_done, op, run, seed, segment,
};
use crate::{LAP_BYTES_MAX, Store as _, Wait};

const SYNC: cleave_blk::OpKind = cleave_blk::OpKind::Sync;
const GET: cleave_blk::OpKind = cleave_blk::OpKind::Read;
const SIZE: u64 = 4 << 20;
/// Short times, so that a test sees them pass.
const QUICK: &str = "&timeout=1&reconnect=20&fence=2";

struct Bench {
    _scratch: Scratch,
    server: NbdServer,
    disk: Arc<Disk>,
    guest: Guest,
}

impl Bench {
    fn new(export: Export, options: &str) -> Bench {
        let start = || {
            let scratch = Scratch::in_memory();
            let server = NbdServer::start(&scratch.join("nbd"), export);
            Bench::with(scratch, server, options)
        };
        // A server that is late lets in fewer clients than are wanted.
        let is_whole = |bench: &Bench| export.flags & MULTI == 0 || bench.has_all_connections();
        let mut made = (0..3).map(|_| start());
        made.find(is_whole).expect("too few connections")
    }

    fn has_all_connections(&self) -> bool {
        match self.disk.backing() {
            cleave_disk::Backing::Nbd(nbd) => nbd.connections() == nbd.spec().connections,
            _ => panic!("another store"),
        }
    }

    /// For the server at the path `nbd` in the folder; `server` is behind it.
    fn with(scratch: Scratch, server: NbdServer, options: &str) -> Bench {
        let path = scratch.join("nbd");
        let uri = format!("nbd+unix:///?socket={}{options}", path.display());
        let disk = Disk::open(&uri.parse().unwrap(), &OpenOptions::default()).unwrap();
        Bench {
            _scratch: scratch,
            server,
            disk: Arc::new(disk),
            guest: Guest::new(),
        }
    }

    /// For a server that belongs to a process of its own.
    fn with_process(options: &str) -> (Bench, Process) {
        let scratch = Scratch::in_memory();
        let server = NbdServer::start(&scratch.join("nbd"), Export::able(SIZE));
        let process = Process::listening(&server);
        (Bench::with(scratch, server, options), process)
    }

    fn store(&self) -> Uring {
        Uring::new(self.disk.clone(), self.guest.memory.clone(), 64, 4, 4).unwrap()
    }

    /// On a thread that it shares with other disks.
    fn shared(&self) -> Uring {
        Uring::shared(self.disk.clone(), self.guest.memory.clone(), 64).unwrap()
    }

    fn lost(&self) -> u64 {
        self.state().lost
    }

    fn state(&self) -> cleave_nbd::NbdState {
        match self.disk.backing() {
            cleave_disk::Backing::Nbd(nbd) => nbd.state(),
            _ => panic!("another store"),
        }
    }
}

/// A process that counts as a server's, because it was the last to listen. The server itself is in this one.
struct Process(std::process::Child);

impl Process {
    fn listening(server: &NbdServer) -> Process {
        use std::os::fd::AsRawFd as _;
        use std::os::unix::process::CommandExt as _;
        let socket = server.listener().as_raw_fd();
        let mut command = std::process::Command::new("sleep");
        command.arg("600");
        // SAFETY: `listen` may be called between fork and exec, and the child has the descriptor by then.
        let command = unsafe {
            command.pre_exec(move || match libc::listen(socket, 64) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            })
        };
        Process(command.spawn().unwrap())
    }

    fn end(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const MANY: Load = Load {
    ops: 3000,
    depth: 32,
    sectors_max: 300,
    kinds: &[GET, GET, GET, PLAIN, PLAIN, DURABLE, ZERO, UNMAP, SYNC],
};

#[test]
fn each_byte_is_right_whatever_the_server_can() {
    let able = Export::able(SIZE);
    let bare = Export {
        flags: 1,
        blocks: None,
        structured: None,
        ..able
    };
    let small = Export {
        blocks: Some([512, 512, 8192]),
        structured: Some(3000),
        ..able
    };
    let whole = Export {
        structured: None,
        ..able
    };
    let multi = Export {
        flags: ABLE | MULTI,
        ..able
    };
    let rows = [
        (able, ""),
        (bare, ""),
        (small, ""),
        (whole, ""),
        (multi, "&connections=4"),
    ];
    for (export, options) in rows {
        let bench = Bench::new(export, options);
        let mut stores = [bench.store()];
        check_against_model(&mut stores, &bench.guest, &bench.disk, &MANY, seed());
        if export.flags & MULTI != 0 {
            assert_eq!(bench.server.connections(), 4);
        }
        assert_eq!(bench.lost(), 0, "{export:?}");
    }
}

/// An export whose requests may be longer than what a shared thread does in a lap.
const LONG: Export = Export {
    size: SIZE,
    flags: ABLE,
    blocks: Some([1, 4096, 32 << 20]),
    structured: Some(SIZE as usize),
};

#[test]
fn a_hole_is_zeroed_lap_by_lap_on_a_shared_thread() {
    let bench = Bench::new(LONG, "");
    let memory = [segment(0, SIZE as u32)];
    bench.guest.put(&memory, &vec![1; SIZE as usize]);
    let mut store = bench.shared();
    // The answer to each is one chunk without data, and all come at once.
    for token in 0..4 {
        store.push(op(GET, 0, SIZE, &memory), token);
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut zeroed = 0;
    let is_over = |event: Option<Event>| matches!(event, Some(Event::Done { result: Ok(()), .. }));
    let mut ended = usize::from(is_over(store.reap()));
    while ended < 4 {
        assert!(Instant::now() < deadline, "{ended} of 4");
        store.enter(Wait::Until(Some(deadline))).unwrap();
        let bytes = bench.guest.get(&memory, SIZE as usize);
        let now = bytes.iter().filter(|byte| **byte == 0).count() as u64;
        assert!(now - zeroed <= LAP_BYTES_MAX, "{} at once", now - zeroed);
        zeroed = now;
        ended += usize::from(is_over(store.reap()));
    }
    assert_eq!(zeroed, SIZE);
}

/// Their data may go to pages that nobody has touched.
#[test]
fn answers_that_take_long_are_taken_in_over_several_laps_of_a_shared_thread() {
    const READS: usize = 8;
    let bench = Bench::new(LONG, "");
    let mut store = bench.shared();
    match store.store() {
        crate::AnyStore::Nbd(nbd) => nbd.lap.hurry(),
        _ => panic!("another store"),
    }
    let held = std::sync::Mutex::new(Vec::new());
    bench.server.react(move |asked| {
        let mut held = held.lock().unwrap();
        held.push(chunk(asked.cookie, 1, 1, &data_at(asked.offset, &[7; 512])));
        match held.len() {
            READS => Reaction::Send(held.concat()),
            _ => Reaction::Send(Vec::new()),
        }
    });
    let memory = [segment(0, 512)];
    (0..READS as u64).for_each(|token| store.push(op(GET, token * 512, 512, &memory), token));
    let (mut laps, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
    while laps.iter().sum::<usize>() < READS {
        assert!(Instant::now() < deadline, "{laps:?}");
        store.enter(Wait::Until(Some(deadline))).unwrap();
        let mut ended = 0;
        while let Some(event) = store.reap() {
            assert!(matches!(event, Event::Done { result: Ok(()), .. }));
            ended += 1;
        }
        laps.push(ended);
    }
    assert!(laps.iter().all(|ended| *ended <= 1), "{laps:?}");
    assert_eq!(bench.guest.get(&memory, 512), [7; 512]);
}

/// Reads alternate between two connections, and each connection is sent all its answers at once, which take a hundred laps to write.
#[test]
fn a_connection_with_much_to_take_in_does_not_keep_another_waiting() {
    const READS: usize = 8;
    let export = Export {
        flags: ABLE | MULTI,
        ..LONG
    };
    let bench = Bench::new(export, "&connections=2");
    let mut store = bench.shared();
    while bench.state().waiting > 0 {
        nothing_ends(&mut store);
    }
    let held = std::sync::Mutex::new([Vec::new(), Vec::new()]);
    bench.server.react(move |asked| {
        let own = asked.connection as usize;
        let hole = data_at(0, &(SIZE as u32).to_be_bytes());
        let mut held = held.lock().unwrap();
        held[own].push(chunk(asked.cookie, 1, 2, &hole));
        match held[own].len() {
            READS => Reaction::Send(held[own].concat()),
            _ => Reaction::Send(Vec::new()),
        }
    });
    let memory = [segment(0, SIZE as u32)];
    let all = 2 * READS as u64;
    (0..all).for_each(|token| store.push(op(GET, 0, SIZE, &memory), token));
    store.enter(Wait::No).unwrap();
    // The store takes nothing in before both have all.
    let sent = || bench.server.sent();
    assert!(wait_until(|| sent() == all), "{}", sent());
    let ended: Vec<u64> = (0..all).map(|_| next_done(&mut store).0).collect();
    let first = ended.iter().take(READS);
    let of_one = first.filter(|token| *token % 2 == 0).count();
    assert!(of_one > 0 && of_one < READS, "{ended:?}");
}

#[test]
fn each_byte_is_right_on_a_shared_thread_and_no_change_is_long() {
    let bench = Bench::new(LONG, "");
    let long = Load {
        ops: 200,
        depth: 8,
        sectors_max: 4000,
        ..MANY
    };
    let mut stores = [bench.shared()];
    check_against_model(&mut stores, &bench.guest, &bench.disk, &long, seed());
    let most = |kind| {
        let asked = bench.server.asked();
        let lengths = asked.iter().filter(|asked| asked.kind == kind);
        lengths.map(|asked| asked.len).max()
    };
    assert_eq!(most(WRITE), Some(1 << 20));
    assert!(most(READ) > Some(1 << 20));
    assert_eq!(bench.lost(), 0);
}

#[test]
fn a_store_that_ends_flushes_and_takes_leave() {
    let bench = Bench::new(Export::able(SIZE), "");
    for turn in 1..4 {
        let mut store = bench.store();
        let memory = [segment(0, 512)];
        assert_eq!(run(&mut store, op(PLAIN, 0, 512, &memory)), Ok(()));
        assert_eq!(run(&mut store, op(GET, 0, 512, &memory)), Ok(()));
        store.store().prepare_close();
        kept::end_all(&mut store);
        drop(store);
        let last = bench.server.asked().pop().map(|asked| asked.kind);
        assert_eq!((last, bench.state().unflushed_bytes), (Some(FLUSH), 0));
        let deadline = Instant::now() + Duration::from_secs(20);
        while bench.server.farewells() < turn {
            assert!(Instant::now() < deadline, "it does not take leave");
            std::thread::yield_now();
        }
    }
    assert_eq!((bench.server.connections(), bench.lost()), (3, 0));
}

#[test]
fn several_workers_with_several_connections_see_each_others_writes() {
    let export = Export {
        flags: ABLE | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "&connections=2");
    let mut stores = [bench.store(), bench.store()];
    check_against_model(&mut stores, &bench.guest, &bench.disk, &MANY, seed());
    assert_eq!(bench.server.connections(), 4);
}

#[test]
fn answers_in_any_order_go_to_their_requests() {
    for structured in [None, Some(1000)] {
        let export = Export {
            structured,
            ..Export::able(SIZE)
        };
        let bench = Bench::new(export, "");
        bench.server.fill(|at| (at / 512 * 31 + at) as u8);
        bench.server.react(|_| Reaction::Later(8));
        let mut store = bench.store();
        for number in 0..8 {
            let memory = [segment(number * 8192, 4096)];
            store.push(op(GET, number * 4096, 4096, &memory), number);
        }
        let order: Vec<u64> = (0..8).map(|_| next_done(&mut store).0).collect();
        assert_eq!(order, [7, 6, 5, 4, 3, 2, 1, 0]);
        let bytes = bench.server.bytes();
        for number in 0..8_u64 {
            let got = bench.guest.get(&[segment(number * 8192, 4096)], 4096);
            assert_eq!(got, bytes[number as usize * 4096..][..4096]);
        }
    }
}

#[test]
fn a_durable_write_is_flushed_or_has_fua_and_a_failed_flush_stays_failed() {
    for (flags, expected) in [
        (ABLE, vec![(WRITE, 1)]),
        (1 | 4, vec![(WRITE, 0), (FLUSH, 0)]),
    ] {
        let export = Export {
            flags,
            ..Export::able(SIZE)
        };
        let bench = Bench::new(export, "");
        let mut store = bench.store();
        assert_eq!(
            run(&mut store, op(DURABLE, 0, 512, &[segment(0, 512)])),
            Ok(())
        );
        let asked = bench.server.asked();
        let words: Vec<_> = asked
            .iter()
            .map(|asked| (asked.kind, asked.flags))
            .collect();
        assert_eq!(words, expected);
        bench.server.react(|asked| match asked.kind {
            FLUSH => Reaction::Send(simple(asked.cookie, 5, &[])),
            _ => Reaction::Honest,
        });
        assert_eq!(run(&mut store, op(SYNC, 0, 0, &[])), Err(libc::EIO));
        bench.server.react(|_| Reaction::Honest);
        assert_eq!(run(&mut store, op(SYNC, 0, 0, &[])), Err(libc::EIO));
    }
}

#[test]
fn errors_of_the_server_become_errnos() {
    let bench = Bench::new(Export::able(SIZE), "");
    let mut store = bench.store();
    for (error, errno) in [
        (28, libc::ENOSPC),
        (1, libc::EROFS),
        (12, libc::EIO),
        (22, libc::EINVAL),
    ] {
        bench.server.react(move |asked| match asked.kind {
            READ => {
                let mut content = u32::to_be_bytes(error).to_vec();
                content.extend(b"\0\x03why");
                Reaction::Send(chunk(asked.cookie, 1, 0x8001, &content))
            }
            _ => Reaction::Send(simple(asked.cookie, error, &[])),
        });
        let memory = [segment(0, 4096)];
        assert_eq!(run(&mut store, op(PLAIN, 0, 4096, &memory)), Err(errno));
        assert_eq!(run(&mut store, op(GET, 0, 4096, &memory)), Err(errno));
    }
    assert_eq!(bench.lost(), 0);
}

/// Runs the store for a moment in which no op ends.
fn nothing_ends(store: &mut Uring) {
    let end = Instant::now() + Duration::from_millis(200);
    while Instant::now() < end {
        store.enter(Wait::Until(Some(end))).unwrap();
        assert_eq!(store.reap(), None);
    }
}

/// Repeats an attempt that failed while the machine was so late that a server may have seemed silent.
fn unless_late(attempt: impl Fn() -> Result<(), String>) {
    let name = std::thread::current().name().unwrap().replace("::", "-");
    cleave_tests::unless_late(&name, Duration::from_millis(100), |_| attempt()).unwrap();
}

/// A request after which the server reacts once in this way, and behaves from then on.
fn once(bench: &Bench, react: impl Fn(&Asked) -> Reaction + Send + Sync + 'static) {
    let is_first = std::sync::atomic::AtomicBool::new(true);
    bench.server.react(move |asked| {
        match is_first.swap(false, std::sync::atomic::Ordering::SeqCst) {
            true => react(asked),
            false => Reaction::Honest,
        }
    });
}

#[test]
fn requests_of_a_lost_connection_are_done_again_on_the_next() {
    let bench = Bench::new(Export::able(SIZE), "&fence=1");
    let mut store = bench.store();
    for turn in 0..5 {
        once(&bench, |_| Reaction::Close(Vec::new()));
        bench.guest.put(&[segment(0, 4096)], &[turn + 1; 4096]);
        for number in 0..4 {
            store.push(op(PLAIN, number * 4096, 4096, &[segment(0, 4096)]), number);
        }
        for _ in 0..4 {
            assert_eq!(next_done(&mut store).1, Ok(()));
        }
        assert!(
            bench.server.bytes()[..16384]
                .iter()
                .all(|byte| *byte == turn + 1)
        );
    }
    assert_eq!(bench.lost(), 5);
}

#[test]
fn nothing_is_sent_again_to_a_server_that_is_silent_before_the_fence_is_over() {
    // (the server closes its side when it sees ours closed, the op needs a fence), and the least time until it is done again.
    // qemu-nbd closes at once, while a slow disk still has writes of that connection. A read that waited for a fence of a minute
    // would not complete in the time of the test.
    let second = Duration::from_secs(1);
    // A server that closes first may do them later all the same, as long as its process is there.
    let none = Duration::ZERO;
    let rows: [(fn() -> Reaction, _, _, _); 5] = [
        (|| Reaction::Freeze(Vec::new()), PLAIN, QUICK, 3 * second),
        (|| Reaction::Dead(Vec::new()), PLAIN, QUICK, 3 * second),
        (
            || Reaction::Dead(Vec::new()),
            GET,
            "&timeout=1&fence=600",
            second,
        ),
        (
            || Reaction::Close(Vec::new()),
            PLAIN,
            "&fence=2",
            2 * second,
        ),
        (|| Reaction::Close(Vec::new()), GET, "&fence=600", none),
    ];
    for (react, kind, options, least) in rows {
        let bench = Bench::new(Export::able(SIZE), options);
        let mut store = bench.store();
        once(&bench, move |_| react());
        let begun = Instant::now();
        assert_eq!(
            run(&mut store, op(kind, 0, 4096, &[segment(0, 4096)])),
            Ok(())
        );
        let took = begun.elapsed();
        assert!(took >= least, "{:?} {kind:?}: {took:?}", react());
        let connections: Vec<u64> = bench
            .server
            .asked()
            .iter()
            .map(|asked| asked.connection)
            .collect();
        // A server that is late is silent once more. On no connection it is asked twice.
        let each_once = (0..connections.len() as u64).collect::<Vec<_>>();
        assert_eq!(connections, each_once);
        assert!(connections.len() > 1);
    }
}

#[test]
fn an_error_is_not_reported_before_the_fence_either() {
    let bench = Bench::new(Export::able(SIZE), "&timeout=1&reconnect=0&fence=2");
    let mut store = bench.store();
    bench.server.react(|_| Reaction::Dead(Vec::new()));
    let begun = Instant::now();
    store.push(op(PLAIN, 0, 512, &[segment(0, 512)]), 1);
    bench.server.accept(false);
    assert_eq!(next_done(&mut store), (1, Err(libc::ENOTCONN)));
    assert!(begun.elapsed() >= Duration::from_secs(3));
}

#[test]
fn requests_fail_when_the_server_stays_away_and_work_when_it_is_back() {
    let bench = Bench::new(Export::able(SIZE), "&reconnect=1&fence=1");
    let mut store = bench.store();
    let memory = [segment(0, 512)];
    assert_eq!(run(&mut store, op(PLAIN, 0, 512, &memory)), Ok(()));
    bench.server.accept(false);
    bench.server.hang_up();
    let begun = Instant::now();
    assert_eq!(
        run(&mut store, op(GET, 0, 512, &memory)),
        Err(libc::ENOTCONN)
    );
    assert!(begun.elapsed() >= Duration::from_millis(900));
    // From now on at once, unless the machine is late.
    let fails_at_once = |_| {
        let again = Instant::now();
        assert_eq!(
            run(&mut store, op(GET, 0, 512, &memory)),
            Err(libc::ENOTCONN)
        );
        again.elapsed() < Duration::from_millis(900)
    };
    assert!((0..10).any(fails_at_once));
    assert!(store.store().came_back(), "the first connection");
    assert!(!store.store().came_back());
    bench.server.accept(true);
    let deadline = Instant::now() + Duration::from_secs(30);
    while !store.store().came_back() {
        assert!(Instant::now() < deadline, "it never comes back");
        store.enter(Wait::Until(Some(deadline))).unwrap();
        assert_eq!(store.reap(), None);
    }
    assert_eq!(run(&mut store, op(GET, 0, 512, &memory)), Ok(()));
    assert_eq!(bench.lost(), 1);
}

#[test]
fn an_export_that_has_become_less_is_not_used_and_a_larger_one_is_noticed() {
    let bench = Bench::new(Export::able(SIZE), QUICK);
    let mut store = bench.store();
    let memory = [segment(0, 512)];
    bench
        .server
        .export(|export| export.flags |= cleave_tests::nbd::READ_ONLY);
    bench.server.hang_up();
    store.push(op(PLAIN, 0, 512, &memory), 1);
    let pause = Instant::now() + Duration::from_millis(500);
    while Instant::now() < pause {
        store.enter(Wait::Until(Some(pause))).unwrap();
        assert_eq!(store.reap(), None);
    }
    bench.server.export(|export| {
        export.flags = ABLE;
        export.size = 2 * SIZE;
    });
    assert_eq!(next_done(&mut store), (1, Ok(())));
    assert_eq!(
        bench.disk.refresh().unwrap(),
        cleave_disk::Resized::Grown(2 * SIZE)
    );
    assert_eq!(run(&mut store, op(PLAIN, SIZE, 512, &memory)), Ok(()));
}

/// qemu-nbd that is started again without `--shared`.
#[test]
fn a_server_that_permits_one_connection_only_now_is_used_where_there_is_one() {
    let export = Export {
        flags: ABLE | MULTI,
        ..Export::able(SIZE)
    };
    let bench = Bench::new(export, "&reconnect=15&fence=1");
    let mut store = bench.store();
    let memory = [segment(0, 512)];
    assert_eq!(run(&mut store, op(PLAIN, 0, 512, &memory)), Ok(()));
    bench.server.export(|export| export.flags = ABLE);
    bench.server.hang_up();
    assert_eq!(run(&mut store, op(PLAIN, 0, 512, &memory)), Ok(()));
}

/// An attack: what the server sends in answer to a read of 4 KiB at 8 KiB.
type Attack = fn(u64) -> Vec<u8>;

/// Lies about structured replies.
const STRUCTURED: [(&str, Attack); 17] = [
    ("another magic", |_| vec![0xff; 64]),
    ("another cookie", |c| simple(c ^ 1 << 40, 0, &[])),
    ("another index", |c| chunk(c ^ 1, 1, 0, &[])),
    ("an index beyond the table", |c| {
        chunk(c | 0xffff, 1, 0, &[])
    }),
    ("no data", |c| chunk(c, 1, 0, &[])),
    ("no structure", |c| simple(c, 0, &[1; 4096])),
    ("less data", |c| chunk(c, 1, 1, &data_at(8192, &[1; 4095]))),
    ("more data", |c| chunk(c, 1, 1, &data_at(8192, &[1; 4097]))),
    ("data before", |c| {
        chunk(c, 1, 1, &data_at(8191, &[1; 4096]))
    }),
    ("data at the end of the world", |c| {
        chunk(c, 1, 1, &data_at(u64::MAX, &[1; 4096]))
    }),
    ("data behind", |c| chunk(c, 1, 1, &data_at(12288, &[1; 1]))),
    ("data twice", |c| {
        let data = data_at(8192, &[1; 4096]);
        [chunk(c, 0, 1, &data), chunk(c, 1, 1, &data)].concat()
    }),
    ("a huge hole", |c| {
        chunk(c, 1, 2, &data_at(8192, &[0xff; 4]))
    }),
    ("an empty hole", |c| chunk(c, 1, 2, &data_at(8192, &[0; 4]))),
    ("a length that lies", |c| {
        chunk_of(c, 1, 1, u32::MAX, &[0; 4000])
    }),
    ("an error with a long message", |c| {
        chunk_of(c, 1, 0x8001, u32::MAX, &[0; 4000])
    }),
    ("the answer twice", |c| {
        let reply = chunk(c, 1, 1, &data_at(8192, &[1; 4096]));
        [reply.clone(), reply].concat()
    }),
];

/// Lies about simple replies.
const SIMPLE: [(&str, Attack); 4] = [
    ("a structured reply", |c| {
        chunk(c, 1, 1, &data_at(8192, &[1; 4096]))
    }),
    ("another cookie", |c| simple(c ^ 1 << 16, 0, &[1; 4096])),
    ("answers without end", |c| simple(c, 5, &[]).repeat(500)),
    ("the answer and rubbish", |c| {
        let mut reply = simple(c, 0, &[1; 4096]);
        reply.extend([9; 5000]);
        reply
    }),
];

/// Holds after any attack: the op ends, the memory around it is unchanged, and the store works.
fn survives(export: Export, name: &str, attack: Attack) {
    // The lie itself must be noticed, not the silence behind it.
    let bench = Bench::new(export, "&timeout=60&fence=60");
    let begun = Instant::now();
    let mut store = bench.store();
    let around = [segment(0, REGION as u32)];
    bench.guest.put(&around, &vec![0xee; REGION as usize]);
    once(&bench, move |asked| Reaction::Freeze(attack(asked.cookie)));
    let memory = [segment(4096, 100), segment(8192, 3996)];
    // The second attempt is answered by an honest server, with zeroes.
    let result = run(&mut store, op(GET, 8192, 4096, &memory));
    assert!(
        matches!(result, Ok(()) | Err(libc::EIO)),
        "{name}: {result:?}"
    );
    // The second attempt, or what follows, finds the connection lost.
    let next = run(&mut store, op(GET, 0, 4096, &[segment(1 << 20, 4096)]));
    assert_eq!(next, Ok(()), "{name}");
    assert_eq!(bench.lost(), 1, "{name}");
    assert!(begun.elapsed() < Duration::from_secs(50), "{name}");
    let after = bench.guest.get(&around, REGION as usize);
    let is_ours = |at: usize| {
        (4096..4196).contains(&at)
            || (8192..12188).contains(&at)
            || (1 << 20..(1 << 20) + 4096).contains(&at)
    };
    let spoilt = after
        .iter()
        .enumerate()
        .find(|(at, byte)| **byte != 0xee && !is_ours(*at));
    assert_eq!(spoilt, None, "{name}");
}

#[test]
fn no_lie_of_a_server_does_harm() {
    for (name, attack) in STRUCTURED {
        survives(Export::able(SIZE), name, attack);
    }
    let plain = Export {
        structured: None,
        ..Export::able(SIZE)
    };
    for (name, attack) in SIMPLE {
        survives(plain, name, attack);
    }
}

#[test]
fn silence_at_each_byte_of_a_reply_ends_after_the_time() {
    let reply = |cookie| chunk(cookie, 1, 1, &data_at(0, &[1; 512]));
    let lengths = (0..32).chain([100, 539]);
    let mut benches: Vec<_> = lengths
        .map(|length| {
            let bench = Bench::new(Export::able(SIZE), "&timeout=3&fence=2");
            once(&bench, move |asked| {
                Reaction::Dead(reply(asked.cookie)[..length].to_vec())
            });
            let mut store = bench.store();
            store.push(op(GET, 0, 512, &[segment(0, 512)]), 1);
            (bench, store, false)
        })
        .collect();
    // All at the same time, because each takes some seconds: more than a server that is only late.
    let deadline = Instant::now() + Duration::from_secs(60);
    while benches.iter().any(|(_, _, is_done)| !is_done) {
        assert!(Instant::now() < deadline);
        for (_, store, is_done) in &mut benches {
            let soon = Instant::now() + Duration::from_millis(1);
            store.enter(Wait::Until(Some(soon))).unwrap();
            if let Some(Event::Done { result, .. }) = store.reap() {
                assert_eq!(result, Ok(()));
                *is_done = true;
            }
        }
    }
    assert!(benches.iter().all(|(bench, _, _)| bench.lost() == 1));
}

#[test]
fn a_server_that_answers_all_but_one_request_is_found_out() {
    unless_late(|| {
        let took = until_found_out();
        ensure(took >= Duration::from_secs(4), || {
            format!("found out after {took:?}")
        })
    });
}

/// Returns the time until a server is given up that answers all requests but one.
fn until_found_out() -> Duration {
    let bench = Bench::new(Export::able(SIZE), QUICK);
    let mut store = bench.store();
    let forgotten = std::sync::atomic::AtomicBool::new(true);
    bench.server.react(move |asked| {
        match asked.offset == 0 && forgotten.swap(false, std::sync::atomic::Ordering::SeqCst) {
            true => Reaction::Send(Vec::new()),
            false => Reaction::Honest,
        }
    });
    store.push(op(GET, 0, 512, &[segment(0, 512)]), 1);
    let begun = Instant::now();
    loop {
        store.push(op(GET, 4096, 512, &[segment(4096, 512)]), 2);
        if next_done(&mut store) == (1, Ok(())) {
            break;
        }
        let pause = Some(Instant::now() + Duration::from_millis(50));
        store.enter(Wait::Until(pause)).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
    let took = begun.elapsed();
    while store.in_flight() > 0 {
        assert_eq!(next_done(&mut store).1, Ok(()));
    }
    took
}

#[test]
fn a_store_closes_while_the_server_is_silent_or_away() {
    for away in [false, true] {
        let bench = Bench::new(Export::able(SIZE), "&timeout=1&reconnect=60&fence=1");
        bench.server.react(|_| Reaction::Dead(Vec::new()));
        let mut store = bench.store();
        store.push(op(PLAIN, 0, 512, &[segment(0, 512)]), 1);
        // An op of which nothing is sent ends at once.
        while bench.server.asked().is_empty() {
            nothing_ends(&mut store);
        }
        if away {
            bench.server.accept(false);
            bench.server.hang_up();
        }
        let begun = Instant::now();
        drop(store);
        let took = begun.elapsed();
        // Silent: the time-out and the fence. Away: the fence.
        assert!(took < Duration::from_secs(30), "{took:?}");
        assert!(took >= Duration::from_secs(1), "{took:?}");
    }
}
