//! The list of all options of a disk: the name, the type with its bounds and its default, and the help of each.

use std::path::PathBuf;

use clap::Args;
use cleave_blk::Stripe;
use cleave_worker::{RateLimits, Tuning};
use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::change::{Setting, VringModes, as_named, named};
use crate::given::{Given, LeftOut, flag};
use crate::names::Names;
use crate::values::cpus::CpuList;
use crate::values::labels::Labels;
use crate::values::limits::DiskLimits;
use crate::values::mode::SocketMode;
use crate::values::number::{Number, OrNone, QueueSize};
use crate::values::policy::ErrorPolicy;
use crate::values::serial::Serial;
use crate::values::size::Size;
use crate::values::spec::WrittenSpec;
use crate::values::split::SplitOption;
use crate::values::words::{
    Cache, CompletionOption, FaceVersion, Persistent, StartState, Switch, When,
};

/// The CPU time of 256 workers that never sleep, in per cent of one core.
const SPIN_MAX: u32 = 25_600;
/// More than any vring gets: adaptive never spins.
const SPIN_RATE_MAX: u32 = 1_000_000_000;
/// Far beyond any core count: adaptive spins wherever that gains 5 %.
const SPIN_WORTH_MAX: u32 = 10_000;
/// 10 ms: a guest would feel a longer delay, and takes a request for lost only after seconds.
const COALESCE_US_MAX: u32 = 10_000;
/// As many as a vring can have.
const COALESCE_MAX_MAX: u32 = 32_768;

