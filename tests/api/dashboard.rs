//! `dist/grafana.json`, the dashboard for Grafana, against what daemons under load answer to `GET /metrics`.

mod check;

use std::fs::File;
use std::sync::LazyLock;
use std::time::Duration;

use cleave_client::{Client, OffsetOrder, Stop, Workload};
use cleave_tests::http::fetch;
use cleave_tests::nbd::{Export, NbdServer};
use cleave_tests::{Daemon, Node, Scratch, run_to_exit, small, wait_until};
use rustix::process::Signal;
use serde_json::{Value, json};

use self::check::Families;
use crate::prometheus::{parse, sum};

static SCRAPED: LazyLock<Families> = LazyLock::new(|| {
    let mut all = failing_disk();
    for (name, family) in stripe().into_iter().chain(nbd()).chain(node()) {
        let known = all.entry(name).or_default();
        known.kind = family.kind;
        known.samples.extend(family.samples);
    }
    for name in check::RARE {
        all.entry(name.to_owned()).or_default().kind = "gauge".to_owned();
    }
    all
});

/// With a limit, requests of several sizes, a failed read, and a write that is held.
fn failing_disk() -> Families {
    let scratch = Scratch::in_memory();
    let image = scratch.image("disk", 64 << 20);
    let limits = "iops-total=5000,iops-total-max=6000,bps-total=1G,bps-total-max=2G";
    let policy = "read=report,write=hold";
    let path = image.to_str().unwrap();
    let (daemon, control) = Daemon::serve_with_control(&[
        "--disk",
        path,
        "--serial",
        "a",
        "--limit",
        limits,
        "--on-error",
        policy,
    ]);
    let mut client = daemon.open(&small(2));
    load(&mut client);
    File::options()
        .write(true)
        .open(&image)
        .unwrap()
        .set_len(32 << 20)
        .unwrap();
    daemon.signal(Signal::HUP);
    assert!(daemon.log_has("has shrunk"), "{}", daemon.log());
    let queue = client.queue(0);
    queue.set_timeout(Duration::from_millis(300));
    assert!(queue.read(40 << 20, &mut [0; 4096]).is_err());
    assert!(queue.write(40 << 20, &[0; 4096]).is_err());
    let mut families = Families::new();
    assert!(wait_until(|| {
        families = scrape(&control);
        let is_held = || sum(&families, "cleave_held_requests", &[]) > 0.0;
        families.contains_key("cleave_held_requests") && is_held()
    }));
    finish(daemon, client);
    families
}

