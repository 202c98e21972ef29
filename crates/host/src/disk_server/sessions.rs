//! The sessions of a disk: how they begin and end.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cleave_api::EventName;
use cleave_sandbox::Role;
use cleave_session::{
    Ending, Handover, Offload, Offloaded, Owners, Session, SessionConfig, SessionHandle,
};
use cleave_worker::{Device, Totals};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use super::guests::{Guest, GuestKind};
use super::{DiskServer, Order, until};
use crate::failure::Failure;
use crate::handover::merge::DiskUse;

/// How long the end of a session may wait for its frontend, at most.
const HANG_UP_AFTER: Duration = Duration::from_millis(500);

impl DiskServer {
    /// Starts a session on a thread of its own.
    pub(super) fn begin(&mut self, stream: UnixStream) {
        let name = self.disk.name().to_owned();
        if self.device.is_lost() {
            self.offload.hang_up(stream);
            return self.faults.log(|more| {
                tracing::error!(
                    "{name}: a frontend was turned away: a worker failed twice and left requests in flight, which could overtake \
                     newer ones; start the daemon again{more}"
                );
            });
        }
        match self.spawn(stream) {
            Ok(GuestKind::Guest) => self
                .arrivals
                .log(|more| tracing::info!("{name}: a frontend has connected{more}")),
            Ok(GuestKind::Parked) => {
                self.parkings.log(|more| {
                    tracing::info!(
                        "{name}: a second frontend has connected and is parked: it can start when the first has stopped its \
                         vrings{more}"
                    );
                });
                let waiting = self.pending.clear();
                if waiting > 0 {
                    self.rejections.log(|more| {
                        tracing::warn!("{name}: {waiting} further frontends were turned away: two are connected{more}");
                    });
                }
            }
            Err(error) => self.faults.log(|more| {
                tracing::warn!("{name}: a frontend cannot be served: {error}{more}");
            }),
        }
    }

    pub(super) fn spawn(&mut self, stream: UnixStream) -> io::Result<GuestKind> {
        let theirs = stream.try_clone();
        self.spawn_session(stream, |device, offload, owners, config| {
            Session::new(theirs?, device, offload, owners, config)
        })
    }

    /// Starts the session of this connection on a thread of its own.
    pub(super) fn spawn_session(
        &mut self,
        stream: UnixStream,
        make: impl FnOnce(
            Arc<Device>,
            Offload,
            Arc<Owners>,
            SessionConfig,
        ) -> io::Result<(Session, SessionHandle)>,
    ) -> io::Result<GuestKind> {
        self.disk_use = DiskUse::MaybeUsed;
        let started = self.start(make);
        let (remote, ending) = match started {
            Ok(started) => started,
            Err(error) => {
                self.offload.hang_up(stream);
                return Err(error);
            }
        };
        let kind = self.guests.add(Guest {
            remote,
            stream: Arc::new(stream),
            ending,
        });
        let event = match kind {
            GuestKind::Guest => EventName::Connected,
            GuestKind::Parked => EventName::Parked,
        };
        self.status.begin(self.guests.sessions(), event);
        Ok(kind)
    }

    fn start(
        &self,
        make: impl FnOnce(
            Arc<Device>,
            Offload,
            Arc<Owners>,
            SessionConfig,
        ) -> io::Result<(Session, SessionHandle)>,
    ) -> io::Result<(SessionHandle, oneshot::Receiver<Ending>)> {
        let config = self.service.session.clone();
        let (device, owners) = (Arc::clone(&self.device), Arc::clone(&self.owners));
        let (session, remote) = make(device, self.offload.clone(), owners, config)?;
        if let Some(keeper) = self.keeper() {
            remote.keep_with(keeper);
        }
        let (reply, ending) = oneshot::channel();
        let confinement = self.confinement.clone();
        thread::Builder::new()
            .name("session".to_owned())
            .spawn(move || {
                confinement.thread(Role::Session);
                // The receiver is gone only when the process is about to exit.
                let _ = reply.send(session.run());
            })?;
        Ok((remote, ending))
    }

