//! `cleave serve` on the command line. The options of the disk itself are those of its description.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use clap::{ArgMatches, Args, FromArgMatches as _, Parser};
use cleave_config::{CompletionOption, DiskConfig, FILE_BYTES_MAX, Names, Switch, given_only};
use cleave_host::{Endpoint, Failure, ServeSettings, SocketSettings};
use tracing::level_filters::LevelFilter;

use super::metrics::MetricsOptions;

pub(super) const EXAMPLES: &str = "\
Examples:
  An image, to one guest after the other:
      cleave serve --socket-path /run/cleave/a.sock --disk /var/lib/images/a.img
  A block device, every completed write durable, workers on CPUs 2 and 3:
      cleave serve --socket-path /run/cleave/b.sock --disk /dev/vg0/b \\
          --cache writethrough --cpus 2-3
  Lowest latency, at the price of busy CPUs:
      cleave serve --socket-path /run/cleave/c.sock --disk /dev/nvme0n1 --completion poll
  4 GiB of memory as a disk, for the life of one guest:
      cleave serve --socket-path /run/cleave/d.sock --disk ram:4G --once
  Two devices as one disk, made by `cleave stripe create --chunk 64K`:
      cleave serve --socket-path /run/cleave/e.sock --stripe 64K \\
          --disk /dev/nvme1n1 --disk /dev/nvme2n1
  With a control socket, and what the disk does:
      cleave serve --socket-path /run/cleave/a.sock --disk /var/lib/images/a.img \\
          --control /run/cleave/a.ctl
      cleave top --control /run/cleave/a.ctl
  A drive that is only modelled, to see what it gains from being asked in parallel:
      cleave serve --socket-path /run/cleave/f.sock --disk model:p3700,size=4G

Signals: TERM and INT finish the requests in flight and exit 0. If the disk hangs, they exit 1
after --stop-deadline and report what became of its requests.
HUP checks the size of the disk and reports growth to the guest.";

/// The socket of the frontends.
#[derive(Debug, Clone, Args)]
#[group(multiple = false)]
pub(crate) struct EndpointArgs {
    /// Make a socket for VMMs here and listen on it
    ///
    /// A stale socket file is replaced; one on which a program listens is not. The file is removed when cleave ends.
    #[arg(long, value_name = "PATH")]
    socket_path: Option<PathBuf>,
    /// Use this inherited socket, listening or already connected
    #[arg(long, value_name = "N")]
    fd: Option<u32>,
}

/// `cleave serve`.
#[derive(Debug, Clone, Args)]
#[command(mut_args(hide_node_field))]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    endpoint: EndpointArgs,
    /// Read the disk and its options from this file, TOML in the form in which `cleave node` keeps a disk
    ///
    /// Each field is the option of its name, with _ for -: see docs/disk-file.md. A field of the file cannot be given as
    /// an option too.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    disk: DiskConfig,
    #[command(flatten)]
    pub(super) options: ServeOptions,
}

/// An option for the disks of a node is refused with its reason, and not shown.
fn hide_node_field(arg: clap::Arg) -> clap::Arg {
    match DiskConfig::NODE_FIELDS.contains(&arg.get_id().as_str()) {
        true => arg.hide(true),
        false => arg,
    }
}

