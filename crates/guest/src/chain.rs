//! A descriptor chain, copied out of guest memory once.

use cleave_blk::{Segment, Shape};

/// Why a chain cannot be served. The chain still goes back to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// `next` outside the table, a loop, or more descriptors than a chain may have.
    #[error("the chain does not end")]
    Endless,
    /// An indirect table of bad length or place, nested, or with NEXT beside INDIRECT.
    #[error("bad indirect table")]
    Indirect,
    /// A readable descriptor after a writable one.
    #[error("readable after writable")]
    Order,
    /// More data segments than a request may carry.
    #[error("too many segments")]
    TooMany,
}

/// Room for one chain; made once per vring's owner and filled by `Vring::take` again and again.
#[derive(Debug)]
pub struct Chain {
    segments: Vec<Segment>,
    readable: usize,
}

impl Chain {
    /// An empty chain with all the room it will ever need.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Chain {
        todo!()
    }

    /// Bytes in each direction.
    pub fn shape(&self) -> Shape {
        todo!()
    }

    /// The device-readable segments, in order.
    pub fn readable(&self) -> &[Segment] {
        &self.segments[..self.readable]
    }

    /// The device-writable segments, in order.
    pub fn writable(&self) -> &[Segment] {
        &self.segments[self.readable..]
    }

    /// Guest address of the status byte: the last byte of the writable stream; `None` where there is none.
    /// (Zero-length descriptors at the end do not count.)
    pub fn status_addr(&self) -> Option<u64> {
        todo!()
    }

    /// The readable stream after its first `head_bytes` bytes (trims the chain; call once).
    pub fn data_out(&mut self, head_bytes: u64) -> &[Segment] {
        let _ = head_bytes;
        todo!()
    }

    /// The writable stream without its last byte, the status (trims the chain; call once).
    pub fn data_in(&mut self) -> &[Segment] {
        todo!()
    }
}
