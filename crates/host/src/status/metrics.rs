//! `GET /metrics`: all families of metrics, each over all disks.

mod exposition;
#[cfg(test)]
pub(super) mod tests;

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use cleave_api::{
    DiskReport, DiskState, ImageLock, RequestClass, ServerConnections, SpinExperiment, SplitReport,
    VringReport, WorkerMode,
};
use cleave_config::CompletionOption;
use cleave_worker::record::{Distribution, Kind, Stage, VringRecord};
use cleave_worker::{LimitKind, RateLimits};

use self::exposition::{Bounds, Family, SampleLabels, Samples, families};
use super::DiskStatus;
use super::gather::merged;
use super::usage::{self, ResidentMemory};
use crate::process::started;

/// Room in a text for the heads of all families and the samples of the process.
const HEADS_BYTES: usize = 16 << 10;

/// What belongs to the process, whatever disks it has. Names that begin with `process_` are those of Prometheus' own libraries.
const PROCESS: &[Family<ResidentMemory>] = families! { ResidentMemory:
    /// The version of the program; always 1.
    gauge cleave_build_info = |_, to| to.sample(&[("version", &env!("CARGO_PKG_VERSION"))], 1);
    /// Time at which the daemon started, since 1970.
    gauge process_start_time_seconds = |_, to| {
        to.maybe(started().time.duration_since(UNIX_EPOCH).ok().map(|time| time.as_secs_f64()));
    };
    /// CPU time of the daemon, user and system.
    counter process_cpu_seconds_total = |_, to| to.one(usage::cpu_seconds());
    /// Resident memory of the daemon, with the memory of guests that it has touched.
    gauge process_resident_memory_bytes = |memory, to| to.one(memory.total_bytes);
    /// Resident memory of the daemon, without what it shares with guests.
    gauge cleave_private_memory_bytes = |memory, to| to.one(memory.private_bytes);
    /// Files that the daemon has open. Absent before Linux 6.2.
    gauge process_open_fds = |_, to| to.maybe(usage::open_files());
    /// Files that the daemon may have open.
    gauge process_max_fds = |_, to| to.maybe(usage::open_files_max());
};

/// What is known of every disk.
const DISK: &[Family<DiskMetrics>] = families! { DiskMetrics:
    /// The state of a disk: opening, serving, ending, failed or ended; always 1.
    gauge cleave_disk_state = |disk, to| to.by("state", [(disk.state, 1)]);
    /// Files that a disk of a node may come to need open; all disks together may need process_max_fds.
    gauge cleave_disk_reserved_fds = |disk, to| to.maybe(Some(disk.descriptors).filter(|count| *count > 0));
};

