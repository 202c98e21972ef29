//! `--on-error` from outside: a disk that fails and recovers causes no error for its guest.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cleave_client::message::protocol;
use cleave_client::{Base, Client, Error};
use cleave_tests::http::{fetch, get};
use cleave_tests::{
    Case, Daemon, Exited, Mount, Requirement, Scratch, Stopwatch, TIMEOUT, assert_serves, pattern,
    run_to_exit, small, wait_until, writes_all,
};
use rustix::process::Signal;
use serde_json::{Value, json};

const DISK: u64 = 64 << 20;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_full_disk_holds_its_guest_until_there_is_room: Requirement::Root,
        a_full_disk_is_retried_until_there_is_room: Requirement::Root,
        held_requests_are_ended_when_the_operator_gives_up,
        a_held_vring_costs_nothing_and_the_others_continue,
        a_held_request_delays_neither_the_frontend_nor_the_exit,
        a_held_request_that_the_frontend_keeps_outlives_connection_and_daemon,
        a_vring_that_was_reset_with_a_held_request_has_no_position,
        the_policy_is_changed_while_the_disk_is_served,
        resume_and_fail_need_a_held_request,
    ]
}

/// A daemon with this policy and a control socket, and the path of that socket.
fn serve(on_error: &str, disk: &Path, more: &[&str]) -> (Daemon, PathBuf) {
    let disk = disk.to_str().unwrap();
    let args = ["--disk", disk, "--on-error", on_error, "--serial", "disk"];
    Daemon::serve_with_control(&[&args, more].concat())
}

fn stalled(control: &Path) -> Value {
    get(control, "/v1/disks/disk")["stalled"].clone()
}

fn holds(control: &Path) -> bool {
    stalled(control)[0]["held"].as_u64() > Some(0)
}

/// Runs `cleave disk` with these words for the disk of this socket.
fn order(words: &str, control: &Path) -> Exited {
    let words = words.split(' ');
    let line: Vec<_> = ["disk"].into_iter().chain(words).collect();
    run_to_exit(&[&*line, &["--control", control.to_str().unwrap()]].concat())
}

const RESUME: &str = "resume --held";

fn io_error(result: &Result<(), Error>) -> bool {
    matches!(result, Err(Error::Status { status: 1, .. }))
}

/// Truncates the disk's file, or restores its length, and waits until the daemon has noticed.
fn resize(image: &Path, bytes: u64, daemon: &Daemon) {
    let file = File::options().write(true).open(image).unwrap();
    let lines = |daemon: &Daemon| daemon.log().matches("has shrunk").count();
    let before = lines(daemon);
    file.set_len(bytes).unwrap();
    // The daemon may not watch the file yet.
    daemon.signal(Signal::HUP);
    if bytes < DISK {
        assert!(wait_until(|| lines(daemon) > before), "{}", daemon.log());
    }
}

/// Length to which the file is cut, and an offset beyond it.
const CUT: u64 = 32 << 20;
const BEYOND: u64 = 40 << 20;

/// A daemon on a disk whose file was cut, so that requests beyond the cut fail with EIO.
fn cut_disk(scratch: &Scratch, on_error: &str) -> (Daemon, PathBuf, PathBuf) {
    let image = scratch.image("disk", DISK);
    let (daemon, control) = serve(on_error, &image, &[]);
    resize(&image, CUT, &daemon);
    (daemon, control, image)
}

/// A file system of 16 MiB with a larger disk on it, and the file that fills it.
fn full_disk(scratch: &Scratch) -> (Mount, PathBuf, PathBuf) {
    let mount = Mount::tmpfs(scratch, 16 << 20).unwrap();
    let [image, filler] = ["disk", "filler"].map(|name| mount.path().join(name));
    File::create(&image).unwrap().set_len(DISK).unwrap();
    std::fs::write(&filler, vec![1; 12 << 20]).unwrap();
    (mount, image, filler)
}

/// To the first 12 MiB, several requests at a time on two vrings.
fn fills(daemon: &Daemon, meanwhile: impl FnOnce() + Send) {
    let fill = pattern(64 << 10, 8, 12 << 20, 192);
    writes_all(&mut daemon.open(&small(2)), &fill, meanwhile);
}

