//! `quiesce`, `flush` and `snapshot`: for a moment nothing is written, the guest only waits, and goes on.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleave_client::{Client, OffsetOrder, Stop, Verify, Workload};
use cleave_tests::http::{Response, fetch, get};
use cleave_tests::{
    Case, Daemon, EndOf, Mount, Requirement, Scratch, TIMEOUT, UnresponsiveFs, assert_serves,
    exercise, small, wait_until,
};
use serde_json::json;

const DISK: u64 = 16 << 20;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        nothing_is_written_while_a_disk_is_quiesced,
        a_quiet_ends_by_itself,
        frontends_come_and_go_while_it_lasts,
        what_makes_no_sense_is_refused_in_a_line,
        a_disk_that_hangs_is_not_quiesced_and_goes_on: Requirement::Root,
        a_disk_that_is_resumed_while_it_flushes_is_not_called_quiesced: Requirement::Root,
        a_snapshot_has_what_the_disk_had_at_one_moment: Requirement::Root,
        snapshots_into_a_folder_that_hangs_do_not_pile_up: Requirement::Root,
        what_cannot_be_cloned_says_why,
    ]
}

fn serve(disk: &str, more: &[&str]) -> (Daemon, PathBuf) {
    let args = ["--disk", disk, "--serial", "disk"];
    Daemon::serve_with_control_in(Scratch::in_memory(), &[&args, more].concat())
}

fn post(control: &Path, what: &str, body: &str) -> Response {
    fetch(control, "POST", &format!("/v1/disks/disk/{what}"), body)
}

fn quiesce(control: &Path, seconds: u64) -> Response {
    post(
        control,
        "quiesce",
        &json!({ "seconds": seconds }).to_string(),
    )
}

fn writes(control: &Path) -> u64 {
    let report = get(control, "/v1/disks/disk");
    report["totals"]["writes"].as_u64().unwrap()
}

/// Writes and checks a pattern on two vrings, several requests at a time, until `meanwhile` has ended.
fn under_load(daemon: &Daemon, meanwhile: impl FnOnce() + Send) {
    let mut client = daemon.open(&small(2));
    let load = Workload {
        read_percent: 30,
        order: OffsetOrder::Random,
        stop: Stop::Requests(u64::MAX),
        verify: Verify::Pattern(7),
        ..Workload::reads(16 << 10, 8, 8 << 20, Duration::ZERO)
    };
    let fill = Workload {
        read_percent: 0,
        order: OffsetOrder::Sequential,
        stop: Stop::Requests(512),
        ..load.clone()
    };
    client.run(&fill, |_| |_| {}).unwrap();
    let done = AtomicBool::new(false);
    let load = Workload {
        abort: Some(&done),
        ..load
    };
    std::thread::scope(|scope| {
        let meanwhile = scope.spawn(|| {
            let ended = catch_unwind(AssertUnwindSafe(meanwhile));
            done.store(true, Ordering::Relaxed);
            ended
        });
        let tallies = client.run(&load, |_| |_| {}).unwrap();
        assert!(tallies.iter().all(|tally| tally.failed == 0), "{tallies:?}");
        if let Err(panic) = meanwhile.join().unwrap() {
            resume_unwind(panic);
        }
    });
}

fn nothing_is_written_while_a_disk_is_quiesced() {
    for completion in ["adaptive", "poll", "interrupt"] {
        // The quiet lasts a minute, and a flush half of one, whatever the disk does.
        let scratch = Scratch::in_memory();
        let image = scratch.image("disk", DISK);
        let (daemon, control) = serve(image.to_str().unwrap(), &["--completion", completion]);
        under_load(&daemon, || {
            let before = writes(&control);
            assert!(wait_until(|| writes(&control) > before));
            let answer = quiesce(&control, 60);
            assert_eq!(answer.status, 200, "{}", answer.body);
            assert_eq!(answer.json()["state"], "quiesced");
            let (copy, count) = (fs::read(&image).unwrap(), writes(&control));
            if completion != "poll" {
                daemon.stays_at_rest().unwrap();
            }
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(writes(&control), count);
            assert!(fs::read(&image).unwrap() == copy);
            let report = get(&control, "/v1/disks/disk");
            assert!(report["quiesced_seconds"].as_f64().unwrap() < 60.0);
            let metrics = fetch(&control, "GET", "/metrics", "").body;
            assert!(
                metrics.contains("\ncleave_quiesced{disk=\"disk\"} 1\n"),
                "{metrics}"
            );
            assert_eq!(quiesce(&control, 60).status, 409);
            assert_eq!(post(&control, "resume", "").status, 200);
            assert!(wait_until(|| writes(&control) > count), "{}", daemon.log());
            let report = get(&control, "/v1/disks/disk");
            assert_eq!(report["quiesced_seconds"], json!(null));
            assert_eq!(post(&control, "flush", "").status, 200);
        });
        daemon.finish();
    }
}

