//! Ops on the export of an NBD server, through one or more connections.
//!
//! Each connection has at most one message under way in each direction. A message to the server contains the requests that wait,
//! with their data straight from guest memory. A receive goes straight to the guest memory of the read whose data comes next, and
//! after it to a small staging area, from which the heads of replies are read (`inbound.rs`).
//!
//! A request belongs to one connection until it is answered. If that connection is lost, the op waits, is sent again on another
//! one, or fails; none of that happens before the server cannot apply the first request any more (`loss.rs`).
//!
//! Changes that the server answered are kept until it has flushed them, so that they can be sent again to a server that may have
//! lost them (`kept.rs`).
//!
//! Unsafe because entries handed to the ring point to guest memory and to the areas of `ops`, `headers`, `zeroes` and the
//! lines. The epoch in an op's entry keeps its guest memory mapped until `finish`, which never runs while a message that contains
//! the op, or a receive for it, is under way. The areas live until the last completion has been seen (`close`; if that did not
//! happen, `drop` leaks them).

mod closing;
mod flight;
mod flushes;
mod gather;
mod inbound;
mod kept;
mod line;
mod loss;
mod next;
mod outbound;

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_blk::{Op, OpKind};
use cleave_disk::{Backing, Disk};
use cleave_guest::Epoch;
use cleave_nbd::{Export, FlushTurn, NbdSpec};
use io_uring::types::Fixed;
use io_uring::{opcode, squeue};
use libc::iovec;

use self::flight::{Flight, Part, SendState};
use self::line::{Line, Phase, RingEntry};
use self::next::{NextRequest, ZEROES_BYTES};
use crate::ops::area::{Access, Area};
use crate::ops::lap::LapBudget;
use crate::ops::memory::remote_range;
use crate::ops::progress;
use crate::ops::queue::{self, OpQueue, from_ops};
use crate::reactor::{FULL_PAUSE, StoreId};
use crate::{Completion, Reactor, Store, Wait};

/// Bytes of the place of a request's head.
const HEADER_BYTES: usize = 32;

/// Most bytes in each direction that a store on a shared thread has the kernel move at once, all its connections together: a part of this
/// for each. The sockets may have much more, and the kernel copies that on this thread, inside the enter.
const MOVED_MAX: u64 = 1 << 20;
/// Least time for the first connection of a store, which needs no more than this to find that the server does not answer.
const FIRST_TIME_MIN: Duration = Duration::from_secs(10);
/// Ops of the store's own: a flush.
const OWN_OPS: u16 = 1;
/// The token of the flush of the store's own (`kept.rs`). No owner pushes it: a token holds a slot and a part.
const OWN_FLUSH: u64 = u64::MAX;

/// Ops on an NBD server's export.
#[derive(Debug)]
pub struct Nbd {
    disk: Arc<Disk>,
    id: StoreId,
    ops: OpQueue<Flight>,
    lines: Box<[Line]>,
    headers: Area,
    zeroes: Area,
    /// For what is zeroed, copied and looked up here, and what the kernel copied for the sends and receives that have completed.
    lap: LapBudget,
    /// Most bytes of a message, and of data in a receive.
    portion: u64,
    /// The connection that has its turn first, another one in each lap: it may use the budget of the lap up.
    first_line: usize,
    /// Used where a connection's own promises are not known.
    export: Export,
    /// The times that the operator chose, and the rest of the disk's name.
    spec: NbdSpec,
    /// The clock, read once a lap while ops are in flight.
    now: Instant,
    /// The next look at the age of the requests.
    check_at: Option<Instant>,
    next_cookie: u64,
    /// A flush of this store's own is under way, so that fewer changes have to be kept.
    is_flushing: bool,
    /// The ops that wait for a flush, in the order in which they asked.
    flush_waits: VecDeque<u16>,
    /// The op whose FLUSH is the one of the disk that is under way.
    turn: Option<(u16, FlushTurn)>,
    /// The changes that wait for room among the kept ones, in order.
    waiting: VecDeque<u16>,
    /// A request or an op has ended, so there may be room for them.
    may_have_room: bool,
    /// What all flights have reserved.
    reserved: u64,
    /// The number after the last change of this store that was kept.
    kept_end: u64,
    /// When a flush of this store last left memory for large copies.
    copy_room_at: Option<Instant>,
    /// A connection was made since the owner last asked.
    came_back: bool,
    is_closing: bool,
}

