//! How a disk goes from one process to the next with its frontends, which notice nothing but a pause.

use std::os::fd::OwnedFd;
use std::time::Duration;

use cleave_session::{Handover, Keeper, Session, SessionHandle};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;

use super::terms::is_in_memory;
use super::{DiskServer, Order, identities};
use crate::failure::Failure;
use crate::handover::parcel::{DiskRecord, Parcel};
use crate::handover::store::{self, SessionKeeper};
use crate::process::systemd::{self, Manager};
use crate::socket::Door;

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

    /// Ends, and has the manager keep what the next process needs to go on.
    pub(super) async fn leave_to_next(
        &mut self,
        orders: &mut mpsc::Receiver<Order>,
        door: Door,
        deadline: Duration,
        manager: &Manager,
    ) -> Result<(), Failure> {
        let parcel = self.hand_over(orders, door, deadline).await;
        self.status.forget_quiet();
        let name = systemd::kept_name("disk");
        if let Err(error) = store::keep(manager, &name, parcel?).await {
            let name = self.disk.name();
            tracing::warn!(
                "{name}: nothing is kept for the next process: {error}: a frontend has to connect again"
            );
        }
        Ok(())
    }

    /// Ends the sessions in such a way that another process goes on with them. Returns all that it needs.
    pub(super) async fn hand_over(
        &mut self,
        orders: &mut mpsc::Receiver<Order>,
        door: Door,
        deadline: Duration,
    ) -> Result<Parcel, Failure> {
        let since = now();
        self.offload.close(self.listener.take());
        self.pending.clear();
        let mut sessions = self
            .drain(orders, deadline, SessionHandle::hand_over)
            .await?;
        // The owner starts first, so that no other session can be taken for the first one.
        sessions.sort_by_key(|session| !session.owns);
        let files = self.disk.held_files();
        let files = files.map(|file| file.try_clone().map(OwnedFd::from));
        let files = files.collect::<Result<_, _>>();
        let cannot = |error| Failure::run(format!("cannot be handed over: {error}"));
        Ok(Parcel {
            disk: self.record(),
            files: files.map_err(cannot)?,
            listener: door.hand_over().map_err(cannot)?,
            sessions,
            since: Some(since),
        })
    }

    fn record(&self) -> DiskRecord {
        DiskRecord {
            id: self.status.id(),
            storage: self.service.disk.line(),
            endpoint: self.endpoint.clone(),
            identities: identities(self.disk.held_files()),
        }
    }

    /// Returns what keeps a session for the case that this process is killed.
    pub(super) fn keeper(&self) -> Option<Box<dyn Keeper>> {
        let manager = self
            .manager
            .as_ref()
            .filter(|_| !is_in_memory(&self.disk))?;
        let keeper = SessionKeeper::new(manager.clone(), self.record());
        Some(Box::new(keeper))
    }

    /// Goes on with the sessions of another process. `since`: they have waited from then on.
    pub(crate) fn resume(&mut self, sessions: Vec<Handover>, since: Option<Duration>) {
        for (at, session) in sessions.into_iter().enumerate() {
            let name = self.disk.name().to_owned();
            let (told, status) = (name.clone(), self.status.clone());
            let resumed = move || {
                let pause = since.map(|since| now().saturating_sub(since));
                // The guest's, which comes first. One that is parked waits for nothing.
                if at == 0 {
                    status.note_taken_over(pause);
                }
                let Some(pause) = pause else {
                    return tracing::info!(
                        "{told}: the frontend of a daemon that died was taken over"
                    );
                };
                let pause = pause.as_secs_f64() * 1e3;
                tracing::info!(
                    "{told}: its frontend was taken over after a pause of {pause:.1} ms"
                );
            };
            let stream = session.connection.try_clone();
            let resumed = stream.and_then(|stream| {
                self.spawn_session(stream, move |device, offload, owners, config| {
                    Session::resume(session, device, offload, owners, config, resumed)
                })
            });
            if let Err(error) = resumed {
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
fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}
