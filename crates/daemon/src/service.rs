//! What is served and how: the complete, checked value that the command line becomes.

use std::path::PathBuf;

use cleave_blk::spec::ID_BYTES;
use cleave_disk::{Direct, DiskSpec, OpenOptions};
use cleave_session::SessionConfig;
use cleave_worker::{Completion, WorkerConfig};
use tracing::level_filters::LevelFilter;

use crate::cli::{Cache, EndpointArgs, ServeArgs, Switch, Wait, When};
use crate::cpus;
use crate::failure::Failure;

/// Most ops that a worker keeps in flight, and least, whatever the size of its vrings: the upper bound
/// keeps a worker's tables small, and devices are at their best far below it.
const OPS_MAX: u16 = 1024;
const OPS_MIN: u16 = 128;

/// Where frontends come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// Listen on a socket made here.
    Path(PathBuf),
    /// An inherited socket.
    Fd(u32),
}

/// One disk on one socket.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) endpoint: Endpoint,
    pub(crate) disk: DiskSpec,
    pub(crate) open: OpenOptions,
    pub(crate) serial: [u8; ID_BYTES],
    pub(crate) writeback: bool,
    pub(crate) session: SessionConfig,
    pub(crate) worker: WorkerConfig,
    pub(crate) once: bool,
    pub(crate) log: LevelFilter,
    pub(crate) exit_with_parent: bool,
}

impl Service {
    /// Checks what the parser alone cannot.
    pub(crate) fn new(args: &ServeArgs) -> Result<Service, Failure> {
        let options = &args.options;
        let cpus = match &options.cpus {
            Some(list) => usable(&list.0)?,
            None => Vec::new(),
        };
        Ok(Service {
            endpoint: endpoint(&args.endpoint)?,
            disk: only_disk(&args.disk)?,
            open: OpenOptions {
                read_only: args.access.read_only,
                direct: match options.direct {
                    When::On => Direct::On,
                    When::Off => Direct::Off,
                    When::Auto => Direct::Auto,
                },
                block_bytes: options.block_size,
                discard: options.discard == Switch::On,
            },
            serial: options.serial.0,
            writeback: options.cache == Cache::Writeback,
            session: SessionConfig {
                vrings_max: options.queues,
                vring_size_max: options.queue_size,
                workers_max: options
                    .workers
                    .unwrap_or_else(|| workers_default(cpus.len(), options.queues)),
            },
            worker: WorkerConfig {
                completion: match options.completion {
                    Wait::Interrupt => Completion::Interrupt,
                    Wait::Poll => Completion::Poll,
                },
                cpus,
                ops: options.queue_size.clamp(OPS_MIN, OPS_MAX),
            },
            once: options.once,
            log: options.log.parse().unwrap_or(LevelFilter::INFO),
            exit_with_parent: options.exit_with_parent,
        })
    }
}

fn endpoint(args: &EndpointArgs) -> Result<Endpoint, Failure> {
    match (&args.socket_path, args.fd) {
        (Some(path), None) => Ok(Endpoint::Path(path.clone())),
        (None, Some(fd)) => Ok(Endpoint::Fd(fd)),
        // The parser refuses both.
        _ => Err(Failure::input(
            "no socket: give --socket-path PATH or --fd N",
        )),
    }
}

fn only_disk(disks: &[DiskSpec]) -> Result<DiskSpec, Failure> {
    match disks {
        [disk] => Ok(disk.clone()),
        [] => Err(Failure::input("no disk: give --disk SPEC")),
        more => Err(Failure::input(format!(
            "--disk was given {} times, and this cleave serves one disk: start another `cleave serve` \
             with a socket of its own for each further disk",
            more.len()
        ))),
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
