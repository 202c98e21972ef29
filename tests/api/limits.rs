//! `--limit` and `limits` of a PATCH: the rate that a guest reaches, and what is said of it.

use std::time::{Duration, Instant};

use cleave_client::Workload;
use cleave_tests::http::{Response, fetch};
use cleave_tests::{Daemon, Lateness, Node, Stopwatch, ensure, small, unless_late, wait_until};
use serde_json::{Value, json};

use crate::prometheus::{parse, sum};
use crate::report;

fn patch(control: &std::path::Path, body: &serde_json::Value) -> Response {
    fetch(control, "PATCH", "/v1/disks/disk", &body.to_string())
}

/// The daemon's requests and CPU time in seconds, and when.
fn reached(control: &std::path::Path) -> (u64, f64, Instant) {
    let report = report(control);
    let at = Instant::now();
    let reads = report["totals"]["reads"].as_u64().unwrap();
    (
        reads,
        report["process"]["cpu_seconds"].as_f64().unwrap(),
        at,
    )
}

const LIMIT: f64 = 2000.0;

/// Reads that the machine delays by up to a tenth of a second are made up for. If it was later, it is measured again.
#[test]
fn a_limit_is_kept_in_every_mode_and_taken_away_while_the_disk_is_served() {
    for completion in ["interrupt", "adaptive", "poll"] {
        let args = [
            "--disk",
            "null:1G",
            "--serial",
            "disk",
            "--completion",
            completion,
        ];
        let (daemon, control) = Daemon::serve_with_control(&args);
        let mut client = daemon.open(&small(2));
        let mut reads = |ms| {
            let load = Workload::reads(4096, 8, 1 << 30, Duration::from_millis(ms));
            assert_eq!(client.queue(0).run(&load, |_| {}).unwrap().failed, 0);
        };
        let answer = patch(&control, &json!({"limits": {"iops-total": LIMIT as u64}}));
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(
            answer.json()["tuning"]["limits"],
            json!({"iops-total": 2000})
        );
        let kept = unless_late("limit", Duration::from_millis(100), |lateness| {
            *lateness = Lateness::start(&[daemon.pid()]);
            // The first tenth of a second's worth comes at once.
            reads(300);
            let (before, cpu_before, start) = reached(&control);
            reads(1500);
            let (after, cpu_after, end) = reached(&control);
            let seconds = end.duration_since(start).as_secs_f64();
            let rate = (after - before) as f64 / seconds / LIMIT;
            // As much as a tenth of a second's worth was saved while nothing was asked for before the start.
            let most = 1.01 + 0.1 / seconds;
            ensure((0.95..most).contains(&rate), || {
                format!("{completion}: {rate} of the limit")
            })?;
            let cores = (cpu_after - cpu_before) / seconds;
            let is_frugal = completion == "poll" || cores < 0.5;
            ensure(is_frugal, || {
                format!("{completion}: {cores} cores for what waits")
            })
        });
        kept.unwrap();

        let shown = report(&control);
        let waited = shown["totals"]["throttled"].as_u64().unwrap();
        // A late machine has several go at once, of which one has waited.
        assert!(waited > 100, "{waited}");
        assert!(shown["vrings"][0]["throttle"]["mean_us"].as_f64().unwrap() > 10.0);
        let metrics = parse(&fetch(&control, "GET", "/metrics", "").body).unwrap();
        assert_eq!(
            sum(&metrics, "cleave_requests_throttled_total", &[]),
            waited as f64
        );
        let limit = sum(&metrics, "cleave_limit_requests_per_second", &[]);
        assert_eq!(limit, LIMIT);

        let answer = patch(&control, &json!({"limits": {"iops-total": 0}}));
        assert_eq!(answer.json()["tuning"]["limits"], json!({}));
        let mut rate = 0.0;
        let is_free = wait_until(|| {
            let (before, _, start) = reached(&control);
            reads(300);
            let (after, _, end) = reached(&control);
            rate = (after - before) as f64 / end.duration_since(start).as_secs_f64();
            rate > 2.0 * LIMIT
        });
        assert!(is_free, "{completion}: {rate} without a limit");
        drop(client);
        daemon.finish();
    }
}

