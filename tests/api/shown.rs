//! The report shows the requests that were done.

use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use cleave_client::{Base, OffsetOrder, Stop, Verify, Workload};
use cleave_tests::http::{fetch, get};
use cleave_tests::{Daemon, Scratch, run_to_exit, small, wait_until};
use serde_json::Value;

use crate::prometheus::{parse, sum};
use crate::report;

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("{value} is not a number"))
}

/// Requests and bytes of the lists called `requests` in a value.
fn counted(of: &Value, direction: &str, size: &str) -> (u64, u64) {
    let list = of["requests"].as_array().unwrap();
    let found = list
        .iter()
        .find(|row| row["direction"] == direction && row["size"] == size);
    found.map_or((0, 0), |row| {
        (number(&row["requests"]), number(&row["bytes"]))
    })
}

/// Counters are equal to what a client did, on disks of each kind and from three sides.
#[test]
fn counters_equal_what_the_client_did() {
    let scratch = Scratch::new();
    let image = scratch.join("disk");
    std::fs::File::create(&image)
        .unwrap()
        .set_len(64 << 20)
        .unwrap();
    for disk in ["null:64M", "ram:64M", image.to_str().unwrap()] {
        let (daemon, control) = Daemon::serve_with_control(&["--disk", disk]);
        let mut client = daemon.open(&small(2));
        let mut data = vec![1; 512 << 10];
        for turn in 0..100 {
            let queue = client.queue(turn % 2);
            queue.write((turn as u64) * 4096, &data[..4096]).unwrap();
            queue.read((turn as u64) * 512, &mut data[..512]).unwrap();
        }
        for _ in 0..7 {
            client.queue(1).read(0, &mut data[..16 << 10]).unwrap();
            client.queue(0).write(0, &data).unwrap();
            client.queue(0).flush().unwrap();
        }
        let beyond = client.config().capacity_bytes();
        client.queue(0).read(beyond, &mut data[..512]).unwrap_err();
        client.queue(1).get_id().unwrap();
        let shown = report(&control);
        assert_eq!(counted(&shown, "read", "4K"), (100, 51_200), "{disk}");
        assert_eq!(counted(&shown, "write", "4K"), (100, 409_600), "{disk}");
        assert_eq!(counted(&shown, "read", "16K"), (7, 7 << 14), "{disk}");
        assert_eq!(counted(&shown, "write", "larger"), (7, 7 << 19), "{disk}");
        assert_eq!(counted(&shown, "flush", "none").0, 7, "{disk}");
        assert_eq!(counted(&shown, "other", "none").0, 1, "{disk}");
        assert_eq!(shown["errors"]["invalid"], 1);
        assert_eq!(shown["in_flight"]["requests"], 0);
        let totals = &shown["totals"];
        assert_eq!(number(&totals["reads"]), 107);
        assert_eq!(number(&totals["writes"]), 107);
        assert_eq!(number(&totals["others"]), 8);
        assert_eq!(number(&totals["refused"]), 1);
        let vrings = shown["vrings"].as_array().unwrap();
        assert_eq!(vrings.len(), 2);
        assert_eq!(counted(&vrings[0], "read", "4K").0, 50);
        assert_eq!(counted(&vrings[1], "read", "16K").0, 7);
        assert!(
            number(&shown["zero_reads"]["sampled"]) >= 2,
            "the first of each vring"
        );
        let text = fetch(&control, "GET", "/metrics", "").body;
        let families = parse(&text).unwrap_or_else(|why| panic!("{why}\n{text}"));
        let of = |name: &str, with: &[(&str, &str)]| sum(&families, name, with) as u64;
        // No request waited for a limit, and an empty histogram would have two dozen lines for each vring.
        assert!(!families.contains_key("cleave_throttled_seconds"), "{text}");
        let reads = [("direction", "read"), ("size", "4K")];
        assert_eq!(of("cleave_requests_total", &reads), 100);
        assert_eq!(of("cleave_request_bytes_total", &reads), 51_200);
        assert_eq!(of("cleave_disk_requests_total", &[]), 222);
        assert_eq!(of("cleave_request_errors_total", &[("kind", "invalid")]), 1);
        // The last of them are counted after the requests that they were for.
        let agree = wait_until(|| {
            let families = parse(&fetch(&control, "GET", "/metrics", "").body).unwrap();
            let totals = &report(&control)["totals"];
            ["calls", "kicks"].iter().all(|name| {
                let shown = sum(&families, &format!("cleave_{name}_total"), &[]) as u64;
                shown > 0 && shown == number(&totals[*name])
            })
        });
        assert!(agree, "calls and kicks: {}", report(&control)["totals"]);
        if disk == image.to_str().unwrap() {
            // Each request was timed, where none ends on the spot.
            let device = families["cleave_request_stage_seconds"]
                .samples
                .iter()
                .filter(|(suffix, labels, _)| suffix == "_count" && labels["stage"] == "device");
            assert_eq!(device.map(|sample| sample.2).sum::<f64>() as u64, 214 + 7);
        }
        drop(client);
        daemon.finish();
    }
}