impl Nbd {
    /// For an NBD disk, on a reactor that was created for it. The connections come later.
    pub(crate) fn new(reactor: &mut Reactor, disk: Arc<Disk>, ops: u16) -> io::Result<Nbd> {
        let Backing::Nbd(client) = disk.backing() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let now = Instant::now();
        let (export, spec) = (*client.export(), client.spec().clone());
        let slots = ops.saturating_add(OWN_OPS);
        // The wait for the first connections begins later, so that it does not end too soon.
        let since = now + FIRST_TIME_MIN.saturating_sub(spec.reconnect);
        let mut lines = Vec::new();
        for mut port in client.ports().map_err(io::Error::other)? {
            port.request();
            lines.push(Line::new(port, usize::from(slots), since, client.is_tcp())?);
        }
        // The place of the socket has the bell until there is a socket.
        let bells = lines.iter().flat_map(|line| [line.port.bell(); 2]);
        // A receive is put off by microseconds (`gather.rs`), and the kernel's 50 more would be felt. A thread of a pool has none of
        // its own to change, and keeps them.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let id = reactor.attach(&bells.collect::<Vec<_>>(), false)?;
        let lap = LapBudget::of(&reactor.tenancy());
        let portion = match lap.is_bounded() {
            true => MOVED_MAX / lines.len().max(1) as u64,
            false => u64::MAX,
        };
        Ok(Nbd {
            id,
            ops: OpQueue::new(&disk, ops, OWN_OPS, Flight::free(now))?,
            lines: lines.into_boxed_slice(),
            headers: Area::new(usize::from(slots) * HEADER_BYTES, 4096, Access::ReadWrite)?,
            zeroes: Area::new(ZEROES_BYTES as usize, 4096, Access::Read)?,
            lap,
            portion,
            first_line: 0,
            export,
            spec,
            now,
            check_at: None,
            next_cookie: 1,
            is_flushing: false,
            flush_waits: VecDeque::with_capacity(usize::from(slots)),
            turn: None,
            waiting: VecDeque::with_capacity(usize::from(ops)),
            may_have_room: false,
            reserved: 0,
            kept_end: 0,
            copy_room_at: None,
            came_back: false,
            is_closing: false,
            disk,
        })
    }

    /// Checks an op, chooses its connection and adds it to the queue. `Err` is the result of an op that ends here.
    fn admit(&mut self, epoch: &Epoch, op: &Op<'_>, token: u64) -> Result<u16, Result<(), i32>> {
        let range = remote_range(&self.disk, op, self.export.block_min.into())?;
        let line = self.choose_line().ok_or(Err(libc::ENOTCONN))?;
        let flight = |_memory| Flight::on(line, self.now);
        let lap = &mut self.lap;
        let index = self.ops.admit(lap, epoch, op, token, range, flight);
        let index = index.map_err(Err)?;
        self.line_mut(line).ops += 1;
        Ok(index)
    }

    /// The connection with the fewest ops, if possible one that is there. `None`: all are gone for so long that ops fail.
    fn choose_line(&self) -> Option<u8> {
        let rank = |line: &Line| match line.phase {
            Phase::Up => Some((0, line.ops)),
            Phase::Down { gave_up: false, .. } => Some((1, line.ops)),
            Phase::Ending { .. } => Some((2, line.ops)),
            Phase::Down { gave_up: true, .. } => None,
        };
        let ranked = (0_u8..).zip(&self.lines);
        let ranked = ranked.filter_map(|(number, line)| Some((rank(line)?, number)));
        ranked.min().map(|(_, number)| number)
    }

