//! The end of a store. Its requests must be answered first, or fenced: another store of the same disk may follow at once.
//! It takes leave of the server, which would report a connection that just breaks.
//!
//! The last flush begins before that (`prepare_close`), and the owner waits for it in its laps, because a server may need minutes.
//! The end itself does not wait for a flush of the store's own: a flush that the server does later harms nobody.

use std::io;
use std::time::{Duration, Instant};

use super::line::Phase;
use super::{Nbd, OWN_FLUSH};
use crate::Reactor;

/// Longest sleep between two looks at the connections.
const SLEEP_MAX: Duration = Duration::from_millis(100);

impl Nbd {
    /// Returns true if a flush of the store's own is under way. Nobody waits for it if the disk is given up, or the server is away.
    #[inline]
    pub(super) fn awaits_flush(&self) -> bool {
        self.is_flushing
            && self.lines.iter().any(|line| line.phase == Phase::Up)
            && !self.lines.iter().any(|line| line.port.is_abandoned())
    }

    /// Returns the longest sleep while a flush of the store's own is under way. A store that has its connections is not woken when its
    /// disk is given up.
    #[inline]
    pub(super) fn look_pause(&self) -> Option<Duration> {
        self.awaits_flush().then_some(SLEEP_MAX)
    }

    /// Waits until no op of the owner is in flight. `Err`: the ring is broken.
    pub(super) fn close_lines(&mut self, reactor: &mut Reactor) -> io::Result<()> {
        self.is_closing = true;
        for line in self.line_numbers() {
            self.drop_unsent(line);
        }
        self.await_answers(reactor)?;
        self.part(reactor)
    }

    /// Drops the ops whose requests the server has no byte of.
    fn drop_unsent(&mut self, line: u8) {
        let mut queue = std::mem::take(&mut self.line_mut(line).queue);
        queue.retain(|index| self.flight(*index).sent.is_out());
        self.line_mut(line).queue = queue;
        for index in self.ops_of(line) {
            if !self.flight(index).sent.is_out() {
                self.finish(index, Err(libc::ECANCELED));
            }
        }
    }

    /// Returns true if no op of the owner is on this connection.
    fn has_answers(&self, line: u8) -> bool {
        let mut entries = self.ops.entries();
        entries.all(|(_, entry)| !entry.own.is_on(line) || entry.token == OWN_FLUSH)
    }

    /// Waits for the answers to what was sent, or for the fence of a connection that is lost.
    fn await_answers(&mut self, reactor: &mut Reactor) -> io::Result<()> {
        loop {
            self.now = Instant::now();
            for line in self.line_numbers() {
                // An op that has another request to send does not send it.
                self.drop_unsent(line);
            }
            let limit = self.turn(reactor).unwrap_or(SLEEP_MAX).min(SLEEP_MAX);
            let is_over = self.line_numbers().all(|line| match self.line(line).phase {
                Phase::Up => self.has_answers(line) && !self.line(line).sending,
                Phase::Down { .. } => true,
                Phase::Ending { .. } => false,
            });
            if is_over {
                return Ok(());
            }
            self.await_completion(reactor, limit)?;
        }
    }

    fn await_completion(&mut self, reactor: &mut Reactor, time: Duration) -> io::Result<()> {
        if let Some(completion) = reactor.next_of_within(self.id, time)? {
            crate::Store::completed(self, reactor, completion);
        }
        Ok(())
    }

    /// Takes leave of the server, and ends the receives and the watches that are left.
    fn part(&mut self, reactor: &mut Reactor) -> io::Result<()> {
        let since = Instant::now();
        for line in self.line_numbers() {
            let state = self.line_mut(line);
            if let (Phase::Up, Some(link)) = (state.phase, &state.link) {
                state.port.part(link);
            }
            // Nothing that arrives or fails from now on matters.
            state.phase = Phase::Down {
                since,
                gave_up: true,
            };
            if state.listening {
                state.port.wake();
            }
        }
        while self.lines.iter().any(super::Line::is_busy) {
            for line in self.line_numbers() {
                let state = self.line(line);
                if state.receiving && !state.shutting && !state.is_cut {
                    let is_cut = self.shut_down(reactor, line, libc::SHUT_RDWR);
                    self.line_mut(line).is_cut = is_cut;
                }
            }
            self.await_completion(reactor, SLEEP_MAX)?;
        }
        for line in self.line_numbers() {
            let _ = reactor.set_file(self.socket_slot(line), None);
            self.line_mut(line).link = None;
        }
        Ok(())
    }
}
