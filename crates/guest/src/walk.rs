//! Walks a descriptor chain (virtio 1.3 §2.7.5).
//!
//! Each descriptor is copied once and the copy is checked, so a guest that rewrites it meanwhile gets one of
//! the two values. The walk takes bounded time with any table: every descriptor, including empty ones, counts
//! against the length of its table.

use cleave_blk::Segment;

use crate::descriptor::{DESCRIPTOR_BYTES, DescriptorCopy, INDIRECT, NEXT, WRITE};
use crate::{Chain, ChainFault, Memory, racy};

/// Most descriptors of a chain. A chain may not be longer than the vring (virtio 1.3 §2.7.5.3.1), and no
/// vring has more entries than this. The size of the vring at hand is not the limit, because guests with
/// small vrings put long chains into indirect tables, and every device serves them.
const TABLE_ENTRIES_MAX: u32 = 32768;

/// Location of a descriptor table.
#[derive(Debug, Clone, Copy)]
enum TablePlace {
    /// Contiguous on the host.
    Host(*const u8),
    /// Across regions that are adjacent in the guest but not on the host.
    Guest(u64),
}

/// A table of descriptors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DescriptorTable<'a> {
    memory: &'a Memory,
    place: TablePlace,
    entries: u32,
}

impl<'a> DescriptorTable<'a> {
    /// Makes the table of a vring itself.
    ///
    /// # Safety
    /// `entries` descriptors at `at` must be mapped while `memory` lives.
    #[inline]
    pub(crate) unsafe fn direct(
        memory: &'a Memory,
        at: *const u8,
        entries: u16,
    ) -> DescriptorTable<'a> {
        DescriptorTable {
            memory,
            place: TablePlace::Host(at),
            entries: u32::from(entries),
        }
    }

    /// Returns the table that `descriptor` refers to.
    #[inline]
    fn indirect(
        memory: &'a Memory,
        descriptor: DescriptorCopy,
    ) -> Result<DescriptorTable<'a>, ChainFault> {
        let DescriptorCopy { addr, len, .. } = descriptor;
        let entries = len / DESCRIPTOR_BYTES as u32;
        let whole = u64::from(len).is_multiple_of(DESCRIPTOR_BYTES);
        if !whole || entries == 0 || entries > TABLE_ENTRIES_MAX {
            return Err(ChainFault::Indirect);
        }
        let place = match memory.host_range(addr, u64::from(len)) {
            Some(at) => TablePlace::Host(at),
            None if memory.covers(descriptor.segment()) => TablePlace::Guest(addr),
            None => return Err(ChainFault::Indirect),
        };
        Ok(DescriptorTable {
            memory,
            place,
            entries,
        })
    }

    /// Copies a descriptor; the caller has checked that `index` lies in the table.
    #[inline]
    fn read(&self, index: u32) -> Result<DescriptorCopy, ChainFault> {
        let offset_bytes = u64::from(index) * DESCRIPTOR_BYTES;
        match self.place {
            // SAFETY: inside the table, which lies in memory that `self.memory` keeps mapped.
            TablePlace::Host(at) => unsafe { Ok(racy::descriptor(at.add(offset_bytes as usize))) },
            TablePlace::Guest(addr) => self.read_scattered(addr.wrapping_add(offset_bytes)),
        }
    }

    #[cold]
    fn read_scattered(&self, addr: u64) -> Result<DescriptorCopy, ChainFault> {
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
        Ok(DescriptorCopy::from_words(addr, rest))
    }
}

/// Copies the chain that begins at `head` into `chain`. After `Order` or `TooMany` the chain's status byte is
/// known; after any other fault the chain is empty.
#[inline]
pub(crate) fn walk(
    table: DescriptorTable<'_>,
    head: u16,
    chain: &mut Chain,
) -> Result<(), ChainFault> {
    chain.clear();
    let mut shape_fault = None;
    let mut read = 0;
    let walked = follow(table, head, &mut read, |descriptor| {
        let added = if descriptor.flags & WRITE == 0 {
            chain.add_readable(descriptor.segment())
        } else {
            chain.add_writable(descriptor.segment())
        };
        // The first fault is reported; the walk continues, to find the status byte.
        shape_fault = shape_fault.or(added.err());
    });
    if let Err(fault) = walked {
        chain.clear();
        chain.descriptors = read;
        return Err(fault);
    }
    chain.descriptors = read;
    shape_fault.map_or(Ok(()), Err)
}

