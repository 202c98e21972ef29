//! The report of a disk that is served: the JSON of `GET /v1/disks/{id}`, which `cleave stats` and `cleave top` read.

use std::collections::BTreeMap;

use cleave_config::{Cache, CompletionOption};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A disk that is served: what it is, and what it does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DiskReport {
    /// Names the disk in the paths of this interface.
    pub id: String,
    /// The storage that is served, as it was named.
    pub name: String,
    /// The serial number that the guest sees.
    pub serial: Option<String>,
    /// The socket to which frontends connect.
    pub endpoint: String,
    /// The storage.
    pub store: StoreReport,
    /// The process of the daemon.
    pub process: ProcessReport,
    /// The right to read and write the disk.
    #[serde(default)]
    pub possession: PossessionState,
    /// The frontend.
    pub session: SessionReport,
    /// How the disk goes from one process to the next.
    #[serde(default)]
    pub hand_over: HandOverReport,
    /// The settings that can change while the disk is served.
    pub tuning: TuningReport,
    /// How the workers wait.
    pub pacing: PacingReport,
    /// Counters over all vrings and sessions, with `--stats off` too.
    pub totals: RequestTotals,
    /// Requests that did not end well, by the kind of error.
    pub errors: BTreeMap<String, u64>,
    /// Requests in flight.
    pub in_flight: InFlightRequests,
    /// Vrings with requests that the disk failed and that wait to be repeated, with `--stats off` too.
    #[serde(default)]
    pub stalled: Vec<StalledVring>,
    /// The longest time that the disk stays quiesced from now on. Null: it is not quiesced.
    #[serde(default)]
    pub quiesced_seconds: Option<f64>,
    /// Reads that found nothing but zeroes.
    pub zero_reads: ZeroReads,
    /// True with `--stats on`. Otherwise nothing is counted in `errors`, `in_flight`, `zero_reads` and in the lists that follow.
    pub recording: bool,
    /// Requests that ended well, over all vrings, by direction and size. A class without requests is left out.
    pub requests: Vec<RequestClass>,
    /// The vrings that there have been.
    pub vrings: Vec<VringReport>,
    /// How large requests are split, by direction and size.
    pub splitting: Vec<SplitReport>,
    /// The legs of a stripe. Empty for a disk that is not one.
    pub legs: Vec<LegReport>,
}

/// The storage that is served.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StoreReport {
    /// The kind of storage.
    pub kind: StoreKind,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Bytes that are missing at the end of the disk, or of a leg of its stripe, because it shrank: reads and writes there fail.
    #[serde(default)]
    pub short_bytes: u64,
    /// Size of the blocks that the guest sees.
    pub block_bytes: u32,
    /// The guest cannot write.
    pub read_only: bool,
    /// Reads and writes bypass the page cache (O_DIRECT). Null for a disk that is neither a file nor a device.
    #[serde(default)]
    pub direct: Option<bool>,
    /// Reads and writes are polled for: `--iopoll on`, and the device has not refused since.
    #[serde(default)]
    pub iopoll: bool,
    /// The mode of the write cache, as the guest last set it.
    pub cache: Cache,
    /// A sync failed: every flush fails until the disk is opened again.
    pub sync_failed: bool,
    /// Null for a disk without a server.
    #[serde(default)]
    pub connections: Option<ServerConnections>,
    /// The exclusive lock of an RBD image. Null for other disks.
    #[serde(default)]
    pub lock: Option<ImageLock>,
}

/// The connections to the server of a disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ServerConnections {
    /// Connections in use.
    pub connected: u64,
    /// Connections that are missing and are to be made.
    pub waiting: u64,
    /// Connections lost so far.
    pub lost: u64,
    /// Connections made in their place.
    pub reconnects: u64,
    /// Requests that wait for a connection.
    #[serde(default)]
    pub held: u64,
    /// Bytes sent to the server.
    #[serde(default)]
    pub sent_bytes: u64,
    /// Bytes received from it.
    #[serde(default)]
    pub received_bytes: u64,
    /// Bytes that are kept because the server has not flushed them yet.
    #[serde(default)]
    pub unflushed_bytes: u64,
    /// Bytes that were sent again after a connection was lost.
    #[serde(default)]
    pub replayed_bytes: u64,
}

/// The daemon's process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessReport {
    /// Version of the program.
    pub version: String,
    /// Process ID.
    pub pid: u32,
    /// Time since the daemon started.
    pub uptime_seconds: f64,
    /// CPU time, user and system, of all its disks.
    pub cpu_seconds: f64,
    /// Memory of its own, without the memory of guests.
    pub resident_bytes: u64,
}

