//! The service of one disk: the complete, checked value that the command line becomes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cleave_blk::Stripe;
use cleave_blk::spec::ID_BYTES;
use cleave_disk::{Content, DiskSpec, OpenOptions, StripeKind, format_size};
use cleave_sandbox::Identity;
use cleave_session::SessionConfig;
use cleave_worker::record::Recording;
use cleave_worker::{LimitGroup, Pool, Split, Tuning, WorkerConfig};
use tracing::level_filters::LevelFilter;

use crate::cli::{Cache, EndpointArgs, MetricsOptions, ServeArgs, StripeArgs, Switch};
use crate::control::CONNECTIONS_MAX;
use crate::cpus;
use crate::failure::Failure;
use crate::socket::Endpoint;
use crate::source::Source;
use crate::split::SplitArgs;
use crate::systemd;

/// Descriptors that every daemon may have open, whatever its vrings and workers: the standard streams, the sockets, 16
/// pending, the descriptors of a message, and the runtime with its watches. The connections of the control socket and of that for
/// metrics come on top.
const DESCRIPTORS_OWN: u64 = 96;
/// The same for each disk of a node, which has the others once for all: its socket and locks, 16 pending connections, those of its
/// session, and the descriptors of a message.
const DESCRIPTORS_OF_DISK: u64 = 64;
/// Call and err, and for each a ring of its own if the frontend's eventfd blocks. The kick is only in the worker's ring.
const VRING_DESCRIPTORS: u64 = 4;
/// Its rings (plain, polled), what wakes it, and the times of its thread (schedstat); each leg's file comes on top.
const WORKER_DESCRIPTORS: u64 = 4;

/// One disk on one socket.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) endpoint: Endpoint,
    pub(crate) disk: Source,
    pub(crate) open: OpenOptions,
    /// The disk's reads and writes are polled for.
    pub(crate) iopoll: bool,
    pub(crate) serial: [u8; ID_BYTES],
    pub(crate) writeback: bool,
    pub(crate) session: SessionConfig,
    pub(crate) worker: WorkerConfig,
    /// The threads of a node that serve it. `None`: its workers have threads of their own.
    pub(crate) pool: Option<Arc<Pool>>,
    pub(crate) tuning: Tuning,
    /// Other disks share its limits.
    pub(crate) limit_group: Option<LimitGroup>,
    pub(crate) split: SplitArgs,
    /// The control socket.
    pub(crate) control: Option<PathBuf>,
    pub(crate) metrics: MetricsOptions,
    pub(crate) recording: Recording,
    /// Whether the process is confined.
    pub(crate) sandbox: bool,
    /// The user that it becomes.
    pub(crate) identity: Option<Identity>,
    pub(crate) once: bool,
    /// How long the end waits for what is in flight.
    pub(crate) stop_deadline: Duration,
    pub(crate) log: LevelFilter,
    pub(crate) exit_with_parent: Option<u32>,
}

