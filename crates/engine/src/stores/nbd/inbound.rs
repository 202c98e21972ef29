//! Replies on their way from the server. The server is not trusted: a reply must name a request that was asked on this
//! connection, and its data must lie inside the request; anything else ends the connection.

use cleave_nbd::frame::{self, Breach, Frame, FrameContent, HEAD_MAX};
use cleave_nbd::wire::request;
use io_uring::opcode;
use io_uring::squeue::Flags;

use super::flight::SendState;
use super::line::{Inbound, Phase, RANGES_MAX, RingEntry, STAGING_BYTES};
use super::{Nbd, cut};
use crate::Reactor;
use crate::ops::memory::fill_with_zeroes;
use crate::ops::table::Entry;

/// TCP acknowledges larger amounts by itself.
const ACK_BYTES: u64 = 64 << 10;

impl Nbd {
    /// Submits a receive: to the guest memory of the read whose data comes next, then to the staging area.
    pub(super) fn receive(&mut self, reactor: &mut Reactor, line: u8) -> bool {
        let mut count = 0;
        if let Inbound::Data {
            index, at, left, ..
        } = self.line(line).inbound
        {
            let skip = self.ops.get(index).pos + at;
            let (all, many) = self.ops.ranges(index);
            // SAFETY: the table's ranges are valid until the entry is freed, and filling the line's does not touch them.
            let all = unsafe { std::slice::from_raw_parts(all, many) };
            let state = &mut self.lines[usize::from(line)];
            let mut covered = 0;
            cut(all, skip, left.min(self.portion), |range| {
                state.put_receive(count, range);
                (count, covered) = (count + 1, covered + range.iov_len as u64);
                count < RANGES_MAX - 1
            });
            if covered < left {
                // More than fits into one receive: no staging after that.
                return self.submit_receive(reactor, line, count);
            }
        }
        let state = self.line_mut(line);
        let room = state.staging_room();
        state.put_receive(count, room);
        self.submit_receive(reactor, line, count + 1)
    }

    fn submit_receive(&mut self, reactor: &mut Reactor, line: u8, ranges: usize) -> bool {
        let message = self.line_mut(line).receive_message(ranges);
        let entry = opcode::RecvMsg::new(self.socket(line), message).build();
        self.submit(reactor, line, RingEntry::Receive, &entry)
    }

    /// Acknowledges what was received, without the 40 ms for which TCP waits for something to send. Many servers, qemu-nbd among
    /// them, let TCP hold back a short answer until the one before is acknowledged (Nagle).
    pub(super) fn acknowledge(&mut self, reactor: &mut Reactor, line: u8) {
        let (value, len) = self.line_mut(line).at_once();
        let (level, option) = (libc::IPPROTO_TCP as u32, libc::TCP_QUICKACK as u32);
        let entry = opcode::SetSockOpt::new(self.socket(line), level, option, value, len).build();
        let entry = entry.flags(Flags::SKIP_SUCCESS);
        // If there is no room, TCP acknowledges later.
        self.submit(reactor, line, RingEntry::Acknowledge, &entry);
    }

    /// A receive has completed.
    pub(super) fn received(&mut self, line: u8, result: i32) {
        self.line_mut(line).receiving = false;
        if self.line(line).phase != Phase::Up {
            // Nothing that comes on a connection that is lost matters.
            return;
        }
        match result {
            1.. => {
                self.line_mut(line).heard = true;
                self.line(line).port.count_received(result as u64);
                self.stage(line, result as u64);
                self.take_in(line);
                // After what is small was taken in, which other connections may wait for.
                self.lap.spend(result as u64);
                let state = self.line_mut(line);
                state.wants_ack = state.can_ack && state.ops > 0 && (result as u64) < ACK_BYTES;
            }
            0 => self.lose(line, "it closed the connection"),
            _ => match -result {
                libc::EAGAIN | libc::EINTR | libc::ENOMEM | libc::ENOBUFS | libc::ECANCELED => {}
                libc::ECONNRESET | libc::EPIPE => {
                    self.lose(line, "it closed the connection");
                }
                libc::EFAULT => self.lose_read(line),
                errno => self.failed_here(line, errno),
            },
        }
    }

    /// The kernel cannot write to the memory of the read whose data comes: the data is dropped, and the read fails.
    fn lose_read(&mut self, line: u8) {
        match self.line(line).inbound {
            Inbound::Data {
                index,
                left,
                is_last,
                ..
            } => {
                self.flight_mut(index).error = Some(libc::EFAULT);
                self.line_mut(line).inbound = Inbound::Skip {
                    left,
                    then: is_last.then_some(index),
                };
            }
            _ => self.lose(line, "it cannot be received from"),
        }
    }

