//! Ops that wait for a buffer, a range lock, a time or the next lap, and how they go on.

use std::time::{Duration, Instant};

use super::Files;
use super::portion::Postponed;
use crate::Reactor;

/// Longest sleep while an op waits for a range lock of another worker, which sends no signal when it releases
/// the lock.
const LOCK_PAUSE: Duration = Duration::from_micros(200);
/// Attempts to get a range lock per enter, so that a long queue adds little to each lap.
const LOCKS_PER_ENTER: usize = 32;

impl Files {
    #[inline]
    pub(super) fn serve_buffer_waiters(&mut self, reactor: &mut Reactor) {
        while self.pool.has_free() {
            let Some(index) = self.buffer_waiters.pop_front() else {
                return;
            };
            self.ops.get_mut(index).own.buffer = self.pool.take();
            self.proceed(reactor, index);
        }
    }

    /// Retries the ops that wait for a lock or a time. Returns the longest sleep allowed.
    pub(super) fn retry_waiting(&mut self, reactor: &mut Reactor) -> Option<Duration> {
        self.retry_holds(reactor);
        let pause = self.retry_delayed(reactor);
        self.serve_delegated(reactor);
        self.serve_buffer_waiters(reactor);
        let hold = (!self.hold_waiters.is_empty()).then_some(LOCK_PAUSE);
        hold.into_iter().chain(pause).min()
    }

    fn retry_holds(&mut self, reactor: &mut Reactor) {
        for _ in 0..self.hold_waiters.len().min(LOCKS_PER_ENTER) {
            let Some(index) = self.hold_waiters.pop_front() else {
                return;
            };
            self.begin(reactor, index);
        }
    }

    /// Goes on with the ops that were put off, as far as the lap allows.
    #[cold]
    pub(super) fn resume_put_off(&mut self, reactor: &mut Reactor) {
        let end = self.lap.end_of_work();
        for _ in 0..self.put_off.len() {
            if self.lap.is_used_up() {
                break;
            }
            match self.put_off.pop_front() {
                Some((index, Postponed::Issue)) => self.issue(reactor, index),
                Some((index, Postponed::Proceed)) => self.proceed(reactor, index),
                Some((index, Postponed::Take(result))) => self.take_result(reactor, index, result),
                None => {}
            }
            if end.has_come() {
                self.lap.exhaust();
            }
        }
        self.serve_buffer_waiters(reactor);
    }

    /// Issues the ops that are due. Returns the time until the next one.
    fn retry_delayed(&mut self, reactor: &mut Reactor) -> Option<Duration> {
        let now = Instant::now();
        let mut pause: Option<Duration> = None;
        for _ in 0..self.delayed.len() {
            let (due, index) = self.delayed.pop_front()?;
            if due <= now {
                self.issue(reactor, index);
            } else {
                let left = due - now;
                pause = Some(pause.map_or(left, |pause| pause.min(left)));
                self.delayed.push_back((due, index));
            }
        }
        pause
    }

    /// Drops the ops that have not started, and releases their range locks.
    pub(super) fn drop_waiting(&mut self) {
        let delayed = std::mem::take(&mut self.delayed)
            .into_iter()
            .map(|(_, index)| index);
        let mut waiting: Vec<u16> = delayed.collect();
        waiting.extend(self.put_off.drain(..).map(|(index, _)| index));
        for queue in [&mut self.hold_waiters, &mut self.buffer_waiters] {
            waiting.extend(queue.drain(..));
        }
        waiting.extend(self.delegated.drain());
        for leg in &mut self.legs {
            waiting.extend(leg.syncs.waiting.drain(..));
            waiting.extend(leg.syncs.followers.drain(..));
        }
        for index in waiting {
            self.release_hold(index);
        }
    }
}