    /// Starts the next request of an op, or ends the op. While its connection is not there, the op waits.
    fn proceed(&mut self, index: u16) {
        let line = self.flight(index).line;
        let Line {
            phase: Phase::Up,
            link: Some(link),
            ..
        } = self.line(line)
        else {
            self.flight_mut(index).sent = SendState::Nothing;
            return;
        };
        match next::next(self.ops.get(index), &link.export) {
            NextRequest::Done => self.finish(index, Ok(())),
            NextRequest::Send(part) if part == Part::FLUSH => self.queue_flush(index),
            NextRequest::Send(part) if part.changes() => self.queue_change(index, part),
            NextRequest::Send(part) => self.queue(index, part),
        }
    }

    /// The current request of an op is answered.
    fn settle(&mut self, index: u16, result: Result<(), i32>) {
        let flight = self.flight_mut(index);
        let part = flight.part;
        flight.cookie = 0;
        if result == Err(libc::ESHUTDOWN) {
            // It did not do this request, and the next server will. It closes the connection when it has answered the others.
            return self.interrupt(index);
        }
        flight.lost_at = None;
        if part.kind == Part::FLUSH.kind {
            return self.flush_answered(index, result);
        }
        match result {
            Ok(()) => {
                if part.changes() {
                    self.keep(index, part);
                }
                self.ops.get_mut(index).pos += part.len;
            }
            // A hint, which this server announced and does not take.
            Err(libc::EOPNOTSUPP) if self.ops.get(index).kind == OpKind::Discard => {
                return self.finish(index, Ok(()));
            }
            Err(libc::EOPNOTSUPP)
                if matches!(self.ops.get(index).kind, OpKind::Zero { .. })
                    && !self.flight(index).written =>
            {
                self.flight_mut(index).written = true;
            }
            Err(errno) => {
                if part.flags & 1 != 0 && progress::taints_sync(errno) {
                    self.taint_sync(errno);
                }
                return self.finish(index, Err(errno));
            }
        }
        self.release(index);
        self.proceed(index);
    }

    /// Ends an op. Nothing that the kernel does refers to it any more.
    fn finish(&mut self, index: u16, result: Result<(), i32>) {
        self.interrupt(index);
        let entry = self.ops.get_mut(index);
        entry.own.sent = SendState::Free;
        let (token, line) = (entry.token, entry.own.line);
        self.line_mut(line).ops -= 1;
        match token {
            OWN_FLUSH => {
                self.is_flushing = false;
                self.ops.free(index);
            }
            _ => self.ops.finish(index, result),
        }
    }

    /// Takes an op's request back, if it has one.
    fn interrupt(&mut self, index: u16) {
        let flight = self.flight_mut(index);
        let sent = std::mem::replace(&mut flight.sent, SendState::Nothing);
        (flight.cookie, flight.early) = (0, None);
        match sent {
            SendState::Full => self.waiting.retain(|at| *at != index),
            SendState::Turn => self.flush_waits.retain(|at| *at != index),
            _ => {}
        }
        if matches!(self.turn, Some((leader, _)) if leader == index) {
            self.turn = None;
        }
        self.release(index);
    }

    /// Makes every later flush fail: the server may have dropped what it could not write, as a kernel does.
    fn taint_sync(&self, errno: i32) {
        let failed = "the NBD server failed a flush";
        queue::taint_sync(&self.disk, self.disk.name(), failed, errno);
    }

    #[inline]
    fn flight(&self, index: u16) -> &Flight {
        &self.ops.get(index).own
    }

    #[inline]
    fn flight_mut(&mut self, index: u16) -> &mut Flight {
        &mut self.ops.get_mut(index).own
    }

    #[inline]
    fn line(&self, line: u8) -> &Line {
        &self.lines[usize::from(line)]
    }

    #[inline]
    fn line_mut(&mut self, line: u8) -> &mut Line {
        &mut self.lines[usize::from(line)]
    }

