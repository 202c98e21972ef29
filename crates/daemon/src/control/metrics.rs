//! `GET /metrics`: the Prometheus text format.

use std::collections::HashMap;
use std::fmt::{Display, Write as _};

use cleave_api::{
    DiskReport, DiskState, ImageLock, RequestClass, ServerConnections, SpinExperiment, SplitReport,
    VringReport, WorkerMode,
};
use cleave_config::CompletionOption;
use cleave_worker::record::{Distribution, Kind, Stage};

use super::DiskStatus;
use super::gather::merged as merged_times;

/// All families: name, type and help.
const FAMILIES: &str = "\
cleave_info gauge The program and what it serves; always 1.
cleave_uptime_seconds gauge Time since the daemon started.
cleave_process_cpu_seconds_total counter CPU time of the daemon, user and system.
cleave_process_resident_bytes gauge Memory of the daemon, without what it shares with guests.
cleave_disk_state gauge The state of a disk of a node: opening, serving, ending, failed or ended; always 1.
cleave_connected gauge 1 while a frontend is connected.
cleave_sessions_total counter Frontends served so far.
cleave_vrings_without_recovery gauge Running vrings whose requests in flight are lost if the daemon is killed.
cleave_disk_size_bytes gauge Size of the disk.
cleave_disk_short_bytes gauge Bytes that are missing at the end of the disk, or of a leg of its stripe, because it shrank.
cleave_disk_sync_failed gauge 1 after a sync failed: every flush fails until the disk is opened again.
cleave_nbd_connections gauge ServerConnections to the NBD server: up, or waiting to be made.
cleave_nbd_lost_total counter ServerConnections to the NBD server that were lost.
cleave_nbd_reconnects_total counter ServerConnections made in place of lost ones.
cleave_nbd_held_requests gauge RequestClass that wait for a connection to the NBD server.
cleave_nbd_bytes_total counter Bytes that went to the NBD server and came from it.
cleave_nbd_unflushed_bytes gauge Bytes that are kept because the NBD server answered and did not flush them.
cleave_nbd_replayed_bytes_total counter Bytes that were sent to the NBD server again because it may have lost them.
cleave_rbd_lock_lost gauge 1 after another client took the exclusive lock of the image: every request fails until the daemon is restarted.
cleave_disk_requests_total counter RequestClass that ended well, over all vrings; counted also with --stats off.
cleave_disk_bytes_total counter Bytes that they moved; counted also with --stats off.
cleave_disk_failures_total counter RequestClass that did not end well: failed by the store, refused as invalid, or too broken to answer.
cleave_retired_vrings_total counter Vrings that are served no more because their guest broke them.
cleave_polled_total counter Reads and writes of the disk that were polled for (--iopoll on).
cleave_laps_total counter Turns of the workers' loops that did something.
cleave_completion_mode gauge 1 for the mode in force.
cleave_workers gauge Workers that run, by what they do when there is nothing to do.
cleave_spin_seconds_total counter Time spun: hit ended with something to do, wasted did not.
cleave_sleeps_total counter Times that a worker slept until an event.
cleave_dozes_total counter Times that a worker slept with a timer, to look again by itself.
cleave_wakeups_total counter Times that a worker came back from either.
cleave_mode_switches_total counter Times that a worker changed between spinning and sleeping, by reason.
cleave_pacing_experiments_total counter Experiments of adaptive workers with spinning and sleeping that came to a verdict.
cleave_spin_gain_ratio gauge Share of the response time that spinning saved in the last experiment of a worker; negative: it took longer.
cleave_spin_price_cores gauge Cores that spinning kept busy more in that experiment; negative: less.
cleave_spin_budget_seconds gauge How long workers may spin in vain from now on.
cleave_spin_budget_max_seconds gauge The most that this can be.
cleave_requests_total counter RequestClass that ended well, by direction and size class.
cleave_request_bytes_total counter Bytes that they moved.
cleave_request_errors_total counter RequestClass that did not end well, by kind of error.
cleave_kicks_total counter Kicks from the guest that the worker saw.
cleave_calls_total counter Calls to the guest.
cleave_calls_suppressed_total counter Published batches for which the guest wanted no call, or has no way to be called.
cleave_reads_sampled_total counter Reads whose data was looked at.
cleave_reads_zero_total counter Of these, reads that found nothing but zeroes.
cleave_calls_coalesced_total counter Published batches whose call was held back and became one with a later one.
cleave_in_flight_requests gauge RequestClass with the engine.
cleave_oldest_request_seconds gauge Age of the oldest request in flight; 0 where there is none.
cleave_held_requests gauge RequestClass that the disk failed and that wait for the operator; no sample where nothing waits.
cleave_retrying_requests gauge The same, of those that wait for a pause to end.
cleave_quiesced gauge 1 while the disk is quiesced: requests wait in their rings.
cleave_requests_held_total counter Times that a request which the disk failed was held.
cleave_requests_redone_total counter Times that a request which the disk failed was done again.
cleave_request_stage_seconds histogram Time that requests spent in a stage; split is the part of device that was cut into several ops.
cleave_call_held_seconds histogram Time that calls to the guest were held back to become fewer.
cleave_limit gauge Limits of the disk that are set, by QEMU's names.
cleave_requests_throttled_total counter RequestClass that waited in the ring for these limits.
cleave_throttled_seconds histogram Time that they waited there.
cleave_split_chunk_bytes gauge Pieces that large requests are split into now, by size; 0: left whole.
cleave_split_gain_ratio gauge Share of the response time that smaller pieces saved in the last experiment; negative: it took longer.
cleave_split_price_cores gauge Cores that smaller pieces kept busy more in that experiment; negative: less.
cleave_leg_ops_total counter Ops that a leg of the stripe ended well.
cleave_leg_bytes_total counter Bytes read from it and written to it.
cleave_leg_errors_total counter Ops that it failed.
cleave_leg_busy_seconds_total counter Sum of the times that its reads and writes took.
";

