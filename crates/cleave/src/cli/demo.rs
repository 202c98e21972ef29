//! `cleave demo` on the command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use cleave_disk::parse_size;

use crate::commands::demo::Demo;

/// `cleave demo`.
#[derive(Debug, Clone, Args)]
pub(super) struct DemoArgs {
    /// End after the table
    #[arg(long)]
    exit: bool,
    /// Size of the image, in whole mebibytes, at least 16M
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = demo_size)]
    size: u64,
    /// Length of each measurement, in seconds: 1 to 3600
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Folder that the temporary one is made in [default: $TMPDIR, or else /var/tmp]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl From<DemoArgs> for Demo {
    fn from(args: DemoArgs) -> Demo {
        let folder = || std::env::var_os("TMPDIR").map_or("/var/tmp".into(), PathBuf::from);
        Demo {
            exit: args.exit,
            size_bytes: args.size,
            time: Duration::from_secs(args.seconds),
            parent: args.dir.unwrap_or_else(folder),
        }
    }
}

fn demo_size(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        bytes if bytes >= 16 << 20 && bytes.is_multiple_of(1 << 20) => Ok(bytes),
        _ => Err("the image has whole mebibytes, at least 16M".to_owned()),
    }
}
