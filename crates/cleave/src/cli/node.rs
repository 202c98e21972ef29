//! `cleave node` on the command line.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use cleave_config::{CpuList, is_id};
use cleave_host::{NodeSettings, PoolSettings, SocketSettings};
use tracing::level_filters::LevelFilter;

use super::metrics::MetricsOptions;
use super::serve::SandboxSwitch;

pub(super) const EXAMPLES: &str = "\
Examples:
  A node with its folders in the usual places:
      cleave node
  A disk, added to it:
      cleave disk add d1 --disk /var/lib/images/a.img --serial a

Signals: TERM and INT finish the requests in flight of all disks at once, and exit 0. If a disk hangs, they exit 1
after its stop_deadline. HUP checks the size of all disks.";

/// Longest name of a pool.
const POOL_CHARS_MAX: usize = 32;

/// `cleave node`.
#[derive(Debug, Clone, Args)]
pub(super) struct NodeArgs {
    /// Folder that keeps the disks, in DIR/disks/ID.toml
    #[arg(long, value_name = "DIR", default_value = "/var/lib/cleave")]
    state: PathBuf,
    /// Folder of the sockets of the disks, DIR/ID/disk.sock
    #[arg(long, value_name = "DIR", default_value = "/run/cleave")]
    run: PathBuf,
    /// The control socket [default: control.sock in the folder of --run]
    ///
    /// Only the user that runs cleave may use it (mode 0600), unless there is --control-group.
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Group that may use the control socket too (mode 0660): a name or a number
    ///
    /// Its members can have any file served that cleave may open: they are as mighty as the user that runs cleave.
    #[arg(long, value_name = "GROUP")]
    control_group: Option<String>,
    #[command(flatten)]
    metrics: MetricsOptions,
    /// Folder of images, block devices and profiles: no others can be opened [default: everywhere]
    ///
    /// May be given several times. Block devices are reached with --images /dev. A symlink counts as the file that it leads
    /// to. A folder that is not there when the node starts is left out, which the log says; without any the node does not
    /// start.
    #[arg(long, value_name = "DIR")]
    images: Vec<PathBuf>,
    /// Give up what the node does not need
    ///
    /// on: few capabilities, and none where guests are served; files are opened only in the folders of --images, and made
    /// only in those of --state and --run; no program can be started; each thread may make only the system calls of its
    /// task. The log names what the kernel lacks for it. off: nothing is given up, which is for finding faults. See
    /// docs/security.md.
    #[arg(long, value_name = "SWITCH", value_enum, default_value_t)]
    sandbox: SandboxSwitch,
    /// Threads that serve many disks, one pinned to each of these CPUs: fast=2-5
    ///
    /// For disks with this name in their field `pool`. The others have threads of their own. May be repeated; a CPU is
    /// in one pool only.
    #[arg(long = "pool", value_name = "NAME=CPUS", value_parser = pool)]
    pools: Vec<PoolSettings>,
    /// Serve images of Ceph clusters too
    ///
    /// Loads librbd at the start. Its threads need the network and the files of the clients' keys, and are confined less than
    /// the others. See docs/security.md.
    #[arg(long)]
    ceph: bool,
    /// Take the disks over from the node that has the control socket, with their frontends
    ///
    /// For an upgrade without a service manager: start the new node with the options of the running one. That one serves each
    /// disk until the new one has all that it needs for it, and exits after the last. A guest sees a pause of some
    /// milliseconds. If a disk cannot be taken over, the running node goes on. The new one then exits 3 if a restart gets
    /// past the reason, and 1 otherwise. If none runs, the disks are opened as usual.
    #[arg(long)]
    take_over: bool,
    /// Return when the new process has taken over, and leave it in the background
    ///
    /// For ExecReload= of a unit: `systemctl reload` upgrades the daemon then. If the new process cannot take over, it exits
    /// with the code of that one, and the running process goes on. See docs/upgrade.md.
    #[arg(long, requires = "take_over")]
    pub(super) detach: bool,
    /// Print the OpenAPI document of the control socket and exit
    #[arg(long)]
    pub(super) openapi: bool,
    /// Least severe messages that are written to stderr
    #[arg(long, value_name = "LEVEL", default_value = "info",
          value_parser = PossibleValuesParser::new(["error", "warn", "info", "debug", "trace"]))]
    log: String,
}

impl From<NodeArgs> for NodeSettings {
    fn from(args: NodeArgs) -> NodeSettings {
        let run = absolute(args.run);
        let control = args.control.unwrap_or_else(|| run.join("control.sock"));
        NodeSettings {
            state: absolute(args.state),
            control: SocketSettings {
                path: absolute(control),
                group: args.control_group,
            },
            metrics: args.metrics.socket().map(|socket| SocketSettings {
                path: absolute(socket.path),
                group: socket.group,
            }),
            run,
            images: args.images.into_iter().map(absolute).collect(),
            sandbox: args.sandbox.is_on(),
            pools: args.pools,
            ceph: args.ceph,
            take_over: args.take_over,
            log: args.log.parse().unwrap_or(LevelFilter::INFO),
        }
    }
}

/// Makes a path independent of the folder that the process works in.
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

/// Parses `--pool`.
fn pool(text: &str) -> Result<PoolSettings, String> {
    let Some((name, list)) = text.split_once('=') else {
        return Err("write NAME=CPUS, such as fast=2-5".to_owned());
    };
    if name.len() > POOL_CHARS_MAX || !is_id(name) {
        return Err(format!(
            "'{name}' is not a name: write at most {POOL_CHARS_MAX} letters, digits, '_', '.' and '-'"
        ));
    }
    let CpuList(cpus) = list.parse()?;
    Ok(PoolSettings {
        name: name.to_owned(),
        cpus,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_a_name_and_its_cpus() {
        let fast = pool("fast=2-4").unwrap();
        assert_eq!((&*fast.name, &*fast.cpus), ("fast", &[2, 3, 4][..]));
        for (text, part) in [
            ("fast", "NAME=CPUS"),
            ("=0", "not a name"),
            ("a b=0", "not a name"),
            ("fast=", "write a list"),
            ("fast=x", "write a list"),
            ("fast=3-1", "backwards"),
            ("fast=0,0", "listed twice"),
        ] {
            let why = pool(text).unwrap_err();
            assert!(
                why.contains(part) && why.lines().count() == 1,
                "{text}: {why}"
            );
        }
    }
}
