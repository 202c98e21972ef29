//! The command line. The options of a disk are those of its description, in the crate `config`; all others are defined here once.
//! `--help`, the parser and `docs/options.md` derive from these definitions.

mod demo;
mod disk;
mod doctor;
mod metrics;
mod node;
mod probe;
mod serve;
mod stripe;
mod upgrade;
mod view;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{ArgMatches, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use cleave_config::{DiskConfig, WrittenSpec};
use cleave_disk::DiskSpec;
use cleave_host::{Failure, NodeSettings, ServeSettings};

use crate::commands::demo::Demo;
use crate::commands::detach::Detached;
use crate::commands::doctor::Doctor;
use crate::commands::probe::Probe;
use crate::commands::remote::Remote;
use crate::commands::stripe::StripeAction;
use crate::commands::upgrade::Upgrade;
use crate::commands::view::{Stats, Top};
use crate::options_doc;
use serve::{EndpointArgs, ServeArgs, ServeOptions};

/// The action that the command line asks for.
#[derive(Debug)]
pub(crate) enum Action {
    /// Write this to stdout.
    Print(String),
    /// Write the OpenAPI document of a node to stdout.
    OpenApi,
    /// Write man pages and shell completions to this folder.
    Pages(PathBuf),
    /// Serve a disk.
    Serve(Box<ServeSettings>),
    /// Serve many disks.
    Node(NodeSettings),
    /// Have another process do it.
    Detach(Detached),
    /// Ask a control socket about its disks.
    Disk(Remote),
    /// Measure a disk.
    Probe(Probe),
    /// Show what it can do.
    Demo(Demo),
    /// Check the host.
    Doctor(Doctor),
    /// Create or show a stripe.
    Stripe(StripeAction),
    /// Show the activity of disks until the operator quits.
    Top(Top),
    /// Show it once.
    Stats(Stats),
    /// Restart daemons under the installed program.
    Upgrade(Upgrade),
}

/// Answer to `--print-capabilities` (vhost-user "Backend program conventions").
const CAPABILITIES: &str = "{\"type\": \"block\", \"features\": [\"read-only\", \"blk-file\"]}\n";

const EXAMPLES: &str = "\
Examples:
  See it work; nothing else is needed:
      cleave demo
  Would splitting large requests pay on this disk?
      cleave probe /dev/nvme0n1
  Serve an image to a guest:
      cleave serve --socket-path /run/cleave/a.sock --disk /var/lib/images/a.img
  As a program that follows the conventions of vhost-user back-ends is started:
      cleave --socket-path /run/cleave/a.sock --blk-file /var/lib/images/a.img

Exit codes: 0 ended as asked, 1 failed while running or something that may pass, such as a server that does not answer, 2 bad input,
3 (--take-over) the running process cannot hand over and goes on.";

/// Serves virtual disks to virtual machines over vhost-user
///
/// Cleave runs beside QEMU or any other VMM that speaks vhost-user, maps the guest's virtqueues, and
/// serves a virtual disk from a file, a block device, memory, several of these as one stripe, an NBD
/// server or a Ceph cluster.
#[derive(Debug, Parser)]
#[command(name = "cleave", version, after_long_help = EXAMPLES, arg_required_else_help = true)]
#[command(override_usage = "cleave <COMMAND>
       cleave (--socket-path <PATH> | --fd <N>) --blk-file <FILE> [--read-only]")]
#[command(args_conflicts_with_subcommands = true)]
#[command(max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    program: BackendProgram,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a disk on a socket
    ///
    /// Serves a disk to one guest at a time. On a listening socket VMMs may come and go any number of times. A second one may
    /// connect, and is served when the first has stopped.
    #[command(after_long_help = serve::EXAMPLES, override_usage =
        "cleave serve (--socket-path <PATH> | --fd <N>) --disk <SPEC> [OPTIONS]")]
    Serve(Box<ServeArgs>),
    /// Serve many disks, added and removed over HTTP while it runs
    ///
    /// Each disk has a socket of its own, RUN/ID/disk.sock, and workers of its own. Disks are kept in files of the folder
    /// --state and come back when the node starts again.
    #[command(after_long_help = node::EXAMPLES)]
    Node(node::NodeArgs),
    /// Show, change and control the disks of a node or of `cleave serve`; add and remove those of a node
    ///
    /// Talks to `cleave node` or `cleave serve` on its control socket. Options of a disk are those of `cleave serve`.
    /// Most commands go without ID if the socket has one disk only, as that of `cleave serve` has. What cannot be
    /// undone wants the ID: add, fail, snapshot and remove. The disk of `cleave serve` has its serial as ID, or else
    /// the last part of its name.
    #[command(subcommand, after_long_help = disk::EXAMPLES, disable_help_subcommand = true,
              arg_required_else_help = false)]
    Disk(disk::DiskCommand),
    /// Measure whether splitting pays on a disk, and how it is best done
    ///
    /// Reads the disk at random with 512 bytes to 4 MiB outstanding, first in one request and then in more and smaller
    /// ones. Prints the throughput as a table, and what follows from it. Nothing is written to the disk unless you ask
    /// for it.
    #[command(after_long_help = probe::EXAMPLES)]
    Probe(probe::ProbeArgs),
    /// Show what disks do, live
    ///
    /// A line for each disk: requests and bytes a second, how long requests took, how workers wait, and what that
    /// costs. If the output is not a terminal, each update is a block of lines. CPU% is the time of the disk's own workers.
    /// After the mode, * marks a disk with limits, and ! one at which requests waited for them since the last update.
    #[command(after_long_help = view::TOP_EXAMPLES)]
    Top(view::TopArgs),
    /// Show what disks have done, once
    #[command(after_long_help = view::STATS_EXAMPLES)]
    Stats(view::StatsArgs),
    /// Restart the daemons under the installed program, and say what each guest noticed
    ///
    /// Asks each daemon whose program is not the installed one, which is the one that runs this command, what it would hand
    /// over, has systemd reload its unit, or restart it if the daemon cannot hand over, and says for each disk how long its guest
    /// paused. A daemon that is not in a unit is left alone, and so is one that nothing would be handed over from: the lines say
    /// what to do. Needs root.
    #[command(after_long_help = upgrade::EXAMPLES)]
    Upgrade(upgrade::UpgradeArgs),
    /// See it work on this machine; nothing else is needed
    ///
    /// Makes an image in a temporary folder, serves it on a socket, fills and verifies it through the
    /// built-in client, measures, prints a table and the QEMU command line that attaches a guest, and
    /// keeps serving until Ctrl-C. Everything is removed at the end.
    Demo(demo::DemoArgs),
    /// Check this host, a socket and an image, and say how to repair what is wrong
    ///
    /// Prints a line for each finding: OK, warning or problem, and the remedy. Nothing is changed. A disk is opened
    /// read-only for a moment, to see whether its locks are held.
    #[command(after_long_help = doctor::EXAMPLES)]
    Doctor(doctor::DoctorArgs),
    /// Create and show stripes: several files, block devices or images of a Ceph cluster as one disk
    // No help where nothing follows, so that what is missing is named as in every other command.
    #[command(subcommand, after_long_help = stripe::EXAMPLES, disable_help_subcommand = true,
              arg_required_else_help = false)]
    Stripe(stripe::StripeCommand),
}

