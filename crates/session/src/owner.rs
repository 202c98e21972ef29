//! Which session of a disk may serve vrings.
//!
//! While a guest moves to another VMM on this host, the frontends of both are connected. One of them *owns* the disk, the other
//! is *parked*: it may do everything but start a vring. A session claims the disk before its first vring starts. What the sessions
//! of a disk have:
//!
//! ```text
//!          claim                 the last vring stops
//!   Free ─────────► Serving ────────────────────────────► Idle
//!     ▲                │    ◄────────────────────────────  │
//!     │                │     claim of the owner: the other │
//!     │                │     session is hung up            │
//!     └────────────────┴───────────────────────────────────┘
//!       the owner ends, or it is idle and another session waits
//! ```
//!
//! An owner that comes from another process has the disk from the beginning: it is *resuming* until its vrings are started again, and
//! then serving, or free if it had none. A session without a vring that has the disk flushed is serving meanwhile.
//!
//! What one of them is:
//!
//! ```text
//!            claim           another session claims the disk
//!   Parked ─────────► Owner ─────────────────────────────────► TakenOver ──► hung up
//!                       ▲                                          │  claim while the owner is connected
//!                       └──────────────────────────────────────────┘
//!                          claim when the owner has left
//! ```
//!
//! The guest of a session that was taken over runs at the owner. If that session waited for its turn, it would start when the guest
//! pauses, and two copies of one guest would write to the disk. When the owner has left, the VMM may take its guest back.
//!
//! An idle owner keeps its workers, because most guests only pause. It ends them before another session makes its own: a server
//! may let in only so many connections, and a flush on one need not cover what was written on another.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use crate::MessageRefusal;
use crate::fd::{is_ready, wait};
use crate::possession::Possession;
use crate::signals::{SessionSignals, Summons};

/// The sessions of a disk, one of which at a time serves vrings.
#[derive(Debug, Default)]
pub struct Owners {
    possession: Option<Arc<dyn Possession>>,
    sessions: Mutex<Sessions>,
}

impl Owners {
    /// Makes the owners of a disk that may move to another host and back.
    pub fn of(possession: Arc<dyn Possession>) -> Owners {
        Owners {
            possession: Some(possession),
            sessions: Mutex::default(),
        }
    }

    /// Returns the number of sessions that wait for the disk.
    pub fn waiting(&self) -> usize {
        let sessions = self.lock();
        sessions.members.iter().filter(|one| one.waits).count()
    }

    fn lock(&self) -> MutexGuard<'_, Sessions> {
        // No code here panics in the middle of a change, so a poisoned lock is still consistent.
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct Sessions {
    /// In the order in which they came.
    members: Vec<Member>,
    /// The session that has the disk or had it last.
    owner: Option<Arc<SessionSignals>>,
    hold: Hold,
}

#[derive(Debug)]
struct Member {
    signals: Arc<SessionSignals>,
    connection: Arc<UnixStream>,
    /// True while it waits for the disk.
    waits: bool,
    /// True if it owns the disk or has owned it.
    has_owned: bool,
}

impl Member {
    /// Returns true if its frontend has closed the connection. The session ends when it sees that.
    fn has_left(&self) -> bool {
        is_ready(&self.connection, PollFlags::RDHUP | PollFlags::HUP)
    }
}

/// What the owner has.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Hold {
    /// Nothing: no session has workers.
    #[default]
    Free,
    /// Workers, but none of its vrings is started.
    Idle,
    /// A vring is started, or will be at once.
    Serving,
    /// Not known yet: the owner comes from another process, and messages are left that make it what it was there.
    Resuming,
}

/// How a session got the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    /// The session came first, or had the disk before.
    First,
    /// The session was parked until now.
    TakenOver,
    /// The session had the disk before, and one that was parked meanwhile has been hung up.
    Defended,
}

/// Result of a claim by a session without vrings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unserved {
    /// The session has the disk now.
    Taken,
    /// The frontend of the session that has the disk has left, and its requests are under way.
    Ending,
    /// A session that is connected has the disk, or had it last.
    Owned,
}

impl Sessions {
    fn is_owner(&self, session: &Arc<SessionSignals>) -> bool {
        let owner = self.owner.as_ref();
        owner.is_some_and(|owner| Arc::ptr_eq(owner, session))
    }

