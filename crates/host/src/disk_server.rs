//! The server of one disk: opens it, accepts frontends, gives each of at most two to a session on a thread of its own,
//! and ends in order. `cleave serve` has one, `cleave node` has many on one runtime.

mod announcement;
mod giving;
mod guests;
mod handover;
mod loop_device;
mod pending;
mod possession;
mod server;
mod server_losses;
mod sessions;
mod size;
mod size_checks;
mod terms;

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cleave_api::EventName;
use cleave_config::{Cache, Storage};
use cleave_disk::{Disk, DiskSpec, Locking, OpenError, Resized};
use cleave_sandbox::Role;
use cleave_session::{Ending, Offload, Offloaded, Owners, Quota, SessionHandle};
use cleave_worker::record::Recording;
use cleave_worker::{Device, Incident, Totals};
use rustix::fs::fstat;
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot, watch};

use crate::events::Events;
use crate::failure::Failure;
use crate::handover::link::{Giver, Peer};
use crate::handover::merge::DiskUse;
use crate::handover::parcel::{Packed, Parcel};
use crate::hosted::changes::PassingOn;
use crate::possession::DiskPossession;
use crate::problem::Refusal;
use crate::process::confine::Confinement;
use crate::process::systemd::Manager;
use crate::resize::Watch;
use crate::service::Service;
use crate::socket::path_lock::{PathLock, Unrecorded};
use crate::socket::{Door, Endpoint, FileOwner};
use crate::source;
use crate::status::DiskStatus;
use crate::tuning::split_for;
use guests::{GuestKind, Guests};
use pending::PendingConnections;
use server_losses::ServerLosses;
pub(crate) use size_checks::SizeAsker;
use size_checks::SizeChecks;

/// How long no connection is accepted after accepting failed (no descriptors left, say).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Burst of log lines about frontends that connect and leave; enough for a VMM that connects a few times while it starts.
const ARRIVALS_MAX: u32 = 10;

/// An order for a disk that is served.
#[derive(Debug)]
pub(crate) enum Order {
    /// Hang up, wait for what is in flight at most for so long, else for its `--stop-deadline`, and end.
    /// The text is the reason, for the log.
    Stop(String, Option<Duration>),
    /// Have the service manager keep the disk and its frontends for the next process, and end. If that cannot be, stop. The text is
    /// the reason, for the log.
    HandOver(String, Arc<Manager>),
    /// Say what another process needs that takes the disk over, or why it stays here.
    Offer(oneshot::Sender<Result<Parcel, Refusal>>),
    /// Give the disk to a process that is ready to take it. The guard keeps others from asking.
    Give(Giver, Peer, Option<PassingOn>),
    /// End as with `Stop`, so that another process can open the disk. It is opened here again if that process leaves.
    Yield(String),
    /// Check the size of the disk, and tell the result to whoever asked, if anybody did.
    CheckSize(Option<SizeAsker>),
}

/// How a disk ended that was served in order.
#[derive(Debug, Clone)]
pub(crate) enum Served {
    Ended,
    /// Another process serves it.
    Given(Peer),
    /// Another process is to open it.
    Yielded,
}

/// Opens the disk, and proves that it can be polled for where that is asked. It may block for as long as the store does.
/// The caller holds the lock of the disk's socket, in which the disk is recorded. `given`: the files that the process before has left.
pub(crate) fn open(
    service: &mut Service,
    lock: Option<&PathLock>,
    given: Vec<File>,
) -> Result<Arc<Disk>, Failure> {
    let mut options = service.open.clone();
    if !given.is_empty() {
        // It was active, and its locks came with its files.
        options.locking = Locking::AtOpen;
    }
    let disk = match source::open_storage(&service.disk, &options, given) {
        // The settings have changed, so the files of the other process are closed, and its locks released with them.
        Err(error @ OpenError::TakeOver(..)) => {
            tracing::info!("{error}: it is opened anew");
            source::open_storage(&service.disk, &service.open, Vec::new())
        }
        disk => {
            service.open = options;
            disk
        }
    };
    complete(service, lock, disk.map_err(Failure::open)?)
}

/// Returns true if the process before has left frontends of another file than is open now: they cannot go on with this one.
pub(crate) fn is_another(service: &Service, disk: &Disk, left: &Parcel) -> bool {
    let is_another = !left.sessions.is_empty() && service.identities != left.disk.identities;
    if is_another {
        let name = disk.name();
        tracing::warn!(
            "{name}: the process before had another file open: a frontend has to connect again"
        );
    }
    is_another
}