fn a_full_disk_holds_its_guest_until_there_is_room() {
    let scratch = Scratch::new();
    let (_mount, image, filler) = full_disk(&scratch);
    let (daemon, control) = serve("enospc=hold", &image, &["--direct", "off"]);
    fills(&daemon, || {
        assert!(wait_until(|| holds(&control)), "{}", daemon.log());
        let shown = &stalled(&control)[0];
        assert_eq!(
            (&shown["verb"], &shown["errno"]),
            (&json!("write"), &json!(28))
        );
        assert!(daemon.log_has("is held: a write at sector"));
        let metrics = fetch(&control, "GET", "/metrics", "").body;
        assert!(
            metrics.contains("cleave_held_requests{disk=\"disk\",vring=\""),
            "{metrics}"
        );
        let text = run_to_exit(&["stats", control.to_str().unwrap()]).stdout;
        assert!(text.contains("No space left on device"), "{text}");
        // Still full: held once more, and no error.
        let ended = order(RESUME, &control);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(
            ended
                .stdout
                .starts_with("disk: held requests are done again: ")
        );
        assert!(wait_until(|| holds(&control)));
        std::fs::remove_file(&filler).unwrap();
        // With several vrings, one may be held a moment later than the others.
        let goes_on = wait_until(|| {
            assert_eq!(order(RESUME, &control).code, Some(0));
            !holds(&control)
        });
        assert!(goes_on, "{}", stalled(&control));
    });
    let report = get(&control, "/v1/disks/disk");
    assert_eq!(
        (&report["stalled"], &report["totals"]["failed"]),
        (&json!([]), &json!(0))
    );
    assert!(report["totals"]["held"].as_u64() >= Some(2), "{report}");
    assert_eq!(
        daemon.log().matches("is held").count(),
        daemon.log().matches("The guest waits").count()
    );
    daemon.finish();
}

