//! The service of one disk: the complete, checked value that its description becomes.

use std::sync::Arc;
use std::time::Duration;

use cleave_config::{CpuList, DiskConfig, Names, Storage};
use cleave_disk::{ContentOrigin, DiskSpec, OpenOptions};
use cleave_session::{MEMORY_FILES_MAX, SessionConfig};
use cleave_worker::{CacheNote, LimitGroup, Pool, Split, Tuning, WorkerConfig};

use crate::failure::Failure;
use crate::process::cpus;
use crate::socket::Endpoint;
use crate::tuning::tuning;

/// Most ops that a worker keeps in flight, and least, whatever the size of its vrings: the upper bound
/// keeps a worker's tables small, and devices are at their best far below it.
const OPS_MAX: u16 = 1024;
const OPS_MIN: u16 = 128;
/// Most ops in flight for a stripe: a request is taken while there is room for the longest, so this has to be several of those.
const STRIPE_OPS: u16 = 4096;

/// Descriptors of each disk of a node, which has others once for all: its socket and locks, 16 pending connections, those of its
/// sessions, and the descriptors of a message.
const DESCRIPTORS_OF_DISK: u64 = 64 + DESCRIPTORS_KEPT;
/// What its sessions keep for the next process: those of the guest and of a parked frontend each have the files of memory, the file of
/// the in-flight region, and that of the dirty log. When they are handed over, copies of some take the places of pending connections
/// and of a message, which are free by then.
pub(crate) const DESCRIPTORS_KEPT: u64 = 2 * (MEMORY_FILES_MAX as u64 + 2);
/// Call, err and kick, and for call and err a ring of its own if the frontend's eventfd blocks. A parked frontend has the first three.
const VRING_DESCRIPTORS: u64 = 8;
/// Its rings (plain, polled), what wakes it, and the times of its thread (schedstat); each leg's file comes on top.
const WORKER_DESCRIPTORS: u64 = 4;

/// One disk on one socket.
#[derive(Debug)]
pub(crate) struct Service {
    /// The description that the rest follows from.
    pub(crate) config: DiskConfig,
    /// How messages name its fields.
    pub(crate) names: Names,
    pub(crate) endpoint: Endpoint,
    pub(crate) disk: Storage,
    /// The devices and inodes of its files, in their order, once they are open. Asked for later, a server that hangs would hold up whoever
    /// asks.
    pub(crate) identities: Vec<Option<[u64; 3]>>,
    pub(crate) open: OpenOptions,
    pub(crate) session: SessionConfig,
    pub(crate) worker: WorkerConfig,
    /// The threads of a node that serve it. `None`: its workers have threads of their own.
    pub(crate) pool: Option<Arc<Pool>>,
    pub(crate) tuning: Tuning,
    /// Other disks share its limits.
    pub(crate) limit_group: Option<LimitGroup>,
    /// Where it is noted that a guest has switched its write cache off, once the disk is open.
    pub(crate) cache_note: Option<Arc<dyn CacheNote>>,
    /// True if the disk ends when a frontend has left.
    pub(crate) once: bool,
}

impl Service {
    /// Checks what the description alone cannot say.
    pub(crate) fn new(
        config: DiskConfig,
        endpoint: Endpoint,
        names: Names,
    ) -> Result<Service, Failure> {
        config.check(names).map_err(Failure::input)?;
        let disk = config.storage(names).map_err(Failure::input)?;
        let cpus = match &config.cpus {
            Some(list) => usable(list, names)?,
            None => Vec::new(),
        };
        let queues = count(config.queues.get().get());
        let queue_size = config.queue_size.get().get();
        let workers = match config.workers {
            Some(workers) => count(workers.get()),
            None => workers_default(cpus.len(), queues),
        };
        Ok(Service {
            names,
            endpoint,
            identities: Vec::new(),
            open: OpenOptions {
                read_only: config.read_only,
                direct: config.direct.get().into(),
                block_bytes: config.block_size.get().bytes(),
                discard: config.discard.get().is_on(),
                // A vring has one worker.
                workers: workers.min(queues),
                content: ContentOrigin::Unknown,
                locking: config.start.get().into(),
            },
            session: SessionConfig {
                face: config.face.get().into(),
                vrings_max: queues,
                vring_size_max: queue_size,
                workers_max: workers,
            },
            worker: WorkerConfig {
                cpus,
                ops: ops(&disk, queue_size),
            },
            pool: None,
            // How requests are split is known when the disk is open.
            tuning: tuning(&config, Split::Off),
            disk,
            limit_group: None,
            cache_note: None,
            once: false,
            config,
        })
    }

    /// How long the end waits for what is in flight.
    pub(crate) fn stop_deadline(&self) -> Duration {
        Duration::from_secs(self.config.stop_deadline.get().get().into())
    }

    /// Descriptors that a disk of a node may come to need, with a frontend that uses all that is offered.
    pub(crate) fn descriptors_in_node(&self) -> u64 {
        DESCRIPTORS_OF_DISK + self.descriptors_of_vrings()
    }