impl Service {
    /// Checks what the parser alone cannot.
    pub(crate) fn new(args: &ServeArgs) -> Result<Service, Failure> {
        let options = &args.options;
        let cpus = match &options.disk.cpus {
            Some(list) => usable(&list.0)?,
            None => Vec::new(),
        };
        if options.disk.live.on_error.may_hold() && options.control.is_none() {
            return Err(Failure::input(format!(
                "--on-error {}: held requests wait for `cleave resume`, which needs a control socket: give --control PATH",
                options.disk.live.on_error
            )));
        }
        options.disk.live.pacing.refuse_vain_coalescing()?;
        let identity = Identity::find(options.user.as_deref(), options.group.as_deref());
        let identity = identity.map_err(Failure::input)?;
        let endpoint = endpoint(&args.endpoint)?;
        refuse_one_path(&endpoint, "--control", options.control.as_deref())?;
        refuse_one_path(&endpoint, "--metrics", options.metrics.path())?;
        let disk = source(&args.disk, &args.stripe, options.disk.block_size)?;
        let workers = options
            .disk
            .workers
            .unwrap_or_else(|| workers_default(cpus.len(), options.disk.queues));
        Ok(Service {
            endpoint,
            open: OpenOptions {
                read_only: args.access.read_only,
                direct: options.disk.direct.into(),
                block_bytes: options.disk.block_size,
                discard: options.disk.discard == Switch::On,
                // A vring has one worker.
                workers: workers.min(options.disk.queues),
                content: Content::Unknown,
            },
            iopoll: options.disk.iopoll == Switch::On,
            serial: options.disk.serial.0,
            writeback: options.disk.cache == Cache::Writeback,
            session: SessionConfig {
                vrings_max: options.disk.queues,
                vring_size_max: options.disk.queue_size,
                workers_max: workers,
            },
            worker: WorkerConfig {
                cpus,
                ops: disk.ops(options.disk.queue_size),
            },
            pool: None,
            // How requests are split is known when the disk is open.
            tuning: Tuning {
                on_error: options.disk.live.on_error,
                limits: options.disk.live.limit,
                ..options.disk.live.pacing.tuning(Split::Off)
            },
            disk,
            limit_group: None,
            split: SplitArgs {
                split: options.disk.live.split,
                profile: options.disk.profile.clone(),
            },
            control: options.control.clone(),
            metrics: options.metrics.clone(),
            recording: match options.disk.stats {
                Switch::On => Recording::On,
                Switch::Off => Recording::Off,
            },
            sandbox: options.sandbox == Switch::On,
            identity,
            once: options.once,
            stop_deadline: Duration::from_secs(options.disk.stop_deadline.into()),
            log: options.log.parse().unwrap_or(LevelFilter::INFO),
            exit_with_parent: options.exit_with_parent,
        })
    }

    /// Descriptors that it may come to need, with a frontend that uses all that is offered.
    pub(crate) fn descriptors(&self) -> u64 {
        let sockets = [self.control.as_deref(), self.metrics.path()];
        let sockets = sockets.into_iter().flatten().count() as u64;
        DESCRIPTORS_OWN + sockets * CONNECTIONS_MAX as u64 + self.descriptors_of_vrings()
    }

    /// The same for a disk of a node.
    pub(crate) fn descriptors_in_node(&self) -> u64 {
        DESCRIPTORS_OF_DISK + self.descriptors_of_vrings()
    }

    fn descriptors_of_vrings(&self) -> u64 {
        let workers = u64::from(self.open.workers);
        let files = |spec: &DiskSpec| match spec {
            // A socket, an eventfd and the server's pidfd for each connection.
            DiskSpec::Nbd(nbd) => 3 * u64::from(nbd.connections),
            _ => 1,
        };
        let files: u64 = self.disk.specs().iter().map(files).sum();
        VRING_DESCRIPTORS * u64::from(self.session.vrings_max)
            + (WORKER_DESCRIPTORS + files) * workers
            // For syncs of the operator.
            + files
    }
}

fn endpoint(args: &EndpointArgs) -> Result<Endpoint, Failure> {
    match (&args.socket_path, args.fd) {
        (Some(path), None) => Ok(Endpoint::Path(path.clone())),
        (None, Some(fd)) => Ok(Endpoint::Fd(fd)),
        (None, None) if systemd::passed()?.is_some() => Ok(Endpoint::Fd(systemd::FIRST_SOCKET)),
        // The parser refuses both.
        _ => Err(Failure::input(
            "no socket: give --socket-path PATH or --fd N",
        )),
    }
}

/// Refuses one path for both sockets: the daemon would wait for the lock of the other socket, which it holds itself.
fn refuse_one_path(endpoint: &Endpoint, option: &str, other: Option<&Path>) -> Result<(), Failure> {
    // As the same name in the same folder, since neither socket exists yet.
    let place = |path: &Path| {
        let path = std::path::absolute(path).ok()?;
        let folder = path.parent()?;
        let folder = folder.canonicalize().unwrap_or(folder.to_owned());
        Some(folder.join(path.file_name()?))
    };
    match (endpoint, other) {
        (Endpoint::Path(path), Some(other)) if place(path) == place(other) => {
            Err(Failure::input(format!(
                "{option} and --socket-path are both {}: give each socket a path of its own",
                path.display()
            )))
        }
        _ => Ok(()),
    }
}

