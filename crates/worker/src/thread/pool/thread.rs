//! The loop of a pool's thread. Workers that are awake have a lap each, in turn. When all rest, the thread sleeps once for
//! all of them.

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::time::Timespec;

use super::seat::{Seat, Turn};
use crate::thread::contention::CoreContention;

/// Most events that are taken at once. The others wait for the next look.
const EVENTS_MAX: usize = 64;
/// Laps of workers that are awake between two looks at those that rest. A look is a system call, which costs as much
/// as a few laps of a worker that spins.
const LOOK_LAPS: usize = 16;
/// Or this time, if laps take long because they copy: those that rest may have been kicked.
const LOOK_TIME: Duration = Duration::from_micros(100);
/// Names the thread's own eventfd.
const BELL: u64 = u64::MAX;
/// Pause after a wait that failed, which none should.
const FAILED_PAUSE: Duration = Duration::from_millis(1);

/// Makes a worker on the thread.
pub(super) type Admission = Box<dyn FnOnce(&Arc<CoreContention>) -> Option<Seat> + Send>;

/// How long to look for events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    Glance,
    Sleep,
}

/// A thread of a pool.
pub(super) struct Thread {
    /// Watches the ring of each worker, and the bell. Edge-triggered: a worker looks at its own ring before it rests.
    epoll: OwnedFd,
    bell: Arc<OwnedFd>,
    admissions: Receiver<Admission>,
    /// The bell was rung.
    is_called: bool,
    /// The pool is gone.
    is_closed: bool,
    seats: Vec<Option<Seat>>,
    /// Seats that have a lap in each pass.
    awake: Vec<usize>,
    /// Laps since the last look, and the beginning of the first.
    laps: usize,
    since: Instant,
}

/// Makes an epoll that watches the bell.
pub(super) fn epoll(bell: &OwnedFd) -> io::Result<OwnedFd> {
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    let edge = EventFlags::IN | EventFlags::ET;
    epoll::add(&epoll, bell, EventData::new_u64(BELL), edge)?;
    Ok(epoll)
}

impl Thread {
    pub(super) fn new(
        epoll: OwnedFd,
        bell: Arc<OwnedFd>,
        admissions: Receiver<Admission>,
    ) -> Thread {
        Thread {
            epoll,
            bell,
            admissions,
            is_called: false,
            is_closed: false,
            seats: Vec::new(),
            awake: Vec::new(),
            laps: 0,
            since: Instant::now(),
        }
    }

    /// Runs until the pool and the last worker are gone.
    pub(super) fn run(mut self, contention: &Arc<CoreContention>) {
        loop {
            if std::mem::take(&mut self.is_called) {
                self.admit(contention);
            }
            let now = self.pass();
            if self.is_closed && self.seats.iter().all(Option::is_none) {
                return;
            }
            if self.awake.is_empty() {
                self.look(Look::Sleep);
            } else if self.laps >= LOOK_LAPS || now.duration_since(self.since) >= LOOK_TIME {
                self.look(Look::Glance);
            }
        }
    }

    /// Takes in the workers that control hands over.
    fn admit(&mut self, contention: &Arc<CoreContention>) {
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        loop {
            match self.admissions.try_recv() {
                Ok(admission) => self.take_in(admission, contention),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.is_closed = true;
                    return;
                }
            }
        }
    }

    fn take_in(&mut self, admission: Admission, contention: &Arc<CoreContention>) {
        // After a panic the caller finds that no answer comes.
        let Ok(Some(seat)) = catch_unwind(AssertUnwindSafe(|| admission(contention))) else {
            return;
        };
        let number = self.seats.iter().position(Option::is_none);
        let number = number.unwrap_or(self.seats.len());
        let edge = EventFlags::IN | EventFlags::ET;
        let added = seat.descriptor().map_or(Ok(()), |ring| {
            epoll::add(&self.epoll, ring, EventData::new_u64(number as u64), edge)
        });
        if let Err(error) = added {
            tracing::error!("a pool cannot watch a worker's ring, so its session ends: {error}");
            return seat.refuse();
        }
        if number == self.seats.len() {
            self.seats.push(None);
        }
        if let Some(free) = self.seats.get_mut(number) {
            *free = Some(seat);
            self.awake.push(number);
        }
    }

    /// Gives each worker that is awake a turn. Returns the time after the last one.
    fn pass(&mut self) -> Instant {
        let mut at = Instant::now();
        if self.laps == 0 {
            self.since = at;
        }
        let mut has_worked = false;
        let mut next = 0;
        while let Some(&number) = self.awake.get(next) {
            self.laps += 1;
            let seat = self.seats.get_mut(number).and_then(Option::as_mut);
            match seat.map_or(Turn::Ended, |seat| seat.turn(&mut at)) {
                Turn::Again { worked } => {
                    has_worked |= worked;
                    next += 1;
                }
                Turn::Rest(_) => {
                    has_worked = true;
                    self.awake.swap_remove(next);
                }
                turn @ (Turn::Ended | Turn::Lost) => {
                    self.awake.swap_remove(next);
                    self.end(number, turn);
                    at = Instant::now();
                }
            }
        }
        if !has_worked {
            std::hint::spin_loop();
        }
        at
    }

    fn end(&mut self, number: usize, turn: Turn) {
        let Some(seat) = self.seats.get_mut(number).and_then(Option::take) else {
            return;
        };
        if let Some(ring) = seat.descriptor() {
            let _ = epoll::delete(&self.epoll, ring);
        }
        seat.end(turn);
    }

    /// Wakes the workers that have something in their ring, or whose time has come.
    fn look(&mut self, look: Look) {
        self.laps = 0;
        let deadlines = self.seats.iter().flatten();
        let earliest = deadlines.filter_map(|seat| seat.deadline).min();
        let time = match look {
            Look::Glance => Some(Duration::ZERO),
            Look::Sleep => earliest.map(|at| at.saturating_duration_since(Instant::now())),
        };
        self.wait(time);
        if let Some(earliest) = earliest {
            self.wake_due(earliest);
        }
    }

    fn wait(&mut self, time: Option<Duration>) {
        // A duration of ours is far below the 292 years that this holds.
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        let none = Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        };
        let mut events = [none; EVENTS_MAX];
        let found = match epoll::wait(&self.epoll, &mut events, time.as_ref()) {
            // The completion of a ring's work interrupts the wait, and then is an event.
            Err(rustix::io::Errno::INTR) => {
                epoll::wait(&self.epoll, &mut events, Some(&Timespec::default())).unwrap_or(0)
            }
            Err(error) => {
                tracing::error!("a pool's thread cannot wait: {error}");
                std::thread::sleep(FAILED_PAUSE);
                return (0..self.seats.len()).for_each(|number| self.wake(number));
            }
            Ok(found) => found,
        };
        for event in events.into_iter().take(found) {
            match event.data.u64() {
                BELL => self.is_called = true,
                number => self.wake(number as usize),
            }
        }
    }

    fn wake_due(&mut self, earliest: Instant) {
        let now = Instant::now();
        if now < earliest {
            return;
        }
        for number in 0..self.seats.len() {
            let seat = self.seats.get(number).and_then(Option::as_ref);
            let deadline = seat.and_then(|seat| seat.deadline);
            if deadline.is_some_and(|deadline| deadline <= now) {
                self.wake(number);
            }
        }
    }

    /// Has a worker take part in the next pass, unless it does.
    fn wake(&mut self, number: usize) {
        let seat = self.seats.get(number).and_then(Option::as_ref);
        if seat.is_some_and(|seat| seat.rests) && !self.awake.contains(&number) {
            self.awake.push(number);
        }
    }
}
