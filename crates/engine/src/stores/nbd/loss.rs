//! The loss of a connection, and what becomes of its requests.
//!
//! A request that was sent and not answered may still be applied by the server, even after the connection is gone: it may lie in
//! a queue, behind a slow disk. If it were sent again meanwhile, and the guest wrote other data to the same place after the second
//! answer, the first one could replace that data. So nothing becomes of the requests of a lost connection before its *fence* is
//! over. That the server closed the connection says nothing: qemu-nbd closes first and lets its disk finish what it got, and over
//! TCP anything on the way may end a connection. Only a server whose process has ended has done all that it ever will. A connection
//! on which nothing that changes the disk is unanswered needs no fence.
//!
//! The fence begins when nothing more of the connection can leave this host. TCP sends what it has for minutes, so the dialler
//! disconnects its sockets (`cleave_nbd::Disconnect`).

use std::io;
use std::time::{Duration, Instant};

use cleave_nbd::PATIENCE;
use io_uring::opcode;
use io_uring::types::Fixed;

use super::flight::{Flight, SendState};
use super::line::{Line, Phase, RingEntry};
use super::{Nbd, next, socket_of};
use crate::Reactor;
use crate::reactor::FULL_PAUSE;

/// How often to look whether the dialler has disconnected a socket.
const DISCONNECT_PAUSE: Duration = Duration::from_millis(10);

impl Nbd {
    /// The connection counts as lost.
    pub(super) fn lose(&mut self, line: u8, why: &str) {
        if self.line(line).phase != Phase::Up {
            return;
        }
        self.withdraw_flushes(line);
        let needs_fence = self.has_unanswered_changes(line);
        let lost_at = Instant::now();
        let fence_at = needs_fence.then(|| lost_at + self.spec.fence);
        let state = self.line_mut(line);
        state.port.lost(why, fence_at);
        state.phase = Phase::Ending { lost_at, fence_at };
    }

    fn has_unanswered_changes(&self, line: u8) -> bool {
        let mut flights = self.flights(line);
        flights.any(|flight| flight.sent.is_out() && flight.part.changes())
    }

    /// The connection failed on our side (a time-out of TCP, say).
    pub(super) fn failed_here(&mut self, line: u8, errno: i32) {
        self.lose(line, &io::Error::from_raw_os_error(errno).to_string());
    }

    /// Cuts a lost connection off, waits for the kernel and for the fence, and gives the connection up.
    pub(super) fn end(&mut self, reactor: &mut Reactor, line: u8) -> Option<Duration> {
        let state = self.line(line);
        if !state.is_cut {
            let is_cut = self.shut_down(reactor, line, libc::SHUT_RDWR);
            self.line_mut(line).is_cut = is_cut;
            return (!is_cut).then_some(FULL_PAUSE);
        }
        if state.shutting || state.sending || state.receiving {
            return None;
        }
        self.hang_up(reactor, line);
        if !self.is_disconnected(line) {
            return Some(DISCONNECT_PAUSE);
        }
        if let Some(left) = self.fence_left(line) {
            return Some(left);
        }
        self.leave(line);
        // Its requests may have gone to a connection that had its turn in this lap.
        Some(Duration::ZERO)
    }

    /// Returns the longest sleep until the fence is over, or may be; `None`: it is over.
    fn fence_left(&mut self, line: u8) -> Option<Duration> {
        let Line {
            port,
            server,
            phase,
            ..
        } = self.line_mut(line);
        match phase {
            Phase::Ending {
                fence_at: Some(fence_at),
                ..
            } => port.fence_left(fence_at, server),
            _ => None,
        }
    }

    /// Gives the socket up, and has it disconnected: a close would leave the ring's reference, which the kernel may keep for as long as
    /// the ring has other requests.
    fn hang_up(&mut self, reactor: &mut Reactor, line: u8) {
        let slot = self.socket_slot(line);
        let state = self.line_mut(line);
        if let Some(link) = state.link.take() {
            state.disconnect = Some(state.port.disconnect(link.socket));
            let _ = reactor.set_file(slot, None);
        }
    }

