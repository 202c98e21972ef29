//! Collects the state of workers, session and disk into a [`DiskReport`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cleave_api::{
    DiskReport, ImageLock, InFlightRequests, LatencySummary, LegReport, PacingReport,
    ProcessReport, RequestClass, RequestDirection, RequestTotals, RequestVerb, RunningVring,
    ServerConnections, SessionReport, SizeClass, SpinExperiment, SplitExperiment, SplitReport,
    StalledVring, StoreKind, StoreReport, TuningReport, VringReport, WorkerMode, ZeroReads,
};
use cleave_config::{Cache, CompletionOption};
use cleave_disk::{Backing, Disk, FileKind, format_size};
use cleave_worker::record::{Distribution, ErrorKind, Kind, Stage, VringRecord};
use cleave_worker::splitter::{SplitResult, SplitState};
use cleave_worker::{DataDirection, Device, LegTotals, Split, TrialResult, WaitState};

use super::DiskStatus;
use super::usage::{self, ResidentMemory};
use crate::process::started;

impl DiskStatus {
    /// The storage of the disk, as it was named.
    pub(crate) fn name(&self) -> &str {
        self.device.disk.name()
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.device.disk.capacity_bytes()
    }

    /// The serial that the operator gave.
    pub(super) fn serial(&self) -> Option<String> {
        let text: String = self
            .device
            .serial
            .iter()
            .take_while(|byte| **byte != 0)
            .map(|byte| char::from(*byte))
            .collect();
        Some(text).filter(|text| !text.is_empty())
    }

    /// The id of the disk: its serial, or else the last part of its name. A stripe has that of its first leg.
    pub(crate) fn id(&self) -> String {
        if let Some(id) = &self.id {
            return id.clone();
        }
        let disk = &self.device.disk;
        let name = match (disk.stripe(), disk.legs().first()) {
            (Some(_), Some(leg)) => leg.name(),
            _ => disk.name(),
        };
        let name = match disk.backing() {
            // Without the options behind it.
            Backing::Rbd(_) => name.split(',').next().unwrap_or(name),
            _ => name,
        };
        let last = name.rsplit('/').next().unwrap_or(name);
        self.serial().unwrap_or_else(|| last.to_owned())
    }

    /// All there is to know.
    pub(crate) fn report(&self) -> DiskReport {
        let device = &self.device;
        let records = device.records.all();
        DiskReport {
            id: self.id(),
            name: device.disk.name().to_owned(),
            serial: self.serial(),
            endpoint: self.endpoint.clone(),
            store: store(device),
            process: process(),
            possession: self.possession.state(),
            session: self.session_report(),
            hand_over: self.hand_over(),
            tuning: self.tuning(),
            pacing: pacing(device),
            totals: totals(device),
            errors: errors(&records),
            in_flight: in_flight(device, &records),
            stalled: stalled(device),
            quiesced_seconds: self.quiet_left().map(|left| left.as_secs_f64()),
            zero_reads: zero_reads(&records),
            recording: device.records.is_on(),
            requests: requests(&records),
            vrings: records.iter().map(|record| vring(device, record)).collect(),
            splitting: splitting(device),
            legs: legs(&device.disk, &device.leg_totals()),
        }
    }

    /// How workers wait, call and split.
    pub(crate) fn tuning(&self) -> TuningReport {
        let mut tuning = tuning(&self.device);
        tuning.profile = self.profile.clone().filter(|_| tuning.split == "auto");
        tuning
    }

    fn session_report(&self) -> SessionReport {
        let (session, parked) = self.session();
        let view = session.map(|remote| remote.view());
        let count = self.sessions_so_far.load(Ordering::Relaxed);
        let vrings = view.iter().flat_map(|view| &view.vrings);
        SessionReport {
            connected: view.is_some(),
            parked,
            kept: view.as_ref().is_some_and(|view| view.kept),
            count,
            features: view
                .as_ref()
                .and_then(|view| Some(format!("{:#x}", view.features?))),
            protocol_features: view
                .as_ref()
                .map(|view| format!("{:#x}", view.protocol_features)),
            vrings: vrings
                .map(|vring| RunningVring {
                    index: vring.index,
                    size: vring.size,
                    enabled: vring.enabled,
                    recovery: vring.recovery,
                })
                .collect(),
        }
    }
}

