//! NBD servers as disks, through the program: those that people use, and one that attacks.
//!
//! `CLEAVE_KILLS` sets the number of kills of `cleave serve` (default 20), `CLEAVE_TEST_SCALE` multiplies those of a node.
#![allow(clippy::unwrap_used, clippy::panic)] // a mistake in the test ends the test

mod held;
mod kill;
mod node;
mod servers;
mod speed;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use cleave_blk::spec::feature;
use cleave_client::Error;
use cleave_tests::http::{events, fetch};
use cleave_tests::nbd::{Export, FLUSH, NbdServer, Reaction, chunk, data_at, simple};
use cleave_tests::{
    Daemon, Model, Requirement, Scratch, assert_serves, run, run_cases, run_to_exit, seeded, small,
    wait_until, writes_all,
};
use serde_json::json;

use held::{
    a_flush_that_is_held_fails_if_writes_were_lost,
    a_server_that_drops_each_connection_is_not_asked_in_a_loop,
    a_write_and_a_flush_are_held_until_their_server_is_back,
    an_error_of_the_disk_is_held_when_its_server_is_back,
};
use kill::{
    a_failed_flush_of_which_no_guest_knows_is_kept,
    a_flush_fails_if_the_daemon_before_ended_while_its_server_was_away,
    a_killed_daemon_loses_nothing, a_killed_node_loses_nothing,
    a_loss_is_kept_until_a_flush_has_failed, a_loss_is_of_one_export_whatever_its_options,
    a_loss_that_the_server_refused_to_mend_is_kept,
    the_fence_holds_for_a_guest_that_was_reset_and_over_an_orderly_restart,
    the_next_daemon_waits_for_the_fence,
};
use node::{
    a_confined_node_connects_again_over_tcp_and_unix_sockets,
    a_disk_that_is_removed_and_added_again_does_what_was_left,
    a_disk_that_is_removed_and_added_again_waits_for_the_fence,
    a_disk_that_is_removed_does_not_wait_for_its_last_flush,
    a_disk_that_is_removed_writes_nothing_when_its_server_is_back,
    a_limit_holds_for_a_disk_on_a_server,
    a_server_that_is_stopped_does_not_keep_a_node_from_its_end, disks_of_a_pool_connect_again,
};
use servers::{At, SIZE, Server, holds, load, qemu_nbd, report, resume, serve};
use speed::{
    a_probe_finds_that_pieces_pay_where_a_server_handles_a_connection_in_order,
    several_connections_hide_a_delay, short_answers_over_tcp_do_not_wait_for_each_other,
};

const QEMU: Requirement = Requirement::Program("/usr/bin/qemu-nbd");
const NBDKIT: Requirement = Requirement::Program("/usr/bin/nbdkit");
const NBD_SERVER: Requirement = Requirement::Program("/usr/bin/nbd-server");

fn main() -> ExitCode {
    run_cases(cleave_tests::cases![
        raw_and_qcow2_images_are_served_over_unix_sockets_and_tcp: QEMU,
        the_reference_server_is_served: NBD_SERVER,
        a_read_only_export_is_served_read_only: QEMU,
        errors_of_the_server_are_reported_or_retried: NBDKIT,
        errors_of_the_server_are_held_until_the_operator_resumes: NBDKIT,
        a_server_that_is_killed_and_restarted_costs_a_pause_and_no_error: QEMU,
        a_killed_server_of_a_qcow2_image_loses_nothing_that_it_answered: QEMU,
        writes_that_outlive_their_guest_are_told_of_and_sent_again,
        a_write_and_a_flush_are_held_until_their_server_is_back: QEMU,
        an_error_of_the_disk_is_held_when_its_server_is_back,
        a_flush_that_is_held_fails_if_writes_were_lost,
        a_server_that_drops_each_connection_is_not_asked_in_a_loop,
        an_operator_has_the_server_flush_with_and_without_a_guest,
        a_killed_daemon_loses_nothing: QEMU,
        a_killed_node_loses_nothing: QEMU,
        the_next_daemon_waits_for_the_fence,
        the_fence_holds_for_a_guest_that_was_reset_and_over_an_orderly_restart,
        a_flush_fails_if_the_daemon_before_ended_while_its_server_was_away,
        a_loss_is_kept_until_a_flush_has_failed,
        a_loss_is_of_one_export_whatever_its_options,
        a_failed_flush_of_which_no_guest_knows_is_kept,
        a_loss_that_the_server_refused_to_mend_is_kept,
        a_confined_node_connects_again_over_tcp_and_unix_sockets: QEMU,
        a_disk_that_is_removed_writes_nothing_when_its_server_is_back,
        a_disk_that_is_removed_does_not_wait_for_its_last_flush,
        a_server_that_is_stopped_does_not_keep_a_node_from_its_end: QEMU,
        a_disk_that_is_removed_and_added_again_does_what_was_left,
        a_disk_that_is_removed_and_added_again_waits_for_the_fence,
        disks_of_a_pool_connect_again: QEMU,
        a_limit_holds_for_a_disk_on_a_server: QEMU,
        several_connections_hide_a_delay: NBDKIT,
        short_answers_over_tcp_do_not_wait_for_each_other: QEMU,
        a_probe_finds_that_pieces_pay_where_a_server_handles_a_connection_in_order,
        what_a_connection_moves_and_what_waits_for_it_is_shown,
        a_guest_sees_a_larger_export_after_a_reconnect,
        an_idle_disk_costs_nothing,
        an_attacking_server_takes_only_its_own_disk_with_it,
        a_server_that_is_away_is_worth_another_attempt_and_one_that_is_unfit_is_not,
        servers_that_cannot_be_used_are_named_with_the_remedy,
    ])
}

