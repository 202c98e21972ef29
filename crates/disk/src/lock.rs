//! Serialises read-modify-write against other writes of the same blocks, across the engines of a disk.

/// Try-locks over hashed regions of the disk; used only where `offset_align_bytes` > 512, so that a
/// disk of 512-byte blocks pays nothing. Writers that need no read-modify-write hold a region shared,
/// a read-modify-write holds it alone. Nothing blocks: who fails tries again later; a waiting
/// exclusive holder keeps new shared holders out, so neither side starves.
#[derive(Debug)]
pub struct RangeLocks {}

/// What is held, to be given back; regions are derived from the byte range.
impl RangeLocks {
    /// Shared hold on every region that the range touches, or none of them.
    pub fn try_shared(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        let _ = (offset_bytes, len_bytes);
        todo!()
    }

    /// Exclusive hold on every region that the range touches, or none of them.
    pub fn try_exclusive(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        let _ = (offset_bytes, len_bytes);
        todo!()
    }

    /// Gives a shared hold back.
    pub fn release_shared(&self, offset_bytes: u64, len_bytes: u64) {
        let _ = (offset_bytes, len_bytes);
        todo!()
    }

    /// Gives an exclusive hold back.
    pub fn release_exclusive(&self, offset_bytes: u64, len_bytes: u64) {
        let _ = (offset_bytes, len_bytes);
        todo!()
    }
}