fn a_quiet_ends_by_itself() {
    let (daemon, control) = serve("ram:16M", &[]);
    let mut client = daemon.open(&small(1));
    exercise(&mut client).unwrap();
    let start = Instant::now();
    assert_eq!(quiesce(&control, 3).status, 200);
    exercise(&mut client).unwrap();
    let waited = start.elapsed();
    assert!(
        waited >= Duration::from_millis(2990) && waited < TIMEOUT,
        "{waited:?}"
    );
    assert!(daemon.log_has("goes on"));
    drop(client);
    daemon.finish();
}

/// A vring stops, and another starts, without a request to the disk. The new one waits like the old.
fn frontends_come_and_go_while_it_lasts() {
    let (daemon, control) = serve("ram:16M", &[]);
    let mut client = daemon.open(&small(2));
    exercise(&mut client).unwrap();
    assert_eq!(quiesce(&control, 60).status, 200);
    drop(client);
    let mut client = daemon.open(&small(1));
    client.queue(0).set_timeout(Duration::from_millis(300));
    assert!(client.queue(0).read(0, &mut [0; 4096]).is_err());
    drop(client);
    assert_eq!(post(&control, "resume", "").status, 200);
    assert_serves(&daemon).unwrap();
    // The end does not wait for it either.
    assert_eq!(quiesce(&control, 60).status, 200);
    daemon.finish();
}

fn what_makes_no_sense_is_refused_in_a_line() {
    let (daemon, control) = serve("ram:16M", &[]);
    for (body, named) in [
        ("{\"seconds\": 0}", "seconds: 0 is not 1 to 60"),
        ("{\"seconds\": 61}", "seconds: 61 is not 1 to 60"),
        ("{\"seconds\": -1}", "seconds"),
        ("{\"minutes\": 1}", "minutes"),
        ("[]x", "send {\"seconds\": 10}"),
    ] {
        let answer = post(&control, "quiesce", body);
        assert_eq!(answer.status, 400, "{body}: {}", answer.body);
        let error = answer.error();
        assert!(
            error.contains(named) && error.lines().count() == 1,
            "{body}: {error}"
        );
    }
    assert_eq!(post(&control, "quiesce", "").status, 200);
    assert_eq!(post(&control, "resume", "").status, 200);
    daemon.finish();
}

fn a_disk_that_hangs_is_not_quiesced_and_goes_on() {
    let scratch = Scratch::in_memory();
    let silent = UnresponsiveFs::mount(&scratch, DISK).unwrap();
    let (daemon, control) = serve(silent.file().to_str().unwrap(), &["--direct", "off"]);
    let mut client = daemon.open(&small(1));
    silent.hold(true);
    let read = std::thread::spawn(move || {
        let done = client.queue(0).read(0, &mut [0; 4096]);
        (client, done)
    });
    let in_flight = || get(&control, "/v1/disks/disk")["in_flight"]["requests"] == json!(1);
    assert!(wait_until(in_flight));
    let start = Instant::now();
    let answer = quiesce(&control, 1);
    assert_eq!(answer.status, 503, "{}", answer.body);
    assert!(
        answer.error().contains("still in flight"),
        "{}",
        answer.body
    );
    assert!(start.elapsed() < Duration::from_secs(60));
    silent.release();
    let (mut client, done) = read.join().unwrap();
    done.unwrap();
    client.queue(0).read(8192, &mut [0; 4096]).unwrap();
    drop(client);
    daemon.finish();
}

fn a_disk_that_is_resumed_while_it_flushes_is_not_called_quiesced() {
    let scratch = Scratch::in_memory();
    let silent = UnresponsiveFs::mount(&scratch, DISK).unwrap();
    let (daemon, control) = serve(silent.file().to_str().unwrap(), &["--direct", "off"]);
    let mut client = daemon.open(&small(1));
    client.queue(0).write(0, &[7; 4096]).unwrap();
    silent.hold(true);
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| quiesce(&control, 30));
        assert!(wait_until(|| silent.held() == 1));
        assert_eq!(post(&control, "resume", "").status, 200);
        silent.release();
        let answer = asked.join().unwrap();
        assert_eq!(answer.status, 409, "{}", answer.body);
        assert!(answer.error().contains("resumed"), "{}", answer.body);
    });
    assert_eq!(quiesce(&control, 5).status, 200);
    assert_eq!(post(&control, "resume", "").status, 200);
    drop(client);
    daemon.finish();
}

