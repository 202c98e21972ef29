//! A change while the disk is served takes effect, all of it or nothing, and harms no request.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use cleave_client::{OffsetOrder, Stop, Verify, Workload};
use cleave_tests::http::{Response, fetch, get};
use cleave_tests::{Daemon, small, wait_until};
use serde_json::{Value, json};

use crate::report;

fn patch(control: &std::path::Path, body: &str) -> Response {
    fetch(control, "PATCH", "/v1/disks/disk", body)
}

const ARGS: [&str; 4] = ["--disk", "ram:64M", "--serial", "disk"];

#[test]
fn a_change_is_answered_with_the_new_state() {
    let (daemon, control) = Daemon::serve_with_control(&ARGS);
    let start = report(&control)["tuning"].clone();
    let rows = [
        (json!({"completion": "poll"}), "completion", json!("poll")),
        (
            json!({"completion": "interrupt"}),
            "completion",
            json!("interrupt"),
        ),
        (json!({"spin_cpu_max": 7}), "spin_cpu_max", json!(7)),
        (json!({"spin_cpu_total": 70}), "spin_cpu_total", json!(70)),
        (
            json!({"spin_cpu_total": null}),
            "spin_cpu_total",
            Value::Null,
        ),
        (json!({"spin_rate_min": 300}), "spin_rate_min", json!(300)),
        (json!({"spin_worth": 3}), "spin_worth", json!(3)),
        (
            json!({"coalesce_us": 20, "coalesce_max": 4}),
            "coalesce_us",
            json!(20),
        ),
        (json!({"split": "64K"}), "split", json!("64K")),
        (json!({"split": "off"}), "split", json!("off")),
        (
            json!({"vrings": {"1": "poll"}}),
            "vrings",
            json!({"1": "poll"}),
        ),
        (
            json!({"vrings": {"0": "adaptive", "1": null}}),
            "vrings",
            json!({"0": "adaptive"}),
        ),
        (json!({}), "coalesce_max", json!(4)),
    ];
    for (body, field, expected) in rows {
        let answer = patch(&control, &body.to_string());
        assert_eq!(answer.status, 200, "{body}: {}", answer.body);
        assert_eq!(answer.json()["tuning"][field], expected, "{body}");
        assert_eq!(get(&control, "/v1/disks/disk")["tuning"][field], expected);
    }
    let back = json!({"completion": "adaptive", "spin_cpu_max": 25, "spin_rate_min": 1100,
        "spin_worth": start["spin_worth"], "coalesce_us": 0, "coalesce_max": 0, "split": "auto", "vrings": {"0": null}});
    assert_eq!(patch(&control, &back.to_string()).json()["tuning"], start);
    assert!(daemon.log_has("is served differently"));
    daemon.finish();
}

#[test]
fn a_wrong_change_changes_nothing_and_names_what_is_wrong() {
    let (daemon, control) = Daemon::serve_with_control(&ARGS);
    let start = report(&control)["tuning"].clone();
    let long = format!("{{\"{}\": 1}}", "y".repeat(10_000));
    let rows = [
        ("", 400, "JSON"),
        ("poll", 400, "JSON"),
        (
            "{\"completion\": \"poll\", \"unknown\": 1}",
            400,
            "`unknown`",
        ),
        (
            "{\"completion\": \"poll\", \"spin_cpu_max\": -1}",
            400,
            "spin_cpu_max",
        ),
        (
            "{\"completion\": \"poll\", \"split\": \"1K\"}",
            400,
            "split",
        ),
        (
            "{\"completion\": \"poll\", \"vrings\": {\"64\": \"poll\"}}",
            400,
            "vrings.64",
        ),
        ("{\"completion\": \"poll\"", 400, "body"),
        ("{\"completion\": \"poll\"}\0", 400, "body"),
        (long.as_str(), 400, "unknown field"),
    ];
    for (body, status, named) in rows {
        let answer = patch(&control, body);
        let error = answer.error();
        assert_eq!(answer.status, status, "{body}: {error}");
        assert!(
            error.contains(named) && error.len() < 1000,
            "{body}: {error}"
        );
        assert_eq!(report(&control)["tuning"], start, "after {body}");
    }
    let large = format!("{{\"split\": \"{}\"}}", "y".repeat(1 << 20));
    assert_eq!(patch(&control, &large).status, 413);
    assert_eq!(
        fetch(&control, "PATCH", "/v1/disks/other", "{}").status,
        404
    );
    assert_eq!(report(&control)["tuning"], start);
    daemon.finish();
}

/// Every combination, back and forth, under a load whose data is checked.
#[test]
fn changes_under_load_harm_no_request() {
    let (daemon, control) =
        Daemon::serve_with_control(&["--disk", "ram:64M", "--serial", "disk", "--workers", "2"]);
    let mut client = daemon.open(&small(2));
    let done = AtomicBool::new(false);
    let load = |bytes| Workload {
        read_percent: 50,
        order: OffsetOrder::Random,
        stop: Stop::After(Duration::from_millis(700)),
        verify: Verify::Pattern(7),
        ..Workload::reads(bytes, 8, 32 << 20, Duration::ZERO)
    };
    let fill = Workload {
        read_percent: 0,
        order: OffsetOrder::Sequential,
        stop: Stop::Requests(512),
        ..load(64 << 10)
    };
    assert_eq!(client.queue(0).run(&fill, |_| {}).unwrap().failed, 0);
    let changes = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for completion in ["poll", "interrupt", "adaptive"] {
                    for (split, us) in [("off", 0), ("auto", 30), ("16K", 0), ("auto", 0)] {
                        let body = json!({"completion": completion, "split": split,
                            "coalesce_us": us, "coalesce_max": us / 10, "spin_cpu_max": us,
                            "vrings": {"1": "interrupt"}});
                        let answer = patch(&control, &body.to_string());
                        assert_eq!(answer.status, 200, "{}", answer.body);
                        changes.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        });
        for bytes in [4096, 65536] {
            // However long the changes take.
            let enough = changes.load(Ordering::Relaxed) + 10;
            loop {
                let tallies = client.run(&load(bytes), |_| |_| {}).unwrap();
                assert!(tallies.iter().all(|tally| tally.failed == 0));
                if changes.load(Ordering::Relaxed) >= enough || changing.is_finished() {
                    break;
                }
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    drop(client);
    daemon.finish();
}

/// A change reaches a worker that sleeps: it polls from then on, and sleeps again after the next.
#[test]
fn a_change_reaches_a_worker_at_rest() {
    let (daemon, control) = Daemon::serve_with_control(&[
        "--disk",
        "null:1M",
        "--serial",
        "disk",
        "--completion",
        "interrupt",
    ]);
    let mut client = daemon.open(&small(1));
    client.queue(0).read(0, &mut [0; 512]).unwrap();
    let workers = || report(&control)["pacing"]["workers"].clone();
    assert_eq!(workers(), json!(["sleeps"]));
    for (completion, expected) in [
        ("poll", "polls"),
        ("interrupt", "sleeps"),
        ("poll", "polls"),
    ] {
        patch(&control, &json!({"completion": completion}).to_string());
        let does = wait_until(|| workers() == json!([expected]));
        assert!(does, "{completion}: {}", workers());
        client.queue(0).read(0, &mut [0; 512]).unwrap();
    }
    drop(client);
    daemon.finish();
}
