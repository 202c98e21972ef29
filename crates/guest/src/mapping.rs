//! One mapped region of guest memory.
//!
//! It calls `mmap` itself instead of using `vm_memory::MmapRegion`, because that keeps the file open (one descriptor
//! per region, and a frontend can have 509), accepts unaligned hugetlb offsets, and does not check the file's size.

use std::fs::File;
use std::io;
use std::ptr::null_mut;
use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FileType, fstat, fstatfs};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::param::page_size;

use crate::room::{Allowance, Place, Taken};
use crate::sigbus::MappingWatch;
use crate::{MapError, RegionSpec};

/// `statfs` type of hugetlbfs, also reported for a memfd with hugetlb.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The file and offset that back an address. Equal origins are the same memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) file_offset: u64,
}

/// A shared mapping. When it is dropped, its pages go to the thread that waits for that. If none does, they are unmapped at once.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// `None` only during drop.
    pages: Option<MappedPages>,
    /// The region's first byte.
    start: *mut u8,
    pub(crate) origin: Origin,
    heir: Mutex<Option<Sender<MappedPages>>>,
}

/// The pages of a mapping, unmapped when dropped. That takes long: 5 ms and more for each GiB that was touched.
#[derive(Debug)]
pub(crate) struct MappedPages {
    /// `None` until they are watched, and during drop.
    watch: Option<MappingWatch>,
    base: *mut u8,
    map_bytes: usize,
    /// Dropped after the `munmap`, because others have its room then.
    place: Place,
}

/// How much of a mapping becomes zeroes when a page is touched that is no longer in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LostWith {
    /// The page alone, because its neighbours may be sound.
    Page,
    /// The mapping, which is worth nothing without it. Page by page, each could cost the process two mappings more.
    Mapping,
}

// SAFETY: any thread may unmap them.
unsafe impl Send for MappedPages {}
// SAFETY: nothing in it changes after it was created.
unsafe impl Sync for MappedPages {}

// SAFETY: a mapping is plain memory at an address that any thread may use; the (racy) accesses through it are
// responsible for its contents.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing in it changes after it was created.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the region of `spec`. The caller has checked that its length is not 0 and does not wrap. `own`: the room that the other
    /// mappings of its table take; `allowance`: how much the table may have; `lost`: how much is lost with a page.
    pub(crate) fn new(
        spec: &RegionSpec,
        own: Taken,
        allowance: Allowance,
        lost: LostWith,
    ) -> Result<Mapping, MapError> {
        let refuse = |source: io::Error| MapError::Map {
            guest_addr: spec.guest_addr,
            source,
        };
        let origin = check_file(spec)?;
        let page_bytes = page_bytes(&spec.file).map_err(refuse)?;
        // Below 2^63, because the file is that long.
        let (map_offset, map_bytes) = whole_pages(spec.file_offset, spec.len_bytes, page_bytes);
        let place = Place::take(map_bytes, own, allowance).ok_or(MapError::NoRoom {
            guest_addr: spec.guest_addr,
            len_bytes: spec.len_bytes,
        })?;
        let map_bytes = map_bytes as usize;
        // SAFETY: a new mapping at an address that the kernel chooses; nothing is overwritten.
        let base = unsafe {
            mmap(
                null_mut(),
                map_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &spec.file,
                map_offset,
            )
        }
        .map_err(|errno| refuse(errno.into()))?;
        // Guest secrets do not belong in a core dump. If the kernel refuses, nothing breaks.
        // SAFETY: our own fresh mapping; the advice does not change its contents.
        let _ = unsafe { madvise(base, map_bytes, Advice::LinuxDontDump) };
        let mut pages = MappedPages {
            watch: None,
            base: base.cast(),
            map_bytes,
            place,
        };
        // Watched before anything can touch them. If the watch is refused, `drop` unmaps them.
        let lost_bytes = match lost {
            LostWith::Page => page_bytes as usize,
            LostWith::Mapping => map_bytes,
        };
        let watch = MappingWatch::new(base as usize, map_bytes, lost_bytes).map_err(refuse)?;
        pages.watch = Some(watch);
        let within_bytes = (spec.file_offset - map_offset) as usize;
        Ok(Mapping {
            start: pages.base.wrapping_add(within_bytes),
            pages: Some(pages),
            origin,
            heir: Mutex::default(),
        })
    }

    /// Address of the region's first byte.
    #[inline]
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Returns the room that it takes.
    pub(crate) fn taken(&self) -> Taken {
        let place = self.pages.as_ref().map(|pages| &pages.place);
        place.map(Place::taken).unwrap_or_default()
    }

    /// Sends its pages to `heir` instead of another one when it is dropped.
    pub(crate) fn leave_to(&self, heir: Sender<MappedPages>) {
        *self.heir.lock().unwrap_or_else(PoisonError::into_inner) = Some(heir);
    }

    /// Returns true if a page of it was replaced by zeroes.
    pub(crate) fn is_lost(&self) -> bool {
        // As in `Memory::is_lost`: this thread's earlier reads are covered.
        fence(Ordering::Acquire);
        let watch = self.pages.as_ref().and_then(|pages| pages.watch.as_ref());
        watch.is_some_and(MappingWatch::is_lost)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let heir = self.heir.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let (Some(heir), Some(pages)) = (heir.take(), self.pages.take()) {
            // If nobody waits any more, they come back, and this thread unmaps them.
            let _ = heir.send(pages);
        }
    }
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        // Removed from the handler's table before it is unmapped, because the address may be reused at once.
        self.watch = None;
        // SAFETY: our own whole mapping; every holder of a pointer into it also held the `Mapping`, which is gone.
        let _ = unsafe { munmap(self.base.cast(), self.map_bytes) };
    }
}

