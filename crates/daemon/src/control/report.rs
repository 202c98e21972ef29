//! The report of a disk: the JSON of `GET /v1/disks/{id}`, and what `cleave stats` and `cleave top`
//! read. Values only; `gather` fills them in.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One disk of `GET /v1/disks`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// Its id in the paths of this interface: its serial, or the last part of its name.
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) serial: Option<String>,
    pub(crate) size_bytes: u64,
    pub(crate) connected: bool,
}

/// A disk: all there is to know of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Report {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) serial: Option<String>,
    /// The socket of the frontends.
    pub(crate) endpoint: String,
    pub(crate) store: Store,
    pub(crate) process: Process,
    pub(crate) session: Session,
    pub(crate) tuning: Tuning,
    pub(crate) pacing: Pacing,
    pub(crate) totals: Totals,
    /// Of requests that did not end well, by kind.
    pub(crate) errors: BTreeMap<String, u64>,
    pub(crate) in_flight: InFlight,
    /// Vrings with requests that the disk failed and that wait to be done again, recording or not.
    #[serde(default)]
    pub(crate) stalled: Vec<Stalled>,
    /// How long the disk takes no requests, at most; null: it is not quiesced.
    #[serde(default)]
    pub(crate) quiesced_seconds: Option<f64>,
    pub(crate) zero_reads: ZeroReads,
    /// Whether there is anything in the fields that follow, and in the three above: `--stats on`.
    pub(crate) recording: bool,
    /// Over all vrings, kinds that have seen requests.
    pub(crate) requests: Vec<Requests>,
    pub(crate) vrings: Vec<Vring>,
    /// How large requests are split, by direction and size.
    pub(crate) splitting: Vec<SplitCell>,
    /// The legs of a stripe; empty where the disk is none.
    pub(crate) legs: Vec<Leg>,
}

/// The disk that is served.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Store {
    pub(crate) kind: String,
    pub(crate) size_bytes: u64,
    /// Bytes that are missing at the end of the disk, or of a leg of its stripe, because it shrank: reads and writes there fail.
    #[serde(default)]
    pub(crate) short_bytes: u64,
    pub(crate) block_bytes: u32,
    pub(crate) read_only: bool,
    /// Reads and writes bypass the page cache (O_DIRECT). Null for a disk that is no file or device.
    #[serde(default)]
    pub(crate) direct: Option<bool>,
    /// Its reads and writes are polled for: `--iopoll on`, and the device has not refused since.
    #[serde(default)]
    pub(crate) iopoll: bool,
    /// `writeback` or `writethrough`, as the guest last set it.
    pub(crate) cache: String,
    /// A sync failed: every flush fails until the disk is opened again.
    pub(crate) sync_failed: bool,
    /// Null for a disk without a server.
    #[serde(default)]
    pub(crate) connections: Option<Connections>,
    /// The exclusive lock of an RBD image: `held`, `none` (read-only), or `lost` to another client, for good. Null for other disks.
    #[serde(default)]
    pub(crate) lock: Option<String>,
}

/// The connections to the server of a disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Connections {
    /// Those in use now, and those that are missing and wanted.
    pub(crate) connected: u64,
    pub(crate) waiting: u64,
    /// Those lost so far, and those made in their place.
    pub(crate) lost: u64,
    pub(crate) reconnects: u64,
    /// Requests that wait for a connection.
    #[serde(default)]
    pub(crate) held: u64,
    /// Bytes that went to the server and came from it.
    #[serde(default)]
    pub(crate) sent_bytes: u64,
    #[serde(default)]
    pub(crate) received_bytes: u64,
    /// Bytes that are kept because the server answered and did not flush them, and those that were sent to it again after a
    /// connection was lost.
    #[serde(default)]
    pub(crate) unflushed_bytes: u64,
    #[serde(default)]
    pub(crate) replayed_bytes: u64,
}

