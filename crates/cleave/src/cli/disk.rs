//! `cleave disk` on the command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgMatches, Args, Subcommand, ValueEnum};
use cleave_api::Operation;
use cleave_config::{Change, DiskConfig, DiskLimits, WrittenSpec};
use cleave_disk::DiskSpec;
use cleave_disk::nbd::Address;
use cleave_host::Failure;
use serde_json::{Value, json};

use super::serve::with_options;
use crate::commands::remote::{Ask, DiskChoice, Remote};

pub(super) const EXAMPLES: &str = "\
Examples:
  Add an image, with a limit, and see it:
      cleave disk add d1 --disk /var/lib/images/a.img --serial a --limit iops-total=5000
      cleave disk list
      cleave disk show d1
  Another limit while a guest uses it:
      cleave disk set d1 --limit iops-total=0,bps-total=100M
  A quiesce, for a snapshot by other means:
      cleave disk quiesce d1 --for 30 && if lvcreate -s -L 5G -n s vg0/a
          then cleave disk resume d1 || lvremove -y vg0/s; else cleave disk resume d1; fi
  The disk was full, and its guest waits; there is room again:
      cleave disk resume d1 --held
  There will be none; the guest gets an I/O error:
      cleave disk fail d1
  The guest is gone:
      cleave disk remove d1
  The disk of a `cleave serve --control /run/cleave/a.ctl`:
      cleave disk show --control /run/cleave/a.ctl

Exit codes: 0 done, 1 refused or no answer, 2 bad input.";

/// The control socket of the packaged node.
pub(super) const NODE_CONTROL: &str = "/run/cleave/control.sock";

/// `cleave disk`.
#[derive(Debug, Subcommand)]
pub(super) enum DiskCommand {
    /// Add a disk; its socket is there when this returns
    ///
    /// The disk is kept, and comes back when the node starts again. Adding it once more with the same options changes
    /// nothing.
    Add(Box<AddArgs>),
    /// List all disks
    List(RemoteArgs),
    /// Show a disk: its state, its options and what it has done
    Show(DiskArgs),
    /// Change how a disk is served, while it is
    ///
    /// An option that is left out stays as it is. A node keeps the change; `cleave serve` has it until it ends.
    Set(Box<SetArgs>),
    /// Check the size of a disk, and report growth to the guest
    Resize(DiskArgs),
    /// Try a failed disk again at once
    Start(DiskArgs),
    /// Retry the requests that are held because the disk failed them, and end a quiesce
    ///
    /// Exits with 1 if the quiesce had ended before: its time was over, or another command ended it. A copy made since then may
    /// be torn. With --held or --all only held requests matter.
    Resume(ResumeDiskArgs),
    /// End the requests that are held because the disk failed them: the guest gets I/O errors
    Fail(OneArgs),
    /// Make everything durable that was written
    Flush(DiskArgs),
    /// Finish what is in flight, flush, and have new requests wait in the guest
    ///
    /// For a snapshot below the disk. It ends by `cleave disk resume`, or after the time of --for.
    Quiesce(QuiesceArgs),
    /// Copy a disk at one moment into a new file that shares its blocks
    ///
    /// On a file system that can do that, such as XFS and Btrfs. The guest waits for milliseconds.
    Snapshot(SnapshotArgs),
    /// Remove a disk from the node; its image stays
    Remove(RemoveArgs),
    /// Print all disks, and then what happens to them, a line each, until Ctrl-C
    Events(RemoteArgs),
}

/// The socket that is asked, and how its answer is printed.
#[derive(Debug, Clone, Args)]
pub(super) struct RemoteArgs {
    /// The control socket of the node, or of a `cleave serve`
    #[arg(long, value_name = "PATH", default_value = NODE_CONTROL)]
    control: PathBuf,
    /// Print the answer as it comes, as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Args)]
pub(super) struct OneArgs {
    /// ID of the disk
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    node: RemoteArgs,
}

/// A disk that goes without its ID if the socket has no other.
#[derive(Debug, Clone, Args)]
pub(super) struct DiskArgs {
    /// ID of the disk; without it, the socket must have one disk only, as that of `cleave serve` has
    #[arg(value_name = "ID")]
    id: Option<String>,
    #[command(flatten)]
    node: RemoteArgs,
}

#[derive(Debug, Clone, Args)]
#[command(mut_args(with_disk))]
pub(super) struct AddArgs {
    #[command(flatten)]
    one: OneArgs,
    #[command(flatten)]
    disk: DiskConfig,
    /// The group of disks with which it shares its limits
    #[arg(long, value_name = "NAME")]
    limit_group: Option<String>,
}

/// The disk has to be named, since there is no file that could name it; its long help is that of `cleave serve`.
fn with_disk(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "disk" => arg
            .required(true)
            .help("The disk, as for `cleave serve`; with --stripe once for each leg")
            .long_help(Resettable::Reset),
        _ => arg,
    }
}

