//! The split virtqueue, device side (virtio 1.3 §2.7).

mod log;

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use cleave_blk::spec::feature;

use crate::descriptor::DESCRIPTOR_BYTES;
use crate::dirty::{MarkingBudget, VringLog};
use crate::inflight::{Journal, JournalFault};
use crate::positions::Positions;
use crate::signals::{RingWords, VringSignals};
use crate::walk::{DescriptorTable, walk};
use crate::{Chain, ChainFault, Epoch, Memory, racy};

/// Location of a vring, in guest-physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringLayout {
    /// Entries: a power of two, at most 32768.
    pub size: u16,
    /// Descriptor table, 16-byte aligned.
    pub desc_addr: u64,
    /// Available ring, 2-byte aligned.
    pub avail_addr: u64,
    /// Used ring, 4-byte aligned.
    pub used_addr: u64,
}

impl VringLayout {
    /// Checks that a vring at this location can be served in this memory.
    pub fn check(self, memory: &Memory) -> Result<(), VringError> {
        Parts::find(memory, self).map(drop)
    }

    /// Address and length of descriptor table, available ring and used ring. The event fields after the
    /// rings are included even if EVENT_IDX was not negotiated (virtio 1.3 §2.7).
    fn parts(self) -> [(u64, u64); 3] {
        let size = u64::from(self.size);
        [
            (self.desc_addr, DESCRIPTOR_BYTES * size),
            (self.avail_addr, 6 + 2 * size),
            (self.used_addr, 6 + USED_ENTRY_BYTES as u64 * size),
        ]
    }
}

/// Why a vring cannot be set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VringError {
    /// Not a power of two, zero, or too large.
    #[error("vring size {0} is not a power of two up to 32768")]
    Size(u16),
    /// A part is misaligned in the guest, or on the host because of the region's offset in its file.
    #[error("vring part at {0:#x} is misaligned")]
    Align(u64),
    /// A part does not lie wholly inside one region.
    #[error("vring part at {0:#x} is not mapped")]
    Unmapped(u64),
}

/// The guest broke its vring, which must be retired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VringFault {
    /// The available index is too far ahead: more chains than entries would be outstanding.
    #[error("available index {found} at entry {next} means more than {size} chains outstanding")]
    AvailIndex {
        /// The index that was found.
        found: u16,
        /// Index of the next entry.
        next: u16,
        /// The number of entries.
        size: u16,
    },
    /// A head outside the descriptor table.
    #[error("head {head} in a table of {size}")]
    Head {
        /// The head that was found.
        head: u16,
        /// The number of entries.
        size: u16,
    },
    /// The journal of its requests in flight is invalid, so it is unknown which of them to repeat.
    #[error("its part of the in-flight region: {0}")]
    Journal(JournalFault),
}

/// A chain's head, and the fault of its descriptors if they have one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TakenChain {
    /// The descriptor index that `push_used` returns to the guest.
    pub head: u16,
    /// Set if the chain cannot be served. `Chain` then knows its status byte (`Order`, `TooMany`) or is
    /// empty. Its segments must not be used.
    pub fault: Option<ChainFault>,
}

/// Largest vring (virtio 1.3 §2.7).
const SIZE_MAX: u16 = 32768;
/// Offset of `idx` in both rings, after `flags`.
const INDEX_OFFSET: usize = 2;
/// Offset of the entries in both rings.
const ENTRIES_OFFSET: usize = 4;
/// Bytes of a used entry.
const USED_ENTRY_BYTES: usize = 8;
/// Prefetch distance of descriptors, in entries: a cache line from another core arrives while two chains are
/// parsed, and is not evicted before.
const PREFETCH_ENTRIES: u16 = 3;
/// Prefetch distance of a chain's first bytes, in entries.
const HEADERS_AHEAD: u16 = 1;

/// Returns the offset of an entry of the used ring. After the last one is the event field.
fn used_entry_offset(entry: u16) -> usize {
    ENTRIES_OFFSET + USED_ENTRY_BYTES * usize::from(entry)
}

/// The three parts of a vring on the host.
#[derive(Debug, Clone, Copy)]
struct Parts {
    desc: *mut u8,
    avail: *mut u8,
    used: *mut u8,
    /// The number of entries.
    size: u16,
}

