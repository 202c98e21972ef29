//! A server fails requests, is killed and restarted, or attacks: the guest waits, and loses nothing.

use std::path::PathBuf;
use std::time::Duration;

use cleave_client::Error;
use cleave_tests::http::{events, fetch};
use cleave_tests::nbd::{Export, NbdServer, Reaction, chunk, data_at};
use cleave_tests::{
    Case, Messages as _, Scratch, assert_serves, outliving, run, small, wait_until, writes_all,
};
use serde_json::json;

use crate::servers::{
    At, NBDKIT, QEMU, SIZE, Server, holds, load, qemu_nbd, report, resume, serve,
};

/// Where the driver switches its write cache.
const WCE_AT: u32 = 32;

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        errors_of_the_server_are_reported_or_retried: NBDKIT,
        errors_of_the_server_are_held_until_the_operator_resumes: NBDKIT,
        a_server_that_is_killed_and_restarted_costs_a_pause_and_no_error: QEMU,
        a_killed_server_of_a_qcow2_image_loses_nothing_that_it_answered: QEMU,
        a_cache_that_is_switched_off_without_a_server_is_flushed_later,
        writes_that_outlive_their_guest_are_told_of_and_sent_again,
        an_attacking_server_takes_only_its_own_disk_with_it,
    ]
}

/// The VMM does not wait for the server meanwhile.
fn a_cache_that_is_switched_off_without_a_server_is_flushed_later() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(8 << 20));
    let uri = server.uri("&reconnect=600&fence=1");
    let (daemon, control) = serve(&uri, &["--on-error", "hold"]);
    let mut client = daemon.open(&outliving());
    client.queue(0).write(0, &[1; 4096]).unwrap();
    server.accept(false);
    server.hang_up();
    let lost = || report(&control)["store"]["connections"]["lost"] != json!(0);
    assert!(wait_until(lost), "{}", daemon.log());
    std::thread::scope(|scope| {
        let switched = scope.spawn(|| client.frontend().set_config(WCE_AT, &[0]).unwrap());
        let is_answered = wait_until(|| switched.is_finished());
        assert_eq!(server.flushes(), 0);
        // An answer that waits comes then, and the test ends.
        server.accept(true);
        assert!(is_answered, "{}", daemon.log());
    });
    client.queue(0).write(4096, &[2; 4096]).unwrap();
    assert!(server.flushes() > 0, "{}", daemon.log());
    drop(client);
    daemon.finish();
}

/// nbdkit whose writes fail while a file is there.
fn failing_server(scratch: &Scratch) -> (Server, At, PathBuf) {
    let at = At::Unix(scratch.join("nbd"));
    let (socket, trigger) = (scratch.join("nbd"), scratch.join("trigger"));
    let file = format!("error-file={}", trigger.display());
    let socket = socket.to_str().unwrap();
    let args = [
        "nbdkit",
        "-f",
        "-U",
        socket,
        "--filter=error",
        "memory",
        "64M",
        "error=ENOSPC",
        "error-pwrite-rate=100%",
        &file,
    ];
    (Server::start(&args, &at), at, trigger)
}

fn errors_of_the_server_are_reported_or_retried() {
    let scratch = Scratch::in_memory();
    let (_server, at, trigger) = failing_server(&scratch);
    for (on_error, is_error) in [("report", true), ("retry:60", false)] {
        let (daemon, control) = serve(&at.uri("", ""), &["--on-error", on_error]);
        let mut client = daemon.open(&small(1));
        std::fs::write(&trigger, "").unwrap();
        let retries = || report(&control)["stalled"][0]["retrying"].as_u64() > Some(0);
        let result = std::thread::scope(|scope| {
            let write = scope.spawn(|| client.queue(0).write(0, &[7; 4096]));
            // The server fails requests until one was failed.
            assert!(wait_until(|| write.is_finished() || retries()));
            std::fs::remove_file(&trigger).unwrap();
            write.join().unwrap()
        });
        let failed = matches!(result, Err(Error::Status { status: 1, .. }));
        assert_eq!(failed, is_error, "{on_error}: {result:?}");
        assert!(is_error || result.is_ok());
        drop(client);
        daemon.finish();
    }
}

fn errors_of_the_server_are_held_until_the_operator_resumes() {
    let scratch = Scratch::in_memory();
    let (_server, at, trigger) = failing_server(&scratch);
    let (daemon, control) = serve(&at.uri("", ""), &["--on-error", "enospc=hold"]);
    let mut client = daemon.open(&small(1));
    std::fs::write(&trigger, "").unwrap();
    std::thread::scope(|scope| {
        let write = scope.spawn(|| client.queue(0).write(0, &[7; 4096]));
        assert!(wait_until(|| holds(&control)), "{}", daemon.log());
        assert_eq!(report(&control)["stalled"][0]["errno"], json!(28));
        std::fs::remove_file(&trigger).unwrap();
        assert_eq!(resume(&control), Some(0));
        write.join().unwrap().unwrap();
    });
    let mut back = [0; 4096];
    client.queue(0).read(0, &mut back).unwrap();
    assert_eq!(back, [7; 4096]);
    drop(client);
    daemon.finish();
}