/// One `--disk`, or as many as a stripe has legs.
pub(crate) fn source(
    disks: &[DiskSpec],
    stripe: &StripeArgs,
    block_size: Option<u32>,
) -> Result<Source, Failure> {
    let kind = match stripe.stripe_raw {
        true => StripeKind::Raw,
        false => StripeKind::Superblocks,
    };
    match (disks, stripe.stripe) {
        ([], _) => Err(Failure::input("no disk: give --disk SPEC")),
        ([disk], None) => Ok(Source::One(disk.clone())),
        ([_], Some(_)) => Err(Failure::input(
            "a stripe of one leg is a disk: leave --stripe out, or name all its legs",
        )),
        (more, None) => Err(Failure::input(format!(
            "{} disks were given: make them one disk with --stripe SIZE, or start a `cleave` of its own \
             for each",
            more.len()
        ))),
        (legs, Some(_)) if legs.len() > usize::from(Stripe::LEGS_MAX) => {
            Err(Failure::input(format!(
                "{} legs were given, and a stripe has at most {} legs",
                legs.len(),
                Stripe::LEGS_MAX
            )))
        }
        (legs, Some(chunk_bytes)) => {
            if let Some(block) = block_size.filter(|block| *block > chunk_bytes) {
                return Err(Failure::input(format!(
                    "--stripe {} is below --block-size {}; a chunk holds whole blocks",
                    format_size(chunk_bytes.into()),
                    format_size(block.into())
                )));
            }
            Ok(Source::Stripe {
                legs: legs.to_vec(),
                chunk_bytes,
                kind,
            })
        }
    }
}

/// A worker per vring, up to the CPUs that workers may use.
fn workers_default(pinned: usize, vrings: u16) -> u16 {
    let cpus = if pinned > 0 { pinned } else { cpus::count() };
    u16::try_from(cpus).unwrap_or(u16::MAX).min(vrings)
}

/// Refuses a CPU that a worker could not be pinned to.
fn usable(wanted: &[usize]) -> Result<Vec<usize>, Failure> {
    if let Some(allowed) = cpus::allowed()
        && let Some(cpu) = wanted.iter().find(|cpu| !allowed.contains(cpu))
    {
        return Err(Failure::input(format!(
            "--cpus: CPU {cpu} is not at hand: this process may use {}",
            shown(&allowed)
        )));
    }
    Ok(wanted.to_vec())
}

/// `[0, 1, 2, 5]` as `0-2,5`.
fn shown(cpus: &[usize]) -> String {
    let runs = cpus.chunk_by(|a, b| a + 1 == *b);
    let parts: Vec<String> = runs
        .filter_map(|run| match run {
            [] => None,
            [only] => Some(only.to_string()),
            [first, .., last] => Some(format!("{first}-{last}")),
        })
        .collect();
    parts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_shown_as_ranges() {
        let cases: &[(&[usize], &str)] =
            &[(&[], ""), (&[3], "3"), (&[0, 1, 2, 5, 7, 8], "0-2,5,7-8")];
        for (cpus, text) in cases {
            assert_eq!(shown(cpus), *text);
        }
    }

    #[test]
    fn a_worker_per_vring_up_to_the_cpus() {
        assert_eq!(workers_default(3, 64), 3);
        assert_eq!(workers_default(3, 2), 2);
        assert_eq!(usize::from(workers_default(0, 256)), cpus::count().min(256));
    }

    #[test]
    fn a_cpu_out_of_reach_is_named_with_those_at_hand() {
        let failure = usable(&[1023]).unwrap_err().to_string();
        assert!(failure.contains("CPU 1023 is not at hand"), "{failure}");
    }
}
