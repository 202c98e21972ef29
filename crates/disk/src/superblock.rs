//! The superblock at the end of each leg of a stripe. It prevents legs that do not belong together, or are in
//! the wrong order, from being served as one disk.
//!
//! A superblock is the last whole 4 KiB of its leg (4 KiB from the end of a leg of 10 000 bytes: bytes 4096
//! to 8191). Little-endian; the rest is zero:
//!
//! | offset | bytes | value |
//! |----|-------|------|
//! | 0  | 8  | `CLVSTRIP` |
//! | 8  | 4  | version, 1 |
//! | 12 | 16 | set, drawn at random when the stripe was created |
//! | 28 | 4  | index of this leg, from 0 |
//! | 32 | 4  | number of legs |
//! | 36 | 4  | bytes of a chunk |
//! | 40 | 8  | bytes of data on each leg, from its beginning |
//! | 48 | 8  | bytes of this leg when the stripe was created |
//! | 56 | 4  | CRC-32C (Castagnoli) of the 56 bytes before |

use std::io;

use cleave_blk::Stripe;

use crate::Backing;

/// Bytes of a superblock.
pub(crate) const SUPERBLOCK_BYTES: u64 = 4096;
const MAGIC: &[u8; 8] = b"CLVSTRIP";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 60;

/// One leg's superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Superblock {
    /// Identifies the set: equal on all its legs, and on no other leg.
    pub(crate) set: [u8; 16],
    /// Index of this leg.
    pub(crate) leg: u32,
    /// The layout: number of legs and chunk.
    pub(crate) stripe: Stripe,
    /// Bytes of data on each leg.
    pub(crate) data_bytes: u64,
    /// Bytes of this leg when the stripe was created.
    pub(crate) leg_bytes: u64,
}

/// Result of reading the place of a superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SuperblockState {
    /// No superblock.
    Nothing,
    /// A whole superblock.
    Whole(Superblock),
    /// The beginning of a superblock with wrong contents.
    Damaged,
    /// The superblock of a later version.
    Version(u32),
}

/// Returns the offset of the superblock of a leg of this size; `None`: too small for a superblock and data.
pub(crate) fn offset(leg_bytes: u64) -> Option<u64> {
    let blocks = leg_bytes / SUPERBLOCK_BYTES;
    (blocks >= 2).then(|| (blocks - 1) * SUPERBLOCK_BYTES)
}

/// Bytes that are read to see a superblock again, and their alignment: no store needs a larger one.
const WINDOW_BYTES: usize = 64 << 10;

/// Returns the size of a leg, and what is in the place of its superblock.
pub(crate) fn read(leg: &Backing) -> io::Result<(u64, SuperblockState)> {
    let size_bytes = leg.size_bytes()?.unwrap_or(0);
    let Some(place) = offset(size_bytes) else {
        return Ok((size_bytes, SuperblockState::Nothing));
    };
    let mut block = [0; SUPERBLOCK_BYTES as usize];
    leg.read_exact_at(&mut block, place)?;
    Ok((size_bytes, Superblock::parse(&block)))
}

