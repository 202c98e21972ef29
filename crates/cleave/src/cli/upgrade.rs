//! `cleave upgrade` on the command line.

use std::path::PathBuf;

use clap::{ArgAction, Args};

use crate::commands::upgrade::Upgrade;

pub(super) const EXAMPLES: &str = "\
Examples:
  What would a restart mean for the guests?
      cleave upgrade --check
  Restart the daemons that run another program than the installed one, and see how long each guest paused:
      cleave upgrade
  Daemons with their control sockets elsewhere:
      cleave upgrade --control /run/vm1/a.ctl --control /run/vm1/b.ctl

Exit codes: 0 each daemon can be restarted and no VMM has to connect again (--check), or every daemon runs the installed program
and every guest has its disk; 1 otherwise, or no daemon was found; 2 bad input.";

/// `cleave upgrade`.
#[derive(Debug, Clone, Args)]
pub(super) struct UpgradeArgs {
    /// Say what would happen, and change nothing
    #[arg(long)]
    check: bool,
    /// The control socket of a daemon or a node; once for each; without any, all at /run/cleave/control.sock and
    /// /run/cleave/*/control.sock
    #[arg(long, value_name = "PATH", action = ArgAction::Append)]
    control: Vec<PathBuf>,
}

impl From<UpgradeArgs> for Upgrade {
    fn from(args: UpgradeArgs) -> Upgrade {
        Upgrade {
            check: args.check,
            sockets: args.control,
        }
    }
}
