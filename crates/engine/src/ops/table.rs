//! The ops in flight: a fixed array, the host ranges of each op, and a free list that reuses the entry freed
//! last, so that a shallow load touches few pages.
//!
//! Unsafe because host ranges are raw pointers: they point into guest memory, which the entry's epoch keeps
//! mapped until the entry is freed, and into the block of ranges, which lives as long as the table.

use std::io;

use cleave_blk::spec::SEGMENTS_MAX;
use cleave_blk::{OP_CHUNKS_MAX, OpKind};
use cleave_guest::Epoch;
use libc::iovec;

use super::area::{Access, Area};

/// Most host ranges of one op: a request's segments, plus one for each of the table's 509 regions whose border a
/// segment may cross, plus one for each chunk of a stripe. Only segments that overlap each other need more, which no driver makes;
/// they end with EFAULT.
pub(crate) const RANGES_MAX: usize = SEGMENTS_MAX + 512 + OP_CHUNKS_MAX;
/// Most host ranges in one system call (UIO_MAXIOV).
pub(crate) const RANGES_AT_ONCE: usize = 1024;
const BLOCK_BYTES: usize = RANGES_MAX * size_of::<iovec>();
/// Blocks that keep their memory while nothing is in flight. A burst of deep queues may have touched a thousand.
const BLOCKS_KEPT: u16 = 64;
/// Bytes of a page in a device's lists. The kernel sets NVMe drives to this size, whatever its own pages are.
const LIST_PAGE_BYTES: u64 = 4096;

/// One op in flight, with the store's own part.
#[derive(Debug, Clone)]
pub(crate) struct Entry<T> {
    pub(crate) token: u64,
    pub(crate) kind: OpKind,
    pub(crate) leg: u16,
    /// The op's range on the leg.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Bytes of the range that are finished.
    pub(crate) pos: u64,
    /// Keeps the guest memory that `ranges` point to mapped.
    pub(crate) epoch: Option<Epoch>,
    /// When the op was pushed, on the clock of `legs`.
    pub(crate) begun_ns: u64,
    pub(super) ranges: Ranges,
    pub(crate) own: T,
}

/// The host ranges not yet used up: `count` from `first`. A single range is kept in the entry, so that an op
/// of one segment does not touch the block.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Ranges {
    lone: Option<iovec>,
    first: usize,
    count: usize,
    /// Set while only the beginning of them is shown: their real number, and the real length of the last one that is shown.
    hidden: Option<(usize, usize)>,
}

impl<T> Entry<T> {
    /// An op without memory, on the first leg.
    pub(crate) fn new(token: u64, kind: OpKind, offset: u64, len: u64, own: T) -> Entry<T> {
        Entry {
            token,
            kind,
            leg: 0,
            offset,
            len,
            pos: 0,
            epoch: None,
            begun_ns: 0,
            ranges: Ranges::default(),
            own,
        }
    }

    /// The offset at which the op continues, and the number of bytes left.
    pub(crate) fn rest(&self) -> (u64, u64) {
        (self.offset + self.pos, self.len - self.pos)
    }
}

/// The entries of a store, and the memory for their host ranges.
#[derive(Debug)]
pub(crate) struct Table<T> {
    entries: Box<[Entry<T>]>,
    free: Vec<u16>,
    blocks: Area,
    /// The blocks from here on have no memory.
    blocks_used: u16,
}

/// Properties of an op's host ranges after all have been collected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Gathered {
    /// The bitwise OR of all addresses.
    pub(crate) addr_bits: u64,
    /// The bitwise OR of all lengths.
    pub(crate) len_bits: u64,
    /// The number of ranges after adjacent ones are merged.
    pub(crate) count: usize,
}

impl Gathered {
    /// Returns true if ranges meet inside a page of a device's lists. A device that has such lists (NVMe) gets the I/O in pieces.
    pub(crate) fn has_gaps(&self) -> bool {
        self.count > 1 && (self.addr_bits | self.len_bits) & (LIST_PAGE_BYTES - 1) != 0
    }
}