/// What a disk does while it is served.
const SERVED: &[Family<ServedMetrics>] = families! { ServedMetrics:
    /// What a served disk is called, and what it consists of; always 1.
    gauge cleave_disk_info = info;
    /// The right to read and write a served disk: active, inactive, handed-over or waiting; always 1.
    gauge cleave_disk_possession = |disk, to| to.by("state", [(disk.report.possession, 1)]);
    /// 1 while a frontend is connected.
    gauge cleave_connected = |disk, to| to.one(u8::from(disk.report.session.connected));
    /// 1 while a second frontend is connected, whose vrings start when the first has stopped its own.
    gauge cleave_parked_frontends = |disk, to| to.one(u8::from(disk.report.session.parked));
    /// Frontends served so far.
    counter cleave_sessions_total = |disk, to| to.one(disk.report.session.count);
    /// Running vrings whose requests in flight are lost if the daemon is killed.
    gauge cleave_vrings_without_recovery = |disk, to| {
        to.one(disk.report.session.vrings.iter().filter(|vring| !vring.recovery).count());
    };
    /// Time in which the disk was not served when the process before handed it over; absent if none did.
    gauge cleave_hand_over_pause_seconds = |disk, to| {
        to.maybe(disk.report.hand_over.last.and_then(|last| last.pause_seconds));
    };
    /// Size of the disk.
    gauge cleave_disk_size_bytes = |disk, to| to.one(disk.report.store.size_bytes);
    /// Bytes that are missing at the end of the disk, or of a leg of its stripe, because it shrank.
    gauge cleave_disk_short_bytes = |disk, to| to.one(disk.report.store.short_bytes);
    /// 1 after a sync failed: every flush fails until the disk is opened again.
    gauge cleave_disk_sync_failed = |disk, to| to.one(u8::from(disk.report.store.sync_failed));

    /// Connections to the NBD server: up, or waiting to be made.
    gauge cleave_nbd_connections = |disk, to| {
        if let Some(server) = disk.server() {
            to.by("state", [("up", server.connected), ("waiting", server.waiting)]);
        }
    };
    /// Connections to the NBD server that were lost.
    counter cleave_nbd_connections_lost_total = |disk, to| to.maybe(disk.server().map(|server| server.lost));
    /// Connections to the NBD server that were made in place of lost ones.
    counter cleave_nbd_reconnects_total = |disk, to| to.maybe(disk.server().map(|server| server.reconnects));
    /// Requests that wait for a connection to the NBD server.
    gauge cleave_nbd_held_requests = |disk, to| to.maybe(disk.server().map(|server| server.held));
    /// Bytes that were sent to the NBD server and received from it.
    counter cleave_nbd_bytes_total = |disk, to| {
        if let Some(server) = disk.server() {
            to.by("direction", [("sent", server.sent_bytes), ("received", server.received_bytes)]);
        }
    };
    /// Bytes that are kept because the NBD server answered and did not flush them.
    gauge cleave_nbd_unflushed_bytes = |disk, to| to.maybe(disk.server().map(|server| server.unflushed_bytes));
    /// Bytes that were sent to the NBD server again because it may have lost them.
    counter cleave_nbd_replayed_bytes_total = |disk, to| to.maybe(disk.server().map(|server| server.replayed_bytes));
    /// 1 after another client took the exclusive lock of the image: every request fails until the daemon is restarted.
    gauge cleave_rbd_lock_lost = |disk, to| {
        to.maybe(disk.report.store.lock.map(|lock| u8::from(lock == ImageLock::Lost)));
    };

    /// Requests that succeeded, over all vrings; counted also with --stats off.
    counter cleave_disk_requests_total = |disk, to| {
        let totals = &disk.report.totals;
        to.by("direction", [("read", totals.reads), ("write", totals.writes), ("other", totals.others)]);
    };
    /// Bytes that these requests moved; counted also with --stats off.
    counter cleave_disk_bytes_total = |disk, to| {
        let totals = &disk.report.totals;
        to.by("direction", [("read", totals.read_bytes), ("write", totals.write_bytes)]);
    };
    /// Requests that did not succeed: failed by the store, refused as invalid, or too broken to answer.
    counter cleave_disk_failures_total = |disk, to| {
        let totals = &disk.report.totals;
        to.by("outcome", [("failed", totals.failed), ("refused", totals.refused), ("broken", totals.broken)]);
    };
    /// Vrings that are no longer served because their guest broke them.
    counter cleave_retired_vrings_total = |disk, to| to.one(disk.report.totals.retired_vrings);
    /// Reads and writes of the disk that were polled for (--iopoll on).
    counter cleave_polled_ops_total = |disk, to| to.one(disk.report.totals.polled);
    /// Laps of the workers' loops that did something.
    counter cleave_laps_total = |disk, to| to.one(disk.report.totals.laps);

    /// 1 for the completion mode in force.
    gauge cleave_completion_mode = |disk, to| {
        let modes = [CompletionOption::Interrupt, CompletionOption::Poll, CompletionOption::Adaptive];
        to.by("mode", modes.map(|mode| (mode, u8::from(disk.report.tuning.completion == mode))));
    };
    /// Running workers, by what they do when there is nothing to do.
    gauge cleave_workers = |disk, to| {
        let count = |mode| disk.report.pacing.workers.iter().filter(|worker| *worker == mode).count();
        to.by("mode", WorkerMode::ALL.iter().map(|mode| (mode, count(mode))));
    };
    /// CPU time of the workers of a disk; in a pool, the time that the pool's threads spent on it.
    counter cleave_disk_worker_cpu_seconds_total = |disk, to| to.one(disk.report.pacing.cpu_seconds);
    /// Time that adaptive workers spun: hit ended with something to do, wasted did not.
    counter cleave_spin_seconds_total = |disk, to| {
        let pacing = &disk.report.pacing;
        to.by("outcome", [("hit", pacing.spin_hit_seconds), ("wasted", pacing.spin_wasted_seconds)]);
    };
    /// Times that a worker slept until an event.
    counter cleave_sleeps_total = |disk, to| to.one(disk.report.pacing.sleeps);
    /// Times that a worker slept with a timer.
    counter cleave_dozes_total = |disk, to| to.one(disk.report.pacing.dozes);
    /// Times that a worker woke up from either.
    counter cleave_wakeups_total = |disk, to| to.one(disk.report.pacing.wakeups);
    /// Times that a worker changed between spinning and sleeping, by reason.
    counter cleave_mode_switches_total = |disk, to| to.by("reason", &disk.report.pacing.switches);
    /// Experiments of adaptive workers with spinning and sleeping that reached a verdict.
    counter cleave_pacing_experiments_total = |disk, to| to.one(disk.report.pacing.experiments);
    /// Share of the response time that spinning saved in the last experiment of a worker; negative: it took longer.
    gauge cleave_spin_gain_ratio = |disk, to| to.by("worker", disk.tried(|tried| tried.gain_percent[0]));
    /// Additional cores that spinning kept busy in that experiment; negative: it kept fewer busy.
    gauge cleave_spin_price_cores = |disk, to| to.by("worker", disk.tried(|tried| tried.price_percent));
    /// How long workers may still spin without finding work.
    gauge cleave_spin_budget_seconds = |disk, to| to.one(disk.report.pacing.spin_left_seconds);
    /// The most that this budget can be.
    gauge cleave_spin_budget_max_seconds = |disk, to| to.one(disk.report.pacing.spin_left_max_seconds);

    /// Requests that succeeded, by direction and size class.
    counter cleave_requests_total = |disk, to| classes(disk, to, |class| class.requests);
    /// Bytes that these requests moved.
    counter cleave_request_bytes_total = |disk, to| classes(disk, to, |class| class.bytes);
    /// Requests that did not succeed, by kind of error.
    counter cleave_request_errors_total = |disk, to| {
        for vring in &disk.report.vrings {
            for (kind, count) in &vring.errors {
                to.sample(&[("vring", &vring.index), ("kind", kind)], count);
            }
        }
    };
    /// Kicks from the guest that the worker saw.
    counter cleave_kicks_total = |disk, to| to.by("vring", disk.vrings(|vring| vring.kicks));
    /// Calls to the guest.
    counter cleave_calls_total = |disk, to| to.by("vring", disk.vrings(|vring| vring.calls));
    /// Published batches for which the guest wanted no call, or cannot be called.
    counter cleave_calls_suppressed_total = |disk, to| to.by("vring", disk.vrings(|vring| vring.calls_suppressed));
    /// Published batches whose call was held back and merged into a later one.
    counter cleave_calls_coalesced_total = |disk, to| to.one(disk.report.totals.calls_coalesced);
    /// Reads whose data was examined.
    counter cleave_reads_sampled_total = |disk, to| to.by("vring", disk.vrings(|vring| vring.zero_reads.sampled));
    /// Reads among these that found nothing but zeroes.
    counter cleave_reads_zero_total = |disk, to| to.by("vring", disk.vrings(|vring| vring.zero_reads.zero));
    /// Requests in flight.
    gauge cleave_in_flight_requests = |disk, to| to.by("vring", disk.vrings(|vring| vring.in_flight.requests.into()));
    /// Age of the oldest request in flight; 0 if there is none.
    gauge cleave_oldest_request_seconds = |disk, to| to.one(disk.report.in_flight.oldest_seconds.unwrap_or(0.0));
    /// Requests that the disk failed and that wait for the operator, or for a lost NBD server; no sample if nothing waits.
    gauge cleave_held_requests = |disk, to| {
        to.by("vring", disk.report.stalled.iter().map(|stalled| (stalled.vring, stalled.held)));
    };
    /// Requests that the disk failed and that wait for a pause to end; no sample if nothing waits.
    gauge cleave_retrying_requests = |disk, to| {
        to.by("vring", disk.report.stalled.iter().map(|stalled| (stalled.vring, stalled.retrying)));
    };
    /// 1 while the disk is quiesced: requests wait in their rings.
    gauge cleave_quiesced = |disk, to| to.one(u8::from(disk.report.quiesced_seconds.is_some()));
    /// Times that a request which the disk failed was held.
    counter cleave_requests_held_total = |disk, to| to.one(disk.report.totals.held);
    /// Times that a request which the disk failed was repeated.
    counter cleave_requests_redone_total = |disk, to| to.one(disk.report.totals.redone);
    /// Time that requests spent in a stage; split is the part of device that was cut into several ops.
    histogram cleave_request_stage_seconds = stages;
    /// Time that calls to the guest were held back to become fewer.
    histogram cleave_call_held_seconds = |disk, to| histograms(disk, to, VringRecord::call_times, &Bounds::SHORT);

    /// Limits of requests that are set, by QEMU's names; those that end in -max are for bursts.
    gauge cleave_limit_requests_per_second = |disk, to| to.by("limit", disk.rates(OF_REQUESTS));
    /// Limits of bytes that are set, by QEMU's names; those that end in -max are for bursts.
    gauge cleave_limit_bytes_per_second = |disk, to| to.by("limit", disk.rates(OF_BYTES));
    /// How long a burst may last, if that is set, by QEMU's names.
    gauge cleave_limit_burst_seconds = |disk, to| {
        let seconds = |kind: LimitKind| (format!("{}-max-length", kind.name()), disk.limits.of(kind).max_length);
        to.by("limit", LimitKind::ALL.map(seconds).into_iter().filter(is_set));
    };
    /// Size from which a request counts as several for the limits, if that is set (iops-size).
    gauge cleave_limit_request_size_bytes = |disk, to| to.maybe(Some(disk.limits.iops_size).filter(|size| *size > 0));
    /// Requests that waited in the ring for the limits.
    counter cleave_requests_throttled_total = |disk, to| to.one(disk.report.totals.throttled);
    /// Time that requests waited in the ring for the limits.
    histogram cleave_throttled_seconds = |disk, to| histograms(disk, to, VringRecord::throttle_times, &Bounds::DEVICE);

    /// Size of the pieces that large requests are split into now, by size of the request; 0: left whole.
    gauge cleave_split_chunk_bytes = |disk, to| splits(disk, to, |cell| Some(f64::from(cell.chunk_bytes)));
    /// Share of the response time that smaller pieces saved in the last experiment; negative: it took longer.
    gauge cleave_split_gain_ratio = |disk, to| splits(disk, to, |cell| Some(share(cell.tried?.gain_percent[0])));
    /// Additional cores that smaller pieces kept busy in that experiment; negative: they kept fewer busy.
    gauge cleave_split_price_cores = |disk, to| splits(disk, to, |cell| Some(share(cell.tried?.price_percent)));

    /// Ops that succeeded on a leg of the stripe.
    counter cleave_leg_ops_total = |disk, to| {
        for leg in &disk.report.legs {
            for (direction, count) in [("read", leg.reads), ("write", leg.writes), ("other", leg.others)] {
                to.sample(&[("leg", &leg.name), ("direction", &direction)], count);
            }
        }
    };
    /// Bytes read from a leg and written to it.
    counter cleave_leg_bytes_total = |disk, to| to.by("leg", disk.report.legs.iter().map(|leg| (&leg.name, leg.bytes)));
    /// Ops that a leg failed.
    counter cleave_leg_errors_total = |disk, to| to.by("leg", disk.report.legs.iter().map(|leg| (&leg.name, leg.failed)));
    /// Sum of the times that reads and writes of a leg took.
    counter cleave_leg_busy_seconds_total = |disk, to| {
        to.by("leg", disk.report.legs.iter().map(|leg| (&leg.name, leg.busy_seconds)));
    };
};

