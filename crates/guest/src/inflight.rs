//! Requests in flight, written down where they outlive this process (vhost-user "Inflight I/O tracking").
//!
//! The region is a memory file that the frontend keeps. It has a part for each vring; the [`Journal`] of a vring notes
//! there each head that is taken and not yet shown as used. A daemon that takes the place of one that died finds in it
//! the requests to do again.
//!
//! Only this process writes to the region while it lives, and the region outlives nothing but the process. So the order of the
//! stores counts as the program has it, and no fence of the processor is needed between them. But any frontend could have
//! written what is found there: every index is checked, and every walk is bounded.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::mapping::{LostWith, Mapping};
use crate::room::{Allowance, Taken};
use crate::{MapError, RegionSpec, racy};

/// Bytes before the entries of a vring's part.
const HEAD_BYTES: u64 = 16;
/// Bytes of an entry.
const ENTRY_BYTES: u64 = 16;
/// Parts begin at multiples of this, as those of libvhost-user, DPDK and SPDK do. The specification leaves it open.
const PART_ALIGN: u64 = 64;
/// The only version there is. 0: nobody has used this part yet.
const VERSION: u16 = 1;

// Offsets in a part. Before them stands a word for features, always 0.
const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const LAST_AT: usize = 12;
const USED_AT: usize = 14;
// Offsets in an entry: whether the request is in flight, the one before it in its batch, and its place in the order in which
// requests were taken.
const IN_FLIGHT_AT: usize = 0;
const BEFORE_AT: usize = 6;
const COUNTER_AT: usize = 8;

/// Place and shape of a region, as both messages about it carry them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InflightLayout {
    /// Length in bytes.
    pub len_bytes: u64,
    /// Offset in the file.
    pub file_offset: u64,
    /// Vrings.
    pub vrings: u16,
    /// Entries of each, as the frontend says. The parts may have room for more.
    pub vring_size: u16,
}

impl InflightLayout {
    /// Describes a region of its own file.
    pub fn new(vrings: u16, vring_size: u16) -> InflightLayout {
        InflightLayout {
            len_bytes: u64::from(vrings) * part_bytes(vring_size),
            file_offset: 0,
            vrings,
            vring_size,
        }
    }

    /// Returns the entries of each part.
    ///
    /// QEMU returns the length of the region that it got and the size of a vring that it asked for, which the guest's
    /// driver may exceed. So a length that fits larger parts exactly means those: 8448 bytes for 4 vrings are parts of 128
    /// entries, and 66560 bytes are parts of 1024, whatever the frontend says.
    fn part_entries(&self) -> u16 {
        let larger = (0..u16::BITS).map(|bit| 1 << bit);
        let mut larger = larger.filter(|entries| *entries >= self.vring_size);
        let fits =
            |entries: &u16| InflightLayout::new(self.vrings, *entries).len_bytes == self.len_bytes;
        larger.find(fits).unwrap_or(self.vring_size)
    }
}

