//! A node as the host of its disks: how their lives begin and end with it, and what each asks of it.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cleave_api::{EventName, NodeSetup, ProblemKind};
use cleave_config::{DiskConfig, ID_CHARS_MAX, is_id};
use cleave_worker::RateLimits;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::files::{Found, KeptLimits};
use super::opening::{self, Opened};
use super::serving;
use super::shared::{LeftDisk, Node};
use crate::disk_server::Order;
use crate::failure::Failure;
use crate::handover::link::Peer;
use crate::handover::merge::{self, DiskUse};
use crate::handover::store;
use crate::hosted::aside::aside;
use crate::hosted::disk::{DiskRequest, FutureReply, HostedDisk, HostedState, Placed};
use crate::hosted::disk_host::{DiskHost, FileFault, OpenResult, Past, Removal, ServerEnd, Work};
use crate::hosted::{FileBounds, ManyDisks, life};
use crate::problem::Refusal;
use crate::process::systemd::Manager;
use crate::status::DiskStatus;

/// How long the end of a node waits for the files of disks that are being deleted.
const FILE_TIME: Duration = Duration::from_secs(3);
/// Most disks of a node.
pub(super) const DISKS_MAX: usize = 1024;

impl Node {
    /// Stops all disks side by side, and tells of each that left or lost requests. Those that are kept are left to the next process,
    /// if the manager can keep them for it. `None`: the next process runs, and takes nothing from a manager. Whatever is left of a
    /// disk would keep it from that process, so a disk that is still being opened is not waited for.
    pub(super) async fn stop(
        &self,
        why: &str,
        manager: Option<&Arc<Manager>>,
    ) -> Result<(), Failure> {
        self.is_ending.store(true, Ordering::Relaxed);
        let all = self.disks.all();
        if self.inherits && manager.is_some() {
            // The frontends of a disk that is still being opened have waited long enough. The other disks are served until it is. One
            // that takes longer goes on to the next process as it came.
            let opened = async {
                for disk in &all {
                    disk.reaches(|state| !matches!(state, HostedState::Opening))
                        .await;
                }
            };
            let _ = timeout(self.stop_deadline(), opened).await;
        }
        let store = manager.filter(|manager| manager.has_store());
        for disk in &all {
            let why = why.to_owned();
            let comes_back = disk.shown().config.persistent.get().0;
            let order = match store.filter(|_| comes_back) {
                Some(manager) => DiskRequest::HandOver(why, manager.clone()),
                None => DiskRequest::Stop(why),
            };
            disk.order(order).await;
        }
        let mut lost = 0;
        for disk in &all {
            let ended = disk.reaches(|state| matches!(state, HostedState::Ended(_)));
            if let HostedState::Ended(Some(line)) = ended.await {
                tracing::error!("{line}");
                lost += 1;
            }
        }
        // One that is being deleted has its file removed: with that, the next node would serve it again.
        let gone = async {
            for disk in &all {
                disk.gone().await;
            }
        };
        if timeout(FILE_TIME, gone).await.is_err() {
            tracing::warn!(
                "the files of disks that were being deleted are not removed yet: the next node serves these disks again"
            );
        }
        match lost {
            0 => Ok(()),
            1 => Err(Failure::run("a disk did not end in order; see the log")),
            _ => Err(Failure::run(format!(
                "{lost} disks did not end in order; see the log"
            ))),
        }
    }

    /// Has disks that could not be opened be tried at once: the process that had them is gone.
    pub(super) async fn open_failed_again(&self) {
        for disk in self.disks.all() {
            if matches!(disk.state(), HostedState::Failed(_)) {
                let (reply, _) = oneshot::channel();
                disk.order(DiskRequest::Start(reply)).await;
            }
        }
    }

    /// The longest time for which a disk is waited for.
    pub(super) fn stop_deadline(&self) -> Duration {
        let deadlines = self.disks.all().into_iter().map(|disk| {
            let seconds = disk.shown().config.stop_deadline.get().get();
            Duration::from_secs(seconds.into())
        });
        deadlines.max().unwrap_or_default()
    }

    pub(super) async fn check_sizes(&self) {
        let all = self.disks.all();
        tracing::info!("SIGHUP received: checking the sizes of {} disks", all.len());
        for disk in all {
            disk.order(DiskRequest::CheckSize(None)).await;
        }
    }

    /// Begins the lives of the disks that are kept. Returns how many there are.
    pub(super) fn restore(self: &Arc<Node>) -> Result<usize, Failure> {
        let found = self.files.load()?;
        let count = found.len();
        self.forget_parcels_but(|id| {
            let mut found = found.iter();
            found.any(|(there, file)| there == id && !matches!(file, Err(FileFault::Lasting(_))))
        });
        self.restore_groups(&found)?;
        for (id, file) in found {
            self.disks.add(life::restore(self, &id, file));
        }
        let needed = self.descriptors_needed();
        if needed > self.descriptors {
            tracing::warn!(
                "the disks that are kept may come to need {needed} open files and {} may be: raise LimitNOFILE=, or some of them \
                 cannot be opened, or not by a guest with many vrings",
                self.descriptors
            );
        }
        Ok(count)
    }