/// Random operations on two vrings, each byte compared with a model.
fn compare_bytes(daemon: &Daemon, steps: u64) {
    let mut random = seeded("nbd");
    let mut client = daemon.open(&small(2));
    for index in 0..2 {
        let mut model = Model::zeroed(index as u64 * (32 << 20), 8 << 20);
        for _ in 0..steps {
            let queue = client.queue(index);
            model.step(queue, &mut random, 512 << 10).unwrap();
        }
        let queue = client.queue(index);
        // Support for it depends on the server.
        queue.discard(model.offset + (16 << 20), 1 << 20).unwrap();
        model.compare_all(queue).unwrap();
    }
}

fn raw_and_qcow2_images_are_served_over_unix_sockets_and_tcp() {
    for format in ["raw", "qcow2"] {
        for is_unix in [true, false] {
            let scratch = Scratch::in_memory();
            let image = scratch.join("image");
            let path = image.to_str().unwrap();
            run("qemu-img", &["create", "-f", format, path, "64M"]).unwrap();
            let at = match is_unix {
                true => At::Unix(scratch.join("nbd")),
                false => At::tcp(),
            };
            // With several connections, and write-through.
            let _server = qemu_nbd(&image, format, &at, &["-x", "a b", "--shared", "8"]);
            let more = [
                "--cache",
                if is_unix { "writeback" } else { "writethrough" },
            ];
            let (daemon, control) = serve(&at.uri("a%20b", "connections=2"), &more);
            compare_bytes(&daemon, 100);
            assert_eq!(report(&control)["store"]["kind"], json!("nbd"));
            assert_eq!(report(&control)["store"]["connections"]["lost"], json!(0));
            daemon.finish();
        }
    }
}

fn the_reference_server_is_served() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("image", SIZE);
    let at = At::tcp();
    let At::Tcp(port) = at else { return };
    let config = scratch.join("config");
    let text = format!(
        "[generic]\nport = {port}\nlistenaddr = 127.0.0.1\n[disk]\nexportname = {}\nflush = true\nfua = true\ntrim = true\n",
        image.display()
    );
    std::fs::write(&config, text).unwrap();
    let config = config.to_str().unwrap();
    let args = ["nbd-server", "-d", "-C", config, "-p", ""];
    let _server = Server::start(&args, &at);
    // It promises several connections, and in this mode lets one in.
    let (daemon, _) = serve(&at.uri("disk", ""), &["--workers", "2"]);
    assert!(daemon.log_has("connections to the server: 1 instead of 2"));
    compare_bytes(&daemon, 60);
    daemon.finish();
}

