//! Detects reads that found only zeroes. Areas that were never written answer faster than a full disk, so a
//! benchmark of them is misleading.

use cleave_blk::Segment;
use cleave_guest::Memory;

/// One in this many reads is checked.
const LOOK_EVERY: u32 = 1024;
/// Maximum number of bytes to check, from the start of the read, so that checking a long read does not cost
/// more than reading it.
const LOOK_BYTES_MAX: u32 = 64 << 10;
/// Maximum number of segments to keep of a read until it completes: 64 KiB in pages.
const SEGMENTS_MAX: usize = 16;

/// Chooses the reads to check, and keeps the destination of one read at a time.
#[derive(Debug)]
pub(super) struct Sampler {
    left: u32,
    head: Option<u16>,
    segments: [Segment; SEGMENTS_MAX],
    count: usize,
}

impl Sampler {
    pub(super) fn new() -> Sampler {
        Sampler {
            left: 0,
            head: None,
            segments: [Segment::default(); SEGMENTS_MAX],
            count: 0,
        }
    }

    /// Counts reads.
    #[inline]
    pub(super) fn pass(&mut self, n: u32) {
        self.left = self.left.saturating_sub(n);
    }

    /// Returns true if the next read is to be checked. Reads are checked one at a time.
    #[inline]
    pub(super) fn wants(&self) -> bool {
        self.left == 0 && self.head.is_none()
    }

    /// Returns true if the current read is to be checked.
    pub(super) fn chooses(&mut self) -> bool {
        let wants = self.wants();
        if wants {
            self.left = LOOK_EVERY;
        }
        wants
    }

    /// Keeps the destination of the chosen read until it completes.
    pub(super) fn keep(&mut self, head: u16, data: &[Segment]) {
        self.count = 0;
        for (kept, segment) in self.segments.iter_mut().zip(data) {
            *kept = *segment;
            self.count += 1;
        }
        self.head = Some(head);
    }

    /// Returns the destination of a completed read, if it is the one that was kept.
    #[inline]
    pub(super) fn take(&mut self, head: u16) -> Option<&[Segment]> {
        self.head.take_if(|kept| *kept == head)?;
        self.segments.get(..self.count)
    }
}

/// Bytes that are compared at a time.
const STEP: usize = 1024;

/// Returns true if the checked data is all zero, and `None` if the memory is gone.
pub(super) fn is_zero(memory: &Memory, data: &[Segment]) -> Option<bool> {
    let zero = [0; STEP];
    let mut bytes = [0; STEP];
    let mut left = LOOK_BYTES_MAX;
    for segment in data {
        let mut rest = *segment;
        rest.len = rest.len.min(left);
        left -= rest.len;
        while rest.len > 0 {
            let addr = rest.addr;
            let len = rest.len.min(STEP as u32);
            let copied = memory.copy_in(&[Segment { addr, len }], &mut bytes).ok()?;
            if bytes.get(..copied) != zero.get(..copied) {
                return Some(false);
            }
            rest.addr = addr.checked_add(u64::from(len))?;
            rest.len -= len;
        }
    }
    Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_read_in_many_is_checked() {
        let mut sampler = Sampler::new();
        let looked = |sampler: &mut Sampler, reads: u32| {
            (0..reads)
                .filter(|_| {
                    sampler.pass(1);
                    sampler.chooses()
                })
                .count()
        };
        assert_eq!(looked(&mut sampler, 1), 1, "the first");
        assert_eq!(looked(&mut sampler, LOOK_EVERY * 10), 10);
        sampler.pass(u32::MAX);
        assert!(sampler.wants());
        sampler.keep(3, &[]);
        assert!(!sampler.wants(), "one at a time");
        assert!(sampler.take(4).is_none());
        assert_eq!(sampler.take(3), Some(&[][..]));
        assert!(sampler.wants());
    }

    #[test]
    fn the_kept_part_of_a_read_is_bounded() {
        let mut sampler = Sampler::new();
        let page = Segment {
            addr: 4096,
            len: 4096,
        };
        sampler.keep(0, &[page; 100]);
        assert_eq!(sampler.take(0).unwrap(), &[page; SEGMENTS_MAX]);
    }
}