fn process() -> ProcessReport {
    ProcessReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_seconds: started().instant.elapsed().as_secs_f64(),
        cpu_seconds: usage::cpu_seconds(),
        resident_bytes: ResidentMemory::read().private_bytes,
    }
}

fn store(device: &Device) -> StoreReport {
    let disk = &device.disk;
    let writeback = device.writeback.load(Ordering::Relaxed);
    StoreReport {
        kind: kind_of(disk),
        size_bytes: disk.capacity_bytes(),
        short_bytes: disk.short_bytes(),
        block_bytes: disk.limits().block_bytes,
        read_only: disk.limits().read_only,
        cache: match writeback {
            true => Cache::Writeback,
            false => Cache::Writethrough,
        },
        direct: disk.is_direct(),
        iopoll: disk.is_polled(),
        sync_failed: disk.sync_failed(),
        connections: connections(disk),
        lock: lock(disk),
    }
}

/// How the connections to the server of the disk are, if it has one.
fn connections(disk: &Disk) -> Option<ServerConnections> {
    let Backing::Nbd(nbd) = disk.backing() else {
        return None;
    };
    let state = nbd.state();
    Some(ServerConnections {
        connected: state.connected,
        waiting: state.waiting,
        lost: state.lost,
        reconnects: state.reconnects,
        held: state.held,
        sent_bytes: state.sent_bytes,
        received_bytes: state.received_bytes,
        unflushed_bytes: state.unflushed_bytes,
        replayed_bytes: state.replayed_bytes,
    })
}

/// The exclusive locks of a disk's images in a cluster: lost if one of them is.
fn lock(disk: &Disk) -> Option<ImageLock> {
    let Backing::Rbd(first) = disk.backing() else {
        return None;
    };
    let is_fenced =
        |leg: &cleave_disk::Leg| matches!(leg.backing(), Backing::Rbd(image) if image.is_fenced());
    // All are opened alike.
    Some(
        match (first.is_locked(), disk.legs().iter().any(is_fenced)) {
            (_, true) => ImageLock::Lost,
            (true, false) => ImageLock::Held,
            (false, false) => ImageLock::None,
        },
    )
}

fn kind_of(disk: &Disk) -> StoreKind {
    if disk.stripe().is_some() {
        return StoreKind::Stripe;
    }
    match disk.backing() {
        Backing::File {
            kind: FileKind::Regular,
            ..
        } => StoreKind::File,
        Backing::File {
            kind: FileKind::BlockDevice,
            ..
        } => StoreKind::BlockDevice,
        Backing::Ram(_) => StoreKind::Ram,
        Backing::Null { .. } => StoreKind::Null,
        Backing::Model { .. } => StoreKind::Model,
        Backing::Nbd(_) => StoreKind::Nbd,
        Backing::Rbd(_) => StoreKind::Rbd,
    }
}

fn tuning(device: &Device) -> TuningReport {
    let tuning = device.tuning();
    let vrings = tuning.vrings.iter();
    TuningReport {
        completion: tuning.completion.into(),
        vrings: vrings
            .map(|(index, completion)| (*index, CompletionOption::from(*completion)))
            .collect(),
        spin_cpu_max: tuning.spin_cpu_max,
        spin_cpu_total: tuning.spin_cpu_total,
        spin_rate_min: tuning.spin_rate_min,
        spin_worth: tuning.spin_worth,
        coalesce_us: tuning.coalesce.us,
        coalesce_max: tuning.coalesce.max,
        split: match &tuning.split {
            Split::Off => "off".to_owned(),
            Split::Fixed(chunk) => format_size(u64::from(chunk.get())),
            Split::Auto(_) => "auto".to_owned(),
        },
        profile: None,
        on_error: tuning.on_error.to_string(),
        limits: tuning.limits.settings().into_iter().collect(),
    }
}

