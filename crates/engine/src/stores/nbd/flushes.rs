//! The flushes of ops. At most one FLUSH of a disk is under way, whichever worker asks, because a server may tell only one of lost data
//! (`cleave_nbd::FlushTurn`). An op that needs a flush waits until one is answered that was sent later, or has its own sent when it is
//! its turn. A failed flush fails every op that shares it, through the state of the disk.

use std::time::Duration;

use super::Nbd;
use super::flight::{Part, SendState};
use crate::Reactor;
use crate::ops::queue;
use crate::reactor::FULL_PAUSE;

impl Nbd {
    /// Has an op flushed, by a FLUSH of its own or of another op.
    pub(super) fn queue_flush(&mut self, index: u16) {
        let line = self.flight(index).line;
        let number = self.line(line).port.next_flush();
        let flight = self.flight_mut(index);
        (flight.sent, flight.part) = (SendState::Turn, Part::FLUSH);
        flight.flush_number = number;
        self.flush_waits.push_back(index);
        self.take_turn();
    }

    /// Has the first op that waits send its FLUSH, unless one of the disk is under way.
    fn take_turn(&mut self) {
        let first = self.flush_waits.front().copied();
        let Some(index) = first.filter(|_| self.turn.is_none()) else {
            return;
        };
        let line = self.flight(index).line;
        if let Some(turn) = self.line(line).port.take_turn() {
            self.flush_waits.pop_front();
            self.turn = Some((index, turn));
            self.queue(index, Part::FLUSH);
        }
    }

    /// Records that the FLUSH of an op is about to be sent. The server does not have all of it yet, so it covers what was answered by
    /// now, and is shared by all that asked by now.
    pub(super) fn flush_begins(&mut self, index: u16) {
        if let Some((_, turn)) = &self.turn {
            turn.begin();
        }
        let covers = self.line(self.flight(index).line).port.answered();
        self.flight_mut(index).covers = covers;
    }

    /// The FLUSH of an op is answered.
    pub(super) fn flush_answered(&mut self, index: u16, result: Result<(), i32>) {
        if let Err(errno) = result {
            // Before others see that it has ended.
            self.taint_sync(errno);
        }
        // Even if the flush failed: the guest is told then that the changes may be lost, and they must not keep others waiting.
        let (line, covers) = (self.flight(index).line, self.flight(index).covers);
        self.drop_kept(line, covers);
        if let Some((_, turn)) = self.turn.take() {
            turn.end();
        }
        self.flush_done(index, result);
        self.share_flushes();
    }

    /// A flush that covers an op was answered.
    fn flush_done(&mut self, index: u16, result: Result<(), i32>) {
        // The server may have lost something before, or told another flush of it.
        let result = match result {
            Ok(()) if self.disk.sync_failed() => Err(libc::EIO),
            result => result,
        };
        if result.is_err() {
            return self.finish(index, result);
        }
        let flight = self.flight_mut(index);
        (flight.flushed, flight.lost_at) = (true, None);
        self.release(index);
        self.proceed(index);
    }

    /// Ends the waits for a flush that was answered, and has the next one sent.
    fn share_flushes(&mut self) {
        while let Some(index) = self.flush_waits.front().copied() {
            let flight = self.flight(index);
            if flight.flush_number > self.line(flight.line).port.last_flush() {
                break;
            }
            self.flush_waits.pop_front();
            self.flush_done(index, Ok(()));
        }
        self.take_turn();
    }

    /// Goes on with the ops that wait for the flush of another store. Its end rings a bell, for which a store that closes does not wait,
    /// because that looks often enough.
    pub(super) fn await_flushes(&mut self, reactor: &mut Reactor) -> Option<Duration> {
        if self.flush_waits.is_empty() || self.turn.is_some() {
            return None;
        }
        let waits = self.flush_waits.len();
        self.share_flushes();
        if self.flush_waits.len() < waits {
            // The next lap sends what may follow.
            return Some(Duration::ZERO);
        }
        let first = self.flush_waits.front().copied();
        let line = self.flight(first.filter(|_| !self.is_closing)?).line;
        (!self.listen(reactor, line)).then_some(FULL_PAUSE)
    }

    /// Gives the turn up when the store ends. If its FLUSH was sent, the server may tell that one alone of lost data, and nobody reads
    /// the answer. If the disk was given up, it is the next one at its socket that must not vouch for that data.
    pub(super) fn give_up_turn(&mut self) {
        let Some((leader, turn)) = self.turn.take() else {
            return;
        };
        if self.flight(leader).sent.is_out() {
            // Before others may flush.
            let failed = "a worker ended before the NBD server answered its flush";
            queue::taint_sync(&self.disk, self.disk.name(), failed, libc::EIO);
        }
        drop(turn);
    }

    /// Ends the wait of the ops on a connection that is lost. They need another one first.
    pub(super) fn withdraw_flushes(&mut self, line: u8) {
        for index in self.ops_of(line) {
            if self.flight(index).sent == SendState::Turn {
                self.interrupt(index);
            }
        }
    }
}
