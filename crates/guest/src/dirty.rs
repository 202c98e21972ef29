//! The dirty log: which pages of its guest's memory a device has written while the guest moves to another host (vhost-user
//! "Migration").
//!
//! The frontend shares a file with one bit for each page, clears the bits that it finds set, and copies those pages. So a bit
//! is set after its page was written, with a full fence in between: either we see that the frontend has cleared the bit, and
//! set it again, or the frontend sees what we wrote.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering, fence};

use cleave_blk::Segment;

use crate::mapping::Mapping;
use crate::room::{self, Taken};
use crate::walk::{DescriptorTable, walk};
use crate::{Chain, MapError, Memory, RegionSpec};

/// Bytes of a page of the log, whatever the host's pages are.
const PAGE_BYTES: u64 = 4096;
/// Longest log: it has a bit for each page of a guest's memory that would fill the address space.
const LOG_BYTES_MAX: u64 = room::BYTES_MAX / PAGE_BYTES / 8;
/// Maximum number of descriptors that are read again for one batch of answers: more than a thousand requests of the most
/// segments. Only a guest that rewrites the chains of requests in flight exceeds it.
const DESCRIPTORS_MAX: u32 = 1 << 20;

/// Answers of one batch of which it can be told: more than end at once in a lap.
const TOLD_MAX: usize = 64;

/// A log, mapped: the bit of page `n` is bit `n % 8` of byte `n / 8`.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: Mapping,
    /// At least 1. Need not be a multiple of anything.
    len_bytes: u64,
}

impl DirtyLog {
    /// Maps `len_bytes` bytes of a file of the frontend.
    pub fn map(file: File, file_offset: u64, len_bytes: u64) -> Result<Arc<DirtyLog>, MapError> {
        if !(1..=LOG_BYTES_MAX).contains(&len_bytes) {
            return Err(MapError::Length {
                guest_addr: 0,
                len_bytes,
            });
        }
        let spec = RegionSpec {
            guest_addr: 0,
            user_addr: 0,
            len_bytes,
            file_offset,
            file,
        };
        let mapping = Mapping::new(&spec, Taken::default())?;
        Ok(Arc::new(DirtyLog { mapping, len_bytes }))
    }

    /// Returns true if every page of this memory has a bit.
    pub fn covers(&self, memory: &Memory) -> bool {
        let last_byte = memory.last_addr().map(|addr| addr / PAGE_BYTES / 8);
        last_byte.is_none_or(|last_byte| last_byte < self.len_bytes)
    }

    /// Returns true if the file was cut and part of the log was replaced by zeroes that the frontend never sees.
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// Sets the bits of all pages of a range, as far as they are in the log. The range was written before the last full fence.
    #[inline]
    fn mark(&self, addr: u64, len_bytes: u64) {
        let first = addr / PAGE_BYTES;
        // Most ranges lie in one page. An empty one wraps to a long one.
        let more_bytes = len_bytes.wrapping_sub(1);
        let last = addr.wrapping_add(more_bytes) / PAGE_BYTES;
        match more_bytes < PAGE_BYTES && first == last {
            true => self.mark_page(first),
            false => self.mark_range(addr, len_bytes),
        }
    }

    /// Sets the bit of a page, if it is in the log.
    #[inline]
    fn mark_page(&self, page: u64) {
        if page / 8 < self.len_bytes {
            self.set(page / 8, 1 << (page % 8));
        }
    }

    /// Does what `mark` does, for any range.
    #[inline(never)]
    fn mark_range(&self, addr: u64, len_bytes: u64) {
        let Some(more_bytes) = len_bytes.checked_sub(1) else {
            return;
        };
        let first = addr / PAGE_BYTES;
        let last = addr.saturating_add(more_bytes) / PAGE_BYTES;
        let last = last.min(self.len_bytes.saturating_mul(8) - 1);
        for byte in first / 8..=last / 8 {
            let from = first.saturating_sub(8 * byte);
            let to = (last - 8 * byte).min(7);
            // Pages 3 to 5 of a byte: 0b1111_1000 and 0b0011_1111.
            self.set(byte, (0xff << from) & (0xff >> (7 - to)));
        }
    }

