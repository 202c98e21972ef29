//! The state of a device that moves to another host with its guest. The guest's memory and its vrings move with the VMM. What is left
//! is what the guest's driver has set on the device, and by which the next daemon knows that its disk can take this one's place.

use std::fmt;

/// The state as bytes: magic, version of this layout, face, size, block size, flags and a sum, little-endian. Later versions of Cleave
/// read it too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PortableState {
    /// Version of the device that the guest sees.
    pub(crate) face: u32,
    pub(crate) capacity_bytes: u64,
    pub(crate) block_bytes: u32,
    pub(crate) read_only: bool,
    /// The cache mode, which a driver may have changed.
    pub(crate) writeback: bool,
}

const MAGIC: [u8; 8] = *b"CLEAVEDV";
const VERSION: u32 = 1;
const READ_ONLY: u32 = 1 << 0;
const WRITEBACK: u32 = 1 << 1;
/// Bytes before the sum.
const BODY_BYTES: usize = 32;

/// Why a state cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// The bytes are not a whole state.
    Damaged(&'static str),
    /// The disk that the guest comes from differs from this one in a property: there, and here.
    Different(&'static str, String, String),
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unfit::Damaged(what) => write!(f, "the state of the guest's device {what}"),
            Unfit::Different(property, there, here) => write!(
                f,
                "the guest comes from a disk with {property} {there}, and this one has {here}: serve the same disk with the same \
                 options"
            ),
        }
    }
}

impl PortableState {
    /// Its length.
    pub(crate) const BYTES: usize = BODY_BYTES + 8;

    /// Returns the state as bytes.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        let flags = flag(self.read_only, READ_ONLY) | flag(self.writeback, WRITEBACK);
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.face.to_le_bytes());
        bytes.extend(self.capacity_bytes.to_le_bytes());
        bytes.extend(self.block_bytes.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(sum(&bytes).to_le_bytes());
        bytes
    }

    /// Parses a state. The version is checked before the length, because a later one may be longer.
    pub(crate) fn parse(bytes: &[u8]) -> Result<PortableState, Unfit> {
        const CUT: Unfit = Unfit::Damaged("is cut off");
        let mut fields = Fields(bytes);
        if fields.take().ok_or(CUT)? != MAGIC {
            return Err(Unfit::Damaged("is not one of Cleave"));
        }
        if fields.u32().ok_or(CUT)? != VERSION {
            return Err(Unfit::Damaged(
                "was written by another version of Cleave, which this one does not understand",
            ));
        }
        let state = fields.body().ok_or(CUT)?;
        let is_whole = fields.u64() == bytes.get(..BODY_BYTES).map(sum) && fields.0.is_empty();
        match is_whole {
            true => Ok(state),
            false => Err(Unfit::Damaged("is damaged")),
        }
    }

    /// Refuses a state whose guest could not go on with the disk `here`. The cache mode does not belong to the disk.
    pub(crate) fn fits(self, here: PortableState) -> Result<(), Unfit> {
        let access = |read_only| if read_only { "read-only" } else { "read-write" };
        let properties = [
            (
                "the face",
                format!("v{}", self.face),
                format!("v{}", here.face),
            ),
            (
                "the block size",
                self.block_bytes.to_string(),
                here.block_bytes.to_string(),
            ),
            (
                "the access",
                access(self.read_only).to_owned(),
                access(here.read_only).to_owned(),
            ),
            (
                "the size",
                self.capacity_bytes.to_string(),
                here.capacity_bytes.to_string(),
            ),
        ];
        let mut properties = properties.into_iter();
        match properties.find(|(_, there, here)| there != here) {
            Some((property, there, here)) => Err(Unfit::Different(property, there, here)),
            None => Ok(()),
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

    fn body(&mut self) -> Option<PortableState> {
        let (face, capacity_bytes, block_bytes) = (self.u32()?, self.u64()?, self.u32()?);
        let flags = self.u32()?;
        Some(PortableState {
            face,
            capacity_bytes,
            block_bytes,
            read_only: flags & READ_ONLY != 0,
            writeback: flags & WRITEBACK != 0,
        })
    }
}

/// Computes FNV-1a of 64 bits. No two texts that differ in one byte have the same.
fn sum(bytes: &[u8]) -> u64 {
    const PRIME: u64 = 0x0100_0000_01b3;
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(PRIME)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATE: PortableState = PortableState {
        face: 1,
        capacity_bytes: 0x0102_0304_0506_0800,
        block_bytes: 512,
        read_only: false,
        writeback: true,
    };

    /// Written by a daemon, and read by another that may be years younger.
    #[test]
    fn the_layout_is_fixed() {
        let bytes = STATE.to_bytes();
        assert_eq!(bytes.len(), PortableState::BYTES);
        let body =
            b"CLEAVEDV\x01\0\0\0\x01\0\0\0\0\x08\x06\x05\x04\x03\x02\x01\0\x02\0\0\x02\0\0\0";
        assert_eq!(bytes[..BODY_BYTES], body[..]);
        assert_eq!(sum(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(sum(b"a"), 0xaf63_dc4c_8601_ec8c);
    }

    #[test]
    fn every_state_is_read_as_it_was_written() {
        for (read_only, writeback) in [(false, false), (false, true), (true, false), (true, true)] {
            let state = PortableState {
                read_only,
                writeback,
                ..STATE
            };
            assert_eq!(PortableState::parse(&state.to_bytes()), Ok(state));
        }
    }

    #[test]
    fn no_part_of_a_state_is_taken_for_one() {
        let mut bytes = STATE.to_bytes();
        for len in 0..bytes.len() {
            assert!(PortableState::parse(&bytes[..len]).is_err(), "{len}");
        }
        bytes.push(0);
        assert!(PortableState::parse(&bytes).is_err());
    }

    #[test]
    fn no_changed_byte_is_overlooked() {
        let bytes = STATE.to_bytes();
        for at in 0..bytes.len() {
            for change in 1..=u8::MAX {
                let mut changed = bytes.clone();
                changed[at] ^= change;
                assert!(PortableState::parse(&changed).is_err(), "{at} {change:#x}");
            }
        }
    }

    #[test]
    fn only_an_equal_disk_takes_a_guest() {
        let other = [
            PortableState { face: 2, ..STATE },
            PortableState {
                capacity_bytes: STATE.capacity_bytes + 512,
                ..STATE
            },
            PortableState {
                block_bytes: 4096,
                ..STATE
            },
            PortableState {
                read_only: true,
                ..STATE
            },
        ];
        for here in other {
            let why = STATE.fits(here).unwrap_err().to_string();
            assert!(why.contains("serve the same disk"), "{why}");
        }
        let why = STATE.fits(other[2]).unwrap_err().to_string();
        assert!(
            why.contains("with the block size 512, and this one has 4096"),
            "{why}"
        );
        let write_through = PortableState {
            writeback: false,
            ..STATE
        };
        assert_eq!(STATE.fits(write_through), Ok(()), "a guest brings its mode");
    }
}
