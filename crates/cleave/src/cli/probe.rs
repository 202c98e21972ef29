//! `cleave probe` on the command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use cleave_blk::Stripe;
use cleave_config::{Names, Size, Storage, When};
use cleave_disk::{DiskSpec, StripeKind};
use cleave_host::Failure;

use crate::commands::probe::{Depth, Probe};

pub(super) const EXAMPLES: &str = "\
Examples:
  Does splitting pay on this drive? An answer within a minute; nothing is written to it:
      cleave probe /dev/nvme0n1
  A profile for serving it, and every measurement:
      cleave probe /dev/nvme0n1 --full --profile nvme0n1.toml --json nvme0n1.json
      cleave serve --socket-path /run/cleave/a.sock --disk /dev/nvme0n1 --profile nvme0n1.toml
  Writes too, on a drive whose contents may be lost:
      cleave probe /dev/nvme1n1 --writes --destructive --profile nvme1n1.toml

Ctrl-C ends the measurement; what was measured until then is printed and written, and says that it is
partial; the exit code is 1.";

/// `cleave probe`.
#[derive(Debug, Clone, Args)]
pub(super) struct ProbeArgs {
    /// The disk, as in `cleave serve --disk`
    ///
    /// With --stripe, all legs of the stripe, in order.
    #[arg(value_name = "SPEC", required = true)]
    disk: Vec<DiskSpec>,
    /// Measure several disks as one stripe, divided among them in chunks of this size
    #[arg(long, value_name = "SIZE")]
    stripe: Option<Size<{ Stripe::CHUNK_MIN_BYTES }, { Stripe::CHUNK_MAX_BYTES }>>,
    /// Measure legs that have no superblock
    #[arg(long, requires = "stripe")]
    stripe_raw: bool,
    /// Measure each point until it is known to ±3 %, for at most five seconds
    ///
    /// Takes at most nine minutes for reads, and as long again for writes. Without it the probe ends within a minute
    /// (two with --writes), and each figure is a little less certain.
    #[arg(long)]
    full: bool,
    /// Maximum time of the whole probe, in seconds: 1 to 86400
    #[arg(long, value_name = "N", conflicts_with = "full",
          value_parser = clap::value_parser!(u64).range(1..=86400))]
    seconds: Option<u64>,
    /// Measure writes too
    ///
    /// They overwrite the disk with random bytes.
    #[arg(long)]
    writes: bool,
    /// Allow --writes on a disk that holds data, or may
    #[arg(long, requires = "writes")]
    destructive: bool,
    /// Measure a file although much of it was never written
    ///
    /// Such areas answer without the device, and faster than it ever could.
    #[arg(long)]
    allow_thin: bool,
    /// Bypass the host's page cache (O_DIRECT)
    ///
    /// auto: where the disk can. A profile is for serving the disk in the same way.
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = When::Auto)]
    direct: When,
    /// Write a profile for `cleave serve --profile` here
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Write everything as JSON here; - is stdout, in place of the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl TryFrom<ProbeArgs> for Probe {
    type Error = Failure;

    fn try_from(args: ProbeArgs) -> Result<Probe, Failure> {
        let kind = match args.stripe_raw {
            true => StripeKind::Raw,
            false => StripeKind::Superblocks,
        };
        let chunk_bytes = args.stripe.map(|size| size.bytes());
        let disk = Storage::new(&args.disk, chunk_bytes, kind, Names::Options);
        Ok(Probe {
            disk: disk.map_err(Failure::input)?,
            depth: match args.seconds {
                Some(seconds) => Depth::Within(Duration::from_secs(seconds)),
                None if args.full => Depth::Full,
                None => Depth::Quick,
            },
            writes: args.writes,
            destructive: args.destructive,
            allow_thin: args.allow_thin,
            direct: args.direct.into(),
            profile: args.profile,
            json: args.json,
        })
    }
}