    /// A session has ended; `None`: its thread failed. `left` says how a connection that was in order ended.
    pub(super) fn end_session(&mut self, kind: GuestKind, ending: Option<Ending>, left: &str) {
        let (kind, ended) = self.guests.remove(kind);
        self.offload.close(ended.map(|guest| guest.stream));
        let sessions = self.guests.sessions();
        match kind {
            GuestKind::Parked => {
                self.status.end(sessions, EventName::ParkedLeft);
                self.tell_parked_ended(ending, left);
            }
            GuestKind::Guest => {
                // Only the guest's frontend waits for locks. Another one that waits since then asks again.
                self.possession.stop_waiting();
                let has_next = !sessions.is_empty();
                self.status.end(sessions, EventName::Disconnected);
                self.tell_ended(ending, left);
                if has_next {
                    self.status.tell(EventName::Connected, Value::Null);
                }
            }
        }
    }

    /// Many parked frontends must not hide what the guest's does.
    fn tell_parked_ended(&mut self, ending: Option<Ending>, left: &str) {
        let name = self.disk.name();
        self.parkings.log(|more| match ending {
            Some(Ending::HungUp) => tracing::info!("{name}: the parked frontend {left}{more}"),
            // It may also have started although the disk was taken over from it.
            Some(Ending::Refused(why) | Ending::Lost(why)) => {
                tracing::warn!("{name}: the parked frontend was let go: {why}{more}");
            }
            Some(Ending::HandedOver(_)) => {}
            None => tracing::error!("{name}: the session of the parked frontend failed{more}"),
        });
    }

    fn tell_ended(&mut self, ending: Option<Ending>, left: &str) {
        let name = self.disk.name();
        let totals = self.device.totals();
        let served = totals.since(std::mem::replace(&mut self.reported, totals));
        match ending {
            // QEMU connects a few times while it starts; sums of nothing would fill the log.
            Some(Ending::HungUp) if is_unused(&served) => self.arrivals.log(|more| {
                tracing::info!("{name}: the frontend {left} without a request{more}");
            }),
            Some(Ending::HungUp) => self
                .arrivals
                .log(|more| tracing::info!("{name}: the frontend {left} after {served}{more}")),
            Some(Ending::Refused(why)) => self.faults.log(|more| {
                tracing::warn!(
                    "{name}: the frontend broke the protocol and was let go: {why}{more}"
                );
            }),
            Some(Ending::Lost(why)) => self
                .faults
                .log(|more| tracing::warn!("{name}: the frontend was let go: {why}{more}")),
            Some(Ending::HandedOver(_)) => {}
            None => self
                .faults
                .log(|more| tracing::error!("{name}: the session failed{more}")),
        }
    }

    /// Ends the sessions with `end` and waits for them, at most for so long, or for less if that is ordered meanwhile. Returns those
    /// that can go on in another process.
    pub(super) async fn drain(
        &mut self,
        orders: &mut mpsc::Receiver<Order>,
        mut deadline: Duration,
        end: fn(&SessionHandle),
    ) -> Result<Offloaded<Handover>, Failure> {
        self.guests.iter().for_each(|guest| end(&guest.remote));
        let keeps = self.guests.iter().all(|guest| {
            let vrings = guest.remote.view().vrings;
            vrings.iter().all(|vring| vring.recovery)
        });
        let patience = Some(HANG_UP_AFTER.min(deadline / 2));
        match self.sessions_end(orders, &mut deadline, patience).await {
            (handovers, true) => Ok(handovers),
            (_, false) => Err(self.abandon(deadline, keeps)),
        }
    }