/// Opens the disk with the files of a process that serves it until it is taken. `lock`: that process has it.
pub(crate) fn open_offered(
    service: &mut Service,
    lock: Option<&PathLock>,
    files: Vec<File>,
) -> Result<Arc<Disk>, Failure> {
    // It is active there, and is asked again before it is given. Its guest may leave for another host until then.
    service.open.locking = Locking::Given;
    let disk = source::open_storage(&service.disk, &service.open, files);
    complete(service, lock, disk.map_err(Failure::open)?)
}

/// Does with an opened disk what the lock of its socket asks for, and what its options do.
fn complete(
    service: &mut Service,
    lock: Option<&PathLock>,
    mut disk: Disk,
) -> Result<Arc<Disk>, Failure> {
    if let Some(file) = PathLock::copy(lock)? {
        disk.add_barrier(file);
    }
    if let Some(lock) = lock {
        if lock.left_a_server() {
            disk.mark_predecessor_died();
        }
        if lock.left_lost_changes(&service.disk) {
            disk.mark_changes_lost();
        }
        lock.note_failures_of(&mut disk);
    }
    service.identities = identities(disk.held_files());
    let is_polled = service.config.iopoll.get().is_on();
    if is_polled {
        disk = disk.with_iopoll().map_err(Failure::input)?;
    }
    let disk = Arc::new(disk);
    if is_polled {
        let probed = cleave_engine::probe_iopoll(&disk);
        probed.map_err(|error| match error.may_pass() {
            true => Failure::start(error),
            false => Failure::input(error),
        })?;
    }
    service.tuning.split = split_for(&service.config, &disk, service.names)?;
    record_beside(service, lock, disk.is_loss_untold())?;
    service.cache_note = lock.and_then(|lock| lock.cache_note(&service.disk));
    Ok(disk)
}

/// Records beside its socket that the disk is open. Goes on where that cannot be, unless the disk is on an NBD server: after a kill, the
/// next daemon would let that server's last writes from this one overtake its own.
fn record_beside(
    service: &Service,
    lock: Option<&PathLock>,
    is_loss_untold: bool,
) -> Result<(), Failure> {
    let recorded = match (lock, &service.endpoint) {
        (Some(lock), _) => lock.record(&service.disk, is_loss_untold),
        (None, Endpoint::Path(socket)) => Err(Unrecorded::without_lock(socket)),
        (None, Endpoint::Fd(_)) => Ok(()),
    };
    let Err(Unrecorded { why, remedy }) = recorded else {
        return Ok(());
    };
    match &service.disk {
        Storage::One(DiskSpec::Nbd(_)) if !service.open.read_only => Err(Failure::start(format!(
            "{why}: after a kill the next daemon would not know that the NBD server may still write: {remedy}"
        ))),
        // One without a lock has a line of its own when it is served.
        _ if lock.is_none() => Ok(()),
        _ => {
            tracing::warn!(
                "{why}: after a kill the next daemon will not know that this disk was served, nor of a failed sync, nor of a guest that \
                 has switched its write cache off: {remedy}, then reload or restart cleave"
            );
            Ok(())
        }
    }
}

/// Returns what tells these files from others: the numbers of their devices and inodes.
fn identities<'a>(files: impl IntoIterator<Item = &'a File>) -> Vec<Option<[u64; 3]>> {
    let identity = |file| {
        let found = fstat(file).ok()?;
        Some([found.st_dev, found.st_ino, found.st_rdev])
    };
    files.into_iter().map(identity).collect()
}

/// How a disk is found and shown.
#[derive(Debug)]
pub(crate) struct Naming {
    /// Its id in the control interface, if that is not its serial or its name.
    pub(crate) id: Option<String>,
    /// The socket of the frontends.
    pub(crate) endpoint: String,
    /// The lock of its path, if that is locked.
    pub(crate) lock: Option<File>,
    /// The listeners for what happens to it.
    pub(crate) events: Arc<Events>,
    /// The manager that keeps sessions of its frontends for the next process.
    pub(crate) manager: Option<Arc<Manager>>,
    /// False once the node before cannot take the disk back any more. `None`: nobody can.
    pub(crate) until_alone: Option<watch::Receiver<bool>>,
}

