//! `cleave serve` on the command line. Each option of a disk is defined here once.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{ArgAction, Args, Parser, ValueEnum};
use cleave_disk::{Direct, DiskSpec, parse_size};
use cleave_worker::{Limits, OnError};

use super::metrics::MetricsOptions;
use crate::cpus::CpuList;
use crate::pacing::PacingArgs;
use crate::split::SplitOption;

pub(super) const EXAMPLES: &str = "\
Examples:
  An image, to one guest after the other:
      cleave serve --socket-path /run/cleave/a.sock --disk /var/lib/images/a.img
  A block device, every completed write durable, workers on CPUs 2 and 3:
      cleave serve --socket-path /run/cleave/b.sock --disk /dev/vg0/b \\
          --cache writethrough --cpus 2-3
  Lowest latency, at the price of busy CPUs:
      cleave serve --socket-path /run/cleave/c.sock --disk /dev/nvme0n1 --completion poll
  4 GiB of memory as a disk, for the life of one guest:
      cleave serve --socket-path /run/cleave/d.sock --disk ram:4G --once
  Two devices as one disk, made by `cleave stripe create --chunk 64K`:
      cleave serve --socket-path /run/cleave/e.sock --stripe 64K \\
          --disk /dev/nvme1n1 --disk /dev/nvme2n1
  With a control socket, and what the disk does:
      cleave serve --socket-path /run/cleave/a.sock --disk /var/lib/images/a.img \\
          --control /run/cleave/a.ctl
      cleave top --control /run/cleave/a.ctl
  A drive that is only modelled, to see what it gains from being asked in parallel:
      cleave serve --socket-path /run/cleave/f.sock --disk model:p3700,size=4G

Signals: TERM and INT finish the requests in flight and exit 0. If the disk hangs, they exit 1
after --stop-deadline and report what became of its requests.
HUP checks the size of the disk and reports growth to the guest.";

/// The socket of the frontends.
#[derive(Debug, Clone, Args)]
#[group(multiple = false)]
pub(crate) struct EndpointArgs {
    /// Make a socket for frontends here and listen on it
    ///
    /// A stale socket file is replaced; one on which a program listens is not. The file is removed when cleave ends.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket_path: Option<PathBuf>,
    /// Use this inherited socket, listening or already connected
    #[arg(long, value_name = "N")]
    pub(crate) fd: Option<u32>,
}

/// Access to the disk.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct AccessArgs {
    /// Serve the disk read-only; other read-only servers may share it
    #[arg(long)]
    pub(crate) read_only: bool,
}

/// `cleave serve`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) endpoint: EndpointArgs,
    /// Read the disk and its options from this file, TOML in the form in which `cleave node` keeps a disk
    ///
    /// Each field is the option of its name, with _ for -: see docs/disk-file.md. A field of the file cannot be given as
    /// an option too.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
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
    #[arg(long, value_name = "SPEC", action = ArgAction::Append)]
    pub(crate) disk: Vec<DiskSpec>,
    #[command(flatten)]
    pub(crate) stripe: StripeArgs,
    #[command(flatten)]
    pub(crate) access: AccessArgs,
    #[command(flatten)]
    pub(crate) options: ServeOptions,
}

/// Several `--disk` as one.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct StripeArgs {
    /// Serve several disks as one (RAID-0), divided among them in chunks of this size
    ///
    /// A power of two from 4K to 4M: the one that was given to `cleave stripe create`. 2 to 64 legs: files, block
    /// devices, images of a Ceph cluster. There is no redundancy: if one leg is lost, everything is lost.
    #[arg(long, value_name = "SIZE", value_parser = stripe_chunk)]
    pub(crate) stripe: Option<u32>,
    /// Serve legs that have no superblock; their order and chunk are yours to remember
    #[arg(long, requires = "stripe")]
    pub(crate) stripe_raw: bool,
}

