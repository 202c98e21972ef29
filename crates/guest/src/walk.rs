//! Following a descriptor chain (virtio 1.3 §2.7.5).
//!
//! Each descriptor is copied once and judged on the copy, so that a guest that rewrites it meanwhile
//! gets one of the two values. The walk ends in bounded time whatever the table holds: every
//! descriptor, empty ones too, is counted against the length of the table it stands in.

use cleave_blk::Segment;

use crate::{Chain, ChainFault, Memory, racy};

/// Another descriptor follows.
const NEXT: u16 = 1;
/// Device-writable, else device-readable.
const WRITE: u16 = 2;
/// The descriptor names a table of descriptors.
const INDIRECT: u16 = 4;

/// Bytes of a descriptor.
pub(crate) const DESCRIPTOR_BYTES: u64 = 16;

/// Descriptors of the longest chain: a chain may not be longer than the vring (virtio 1.3 §2.7.5.3.1),
/// and no vring has more entries than this. The vring's own size is not asked for here: guests
/// with small vrings put long chains into indirect tables, and every device serves them.
const TABLE_ENTRIES_MAX: u32 = 32768;

/// One descriptor, copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Descriptor {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    /// From its two little-endian words: address; length, flags and next.
    #[inline]
    pub(crate) fn from_words(addr: u64, rest: u64) -> Descriptor {
        Descriptor {
            addr,
            len: rest as u32,
            flags: (rest >> 32) as u16,
            next: (rest >> 48) as u16,
        }
    }

    fn segment(self) -> Segment {
        Segment {
            addr: self.addr,
            len: self.len,
        }
    }
}

/// Where a table of descriptors is.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// In one piece on the host.
    Host(*const u8),
    /// Over regions that are neighbours in the guest but not on the host.
    Guest(u64),
}

/// A table of descriptors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Table<'a> {
    memory: &'a Memory,
    place: Place,
    entries: u32,
}

impl<'a> Table<'a> {
    /// A vring's own table.
    ///
    /// # Safety
    /// `entries` descriptors at `at` must be mapped while `memory` lives.
    #[inline]
    pub(crate) unsafe fn direct(memory: &'a Memory, at: *const u8, entries: u16) -> Table<'a> {
        Table {
            memory,
            place: Place::Host(at),
            entries: u32::from(entries),
        }
    }

    /// The table that `descriptor` names.
    #[inline]
    fn indirect(memory: &'a Memory, descriptor: Descriptor) -> Result<Table<'a>, ChainFault> {
        let Descriptor { addr, len, .. } = descriptor;
        let entries = len / DESCRIPTOR_BYTES as u32;
        let whole = u64::from(len).is_multiple_of(DESCRIPTOR_BYTES);
        if !whole || entries == 0 || entries > TABLE_ENTRIES_MAX {
            return Err(ChainFault::Indirect);
        }
        let place = match memory.host_range(addr, u64::from(len)) {
            Some(at) => Place::Host(at),
            None if memory.covers(descriptor.segment()) => Place::Guest(addr),
            None => return Err(ChainFault::Indirect),
        };
        Ok(Table {
            memory,
            place,
            entries,
        })
    }

    /// Copies a descriptor; the caller has checked that `index` lies in the table.
    #[inline]
    fn read(&self, index: u32) -> Result<Descriptor, ChainFault> {
        let offset_bytes = u64::from(index) * DESCRIPTOR_BYTES;
        match self.place {
            // SAFETY: inside the table, which lies in memory that `self.memory` keeps mapped.
            Place::Host(at) => unsafe { Ok(racy::descriptor(at.add(offset_bytes as usize))) },
            Place::Guest(addr) => self.read_scattered(addr.wrapping_add(offset_bytes)),
        }
    }

    #[cold]
    fn read_scattered(&self, addr: u64) -> Result<Descriptor, ChainFault> {
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        let segment = Segment {
            addr,
            len: DESCRIPTOR_BYTES as u32,
        };
        let copied = self.memory.copy_in(&[segment], &mut bytes);
        copied.map_err(|_| ChainFault::Indirect)?;
        let [addr, rest] = *bytes.as_chunks::<8>().0 else {
            return Err(ChainFault::Indirect);
        };
        let (addr, rest) = (u64::from_le_bytes(addr), u64::from_le_bytes(rest));
        Ok(Descriptor::from_words(addr, rest))
    }
}

/// Copies the chain that begins at `head` into `chain`. After `Order` or `TooMany` the chain's status
/// byte is known; after the other faults the chain is empty.
#[inline]
pub(crate) fn walk(table: Table<'_>, head: u16, chain: &mut Chain) -> Result<(), ChainFault> {
    chain.clear();
    let mut shape_fault = None;
    let walked = follow(table, head, |descriptor| {
        let added = if descriptor.flags & WRITE == 0 {
            chain.add_readable(descriptor.segment())
        } else {
            chain.add_writable(descriptor.segment())
        };
        // The first one is reported; the walk goes on, to find the status byte.
        shape_fault = shape_fault.or(added.err());
    });
    if let Err(fault) = walked {
        chain.clear();
        return Err(fault);
    }
    shape_fault.map_or(Ok(()), Err)
}

/// Calls `each` for every descriptor of a chain that is not a reference to a table.
#[inline]
fn follow(
    direct: Table<'_>,
    head: u16,
    mut each: impl FnMut(Descriptor),
) -> Result<(), ChainFault> {
    let mut table = direct;
    let mut index = u32::from(head);
    let mut left = direct.entries;
    let mut nested = false;
    loop {
        // A table has no more than `entries` different descriptors: who reads more has read one twice.
        if index >= table.entries || left == 0 {
            return Err(ChainFault::Endless);
        }
        left -= 1;
        let descriptor = table.read(index)?;
        if descriptor.flags & INDIRECT != 0 {
            // virtio 1.3 §2.7.5.3.1: never inside a table, never with NEXT. Direct descriptors in front
            // of it are legal, and WRITE beside it is ignored (§2.7.5.3.2).
            if nested || descriptor.flags & NEXT != 0 {
                return Err(ChainFault::Indirect);
            }
            table = Table::indirect(table.memory, descriptor)?;
            (index, left, nested) = (0, table.entries, true);
            continue;
        }
        each(descriptor);
        if descriptor.flags & NEXT == 0 {
            return Ok(());
        }
        index = u32::from(descriptor.next);
    }
}
