//! The device's configuration space (virtio 1.3 §5.2.4).

use crate::Limits;
use crate::spec::{SECTOR_BYTES, feature};

/// Configuration space of one disk. Its bytes are generated on demand, so they always match these fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Current size.
    pub capacity_bytes: u64,
    /// Most data segments of a request, as stated to the guest.
    pub segments_max: u32,
    /// Most bytes of one data segment, if the guest is given a limit.
    pub segment_bytes_max: Option<u32>,
    /// Number of vrings offered.
    pub vrings: u16,
    /// True if the cache is write-back (the `writeback` field, which a guest may set with CONFIG_WCE).
    pub writeback: bool,
    /// The disk.
    pub limits: Limits,
}

impl Config {
    /// Length of the space.
    pub const BYTES: usize = 96;
    /// Offset of the one byte that a guest may write (`writeback`).
    pub const WRITEBACK_OFFSET: usize = 32;

    /// Most sectors of one discard: 1 GiB. A discard changes only metadata but is not free: punching a hole
    /// into a fragmented file locks its inode while extents are dropped, and stopping a vring waits for it. A
    /// power of two, so that a guest that splits a larger discard splits it at aligned places.
    pub const DISCARD_SECTORS_MAX: u32 = 1 << 21;
    /// Most sectors of one write-zeroes: 128 MiB. If the store can zero a range, this is as cheap as a
    /// discard. Otherwise every byte is written, and this limit keeps that within a fraction of a second,
    /// because a stop must be able to drain.
    pub const ZERO_SECTORS_MAX: u32 = 1 << 18;
    /// Most ranges in one discard or write-zeroes request. Linux sends one unless the limit is higher.
    pub const RANGES_MAX: u32 = 1;

    /// Returns the features of the block device and its vrings. The session adds those of the transport (`VHOST_USER_PROTOCOL`).
    pub fn features(&self) -> u64 {
        // MQ is offered even with one vring: `vrings` is 1 then. CONFIG_WCE requires FLUSH (virtio 1.3 §5.2.5.2).
        let mut bits = feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::TOPOLOGY
            | feature::FLUSH
            | feature::CONFIG_WCE
            | feature::MQ
            | feature::INDIRECT_DESC
            | feature::EVENT_IDX
            | feature::VERSION_1;
        if self.segment_bytes_max.is_some() {
            bits |= feature::SIZE_MAX;
        }
        if self.limits.read_only {
            bits |= feature::RO;
        } else {
            bits |= feature::WRITE_ZEROES;
        }
        if self.offers_discard() {
            bits |= feature::DISCARD;
        }
        bits
    }

    /// Returns the space as bytes, little-endian. Fields of features that are not offered are zero.
    pub fn bytes(&self) -> [u8; Self::BYTES] {
        let mut space = Space([0; Self::BYTES]);
        space.put::<0, 8>((self.capacity_bytes / SECTOR_BYTES).to_le_bytes());
        space.put::<8, 4>(self.segment_bytes_max.unwrap_or(0).to_le_bytes());
        space.put::<12, 4>(self.segments_max.to_le_bytes());
        space.put::<20, 4>(self.limits.block_bytes.to_le_bytes());
        self.put_topology(&mut space);
        space.put::<{ Self::WRITEBACK_OFFSET }, 1>([u8::from(self.writeback)]);
        space.put::<34, 2>(self.vrings.to_le_bytes());
        if self.offers_discard() {
            space.put::<36, 4>(Self::DISCARD_SECTORS_MAX.to_le_bytes());
            space.put::<40, 4>(Self::RANGES_MAX.to_le_bytes());
            space.put::<44, 4>(self.discard_sector_alignment().to_le_bytes());
        }
        if !self.limits.read_only {
            space.put::<48, 4>(Self::ZERO_SECTORS_MAX.to_le_bytes());
            space.put::<52, 4>(Self::RANGES_MAX.to_le_bytes());
            space.put::<56, 1>([u8::from(self.limits.discard)]);
        }
        space.0
    }