#[test]
fn a_limit_of_the_command_line_holds_writes_and_leaves_reads_and_flushes_alone() {
    let args = [
        "--disk",
        "ram:64M",
        "--serial",
        "disk",
        "--limit",
        "iops-write=20",
    ];
    let (daemon, control) = Daemon::serve_with_control(&args);
    let mut client = daemon.open(&small(1));
    let start = Instant::now();
    let mut data = vec![7; 4096];
    for number in 0..500_u64 {
        client.queue(0).read(number * 4096, &mut data).unwrap();
        client.queue(0).flush().unwrap();
    }
    assert_eq!(report(&control)["totals"]["throttled"], 0);
    // Two come at once, and each that follows within a twentieth of a second waits for the rest of it.
    let mut writes = 0;
    let throttled = || report(&control)["totals"]["throttled"].as_u64();
    let are_held = wait_until(|| {
        for number in 0..13_u64 {
            client.queue(0).write(number * 4096, &data).unwrap();
        }
        writes += 13;
        throttled() > Some(8)
    });
    assert!(are_held, "{:?} of {writes}", throttled());
    assert!(
        start.elapsed() > Duration::from_millis(50) * (writes - 3),
        "{writes} in {:?}",
        start.elapsed()
    );
    drop(client);
    daemon.finish();
}

/// A request that waits is still the guest's: it is not done when its vring stops, and the next session does it.
#[test]
fn a_session_ends_at_once_although_requests_wait() {
    let args = [
        "--disk",
        "ram:64M",
        "--serial",
        "disk",
        "--limit",
        "iops-total=1",
    ];
    let (daemon, control) = Daemon::serve_with_control(&args);
    let client = daemon.open(&small(1));
    let busy = std::thread::spawn(move || {
        let mut client = client;
        let load = Workload::reads(4096, 8, 1 << 20, Duration::from_secs(60));
        // Ends with an error: the daemon goes.
        client.queue(0).run(&load, |_| {}).is_err()
    });
    assert!(wait_until(|| report(&control)["vrings"][0]["kicks"]
        .as_u64()
        > Some(0)));
    std::thread::sleep(Duration::from_millis(200));
    let watch = Stopwatch::start();
    daemon.finish();
    let took = watch.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    drop(busy);
}

#[test]
fn what_makes_no_sense_is_refused_and_changes_nothing() {
    let args = [
        "--disk",
        "null:1G",
        "--serial",
        "disk",
        "--limit",
        "iops-total=500",
    ];
    let (daemon, control) = Daemon::serve_with_control(&args);
    for (body, why) in [
        (json!({"limits": 5}), "expected an object"),
        (json!({"limits": {"iops": 5}}), "is not a limit"),
        (
            json!({"limits": {"iops-total": "5"}}),
            "limits.iops-total: invalid type: string \"5\", expected a whole number",
        ),
        (
            json!({"limits": {"iops-total": -1}}),
            "limits.iops-total: invalid value: integer `-1`, expected a whole number",
        ),
        (json!({"limits": {"iops-read": 5}}), "excludes"),
        (json!({"limits": {"bps-read-max": 5}}), "needs bps-read"),
        (json!({"limits": {"iops-total-max": 5}}), "at least"),
        (
            json!({"limits": {"iops-total": 2_000_000_000_000_000_u64}}),
            "at most",
        ),
    ] {
        let answer = patch(&control, &body);
        assert_eq!(answer.status, 400, "{body}");
        assert!(answer.error().contains(why), "{body}: {}", answer.body);
        let limits = report(&control)["tuning"]["limits"].clone();
        assert_eq!(limits, json!({"iops-total": 500}), "{body}");
    }
    // A whole that makes sense, though its parts one by one would not.
    let answer = patch(
        &control,
        &json!({"limits": {"iops-total": 0, "iops-read": 5, "iops-read-max": 50}}),
    );
    assert_eq!(answer.status, 200, "{}", answer.body);
    daemon.finish();
}

/// The requests of each disk in a second, as a share of `rate`, while all have more to do than they may.
fn shares(node: &Node, ids: &[&str], rate: f64, lateness: &mut Lateness) -> Vec<f64> {
    let reads = || -> Vec<u64> {
        let reads = |id: &&str| node.disk(id)["totals"]["reads"].as_u64().unwrap();
        ids.iter().map(reads).collect()
    };
    let load = Workload::reads(4096, 60, 1 << 30, Duration::from_millis(1900));
    std::thread::scope(|scope| {
        for id in ids {
            let mut client = node.open(id, &small(1));
            let load = &load;
            scope.spawn(move || assert_eq!(client.queue(0).run(load, |_| {}).unwrap().failed, 0));
        }
        // The first tenth of a second's worth comes at once.
        std::thread::sleep(Duration::from_millis(400));
        let (before, start) = (reads(), Instant::now());
        std::thread::sleep(Duration::from_millis(1200));
        let (after, seconds) = (reads(), start.elapsed().as_secs_f64());
        // The clients, and the workers of the disks, end soon.
        lateness.note();
        let done = after.iter().zip(before);
        done.map(|(after, before)| (after - before) as f64 / seconds / rate)
            .collect()
    })
}