/// With the limits that exclude those of the other disk.
fn stripe() -> Families {
    let scratch = Scratch::in_memory();
    let legs = ["x", "y"].map(|leg| scratch.image(leg, 32 << 20).display().to_string());
    let made = run_to_exit(&["stripe", "create", "--chunk", "64K", &legs[0], &legs[1]]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let limits = "iops-read=5000,iops-read-max=6000,iops-write=5000,iops-write-max=6000,\
        bps-read=1G,bps-read-max=2G,bps-write=1G,bps-write-max=2G";
    let (daemon, control) = Daemon::serve_with_control(&[
        "--stripe", "64K", "--disk", &legs[0], "--disk", &legs[1], "--serial", "b", "--limit",
        limits,
    ]);
    let mut client = daemon.open(&small(1));
    load(&mut client);
    let families = scrape(&control);
    finish(daemon, client);
    families
}

fn nbd() -> Families {
    let scratch = Scratch::in_memory();
    let server = NbdServer::start(&scratch.join("nbd"), Export::able(32 << 20));
    let (daemon, control) =
        Daemon::serve_with_control(&["--disk", &server.uri(""), "--serial", "c"]);
    let mut client = daemon.open(&small(1));
    load(&mut client);
    let families = scrape(&control);
    finish(daemon, client);
    families
}

/// With requests that wait for a limit.
fn node() -> Families {
    let node = Node::start();
    let limits = json!({"iops-total": 100});
    node.add(
        "d",
        &json!({"disk": ["ram:1M"], "persistent": false, "limits": limits}),
    );
    let mut client = node.open("d", &small(1));
    // At once: on a slow machine, one after the other would stay within the limit.
    let reads = Workload {
        stop: Stop::Requests(60),
        ..Workload::reads(4096, 20, 1 << 20, Duration::ZERO)
    };
    assert_eq!(client.queue(0).run(&reads, |_| {}).unwrap().failed, 0);
    let families = scrape(node.daemon.socket());
    drop(client);
    node.daemon.finish();
    families
}

fn load(client: &mut Client) {
    for (bytes, requests) in [(4096, 1500), (256 << 10, 50)] {
        let mix = Workload {
            read_percent: 50,
            order: OffsetOrder::Random,
            stop: Stop::Requests(requests),
            ..Workload::reads(bytes, 8, 16 << 20, Duration::ZERO)
        };
        assert_eq!(client.queue(0).run(&mix, |_| {}).unwrap().failed, 0);
    }
    client.queue(0).flush().unwrap();
}

fn scrape(control: &std::path::Path) -> Families {
    let text = fetch(control, "GET", "/metrics", "").body;
    parse(&text).unwrap_or_else(|why| panic!("{why}\n{text}"))
}

fn finish(daemon: Daemon, client: Client) {
    drop(client);
    daemon.finish();
}

fn dashboard() -> Value {
    serde_json::from_str(include_str!("../../dist/grafana.json")).unwrap()
}

#[test]
fn the_dashboard_shows_metrics_that_there_are() {
    let faults = check::faults(&dashboard(), &SCRAPED);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The check finds each kind of fault, in panels inside of rows too.
#[test]
fn a_faulty_dashboard_is_noticed() {
    let sound = dashboard();
    let expr = |text: &str| json!(text);
    let selected = "instance=~\"$instance\",disk=~\"$disk\"";
    let query = |text: &str| expr(&text.replace('@', selected));
    let first = |kind: &str| {
        let panels = sound["panels"].as_array().unwrap();
        panels
            .iter()
            .position(|panel| panel["type"] == kind)
            .unwrap()
    };
    let graph = format!("/panels/{}", first("timeseries"));
    let inner = format!("{}/panels/0", last_row(&sound));
    let at = |place: &str| format!("{graph}/{place}");
    let cases = [
        (
            at("targets/0/expr"),
            query("rate(cleave_requets_total{@}[$__rate_interval])"),
            "no metric cleave_requets_total",
        ),
        (
            at("targets/0/expr"),
            query("sum(cleave_throttled_seconds{@})"),
            "no metric cleave_throttled_seconds",
        ),
        (
            at("targets/0/expr"),
            query("sum(cleave_connected_count{@})"),
            "no metric cleave_connected_count",
        ),
        (
            at("targets/0/expr"),
            query("sum(cleave_workers{@,modus=\"spins\"})"),
            "cleave_workers has no label modus",
        ),
        (
            at("targets/0/expr"),
            query("sum(cleave_workers{@,mode=\"spinning\"})"),
            "cleave_workers: no sample with mode=spinning",
        ),
        (
            at("targets/0/expr"),
            query("sum(cleave_workers{@,mode=~\"spins|slept\"})"),
            "cleave_workers: no sample with mode=slept",
        ),
        (
            at("targets/0/expr"),
            query("sum by (disk, vring) (cleave_workers{@})"),
            "cleave_workers has no label vring",
        ),
        (
            at("targets/0/expr"),
            query("sum by (disk, vring) (cleave_spin_gain_ratio{@})"),
            "cleave_spin_gain_ratio has no label vring",
        ),
        (
            at("targets/0/expr"),
            query("sum(rate(cleave_workers{@}[5m]))"),
            "cleave_workers is a gauge",
        ),
        (
            at("targets/0/expr"),
            query("sum(rate(cleave_laps_total{@}[1s]))"),
            "[1s] is not an interval",
        ),
        (
            at("targets/0/expr"),
            expr("sum(cleave_workers{instance=~\"$instance\"})"),
            "does not use $disk",
        ),
        (
            at("targets/0/expr"),
            expr("sum(cleave_workers{disk=~\"$disk\"})"),
            "does not use $instance",
        ),
        (at("targets/0/expr"), expr("vector(1)"), "no metric in"),
        (
            at("targets/0/expr"),
            expr("sum by (instance) (process_open_fds{instance=~\"$instance\"})"),
            "process_open_fds without cleave_build_info",
        ),
        (
            at("targets/0/expr"),
            query(
                "histogram_quantile(0.5, sum by (disk) (rate(cleave_throttled_seconds_bucket{@}[5m])))",
            ),
            "needs le",
        ),
        (
            at("targets/0/legendFormat"),
            json!("{{vring}}"),
            "no label vring in the query",
        ),
        (at("targets/0/refId"), json!(""), "no refId"),
        (at("targets"), json!([]), "no query"),
        (at("title"), json!(" "), "no title"),
        (
            at("fieldConfig/defaults/unit"),
            json!("iosp"),
            "\"iosp\" is not a unit",
        ),
        (
            at("fieldConfig/defaults/unit"),
            Value::Null,
            "null is not a unit",
        ),
        (
            at("datasource/uid"),
            json!("abc"),
            "not the data source ${datasource}",
        ),
        (
            at("type"),
            json!("flamegraph-of-others"),
            "is not a core panel",
        ),
        (at("id"), json!(1), "id 1 twice"),
        (at("gridPos/x"), json!(20), "beyond the grid"),
        (at("gridPos/h"), json!(9), "overlaps"),
        (format!("{inner}/title"), json!(""), "no title"),
        (format!("{inner}/gridPos/y"), json!(0), "overlaps"),
        (
            "/templating/list/2/name".to_owned(),
            json!("disc"),
            "no variable disk",
        ),
        (
            "/templating/list/2/query/query".to_owned(),
            json!("label_values(cleave_inof, disk)"),
            "no metric cleave_inof",
        ),
        (
            "/templating/list/2/query/query".to_owned(),
            json!("label_values(cleave_disk_state, disc)"),
            "cleave_disk_state has no label disc",
        ),
    ];
    for (place, value, fault) in cases {
        let mut faulty = sound.clone();
        *faulty
            .pointer_mut(&place)
            .unwrap_or_else(|| panic!("no {place}")) = value;
        let found = check::faults(&faulty, &SCRAPED);
        assert!(
            found.iter().any(|found| found.contains(fault)),
            "{fault}: {found:?}"
        );
    }
}

/// Where a row is that holds its panels.
fn last_row(dashboard: &Value) -> String {
    let panels = dashboard["panels"].as_array().unwrap();
    let at = panels
        .iter()
        .rposition(|panel| panel["panels"][0].is_object());
    format!("/panels/{}", at.unwrap())
}