disk_options! {
    required {
        /// The disk: a file, a block device, raw:PATH, ram:SIZE, null:SIZE, model:NAME, rbd:POOL/IMAGE or nbd://HOST/EXPORT
        ///
        /// PATH is a regular file or a block device. The guest sees its bytes as they are. A file that looks like an image
        /// of another format (qcow2, QED, VMDK, VHDX, VHD, VDI) is refused; `raw:PATH` serves it nevertheless.
        ///
        /// `ram:SIZE` is memory, whose contents are lost at the end. `null:SIZE` forgets writes and reads zeroes: use it to
        /// measure the cost of everything but the disk. With `null:SIZE,read-zeroes=off` not even the memory of reads is
        /// written, which no guest expects. `model:NAME[,KEY=VALUE...]` is memory that takes as long as a drive would. NAME
        /// is p3700, p320h, flat or custom. KEY is size, seed, channels, page, read_us, write_us, mbps_per_channel,
        /// command_us, window, link_mbps, jitter or write_buffer.
        ///
        /// `nbd://HOST[:PORT]/EXPORT` and `nbd+unix:///EXPORT?socket=PATH` are the export of an NBD server (qemu-nbd, nbdkit).
        /// Options follow as ?NAME=VALUE&NAME=VALUE: connections (for each worker, where the server permits several; default 1),
        /// timeout (seconds of silence after which a connection counts as lost; 60), reconnect (seconds that requests wait for a
        /// lost server before --on-error decides; 30), fence (seconds for which a server may still apply the requests of a lost
        /// connection; 30) and replay (MiB of unflushed changes that are kept to be sent again; 32). See docs/network.md.
        ///
        /// `rbd:POOL[/NAMESPACE]/IMAGE[@SNAP][,id=USER][,conf=PATH]` is an image of a Ceph cluster, or with @SNAP and --read-only a
        /// snapshot of one. USER is the user without `client.` (default admin), and PATH the configuration of the cluster (default:
        /// where Ceph's programs look for it). With `,raw=on` at its end it may be one leg of a stripe. It needs librbd on this host.
        ///
        /// Sizes are written 4K, 1M, 2G (powers of 1024). For a file named `ram:1G` write ./ram:1G. With --stripe, give
        /// --disk once for each leg, in order.
        #[arg(long, value_name = "SPEC")]
        disk: Vec<WrittenSpec>,
    }
    opened {
        /// Serve several disks as one (RAID-0), divided among them in chunks of this size
        ///
        /// A power of two from 4K to 4M: the one that was given to `cleave stripe create`. 2 to 64 legs: files, block
        /// devices, images of a Ceph cluster. There is no redundancy: if one leg is lost, everything is lost.
        #[arg(long, value_name = "SIZE")]
        stripe: Option<Size<{ Stripe::CHUNK_MIN_BYTES }, { Stripe::CHUNK_MAX_BYTES }>>,
        /// Serve legs that have no superblock; their order and chunk are yours to remember
        #[arg(long, requires = "stripe")]
        #[serde(deserialize_with = "flag")]
        stripe_raw: bool,
        /// Serve the disk read-only; other read-only servers may share it
        #[arg(long)]
        #[serde(deserialize_with = "flag")]
        read_only: bool,
        /// Serial number that the guest sees: up to 20 printable ASCII characters, without space and /
        ///
        /// A Linux guest shows it as /dev/disk/by-id/virtio-TEXT. Without it the disk has none.
        #[arg(long, value_name = "TEXT", default_value_t, hide_default_value = true)]
        serial: Given<Serial>,
        /// The version of the device that the guest sees: its features, whatever the storage is
        ///
        /// A guest can move between hosts whose disks have the same face, block size, vrings and read-only flag. v1: discard and
        /// write-zeroes unless the disk is read-only, physical blocks of 4K. A later version of Cleave offers more only with a later face.
        #[arg(long, value_name = "VERSION", default_value_t)]
        face: Given<FaceVersion>,
        /// Logical block size that the guest sees
        ///
        /// A power of two from 512 to 64K, whatever the blocks of the disk are. If the guest writes less than a block of the disk, that
        /// block is read, changed and written.
        #[arg(long, value_name = "SIZE", default_value_t)]
        block_size: Given<Size<512, 65_536>>,
        /// Cache mode, which decides when a completed write is durable
        ///
        /// writeback: a write is durable when the guest flushes. writethrough: when it completes. The guest may change it.
        #[arg(long, value_name = "MODE", default_value_t)]
        cache: Given<Cache>,
        /// Bypass the host's page cache (O_DIRECT)
        ///
        /// auto: if the disk can. on: always; refused at start if the disk cannot, and for a disk that is neither a file nor a
        /// device. off: never.
        #[arg(long, value_name = "WHEN", default_value_t)]
        direct: Given<When>,
        /// Poll the device for completions instead of waiting for interrupts (IOPOLL)
        ///
        /// on: for devices with polled queues, such as NVMe with the kernel parameter nvme.poll_queues, and with
        /// O_DIRECT; refused at start if the device cannot be polled. Workers are busy while such reads and writes are in
        /// flight, whatever --completion says. Flushes, discards, durable writes and pieces above 128K complete by
        /// interrupts, and so does an I/O that the device refuses to poll for.
        #[arg(long, value_name = "SWITCH", default_value_t)]
        iopoll: Given<Switch<false>>,
        /// Give the space back that the guest discards (TRIM)
        ///
        /// off: a discard succeeds and does nothing, as it does on a disk that cannot give space back.
        #[arg(long, value_name = "SWITCH", default_value_t)]
        discard: Given<Switch<true>>,
        /// Maximum number of queues (vrings), 1 to 256; a worker starts only for one that the guest uses
        #[arg(long, value_name = "N", default_value_t)]
        queues: Given<Number<1, 256, 64>>,
        /// Maximum number of entries of a queue: a power of two from 4 to 32768
        #[arg(long, value_name = "N", default_value_t)]
        queue_size: Given<QueueSize>,
        /// Maximum number of worker threads, 1 to 256 [default: one for each available CPU]
        ///
        /// Queues are distributed among the workers in turn. With --cpus the default is one worker for each CPU of that
        /// list.
        #[arg(long, value_name = "N")]
        workers: Option<Number<1, 256>>,
        /// CPUs that workers are pinned to, in turn: 0,2-3 [default: not pinned]
        #[arg(long, value_name = "LIST")]
        cpus: Option<CpuList>,
        /// File that `cleave probe --profile` wrote for this disk; --split auto starts from it
        ///
        /// It is refused for another disk and for one that shrank.
        #[arg(long, value_name = "FILE")]
        profile: Option<PathBuf>,
        /// Record times and counts for each vring, direction and size of request
        ///
        /// off: only a few sums are recorded.
        #[arg(long, value_name = "SWITCH", default_value_t)]
        stats: Given<Switch<true>>,
        /// Lock the disk at once, or only before a guest uses it that moves here from another host
        ///
        /// active: at once; a disk that another program has is refused. inactive: the disk is opened although another host still
        /// serves it. Its locks are taken before the guest's first request, and waited for as long as it takes. See
        /// docs/migration.md.
        #[arg(long, value_name = "STATE", default_value_t)]
        start: Given<StartState>,
        /// How long a shutdown waits for requests in flight, in seconds: 0 to 86400
        ///
        /// If the disk has not answered by then, cleave exits 1 and reports how many requests are left to the next daemon,
        /// or are lost. They are left if the frontend keeps them (in-flight tracking), as QEMU and Cloud Hypervisor do.
        #[arg(long, value_name = "SECONDS", default_value_t)]
        stop_deadline: Given<Number<0, 86_400, 2>>,
    }
    node {
        /// The pool of the node whose threads serve the disk [default: threads of its own]
        #[arg(long, value_name = "NAME")]
        pool: Option<String>,
        /// Permissions of the socket of the disk, in octal
        #[arg(long, value_name = "MODE", default_value_t)]
        socket_mode: Given<SocketMode>,
        /// User that owns the socket of the disk, by name or number [default: the node's]
        ///
        /// For a VMM that runs as a user of its own, as libvirt's do.
        #[arg(long, value_name = "USER")]
        socket_user: Option<String>,
        /// Group of the socket of the disk, by name or number [default: the node's]
        #[arg(long, value_name = "GROUP")]
        socket_group: Option<String>,
        /// Serve the disk again after the node was restarted
        #[arg(long, value_name = "BOOL", default_value_t)]
        persistent: Given<Persistent>,
    }
    live {
        /// How to treat a request that the disk fails: report, retry, or hold
        ///
        /// report: the guest gets an I/O error. retry or retry:SECONDS: the request is repeated after 10 ms, 20 ms and so
        /// on, up to once a second, until SECONDS have passed since it first failed (1 to 86400, 30 by default). Then it is
        /// reported, or with `:hold` held. hold: the request waits until `cleave disk resume` repeats it or `cleave disk fail` ends
        /// it. Meanwhile its vring does not take new requests; other vrings continue. `cleave serve` needs --control for it. A
        /// request that is held because an NBD server is away continues by itself when the server is back.
        ///
        /// Each kind of error can have its own policy: read=..., write=..., enospc=..., separated by commas. write includes
        /// discards and write-zeroes. enospc is a full disk or quota; without it the policy for write applies. A kind that
        /// is left out is reported. A failed flush is always reported, and so is every failed write after it; a flush that
        /// could not be sent to an NBD server counts as a write.
        #[arg(long, value_name = "POLICY")]
        on_error: ErrorPolicy,
        /// Maximum number of requests and bytes a second: iops-total=5000,bps-write=100M and so on [default: none]
        ///
        /// Names and meaning are QEMU's: iops-total, iops-read, iops-write, bps-total, bps-read and bps-write. A total
        /// excludes the read and write limits of its kind. Followed by -max (iops-total-max=20000), a name sets the rate
        /// of a burst, and with -max-length for how many seconds the burst may last. iops-size=8K: a request of more bytes
        /// counts as several. Sizes are written 4K, 1M, 2G (powers of 1024). A flush is never limited. A request over the
        /// limit waits in the guest's ring. The control socket changes limits while the disk is served.
        #[arg(long = "limit", value_name = "LIMITS", hide_default_value = true)]
        limits: DiskLimits,
        /// How a worker waits for the guest and for the disk
        ///
        /// interrupt: it sleeps whenever there is nothing to do. poll: it spins as long as the guest uses its vrings, which
        /// saves the wake-up and costs a CPU; if other threads want that CPU, it sleeps nevertheless. adaptive: it tries
        /// both on the current load, spins if that makes requests faster by enough to be worth the CPU time (--spin-worth),
        /// and sleeps otherwise. An idle disk costs no CPU time.
        #[arg(long, value_name = "HOW")]
        completion: CompletionOption,
        /// Maximum CPU time that adaptive may spin without finding work, in per cent of one core, 0 to 25600
        ///
        /// For the whole disk, however many workers serve it. When it is used up, workers sleep until there is budget
        /// again. 0: adaptive never spins. Refused beside interrupt and poll, unless --control could change the mode later.
        #[arg(long, value_name = "PCT")]
        spin_cpu_max: Number<0, SPIN_MAX, { Tuning::SPIN_CPU_MAX }>,
        /// Maximum CPU time that adaptive may spin at all, also where it finds work [default: as much as pays]
        ///
        /// In per cent of one core, 1 to 25600, for all workers of the disk together. Refused in the same cases as
        /// --spin-cpu-max.
        #[arg(long, value_name = "PCT", hide_default_value = true)]
        spin_cpu_total: OrNone<Number<1, SPIN_MAX>>,
        /// Requests a second below which adaptive does not spin, 0 to 1000000000
        ///
        /// Below that rate it costs as little CPU time as interrupt, and each request waits for a wake-up. 0: it spins at
        /// any rate above 4 a second if that pays and budget is left; it still sleeps through gaps of more than a
        /// millisecond. Refused in the same cases as --spin-cpu-max.
        #[arg(long, value_name = "N")]
        spin_rate_min: Number<0, SPIN_RATE_MAX, { Tuning::SPIN_RATE_MIN }>,
        /// Per cent of a core that adaptive may pay for each per cent that spinning makes the disk faster, 0 to 10000
        ///
        /// With 5 it spends a whole core if that makes the disk a fifth faster, and does not spin for a gain below 5 %.
        /// Gain and cost are measured on the load. 0: it spins only if that costs no more CPU time than sleeping. Refused
        /// in the same cases as --spin-cpu-max.
        #[arg(long, value_name = "N")]
        spin_worth: Number<0, SPIN_WORTH_MAX, { Tuning::SPIN_WORTH }>,
        /// Longest time that a call to the guest is delayed to merge it with the next, in microseconds, 0 to 10000
        ///
        /// Only while other requests of the vring are in flight: a lone request is never delayed. 0: never.
        #[arg(long, value_name = "N")]
        coalesce_us: Number<0, COALESCE_US_MAX>,
        /// Maximum number of requests whose calls are merged into one, 0 to 32768; 0: as many as complete within --coalesce-us
        ///
        /// Needs --coalesce-us above 0.
        #[arg(long, value_name = "N")]
        coalesce_max: Number<0, COALESCE_MAX_MAX>,
        /// Split large requests into several smaller ones: off, auto, or the size of the pieces
        ///
        /// auto: if that pays, in the size that pays best, as measured while serving. A size is a power of two from 4K to 4M, no
        /// less than the disk's block: every request that is larger and has 32K or more is cut into pieces of that size, or of a
        /// larger one if there would be more than 64.
        #[arg(long, value_name = "HOW")]
        split: SplitOption,
        /// Names and values by which the disk's owner finds it: owner=web,zone=b [default: none]
        ///
        /// Up to 32 names with values. They change nothing in how the disk is served; `GET /v1/disks?label=owner=web` lists the disks
        /// that have one.
        #[arg(long, value_name = "LABELS", hide_default_value = true)]
        labels: Labels,
    }
}

