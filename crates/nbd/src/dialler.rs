//! The thread of a disk that makes its connections, one at a time: all go to the same server.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::NbdError;
use crate::disconnect::Refused;
use crate::fence::Fence;
use crate::link::{DIAL_TIME, Link, MORE_TIME};
use crate::lock::lock;
use crate::mailbox::{DiallerOrder, Mailbox, Want};
use crate::shared::{Failed, Shared};

/// Pause after a failed attempt, or one that was of no use; it doubles up to the second one.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How often a server that stays away is reported.
const REPORT_EVERY: Duration = Duration::from_secs(60);

pub(crate) struct Dialler {
    shared: Arc<Shared>,
    wanted: VecDeque<Weak<Mailbox>>,
    pause: Duration,
    /// Not before this, because the last attempt failed, or brought a connection that was of no use.
    next_at: Option<Instant>,
    /// Fence of the changes that were sent again since the last connection was made.
    fence: Option<Fence>,
    /// When the last connection was made.
    made_at: Option<Instant>,
    reported: Option<Instant>,
    refused: Refused,
}

/// Returns true if the store of this mailbox has not closed.
fn is_in_use(mailbox: &Weak<Mailbox>) -> bool {
    mailbox.strong_count() > 0
}

impl Dialler {
    pub(crate) fn start(shared: Arc<Shared>, inbox: Receiver<DiallerOrder>) -> io::Result<()> {
        let dialler = Dialler {
            shared,
            wanted: VecDeque::new(),
            pause: Duration::ZERO,
            next_at: None,
            fence: None,
            made_at: None,
            reported: None,
            refused: Refused::default(),
        };
        let thread = thread::Builder::new().name("cleave-nbd".to_owned());
        thread.spawn(move || dialler.run(&inbox))?;
        Ok(())
    }

    fn run(mut self, inbox: &Receiver<DiallerOrder>) {
        loop {
            let order = match self.sleep() {
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(time) => inbox.recv_timeout(time),
            };
            match order {
                Ok(DiallerOrder::Dial(mailbox, want)) => {
                    if want != Want::First {
                        // Most likely lost with it.
                        lock(&self.shared.spares).clear();
                    }
                    self.wanted.push_back(mailbox);
                    self.slow_down(want);
                }
                Ok(DiallerOrder::Disconnect(socket, disconnect)) => {
                    let (name, now) = (&self.shared.name, Instant::now());
                    self.refused.run(socket, disconnect, name, now);
                }
                Ok(DiallerOrder::Look) => self.cut(),
                Ok(DiallerOrder::Run(run)) => run(),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.refused.run_due(&self.shared.name, Instant::now());
            self.serve();
        }
    }

    /// Returns the longest sleep until something is due; `None`: only an order ends it.
    fn sleep(&mut self) -> Option<Duration> {
        let is_idle = self.wanted.is_empty() || lock(&self.shared.attached).is_closing();
        let dial = (!is_idle).then(|| self.left());
        let reset = self.refused.left(Instant::now());
        dial.into_iter().chain(reset).min()
    }

    /// Ends all connections after one was lost.
    fn cut(&self) {
        if lock(&self.shared.attached).cut() {
            lock(&self.shared.spares).clear();
        }
    }

    /// Makes a connection for a port that still wants one, if the time has come: first for one whose store has none, because it
    /// could do nothing.
    fn serve(&mut self) {
        if self.shared.is_abandoned() {
            let waiting = self.wanted.drain(..);
            let waiting = waiting.filter_map(|mailbox| mailbox.upgrade());
            return waiting.for_each(|mailbox| mailbox.ring());
        }
        self.wanted.retain(is_in_use);
        let attached = lock(&self.shared.attached);
        let (is_closing, is_first) = (attached.is_closing(), attached.count == 0);
        drop(attached);
        if self.wanted.is_empty() || is_closing || self.is_early() {
            return;
        }
        // Only this thread hands connections out, so there still is none when it has made the first.
        match self.make(is_first) {
            Ok(link) => {
                (self.next_at, self.fence, self.reported) = (None, None, None);
                self.made_at = Some(Instant::now());
                let needy =
                    |port: &Weak<Mailbox>| port.upgrade().is_some_and(|port| port.is_needy());
                let at = self.wanted.iter().position(needy).unwrap_or(0);
                match self.wanted.get(at).and_then(Weak::upgrade) {
                    Some(port) if !port.put(&self.shared, link, is_first) => self.cut(),
                    _ => drop(self.wanted.remove(at)),
                }
            }
            Err(Failed { error, fence }) => {
                if self.is_wanted() {
                    self.report(&error);
                    self.pause_longer();
                }
                self.await_fence(fence);
            }
        }
    }

    /// Nothing newer may reach the server before it cannot apply any more what was sent again.
    fn await_fence(&mut self, fence: Option<Fence>) {
        let Some(fence) = fence else {
            return;
        };
        if self.fence.is_none() {
            // The time of the requests that wait begins after it. It does not begin again after each further one: a server that
            // fails every time must not keep them for longer.
            lock(&self.shared.fences).add(fence.until, Instant::now());
        }
        self.fence = Some(fence);
    }

    /// Returns true if a store still waits for a connection, of those that are known.
    fn is_wanted(&self) -> bool {
        self.wanted.iter().any(is_in_use)
    }

    fn make(&self, is_first: bool) -> Result<Link, Failed> {
        let spare = lock(&self.shared.spares).pop();
        if let Some(link) = spare.filter(|link| link.is_alive()) {
            return Ok(link);
        }
        // A server that lets in no more must not keep this thread from those that lose theirs.
        let time = if is_first { DIAL_TIME } else { MORE_TIME };
        self.shared.connect(time, is_first, || self.is_wanted())
    }

    /// A server that lets us in and then hangs up must not keep us busy, nor fill the log.
    fn slow_down(&mut self, want: Want) {
        // One that nobody used for a while may be lost like any other.
        let is_short = self.made_at.is_some_and(|at| at.elapsed() < PAUSE_MAX);
        if want == Want::Better && is_short {
            // A pause that has begun is for all connections that are lost together.
            if !self.is_early() {
                self.pause_longer();
            }
            return;
        }
        if self.next_at.is_none() {
            self.pause = Duration::ZERO;
            let made_at = self.made_at.filter(|_| want != Want::First);
            self.next_at = made_at.map(|at| at + PAUSE_FIRST);
        }
    }

    fn is_early(&mut self) -> bool {
        !self.left().is_zero()
    }

    /// Returns the longest sleep until the next attempt may be made.
    fn left(&mut self) -> Duration {
        let now = Instant::now();
        let pause = self.next_at.map(|at| at.saturating_duration_since(now));
        let fence = self.fence.as_mut().and_then(|fence| {
            lock(&self.shared.fences).left(&mut fence.until, &mut fence.server, now)
        });
        pause.max(fence).unwrap_or_default()
    }

    fn pause_longer(&mut self) {
        self.pause = (self.pause * 2).clamp(PAUSE_FIRST, PAUSE_MAX);
        self.next_at = Some(Instant::now() + self.pause);
    }

    fn report(&mut self, error: &NbdError) {
        let is_due = self.reported.is_none_or(|at| at.elapsed() >= REPORT_EVERY);
        if is_due {
            self.reported = Some(Instant::now());
            tracing::warn!(
                "{}: cannot connect to the NBD server: {error}; trying again",
                self.shared.name
            );
        }
    }
}
