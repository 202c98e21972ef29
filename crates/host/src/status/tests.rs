//! Reports of an unused disk and of a stripe.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use cleave_api::{EventName, ProblemKind, RequestDirection, RequestVerb, SizeClass, StoreKind};
use cleave_blk::Face;
use cleave_config::DiskConfig;
use cleave_disk::{Disk, DiskSpec, Locking, OpenOptions, StripeKind};
use cleave_session::{Offload, Possession, Session, SessionConfig};
use cleave_worker::record::{Kind, Recording};
use cleave_worker::splitter::{SplitResult, SplitState};
use cleave_worker::{DataDirection, Device, LegTotals, Split, TrialResult, Tuning, WorkerConfig};
use serde_json::{Value, json};

use super::metrics::tests::text_of;
use super::{CurrentSession, DiskStatus};
use crate::possession::DiskPossession;
use crate::problem::Refusal;
use crate::process::confine::Confinement;

fn options() -> OpenOptions {
    OpenOptions::default()
}

pub(super) fn status(disk: Disk, serial: &str) -> Arc<DiskStatus> {
    status_of(disk, serial, Locking::AtOpen)
}

fn status_of(disk: Disk, serial: &str, locking: Locking) -> Arc<DiskStatus> {
    let mut padded = [0; 20];
    padded[..serial.len()].copy_from_slice(serial.as_bytes());
    let config = WorkerConfig {
        cpus: Vec::new(),
        ops: 64,
    };
    let tuning = Tuning::new(Split::Off);
    let device = Device::new(Arc::new(disk), padded, true, config, tuning);
    let device = Arc::new(device.recording(Recording::On));
    let disk = device.disk.clone();
    let possession = DiskPossession::new(disk, locking, drop, drop);
    Arc::new(DiskStatus::new(
        device,
        Arc::new(possession),
        "/run/a.sock".to_owned(),
        4,
        Confinement::none(),
        &DiskConfig::default(),
    ))
}

pub(crate) fn ram(serial: &str) -> Arc<DiskStatus> {
    status(
        Disk::open(&"ram:1M".parse().unwrap(), &options()).unwrap(),
        serial,
    )
}

/// Connects a frontend to the disk. Returns its end of the connection, and what the server of a disk keeps for it: its own end, and the
/// session, which does not run.
pub(crate) fn connect(status: &DiskStatus) -> (UnixStream, (Arc<UnixStream>, Session)) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    let config = SessionConfig {
        face: Face::V1,
        vrings_max: 1,
        vring_size_max: 256,
        workers_max: 1,
    };
    let (device, offload) = (status.device.clone(), Offload::default());
    let copy = ours.try_clone().unwrap();
    let (session, remote) = Session::new(copy, device, offload, Arc::default(), config).unwrap();
    let ours = Arc::new(ours);
    let stream = Arc::downgrade(&ours);
    status.begin(
        vec![CurrentSession { remote, stream }],
        EventName::Connected,
    );
    (theirs, (ours, session))
}

/// Names of all fields, nested ones with a dot.
fn fields(value: &Value, before: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(name, value)| {
            fields(value, &format!("{before}.{name}"), found);
        }),
        Value::Array(rows) => rows
            .iter()
            .for_each(|row| fields(row, &format!("{before}[]"), found)),
        _ => found.push(before.trim_start_matches('.').to_owned()),
    }
}