impl DiskConfig {
    /// Returns the description after a change, if its fields then agree: all of the change or nothing.
    pub fn with(&self, change: &Change) -> Result<DiskConfig, String> {
        let mut next = self.changed(change)?;
        // A profile is for automatic splitting: with another, the disk could not be opened again.
        if next.split.get() != SplitOption::Auto {
            next.profile = None;
        }
        next.check(Names::Fields)?;
        Ok(next)
    }

    /// The description that a disk has once it is as `wanted` says. The error is the fields in which it would have to be opened
    /// anew, or the reason why the fields would not agree.
    pub fn turned_into(&self, wanted: &DiskConfig) -> Result<DiskConfig, Unlike> {
        let mut fixed = self.fixed_differences(wanted);
        if self.limit_group() != wanted.limit_group() {
            fixed.push("limits.group");
        }
        if !fixed.is_empty() {
            return Err(Unlike::Fixed(fixed));
        }
        let next = self.with_live_settings_of(wanted);
        // A request that names a group alone takes whatever limits the group has.
        let next = match self.limit_group() {
            Some(_) if !wanted.limits.get().values.any() => {
                next.with_limits(self.limits.get().values)
            }
            _ => next,
        };
        next.check(Names::Fields).map_err(Unlike::Check)?;
        Ok(next)
    }

