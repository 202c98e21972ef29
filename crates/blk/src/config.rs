//! The device's configuration space (virtio 1.3 §5.2.4).

use crate::spec::{SECTOR_BYTES, feature};

/// The device that a guest sees, by version: which features are offered, and the fields that neither the operator nor the size
/// decides. It never depends on what holds the bytes, so a guest may move to another host whose storage is of another kind. What is
/// added later gets a version of its own, because a guest cannot move to a host that offers less than it uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Face {
    /// Discards and write-zeroes unless the disk is read-only, physical blocks of 4 KiB, segments of any length.
    #[default]
    V1,
}

impl Face {
    /// Returns the number of the version.
    pub fn version(self) -> u32 {
        match self {
            Face::V1 => 1,
        }
    }
}

/// Configuration space of one disk. Its bytes are generated on demand, so they always match these fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The version of the device, which fixes the features and all of the space but the other fields.
    pub face: Face,
    /// Current size.
    pub capacity_bytes: u64,
    /// Logical block size; a power of two ≥ 512.
    pub block_bytes: u32,
    /// The guest may only read.
    pub read_only: bool,
    /// Most data segments of a request, as stated to the guest.
    pub segments_max: u32,
    /// Number of vrings offered.
    pub vrings: u16,
    /// True if the cache is write-back (the `writeback` field, which a guest may set with CONFIG_WCE).
    pub writeback: bool,
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
    /// Physical block, and unit of discards: that of most devices and file systems. Requests in such units are never slower where the
    /// real unit is smaller.
    const PHYSICAL_BYTES: u32 = 4096;

    /// Returns the features of the block device and its vrings. The session adds those of the transport (`VHOST_USER_PROTOCOL`).
    pub fn features(&self) -> u64 {
        // MQ is offered even with one vring: `vrings` is 1 then. CONFIG_WCE requires FLUSH (virtio 1.3 §5.2.5.2).
        const ALWAYS: u64 = feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::TOPOLOGY
            | feature::FLUSH
            | feature::CONFIG_WCE
            | feature::MQ
            | feature::INDIRECT_DESC
            | feature::EVENT_IDX
            | feature::VERSION_1;
        match (self.face, self.read_only) {
            (Face::V1, true) => ALWAYS | feature::RO,
            (Face::V1, false) => ALWAYS | feature::DISCARD | feature::WRITE_ZEROES,
        }
    }

    /// Returns the space as bytes, little-endian. Fields of features that are not offered are zero.
    pub fn bytes(&self) -> [u8; Self::BYTES] {
        let mut space = Space([0; Self::BYTES]);
        space.put::<0, 8>((self.capacity_bytes / SECTOR_BYTES).to_le_bytes());
        space.put::<12, 4>(self.segments_max.to_le_bytes());
        space.put::<20, 4>(self.block_bytes.to_le_bytes());
        // The topology is in logical blocks. Example: 512-byte blocks on 4 KiB sectors are exponent 3, minimum 8. The best size is
        // unknown (28), and the disk begins at the start of a physical block (25).
        let physical_bytes = Self::PHYSICAL_BYTES.max(self.block_bytes);
        let blocks = (physical_bytes / self.block_bytes.max(1)).max(1);
        // An exponent below 32 always fits a byte, and a physical block is at most 8 blocks.
        space.put::<24, 1>([u8::try_from(blocks.ilog2()).unwrap_or(0)]);
        space.put::<26, 2>(u16::try_from(blocks).unwrap_or(u16::MAX).to_le_bytes());
        space.put::<{ Self::WRITEBACK_OFFSET }, 1>([u8::from(self.writeback)]);
        space.put::<34, 2>(self.vrings.to_le_bytes());
        if !self.read_only {
            let physical_sectors = physical_bytes / SECTOR_BYTES as u32;
            space.put::<36, 4>(Self::DISCARD_SECTORS_MAX.to_le_bytes());
            space.put::<40, 4>(Self::RANGES_MAX.to_le_bytes());
            space.put::<44, 4>(physical_sectors.to_le_bytes());
            space.put::<48, 4>(Self::ZERO_SECTORS_MAX.to_le_bytes());
            space.put::<52, 4>(Self::RANGES_MAX.to_le_bytes());
            // "May": a store that cannot give space back writes zeroes.
            space.put::<56, 1>([1]);
        }
        space.0
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
            face: Face::V1,
            capacity_bytes: 0x0102_0304_0506 * 512,
            block_bytes: 512,
            read_only: false,
            segments_max: 0x0a0b_0c0d,
            vrings: 0x1112,
            writeback: true,
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
            ("opt_io_size", 28, 4, 0),
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

    /// A guest that runs has these bits, and does not start again with a daemon that offers fewer.
    #[test]
    fn the_features_of_a_face_are_fixed() {
        let mut config = config();
        assert_eq!(config.features(), 0x1_3000_7e44);
        config.read_only = true;
        assert_eq!(config.features(), 0x1_3000_1e64);
        let bytes = config.bytes();
        assert_eq!(
            bytes[36..],
            [0; 60],
            "fields of features that are not offered"
        );
    }

    #[test]
    fn topology_and_discards_are_in_physical_blocks() {
        // block; exponent, minimum, optimum, sectors of a discard's unit.
        let table = [
            (512, [3, 8, 0, 8]),
            (2048, [1, 2, 0, 8]),
            (4096, [0, 1, 0, 8]),
            (65_536, [0, 1, 0, 128]),
        ];
        for (block_bytes, expected) in table {
            let bytes = Config {
                block_bytes,
                ..config()
            }
            .bytes();
            let found =
                [(24, 1), (26, 2), (28, 4), (44, 4)].map(|(at, len)| field(&bytes, at, len));
            assert_eq!(found, expected, "{block_bytes}");
            assert_eq!(field(&bytes, 20, 4), u64::from(block_bytes));
        }
    }

    #[test]
    fn writeback_byte_is_the_mode() {
        let mut config = config();
        config.writeback = false;
        assert_eq!(config.bytes()[Config::WRITEBACK_OFFSET], 0);
    }
}
