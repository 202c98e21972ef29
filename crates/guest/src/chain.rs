//! A descriptor chain, copied out of guest memory once.

use cleave_blk::spec::{HEADER_BYTES, SEGMENTS_MAX};
use cleave_blk::{Segment, Shape};

/// Why a chain cannot be served. The chain still goes back to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// `next` outside the table, a loop, or more descriptors than a chain may have.
    #[error("the chain does not end")]
    Endless,
    /// An indirect table of bad length or address, a nested one, or NEXT beside INDIRECT.
    #[error("bad indirect table")]
    Indirect,
    /// A readable descriptor after a writable one.
    #[error("readable after writable")]
    Order,
    /// More data segments than a request may carry.
    #[error("too many segments")]
    TooMany,
}

/// Most segments of a chain: the data of the largest request, a header in pieces of one byte, and the status.
/// A longer chain is `TooMany`.
const CHAIN_SEGMENTS_MAX: usize = SEGMENTS_MAX + HEADER_BYTES + 1;

/// Room for one chain, allocated once by a vring's owner and filled by each `Vring::take`. Descriptors of
/// length 0 are dropped: they carry nothing, and their address has no meaning.
#[derive(Debug)]
pub struct Chain {
    segments: Vec<Segment>,
    /// First remaining readable segment (`data_out` moves it).
    first: usize,
    /// End of the readable segments.
    readable: usize,
    shape: Shape,
    status_addr: Option<u64>,
    pub(crate) descriptors: u32,
}

impl Chain {
    /// Makes an empty chain with all the room that it will ever need.
    #[allow(clippy::new_without_default)] // it allocates, which a default should not
    pub fn new() -> Chain {
        Chain {
            segments: Vec::with_capacity(CHAIN_SEGMENTS_MAX),
            first: 0,
            readable: 0,
            shape: Shape {
                readable_bytes: 0,
                writable_bytes: 0,
            },
            status_addr: None,
            descriptors: 0,
        }
    }

    /// Returns the bytes in each direction in the guest's layout. Trimming does not change it, nor does a fault that left
    /// segments out.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the number of descriptors that were read to find the chain, even if it has a fault.
    #[inline]
    pub fn descriptors(&self) -> u32 {
        self.descriptors
    }

    /// Returns the device-readable segments, in order.
    pub fn readable(&self) -> &[Segment] {
        self.segments
            .get(self.first..self.readable)
            .unwrap_or_default()
    }

    /// Returns the device-writable segments, in order.
    pub fn writable(&self) -> &[Segment] {
        self.segments.get(self.readable..).unwrap_or_default()
    }

    /// Returns the guest address of the status byte, which is the last byte of the writable stream; `None` if there is none.
    /// Zero-length descriptors at the end do not count. Trimming does not change it.
    pub fn status_addr(&self) -> Option<u64> {
        self.status_addr
    }

    /// Returns the readable stream after its first `head_bytes` bytes (trims the chain; call once).
    pub fn data_out(&mut self, head_bytes: u64) -> &[Segment] {
        let mut skip_bytes = head_bytes;
        while self.first < self.readable
            && let Some(segment) = self.segments.get_mut(self.first)
        {
            if skip_bytes < u64::from(segment.len) {
                // Fits: below a u32. An address that wraps is refused when it is translated.
                segment.addr = segment.addr.wrapping_add(skip_bytes);
                segment.len -= skip_bytes as u32;
                break;
            }
            skip_bytes -= u64::from(segment.len);
            self.first += 1;
        }
        self.readable()
    }

    /// Returns the writable stream without its last byte, the status (trims the chain; call once).
    pub fn data_in(&mut self) -> &[Segment] {
        if self.readable < self.segments.len()
            && let Some(last) = self.segments.last_mut()
        {
            last.len -= 1;
            if last.len == 0 {
                self.segments.pop();
            }
        }
        self.writable()
    }

    pub(crate) fn clear(&mut self) {
        self.segments.clear();
        self.first = 0;
        self.readable = 0;
        self.shape = Shape {
            readable_bytes: 0,
            writable_bytes: 0,
        };
        self.status_addr = None;
    }

    /// Adds a device-readable segment.
    #[inline]
    pub(crate) fn add_readable(&mut self, segment: Segment) -> Result<(), ChainFault> {
        if segment.len == 0 {
            return Ok(());
        }
        // No overflow: at most 32768 descriptors of 4 GiB.
        self.shape.readable_bytes += u64::from(segment.len);
        if self.shape.writable_bytes > 0 {
            return Err(ChainFault::Order);
        }
        self.add(segment)?;
        self.readable = self.segments.len();
        Ok(())
    }

