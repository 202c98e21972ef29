//! The driver side of one split virtqueue (virtio 1.3 §2.7), written from the specification.
//!
//! There are two ways to use it. Managed: [`DriverRing::add`] builds a chain from free descriptors, then `publish`
//! and `reap`. By hand: `write_descriptor` and `push` store anything anywhere, for hostile tests and for loops that
//! reuse their chains.
//!
//! Unsafe: pointers into [`GuestMemory`], kept alive by the `Arc` beside them. All words shared with the
//! daemon are accessed by atomics or volatile stores; no reference to them is made.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use crate::{Error, GuestMemory};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const NO_INTERRUPT: u16 = 1;
const NO_NOTIFY: u16 = 1;

/// One entry of a descriptor table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Descriptor {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// NEXT 1, WRITE 2, INDIRECT 4.
    pub flags: u16,
    /// Index of the next descriptor.
    pub next: u16,
}

impl Descriptor {
    /// Returns the bytes that are stored in memory.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[0..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..16].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// A range of guest memory and its direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Written by the device.
    pub writable: bool,
}

impl Buffer {
    /// Returns a range that the device reads.
    pub fn readable(addr: u64, len: u32) -> Buffer {
        Buffer {
            addr,
            len,
            writable: false,
        }
    }

    /// Returns a range that the device writes.
    pub fn writable(addr: u64, len: u32) -> Buffer {
        Buffer {
            addr,
            len,
            writable: true,
        }
    }

    fn flags(self) -> u16 {
        if self.writable { WRITE } else { 0 }
    }
}

/// Addresses of the parts of a ring in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingLayout {
    /// Entries.
    pub size: u16,
    /// Descriptor table.
    pub desc: u64,
    /// Available ring.
    pub avail: u64,
    /// Used ring.
    pub used: u64,
}

impl RingLayout {
    /// Allocates a layout in one piece of a memory region.
    pub fn alloc(memory: &GuestMemory, region: usize, size: u16) -> Result<RingLayout, Error> {
        let entries = u64::from(size);
        let desc = memory.alloc_in(region, 16 * entries, 4096)?;
        let avail = memory.alloc_in(region, 6 + 2 * entries, 64)?;
        let used = memory.alloc_in(region, 6 + 8 * entries, 4096)?;
        Ok(RingLayout {
            size,
            desc,
            avail,
            used,
        })
    }
}

/// An entry of the used ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Used {
    /// First descriptor of the chain.
    pub head: u32,
    /// Bytes that the device reports as written.
    pub len: u32,
}

/// The driver side of one vring. Order of calls: `add` or `push` while there is room; `publish`, and kick if it
/// returns `true`; `reap` until `None`; before a sleep `arm`, and reap again if it returns `true`.
#[derive(Debug)]
pub struct DriverRing {
    memory: Arc<GuestMemory>,
    layout: RingLayout,
    desc: NonNull<Descriptor>,
    avail: NonNull<u16>,
    used: NonNull<u8>,
    event_idx: bool,
    /// Position of the next available entry, and the position that was last published.
    next_avail: u16,
    published: u16,
    /// Position of the next used entry, and the used index when it was last read.
    next_used: u16,
    seen_used: u16,
    /// Free descriptors as a list through `links`; `owned[head]`: descriptors of a managed chain.
    free_head: u16,
    free_count: u16,
    links: Box<[u16]>,
    owned: Box<[u16]>,
}

// SAFETY: the pointers lead into memory that `memory` keeps mapped, from whatever thread owns the ring.
unsafe impl Send for DriverRing {}

impl DriverRing {
    /// Initializes a ring in guest memory, starting at position `base`.
    pub fn new(
        memory: &Arc<GuestMemory>,
        layout: RingLayout,
        event_idx: bool,
        base: u16,
    ) -> Result<DriverRing, Error> {
        let entries = u64::from(layout.size);
        let part = |addr, len| {
            memory
                .host(addr, len)
                .ok_or_else(|| Error::Memory(format!("no ring at {addr:#x}")))
        };
        let desc = part(layout.desc, 16 * entries)?.cast();
        let avail = part(layout.avail, 6 + 2 * entries)?.cast();
        let used = part(layout.used, 6 + 8 * entries)?;
        memory.fill(layout.desc, 16 * usize::from(layout.size), 0);
        memory.fill(layout.avail, 6 + 2 * usize::from(layout.size), 0);
        memory.fill(layout.used, 6 + 8 * usize::from(layout.size), 0);
        let mut ring = DriverRing {
            memory: Arc::clone(memory),
            layout,
            desc,
            avail,
            used,
            event_idx,
            next_avail: base,
            published: base,
            next_used: base,
            seen_used: base,
            free_head: 0,
            free_count: 0,
            links: vec![0; layout.size.into()].into(),
            owned: vec![0; layout.size.into()].into(),
        };
        ring.avail_index().store(base, Ordering::Release);
        ring.used_index_word().store(base, Ordering::Release);
        ring.free_all();
        Ok(ring)
    }