/// As [`shares`], judged: together they reach the rate, each by its even share. A client that its own machine keeps from
/// asking for as long as a twentieth of the time has less.
fn assert_shared(node: &Node, ids: &[&str], rate: f64) {
    let even = 1.0 / ids.len() as f64;
    let is_even = |share: &f64| (0.95..1.05).contains(&(share / even));
    let shared = unless_late("shares", Duration::from_millis(40), |lateness| {
        *lateness = Lateness::start(&[node.daemon.pid()]);
        let shares = shares(node, ids, rate, lateness);
        let sum: f64 = shares.iter().sum();
        match (0.96..1.03).contains(&sum) && shares.iter().all(is_even) {
            true => Ok(()),
            false => Err(format!("{ids:?}: {shares:?}")),
        }
    });
    shared.unwrap();
}

#[test]
fn disks_of_a_group_share_its_limits() {
    let node = Node::start();
    let disk = |limits: Value| json!({"disk": ["null:1G"], "queues": 2, "persistent": false, "limits": limits});
    let limits = |id: &str| node.disk(id)["tuning"]["limits"].clone();
    node.add("a", &disk(json!({"group": "g", "iops-total": 500})));
    node.add("b", &disk(json!({"group": "g"})));
    assert_eq!(
        limits("b"),
        json!({"iops-total": 500}),
        "those of the group"
    );
    node.add("c", &disk(json!({"group": "g", "iops-total": 3000})));
    node.add("other", &disk(json!({"iops-total": 700})));
    let ids = ["a", "b", "c"];
    for id in ids {
        assert_eq!(limits(id), json!({"iops-total": 3000}), "of the last");
    }
    assert_shared(&node, &ids, 3000.0);
    let change = json!({"limits": {"iops-total": 1500}}).to_string();
    assert_eq!(node.ask("PATCH", "/v1/disks/b", &change).status, 200);
    for id in ids {
        assert_eq!(limits(id), json!({"iops-total": 1500}), "of the last");
    }
    assert_eq!(limits("other"), json!({"iops-total": 700}));
    assert_shared(&node, &ids, 1500.0);
    // The others get the share that one does not use, or leaves.
    node.remove("a");
    assert_shared(&node, &["b", "c"], 1500.0);
    let moved = json!({"limits": {"group": "h"}}).to_string();
    let refused = node.ask("PATCH", "/v1/disks/b", &moved);
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(refused.error().contains("limits.group"), "{}", refused.body);
    // With its last disk a group is gone.
    node.remove("b");
    node.remove("c");
    node.add("b", &disk(json!({"group": "g"})));
    assert_eq!(limits("b"), json!({}));
    node.daemon.finish();
}

/// A disk that sleeps until its turn under a low limit is woken when another of its group raises that.
#[test]
fn a_limit_raised_by_another_disk_of_the_group_is_felt_at_once() {
    let node = Node::start();
    let disk = json!({"disk": ["null:1G"], "persistent": false, "limits": {"group": "g", "iops-total": 1}});
    node.add("a", &disk);
    node.add("b", &disk);
    let mut client = node.open("a", &small(1));
    let load = Workload {
        stop: cleave_client::Stop::Requests(60),
        ..Workload::reads(4096, 1, 1 << 30, Duration::ZERO)
    };
    let start = Instant::now();
    std::thread::scope(|scope| {
        let all = scope.spawn(|| client.queue(0).run(&load, |_| {}).unwrap());
        assert!(wait_until(
            || node.disk("a")["totals"]["throttled"] != json!(0)
        ));
        let raised = json!({"limits": {"iops-total": 10_000}}).to_string();
        assert_eq!(node.ask("PATCH", "/v1/disks/b", &raised).status, 200);
        assert_eq!(all.join().unwrap().requests(), 60);
    });
    // One a second otherwise.
    assert!(
        start.elapsed() < Duration::from_secs(40),
        "{:?}",
        start.elapsed()
    );
    drop(client);
    node.daemon.finish();
}
