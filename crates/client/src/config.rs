//! The device's configuration space as a driver reads it (virtio 1.3 §5.2.4).

use cleave_blk::spec::SECTOR_BYTES;

use crate::message::u32_at;

/// The daemon's configuration of its disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Size in sectors.
    pub capacity_sectors: u64,
    /// Longest segment, if SIZE_MAX is offered.
    pub size_max: u32,
    /// Most data segments in a request.
    pub seg_max: u32,
    /// Logical block size in bytes.
    pub blk_size: u32,
    /// log2 of logical blocks per physical block.
    pub physical_block_exp: u8,
    /// First aligned logical block.
    pub alignment_offset: u8,
    /// Optimal minimum transfer, in logical blocks.
    pub min_io_size: u16,
    /// Optimal maximum transfer, in logical blocks.
    pub opt_io_size: u32,
    /// One if the write-back cache is on.
    pub writeback: u8,
    /// Vrings offered.
    pub num_queues: u16,
    /// Longest discard, in sectors.
    pub max_discard_sectors: u32,
    /// Most segments in a discard.
    pub max_discard_seg: u32,
    /// Optimal alignment of a discard, in sectors.
    pub discard_sector_alignment: u32,
    /// Longest write-zeroes, in sectors.
    pub max_write_zeroes_sectors: u32,
    /// Most segments in a write-zeroes.
    pub max_write_zeroes_seg: u32,
    /// One if write-zeroes may deallocate.
    pub write_zeroes_may_unmap: u8,
}

impl DeviceConfig {
    /// Bytes up to the write-zeroes fields, which all current daemons return.
    pub const BYTES: u32 = 60;
    /// Offset of the cache mode, which a driver may write.
    pub const WRITEBACK_OFFSET: u32 = 32;

    /// Parses the space; missing bytes read as zero.
    pub fn parse(bytes: &[u8]) -> DeviceConfig {
        let u32_of = |at| u32_at(bytes, at).unwrap_or_default();
        let u8_of = |at: usize| bytes.get(at).copied().unwrap_or_default();
        let u16_of = |at| u16::from_le_bytes([u8_of(at), u8_of(at + 1)]);
        DeviceConfig {
            capacity_sectors: u64::from(u32_of(0)) | u64::from(u32_of(4)) << 32,
            size_max: u32_of(8),
            seg_max: u32_of(12),
            blk_size: u32_of(20),
            physical_block_exp: u8_of(24),
            alignment_offset: u8_of(25),
            min_io_size: u16_of(26),
            opt_io_size: u32_of(28),
            writeback: u8_of(32),
            num_queues: u16_of(34),
            max_discard_sectors: u32_of(36),
            max_discard_seg: u32_of(40),
            discard_sector_alignment: u32_of(44),
            max_write_zeroes_sectors: u32_of(48),
            max_write_zeroes_seg: u32_of(52),
            write_zeroes_may_unmap: u8_of(56),
        }
    }

    /// Returns the size of the disk in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_sectors * SECTOR_BYTES
    }
}
