//! Messages in their format on the socket (vhost-user "Message format").

use vhost::vhost_user::message::{FrontendReq, MAX_MSG_SIZE};

use crate::MessageRefusal;
use crate::foreign::Foreign;

/// Size of request, flags and size: three 32-bit numbers in the byte order of the host.
pub(crate) const HEADER_BYTES: usize = 12;
/// Maximum payload: the limit of the `vhost` crate, and more than any served message needs (32 regions of 32
/// bytes, or a configuration space).
pub(crate) const PAYLOAD_BYTES_MAX: usize = MAX_MSG_SIZE;
/// Maximum number of descriptors per message: a table of 32 regions is the largest that the crates below
/// support. The specification asks for 8.
pub(crate) const FDS_MAX: usize = 32;

const FLAG_VERSION: u32 = 0x3;
const VERSION: u32 = 0x1;
const FLAG_REPLY: u32 = 0x4;
const FLAG_NEED_REPLY: u32 = 0x8;

/// A valid header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// The request. Not an enum: the specification grows, and an unknown number is refused, not misread.
    pub(crate) request: u32,
    /// The frontend wants an acknowledgement (REPLY_ACK).
    pub(crate) need_reply: bool,
    /// Number of bytes that follow.
    pub(crate) payload_bytes: usize,
}

impl Header {
    /// Parses a header, or returns what is wrong with it.
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header, MessageRefusal> {
        let (request, flags, size) = (word(bytes, 0), word(bytes, 4), word(bytes, 8));
        if flags & FLAG_VERSION != VERSION {
            return Err(MessageRefusal::connection(format!(
                "message {request} has version {}, not 1",
                flags & FLAG_VERSION
            )));
        }
        if flags & !(FLAG_VERSION | FLAG_NEED_REPLY) != 0 {
            return Err(MessageRefusal::connection(format!(
                "message {request} has flags {flags:#x}, which are not valid in a request"
            )));
        }
        let payload_bytes = usize::try_from(size).unwrap_or(usize::MAX);
        if payload_bytes > PAYLOAD_BYTES_MAX {
            return Err(MessageRefusal::connection(format!(
                "message {request} announces {size} bytes, more than {PAYLOAD_BYTES_MAX}"
            )));
        }
        Ok(Header {
            request,
            need_reply: flags & FLAG_NEED_REPLY != 0,
            payload_bytes,
        })
    }

    /// Returns the header as bytes.
    pub(crate) fn bytes(&self) -> [u8; HEADER_BYTES] {
        let need_reply = if self.need_reply { FLAG_NEED_REPLY } else { 0 };
        let size = u32::try_from(self.payload_bytes).unwrap_or(u32::MAX);
        header_bytes(self.request, VERSION | need_reply, size)
    }
}

/// One whole message, with its descriptors.
#[derive(Debug)]
pub(crate) struct Message {
    /// Its header.
    pub(crate) header: Header,
    /// `header.payload_bytes` bytes.
    pub(crate) payload: Vec<u8>,
    /// Descriptors attached to any byte of it, in order; closed on exec.
    pub(crate) fds: Foreign,
}

impl Message {
    /// Returns the request, if its number is known.
    pub(crate) fn request(&self) -> Option<FrontendReq> {
        FrontendReq::try_from(self.header.request).ok()
    }

    /// Returns the payload as one 64-bit number, if it has that length.
    pub(crate) fn number(&self) -> Result<u64, MessageRefusal> {
        <[u8; 8]>::try_from(self.payload.as_slice())
            .map(u64::from_ne_bytes)
            .map_err(|_| self.malformed())
    }

    /// Returns the refusal of a payload whose length does not fit its request.
    pub(crate) fn malformed(&self) -> MessageRefusal {
        MessageRefusal::connection(format!(
            "message {} has a payload of {} bytes",
            self.name(),
            self.payload.len()
        ))
    }

    /// Returns the request's name for messages to an operator.
    pub(crate) fn name(&self) -> String {
        match self.request() {
            Some(request) => format!("{request:?}"),
            None => self.header.request.to_string(),
        }
    }

    /// Returns the descriptor of a message that must have exactly one.
    pub(crate) fn only_fd(&mut self) -> Result<Foreign, MessageRefusal> {
        match self.fds.len() {
            1 => Ok(self.fds.take()),
            _ => Err(MessageRefusal::connection(format!(
                "{} takes exactly one descriptor",
                self.name()
            ))),
        }
    }
}

/// Makes a reply to `request` as bytes.
pub(crate) fn reply(request: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let mut bytes = header_bytes(request, VERSION | FLAG_REPLY, size).to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

/// Makes a request of ours on the backend channel, without a payload, which asks for no answer. QEMU reads the configuration on
/// the main socket before it acknowledges, so waiting for an answer on the thread that serves the main socket would be a
/// deadlock.
pub(crate) fn notice(request: u32) -> [u8; HEADER_BYTES] {
    header_bytes(request, VERSION, 0)
}

/// Returns the 16-bit number at `offset`, or 0 if the bytes end before it does.
pub(crate) fn half(bytes: &[u8], offset: usize) -> u16 {
    field::<2>(bytes, offset).map_or(0, u16::from_ne_bytes)
}

/// Returns the 32-bit number at `offset`, or 0 if the bytes end before it does.
pub(crate) fn word(bytes: &[u8], offset: usize) -> u32 {
    field::<4>(bytes, offset).map_or(0, u32::from_ne_bytes)
}

/// Returns the 64-bit number at `offset`, or 0 if the bytes end before it does.
pub(crate) fn long(bytes: &[u8], offset: usize) -> u64 {
    field::<8>(bytes, offset).map_or(0, u64::from_ne_bytes)
}

fn field<const LEN: usize>(bytes: &[u8], offset: usize) -> Option<[u8; LEN]> {
    bytes.get(offset..)?.first_chunk::<LEN>().copied()
}

fn header_bytes(request: u32, flags: u32, size: u32) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    for (place, number) in bytes.chunks_exact_mut(4).zip([request, flags, size]) {
        place.copy_from_slice(&number.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_accepted_or_refused() {
        // (flags, size, taken)
        let rows = [
            (0x1, 0, true),
            (0x9, 8, true),
            (0x1, 4096, true),
            (0x1, 4097, false),
            (0x1, u32::MAX, false),
            (0x0, 0, false),
            (0x2, 0, false),
            (0x3, 0, false),
            (0x5, 0, false),
            (0x11, 0, false),
            (0x8000_0001, 0, false),
        ];
        for (flags, size, taken) in rows {
            let parsed = Header::parse(&header_bytes(24, flags, size));
            assert_eq!(parsed.is_ok(), taken, "flags {flags:#x} size {size}");
        }
    }

    #[test]
    fn a_header_is_written_as_it_was_parsed() {
        for flags in [0x1, 0x9] {
            let bytes = header_bytes(u32::MAX, flags, 77);
            let header = Header::parse(&bytes).unwrap();
            assert_eq!(header.bytes(), bytes);
        }
    }

    #[test]
    fn numbers_beyond_the_payload_are_zero() {
        let bytes = [1, 0, 0, 0, 2, 0, 0, 0, 3];
        assert_eq!(word(&bytes, 4), 2);
        assert_eq!(long(&bytes, 0), 0x2_0000_0001);
        assert_eq!(long(&bytes, 4), 0);
        assert_eq!(word(&bytes, usize::MAX), 0);
    }
}