fn a_read_only_export_is_served_read_only() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("image", SIZE);
    let at = At::Unix(scratch.join("nbd"));
    let _server = qemu_nbd(&image, "raw", &at, &["--read-only"]);
    let socket = scratch.join("socket");
    let socket = socket.to_str().unwrap();
    let uri = at.uri("", "");
    let refused = run_to_exit(&["serve", "--socket-path", socket, "--disk", &uri]);
    let stderr = refused.stderr;
    assert!(
        stderr.contains("read-only; serve it with --read-only"),
        "{stderr}"
    );
    let (daemon, _) = serve(&uri, &["--read-only"]);
    let mut client = daemon.open(&small(1));
    assert!(client.offered() & feature::RO != 0);
    let mut bytes = [1; 4096];
    client.queue(0).read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4096]);
    assert!(client.queue(0).write(0, &bytes).is_err());
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
        let fence = if is_unix { "" } else { "fence=1" };
        let mut server = qemu_nbd(&image, "raw", &at, &["--shared", "8"]);
        let (daemon, control) = serve(&at.uri("", fence), &["--on-error", "hold"]);
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
    let (daemon, control) = serve(&at.uri("", ""), &[]);
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

fn a_guest_sees_a_larger_export_after_a_reconnect() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(8 << 20));
    let (daemon, _) = serve(&server.uri(""), &[]);
    let mut client = daemon.open(&small(1));
    assert_eq!(client.config().capacity_bytes(), 8 << 20);
    server.export(|export| export.size = 16 << 20);
    server.hang_up();
    let grows = || client.refresh_config().unwrap().capacity_bytes() == 16 << 20;
    assert!(wait_until(grows), "{}", daemon.log());
    client.queue(0).write(12 << 20, &[1; 512]).unwrap();
    drop(client);
    daemon.finish();
}

fn an_operator_has_the_server_flush_with_and_without_a_guest() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(8 << 20));
    let (daemon, control) = serve(&server.uri("&timeout=2&fence=1"), &[]);
    let flushes = || {
        let asked = server.asked();
        asked.iter().filter(|asked| asked.kind == FLUSH).count()
    };
    let post = |what: &str| fetch(&control, "POST", &format!("/v1/disks/disk/{what}"), "");
    assert_eq!(post("flush").status, 200);
    assert_eq!(flushes(), 1);
    let mut client = daemon.open(&small(1));
    client.queue(0).write(0, &[1; 4096]).unwrap();
    for (what, count) in [("flush", 2), ("flush", 3), ("quiesce", 4), ("resume", 4)] {
        let answer = post(what);
        assert_eq!(
            (answer.status, flushes()),
            (200, count),
            "{what}: {}",
            answer.body
        );
    }
    client.queue(0).write(0, &[2; 4096]).unwrap();
    // While the server is silent, both end in time and the guest goes on.
    server.react(|asked| match asked.kind {
        FLUSH => Reaction::Freeze(Vec::new()),
        _ => Reaction::Honest,
    });
    let body = r#"{"seconds": 1}"#;
    let late = fetch(&control, "POST", "/v1/disks/disk/quiesce", body);
    assert_eq!(late.status, 503, "{}", late.body);
    server.react(|_| Reaction::Honest);
    client.queue(0).write(0, &[3; 4096]).unwrap();
    server.react(|asked| match asked.kind {
        FLUSH => Reaction::Send(simple(asked.cookie, 5, &[])),
        _ => Reaction::Honest,
    });
    assert_eq!(post("flush").status, 500);
    drop(client);
    daemon.finish();
}

fn what_a_connection_moves_and_what_waits_for_it_is_shown() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(8 << 20));
    let (daemon, control) = serve(&server.uri("&reconnect=600&fence=1"), &[]);
    let mut client = daemon.open(&small(1));
    for _ in 0..10 {
        client.queue(0).write(0, &[1; 4096]).unwrap();
    }
    let connections = || report(&control)["store"]["connections"].clone();
    let moved = connections();
    assert_eq!(moved["sent_bytes"], json!(10 * (28 + 4096)), "{moved}");
    assert_eq!(moved["received_bytes"], json!(10 * 16), "{moved}");
    assert_eq!(moved["held"], json!(0));
    server.accept(false);
    server.hang_up();
    std::thread::scope(|scope| {
        let write = scope.spawn(|| client.queue(0).write(0, &[2; 4096]));
        assert!(wait_until(|| connections()["held"] == json!(1)));
        let metrics = fetch(&control, "GET", "/metrics", "").body;
        for sample in [
            "cleave_nbd_held_requests{disk=\"disk\"} 1\n",
            "cleave_nbd_connections{disk=\"disk\",state=\"waiting\"} 1\n",
            "cleave_nbd_bytes_total{disk=\"disk\",direction=\"sent\"} ",
        ] {
            assert!(metrics.contains(sample), "{sample}: {metrics}");
        }
        let stats = run_to_exit(&["stats", "--control", control.to_str().unwrap()]).stdout;
        let line = "server    0 connections up, 1 missing, 1 requests wait for one; 1 lost and";
        assert!(stats.contains(line), "{stats}");
        server.accept(true);
        write.join().unwrap().unwrap();
    });
    assert!(wait_until(|| connections()["held"] == json!(0)));
    drop(client);
    // The counters outlive the session.
    assert!(wait_until(|| connections()["connected"] == json!(0)));
    assert!(connections()["sent_bytes"].as_u64() > moved["sent_bytes"].as_u64());
    daemon.finish();
}

