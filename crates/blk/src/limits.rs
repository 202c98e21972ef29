//! What a store can do.

/// What an opened disk can do, probed once when it is opened. All sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Usable size; a multiple of `block_bytes`.
    pub capacity_bytes: u64,
    /// Logical block told to the guest (`blk_size`); a power of two ≥ 512.
    pub block_bytes: u32,
    /// Physical block told to the guest through the topology; ≥ `block_bytes`.
    pub physical_block_bytes: u32,
    /// Best transfer size, 0 where unknown.
    pub optimal_io_bytes: u32,
    /// Offsets and lengths that the store takes as they are (1 for buffered files and RAM). What a
    /// guest sends below this is read-modify-write. A power of two.
    pub offset_align_bytes: u32,
    /// Addresses of memory that the store takes as they are; else the engine bounces. A power of two.
    pub memory_align_bytes: u32,
    /// No write of any kind reaches the store.
    pub read_only: bool,
    /// The store can give space back, and the operator lets it.
    pub discard: bool,
    /// Parts of a discard below this the store refuses, whatever it takes of reads and writes: they stay as they
    /// are. A power of two.
    pub discard_align_bytes: u32,
    /// Best size and alignment of a discard (≥ 512).
    pub discard_granularity_bytes: u32,
    /// It says that it spins. So do many virtual disks and loop devices that do not.
    pub rotational: bool,
}
