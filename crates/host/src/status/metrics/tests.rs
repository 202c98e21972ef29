//! The text for no disk, one and two, and the manual's list of it.

use std::collections::BTreeMap;
use std::time::SystemTime;

use super::*;
use crate::status::tests::ram;

/// Returns the text of the one disk of a process, which has this report.
pub(in crate::status) fn text_of(report: DiskReport) -> String {
    let served = ServedMetrics {
        report,
        ..ram("a").metrics()
    };
    write(&[disk("a", DiskState::Serving, Some(served))])
}

fn write(disks: &[DiskMetrics]) -> String {
    let mut text = MetricsText::new();
    disks.iter().for_each(|disk| text.add(disk));
    text.finish()
}

fn disk(id: &str, state: DiskState, served: Option<ServedMetrics>) -> DiskMetrics {
    DiskMetrics {
        id: id.to_owned(),
        state,
        descriptors: 74,
        served,
    }
}

fn served(id: &str) -> DiskMetrics {
    disk(id, DiskState::Serving, Some(ram(id).metrics()))
}

/// Returns the samples of each family. Panics if a family is declared twice, without its type or without a sample, or has samples
/// apart from its head.
fn families(text: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut all = BTreeMap::new();
    for part in text.split("# HELP ").skip(1) {
        let mut lines = part.lines();
        let (name, help) = lines.next().unwrap().split_once(' ').unwrap();
        assert!(help.ends_with('.') && help == help.trim(), "{name}: {help}");
        let kind = lines
            .next()
            .unwrap()
            .strip_prefix(&format!("# TYPE {name} "));
        assert!(kind.is_some(), "{name}\n{text}");
        let samples: Vec<&str> = lines.collect();
        assert!(!samples.is_empty(), "{name}\n{text}");
        for sample in &samples {
            assert!(sample.starts_with(name), "{sample} in {name}");
        }
        assert!(all.insert(name, samples).is_none(), "{name} twice");
    }
    all
}

