//! Gives a disk to a process that takes it over while this one runs, or goes on with it.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_api::ProblemKind;
use cleave_disk::Backing;
use cleave_session::{Handover, HandoverObstacle, Offloaded};
use rustix::fs::{FlockOperation, flock};
use tokio::sync::mpsc;

use super::handover::now;
use super::{DiskServer, Order};
use crate::handover::link::{Giver, Peer};
use crate::handover::parcel::{Packed, Parcel};
use crate::hosted::aside::aside;
use crate::problem::Refusal;
use crate::socket::Door;

/// Longest time for which a guest waits for its requests in flight, and then for the other process.
const GIVE_TIME: Duration = Duration::from_secs(2);

impl DiskServer {
    /// Returns what a process needs that takes the disk over, without its sessions.
    pub(super) fn offer(&self, door: &Door) -> Result<Parcel, Refusal> {
        let stays = |kind, why: &str| {
            let name = self.disk.name();
            let why = format!("{name} stays with the process that serves it: {why}");
            Refusal(kind, why)
        };
        if let Some(obstacle) = self.obstacle_of_giving() {
            // A restart would get past one that passes too, and lose what it protects.
            let kind = match obstacle.passes {
                true => ProblemKind::Busy,
                false => ProblemKind::CannotHandOver,
            };
            return Err(stays(kind, obstacle.why));
        }
        let parcel = match self.parcel(door) {
            Ok(parcel) => parcel,
            Err(error) => return Err(stays(ProblemKind::Busy, &error.to_string())),
        };
        match parcel.has_listener() {
            true => Ok(parcel),
            false => Err(stays(
                ProblemKind::CannotHandOver,
                "its socket is the service manager's: restart the service",
            )),
        }
    }

    /// Returns why this disk cannot be given to a process while this one runs. There, nothing would wait for what this process or an
    /// earlier one may still have in flight. An obstacle that passes comes before one that lasts.
    fn obstacle_of_giving(&self) -> Option<HandoverObstacle> {
        let (lasting, passing) = (HandoverObstacle::lasting, HandoverObstacle::passing);
        let is_away =
            |backing: &Backing| matches!(backing, Backing::Nbd(nbd) if nbd.state().waiting > 0);
        let own = [
            (
                is_away(self.disk.backing()),
                passing("it waits for its server"),
            ),
            (
                self.disk.owes_changes(),
                passing(
                    "its server may have lost changes, and no flush of the guest has failed since",
                ),
            ),
            (
                self.device.unsettled_for().is_some(),
                passing("its server may still do what a daemon sent that died"),
            ),
            (
                self.status.is_syncing(),
                passing(
                    "it is being flushed for the operator, and only this process learns whether that fails",
                ),
            ),
            (
                self.device.is_lost(),
                lasting("a worker failed and left requests in flight"),
            ),
            (
                self.service.disk.needs_ceph(),
                lasting("its image is locked by this client of the cluster"),
            ),
        ];
        let own = own.into_iter().filter(|(is_there, _)| *is_there);
        let own = own.map(|(_, obstacle)| obstacle);
        let mut all: Vec<_> = own.chain(self.status.obstacles()).collect();
        all.sort_by_key(|obstacle| !obstacle.passes);
        all.into_iter().next()
    }

    /// Gives the disk to a process that is ready to take it. Returns false if this one goes on with it.
    pub(super) async fn give(
        &mut self,
        orders: &mut mpsc::Receiver<Order>,
        giver: Giver,
        peer: &Peer,
    ) -> bool {
        let name = self.disk.name().to_owned();
        if let Err(why) = self.try_to_give(orders, giver).await {
            self.status.admit_quiet();
            let pid = peer.pid;
            tracing::warn!("{name}: it is served as before: process {pid} has not taken it: {why}");
            return false;
        }
        // From here on the other process serves. It waits for the lock.
        let lock = self.lock.iter();
        let mut released = lock.map(|lock| flock(lock, FlockOperation::Unlock));
        if let Some(Err(error)) = released.next() {
            tracing::warn!("{name}: the lock beside its socket cannot be released: {error}");
        }
        tracing::info!("{name}: process {} has taken it over", peer.pid);
        self.offload.close(self.listener.take());
        self.pending.clear();
        self.status.forget_quiet();
        true
    }

    /// Tells that the disk ends, for this reason, so that another process can open it.
    pub(super) fn warn_of_yielding(&self, why: &str) {
        let name = self.disk.name();
        tracing::warn!(
            "{name}: {why}: finishing the requests in flight, then leaving the disk to that process; its frontend has to connect again"
        );
    }

    /// Drains the sessions and offers them. If they are not taken, they go on here.
    async fn try_to_give(
        &mut self,
        orders: &mut mpsc::Receiver<Order>,
        giver: Giver,
    ) -> Result<(), String> {
        let since = now();
        let packed = match self.pack_sessions(orders, since).await {
            Ok(packed) => Arc::new(packed),
            Err((sessions, why)) => {
                giver.keep(&why);
                self.take_back(sessions);
                return Err(why);
            }
        };
        let sent = packed.clone();
        let deadline = Instant::now() + GIVE_TIME;
        let given = aside("hand-over", move || giver.give(&sent, deadline)).await;
        let Err(error) = given else {
            return Ok(());
        };
        match Arc::into_inner(packed).map(Parcel::unpack) {
            Some(Ok(parcel)) => self.take_back(parcel.sessions),
            Some(Err(error)) => tracing::error!("{}: {error}", self.disk.name()),
            None => {}
        }
        Err(error.to_string())
    }

    /// Drains the sessions and packs them. If that cannot be, those that have ended come back with the reason; the others follow when
    /// they end.
    async fn pack_sessions(
        &mut self,
        orders: &mut mpsc::Receiver<Order>,
        since: Duration,
    ) -> Result<Packed, (Offloaded<Handover>, String)> {
        self.status.bar_quiet();
        if let Some(obstacle) = self.obstacle_of_giving() {
            return Err((Offloaded::default(), obstacle.why.to_owned()));
        }
        for guest in self.guests.iter() {
            guest.remote.hand_over();
        }
        let mut time = GIVE_TIME;
        let (sessions, have_ended) = self.sessions_end(orders, &mut time, None).await;
        if !have_ended {
            self.guests.iter().for_each(|guest| guest.remote.stay());
            let why = "requests or messages of its frontend are not finished in time";
            return Err((sessions, why.to_owned()));
        }
        // A guest may have left for another host meanwhile.
        if let Some(obstacle) = self.obstacle_of_giving() {
            return Err((sessions, obstacle.why.to_owned()));
        }
        let parcel = Parcel {
            disk: self.record(),
            sessions,
            since: Some(since),
            limit_levels: Some(self.device.limit_levels()),
            sync_failure: self.disk.sync_failure(),
            ..Parcel::default()
        };
        parcel.pack().map_err(|failed| {
            let (parcel, error): (Parcel, io::Error) = *failed;
            (parcel.sessions, error.to_string())
        })
    }
}
