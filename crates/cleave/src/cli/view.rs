//! `cleave top` and `cleave stats` on the command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};

use super::disk::NODE_CONTROL;
use crate::commands::view::{Stats, Top};

pub(super) const TOP_EXAMPLES: &str = "\
Examples:
  Show what the disks of the node do, once a second:
      cleave top
  A disk of `cleave serve`:
      cleave top --control /run/cleave/a.ctl
  Several disks, every five seconds, into a file:
      cleave top --control /run/cleave/a.ctl --control /run/cleave/b.ctl --interval 5 > log

On a terminal: Left and Right choose the column to sort by, r reverses the order. Up, Down, Page Up, Page Down, Home and End
select a disk; Enter shows it alone, Escape all disks again. q, Ctrl-C and the end of the input quit.";

pub(super) const STATS_EXAMPLES: &str = "\
Examples:
  A disk on a page:
      cleave stats --control /run/cleave/a.ctl
  How many 4 KiB reads there were:
      cleave stats --control /run/cleave/a.ctl --json |
          jq '.[0].requests[] | select(.direction == \"read\" and .size == \"4K\").requests'";

/// The control sockets of the daemons to ask.
#[derive(Debug, Clone, Args)]
struct Sockets {
    /// The control socket of a daemon or a node; once for each; without any, /run/cleave/control.sock
    #[arg(long, value_name = "PATH", action = ArgAction::Append)]
    control: Vec<PathBuf>,
    /// A control socket, without the option's name
    #[arg(value_name = "CONTROL")]
    plain: Vec<PathBuf>,
}

impl Sockets {
    fn all(mut self) -> Vec<PathBuf> {
        self.control.append(&mut self.plain);
        if self.control.is_empty() {
            self.control.push(NODE_CONTROL.into());
        }
        self.control
    }
}

/// `cleave top`.
#[derive(Debug, Clone, Args)]
pub(super) struct TopArgs {
    #[command(flatten)]
    sockets: Sockets,
    /// Seconds between two looks, 0.1 to 3600
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = interval)]
    interval: f64,
}

/// `cleave stats`.
#[derive(Debug, Clone, Args)]
pub(super) struct StatsArgs {
    #[command(flatten)]
    sockets: Sockets,
    /// Print all there is as JSON: a list of disks, each as GET /v1/disks/{id} has it
    #[arg(long)]
    json: bool,
}

fn interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("an interval has 0.1 to 3600 seconds".to_owned()),
    }
}

impl From<TopArgs> for Top {
    fn from(args: TopArgs) -> Top {
        Top {
            sockets: args.sockets.all(),
            interval: Duration::from_secs_f64(args.interval),
        }
    }
}

impl From<StatsArgs> for Stats {
    fn from(args: StatsArgs) -> Stats {
        Stats {
            sockets: args.sockets.all(),
            json: args.json,
        }
    }
}
