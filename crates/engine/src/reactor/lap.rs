//! A reactor's part in a lap of its owner: collect completions, submit, wait.

use std::io;
use std::time::{Duration, Instant};

use super::ring::{Purpose, Sleep};
use super::{Reactor, Received};
use crate::{Event, Store, Wait};

/// Longest sleep while a watch or a bell waits for room in the queue.
const ARM_PAUSE: Duration = Duration::from_millis(1);

/// How long a thread with several reactors may leave one alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// Not at all: there is an event, or something to poll.
    None,
    /// Until its descriptor becomes readable, or until then.
    Until(Option<Instant>),
}

impl Reactor {
    /// Takes the next event of the reactor or of one of its stores, without a system call. `None`: there is
    /// none until the next `enter`.
    #[inline]
    pub fn reap<S: Store>(&mut self, stores: &mut [S]) -> Option<Event> {
        loop {
            for (store, one) in stores.iter_mut().enumerate() {
                if let Some(done) = one.reap() {
                    return Some(Event::Done { store, done });
                }
            }
            let received = match self.deferred.is_empty() {
                true => self.next()?,
                false => self.deferred.pop_front()?,
            };
            match received {
                Received::Op(completion) => {
                    stores[usize::from(completion.store)].completed(self, completion);
                }
                Received::Signal(slot) => return Some(Event::Woken { slot }),
                Received::Nothing => {}
            }
        }
    }

    /// Submits everything pushed, writes the bells that were rung, and waits as `wait` says. Makes at most
    /// one system call, or two while ops are polled; none if there is nothing to submit, nothing to collect
    /// from the kernel and no wait. Returns at once if events are ready, and while ops are polled unless the
    /// wait has a deadline. `Err` is our own fault (a broken ring), not the disk's.
    #[inline]
    pub fn enter<S: Store>(&mut self, stores: &mut [S], wait: Wait) -> io::Result<()> {
        let mut limit = None;
        for store in &mut *stores {
            if let Some(of_store) = store.before_enter(self, wait) {
                limit = Some(limit.map_or(of_store, |limit: Duration| limit.min(of_store)));
            }
        }
        self.watches.arm_wanted(&mut self.ring);
        self.bells.flush(&mut self.ring);
        // The plain ring first, because it calls the guest; the polled ring first only before a sleep.
        let entered = match wait {
            Wait::No => self.ring.enter(Sleep::No, Purpose::Io),
            Wait::Until(deadline) => self.enter_to_wait(stores, deadline, limit),
        };
        if let Some(polled) = &mut self.polled {
            polled.poll()?;
        }
        for store in stores {
            store.after_enter();
        }
        entered
    }

    fn enter_to_wait<S: Store>(
        &mut self,
        stores: &[S],
        deadline: Option<Instant>,
        limit: Option<Duration>,
    ) -> io::Result<()> {
        if let Some(polled) = &mut self.polled {
            // Polled ops must be submitted before the sleep, and completed ones must prevent it.
            polled.poll()?;
        }
        let sleep = self.sleep(stores, deadline, limit);
        let purpose = match stores.iter().all(|store| store.in_flight() == 0) {
            true => Purpose::Signal,
            false => Purpose::Io,
        };
        self.ring.enter(sleep, purpose)
    }

    /// Like `enter` with a wait, for a thread that has several reactors and sleeps elsewhere: submits everything
    /// pushed, does not wait, and returns until when the thread may leave this reactor alone. The descriptor of the
    /// reactor becomes readable when an event arrives, if the reactor was prepared for that ([`Prepared`](super::Prepared)).
    pub fn settle<S: Store>(
        &mut self,
        stores: &mut [S],
        deadline: Option<Instant>,
    ) -> io::Result<Rest> {
        let mut limit = None;
        for store in &mut *stores {
            let of_store = store.before_enter(self, Wait::Until(deadline));
            limit = limit.into_iter().chain(of_store).min();
        }
        self.watches.arm_wanted(&mut self.ring);
        self.bells.flush(&mut self.ring);
        let entered = self.ring.enter(Sleep::No, Purpose::Io);
        if let Some(polled) = &mut self.polled {
            polled.poll()?;
        }
        stores.iter_mut().for_each(Store::after_enter);
        entered?;
        if self.ring.has_queued() {
            // The kernel is short of memory or of room for completions.
            limit = limit.into_iter().chain([ARM_PAUSE]).min();
        }
        Ok(match self.sleep(stores, deadline, limit) {
            _ if self.ring.is_signalled() => Rest::None,
            Sleep::No => Rest::None,
            Sleep::For(time) => Rest::Until(Some(Instant::now() + time)),
            Sleep::Forever => Rest::Until(None),
        })
    }

    /// Closes the stores in order. Bells that were rung are written first. Returns false if one of them still has ops in
    /// flight.
    pub fn close<S: Store>(&mut self, stores: &mut [S]) -> bool {
        let _ = self.submit_and_sleep(Duration::ZERO);
        let ended = stores.iter_mut().map(|store| store.close(self));
        ended.fold(true, |all, ended| all & ended)
    }

    /// How long an enter may sleep.
    #[inline]
    fn sleep<S: Store>(
        &mut self,
        stores: &[S],
        deadline: Option<Instant>,
        limit: Option<Duration>,
    ) -> Sleep {
        // The completion of a polled op does not end a sleep.
        let is_ready = stores.iter().any(Store::is_ready) || self.has_events();
        if is_ready || (deadline.is_none() && stores.iter().any(Store::polls)) {
            return Sleep::No;
        }
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let waiting = self.watches.is_waiting() || self.bells.is_waiting();
        let arm = waiting.then_some(ARM_PAUSE);
        match left.into_iter().chain(limit).chain(arm).min() {
            None => Sleep::Forever,
            Some(Duration::ZERO) => Sleep::No,
            Some(time) => Sleep::For(time),
        }
    }
}