const OF_REQUESTS: [LimitKind; 3] = [
    LimitKind::IopsTotal,
    LimitKind::IopsRead,
    LimitKind::IopsWrite,
];
const OF_BYTES: [LimitKind; 3] = [LimitKind::BpsTotal, LimitKind::BpsRead, LimitKind::BpsWrite];

/// A disk whose metrics are to be written.
#[derive(Debug)]
pub(crate) struct DiskMetrics {
    pub(crate) id: String,
    pub(crate) state: DiskState,
    /// Descriptors that it may come to need. 0: nobody counts them.
    pub(crate) descriptors: u64,
    /// What it does, if it is served.
    pub(crate) served: Option<ServedMetrics>,
}

/// What a disk does that is served.
#[derive(Debug)]
pub(crate) struct ServedMetrics {
    report: DiskReport,
    records: Vec<Arc<VringRecord>>,
    limits: RateLimits,
}

/// The metrics of a process and its disks in the making. Disks are added one by one, so that the thread that adds them can do something
/// else in between; in the text the samples of a family stand together.
#[derive(Debug)]
pub(crate) struct MetricsText {
    /// The samples of each family of [`DISK`].
    disk: Vec<String>,
    /// Those of [`SERVED`].
    served: Vec<String>,
}

impl MetricsText {
    /// Makes a text without disks.
    pub(crate) fn new() -> MetricsText {
        MetricsText {
            disk: vec![String::new(); DISK.len()],
            served: vec![String::new(); SERVED.len()],
        }
    }