    /// Addresses of its parts.
    pub fn layout(&self) -> RingLayout {
        self.layout
    }

    /// Returns its memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Entries.
    pub fn size(&self) -> u16 {
        self.layout.size
    }

    /// Chains that were made available and not reaped.
    pub fn in_flight(&self) -> u16 {
        self.next_avail.wrapping_sub(self.next_used)
    }

    /// Returns the position of the next available entry.
    pub fn position(&self) -> u16 {
        self.next_avail
    }

    /// Returns the position after the last reaped used entry.
    pub fn reaped(&self) -> u16 {
        self.next_used
    }

    /// Forgets all chains: every descriptor is free again.
    pub fn free_all(&mut self) {
        let size = self.layout.size;
        for (index, link) in (1..=size).zip(self.links.iter_mut()) {
            *link = index;
        }
        self.owned.fill(0);
        self.free_head = 0;
        self.free_count = size;
    }
}

/// Managed chains.
impl DriverRing {
    /// Builds a chain from free descriptors and puts it into the available ring. `None`: the ring is full.
    pub fn add(&mut self, buffers: &[Buffer]) -> Option<u16> {
        let head = self.chain(buffers)?;
        self.push(head);
        Some(head)
    }

    /// Builds a chain from free descriptors without making it available.
    pub fn chain(&mut self, buffers: &[Buffer]) -> Option<u16> {
        if buffers.is_empty() || buffers.len() > self.free_count.into() {
            return None;
        }
        let head = self.free_head;
        let mut at = head;
        for (left, buffer) in (0..buffers.len()).rev().zip(buffers) {
            let next = self.links[usize::from(at)];
            let more = if left > 0 { NEXT } else { 0 };
            let flags = buffer.flags() | more;
            let entry = Descriptor {
                addr: buffer.addr,
                len: buffer.len,
                flags,
                next,
            };
            self.write_descriptor(at, entry);
            at = next;
        }
        self.free_head = at;
        self.free_count -= buffers.len() as u16;
        self.owned[usize::from(head)] = buffers.len() as u16;
        Some(head)
    }

    /// Adds a chain as `add` does, through an indirect table at `table` in guest memory.
    pub fn add_indirect(&mut self, table: u64, buffers: &[Buffer]) -> Option<u16> {
        if buffers.is_empty() || self.free_count == 0 {
            return None;
        }
        write_table(&self.memory, table, buffers);
        let head = self.free_head;
        let len = 16 * buffers.len() as u32;
        let entry = Descriptor {
            addr: table,
            len,
            flags: INDIRECT,
            next: 0,
        };
        self.write_descriptor(head, entry);
        self.free_head = self.links[usize::from(head)];
        self.free_count -= 1;
        self.owned[usize::from(head)] = 1;
        self.push(head);
        Some(head)
    }

    /// Returns the next used entry; frees the descriptors of a managed chain.
    pub fn reap(&mut self) -> Option<Used> {
        let mut one = [Used::default()];
        if self.reap_batch(&mut one) == 0 {
            return None;
        }
        let head = one[0].head as usize;
        let count = self.owned.get(head).copied().unwrap_or(0);
        if count > 0 {
            self.owned[head] = 0;
            let mut last = head;
            for _ in 1..count {
                last = self.links[last].into();
            }
            self.links[last] = self.free_head;
            self.free_head = head as u16;
            self.free_count += count;
        }
        Some(one[0])
    }
}

/// Chains by hand, and the hot path.
impl DriverRing {
    /// Stores a descriptor anywhere in the table.
    ///
    /// # Panics
    /// Panics if `index` is outside of the table.
    #[inline]
    pub fn write_descriptor(&self, index: u16, entry: Descriptor) {
        assert!(index < self.layout.size, "descriptor outside of the table");
        // SAFETY: inside the table, which lies inside one mapping, and aligned to 16 by `RingLayout`. Volatile,
        // because the daemon may watch the store: the compiler must not invent, split or drop it.
        unsafe { self.desc.add(index.into()).write_volatile(entry) };
    }