/// How a disk is served: by `cleave serve`, or in a node. All have a default.
#[derive(Debug, Clone, Args)]
pub(crate) struct DiskOptions {
    /// Serial number that the guest sees: up to 20 printable ASCII characters, without space and /
    ///
    /// A Linux guest shows it as /dev/disk/by-id/virtio-TEXT. Without it the disk has none.
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) serial: Serial,
    /// Logical block size that the guest sees, instead of the disk's own
    ///
    /// A power of two from 512 to 64K. If the guest writes less than a block of the disk, that block is read, changed
    /// and written.
    #[arg(long, value_name = "SIZE", value_parser = block_size)]
    pub(crate) block_size: Option<u32>,
    /// Whether a completed write may still be in a cache
    ///
    /// writeback: durable when the guest flushes. writethrough: durable when it completes. The guest
    /// may change it.
    #[arg(long, value_name = "MODE", value_enum, default_value_t = Cache::Writeback)]
    pub(crate) cache: Cache,
    /// Whether the host's page cache is bypassed (O_DIRECT)
    ///
    /// auto: if the disk can. on: always; refused at start if the disk cannot, and for one that is no file or device.
    /// off: never.
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = When::Auto)]
    pub(crate) direct: When,
    /// Poll the device for completions instead of waiting for interrupts (IOPOLL)
    ///
    /// on: for devices with polled queues, such as NVMe with the kernel parameter nvme.poll_queues, and with
    /// O_DIRECT; refused at start if the device cannot be polled. Workers are busy while such reads and writes are in
    /// flight, whatever --completion says. Flushes, discards, durable writes and pieces above 128K complete by
    /// interrupts, and so does an I/O that the device refuses to poll for.
    #[arg(long, value_name = "SWITCH", value_enum, default_value_t = Switch::Off)]
    pub(crate) iopoll: Switch,
    /// Whether the guest may give space back
    #[arg(long, value_name = "SWITCH", value_enum, default_value_t = Switch::On)]
    pub(crate) discard: Switch,
    /// Most vrings offered, 1 to 256; a worker starts only for one that the guest uses
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) queues: u16,
    /// Most entries of a vring: a power of two from 4 to 32768
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = queue_size)]
    pub(crate) queue_size: u16,
    /// Most worker threads, 1 to 256 [default: one for each available CPU]
    ///
    /// Vrings are distributed among the workers in turn. With --cpus the default is one worker for each CPU of that
    /// list.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) workers: Option<u16>,
    /// CPUs that workers are pinned to, in turn: 0,2-3 [default: not pinned]
    #[arg(long, value_name = "LIST")]
    pub(crate) cpus: Option<CpuList>,
    #[command(flatten)]
    pub(crate) live: LiveOptions,
    /// File that `cleave probe --profile` wrote for this disk; --split auto starts from it
    ///
    /// It is refused for another disk and for one that shrank.
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,
    /// Whether times and counts are recorded for each vring, direction and size of request
    ///
    /// off: only a few sums are recorded.
    #[arg(long, value_name = "SWITCH", value_enum, default_value_t = Switch::On)]
    pub(crate) stats: Switch,
    /// How long a shutdown waits for requests in flight, in seconds: 0 to 86400
    ///
    /// If the disk has not answered by then, cleave exits 1 and reports how many requests are left to the next daemon,
    /// or are lost. They are left if the frontend keeps them (in-flight tracking), as QEMU and Cloud Hypervisor do.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(..=86_400))]
    pub(crate) stop_deadline: u32,
}

/// Options that `cleave disk set` can change while a disk is served.
#[derive(Debug, Clone, Args)]
pub(crate) struct LiveOptions {
    /// How to treat a request that the disk fails: report, retry, or hold
    ///
    /// report: the guest gets an I/O error. retry or retry:SECONDS: the request is repeated after 10 ms, 20 ms and so
    /// on, up to once a second, until SECONDS have passed since it first failed (1 to 86400, 30 by default). Then it is
    /// reported, or with `:hold` held. hold: the request waits until `cleave resume` repeats it or `cleave fail` ends
    /// it. Its vring takes no new requests meanwhile; other vrings continue. `cleave serve` needs --control for it. A
    /// request that is held because an NBD server is away goes on by itself when the server is back.
    ///
    /// Each kind of error can have its own policy: read=..., write=..., enospc=..., separated by commas. write includes
    /// discards and write-zeroes. enospc is a full disk or quota; without it the policy for write applies. A kind that
    /// is left out is reported. A failed flush is always reported, and so is every failed write after it; a flush that
    /// could not be sent to an NBD server counts as a write.
    #[arg(long, value_name = "POLICY", default_value_t = OnError::default())]
    pub(crate) on_error: OnError,
    /// Most requests and bytes a second: iops-total=5000,bps-write=100M and so on [default: none]
    ///
    /// Names and meaning are QEMU's: iops-total, iops-read, iops-write, bps-total, bps-read and bps-write. A total
    /// excludes the read and write limits of its kind. With -max behind it (iops-total-max=20000), a name sets the rate
    /// of a burst, and with -max-length for how many seconds the burst may last. iops-size=8K: a request of more bytes
    /// counts as several. Sizes are written 4K, 1M, 2G (powers of 1024). A flush is never limited. A request over the
    /// limit waits in the guest's ring. The control socket changes limits while the disk is served.
    #[arg(long, value_name = "LIMITS", default_value_t = Limits::default(), hide_default_value = true)]
    pub(crate) limit: Limits,
    #[command(flatten)]
    pub(crate) pacing: PacingArgs,
    /// Whether large requests become several smaller ones: off, auto, or the size of the pieces
    ///
    /// auto: if that pays, in the size that pays best, as measured while serving. A size is a power of two from 4K to
    /// 4M, no less than the disk's block: every request that is larger and has 32K or more is cut into pieces of that
    /// size, or into at most 64 larger ones.
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub(crate) split: SplitOption,
}