/// The daemon's process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Process {
    pub(crate) version: String,
    pub(crate) pid: u32,
    pub(crate) uptime_seconds: f64,
    pub(crate) cpu_seconds: f64,
    /// Memory of its own, without what it shares with guests.
    pub(crate) resident_bytes: u64,
}

/// The frontend.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Session {
    pub(crate) connected: bool,
    /// How many there have been.
    pub(crate) count: u64,
    /// Virtio features that the guest took, in hexadecimal.
    pub(crate) features: Option<String>,
    /// vhost-user protocol features that the frontend took, in hexadecimal.
    pub(crate) protocol_features: Option<String>,
    /// Vrings that run.
    pub(crate) vrings: Vec<RunningVring>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct RunningVring {
    pub(crate) index: u16,
    pub(crate) size: u16,
    pub(crate) enabled: bool,
    /// The frontend keeps its requests in flight: after a crash the next daemon repeats them. Otherwise they are lost then.
    #[serde(default)]
    pub(crate) recovery: bool,
}

/// The settings that `PATCH` changes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Tuning {
    /// `interrupt`, `poll` or `adaptive`.
    pub(crate) completion: String,
    /// Vrings that differ from that, by index.
    pub(crate) vrings: BTreeMap<u16, String>,
    pub(crate) spin_cpu_max: u32,
    pub(crate) spin_cpu_total: Option<u32>,
    pub(crate) spin_rate_min: u32,
    #[serde(default)]
    pub(crate) spin_worth: u32,
    pub(crate) coalesce_us: u32,
    pub(crate) coalesce_max: u32,
    /// `off`, `auto` or a size.
    pub(crate) split: String,
    /// The profile from which `auto` started; null without one.
    #[serde(default)]
    pub(crate) profile: Option<String>,
    /// As `--on-error` takes it.
    #[serde(default)]
    pub(crate) on_error: String,
    /// Those that are set, by QEMU's names.
    #[serde(default)]
    pub(crate) limits: BTreeMap<String, u64>,
}

/// How workers waited.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Pacing {
    /// How each running worker waits at present: `sleeps`, `spins` or `polls`.
    pub(crate) workers: Vec<String>,
    /// Sleeps until an event, and sleeps with a timer.
    pub(crate) sleeps: u64,
    pub(crate) dozes: u64,
    pub(crate) wakeups: u64,
    pub(crate) spin_hit_seconds: f64,
    pub(crate) spin_wasted_seconds: f64,
    /// How long workers may spin in vain from now on, and how long at most.
    pub(crate) spin_left_seconds: f64,
    pub(crate) spin_left_max_seconds: f64,
    /// Changes of mode, by reason.
    pub(crate) switches: BTreeMap<String, u64>,
    /// Experiments with spinning that came to a verdict, over all workers that ever ran.
    #[serde(default)]
    pub(crate) experiments: u64,
    /// Result of the last experiment of each of `workers`; null before the first.
    #[serde(default)]
    pub(crate) tried: Vec<Option<Tried>>,
}

/// Spinning compared with sleeping, on the load at that time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Tried {
    /// The verdict: the worker has spun since, else slept.
    pub(crate) spins: bool,
    /// Share of the response time that spinning saves: median and quartiles. Negative: it takes longer.
    pub(crate) gain_percent: [f64; 3],
    /// How much of a core spinning keeps busy more. Negative: less.
    pub(crate) price_percent: f64,
    pub(crate) seconds_ago: f64,
}

/// Counters over all vrings and sessions, recording or not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Totals {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) others: u64,
    pub(crate) read_bytes: u64,
    pub(crate) write_bytes: u64,
    pub(crate) failed: u64,
    pub(crate) refused: u64,
    pub(crate) broken: u64,
    pub(crate) retired_vrings: u64,
    /// Times that a request which the disk failed was held, and done again.
    #[serde(default)]
    pub(crate) held: u64,
    #[serde(default)]
    pub(crate) redone: u64,
    /// Requests that waited for the disk's limits.
    #[serde(default)]
    pub(crate) throttled: u64,
    /// Reads and writes of the disk that were polled for.
    #[serde(default)]
    pub(crate) polled: u64,
    pub(crate) laps: u64,
    pub(crate) kicks: u64,
    pub(crate) calls: u64,
    pub(crate) calls_suppressed: u64,
    pub(crate) calls_coalesced: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct InFlight {
    pub(crate) requests: u32,
    /// Since the oldest of them was taken from its ring.
    pub(crate) oldest_seconds: Option<f64>,
}