/// Long enough for some restarts of a server.
fn a_server_that_is_killed_and_restarted_costs_a_pause_and_no_error() {
    for is_unix in [true, false] {
        let scratch = Scratch::in_memory();
        let image = scratch.image("image", SIZE);
        let at = match is_unix {
            true => At::Unix(scratch.join("nbd")),
            false => At::tcp(),
        };
        // Over a unix socket it is seen that the process has ended, and the fence of 30 s is not waited for.
        let options = match is_unix {
            true => "reconnect=600",
            false => "reconnect=600&fence=1",
        };
        let mut server = qemu_nbd(&image, "raw", &at, &["--shared", "8"]);
        let (daemon, control) = serve(&at.uri("", options), &["--on-error", "hold"]);
        // The load ends before the last kill, or after it: the data must be right either way.
        writes_all(&mut daemon.open(&small(2)), &load(), || {
            for _ in 0..3 {
                std::thread::sleep(Duration::from_millis(60));
                server.kill();
                std::thread::sleep(Duration::from_millis(60));
                server.restart(&at);
            }
        });
        let reconnects = || report(&control)["store"]["connections"]["reconnects"].as_u64();
        assert!(
            wait_until(|| reconnects() >= Some(1)),
            "{}",
            report(&control)
        );
        assert_eq!(report(&control)["totals"]["failed"], json!(0));
        assert_eq!(report(&control)["totals"]["held"], json!(0));
        let metrics = fetch(&control, "GET", "/metrics", "").body;
        for family in [
            "cleave_nbd_connections{disk=\"disk\",state=\"up\"}",
            "cleave_nbd_connections_lost_total",
            "cleave_nbd_reconnects_total",
        ] {
            assert!(metrics.contains(family), "{metrics}");
        }
        assert!(daemon.log_has("connected to the NBD server again"));
        assert!(!daemon.log().contains("confined less"), "{}", daemon.log());
        daemon.finish();
    }
}

/// qemu-nbd keeps the tables of a qcow2 image in its memory until a flush.
fn a_killed_server_of_a_qcow2_image_loses_nothing_that_it_answered() {
    let scratch = Scratch::in_memory();
    let image = scratch.join("image");
    run(
        "qemu-img",
        &["create", "-f", "qcow2", image.to_str().unwrap(), "64M"],
    )
    .unwrap();
    let at = At::Unix(scratch.join("nbd"));
    let mut server = qemu_nbd(&image, "qcow2", &at, &["--shared", "8"]);
    let (daemon, control) = serve(&at.uri("", "reconnect=600"), &[]);
    let mut events = events(&control);
    let mut client = daemon.open(&small(1));
    for number in 0..8_u8 {
        let offset = u64::from(number) << 20;
        client.queue(0).write(offset, &[number + 1; 4096]).unwrap();
    }
    server.kill();
    server.restart(&at);
    client.queue(0).flush().unwrap();
    for number in 0..8_u8 {
        let mut bytes = [0; 4096];
        client
            .queue(0)
            .read(u64::from(number) << 20, &mut bytes)
            .unwrap();
        assert!(bytes == [number + 1; 4096], "write {number} is lost");
    }
    let connections = &report(&control)["store"]["connections"];
    assert_eq!(
        connections["replayed_bytes"],
        json!(8 * 4096),
        "{connections}"
    );
    assert_eq!(connections["unflushed_bytes"], json!(0), "{connections}");
    assert!(daemon.log_has("were sent again"));
    let lost = events.find(|event| event["event"] == "server_lost");
    let unflushed = lost.unwrap()["unflushed_bytes"].as_u64();
    assert!(unflushed >= Some(8 * 4096), "{unflushed:?}");
    let resent = events.next().unwrap();
    assert_eq!(
        [&resent["event"], &resent["bytes"], &resent["data_lost"]],
        [&json!("resent"), &json!(8 * 4096), &json!(false)]
    );
    drop(client);
    daemon.finish();
}

fn writes_that_outlive_their_guest_are_told_of_and_sent_again() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(8 << 20));
    let (daemon, control) = serve(&server.uri("&fence=1"), &[]);
    let mut client = daemon.open(&small(1));
    client.queue(0).write(0, &[1; 4096]).unwrap();
    server.accept(false);
    server.fill(|_| 0);
    server.hang_up();
    let connections = || report(&control)["store"]["connections"].clone();
    assert!(wait_until(|| connections()["lost"] == json!(1)));
    drop(client);
    let told = "no guest is left, and the NBD server is away";
    assert!(wait_until(|| daemon.log_has(told)), "{}", daemon.log());
    assert!(daemon.log_has("remove the disk here"), "{}", daemon.log());
    server.accept(true);
    let mut client = daemon.open(&small(1));
    client.queue(0).flush().unwrap();
    let mut bytes = [0; 4096];
    client.queue(0).read(0, &mut bytes).unwrap();
    assert!(bytes == [1; 4096]);
    drop(client);
    daemon.finish();
}

fn an_attacking_server_takes_only_its_own_disk_with_it() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(8 << 20));
    let (daemon, control) = serve(&server.uri("&timeout=1&reconnect=5&fence=1"), &[]);
    let attacks: [fn(u64) -> Vec<u8>; 5] = [
        |_| vec![0xaa; 100_000],
        |cookie| chunk(cookie ^ 1, 1, 0, &[]),
        |cookie| chunk(cookie, 1, 1, &data_at(1 << 40, &[1; 512])),
        |cookie| chunk(cookie, 1, 0, &[]).repeat(5000),
        |_| Vec::new(),
    ];
    // A machine that is late for a second loses others.
    let lost = || report(&control)["store"]["connections"]["lost"].as_u64();
    for attack in attacks {
        let mut client = daemon.open(&small(1));
        let before = lost();
        let first = std::sync::atomic::AtomicBool::new(true);
        server.react(
            move |asked| match first.swap(false, std::sync::atomic::Ordering::SeqCst) {
                true => Reaction::Freeze(attack(asked.cookie)),
                false => Reaction::Honest,
            },
        );
        let mut bytes = [0; 4096];
        client.queue(0).read(0, &mut bytes).unwrap();
        drop(client);
        assert_serves(&daemon).unwrap();
        assert!(
            wait_until(|| lost() > before),
            "{:?} after {before:?}: {}",
            lost(),
            daemon.log()
        );
    }
    daemon.finish();
}
