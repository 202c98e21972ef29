//! The bytes of replies as frames: arithmetic without a socket, so that a test can cut them at each byte. It runs for each
//! request, so it is inlined into the engine.

use crate::wire::{self, chunk};

/// Bytes of the longest head of a frame, as far as they are read at once.
pub const HEAD_MAX: usize = 32;
/// Longest content of an error's chunk: numbers, and a message.
const ERROR_MAX: u32 = 14 + wire::TEXT_MAX as u32;

/// The content of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameContent {
    /// A simple reply: 0, or the server's error. The data of a read follows a success.
    Simple {
        /// The server's number of it.
        error: u32,
    },
    /// The end of a structured reply.
    End,
    /// Data at this offset of the disk follows.
    Data {
        /// Bytes from the beginning of the export.
        offset: u64,
        /// Bytes that follow.
        len: u32,
    },
    /// Zeroes at this offset of the disk.
    Hole {
        /// Bytes from the beginning of the export.
        offset: u64,
        /// Bytes of zeroes.
        len: u32,
    },
    /// An error.
    Error {
        /// The server's number of it.
        error: u32,
        /// Bytes that follow and say more.
        skip: u32,
    },
}

/// The head of a reply, or of one chunk of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// The request that it answers.
    pub cookie: u64,
    /// The last of its reply.
    pub is_last: bool,
    /// What the frame says.
    pub content: FrameContent,
    /// Bytes of the head.
    pub head_bytes: usize,
}

/// A breach of the protocol by the server, in words for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Breach(pub &'static str);

#[inline]
fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[inline]
fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[inline]
fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Reads the frame at the beginning of `bytes`. `None`: more bytes are needed.
#[inline]
pub fn parse(bytes: &[u8]) -> Result<Option<Frame>, Breach> {
    match u32_at(bytes, 0) {
        None => Ok(None),
        Some(wire::SIMPLE_REPLY) => Ok(simple(bytes)),
        Some(wire::STRUCTURED_REPLY) => structured(bytes),
        Some(_) => Err(Breach("a reply has another magic")),
    }
}

#[inline]
fn simple(bytes: &[u8]) -> Option<Frame> {
    Some(Frame {
        content: FrameContent::Simple {
            error: u32_at(bytes, 4)?,
        },
        cookie: u64_at(bytes, 8)?,
        is_last: true,
        head_bytes: 16,
    })
}

#[inline]
fn structured(bytes: &[u8]) -> Result<Option<Frame>, Breach> {
    let head = || {
        let flags = u16_at(bytes, 4)?;
        let kind = u16_at(bytes, 6)?;
        Some((flags, kind, u64_at(bytes, 8)?, u32_at(bytes, 16)?))
    };
    let Some((flags, kind, cookie, len)) = head() else {
        return Ok(None);
    };
    let is_last = flags & chunk::DONE != 0;
    let content = match kind {
        chunk::NONE if len == 0 && is_last => Some((FrameContent::End, 20)),
        chunk::DATA if len > 8 => data(bytes, len),
        chunk::HOLE if len == 12 => hole(bytes),
        _ if kind & chunk::ERROR != 0 && (6..=ERROR_MAX).contains(&len) => error(bytes, len)?,
        _ => {
            return Err(Breach(
                "a chunk of a reply has an impossible type or length",
            ));
        }
    };
    Ok(content.map(|(content, head_bytes)| Frame {
        cookie,
        is_last,
        content,
        head_bytes,
    }))
}

#[inline]
fn data(bytes: &[u8], len: u32) -> Option<(FrameContent, usize)> {
    let offset = u64_at(bytes, 20)?;
    let len = len.checked_sub(8)?;
    Some((FrameContent::Data { offset, len }, 28))
}

fn hole(bytes: &[u8]) -> Option<(FrameContent, usize)> {
    let (offset, len) = (u64_at(bytes, 20)?, u32_at(bytes, 28)?);
    Some((FrameContent::Hole { offset, len }, 32))
}

fn error(bytes: &[u8], len: u32) -> Result<Option<(FrameContent, usize)>, Breach> {
    let (Some(error), Some(text)) = (u32_at(bytes, 20), u16_at(bytes, 24)) else {
        return Ok(None);
    };
    if u32::from(text) > len - 6 {
        return Err(Breach("an error's message is longer than its chunk"));
    }
    if error == 0 {
        return Err(Breach("an error is none"));
    }
    Ok(Some((
        FrameContent::Error {
            error,
            skip: len - 6,
        },
        26,
    )))
}