impl<T> Table<T> {
    /// `blank`: what a free entry has as the store's own part.
    pub(crate) fn new(ops: u16, blank: T) -> io::Result<Table<T>>
    where
        T: Clone,
    {
        let blocks = Area::new(usize::from(ops) * BLOCK_BYTES, 4096, Access::ReadWrite)?;
        let entries = vec![Entry::new(0, OpKind::Sync, 0, 0, blank); usize::from(ops)];
        Ok(Table {
            entries: entries.into_boxed_slice(),
            free: (0..ops).rev().collect(),
            blocks,
            blocks_used: 0,
        })
    }

    /// Takes an entry, and fills it with an op that has no memory. `None`: all are in use.
    pub(crate) fn take(&mut self, entry: Entry<T>) -> Option<u16> {
        let index = self.reserve()?;
        self.fill(index, entry);
        Some(index)
    }

    /// Takes the entry that was freed last, which is to be filled or freed.
    #[inline]
    pub(super) fn reserve(&mut self) -> Option<u16> {
        self.free.pop()
    }

    #[inline]
    pub(super) fn fill(&mut self, index: u16, entry: Entry<T>) {
        self.entries[usize::from(index)] = entry;
    }

    #[inline]
    pub(crate) fn free(&mut self, index: u16) {
        self.get_mut(index).epoch = None;
        debug_assert!(self.free.len() < self.entries.len());
        self.free.push(index);
        if self.blocks_used > BLOCKS_KEPT && self.free.len() == self.entries.len() {
            self.give_back();
        }
    }

    /// Gives the memory of a burst back, and begins anew with the first entries.
    #[cold]
    fn give_back(&mut self) {
        let bytes = |blocks: u16| usize::from(blocks) * BLOCK_BYTES;
        // SAFETY: no entry is in use, so nothing refers to any block.
        unsafe {
            self.blocks
                .give_back(bytes(BLOCKS_KEPT), bytes(self.blocks_used))
        };
        self.blocks_used = BLOCKS_KEPT;
        self.free
            .sort_unstable_by_key(|index| std::cmp::Reverse(*index));
    }

    /// Never unmaps the memory that the kernel may still access.
    pub(crate) fn leak(&mut self) {
        self.blocks.leak();
        for entry in &mut self.entries {
            std::mem::forget(entry.epoch.take());
        }
    }

    #[inline]
    pub(crate) fn get(&self, index: u16) -> &Entry<T> {
        &self.entries[usize::from(index)]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: u16) -> &mut Entry<T> {
        &mut self.entries[usize::from(index)]
    }

    /// Returns an entry by an index that may be out of range.
    #[inline]
    pub(crate) fn find(&self, index: u16) -> Option<&Entry<T>> {
        self.entries.get(usize::from(index))
    }