    /// Returns the group with whose disks it shares its limits.
    pub fn limit_group(&self) -> Option<&str> {
        self.limits.written()?.group.as_deref()
    }

    /// Returns the disk with these limits.
    pub fn with_limits(&self, values: RateLimits) -> DiskConfig {
        let group = self.limit_group().map(str::to_owned);
        let limits = DiskLimits { group, values };
        DiskConfig {
            limits: match limits.is_empty() {
                true => Given::default(),
                false => Given::from(limits),
            },
            ..self.clone()
        }
    }

    /// Returns what the file of the disk keeps: without the limits of its group, which are the group's to keep.
    pub fn kept(&self) -> DiskConfig {
        match self.limit_group() {
            Some(_) => self.with_limits(RateLimits::default()),
            None => self.clone(),
        }
    }

    /// A field that was written and is for the disks of a node alone.
    pub fn node_field(&self) -> Option<&'static str> {
        let is_of_node = |field: &&str| DiskConfig::NODE_FIELDS.contains(field);
        let field = self.written().into_iter().find(is_of_node);
        field.or(self.limit_group().map(|_| "limits.group"))
    }
}

/// Why a disk that is served cannot be as a description says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unlike {
    /// These fields take effect only when a disk is opened.
    Fixed(Vec<&'static str>),
    /// The fields would not agree.
    Check(String),
}