    /// Sets bits of a byte of the log.
    #[inline]
    fn set(&self, byte: u64, bits: u8) {
        // SAFETY: the callers pass bytes of the log only, and the mapping is held. The frontend's accesses are atomic too.
        let at = unsafe { AtomicU8::from_ptr(self.mapping.start().wrapping_add(byte as usize)) };
        // Most pages are written again and again, and a set bit needs no write to a cache line that all workers share.
        if at.load(Ordering::Relaxed) & bits != bits {
            at.fetch_or(bits, Ordering::Relaxed);
        }
    }
}

/// The marking of one vring in a log, with room to read its chains again.
#[derive(Debug)]
pub struct VringLog {
    log: Arc<DirtyLog>,
    used_addr: Option<u64>,
    answers: bool,
    chain: Chain,
    descriptors_left: u32,
    /// The pages of data and status of the answers that were added since the last batch, as far as the caller has told it: the
    /// first `count`. No places, if answers are not marked.
    told: Box<[[u64; 2]]>,
    count: usize,
}

impl VringLog {
    /// Makes the part of a vring. `used_addr`: where the log has the used ring; `None`: writes to it are not marked.
    /// `answers`: what requests write is marked.
    pub fn new(log: Arc<DirtyLog>, used_addr: Option<u64>, answers: bool) -> VringLog {
        VringLog {
            log,
            used_addr,
            answers,
            chain: Chain::new(),
            descriptors_left: 0,
            told: vec![[0; 2]; if answers { TOLD_MAX } else { 0 }].into(),
            count: 0,
        }
    }

    /// Notes what was written for the answer that is added next, so that its chain need not be read again, if it was at most one
    /// page of data.
    #[inline]
    pub(crate) fn tell(&mut self, data: &[Segment], status_addr: u64) {
        let status_page = status_addr / PAGE_BYTES;
        let data_page = match *data {
            [Segment { addr, len }] if addr % PAGE_BYTES + u64::from(len) <= PAGE_BYTES => {
                addr / PAGE_BYTES
            }
            [] => status_page,
            _ => return,
        };
        if let Some(place) = self.told.get_mut(self.count) {
            *place = [data_page, status_page];
            // There is a place, so this cannot wrap.
            self.count = self.count.wrapping_add(1);
        }
    }

    /// Marks what it was told since the last call. Returns true if that was told of so many answers, and so of all in a batch.
    #[inline]
    pub(crate) fn mark_told(&mut self, answers: u16) -> bool {
        let is_all = self.count == usize::from(answers);
        let told = self.told.get(..self.count).unwrap_or_default();
        self.count = 0;
        let mut last_status = u64::MAX;
        for [data, status] in told {
            self.log.mark_page(*data);
            // Drivers keep the status bytes of several requests in one page.
            if last_status != *status {
                last_status = *status;
                self.log.mark_page(last_status);
            }
        }
        is_all
    }

    /// Begins a batch: all that is marked in it has been written.
    pub(crate) fn begin(&mut self) {
        self.descriptors_left = DESCRIPTORS_MAX;
        fence(Ordering::SeqCst);
    }

    /// Marks what the answer to a chain may have written. The chain is read again, because nothing about it is kept while its
    /// request is in flight: every device-writable byte counts, whatever the request was and however it ended.
    ///
    /// A guest that has changed the chain meanwhile harms only its own migration.
    pub(crate) fn answer(&mut self, table: DescriptorTable<'_>, head: u16) {
        if !self.answers || self.descriptors_left == 0 {
            return;
        }
        let fault = walk(table, head, &mut self.chain).err();
        let read = self.chain.descriptors();
        self.descriptors_left = self.descriptors_left.saturating_sub(read);
        if self.descriptors_left == 0 {
            // For the rest of the batch too, which was written before. Not the whole log, which the frontend may have made
            // longer than any memory.
            for (addr, len_bytes) in table.memory().ranges() {
                self.log.mark(addr, len_bytes);
            }
        } else if fault.is_none() && self.chain.shape().is_served() {
            for segment in self.chain.writable() {
                self.log.mark(segment.addr, u64::from(segment.len));
            }
        } else if let Some(addr) = self.chain.status_addr() {
            // It was refused.
            self.log.mark(addr, 1);
        }
    }

    /// Marks a part of the used ring.
    pub(crate) fn used(&self, offset_bytes: usize, len_bytes: usize) {
        if let Some(used_addr) = self.used_addr {
            let addr = used_addr.saturating_add(offset_bytes as u64);
            self.log.mark(addr, len_bytes as u64);
        }
    }
}

#[cfg(test)]
mod tests;