/// The frontend.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SessionReport {
    /// A frontend is connected.
    pub connected: bool,
    /// A second frontend is connected. It is parked: its vrings start when the first has stopped its own.
    #[serde(default)]
    pub parked: bool,
    /// The service manager keeps the connection: if this process is killed, the next one goes on with it. Otherwise the frontend has to
    /// connect again then.
    #[serde(default)]
    pub kept: bool,
    /// Sessions so far.
    pub count: u64,
    /// Virtio features that the guest accepted, in hexadecimal.
    pub features: Option<String>,
    /// vhost-user protocol features that the frontend accepted, in hexadecimal.
    pub protocol_features: Option<String>,
    /// Vrings that are running.
    pub vrings: Vec<RunningVring>,
}

/// A vring that is running.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RunningVring {
    /// Number of the vring.
    pub index: u16,
    /// Number of its entries.
    pub size: u16,
    /// The frontend has enabled it.
    pub enabled: bool,
    /// The frontend keeps its requests in flight: after a crash the next daemon repeats them. Otherwise a crash loses them.
    #[serde(default)]
    pub recovery: bool,
}

/// How the disk goes from one process to the next, with the connections of its frontends.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HandOverReport {
    /// Why the frontends of the disk would have to connect again if the process were restarted now. Null: nothing about the disk
    /// keeps them from being handed over. If `keeps` of the process is false, they have to connect again all the same.
    pub obstacle: Option<String>,
    /// How this process came by the connections that it has from the process before. Null: it has taken none over.
    pub last: Option<LastHandOver>,
}

/// A hand-over to this process.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LastHandOver {
    /// Time in which the disk was not served. Null: the process before died, and nobody knows when.
    pub pause_seconds: Option<f64>,
    /// When the disk was served again, in seconds since 1970.
    pub at_seconds: f64,
}

/// The settings that `PATCH` changes. They mean what the options of the same names mean.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TuningReport {
    /// How workers wait for the guest and for the disk.
    pub completion: CompletionOption,
    /// The vrings that differ from that, by their numbers.
    #[schemars(with = "BTreeMap<String, CompletionOption>")]
    pub vrings: BTreeMap<u16, CompletionOption>,
    /// Most CPU time that adaptive may spin without finding work, in per cent of a core.
    pub spin_cpu_max: u32,
    /// Most CPU time that adaptive may spin at all, in per cent of a core. Null: as much as pays.
    pub spin_cpu_total: Option<u32>,
    /// Requests a second below which adaptive does not spin.
    pub spin_rate_min: u32,
    /// Per cent of a core that adaptive may pay for each per cent that spinning makes the disk faster.
    #[serde(default)]
    pub spin_worth: u32,
    /// Longest time that a call to the guest is delayed, in microseconds.
    pub coalesce_us: u32,
    /// Most requests whose calls are merged into one. 0: as many as complete in that time.
    pub coalesce_max: u32,
    /// How large requests are split: `off`, `auto`, or a size such as `64K`.
    pub split: String,
    /// The profile from which `auto` started. Null without one.
    #[serde(default)]
    pub profile: Option<String>,
    /// How a request that the disk fails is treated, as `--on-error` writes it.
    #[serde(default)]
    pub on_error: String,
    /// The limits that are set, by QEMU's names.
    #[serde(default)]
    pub limits: BTreeMap<String, u64>,
}

/// How the workers of a disk wait.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PacingReport {
    /// How each running worker waits at present.
    pub workers: Vec<WorkerMode>,
    /// CPU time of all workers that there have been. In a pool it is the time that the pool's threads spent on the disk. 0 if the kernel
    /// does not count it.
    #[serde(default)]
    pub cpu_seconds: f64,
    /// Times that a worker slept until an event.
    pub sleeps: u64,
    /// Times that a worker slept with a timer.
    pub dozes: u64,
    /// Times that a worker woke up from either.
    pub wakeups: u64,
    /// Time spun that ended with something to do.
    pub spin_hit_seconds: f64,
    /// Time spun without finding work.
    pub spin_wasted_seconds: f64,
    /// How long workers may spin without finding work from now on.
    pub spin_left_seconds: f64,
    /// The most that this can be.
    pub spin_left_max_seconds: f64,
    /// Times that a worker changed between spinning and sleeping, by reason.
    pub switches: BTreeMap<String, u64>,
    /// Experiments with spinning that have ended, over all workers that there have been.
    #[serde(default)]
    pub experiments: u64,
    /// Result of the last experiment of each of `workers`. Null before the first.
    #[serde(default)]
    pub tried: Vec<Option<SpinExperiment>>,
}