    /// Adds a disk.
    pub(crate) fn add(&mut self, disk: &DiskMetrics) {
        let id = Some(&*disk.id);
        for (family, samples) in DISK.iter().zip(&mut self.disk) {
            family.write(samples, id, disk);
        }
        let Some(served) = &disk.served else {
            return;
        };
        for (family, samples) in SERVED.iter().zip(&mut self.served) {
            family.write(samples, id, served);
        }
    }

    /// Returns the text, which begins with the metrics of the process.
    pub(crate) fn finish(self) -> String {
        let samples = self.disk.iter().chain(&self.served);
        let bytes: usize = samples.map(String::len).sum();
        let mut out = String::with_capacity(bytes + HEADS_BYTES);
        let memory = ResidentMemory::read();
        for family in PROCESS {
            let mut samples = String::new();
            family.write(&mut samples, None, &memory);
            family.put(&mut out, &samples);
        }
        // The samples of a family are dropped when they have been copied.
        for (family, samples) in DISK.iter().zip(self.disk) {
            family.put(&mut out, &samples);
        }
        for (family, samples) in SERVED.iter().zip(self.served) {
            family.put(&mut out, &samples);
        }
        out
    }
}

impl DiskStatus {
    /// Returns what the metrics say of the disk.
    pub(crate) fn metrics(&self) -> ServedMetrics {
        ServedMetrics {
            report: self.report(),
            records: self.device.records.all(),
            limits: self.device.tuning().limits,
        }
    }
}

