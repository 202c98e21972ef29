//! The process: its threads, what it costs at rest, and how it ends.

use std::time::Duration;

use cleave_client::{DeviceOptions, Notifier, ReapWait, Workload};
use cleave_tests::{Daemon, Lateness, Scratch, ensure, exercise, is_root, run, small, unless_late};
use rustix::process::Signal;

#[test]
fn sigterm_and_sigint_shut_down_cleanly_under_load() {
    for signal in [Signal::TERM, Signal::INT] {
        for (queues, depth, completion) in
            [(4, 32, "interrupt"), (2, 16, "poll"), (0, 0, "interrupt")]
        {
            // In memory: the daemon gives what is in flight two seconds, and the disk of a busy machine may take longer.
            let scratch = Scratch::in_memory();
            let image = scratch.image("disk", 64 << 20);
            let args = [
                "--disk",
                image.to_str().unwrap(),
                "--completion",
                completion,
            ];
            let mut daemon = Daemon::serve(&args);
            let mut client = daemon.open(&small(queues));
            for queue in client.queues() {
                queue.set_timeout(Duration::from_millis(700));
            }
            std::thread::scope(|scope| {
                let load = scope.spawn(|| {
                    let time = Duration::from_secs(5);
                    let mix = Workload {
                        read_percent: 50,
                        ..Workload::reads(16 << 10, depth, 32 << 20, time)
                    };
                    // Fails with a time-out, because its daemon exits.
                    if queues > 0 {
                        let _ = client.run(&mix, |_| |_| ());
                    }
                });
                std::thread::sleep(Duration::from_millis(100));
                daemon.signal(signal);
                match daemon.wait() {
                    Some((Some(0), took)) if took < Duration::from_secs(6) => {}
                    other => panic!("{signal:?}, {queues} vrings: {other:?}\n{}", daemon.log()),
                }
                assert!(!daemon.socket().exists(), "the socket file remains");
                load.join().unwrap();
            });
        }
    }
}

#[test]
fn an_idle_disk_costs_nothing() {
    let daemon = Daemon::serve(&["--disk", "ram:64M"]);
    let mut client = daemon.open(&small(4));
    exercise(&mut client).unwrap();
    daemon.stays_at_rest().unwrap();
    exercise(&mut client).unwrap();
    drop(client);
    daemon.stays_at_rest().unwrap();
    daemon.finish();
}

#[test]
fn polling_spins_only_while_there_is_a_vring() {
    let daemon = Daemon::serve(&["--disk", "ram:64M", "--completion", "poll"]);
    let mut client = daemon.open(&DeviceOptions {
        kick: Notifier::Absent,
        wait: ReapWait::Poll,
        ..small(1)
    });
    exercise(&mut client).unwrap();
    let spins = unless_late("spins", Duration::from_millis(100), |lateness| {
        *lateness = Lateness::start(&[daemon.pid()]);
        ensure(daemon.does_not_spin().is_err(), || {
            "it does not spin".into()
        })
    });
    spins.unwrap();
    drop(client);
    daemon.stays_at_rest().unwrap();
    daemon.finish();
}

#[test]
fn a_worker_per_vring_and_no_child() {
    let daemon = Daemon::serve(&["--disk", "ram:64M", "--workers", "4", "--queues", "4"]);
    let alone = daemon.threads();
    let mut client = daemon.open(&small(4));
    exercise(&mut client).unwrap();
    assert!(
        daemon.threads() >= alone + 4,
        "the number of threads went from {alone} to {}",
        daemon.threads()
    );
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", daemon.pid()));
    assert_eq!(children.unwrap_or_default().trim(), "");
    drop(client);
    daemon.threads_settle_at(alone).unwrap();
    daemon.finish();
}

#[test]
fn a_demonstration_runs_as_the_first_process_of_a_container() {
    if !is_root() {
        return cleave_tests::ignored("not root");
    }
    // Its daemon has five seconds to listen there.
    let scratch = Scratch::in_memory();
    let folder = scratch.path().to_str().unwrap();
    let program = cleave_tests::program_path().to_str().unwrap();
    let line = "--pid --fork --mount-proc";
    let demo = [
        "demo",
        "--exit",
        "--seconds",
        "1",
        "--size",
        "16M",
        "--dir",
        folder,
    ];
    let args: Vec<&str> = line.split(' ').chain([program]).chain(demo).collect();
    run("unshare", &args).unwrap();
}

/// A handler is in force a moment before it can note a signal, and the thread of the log is there before it.
#[test]
fn a_signal_to_end_never_goes_to_the_log() {
    let daemon = Daemon::serve(&["--disk", "ram:1M"]);
    let ends = [Signal::TERM, Signal::INT, Signal::HUP];
    let ends: u64 = ends.map(|signal| 1 << (signal.as_raw() - 1)).iter().sum();
    // Those of them that threads of this name block.
    let blocked = |name: &str| -> Vec<u64> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
        let statuses = threads.filter_map(|thread| {
            let status = std::fs::read_to_string(thread.ok()?.path().join("status")).ok()?;
            status
                .starts_with(&format!("Name:\t{name}\n"))
                .then_some(status)
        });
        let mask = |status: String| {
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("SigBlk:\t"));
            u64::from_str_radix(line.unwrap(), 16).unwrap() & ends
        };
        statuses.map(mask).collect()
    };
    // A thread has the name of the one that made it until it runs.
    let found = || (blocked("log"), blocked("cleave"));
    let is_blocked = cleave_tests::wait_until(|| found() == (vec![ends], vec![0]));
    assert!(is_blocked, "{:?}", found());
    daemon.finish();
}