#[test]
fn the_shape_of_the_json_is_a_promise() {
    let report = serde_json::to_value(ram("").report()).unwrap();
    let mut found = Vec::new();
    fields(&report, "", &mut found);
    let expected = "\
        endpoint errors.broken errors.invalid errors.memory errors.space errors.store \
        errors.unsupported hand_over.last hand_over.obstacle id in_flight.oldest_seconds in_flight.requests name pacing.cpu_seconds pacing.dozes \
        pacing.experiments pacing.sleeps pacing.spin_hit_seconds pacing.spin_left_max_seconds \
        pacing.spin_left_seconds pacing.spin_wasted_seconds pacing.switches.budget \
        pacing.switches.crowded pacing.switches.fast pacing.switches.slow pacing.switches.tuned pacing.switches.vain \
        pacing.wakeups possession process.cpu_seconds process.pid process.resident_bytes \
        process.uptime_seconds process.version quiesced_seconds recording serial session.connected session.count \
        session.features session.kept session.parked session.protocol_features store.block_bytes store.cache store.connections store.direct store.iopoll \
        store.kind store.lock store.read_only store.short_bytes store.size_bytes store.sync_failed totals.broken totals.calls \
        totals.calls_coalesced totals.calls_suppressed totals.failed totals.held totals.kicks totals.laps \
        totals.others totals.polled totals.read_bytes totals.reads totals.redone totals.refused totals.retired_vrings totals.throttled \
        totals.write_bytes totals.writes tuning.coalesce_max tuning.coalesce_us tuning.completion tuning.on_error tuning.profile \
        tuning.spin_cpu_max tuning.spin_cpu_total tuning.spin_rate_min tuning.spin_worth tuning.split zero_reads.sampled zero_reads.zero";
    let mut expected: Vec<&str> = expected.split_whitespace().collect();
    expected.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, expected);
    for list in ["requests", "vrings", "splitting", "legs", "stalled"] {
        assert_eq!(report[list], Value::Array(Vec::new()), "{list}");
    }
    for list in ["workers", "tried"] {
        assert_eq!(report["pacing"][list], Value::Array(Vec::new()), "{list}");
    }
}

/// Its bytes are another host's, and a flush or a copy of them would mean nothing.
#[tokio::test]
async fn a_disk_that_another_host_may_have_is_shown_and_left_alone() {
    let disk = Disk::open(&"ram:1M".parse().unwrap(), &options()).unwrap();
    let status = status_of(disk, "a", Locking::Later);
    let kinds = [
        status.flush().await.map(drop),
        status.quiesce(b"").await.map(drop),
    ];
    let kinds = kinds.map(|refused| refused.map_err(|Refusal(kind, _)| kind));
    assert_eq!(kinds, [Err(ProblemKind::NotActive); 2]);
    assert!(status.quiet_left().is_none());
    let report = status.report();
    assert_eq!(
        serde_json::to_value(&report).unwrap()["possession"],
        "inactive"
    );
    let sample = "cleave_disk_possession{disk=\"a\",state=\"inactive\"} 1\n";
    assert!(text_of(report).contains(sample));
}

/// The other host may have written by then, so a copy that was made here may be torn.
#[tokio::test]
async fn a_disk_whose_guest_has_moved_away_was_not_quiesced_until_it_is_resumed() {
    let status = ram("a");
    for moves in [false, true] {
        status.quiesce(b"").await.unwrap();
        if moves {
            status.possession.hand_over();
        }
        assert_eq!(status.resume(b"").unwrap().quiesced, !moves);
        assert!(status.quiet_left().is_none());
    }
}

#[test]
fn what_an_experiment_found_is_told_of_the_worker_that_made_it() {
    let found = TrialResult {
        spins: true,
        gain: [0.22, -0.041, f32::NEG_INFINITY],
        cores: 0.4004,
        at: Duration::from_secs(5),
    };
    let mut report = ram("a").report();
    let tried = super::gather::tried((found, Duration::from_millis(2500)));
    report.pacing.tried = vec![None, Some(tried)];
    let json = serde_json::to_value(&report).unwrap();
    let expected = json!({"spins": true, "gain_percent": [22.0, -4.1, -100_000.0], "price_percent": 40.0,
        "seconds_ago": 2.5});
    assert_eq!(json["pacing"]["tried"], json!([null, expected]));
    let metrics = text_of(report);
    for sample in [
        "cleave_spin_gain_ratio{disk=\"a\",worker=\"1\"} 0.22\n",
        "cleave_spin_price_cores{disk=\"a\",worker=\"1\"} 0.4\n",
    ] {
        assert!(metrics.contains(sample), "{metrics}");
    }
    assert!(!metrics.contains("worker=\"0\""), "{metrics}");
}