impl ServedMetrics {
    fn server(&self) -> Option<&ServerConnections> {
        self.report.store.connections.as_ref()
    }

    fn vrings(&self, of: fn(&VringReport) -> u64) -> impl Iterator<Item = (u16, u64)> {
        let vrings = self.report.vrings.iter();
        vrings.map(move |vring| (vring.index, of(vring)))
    }

    /// Returns a percentage of the last experiment of each worker that has made one, as a share.
    fn tried(&self, percent: fn(&SpinExperiment) -> f64) -> impl Iterator<Item = (usize, f64)> {
        let each = self.report.pacing.tried.iter().enumerate();
        each.filter_map(move |(worker, tried)| Some((worker, share(percent(tried.as_ref()?)))))
    }

    /// Returns the limits of these kinds that are set.
    fn rates(&self, kinds: [LimitKind; 3]) -> impl Iterator<Item = (String, u64)> {
        let each = kinds.into_iter().flat_map(|kind| {
            let (name, limit) = (kind.name(), self.limits.of(kind));
            [
                (name.to_owned(), limit.average),
                (format!("{name}-max"), limit.max),
            ]
        });
        each.filter(is_set)
    }
}

fn is_set((_, value): &(String, u64)) -> bool {
    *value > 0
}

fn info(disk: &ServedMetrics, to: &mut Samples<'_>) {
    let report = &disk.report;
    let labels: SampleLabels<'_> = &[
        ("name", &report.name),
        ("serial", &report.serial.as_deref().unwrap_or_default()),
        ("kind", &report.store.kind),
        ("socket", &report.endpoint),
    ];
    to.sample(labels, 1);
}

