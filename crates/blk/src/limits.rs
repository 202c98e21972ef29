//! The limits of a store.

/// The limits and abilities of an opened disk, probed once when it is opened. All sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Usable size; a multiple of `block_bytes`.
    pub capacity_bytes: u64,
    /// Logical block size for the guest (`blk_size`); a power of two ≥ 512.
    pub block_bytes: u32,
    /// The store's unit of offsets and lengths (1 for buffered files and RAM); a power of two. A smaller
    /// request of the guest becomes a read-modify-write.
    pub offset_align_bytes: u32,
    /// Alignment of memory addresses that the store needs, a power of two. Other memory goes through bounce buffers.
    pub memory_align_bytes: u32,
    /// No write of any kind reaches the store.
    pub read_only: bool,
    /// The store can deallocate space, and the operator allows it. Otherwise a discard succeeds and does nothing.
    pub discard: bool,
    /// Alignment of discards, a power of two. The store leaves the unaligned ends of a discard unchanged,
    /// even if it reads and writes smaller units.
    pub discard_align_bytes: u32,
    /// The device reports that it is rotational, as do many virtual disks and loop devices that are not.
    pub rotational: bool,
}