/// The texts of several disks as one: a family is declared once, with the samples of all.
pub(crate) fn merged(texts: impl IntoIterator<Item = String>) -> String {
    let mut families: Vec<(String, String)> = Vec::new();
    let mut places = HashMap::new();
    for text in texts {
        let mut at = 0;
        for line in text.lines() {
            match line.strip_prefix("# HELP ") {
                Some(head) => {
                    let name = head.split(' ').next().unwrap_or_default().to_owned();
                    at = *places.entry(name).or_insert(families.len());
                    if at == families.len() {
                        families.push((format!("{line}\n"), String::new()));
                    }
                }
                None => {
                    let Some((head, samples)) = families.get_mut(at) else {
                        continue;
                    };
                    match line.starts_with("# TYPE ") {
                        true if head.contains("# TYPE ") => {}
                        true => *head += &format!("{line}\n"),
                        false => *samples += &format!("{line}\n"),
                    }
                }
            }
        }
    }
    families
        .into_iter()
        .flat_map(|(head, samples)| [head, samples])
        .collect()
}

/// Bounds of histograms are powers of two of nanoseconds, from the first by a factor to the last: those
/// at which buckets of ours begin, so that nothing is interpolated.
struct Bounds {
    first: u32,
    step: usize,
    last: u32,
}

/// 1 µs to 4.3 s, doubling.
const DEVICE: Bounds = Bounds {
    first: 10,
    step: 1,
    last: 32,
};
/// 256 ns to 4.3 s by factors of four, for the stages that are short.
const SHORT: Bounds = Bounds {
    first: 8,
    step: 2,
    last: 32,
};

/// Labels of a sample beside `disk`, which every sample has.
type Labels<'a> = &'a [(&'a str, &'a dyn Display)];

/// A text that grows family by family.
struct Text<'a> {
    out: String,
    disk: &'a str,
    family: &'static str,
}

impl Text<'_> {
    fn new(disk: &str) -> Text<'_> {
        Text {
            out: String::with_capacity(16 << 10),
            disk,
            family: "",
        }
    }

    /// Begins one of [`FAMILIES`].
    fn family(&mut self, name: &'static str) {
        self.family = name;
        let row = |line: &'static str| line.strip_prefix(name)?.strip_prefix(' ')?.split_once(' ');
        let (kind, help) = FAMILIES.lines().find_map(row).unwrap_or_default();
        debug_assert!(!kind.is_empty(), "{name} is not in the table");
        // Writing to a string does not fail.
        let _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// A family of one sample.
    fn one(&mut self, name: &'static str, value: impl Display) {
        self.family(name);
        self.sample(&[], value);
    }

    /// A family whose samples differ in one label.
    fn by<L: Display, V: Display>(
        &mut self,
        name: &'static str,
        label: &str,
        samples: impl IntoIterator<Item = (L, V)>,
    ) {
        self.family(name);
        for (of, value) in samples {
            self.sample(&[(label, &of)], value);
        }
    }

    fn sample(&mut self, labels: Labels<'_>, value: impl Display) {
        self.line("", labels, value);
    }

    fn line(&mut self, suffix: &str, labels: Labels<'_>, value: impl Display) {
        let (family, disk) = (self.family, escaped(self.disk));
        let _ = write!(self.out, "{family}{suffix}{{disk=\"{disk}\"");
        for (name, value) in labels {
            let _ = write!(self.out, ",{name}=\"{}\"", escaped(&value.to_string()));
        }
        let _ = writeln!(self.out, "}} {value}");
    }

    fn histogram(&mut self, labels: Labels<'_>, all: &Distribution, bounds: &Bounds) {
        let mut bucket = |bound: &dyn Display, count| {
            self.line("_bucket", &[labels, &[("le", bound)]].concat(), count);
        };
        for power in (bounds.first..=bounds.last).step_by(bounds.step) {
            bucket(&((1u64 << power) as f64 / 1e9), all.below_ns(power));
        }
        bucket(&"+Inf", all.count());
        self.line("_sum", labels, all.sum_ns() as f64 / 1e9);
        self.line("_count", labels, all.count());
    }
}