fn value(sample: &str) -> f64 {
    sample.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn metrics_without_a_disk_are_those_of_the_process() {
    let text = write(&[]);
    let all = families(&text);
    let names: Vec<&str> = all.keys().copied().collect();
    let expected = [
        "cleave_build_info",
        "cleave_private_memory_bytes",
        "process_cpu_seconds_total",
        "process_max_fds",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
    ];
    assert_eq!(names, expected);
    let version = env!("CARGO_PKG_VERSION");
    let build = format!("cleave_build_info{{version=\"{version}\"}} 1");
    assert_eq!(all["cleave_build_info"], [build]);
    let of = |name: &str| {
        let [sample] = all[name][..] else {
            panic!("{name} has several samples");
        };
        assert_eq!(sample.split(' ').next(), Some(name), "no labels");
        value(sample)
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let age = now.as_secs_f64() - of("process_start_time_seconds");
    assert!((0.0..3600.0).contains(&age), "{age}");
    assert!(of("process_cpu_seconds_total") > 0.0);
    assert!((3.0..of("process_max_fds")).contains(&of("process_open_fds")));
    let resident = of("process_resident_memory_bytes");
    assert!((1.0..resident).contains(&of("cleave_private_memory_bytes")));
}

#[test]
fn metrics_of_a_disk_have_its_id() {
    let text = write(&[served("a\"b")]);
    let all = families(&text);
    for (name, samples) in &all {
        let of_disk = format!("{name}{{disk=\"a\\\"b\"");
        let is_of_disk = |sample: &&str| sample.starts_with(&of_disk);
        let is_own = PROCESS.iter().any(|family| family.name == *name);
        let count = samples.iter().filter(|sample| is_of_disk(sample)).count();
        assert_eq!(count, if is_own { 0 } else { samples.len() }, "{samples:?}");
    }
    let info = "cleave_disk_info{disk=\"a\\\"b\",name=\"ram:1M\",serial=\"a\\\"b\",kind=\"ram\",socket=\"/run/a.sock\"} 1";
    assert_eq!(all["cleave_disk_info"], [info]);
    let state = "cleave_disk_state{disk=\"a\\\"b\",state=\"serving\"} 1";
    assert_eq!(all["cleave_disk_state"], [state]);
    for absent in ["cleave_nbd_connections", "cleave_leg_ops_total"] {
        assert!(!all.contains_key(absent), "{absent}");
    }
}

#[test]
fn a_parked_frontend_is_counted() {
    for parked in [false, true] {
        let mut report = ram("a").report();
        report.session.parked = parked;
        let text = text_of(report);
        let sample = format!("cleave_parked_frontends{{disk=\"a\"}} {}", u8::from(parked));
        assert_eq!(families(&text)["cleave_parked_frontends"], [sample]);
    }
}

/// Parsing the text checks that a family has one head, and the samples of all disks under it.
#[test]
fn metrics_of_several_disks_are_written_by_family() {
    let disks = [
        served("a"),
        disk("b", DiskState::Failed, None),
        served("c"),
        disk("d", DiskState::Opening, None),
    ];
    let text = write(&disks);
    let all = families(&text);
    let states = ["a serving", "b failed", "c serving", "d opening"].map(|line| {
        let (id, state) = line.split_once(' ').unwrap();
        format!("cleave_disk_state{{disk=\"{id}\",state=\"{state}\"}} 1")
    });
    assert_eq!(all["cleave_disk_state"], states);
    let requests: Vec<&str> = all["cleave_disk_requests_total"]
        .iter()
        .map(|sample| &sample["cleave_disk_requests_total{disk=\"".len()..][..1])
        .collect();
    assert_eq!(requests.concat(), "aaaccc");
    for absent in ["b", "d"] {
        let label = format!("disk=\"{absent}\"");
        assert_eq!(text.matches(&label).count(), 2, "what is known of each");
    }
    let alone = write(&disks[..1]);
    let alone: Vec<_> = families(&alone).into_keys().collect();
    assert_eq!(all.into_keys().collect::<Vec<_>>(), alone);
}

#[test]
fn limits_in_the_metrics_have_their_units() {
    let mut limited = ram("a").metrics();
    let limits =
        "iops-total=5000,iops-total-max=6000,iops-total-max-length=10,bps-read=1G,iops-size=64K";
    limited.limits = limits.parse().unwrap();
    let text = write(&[disk("a", DiskState::Serving, Some(limited))]);
    let lines: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("cleave_limit_"))
        .collect();
    let expected = [
        "requests_per_second{disk=\"a\",limit=\"iops-total\"} 5000",
        "requests_per_second{disk=\"a\",limit=\"iops-total-max\"} 6000",
        "bytes_per_second{disk=\"a\",limit=\"bps-read\"} 1073741824",
        "burst_seconds{disk=\"a\",limit=\"iops-total-max-length\"} 10",
        "request_size_bytes{disk=\"a\"} 65536",
    ];
    assert_eq!(lines, expected);
}

/// A name is a promise, which the manual makes.
#[test]
fn the_manual_has_each_metric_with_its_type() {
    fn heads<T>(families: &[Family<T>]) -> impl Iterator<Item = (String, String)> {
        let head = |family: &Family<T>| (family.name.to_owned(), family.kind.to_owned());
        families.iter().map(head)
    }
    let all = heads(PROCESS).chain(heads(DISK)).chain(heads(SERVED));
    let mut all: Vec<_> = all.collect();
    let manual = include_str!("../../../../../docs/metrics.md");
    let (_, metrics) = manual.split_once("\n## Metrics\n").unwrap();
    let mut told = Vec::new();
    for row in metrics.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let names = cells[1].split(", ").map(|name| name.trim_matches('`'));
        told.extend(names.map(|name| (name.to_owned(), cells[2].to_owned())));
    }
    all.sort();
    told.sort();
    assert_eq!(told, all);
    let is_total =
        |(name, kind): &(String, String)| name.ends_with("_total") == (kind == "counter");
    assert!(all.iter().all(is_total), "{all:?}");
}