/// The state of the disk's loop.
pub(crate) struct DiskServer {
    service: Service,
    confinement: Confinement,
    disk: Arc<Disk>,
    device: Arc<Device>,
    /// The right of this host to read and write the disk.
    possession: Arc<DiskPossession>,
    watch: Watch,
    /// The watch ignores writes until then.
    rearm_at: Option<Instant>,
    size: SizeChecks,
    losses: ServerLosses,
    /// The lock of its socket's path, which is released when another process has the disk.
    lock: Option<File>,
    listener: Option<UnixListener>,
    /// An order that came while the sessions were being drained.
    deferred: Option<Order>,
    /// Accepting failed: not before this.
    accept_after: Option<Instant>,
    pending: PendingConnections,
    /// The threads that close what frontends send.
    offload: Offload,
    owners: Arc<Owners>,
    guests: Guests,
    status: Arc<DiskStatus>,
    /// The socket of the frontends, for messages.
    endpoint: String,
    /// The manager that keeps sessions. `None` without the lock of the socket's path: the next process could not tell when the I/O of
    /// this one has ended.
    manager: Option<Arc<Manager>>,
    /// Use of the disk by guests until now. The next process is told of it, which may find a session that this one did not get.
    disk_use: DiskUse,
    /// False once the node before cannot take the disk back any more, which serves it if this process dies. `None`: nobody can.
    until_alone: Option<watch::Receiver<bool>>,
    /// Limits of log lines: about frontends that connect and leave, about parked ones, about rejected ones, and about faults. They
    /// are separate so that many rejected frontends do not hide a fault.
    arrivals: Quota,
    parkings: Quota,
    rejections: Quota,
    faults: Quota,
    /// Totals of the disk when the last session ended; the line of the next session has the difference.
    reported: Totals,
    /// End when a frontend has left and none is there any more.
    once: bool,
}

/// Why the loop has ended.
enum LoopEnd {
    /// All that is in flight is finished, within this time if there is one. The disk ends as it says.
    Stopped(Served, Option<Duration>),
    /// The manager keeps the disk for the next process.
    Left(Arc<Manager>),
    /// This process has the disk.
    Given(Peer),
}

/// An event that wakes the loop.
enum Event {
    Ordered(Order),
    Ended(GuestKind, Option<Ending>),
    Accepted(io::Result<tokio::net::UnixStream>),
    AcceptAgain,
    Ready(UnixStream),
    Changed,
    Rearm,
    SizeChecked(io::Result<Resized>),
    /// The disk has come from another host.
    Acquired,
    /// The node before cannot take it back any more.
    Alone,
}

impl DiskServer {
    /// Makes the server of an opened disk and its watch. To be called inside the runtime. `confine` is called when nothing needs a
    /// path or a privilege any more, and before there is a thread that a frontend could reach.
    pub(crate) fn new(
        service: Service,
        disk: Arc<Disk>,
        door: &Door,
        naming: Naming,
        watch: Watch,
        confine: impl FnOnce(&str, Watch) -> Result<(Confinement, Watch), Failure>,
    ) -> Result<DiskServer, Failure> {
        let listener = door.listener()?;
        let loops = loop_device::attached_to_legs(&disk);
        let (confinement, watch) = confine(disk.name(), watch)?;
        confinement.confine_dialler(&disk);
        let device = device_of(&service, &disk);
        let device = device.at_worker_start(confinement.narrowing(Role::Worker));
        // Known when the disk can be shown.
        let id = Arc::new(OnceLock::new());
        let is_locked = naming.lock.is_some() || matches!(service.endpoint, Endpoint::Fd(_));
        let device = device.at_incident(telling(id.clone(), naming.events.clone()));
        let device = match &service.limit_group {
            Some(group) => device.in_group(group),
            None => device,
        };
        let device = device.in_pool(service.pool.clone());
        let device = Arc::new(device.recording(recording(&service)));
        let vrings = service.session.vrings_max;
        let events = naming.events.clone();
        let possession = possession::of(&disk, &service.open, &confinement, id.clone(), events);
        let status = DiskStatus::new(
            device.clone(),
            possession.clone(),
            naming.endpoint.clone(),
            vrings,
            confinement.clone(),
            &service.config,
        );
        let owners = Arc::new(Owners::of(possession.clone()));
        let terms = terms::of(&service, &disk, owners.clone());
        let status = status.named(naming.id).telling(naming.events);
        let status = status.handed_over_on(terms);
        let _ = id.set(status.id());
        let offload = Offload::default();
        Ok(DiskServer {
            once: service.once,
            watch,
            rearm_at: None,
            size: SizeChecks::new(disk.capacity_bytes()),
            losses: ServerLosses::default(),
            disk,
            device,
            owners,
            possession,
            service,
            confinement,
            lock: naming.lock,
            listener,
            deferred: None,
            accept_after: None,
            pending: PendingConnections::new(offload.clone()),
            offload,
            guests: Guests::default(),
            status: Arc::new(status),
            endpoint: naming.endpoint,
            manager: naming.manager.filter(|_| is_locked),
            disk_use: DiskUse::Unused,
            until_alone: naming.until_alone,
            arrivals: Quota::new(ARRIVALS_MAX),
            parkings: Quota::new(ARRIVALS_MAX),
            rejections: Quota::new(1),
            faults: Quota::new(1),
            reported: Totals::default(),
        }
        .announced(is_locked, &loops))
    }

