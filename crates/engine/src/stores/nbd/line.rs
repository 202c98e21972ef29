//! One connection of a store: its phase, the requests that wait to be sent, and the memory that the kernel reads and writes.
//!
//! Unsafe because that memory is raw: messages, ranges and received bytes lie in an `Area`, where the kernel may use them until
//! the entries' completions have been seen. Each part belongs either to the kernel (`sending`, `receiving`) or to the store.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use cleave_nbd::{Disconnect, Link, Port};
use libc::{c_int, iovec, msghdr};

use super::gather::Gather;
use crate::ops::area::{Access, Area};

/// Most ranges of one message (UIO_MAXIOV).
pub(super) const RANGES_MAX: usize = 1024;
/// Bytes that are received after what is expected in guest memory: the heads of the next replies, and with them the data of
/// small ones. It is copied from here, which takes less time than receiving it with a system call of its own.
pub(super) const STAGING_BYTES: usize = 64 << 10;
/// Part of it that is used while reads are large: their data goes straight to guest memory.
const STAGING_LARGE_BYTES: usize = 8 << 10;
/// A read from this size on is large.
const LARGE_BYTES: u64 = 64 << 10;

/// The phase of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// There is none. `gave_up`: for so long that requests fail.
    Down { since: Instant, gave_up: bool },
    /// Requests are sent and answered.
    Up,
    /// The connection counts as lost. Its requests wait until the server cannot apply them any more. `None`: it has none that matters.
    Ending {
        lost_at: Instant,
        fence_at: Option<Instant>,
    },
}

/// The meaning of the next received bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Inbound {
    /// The head of a frame.
    Head,
    /// Data for a request; `at` bytes into its part, `left` to come.
    Data {
        index: u16,
        at: u64,
        left: u64,
        is_last: bool,
    },
    /// Zeroes for a request, which are not sent; `at` bytes into its part, `left` to write.
    Hole {
        index: u16,
        at: u64,
        left: u64,
        is_last: bool,
    },
    /// Bytes that nobody wants. If they end the reply of a request, it is named.
    Skip { left: u64, then: Option<u16> },
}

/// The entries of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RingEntry {
    Receive,
    Send,
    Bell,
    Shutdown,
    /// Acknowledges what was received. Only its failure is reported.
    Acknowledge,
}

impl RingEntry {
    /// The number under which connection `line` submits it.
    pub(super) fn number(self, line: u8) -> u16 {
        u16::from(line) * 8 + self as u16
    }

    /// The connection and its entry with this number.
    pub(super) fn of(number: u16) -> (u8, RingEntry) {
        let entry = match number % 8 {
            0 => RingEntry::Receive,
            1 => RingEntry::Send,
            2 => RingEntry::Bell,
            3 => RingEntry::Shutdown,
            _ => RingEntry::Acknowledge,
        };
        ((number / 8) as u8, entry)
    }
}

/// The memory that the kernel reads and writes.
#[repr(C)]
struct Space {
    send: msghdr,
    receive: msghdr,
    send_ranges: [iovec; RANGES_MAX],
    receive_ranges: [iovec; RANGES_MAX],
    staging: [u8; STAGING_BYTES],
    /// The value of TCP_QUICKACK.
    at_once: c_int,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) port: Port,
    pub(super) link: Option<Link>,
    pub(super) phase: Phase,
    /// The socket of a lost connection, while it may still send something.
    pub(super) disconnect: Option<Disconnect>,
    /// The server's process, of the last connection.
    pub(super) server: Option<OwnedFd>,
    /// Requests that have not been sent whole, in order.
    pub(super) queue: VecDeque<u16>,
    /// Bytes of the first of them that have been sent.
    pub(super) front_sent: u64,
    /// Ops of this connection, sent or not, and how many were last shown as waiting for one.
    pub(super) ops: usize,
    held_shown: usize,
    pub(super) inbound: Inbound,
    /// Bytes in the staging area that have not been read.
    pub(super) staged: usize,
    /// The last read was large.
    is_large: bool,
    /// This lap has done enough: what is staged is taken in by the next ones, and nothing is received before that.
    pub(super) is_behind: bool,
    pub(super) gather: Gather,
    /// Entries in the ring.
    pub(super) sending: bool,
    pub(super) receiving: bool,
    pub(super) listening: bool,
    pub(super) shutting: bool,
    /// The socket was shut down in both directions.
    pub(super) is_cut: bool,
    /// Something small arrived that is to be acknowledged; and whether that is of use, and the kernel can.
    pub(super) wants_ack: bool,
    pub(super) can_ack: bool,
    /// A request was answered on this connection.
    pub(super) has_answered: bool,
    /// Something arrived since the last look at the clock, and the time of the last arrival.
    pub(super) heard: bool,
    pub(super) heard_at: Instant,
    space: Area,
}