#[derive(Debug, Clone, Args)]
pub(super) struct SetArgs {
    #[command(flatten)]
    one: DiskArgs,
    #[command(flatten)]
    change: Change,
}

#[derive(Debug, Clone, Args)]
pub(super) struct QuiesceArgs {
    #[command(flatten)]
    one: DiskArgs,
    /// Longest time of the quiesce, in seconds: 1 to 60
    #[arg(long = "for", value_name = "SECONDS", default_value_t = 10,
          value_parser = clap::value_parser!(u32).range(1..=60))]
    seconds: u32,
}

#[derive(Debug, Clone, Args)]
pub(super) struct ResumeDiskArgs {
    #[command(flatten)]
    one: DiskArgs,
    /// End only the quiesce that `cleave disk quiesce` named so, and leave held requests alone
    #[arg(long, value_name = "NAME", conflicts_with = "held")]
    quiet: Option<String>,
    /// Retry only the held requests, and leave a quiesce alone
    #[arg(long)]
    held: bool,
    /// Retry the held requests of all disks that are served, and end no quiesce
    #[arg(long, conflicts_with_all = ["id", "quiet", "json"])]
    all: bool,
}

#[derive(Debug, Clone, Args)]
pub(super) struct SnapshotArgs {
    #[command(flatten)]
    one: OneArgs,
    /// The new file, on the file system of the image
    #[arg(value_name = "FILE")]
    to: PathBuf,
}

#[derive(Debug, Clone, Args)]
pub(super) struct RemoveArgs {
    #[command(flatten)]
    one: OneArgs,
    /// How a connected VMM is treated
    ///
    /// safe: the disk is not removed while there is one. drain: it is disconnected when its requests are done, or after
    /// --stop-deadline. hard: it is disconnected at once.
    #[arg(long, value_name = "MODE", value_enum, default_value_t = Mode::Safe)]
    mode: Mode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    Safe,
    Drain,
    Hard,
}

impl DiskCommand {
    /// The request to the control socket. `given` has the words that follow `cleave disk`.
    pub(super) fn remote(self, given: &ArgMatches) -> Result<Remote, Failure> {
        let post = |args: DiskArgs, operation| args.asks(Ask::Order(operation, Value::Null));
        Ok(match self {
            DiskCommand::Add(args) => {
                let given = given.subcommand_matches("add").unwrap_or(given);
                let config = added(&args, given)?;
                args.one.asks(Ask::Add(Box::new(config)))
            }
            DiskCommand::Set(args) => {
                if args.change == Change::default() {
                    return Err(Failure::input(
                        "nothing to set: give the options that are to change, such as --completion poll",
                    ));
                }
                let SetArgs { one, change } = *args;
                one.asks(Ask::Set(Box::new(change)))
            }
            DiskCommand::List(node) => node.asks(DiskChoice::Any, Ask::List),
            DiskCommand::Events(node) => node.asks(DiskChoice::Any, Ask::Events),
            DiskCommand::Show(args) => args.asks(Ask::Show),
            DiskCommand::Resize(args) => post(args, Operation::ResizeDisk),
            DiskCommand::Start(args) => post(args, Operation::StartDisk),
            DiskCommand::Resume(args) => {
                let body = match (args.quiet, args.held || args.all) {
                    (Some(name), _) => json!({ "quiet": name }),
                    (None, true) => json!({ "held": true }),
                    (None, false) => Value::Null,
                };
                let ask = Ask::Order(Operation::ResumeDisk, body);
                match args.all {
                    true => args.one.node.asks(DiskChoice::Served, ask),
                    false => args.one.asks(ask),
                }
            }
            DiskCommand::Fail(args) => args.asks(Ask::Order(Operation::FailDisk, Value::Null)),
            DiskCommand::Flush(args) => post(args, Operation::FlushDisk),
            DiskCommand::Quiesce(args) => {
                let body = json!({ "seconds": args.seconds });
                args.one.asks(Ask::Order(Operation::QuiesceDisk, body))
            }
            DiskCommand::Snapshot(args) => {
                let to = std::path::absolute(&args.to).unwrap_or(args.to);
                let Some(to) = to.to_str() else {
                    return Err(Failure::input(format!(
                        "{} is not valid UTF-8: give the copy another name",
                        to.display()
                    )));
                };
                let body = json!({ "to": to });
                args.one.asks(Ask::Order(Operation::SnapshotDisk, body))
            }
            DiskCommand::Remove(args) => {
                let mode = match args.mode {
                    Mode::Safe => "safe",
                    Mode::Drain => "drain",
                    Mode::Hard => "hard",
                };
                args.one.asks(Ask::Remove(mode))
            }
        })
    }
}