/// Spinning compared with sleeping, on the load at that time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SpinExperiment {
    /// The verdict: the worker spins from then on. Otherwise it sleeps.
    pub spins: bool,
    /// Share that spinning saves of the time between two completions, or of the response time of a guest with a clock of its own:
    /// median and quartiles. Negative: spinning takes longer.
    pub gain_percent: [f64; 3],
    /// CPU time that spinning costs beyond sleeping, in per cent of a core. Negative: it costs less.
    pub price_percent: f64,
    /// Time since the experiment.
    pub seconds_ago: f64,
}

/// Counters over all vrings and sessions, with `--stats off` too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RequestTotals {
    /// Reads that ended well.
    pub reads: u64,
    /// Writes that ended well.
    pub writes: u64,
    /// Other requests that ended well.
    pub others: u64,
    /// Bytes that these reads moved.
    pub read_bytes: u64,
    /// Bytes that these writes moved.
    pub write_bytes: u64,
    /// Requests that the store failed.
    pub failed: u64,
    /// Requests that were refused as invalid.
    pub refused: u64,
    /// Requests that were too broken to be answered.
    pub broken: u64,
    /// Vrings that are no longer served because their guest broke them.
    pub retired_vrings: u64,
    /// Times that a request which the disk failed was held.
    #[serde(default)]
    pub held: u64,
    /// Times that such a request was repeated.
    #[serde(default)]
    pub redone: u64,
    /// Requests that waited for the disk's limits.
    #[serde(default)]
    pub throttled: u64,
    /// Reads and writes of the disk that were polled for.
    #[serde(default)]
    pub polled: u64,
    /// Turns of the workers' loops that did something.
    pub laps: u64,
    /// Kicks of the guest that workers saw.
    pub kicks: u64,
    /// Calls to the guest.
    pub calls: u64,
    /// Batches of answers for which the guest wanted no call, or cannot be called.
    pub calls_suppressed: u64,
    /// Batches of answers whose call was merged with a later one.
    pub calls_coalesced: u64,
}

/// Requests in flight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InFlightRequests {
    /// How many there are.
    pub requests: u32,
    /// Time since the oldest of them was taken from its ring.
    pub oldest_seconds: Option<f64>,
}

/// Requests of a vring that the disk failed and that wait to be repeated. The fields from `verb` on are about the oldest of
/// them, or the oldest that is held if any is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StalledVring {
    /// Number of the vring.
    pub vring: u16,
    /// Requests that wait for `resume` or `fail`, or until the NBD server that was lost is back.
    pub held: u32,
    /// Requests that wait for a pause to end.
    pub retrying: u32,
    /// The kind of request.
    pub verb: RequestVerb,
    /// The first sector of the request, in units of 512 bytes.
    pub sector: u64,
    /// The last error as a number.
    pub errno: i32,
    /// The last error in words.
    pub error: String,
    /// Time since the request failed for the first time.
    pub seconds: f64,
}

/// Reads whose data was examined.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ZeroReads {
    /// Reads that were examined.
    pub sampled: u64,
    /// Reads among these that found nothing but zeroes.
    pub zero: u64,
}

/// Requests of one direction and size that ended well.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RequestClass {
    /// The direction of their data.
    pub direction: RequestDirection,
    /// The size of the largest.
    pub size: SizeClass,
    /// How many there were.
    pub requests: u64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// How long they took, by stage: `ring`, `plan`, `device`, `publish`, and `split`, which is the part of `device` that
    /// was cut into several ops by choice.
    pub stages: BTreeMap<String, LatencySummary>,
    /// All times of `device`: where a bucket begins, in nanoseconds, and how many times are in it. Only in the sum over all
    /// vrings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_buckets: Vec<(u64, u64)>,
}

/// A distribution in a few numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LatencySummary {
    /// Number of times.
    pub count: u64,
    /// Mean, in microseconds.
    pub mean_us: f64,
    /// Median, in microseconds.
    pub p50_us: f64,
    /// The time within which 90 % were, in microseconds.
    pub p90_us: f64,
    /// The time within which 99 % were, in microseconds.
    pub p99_us: f64,
    /// The time within which 99.9 % were, in microseconds.
    pub p999_us: f64,
}

/// A vring, over all sessions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VringReport {
    /// Number of the vring.
    pub index: u16,
    /// Kicks of the guest that its worker saw.
    pub kicks: u64,
    /// Calls to the guest.
    pub calls: u64,
    /// Batches of answers for which the guest wanted no call, or cannot be called.
    pub calls_suppressed: u64,
    /// How long calls were held back.
    pub call: Option<LatencySummary>,
    /// How long requests waited in the ring for the disk's limits. Null: none did.
    #[serde(default)]
    pub throttle: Option<LatencySummary>,
    /// Requests in flight.
    pub in_flight: InFlightRequests,
    /// Reads that found nothing but zeroes.
    pub zero_reads: ZeroReads,
    /// Requests that did not end well, by the kind of error.
    pub errors: BTreeMap<String, u64>,
    /// Requests that ended well, by direction and size.
    pub requests: Vec<RequestClass>,
}