impl Line {
    /// `since`: when the wait for a connection begins.
    pub(super) fn new(port: Port, ops: usize, since: Instant, can_ack: bool) -> io::Result<Line> {
        let space = Area::new(size_of::<Space>(), 4096, Access::ReadWrite)?;
        Ok(Line {
            port,
            link: None,
            phase: Phase::Down {
                since,
                gave_up: false,
            },
            disconnect: None,
            server: None,
            queue: VecDeque::with_capacity(ops),
            front_sent: 0,
            ops: 0,
            held_shown: 0,
            inbound: Inbound::Head,
            staged: 0,
            is_large: false,
            is_behind: false,
            gather: Gather::new(since),
            sending: false,
            receiving: false,
            listening: false,
            shutting: false,
            is_cut: false,
            wants_ack: false,
            can_ack,
            has_answered: false,
            heard: false,
            heard_at: since,
            space,
        })
    }

    fn space(&self) -> *mut Space {
        self.space.at(0).cast()
    }

    /// Returns true if the kernel has entries of this connection.
    pub(super) fn is_busy(&self) -> bool {
        self.sending || self.receiving || self.listening || self.shutting
    }

    /// Shows how many requests wait for a connection.
    pub(super) fn show_held(&mut self) {
        let held = match self.phase {
            Phase::Up => 0,
            Phase::Down { .. } | Phase::Ending { .. } => self.ops,
        };
        if held != self.held_shown {
            self.held_shown = held;
            self.port.set_held(held);
        }
    }

    /// Begins with a fresh connection.
    pub(super) fn begin(&mut self, mut link: Link, now: Instant) {
        self.server = link.server.take();
        self.link = Some(link);
        self.phase = Phase::Up;
        self.inbound = Inbound::Head;
        (self.staged, self.front_sent, self.is_behind) = (0, 0, false);
        (self.is_cut, self.wants_ack) = (false, false);
        (self.has_answered, self.heard, self.heard_at) = (false, false, now);
        self.gather = Gather::new(now);
    }

    /// Stores range number `count` of the message to send.
    pub(super) fn put_send(&mut self, count: usize, range: iovec) {
        debug_assert!(!self.sending && count < RANGES_MAX);
        if count < RANGES_MAX {
            // SAFETY: `count` is inside the array (checked), which lives as long as this line, and the kernel does not use it
            // while nothing is being sent.
            unsafe {
                (&raw mut (*self.space()).send_ranges)
                    .cast::<iovec>()
                    .add(count)
                    .write(range)
            };
        }
    }

    /// Stores range number `count` of the next receive.
    pub(super) fn put_receive(&mut self, count: usize, range: iovec) {
        debug_assert!(!self.receiving && count < RANGES_MAX);
        if count < RANGES_MAX {
            let ranges = unsafe_ranges(self.space());
            // SAFETY: as in `put_send`, for the other array.
            unsafe { ranges.add(count).write(range) };
        }
    }

    /// The message with the first `count` ranges to send.
    pub(super) fn send_message(&mut self, count: usize) -> *const msghdr {
        let space = self.space();
        // SAFETY: `space` is valid for as long as this line lives; zeroes are a valid message, and only these fields are set.
        unsafe {
            (*space).send.msg_iov = (&raw mut (*space).send_ranges).cast();
            (*space).send.msg_iovlen = count;
            &raw const (*space).send
        }
    }