    /// Returns true if nothing more of a lost connection leaves this host. Its fence begins then: a write could reach the server at the
    /// very end of one that began earlier. Without a fence it does not matter what leaves.
    fn is_disconnected(&mut self, line: u8) -> bool {
        let Line {
            port,
            phase,
            disconnect,
            ..
        } = self.line_mut(line);
        let Phase::Ending {
            fence_at: Some(fence_at),
            ..
        } = phase
        else {
            return true;
        };
        match disconnect {
            Some(disconnect) if !disconnect.is_done() => return false,
            Some(_) => port.begin_fence(fence_at),
            None => {}
        }
        *disconnect = None;
        true
    }

    /// The requests of the connection wait for the next one, except those that cannot be repeated. Their time begins now: nobody
    /// could connect before the fence, which would use it up otherwise.
    fn leave(&mut self, line: u8) {
        let now = Instant::now();
        let reconnect = self.spec.reconnect;
        let state = self.line_mut(line);
        let lost_at = match state.phase {
            Phase::Ending { lost_at, .. } => lost_at,
            Phase::Up | Phase::Down { .. } => now,
        };
        state.queue.clear();
        state.phase = Phase::Down {
            since: now,
            gave_up: false,
        };
        if self.is_closing {
            return self.fail_all(line, libc::ENOTCONN);
        }
        let state = self.line_mut(line);
        state.port.replace(state.has_answered);
        // Nobody connects before the fences of the other connections are over either.
        let begins = state.port.fenced(now);
        for index in self.ops_of(line) {
            self.interrupt(index);
            let entry = self.ops.get_mut(index);
            let flight = &mut entry.own;
            if next::is_durable(entry.kind) && !flight.flushed {
                // The server may have lost data that it answered and did not flush. A flush on the next connection would not
                // report that.
                entry.pos = 0;
            }
            // Without the fence of this loss, for which the server is not to blame.
            let waited = lost_at.saturating_duration_since(*flight.lost_at.get_or_insert(begins));
            if flight.doomed {
                self.finish(index, Err(libc::EFAULT));
            } else if waited > reconnect {
                // The server may close each connection because of this very request.
                self.finish(index, Err(libc::ENOTCONN));
            }
        }
        self.share_out();
    }

    /// Moves the ops that wait for a connection to those that are there. After the fence nothing binds them.
    fn share_out(&mut self) {
        for index in 0..self.ops.entries().count() as u16 {
            let flight = self.flight(index);
            let from = flight.line;
            let is_left = flight.sent == SendState::Nothing
                && matches!(self.line(from).phase, Phase::Down { .. });
            let to = self
                .choose_line()
                .filter(|to| self.line(*to).phase == Phase::Up);
            if let (true, Some(to)) = (is_left, to) {
                self.line_mut(from).ops -= 1;
                self.line_mut(to).ops += 1;
                self.flight_mut(index).line = to;
                self.proceed(index);
            }
        }
    }

    /// The ops of a connection. Allocates, because this is rare.
    pub(super) fn ops_of(&self, line: u8) -> Vec<u16> {
        let all = self.ops.entries();
        let ours = all.filter(|(_, entry)| entry.own.is_on(line));
        ours.map(|(index, _)| index).collect()
    }

    fn flights(&self, line: u8) -> impl Iterator<Item = &Flight> {
        let all = self.ops.entries().map(|(_, entry)| &entry.own);
        all.filter(move |flight| flight.is_on(line))
    }

    pub(super) fn fail_all(&mut self, line: u8, errno: i32) {
        for index in self.ops_of(line) {
            self.finish(index, Err(errno));
        }
    }

    /// Waits for a connection; after the operator's time the ops fail, and so do new ones.
    pub(super) fn wait_for_link(&mut self, reactor: &mut Reactor, line: u8) -> Option<Duration> {
        let Phase::Down { since, gave_up } = self.line(line).phase else {
            return None;
        };
        if self.is_closing {
            return None;
        }
        if !self.listen(reactor, line) {
            return Some(FULL_PAUSE);
        }
        if gave_up || self.line(line).ops == 0 {
            return None;
        }
        let since = self.line(line).port.fenced(since);
        let left = (since + self.spec.reconnect).saturating_duration_since(Instant::now());
        if !left.is_zero() {
            return Some(left);
        }
        self.give_up(line);
        None
    }

