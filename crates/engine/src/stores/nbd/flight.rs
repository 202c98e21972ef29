//! An op on its way to the server and back: its current request, and what the store notes about it.

use std::time::Instant;

use cleave_nbd::wire::request;

/// The bytes after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Payload {
    Nothing,
    Guest,
    Zeroes,
}

/// One request of an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) payload: Payload,
}

impl Part {
    pub(super) const FLUSH: Part = Part {
        kind: request::FLUSH,
        flags: 0,
        offset: 0,
        len: 0,
        payload: Payload::Nothing,
    };

    /// Returns true if a server that applies it late would do harm.
    pub(super) fn changes(&self) -> bool {
        !matches!(self.kind, request::READ | request::FLUSH)
    }

    /// Returns true for a request whose time depends on more than its length.
    pub(super) fn is_slow(&self) -> bool {
        matches!(
            self.kind,
            request::FLUSH | request::TRIM | request::WRITE_ZEROES
        )
    }

    pub(super) fn payload_bytes(&self) -> u64 {
        match self.payload {
            Payload::Nothing => 0,
            Payload::Guest | Payload::Zeroes => self.len,
        }
    }
}

/// How far the current request of an op is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendState {
    /// There is no op: the entry is free.
    Free,
    /// There is no request: the op waits for another connection.
    Nothing,
    /// There is no request: the change waits until there is room among the kept ones.
    Full,
    /// There is no request: the op waits for the turn to flush, or for the flush of another op.
    Turn,
    /// The request waits in the queue.
    Queued,
    /// The request is in the message under way, or partly sent.
    Partly,
    /// The request is sent.
    Whole,
}

impl SendState {
    /// Returns true if the server may have some of the request.
    pub(super) fn is_out(self) -> bool {
        matches!(self, SendState::Partly | SendState::Whole)
    }
}

/// The state of an op besides what every store notes about it.
#[derive(Debug, Clone)]
pub(super) struct Flight {
    pub(super) line: u8,
    pub(super) sent: SendState,
    pub(super) cookie: u64,
    pub(super) part: Part,
    /// Bytes of the part whose data came.
    pub(super) got: u64,
    /// The first error of a structured reply.
    pub(super) error: Option<i32>,
    /// The answer, if it came before the request was known to be sent.
    pub(super) early: Option<Result<(), i32>>,
    /// Its guest memory is gone, so it is not sent again.
    pub(super) doomed: bool,
    /// For zeroing: write zeroes, because the server refused to zero by itself.
    pub(super) written: bool,
    /// The first loss of a connection since a request of it was answered.
    pub(super) lost_at: Option<Instant>,
    pub(super) flushed: bool,
    /// For a flush: it covers the kept changes before this number.
    pub(super) covers: u64,
    /// For an op that waits for a flush: the number of the first one that covers it.
    pub(super) flush_number: u64,
    /// The room among the kept changes that the current request has.
    pub(super) reserved: u64,
    pub(super) asked_at: Instant,
}

impl Flight {
    /// A free entry.
    pub(super) fn free(now: Instant) -> Flight {
        Flight {
            line: 0,
            sent: SendState::Free,
            cookie: 0,
            part: Part::FLUSH,
            got: 0,
            error: None,
            early: None,
            doomed: false,
            written: false,
            lost_at: None,
            flushed: false,
            covers: 0,
            flush_number: 0,
            reserved: 0,
            asked_at: now,
        }
    }

    /// An op of this connection.
    pub(super) fn on(line: u8, now: Instant) -> Flight {
        Flight {
            line,
            sent: SendState::Nothing,
            ..Flight::free(now)
        }
    }

    /// Returns true for an op of this connection.
    pub(super) fn is_on(&self, line: u8) -> bool {
        self.line == line && self.sent != SendState::Free
    }
}
