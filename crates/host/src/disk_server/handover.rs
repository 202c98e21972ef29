//! How a disk goes from one process to the next with its frontends, which notice nothing but a pause.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use cleave_session::{Handover, Keeper, Offloaded, Session, SessionHandle};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;

use super::terms::is_in_memory;
use super::{DiskServer, Order};
use crate::failure::Failure;
use crate::handover::merge::DiskUse;
use crate::handover::parcel::{DiskRecord, Packed, Parcel};
use crate::handover::store::{self, SessionKeeper};
use crate::process::systemd::Manager;
use crate::socket::{Door, FileOwner};

impl DiskServer {
    /// Tells of the end for this reason. Returns true if the frontends have to connect again.
    pub(super) fn is_kept_back(&self, why: &str) -> bool {
        let name = self.disk.name();
        let obstacle = self.status.obstacle();
        match &obstacle {
            None => tracing::info!(
                "{name}: {why}: finishing the requests in flight, then leaving the rest to the next process"
            ),
            Some(obstacle) => tracing::info!(
                "{name}: {why}: finishing the requests in flight, then exiting; a frontend has to connect again, because {obstacle}"
            ),
        }
        obstacle.is_some()
    }

    /// Ends, and has the manager keep what the next process needs to go on. The caller closes the door and what is returned.
    pub(super) async fn leave_to_next(
        &mut self,
        orders: &mut mpsc::Receiver<Order>,
        door: &mut Door,
        deadline: Duration,
        manager: &Manager,
    ) -> Result<Option<Packed>, Failure> {
        let since = now();
        // The door has the socket too, so this close is not the last one and waits for nothing.
        self.listener = None;
        self.pending.clear();
        let sessions = self.drain(orders, deadline, SessionHandle::hand_over).await;
        self.status.forget_quiet();
        let sessions = sessions?;
        if !self.possession.is_active() {
            // It has gone to another host with its guest meanwhile. The next process would lock the files again, and nobody would
            // release them for that host.
            let name = self.disk.name();
            tracing::info!(
                "{name}: its guest has left for another host: nothing is kept for the next process"
            );
            return Ok(None);
        }
        // The guest waits, and must not be told that what was lost is durable.
        let time = deadline.saturating_sub(now().saturating_sub(since));
        self.status.await_syncing(time).await;
        let cannot = |error| Failure::run(format!("cannot be handed over: {error}"));
        let parcel = Parcel {
            sessions,
            since: Some(since),
            limit_levels: Some(self.device.limit_levels()),
            sync_failure: self.disk.sync_failure(),
            ..self.parcel(door).map_err(cannot)?
        };
        door.set_owner(FileOwner::Another);
        let (packed, kept) = match parcel.pack() {
            Ok(packed) => {
                let kept = store::keep(manager, self.disk_use, &packed).await;
                (Some(packed), kept)
            }
            Err(failed) => (None, Err(failed.1)),
        };
        if let Err(error) = kept {
            let name = self.disk.name();
            tracing::warn!(
                "{name}: nothing is kept for the next process: {error}: a frontend has to connect again"
            );
        }
        Ok(packed)
    }

    /// Returns all that another process needs but the sessions.
    pub(super) fn parcel(&self, door: &Door) -> io::Result<Parcel> {
        let files = self.disk.held_files();
        let files = files.map(|file| file.try_clone().map(OwnedFd::from));
        Ok(Parcel {
            disk: self.record(),
            files: files.collect::<io::Result<_>>()?,
            listener: Vec::from_iter(door.copy()?).into(),
            ..Parcel::default()
        })
    }

    pub(super) fn record(&self) -> DiskRecord {
        DiskRecord::of(self.status.id(), &self.service)
    }

    /// Returns what keeps a session for the case that this process is killed. `None` as long as another process would go on then: the
    /// manager would hold the connection, of which that process knows nothing, and the frontend would never see its end.
    pub(super) fn keeper(&self) -> Option<Box<dyn Keeper>> {
        let is_ours = self.until_alone.is_none() && !is_in_memory(&self.disk);
        let manager = self.manager.as_ref().filter(|_| is_ours)?;
        let keeper = SessionKeeper::new(manager.clone(), self.record());
        Some(Box::new(keeper))
    }

    /// Has all sessions kept: no other process would go on with the disk any more.
    pub(super) fn keep_sessions(&mut self) {
        self.until_alone = None;
        for guest in self.guests.iter() {
            if let Some(keeper) = self.keeper() {
                guest.remote.keep_with(keeper);
            }
        }
    }

    /// Goes on with what another process has left: the sessions, a sync that failed, and the limits where they were.
    pub(crate) fn resume(&mut self, parcel: Parcel) {
        if parcel.disk != DiskRecord::default() {
            self.disk_use = DiskUse::MaybeUsed;
        }
        if let Some(failure) = parcel.sync_failure {
            self.disk.inherit_sync_failure(failure);
        }
        if let Some(levels) = &parcel.limit_levels {
            self.device.fill_limits(levels);
        }
        let (name, status) = (self.disk.name().to_owned(), self.status.clone());
        self.go_on_with(parcel.sessions, move |at| {
            let pause = parcel.since.map(|since| now().saturating_sub(since));
            // The guest's, which comes first. One that is parked waits for nothing.
            if at == 0 {
                status.note_taken_over(pause);
            }
            let Some(pause) = pause else {
                return tracing::info!("{name}: the frontend of a daemon that died was taken over");
            };
            let pause = pause.as_secs_f64() * 1e3;
            tracing::info!("{name}: its frontend was taken over after a pause of {pause:.1} ms");
        });
    }

    /// Goes on with sessions that no other process has taken.
    pub(super) fn take_back(&mut self, sessions: Offloaded<Handover>) {
        self.go_on_with(sessions, |_| {});
    }

    /// Goes on with sessions. `resumed`: called with the place of each when its vrings are served again.
    fn go_on_with(
        &mut self,
        mut sessions: Offloaded<Handover>,
        resumed: impl Fn(usize) + Clone + Send + 'static,
    ) {
        // The owner before another that could claim the disk.
        sessions.sort_by_key(|session| !session.owns);
        for (at, session) in sessions.into_vec().into_iter().enumerate() {
            let resumed = resumed.clone();
            let resumed = move || resumed(at);
            let resumed = match session.connection.try_clone() {
                Ok(stream) => self.spawn_session(stream, move |device, offload, owners, config| {
                    Session::resume(session, device, offload, owners, config, resumed)
                }),
                Err(error) => {
                    self.offload.close(session);
                    Err(error)
                }
            };
            if let Err(error) = resumed {
                let name = self.disk.name();
                self.faults.log(|more| {
                    tracing::warn!("{name}: a frontend cannot be taken over: {error}{more}");
                });
            }
        }
        // The disk may have another size than when they last asked, or may have had and not have said so.
        self.guests
            .iter()
            .for_each(|guest| guest.remote.config_changed());
    }
}

/// Returns the time on a clock that all processes of this host have in common.
pub(super) fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}