    fn others(&self, session: &Arc<SessionSignals>) -> impl Iterator<Item = &Member> {
        let members = self.members.iter();
        members.filter(move |member| !Arc::ptr_eq(&member.signals, session))
    }

    fn member(&mut self, session: &Arc<SessionSignals>) -> Option<&mut Member> {
        let mut members = self.members.iter_mut();
        members.find(|member| Arc::ptr_eq(&member.signals, session))
    }

    /// Returns true if another session, which is still connected, has the disk.
    fn are_owned_beside(&self, session: &Arc<SessionSignals>) -> bool {
        let mut others = self.others(session);
        others.any(|other| self.is_owner(&other.signals) && !other.has_left())
    }

    /// Frees the disk, and has those that wait claim it again.
    fn free(&mut self) {
        self.hold = Hold::Free;
        let waiting = self.members.iter().filter(|member| member.waits);
        waiting.for_each(|member| member.signals.ring());
    }
}

/// A session as the others of its disk know it. Dropping it gives up the disk, so its workers must have ended by then.
#[derive(Debug)]
pub(crate) struct Claimant {
    owners: Arc<Owners>,
    signals: Arc<SessionSignals>,
    connection: Arc<UnixStream>,
}

impl Claimant {
    /// Adds a session with this connection.
    pub(crate) fn new(
        owners: Arc<Owners>,
        signals: Arc<SessionSignals>,
        connection: Arc<UnixStream>,
    ) -> Claimant {
        owners.lock().members.push(Member {
            signals: signals.clone(),
            connection: connection.clone(),
            waits: false,
            has_owned: false,
        });
        Claimant {
            owners,
            signals,
            connection,
        }
    }

    /// Makes the session what it was in another process. An owner claims the disk again if it serves vrings, and no other session gets
    /// it before [`resumed`](Claimant::resumed). One that finds the disk taken is parked.
    pub(crate) fn resume(&self, has_owned: bool, owns: bool) {
        let mut sessions = self.owners.lock();
        if let Some(own) = sessions.member(&self.signals) {
            own.has_owned = has_owned;
        }
        if owns && sessions.hold == Hold::Free {
            sessions.owner = Some(self.signals.clone());
            sessions.hold = Hold::Resuming;
            self.signals.set_owns(true);
        }
    }

    /// Notes that all messages have been served which make the session what it was.
    pub(crate) fn resumed(&self) {
        let mut sessions = self.owners.lock();
        if sessions.hold == Hold::Resuming && sessions.is_owner(&self.signals) {
            sessions.free();
        }
    }

    /// Returns true if the session owns the disk or has owned it.
    pub(crate) fn has_owned(&self) -> bool {
        let mut sessions = self.owners.lock();
        let own = sessions.member(&self.signals);
        own.is_some_and(|own| own.has_owned)
    }

    /// Returns the eventfd for alarms of the session's workers.
    pub(crate) fn alarm(&self) -> Arc<OwnedFd> {
        self.signals.alarm.clone()
    }

    /// Returns the eventfd that ends a [`pause`](Claimant::pause).
    pub(crate) fn bell(&self) -> Arc<OwnedFd> {
        self.signals.wake.clone()
    }

    /// Takes the disk before the first vring starts. `None`: another session has it; claim again after each
    /// [`pause`](Claimant::pause). Fails if that session has taken the disk over from this one, or has had it hung up.
    pub(crate) fn claim(&self) -> Result<Option<Claim>, MessageRefusal> {
        let mut sessions = self.owners.lock();
        // The owner, which does that under this lock, may be idle again.
        if self.signals.is_hung_up() {
            return Err(MessageRefusal::Gone);
        }
        let is_owner = sessions.is_owner(&self.signals);
        let is_owned = sessions.are_owned_beside(&self.signals);
        let is_free = sessions.hold == Hold::Free;
        let Some(own) = sessions.member(&self.signals) else {
            return Err(MessageRefusal::Gone);
        };
        if own.has_owned && is_owned {
            return Err(MessageRefusal::connection(
                "it starts a vring, but another frontend has taken the disk over, and the guest runs there",
            ));
        }
        own.waits = !is_owner && !is_free;
        if own.waits {
            // If it is idle, it sees then that it must yield.
            sessions.owner.iter().for_each(|owner| owner.ring());
            return Ok(None);
        }
        own.has_owned = true;
        let is_first = |first: &Member| Arc::ptr_eq(&first.signals, &self.signals);
        let claim = if is_owner {
            let is_alone = sessions.others(&self.signals).next().is_none();
            if is_alone || sessions.hold == Hold::Resuming {
                Claim::First
            } else {
                Claim::Defended
            }
        } else if sessions.owner.is_none() && sessions.members.first().is_some_and(is_first) {
            Claim::First
        } else {
            Claim::TakenOver
        };
        sessions.hold = Hold::Serving;
        sessions.owner = Some(self.signals.clone());
        self.signals.set_owns(true);
        for other in sessions.others(&self.signals) {
            other.signals.set_owns(false);
            if claim == Claim::Defended {
                other.signals.hang_up();
            }
        }
        Ok(Some(claim))
    }