fn pacing(device: &Device) -> PacingReport {
    let totals = device.totals();
    let (left, size) = device.spin_left();
    let seconds = |ns: u64| Duration::from_nanos(ns).as_secs_f64();
    let switches = [
        ("fast", totals.switches_fast),
        ("slow", totals.switches_slow),
        ("vain", totals.switches_vain),
        ("budget", totals.switches_budget),
        ("crowded", totals.switches_crowded),
        ("tuned", totals.switches_tuned),
    ];
    let modes = device.modes();
    let each = device.tried().into_iter();
    PacingReport {
        workers: modes.into_iter().map(worker_mode).collect(),
        cpu_seconds: seconds(totals.cpu_ns),
        sleeps: totals.sleeps,
        dozes: totals.dozes,
        wakeups: totals.wakeups,
        spin_hit_seconds: seconds(totals.spin_hit_ns),
        spin_wasted_seconds: seconds(totals.spin_wasted_ns),
        spin_left_seconds: left.as_secs_f64(),
        spin_left_max_seconds: size.as_secs_f64(),
        switches: switches
            .into_iter()
            .map(|(reason, count)| (reason.to_owned(), count))
            .collect(),
        experiments: totals.experiments,
        tried: each.map(|found| Some(tried(found?))).collect(),
    }
}

fn worker_mode(mode: WaitState) -> WorkerMode {
    match mode {
        WaitState::Sleeps => WorkerMode::Sleeps,
        WaitState::Spins => WorkerMode::Spins,
        WaitState::Polls => WorkerMode::Polls,
    }
}

/// Rounded to what is worth saying, a tenth of a per cent. The bounds are for a share of nothing, since
/// JSON has no infinity.
fn percent(share: f32) -> f64 {
    (f64::from(share) * 1e3).round().clamp(-1e6, 1e3) / 10.0
}

pub(super) fn tried((tried, ago): (TrialResult, Duration)) -> SpinExperiment {
    SpinExperiment {
        spins: tried.spins,
        gain_percent: tried.gain.map(percent),
        price_percent: percent(tried.cores),
        seconds_ago: ago.as_secs_f64(),
    }
}

fn totals(device: &Device) -> RequestTotals {
    let totals = device.totals();
    RequestTotals {
        reads: totals.reads,
        writes: totals.writes,
        others: totals.others,
        read_bytes: totals.read_bytes,
        write_bytes: totals.write_bytes,
        failed: totals.failed,
        refused: totals.refused,
        broken: totals.broken,
        retired_vrings: totals.retired,
        held: totals.held,
        redone: totals.redone,
        throttled: totals.throttled,
        polled: totals.polled,
        laps: totals.laps,
        kicks: totals.kicks,
        calls: totals.calls,
        calls_suppressed: totals.calls_suppressed,
        calls_coalesced: totals.calls_coalesced,
    }
}

type Records = [Arc<VringRecord>];

fn errors(records: &Records) -> BTreeMap<String, u64> {
    let sum = |kind| records.iter().map(|record| record.errors(kind)).sum();
    let sums = ErrorKind::ALL.map(|kind| (kind.name().to_owned(), sum(kind)));
    BTreeMap::from(sums)
}

fn in_flight(device: &Device, records: &Records) -> InFlightRequests {
    let (mut requests, mut oldest_ns) = (0_u32, None);
    for record in records {
        let (count, since_ns) = record.in_flight();
        requests = requests.saturating_add(count);
        oldest_ns = oldest_ns.into_iter().chain(since_ns).min();
    }
    let age = |ns| Duration::from_nanos(device.now_ns().saturating_sub(ns)).as_secs_f64();
    InFlightRequests {
        requests,
        oldest_seconds: oldest_ns.map(age),
    }
}

fn stalled(device: &Device) -> Vec<StalledVring> {
    let age = |ns| Duration::from_nanos(device.now_ns().saturating_sub(ns)).as_secs_f64();
    let each = device.records.stalled().into_iter();
    each.map(|(vring, stalled)| StalledVring {
        vring,
        held: stalled.held,
        retrying: stalled.retrying,
        verb: RequestVerb::of_name(stalled.verb).unwrap_or(RequestVerb::Other),
        sector: stalled.sector,
        errno: stalled.errno,
        error: std::io::Error::from_raw_os_error(stalled.errno).to_string(),
        seconds: age(stalled.since_ns),
    })
    .collect()
}

fn zero_reads(records: &Records) -> ZeroReads {
    let mut sum = ZeroReads::default();
    for record in records {
        let (sampled, zero) = record.zero_reads();
        sum.sampled += sampled;
        sum.zero += zero;
    }
    sum
}