    /// All entries with their indices, the free ones too.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (u16, &Entry<T>)> {
        (0..).zip(&self.entries)
    }

    fn block(&self, index: u16) -> *mut iovec {
        self.blocks.at(usize::from(index) * BLOCK_BYTES).cast()
    }

    /// Collects the host ranges of a reserved entry, to which `with` adds them. `Err`: that failed, or there are more than a request
    /// can have.
    #[inline]
    pub(super) fn gather(
        &mut self,
        index: u16,
        with: impl FnOnce(&mut RangeCollector) -> Result<(), i32>,
    ) -> Result<(Ranges, Gathered), i32> {
        let mut gather = RangeCollector::new(self.block(index));
        with(&mut gather)?;
        if gather.gathered.count > 1 {
            self.blocks_used = self.blocks_used.max(index + 1);
        }
        gather.finish()
    }

    /// The ranges not yet used up, in the kernel's format; valid until the entry is freed.
    #[inline]
    pub(crate) fn ranges(&self, index: u16) -> (*const iovec, usize) {
        let ranges = &self.get(index).ranges;
        match &ranges.lone {
            Some(lone) => (std::ptr::from_ref(lone), ranges.count),
            // SAFETY: `first + count` ≤ RANGES_MAX, the length of the block.
            None => (unsafe { self.block(index).add(ranges.first) }, ranges.count),
        }
    }

    /// Returns the ranges not yet used up as a slice.
    pub(crate) fn host_ranges(&self, index: u16) -> &[iovec] {
        let (start, count) = self.ranges(index);
        match count {
            0 => &[],
            // SAFETY: the ranges lie in the table, which is borrowed, and `consume` needs it exclusively.
            count => unsafe { std::slice::from_raw_parts(start, count) },
        }
    }

    /// Shows only the next `bytes` of the entry's memory until `show_all`, for a store that takes an op in parts.
    pub(crate) fn show_first(&mut self, index: u16, bytes: u64) {
        self.show_all(index);
        let mut left = bytes;
        for shown in 1..=self.get(index).ranges.count {
            let Some(range) = self.range_mut(index, shown - 1) else {
                return;
            };
            let whole = range.iov_len;
            if (whole as u64) < left {
                left -= whole as u64;
                continue;
            }
            // At most `whole`.
            range.iov_len = left as usize;
            let ranges = &mut self.get_mut(index).ranges;
            ranges.hidden = Some((ranges.count, whole));
            ranges.count = shown;
            return;
        }
    }

    /// Ends `show_first`.
    #[inline]
    pub(crate) fn show_all(&mut self, index: u16) {
        let ranges = &mut self.get_mut(index).ranges;
        let Some((count, whole)) = ranges.hidden.take() else {
            return;
        };
        let last = std::mem::replace(&mut ranges.count, count) - 1;
        if let Some(range) = self.range_mut(index, last) {
            range.iov_len = whole;
        }
    }

    /// Range number `at` of those not yet used up.
    fn range_mut(&mut self, index: u16, at: usize) -> Option<&mut iovec> {
        let block = self.block(index);
        let ranges = &mut self.get_mut(index).ranges;
        if at >= ranges.count {
            return None;
        }
        Some(match &mut ranges.lone {
            Some(lone) => lone,
            // SAFETY: `first + count` ≤ RANGES_MAX, the length of the block, and nothing else refers to this entry's block:
            // nobody else uses it between completion and push.
            None => unsafe { &mut *block.add(ranges.first + at) },
        })
    }

    /// Uses up the next `bytes` of the entry's memory and passes each host range of them to `with`.
    pub(crate) fn consume(
        &mut self,
        index: u16,
        mut bytes: u64,
        mut with: impl FnMut(*mut u8, usize),
    ) {
        while let (true, Some(range)) = (bytes > 0, self.range_mut(index, 0)) {
            let len =
                usize::try_from(bytes).map_or(range.iov_len, |bytes| range.iov_len.min(bytes));
            with(range.iov_base.cast(), len);
            range.iov_base = range.iov_base.wrapping_byte_add(len);
            range.iov_len -= len;
            bytes -= len as u64;
            if range.iov_len == 0 {
                let ranges = &mut self.get_mut(index).ranges;
                ranges.first += 1;
                ranges.count -= 1;
            }
        }
        debug_assert_eq!(bytes, 0, "more used than there is");
    }
}

/// Collects host ranges and merges adjacent ones. The newest stays in `last` so that the next can be merged with it.
#[derive(Debug)]
pub(super) struct RangeCollector {
    block: *mut iovec,
    last: iovec,
    gathered: Gathered,
}

impl RangeCollector {
    fn new(block: *mut iovec) -> RangeCollector {
        let last = iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        RangeCollector {
            block,
            last,
            gathered: Gathered::default(),
        }
    }

