//! Several files as one disk, through the real program and the test client.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use cleave_client::{Error, Layout, OffsetOrder, Stop, Verify, Workload, pattern_word};
use cleave_tests::{Case, Daemon, Scratch, run_to_exit, small};

const CHUNK: u64 = 64 << 10;
const LEG: u64 = 4 << 20;
const SEED: u64 = 11;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        twenty_threads_on_twenty_eight_legs_read_back_their_writes,
        only_requests_to_a_truncated_leg_fail,
    ]
}

/// Legs of a new stripe in their own folder, and the arguments that serve it.
fn created(legs: usize, more: &[&str]) -> (Scratch, Vec<PathBuf>, Daemon) {
    let (scratch, folder) = (Scratch::new(), Scratch::new());
    let paths: Vec<_> = (0..legs)
        .map(|leg| folder.image(&format!("leg{leg:02}"), LEG + CHUNK))
        .collect();
    let names: Vec<_> = paths.iter().map(|path| path.to_str().unwrap()).collect();
    let made = run_to_exit(&[&["stripe", "create", "--chunk", "64K"], &*names].concat());
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let shown = run_to_exit(&[&["stripe", "show"], &*names].concat());
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);
    assert!(
        shown.stdout.contains(&format!("leg {legs} of {legs}")),
        "{}",
        shown.stdout
    );
    let socket = scratch.join("socket");
    let mut args = vec![
        "serve",
        "--socket-path",
        socket.to_str().unwrap(),
        "--stripe",
        "64K",
    ];
    for name in &names {
        args.extend(["--disk", name]);
    }
    args.extend(more);
    let daemon = Daemon::with_args(scratch, socket.clone(), &args);
    (folder, paths, daemon)
}

fn workload(
    read_percent: u8,
    order: OffsetOrder,
    requests: u64,
    span_bytes: u64,
) -> Workload<'static> {
    Workload {
        read_percent,
        block_bytes: 32 << 10,
        depth: 8,
        offset_bytes: 0,
        span_bytes,
        order,
        seed: 1,
        stop: Stop::Requests(requests),
        verify: Verify::Pattern(SEED),
        offered: None,
        pulse: None,
        layout: Layout::Auto,
        abort: None,
    }
}

/// Bytes that each leg moved, from the log lines at the end of the session.
fn moved(log: &str) -> Vec<u64> {
    log.lines()
        .filter(|line| line.contains("leg ") && line.contains(" bytes; mean"))
        .map(|line| {
            let before = line.split(" bytes; mean").next().unwrap();
            before.rsplit(' ').next().unwrap().parse().unwrap()
        })
        .collect()
}

fn twenty_threads_on_twenty_eight_legs_read_back_their_writes() {
    let (_folder, legs, daemon) = created(28, &["--log", "debug"]);
    let mut client = daemon.open(&small(20));
    let capacity = client.config().capacity_bytes();
    assert_eq!(capacity, 28 * LEG);
    let fill = workload(0, OffsetOrder::Sequential, capacity / (32 << 10), capacity);
    let filled = client.queue(0).run(&fill, |_| ()).unwrap();
    assert_eq!(filled.failed, 0);
    let mix = workload(70, OffsetOrder::Random, 1500, capacity);
    for tally in client.run(&mix, |_| |_| ()).unwrap() {
        assert_eq!((tally.failed, tally.requests()), (0, 1500));
    }
    client.queue(3).flush().unwrap();
    // Longer than a row of the stripe, starting inside a chunk.
    let mut bytes = vec![0; 2 << 20];
    client.queue(5).read(CHUNK / 2, &mut bytes).unwrap();
    for (word, at) in bytes.chunks(8).zip((CHUNK / 2 / 8)..) {
        assert_eq!(word, pattern_word(SEED, at).to_le_bytes(), "word {at}");
    }
    drop(client);
    assert!(daemon.log_has("28 legs moved"), "{}", daemon.log_tail());
    let moved = moved(&daemon.log());
    let (least, most) = (moved.iter().min().unwrap(), moved.iter().max().unwrap());
    println!("28 legs moved {least} to {most} bytes each");
    assert_eq!(moved.len(), 28);
    let mean = moved.iter().sum::<u64>() / 28;
    assert!(
        mean - least < mean / 10 && most - mean < mean / 10,
        "{moved:?}"
    );
    daemon.finish();
    // The expected position of each byte, computed independently.
    for (leg, path) in (0..).zip(&legs) {
        let file = std::fs::File::open(path).unwrap();
        for row in 0..LEG / CHUNK {
            let mut word = [0; 8];
            file.read_exact_at(&mut word, row * CHUNK + 4096).unwrap();
            let at = (row * 28 + leg) * CHUNK + 4096;
            assert_eq!(
                word,
                pattern_word(SEED, at / 8).to_le_bytes(),
                "leg {leg} row {row}"
            );
        }
    }
}

fn only_requests_to_a_truncated_leg_fail() {
    let (_folder, legs, daemon) = created(3, &[]);
    let mut client = daemon.open(&small(1));
    let queue = client.queue(0);
    let data = vec![0x5a; CHUNK as usize];
    for chunk in 0..6 {
        queue.write(chunk * CHUNK, &data).unwrap();
    }
    queue.flush().unwrap();
    // Leg 1 keeps only its first chunk; chunk 4 of the disk is its second.
    let leg = OpenOptions::new().write(true).open(&legs[1]).unwrap();
    leg.set_len(CHUNK).unwrap();
    // From then on the daemon refuses what is beyond the end, where before that the kernel did.
    let said = "leg01: has shrunk to 65536 bytes";
    assert!(daemon.log_has(said), "{}", daemon.log_tail());
    let mut back = vec![0; CHUNK as usize];
    for chunk in [0, 1, 2, 3, 5] {
        queue.read(chunk * CHUNK, &mut back).unwrap();
        assert_eq!(back, data, "chunk {chunk}");
    }
    let failed = queue.read(4 * CHUNK, &mut back);
    assert!(
        matches!(failed, Err(Error::Status { status: 1, .. })),
        "{failed:?}"
    );
    let mut three = vec![0; 3 * CHUNK as usize];
    assert!(
        queue.read(3 * CHUNK, &mut three).is_err(),
        "touches chunk 4"
    );
    queue.read(0, &mut three).unwrap();
    drop(client);
    daemon.finish();
    let names: Vec<_> = legs.iter().map(|path| path.to_str().unwrap()).collect();
    let served = run_to_exit(
        &[
            &[
                "serve",
                "--socket-path",
                "/nowhere/s",
                "--stripe",
                "64K",
                "--disk",
                names[0],
            ][..],
            &["--disk", names[1], "--disk", names[2]],
        ]
        .concat(),
    );
    assert_eq!(served.code, Some(2), "{}", served.stderr);
    assert!(
        served.stderr.contains("leg01 was cut short"),
        "{}",
        served.stderr
    );
}