/// Without a subcommand: the conventions of vhost-user back-end programs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Conventions of vhost-user back-end programs")]
struct BackendProgram {
    #[command(flatten)]
    endpoint: EndpointArgs,
    /// Serve the disk read-only; other read-only servers may share it
    #[arg(long)]
    read_only: bool,
    /// File or block device to serve
    #[arg(long, value_name = "FILE")]
    blk_file: Option<PathBuf>,
    // Found before parsing; defined here for the help.
    /// Print what this program can do, as JSON, and exit
    ///
    /// Other options are ignored.
    #[arg(long)]
    print_capabilities: bool,
    /// Print all options as Markdown and exit
    #[arg(long, hide = true)]
    help_markdown: bool,
    /// Write the man pages and the shell completions to this folder and exit
    #[arg(long, value_name = "DIR", hide = true)]
    write_pages: Option<PathBuf>,
}

/// Parses a command line, program name first.
pub(crate) fn parse(line: impl IntoIterator<Item = OsString>) -> Result<Action, Failure> {
    let line: Vec<OsString> = line.into_iter().collect();
    // "Other options and arguments should be ignored", even those that we do not know.
    if line.iter().any(|word| word == "--print-capabilities") {
        return Ok(Action::Print(CAPABILITIES.to_owned()));
    }
    let (cli, matches) = match read(&line) {
        Ok(parsed) => parsed,
        Err(error) => {
            return disk::fixed(&line, &error, &definition()).map_or_else(|| refused(&error), Err);
        }
    };
    match cli.command {
        Some(Command::Serve(args)) => {
            let given = matches.subcommand_matches("serve");
            let settings = args.serve(given.unwrap_or(&matches))?;
            Ok(match (args.options.detach, &settings.control) {
                (true, Some(control)) => Action::Detach(Detached::new(&line, &control.path)),
                _ => Action::Serve(Box::new(settings)),
            })
        }
        Some(Command::Node(args)) if args.openapi => Ok(Action::OpenApi),
        Some(Command::Node(args)) => {
            let detach = args.detach;
            let settings = NodeSettings::from(args);
            Ok(match detach {
                true => Action::Detach(Detached::new(&line, &settings.control.path)),
                false => Action::Node(settings),
            })
        }
        Some(Command::Disk(command)) => {
            let given = matches.subcommand_matches("disk");
            Ok(Action::Disk(command.remote(given.unwrap_or(&matches))?))
        }
        Some(Command::Probe(args)) => Ok(Action::Probe(args.try_into()?)),
        Some(Command::Demo(args)) => Ok(Action::Demo(args.into())),
        Some(Command::Top(args)) => Ok(Action::Top(args.into())),
        Some(Command::Stats(args)) => Ok(Action::Stats(args.into())),
        Some(Command::Upgrade(args)) => Ok(Action::Upgrade(args.into())),
        Some(Command::Doctor(args)) => Ok(Action::Doctor(args.into())),
        Some(Command::Stripe(command)) => Ok(Action::Stripe(command.into())),
        None if cli.program.help_markdown => Ok(Action::Print(markdown())),
        None if cli.program.write_pages.is_some() => {
            Ok(Action::Pages(cli.program.write_pages.unwrap_or_default()))
        }
        None if cli.program.blk_file.is_none() => {
            Err(Failure::input("no disk: give --blk-file FILE"))
        }
        None => Ok(Action::Serve(Box::new(cli.program.serve()?))),
    }
}