fn an_idle_disk_costs_nothing() {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(8 << 20));
    let (daemon, _) = serve(&server.uri(""), &[]);
    let mut client = daemon.open(&small(1));
    client.queue(0).write(0, &[1; 4096]).unwrap();
    daemon.stays_at_rest().unwrap();
    // Nor does one that has just lost its connection and made a new one.
    server.hang_up();
    client.queue(0).write(0, &[2; 4096]).unwrap();
    daemon.stays_at_rest().unwrap();
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
    for (number, attack) in (1..).zip(attacks) {
        let mut client = daemon.open(&small(1));
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
        let lost = || report(&control)["store"]["connections"]["lost"].as_u64();
        assert!(
            wait_until(|| lost() == Some(number)),
            "{:?}: {}",
            lost(),
            daemon.log()
        );
    }
    daemon.finish();
}

/// A service manager starts the daemon again for code 1 only.
fn a_server_that_is_away_is_worth_another_attempt_and_one_that_is_unfit_is_not() {
    let scratch = Scratch::in_memory();
    let _empty = NbdServer::start(&scratch.join("empty"), Export::able(0));
    for (server, code) in [("away", 1), ("empty", 2)] {
        let uri = format!("nbd+unix:///?socket={}", scratch.join(server).display());
        let socket = scratch.join("socket");
        let args = ["serve", "--disk", &uri, "--socket-path"];
        let exited = run_to_exit(&[&args[..], &[socket.to_str().unwrap()]].concat());
        assert_eq!(exited.code, Some(code), "{server}: {}", exited.stderr);
    }
}

fn servers_that_cannot_be_used_are_named_with_the_remedy() {
    let scratch = Scratch::in_memory();
    let socket = scratch.join("socket");
    let refusal = |uri: &str, more: &[&str]| {
        let mut args = vec![
            "serve",
            "--socket-path",
            socket.to_str().unwrap(),
            "--disk",
            uri,
        ];
        args.extend(more);
        let exited = run_to_exit(&args);
        assert_ne!(exited.code, Some(0));
        exited.stderr
    };
    let large = Export {
        blocks: Some([4096, 4096, 1 << 20]),
        ..Export::able(8 << 20)
    };
    let server = NbdServer::start(&scratch.join("large"), large);
    let empty = NbdServer::start(&scratch.join("empty"), Export::able(0));
    let silent = scratch.join("silent");
    let _silent = std::os::unix::net::UnixListener::bind(&silent).unwrap();
    let silent = format!("nbd+unix:///?socket={}", silent.display());
    let rows: [(&str, &[&str], &str); 6] = [
        (&server.uri(""), &[], "--block-size 4096"),
        (&empty.uri(""), &[], "has no bytes"),
        (&silent, &[], "does not answer"),
        (
            "nbd+unix:///?socket=/nowhere",
            &[],
            "check that the server runs",
        ),
        (
            &server.uri(""),
            &["--block-size", "4096", "--direct", "on"],
            "no page cache",
        ),
        (
            "nbds://host/",
            &[],
            "TLS is not supported (use a unix socket, and a TLS proxy such as stunnel",
        ),
    ];
    for (uri, more, part) in rows {
        let why = refusal(uri, more);
        assert!(why.contains(part), "{uri}: {why}");
    }
    let (daemon, _) = serve(&server.uri(""), &["--block-size", "4096"]);
    assert_serves(&daemon).unwrap();
    daemon.finish();
}