    /// Takes the disk at the end of the session, so that no other session starts before this one is dropped. Returns false if
    /// another one has it.
    pub(crate) fn claim_last(&self) -> bool {
        let mut sessions = self.owners.lock();
        let is_owner = sessions.is_owner(&self.signals);
        if sessions.owner.is_some() && !is_owner {
            return false;
        }
        sessions.hold = Hold::Serving;
        sessions.owner = Some(self.signals.clone());
        true
    }

    /// Takes the disk without a vring, until [`release`](Claimant::release), if no other session goes on with it.
    pub(crate) fn claim_unserved(&self) -> Unserved {
        let mut sessions = self.owners.lock();
        let is_free = sessions.hold == Hold::Free;
        if sessions.are_owned_beside(&self.signals) || sessions.is_owner(&self.signals) && !is_free
        {
            return Unserved::Owned;
        }
        if !is_free {
            return Unserved::Ending;
        }
        sessions.hold = Hold::Serving;
        sessions.owner = Some(self.signals.clone());
        Unserved::Taken
    }

    /// Gives back what [`claim_unserved`](Claimant::claim_unserved) has taken. The workers have ended.
    pub(crate) fn release(&self) {
        let mut sessions = self.owners.lock();
        if !self.signals.owns() {
            sessions.owner = None;
        }
        sessions.free();
    }

    /// Sleeps until the session is woken, its frontend leaves, or `until`. Returns why the session must end, if it must.
    pub(crate) fn pause(&self, until: Option<Instant>) -> std::io::Result<Option<Summons>> {
        let mut fds = [
            // Not for input: the frontend may have sent more messages, which are served later.
            PollFd::new(&self.connection, PollFlags::RDHUP),
            PollFd::new(&self.signals.wake, PollFlags::IN),
            PollFd::new(&self.signals.alarm, PollFlags::IN),
        ];
        wait(&mut fds, until)?;
        let [connection, ..] = &fds;
        match connection.revents().is_empty() {
            true => Ok(self.signals.check()),
            false => Ok(Some(Summons::HangUp)),
        }
    }

    /// Notes whether the guest's move waits for requests that the disk failed.
    pub(crate) fn set_awaits_stalled(&self, waits: bool) {
        self.signals.set_awaits_stalled(waits);
    }

    /// Notes that the last vring has stopped.
    pub(crate) fn stopped(&self) {
        let mut sessions = self.owners.lock();
        if sessions.is_owner(&self.signals) {
            sessions.hold = Hold::Idle;
        }
    }

    /// Returns true if another session waits for the disk and this one, which has it, serves no vring.
    pub(crate) fn must_yield(&self) -> bool {
        let sessions = self.owners.lock();
        sessions.hold == Hold::Idle
            && sessions.is_owner(&self.signals)
            && sessions.others(&self.signals).any(|other| other.waits)
    }

    /// Gives the disk to the session that waits. The workers of this one have ended.
    pub(crate) fn give_up(&self) {
        self.owners.lock().free();
    }

    /// The right to the disk's bytes, if the disk may move to another host.
    pub(crate) fn possession(&self) -> Option<&dyn Possession> {
        self.owners.possession.as_deref()
    }
}

impl Drop for Claimant {
    fn drop(&mut self) {
        let mut sessions = self.owners.lock();
        sessions
            .members
            .retain(|member| !Arc::ptr_eq(&member.signals, &self.signals));
        if sessions.is_owner(&self.signals) {
            sessions.owner = None;
            sessions.free();
        }
    }
}