fn classes(disk: &ServedMetrics, to: &mut Samples<'_>, of: fn(&RequestClass) -> u64) {
    for vring in &disk.report.vrings {
        for class in &vring.requests {
            let labels: SampleLabels<'_> = &[
                ("vring", &vring.index),
                ("direction", &class.direction),
                ("size", &class.size),
            ];
            to.sample(labels, of(class));
        }
    }
}

/// Writes the times of the stages. Kinds of request that never occurred are left out; that is most of them.
fn stages(disk: &ServedMetrics, to: &mut Samples<'_>) {
    let records = &disk.records;
    for kind in Kind::all() {
        let mut stage_of = |stage: &str, all: Option<Distribution>, bounds| {
            let labels: SampleLabels<'_> = &[
                ("direction", &kind.way().name()),
                ("size", &kind.size()),
                ("stage", &stage),
            ];
            if let Some(all) = all.filter(|all| all.count() > 0) {
                to.histogram(labels, &all, bounds);
            }
        };
        for stage in Stage::ALL {
            let bounds = match stage {
                Stage::Device => &Bounds::DEVICE,
                Stage::Ring | Stage::Plan | Stage::Publish => &Bounds::SHORT,
            };
            let each = records.iter().map(|record| record.times(stage, kind));
            stage_of(stage.name(), merged(each), bounds);
        }
        let split = records.iter().filter_map(|record| record.split_times(kind));
        stage_of("split", merged(split), &Bounds::DEVICE);
    }
}

/// Writes a distribution of each vring, unless it is empty.
fn histograms(
    disk: &ServedMetrics,
    to: &mut Samples<'_>,
    of: fn(&VringRecord) -> Distribution,
    bounds: &Bounds,
) {
    for record in &disk.records {
        let all = of(record);
        if all.count() > 0 {
            to.histogram(&[("vring", &record.index())], &all, bounds);
        }
    }
}

fn splits(disk: &ServedMetrics, to: &mut Samples<'_>, of: fn(&SplitReport) -> Option<f64>) {
    for cell in &disk.report.splitting {
        let labels: SampleLabels<'_> = &[
            ("direction", &cell.direction),
            ("from_bytes", &cell.from_bytes),
        ];
        if let Some(value) = of(cell) {
            to.sample(labels, value);
        }
    }
}

/// Returns the share that a percentage is. As percentages have one decimal, it is as short as it can be written.
fn share(percent: f64) -> f64 {
    (percent * 10.0).round() / 1000.0
}