    /// The disk's state as the control interface shows it.
    pub(crate) fn status(&self) -> Arc<DiskStatus> {
        self.status.clone()
    }

    /// Serves the frontend of an inherited connection, and no other.
    pub(crate) fn serve_connected(&mut self, door: &Door) -> Result<(), Failure> {
        let Door::Connected(stream) = door else {
            return Ok(());
        };
        self.once = true;
        let served = stream.try_clone().and_then(|stream| self.spawn(stream));
        served.map_err(|error| Failure::run(format!("cannot serve the frontend: {error}")))?;
        Ok(())
    }

    fn announced(self, is_locked: bool, loops: &[(String, String)]) -> DiskServer {
        self.announce(is_locked, loops);
        self
    }

    /// The loop, and the end. Whatever happens, the door is closed here: everything else only borrows it, because a door that is dropped
    /// closes what frontends have queued in it, and that may wait.
    pub(crate) async fn serve(
        &mut self,
        orders: &mut mpsc::Receiver<Order>,
        mut door: Door,
    ) -> Result<Served, Failure> {
        let deadline = self.service.stop_deadline();
        match self.serve_frontends(orders, &mut door).await {
            LoopEnd::Given(peer) => {
                door.close(&self.offload);
                Ok(Served::Given(peer))
            }
            LoopEnd::Left(manager) => {
                let left = self
                    .leave_to_next(orders, &mut door, deadline, &manager)
                    .await;
                // By one thread, because the guests of all disks wait for their end.
                let (served, packed) = match left {
                    Ok(packed) => (Ok(Served::Ended), packed),
                    Err(failure) => (Err(failure), None),
                };
                door.close_with(packed.map(Packed::into_fds), &self.offload);
                served
            }
            LoopEnd::Stopped(served, within) => {
                // With its file, and before the drain.
                self.offload.close(self.listener.take());
                door.close(&self.offload);
                self.pending.clear();
                let (since, time) = (Instant::now(), within.unwrap_or(deadline));
                let drained = self.drain(orders, time, SessionHandle::hang_up).await;
                // The timer of a quiet would keep the image open until its time is over.
                self.status.forget_quiet();
                // A sync whose result nobody learns counts as failed for the next process.
                let left = time.saturating_sub(since.elapsed());
                self.status.await_syncing(left).await;
                drained.map(|_| served)
            }
        }
    }

