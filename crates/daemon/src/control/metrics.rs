//! `GET /metrics`: the Prometheus text format.

use std::fmt::{Display, Write as _};

use cleave_worker::record::{Distribution, Kind, Stage};

use super::Exhibit;
use super::gather::merged;
use super::report::{Report, Vring};

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

/// A text that grows family by family.
struct Text {
    out: String,
    family: &'static str,
}

impl Text {
    fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        self.family = name;
        // Writing to a string does not fail.
        let _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn counter(&mut self, name: &'static str, help: &str) {
        self.family(name, "counter", help);
    }

    fn gauge(&mut self, name: &'static str, help: &str) {
        self.family(name, "gauge", help);
    }

    fn sample(&mut self, labels: &[(&str, &dyn Display)], value: impl Display) {
        self.line("", labels, value);
    }

    fn line(&mut self, suffix: &str, labels: &[(&str, &dyn Display)], value: impl Display) {
        let _ = write!(self.out, "{}{suffix}", self.family);
        for (at, (name, value)) in labels.iter().enumerate() {
            let open = if at == 0 { '{' } else { ',' };
            let _ = write!(self.out, "{open}{name}=\"{}\"", escaped(&value.to_string()));
        }
        let close = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.out, "{close} {value}");
    }

    fn histogram(&mut self, labels: &[(&str, &dyn Display)], all: &Distribution, bounds: &Bounds) {
        let count = all.count();
        for power in (bounds.first..=bounds.last).step_by(bounds.step) {
            let bound = (1u64 << power) as f64 / 1e9;
            let mut with = labels.to_vec();
            with.push(("le", &bound));
            self.line("_bucket", &with, all.below_ns(power));
        }
        let mut with = labels.to_vec();
        with.push(("le", &"+Inf"));
        self.line("_bucket", &with, count);
        self.line("_sum", labels, all.sum_ns() as f64 / 1e9);
        self.line("_count", labels, count);
    }
}

/// Of a label's value.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

impl Exhibit {
    /// All metrics of the disk.
    pub(super) fn metrics(&self) -> String {
        let report = self.report();
        let mut text = Text {
            out: String::with_capacity(16 << 10),
            family: "",
        };
        daemon(&mut text, &report);
        disk(&mut text, &report);
        pacing(&mut text, &report);
        vrings(&mut text, &report);
        self.stages(&mut text, &report.id);
        self.calls(&mut text, &report.id);
        splitters(&mut text, &report);
        legs(&mut text, &report);
        text.out
    }

    fn stages(&self, text: &mut Text, id: &str) {
        text.family(
            "cleave_request_stage_seconds",
            "histogram",
            "Time that requests spent in a stage; split is the part of device that was cut into several ops.",
        );
        let records = self.device.records.all();
        for kind in Kind::all() {
            for stage in Stage::ALL {
                let all = merged(records.iter().map(|record| record.times(stage, kind)));
                let bounds = match stage {
                    Stage::Device => &DEVICE,
                    Stage::Ring | Stage::Plan | Stage::Publish => &SHORT,
                };
                stage_of(text, id, kind, stage.name(), all, bounds);
            }
            let split = records.iter().filter_map(|record| record.split_times(kind));
            stage_of(text, id, kind, "split", merged(split), &DEVICE);
        }
    }

    fn calls(&self, text: &mut Text, id: &str) {
        text.family(
            "cleave_call_held_seconds",
            "histogram",
            "Time that calls to the guest were held back to become fewer.",
        );
        for record in self.device.records.all() {
            let labels: &[(&str, &dyn Display)] = &[("disk", &id), ("vring", &record.index())];
            text.histogram(labels, &record.call_times(), &SHORT);
        }
    }
}

/// What has never been seen is not told: most kinds of request never come.
fn stage_of(
    text: &mut Text,
    id: &str,
    kind: Kind,
    stage: &str,
    all: Option<Distribution>,
    bounds: &Bounds,
) {
    let Some(all) = all.filter(|all| all.count() > 0) else {
        return;
    };
    let labels: &[(&str, &dyn Display)] = &[
        ("disk", &id),
        ("direction", &kind.way().name()),
        ("size", &kind.size()),
        ("stage", &stage),
    ];
    text.histogram(labels, &all, bounds);
}

fn daemon(text: &mut Text, report: &Report) {
    let id = &report.id;
    text.gauge("cleave_info", "The program and what it serves; always 1.");
    text.sample(
        &[
            ("disk", id),
            ("name", &report.name),
            ("store", &report.store.kind),
            ("version", &report.process.version),
        ],
        1,
    );
    text.gauge("cleave_uptime_seconds", "Time since the daemon started.");
    text.sample(&[("disk", id)], report.process.uptime_seconds);
    text.counter(
        "cleave_process_cpu_seconds_total",
        "CPU time of the daemon, user and system.",
    );
    text.sample(&[("disk", id)], report.process.cpu_seconds);
    text.gauge(
        "cleave_process_resident_bytes",
        "Memory of the daemon, without what it shares with guests.",
    );
    text.sample(&[("disk", id)], report.process.resident_bytes);
    text.gauge("cleave_connected", "1 while a frontend is connected.");
    text.sample(&[("disk", id)], u8::from(report.session.connected));
    text.counter("cleave_sessions_total", "Frontends served so far.");
    text.sample(&[("disk", id)], report.session.count);
}

