//! Bounce buffers: a fixed number, aligned for the store, backed by memory when touched.
//!
//! Unsafe because a buffer is a raw range of an `Area`. It belongs to one op from `take` to `give`, and the
//! area lives until the kernel has finished every op.

use std::io;

use super::area::{Access, Area};

/// Most ops that bounce at once; others wait. There are many small buffers rather than a few large ones
/// because most bounced requests are small ones of old drivers; large ones go in pieces.
const BUFFERS: u16 = 64;
/// Size of a buffer, unless the store's block is larger.
const BUFFER_BYTES: usize = 128 << 10;
/// Size of the shared zeroes, unless the store's block is larger.
const ZEROES_BYTES: usize = 1 << 20;

/// The buffers, and a read-only range of zeroes.
#[derive(Debug)]
pub(crate) struct BufferPool {
    area: Area,
    zeroes: Area,
    free: Vec<u16>,
    buffer_bytes: usize,
    zeroes_bytes: usize,
}

impl BufferPool {
    /// Buffers for a store with the offset unit `unit` and the memory alignment `align`.
    pub(crate) fn new(unit: usize, align: usize) -> io::Result<BufferPool> {
        // Both are powers of two, so the larger is a multiple of the unit.
        let buffer_bytes = BUFFER_BYTES.max(unit).max(align);
        let zeroes_bytes = ZEROES_BYTES.max(unit);
        let area = Area::new(
            buffer_bytes * usize::from(BUFFERS),
            align,
            Access::ReadWrite,
        )?;
        let zeroes = Area::new(zeroes_bytes, align, Access::Read)?;
        Ok(BufferPool {
            area,
            zeroes,
            free: (0..BUFFERS).rev().collect(),
            buffer_bytes,
            zeroes_bytes,
        })
    }

    /// Never unmaps the buffers, because the kernel may still follow a pointer into them.
    pub(crate) fn leak(&mut self) {
        self.area.leak();
        self.zeroes.leak();
    }

    pub(crate) fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    pub(crate) fn give(&mut self, buffer: u16) {
        debug_assert!(self.free.len() < usize::from(BUFFERS));
        self.free.push(buffer);
    }

    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    #[cfg(test)]
    pub(crate) fn has_all(&self) -> bool {
        self.free.len() == usize::from(BUFFERS)
    }

    /// Bytes of one buffer.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        self.buffer_bytes as u64
    }

    /// Bytes of the shared zeroes.
    pub(crate) fn zeroes_bytes(&self) -> u64 {
        self.zeroes_bytes as u64
    }

    /// The byte at `offset` of a buffer.
    pub(crate) fn at(&self, buffer: u16, offset: u64) -> *mut u8 {
        debug_assert!(offset <= self.buffer_bytes as u64);
        self.area
            .at(usize::from(buffer) * self.buffer_bytes + offset as usize)
    }

    /// The first of the zeroes.
    pub(crate) fn zeroes(&self) -> *const u8 {
        self.zeroes.at(0)
    }
}