/// Of a label's value.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

/// The state of a disk of a node, served or not.
pub(crate) fn state_of(id: &str, state: DiskState) -> String {
    let mut text = Text::new(id);
    text.by("cleave_disk_state", "state", [(state, 1)]);
    text.out
}

impl DiskStatus {
    /// All metrics of the disk.
    pub(crate) fn metrics(&self) -> String {
        let report = self.report();
        let mut text = Text::new(&report.id);
        daemon(&mut text, &report);
        disk(&mut text, &report);
        pacing(&mut text, &report);
        vrings(&mut text, &report);
        stalls(&mut text, &report);
        self.stages(&mut text);
        self.calls(&mut text);
        self.limits(&mut text, &report);
        splitting(&mut text, &report);
        legs(&mut text, &report);
        text.out
    }

    fn stages(&self, text: &mut Text<'_>) {
        text.family("cleave_request_stage_seconds");
        let records = self.device.records.all();
        for kind in Kind::all() {
            for stage in Stage::ALL {
                let all = merged_times(records.iter().map(|record| record.times(stage, kind)));
                let bounds = match stage {
                    Stage::Device => &DEVICE,
                    Stage::Ring | Stage::Plan | Stage::Publish => &SHORT,
                };
                stage_of(text, kind, stage.name(), all, bounds);
            }
            let split = records.iter().filter_map(|record| record.split_times(kind));
            stage_of(text, kind, "split", merged_times(split), &DEVICE);
        }
    }

    fn calls(&self, text: &mut Text<'_>) {
        text.family("cleave_call_held_seconds");
        for record in self.device.records.all() {
            let labels: Labels<'_> = &[("vring", &record.index())];
            text.histogram(labels, &record.call_times(), &SHORT);
        }
    }

    fn limits(&self, text: &mut Text<'_>, report: &DiskReport) {
        text.by("cleave_limit", "limit", &report.tuning.limits);
        text.one("cleave_requests_throttled_total", report.totals.throttled);
        text.family("cleave_throttled_seconds");
        for record in self.device.records.all() {
            let labels: Labels<'_> = &[("vring", &record.index())];
            text.histogram(labels, &record.throttle_times(), &DEVICE);
        }
    }
}

/// Kinds of request that never occurred are left out; that is most of them.
fn stage_of(
    text: &mut Text<'_>,
    kind: Kind,
    stage: &str,
    all: Option<Distribution>,
    bounds: &Bounds,
) {
    let Some(all) = all.filter(|all| all.count() > 0) else {
        return;
    };
    let labels: Labels<'_> = &[
        ("direction", &kind.way().name()),
        ("size", &kind.size()),
        ("stage", &stage),
    ];
    text.histogram(labels, &all, bounds);
}

fn daemon(text: &mut Text<'_>, report: &DiskReport) {
    let process = &report.process;
    text.family("cleave_info");
    let labels: Labels<'_> = &[
        ("name", &report.name),
        ("store", &report.store.kind),
        ("version", &process.version),
    ];
    text.sample(labels, 1);
    text.one("cleave_uptime_seconds", process.uptime_seconds);
    text.one("cleave_process_cpu_seconds_total", process.cpu_seconds);
    text.one("cleave_process_resident_bytes", process.resident_bytes);
    text.one("cleave_connected", u8::from(report.session.connected));
    text.one("cleave_sessions_total", report.session.count);
    let vrings = report.session.vrings.iter();
    let unrecorded = vrings.filter(|vring| !vring.recovery).count();
    text.one("cleave_vrings_without_recovery", unrecorded);
}