impl Parts {
    /// Finds the parts of a layout in memory.
    fn find(memory: &Memory, layout: VringLayout) -> Result<Parts, VringError> {
        if !layout.size.is_power_of_two() || layout.size > SIZE_MAX {
            return Err(VringError::Size(layout.size));
        }
        let [desc, avail, used] = layout.parts();
        let part = |(addr, len_bytes): (u64, u64), align: u64| {
            if !addr.is_multiple_of(align) {
                return Err(VringError::Align(addr));
            }
            let host = memory.host_range(addr, len_bytes);
            let host = host.ok_or(VringError::Unmapped(addr))?;
            // Atomics need the alignment on the host too; a region may begin anywhere in a page.
            if !(host as u64).is_multiple_of(align) {
                return Err(VringError::Align(addr));
            }
            Ok(host)
        };
        Ok(Parts {
            desc: part(desc, 16)?,
            avail: part(avail, 2)?,
            used: part(used, 4)?,
            size: layout.size,
        })
    }
}

impl Parts {
    /// Prefetches the descriptor of an entry of the available ring (below the ring's size).
    #[inline]
    fn prefetch_at(&self, entry: u16) {
        racy::prefetch(self.descriptor_at(entry));
    }

    /// Prefetches the memory to which the first descriptor of an entry points: a table of descriptors, or the
    /// header, which the driver has just written and beside which drivers keep the status byte. It is only a
    /// hint, so the guest may change the descriptor meanwhile.
    #[inline]
    fn look_ahead(&self, memory: &Memory, entry: u16) {
        // SAFETY: an entry of the table, which lies wholly in memory that the caller's place keeps mapped.
        let first = unsafe { racy::descriptor(self.descriptor_at(entry)) };
        if let Some(host) = memory.host_range(first.addr, 16) {
            racy::prefetch_to_write(host);
        }
    }

    /// Returns the descriptor to which an entry of the available ring points. The head is masked so that it lies in the table;
    /// `take` detects one that does not.
    #[inline]
    fn descriptor_at(&self, entry: u16) -> *mut u8 {
        let head = self.head_at(entry) & (self.size - 1);
        self.desc
            .wrapping_add(usize::from(head) * DESCRIPTOR_BYTES as usize)
    }

    /// Returns the descriptor table. Requests of the vring may have been taken in another memory table, `memory`.
    #[inline]
    fn table<'a>(&'a self, memory: &'a Memory) -> DescriptorTable<'a> {
        // SAFETY: the table lies wholly in memory that the caller's place keeps mapped.
        unsafe { DescriptorTable::direct(memory, self.desc, self.size) }
    }

    /// Returns the head in an entry (below the ring's size) of the used ring, masked, because the guest may have overwritten it.
    fn used_head_at(&self, entry: u16) -> u16 {
        // SAFETY: an entry of the ring, which lies wholly in memory that the caller's place keeps mapped; entries are as aligned
        // as the ring. The head is little-endian and below 2^16.
        let head = unsafe { racy::read_u16(self.used.add(used_entry_offset(entry))) };
        head & (self.size - 1)
    }

    /// Returns the used index that the guest sees.
    fn used_index(&self) -> u16 {
        // SAFETY: inside the used ring, which lies wholly in memory that the caller's place keeps mapped; even.
        unsafe { racy::load_index(self.used.add(INDEX_OFFSET)) }
    }

    /// Returns the head in an entry (below the ring's size) of the available ring.
    #[inline]
    fn head_at(&self, entry: u16) -> u16 {
        let offset_bytes = ENTRIES_OFFSET + 2 * usize::from(entry);
        // SAFETY: an entry of the ring, which lies wholly in memory that the caller's place keeps mapped. It
        // was written before the available index that we loaded with Acquire.
        unsafe { racy::read_u16(self.avail.add(offset_bytes)) }
    }
}

impl RingWords for Parts {
    #[inline]
    fn avail_index(&self) -> u16 {
        // SAFETY: inside the available ring, which `find` checked and the caller's place keeps mapped; even.
        unsafe { racy::load_index(self.avail.add(INDEX_OFFSET)) }
    }

    #[inline]
    fn avail_flags(&self) -> u16 {
        // SAFETY: the first field of the available ring, as above.
        unsafe { racy::read_u16(self.avail) }
    }

    #[inline]
    fn used_event(&self) -> u16 {
        let offset_bytes = ENTRIES_OFFSET + 2 * usize::from(self.size);
        // SAFETY: the last field of the available ring, as above.
        unsafe { racy::read_u16(self.avail.add(offset_bytes)) }
    }