#[test]
fn totals_survive_sessions() {
    let (daemon, control) =
        Daemon::serve_with_control(&["--disk", "ram:64M", "--serial", "disk-7"]);
    for round in 1..=5u64 {
        let mut client = daemon.open(&small(1));
        for _ in 0..10 {
            client.queue(0).write(0, &[7; 4096]).unwrap();
        }
        let shown = get(&control, "/v1/disks/disk-7");
        assert_eq!(shown["session"]["connected"], true);
        assert_eq!(shown["session"]["count"], round);
        let features = shown["session"]["features"].as_str().unwrap();
        let features = u64::from_str_radix(features.trim_start_matches("0x"), 16).unwrap();
        assert_eq!(features & client.features(), client.features());
        let vrings = shown["session"]["vrings"].as_array().unwrap();
        assert_eq!((vrings.len(), &vrings[0]["size"]), (1, &Value::from(64)));
        assert_eq!(counted(&shown, "write", "4K").0, round * 10);
        assert_eq!(number(&shown["totals"]["writes"]), round * 10);
        drop(client);
        // The daemon notices a moment later.
        assert!(wait_until(
            || report(&control)["session"]["connected"] == false
        ));
    }
    daemon.finish();
}

#[test]
fn a_disk_goes_by_its_serial_its_name_and_the_end_of_it() {
    let scratch = Scratch::new();
    let image = scratch.join("a disk.img");
    std::fs::File::create(&image)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let name = image.to_str().unwrap();
    let (daemon, control) = Daemon::serve_with_control(&["--disk", name]);
    let listed = get(&control, "/v1/disks");
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(listed[0]["id"], "a disk.img");
    assert_eq!(listed[0]["name"], name);
    assert_eq!(listed[0]["size_bytes"], 1 << 20);
    let encoded = name.replace('/', "%2F").replace(' ', "%20");
    for id in ["a%20disk.img", encoded.as_str()] {
        assert_eq!(get(&control, &format!("/v1/disks/{id}"))["name"], name);
    }
    for id in ["a", "..", "%00", "%ff", "a%20disk.img/x"] {
        let status = fetch(&control, "GET", &format!("/v1/disks/{id}"), "").status;
        assert!((400..500).contains(&status), "{id}: {status}");
    }
    daemon.finish();
}

