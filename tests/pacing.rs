//! Every way of waiting, with every kind of guest: data stays right, nobody waits for a signal that does not
//! come, and a disk that nobody uses costs nothing.

// A test's own mistake ends the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use cleave_blk::spec::feature;
use cleave_client::{Doorbell, Layout, Offered, Options, Order, Stop, Verify, Wait, Workload};
use cleave_tests::{Daemon, Stopwatch, scale, small};
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

const SPAN: u64 = 8 << 20;

/// Fills and then mixes on all vrings, checking every byte read.
fn load(daemon: &Daemon, options: &Options, name: &str) {
    let mut client = daemon.open(options);
    let fill = Workload {
        read_percent: 0,
        order: Order::Sequential,
        stop: Stop::Requests(SPAN / 4096),
        verify: Verify::Pattern(5),
        layout: Layout::Auto,
        ..Workload::reads(4096, 16, SPAN, Duration::ZERO)
    };
    let done = client.queue(0).run(&fill, |_| ());
    assert_eq!(done.unwrap_or_else(|e| panic!("{name}: {e}")).failed, 0);
    for (depth, per_second) in [(1, None), (16, None), (4, Some(8000.0))] {
        let mix = Workload {
            read_percent: 60,
            order: Order::Random,
            depth,
            stop: Stop::Requests(scale(200) as u64),
            offered: per_second.map(|per_second| Offered {
                per_second,
                burst: 3,
            }),
            ..fill.clone()
        };
        let all = client.run(&mix, |_| |_| ());
        let all = all.unwrap_or_else(|e| panic!("{name}, depth {depth}: {e}"));
        assert!(all.iter().all(|tally| tally.failed == 0), "{name}");
    }
}

#[test]
fn every_way_of_waiting_serves_every_kind_of_guest() {
    for completion in ["interrupt", "poll", "adaptive"] {
        for more in [&[][..], &["--coalesce-us", "100", "--coalesce-max", "4"]] {
            let mut args = vec!["--disk", "ram:16M", "--workers", "1"];
            args.extend(["--completion", completion]);
            args.extend(more);
            let daemon = Daemon::serve(&args);
            for queues in [1, 8] {
                for (guest, features, call, wait) in [
                    ("event index", !0, Doorbell::NonBlocking, Wait::Sleep),
                    (
                        "no event index",
                        !feature::EVENT_IDX,
                        Doorbell::NonBlocking,
                        Wait::Sleep,
                    ),
                    ("no call", !0, Doorbell::Absent, Wait::Poll),
                    (
                        "no call, no event index",
                        !feature::EVENT_IDX,
                        Doorbell::Absent,
                        Wait::Poll,
                    ),
                ] {
                    let options = Options {
                        features,
                        call,
                        wait,
                        ..small(queues)
                    };
                    let name = format!("{completion} {more:?}, {queues} vrings, {guest}");
                    load(&daemon, &options, &name);
                }
            }
            daemon.finish();
        }
    }
}

/// Times that the daemon's threads were put on a core of their own will.
fn switches(daemon: &Daemon) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let counts = tasks.flatten().filter_map(|task| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse::<u64>().ok()
    });
    counts.sum()
}

#[test]
fn an_adaptive_disk_that_falls_silent_is_not_woken_again() {
    let daemon = Daemon::serve(&["--disk", "ram:16M", "--workers", "2"]);
    let mut client = daemon.open(&small(4));
    let busy = Workload::reads(4096, 16, SPAN, Duration::from_millis(200));
    client.run(&busy, |_| |_| ()).unwrap();
    // What is still spun or dozed is far shorter, but for a machine that stops meanwhile: then it is at rest the
    // next time.
    let look = || (switches(&daemon), daemon.cpu());
    let mut seen = Vec::new();
    let rests = (0..5).any(|_| {
        std::thread::sleep(Duration::from_millis(300));
        let before = look();
        std::thread::sleep(Duration::from_millis(700));
        seen.push((before, look()));
        seen.last().is_some_and(|(before, after)| before == after)
    });
    assert!(rests, "something woke it, or ran, each time: {seen:?}");
    client.run(&busy, |_| |_| ()).unwrap();
    drop(client);
    daemon.finish();
}

/// Whoever wanted the core of a worker that polls has gone: it polls again, though no request tells it to. Where
/// somebody else stays on that core it sleeps for good, which says nothing, and another is tried.
#[test]
fn polling_goes_on_when_others_have_left_the_core() {
    assert!((0..10).any(|_| polls_again()), "it sleeps, ten times");
}

fn polls_again() -> bool {
    let core = sched_getcpu();
    let daemon = Daemon::serve(&[
        "--disk",
        "ram:16M",
        "--completion",
        "poll",
        "--cpus",
        &core.to_string(),
    ]);
    let mut client = daemon.open(&small(1));
    client.queue(0).read(0, &mut [0; 512]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut here = CpuSet::new();
            here.set(core);
            sched_setaffinity(None, &here).unwrap();
            let end = Instant::now() + Duration::from_millis(100);
            while Instant::now() < end {
                std::hint::spin_loop();
            }
        });
    });
    // On a machine whose cores are all wanted it looks at least, again and again.
    let polled = || daemon.cpu() + 10 * Duration::from_millis(switches(&daemon));
    let (before, watch) = (polled(), Stopwatch::start());
    let goes_on = || polled() >= before + Duration::from_millis(50);
    while !goes_on() && watch.elapsed() < Duration::from_secs(3) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let goes_on = goes_on();
    drop(client);
    daemon.finish();
    goes_on
}