/// Options of `cleave serve` that all have a default.
#[derive(Debug, Clone, Args)]
pub(crate) struct ServeOptions {
    /// Make a control socket here, which shows the disk and changes its settings over HTTP
    ///
    /// `cleave top` and `cleave stats` read it, and so does curl --unix-socket. The metrics for Prometheus are under
    /// /metrics. Only the user that runs cleave may use the socket (mode 0600). A stale one is replaced; the file is
    /// removed when cleave ends. Of several the last one counts, so that the options of a unit can name another.
    #[arg(long, value_name = "PATH", overrides_with = "control")]
    control: Option<PathBuf>,
    /// Group that may use the control socket too (mode 0660): a name or a number
    #[arg(long, value_name = "GROUP", requires = "control")]
    control_group: Option<String>,
    #[command(flatten)]
    metrics: MetricsOptions,
    /// Give up what the daemon does not need, once its disk and its sockets are open
    ///
    /// on: no capabilities; no file can be opened and no program started; connections are made to an NBD server or a Ceph cluster
    /// only; each thread may make only the system calls of its task. The log names what the kernel lacks for it. off: nothing is
    /// given up, which is for finding faults. See docs/security.md.
    #[arg(long, value_name = "SWITCH", value_enum, default_value_t)]
    pub(super) sandbox: SandboxSwitch,
    /// Become this user once the disk and the sockets are open: a name or a number
    ///
    /// For a daemon that is started as root. Its group becomes that of the user, or --group; it is in no other group. The
    /// sockets made here are given to the user and the group.
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Become this group once the disk and the sockets are open: a name or a number
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// Take the disk over from the process that has the control socket, with its frontend
    ///
    /// For an upgrade without a service manager: start the new cleave with the options of the running one. That one serves the
    /// disk until the new one has all that it needs, and exits then. The guest sees a pause of some milliseconds. If the disk
    /// cannot be taken over, the running process goes on. The new one then exits 3 if a restart gets past the reason, and 1
    /// otherwise. If none runs, the disk is opened as usual.
    #[arg(long, requires = "control")]
    take_over: bool,
    /// Return when the new process has taken over, and leave it in the background
    ///
    /// For ExecReload= of a unit: `systemctl reload` upgrades the daemon then. If the new process cannot take over, it exits
    /// with the code of that one, and the running process goes on. See docs/upgrade.md.
    #[arg(long, requires = "take_over")]
    pub(super) detach: bool,
    /// Exit when the first frontend leaves
    #[arg(long)]
    once: bool,
    /// Least severe messages that are written to stderr
    #[arg(long, value_name = "LEVEL", default_value = "info",
          value_parser = PossibleValuesParser::new(["error", "warn", "info", "debug", "trace"]))]
    log: String,
    /// Exit when this process, which started this one, ends.
    #[arg(long, value_name = "PID", hide = true)]
    exit_with_parent: Option<u32>,
}

/// `--sandbox`. A sanitizer traces the daemon at its end, and the sandbox kills a daemon that does so.
pub(super) type SandboxSwitch = Switch<{ !cfg!(sanitized) }>;

impl ServeArgs {
    /// The disk, and the process around it. `given`: the words of the line.
    pub(super) fn serve(&self, given: &ArgMatches) -> Result<ServeSettings, Failure> {
        let on_line = with_options(DiskConfig::default(), given)?;
        let config = match &self.config {
            Some(path) => with_file(path, &on_line, given)?,
            None => on_line,
        };
        if let Some(field) = config.node_field() {
            return Err(Failure::input(format!(
                "{} is for the disks of a node: leave it out",
                Names::Options.of(field)
            )));
        }
        refuse_idle(&config, self.options.control.is_some())?;
        serve(&self.endpoint, config, &self.options)
    }
}

/// A description in which the options that stand on the command line have their values.
pub(super) fn with_options(
    mut config: DiskConfig,
    given: &ArgMatches,
) -> Result<DiskConfig, Failure> {
    let updated = config.update_from_arg_matches(&given_only(given));
    updated.map_err(Failure::input).map(|()| config)
}

/// The disk of a file together with the options on the line.
fn with_file(path: &Path, on_line: &DiskConfig, given: &ArgMatches) -> Result<DiskConfig, Failure> {
    let named = |why: String| Failure::input(format!("{}: {why}", path.display()));
    let text = read_config(path).map_err(|error| {
        Failure::unread(format!("--config {}: {error}", path.display()), &error)
    })?;
    let file = DiskConfig::from_toml(&text).map_err(named)?;
    if let Some(field) = file.node_field() {
        return Err(named(format!(
            "{field}: it is for the disks of a node: leave it out"
        )));
    }
    let in_file = file.written();
    let mut twice = on_line.written().into_iter();
    if let Some(field) = twice.find(|field| in_file.contains(field)) {
        return Err(named(format!(
            "{} stands on the command line too: leave one of them out",
            Names::Options.of(field)
        )));
    }
    with_options(file, given)
}