    /// Takes the limits of the groups of these disks.
    fn restore_groups(&self, found: &[Found]) -> Result<(), Failure> {
        let kept = self.files.load_groups()?;
        for why in kept.values().filter_map(|kept| kept.as_ref().err()) {
            tracing::error!("{why}; the disks of this limit group are not served meanwhile");
        }
        for config in found.iter().filter_map(|(_, file)| file.as_ref().ok()) {
            self.restore_group(config, &kept);
        }
        // A group whose disks are gone has no limits. But one of them may be in a file that cannot be read.
        let are_all_read = found.iter().all(|(_, file)| file.is_ok());
        for (name, limits) in &kept {
            if !are_all_read {
                self.groups.hold(name, limits);
            } else if !self.groups.has(name)
                && let Err(error) = self.files.keep_group(name, RateLimits::default())
            {
                tracing::warn!(
                    "cannot remove the file of group {name}, which has no disk: {error}"
                );
            }
        }
        Ok(())
    }

    /// Takes the limits of the group of a disk. The files of an earlier version have the limits of the group; those of its first disk
    /// that names any count.
    fn restore_group(&self, config: &DiskConfig, kept: &BTreeMap<String, KeptLimits>) {
        if let Some(group) = config.limit_group() {
            let of_disk = config.limits.get().values;
            self.groups.restore(group, kept.get(group), of_disk);
        }
    }

    /// Checks that a disk of this id can be added.
    fn check_id(&self, id: &str) -> Result<(), String> {
        if !is_id(id) {
            return Err(format!(
                "id: {id:?}: take 1 to {ID_CHARS_MAX} letters, digits and _.- that begin with a letter or a digit"
            ));
        }
        match self.run.join(id) == self.control {
            true => Err(format!(
                "id: {id} is the name of the control socket in the same folder: take another"
            )),
            false => Ok(()),
        }
    }
}

impl ManyDisks for Node {
    fn begin(
        &self,
        id: &str,
        config: &DiskConfig,
    ) -> Result<(Arc<HostedDisk>, FutureReply<Placed>), Refusal> {
        let bad = |why| Refusal(ProblemKind::InvalidRequest, why);
        self.check_id(id).map_err(bad)?;
        let more = self.judge(id, config).map_err(bad)?;
        let full = |why| Refusal(ProblemKind::NoRoom, why);
        if self.disks.all().len() >= DISKS_MAX {
            let why = format!("a node has at most {DISKS_MAX} disks: start another node");
            return Err(full(why));
        }
        let needed = self.descriptors_needed() + more;
        if needed > self.descriptors {
            return Err(full(format!(
                "{needed} files may have to be open and {} may be: raise LimitNOFILE=, or lower queues or workers",
                self.descriptors
            )));
        }
        let me = self.me.upgrade();
        let me = me.filter(|_| !self.is_ending.load(Ordering::Relaxed));
        let me = me.ok_or_else(|| Refusal(ProblemKind::Ending, "the node ends".to_owned()))?;
        let (disk, answer) = life::begin(&me, id, config.clone());
        self.disks.add(disk.clone());
        Ok((disk, answer))
    }

    fn with_group_limits(&self, config: &DiskConfig) -> DiskConfig {
        self.groups.in_force(config)
    }

    fn end_for(&self, peer: Peer) {
        let _ = self.end_for.try_send(peer);
    }

    fn setup(&self) -> NodeSetup {
        let shown = |path: &PathBuf| path.display().to_string();
        NodeSetup {
            state: shown(&self.state),
            run: shown(&self.run),
            images: self.images.iter().map(shown).collect(),
            ceph: self.ceph,
            pools: self.pools.report(),
        }
    }

    fn bounds(&self) -> FileBounds {
        FileBounds {
            images: self.images.clone(),
            own: vec![(self.state.clone(), "--state"), (self.run.clone(), "--run")],
        }
    }
}

impl DiskHost for Node {
    type Opened = Opened;

    fn judge(&self, id: &str, config: &DiskConfig) -> Result<u64, String> {
        let service = self.service(id, config)?;
        Ok(service.descriptors_in_node())
    }

    fn read(self: Arc<Node>, id: &str) -> Work<Result<DiskConfig, FileFault>> {
        let id = id.to_owned();
        Box::pin(async move {
            let (files, name) = (self.files.clone(), id.clone());
            let read = aside("state", move || Ok(files.read_disk(&name))).await;
            let read = read.unwrap_or_else(|error| Err(FileFault::Passing(error.to_string())));
            match &read {
                // The files of groups were read before: this one has none, or is held.
                Ok(config)
                    if config
                        .limit_group()
                        .is_some_and(|group| !self.groups.has(group)) =>
                {
                    self.restore_group(config, &BTreeMap::new());
                }
                Ok(_) => {}
                Err(FileFault::Passing(_)) => {}
                // It will not be opened: its frontends see the end of their connections.
                Err(FileFault::Lasting(_)) => {
                    merge::close(self.take_parcel(&id).into_iter().collect());
                }
            }
            read
        })
    }