fn snapshots_into_a_folder_that_hangs_do_not_pile_up() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("image", DISK);
    let silent = UnresponsiveFs::mount(&scratch, DISK).unwrap();
    let (daemon, control, _) = node(&image);
    let to = json!({ "to": silent.file().with_file_name("copy") }).to_string();
    silent.stop_answering();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| post(&control, "snapshot", &to));
        assert!(wait_until(|| snapshots(&daemon) > 0));
        for _ in 0..5 {
            let answer = post(&control, "snapshot", &to);
            assert_eq!(answer.status, 409, "{}", answer.body);
        }
        assert_eq!(snapshots(&daemon), 1);
        drop(silent);
        assert!(first.join().unwrap().status >= 400);
    });
    daemon.finish();
}

/// The threads of a daemon that take snapshots.
fn snapshots(daemon: &Daemon) -> usize {
    let threads = daemon.named_threads().into_iter();
    threads.filter(|(_, name)| name == "snapshot").count()
}

/// A node with one disk, `disk`.
fn node(image: &Path) -> (Daemon, PathBuf, PathBuf) {
    let scratch = Scratch::in_memory();
    let (state, run) = (scratch.join("state"), scratch.join("run"));
    let control = run.join("control.sock");
    let line = [
        "node",
        "--state",
        state.to_str().unwrap(),
        "--run",
        run.to_str().unwrap(),
    ];
    let daemon = Daemon::with_args(scratch, control.clone(), &line);
    let body = json!({"disk": [image], "queues": 1, "persistent": false}).to_string();
    let added = fetch(&control, "PUT", "/v1/disks/disk", &body);
    assert_eq!(added.status, 201, "{}", added.body);
    let socket = run.join("disk/disk.sock");
    (daemon, control, socket)
}

/// The guest writes a number to one block, and when that is done to another. A snapshot has both, or the first alone is one
/// ahead.
fn a_snapshot_has_what_the_disk_had_at_one_moment() {
    // The daemon gives a snapshot ten seconds, which a busy disk may take for one flush.
    let scratch = Scratch::in_memory();
    let mount = Mount::xfs(&scratch, 512 << 20).unwrap();
    let image = mount.path().join("disk");
    fs::File::create(&image).unwrap().set_len(DISK).unwrap();
    let (daemon, control, socket) = node(&image);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = Client::open(&socket, &small(1)).unwrap();
            let mut count = 0_u64;
            while !over.load(Ordering::Relaxed) {
                count += 1;
                for block in [0, 8 << 20] {
                    let data: Vec<u8> = count.to_le_bytes().repeat(512);
                    client.queue(0).write(block, &data).unwrap();
                }
            }
        });
        let end = EndOf(&over);
        for round in 0..5 {
            let to = mount.path().join(format!("copy{round}"));
            let answer = post(&control, "snapshot", &json!({ "to": to }).to_string());
            assert_eq!(answer.status, 201, "{}", answer.body);
            println!("the guest waited {} ms", answer.json()["guest_waited_ms"]);
            let copy = fs::read(&to).unwrap();
            assert_eq!(copy.len() as u64, DISK);
            let at =
                |offset: usize| u64::from_le_bytes(copy[offset..offset + 8].try_into().unwrap());
            let (first, second) = (at(0), at(8 << 20));
            assert!(
                first == second || first == second + 1,
                "{first} and {second}"
            );
            let again = post(&control, "snapshot", &json!({ "to": to }).to_string());
            assert_eq!(again.status, 422, "{}", again.body);
        }
        drop(end);
        writer.join().unwrap();
    });
    daemon.finish();
}

fn what_cannot_be_cloned_says_why() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("disk", DISK);
    let (daemon, control, socket) = node(&image);
    let to = scratch.join("copy");
    for (body, status, named) in [
        (json!({ "to": to }), 422, "cannot share blocks"),
        (json!({ "to": "copy" }), 400, "not an absolute path"),
        (
            json!({ "to": "/no/such/folder/copy" }),
            422,
            "/no/such/folder/copy",
        ),
        (json!({ "too": to }), 400, "`too`"),
        (json!({}), 400, "`to`"),
    ] {
        let answer = post(&control, "snapshot", &body.to_string());
        assert_eq!(answer.status, status, "{body}: {}", answer.body);
        let error = answer.error();
        assert!(
            error.contains(named) && error.lines().count() == 1,
            "{body}: {error}"
        );
        assert!(!to.exists());
    }
    exercise(&mut Client::open(&socket, &small(1)).unwrap()).unwrap();
    daemon.finish();
}