    fn line_numbers(&self) -> std::ops::Range<u8> {
        // At most 16 (`NbdSpec`).
        0..self.lines.len() as u8
    }

    fn socket_slot(&self, line: u8) -> u32 {
        self.id.first_file + 2 * u32::from(line)
    }

    fn socket(&self, line: u8) -> Fixed {
        Fixed(self.socket_slot(line))
    }

    /// Submits an entry of a connection. `false`: there is no room now; the next lap tries again.
    fn submit(
        &mut self,
        reactor: &mut Reactor,
        line: u8,
        which: RingEntry,
        entry: &squeue::Entry,
    ) -> bool {
        let entry = entry
            .clone()
            .user_data(self.id.user_data(which.number(line)));
        // SAFETY: see the module's documentation: everything that `entry` points to lives until its completion.
        let pushed = unsafe { reactor.submit(self.id, &entry, false) };
        let line = self.line_mut(line);
        match which {
            RingEntry::Receive => line.receiving = pushed,
            RingEntry::Send => line.sending = pushed,
            RingEntry::Bell => line.listening = pushed,
            RingEntry::Shutdown => line.shutting = pushed,
            RingEntry::Acknowledge => {}
        }
        pushed
    }

    fn shut_down(&mut self, reactor: &mut Reactor, line: u8, how: i32) -> bool {
        let entry = opcode::Shutdown::new(self.socket(line), how).build();
        self.submit(reactor, line, RingEntry::Shutdown, &entry)
    }

    /// Does what is due on each connection. `Some`: the longest sleep allowed.
    fn turn(&mut self, reactor: &mut Reactor) -> Option<Duration> {
        let mut limit: Option<Duration> = None;
        let mut at_most = |time: Option<Duration>| {
            limit = limit.into_iter().chain(time).min();
        };
        at_most(self.check_ages());
        if std::mem::take(&mut self.may_have_room) {
            self.queue_waiting();
        }
        let lines = self.lines.len();
        let turns = self.line_numbers().cycle().skip(self.first_line);
        self.first_line = (self.first_line + 1) % lines.max(1);
        for (at, line) in turns.take(lines).enumerate() {
            at_most(match self.line(line).phase {
                Phase::Up => self.keep_moving(reactor, line, at == 0),
                Phase::Ending { .. } => self.end(reactor, line),
                Phase::Down { .. } => self.wait_for_link(reactor, line),
            });
            self.line_mut(line).show_held();
        }
        at_most(self.await_flushes(reactor));
        at_most(self.free_copy_room());
        limit
    }

    /// Sends and receives on a connection that is there. If the lap is used up, only the one that has its turn first begins anything.
    fn keep_moving(&mut self, reactor: &mut Reactor, line: u8, is_first: bool) -> Option<Duration> {
        let was_behind = self.line(line).is_behind;
        if was_behind {
            // The server is not silent meanwhile.
            self.line_mut(line).heard = true;
            self.take_in(line);
            if self.line(line).phase != Phase::Up {
                return Some(Duration::ZERO);
            }
        }
        let state = self.line(line);
        let is_idle = !state.receiving && !state.is_cut && !state.is_behind;
        let has_more = !state.queue.is_empty() && !state.port.is_abandoned();
        let wants_send = !state.sending && has_more;
        if !is_first && self.lap.is_used_up() && (is_idle || wants_send) {
            return Some(Duration::ZERO);
        }
        let pause = match is_idle {
            true => self.line_mut(line).gather.left(),
            false => None,
        };
        let mut is_full = is_idle && pause.is_none() && !self.receive(reactor, line);
        if wants_send {
            // That acknowledges what was received.
            self.line_mut(line).wants_ack = false;
            is_full |= !self.send(reactor, line);
        } else if pause.is_none() && std::mem::take(&mut self.line_mut(line).wants_ack) {
            self.acknowledge(reactor, line);
        }
        match is_full {
            // An answer may have made room for changes that wait, or queued a request on a connection that had its turn.
            _ if was_behind => Some(Duration::ZERO),
            true => Some(FULL_PAUSE),
            false => pause,
        }
    }
}

