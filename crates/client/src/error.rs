//! Errors of the client.

use std::io;
use std::time::Duration;

/// Why an exchange with the daemon failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("{doing}: {source}")]
    Io {
        /// The attempted operation.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The daemon closed the connection.
    #[error("the daemon closed the connection")]
    Closed,
    /// No reply in time.
    #[error("no answer to {what} within {after:?}")]
    TimedOut {
        /// The expected reply.
        what: &'static str,
        /// Time limit.
        after: Duration,
    },
    /// The daemon rejected the message.
    #[error("message {request} was refused with {code}")]
    Refused {
        /// Message type.
        request: u32,
        /// The code in the reply.
        code: u64,
    },
    /// A reply that the specification does not permit.
    #[error("the daemon broke the protocol: {0}")]
    Protocol(String),
    /// The simulated guest has no such memory, or none left.
    #[error("guest memory: {0}")]
    Memory(String),
    /// A request completed with a status other than OK.
    #[error("request type {kind} at sector {sector} ended with status {status}")]
    Status {
        /// Type of the request.
        kind: u32,
        /// First sector.
        sector: u64,
        /// Status byte.
        status: u8,
    },
    /// The used length differs from the specification's.
    #[error("request type {kind} at sector {sector} reported {found} bytes used, not {wanted}")]
    UsedLength {
        /// Type of the request.
        kind: u32,
        /// First sector.
        sector: u64,
        /// Reported length.
        found: u32,
        /// Expected length.
        wanted: u32,
    },
    /// The used ring names a chain that is not in flight.
    #[error("chain {head} was completed without being in flight")]
    Spurious {
        /// The reported head.
        head: u32,
    },
    /// A read returned other data than was written.
    #[error("wrong data at byte {offset_bytes}: found {found:#018x}, wanted {wanted:#018x}")]
    Verify {
        /// Byte offset on the disk.
        offset_bytes: u64,
        /// The word that was read.
        found: u64,
        /// Expected word.
        wanted: u64,
    },
    /// The ring has no room for another chain.
    #[error("the vring is full")]
    Full,
}

impl Error {
    /// Maps a system error; a socket time-out becomes [`Error::TimedOut`].
    pub(crate) fn io(doing: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { doing, source }
    }
}