    /// Waits for the ends of all sessions, at most for so long, or for less if that is ordered meanwhile. Returns those that can go on in
    /// another process, and true if all have ended. `patience`: for how long frontends are waited for that do not go on; a session that
    /// is itself late has until the deadline.
    pub(super) async fn sessions_end(
        &mut self,
        orders: &mut mpsc::Receiver<Order>,
        deadline: &mut Duration,
        mut patience: Option<Duration>,
    ) -> (Offloaded<Handover>, bool) {
        let mut handovers = Offloaded::new(Vec::new(), &self.offload);
        let start = Instant::now();
        while !self.guests.are_none() {
            let impatient_at = patience.map(|patience| start + patience);
            tokio::select! {
                biased;
                (kind, ending) = self.guests.ended() => match ending {
                    Some(Ending::HandedOver(handover)) => {
                        self.remove_guest(kind);
                        handovers.push(*handover);
                    }
                    ending => self.end_session(kind, ending, "was disconnected"),
                },
                Some(order) = orders.recv() => {
                    if let Order::Stop(_, Some(within)) = order {
                        *deadline = (*deadline).min(start.elapsed() + within);
                    }
                    // The disk may stay. Whoever waits for another order learns that it was not taken.
                    if matches!(order, Order::Stop(..) | Order::HandOver(..)) {
                        self.deferred = Some(order);
                    }
                }
                () = until(impatient_at), if impatient_at.is_some() => {
                    patience = None;
                    self.guests.iter().for_each(|guest| guest.remote.hurry());
                }
                () = tokio::time::sleep_until((start + *deadline).into()) => {
                    return (handovers, false);
                }
            }
        }
        // The owner starts first, so that no other session can be taken for the first one.
        handovers.sort_by_key(|session| !session.owns);
        (handovers, true)
    }

    /// Removes a frontend whose session has ended and its connection has not.
    pub(super) fn remove_guest(&mut self, kind: GuestKind) {
        let (_, guest) = self.guests.remove(kind);
        self.offload.close(guest.map(|guest| guest.stream));
    }

    /// Gives up the disk, which hangs. Returns what is lost; `keeps`: the frontend has a list of the requests in flight.
    fn abandon(&mut self, deadline: Duration, keeps: bool) -> Failure {
        let name = self.disk.name().to_owned();
        let out = self.in_flight();
        self.disk.abandon();
        let seconds = deadline.as_secs();
        let guests = std::mem::take(&mut self.guests);
        self.offload.close(guests.into_streams());
        let Some(out) = out else {
            return Failure::run(format!(
                "{name}: the disk did not answer the last flush within {seconds} s; no request is in flight, but what the \
                 guest wrote since it last flushed may be lost if the disk's server fails now; see why the disk hangs"
            ));
        };
        Failure::run(match keeps {
            true => format!(
                "{name}: {out} left to the next daemon: still in flight after {seconds} s; the guest waits, and \
                 the next cleave at this socket does what is left once more; see why the disk hangs"
            ),
            false => format!(
                "{name}: {out} lost: still in flight after {seconds} s, so it is unknown whether the disk did \
                 what was asked, and the guest waits for the answers; see why the disk hangs, then reset the guest"
            ),
        })
    }

    /// Returns how many requests are in flight, as the subject of a sentence; `None`: none is. Nothing counts them with `--stats off`.
    fn in_flight(&self) -> Option<String> {
        let records = self.device.records.all();
        match records
            .iter()
            .map(|record| record.in_flight().0)
            .sum::<u32>()
        {
            0 if self.device.records.is_on() => None,
            0 => Some("requests are".to_owned()),
            1 => Some("1 request is".to_owned()),
            several => Some(format!("{several} requests are")),
        }
    }
}

/// Returns true if a session had no request, good or bad.
fn is_unused(served: &Totals) -> bool {
    let Totals {
        reads,
        writes,
        others,
        failed,
        refused,
        broken,
        retired,
        ..
    } = *served;
    [reads, writes, others, failed, refused, broken, retired] == [0; 7]
}