fn write_connections(text: &mut Text<'_>, connections: Option<&ServerConnections>) {
    let Some(connections) = connections else {
        return;
    };
    let states = [
        ("up", connections.connected),
        ("waiting", connections.waiting),
    ];
    text.by("cleave_nbd_connections", "state", states);
    text.one("cleave_nbd_lost_total", connections.lost);
    text.one("cleave_nbd_reconnects_total", connections.reconnects);
    text.one("cleave_nbd_held_requests", connections.held);
    let bytes = [
        ("sent", connections.sent_bytes),
        ("received", connections.received_bytes),
    ];
    text.by("cleave_nbd_bytes_total", "direction", bytes);
    text.one("cleave_nbd_unflushed_bytes", connections.unflushed_bytes);
    let replayed = connections.replayed_bytes;
    text.one("cleave_nbd_replayed_bytes_total", replayed);
}

fn disk(text: &mut Text<'_>, report: &DiskReport) {
    let (store, totals) = (&report.store, &report.totals);
    text.one("cleave_disk_size_bytes", store.size_bytes);
    text.one("cleave_disk_short_bytes", store.short_bytes);
    text.one("cleave_disk_sync_failed", u8::from(store.sync_failed));
    write_connections(text, store.connections.as_ref());
    if let Some(lock) = &store.lock {
        text.one("cleave_rbd_lock_lost", u8::from(*lock == ImageLock::Lost));
    }
    let requests = [
        ("read", totals.reads),
        ("write", totals.writes),
        ("other", totals.others),
    ];
    text.by("cleave_disk_requests_total", "direction", requests);
    let bytes = [("read", totals.read_bytes), ("write", totals.write_bytes)];
    text.by("cleave_disk_bytes_total", "direction", bytes);
    let failures = [
        ("failed", totals.failed),
        ("refused", totals.refused),
        ("broken", totals.broken),
    ];
    text.by("cleave_disk_failures_total", "outcome", failures);
    text.one("cleave_retired_vrings_total", totals.retired_vrings);
    text.one("cleave_polled_total", totals.polled);
    text.one("cleave_laps_total", totals.laps);
}

fn pacing(text: &mut Text<'_>, report: &DiskReport) {
    let pacing = &report.pacing;
    let modes = [
        CompletionOption::Interrupt,
        CompletionOption::Poll,
        CompletionOption::Adaptive,
    ];
    let modes = modes.map(|mode| (mode, u8::from(report.tuning.completion == mode)));
    text.by("cleave_completion_mode", "mode", modes);
    let count = |mode| pacing.workers.iter().filter(move |worker| *worker == mode);
    let workers = WorkerMode::ALL
        .iter()
        .map(|mode| (mode, count(mode).count()));
    text.by("cleave_workers", "mode", workers);
    let spun = [
        ("hit", pacing.spin_hit_seconds),
        ("wasted", pacing.spin_wasted_seconds),
    ];
    text.by("cleave_spin_seconds_total", "outcome", spun);
    text.one("cleave_sleeps_total", pacing.sleeps);
    text.one("cleave_dozes_total", pacing.dozes);
    text.one("cleave_wakeups_total", pacing.wakeups);
    text.by("cleave_mode_switches_total", "reason", &pacing.switches);
    text.one("cleave_pacing_experiments_total", pacing.experiments);
    let tried = |of: fn(&SpinExperiment) -> f64| {
        let each = pacing.tried.iter().enumerate();
        each.filter_map(move |(worker, tried)| Some((worker, of(tried.as_ref()?))))
    };
    let [gain, price] = [
        |tried: &SpinExperiment| share(tried.gain_percent[0]),
        |tried: &SpinExperiment| share(tried.price_percent),
    ];
    text.by("cleave_spin_gain_ratio", "worker", tried(gain));
    text.by("cleave_spin_price_cores", "worker", tried(price));
    text.one("cleave_spin_budget_seconds", pacing.spin_left_seconds);
    let most = pacing.spin_left_max_seconds;
    text.one("cleave_spin_budget_max_seconds", most);
}

fn vrings(text: &mut Text<'_>, report: &DiskReport) {
    each_kind(text, report, "cleave_requests_total", |row| row.requests);
    each_kind(text, report, "cleave_request_bytes_total", |row| row.bytes);
    text.family("cleave_request_errors_total");
    for vring in &report.vrings {
        for (kind, count) in &vring.errors {
            text.sample(&[("vring", &vring.index), ("kind", kind)], count);
        }
    }
    by_vring(text, report, "cleave_kicks_total", |vring| vring.kicks);
    by_vring(text, report, "cleave_calls_total", |vring| vring.calls);
    let suppressed = |vring: &VringReport| vring.calls_suppressed;
    by_vring(text, report, "cleave_calls_suppressed_total", suppressed);
    let sampled = |vring: &VringReport| vring.zero_reads.sampled;
    by_vring(text, report, "cleave_reads_sampled_total", sampled);
    let zero = |vring: &VringReport| vring.zero_reads.zero;
    by_vring(text, report, "cleave_reads_zero_total", zero);
    let coalesced = report.totals.calls_coalesced;
    text.one("cleave_calls_coalesced_total", coalesced);
    let in_flight = |vring: &VringReport| vring.in_flight.requests.into();
    by_vring(text, report, "cleave_in_flight_requests", in_flight);
    let oldest = report.in_flight.oldest_seconds.unwrap_or(0.0);
    text.one("cleave_oldest_request_seconds", oldest);
}

