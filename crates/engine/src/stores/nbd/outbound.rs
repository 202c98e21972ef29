//! Requests on their way to the server: the queue of a connection, and its message under way.

use cleave_nbd::wire::{REQUEST_BYTES, WireRequest};
use io_uring::opcode;
use libc::iovec;

use super::flight::{Part, Payload, SendState};
use super::line::{Phase, RANGES_MAX, RingEntry};
use super::{HEADER_BYTES, Nbd, cut};
use crate::Reactor;

/// No further request is added to a message of so many bytes: a socket takes less at once.
const MESSAGE_BYTES: u64 = 1 << 20;

impl Nbd {
    /// Appends a request of an op to the queue of its connection.
    pub(super) fn queue(&mut self, index: u16, part: Part) {
        // The lower bits find the op, the others are different in each request.
        let cookie = self.next_cookie << 16 | u64::from(index);
        self.next_cookie = self.next_cookie.wrapping_add(1).max(1);
        let request = WireRequest {
            flags: part.flags,
            kind: part.kind,
            cookie,
            offset: part.offset,
            len: part.len as u32,
        };
        let (now, header) = (self.now, self.header(index));
        let bytes = request.bytes();
        // SAFETY: the place of this op's head, which the kernel does not read: the op has no request in a message.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), header, bytes.len()) };
        let flight = self.flight_mut(index);
        (flight.sent, flight.cookie, flight.part) = (SendState::Queued, cookie, part);
        (flight.got, flight.error, flight.early) = (0, None, None);
        flight.asked_at = now;
        let line = flight.line;
        self.line_mut(line).queue.push_back(index);
        self.check_ages_later();
    }

    fn header(&self, index: u16) -> *mut u8 {
        self.headers.at(usize::from(index) * HEADER_BYTES)
    }

    /// Submits a message with as many of the queued requests as fit. `false`: there is no room in the ring now.
    pub(super) fn send(&mut self, reactor: &mut Reactor, line: u8) -> bool {
        let (ranges, batch) = self.compose(line);
        let message = self.line_mut(line).send_message(ranges);
        let entry = opcode::SendMsg::new(self.socket(line), message)
            .flags(libc::MSG_NOSIGNAL as u32)
            .build();
        if !self.submit(reactor, line, RingEntry::Send, &entry) {
            return false;
        }
        for at in 0..batch {
            if let Some(index) = self.line(line).queue.get(at).copied() {
                self.flight_mut(index).sent = SendState::Partly;
                if self.flight(index).part.kind == Part::FLUSH.kind {
                    self.flush_begins(index);
                }
            }
        }
        true
    }

    /// Fills the ranges of the next message. Returns their number, and that of the requests that it contains or begins.
    fn compose(&mut self, line: u8) -> (usize, usize) {
        let (mut ranges, mut batch, mut bytes) = (0, 0, 0);
        let mut skip = self.line(line).front_sent;
        for at in 0..self.line(line).queue.len() {
            let Some(index) = self.line(line).queue.get(at).copied() else {
                break;
            };
            if ranges >= RANGES_MAX || bytes >= MESSAGE_BYTES.min(self.portion) {
                break;
            }
            batch += 1;
            let room = self.portion - bytes;
            bytes += self.flight(index).part.payload_bytes();
            if let Some(left) = REQUEST_BYTES.checked_sub(skip as usize).filter(|n| *n > 0) {
                let start = self.header(index).wrapping_add(skip as usize);
                let range = iovec {
                    iov_base: start.cast(),
                    iov_len: left,
                };
                self.line_mut(line).put_send(ranges, range);
                ranges += 1;
            }
            let sent = skip.saturating_sub(REQUEST_BYTES as u64);
            ranges = self.compose_payload(line, index, [sent, room], ranges);
            skip = 0;
        }
        (ranges, batch)
    }

