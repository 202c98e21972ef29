//! Exports of servers that people use are served, as they are and as they grow; the others are refused with the remedy.

use cleave_blk::spec::feature;
use cleave_tests::http::fetch;
use cleave_tests::nbd::{Export, FLUSH, NbdServer, Reaction, simple};
use cleave_tests::{
    Case, Scratch, assert_face_v1, assert_serves, compare_bytes, run, run_to_exit, small,
    wait_until,
};
use serde_json::json;

use crate::servers::{At, NBD_SERVER, QEMU, SIZE, Server, qemu_nbd, report, serve};

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        raw_and_qcow2_images_are_served_over_unix_sockets_and_tcp: QEMU,
        the_reference_server_is_served: NBD_SERVER,
        a_read_only_export_is_served_read_only: QEMU,
        every_export_has_the_same_face_and_ignores_discards_that_it_cannot_take,
        an_operator_has_the_server_flush_with_and_without_a_guest,
        what_a_connection_moves_and_what_waits_for_it_is_shown,
        a_guest_sees_a_larger_export_after_a_reconnect,
        an_idle_disk_costs_nothing,
        a_server_that_is_away_is_worth_another_attempt_and_one_that_is_unfit_is_not,
        servers_that_cannot_be_used_are_named_with_the_remedy,
    ]
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
            compare_bytes(&daemon, "nbd", 100);
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
    compare_bytes(&daemon, "nbd", 60);
    daemon.finish();
}

fn every_export_has_the_same_face_and_ignores_discards_that_it_cannot_take() {
    let scratch = Scratch::in_memory();
    let able = Export::able(8 << 20);
    let exports = [
        ("able", able),
        (
            "large preferred blocks",
            Export {
                blocks: Some([512, 65_536, 1 << 20]),
                ..Export::able(8 << 20)
            },
        ),
        (
            "reads, writes and flushes alone",
            Export {
                flags: 1 | 4,
                ..Export::able(8 << 20)
            },
        ),
    ];
    for (name, export) in exports {
        let server = NbdServer::start(&scratch.join(&name.replace(' ', "-")), export);
        let (daemon, _) = serve(&server.uri(""), &[]);
        assert_face_v1(&daemon, name);
        let mut client = daemon.open(&small(1));
        let queue = client.queue(0);
        queue.write(0, &[7; 12 << 10]).unwrap();
        queue.discard(4 << 20, 1 << 20).unwrap();
        queue.write_zeroes(4 << 10, 4 << 10, true).unwrap();
        let mut back = vec![0; 12 << 10];
        queue.read(0, &mut back).unwrap();
        let wanted = [[7; 4 << 10], [0; 4 << 10], [7; 4 << 10]].concat();
        assert!(back == wanted, "{name}");
        drop(client);
        daemon.finish();
    }
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