    /// Adds a device-writable segment.
    #[inline]
    pub(crate) fn add_writable(&mut self, segment: Segment) -> Result<(), ChainFault> {
        if segment.len == 0 {
            return Ok(());
        }
        self.shape.writable_bytes += u64::from(segment.len);
        self.status_addr = segment.addr.checked_add(u64::from(segment.len) - 1);
        self.add(segment)
    }

    #[inline]
    fn add(&mut self, segment: Segment) -> Result<(), ChainFault> {
        if self.segments.len() >= CHAIN_SEGMENTS_MAX {
            return Err(ChainFault::TooMany);
        }
        self.segments.push(segment);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(lens: &[u32]) -> Vec<Segment> {
        let mut addr = 0x1000;
        lens.iter()
            .map(|&len| {
                addr += 0x1_0000;
                Segment { addr, len }
            })
            .collect()
    }

    fn chain(readable: &[u32], writable: &[u32]) -> Chain {
        let mut chain = Chain::new();
        for segment in segments(readable) {
            chain.add_readable(segment).unwrap();
        }
        for segment in segments(writable) {
            chain.add_writable(segment).unwrap();
        }
        chain
    }

    /// Returns every byte address of a stream, to compare layouts.
    fn bytes(segments: &[Segment]) -> Vec<u64> {
        segments
            .iter()
            .flat_map(|s| s.addr..s.addr + u64::from(s.len))
            .collect()
    }

    #[test]
    fn data_out_leaves_the_stream_after_the_head_for_any_layout() {
        for lens in [
            &[16][..],
            &[16, 512],
            &[8, 8, 512],
            &[1; 40],
            &[528],
            &[15, 513],
            &[4],
            &[],
        ] {
            let mut chain = chain(lens, &[1]);
            let all = bytes(chain.readable());
            let expected = all.get(16..).unwrap_or_default().to_vec();
            assert_eq!(bytes(chain.data_out(16)), expected, "{lens:?}");
            assert_eq!(bytes(chain.readable()), expected, "{lens:?}");
            assert_eq!(chain.writable().len(), 1, "{lens:?}");
            assert_eq!(
                chain.shape().readable_bytes,
                all.len() as u64,
                "{lens:?}: the shape is the guest's"
            );
        }
    }

    #[test]
    fn data_in_leaves_out_the_status_byte_for_any_layout() {
        for lens in [&[1][..], &[512, 1], &[513], &[512, 0, 1, 0], &[1, 1], &[]] {
            let mut chain = chain(&[16], lens);
            let mut all = bytes(chain.writable());
            let status = all.pop();
            assert_eq!(chain.status_addr(), status, "{lens:?}");
            assert_eq!(bytes(chain.data_in()), all, "{lens:?}");
            assert_eq!(chain.status_addr(), status, "{lens:?}: kept");
            assert_eq!(chain.readable().len(), 1, "{lens:?}");
        }
    }

    #[test]
    fn a_readable_segment_after_a_writable_one_is_refused() {
        let mut chain = chain(&[16], &[512]);
        let [late] = segments(&[1])[..] else {
            unreachable!()
        };
        assert_eq!(chain.add_readable(late), Err(ChainFault::Order));
        assert_eq!(chain.readable().len(), 1);
    }

    #[test]
    fn a_chain_of_too_many_segments_has_a_known_status() {
        let mut chain = Chain::new();
        let one = |addr| Segment { addr, len: 1 };
        for addr in 0..CHAIN_SEGMENTS_MAX as u64 {
            chain.add_writable(one(addr)).unwrap();
        }
        let room = chain.segments.capacity();
        assert_eq!(chain.add_writable(one(77_777)), Err(ChainFault::TooMany));
        assert_eq!(chain.status_addr(), Some(77_777));
        assert_eq!(chain.segments.capacity(), room, "no allocation");
    }

    #[test]
    fn a_status_byte_beyond_the_address_space_is_none() {
        let mut chain = Chain::new();
        let wrapping = Segment {
            addr: u64::MAX,
            len: 2,
        };
        chain.add_writable(wrapping).unwrap();
        assert_eq!(chain.status_addr(), None);
    }
}