/// Why a region is refused.
#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    /// The region has no room for its vrings.
    #[error("an in-flight region of {found} bytes for {needed}")]
    Short {
        /// Bytes that its vrings need.
        needed: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// No vring has as many entries.
    #[error("an in-flight region for vrings of {0}: not a power of two")]
    Size(u16),
    /// Its words would not be aligned.
    #[error("an in-flight region at offset {0} of its file")]
    Align(u64),
    /// The region cannot be mapped.
    #[error("an in-flight region: {0}")]
    Map(#[from] MapError),
}

/// The region of one device, mapped.
#[derive(Debug, Clone)]
pub struct Inflight {
    mapping: Arc<Mapping>,
    vrings: u16,
    /// Entries of each vring's part.
    part_entries: u16,
}

impl Inflight {
    /// Makes a file for a region that nobody has used yet. The frontend keeps it; sealed, so that nobody can cut it.
    pub fn create(layout: InflightLayout) -> io::Result<File> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create("cleave-inflight", flags)?;
        ftruncate(&fd, layout.file_offset + layout.len_bytes)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(File::from(fd))
    }

    /// Maps the region that a frontend brings.
    pub fn map(file: File, layout: InflightLayout) -> Result<Inflight, InflightError> {
        Self::map_in(file, layout, Allowance::Share)
    }

    /// Does what [`Inflight::map`] does, for a region that may have so much room.
    pub fn map_in(
        file: File,
        layout: InflightLayout,
        allowance: Allowance,
    ) -> Result<Inflight, InflightError> {
        let part_entries = layout.part_entries();
        let needed = InflightLayout::new(layout.vrings, part_entries).len_bytes;
        if !layout.vring_size.is_power_of_two() {
            return Err(InflightError::Size(layout.vring_size));
        }
        if layout.len_bytes < needed || needed == 0 {
            let found = layout.len_bytes;
            return Err(InflightError::Short { needed, found });
        }
        if !layout.file_offset.is_multiple_of(PART_ALIGN) {
            return Err(InflightError::Align(layout.file_offset));
        }
        let spec = RegionSpec {
            guest_addr: 0,
            user_addr: 0,
            len_bytes: needed,
            file_offset: layout.file_offset,
            file,
        };
        let mapping = Mapping::new(&spec, Taken::default(), allowance, LostWith::Mapping)?;
        Ok(Inflight {
            mapping: Arc::new(mapping),
            vrings: layout.vrings,
            part_entries,
        })
    }

    /// Returns the part of a vring; `None`: it has none.
    pub fn journal(&self, vring: u16) -> Option<Journal> {
        let size = self.part_entries;
        (vring < self.vrings).then(|| Journal {
            part: self
                .mapping
                .start()
                .wrapping_add((u64::from(vring) * part_bytes(size)) as usize),
            size,
            mask: size.wrapping_sub(1),
            taken: 0,
            last: 0,
            mapping: self.mapping.clone(),
        })
    }
}

fn part_bytes(vring_size: u16) -> u64 {
    (HEAD_BYTES + ENTRY_BYTES * u64::from(vring_size)).next_multiple_of(PART_ALIGN)
}

/// Contents of a part that cannot be true.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JournalFault {
    /// Another version.
    #[error("version {0}")]
    Version(u16),
    /// For a vring of another size.
    #[error("{found} entries instead of {expected}")]
    Entries {
        /// Entries that it says it has.
        found: u16,
        /// Entries that the frontend says it has.
        expected: u16,
    },
    /// Names an entry that the vring does not have.
    #[error("head {head} of a vring of {size}")]
    Head {
        /// Head found.
        head: u16,
        /// The vring's entries.
        size: u16,
    },
    /// Nothing can come after this request.
    #[error("a counter at its end")]
    Counter,
    /// Its file was cut.
    #[error("its file was cut")]
    Lost,
}

/// Position at which a vring continues.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ResumePosition {
    /// Position of the next chain.
    pub(crate) next_avail: u16,
    /// Requests to do again, the first that was taken last.
    pub(crate) again: Vec<u16>,
}

/// Returns how many used entries the guest was shown since the part of `entries` noted the used index. `None`: more than can be
/// under way at a time, so the part is of another ring.
pub(crate) fn shown_since(noted: u16, used: u16, entries: u16) -> Option<u16> {
    let shown = used.wrapping_sub(noted);
    (shown <= entries).then_some(shown)
}

/// Returns the position of the chain after those that are to be taken again: every chain before it is shown as used or one of
/// these.
pub(crate) fn goes_on_at(used: u16, again: u16) -> u16 {
    used.wrapping_add(again)
}

/// The part of one vring.
#[derive(Debug)]
pub struct Journal {
    part: *mut u8,
    /// Entries: a power of two.
    size: u16,
    /// `size - 1`.
    mask: u16,
    /// Requests taken, as the entries count them.
    taken: u64,
    /// Head of the last request that completed.
    last: u16,
    /// Keeps `part` mapped.
    mapping: Arc<Mapping>,
}

// SAFETY: `part` points into `mapping`, which is Send and Sync and lives as long as the journal.
unsafe impl Send for Journal {}

impl Journal {
    /// Finds out where a vring of `ring_size` entries continues. `used`: the index that its guest has seen. That one counts,
    /// and not the position that the frontend names: after a crash QEMU names the used index, Cloud Hypervisor the
    /// available one. The part has room for the ring ([`has_room_for`](Journal::has_room_for)).
    pub(crate) fn resume(
        &mut self,
        ring_size: u16,
        used: u16,
    ) -> Result<ResumePosition, JournalFault> {
        let resumed = match self.word(VERSION_AT) {
            0 => self.begin(used),
            VERSION => self.recover(ring_size, used)?,
            version => return Err(JournalFault::Version(version)),
        };
        match self.mapping.is_lost() {
            true => Err(JournalFault::Lost),
            false => Ok(resumed),
        }
    }