    /// Puts any number as a head into the available ring. Not visible before `publish`.
    #[inline]
    pub fn push(&mut self, head: u16) {
        self.write_avail(self.next_avail, head);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Stores the available index once for everything that was pushed. Returns true if the daemon wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.next_avail == self.published {
            return false;
        }
        // Release: the daemon must see descriptors and entries before the index that covers them.
        self.avail_index().store(self.next_avail, Ordering::Release);
        let old = std::mem::replace(&mut self.published, self.next_avail);
        // The index must be visible before we check whether the daemon sleeps. The daemon arms before it checks the
        // index; without the fence both sides could check too early, and the daemon would never wake.
        fence(Ordering::SeqCst);
        if self.event_idx {
            passes(self.avail_event(), self.next_avail, old)
        } else {
            self.used_flags() & NO_NOTIFY == 0
        }
    }

    /// Copies the available used entries, as many as fit; frees no descriptor.
    #[inline]
    pub fn reap_batch(&mut self, out: &mut [Used]) -> usize {
        if self.seen_used == self.next_used {
            // Acquire: entries and data are visible once the index is.
            self.seen_used = self.used_index_word().load(Ordering::Acquire);
        }
        let there = usize::from(self.seen_used.wrapping_sub(self.next_used));
        let count = there.min(out.len()).min(self.layout.size.into());
        for place in &mut out[..count] {
            *place = self.used_entry(self.next_used);
            self.next_used = self.next_used.wrapping_add(1);
        }
        count
    }

    /// Returns true if there are used entries to reap.
    #[inline]
    pub fn has_used(&self) -> bool {
        self.used_index_word().load(Ordering::Acquire) != self.next_used
    }

    /// Requests a call at the next completion and checks once more; `true`: there is a used entry already.
    #[inline]
    pub fn arm(&mut self) -> bool {
        if self.event_idx {
            self.used_event().store(self.next_used, Ordering::Relaxed);
        } else {
            self.avail_flags().store(0, Ordering::Relaxed);
        }
        // The request must be visible before the check: see `publish`.
        fence(Ordering::SeqCst);
        self.has_used()
    }

    /// Declares that no call is needed (a hint).
    #[inline]
    pub fn disarm(&mut self) {
        if self.event_idx {
            // Beyond every index of the next half cycle; refreshed at each call.
            self.used_event()
                .store(self.next_used.wrapping_sub(1), Ordering::Relaxed);
        } else {
            self.avail_flags().store(NO_INTERRUPT, Ordering::Relaxed);
        }
    }

    /// Stores an entry of the available ring at any position.
    #[inline]
    pub fn write_avail(&self, position: u16, head: u16) {
        let at = usize::from(position & (self.layout.size - 1));
        self.avail_word(2 + at).store(head, Ordering::Relaxed);
    }

    /// Returns the used index at this moment.
    pub fn used_index(&self) -> u16 {
        self.used_index_word().load(Ordering::Acquire)
    }

    /// Flags of the used ring.
    pub fn used_flags(&self) -> u16 {
        self.used_u16(0).load(Ordering::Relaxed)
    }

    /// Returns the used index at which the daemon wants a kick.
    #[inline]
    pub fn avail_event(&self) -> u16 {
        self.used_u16(4 + 8 * usize::from(self.layout.size))
            .load(Ordering::Relaxed)
    }

    #[inline]
    fn avail_word(&self, word: usize) -> &AtomicU16 {
        debug_assert!(word < 3 + usize::from(self.layout.size));
        // SAFETY: inside the available ring (flags, index, size entries, used event), mapped while
        // `memory` lives, and 2-byte aligned; only ever accessed as an atomic on this side.
        unsafe { AtomicU16::from_ptr(self.avail.add(word).as_ptr()) }
    }

    #[inline]
    fn used_u16(&self, byte: usize) -> &AtomicU16 {
        debug_assert!(byte <= 4 + 8 * usize::from(self.layout.size));
        // SAFETY: inside the used ring, mapped while `memory` lives; its 16-bit words are 2-byte aligned.
        unsafe { AtomicU16::from_ptr(self.used.add(byte).cast().as_ptr()) }
    }

    #[inline]
    fn used_entry(&self, position: u16) -> Used {
        let at = 4 + 8 * usize::from(position & (self.layout.size - 1));
        // SAFETY: inside the used ring; entries are 4-byte aligned words.
        unsafe {
            let entry = self.used.add(at).cast::<u32>();
            Used {
                head: entry.read_volatile(),
                len: entry.add(1).read_volatile(),
            }
        }
    }

    fn avail_flags(&self) -> &AtomicU16 {
        self.avail_word(0)
    }