fn read(line: &[OsString]) -> Result<(Cli, ArgMatches), clap::Error> {
    let matches = Cli::command().try_get_matches_from(line)?;
    Ok((Cli::from_arg_matches(&matches)?, matches))
}

/// `docs/options.md`, from the definitions above.
fn markdown() -> String {
    options_doc::markdown(definition())
}

/// The definitions themselves.
pub(crate) fn definition() -> clap::Command {
    Cli::command()
}

/// Help is an answer; all else becomes one line.
fn refused(error: &clap::Error) -> Result<Action, Failure> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            Ok(Action::Print(error.render().to_string()))
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Err(Failure::input(
            "nothing to do: try `cleave demo`, `cleave serve`, `cleave probe` or `cleave --help`",
        )),
        _ => Err(Failure::input(one_line(&error.render().to_string()))),
    }
}

/// The end of a line about bad options.
pub(crate) const HELP_HINT: &str = " (see --help)";

/// The first paragraphs of a rendered clap error, joined, without its usage.
fn one_line(rendered: &str) -> String {
    let lines: Vec<&str> = rendered
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect();
    let line = lines.join(" ").replace(" tip: ", "; ");
    // The standard library's words for a number that does not parse do not say what to write.
    let line = line.replace(
        "invalid digit found in string",
        "write a whole number, without sign or unit",
    );
    format!(
        "{}{HELP_HINT}",
        line.strip_prefix("error: ").unwrap_or(&line)
    )
}

impl BackendProgram {
    /// A `cleave serve` with all defaults, which come from its own definitions.
    fn serve(self) -> Result<ServeSettings, Failure> {
        // Always a path, whatever it looks like: the convention knows nothing else.
        let disk = self.blk_file.into_iter().map(DiskSpec::Path);
        let config = DiskConfig {
            disk: disk.map(WrittenSpec::from).collect(),
            read_only: self.read_only,
            ..DiskConfig::default()
        };
        serve::serve(&self.endpoint, config, &ServeOptions::default())
    }
}

#[cfg(test)]
mod tests;
