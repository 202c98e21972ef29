//! Confines the daemon once its disk and its sockets are open (`docs/security.md`).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

use cleave_disk::{Backing, Disk};
use cleave_engine::Reactor;
use cleave_sandbox::{Identity, Keep, Missing, PathAccess, Reach, Reaches, Role, Sandbox};
use cleave_session::offload;

use crate::failure::Failure;
use crate::process::{self, cpus, log};
use crate::socket::Listening;

/// The folder through which a process sees itself: a worker reads how long its thread waited for a core, and the control
/// interface how much memory the process has.
const OWN_PROCESS: &str = "/proc/self";

/// A node reads these to open a disk: properties of devices, the numbers of users and groups, and where names of servers are looked up.
const READ: [&str; 8] = [
    "/sys",
    "/etc/group",
    "/etc/passwd",
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
];

/// The confinement of this process; each thread narrows its own when it starts.
#[derive(Debug, Clone)]
pub(crate) struct Confinement(Option<Arc<Sandbox>>);

impl Confinement {
    /// Gives `sockets` to the operator's user and becomes it, and confines the process. To be called on the main thread after
    /// everything that needs a path or a privilege, and before it starts any thread but those that narrow themselves (the log's, the
    /// dialler's) or are confined from their start (librbd's).
    pub(crate) fn apply(
        process: &OneDiskProcess,
        sockets: [Option<&Listening>; 2],
        name: &str,
        log: &log::Guard,
    ) -> Result<Confinement, Failure> {
        let keep = keep();
        // Another user, or root without capabilities, could not search every folder.
        let reaches = Reaches::open(&process.reaches()).map_err(Failure::run)?;
        if let Some(identity) = process.identity {
            process.assume(identity, keep, sockets)?;
        }
        if !process.sandbox {
            tracing::warn!(
                "{name}: --sandbox off: whoever takes this daemon over through a fault of it can do all that its user can"
            );
            return Ok(Confinement::none());
        }
        let sandbox = Sandbox::process(reaches, keep).map_err(Failure::run)?;
        Confinement::begin(sandbox, name, log)
    }

    /// Confines a node, which goes on to open disks and to make sockets in these folders. To be called on the main thread before
    /// it starts any thread but the log's.
    pub(crate) fn apply_to_node(
        folders: &NodeFolders<'_>,
        log: &log::Guard,
    ) -> Result<Confinement, Failure> {
        let keep = keep();
        let opened = Reaches::open(&folders.reaches()).map_err(Failure::start)?;
        let served = Reaches::open(&own().collect::<Vec<_>>()).map_err(Failure::run)?;
        let sandbox = Sandbox::node(opened, served, keep).map_err(Failure::run)?;
        Confinement::begin(sandbox, "node", log)
    }

    /// From the confinement of the main thread on.
    fn begin(sandbox: Sandbox, name: &str, log: &log::Guard) -> Result<Confinement, Failure> {
        let sandbox = Arc::new(sandbox);
        for missing in sandbox.missing() {
            match missing {
                Missing::Layer(what) => {
                    tracing::warn!("{name}: not all is confined, because this kernel lacks {what}");
                }
                Missing::Rules(what) => {
                    tracing::info!("{name}: not all is confined, because this kernel lacks {what}");
                }
            }
        }
        let confinement = Confinement(Some(sandbox.clone()));
        log.order(move || report(sandbox.earlier_thread(Role::Log), Role::Log));
        offload::at_start(confinement.narrowing(Role::Offload));
        // Each worker makes its rings later, without what has just been given up.
        Reactor::probe().map_err(|error| {
            Failure::start(format!(
                "{error} (it worked before this process gave up its privileges: see docs/security.md)"
            ))
        })?;
        Ok(confinement)
    }

    /// Nothing is given up.
    pub(crate) fn none() -> Confinement {
        Confinement(None)
    }

    /// Narrows the calling thread to its role.
    pub(crate) fn thread(&self, role: Role) {
        if let Some(sandbox) = &self.0 {
            report(sandbox.thread(role), role);
        }
    }

    /// Confines the thread that connects to the disk's server, which was started with the disk.
    pub(crate) fn confine_dialler(&self, disk: &Disk) {
        if let (Some(sandbox), Backing::Nbd(nbd)) = (&self.0, disk.backing()) {
            let sandbox = sandbox.clone();
            nbd.on_dialler(move || report(sandbox.dialler(), Role::Dial));
        }
    }

    /// Makes the function that a thread of this role calls when it starts.
    pub(crate) fn narrowing(&self, role: Role) -> impl Fn() + Send + Sync + 'static {
        let confinement = self.clone();
        move || confinement.thread(role)
    }
}