/// How large requests of one direction and size are split.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SplitReport {
    /// Their direction.
    pub direction: RequestDirection,
    /// Their least size. The largest is four times as large.
    pub from_bytes: u64,
    /// Size of the pieces. 0: they stay whole.
    pub chunk_bytes: u32,
    /// How many there were.
    pub requests: u64,
    /// The last experiment. Null: there has been none.
    pub tried: Option<SplitExperiment>,
}

/// Smaller pieces compared with larger ones, on the load at that time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SplitExperiment {
    /// Size of the smaller pieces.
    pub chunk_bytes: u32,
    /// Size of the larger ones. 0: whole requests.
    pub against_bytes: u32,
    /// Share of the response time that the smaller pieces save: median and quartiles. Negative: they take longer.
    pub gain_percent: [f64; 3],
    /// CPU time that the smaller pieces cost beyond the larger ones, in per cent of a core. Negative: they cost less.
    pub price_percent: f64,
    /// Time since the experiment.
    pub seconds_ago: f64,
}

/// A leg of a stripe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LegReport {
    /// The storage of the leg, as it was named.
    pub name: String,
    /// Reads that ended well.
    pub reads: u64,
    /// Writes that ended well.
    pub writes: u64,
    /// Other ops that ended well.
    pub others: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Ops that failed.
    pub failed: u64,
    /// Mean time of reads and writes, in microseconds.
    pub mean_us: f64,
    /// Longest time of one, in microseconds.
    pub max_us: f64,
    /// Sum of the times of its reads and writes.
    pub busy_seconds: f64,
}

words! {
    /// The right to read and write a disk: it is here, or another host may have it.
    PossessionState {
        /// The disk has its locks, and its guest may run here.
        Active = "active",
        /// The disk was started inactive, and no guest has moved here yet.
        Inactive = "inactive",
        /// The guest has moved away, and the locks were released.
        HandedOver = "handed-over",
        /// A guest is to run here and waits, because the locks cannot be had yet.
        Waiting = "waiting",
    }
}

/// The daemons of versions that do not report it always have the locks.
impl Default for PossessionState {
    fn default() -> PossessionState {
        PossessionState::Active
    }
}

words! {
    /// The kind of storage of a disk.
    StoreKind {
        /// A regular file.
        File = "file",
        /// A block device.
        BlockDevice = "block_device",
        /// Several disks as one.
        Stripe = "stripe",
        /// Memory of the daemon.
        Ram = "ram",
        /// Nothing: writes are forgotten, and reads find zeroes.
        Null = "null",
        /// Memory that takes as long as a drive would.
        Model = "model",
        /// The export of an NBD server.
        Nbd = "nbd",
        /// An image of a Ceph cluster.
        Rbd = "rbd",
    }
}

words! {
    /// The exclusive lock of an RBD image.
    ImageLock {
        /// This daemon has it.
        Held = "held",
        /// This daemon does not have it: the disk is read-only, or not active here.
        None = "none",
        /// Another client took it. Every request fails until the disk is opened again.
        Lost = "lost",
    }
}

words! {
    /// How a worker waits at present.
    WorkerMode {
        /// The worker sleeps until an event.
        Sleeps = "sleeps",
        /// The worker spins because that pays.
        Spins = "spins",
        /// The worker spins because it was told to.
        Polls = "polls",
    }
}

words! {
    /// The direction of a request.
    RequestDirection {
        /// From the disk.
        Read = "read",
        /// To the disk.
        Write = "write",
        /// A flush.
        Flush = "flush",
        /// Any other request.
        Other = "other",
    }
}

words! {
    /// A class of sizes of requests.
    SizeClass {
        /// Up to 4 KiB.
        UpTo4K = "4K",
        /// Up to 16 KiB.
        UpTo16K = "16K",
        /// Up to 64 KiB.
        UpTo64K = "64K",
        /// Up to 256 KiB.
        UpTo256K = "256K",
        /// Larger than that.
        Larger = "larger",
        /// Requests without data.
        None = "none",
    }
}

words! {
    /// What a request asks for.
    RequestVerb {
        /// Read data.
        Read = "read",
        /// Write data.
        Write = "write",
        /// Give space back.
        Discard = "discard",
        /// Write zeroes.
        WriteZeroes = "write-zeroes",
        /// Make what was written durable.
        Flush = "flush",
        /// Anything else.
        Other = "other",
    }
}