    #[inline]
    fn set_used_index(&self, index: u16) {
        // SAFETY: inside the used ring, which `find` checked and the caller's place keeps mapped; even.
        // Release: the guest must see the entries, status bytes and data before it sees the new index.
        unsafe { racy::store_index(self.used.add(INDEX_OFFSET), index) };
    }

    #[inline]
    fn set_used_flags(&self, flags: u16) {
        // SAFETY: the first field of the used ring, as above.
        unsafe { racy::write_u16(self.used, flags) };
    }

    #[inline]
    fn set_avail_event(&self, position: u16) {
        let offset_bytes = used_entry_offset(self.size);
        // SAFETY: the last field of the used ring, as above.
        unsafe { racy::write_u16(self.used.add(offset_bytes), position) };
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// All vrings of which kicks are wanted have been asked: one full fence between [`Vring::ask`] and
/// [`Vring::has_come`], however many there are.
#[derive(Debug)]
pub struct Asked(());

impl Asked {
    /// Makes the fence.
    #[inline]
    pub fn all() -> Asked {
        fence(Ordering::SeqCst);
        Asked(())
    }
}

/// The parts of a vring, and the epoch that keeps them mapped.
#[derive(Debug)]
struct RingPlace {
    epoch: Epoch,
    parts: Parts,
}

/// Device side of one split vring. Call `take` until it returns `None`; `push_used` for each completed chain;
/// `publish` once for all of them; and `arm` before sleeping. If `arm` returns `true`, continue instead of sleeping.
///
/// A vring starts armed. Entries that were available before its start come without a kick, so check once.
#[derive(Debug)]
pub struct Vring {
    /// Its location in memory, which it keeps mapped. `None`: detached.
    place: Option<RingPlace>,
    layout: VringLayout,
    signals: VringSignals,
    positions: Positions,
    /// True if a chain has been available since the start, so that the used positions are those of the ring.
    has_begun: bool,
    /// The record of the requests in flight.
    journal: Option<Journal>,
    /// Set while the guest moves to another host.
    log: Option<Box<VringLog>>,
    /// While there is a log: the added answers to requests that were taken in another memory table, by their used index, and that
    /// table. They are marked when they are published.
    earlier: VecDeque<(u16, Epoch)>,
    /// The part of the in-flight region that is too small for such a record, and is marked as such.
    marked: Option<Journal>,
    /// Requests that a dead daemon had taken, to be taken before any other; the first of them is last.
    again: Vec<u16>,
    /// The last of those that was taken, until the next one is taken from anywhere.
    retaken: Option<u16>,
    /// True if `take` returns only those requests.
    drains: bool,
    /// Why the vring cannot be served.
    fault: Option<VringFault>,
    /// True if at least one of the last four fields is set.
    is_special: bool,
}

impl Vring {
    /// Binds a layout to memory, starting at available position `base`. Only EVENT_IDX of `features` matters:
    /// indirect descriptors are served even if they were not negotiated, because Windows uses them anyway.
    ///
    /// The used position is read from the used ring when the first chain is available, because a driver may
    /// initialise the ring after the frontend starts it. The guest expects the next used entry there, whichever
    /// device served the vring before: the position equals `base` after an orderly stop, and is 0 after a reset for
    /// which the driver zeroed the ring. If a guest leaves another value, it gets its entries there.
    pub fn new(
        memory: impl Into<Epoch>,
        layout: VringLayout,
        features: u64,
        base: u16,
    ) -> Result<Vring, VringError> {
        let epoch = memory.into();
        let parts = Parts::find(&epoch, layout)?;
        let event_idx = features & feature::EVENT_IDX != 0;
        Ok(Vring {
            place: Some(RingPlace { epoch, parts }),
            layout,
            signals: VringSignals::new(&parts, event_idx, base),
            positions: Positions::new(layout.size, base),
            has_begun: false,
            journal: None,
            log: None,
            earlier: VecDeque::new(),
            marked: None,
            again: Vec::new(),
            retaken: None,
            drains: false,
            fault: None,
            is_special: false,
        })
    }

    /// Records the requests in flight from now on, and continues at the position that the journal and the
    /// used ring give, whatever `base` was. Requests that a dead daemon had taken are taken again, in their
    /// order. Call this before the first chain is taken. The first `take` reports a fault of the journal.
    ///
    /// A journal without room for the vring records nothing but that it is served. Returns how many requests are lost: if a
    /// daemon died that served it like that, those that wait for an answer may or may not have been done, and may
    /// stand in the available ring after heads that are free again. None of them is taken. Otherwise `base` counts.
    pub fn keep(&mut self, mut journal: Journal) -> u16 {
        let Some(RingPlace { parts, .. }) = &self.place else {
            return 0;
        };
        let used = parts.used_index();
        if !journal.has_room_for(self.layout.size) {
            let was_served = journal.mark(self.layout.size);
            self.marked = Some(journal);
            if !was_served {
                return 0;
            }
            let next = parts.avail_index();
            self.positions.resume(next, used, 0);
            self.has_begun = true;
            self.signals.restart(parts, next);
            return next.wrapping_sub(used);
        }
        match journal.resume(self.layout.size, used) {
            Ok(resumed) => {
                // At most the ring's entries, which are a u16.
                let again = resumed.again.len() as u16;
                self.positions.resume(resumed.next_avail, used, again);
                self.has_begun = true;
                self.signals.restart(parts, resumed.next_avail);
                self.again = resumed.again;
                self.journal = Some(journal);
            }
            Err(fault) => self.fault = Some(VringFault::Journal(fault)),
        }
        self.is_special = self.fault.is_some() || !self.again.is_empty();
        0
    }

    /// Returns true if the requests in flight are recorded.
    pub fn is_kept(&self) -> bool {
        self.journal.is_some()
    }

    /// Returns the entries of the journal if they are too few to record anything.
    pub fn unrecorded(&self) -> Option<u16> {
        self.marked.as_ref().map(Journal::entries)
    }

    /// Notes that every request that was taken is answered and no more will be, so that a journal without room has nothing to
    /// report to the next daemon.
    pub fn end(&mut self) {
        if let Some(marked) = &mut self.marked {
            marked.unmark();
        }
    }

    /// Makes `take` return only the requests of a dead daemon from now on; they count as in flight.
    pub fn take_no_more(&mut self) {
        self.positions.forget_seen();
        (self.drains, self.is_special) = (true, true);
    }

    /// Returns the number of a dead daemon's requests that have not been taken again yet.
    pub fn again(&self) -> usize {
        self.again.len()
    }

    /// Checks that a table covers this ring, with the same memory or with other.
    pub fn fits(&self, epoch: &Epoch) -> Result<(), VringError> {
        self.layout.check(epoch)
    }

    /// Moves the vring to another memory table; positions stay. After an error it is unchanged. A vring that
    /// was detached is armed again, because the announcements in memory may be stale.
    pub fn attach(&mut self, epoch: &Epoch) -> Result<(), VringError> {
        let parts = Parts::find(epoch, self.layout)?;
        if self.place.is_none() {
            self.signals.restart(&parts, self.positions.next_avail());
            self.log_fields();
        }
        self.note_unmarked();
        let epoch = epoch.clone();
        self.place = Some(RingPlace { epoch, parts });
        Ok(())
    }

    /// Releases the memory: until the vring is attached again, nothing is taken, added or published. Entries
    /// that were added but not published are lost.
    pub fn detach(&mut self) {
        self.place = None;
        if let Some(log) = &mut self.log {
            log.begin();
            log.mark_told(0);
        }
        self.earlier.clear();
        // The ring may be different when it is attached again.
        self.positions.forget_seen();
        self.positions.forget_added();
    }

    /// Returns true if it does not hold memory.
    pub fn is_detached(&self) -> bool {
        self.place.is_none()
    }

    /// Returns true if the memory that it holds is lost: then it shows no answer any more.
    pub fn is_lost(&self) -> bool {
        let place = self.place.as_ref();
        place.is_some_and(|place| place.epoch.is_lost())
    }

    /// Returns true if another table maps this very ring: the same bytes of the same files, mapped again or shared. If so, the
    /// vring can move there at any time.
    pub fn is_in(&self, epoch: &Epoch) -> bool {
        let Some(RingPlace { epoch: here, .. }) = &self.place else {
            return false;
        };
        here == epoch
            || self
                .layout
                .parts()
                .into_iter()
                .all(|(addr, len_bytes)| here.has_same_bytes(epoch, addr, len_bytes))
    }

    /// Returns the available index at the last check, and how many of the chains seen then have not been taken. A changed index
    /// means that there were new chains; the next check happens when none are left.
    #[inline]
    pub fn seen(&self) -> (u16, u16) {
        let again = match self.is_special {
            true => self.again.len() as u16,
            false => 0,
        };
        let left = self.positions.left() + again;
        (self.positions.seen_avail(), left)
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u16 {
        self.layout.size
    }

    /// Returns true if the available index, read now, shows nothing to take.
    pub fn is_empty(&self) -> bool {
        let index = self.place.as_ref().map(|place| place.parts.avail_index());
        index == Some(self.positions.next_avail())
    }

    /// Copies the next available chain into `chain`; `None`: there is none. Reads the shared index only when
    /// all chains seen before have been taken (one cache line per batch).
    ///
    /// A `ChainFault` never loses the head: `TakenChain` has it. A `VringFault` leaves the positions unchanged,
    /// and the next call returns it again.
    #[inline]
    pub fn take(&mut self, chain: &mut Chain) -> Result<Option<TakenChain>, VringFault> {
        if self.positions.left() == 0 {
            if self.is_special {
                return self.take_special(chain);
            }
            if !self.look()? {
                return Ok(None);
            }
        }
        let Some(RingPlace { epoch, parts }) = &self.place else {
            return Ok(None);
        };
        let head = parts.head_at(self.positions.entry(0));
        let size = self.layout.size;
        if head >= size {
            return Err(VringFault::Head { head, size });
        }
        self.positions.take();
        if let Some(journal) = &mut self.journal {
            journal.take(head);
        }
        let available = self.positions.left();
        if HEADERS_AHEAD <= available {
            parts.look_ahead(epoch, self.positions.entry(HEADERS_AHEAD - 1));
        }
        if PREFETCH_ENTRIES <= available {
            parts.prefetch_at(self.positions.entry(PREFETCH_ENTRIES - 1));
        }
        let fault = walk(parts.table(epoch), head, chain).err();
        Ok(Some(TakenChain { head, fault }))
    }

    /// Gives back the chain of this head, to be taken and read again later. It must be the one that [`take`](Vring::take)
    /// returned last, and nothing may have been done with it.
    #[cold]
    pub fn untake(&mut self, head: u16) {
        if self.retaken.take().is_some() {
            // It is in flight already, and was not taken from the ring.
            return self.again.push(head);
        }
        if let Some(journal) = &mut self.journal {
            journal.untake(head, self.positions.added());
        }
        self.positions.untake();
    }

    /// Gives up the chain of this head, which [`take`](Vring::take) returned last and with which nothing was done, and takes no
    /// more, because memory is lost. In a page that is not there every entry of the ring names head 0, which the guest may not have
    /// offered: the next connection would do what lies in its descriptors. So such a head is given back, while those of a dead daemon
    /// stay in flight.
    #[cold]
    pub fn leave(&mut self, head: u16) {
        self.untake(head);
        self.leave_all();
    }

    /// Takes no more, neither from the ring nor of a dead daemon's requests. Those stay in flight for the next connection.
    #[cold]
    fn leave_all(&mut self) {
        self.again.clear();
        self.take_no_more();
    }

    /// Takes a chain as `take` does, for a vring that has a fault, is draining, or has requests to take again.
    #[cold]
    fn take_special(&mut self, chain: &mut Chain) -> Result<Option<TakenChain>, VringFault> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        if self.place.is_none() {
            return Ok(None);
        }
        self.retaken = self.again.pop();
        if let Some(head) = self.retaken {
            return self.retake(head, chain).map(Some);
        }
        self.is_special = self.drains;
        match self.drains {
            true => Ok(None),
            false => self.take(chain),
        }
    }

    /// Copies the chain of a head that was taken and not returned once more. The guest may have changed the
    /// chain, so it is checked again. Positions stay. The vring must be attached.
    #[cold]
    pub fn retake(&mut self, head: u16, chain: &mut Chain) -> Result<TakenChain, VringFault> {
        let size = self.layout.size;
        let Some(RingPlace { epoch, parts }) = self.place.as_ref().filter(|_| head < size) else {
            return Err(VringFault::Head { head, size });
        };
        let fault = walk(parts.table(epoch), head, chain).err();
        Ok(TakenChain { head, fault })
    }

    /// Reads the shared available index. Returns whether there is a chain to take.
    fn look(&mut self) -> Result<bool, VringFault> {
        let Some(RingPlace { parts, .. }) = &self.place else {
            return Ok(false);
        };
        let found = parts.avail_index();
        let Some(fresh) = self.positions.look(found) else {
            return Err(VringFault::AvailIndex {
                found,
                next: self.positions.next_avail(),
                size: self.layout.size,
            });
        };
        if fresh > 0 && !self.has_begun {
            self.has_begun = true;
            self.positions.begin(parts.used_index());
        }
        for ahead in 0..PREFETCH_ENTRIES.min(fresh) {
            parts.prefetch_at(self.positions.entry(ahead));
        }
        Ok(fresh > 0)
    }

    /// Adds a used entry. The guest sees it after `publish`.
    #[inline]
    pub fn push_used(&mut self, head: u16, used_bytes: u32) {
        let Some(RingPlace { parts, .. }) = &self.place else {
            return;
        };
        if let Some(journal) = &mut self.journal {
            journal.end(head);
        }
        let offset_bytes = used_entry_offset(self.positions.push_used());
        // SAFETY: masked to an entry of the ring, which lies wholly in memory that the epoch keeps
        // mapped; entries are as aligned as the ring.
        unsafe {
            let at = parts.used.add(offset_bytes);
            racy::write_u32(at, u32::from(head));
            racy::write_u32(at.add(4), used_bytes);
        }
    }

    /// Stores the used index once for all added entries. Returns whether the guest wants a call for them;
    /// `false` if none was added.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.publish_within(&mut MarkingBudget::unlimited())
    }

    /// Does what [`Vring::publish`] does, but while the guest moves only for as many entries as the budget allows to mark. The
    /// others stay [`added`](Vring::added), and the guest does not see them yet.
    #[inline]
    pub fn publish_within(&mut self, budget: &mut MarkingBudget) -> bool {
        let place = self.place.as_ref();
        if place.is_some_and(|place| place.epoch.is_lost()) {
            // The guest may have other pages than those that were written.
            self.leave_all();
            return false;
        }
        match self.log {
            None => self.show(),
            Some(_) => self.log_and_show(budget),
        }
    }

    /// Returns the number of entries that were added and not published.
    pub fn added(&self) -> u16 {
        self.positions.added()
    }

    /// Returns the used index of the entry that is added next.
    pub fn next_used(&self) -> u16 {
        self.positions.next_used()
    }

    #[inline]
    fn show(&mut self) -> bool {
        let Some(RingPlace { epoch, parts }) = &self.place else {
            return false;
        };
        let Some((old, new)) = self.positions.publish() else {
            return false;
        };
        let Some(journal) = &mut self.journal else {
            return self.signals.publish(parts, old, new);
        };
        journal.show();
        let call = self.signals.publish(parts, old, new);
        if epoch.is_lost() {
            // The index may be in the page that is. The guest has seen nothing then.
            self.leave_all();
            return false;
        }
        journal.shown(new.wrapping_sub(old), new);
        call
    }

    /// Asks the guest for a kick when it makes the next chain available. It may have done so before it could see that:
    /// [`Vring::has_come`].
    #[inline]
    pub fn ask(&mut self) {
        if let Some(RingPlace { parts, .. }) = &self.place {
            self.signals.ask(parts, self.positions.next_avail());
        }
        self.log_fields();
    }

    /// Returns true if there is work that needs no kick, so take it; else the guest kicks for the next. [`Vring::ask`] comes
    /// before.
    #[inline]
    pub fn has_come(&self, _: &Asked) -> bool {
        let Some(RingPlace { parts, .. }) = &self.place else {
            return false;
        };
        self.positions.left() != 0
            || self.is_special && !self.again.is_empty()
            || VringSignals::has_come(parts, self.positions.next_avail())
    }

    /// Does what [`Vring::ask`] and [`Vring::has_come`] do, for a vring by itself.
    #[inline]
    pub fn arm(&mut self) -> bool {
        self.ask();
        self.has_come(&Asked::all())
    }

    /// Tells the guest that kicks are not needed (a hint).
    #[inline]
    pub fn disarm(&mut self) {
        if let Some(RingPlace { parts, .. }) = &self.place {
            self.signals.disarm(parts, self.positions.next_avail());
        }
        self.log_fields();
    }

    /// Returns the position of the next available entry: the answer to GET_VRING_BASE.
    pub fn base(&self) -> u16 {
        self.positions.next_avail()
    }
}

#[cfg(test)]
mod tests;