    /// Entries of the part.
    pub fn entries(&self) -> u16 {
        self.size
    }

    /// Returns true if the requests of a vring of that size can be written down here.
    pub fn has_room_for(&self, ring_size: u16) -> bool {
        ring_size <= self.size
    }

    /// Returns true if requests are noted here, most likely in flight: the guest may have seen some of them as used.
    pub fn has_requests(&self) -> bool {
        self.word(VERSION_AT) != 0 && (0..self.size).any(|head| self.is_in_flight(head))
    }

    /// Marks the part as that of a vring which it has no room for. Returns true if the mark is there already: a daemon that
    /// served the vring has died, and nobody knows which requests it had taken.
    ///
    /// The list of a smaller vring that may be in the part is void from now on. The mark is a size in a part that counts as
    /// unused otherwise, so that a smaller vring which comes later begins with an empty list.
    pub(crate) fn mark(&mut self, ring_size: u16) -> bool {
        let is_marked = self.word(VERSION_AT) == 0 && self.word(ENTRIES_AT) == ring_size;
        self.set_word(VERSION_AT, 0);
        compiler_fence(Ordering::SeqCst);
        self.set_word(ENTRIES_AT, ring_size);
        compiler_fence(Ordering::SeqCst);
        is_marked
    }

    /// Removes the mark: every request that was taken is answered.
    pub(crate) fn unmark(&mut self) {
        self.set_word(ENTRIES_AT, 0);
    }

    /// Begins a part that nobody has used, or that is of another ring.
    fn begin(&mut self, used: u16) -> ResumePosition {
        self.set_word(VERSION_AT, 0);
        for head in 0..self.size {
            self.set_in_flight(head, false);
            self.set_counter(head, 0);
        }
        self.set_word(ENTRIES_AT, self.size);
        self.set_word(LAST_AT, 0);
        self.set_word(USED_AT, used);
        // Last: only then is the rest true.
        self.set_word(VERSION_AT, VERSION);
        (self.taken, self.last) = (0, 0);
        ResumePosition {
            next_avail: used,
            again: Vec::new(),
        }
    }

    fn recover(&mut self, ring_size: u16, used: u16) -> Result<ResumePosition, JournalFault> {
        let found = self.word(ENTRIES_AT);
        if found != self.size {
            let expected = self.size;
            return Err(JournalFault::Entries { found, expected });
        }
        let check = |head: u16| match head < ring_size {
            true => Ok(head),
            false => Err(JournalFault::Head {
                head,
                size: ring_size,
            }),
        };
        // The guest has seen these as used. Their daemon died before it could note that.
        let Some(shown) = shown_since(self.word(USED_AT), used, self.size) else {
            return Ok(self.begin(used));
        };
        let mut head = self.word(LAST_AT);
        for _ in 0..shown {
            self.set_in_flight(check(head)?, false);
            head = self.before(head);
        }
        self.set_word(USED_AT, used);
        let mut again = Vec::new();
        let mut taken = 0;
        for head in 0..self.size {
            let counter = self.counter(head);
            if self.is_in_flight(head) {
                again.push((counter, check(head)?));
            }
            taken = taken.max(counter);
        }
        again.sort_unstable_by(|a, b| b.cmp(a));
        self.taken = taken.checked_add(1).ok_or(JournalFault::Counter)?;
        self.last = self.word(LAST_AT);
        Ok(ResumePosition {
            // No more than the ring's entries, which are a u16.
            next_avail: goes_on_at(used, again.len() as u16),
            again: again.into_iter().map(|(_, head)| head).collect(),
        })
    }

    /// Notes that a chain is taken. The counter first: a restart that finds it in flight must find its own.
    #[inline]
    pub(crate) fn take(&mut self, head: u16) {
        self.set_counter(head, self.taken);
        self.taken = self.taken.wrapping_add(1);
        compiler_fence(Ordering::SeqCst);
        self.set_in_flight(head, true);
    }

    /// Notes that the chain that was taken last is given back. A daemon that dies before this leaves it as in flight, and the
    /// next one does it first, which is its turn. If it is the head of one of the `added` requests that completed last, which the guest
    /// was not shown, that one stays in flight: a page that is not there has named its head.
    pub(crate) fn untake(&mut self, head: u16, added: u16) {
        self.taken = self.taken.wrapping_sub(1);
        let mut ended = self.last;
        for _ in 0..added {
            if ended == head {
                return;
            }
            ended = self.before(ended);
        }
        self.set_in_flight(head, false);
    }