/// Asked without end while a verified load runs: every answer is sound, no number falls, and no
/// request is the worse for it.
#[test]
fn answers_are_sound_under_load() {
    let (daemon, control) = Daemon::serve_with_control(&["--disk", "ram:64M", "--workers", "2"]);
    let mut client = daemon.open(&small(2));
    let done = AtomicBool::new(false);
    let load = Workload {
        read_percent: 50,
        order: OffsetOrder::Random,
        stop: Stop::After(Duration::from_millis(500)),
        verify: Verify::Pattern(7),
        ..Workload::reads(4096, 16, 32 << 20, Duration::ZERO)
    };
    let fill = Workload {
        read_percent: 0,
        order: OffsetOrder::Sequential,
        stop: Stop::Requests(8192),
        ..load.clone()
    };
    assert_eq!(client.queue(0).run(&fill, |_| {}).unwrap().failed, 0);
    let asked = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut before = 0;
            while !done.load(Ordering::Relaxed) {
                let shown = report(&control);
                let now = number(&shown["totals"]["reads"]);
                assert!(now >= before, "{now} after {before}");
                let text = fetch(&control, "GET", "/metrics", "").body;
                parse(&text).unwrap_or_else(|why| panic!("{why}\n{text}"));
                before = now;
                asked.fetch_add(1, Ordering::Relaxed);
            }
        });
        for turn in 0.. {
            let tallies = client.run(&load, |_| |_| {}).unwrap();
            assert!(tallies.iter().all(|tally| tally.failed == 0));
            let is_enough = turn >= 2 && asked.load(Ordering::Relaxed) > 5;
            if is_enough || asking.is_finished() {
                break;
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    drop(client);
    daemon.finish();
}

#[test]
fn recording_can_be_switched_off() {
    let (daemon, control) = Daemon::serve_with_control(&["--disk", "null:64M", "--stats", "off"]);
    let mut client = daemon.open(&small(1));
    for _ in 0..10 {
        client.queue(0).read(0, &mut [0; 4096]).unwrap();
    }
    let shown = report(&control);
    assert_eq!(shown["recording"], false);
    assert_eq!(shown["vrings"].as_array().unwrap().len(), 0);
    assert_eq!(number(&shown["totals"]["reads"]), 10);
    let text = fetch(&control, "GET", "/metrics", "").body;
    let families = parse(&text).unwrap();
    assert_eq!(sum(&families, "cleave_disk_requests_total", &[]) as u64, 10);
    assert!(!families.contains_key("cleave_requests_total"), "{text}");
    drop(client);
    assert!(
        daemon.log_has("has left after 10 reads"),
        "{}",
        daemon.log()
    );
    // Totals go on where the log tells of a session alone.
    let mut client = daemon.open(&small(1));
    for _ in 0..3 {
        client.queue(0).read(0, &mut [0; 4096]).unwrap();
    }
    assert_eq!(number(&report(&control)["totals"]["reads"]), 13);
    drop(client);
    assert!(daemon.log_has("has left after 3 reads"), "{}", daemon.log());
    daemon.finish();
}

#[test]
fn the_socket_is_private_and_goes_away() {
    let (daemon, control) = Daemon::serve_with_control(&["--disk", "null:1M"]);
    let found = std::fs::symlink_metadata(&control).unwrap();
    assert!(found.file_type().is_socket());
    assert_eq!(found.permissions().mode() & 0o7777, 0o600);
    // Somebody who holds on to a connection holds nothing up.
    let held = std::os::unix::net::UnixStream::connect(&control).unwrap();
    let scratch = daemon.scratch().join("");
    daemon.signal(rustix::process::Signal::TERM);
    let mut daemon = daemon;
    let (code, took) = daemon.wait().unwrap();
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(1), "{took:?}");
    let left: Vec<_> = std::fs::read_dir(&scratch)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["log"], "only the test's own file is left");
    drop(held);
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let (mut daemon, control) = Daemon::serve_with_control(&["--disk", "null:1M"]);
    let socket = daemon.scratch().join("other");
    let words = |control: &str| {
        let socket = socket.display().to_string();
        [
            "serve",
            "--disk",
            "null:1M",
            "--socket-path",
            &socket,
            "--control",
            control,
        ]
        .map(str::to_owned)
    };
    let refused = run_to_exit(&words(control.to_str().unwrap()));
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("in use"), "{}", refused.stderr);
    assert!(
        !socket.exists(),
        "a daemon that cannot start leaves no socket"
    );
    assert_eq!(report(&control)["connected"], Value::Bool(false));
    let file = daemon.scratch().join("file");
    std::fs::write(&file, "kept").unwrap();
    let refused = run_to_exit(&words(file.to_str().unwrap()));
    assert_eq!(
        (refused.code, std::fs::read(&file).unwrap()),
        (Some(2), b"kept".to_vec())
    );
    let refused = run_to_exit(&words(&format!("/tmp/{}", "x".repeat(120))));
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    daemon.abandon();
    assert!(
        control.exists(),
        "killed without a word, it left its socket"
    );
    let next = Daemon::with_args(
        Scratch::new(),
        socket.clone(),
        &words(control.to_str().unwrap()),
    );
    assert_eq!(get(&control, "/v1/disks")[0]["id"], "null:1M");
    next.finish();
    assert!(!control.exists());
}