/// The errno of a server's error: NBD has numbers of its own, which are those of Linux. Numbers that it does not define, and
/// those that speak of the server's own state, are I/O errors, so that `--on-error` can have the request repeated.
pub fn errno(error: u32) -> i32 {
    match i32::try_from(error) {
        Ok(errno @ (libc::EINVAL | libc::ENOSPC | libc::EOPNOTSUPP | libc::ESHUTDOWN)) => errno,
        Ok(libc::EPERM) => libc::EROFS,
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chunk(flags: u16, kind: u16, content: &[u8]) -> Vec<u8> {
        let mut bytes = wire::STRUCTURED_REPLY.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(0x0102_0304_0506_0708_u64.to_be_bytes());
        bytes.extend((content.len() as u32).to_be_bytes());
        bytes.extend(content);
        bytes
    }

    #[test]
    fn frames_are_read_whole_or_not_at_all() {
        let offset = 4096_u64.to_be_bytes();
        let with = |more: &[u8]| [&offset, more].concat();
        let simple = b"\x67\x44\x66\x98\0\0\0\x05\x01\x02\x03\x04\x05\x06\x07\x08".to_vec();
        let rows = [
            (simple, FrameContent::Simple { error: 5 }, 16, true),
            (chunk(1, 0, b""), FrameContent::End, 20, true),
            (
                chunk(0, 1, &with(b"abc")),
                FrameContent::Data {
                    offset: 4096,
                    len: 3,
                },
                28,
                false,
            ),
            (
                chunk(1, 2, &with(&[0, 0, 2, 0])),
                FrameContent::Hole {
                    offset: 4096,
                    len: 512,
                },
                32,
                true,
            ),
            (
                chunk(1, 0x8001, b"\0\0\0\x1c\0\x04full"),
                FrameContent::Error { error: 28, skip: 4 },
                26,
                true,
            ),
            // A type of errors that is not known, with an offset behind the message.
            (
                chunk(0, 0xfff0, b"\0\0\0\x05\0\0\0\0\0\0\0\0\0\0"),
                FrameContent::Error { error: 5, skip: 8 },
                26,
                false,
            ),
        ];
        for (bytes, content, head_bytes, is_last) in rows {
            let frame = Frame {
                cookie: 0x0102_0304_0506_0708,
                is_last,
                content,
                head_bytes,
            };
            for length in 0..bytes.len() {
                let wanted = (length >= head_bytes).then_some(frame);
                assert_eq!(parse(&bytes[..length]), Ok(wanted), "{length}");
            }
            assert!(head_bytes <= HEAD_MAX);
        }
    }

    #[test]
    fn what_no_server_may_send_is_a_breach() {
        for bytes in [
            b"\0\0\0\0".to_vec(),
            wire::REQUEST.to_be_bytes().to_vec(),
            chunk(0, 0, b""),
            chunk(1, 0, b"x"),
            chunk(1, 1, &[0; 8]),
            chunk(1, 1, b""),
            chunk(1, 2, &[0; 11]),
            chunk(1, 2, &[0; 13]),
            chunk(1, 3, &[0; 12]),
            chunk(1, 5, b""),
            chunk(1, 0x8001, &[0; 5]),
            chunk(1, 0x8001, b"\0\0\0\x05\0\x05full"),
            chunk(1, 0x8001, b"\0\0\0\0\0\0"),
            chunk(1, 0x8001, &[1; 8192]),
        ] {
            assert!(parse(&bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn errors_are_those_that_a_policy_knows() {
        assert_eq!(errno(28), libc::ENOSPC);
        assert_eq!(errno(1), libc::EROFS);
        assert_eq!(errno(12), libc::EIO);
        assert_eq!([0, 77, u32::MAX].map(errno), [libc::EIO; 3]);
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_strange(bytes in proptest::collection::vec(any::<u8>(), 0..64), magic in 0..3) {
            let mut bytes = bytes;
            let magics = [0, wire::SIMPLE_REPLY, wire::STRUCTURED_REPLY];
            bytes.splice(0..0, magics[magic as usize].to_be_bytes());
            if let Ok(Some(frame)) = parse(&bytes) {
                prop_assert!(frame.head_bytes <= bytes.len());
            }
        }
    }
}
