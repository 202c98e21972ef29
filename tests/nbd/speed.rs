//! The speed of NBD disks, with one connection and with several.

use std::time::Duration;

use cleave_client::{DeviceOptions, OffsetOrder, Workload};
use cleave_tests::nbd::{Export, MULTI, NbdServer, Reaction};
use cleave_tests::{Case, Lateness, Scratch, ensure, run_to_exit, small, unless_late};
use serde_json::{Value, json};

use crate::servers::{At, NBDKIT, QEMU, SIZE, Server, qemu_nbd, serve};

/// Many times what these tests make requests wait.
const TIME: Duration = Duration::from_millis(500);
/// A failure counts as one of the machine if threads waited longer than this for a core.
const LATE: Duration = Duration::from_millis(100);

/// The tests of this file.
pub(crate) fn cases() -> Vec<Case> {
    cleave_tests::cases![
        several_connections_hide_a_delay: NBDKIT,
        short_answers_over_tcp_do_not_wait_for_each_other: QEMU,
        a_probe_finds_that_pieces_pay_where_a_server_handles_a_connection_in_order,
    ]
}

/// Random reads a second for `time`, once the same load has run for `warm_up`.
fn reads(uri: &str, more: &[&str], bytes: u32, depth: u16, [warm_up, time]: [Duration; 2]) -> f64 {
    let (daemon, _) = serve(uri, more);
    let options = DeviceOptions {
        queue_size: 256,
        data_bytes: 64 << 20,
        ..small(1)
    };
    let mut client = daemon.open(&options);
    let mut run = |time| {
        let load = Workload {
            order: OffsetOrder::Random,
            ..Workload::reads(bytes, depth, 32 << 20, time)
        };
        let tally = client.queue(0).run(&load, |_| {}).unwrap();
        assert_eq!(tally.failed, 0, "{tally:?}");
        tally.iops()
    };
    run(warm_up);
    let iops = run(time);
    drop(client);
    daemon.finish();
    iops
}

fn several_connections_hide_a_delay() {
    let scratch = Scratch::in_memory();
    let socket = scratch.join("nbd");
    let at = At::Unix(socket.clone());
    let words = [
        "nbdkit",
        "-f",
        "-U",
        socket.to_str().unwrap(),
        "--filter=delay",
    ];
    let words = [&words[..], &["memory", "64M", "delay-read=10ms"]].concat();
    let _server = Server::start(&words, &at);
    let hidden = unless_late("hidden-delay", LATE, |_| {
        let [one, four] = ["connections=1", "connections=4"].map(|connections| {
            reads(
                &at.uri("", connections),
                &["--workers", "1"],
                4096,
                128,
                [TIME, TIME],
            )
        });
        println!("10 ms of delay: {one:.0} reads/s on one connection, {four:.0} on four");
        ensure(four >= 2.0 * one, || format!("{four} {one}"))
    });
    hidden.unwrap();
}

/// qemu-nbd sends a short answer only when the one before is acknowledged, which TCP puts off for 40 ms.
fn short_answers_over_tcp_do_not_wait_for_each_other() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("image", SIZE);
    let at = At::tcp();
    let server = qemu_nbd(&image, "raw", &at, &[]);
    // Each write is 64 requests, and nothing is sent before the last of them is answered: 25 writes a second at most, if one waits.
    let (daemon, _) = serve(&at.uri("", ""), &["--split", "16K"]);
    let mut client = daemon.open(&small(1));
    let load = Workload {
        read_percent: 0,
        ..Workload::reads(1 << 20, 1, 32 << 20, 2 * TIME)
    };
    let are_fast = unless_late("short-answers", LATE, |lateness| {
        *lateness = Lateness::start(&[daemon.pid(), server.child.id()]);
        let tally = client.queue(0).run(&load, |_| {}).unwrap();
        println!("{:.0} writes of 1 MiB a second", tally.iops());
        assert_eq!(tally.failed, 0, "{tally:?}");
        ensure(tally.iops() > 30.0, || format!("{tally:?}"))
    });
    are_fast.unwrap();
    drop(client);
    daemon.finish();
}

/// A server that handles the requests of a connection one after the other, each in a time in proportion to its bytes.
fn slow_server(scratch: &Scratch) -> NbdServer {
    let mut export = Export::able(64 << 20);
    export.flags |= MULTI;
    export.blocks = Some([1, 4096, 32 << 20]);
    export.structured = None;
    let server = NbdServer::start(&scratch.join("nbd"), export);
    server.fill(|at| at as u8);
    server.react(|asked| Reaction::After(Duration::from_micros(100 + u64::from(asked.len) / 400)));
    server
}

/// What a probe says of the reads of a disk.
fn probed(uri: &str) -> Value {
    let probed = run_to_exit(&["probe", uri, "--seconds", "5", "--json", "-"]);
    assert_eq!(probed.code, Some(0), "{}", probed.stderr);
    let mut found: Value = serde_json::from_str(&probed.stdout).unwrap();
    found["sides"][0]["judgement"].take()
}

/// The largest gain of a request that is cut.
fn gain(judgement: &Value) -> f64 {
    let classes = judgement["chunks"].as_array().unwrap().iter();
    let gains = classes.filter_map(|class| class["gain"].as_f64());
    gains.fold(0.0, f64::max)
}

fn a_probe_finds_that_pieces_pay_where_a_server_handles_a_connection_in_order() {
    let scratch = Scratch::in_memory();
    let server = slow_server(&scratch);
    let uri = server.uri("&connections=4");
    // Long enough that a busy host leaves some sizes known to ±10 %. The larger ones gain most: a probe that could not find out how much
    // says so, and is asked again.
    let gains = unless_late("probe-pieces", LATE, |_| {
        let mut judgement = probed(&uri);
        for _ in 0..3 {
            if gain(&judgement) >= 1.5 || judgement["unknown"] == json!(0) {
                break;
            }
            judgement = probed(&uri);
        }
        println!("the probe finds a gain of {:.2}", gain(&judgement));
        let pays = judgement["pays"] == json!(true) && gain(&judgement) >= 1.5;
        ensure(pays, || judgement.to_string())
    });
    gains.unwrap();
    // The same on the live load: a request of 1 MiB takes 3 ms whole.
    // An experiment within the time makes some of its requests whole.
    let pays = unless_late("pieces-pay", LATE, |_| {
        let times = [("off", [TIME, TIME]), ("auto", [8 * TIME, 4 * TIME])];
        let [off, auto] = times.map(|(split, times)| {
            let more = ["--workers", "1", "--split", split];
            reads(&uri, &more, 1 << 20, 1, times)
        });
        println!("1 MiB at depth 1: {off:.0} whole, {auto:.0} with --split auto");
        ensure(auto >= 1.3 * off, || format!("{auto} {off}"))
    });
    pays.unwrap();
}