/// Returns the refusal of an option after `cleave disk set` that only `cleave disk add` has.
pub(super) fn fixed(
    line: &[OsString],
    error: &clap::Error,
    all: &clap::Command,
) -> Option<Failure> {
    let is_set = line.get(1)? == "disk" && line.get(2)? == "set";
    let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let option = given.strip_prefix("--")?;
    let option = option.split('=').next().unwrap_or(option);
    let mut added = all
        .find_subcommand("disk")?
        .find_subcommand("add")?
        .get_arguments();
    let is_known = is_set && added.any(|argument| argument.get_long() == Some(option));
    is_known.then(|| {
        Failure::input(format!(
            "--{option} cannot be changed while the disk is served: remove the disk, and add it again with the new value"
        ))
    })
}

impl RemoteArgs {
    fn asks(self, disks: DiskChoice, ask: Ask) -> Remote {
        Remote {
            socket: self.control,
            json: self.json,
            disks,
            ask,
        }
    }
}

impl OneArgs {
    fn asks(self, ask: Ask) -> Remote {
        self.node.asks(DiskChoice::Named(self.id), ask)
    }
}

impl DiskArgs {
    fn asks(self, ask: Ask) -> Remote {
        let disks = self.id.map_or(DiskChoice::Only, DiskChoice::Named);
        self.node.asks(disks, ask)
    }
}

/// The description of the disk that is to be added: the options that stand on the command line.
fn added(args: &AddArgs, given: &ArgMatches) -> Result<DiskConfig, Failure> {
    let mut config = with_options(DiskConfig::default(), given)?;
    if let Some(group) = &args.limit_group {
        let values = config.limits.get().values;
        let group = Some(group.clone());
        config.limits = DiskLimits { group, values }.into();
    }
    // The node works in another folder.
    config.disk = config.disk.into_iter().map(absolute_spec).collect();
    config.profile = config.profile.map(absolute);
    Ok(config)
}

fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