    fn has_frontend_left(&self, id: &str) -> bool {
        self.left(id, |parcel| !parcel.sessions.is_empty()) == Some(true)
    }

    fn open(self: Arc<Node>, id: &str, config: &DiskConfig, past: Past) -> Work<OpenResult<Node>> {
        let (id, config) = (id.to_owned(), config.clone());
        let left = LeftDisk::of(&self, &id);
        Box::pin(async move { opening::open(&self, &id, config, past, left).await })
    }

    fn leave(self: Arc<Node>, id: &str, manager: Arc<Manager>) -> Work<()> {
        let left = self.take_parcel(id);
        let id = id.to_owned();
        Box::pin(async move {
            let Some(left) = left else { return };
            let kept = match left.pack() {
                Ok(packed) => store::keep(&manager, DiskUse::MaybeUsed, &packed).await,
                Err(failed) => Err(failed.1),
            };
            match kept {
                Ok(()) => tracing::info!(
                    "{id}: not open yet: what the process before has left of it is left to the next one"
                ),
                Err(error) => tracing::warn!(
                    "{id}: nothing is kept for the next process: {error}: a frontend has to connect again"
                ),
            }
        })
    }

    fn serve(
        self: Arc<Node>,
        id: &str,
        opened: Opened,
        orders: mpsc::Receiver<Order>,
    ) -> Result<(Arc<DiskStatus>, Work<ServerEnd>), Failure> {
        serving::begin(&self, id, opened, orders)
    }

    fn keep(
        self: Arc<Node>,
        id: &str,
        file: Option<&DiskConfig>,
        group: Option<&str>,
    ) -> Work<io::Result<()>> {
        let (id, file) = (id.to_owned(), file.cloned());
        let group = group.map(str::to_owned);
        Box::pin(async move {
            let is_kept = file.is_some();
            if let Some(config) = file {
                let (files, id) = (self.files.clone(), id.clone());
                aside("state", move || files.stage(&id, &config)).await?;
            }
            // In this order: a disk whose file cannot be written changes nothing for its group, and it keeps the file that it has if
            // that of its group cannot be written.
            if let Some(group) = &group {
                self.groups.keep(&self.files, group).await?;
            }
            let files = self.files.clone();
            let put = move || match is_kept {
                true => files.place(&id),
                false => files.remove(&id),
            };
            aside("state", put).await
        })
    }

    fn remove(self: Arc<Node>, id: &str, group: Option<&str>) -> Work<io::Result<()>> {
        let id = id.to_owned();
        let group = group.map(str::to_owned);
        Box::pin(async move {
            let files = self.files.clone();
            aside("state", move || files.remove(&id)).await?;
            // In this order: a disk that comes back has its limits.
            match &group {
                Some(group) => self.groups.remove_with_last(&self.files, group).await,
                None => Ok(()),
            }
        })
    }

    fn is_group_due(&self, group: &str) -> bool {
        self.groups.is_due(group)
    }

    fn joins(&self, config: &DiskConfig) {
        self.groups.join(config);
    }

    fn leaves(&self, config: &DiskConfig) {
        self.groups.leave(config);
    }

    fn with_group_limits(&self, config: &DiskConfig) -> DiskConfig {
        self.groups.in_force(config)
    }

    fn set_group_limits(&self, id: &str, config: &DiskConfig) {
        if !self.groups.set(config) {
            return;
        }
        for other in self.disks.all().iter().filter(|other| other.id != id) {
            let status = other.shown();
            if status.config.limit_group() == config.limit_group() {
                let details = status
                    .state
                    .change_details(&self.groups.in_force(&status.config));
                self.tell_change(&other.id, details);
            }
        }
    }

    fn take_limits_back(self: Arc<Node>, id: &str, config: &DiskConfig) {
        self.set_group_limits(id, config);
        let Some(group) = config
            .limit_group()
            .filter(|group| self.is_group_due(group))
        else {
            return;
        };
        let group = group.to_owned();
        tokio::spawn(async move {
            if let Err(error) = self.groups.keep(&self.files, &group).await {
                tracing::error!(
                    "the file of group {group} has limits of a disk that was refused: {error}: set its limits again"
                );
            }
        });
    }

    fn tell_change(&self, id: &str, details: Value) {
        self.events.tell(id, EventName::Changed, details);
    }

    fn socket(&self, id: &str) -> String {
        self.socket_path(id).display().to_string()
    }

    fn tell(&self, id: &str, state: &HostedState, config: &DiskConfig) {
        let details = state.details(&self.socket(id), config);
        self.events.tell(id, state.word().into(), details);
    }

    fn forget(&self, id: &str, removal: Removal) {
        let disk = self.disks.find(id);
        self.disks.remove(id);
        merge::close(self.take_parcel(id).into_iter().collect());
        let user = disk.and_then(|disk| disk.shown().config.socket_user.clone());
        self.remove_folder(id, user.as_deref(), removal);
        self.events.tell(id, EventName::Removed, Value::Null);
    }
}
