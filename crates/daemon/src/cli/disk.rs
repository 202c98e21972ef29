//! `cleave disk` on the command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Args, Id, Subcommand, ValueEnum};
use cleave_disk::nbd::Address;
use cleave_disk::{DiskSpec, parse_size};
use cleave_worker::Limits;
use serde_json::{Map, Value, json};

use super::serve::{AccessArgs, DiskOptions, LiveOptions, StripeArgs};
use crate::failure::Failure;
use crate::node::spec::{DiskFile, by_kind};
use crate::remote::{Ask, Remote};

pub(super) const EXAMPLES: &str = "\
Examples:
  Add an image, with a limit, and see it:
      cleave disk add d1 --disk /var/lib/images/a.img --serial a --limit iops-total=5000
      cleave disk list
      cleave disk show d1
  Another limit while a guest uses it:
      cleave disk set d1 --limit iops-total=0,bps-total=100M
  A moment of rest for a snapshot by other means:
      cleave disk quiesce d1 --for 30 && if lvcreate -s -n s vg0/a
          then cleave disk resume d1 || lvremove -y vg0/s; else cleave disk resume d1; fi
  The guest is gone:
      cleave disk remove d1

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
    List(NodeArgs),
    /// Show a disk: its state, its options and what it has done
    Show(OneArgs),
    /// Change how a disk is served, while it is; the change is kept
    ///
    /// An option that is left out stays as it is.
    Set(Box<SetArgs>),
    /// Check the size of a disk, and report growth to the guest
    Resize(OneArgs),
    /// Try a failed disk again at once
    Start(OneArgs),
    /// Retry the requests that are held because the disk failed them, and end its quiet
    ///
    /// Exits with 1 if the disk was not quiet any more: its time was over, or another command ended it. A copy made since then may be
    /// torn.
    Resume(ResumeArgs),
    /// End the requests that are held because the disk failed them: the guest gets I/O errors
    Fail(OneArgs),
    /// Make everything durable that was written
    Flush(OneArgs),
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
    /// Print what happens to the disks, a line each, until Ctrl-C
    Events(NodeArgs),
}

/// The node that is asked, and how its answer is printed.
#[derive(Debug, Clone, Args)]
pub(super) struct NodeArgs {
    /// The control socket of the node
    #[arg(long, value_name = "PATH", default_value = NODE_CONTROL)]
    control: PathBuf,
    /// Print the answer as the node sends it, as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Args)]
pub(super) struct OneArgs {
    /// Name of the disk in the node
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    node: NodeArgs,
}

#[derive(Debug, Clone, Args)]
pub(super) struct AddArgs {
    #[command(flatten)]
    one: OneArgs,
    /// The disk, as for `cleave serve`; with --stripe once for each leg
    #[arg(long, value_name = "SPEC", action = ArgAction::Append, required = true)]
    disk: Vec<DiskSpec>,
    #[command(flatten)]
    stripe: StripeArgs,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    options: DiskOptions,
    /// The group of disks with which it shares its limits
    #[arg(long, value_name = "NAME")]
    limit_group: Option<String>,
    /// The pool of the node whose threads serve it [default: threads of its own]
    #[arg(long, value_name = "NAME")]
    pool: Option<String>,
    /// Permissions of its socket, in octal [default: 0660]
    #[arg(long, value_name = "MODE")]
    socket_mode: Option<String>,
    /// Group of its socket, by name or number [default: the node's]
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Whether it comes back when the node starts again
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    persistent: bool,
}

// The defaults of `cleave disk add` would read as what an option that is left out becomes.
#[derive(Debug, Clone, Args)]
#[command(mut_args(|arg| match arg.get_id().as_str() {
    "control" | "json" => arg,
    _ => arg.hide_default_value(true),
}))]
pub(super) struct SetArgs {
    #[command(flatten)]
    one: OneArgs,
    #[command(flatten)]
    options: LiveOptions,
}

#[derive(Debug, Clone, Args)]
pub(super) struct QuiesceArgs {
    #[command(flatten)]
    one: OneArgs,
    /// Longest quiet, in seconds: 1 to 60
    #[arg(long = "for", value_name = "SECONDS", default_value_t = 10,
          value_parser = clap::value_parser!(u32).range(1..=60))]
    seconds: u32,
}