    #[inline]
    pub(super) fn add(&mut self, start: *mut u8, len: usize) {
        let Gathered { count, .. } = self.gathered;
        if count > 0 && self.last.iov_base.wrapping_byte_add(self.last.iov_len) == start.cast() {
            self.last.iov_len += len;
            return;
        }
        if count > 0 {
            self.store_last();
        }
        self.last = iovec {
            iov_base: start.cast(),
            iov_len: len,
        };
        self.gathered.count += 1;
    }

    #[inline]
    fn note_last(&mut self) {
        self.gathered.addr_bits |= self.last.iov_base.addr() as u64;
        self.gathered.len_bits |= self.last.iov_len as u64;
    }

    fn store_last(&mut self) {
        self.note_last();
        let Gathered { count, .. } = self.gathered;
        if count <= RANGES_MAX {
            // SAFETY: `count` - 1 < RANGES_MAX, the length of the block, which belongs to this entry alone.
            unsafe { self.block.add(count - 1).write(self.last) };
        }
    }

    fn finish(mut self) -> Result<(Ranges, Gathered), i32> {
        let lone = match self.gathered.count {
            0 => None,
            1 => {
                self.note_last();
                Some(self.last)
            }
            _ => {
                self.store_last();
                None
            }
        };
        let Gathered { count, .. } = self.gathered;
        if count > RANGES_MAX {
            return Err(libc::EFAULT);
        }
        let ranges = Ranges {
            lone,
            count,
            ..Ranges::default()
        };
        Ok((ranges, self.gathered))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the blocks that have memory.
    fn resident_bytes(table: &Table<()>) -> usize {
        let len = table.entries.len() * BLOCK_BYTES;
        let page = rustix::param::page_size();
        let mut pages = vec![0_u8; len.div_ceil(page)];
        // SAFETY: the range is that of the blocks, and the list has a byte for each of its pages.
        let told = unsafe { libc::mincore(table.blocks.at(0).cast(), len, pages.as_mut_ptr()) };
        assert_eq!(told, 0);
        pages.iter().filter(|flags| **flags & 1 != 0).count() * page
    }

    #[test]
    fn the_memory_of_a_burst_is_given_back_when_it_is_over() {
        let mut table = Table::new(1024, ()).unwrap();
        let burst = |table: &mut Table<()>, ops: u16| {
            let taken: Vec<u16> = (0..ops)
                .map(|_| {
                    let index = table.reserve().unwrap();
                    let gathered = table.gather(index, |gather| {
                        // No two of them are adjacent.
                        (1..=RANGES_MAX).for_each(|at| {
                            gather.add(std::ptr::without_provenance_mut(at * 8192), 4096);
                        });
                        Ok(())
                    });
                    gathered.unwrap();
                    index
                })
                .collect();
            let resident = resident_bytes(table);
            taken.iter().for_each(|index| table.free(*index));
            (resident, taken)
        };
        let page = rustix::param::page_size();
        let kept = usize::from(BLOCKS_KEPT) * BLOCK_BYTES + page;
        let (resident, _) = burst(&mut table, 1024);
        assert!(resident > 1000 * BLOCK_BYTES, "{resident}");
        assert!(resident_bytes(&table) <= kept);
        // Those that have memory are used first.
        let (_, taken) = burst(&mut table, 3);
        assert_eq!(taken, [0, 1, 2]);
        burst(&mut table, BLOCKS_KEPT);
        assert!(resident_bytes(&table) > kept - 2 * page);
    }

    fn table_with(ranges: &[(usize, usize)]) -> (Table<()>, u16, Result<Gathered, i32>) {
        let mut table = Table::new(4, ()).unwrap();
        let entry = Entry::new(1, OpKind::Read, 0, 0, ());
        let index = table.take(entry).unwrap();
        let gathered = table.gather(index, |gather| {
            for (start, len) in ranges {
                gather.add(std::ptr::without_provenance_mut(*start), *len);
            }
            Ok(())
        });
        let gathered = gathered.map(|(ranges, gathered)| {
            table.get_mut(index).ranges = ranges;
            gathered
        });
        (table, index, gathered)
    }

    fn rest(table: &Table<()>, index: u16) -> Vec<(usize, usize)> {
        let (ranges, count) = table.ranges(index);
        // SAFETY: the table reports that `count` ranges are initialised.
        (0..count)
            .map(|at| unsafe { *ranges.add(at) })
            .map(|range| (range.iov_base.addr(), range.iov_len))
            .collect()
    }

    #[test]
    fn a_part_of_the_memory_is_shown_and_then_all_of_the_rest() {
        // In the entry, and in the block.
        for ranges in [
            &[(4096, 1000)][..],
            &[(4096, 600), (8192, 200), (9000, 200)],
        ] {
            let (mut table, index, _) = table_with(ranges);
            let mut seen = Vec::new();
            for bytes in [300, 300, 250, 150] {
                table.show_first(index, bytes);
                let shown: Vec<(usize, usize)> = rest(&table, index);
                let total: usize = shown.iter().map(|(_, len)| len).sum();
                assert_eq!(total as u64, bytes, "{ranges:?}");
                seen.extend(shown);
                table.show_all(index);
                table.consume(index, bytes, |_, _| ());
            }
            assert_eq!(rest(&table, index), []);
            let mut merged: Vec<(usize, usize)> = Vec::new();
            for (start, len) in seen {
                match merged.last_mut().filter(|(at, had)| at + had == start) {
                    Some((_, had)) => *had += len,
                    None => merged.push((start, len)),
                }
            }
            assert_eq!(merged, ranges);
        }
    }

    #[test]
    fn adjacent_ranges_merge_and_the_rest_stays_in_order() {
        let (table, index, gathered) =
            table_with(&[(4096, 512), (4608, 512), (8192, 1), (8193, 2)]);
        assert_eq!(rest(&table, index), [(4096, 1024), (8192, 3)]);
        assert_eq!(
            gathered,
            Ok(Gathered {
                addr_bits: 4096 | 8192,
                len_bits: 1024 | 3,
                count: 2
            })
        );
        let (table, index, gathered) = table_with(&[(512, 512)]);
        assert_eq!(rest(&table, index), [(512, 512)]);
        assert_eq!(
            gathered,
            Ok(Gathered {
                addr_bits: 512,
                len_bits: 512,
                count: 1
            })
        );
    }

    #[test]
    fn consume_crosses_ranges() {
        let (mut table, index, _) = table_with(&[(0, 10), (20, 10), (40, 10)]);
        let mut seen = Vec::new();
        table.consume(index, 15, |start, len| seen.push((start.addr(), len)));
        assert_eq!(seen, [(0, 10), (20, 5)]);
        assert_eq!(rest(&table, index), [(25, 5), (40, 10)]);
        table.consume(index, 15, |_, _| ());
        assert_eq!(rest(&table, index), []);
        let (mut table, index, _) = table_with(&[(100, 10)]);
        table.consume(index, 4, |_, _| ());
        assert_eq!(rest(&table, index), [(104, 6)]);
    }

    #[test]
    fn more_ranges_than_a_request_can_have_are_refused() {
        let many: Vec<_> = (0..RANGES_MAX).map(|at| (at * 1000, 10)).collect();
        let (table, index, gathered) = table_with(&many);
        assert_eq!(gathered.map(|gathered| gathered.count), Ok(RANGES_MAX));
        assert_eq!(rest(&table, index), many);
        let more: Vec<_> = (0..RANGES_MAX + 1).map(|at| (at * 1000, 10)).collect();
        assert_eq!(table_with(&more).2, Err(libc::EFAULT));
    }

    #[test]
    fn entries_are_reused_newest_first_and_run_out() {
        let mut table = Table::new(2, ()).unwrap();
        let entry = Entry::new(1, OpKind::Sync, 0, 0, ());
        assert_eq!(
            [(); 3].map(|()| table.take(entry.clone())),
            [Some(0), Some(1), None]
        );
        table.free(0);
        assert_eq!(table.take(entry), Some(0));
    }
}
