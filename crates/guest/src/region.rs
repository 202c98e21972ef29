//! One region of a memory table as the frontend describes it, and why a table is refused.

use std::fs::File;
use std::io;

/// One region of a memory table, as the frontend describes it.
#[derive(Debug)]
pub struct RegionSpec {
    /// Guest-physical address.
    pub guest_addr: u64,
    /// The frontend's virtual address, in which it states vring addresses.
    pub user_addr: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Offset of the region in `file`.
    pub file_offset: u64,
    /// Shared memory: a regular file or memfd, open for reading and writing. It is closed once it is mapped.
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
        /// The requested length.
        len_bytes: u64,
    },
    /// Two regions overlap: in guest addresses, or in the frontend's addresses if they map different memory.
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
        /// Bytes present.
        found: u64,
    },
    /// The region to remove does not exist.
    #[error("no region at {guest_addr:#x} of {len_bytes:#x} bytes")]
    Unknown {
        /// Guest-physical address.
        guest_addr: u64,
        /// The requested length.
        len_bytes: u64,
    },
    /// More regions than slots.
    #[error("more than {0} regions")]
    TooMany(usize),
    /// The table would have more than its share of the process's room for mappings.
    #[error(
        "no room for region at {guest_addr:#x} of {len_bytes:#x} bytes: the memory of a frontend may have a sixteenth of the address space \
         and of the mappings that others leave"
    )]
    NoRoom {
        /// Guest-physical address.
        guest_addr: u64,
        /// The requested length.
        len_bytes: u64,
    },
    /// The kernel refused.
    #[error("cannot map region at {guest_addr:#x}: {source}")]
    Map {
        /// Guest-physical address.
        guest_addr: u64,
        /// The kernel's error.
        source: io::Error,
    },
}