/// Reads a file that may be a device without an end, or an image that is larger than memory.
fn read_config(config: &Path) -> io::Result<String> {
    let mut text = Vec::new();
    let file = File::open(config)?;
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(io::Error::other("it is too long for the file of a disk"));
    }
    String::from_utf8(text).map_err(|_| io::Error::other("it is not valid UTF-8"))
}

/// Refuses options of adaptive polling if the disk can never be adaptive.
fn refuse_idle(config: &DiskConfig, has_control: bool) -> Result<(), Failure> {
    if config.completion.get() == CompletionOption::Adaptive || has_control {
        return Ok(());
    }
    let is_idle = |field: &&str| field.starts_with("spin_");
    match config.written().into_iter().find(is_idle) {
        None => Ok(()),
        Some(field) => Err(Failure::input(format!(
            "{} is for --completion adaptive; leave one of the two out",
            Names::Options.of(field)
        ))),
    }
}

/// A disk that is served so, and the process around it.
pub(super) fn serve(
    endpoint: &EndpointArgs,
    config: DiskConfig,
    options: &ServeOptions,
) -> Result<ServeSettings, Failure> {
    let on_error = config.on_error.get();
    if on_error.policy().may_hold() && options.control.is_none() {
        return Err(Failure::input(format!(
            "--on-error {on_error}: held requests wait for `cleave disk resume`, which needs a control socket: give --control PATH"
        )));
    }
    let control = options.control.clone().map(|path| SocketSettings {
        path,
        group: options.control_group.clone(),
    });
    let metrics = options.metrics.socket();
    let endpoint = endpoint.found()?;
    refuse_one_path(&endpoint, "--control", control.as_ref())?;
    refuse_one_path(&endpoint, "--metrics", metrics.as_ref())?;
    Ok(ServeSettings {
        config,
        endpoint,
        once: options.once,
        control,
        metrics,
        sandbox: options.sandbox.is_on(),
        user: options.user.clone(),
        group: options.group.clone(),
        log: options.log.parse().unwrap_or(LevelFilter::INFO),
        take_over: options.take_over,
        exit_with_parent: options.exit_with_parent,
    })
}

impl EndpointArgs {
    /// The socket that was named, or that the service manager has made.
    fn found(&self) -> Result<Endpoint, Failure> {
        match (&self.socket_path, self.fd) {
            (Some(path), None) => Ok(Endpoint::Path(path.clone())),
            (None, Some(fd)) => Ok(Endpoint::Fd(fd)),
            // The parser refuses both.
            _ => Endpoint::passed()?
                .ok_or_else(|| Failure::input("no socket: give --socket-path PATH or --fd N")),
        }
    }
}

/// Refuses one path for both sockets: the daemon would wait for the lock of the other socket, which it holds itself.
fn refuse_one_path(
    endpoint: &Endpoint,
    option: &str,
    other: Option<&SocketSettings>,
) -> Result<(), Failure> {
    // As the same name in the same folder, since neither socket exists yet.
    let place = |path: &Path| {
        let path = std::path::absolute(path).ok()?;
        let folder = path.parent()?;
        let folder = folder.canonicalize().unwrap_or(folder.to_owned());
        Some(folder.join(path.file_name()?))
    };
    match (endpoint, other) {
        (Endpoint::Path(path), Some(other)) if place(path) == place(&other.path) => {
            Err(Failure::input(format!(
                "{option} and --socket-path are both {}: give each socket a path of its own",
                path.display()
            )))
        }
        _ => Ok(()),
    }
}

impl Default for ServeOptions {
    fn default() -> ServeOptions {
        /// Only the defaulted options.
        #[derive(Parser)]
        struct Defaults {
            #[command(flatten)]
            options: ServeOptions,
        }
        Defaults::parse_from(["cleave"]).options
    }
}