    /// The message that receives into the first `count` ranges.
    pub(super) fn receive_message(&mut self, count: usize) -> *mut msghdr {
        let space = self.space();
        // SAFETY: as in `send_message`. The kernel writes the other fields of a received message, so they are set again.
        unsafe {
            (*space).receive = std::mem::zeroed();
            (*space).receive.msg_iov = (&raw mut (*space).receive_ranges).cast();
            (*space).receive.msg_iovlen = count;
            &raw mut (*space).receive
        }
    }

    /// Returns the bytes of the last message.
    #[cfg(test)]
    pub(super) fn message_bytes(&self) -> u64 {
        let space = self.space();
        // SAFETY: `space` is valid for as long as this line lives, and the kernel writes neither field. As many ranges are stored.
        let ranges = unsafe {
            std::slice::from_raw_parts(
                (&raw const (*space).send_ranges).cast::<iovec>(),
                (*space).send.msg_iovlen,
            )
        };
        ranges.iter().map(|range| range.iov_len as u64).sum()
    }

    /// Returns the bytes that the last receive had room for.
    #[cfg(test)]
    pub(super) fn receive_bytes(&self) -> u64 {
        let space = self.space();
        // SAFETY: as in `message_bytes`. The kernel does not write the number of ranges of a received message.
        let ranges = unsafe {
            std::slice::from_raw_parts(
                (&raw const (*space).receive_ranges).cast::<iovec>(),
                (*space).receive.msg_iovlen,
            )
        };
        ranges.iter().map(|range| range.iov_len as u64).sum()
    }

    /// The value of TCP_QUICKACK, and its size.
    pub(super) fn at_once(&mut self) -> (*const libc::c_void, u32) {
        let space = self.space();
        // SAFETY: `space` is valid for as long as this line lives; the kernel only reads this field, which always has this value.
        unsafe {
            (*space).at_once = 1;
            (
                (&raw const (*space).at_once).cast(),
                size_of::<c_int>() as u32,
            )
        }
    }

    /// Sizes the staging area for the data of a read, which begins to arrive.
    pub(super) fn data_begins(&mut self, bytes: u64) {
        self.is_large = bytes >= LARGE_BYTES;
    }

    /// The free end of the staging area. Never empty: only a part of a head stays there.
    pub(super) fn staging_room(&self) -> iovec {
        let end = match self.is_large {
            true => STAGING_LARGE_BYTES,
            false => STAGING_BYTES,
        };
        iovec {
            // SAFETY: `staged` is at most the length of the array.
            iov_base: unsafe { self.staging().add(self.staged) }.cast(),
            iov_len: end.saturating_sub(self.staged),
        }
    }

    /// The first staged byte.
    pub(super) fn staging(&self) -> *mut u8 {
        // SAFETY: only the address of a field is taken.
        unsafe { (&raw mut (*self.space()).staging).cast() }
    }

    /// Copies the staged bytes from `at` into `out`; returns how many there were.
    pub(super) fn peek(&self, at: usize, out: &mut [u8]) -> usize {
        debug_assert!(!self.receiving);
        let count = self.staged.saturating_sub(at).min(out.len());
        // SAFETY: `at + count` ≤ `staged` ≤ the length of the array, which the kernel does not write now.
        unsafe { std::ptr::copy_nonoverlapping(self.staging().add(at), out.as_mut_ptr(), count) };
        count
    }

    /// Drops the first `count` staged bytes.
    pub(super) fn unstage(&mut self, count: usize) {
        let left = self.staged.saturating_sub(count);
        if left > 0 && count > 0 {
            let start = self.staging();
            // SAFETY: both ranges are inside the array; they may overlap.
            unsafe { std::ptr::copy(start.add(count), start, left) };
        }
        self.staged = left;
    }

    /// Never frees the memory, because the kernel may still use it.
    pub(super) fn leak(&mut self) {
        self.space.leak();
    }
}

fn unsafe_ranges(space: *mut Space) -> *mut iovec {
    // SAFETY: only the address of a field is taken.
    unsafe { (&raw mut (*space).receive_ranges).cast() }
}
