//! `cleave stripe` on the command line.

use clap::{Args, Subcommand};
use cleave_blk::Stripe;
use cleave_config::Size;
use cleave_disk::{DiskSpec, Overwrite};

use crate::commands::stripe::StripeAction;

pub(super) const EXAMPLES: &str = "\
Examples:
  Two devices as one disk:
      cleave stripe create --chunk 64K /dev/nvme0n1 /dev/nvme1n1
      cleave serve --socket-path /run/cleave/e.sock --stripe 64K \\
          --disk /dev/nvme0n1 --disk /dev/nvme1n1
  In which order, and whether all are there:
      cleave stripe show /dev/nvme0n1 /dev/nvme1n1";

/// `cleave stripe`.
#[derive(Debug, Subcommand)]
pub(super) enum StripeCommand {
    /// Make files, block devices or images of a Ceph cluster the legs of a stripe; what they hold is lost
    ///
    /// Writes a superblock into the last 4 KiB of each leg: which stripe, which leg of how many, the
    /// chunk. `cleave serve --stripe` refuses legs that do not belong together or stand in another
    /// order. The usable size is that of the smallest leg times their number.
    Create(CreateArgs),
    /// Show what the superblocks of legs say, and whether the legs are a whole stripe in this order
    ///
    /// Legs that are being served may be looked at. Exits 1 unless they are a whole stripe.
    Show(ShowArgs),
}

#[derive(Debug, Args)]
pub(super) struct CreateArgs {
    /// Bytes that lie together on a leg: a power of two from 4K to 4M
    #[arg(long, value_name = "SIZE", default_value = "64K")]
    chunk: Size<{ Stripe::CHUNK_MIN_BYTES }, { Stripe::CHUNK_MAX_BYTES }>,
    /// Take legs that are part of a stripe already or hold data
    #[arg(long)]
    force: bool,
    /// The legs, in order, as --disk of `cleave serve` names them
    #[arg(value_name = "LEG", required = true)]
    legs: Vec<DiskSpec>,
}

#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    /// The legs, in order, as --disk of `cleave serve` names them
    #[arg(value_name = "LEG", required = true)]
    legs: Vec<DiskSpec>,
}

impl From<StripeCommand> for StripeAction {
    fn from(command: StripeCommand) -> StripeAction {
        match command {
            StripeCommand::Create(args) => StripeAction::Create {
                legs: args.legs,
                chunk_bytes: args.chunk.bytes(),
                overwrite: match args.force {
                    true => Overwrite::Yes,
                    false => Overwrite::No,
                },
            },
            StripeCommand::Show(args) => StripeAction::Show { legs: args.legs },
        }
    }
}