fn disk(text: &mut Text, report: &Report) {
    let id = &report.id;
    let totals = &report.totals;
    text.gauge("cleave_disk_size_bytes", "Size of the disk.");
    text.sample(&[("disk", id)], report.store.size_bytes);
    text.gauge(
        "cleave_disk_sync_failed",
        "1 after a sync failed: every flush fails until the disk is opened again.",
    );
    text.sample(&[("disk", id)], u8::from(report.store.sync_failed));
    text.counter(
        "cleave_disk_requests_total",
        "Requests that ended well, over all vrings; told also with --stats off.",
    );
    let requests = [
        ("read", totals.reads),
        ("write", totals.writes),
        ("other", totals.others),
    ];
    for (direction, count) in requests {
        text.sample(&[("disk", id), ("direction", &direction)], count);
    }
    text.counter(
        "cleave_disk_bytes_total",
        "Bytes that they moved; told also with --stats off.",
    );
    for (direction, count) in [("read", totals.read_bytes), ("write", totals.write_bytes)] {
        text.sample(&[("disk", id), ("direction", &direction)], count);
    }
    text.counter(
        "cleave_disk_failures_total",
        "Requests that did not end well: failed by the store, refused as invalid, or too broken to answer.",
    );
    let failures = [
        ("failed", totals.failed),
        ("refused", totals.refused),
        ("broken", totals.broken),
    ];
    for (outcome, count) in failures {
        text.sample(&[("disk", id), ("outcome", &outcome)], count);
    }
    text.counter(
        "cleave_retired_vrings_total",
        "Vrings that are served no more because their guest broke them.",
    );
    text.sample(&[("disk", id)], totals.retired_vrings);
    text.counter(
        "cleave_polled_total",
        "Reads and writes of the disk that were polled for (--iopoll on).",
    );
    text.sample(&[("disk", id)], totals.polled);
    text.counter(
        "cleave_laps_total",
        "Turns of the workers' loops that did something.",
    );
    text.sample(&[("disk", id)], totals.laps);
}

fn pacing(text: &mut Text, report: &Report) {
    let id = &report.id;
    let pacing = &report.pacing;
    text.gauge(
        "cleave_completion_mode",
        "1 for the mode that workers are told.",
    );
    for mode in ["interrupt", "poll", "adaptive"] {
        let is_it = u8::from(report.tuning.completion == mode);
        text.sample(&[("disk", id), ("mode", &mode)], is_it);
    }
    text.gauge(
        "cleave_workers",
        "Workers that run, by what they do when there is nothing to do.",
    );
    for mode in ["sleeps", "spins", "polls"] {
        let count = pacing.workers.iter().filter(|worker| **worker == mode);
        text.sample(&[("disk", id), ("mode", &mode)], count.count());
    }
    text.counter(
        "cleave_spin_seconds_total",
        "Time spun: hit ended with something to do, wasted did not.",
    );
    let spun = [
        ("hit", pacing.spin_hit_seconds),
        ("wasted", pacing.spin_wasted_seconds),
    ];
    for (outcome, seconds) in spun {
        text.sample(&[("disk", id), ("outcome", &outcome)], seconds);
    }
    let waits = [
        (
            "cleave_sleeps_total",
            "Times that a worker slept with no end in sight.",
            pacing.sleeps,
        ),
        (
            "cleave_dozes_total",
            "Times that a worker slept until shortly before something was expected.",
            pacing.dozes,
        ),
        (
            "cleave_wakeups_total",
            "Times that a worker came back from either.",
            pacing.wakeups,
        ),
    ];
    for (name, help, count) in waits {
        text.counter(name, help);
        text.sample(&[("disk", id)], count);
    }
    text.counter(
        "cleave_mode_switches_total",
        "Times that a worker changed between spinning and sleeping, by reason.",
    );
    for (reason, count) in &pacing.switches {
        text.sample(&[("disk", id), ("reason", reason)], count);
    }
    text.gauge(
        "cleave_spin_budget_seconds",
        "How long workers may spin in vain from now on.",
    );
    text.sample(&[("disk", id)], pacing.spin_left_seconds);
    text.gauge(
        "cleave_spin_budget_max_seconds",
        "The most that this can be.",
    );
    text.sample(&[("disk", id)], pacing.spin_left_max_seconds);
}