#[derive(Debug, Clone, Args)]
pub(super) struct ResumeArgs {
    #[command(flatten)]
    one: OneArgs,
    /// End only the quiet that `cleave disk quiesce` named so, and leave held requests alone
    #[arg(long, value_name = "NAME", conflicts_with = "held")]
    quiet: Option<String>,
    /// Retry only the held requests, and leave a quiet alone
    #[arg(long)]
    held: bool,
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
    /// How a connected frontend is treated
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
    /// The request to the node. `given` has the words that follow `cleave disk`.
    pub(super) fn remote(self, given: &ArgMatches) -> Result<Remote, Failure> {
        let options = |what| fields(given.subcommand_matches(what), what == "set");
        let post = |args: OneArgs, what| asked(args, |id| Ask::Order(id, what, Value::Null));
        Ok(match self {
            DiskCommand::Add(args) => {
                let fields = options("add");
                asked(args.one, |id| Ask::Add(id, fields))
            }
            DiskCommand::Set(args) => {
                let fields = options("set");
                if fields.is_empty() {
                    return Err(Failure::input(
                        "nothing to set: give the options that are to change, such as --completion poll",
                    ));
                }
                asked(args.one, |id| Ask::Set(id, fields))
            }
            DiskCommand::List(node) => remote(node, Ask::List),
            DiskCommand::Events(node) => remote(node, Ask::Events),
            DiskCommand::Show(args) => asked(args, Ask::Show),
            DiskCommand::Resize(args) => post(args, "resize"),
            DiskCommand::Start(args) => post(args, "start"),
            DiskCommand::Resume(args) => {
                let body = match (args.quiet, args.held) {
                    (Some(name), _) => json!({ "quiet": name }),
                    (None, true) => json!({ "held": true }),
                    (None, false) => Value::Null,
                };
                asked(args.one, |id| Ask::Order(id, "resume", body))
            }
            DiskCommand::Fail(args) => post(args, "fail"),
            DiskCommand::Flush(args) => post(args, "flush"),
            DiskCommand::Quiesce(args) => {
                let body = json!({ "seconds": args.seconds });
                asked(args.one, |id| Ask::Order(id, "quiesce", body))
            }
            DiskCommand::Snapshot(args) => {
                let to = std::path::absolute(&args.to).unwrap_or(args.to);
                let Some(to) = to.to_str() else {
                    return Err(Failure::input(format!(
                        "{} is no text in UTF-8: give the copy another name",
                        to.display()
                    )));
                };
                asked(args.one, |id| {
                    Ask::Order(id, "snapshot", json!({ "to": to }))
                })
            }
            DiskCommand::Remove(args) => {
                let mode = match args.mode {
                    Mode::Safe => "safe",
                    Mode::Drain => "drain",
                    Mode::Hard => "hard",
                };
                asked(args.one, |id| Ask::Remove(id, mode))
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

fn asked(args: OneArgs, ask: impl FnOnce(String) -> Ask) -> Remote {
    remote(args.node, ask(args.id))
}

fn remote(node: NodeArgs, ask: Ask) -> Remote {
    Remote {
        socket: node.control,
        json: node.json,
        ask,
    }
}

/// The options that stand on the command line, as the fields of a disk or of a change. The parser has judged their values.
fn fields(given: Option<&ArgMatches>, is_change: bool) -> Map<String, Value> {
    let (mut fields, mut limits) = (Map::new(), Map::new());
    let given = given.into_iter();
    for (name, words) in given.flat_map(|given| given.ids().filter_map(|id| words(given, id))) {
        let text = words.last().cloned().unwrap_or_default();
        let value = match name {
            "id" | "control" | "json" => continue,
            "limit_group" => {
                limits.insert("group".to_owned(), json!(text));
                continue;
            }
            // A change leaves the limits that it does not name as they are.
            "limit" if text == "none" && is_change => {
                limits.extend(Limits::names().map(|name| (name, json!(0))));
                continue;
            }
            "limit" => {
                limits.extend(text.split(',').filter_map(limit));
                continue;
            }
            "disk" => words.iter().map(|word| absolute(word)).collect(),
            "profile" => json!(absolute(&text)),
            "on_error" => by_kind(&text),
            _ => value(name, text),
        };
        fields.insert(name.to_owned(), value);
    }
    if !limits.is_empty() {
        fields.insert("limits".to_owned(), Value::Object(limits));
    }
    fields
}

/// An option and its values, if it stands on the command line. Groups of options have IDs too: the names of their types.
fn words<'a>(given: &'a ArgMatches, id: &'a Id) -> Option<(&'a str, Vec<String>)> {
    let is_option = !id.as_str().starts_with(char::is_uppercase);
    let is_given = is_option && given.value_source(id.as_str()) == Some(ValueSource::CommandLine);
    let words = given.try_get_raw(id.as_str()).ok()??;
    let words = words.map(|word| word.to_string_lossy().into_owned());
    is_given.then(|| (id.as_str(), words.collect()))
}

/// `iops-total=5000`.
fn limit(text: &str) -> Option<(String, Value)> {
    let (name, value) = text.split_once('=')?;
    Some((name.to_owned(), json!(parse_size(value).ok()?)))
}

/// A disk as the node finds it, which works in another folder.
fn absolute(text: &str) -> String {
    let whole = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    match text.parse() {
        Ok(DiskSpec::Path(path)) => whole(&path).display().to_string(),
        Ok(DiskSpec::Raw(path)) => format!("raw:{}", whole(&path).display()),
        Ok(DiskSpec::Nbd(mut nbd)) => match &nbd.address {
            Address::Unix(path) if path.is_relative() => {
                nbd.address = Address::Unix(whole(path));
                nbd.to_string()
            }
            _ => text.to_owned(),
        },
        Ok(DiskSpec::Rbd(mut rbd)) => match &rbd.place.conf {
            Some(conf) if conf.is_relative() => {
                rbd.place.conf = Some(whole(conf));
                rbd.to_string()
            }
            _ => text.to_owned(),
        },
        _ => text.to_owned(),
    }
}

/// A number or a truth where the field takes one, else a text.
fn value(name: &str, text: String) -> Value {
    let is_taken = |value: &Value| {
        let alone = Map::from_iter([(name.to_owned(), value.clone())]);
        serde_json::from_value::<DiskFile>(Value::Object(alone)).is_ok()
    };
    let number = text.parse::<u32>().ok().map(Value::from).filter(is_taken);
    let truth = || text.parse::<bool>().ok().map(Value::from).filter(is_taken);
    number.or_else(truth).unwrap_or(Value::String(text))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::control::patch;

    fn remote(line: &str) -> Result<Remote, Failure> {
        let line = line.split_whitespace().map(Into::into);
        match super::super::parse(line)? {
            super::super::Action::Disk(remote) => Ok(remote),
            other => panic!("{other:?}"),
        }
    }

    /// An option without a field would be accepted and have no effect.
    #[test]
    fn every_option_is_a_field_of_the_disk() {
        let mut cli = super::super::Cli::command();
        cli.build();
        let disk = cli.find_subcommand("disk").unwrap();
        for what in ["add", "set"] {
            let command = disk.find_subcommand(what).unwrap();
            for arg in command.get_arguments() {
                let id = arg.get_id().as_str();
                let field = match id {
                    "id" | "control" | "json" | "help" => continue,
                    "limit" | "limit_group" => "limits",
                    id => id,
                };
                let is_change = patch::FIELDS.contains(&field);
                assert!(is_change || what == "add", "--{id} cannot be set");
                let body = format!("{{\"{field}\": null, \"disk\": []}}");
                let body = body.replace("{\"disk\": null, ", "{");
                DiskFile::from_json(body.as_bytes()).unwrap();
            }
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
            Ask::Add(id, fields) => assert_eq!((&*id, Value::Object(fields)), ("d1", expected)),
            other => panic!("{other:?}"),
        }
        let bare = remote("cleave disk add d1 --disk ram:1M").unwrap();
        assert!(
            matches!(bare.ask, Ask::Add(_, fields) if Value::Object(fields.clone()) == json!({"disk": ["ram:1M"]}))
        );
        let set = remote("cleave disk set d1 --limit iops-total=0").unwrap();
        assert!(matches!(set.ask, Ask::Set(_, fields)
            if Value::Object(fields.clone()) == json!({"limits": {"iops-total": 0}})));
        // Each has to be named to be taken away.
        let set = remote("cleave disk set d1 --limit none").unwrap();
        assert!(matches!(set.ask, Ask::Set(_, fields)
            if fields["limits"]["bps-read-max-length"] == 0 && fields["limits"]["iops-size"] == 0));
    }

    #[test]
    fn a_copy_whose_name_is_no_text_is_refused() {
        use std::ffi::OsString;
        use std::os::unix::ffi::OsStringExt as _;
        let line = ["cleave", "disk", "snapshot", "d1"].map(OsString::from);
        let name = OsString::from_vec(b"/a\xff".to_vec());
        let refused = super::super::parse(line.into_iter().chain([name]));
        assert!(refused.unwrap_err().to_string().contains("no text"));
    }

    #[test]
    fn a_path_is_made_whole() {
        let here = std::env::current_dir().unwrap();
        let here = here.display();
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