/// Options of `cleave serve` that all have a default.
#[derive(Debug, Clone, Args)]
pub(crate) struct ServeOptions {
    #[command(flatten)]
    pub(crate) disk: DiskOptions,
    /// Make a control socket here, which shows the disk and changes its settings over HTTP
    ///
    /// `cleave top` and `cleave stats` read it, and so does curl --unix-socket. The metrics for Prometheus are under
    /// /metrics. Only the user that runs cleave may use the socket (mode 0600). A stale one is replaced; the file is
    /// removed when cleave ends.
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) metrics: MetricsOptions,
    /// Whether the daemon gives up what it does not need, once its disk and its sockets are open
    ///
    /// on: no capabilities; no file can be opened, no program started and no connection made; each thread may make only the
    /// system calls of its task. The log names what the kernel lacks for it. off: nothing is given up, which is for finding
    /// faults. See docs/security.md.
    #[arg(long, value_name = "SWITCH", value_enum, default_value_t = SANDBOX_DEFAULT)]
    pub(crate) sandbox: Switch,
    /// Become this user once the disk and the sockets are open: a name or a number
    ///
    /// For a daemon that is started as root. Its group becomes that of the user, or --group; it is in no other group. The
    /// sockets made here are given to the user and the group.
    #[arg(long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Become this group once the disk and the sockets are open: a name or a number
    #[arg(long, value_name = "GROUP")]
    pub(crate) group: Option<String>,
    /// Exit when the first frontend leaves
    #[arg(long)]
    pub(crate) once: bool,
    /// Least severe messages that are written to stderr
    #[arg(long, value_name = "LEVEL", default_value = "info",
          value_parser = PossibleValuesParser::new(["error", "warn", "info", "debug", "trace"]))]
    pub(crate) log: String,
    /// Exit when this process, which started this one, ends.
    #[arg(long, value_name = "PID", hide = true)]
    pub(crate) exit_with_parent: Option<u32>,
}

/// `--cache`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Cache {
    Writeback,
    Writethrough,
}

/// `--direct`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum When {
    On,
    Off,
    Auto,
}

impl From<When> for Direct {
    fn from(when: When) -> Direct {
        match when {
            When::On => Direct::On,
            When::Off => Direct::Off,
            When::Auto => Direct::Auto,
        }
    }
}

/// A sanitizer traces the daemon at its end, and the sandbox kills a daemon that does so.
pub(super) const SANDBOX_DEFAULT: Switch = if cfg!(sanitized) {
    Switch::Off
} else {
    Switch::On
};

/// `--discard`, `--iopoll`, `--stats` and `--sandbox`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// `--serial`, zero-padded as GET_ID answers it (virtio 1.3 §5.2.6.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Serial(pub(crate) [u8; cleave_blk::spec::ID_BYTES]);

impl std::str::FromStr for Serial {
    type Err = String;

    fn from_str(text: &str) -> Result<Serial, String> {
        let mut padded = [0; cleave_blk::spec::ID_BYTES];
        // `/` and blanks would break the name of the guest's link, as would anything unprintable.
        if let Some(bad) = text.chars().find(|c| !c.is_ascii_graphic() || *c == '/') {
            return Err(format!(
                "{bad:?} is not allowed in a serial: use printable ASCII characters, without space and /"
            ));
        }
        match padded.get_mut(..text.len()) {
            Some(start) => start.copy_from_slice(text.as_bytes()),
            None => {
                return Err(format!(
                    "{} characters are too many: a serial has at most {}",
                    text.len(),
                    padded.len()
                ));
            }
        }
        Ok(Serial(padded))
    }
}

fn block_size(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text)?;
    match u32::try_from(bytes) {
        Ok(bytes) if bytes.is_power_of_two() && (512..=65536).contains(&bytes) => Ok(bytes),
        _ => Err("a block is a power of two from 512 to 64K".to_owned()),
    }
}

pub(super) fn stripe_chunk(text: &str) -> Result<u32, String> {
    let bytes = u32::try_from(parse_size(text)?).unwrap_or(u32::MAX);
    // The number of legs is judged elsewhere.
    match cleave_blk::Stripe::new(cleave_blk::Stripe::LEGS_MIN, bytes) {
        Some(_) => Ok(bytes),
        None => Err("a stripe's chunk is a power of two from 4K to 4M".to_owned()),
    }
}

fn queue_size(text: &str) -> Result<u16, String> {
    match text.parse::<u16>() {
        // Two entries are the header and the status of a request; one less than four carries no data.
        Ok(size) if size.is_power_of_two() && (4..=32768).contains(&size) => Ok(size),
        _ => Err("a vring has a power of two of entries, from 4 to 32768".to_owned()),
    }
}

impl Default for ServeOptions {
    fn default() -> ServeOptions {
        /// Only the defaulted options.
        #[derive(Parser)]
        struct Defaults {
            #[command(flatten)]
            options: ServeOptions,
        }
        Defaults::parse_from(["cleave"]).options
    }
}