    #[inline]
    fn avail_index(&self) -> &AtomicU16 {
        self.avail_word(1)
    }

    #[inline]
    fn used_event(&self) -> &AtomicU16 {
        self.avail_word(2 + usize::from(self.layout.size))
    }

    #[inline]
    fn used_index_word(&self) -> &AtomicU16 {
        self.used_u16(2)
    }
}

/// Writes the indirect table of a managed chain.
pub(crate) fn write_table(memory: &GuestMemory, table: u64, buffers: &[Buffer]) {
    for (index, buffer) in buffers.iter().enumerate() {
        let more = if index + 1 < buffers.len() { NEXT } else { 0 };
        let entry = Descriptor {
            addr: buffer.addr,
            len: buffer.len,
            flags: buffer.flags() | more,
            next: index as u16 + 1,
        };
        memory.write(table + 16 * index as u64, &entry.to_bytes());
    }
}

/// Returns true if an index that went from `old` to `new` has passed `event` (virtio 1.3 §2.7.10.1).
fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RegionOptions;

    fn ring(size: u16, event_idx: bool, base: u16) -> DriverRing {
        let memory = GuestMemory::new(&[RegionOptions::new(0x1000, 1 << 20)]).unwrap();
        let layout = RingLayout::alloc(&memory, 0, size).unwrap();
        DriverRing::new(&memory, layout, event_idx, base).unwrap()
    }

    /// Plays the device: completes one available entry.
    fn complete(ring: &DriverRing, position: u16, len: u32) {
        let slot = u64::from(position % ring.size());
        let layout = ring.layout();
        let head = ring.memory().bytes(layout.avail + 4 + 2 * slot, 2);
        let mut entry = [head[0], head[1], 0, 0, 0, 0, 0, 0];
        entry[4..].copy_from_slice(&len.to_le_bytes());
        ring.memory().write(layout.used + 4 + 8 * slot, &entry);
        let index = position.wrapping_add(1).to_le_bytes();
        ring.memory().write(layout.used + 2, &index);
    }

    #[test]
    fn chains_are_linked_completed_and_freed_across_the_index_wrap() {
        let mut ring = ring(8, false, 65530);
        for turn in 0..20u16 {
            let buffers = [
                Buffer::readable(0x10, 16),
                Buffer::writable(0x20, 512),
                Buffer::writable(0x30, 1),
            ];
            let first = ring.add(&buffers).unwrap();
            let second = ring.add(&buffers).unwrap();
            assert_eq!(
                ring.add(&buffers),
                None,
                "8 descriptors hold two chains of three"
            );
            assert!(ring.publish());
            assert!(ring.reap().is_none());
            let position = 65530u16.wrapping_add(2 * turn);
            complete(&ring, position, 513);
            complete(&ring, position.wrapping_add(1), 514);
            assert_eq!(
                ring.reap(),
                Some(Used {
                    head: first.into(),
                    len: 513
                })
            );
            assert_eq!(
                ring.reap(),
                Some(Used {
                    head: second.into(),
                    len: 514
                })
            );
            assert_eq!(ring.in_flight(), 0);
        }
    }

    #[test]
    fn a_chain_in_memory_is_what_the_specification_says() {
        let mut ring = ring(4, false, 0);
        let head = ring
            .add(&[Buffer::readable(0x1111, 16), Buffer::writable(0x2222, 1)])
            .unwrap();
        let table = ring.layout().desc;
        let first = ring.memory().bytes(table + 16 * u64::from(head), 16);
        assert_eq!(
            first,
            [0x11, 0x11, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 1, 0, 1, 0]
        );
        let second = ring.memory().bytes(table + 16, 16);
        assert_eq!(
            second[..14],
            [0x22, 0x22, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0]
        );
    }

    #[test]
    fn event_idx_asks_for_a_kick_only_when_the_event_is_passed() {
        // (event, old, new, kick)
        let table = [
            (0, 0, 1, true),
            (1, 0, 1, false),
            (0, 1, 2, false),
            (5, 3, 6, true),
            (5, 3, 5, false),
            (65535, 65535, 0, true),
            (65535, 65534, 65535, false),
            (2, 65530, 10, true),
        ];
        for (event, old, new, kick) in table {
            assert_eq!(
                passes(event, new, old),
                kick,
                "event {event}, {old} to {new}"
            );
        }
    }

    #[test]
    fn arming_reports_completions_that_arrived_meanwhile() {
        let mut ring = ring(4, true, 0);
        ring.push(0);
        ring.publish();
        assert!(!ring.arm());
        complete(&ring, 0, 1);
        assert!(ring.arm());
    }
}
