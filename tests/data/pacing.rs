//! Every completion mode with every kind of guest: data stays right, no side waits for a signal that never arrives,
//! and an idle disk costs nothing.

use std::time::{Duration, Instant};

use cleave_blk::spec::feature;
use cleave_client::{
    DeviceOptions, Layout, Notifier, Offered, OffsetOrder, ReapWait, Stop, Verify, Workload,
};
use cleave_tests::{Case, Daemon, Lateness, ensure, scale, small, unless_late};
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

const SPAN: u64 = 8 << 20;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        every_way_of_waiting_serves_every_kind_of_guest,
        an_adaptive_disk_that_becomes_idle_is_not_woken_again,
        polling_resumes_when_the_core_is_free_again,
    ]
}

/// Fills the disk and then mixes reads and writes on all vrings, checking every byte read.
fn load(daemon: &Daemon, options: &DeviceOptions, name: &str) {
    let mut client = daemon.open(options);
    let fill = Workload {
        read_percent: 0,
        order: OffsetOrder::Sequential,
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
            order: OffsetOrder::Random,
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

fn every_way_of_waiting_serves_every_kind_of_guest() {
    for completion in ["interrupt", "poll", "adaptive"] {
        for more in [&[][..], &["--coalesce-us", "100", "--coalesce-max", "4"]] {
            let mut args = vec!["--disk", "ram:16M", "--workers", "1"];
            args.extend(["--completion", completion]);
            args.extend(more);
            let daemon = Daemon::serve(&args);
            for queues in [1, 8] {
                for (guest, features, call, wait) in [
                    ("event index", !0, Notifier::NonBlocking, ReapWait::Sleep),
                    (
                        "no event index",
                        !feature::EVENT_IDX,
                        Notifier::NonBlocking,
                        ReapWait::Sleep,
                    ),
                    ("no call", !0, Notifier::Absent, ReapWait::Poll),
                    (
                        "no call, no event index",
                        !feature::EVENT_IDX,
                        Notifier::Absent,
                        ReapWait::Poll,
                    ),
                ] {
                    let options = DeviceOptions {
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

fn an_adaptive_disk_that_becomes_idle_is_not_woken_again() {
    let daemon = Daemon::serve(&["--disk", "ram:16M", "--workers", "2"]);
    let mut client = daemon.open(&small(4));
    let busy = Workload::reads(4096, 16, SPAN, Duration::from_millis(200));
    client.run(&busy, |_| |_| ()).unwrap();
    daemon.stays_at_rest().unwrap();
    client.run(&busy, |_| |_| ()).unwrap();
    drop(client);
    daemon.finish();
}

/// A worker that polls and had to share its core polls again when it is alone, without a request to trigger that. If
/// other work stays on that core, the worker sleeps instead, and its wait for the core is visible.
fn polling_resumes_when_the_core_is_free_again() {
    unless_late("polls-again", Duration::from_millis(2), polls_again).unwrap();
}

fn polls_again(lateness: &mut Lateness) -> Result<(), String> {
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
    *lateness = Lateness::start(&[daemon.pid()]);
    // If other work wants the core, the worker still checks from time to time, with one wake-up each.
    let polled = || daemon.cpu() + 10 * Duration::from_millis(daemon.wakes());
    let (before, watch) = (polled(), Instant::now());
    let goes_on = || polled() >= before + Duration::from_millis(50);
    while !goes_on() && watch.elapsed() < Duration::from_secs(3) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let done = ensure(goes_on(), || {
        format!(
            "it sleeps: {before:?}, then {:?}\n{}",
            polled(),
            daemon.log_tail()
        )
    });
    drop(client);
    daemon.finish();
    done
}