/// Reads what is in the place of a superblock of a leg that was probed, and so may have O_DIRECT set.
pub(crate) fn read_again(leg: &Backing, place: u64) -> io::Result<SuperblockState> {
    let mut buffer = vec![0; 2 * WINDOW_BYTES];
    let start = buffer.as_ptr().align_offset(WINDOW_BYTES);
    let window = buffer.get_mut(start..start.saturating_add(WINDOW_BYTES));
    let within = place % WINDOW_BYTES as u64;
    let read = leg.read_at(window.unwrap_or_default(), place - within)?;
    let block = read.get(within as usize..);
    match block.filter(|block| block.len() >= HEAD_BYTES) {
        Some(block) => Ok(Superblock::parse(block)),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

impl Superblock {
    /// Returns the bytes on the leg.
    pub(crate) fn to_bytes(self) -> [u8; SUPERBLOCK_BYTES as usize] {
        let mut head = Vec::with_capacity(HEAD_BYTES);
        head.extend(MAGIC);
        head.extend(VERSION.to_le_bytes());
        head.extend(self.set);
        head.extend(self.leg.to_le_bytes());
        head.extend(u32::from(self.stripe.legs()).to_le_bytes());
        head.extend(self.stripe.chunk_bytes().to_le_bytes());
        head.extend(self.data_bytes.to_le_bytes());
        head.extend(self.leg_bytes.to_le_bytes());
        head.extend(crc32c(&head).to_le_bytes());
        let mut block = [0; SUPERBLOCK_BYTES as usize];
        for (to, from) in block.iter_mut().zip(head) {
            *to = from;
        }
        block
    }

    /// Parses a superblock. The version is checked before the checksum, because a later version may compute
    /// it over other bytes.
    pub(crate) fn parse(block: &[u8]) -> SuperblockState {
        let mut fields = Fields(block);
        if fields.take() != Some(*MAGIC) {
            return SuperblockState::Nothing;
        }
        match fields.u32() {
            Some(VERSION) => {}
            Some(version) => return SuperblockState::Version(version),
            None => return SuperblockState::Damaged,
        }
        match fields.body(block) {
            Some(superblock) => SuperblockState::Whole(superblock),
            None => SuperblockState::Damaged,
        }
    }
}

/// The fields that have not been read yet.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// Reads everything after the version. `None`: it is not valid.
    fn body(mut self, block: &[u8]) -> Option<Superblock> {
        let set = self.take()?;
        let leg = self.u32()?;
        let legs = u16::try_from(self.u32()?).ok()?;
        let chunk_bytes = self.u32()?;
        let data_bytes = self.u64()?;
        let leg_bytes = self.u64()?;
        let sum = self.u32()?;
        let stripe = Stripe::new(legs, chunk_bytes)?;
        let is_sound = sum == crc32c(block.get(..HEAD_BYTES - 4)?)
            && leg < u32::from(legs)
            && data_bytes > 0
            && data_bytes.is_multiple_of(u64::from(chunk_bytes))
            && data_bytes <= offset(leg_bytes)?;
        is_sound.then_some(Superblock {
            set,
            leg,
            stripe,
            data_bytes,
            leg_bytes,
        })
    }
}

/// Computes CRC-32C, reflected polynomial 0x82F63B78, by a table of one byte.
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = table();
    !bytes.iter().fold(!0, |crc, byte| {
        // The index is masked to the table's length.
        (crc >> 8) ^ TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize]
    })
}

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock() -> Superblock {
        Superblock {
            set: *b"0123456789abcdef",
            leg: 2,
            stripe: Stripe::new(3, 64 << 10).unwrap(),
            data_bytes: 5 << 16,
            leg_bytes: 6 << 16,
        }
    }

    /// The check value of the CRC catalogue, and one of RFC 3720 B.4.
    #[test]
    fn the_sum_is_crc32c() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn a_superblock_reads_back_and_has_the_documented_layout() {
        let bytes = superblock().to_bytes();
        assert_eq!(
            Superblock::parse(&bytes),
            SuperblockState::Whole(superblock())
        );
        assert_eq!(&bytes[..12], b"CLVSTRIP\x01\0\0\0");
        assert_eq!(&bytes[12..28], b"0123456789abcdef");
        assert_eq!(
            (bytes[28], bytes[32], bytes[38], bytes[42], bytes[50]),
            (2, 3, 1, 5, 6)
        );
        assert!(bytes[60..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn any_changed_bit_is_detected() {
        let whole = superblock().to_bytes();
        for bit in 0..HEAD_BYTES * 8 {
            let mut bytes = whole;
            bytes[bit / 8] ^= 1 << (bit % 8);
            let found = Superblock::parse(&bytes);
            match bit / 8 {
                0..8 => assert_eq!(found, SuperblockState::Nothing, "{bit}"),
                8..12 => assert!(
                    matches!(found, SuperblockState::Version(v) if v != 1),
                    "{bit}"
                ),
                _ => assert_eq!(found, SuperblockState::Damaged, "{bit}"),
            }
        }
        for len in 0..HEAD_BYTES {
            assert!(
                !matches!(Superblock::parse(&whole[..len]), SuperblockState::Whole(_)),
                "{len}"
            );
        }
        assert_eq!(Superblock::parse(&[0; 4096]), SuperblockState::Nothing);
    }

    /// Impossible values with a valid checksum, from an attacker or a faulty program.
    #[test]
    fn impossible_values_are_damage() {
        let wrong = [
            Superblock {
                leg: 3,
                ..superblock()
            },
            Superblock {
                data_bytes: 0,
                ..superblock()
            },
            Superblock {
                data_bytes: 6 << 16,
                ..superblock()
            },
            Superblock {
                data_bytes: 4096,
                ..superblock()
            },
            Superblock {
                leg_bytes: 0,
                ..superblock()
            },
        ];
        for superblock in wrong {
            assert_eq!(
                Superblock::parse(&superblock.to_bytes()),
                SuperblockState::Damaged,
                "{superblock:?}"
            );
        }
    }

    #[test]
    fn a_superblock_is_the_last_whole_block() {
        for (leg_bytes, at) in [
            (0, None),
            (4096, None),
            (8191, None),
            (8192, Some(4096)),
            (10_000, Some(4096)),
            (1 << 20, Some((1 << 20) - 4096)),
        ] {
            assert_eq!(offset(leg_bytes), at, "{leg_bytes}");
        }
    }
}