    /// Those of its vrings and workers.
    pub(crate) fn descriptors_of_vrings(&self) -> u64 {
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

/// A number whose bounds are far below this.
fn count(number: u32) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}

/// Most ops that a worker keeps in flight.
fn ops(disk: &Storage, queue_size: u16) -> u16 {
    match disk {
        Storage::One(_) => queue_size.clamp(OPS_MIN, OPS_MAX),
        Storage::Stripe { .. } => STRIPE_OPS,
    }
}

/// A worker per vring, up to the CPUs that workers may use.
fn workers_default(pinned: usize, vrings: u16) -> u16 {
    let cpus = if pinned > 0 { pinned } else { cpus::count() };
    u16::try_from(cpus).unwrap_or(u16::MAX).min(vrings)
}

/// Refuses a CPU that a worker could not be pinned to.
fn usable(CpuList(wanted): &CpuList, names: Names) -> Result<Vec<usize>, Failure> {
    if let Some(allowed) = cpus::allowed()
        && let Some(&cpu) = wanted.iter().find(|cpu| !allowed.contains(cpu))
    {
        let line = format!(
            "{}: CPU {cpu} is not at hand: this process may use {}",
            names.of("cpus"),
            CpuList(allowed)
        );
        return Err(cpus::refuse(cpu, line));
    }
    Ok(wanted.clone())
}

#[cfg(test)]
mod tests {
    use cleave_blk::Face;
    use cleave_config::Cache;
    use cleave_disk::{Direct, Locking};
    use cleave_worker::CompletionPolicy;

    use super::*;

    /// A disk that its file describes.
    fn service(file: &str) -> Service {
        let config = DiskConfig::from_toml(file).unwrap();
        Service::new(config, Endpoint::Fd(3), Names::Fields).unwrap()
    }

    #[test]
    fn defaults_are_those_documented() {
        let got = service("disk = ['null:1G']");
        assert_eq!(got.disk, Storage::One(DiskSpec::Null(1 << 30)));
        assert_eq!(got.session.vrings_max, 64);
        assert_eq!(got.session.vring_size_max, 1024);
        let workers = usize::from(got.session.workers_max);
        assert_eq!(workers, cpus::count().min(64));
        assert_eq!(got.tuning, Tuning::new(Split::Off));
        assert!(got.worker.cpus.is_empty());
        let open = OpenOptions {
            workers: got.session.workers_max,
            ..OpenOptions::default()
        };
        assert_eq!(got.open, open);
        assert_eq!(got.config.cache.get(), Cache::Writeback);
        assert_eq!(got.config.serial.get().padded(), [0; 20]);
    }

    #[test]
    fn every_field_reaches_the_service() {
        let with = |fields: &str| service(&format!("disk = ['/d']\n{fields}\n"));
        assert!(with("read_only = true").open.read_only);
        let serial = with("serial = 'abc'").config.serial.get().padded();
        assert_eq!(&serial[..4], b"abc\0");
        assert_eq!(with("face = 'v1'").session.face, Face::V1);
        assert_eq!(with("block_size = '4K'").open.block_bytes, 4096);
        assert_eq!(with("direct = 'on'").open.direct, Direct::On);
        assert_eq!(with("direct = 'off'").open.direct, Direct::Off);
        assert!(!with("discard = 'off'").open.discard);
        let inactive = with("start = 'inactive'");
        assert_eq!(inactive.open.locking, Locking::Later);
        assert_eq!(with("queues = 7").session.vrings_max, 7);
        assert_eq!(with("queue_size = 32768").session.vring_size_max, 32768);
        assert_eq!(with("workers = 5").session.workers_max, 5);
        assert_eq!(with("workers = 5\nqueues = 3").open.workers, 3);
        assert_eq!(with("cpus = '0'").worker.cpus, [0]);
        assert_eq!(with("cpus = '0'").session.workers_max, 1);
        let tuning = |fields: &str| with(fields).tuning;
        let completion = tuning("completion = 'poll'").completion;
        assert_eq!(completion, CompletionPolicy::Poll);
        assert_eq!(tuning("spin_cpu_max = 0").spin_cpu_max, 0);
        assert_eq!(tuning("spin_cpu_total = 80").spin_cpu_total, Some(80));
        assert_eq!(tuning("spin_rate_min = 0").spin_rate_min, 0);
        assert_eq!(tuning("spin_worth = 10000").spin_worth, 10_000);
        let coalesce = tuning("coalesce_us = 30\ncoalesce_max = 8").coalesce;
        assert_eq!((coalesce.us, coalesce.max), (30, 8));
        let on_error = |policy: &str| {
            let tuning = tuning(&format!("on_error = '{policy}'"));
            tuning.on_error.to_string()
        };
        let policy = on_error("read=retry:5,enospc=hold");
        assert_eq!(policy, "read=retry:5,write=report,enospc=hold");
        assert_eq!(on_error("retry"), "retry:30");
        assert_eq!(with("queue_size = 32768").worker.ops, 1024);
        assert_eq!(with("queue_size = 4").worker.ops, 128);
        let stripe = service("disk = ['/a', '/b']\nstripe = '64K'");
        assert_eq!(stripe.worker.ops, 4096);
    }

    #[test]
    fn a_worker_per_vring_up_to_the_cpus() {
        assert_eq!(workers_default(3, 64), 3);
        assert_eq!(workers_default(3, 2), 2);
        assert_eq!(usize::from(workers_default(0, 256)), cpus::count().min(256));
    }

    /// docs/node.md names the number.
    #[test]
    fn descriptors_are_those_documented() {
        let one = service("disk = ['/d']\nqueues = 1\nworkers = 1");
        assert_eq!(one.descriptors_in_node(), 146);
        let many = service("disk = ['/a', '/b']\nstripe = '64K'\nqueues = 4\nworkers = 2");
        assert_eq!(many.descriptors_of_vrings(), 4 * 8 + 2 * (4 + 2) + 2);
    }

    #[test]
    fn a_cpu_out_of_reach_is_named_with_those_at_hand() {
        let wanted = CpuList(vec![1023]);
        let failure = usable(&wanted, Names::Fields).unwrap_err().to_string();
        assert!(
            failure.contains("cpus: CPU 1023 is not at hand"),
            "{failure}"
        );
    }
}