fn a_full_disk_is_retried_until_there_is_room() {
    let scratch = Scratch::new();
    let (_mount, image, filler) = full_disk(&scratch);
    let (daemon, control) = serve("retry:60", &image, &["--direct", "off"]);
    fills(&daemon, || {
        let retries = || stalled(&control)[0]["retrying"].as_u64() > Some(0);
        assert!(wait_until(retries), "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(300));
        assert!(wait_until(retries), "{}", daemon.log());
        std::fs::remove_file(&filler).unwrap();
    });
    let report = get(&control, "/v1/disks/disk");
    let totals = &report["totals"];
    assert_eq!(
        (&report["stalled"], &totals["failed"], &totals["held"]),
        (&json!([]), &json!(0), &json!(0))
    );
    assert!(totals["redone"].as_u64() > Some(0), "{report}");
    daemon.finish();
    // The same without free space: one error, at the end and not before.
    let (daemon, _) = serve("retry:1", &image, &["--direct", "off"]);
    std::fs::write(&filler, vec![1; 3 << 20]).unwrap();
    let mut client = daemon.open(&small(1));
    let began = Instant::now();
    let mut failed = Ok(());
    for turn in 12..20 {
        failed = client.queue(0).write(turn << 20, &[1; 1 << 20]);
        if failed.is_err() {
            break;
        }
    }
    assert!(io_error(&failed), "{failed:?}");
    assert!(began.elapsed() >= Duration::from_secs(1));
    drop(client);
    daemon.finish();
}

fn held_requests_are_ended_when_the_operator_gives_up() {
    let scratch = Scratch::new();
    let (daemon, control, image) = cut_disk(&scratch, "hold");
    let mut client = daemon.open(&small(1));
    let queue = client.queue(0);
    for (words, is_error) in [("fail disk", true), (RESUME, false)] {
        std::thread::scope(|scope| {
            let write = scope.spawn(|| queue.write(BEYOND, &[7; 4096]));
            assert!(wait_until(|| holds(&control)), "{}", daemon.log());
            let shown = stalled(&control)[0].clone();
            let expected = json!({"vring": 0, "held": 1, "retrying": 0, "verb": "write",
                "sector": BEYOND / 512, "errno": 5, "error": "Input/output error (os error 5)",
                "seconds": shown["seconds"]});
            assert_eq!(shown, expected);
            if !is_error {
                resize(&image, DISK, &daemon);
                assert!(wait_until(
                    || get(&control, "/v1/disks/disk")["store"]["size_bytes"] == DISK
                ));
            }
            // The daemon may notice the new size a little later than the test.
            let ended = wait_until(|| {
                let ended = order(words, &control);
                assert_eq!(ended.code, Some(0), "{}", ended.stderr);
                wait_until(|| stalled(&control)[0]["retrying"] != 1);
                !holds(&control)
            });
            assert!(ended, "{}", stalled(&control));
            let result = write.join().unwrap();
            assert_eq!(io_error(&result), is_error, "{result:?}");
        });
    }
    let mut back = [0; 4096];
    queue.read(BEYOND, &mut back).unwrap();
    assert!(back == [7; 4096]);
    drop(client);
    assert_serves(&daemon).unwrap();
    daemon.finish();
}

fn a_held_vring_costs_nothing_and_the_others_continue() {
    for completion in ["poll", "adaptive"] {
        let scratch = Scratch::new();
        let image = scratch.image("disk", DISK);
        let more = ["--completion", completion, "--workers", "1"];
        let (daemon, control) = serve("hold", &image, &more);
        resize(&image, CUT, &daemon);
        let mut client = daemon.open(&small(2));
        client.queue(0).set_timeout(Duration::from_millis(500));
        let stuck = client.queue(0).read(BEYOND, &mut [0; 4096]);
        assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
        assert!(wait_until(|| holds(&control)), "{}", daemon.log());
        for turn in 0..100 {
            client
                .queue(1)
                .write(turn << 12, &[turn as u8; 4096])
                .unwrap();
        }
        client.queue(1).flush().unwrap();
        assert!(holds(&control));
        if completion == "adaptive" {
            daemon.stays_at_rest().unwrap();
        }
        drop(client);
        daemon.finish();
    }
}

/// The guest gets an error then: without an in-flight region, no other daemon could answer the request.
fn a_held_request_delays_neither_the_frontend_nor_the_exit() {
    let scratch = Scratch::new();
    let (mut daemon, control, _) = cut_disk(&scratch, "hold");
    let hold = |client: &mut Client| {
        client.queue(0).set_timeout(Duration::from_millis(300));
        let stuck = client.queue(0).write(BEYOND, &[1; 4096]);
        assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
        assert!(wait_until(|| holds(&control)));
    };
    // A frontend that asks for the vring's position gets it at once, and the request back.
    let mut client = daemon.open(&small(1));
    hold(&mut client);
    let watch = Stopwatch::start();
    assert_eq!(client.frontend().vring_base(0).unwrap(), 1);
    assert!(watch.elapsed() < Duration::from_secs(1));
    client.queue(0).wait_used().unwrap();
    assert!(wait_until(|| stalled(&control) == json!([])));
    assert!(daemon.log_has("I/O errors for 1 requests that were held or waited for a retry"));
    drop(client);
    // A frontend that disconnects does not block the next one.
    let mut client = daemon.open(&small(1));
    hold(&mut client);
    drop(client);
    let mut client = daemon.open(&small(1));
    client.queue(0).read(0, &mut [0; 4096]).unwrap();
    // Nor does it delay the exit.
    hold(&mut client);
    daemon.signal(Signal::TERM);
    match daemon.wait() {
        Some((Some(0), took)) if took < Duration::from_millis(1500) => {}
        other => panic!("{other:?}\n{}", daemon.log()),
    }
}

/// If the frontend keeps the requests in flight, a held request stays in its region: the next connection takes it
/// over, and so does the next daemon.
fn a_held_request_that_the_frontend_keeps_outlives_connection_and_daemon() {
    let scratch = Scratch::new();
    let (mut daemon, control, image) = cut_disk(&scratch, "hold");
    let socket = daemon.socket().to_owned();
    let mut keeps = small(1);
    keeps.protocol_features |= protocol::INFLIGHT_SHMFD;
    let mut client = daemon.open(&keeps);
    client.queue(0).set_timeout(Duration::from_millis(300));
    let stuck = client.queue(0).write(BEYOND, &[7; 4096]);
    assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
    assert!(wait_until(|| holds(&control)));
    // A position would claim that nothing is in flight. The daemon closes the connection instead.
    let result = client.frontend().vring_base(0);
    assert!(matches!(result, Err(Error::Closed)), "{result:?}");
    let come_back = |client: &mut Client| {
        let came = wait_until(|| client.reconnect(&socket, &keeps, Base::Used).is_ok());
        assert!(came, "no connection");
    };
    come_back(&mut client);
    assert!(wait_until(|| holds(&control)), "the retry must fail again");
    daemon.signal(Signal::TERM);
    match daemon.wait() {
        Some((Some(0), took)) if took < Duration::from_millis(1500) => {}
        other => panic!("{other:?}\n{}", daemon.log()),
    }
    assert!(
        daemon.log().contains("left to the next daemon"),
        "{}",
        daemon.log()
    );
    File::options()
        .write(true)
        .open(&image)
        .unwrap()
        .set_len(DISK)
        .unwrap();
    let args = ["serve", "--socket-path", socket.to_str().unwrap(), "--disk"];
    let args = [&args[..], &[image.to_str().unwrap()]].concat();
    let next = Daemon::with_args(Scratch::new(), socket.clone(), &args);
    come_back(&mut client);
    let queue = client.queue(0);
    queue.set_timeout(TIMEOUT);
    queue.wait_used().unwrap();
    let mut back = [0; 4096];
    queue.read(BEYOND, &mut back).unwrap();
    assert!(back == [7; 4096]);
    drop(client);
    next.finish();
}

/// QEMU before 8.1 pauses a guest by status 0 and asks for the positions then.
fn a_vring_that_was_reset_with_a_held_request_has_no_position() {
    let scratch = Scratch::new();
    let (daemon, control, _) = cut_disk(&scratch, "hold");
    let mut keeps = small(1);
    keeps.protocol_features |= protocol::INFLIGHT_SHMFD;
    let mut client = daemon.open(&keeps);
    for turn in 0..3 {
        client.queue(0).write(turn << 12, &[1; 4096]).unwrap();
    }
    client.queue(0).set_timeout(Duration::from_millis(300));
    let stuck = client.queue(0).write(BEYOND, &[7; 4096]);
    assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
    assert!(wait_until(|| holds(&control)), "{}", daemon.log());
    client.frontend().set_status(0).unwrap();
    // With the position at which it started, the guest's writes would be done once more.
    let result = client.frontend().vring_base(0);
    assert!(matches!(result, Err(Error::Closed)), "{result:?}");
    drop(client);
    daemon.finish();
}

fn the_policy_is_changed_while_the_disk_is_served() {
    let scratch = Scratch::new();
    let (daemon, control, _) = cut_disk(&scratch, "report");
    let mut client = daemon.open(&small(1));
    let queue = client.queue(0);
    assert!(io_error(&queue.read(BEYOND, &mut [0; 512])));
    let set = |policy: &str, shown: &str| {
        let body = json!({ "on_error": policy }).to_string();
        let answer = fetch(&control, "PATCH", "/v1/disks/disk", &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.json()["tuning"]["on_error"], shown);
    };
    set("read=hold", "read=hold,write=report,enospc=report");
    assert!(io_error(&queue.write(BEYOND, &[0; 512])));
    queue.set_timeout(Duration::from_millis(300));
    let stuck = queue.read(BEYOND, &mut [0; 512]);
    assert!(matches!(stuck, Err(Error::TimedOut { .. })), "{stuck:?}");
    queue.set_timeout(TIMEOUT);
    assert!(wait_until(|| holds(&control)), "{}", daemon.log());
    set("report", "report");
    let answer = fetch(&control, "POST", "/v1/disks/disk/resume", "");
    assert_eq!(
        (answer.status, answer.json()),
        (200, json!({"requests": 1, "quiesced": false}))
    );
    assert!(wait_until(|| stalled(&control) == json!([])));
    queue.wait_used().unwrap();
    assert!(io_error(&queue.read(BEYOND, &mut [0; 512])));
    drop(client);
    daemon.finish();
}

fn resume_and_fail_need_a_held_request() {
    let scratch = Scratch::new();
    let (daemon, control) = serve("retry:60:hold", &scratch.image("disk", DISK), &[]);
    for (word, words) in [("resume", RESUME), ("fail", "fail disk")] {
        let ended = order(words, &control);
        assert_eq!(
            (ended.code, ended.stdout.as_str()),
            (Some(0), "disk: no request was held\n")
        );
        let path = format!("/v1/disks/disk/{word}");
        assert_eq!(fetch(&control, "GET", &path, "").status, 405);
        // `resume` takes the name of a quiet; `fail` takes nothing.
        let junk = fetch(&control, "POST", &path, "{\"junk").status;
        assert_eq!(junk, if word == "resume" { 400 } else { 200 });
        assert_eq!(fetch(&control, "POST", &path, "").status, 200);
        let other = format!("/v1/disks/other/{word}");
        assert_eq!(fetch(&control, "POST", &other, "").status, 404);
        let ended = order(words, &scratch.join("none"));
        assert_eq!(ended.code, Some(1));
        assert!(ended.stderr.contains("no such socket"), "{}", ended.stderr);
    }
    assert_eq!(
        fetch(&control, "POST", "/v1/disks/disk/retire", "").status,
        404
    );
    daemon.finish();
}