    fn offers_discard(&self) -> bool {
        self.limits.discard && !self.limits.read_only
    }

    /// Writes the topology. All values are in logical blocks. Example: 512-byte blocks on 4 KiB sectors with a best size of 64
    /// KiB are exponent 3, minimum 8, optimum 128.
    fn put_topology(&self, space: &mut Space) {
        let blocks = |bytes: u32| bytes.checked_div(self.limits.block_bytes).unwrap_or(0);
        let physical = blocks(self.limits.physical_block_bytes).max(1);
        // An exponent below 32 always fits a byte.
        space.put::<24, 1>([u8::try_from(physical.ilog2()).unwrap_or(0)]);
        // 25: alignment_offset is 0, because the disk begins at the start of a physical block.
        space.put::<26, 2>(u16::try_from(physical).unwrap_or(u16::MAX).to_le_bytes());
        space.put::<28, 4>(blocks(self.limits.optimal_io_bytes).to_le_bytes());
    }

    fn discard_sector_alignment(&self) -> u32 {
        (self.limits.discard_granularity_bytes / SECTOR_BYTES as u32).max(1)
    }
}

/// The bytes while they are being filled. A field that does not fit is a compile error.
struct Space([u8; Config::BYTES]);

impl Space {
    fn put<const AT: usize, const LEN: usize>(&mut self, field: [u8; LEN]) {
        const { assert!(AT + LEN <= Config::BYTES) };
        self.0[AT..AT + LEN].copy_from_slice(&field);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config {
            capacity_bytes: 0x0102_0304_0506 * 512,
            segments_max: 0x0a0b_0c0d,
            segment_bytes_max: None,
            vrings: 0x1112,
            writeback: true,
            limits: Limits {
                capacity_bytes: 1 << 30,
                block_bytes: 512,
                physical_block_bytes: 4096,
                optimal_io_bytes: 64 << 10,
                offset_align_bytes: 512,
                memory_align_bytes: 512,
                read_only: false,
                discard: true,
                discard_align_bytes: 512,
                discard_granularity_bytes: 4096,
                rotational: false,
            },
        }
    }