fn vring(device: &Device, record: &Arc<VringRecord>) -> VringReport {
    let alone = std::slice::from_ref(record);
    let mut totals = cleave_worker::Totals::default();
    record.add_to(&mut totals);
    let mut requests = requests(alone);
    for row in &mut requests {
        row.device_buckets = Vec::new();
    }
    VringReport {
        index: record.index(),
        kicks: totals.kicks,
        calls: totals.calls,
        calls_suppressed: totals.calls_suppressed,
        call: times(&record.call_times()),
        throttle: times(&record.throttle_times()),
        in_flight: in_flight(device, alone),
        zero_reads: zero_reads(alone),
        errors: errors(alone),
        requests,
    }
}

/// Requests by kind, of kinds that there were any of.
fn requests(records: &Records) -> Vec<RequestClass> {
    let of_kind = |kind| requests_of(records, kind);
    Kind::all().filter_map(of_kind).collect()
}

fn requests_of(records: &Records, kind: Kind) -> Option<RequestClass> {
    let done = || records.iter().map(|record| record.done(kind));
    let requests: u64 = done().map(|[requests, _]| requests).sum();
    if requests == 0 {
        return None;
    }
    let of_stage = |stage| merged(records.iter().map(|record| record.times(stage, kind)));
    let split = merged(records.iter().filter_map(|record| record.split_times(kind)));
    let stages = Stage::ALL.map(|stage| (stage.name(), of_stage(stage)));
    let stages = stages.into_iter().chain([("split", split)]);
    let device = of_stage(Stage::Device).unwrap_or_default();
    Some(RequestClass {
        direction: RequestDirection::of_name(kind.way().name())?,
        size: SizeClass::of_name(kind.size())?,
        requests,
        bytes: done().map(|[_, bytes]| bytes).sum(),
        device_buckets: device.buckets().collect(),
        stages: stages
            .filter_map(|(name, all)| Some((name.to_owned(), times(&all?)?)))
            .collect(),
    })
}

/// The sum of some distributions of one kind of histogram.
pub(super) fn merged(mut each: impl Iterator<Item = Distribution>) -> Option<Distribution> {
    let mut sum = each.next()?;
    each.for_each(|one| sum.merge(&one));
    Some(sum)
}

fn times(all: &Distribution) -> Option<LatencySummary> {
    let us = |ns: Option<f64>| ns.map(|ns| ns / 1000.0);
    Some(LatencySummary {
        count: all.count(),
        mean_us: us(all.mean_ns())?,
        p50_us: us(all.quantile_ns(0.5))?,
        p90_us: us(all.quantile_ns(0.9))?,
        p99_us: us(all.quantile_ns(0.99))?,
        p999_us: us(all.quantile_ns(0.999))?,
    })
}

fn splitting(device: &Device) -> Vec<SplitReport> {
    let now = Duration::from_nanos(device.now_ns());
    let states = device.split_states().into_iter();
    states.map(|state| split_cell(&state, now)).collect()
}

pub(super) fn split_cell(state: &SplitState, now: Duration) -> SplitReport {
    let tried = |tried: SplitResult| {
        let [against_bytes, chunk_bytes] = tried.chunks_bytes;
        SplitExperiment {
            chunk_bytes,
            against_bytes,
            gain_percent: tried.gain.map(percent),
            price_percent: percent(tried.cores),
            seconds_ago: now.saturating_sub(tried.at).as_secs_f64(),
        }
    };
    SplitReport {
        direction: match state.direction {
            DataDirection::Read => RequestDirection::Read,
            DataDirection::Write => RequestDirection::Write,
        },
        from_bytes: state.class_bytes,
        chunk_bytes: state.chunk_bytes,
        requests: state.requests,
        tried: state.tried.map(tried),
    }
}

fn legs(disk: &Disk, totals: &[LegTotals]) -> Vec<LegReport> {
    if disk.stripe().is_none() {
        return Vec::new();
    }
    let none = LegTotals::default();
    disk.legs()
        .iter()
        .enumerate()
        .map(|(at, leg)| self::leg(leg.name(), totals.get(at).unwrap_or(&none)))
        .collect()
}

pub(super) fn leg(name: &str, totals: &LegTotals) -> LegReport {
    LegReport {
        name: name.to_owned(),
        reads: totals.reads,
        writes: totals.writes,
        others: totals.others,
        bytes: totals.bytes,
        failed: totals.failed,
        mean_us: totals.latency_mean_ns() as f64 / 1000.0,
        max_us: totals.latency_max_ns as f64 / 1000.0,
        busy_seconds: Duration::from_nanos(totals.latency_ns).as_secs_f64(),
    }
}