/// Calls `each` for every descriptor of a chain that does not refer to a table, and counts the descriptors
/// that it reads.
#[inline]
fn follow(
    direct: DescriptorTable<'_>,
    head: u16,
    read: &mut u32,
    mut each: impl FnMut(DescriptorCopy),
) -> Result<(), ChainFault> {
    let mut table = direct;
    let mut index = u32::from(head);
    let mut left = direct.entries;
    let mut nested = false;
    loop {
        // A table has at most `entries` distinct descriptors; after more reads, one was read twice.
        if index >= table.entries || left == 0 {
            return Err(ChainFault::Endless);
        }
        left -= 1;
        // Cannot wrap: two tables of at most 2^15 entries each are read.
        *read = read.wrapping_add(1);
        let descriptor = table.read(index)?;
        if descriptor.flags & INDIRECT != 0 {
            // virtio 1.3 §2.7.5.3.1: never inside a table, never with NEXT. Direct descriptors in front
            // of it are legal, and WRITE beside it is ignored (§2.7.5.3.2).
            if nested || descriptor.flags & NEXT != 0 {
                return Err(ChainFault::Indirect);
            }
            table = DescriptorTable::indirect(table.memory, descriptor)?;
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::rig::{Desc, Driver, INDIRECT, NEXT, WRITE, memory, region, segment, write};
    use crate::{TakenChain, Vring};

    const SIZE: u16 = 256;
    /// Addresses of indirect tables and of data.
    const TABLE: u64 = 0x10_0000;
    const DATA: u64 = 0x8_0000;
    const MEMORY_BYTES: u64 = 4 << 20;

    /// Serves one chain with head 0 and returns its fault and the chain. The head must come back, whatever the fault.
    fn serve(direct: &[Desc], table: &[Desc]) -> (Option<ChainFault>, Chain) {
        let memory = memory(MEMORY_BYTES);
        let mut driver = Driver::new(&memory, 0, SIZE, 0);
        for (index, &desc) in direct.iter().enumerate() {
            driver.set(index as u16, desc);
        }
        for (index, desc) in table.iter().enumerate() {
            write(&memory, TABLE + 16 * index as u64, &desc.bytes());
        }
        driver.offer(0);
        driver.publish();
        let mut vring = Vring::new(memory, driver.layout, 0, 0).unwrap();
        let mut chain = Chain::new();
        let TakenChain { head, fault } = vring.take(&mut chain).unwrap().unwrap();
        vring.push_used(head, 0);
        assert!(vring.publish());
        assert_eq!(driver.reap(), Some((0, 0)), "the head is never lost");
        (fault, chain)
    }

    /// Returns `count` chained one-byte descriptors from index 0 on, then a status.
    fn long(count: u16) -> Vec<Desc> {
        let data = |index| Desc(DATA, 1, NEXT | WRITE, index + 1);
        let mut chain: Vec<Desc> = (0..count).map(data).collect();
        chain.push(Desc(DATA + 0x4711, 1, WRITE, 0));
        chain
    }

    fn indirect(len: u32) -> [Desc; 1] {
        [Desc(TABLE, len, INDIRECT, 0)]
    }

    #[test]
    fn chains_that_do_not_end_are_faults_without_segments() {
        let ring: Vec<Desc> = (0..SIZE)
            .map(|index| Desc(DATA, 1, NEXT, (index + 1) % SIZE))
            .collect();
        let empty: Vec<Desc> = (0..SIZE)
            .map(|index| Desc(DATA, 0, NEXT, (index + 1) % SIZE))
            .collect();
        for (name, chain) in [
            ("itself", vec![Desc(DATA, 16, NEXT, 0)]),
            ("itself, empty", vec![Desc(DATA, 0, NEXT, 0)]),
            ("two", vec![Desc(DATA, 16, NEXT, 1), Desc(DATA, 1, NEXT, 0)]),
            ("the whole table", ring),
            ("the whole table, empty", empty),
            ("one past the table", vec![Desc(DATA, 16, NEXT, SIZE)]),
            ("far past the table", vec![Desc(DATA, 16, NEXT, 65535)]),
        ] {
            let (fault, found) = serve(&chain, &[]);
            assert_eq!(fault, Some(ChainFault::Endless), "{name}");
            assert_eq!(found.readable(), [], "{name}");
            assert_eq!(found.status_addr(), None, "{name}");

            // The same inside an indirect table of as many entries.
            let (fault, found) = serve(&indirect(16 * u32::from(SIZE)), &chain);
            assert_eq!(fault, Some(ChainFault::Endless), "{name}, indirect");
            assert_eq!(found.readable(), [], "{name}, indirect");
        }
    }

    #[test]
    fn a_chain_as_long_as_the_vring_is_served() {
        let (fault, chain) = serve(&long(SIZE - 1), &[]);
        assert_eq!(fault, None);
        assert_eq!(chain.writable().len(), usize::from(SIZE));
    }

    #[test]
    fn indirect_tables_of_bad_length_or_place_are_faults() {
        let end = MEMORY_BYTES - 32;
        for (name, addr, len, expected) in [
            ("sound", TABLE, 32, None),
            ("sound at the end", end, 32, None),
            ("odd address", TABLE + 0x8001, 32, None),
            ("more entries than used", TABLE, 16 * 32768, None),
            (
                "too many entries",
                TABLE,
                16 * 32769,
                Some(ChainFault::Indirect),
            ),
            ("none", TABLE, 0, Some(ChainFault::Indirect)),
            ("less than one", TABLE, 15, Some(ChainFault::Indirect)),
            ("one and a fraction", TABLE, 17, Some(ChainFault::Indirect)),
            ("huge", TABLE, 0xffff_ffff, Some(ChainFault::Indirect)),
            (
                "huge multiple",
                TABLE,
                0xffff_fff0,
                Some(ChainFault::Indirect),
            ),
            ("over the end", end + 16, 32, Some(ChainFault::Indirect)),
            ("nowhere", 1 << 40, 32, Some(ChainFault::Indirect)),
            ("wrapping", u64::MAX - 15, 32, Some(ChainFault::Indirect)),
        ] {
            let head = [Desc(addr, len, INDIRECT, 0)];
            let (fault, _) = serve(&head, &[Desc(DATA, 16, 0, 0)]);
            assert_eq!(fault, expected, "{name}");
        }
    }

    #[test]
    fn indirect_is_refused_inside_a_table_and_beside_next() {
        let inner = [Desc(DATA, 16, NEXT, 1), Desc(TABLE, 16, INDIRECT, 0)];
        let (fault, chain) = serve(&indirect(32), &inner);
        assert_eq!(fault, Some(ChainFault::Indirect));
        assert_eq!(chain.readable(), []);
        let beside = [Desc(TABLE, 16, INDIRECT | NEXT, 1), Desc(DATA, 1, WRITE, 0)];
        let (fault, chain) = serve(&beside, &[Desc(DATA, 16, 0, 0)]);
        assert_eq!(fault, Some(ChainFault::Indirect));
        assert_eq!(chain.status_addr(), None);
    }

    #[test]
    fn faults_of_shape_leave_the_status_byte_known() {
        let late = [
            Desc(DATA, 16, NEXT, 1),
            Desc(DATA, 1, NEXT | WRITE, 2),
            Desc(DATA, 8, NEXT, 3),
            Desc(DATA + 9, 1, WRITE, 0),
        ];
        let (fault, chain) = serve(&late, &[]);
        assert_eq!(fault, Some(ChainFault::Order));
        assert_eq!(chain.status_addr(), Some(DATA + 9));

        for (count, expected) in [(1040, None), (1041, Some(ChainFault::TooMany))] {
            let (fault, chain) = serve(&indirect(16 * 1042), &long(count));
            assert_eq!(fault, expected, "{count}");
            assert_eq!(chain.status_addr(), Some(DATA + 0x4711), "{count}");
        }
    }

    #[test]
    fn empty_descriptors_are_dropped_wherever_they_point() {
        let direct = [
            Desc(u64::MAX, 0, NEXT, 1),
            Desc(DATA, 16, NEXT, 2),
            Desc(1 << 50, 0, NEXT | WRITE, 3),
            Desc(DATA, 8, NEXT, 4),
            Desc(DATA + 100, 1, NEXT | WRITE, 5),
            Desc(0, 0, WRITE, 0),
        ];
        let (fault, chain) = serve(&direct, &[]);
        assert_eq!(fault, None);
        assert_eq!(chain.readable(), [segment(DATA, 16), segment(DATA, 8)]);
        assert_eq!(chain.status_addr(), Some(DATA + 100));
    }

    #[test]
    fn lengths_of_four_gibibytes_add_up() {
        let huge = |index| Desc(u64::MAX, u32::MAX, NEXT, index);
        let direct = [huge(1), huge(2), Desc(DATA, u32::MAX, WRITE, 0)];
        let (fault, chain) = serve(&direct, &[]);
        assert_eq!(fault, None);
        assert_eq!(chain.shape().readable_bytes, 2 * u64::from(u32::MAX));
        assert_eq!(chain.shape().writable_bytes, u64::from(u32::MAX));
    }

    #[test]
    fn a_table_over_two_regions_is_served() {
        let spec = |guest_addr| region(guest_addr, 0x1_0000);
        // Mapped in this order, the two are not adjacent on the host in guest order.
        let memory = Memory::new(vec![spec(0x1_0000), spec(0)]).unwrap();
        let mut driver = Driver::new(&memory, 0, 8, 0);
        for (offset, desc) in [
            (0, Desc(0x100, 16, NEXT, 1)),
            (16, Desc(0x200, 512, WRITE | NEXT, 2)),
            (32, Desc(0x300, 1, WRITE, 0)),
        ] {
            write(&memory, 0xffe8 + offset, &desc.bytes());
        }
        driver.set(0, Desc(0xffe8, 48, INDIRECT, 0));
        driver.offer(0);
        driver.publish();
        let mut vring = Vring::new(memory, driver.layout, 0, 0).unwrap();
        let mut chain = Chain::new();
        let taken = vring.take(&mut chain).unwrap().unwrap();
        assert_eq!(taken.fault, None);
        assert_eq!(chain.readable(), [segment(0x100, 16)]);
        assert_eq!(chain.writable(), [segment(0x200, 512), segment(0x300, 1)]);
    }

    #[test]
    fn a_chain_leaves_nothing_in_the_next_one() {
        let memory = memory(MEMORY_BYTES);
        let mut driver = Driver::new(&memory, 0, 8, 0);
        driver.set(0, Desc(DATA, 16, NEXT, 1));
        driver.set(1, Desc(DATA + 16, 512, NEXT, 2));
        driver.set(2, Desc(DATA + 999, 1, WRITE, 0));
        driver.set(3, Desc(DATA + 32, 7, 0, 0));
        for head in [0, 3, 0] {
            driver.offer(head);
        }
        driver.publish();
        let mut vring = Vring::new(memory, driver.layout, 0, 0).unwrap();
        let mut chain = Chain::new();
        for (head, readable_bytes, writable_bytes) in [(0, 528, 1), (3, 7, 0), (0, 528, 1)] {
            vring.take(&mut chain).unwrap().unwrap();
            assert_eq!(chain.shape().readable_bytes, readable_bytes);
            assert_eq!(chain.shape().writable_bytes, writable_bytes);
            assert_eq!(chain.status_addr().is_some(), head == 0);
            let bytes: u64 = chain.readable().iter().map(|s| u64::from(s.len)).sum();
            assert_eq!(bytes, readable_bytes);
            chain.data_out(16);
            chain.data_in();
        }
    }

    #[test]
    fn the_longest_walk_ends_soon() {
        let table: Vec<Desc> = (0..32768u32)
            .map(|index| Desc(DATA, 1, NEXT | WRITE, (index + 1) as u16 % 32768))
            .collect();
        let begun = Instant::now();
        let (fault, _) = serve(&indirect(16 * 32768), &table);
        assert_eq!(fault, Some(ChainFault::Endless));
        // Generous for a loaded machine; the time includes writing the table.
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
}
