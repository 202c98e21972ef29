//! The fences of lost connections: until when the server may still apply what was sent on them.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::bell::is_ready;

/// After the server's process has ended: what it handed to the kernel may take so long. A process does not wait at its end for what
/// it began with io_uring.
const AFTER_END: Duration = Duration::from_secs(1);
/// How often to look whether the process has ended, which it does a little later than its connections.
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// The fence of changes that were sent again and not answered.
#[derive(Debug)]
pub(crate) struct Fence {
    pub(crate) until: Instant,
    /// The server's process, if it is known and was not seen to end.
    pub(crate) server: Option<OwnedFd>,
}

/// The ends of a disk's fences.
#[derive(Debug, Default)]
pub(crate) struct Fences(Vec<Instant>);

impl Fences {
    pub(crate) fn add(&mut self, until: Instant, now: Instant) {
        self.0.retain(|end| *end > now);
        self.0.push(until);
    }

    /// Puts the end of a fence off.
    pub(crate) fn put_off(&mut self, until: &mut Instant, to: Instant) {
        match self.0.iter_mut().find(|end| **end == *until) {
            Some(end) => *end = to,
            None => self.0.push(to),
        }
        *until = to;
    }

    /// Returns when the last fence ends.
    pub(crate) fn last(&self) -> Option<Instant> {
        self.0.iter().max().copied()
    }

    /// Returns the longest sleep until a fence is over, or may be; `None`: it is over. It ends soon after the server's process,
    /// which is looked at here.
    pub(crate) fn left(
        &mut self,
        until: &mut Instant,
        server: &mut Option<OwnedFd>,
        now: Instant,
    ) -> Option<Duration> {
        if server.as_ref().is_some_and(is_ready) {
            *server = None;
            let sooner = (*until).min(now + AFTER_END);
            if let Some(end) = self.0.iter_mut().find(|end| *end == until) {
                *end = sooner;
            }
            *until = sooner;
        }
        let left = until.saturating_duration_since(now);
        let pause = match server {
            Some(_) => left.min(LOOK_PAUSE),
            None => left,
        };
        (!left.is_zero()).then_some(pause)
    }
}
