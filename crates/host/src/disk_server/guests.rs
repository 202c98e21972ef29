//! The frontends of a disk that have sessions: the guest's, and one that is parked.

use std::future::pending;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use cleave_session::{Ending, SessionHandle};
use tokio::sync::oneshot;

use crate::socket::hang_up::has_left;
use crate::status::CurrentSession;

/// A frontend with a session.
pub(super) struct Guest {
    pub(super) remote: SessionHandle,
    /// Our own descriptor of its connection, to see it leave before its session has ended.
    pub(super) stream: Arc<UnixStream>,
    pub(super) ending: oneshot::Receiver<Ending>,
}

/// The part that a frontend plays at its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GuestKind {
    /// The guest that has the disk, or that of the frontend that came first.
    Guest,
    /// A guest that may come: the frontend waits until the other has stopped its vrings.
    Parked,
}

/// All frontends with a session. One that is parked becomes the guest's when it takes over, and when the other leaves.
#[derive(Default)]
pub(super) struct Guests {
    guest: Option<Guest>,
    parked: Option<Guest>,
}

impl Guests {
    /// Returns true if the next frontend may have a session now. One that connects again waits for the end of its session before.
    pub(super) fn have_place(&self) -> bool {
        match (&self.guest, &self.parked) {
            (None, _) => true,
            (Some(guest), None) => !has_left(&guest.stream),
            (Some(_), Some(_)) => false,
        }
    }

    /// Returns true if two frontends are connected and neither has left, so that there is no place for a third.
    pub(super) fn are_two(&self) -> bool {
        self.parked.is_some() && self.iter().all(|guest| !has_left(&guest.stream))
    }

    pub(super) fn are_none(&self) -> bool {
        self.guest.is_none()
    }

    /// Returns the guest's frontend, then the parked one.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Guest> {
        self.guest.iter().chain(&self.parked)
    }

    /// Returns the sessions, in the order of [`iter`](Guests::iter).
    pub(super) fn sessions(&self) -> Vec<CurrentSession> {
        let sessions = self.iter().map(|guest| CurrentSession {
            remote: guest.remote.clone(),
            stream: Arc::downgrade(&guest.stream),
        });
        sessions.collect()
    }

    /// Returns our descriptors of the connections, to close them.
    pub(super) fn into_streams(self) -> Vec<Arc<UnixStream>> {
        let all = self.guest.into_iter().chain(self.parked);
        all.map(|guest| guest.stream).collect()
    }

    /// Adds a frontend for which there is a place.
    pub(super) fn add(&mut self, guest: Guest) -> GuestKind {
        match self.guest {
            None => {
                self.guest = Some(guest);
                GuestKind::Guest
            }
            Some(_) => {
                self.parked = Some(guest);
                GuestKind::Parked
            }
        }
    }

    /// Waits for the end of a session; forever if there is none. `None`: its thread failed.
    pub(super) async fn ended(&mut self) -> (GuestKind, Option<Ending>) {
        let Guests { guest, parked } = self;
        tokio::select! {
            biased;
            ending = ended(guest) => (GuestKind::Guest, ending),
            ending = ended(parked) => (GuestKind::Parked, ending),
        }
    }

    /// Removes a frontend whose session has ended. Returns it, and what it was at its end.
    pub(super) fn remove(&mut self, ended: GuestKind) -> (GuestKind, Option<Guest>) {
        let owns = |guest: &Option<Guest>| guest.as_ref().is_some_and(|one| one.remote.owns());
        let has_taken_over = owns(&self.parked) && !owns(&self.guest);
        if has_taken_over {
            std::mem::swap(&mut self.guest, &mut self.parked);
        }
        match (ended, has_taken_over) {
            (GuestKind::Guest, false) | (GuestKind::Parked, true) => {
                let left = std::mem::replace(&mut self.guest, self.parked.take());
                (GuestKind::Guest, left)
            }
            (GuestKind::Parked, false) | (GuestKind::Guest, true) => {
                (GuestKind::Parked, self.parked.take())
            }
        }
    }
}

async fn ended(guest: &mut Option<Guest>) -> Option<Ending> {
    match guest {
        Some(guest) => (&mut guest.ending).await.ok(),
        None => pending().await,
    }
}