fn stalls(text: &mut Text<'_>, report: &DiskReport) {
    let stalled = || report.stalled.iter();
    let held = stalled().map(|stalled| (stalled.vring, stalled.held));
    text.by("cleave_held_requests", "vring", held);
    let retrying = stalled().map(|stalled| (stalled.vring, stalled.retrying));
    text.by("cleave_retrying_requests", "vring", retrying);
    text.one(
        "cleave_quiesced",
        u8::from(report.quiesced_seconds.is_some()),
    );
    text.one("cleave_requests_held_total", report.totals.held);
    text.one("cleave_requests_redone_total", report.totals.redone);
}

fn by_vring(
    text: &mut Text<'_>,
    report: &DiskReport,
    name: &'static str,
    of: fn(&VringReport) -> u64,
) {
    let samples = report.vrings.iter().map(|vring| (vring.index, of(vring)));
    text.by(name, "vring", samples);
}

fn each_kind(
    text: &mut Text<'_>,
    report: &DiskReport,
    name: &'static str,
    of: fn(&RequestClass) -> u64,
) {
    text.family(name);
    for vring in &report.vrings {
        for row in &vring.requests {
            let labels: Labels<'_> = &[
                ("vring", &vring.index),
                ("direction", &row.direction),
                ("size", &row.size),
            ];
            text.sample(labels, of(row));
        }
    }
}

/// Of tenths of a per cent: as short as it can be written.
fn share(percent: f64) -> f64 {
    (percent * 10.0).round() / 1000.0
}

fn splitting(text: &mut Text<'_>, report: &DiskReport) {
    let mut each = |name, of: &dyn Fn(&SplitReport) -> Option<f64>| {
        text.family(name);
        for cell in &report.splitting {
            let labels: Labels<'_> = &[
                ("direction", &cell.direction),
                ("from_bytes", &cell.from_bytes),
            ];
            if let Some(value) = of(cell) {
                text.sample(labels, value);
            }
        }
    };
    each("cleave_split_chunk_bytes", &|cell| {
        Some(cell.chunk_bytes.into())
    });
    each("cleave_split_gain_ratio", &|cell| {
        cell.tried.map(|tried| share(tried.gain_percent[0]))
    });
    each("cleave_split_price_cores", &|cell| {
        cell.tried.map(|tried| share(tried.price_percent))
    });
}

/// The part about splitting, by itself.
#[cfg(test)]
pub(super) fn splitting_of(report: &DiskReport) -> String {
    let mut text = Text::new(&report.id);
    splitting(&mut text, report);
    text.out
}

/// The part about waiting, by itself.
#[cfg(test)]
pub(super) fn pacing_of(report: &DiskReport) -> String {
    let mut text = Text::new(&report.id);
    pacing(&mut text, report);
    text.out
}

/// The part about legs, by itself.
#[cfg(test)]
pub(super) fn legs_of(report: &DiskReport) -> String {
    let mut text = Text::new(&report.id);
    legs(&mut text, report);
    text.out
}

fn legs(text: &mut Text<'_>, report: &DiskReport) {
    let legs = || report.legs.iter();
    if report.legs.is_empty() {
        return;
    }
    text.family("cleave_leg_ops_total");
    for leg in legs() {
        for (direction, count) in [
            ("read", leg.reads),
            ("write", leg.writes),
            ("other", leg.others),
        ] {
            text.sample(&[("leg", &leg.name), ("direction", &direction)], count);
        }
    }
    let bytes = legs().map(|leg| (&leg.name, leg.bytes));
    text.by("cleave_leg_bytes_total", "leg", bytes);
    let failed = legs().map(|leg| (&leg.name, leg.failed));
    text.by("cleave_leg_errors_total", "leg", failed);
    let busy = legs().map(|leg| (&leg.name, leg.busy_seconds));
    text.by("cleave_leg_busy_seconds_total", "leg", busy);
}