/// Starts the thread that opens images of Ceph clusters, and from it librbd's. To be called before the process is confined.
pub(crate) fn start_ceph(
    sandbox: bool,
    becomes_another: bool,
    taken_cpus: Vec<usize>,
) -> Result<(), String> {
    let confine = move || {
        cpus::stay_off(&taken_cpus);
        if sandbox && let Err(error) = cleave_sandbox::confine_library(becomes_another) {
            tracing::warn!("librbd's threads are confined less than they should be: {error}");
        }
    };
    cleave_disk::start_opener(confine).map_err(|error| error.to_string())
}

/// A thread that cannot be narrowed has the confinement of the one that started it, and serves. Told once: frontends start
/// threads.
fn report(narrowed: Result<(), cleave_sandbox::SandboxError>, role: Role) {
    static TOLD: Once = Once::new();
    if let Err(error) = narrowed {
        TOLD.call_once(|| {
            tracing::warn!(
                "a thread ({role:?}) is confined less than it should be, and so may others: {error}"
            );
        });
    }
}

/// What `cleave serve` gives up, and the files that it needs to the end.
#[derive(Debug)]
pub(crate) struct OneDiskProcess {
    /// True if the process is confined.
    pub(crate) sandbox: bool,
    /// The user that it becomes.
    pub(crate) identity: Option<Identity>,
    /// The process with which it ends.
    pub(crate) exit_with_parent: Option<u32>,
    /// The paths of the socket of the frontends and of the control socket.
    pub(crate) sockets: [Option<PathBuf>; 2],
    /// The socket of the metrics, which has a group of its own.
    pub(crate) metrics: Option<PathBuf>,
}

impl OneDiskProcess {
    /// Gives the sockets of these paths to the user, and becomes it.
    fn assume(
        &self,
        identity: Identity,
        keep: Keep,
        sockets: [Option<&Listening>; 2],
    ) -> Result<(), Failure> {
        let (user, group) = (identity.uid(), identity.gid());
        for (path, socket) in self.sockets.iter().zip(sockets) {
            let (Some(path), Some(socket)) = (path, socket) else {
                continue;
            };
            socket.give_to(user, group).map_err(|error| {
                Failure::start(format!(
                    "cannot give socket {} to user {user}, group {group}: {error}; start as root, or leave --user and --group out",
                    path.display()
                ))
            })?;
        }
        identity.assume(keep).map_err(Failure::input)?;
        // The kernel forgets the request when a process changes its user.
        match self.exit_with_parent {
            Some(parent) => process::end_with_parent(parent),
            None => Ok(()),
        }
    }

    /// Everything that is opened or removed by its path from now on. The disk and the sockets are open.
    fn reaches(&self) -> Vec<Reach> {
        let all = self.sockets.iter().chain([&self.metrics]).flatten();
        let folders = all.filter_map(|path| {
            let path = std::path::absolute(path).ok()?;
            path.parent().map(Path::to_owned)
        });
        let removed = |folder: PathBuf| Reach::new(folder, PathAccess::Remove);
        own().chain(folders.map(removed)).collect()
    }
}

/// The files in which a thread reads about itself.
fn own() -> impl Iterator<Item = Reach> {
    let own = Path::new(OWN_PROCESS).exists();
    own.then(|| Reach::new(OWN_PROCESS, PathAccess::Read))
        .into_iter()
}

/// Root's rings were not counted against the limit of locked memory, and are not to be from now on.
fn keep() -> Keep {
    match process::lift_locked_memory_limit() {
        true => Keep::Nothing,
        false => Keep::LockedMemory,
    }
}

/// The folders in which a node works.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeFolders<'a> {
    /// Its own files and sockets.
    pub(crate) own: [&'a Path; 2],
    /// The control socket.
    pub(crate) control: &'a Path,
    /// The socket of the metrics.
    pub(crate) metrics: Option<&'a Path>,
    /// Images, block devices and profiles, as they were found without links; none: everywhere.
    pub(crate) images: &'a [PathBuf],
}

impl NodeFolders<'_> {
    fn reaches(&self) -> Vec<Reach> {
        let changed = self
            .own
            .map(|folder| Reach::new(folder, PathAccess::Change));
        let sockets = [Some(self.control), self.metrics].into_iter().flatten();
        let sockets = sockets.filter_map(Path::parent);
        let sockets = sockets.map(|folder| Reach::new(folder, PathAccess::Remove));
        let everywhere = [PathBuf::from("/")];
        let images = match self.images {
            [] => &everywhere[..],
            images => images,
        };
        let images = images
            .iter()
            .map(|folder| Reach::new(folder, PathAccess::ReadWrite));
        let read = READ.iter().filter(|path| Path::new(path).exists());
        let read = read.map(|path| Reach::new(path, PathAccess::Read));
        let all = own().chain(changed).chain(sockets).chain(images);
        all.chain(read).collect()
    }
}