    fn field(bytes: &[u8], at: usize, len: usize) -> u64 {
        bytes[at..at + len]
            .iter()
            .rev()
            .fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    /// virtio 1.3 §5.2.4, struct virtio_blk_config: every byte of the space is in one row.
    #[test]
    fn every_field_is_at_its_offset() {
        let table = [
            ("capacity", 0, 8, 0x0102_0304_0506),
            ("size_max", 8, 4, 0),
            ("seg_max", 12, 4, 0x0a0b_0c0d),
            ("geometry", 16, 4, 0),
            ("blk_size", 20, 4, 512),
            ("physical_block_exp", 24, 1, 3),
            ("alignment_offset", 25, 1, 0),
            ("min_io_size", 26, 2, 8),
            ("opt_io_size", 28, 4, 128),
            ("writeback", 32, 1, 1),
            ("unused0", 33, 1, 0),
            ("num_queues", 34, 2, 0x1112),
            ("max_discard_sectors", 36, 4, 1 << 21),
            ("max_discard_seg", 40, 4, 1),
            ("discard_sector_alignment", 44, 4, 8),
            ("max_write_zeroes_sectors", 48, 4, 1 << 18),
            ("max_write_zeroes_seg", 52, 4, 1),
            ("write_zeroes_may_unmap", 56, 1, 1),
            ("unused1", 57, 3, 0),
            ("max_secure_erase_sectors", 60, 4, 0),
            ("max_secure_erase_seg", 64, 4, 0),
            ("secure_erase_sector_alignment", 68, 4, 0),
            ("zone_sectors", 72, 4, 0),
            ("max_open_zones", 76, 4, 0),
            ("max_active_zones", 80, 4, 0),
            ("max_append_sectors", 84, 4, 0),
            ("write_granularity", 88, 4, 0),
            ("model", 92, 1, 0),
            ("unused2", 93, 3, 0),
        ];
        let bytes = config().bytes();
        let mut next = 0;
        for (name, at, len, value) in table {
            assert_eq!(at, next, "{name} follows its neighbour");
            assert_eq!(field(&bytes, at, len), value, "{name}");
            next = at + len;
        }
        assert_eq!(next, Config::BYTES);
    }

    #[test]
    fn features_and_fields_follow_the_limits() {
        let base = feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::TOPOLOGY
            | feature::FLUSH
            | feature::CONFIG_WCE
            | feature::MQ
            | feature::INDIRECT_DESC
            | feature::EVENT_IDX
            | feature::VERSION_1;
        // read_only, discard; features in addition to the base; discard, write-zeroes, may_unmap fields.
        let table = [
            (
                false,
                true,
                feature::DISCARD | feature::WRITE_ZEROES,
                [1, 1, 1],
            ),
            (false, false, feature::WRITE_ZEROES, [0, 1, 0]),
            (true, true, feature::RO, [0, 0, 0]),
            (true, false, feature::RO, [0, 0, 0]),
        ];
        for (read_only, discard, features, present) in table {
            let mut config = config();
            config.limits.read_only = read_only;
            config.limits.discard = discard;
            assert_eq!(config.features(), base | features);
            let bytes = config.bytes();
            assert_eq!([40, 52, 56].map(|at| bytes[at]), present);
            assert_eq!(field(&bytes, 36, 4) != 0, present[0] == 1);
            assert_eq!(field(&bytes, 44, 4) != 0, present[0] == 1);
            assert_eq!(field(&bytes, 48, 4) != 0, present[1] == 1);
        }
    }

    #[test]
    fn size_max_is_offered_if_segments_are_bounded() {
        let mut config = config();
        assert_eq!(config.features() & feature::SIZE_MAX, 0);
        config.segment_bytes_max = Some(0x0003_4000);
        assert_ne!(config.features() & feature::SIZE_MAX, 0);
        assert_eq!(field(&config.bytes(), 8, 4), 0x0003_4000);
    }

    #[test]
    fn topology_is_in_logical_blocks() {
        // block, physical, optimal; exponent, minimum, optimum.
        let table = [
            (512, 512, 0, [0, 1, 0]),
            (512, 4096, 1 << 20, [3, 8, 2048]),
            (4096, 4096, 1 << 20, [0, 1, 256]),
            (4096, 512, 0, [0, 1, 0]),
            (512, 1 << 31, 0, [22, 0xffff, 0]),
            (4096, 16384, 1000, [2, 4, 0]),
            (0, 4096, 4096, [0, 1, 0]),
        ];
        for (block_bytes, physical_block_bytes, optimal_io_bytes, expected) in table {
            let mut config = config();
            config.limits.block_bytes = block_bytes;
            config.limits.physical_block_bytes = physical_block_bytes;
            config.limits.optimal_io_bytes = optimal_io_bytes;
            let bytes = config.bytes();
            let found = [
                field(&bytes, 24, 1),
                field(&bytes, 26, 2),
                field(&bytes, 28, 4),
            ];
            assert_eq!(found, expected, "{block_bytes} {physical_block_bytes}");
            assert_eq!(field(&bytes, 20, 4), u64::from(block_bytes));
        }
    }

    #[test]
    fn discard_alignment_is_at_least_a_sector() {
        for (granularity, sectors) in [(0, 1), (1, 1), (512, 1), (4096, 8), (1 << 20, 2048)] {
            let mut config = config();
            config.limits.discard_granularity_bytes = granularity;
            assert_eq!(field(&config.bytes(), 44, 4), sectors, "{granularity}");
        }
    }

    #[test]
    fn writeback_byte_is_the_mode() {
        let mut config = config();
        config.writeback = false;
        assert_eq!(config.bytes()[Config::WRITEBACK_OFFSET], 0);
    }
}
