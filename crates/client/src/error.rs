//! What can go wrong on the driving side.

use std::io;
use std::time::Duration;

/// Why a step with the daemon failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused.
    #[error("{doing}: {source}")]
    Io {
        /// What was tried.
        doing: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The daemon closed the connection.
    #[error("the daemon closed the connection")]
    Closed,
    /// No answer in time.
    #[error("no answer to {what} within {after:?}")]
    TimedOut {
        /// What was waited for.
        what: &'static str,
        /// How long.
        after: Duration,
    },
    /// The daemon answered that it does not want the message.
    #[error("message {request} was refused with {code}")]
    Refused {
        /// Number of the message.
        request: u32,
        /// The code answered.
        code: u64,
    },
    /// An answer that the specification does not allow.
    #[error("the daemon broke the protocol: {0}")]
    Protocol(String),
    /// The pretended guest has no such memory, or none left.
    #[error("guest memory: {0}")]
    Memory(String),
    /// A request ended with another status than OK.
    #[error("request type {kind} at sector {sector} ended with status {status}")]
    Status {
        /// Type of the request.
        kind: u32,
        /// First sector.
        sector: u64,
        /// Status byte.
        status: u8,
    },
    /// A used length is not what the specification asks for.
    #[error("request type {kind} at sector {sector} reported {found} bytes used, not {wanted}")]
    UsedLength {
        /// Type of the request.
        kind: u32,
        /// First sector.
        sector: u64,
        /// Length found.
        found: u32,
        /// Length wanted.
        wanted: u32,
    },
    /// The used ring names a chain that is not in flight.
    #[error("chain {head} was completed without being in flight")]
    Spurious {
        /// Head named.
        head: u32,
    },
    /// Data read back is not what was written.
    #[error("wrong data at byte {offset_bytes}: found {found:#018x}, wanted {wanted:#018x}")]
    Verify {
        /// Byte offset on the disk.
        offset_bytes: u64,
        /// Word found.
        found: u64,
        /// Word wanted.
        wanted: u64,
    },
    /// The ring has no room for another chain.
    #[error("the vring is full")]
    Full,
}

impl Error {
    /// Maps an error of the system; a time-out of the socket becomes [`Error::TimedOut`].
    pub(crate) fn io(doing: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { doing, source }
    }
}
