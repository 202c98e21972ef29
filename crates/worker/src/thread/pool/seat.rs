//! One worker among others on a thread: its turns, and its end after a failure.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::Instant;

use cleave_engine::ClosedRing;

use crate::wake::signal;

/// Result of a worker's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// The worker wants the next turn at once.
    Again { worked: bool },
    /// The worker wants its next turn when its ring has something, or at this time.
    Rest(Option<Instant>),
    /// Nothing is in flight, so it can be dropped without waiting for its disk.
    Ended,
    /// Nothing can be said of what it has in flight.
    Lost,
}

/// A worker whose kind of store is forgotten.
pub(super) trait Seated {
    /// Returns the descriptor that becomes readable when there is something for it.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Collects what has ended its rest.
    fn wake(&mut self) -> io::Result<()>;

    /// Runs one lap. Adds the time since `at` to its own, and sets `at` to now.
    fn lap(&mut self, at: &mut Instant) -> io::Result<Turn>;

    /// Runs instead of a lap after a failure: serves nothing, and ends when nothing is in flight.
    fn wind_down(&mut self) -> io::Result<Turn>;

    /// Never releases what the kernel may still write to. No thread waits for it: what others wait on is given up.
    fn leave_behind(self: Box<Self>);
}

/// A worker, and control's interest in it.
pub(super) struct Seat {
    /// `None`: it is gone.
    member: Option<Box<dyn Seated>>,
    alarm: Arc<OwnedFd>,
    has_ended: Arc<AtomicBool>,
    /// True if the worker has failed, and winds down.
    has_failed: bool,
    /// True if the worker wants its next turn only when its ring has something, or at `deadline`.
    pub(super) rests: bool,
    pub(super) deadline: Option<Instant>,
    /// Disconnects with the seat, when the member is gone.
    _leaves: Sender<ClosedRing>,
}

impl Seat {
    pub(super) fn new(
        member: Box<dyn Seated>,
        alarm: Arc<OwnedFd>,
        has_ended: Arc<AtomicBool>,
        leaves: Sender<ClosedRing>,
    ) -> Seat {
        Seat {
            member: Some(member),
            alarm,
            has_ended,
            has_failed: false,
            rests: false,
            deadline: None,
            _leaves: leaves,
        }
    }

    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.member.as_ref().map(|member| member.descriptor())
    }

    /// Ends a member that has not served anything.
    pub(super) fn refuse(self) {
        signal(&self.alarm);
        self.end(Turn::Ended);
    }

    /// Gives the member its turn. A failure of our own ends this member alone.
    pub(super) fn turn(&mut self, at: &mut Instant) -> Turn {
        let Some(member) = &mut self.member else {
            return Turn::Ended;
        };
        let (has_rested, has_failed) = (std::mem::take(&mut self.rests), self.has_failed);
        self.deadline = None;
        let turn = catch_unwind(AssertUnwindSafe(|| match has_failed {
            true => member.wind_down(),
            false => {
                if has_rested {
                    member.wake()?;
                }
                member.lap(at)
            }
        }));
        let turn = match turn {
            Ok(Ok(turn)) => turn,
            Ok(Err(error)) => {
                tracing::error!("a worker's io_uring failed, so its session ends: {error}");
                self.fail()
            }
            Err(_) => {
                tracing::error!("a worker panicked; its session ends");
                self.fail()
            }
        };
        if let Turn::Rest(deadline) = turn {
            (self.rests, self.deadline) = (true, deadline);
        }
        turn
    }

    /// Notes a failure. The first one lets what is in flight complete. After a second one the member cannot be trusted to do so.
    fn fail(&mut self) -> Turn {
        self.has_ended.store(true, Ordering::Release);
        signal(&self.alarm);
        match std::mem::replace(&mut self.has_failed, true) {
            false => Turn::Again { worked: true },
            true => Turn::Lost,
        }
    }

    /// Ends a member whose turn was `Ended` or `Lost`. A lost one is left behind, because the kernel may still write to
    /// its buffers.
    pub(super) fn end(mut self, turn: Turn) {
        self.has_ended.store(true, Ordering::Release);
        let Some(member) = self.member.take() else {
            return;
        };
        match turn {
            Turn::Lost => member.leave_behind(),
            _ => {
                let dropped = catch_unwind(AssertUnwindSafe(|| drop(member)));
                if dropped.is_err() {
                    tracing::error!("a worker panicked at its end");
                }
            }
        }
    }
}
