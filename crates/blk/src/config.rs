//! The device's configuration space (virtio 1.3 §5.2.4).

use crate::Limits;

/// Configuration space of one disk. Bytes are made on demand, so that they never disagree with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Size now.
    pub capacity_bytes: u64,
    /// Most data segments of a request told to the guest.
    pub segments_max: u32,
    /// Vrings offered.
    pub vrings: u16,
    /// Write-back (the `writeback` field that a guest may set with CONFIG_WCE).
    pub writeback: bool,
    /// The disk.
    pub limits: Limits,
}

impl Config {
    /// Length of the space; reads beyond it are refused.
    pub const BYTES: usize = 96;
    /// Offset of the one byte that a guest may write (`writeback`).
    pub const WRITEBACK_OFFSET: usize = 32;

    /// The device features that this disk offers (no transport bits; RO, FLUSH, DISCARD … as the limits say).
    pub fn features(&self) -> u64 {
        todo!()
    }

    /// The space as bytes, little-endian.
    pub fn bytes(&self) -> [u8; Self::BYTES] {
        todo!()
    }
}