    async fn serve_frontends(
        &mut self,
        orders: &mut mpsc::Receiver<Order>,
        door: &mut Door,
    ) -> LoopEnd {
        loop {
            match self.event(orders).await {
                Event::Ordered(Order::Stop(why, within)) => {
                    let name = self.disk.name();
                    tracing::info!("{name}: {why}: finishing the requests in flight, then exiting");
                    return LoopEnd::Stopped(Served::Ended, within);
                }
                Event::Ordered(Order::Yield(why)) => {
                    self.warn_of_yielding(&why);
                    return LoopEnd::Stopped(Served::Yielded, None);
                }
                Event::Ordered(Order::HandOver(why, manager)) => {
                    return match self.is_kept_back(&why) {
                        true => LoopEnd::Stopped(Served::Ended, None),
                        false => LoopEnd::Left(manager),
                    };
                }
                Event::Ordered(Order::Offer(reply)) => {
                    let _ = reply.send(self.offer(door));
                }
                Event::Ordered(Order::Give(giver, peer, passing)) => {
                    if self.give(orders, giver, &peer).await {
                        door.set_owner(FileOwner::Another);
                        // Never let go: a signal that comes before the process ends must leave its sockets to the other one.
                        std::mem::forget(passing);
                        return LoopEnd::Given(peer);
                    }
                }
                Event::Ordered(Order::CheckSize(asker)) => self.check_size_for(asker),
                // It was told to hand over, and the disk stays here.
                Event::Ended(kind, Some(Ending::HandedOver(session))) => {
                    self.remove_guest(kind);
                    self.take_back(Offloaded::new(vec![*session], &self.offload));
                }
                Event::Ended(kind, ending) => {
                    self.end_session(kind, ending, "has left");
                    if self.once && self.guests.are_none() {
                        return LoopEnd::Stopped(Served::Ended, None);
                    }
                }
                Event::Accepted(Ok(stream)) => {
                    self.admit(stream);
                    self.pause_while_full();
                }
                Event::Accepted(Err(error)) => self.pause_accepting(&error),
                Event::AcceptAgain => self.pause_while_full(),
                Event::Ready(stream) => self.begin(stream),
                Event::Changed => self.look_at_change(),
                Event::Rearm => {
                    self.rearm_at = None;
                    self.watch.watch_writes();
                    self.check_size();
                }
                Event::SizeChecked(resized) => self.report_size(resized),
                Event::Acquired => self.check_size(),
                Event::Alone => self.keep_sessions(),
            }
        }
    }

    /// The disk, or its server, has changed.
    fn look_at_change(&mut self) {
        self.tell_losses();
        if self.rearm_at.is_none() {
            let pause = self.watch.ignore_writes();
            self.rearm_at = pause.map(|pause| Instant::now() + pause);
        }
        self.check_size();
    }

    async fn event(&mut self, orders: &mut mpsc::Receiver<Order>) -> Event {
        if let Some(order) = self.deferred.take() {
            return Event::Ordered(order);
        }
        let DiskServer {
            guests,
            listener,
            pending,
            watch,
            size,
            possession,
            until_alone,
            ..
        } = self;
        let have_place = guests.have_place();
        let pause = self.accept_after;
        let rearm_at = self.rearm_at;
        tokio::select! {
            // In this order: a shutdown is never delayed, and a session has ended before the next one starts.
            biased;
            Some(order) = orders.recv() => Event::Ordered(order),
            (kind, ending) = guests.ended() => Event::Ended(kind, ending),
            stream = pending.next_ready(), if have_place => Event::Ready(stream),
            accepted = accept(listener), if pause.is_none() => Event::Accepted(accepted),
            () = until(pause), if pause.is_some() => Event::AcceptAgain,
            resized = size.checked() => Event::SizeChecked(resized),
            () = possession.acquired() => Event::Acquired,
            () = watch.changed() => Event::Changed,
            () = until(rearm_at), if rearm_at.is_some() => Event::Rearm,
            () = is_alone(until_alone) => Event::Alone,
        }
    }

    /// A frontend has connected.
    fn admit(&mut self, stream: tokio::net::UnixStream) {
        let name = self.disk.name();
        if self.guests.are_two() {
            self.offload.hang_up(stream);
            return self.rejections.log(|more| {
                tracing::warn!("{name}: a third frontend was turned away: two are connected{more}");
            });
        }
        // One that has left and whose session is about to end makes room: this one waits its turn.
        if self.pending.add(stream) {
            self.rejections.log(|more| {
                tracing::warn!("{name}: the oldest of many silent connections was closed{more}");
            });
        }
    }

    /// A connection that is turned away has to be closed, for which there may be no thread left.
    fn pause_while_full(&mut self) {
        self.accept_after = self
            .offload
            .is_full()
            .then(|| Instant::now() + ACCEPT_PAUSE);
        if self.accept_after.is_some() {
            let name = self.disk.name();
            self.faults.log(|more| {
                tracing::warn!(
                    "{name}: no frontend is accepted: earlier ones left descriptors that cannot be closed; end \
                     the programs that hold the other ends of their sockets and pipes{more}"
                );
            });
        }
    }

    /// Accepting failed: most likely no descriptor is free. The oldest silent connection is closed in
    /// favour of the new one. Trying again at once would only spin.
    fn pause_accepting(&mut self, error: &io::Error) {
        self.pending.close_oldest();
        self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
        let name = self.disk.name();
        self.faults.log(|more| {
            tracing::warn!(
                "{name}: cannot accept a frontend: {error}: raise the limit of open files (LimitNOFILE=){more}"
            );
        });
    }
}

