//! The end of a store. Its requests must be answered first, or fenced: another store of the same disk may follow at once.
//! A connection on which nothing is in flight is kept for it.

use std::io;
use std::time::{Duration, Instant};

use io_uring::opcode;
use io_uring::squeue::Flags;

use super::line::{Entry as RingEntry, Inbound, Phase};
use super::{Nbd, Sent};
use crate::Reactor;
use crate::ring::tag;

/// Longest sleep between two looks at the connections.
const SLEEP_MAX: Duration = Duration::from_millis(100);
/// How long a cancelled receive may take.
const CANCEL_TIME: Duration = Duration::from_secs(1);

impl Nbd {
    /// Waits until nothing is in flight. `Err`: the ring is broken.
    pub(super) fn close_lines(&mut self, reactor: &mut Reactor) -> io::Result<()> {
        self.is_closing = true;
        for line in self.line_numbers() {
            self.drop_unsent(line);
        }
        self.await_answers(reactor)?;
        self.cancel_receives(reactor)?;
        for line in self.line_numbers() {
            let _ = reactor.set_file(self.socket_slot(line), None);
            let state = self.line_mut(line);
            let is_clean = state.phase == Phase::Up
                && state.staged == 0
                && state.inbound == Inbound::Head
                && !state.is_busy();
            if let (true, Some(link)) = (is_clean, state.link.take()) {
                state.port.give_back(link);
            }
        }
        Ok(())
    }

    /// Drops the ops whose requests the server has no byte of.
    fn drop_unsent(&mut self, line: u8) {
        let is_kept = |sent| matches!(sent, Sent::Partly | Sent::Whole);
        let flights = &self.flights;
        let kept = |index: &u16| is_kept(flights[usize::from(*index)].sent);
        self.lines[usize::from(line)].queue.retain(kept);
        for index in 0..self.ops as u16 {
            let flight = self.flight(index);
            if flight.is_used && flight.line == line && flight.sent == Sent::Nothing {
                self.finish(index, Err(libc::ECANCELED));
            }
            let flight = self.flight(index);
            if flight.is_used && flight.line == line && flight.sent == Sent::Queued {
                self.finish(index, Err(libc::ECANCELED));
            }
        }
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
            let is_over = self.lines.iter().all(|line| match line.phase {
                Phase::Up => line.ops == 0 && !line.sending,
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

    /// Ends the receives and the watches that are left.
    fn cancel_receives(&mut self, reactor: &mut Reactor) -> io::Result<()> {
        for line in self.line_numbers() {
            if self.line(line).receiving {
                self.cancel(reactor, line);
            }
            if self.line(line).listening {
                self.line(line).port.wake();
            }
            // No other receive follows.
            self.line_mut(line).is_cut = true;
        }
        let begun = Instant::now();
        while self.lines.iter().any(super::Line::is_busy) {
            self.await_completion(reactor, SLEEP_MAX)?;
            if begun.elapsed() < CANCEL_TIME {
                continue;
            }
            for line in self.line_numbers() {
                if self.line(line).receiving && !self.line(line).shutting {
                    self.shut_down(reactor, line, libc::SHUT_RDWR);
                }
            }
        }
        Ok(())
    }

    fn cancel(&mut self, reactor: &mut Reactor, line: u8) {
        let target = self.id.user_data(RingEntry::Receive.number(line));
        // The flag has no meaning for an operation without a file, but the ring accepts no entry without it.
        let entry = opcode::AsyncCancel::new(target)
            .build()
            .flags(Flags::FIXED_FILE | Flags::SKIP_SUCCESS)
            .user_data(tag::IGNORED);
        // SAFETY: a cancellation points to no memory. If it is not accepted, the socket is shut down later.
        let _ = unsafe { reactor.submit(self.id, &entry, false) };
    }
}
