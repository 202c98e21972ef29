//! `cleave doctor` on the command line.

use std::path::PathBuf;

use clap::Args;
use cleave_disk::DiskSpec;

use crate::commands::doctor::Doctor;

pub(super) const EXAMPLES: &str = "\
Examples:
  The host:
      cleave doctor
  Everything about one disk, as the user that is to run the daemon:
      cleave doctor --socket-path /run/cleave/a/disk.sock --disk /var/lib/images/a.img
  Whether the server of a disk answers:
      cleave doctor --disk nbd://10.0.0.7/vm1
  Only what is wrong, for a script:
      cleave doctor --json | jq '.findings[] | select(.level != \"ok\")'

Exit codes: 0 no problem (there may be warnings), 1 a problem was found, 2 bad input.";

/// `cleave doctor`.
#[derive(Debug, Args)]
pub(super) struct DoctorArgs {
    /// Check that the VMM's user can connect to the socket here
    #[arg(long, value_name = "PATH")]
    socket_path: Option<PathBuf>,
    /// Check that the user that runs this command can serve this disk, named as for cleave serve
    #[arg(long, value_name = "SPEC")]
    disk: Option<DiskSpec>,
    /// The VMM's user, by name or number [default: libvirt-qemu or qemu, if there is one, else this user]
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,
}

impl From<DoctorArgs> for Doctor {
    fn from(args: DoctorArgs) -> Doctor {
        Doctor {
            socket: args.socket_path,
            disk: args.disk,
            user: args.user,
            json: args.json,
        }
    }
}