    /// Adds the rest of a request's data as far as there is room. Returns the number of ranges then.
    fn compose_payload(
        &mut self,
        line: u8,
        index: u16,
        [sent, room]: [u64; 2],
        ranges: usize,
    ) -> usize {
        let part = self.flight(index).part;
        let left = part.payload_bytes().saturating_sub(sent).min(room);
        let mut count = ranges;
        if left == 0 || count >= RANGES_MAX {
            return count;
        }
        if part.payload == Payload::Zeroes {
            let range = iovec {
                iov_base: self.zeroes.at(0).cast(),
                iov_len: left as usize,
            };
            self.line_mut(line).put_send(count, range);
            return count + 1;
        }
        let skip = self.ops.get(index).pos + sent;
        let (all, many) = self.ops.ranges(index);
        // SAFETY: as in `ranges`; it is not used because the line is changed meanwhile, which does not touch the table.
        let all = unsafe { std::slice::from_raw_parts(all, many) };
        let line = &mut self.lines[usize::from(line)];
        cut(all, skip, left, |range| {
            line.put_send(count, range);
            count += 1;
            count < RANGES_MAX
        });
        count
    }

    /// The message has been sent, or a part of it.
    pub(super) fn sent(&mut self, line: u8, result: i32) {
        self.line_mut(line).sending = false;
        match result {
            // Requests that were sent whole are noted after a loss as well.
            0.. => self.count_sent(line, result as u64),
            _ => match -result {
                libc::EAGAIN | libc::EINTR | libc::ENOMEM | libc::ENOBUFS | libc::ECANCELED => {}
                libc::EPIPE | libc::ECONNRESET => {
                    self.lose(line, "it closed the connection");
                }
                libc::EFAULT => {
                    self.doom(line);
                    self.lose(line, "guest memory is gone in a request");
                }
                errno => self.failed_here(line, errno),
            },
        }
    }

    fn count_sent(&mut self, line: u8, mut count: u64) {
        self.lap.spend(count);
        self.line(line).port.count_sent(count);
        while let Some(index) = self.line(line).queue.front().copied() {
            let whole = REQUEST_BYTES as u64 + self.flight(index).part.payload_bytes();
            let left = whole - self.line(line).front_sent;
            if count < left {
                self.line_mut(line).front_sent += count;
                break;
            }
            count -= left;
            let state = self.line_mut(line);
            state.front_sent = 0;
            state.queue.pop_front();
            let now = self.now;
            let flight = self.flight_mut(index);
            (flight.sent, flight.asked_at) = (SendState::Whole, now);
            // On a lost connection nothing ends before the fence does, for which an op has to be in flight.
            if let Some(result) = flight.early.take()
                && self.line(line).phase == Phase::Up
            {
                self.settle(index, result);
            }
            if count == 0 {
                break;
            }
        }
        self.refuse_early_answers(line);
    }

    /// A request that is not sent whole by now and has an answer, or the beginning of one, was not read by the server. The op must
    /// not end before its request has left the queue, and not while data is received into its memory, so it stays as it is.
    fn refuse_early_answers(&mut self, line: u8) {
        let mut is_breach = false;
        let front_sent = self.line(line).front_sent;
        for at in 0..self.line(line).queue.len() {
            let Some(index) = self.line(line).queue.get(at).copied() else {
                break;
            };
            let flight = self.flight_mut(index);
            if flight.sent != SendState::Partly {
                break;
            }
            if flight.early.is_some() || flight.got > 0 || flight.error.is_some() {
                is_breach = true;
            } else if at > 0 || front_sent == 0 {
                flight.sent = SendState::Queued;
            }
        }
        if is_breach {
            self.lose(line, "it answered a request before it had it");
        }
    }

    /// The kernel could not read the memory of a request in the message. The sessions whose memory is cut off end anyway; the
    /// requests of others are sent again.
    fn doom(&mut self, line: u8) {
        let mut is_found = false;
        for at in 0..self.line(line).queue.len() {
            let Some(index) = self.line(line).queue.get(at).copied() else {
                break;
            };
            if self.flight(index).sent == SendState::Partly {
                let epoch = self.ops.get(index).epoch.as_ref();
                let is_lost = epoch.is_some_and(|epoch| epoch.is_lost());
                self.flight_mut(index).doomed |= is_lost;
                is_found |= is_lost;
            }
        }
        let front = self.line(line).queue.front().copied();
        if let (false, Some(index)) = (is_found, front) {
            self.flight_mut(index).doomed = true;
        }
    }
}
