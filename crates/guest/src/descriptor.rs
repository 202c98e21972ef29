//! A copy of one descriptor (virtio 1.3 §2.7.5).

use cleave_blk::Segment;

/// Another descriptor follows.
pub(crate) const NEXT: u16 = 1;
/// Device-writable, else device-readable.
pub(crate) const WRITE: u16 = 2;
/// The descriptor refers to a table of descriptors.
pub(crate) const INDIRECT: u16 = 4;

/// Bytes of a descriptor.
pub(crate) const DESCRIPTOR_BYTES: u64 = 16;

/// A copy of one descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DescriptorCopy {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl DescriptorCopy {
    /// Decodes two little-endian words: the address; then length, flags and next.
    #[inline]
    pub(crate) fn from_words(addr: u64, rest: u64) -> DescriptorCopy {
        DescriptorCopy {
            addr,
            len: rest as u32,
            flags: (rest >> 32) as u16,
            next: (rest >> 48) as u16,
        }
    }

    /// Returns the guest memory that it describes.
    pub(crate) fn segment(self) -> Segment {
        Segment {
            addr: self.addr,
            len: self.len,
        }
    }
}