    /// Counts so many received bytes: first those that went to guest memory, then the staged ones.
    fn stage(&mut self, line: u8, count: u64) {
        let mut staged = count;
        let state = self.line_mut(line);
        if let Inbound::Data { at, left, .. } = &mut state.inbound {
            let direct = count.min(*left);
            (*at, *left) = (*at + direct, *left - direct);
            staged -= direct;
        }
        state.staged = (state.staged + staged as usize).min(STAGING_BYTES);
    }

    /// Takes in what is staged, as far as the budget of this lap allows. Small answers can ask for much work: a hole of 32 MiB has 32
    /// bytes, and the data of an answered write is copied.
    pub(super) fn take_in(&mut self, line: u8) {
        let requests = self.line(line).ops;
        let mut read = 0;
        let end = self.lap.end_of_work();
        let is_behind = loop {
            if self.lap.is_used_up() {
                break Ok(true);
            }
            match self.step_in(line, &mut read) {
                Ok(true) => {}
                Ok(false) => break Ok(false),
                Err(breach) => break Err(breach),
            }
            if end.has_come() {
                self.lap.exhaust();
            }
        };
        self.line_mut(line).unstage(read);
        match is_behind {
            Ok(is_behind) => self.line_mut(line).is_behind = is_behind,
            Err(Breach(why)) => return self.lose(line, why),
        }
        let now = self.now;
        let state = self.line_mut(line);
        state.gather.received(now, requests);
        if state.inbound != Inbound::Head {
            state.gather.hurry();
        }
    }

    /// Reads one head, or the data of one frame, from the staged bytes after the first `read`, or writes zeroes. `false`: more must
    /// come first.
    fn step_in(&mut self, line: u8, read: &mut usize) -> Result<bool, Breach> {
        let available = (self.line(line).staged - *read) as u64;
        match self.line(line).inbound {
            Inbound::Head => {
                let mut head = [0; HEAD_MAX];
                let count = self.line(line).peek(*read, &mut head);
                let Some(frame) = frame::parse(head.get(..count).unwrap_or_default())? else {
                    return Ok(false);
                };
                *read += frame.head_bytes;
                self.begin_frame(line, frame)?;
                Ok(true)
            }
            Inbound::Data {
                index,
                at,
                left,
                is_last,
            } => {
                let take = available.min(left);
                self.copy_out(line, index, at, *read, take);
                *read += take as usize;
                self.line_mut(line).inbound = Inbound::Data {
                    index,
                    at: at + take,
                    left: left - take,
                    is_last,
                };
                if left > take {
                    return Ok(false);
                }
                self.line_mut(line).inbound = Inbound::Head;
                self.end_frame(index, is_last)?;
                Ok(true)
            }
            Inbound::Hole { .. } => self.zero_out(line).map(|()| true),
            Inbound::Skip { left, then } => {
                let take = available.min(left);
                *read += take as usize;
                if left > take {
                    let left = left - take;
                    self.line_mut(line).inbound = Inbound::Skip { left, then };
                    return Ok(false);
                }
                self.line_mut(line).inbound = Inbound::Head;
                if let Some(index) = then {
                    self.end_frame(index, true)?;
                }
                Ok(true)
            }
        }
    }

