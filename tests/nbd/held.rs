//! Requests that are held while their server is away, and what becomes of them when it is back.

use cleave_client::Error;
use cleave_tests::nbd::{Export, NbdServer, READ, Reaction, WRITE, simple};
use cleave_tests::{Case, Scratch, small, wait_until};
use serde_json::{Value, json};

use crate::servers::{At, QEMU, SIZE, holds, qemu_nbd, report, resume, serve};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        a_write_and_a_flush_are_held_until_their_server_is_back: QEMU,
        an_error_of_the_disk_is_held_when_its_server_is_back,
        a_flush_that_is_held_fails_if_writes_were_lost,
        a_server_that_drops_each_connection_is_not_asked_in_a_loop,
    ]
}

/// Returns the errors of the requests that are held, of one for each vring.
fn held(report: &Value) -> Vec<i64> {
    let stalled = report["stalled"].as_array().unwrap().iter();
    let held = stalled.filter(|stalled| stalled["held"].as_u64() > Some(0));
    held.map(|stalled| stalled["errno"].as_i64().unwrap())
        .collect()
}

const ENOTCONN: i64 = 107;

fn a_write_and_a_flush_are_held_until_their_server_is_back() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("image", SIZE);
    let at = At::Unix(scratch.join("nbd"));
    let mut server = qemu_nbd(&image, "raw", &at, &["--shared", "8"]);
    let (daemon, control) = serve(&at.uri("", "reconnect=1"), &["--on-error", "hold"]);
    let mut client = daemon.open(&small(2));
    client.queue(0).write(0, &[1; 4096]).unwrap();
    let [writing, flushing] = client.queues() else {
        panic!("two vrings")
    };
    server.kill();
    std::thread::scope(|scope| {
        let write = scope.spawn(|| writing.write(0, &[2; 4096]));
        let flush = scope.spawn(|| flushing.flush());
        let both = || held(&report(&control)) == [ENOTCONN; 2];
        assert!(wait_until(both), "{}", daemon.log());
        assert!(!write.is_finished() && !flush.is_finished());
        server.restart(&at);
        write.join().unwrap().unwrap();
        flush.join().unwrap().unwrap();
    });
    let mut back = [0; 4096];
    client.queue(0).read(0, &mut back).unwrap();
    assert_eq!(back, [2; 4096]);
    let totals = &report(&control)["totals"];
    assert_eq!(totals["failed"], json!(0), "{totals}");
    assert!(totals["held"].as_u64() >= Some(2), "{totals}");
    assert!(daemon.log_has("continues by itself"), "{}", daemon.log());
    drop(client);
    daemon.finish();
}

/// An error of the disk says nothing of a server that is back, and may be there still.
fn an_error_of_the_disk_is_held_when_its_server_is_back() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(8 << 20));
    let uri = server.uri("&reconnect=1");
    let (daemon, control) = serve(&uri, &["--on-error", "hold"]);
    let mut client = daemon.open(&small(2));
    let [bad, good] = client.queues() else {
        panic!("two vrings")
    };
    server.react(|asked| match asked.kind {
        WRITE => Reaction::Send(simple(asked.cookie, 5, &[])),
        _ => Reaction::Honest,
    });
    std::thread::scope(|scope| {
        let write = scope.spawn(|| bad.write(0, &[1; 512]));
        assert!(wait_until(|| holds(&control)), "{}", daemon.log());
        server.accept(false);
        server.hang_up();
        let read = scope.spawn(|| good.read(0, &mut [0; 512]));
        let both = || held(&report(&control)) == [5, ENOTCONN];
        assert!(wait_until(both), "{}", daemon.log());
        server.accept(true);
        read.join().unwrap().unwrap();
        // Both vrings have their connections again.
        let is_up = || report(&control)["store"]["connections"]["waiting"] == json!(0);
        assert!(wait_until(is_up), "{}", daemon.log());
        assert_eq!(held(&report(&control)), [5]);
        server.react(|_| Reaction::Honest);
        assert_eq!(resume(&control), Some(0));
        write.join().unwrap().unwrap();
    });
    drop(client);
    daemon.finish();
}

/// The server lost a write that it had answered, and cannot do it again.
fn a_flush_that_is_held_fails_if_writes_were_lost() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(8 << 20));
    let uri = server.uri("&reconnect=1");
    let (daemon, control) = serve(&uri, &["--on-error", "hold"]);
    let mut client = daemon.open(&small(1));
    client.queue(0).write(0, &[1; 512]).unwrap();
    server.accept(false);
    server.hang_up();
    let queue = client.queue(0);
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| queue.flush());
        assert!(wait_until(|| holds(&control)), "{}", daemon.log());
        server.react(|asked| match asked.kind {
            WRITE => Reaction::Send(simple(asked.cookie, 5, &[])),
            _ => Reaction::Honest,
        });
        server.accept(true);
        let failed = flush.join().unwrap();
        let is_refused = matches!(failed, Err(Error::Status { status: 1, .. }));
        assert!(is_refused, "{failed:?}\n{}", daemon.log());
    });
    assert!(report(&control)["store"]["sync_failed"] == json!(true));
    drop(client);
    daemon.finish();
}

fn a_server_that_drops_each_connection_is_not_asked_in_a_loop() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(8 << 20));
    let uri = server.uri("&reconnect=0");
    let (daemon, control) = serve(&uri, &["--on-error", "hold"]);
    let mut client = daemon.open(&small(1));
    server.react(|asked| match asked.kind {
        READ => Reaction::Close(Vec::new()),
        _ => Reaction::Honest,
    });
    let reads = || {
        server
            .asked()
            .iter()
            .filter(|asked| asked.kind == READ)
            .count()
    };
    let queue = client.queue(0);
    std::thread::scope(|scope| {
        let read = scope.spawn(|| queue.read(0, &mut [0; 512]));
        let times_held = || report(&control)["totals"]["held"].as_u64();
        assert!(wait_until(|| times_held() >= Some(3)), "{}", daemon.log());
        // Nor does it keep the daemon busy.
        let (before, cpu) = (reads(), daemon.cpu());
        std::thread::sleep(std::time::Duration::from_secs(2));
        let (asked, spent) = (reads() - before, daemon.cpu().saturating_sub(cpu));
        assert!(asked <= 100, "{asked} reads in two seconds");
        assert!(spent.as_millis() < 500, "{spent:?}");
        server.react(|_| Reaction::Honest);
        read.join().unwrap().unwrap();
    });
    assert_eq!(report(&control)["totals"]["failed"], json!(0));
    drop(client);
    daemon.finish();
}