    /// Has the bell of a connection end a sleep. `false`: there is no room in the ring now.
    pub(super) fn listen(&mut self, reactor: &mut Reactor, line: u8) -> bool {
        if self.line(line).listening {
            return true;
        }
        let bell = Fixed(self.socket_slot(line) + 1);
        let entry = opcode::PollAdd::new(bell, libc::POLLIN as u32).build();
        self.submit(reactor, line, RingEntry::Bell, &entry)
    }

    /// No connection came. The ops that waited for one fail, and so do new ones.
    fn give_up(&mut self, line: u8) {
        if let Phase::Down { gave_up, .. } = &mut self.line_mut(line).phase {
            *gave_up = true;
            self.fail_all(line, libc::ENOTCONN);
        }
    }

    /// The bell rang: there may be a connection.
    pub(super) fn belled(&mut self, reactor: &mut Reactor, line: u8) {
        self.line_mut(line).listening = false;
        if self.is_closing {
            return;
        }
        let Some(link) = self.line_mut(line).port.take() else {
            if self.line(line).port.is_abandoned() {
                self.give_up(line);
            }
            return;
        };
        self.now = Instant::now();
        let now = self.now;
        self.line_mut(line).begin(link, now);
        let socket = socket_of(self.line(line));
        if reactor.set_file(self.socket_slot(line), socket).is_err() {
            return self.lose(line, "its socket cannot be used");
        }
        self.came_back = true;
        for index in self.ops_of(line) {
            self.proceed(index);
        }
        self.share_out();
    }

    /// From now on there are requests whose age matters.
    pub(super) fn check_ages_later(&mut self) {
        if self.check_at.is_none() {
            self.check_at = Some(self.now + self.spec.timeout / PATIENCE);
        }
    }

    /// Looks, four times in each time-out, for connections that are silent for too long. Returns the time until the next look.
    pub(super) fn check_ages(&mut self) -> Option<Duration> {
        let at = self.check_at?;
        if self.ops.in_flight() == 0 && !self.is_flushing && !self.is_closing {
            self.check_at = None;
            return None;
        }
        let now = self.now;
        if now < at {
            return Some(at - now);
        }
        let pause = self.spec.timeout / PATIENCE;
        self.check_at = Some(now + pause);
        for line in self.line_numbers() {
            let state = self.line_mut(line);
            if std::mem::take(&mut state.heard) {
                state.heard_at = now;
            }
            if state.phase != Phase::Up || state.ops == 0 {
                continue;
            }
            if self.is_silent(line, now) {
                self.lose(line, "it is silent");
            } else if self.has_old_request(line, now) {
                self.lose(line, "it does not answer a request");
            }
        }
        Some(pause)
    }

    /// Returns true if a connection is silent for too long. A flush takes as long as the server's disk does, and so does a trim or a
    /// write-zeroes: while only such are unanswered, TCP finds out whether the server's host is there, and a unix socket is closed
    /// with its server. Reads and writes beside them may have to wait for them, but the silence before the oldest of them was asked
    /// is not theirs.
    fn is_silent(&self, line: u8, now: Instant) -> bool {
        let (mut has_slow, mut asked_at) = (false, None);
        for flight in self.flights(line) {
            let is_slow = flight.sent == SendState::Whole && flight.part.is_slow();
            let is_turn = flight.sent == SendState::Turn;
            has_slow |= is_slow || is_turn;
            if !is_slow && !is_turn && flight.sent != SendState::Full {
                asked_at = asked_at.into_iter().chain([flight.asked_at]).min();
            }
        }
        let most = match has_slow {
            true => self.spec.timeout * PATIENCE,
            false => self.spec.timeout,
        };
        let since = asked_at.map(|at| at.max(self.line(line).heard_at));
        since.is_some_and(|since| now.saturating_duration_since(since) >= most)
    }

    fn has_old_request(&self, line: u8, now: Instant) -> bool {
        let age_max = self.spec.timeout * PATIENCE;
        self.flights(line).any(|flight| {
            // A request that waits to be sent is not the server's to answer. If nothing moves at all, the connection is silent.
            let is_slow = flight.sent == SendState::Whole && flight.part.is_slow();
            let is_out = matches!(flight.sent, SendState::Whole | SendState::Nothing) && !is_slow;
            is_out && now.saturating_duration_since(flight.asked_at) >= age_max
        })
    }
}