fn device_of(service: &Service, disk: &Arc<Disk>) -> Device {
    let has_cache = service.config.cache.get() == Cache::Writeback;
    let device = Device::new(
        Arc::clone(disk),
        service.config.serial.get().padded(),
        has_cache,
        service.worker.clone(),
        service.tuning.clone(),
    );
    // A guest that starts with its cache off finds it off at the next daemon too.
    device.noting_cache(service.cache_note.clone().filter(|_| has_cache))
}

fn recording(service: &Service) -> Recording {
    match service.config.stats.get().is_on() {
        true => Recording::On,
        false => Recording::Off,
    }
}

/// Tells of what workers report.
fn telling(id: Arc<OnceLock<String>>, events: Arc<Events>) -> impl Fn(Incident) + Send + Sync {
    move |incident| {
        let id = id.get().map_or("", String::as_str);
        let error = |errno| io::Error::from_raw_os_error(errno).to_string();
        match incident {
            Incident::Held {
                vring,
                verb,
                sector,
                errno,
            } => {
                let more =
                    json!({"vring": vring, "verb": verb, "sector": sector, "error": error(errno)});
                events.tell(id, EventName::Held, more);
            }
            Incident::Released { requests } => {
                events.tell(id, EventName::Released, json!({ "requests": requests }));
            }
            Incident::Failed {
                offset_bytes,
                len_bytes,
                errno,
            } => {
                let more = json!({"offset_bytes": offset_bytes, "len_bytes": len_bytes, "error": error(errno)});
                events.tell(id, EventName::Error, more);
            }
            Incident::Retired { vring, why } => {
                events.tell(id, EventName::Retired, json!({"vring": vring, "why": why}));
            }
            Incident::TakenOver => events.tell(id, EventName::TakenOver, Value::Null),
        }
    }
}

async fn accept(listener: &Option<UnixListener>) -> io::Result<tokio::net::UnixStream> {
    match listener {
        Some(listener) => Ok(listener.accept().await?.0),
        None => std::future::pending().await,
    }
}

/// Waits until the node before cannot take the disk back any more.
async fn is_alone(until_alone: &mut Option<watch::Receiver<bool>>) {
    match until_alone {
        // The sender lives as long as the node.
        Some(takes_over) => drop(takes_over.wait_for(|takes_over| !takes_over).await),
        None => std::future::pending().await,
    }
}

async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant.into()).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use cleave_config::{DiskConfig, Names};

    use super::*;

    /// A file or a device has locks of its own.
    #[test]
    fn an_export_is_not_served_where_nothing_tells_of_it_after_a_kill() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let beside = folder.path().join("s.lock");
        let service = |fields: &str, endpoint: &Endpoint| {
            let config = DiskConfig::from_toml(fields).unwrap();
            Service::new(config, endpoint.clone(), Names::Fields).unwrap()
        };
        let export = "disk = ['nbd+unix:///?socket=/none']";
        let at = Endpoint::Path(socket.clone());
        let may_serve = [
            service("disk = ['/none']", &at),
            service(&format!("{export}\nread_only = true"), &at),
        ];
        let refused = |lock: Option<&PathLock>| {
            for service in &may_serve {
                record_beside(service, lock, false).unwrap();
            }
            let failure = record_beside(&service(export, &at), lock, false).unwrap_err();
            assert_eq!(failure.exit_code(), std::process::ExitCode::from(1));
            failure.to_string()
        };
        let why = refused(None);
        assert!(why.contains("s.lock cannot be made or locked"), "{why}");
        fs::write(&beside, "x").unwrap();
        let lock = PathLock::take(&socket).unwrap();
        let why = refused(lock.as_ref());
        assert!(why.contains("remove that file"), "{why}");
        assert_eq!(fs::read_to_string(&beside).unwrap(), "x");
        drop(lock);
        fs::remove_file(&beside).unwrap();
        let lock = PathLock::take(&socket).unwrap();
        record_beside(&service(export, &at), lock.as_ref(), false).unwrap();
        // The VMM's own number: there is no path, and no file beside it.
        record_beside(&service(export, &Endpoint::Fd(3)), None, false).unwrap();
    }
}