    /// Notes that a request has completed; the guest does not see that yet.
    #[inline]
    pub(crate) fn end(&mut self, head: u16) {
        let at = self.entry(head).wrapping_add(BEFORE_AT);
        // SAFETY: a word of an entry, even, in the mapping that is held.
        unsafe { racy::write_u16(at, self.last) };
        self.last = head;
    }

    /// Takes back the `rest` requests that completed last, so that the guest can be shown those before them. Returns what
    /// [`add_again`](Journal::add_again) needs.
    pub(crate) fn hold_back(&mut self, rest: u16) -> u16 {
        let last = self.last;
        for _ in 0..rest {
            self.last = self.before(self.last);
        }
        last
    }

    /// Adds the requests again that were held back.
    pub(crate) fn add_again(&mut self, last: u16) {
        self.last = last;
    }

    /// Notes that the guest is about to see the requests that have completed. A daemon that dies afterwards leaves a list of them
    /// that starts here.
    #[inline]
    pub(crate) fn show(&mut self) {
        compiler_fence(Ordering::SeqCst);
        self.set_word(LAST_AT, self.last);
        compiler_fence(Ordering::SeqCst);
    }

    /// Notes that the guest sees the `count` requests that completed last; `used` is the index that it sees.
    ///
    /// They are found by the links of the region rather than by a copy of ours. A frontend that spoils those makes a wrong
    /// entry, in its own region, look finished. A guest that offers a head again before it has seen it used makes a link
    /// to itself: the entries after it stay, and the next daemon repeats those requests of that guest.
    #[inline]
    pub(crate) fn shown(&mut self, count: u16, used: u16) {
        compiler_fence(Ordering::SeqCst);
        let mut head = self.last;
        for _ in 0..count {
            self.set_in_flight(head, false);
            head = self.before(head);
        }
        compiler_fence(Ordering::SeqCst);
        self.set_word(USED_AT, used);
    }

    #[inline]
    fn word(&self, at: usize) -> u16 {
        // SAFETY: a word of the part's head, even, in the mapping that is held.
        unsafe { racy::read_u16(self.part.wrapping_add(at)) }
    }

    #[inline]
    fn set_word(&self, at: usize, value: u16) {
        // SAFETY: a word of the part's head, even, in the mapping that is held.
        unsafe { racy::write_u16(self.part.wrapping_add(at), value) };
    }

    /// Returns the entry of a head. One beyond the table, which no caller has, is taken for one of it.
    #[inline]
    fn entry(&self, head: u16) -> *mut u8 {
        // At most 2^15 entries of 16 bytes.
        let offset_bytes = u32::from(head & self.mask) * ENTRY_BYTES as u32;
        self.part
            .wrapping_add(HEAD_BYTES as usize + offset_bytes as usize)
    }

    fn is_in_flight(&self, head: u16) -> bool {
        // SAFETY: a byte of an entry, in the mapping that is held.
        unsafe { racy::read_u8(self.entry(head).wrapping_add(IN_FLIGHT_AT)) != 0 }
    }

    #[inline]
    fn set_in_flight(&self, head: u16, is: bool) {
        // SAFETY: a byte of an entry, in the mapping that is held.
        unsafe { racy::write_u8(self.entry(head).wrapping_add(IN_FLIGHT_AT), u8::from(is)) };
    }

    fn before(&self, head: u16) -> u16 {
        // SAFETY: a word of an entry, even, in the mapping that is held.
        unsafe { racy::read_u16(self.entry(head).wrapping_add(BEFORE_AT)) }
    }

    fn counter(&self, head: u16) -> u64 {
        // SAFETY: a word of an entry, a multiple of eight, in the mapping that is held.
        unsafe { racy::read_u64(self.entry(head).wrapping_add(COUNTER_AT)) }
    }

    #[inline]
    fn set_counter(&self, head: u16, value: u64) {
        // SAFETY: a word of an entry, a multiple of eight, in the mapping that is held.
        unsafe { racy::write_u64(self.entry(head).wrapping_add(COUNTER_AT), value) };
    }
}

#[cfg(test)]
mod tests;
