//! The dirty log: which pages of its guest's memory a device has written while the guest moves to another host (vhost-user
//! "Migration").
//!
//! The frontend shares a file with one bit for each page, clears the bits that it finds set, and copies those pages. So a bit
//! is set after its page was written, with a full fence in between: either we see that the frontend has cleared the bit, and
//! set it again, or the frontend sees what we wrote.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use cleave_blk::Segment;

use crate::mapping::{LostWith, Mapping};
use crate::room::{self, Allowance, Taken};
use crate::walk::{DescriptorTable, walk};
use crate::{Chain, MapError, Memory, RegionSpec};

/// Bytes of a page of the log, whatever the host's pages are.
const PAGE_BYTES: u64 = 4096;
/// Longest log: it has a bit for each page of a guest's memory that would fill the address space.
const LOG_BYTES_MAX: u64 = room::BYTES_MAX / PAGE_BYTES / 8;
/// Pages of a word of the log.
const WORD_PAGES: u64 = 64;
/// Most steps of a [`MarkingBudget`]: a tenth of a millisecond, or some hundred requests of 1 MiB.
const STEPS_MAX: u64 = 1 << 15;

/// Answers of one batch of which it can be told: more than end at once in a lap.
const TOLD_MAX: usize = 64;

/// The work that the marking of answers may still take in this turn of a thread. A step is a descriptor that is read again, or a
/// word of the log. The last answer may exceed it, by as much as a chain can have: 2^16 descriptors and 4 GiB. If answers are left, their
/// links in the in-flight region are followed besides: once, and no more than the ring has entries.
#[derive(Debug)]
pub struct MarkingBudget {
    steps_left: u64,
}

impl MarkingBudget {
    /// Makes the budget of one turn.
    #[inline]
    pub fn of_a_turn() -> MarkingBudget {
        MarkingBudget {
            steps_left: STEPS_MAX,
        }
    }

    /// Makes a budget that no batch uses up.
    #[inline]
    pub(crate) fn unlimited() -> MarkingBudget {
        MarkingBudget {
            steps_left: u64::MAX,
        }
    }

    /// Returns true if nothing is left of it.
    #[inline]
    pub fn is_used_up(&self) -> bool {
        self.steps_left == 0
    }

    fn spend(&mut self, steps: u64) {
        self.steps_left = self.steps_left.saturating_sub(steps);
    }
}

/// A log, mapped: the bit of page `n` is bit `n % 8` of byte `n / 8`.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: Mapping,
    /// At least 1. Need not be a multiple of anything.
    len_bytes: u64,
    /// Bits before the log in the word in which it begins, because it may begin at any byte of its file.
    skew_bits: u64,
}

impl DirtyLog {
    /// Maps `len_bytes` bytes of a file of the frontend.
    pub fn map(file: File, file_offset: u64, len_bytes: u64) -> Result<Arc<DirtyLog>, MapError> {
        Self::map_in(file, file_offset, len_bytes, Allowance::Share)
    }

    /// Does what [`DirtyLog::map`] does, for a log that may have so much room.
    pub fn map_in(
        file: File,
        file_offset: u64,
        len_bytes: u64,
        allowance: Allowance,
    ) -> Result<Arc<DirtyLog>, MapError> {
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
        let mapping = Mapping::new(&spec, Taken::default(), allowance, LostWith::Mapping)?;
        let skew_bytes = mapping.start().addr() as u64 % size_of::<u64>() as u64;
        Ok(Arc::new(DirtyLog {
            mapping,
            len_bytes,
            skew_bits: 8 * skew_bytes,
        }))
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
    /// Returns the number of words that this took.
    #[inline]
    fn mark(&self, addr: u64, len_bytes: u64) -> u64 {
        let first = addr / PAGE_BYTES;
        // Most ranges lie in one page. An empty one wraps to a long one.
        let more_bytes = len_bytes.wrapping_sub(1);
        let last = addr.wrapping_add(more_bytes) / PAGE_BYTES;
        match more_bytes < PAGE_BYTES && first == last {
            true => {
                self.mark_page(first);
                1
            }
            false => self.mark_range(addr, len_bytes),
        }
    }

    /// Sets the bit of a page, if it is in the log.
    #[inline]
    fn mark_page(&self, page: u64) {
        if page / 8 < self.len_bytes {
            let bit = page + self.skew_bits;
            self.set(bit / WORD_PAGES, 1 << (bit % WORD_PAGES));
        }
    }

    /// Does what `mark` does, for any range.
    #[inline(never)]
    fn mark_range(&self, addr: u64, len_bytes: u64) -> u64 {
        let Some(more_bytes) = len_bytes.checked_sub(1) else {
            return 0;
        };
        let first = addr / PAGE_BYTES;
        let last = addr.saturating_add(more_bytes) / PAGE_BYTES;
        let last = last.min(self.len_bytes.saturating_mul(8) - 1);
        if first > last {
            return 0;
        }
        // A page is below 2^52.
        let (first, last) = (first + self.skew_bits, last + self.skew_bits);
        let words = first / WORD_PAGES..=last / WORD_PAGES;
        for word in words.clone() {
            let from = first.saturating_sub(WORD_PAGES * word);
            let to = (last - WORD_PAGES * word).min(WORD_PAGES - 1);
            // Pages 3 to 5 of a word: …1111_1000 and …0011_1111.
            let until = u64::MAX >> (WORD_PAGES - 1 - to);
            self.set(word, (u64::MAX << from) & until);
        }
        words.end() - words.start() + 1
    }

    /// Sets bits of a word of the log. The first and the last word may have bytes that are not the log's; their bits stay.
    #[inline]
    fn set(&self, word: u64, bits: u64) {
        // The log has the order of bytes, not that of the host's words.
        let bits = bits.to_le();
        let start = self
            .mapping
            .start()
            .wrapping_sub((self.skew_bits / 8) as usize);
        let at = start.wrapping_add(size_of::<u64>() * word as usize).cast();
        // SAFETY: the callers pass words with at least one byte of the log, and the mapping, which is held, has whole pages, so
        // each of these words whole. `start` is a multiple of eight. The frontend's accesses are atomic too.
        let at = unsafe { AtomicU64::from_ptr(at) };
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
            told: vec![[0; 2]; if answers { TOLD_MAX } else { 0 }].into(),
            count: 0,
        }
    }

    /// Returns true if what requests write is marked.
    #[inline]
    pub(crate) fn marks_answers(&self) -> bool {
        self.answers
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
    pub(crate) fn begin(&self) {
        fence(Ordering::SeqCst);
    }

    /// Marks what the answer to a chain may have written. The chain is read again, because nothing about it is kept while its
    /// request is in flight: every device-writable byte counts, whatever the request was and however it ended.
    ///
    /// A guest that has changed the chain meanwhile harms only its own migration.
    pub(crate) fn answer(
        &mut self,
        table: DescriptorTable<'_>,
        head: u16,
        budget: &mut MarkingBudget,
    ) {
        let fault = walk(table, head, &mut self.chain).err();
        budget.spend(self.chain.descriptors().into());
        if fault.is_none() && self.chain.shape().is_served() {
            for segment in self.chain.writable() {
                budget.spend(self.log.mark(segment.addr, u64::from(segment.len)));
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