impl Store for Nbd {
    from_ops!(room, reap, is_ready);

    #[inline]
    fn in_flight(&self) -> usize {
        self.ops.in_flight() + usize::from(self.awaits_flush())
    }

    fn push(&mut self, _reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64) {
        if self.ops.in_flight() == 0 {
            self.now = Instant::now();
        }
        match self.admit(epoch, &op, token) {
            Ok(index) => self.proceed(index),
            Err(result) => self.ops.end(token, result),
        }
    }

    fn completed(&mut self, reactor: &mut Reactor, completion: Completion) {
        self.id.assert_own(completion);
        let (line, which) = RingEntry::of(completion.index);
        let result = completion.result;
        match which {
            RingEntry::Receive => self.received(line, result),
            RingEntry::Send => self.sent(line, result),
            RingEntry::Bell => self.belled(reactor, line),
            RingEntry::Shutdown => self.line_mut(line).shutting = false,
            // Linux 6.7 is the first that can.
            RingEntry::Acknowledge => self.line_mut(line).can_ack = false,
        }
    }

    #[inline]
    fn before_enter(&mut self, reactor: &mut Reactor, _wait: Wait) -> Option<Duration> {
        let limit = self.turn(reactor);
        limit.into_iter().chain(self.look_pause()).min()
    }

    #[inline]
    fn after_enter(&mut self) {
        self.lap.renew();
        if self.ops.in_flight() > 0 || self.is_flushing {
            self.now = Instant::now();
        }
    }

    #[inline]
    fn is_sated(&self) -> bool {
        self.lap.is_used_up()
    }

    #[inline]
    fn came_back(&mut self) -> bool {
        std::mem::take(&mut self.came_back)
    }

    fn prepare_close(&mut self) {
        if !std::mem::replace(&mut self.is_closing, true) {
            self.now = Instant::now();
            self.flush_at_end();
        }
    }

    fn close(&mut self, reactor: &mut Reactor) -> bool {
        self.lap = LapBudget::unlimited();
        let waited = self.close_lines(reactor);
        queue::has_closed(&self.disk, waited)
    }

    fn release_shared(&mut self) {
        self.give_up_turn();
        let reserved = std::mem::take(&mut self.reserved);
        if let Some(line) = self.lines.first() {
            line.port.release(reserved);
            line.port.forget_copy_room();
        }
    }
}

impl Drop for Nbd {
    /// Without the completions it is unknown when the kernel stops writing, so nothing that it may write to is ever unmapped, guest
    /// memory included.
    fn drop(&mut self) {
        self.release_shared();
        if !self.lines.iter().any(Line::is_busy) {
            return;
        }
        tracing::error!(
            disk = self.disk.name(),
            "I/Os never completed; the memory that they may write to is kept"
        );
        self.ops.leak();
        self.headers.leak();
        self.zeroes.leak();
        self.lines.iter_mut().for_each(Line::leak);
    }
}

/// Passes `take` bytes of the ranges, from byte `skip` on, to `with`, range by range. `false` from it ends the walk.
fn cut(ranges: &[iovec], mut skip: u64, mut take: u64, mut with: impl FnMut(iovec) -> bool) {
    for range in ranges {
        let len = range.iov_len as u64;
        if skip >= len {
            skip -= len;
            continue;
        }
        let count = (len - skip).min(take);
        if count == 0 {
            return;
        }
        let piece = iovec {
            iov_base: range.iov_base.wrapping_byte_add(skip as usize),
            iov_len: count as usize,
        };
        (skip, take) = (0, take - count);
        if !with(piece) {
            return;
        }
    }
}

/// The descriptor of a connection's socket.
fn socket_of(line: &Line) -> Option<i32> {
    line.link.as_ref().map(|link| link.socket.as_raw_fd())
}

#[cfg(test)]
mod tests;
