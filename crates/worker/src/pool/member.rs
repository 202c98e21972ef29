//! One worker among others on a thread, and what its failure means.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use cleave_engine::{ClosedRing, Rest, Store, Wait};

use crate::worker::{Lap, Worker, signal};

/// Pause between two checks of a polled disk whose worker has failed.
const WIND_DOWN_PAUSE: Duration = Duration::from_millis(1);

/// Result of a worker's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// It wants the next turn at once.
    Again { worked: bool },
    /// It wants no turn until its ring has something, or until then.
    Rest(Option<Instant>),
    /// Nothing is in flight, so it can be dropped without waiting for its disk.
    Ended,
    /// Nothing can be said of what it has in flight.
    Lost,
}

/// A worker whose kind of store is forgotten.
pub(super) trait Member {
    /// The descriptor that becomes readable when there is something for it.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Collects what has ended its rest.
    fn wake(&mut self) -> io::Result<()>;

    /// One lap. Adds the time since `at` to its own, and sets `at` to now.
    fn lap(&mut self, at: &mut Instant) -> io::Result<Turn>;

    /// Instead of a lap, after a failure: serves nothing, and ends when nothing is in flight.
    fn wind_down(&mut self) -> io::Result<Turn>;

    /// Keeps everything that the kernel may still write to for ever. Nobody waits for it: what others wait on is given up.
    fn leave_behind(self: Box<Self>);
}

impl<S: Store> Member for Worker<S> {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.reactor.as_fd()
    }

    fn wake(&mut self) -> io::Result<()> {
        self.entered(Wait::Until(None));
        self.reactor.enter(&mut self.store, Wait::No)
    }

    fn lap(&mut self, at: &mut Instant) -> io::Result<Turn> {
        let (wait, worked) = self.work();
        let rest = match wait {
            Wait::No => {
                self.reactor.enter(&mut self.store, wait)?;
                Rest::None
            }
            Wait::Until(deadline) => self.reactor.settle(&mut self.store, deadline)?,
        };
        let lap = self.end_lap();
        let began = std::mem::replace(at, Instant::now());
        if let Some(share_ns) = &mut self.waiting.share_ns {
            *share_ns += at.duration_since(began).as_nanos() as u64;
        }
        Ok(match (lap, rest) {
            (Lap::Ended, _) => Turn::Ended,
            (Lap::Again, Rest::None) => Turn::Again { worked },
            (Lap::Again, Rest::Until(deadline)) => Turn::Rest(deadline),
        })
    }

    fn wind_down(&mut self) -> io::Result<Turn> {
        for (slot, _) in (0..).zip(self.lanes.drain(..)) {
            self.reactor.unwatch(slot);
        }
        // Those that wait for an answer learn that there will be none.
        while self.inbox.commands.queue.try_recv().is_ok() {}
        while self.reactor.reap(&mut self.store).is_some() {}
        if self.prepare_close() {
            return Ok(Turn::Ended);
        }
        let pause = self
            .store()
            .polls()
            .then(|| Instant::now() + WIND_DOWN_PAUSE);
        Ok(match self.reactor.settle(&mut self.store, pause)? {
            Rest::None => Turn::Again { worked: true },
            Rest::Until(deadline) => Turn::Rest(deadline),
        })
    }

    fn leave_behind(mut self: Box<Self>) {
        // Before the session can end.
        self.device.is_lost.store(true, Ordering::Release);
        // A command in a queue that is never dropped would never be answered, and the end of the rings never be seen.
        self.inbox.commands.close();
        self.reactor.disinherit();
        std::mem::forget(self);
    }
}

/// A worker, and control's interest in it.
pub(super) struct Seat {
    /// `None`: it is gone.
    member: Option<Box<dyn Member>>,
    alarm: Arc<OwnedFd>,
    has_ended: Arc<AtomicBool>,
    /// It failed, and winds down.
    has_failed: bool,
    /// It wants no turn before its ring has something, or before `deadline`.
    pub(super) rests: bool,
    pub(super) deadline: Option<Instant>,
    /// Disconnects with the seat, when the member is gone.
    _leaves: Sender<ClosedRing>,
}

impl Seat {
    pub(super) fn new(
        member: Box<dyn Member>,
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

    /// The first failure lets what is in flight complete. After a second one the member cannot be trusted to do so.
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