/// Refuses a file that is not a memory file or is too short: an access beyond the file's end would be a SIGBUS.
fn check_file(spec: &RegionSpec) -> Result<Origin, MapError> {
    let guest_addr = spec.guest_addr;
    let refuse = |source: io::Error| MapError::Map { guest_addr, source };
    let stat = fstat(&spec.file).map_err(|errno| refuse(errno.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(refuse(io::Error::other("not a regular file or memfd")));
    }
    let found = u64::try_from(stat.st_size).unwrap_or(0);
    let Some(needed) = spec.file_offset.checked_add(spec.len_bytes) else {
        return Err(MapError::Length {
            guest_addr,
            len_bytes: spec.len_bytes,
        });
    };
    if needed > found {
        return Err(MapError::Short {
            guest_addr,
            needed,
            found,
        });
    }
    Ok(Origin {
        device: stat.st_dev,
        inode: stat.st_ino,
        file_offset: spec.file_offset,
    })
}

/// Returns the offset and the length of the whole pages that contain a range of a file. Hugetlb maps nothing else.
fn whole_pages(offset: u64, len_bytes: u64, page_bytes: u64) -> (u64, u64) {
    let within = offset % page_bytes;
    let map_bytes = (within + len_bytes).next_multiple_of(page_bytes);
    (offset - within, map_bytes)
}

/// Returns the file's mapping unit: hugetlb maps only whole huge pages.
fn page_bytes(file: &File) -> io::Result<u64> {
    let normal = page_size() as u64;
    let stat = fstatfs(file)?;
    if stat.f_type as u64 & 0xffff_ffff != HUGETLBFS_MAGIC {
        return Ok(normal);
    }
    let huge = u64::try_from(stat.f_bsize).unwrap_or(0);
    if huge.is_power_of_two() && huge >= normal {
        return Ok(huge);
    }
    Err(io::Error::other("unknown huge page size"))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::rig::{region, segment};
    use crate::{Memory, Unmapped};

    const HUGE_BYTES: u64 = 2 << 20;

    #[test]
    fn a_hugetlb_region_that_begins_inside_a_huge_page_is_mapped() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = File::from(memfd_create("huge", flags).unwrap());
        ftruncate(&file, 2 * HUGE_BYTES).unwrap();
        assert_eq!(page_bytes(&file).unwrap(), HUGE_BYTES);
        let spec = RegionSpec {
            guest_addr: 0,
            user_addr: 0,
            len_bytes: HUGE_BYTES,
            file_offset: 0x5000,
            file,
        };
        let memory = Memory::new(vec![spec]).unwrap();
        // If the host has no huge pages left, the first access is a SIGBUS, and the handler must replace a
        // huge page of the mapping. This is worth testing too; both cases must succeed.
        let mut out = [1; 8];
        match memory.copy_in(&[segment(HUGE_BYTES - 4, 4)], &mut out[..4]) {
            Ok(copied) => assert_eq!((copied, memory.is_lost()), (4, false)),
            Err(Unmapped) => assert!(memory.is_lost()),
        }
        assert_eq!(out, [0, 0, 0, 0, 1, 1, 1, 1]);
    }

    #[test]
    fn a_mapping_has_whole_pages_of_any_size() {
        for (offset, len_bytes, page_bytes, expected) in [
            (0x5000, 0x1000, 0x1000, (0x5000, 0x1000)),
            (0x5000, 0x1000, 0x4000, (0x4000, 0x4000)),
            (0x5000, 0x1000, 0x1_0000, (0, 0x1_0000)),
            (0x7000, 0x2000, 0x4000, (0x4000, 0x8000)),
            (0x1_f123, 0x1000, 0x1_0000, (0x1_0000, 0x2_0000)),
            (0x4000, 0x4000, 0x4000, (0x4000, 0x4000)),
        ] {
            let found = whole_pages(offset, len_bytes, page_bytes);
            assert_eq!(
                found, expected,
                "{offset:#x} {len_bytes:#x} {page_bytes:#x}"
            );
        }
    }

    #[test]
    fn a_dropped_mapping_leaves_neither_pages_nor_descriptors() {
        let spec = region(0, 0x5000);
        let kept = spec.file.as_fd().try_clone_to_owned().unwrap();
        let inode = fstat(&kept).unwrap().st_ino;
        let open = || {
            let fds = std::fs::read_dir("/proc/self/fd").unwrap();
            let inodes = fds.filter_map(|fd| fd.ok()?.path().metadata().ok());
            inodes.filter(|found| found.ino() == inode).count()
        };
        let mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let inode = format!(" {inode} ");
            maps.lines().filter(|line| line.contains(&inode)).count()
        };
        let memory = Memory::new(vec![spec]).unwrap();
        assert_eq!((mapped(), open()), (1, 1), "only our own handle is open");
        drop(memory);
        assert_eq!(mapped(), 0);
    }
}