/// A spec with whole paths, as it was written if they are.
fn absolute_spec(disk: WrittenSpec) -> WrittenSpec {
    let whole = match disk.spec().clone() {
        DiskSpec::Path(path) => DiskSpec::Path(absolute(path)),
        DiskSpec::Raw(path) => DiskSpec::Raw(absolute(path)),
        DiskSpec::Nbd(mut nbd) => {
            if let Address::Unix(path) = nbd.address {
                nbd.address = Address::Unix(absolute(path));
            }
            DiskSpec::Nbd(nbd)
        }
        DiskSpec::Rbd(mut rbd) => {
            rbd.place.conf = rbd.place.conf.map(absolute);
            DiskSpec::Rbd(rbd)
        }
        whole => whole,
    };
    match whole == *disk.spec() {
        true => disk,
        false => whole.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn remote(line: &str) -> Result<Remote, Failure> {
        let line = line.split_whitespace().map(Into::into);
        match super::super::parse(line)? {
            super::super::Action::Disk(remote) => Ok(remote),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn options_become_the_fields_of_their_names() {
        let line = "cleave disk add d1 --disk /a.img --queues 4 --serial 5 --on-error write=hold --split 64K \
                    --limit iops-total=5000,bps-write=1M --limit-group g --persistent false --read-only --control /c";
        let added = remote(line).unwrap();
        assert_eq!(
            (added.socket.as_path(), added.json),
            (Path::new("/c"), false)
        );
        let expected = json!({
            "disk": ["/a.img"], "queues": 4, "serial": "5", "on_error": {"write": "hold"}, "split": "64K",
            "limits": {"iops-total": 5000, "bps-write": 1 << 20, "group": "g"},
            "persistent": false, "read_only": true,
        });
        match added.ask {
            Ask::Add(disk) => assert_eq!(json!(disk), expected),
            other => panic!("{other:?}"),
        }
        assert_eq!(added.disks, DiskChoice::Named("d1".to_owned()));
        let bare = remote("cleave disk add d1 --disk ram:1M").unwrap();
        assert!(matches!(bare.ask, Ask::Add(disk) if json!(disk) == json!({"disk": ["ram:1M"]})));
        let set = remote("cleave disk set d1 --limit iops-total=0").unwrap();
        assert!(matches!(set.ask, Ask::Set(change)
            if json!(change) == json!({"limits": {"iops-total": 0}})));
        // Each has to be named to be taken away.
        let set = remote("cleave disk set d1 --limit none").unwrap();
        assert!(matches!(set.ask, Ask::Set(change)
            if json!(change)["limits"]["bps-read-max-length"] == 0 && json!(change)["limits"]["iops-size"] == 0));
    }

    #[test]
    fn a_command_is_about_the_disk_that_is_named_or_the_only_one_or_all() {
        let disks = |line: &str| remote(&format!("cleave disk {line}")).unwrap().disks;
        for line in [
            "show",
            "set --split off",
            "resize",
            "start",
            "resume",
            "flush",
            "quiesce",
        ] {
            assert_eq!(disks(line), DiskChoice::Only, "{line}");
        }
        assert_eq!(disks("resume d1"), DiskChoice::Named("d1".to_owned()));
        assert_eq!(disks("list"), DiskChoice::Any);
        let all = remote("cleave disk resume --all --control /c").unwrap();
        assert_eq!(all.disks, DiskChoice::Served);
        let held = Ask::Order(Operation::ResumeDisk, json!({"held": true}));
        assert_eq!((all.ask, all.socket), (held, "/c".into()));
        for line in [
            "fail",
            "snapshot /c",
            "remove",
            "resume d1 --all",
            "resume --all --quiet q",
        ] {
            assert!(remote(&format!("cleave disk {line}")).is_err(), "{line}");
        }
    }

    #[test]
    fn a_copy_whose_name_is_not_text_is_refused() {
        use std::ffi::OsString;
        use std::os::unix::ffi::OsStringExt as _;
        let line = ["cleave", "disk", "snapshot", "d1"].map(OsString::from);
        let name = OsString::from_vec(b"/a\xff".to_vec());
        let refused = super::super::parse(line.into_iter().chain([name]));
        assert!(refused.unwrap_err().to_string().contains("not valid UTF-8"));
    }

    #[test]
    fn a_path_is_made_whole() {
        let here = std::env::current_dir().unwrap();
        let here = here.display();
        let absolute = |text: &str| absolute_spec(text.parse().unwrap()).to_string();
        assert_eq!(absolute("a.img"), format!("{here}/a.img"));
        assert_eq!(absolute("raw:a"), format!("raw:{here}/a"));
        assert_eq!(
            absolute("nbd+unix:///a?socket=b&timeout=5"),
            format!("nbd+unix:///a?socket={here}/b&timeout=5")
        );
        assert_eq!(absolute("rbd:p/i,conf=b"), format!("rbd:p/i,conf={here}/b"));
        for whole in [
            "ram:1M",
            "nbd://h/a",
            "nbd+unix:///?socket=/b",
            "rbd:p/i",
            "rbd:p/i,conf=/b",
        ] {
            assert_eq!(absolute(whole), whole);
        }
    }

    #[test]
    fn bad_lines_are_named() {
        for (line, part) in [
            ("cleave disk", "add"),
            ("cleave disk add d1", "--disk"),
            ("cleave disk add --disk ram:1M", "<ID>"),
            ("cleave disk add d1 --disk ram:x", "--disk"),
            (
                "cleave disk add d1 --disk ram:1M --socket-path /s",
                "--socket-path",
            ),
            ("cleave disk add d1 --disk ram:1M --queues 0", "--queues"),
            ("cleave disk set d1", "nothing to set"),
            ("cleave disk quiesce d1 --for 61", "1..=60"),
            ("cleave disk remove d1 --mode kind", "safe, drain, hard"),
        ] {
            let told = remote(line).unwrap_err().to_string();
            assert!(
                told.contains(part) && !told.contains('\n'),
                "{line}: {told}"
            );
        }
    }
}