    /// Copies staged bytes to the guest memory of a read.
    fn copy_out(&mut self, line: u8, index: u16, at: u64, read: usize, take: u64) {
        self.lap.spend(take);
        let mut from = self.line(line).staging().wrapping_add(read);
        let skip = self.ops.get(index).pos + at;
        cut(self.ops.host_ranges(index), skip, take, |range| {
            // SAFETY: the op's epoch keeps the range mapped. The staged bytes from `read` on are at least `take`, and the kernel
            // does not write them now. Guest and daemon memory do not overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(from, range.iov_base.cast(), range.iov_len);
                from = from.add(range.iov_len);
            }
            true
        });
    }

    /// Zeroes guest memory of a read, as much of a hole as the budget of this lap allows.
    fn zero_out(&mut self, line: u8) -> Result<(), Breach> {
        let Inbound::Hole {
            index,
            at,
            left,
            is_last,
        } = self.line(line).inbound
        else {
            return Ok(());
        };
        let take = left.min(self.lap.left());
        self.lap.spend(take);
        let skip = self.ops.get(index).pos + at;
        cut(self.ops.host_ranges(index), skip, take, |range| {
            fill_with_zeroes(range.iov_base.cast(), range.iov_len);
            true
        });
        if left > take {
            self.line_mut(line).inbound = Inbound::Hole {
                index,
                at: at + take,
                left: left - take,
                is_last,
            };
            return Ok(());
        }
        self.line_mut(line).inbound = Inbound::Head;
        self.end_frame(index, is_last)
    }

    /// The op whose request a reply names.
    fn asked(&self, line: u8, cookie: u64) -> Result<u16, Breach> {
        let index = cookie as u16;
        let is_asked = self
            .ops
            .find(index)
            .is_some_and(|Entry { own: flight, .. }| {
                let is_ours = flight.line == line && flight.cookie == cookie;
                flight.sent.is_out() && is_ours && flight.early.is_none()
            });
        match is_asked {
            true => Ok(index),
            false => Err(Breach("it answered a request that was not asked")),
        }
    }

    fn begin_frame(&mut self, line: u8, frame: Frame) -> Result<(), Breach> {
        let index = self.asked(line, frame.cookie)?;
        let is_structured = self
            .line(line)
            .link
            .as_ref()
            .is_some_and(|link| link.export.structured);
        let part = self.flight(index).part;
        let is_read = part.kind == request::READ;
        match frame.content {
            FrameContent::Simple { error: 0 } if is_read && is_structured => {
                Err(Breach("it answered a read without structure"))
            }
            FrameContent::Simple { error: 0 } if is_read => {
                self.flight_mut(index).got = part.len;
                self.line_mut(line).data_begins(part.len);
                self.line_mut(line).inbound = Inbound::Data {
                    index,
                    at: 0,
                    left: part.len,
                    is_last: true,
                };
                Ok(())
            }
            FrameContent::Simple { error: 0 } => self.answered(index, Ok(())),
            FrameContent::Simple { error } => self.answered(index, Err(frame::errno(error))),
            _ if !is_structured => Err(Breach("it structures replies without being asked to")),
            FrameContent::End => self.end_frame(index, true),
            FrameContent::Data { offset, len } => {
                let at = self.place(index, offset, len)?;
                self.line_mut(line).data_begins(len.into());
                self.line_mut(line).inbound = Inbound::Data {
                    index,
                    at,
                    left: u64::from(len),
                    is_last: frame.is_last,
                };
                Ok(())
            }
            FrameContent::Hole { offset, len } => {
                let at = self.place(index, offset, len)?;
                self.line_mut(line).inbound = Inbound::Hole {
                    index,
                    at,
                    left: u64::from(len),
                    is_last: frame.is_last,
                };
                Ok(())
            }
            FrameContent::Error { error, skip } => {
                let flight = self.flight_mut(index);
                flight.error.get_or_insert(frame::errno(error));
                self.line_mut(line).inbound = Inbound::Skip {
                    left: skip.into(),
                    then: frame.is_last.then_some(index),
                };
                Ok(())
            }
        }
    }

    /// Where in its request a chunk of data belongs. No reply has more data than was asked for.
    fn place(&mut self, index: u16, offset: u64, len: u32) -> Result<u64, Breach> {
        let flight = self.flight_mut(index);
        let part = flight.part;
        let at = offset.checked_sub(part.offset);
        let got = flight.got + u64::from(len);
        let is_inside = |at: &u64| {
            let ends_inside = at
                .checked_add(len.into())
                .is_some_and(|end| end <= part.len);
            part.kind == request::READ && len > 0 && ends_inside && got <= part.len
        };
        let at = at.filter(is_inside);
        flight.got = got;
        at.ok_or(Breach("it sent data that was not asked for"))
    }

    /// A frame of a reply is over.
    fn end_frame(&mut self, index: u16, is_last: bool) -> Result<(), Breach> {
        if !is_last {
            return Ok(());
        }
        let flight = self.flight(index);
        match flight.error {
            Some(errno) => self.answered(index, Err(errno)),
            None if flight.part.kind == request::READ && flight.got != flight.part.len => {
                Err(Breach("its answer to a read lacks data"))
            }
            None => self.answered(index, Ok(())),
        }
    }

    /// A reply is over. If the message with the request is still under way, the op ends with that.
    fn answered(&mut self, index: u16, result: Result<(), i32>) -> Result<(), Breach> {
        let (line, asked_at) = (self.flight(index).line, self.flight(index).asked_at);
        let took = self.now.saturating_duration_since(asked_at);
        let state = self.line_mut(line);
        state.has_answered |= result != Err(libc::ESHUTDOWN);
        state.gather.answered(took);
        match self.flight(index).sent {
            SendState::Partly => self.flight_mut(index).early = Some(result),
            _ => self.settle(index, result),
        }
        Ok(())
    }
}
