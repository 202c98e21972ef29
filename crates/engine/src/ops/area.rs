//! Anonymous memory that the kernel backs page by page when it is touched, so that tables can be sized for
//! the worst case and cost only what they use.
//!
//! Unsafe because it owns a mapping and hands out raw pointers into it. A user of such a pointer must keep
//! the `Area` alive as long as anything, including the kernel, may follow the pointer.

use std::io;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Permitted access to an area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Reads and writes.
    ReadWrite,
    /// Reads only: the area stays zero, and a stray store faults instead of corrupting data.
    Read,
}

/// A private, zeroed mapping.
#[derive(Debug)]
pub(crate) struct Area {
    map: NonNull<u8>,
    map_bytes: usize,
    start: NonNull<u8>,
    len: usize,
}

impl Area {
    /// Maps `len` bytes whose first is aligned to `align`, a power of two.
    pub(crate) fn new(len: usize, align: usize, access: Access) -> io::Result<Area> {
        let slack = align.saturating_sub(rustix::param::page_size());
        let map_bytes = len
            .max(1)
            .checked_add(slack)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let protection = match access {
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
            Access::Read => ProtFlags::READ,
        };
        // SAFETY: a fresh anonymous mapping at an address that the kernel chooses replaces nothing.
        let map = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                map_bytes,
                protection,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        // A forked child must not get pages that the kernel may be writing. This is only a hint.
        // SAFETY: the range is the mapping just created, and DONTFORK changes nothing for this process.
        let _ = unsafe { rustix::mm::madvise(map, map_bytes, Advice::LinuxDontFork) };
        // Bounce buffers hold the contents of disks, which do not belong in a core dump. This is a hint too.
        // SAFETY: the same range, and DONTDUMP changes nothing for this process either.
        let _ = unsafe { rustix::mm::madvise(map, map_bytes, Advice::LinuxDontDump) };
        let map = NonNull::new(map.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let shift = map.as_ptr().align_offset(align.max(1)).min(slack);
        // SAFETY: `shift` ≤ `slack`, which was added to the length mapped.
        let start = unsafe { map.add(shift) };
        Ok(Area {
            map,
            map_bytes,
            start,
            len,
        })
    }

    /// Never unmaps it.
    pub(crate) fn leak(&mut self) {
        // `drop` then unmaps nothing.
        self.map_bytes = 0;
    }

    /// Gives the memory of these bytes back to the kernel, but for a page at the beginning; they read as zeroes then.
    ///
    /// # Safety
    /// Nobody, the kernel included, relies on what they hold.
    pub(crate) unsafe fn give_back(&self, from: usize, to: usize) {
        let from = from.next_multiple_of(rustix::param::page_size());
        if from < to {
            // SAFETY: the range is inside of the mapping, whose start is aligned to pages, and the caller gives up what it holds.
            // It stays if the kernel refuses.
            let _ = unsafe {
                rustix::mm::madvise(self.at(from).cast(), to - from, Advice::LinuxDontNeed)
            };
        }
    }

    /// The byte at `offset`, which must be below the length asked for.
    #[inline]
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.len);
        // SAFETY: offsets are slot numbers times slot sizes, below the length asked for (asserted).
        unsafe { self.start.as_ptr().add(offset) }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `new`, or an empty range. The owner (`Files`) drops it only
        // after the kernel has reported every op that points into it, and leaks it otherwise.
        let _ = unsafe { rustix::mm::munmap(self.map.as_ptr().cast(), self.map_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_area_is_zero_aligned_and_writable_to_its_end() {
        for align in [1, 4096, 65536, 1 << 21] {
            let area = Area::new(3 * 4096, align, Access::ReadWrite).unwrap();
            assert_eq!(area.at(0).addr() % align, 0);
            // SAFETY: the last byte of the area, which lives to the end of the scope.
            unsafe {
                assert_eq!(area.at(3 * 4096 - 1).read(), 0);
                area.at(3 * 4096 - 1).write(7);
                assert_eq!(area.at(3 * 4096 - 1).read(), 7);
            }
        }
    }
}