/// Requests of a vring that the disk failed and that wait to be done again. The fields from `verb` on are about the
/// oldest of them, of those that are held if any is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Stalled {
    pub(crate) vring: u16,
    /// Until `resume` or `fail`, or until the NBD server that was lost is back.
    pub(crate) held: u32,
    /// Until a pause is over.
    pub(crate) retrying: u32,
    /// `read`, `write`, `discard`, `write-zeroes` or `flush`.
    pub(crate) verb: String,
    pub(crate) sector: u64,
    /// How it failed last, as a number and in words.
    pub(crate) errno: i32,
    pub(crate) error: String,
    /// Since it failed for the first time.
    pub(crate) seconds: f64,
}

/// Reads that were looked at, and how many of those found nothing but zeroes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct ZeroReads {
    pub(crate) sampled: u64,
    pub(crate) zero: u64,
}

/// Requests of one kind that ended well.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Requests {
    /// `read`, `write`, `flush` or `other`.
    pub(crate) direction: String,
    /// The largest in this class: `4K`, `16K`, `64K`, `256K`, `larger`; `none` of flushes and others.
    pub(crate) size: String,
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    /// How long they took, by stage: `ring`, `plan`, `device`, `publish`, and `split`, which is the part
    /// of `device` that was cut into several ops by choice.
    pub(crate) stages: BTreeMap<String, Times>,
    /// All times of `device`: where a bucket begins, in nanoseconds, and how many are in it. Only in
    /// the sum over all vrings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) device_buckets: Vec<(u64, u64)>,
}

/// A distribution in a few numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Times {
    pub(crate) count: u64,
    pub(crate) mean_us: f64,
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
}

/// A vring, over all sessions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Vring {
    pub(crate) index: u16,
    pub(crate) kicks: u64,
    pub(crate) calls: u64,
    pub(crate) calls_suppressed: u64,
    /// How long calls were held back.
    pub(crate) call: Option<Times>,
    /// How long requests waited in the ring for the disk's limits, as far as any did.
    #[serde(default)]
    pub(crate) throttle: Option<Times>,
    pub(crate) in_flight: InFlight,
    pub(crate) zero_reads: ZeroReads,
    pub(crate) errors: BTreeMap<String, u64>,
    pub(crate) requests: Vec<Requests>,
}

/// How large requests of one direction and size are split.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct SplitCell {
    pub(crate) direction: String,
    /// Requests of this size up to four times as much.
    pub(crate) from_bytes: u64,
    /// Size of the pieces; 0: whole.
    pub(crate) chunk_bytes: u32,
    pub(crate) requests: u64,
    /// The last experiment; null: none yet.
    pub(crate) tried: Option<SplitTried>,
}

/// Smaller pieces compared with larger ones, on the load at that time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct SplitTried {
    pub(crate) chunk_bytes: u32,
    /// The larger ones; 0: whole requests.
    pub(crate) against_bytes: u32,
    /// Share of the response time that the smaller ones save: median and quartiles. Negative: it takes longer.
    pub(crate) gain_percent: [f64; 3],
    /// How much of a core they keep busy more. Negative: less.
    pub(crate) price_percent: f64,
    pub(crate) seconds_ago: f64,
}

/// A leg of a stripe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Leg {
    pub(crate) name: String,
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) others: u64,
    pub(crate) bytes: u64,
    pub(crate) failed: u64,
    pub(crate) mean_us: f64,
    pub(crate) max_us: f64,
    /// Sum of the times of its reads and writes.
    pub(crate) busy_seconds: f64,
}