#[test]
fn two_daemons_are_told_apart() {
    let (one, control_one) = Daemon::serve_with_control(&["--disk", "null:1M", "--serial", "one"]);
    let (two, control_two) = Daemon::serve_with_control(&["--disk", "ram:2M", "--serial", "two"]);
    one.open(&small(1)).queue(0).read(0, &mut [0; 512]).unwrap();
    assert_eq!(report(&control_one)["totals"]["reads"], 1);
    assert_eq!(report(&control_two)["totals"]["reads"], 0);
    assert_eq!(fetch(&control_two, "GET", "/v1/disks/one", "").status, 404);
    one.finish();
    assert_eq!(report(&control_two)["id"], "two");
    two.finish();
}

/// On disks that answer on the spot, and on others.
#[test]
fn what_is_tried_on_the_live_load_is_shown() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 64 << 20);
    for disk in ["ram:64M", image.to_str().unwrap()] {
        let (daemon, control) = Daemon::serve_with_control(&["--disk", disk, "--serial", "disk"]);
        let mut client = daemon.open(&small(1));
        let mut reads = |bytes| {
            let time = Duration::from_millis(300);
            let load = Workload::reads(bytes, 2, 32 << 20, time);
            assert_eq!(client.queue(0).run(&load, |_| {}).unwrap().failed, 0);
        };
        let tried = wait_until(|| {
            reads(4096);
            report(&control)["pacing"]["experiments"].as_u64() > Some(0)
        });
        let pacing = &report(&control)["pacing"];
        assert!(tried && pacing["tried"][0].is_object(), "{disk}: {pacing}");
        let tried = wait_until(|| {
            reads(128 << 10);
            report(&control)["splitting"][0]["tried"].is_object()
        });
        let splitting = &report(&control)["splitting"];
        assert!(tried, "{disk}: {splitting}");
        assert_eq!(splitting[0]["from_bytes"], 128 << 10);
        drop(client);
        daemon.finish();
    }
}

/// Guest memory that is not shared looks so from here: kicks, and a ring that never changes. QEMU's own kicks look the same until the
/// guest's first request, and when it connects again.
#[test]
fn kicks_without_a_request_are_warned_of_once() {
    let options = small(2);
    let mut started = [(); 3].map(|()| Daemon::serve_with_control(&["--disk", "null:1M"]));
    let mut clients = started.each_ref().map(|(daemon, _)| daemon.open(&options));
    let [again, _, _] = &mut clients;
    again.queue(0).read(0, &mut [0; 512]).unwrap();
    let next = started[0].0.succeed().unwrap();
    again
        .reconnect(next.socket(), &options, Base::Used)
        .unwrap();
    started[0].0.abandon();
    started[0].0 = next;
    for (client, (daemon, control)) in clients.iter_mut().zip(&started) {
        for _ in 0..3 {
            // Kicks that the worker has not seen yet count as one.
            let kicks = || number(&report(control)["vrings"][1]["kicks"]);
            let before = kicks();
            client.queue(1).ring_kick();
            assert!(wait_until(|| kicks() > before), "{}", daemon.log());
        }
    }
    let [mut again, mut used, hanging] = clients;
    used.queue(0).read(0, &mut [0; 512]).unwrap();
    let [fine @ .., (hangs, _)] = started;
    let warned = hangs.log_has("its memory is not shared: give the VMM's memory backend share=on");
    assert!(warned, "{}", hangs.log());
    drop(hanging);
    let mut client = hangs.open(&small(1));
    client.queue(0).read(0, &mut [0; 512]).unwrap();
    again.queue(0).read(0, &mut [0; 512]).unwrap();
    drop((client, again, used));
    let log = hangs.log();
    assert_eq!(log.matches("share=on").count(), 1, "{log}");
    hangs.finish();
    for (daemon, _) in fine {
        assert!(!daemon.log().contains("share=on"), "{}", daemon.log());
        daemon.finish();
    }
}