fn vrings(text: &mut Text, report: &Report) {
    let id = &report.id;
    text.counter(
        "cleave_requests_total",
        "Requests that ended well, by direction and size class.",
    );
    each_kind(text, report, |requests| requests.requests);
    text.counter("cleave_request_bytes_total", "Bytes that they moved.");
    each_kind(text, report, |requests| requests.bytes);
    text.counter(
        "cleave_request_errors_total",
        "Requests that did not end well, by kind of error.",
    );
    for vring in &report.vrings {
        for (kind, count) in &vring.errors {
            let labels: &[(&str, &dyn Display)] =
                &[("disk", id), ("vring", &vring.index), ("kind", kind)];
            text.sample(labels, count);
        }
    }
    type Family = (&'static str, &'static str, fn(&Vring) -> u64);
    let counters: [Family; 5] = [
        (
            "cleave_kicks_total",
            "Kicks from the guest that the worker saw.",
            |vring| vring.kicks,
        ),
        ("cleave_calls_total", "Calls to the guest.", |vring| {
            vring.calls
        }),
        (
            "cleave_calls_suppressed_total",
            "Published batches for which the guest wanted no call, or has no way to be called.",
            |vring| vring.calls_suppressed,
        ),
        (
            "cleave_reads_sampled_total",
            "Reads whose data was looked at.",
            |vring| vring.zero_reads.sampled,
        ),
        (
            "cleave_reads_zero_total",
            "Of these, reads that found nothing but zeroes.",
            |vring| vring.zero_reads.zero,
        ),
    ];
    for (name, help, of) in counters {
        text.counter(name, help);
        for vring in &report.vrings {
            text.sample(&[("disk", id), ("vring", &vring.index)], of(vring));
        }
    }
    text.counter(
        "cleave_calls_coalesced_total",
        "Published batches whose call was held back and became one with a later one.",
    );
    text.sample(&[("disk", id)], report.totals.calls_coalesced);
    text.gauge("cleave_in_flight_requests", "Requests with the engine.");
    for vring in &report.vrings {
        let labels: &[(&str, &dyn Display)] = &[("disk", id), ("vring", &vring.index)];
        text.sample(labels, vring.in_flight.requests);
    }
    text.gauge(
        "cleave_oldest_request_seconds",
        "Age of the oldest request in flight; 0 where there is none.",
    );
    let oldest = report.in_flight.oldest_seconds.unwrap_or(0.0);
    text.sample(&[("disk", id)], oldest);
}

fn each_kind(text: &mut Text, report: &Report, of: fn(&super::report::Requests) -> u64) {
    for vring in &report.vrings {
        for requests in &vring.requests {
            text.sample(
                &[
                    ("disk", &report.id),
                    ("vring", &vring.index),
                    ("direction", &requests.direction),
                    ("size", &requests.size),
                ],
                of(requests),
            );
        }
    }
}

fn splitters(text: &mut Text, report: &Report) {
    text.gauge(
        "cleave_split_chunk_bytes",
        "Pieces that large requests are split into now, by size and load; 0: left whole.",
    );
    for (worker, cells) in report.splitters.iter().enumerate() {
        for cell in cells {
            text.sample(
                &[
                    ("disk", &report.id),
                    ("worker", &worker),
                    ("direction", &cell.direction),
                    ("from_bytes", &cell.from_bytes),
                    ("in_flight_min", &cell.in_flight_min),
                    ("reason", &cell.reason),
                ],
                cell.chunk_bytes,
            );
        }
    }
}

/// The part about legs, by itself.
#[cfg(test)]
pub(super) fn legs_of(report: &Report) -> String {
    let mut text = Text {
        out: String::new(),
        family: "",
    };
    legs(&mut text, report);
    text.out
}

fn legs(text: &mut Text, report: &Report) {
    if report.legs.is_empty() {
        return;
    }
    text.counter(
        "cleave_leg_ops_total",
        "Ops that a leg of the stripe ended well.",
    );
    for leg in &report.legs {
        for (direction, count) in [
            ("read", leg.reads),
            ("write", leg.writes),
            ("other", leg.others),
        ] {
            let labels: &[(&str, &dyn Display)] = &[
                ("disk", &report.id),
                ("leg", &leg.name),
                ("direction", &direction),
            ];
            text.sample(labels, count);
        }
    }
    text.counter(
        "cleave_leg_bytes_total",
        "Bytes read from it and written to it.",
    );
    for leg in &report.legs {
        text.sample(&[("disk", &report.id), ("leg", &leg.name)], leg.bytes);
    }
    text.counter("cleave_leg_errors_total", "Ops that it failed.");
    for leg in &report.legs {
        text.sample(&[("disk", &report.id), ("leg", &leg.name)], leg.failed);
    }
    text.counter(
        "cleave_leg_busy_seconds_total",
        "Sum of the times that its reads and writes took.",
    );
    for leg in &report.legs {
        let labels: &[(&str, &dyn Display)] = &[("disk", &report.id), ("leg", &leg.name)];
        text.sample(labels, leg.busy_seconds);
    }
}