#[test]
fn what_an_experiment_with_pieces_found_is_told_of_its_requests() {
    let mut state = SplitState {
        direction: DataDirection::Write,
        class_bytes: 512 << 10,
        chunk_bytes: 16 << 10,
        requests: 77,
        tried: None,
    };
    let now = Duration::from_secs(9);
    let mut report = ram("a").report();
    report.splitting = vec![super::gather::split_cell(&state, now)];
    let expected = json!([{"direction": "write", "from_bytes": 524_288, "chunk_bytes": 16384, "requests": 77,
        "tried": null}]);
    assert_eq!(serde_json::to_value(&report.splitting).unwrap(), expected);
    let metrics = text_of(report.clone());
    let labels = "{disk=\"a\",direction=\"write\",from_bytes=\"524288\"}";
    assert!(
        metrics.contains(&format!("cleave_split_chunk_bytes{labels} 16384\n")),
        "{metrics}"
    );
    assert!(!metrics.contains("gain_ratio{"), "{metrics}");
    state.tried = Some(SplitResult {
        chunks_bytes: [0, 16 << 10],
        gain: [0.351, 0.3, 0.4601],
        cores: 0.173,
        at: Duration::from_secs(2),
    });
    report.splitting = vec![super::gather::split_cell(&state, now)];
    let expected = json!({"chunk_bytes": 16384, "against_bytes": 0, "gain_percent": [35.1, 30.0, 46.0],
        "price_percent": 17.3, "seconds_ago": 7.0});
    let found = serde_json::to_value(&report.splitting).unwrap();
    assert_eq!(found[0]["tried"], expected);
    let metrics = text_of(report);
    for (sample, value) in [("gain_ratio", "0.351"), ("price_cores", "0.173")] {
        let line = format!("cleave_split_{sample}{labels} {value}\n");
        assert!(metrics.contains(&line), "{metrics}");
    }
}

#[test]
fn what_was_written_can_be_read_back() {
    let mut report = ram("a").report();
    // A number whose last bit is lost where digits are not read with care.
    report.process.cpu_seconds = 2.511_552_518_000_000_2;
    let text = serde_json::to_string(&report).unwrap();
    let back: cleave_api::DiskReport = serde_json::from_str(&text).unwrap();
    assert_eq!(back, report);
}

#[test]
fn every_kind_of_request_has_its_words() {
    for kind in Kind::all() {
        let direction = RequestDirection::of_name(kind.way().name());
        assert!(direction.is_some(), "{kind:?}");
        assert!(SizeClass::of_name(kind.size()).is_some(), "{kind:?}");
    }
    assert_eq!(RequestVerb::of_name("read"), Some(RequestVerb::Read));
    assert_eq!(RequestVerb::of_name("seek"), None);
}

#[test]
fn a_disk_has_a_short_name_and_a_serial_stands_for_it() {
    let (plain, named) = (ram(""), ram("s-1"));
    assert_eq!((plain.id(), plain.serial()), ("ram:1M".to_owned(), None));
    assert_eq!(named.id(), "s-1");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.img");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let disk = Disk::open(&DiskSpec::Path(path), &options()).unwrap();
    assert_eq!(status(disk, "").id(), "a.img");
}

#[test]
fn legs_of_a_stripe_are_shown_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let legs: Vec<_> = (0..2)
        .map(|leg| {
            let path = folder.path().join(format!("leg\"{leg}"));
            std::fs::File::create(&path)
                .unwrap()
                .set_len(1 << 20)
                .unwrap();
            DiskSpec::Path(path)
        })
        .collect();
    let disk = Disk::open_stripe(&legs, 65536, StripeKind::Raw, &options()).unwrap();
    let status = status(disk, "");
    assert_eq!(status.id(), "leg\"0", "as its first leg");
    let report = status.report();
    assert_eq!(
        (report.store.kind, report.legs.len()),
        (StoreKind::Stripe, 2)
    );
    assert!(report.legs[1].name.ends_with("leg\"1"));
    let metrics = text_of(report);
    assert!(
        metrics.contains("leg\\\"1\",direction=\"read\"} 0"),
        "{metrics}"
    );
}

/// A mean that falls from one nanosecond to the one below it would take a nanosecond for each op so far from a
/// product of mean and count, and Prometheus takes a counter that falls for one that began anew.
#[test]
fn the_busy_time_of_a_leg_never_falls() {
    let busy = |reads, latency_ns| {
        let totals = LegTotals {
            reads,
            latency_ns,
            ..LegTotals::default()
        };
        let mut report = ram("a").report();
        report.legs = vec![super::gather::leg("one", &totals)];
        let text = text_of(report);
        let line = text
            .lines()
            .find(|line| line.starts_with("cleave_leg_busy_seconds_total{"));
        let value = line.and_then(|line| line.rsplit(' ').next());
        value.unwrap().parse::<f64>().unwrap()
    };
    let before = busy(1_000_000, 100_000_000);
    let after = busy(1_000_001, 100_000_050);
    assert!(after >= before, "{after} after {before}");
    assert_eq!(before, 0.1);
}
