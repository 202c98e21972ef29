//! The guest's memory as one immutable snapshot.

use std::fs::File;
use std::io;
use std::sync::Arc;

use cleave_blk::Segment;

/// One region of a memory table, as the frontend describes it.
#[derive(Debug)]
pub struct RegionSpec {
    /// Guest-physical address.
    pub guest_addr: u64,
    /// The frontend's virtual address (vring addresses come in these).
    pub user_addr: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Where the region starts in `file`.
    pub file_offset: u64,
    /// Shared memory.
    pub file: File,
}

/// Why a memory table is refused.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// No bytes, or an end beyond 2^64.
    #[error("region at {guest_addr:#x} has impossible length {len_bytes:#x}")]
    Length {
        /// Guest-physical address.
        guest_addr: u64,
        /// Length asked for.
        len_bytes: u64,
    },
    /// Two regions overlap.
    #[error("region at {guest_addr:#x} overlaps another")]
    Overlap {
        /// Guest-physical address.
        guest_addr: u64,
    },
    /// The file ends before the region does.
    #[error("region at {guest_addr:#x} needs {needed} bytes of a file of {found}")]
    Short {
        /// Guest-physical address.
        guest_addr: u64,
        /// Bytes needed.
        needed: u64,
        /// Bytes there.
        found: u64,
    },
    /// No such region (removal).
    #[error("no region at {guest_addr:#x} of {len_bytes:#x} bytes")]
    Unknown {
        /// Guest-physical address.
        guest_addr: u64,
        /// Length named.
        len_bytes: u64,
    },
    /// More regions than slots.
    #[error("more than {0} regions")]
    TooMany(usize),
    /// The kernel refused.
    #[error("cannot map region at {guest_addr:#x}: {source}")]
    Map {
        /// Guest-physical address.
        guest_addr: u64,
        /// Why.
        source: io::Error,
    },
}

/// A guest range that no region covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("guest memory is not mapped there")]
pub struct Unmapped;

/// The guest's memory: immutable, shared by `Arc`, unmapped when the last holder lets go. A changed
/// table is a new `Memory` that shares the mappings of the regions that stay.
#[derive(Debug)]
pub struct Memory {}

impl Memory {
    /// Most regions of a table (told to the frontend as memory slots).
    pub const REGIONS_MAX: usize = 509;

    /// Maps a whole table (SET_MEM_TABLE), in any order. Zero regions are legal: nothing is mapped.
    pub fn new(regions: Vec<RegionSpec>) -> Result<Arc<Memory>, MapError> {
        let _ = regions;
        todo!()
    }

    /// This table and one more region (ADD_MEM_REG).
    pub fn with(&self, region: RegionSpec) -> Result<Arc<Memory>, MapError> {
        let _ = region;
        todo!()
    }

    /// This table without one region (REM_MEM_REG), matched by guest address, user address and length.
    pub fn without(
        &self,
        guest_addr: u64,
        user_addr: u64,
        len_bytes: u64,
    ) -> Result<Arc<Memory>, MapError> {
        let _ = (guest_addr, user_addr, len_bytes);
        todo!()
    }

    /// Guest-physical address of one of the frontend's virtual addresses.
    pub fn guest_addr(&self, user_addr: u64) -> Option<u64> {
        let _ = user_addr;
        todo!()
    }

    /// Some memory file was cut under us and a page of it was replaced by zeroes: this connection is over.
    pub fn is_lost(&self) -> bool {
        todo!()
    }

    /// Copies the first `out.len()` bytes of the stream `segments`; fewer where the stream is shorter.
    pub fn copy_in(&self, segments: &[Segment], out: &mut [u8]) -> Result<usize, Unmapped> {
        let _ = (segments, out);
        todo!()
    }

    /// Copies `bytes` to the beginning of the stream `segments`; returns how many fitted.
    pub fn copy_out(&self, segments: &[Segment], bytes: &[u8]) -> Result<usize, Unmapped> {
        let _ = (segments, bytes);
        todo!()
    }

    /// Stores one byte (a status), released after all earlier writes.
    pub fn store_byte(&self, addr: u64, byte: u8) -> Result<(), Unmapped> {
        let _ = (addr, byte);
        todo!()
    }

    /// Whether all `len` bytes at `addr` are mapped.
    pub fn covers(&self, segment: Segment) -> bool {
        let _ = segment;
        todo!()
    }

    /// Host ranges of a guest range, in order: one, or several where it crosses regions. For engines
    /// alone: the pointers are valid while this `Memory` lives and race with the guest.
    #[inline]
    pub fn resolve(
        &self,
        segment: Segment,
        mut piece: impl FnMut(*mut u8, usize),
    ) -> Result<(), Unmapped> {
        let _ = (segment, &mut piece);
        todo!()
    }
}
