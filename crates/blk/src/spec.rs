//! Numbers of the virtio specification (virtio 1.3 §5.2, §2.7, §6). They are defined only here.

/// Bytes in a sector: the unit of every sector number on the wire (virtio 1.3 §5.2.4).
pub const SECTOR_BYTES: u64 = 512;
/// Bytes of a request header (virtio 1.3 §5.2.6).
pub const HEADER_BYTES: usize = 16;
/// Bytes of one discard / write-zeroes segment (virtio 1.3 §5.2.6).
pub const RANGE_BYTES: usize = 16;
/// Bytes of a GET_ID answer (virtio 1.3 §5.2.6).
pub const ID_BYTES: usize = 20;
/// Most data segments of one request; also Linux's limit on an iovec array (UIO_MAXIOV).
pub const SEGMENTS_MAX: usize = 1024;

/// Request types (virtio 1.3 §5.2.6).
pub mod request_type {
    #![allow(missing_docs)]
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

/// Flag of a discard / write-zeroes segment: the device may deallocate. All other bits are reserved
/// (virtio 1.3 §5.2.6).
pub const RANGE_FLAG_UNMAP: u32 = 1;

/// Status bytes (virtio 1.3 §5.2.6).
pub mod status {
    #![allow(missing_docs)]
    pub const OK: u8 = 0;
    pub const IOERR: u8 = 1;
    pub const UNSUPP: u8 = 2;
}

/// Feature bits as masks (virtio 1.3 §5.2.3, §6; vhost-user "Feature bits").
pub mod feature {
    #![allow(missing_docs)]
    pub const SIZE_MAX: u64 = 1 << 1;
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Bit 26 belongs to the transport: what the device writes to memory is marked in the dirty log.
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    /// Bit 30 belongs to the transport: the frontend speaks vhost-user protocol features.
    pub const VHOST_USER_PROTOCOL: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
}
