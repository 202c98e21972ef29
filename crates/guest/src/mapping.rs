//! One mapped region of guest memory.
//!
//! Our own `mmap` and not `vm_memory::MmapRegion`, because that keeps the file open (a descriptor
//! per region, of which a frontend can name 509), takes unaligned hugetlb offsets as they are, and
//! does not look at the file's size.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::ptr::null_mut;
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FileType, fstat, fstatfs};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::param::page_size;

use crate::sigbus::Watch;
use crate::{MapError, RegionSpec};

/// `statfs` type of hugetlbfs, which memfd with hugetlb has too.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Which bytes of which file stand behind an address: what is equal here is the same memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) file_offset: u64,
}

/// A shared mapping; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// `None` only while dropping.
    watch: Option<Watch>,
    base: *mut u8,
    map_bytes: usize,
    /// The region's first byte lies so far into the mapping.
    delta_bytes: usize,
    pub(crate) origin: Origin,
    /// Dropped with the mapping, behind the `munmap`: that is how those who wait for it hear of it.
    end_watchers: Mutex<Vec<Sender<Infallible>>>,
}

// SAFETY: a mapping is plain memory with an address that any thread may use; what happens to its
// contents is the business of the (racy) accesses made through it.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing in it changes after it was made.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps what `spec` names. Lengths were checked by the caller to be neither 0 nor wrapping.
    pub(crate) fn new(spec: &RegionSpec) -> Result<Mapping, MapError> {
        let refuse = |source: io::Error| MapError::Map {
            guest_addr: spec.guest_addr,
            source,
        };
        let origin = check_file(spec)?;
        let page_bytes = page_bytes(&spec.file).map_err(refuse)?;
        let delta_bytes = spec.file_offset % page_bytes;
        // Below 2^63, since the file holds it all; rounded up, as hugetlb takes whole pages only.
        let map_bytes = (delta_bytes + spec.len_bytes).next_multiple_of(page_bytes) as usize;
        // SAFETY: a new mapping where the kernel likes; nothing is overwritten.
        let base = unsafe {
            mmap(
                null_mut(),
                map_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &spec.file,
                spec.file_offset - delta_bytes,
            )
        }
        .map_err(|errno| refuse(errno.into()))?;
        // Guest secrets do not belong in a core dump; where the kernel disagrees nothing breaks.
        // SAFETY: our own fresh mapping; the advice does not change its contents.
        let _ = unsafe { madvise(base, map_bytes, Advice::LinuxDontDump) };
        let mut mapping = Mapping {
            watch: None,
            base: base.cast(),
            map_bytes,
            delta_bytes: delta_bytes as usize,
            origin,
            end_watchers: Mutex::default(),
        };
        // Watched before anybody can touch it; refused, it is unmapped by its drop.
        let watch = Watch::new(base as usize, map_bytes, page_bytes as usize).map_err(refuse)?;
        mapping.watch = Some(watch);
        Ok(mapping)
    }

    /// Where the region's first byte is.
    pub(crate) fn start(&self) -> *mut u8 {
        self.base.wrapping_add(self.delta_bytes)
    }

    /// Drops `alive` when nothing is mapped here any more.
    pub(crate) fn watch_end(&self, alive: Sender<Infallible>) {
        let watchers = self.end_watchers.lock();
        watchers.unwrap_or_else(PoisonError::into_inner).push(alive);
    }

    /// A page of it was replaced by zeroes.
    pub(crate) fn is_lost(&self) -> bool {
        self.watch.as_ref().is_some_and(Watch::is_lost)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First out of the handler's table, then unmapped: the address may be reused at once.
        self.watch = None;
        // SAFETY: our own mapping, whole; whoever held a pointer into it held us.
        let _ = unsafe { munmap(self.base.cast(), self.map_bytes) };
    }
}

/// Refuses what is no memory file or too short: a touch behind the file's end would be a SIGBUS.
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

/// The file's unit of mapping: hugetlb maps whole huge pages only.
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
        // Where the host has no huge pages left, the first touch is a SIGBUS, and a huge page of the
        // mapping has to be replaced: the other path worth testing. Both end well.
        let mut out = [1; 8];
        match memory.copy_in(&[segment(HUGE_BYTES - 4, 4)], &mut out[..4]) {
            Ok(copied) => assert_eq!((copied, memory.is_lost()), (4, false)),
            Err(Unmapped) => assert!(memory.is_lost()),
        }
        assert_eq!(out, [0, 0, 0, 0, 1, 1, 1, 1]);
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
        assert_eq!((mapped(), open()), (1, 1), "only ours is open");
        drop(memory);
        assert_eq!(mapped(), 0);
    }
}
