//! Numbers of the NBD protocol (NetworkBlockDevice/nbd, `doc/proto.md`). All integers are big-endian.

/// First eight bytes of a server: `NBDMAGIC`.
pub const GREETING: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`: the second eight bytes of a newstyle server, and the first of each option.
pub const OPTION: u64 = 0x4948_4156_454f_5054;
/// First eight bytes of the answer to an option.
pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// First four bytes of a request.
pub const REQUEST: u32 = 0x2560_9513;
/// First four bytes of a simple reply.
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
/// First four bytes of a chunk of a structured reply.
pub const STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// Handshake flags; the client's have the same values.
pub const FIXED_NEWSTYLE: u16 = 1 << 0;
/// Bit of the handshake flags: no 124 zero bytes after EXPORT_NAME.
pub const NO_ZEROES: u16 = 1 << 1;

/// Options.
pub mod option {
    /// Choose the export and begin.
    pub const GO: u32 = 7;
    /// Negotiate structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
}

/// Types of the answers to options.
pub mod answer {
    /// Done.
    pub const ACK: u32 = 1;
    /// A piece of information about the export.
    pub const INFO: u32 = 3;
    /// Bit of every error.
    pub const ERROR: u32 = 1 << 31;
    /// Unknown option.
    pub const UNSUPPORTED: u32 = ERROR + 1;
    /// Forbidden by the server.
    pub const POLICY: u32 = ERROR + 2;
    /// TLS is required.
    pub const TLS_REQUIRED: u32 = ERROR + 5;
    /// No such export.
    pub const UNKNOWN: u32 = ERROR + 6;
    /// The server shuts down.
    pub const SHUTDOWN: u32 = ERROR + 7;
}

/// Pieces of information about an export.
pub mod info {
    /// Size and flags.
    pub const EXPORT: u16 = 0;
    /// Sizes of blocks and of payloads.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Flags of an export.
pub mod export {
    /// The other flags mean something.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Cannot be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Knows FLUSH.
    pub const FLUSH: u16 = 1 << 2;
    /// Knows FUA.
    pub const FUA: u16 = 1 << 3;
    /// Is rotational.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// Knows TRIM.
    pub const TRIM: u16 = 1 << 5;
    /// Knows WRITE_ZEROES.
    pub const WRITE_ZEROES: u16 = 1 << 6;
    /// A flush on one connection covers the writes that were answered on all of them.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Types of requests.
pub mod request {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// Goodbye; it has no reply.
    pub const DISCONNECT: u16 = 2;
    /// Flush.
    pub const FLUSH: u16 = 3;
    /// Discard.
    pub const TRIM: u16 = 4;
    /// Zero a range.
    pub const WRITE_ZEROES: u16 = 6;
    /// Flag: durable when answered.
    pub const FUA: u16 = 1 << 0;
    /// Flag of WRITE_ZEROES: keep the space.
    pub const NO_HOLE: u16 = 1 << 1;
}

/// Types and flags of the chunks of a structured reply.
pub mod chunk {
    /// Flag: the last chunk of the reply.
    pub const DONE: u16 = 1 << 0;
    /// No content.
    pub const NONE: u16 = 0;
    /// Data at an offset.
    pub const DATA: u16 = 1;
    /// Zeroes at an offset.
    pub const HOLE: u16 = 2;
    /// Bit of the types that are errors.
    pub const ERROR: u16 = 1 << 15;
}

/// Error of a request that the server did not do, because it shuts down.
pub const SHUTS_DOWN: u32 = 108;
/// Largest payload of a server that names none.
pub const PAYLOAD_MAX: u32 = 32 << 20;
/// Longest name or message.
pub const TEXT_MAX: usize = 4096;

/// Bytes of a request without its payload.
pub const REQUEST_BYTES: usize = 28;

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WireRequest {
    /// Flags (`request`).
    pub flags: u16,
    /// Type (`request`).
    pub kind: u16,
    /// Named again by the reply.
    pub cookie: u64,
    /// Where it begins.
    pub offset: u64,
    /// How many bytes it is about.
    pub len: u32,
}

impl WireRequest {
    /// The farewell, which has no reply.
    pub const DISCONNECT: WireRequest = WireRequest {
        flags: 0,
        kind: request::DISCONNECT,
        cookie: 0,
        offset: 0,
        len: 0,
    };

    /// The request as it is sent.
    pub fn bytes(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        let mut rest = bytes.as_mut_slice();
        let mut put = |field: &[u8]| {
            if let Some((place, after)) =
                std::mem::take(&mut rest).split_at_mut_checked(field.len())
            {
                place.copy_from_slice(field);
                rest = after;
            }
        };
        put(&REQUEST.to_be_bytes());
        put(&self.flags.to_be_bytes());
        put(&self.kind.to_be_bytes());
        put(&self.cookie.to_be_bytes());
        put(&self.offset.to_be_bytes());
        put(&self.len.to_be_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_28_bytes_in_the_order_of_the_specification() {
        let request = WireRequest {
            flags: 1,
            kind: request::WRITE,
            cookie: 0x1122_3344_5566_7788,
            offset: 4096,
            len: 512,
        };
        let expected = b"\x25\x60\x95\x13\0\x01\0\x01\x11\x22\x33\x44\x55\x66\x77\x88\0\0\0\0\0\0\x10\0\0\0\x02\0";
        assert_eq!(&request.bytes(), expected);
    }
}
