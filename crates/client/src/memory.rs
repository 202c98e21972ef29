//! The simulated guest's RAM: memfds that are mapped here and passed to the daemon.
//!
//! Unsafe: raw mappings. The daemon, another process, reads and writes the same pages at any moment, so there are no
//! references into them: bytes move by raw copies between the mapping and private memory. A mapping lives as long as
//! its [`GuestMemory`], which every owner of a pointer keeps in an `Arc`.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use rustix::param::page_size;

use crate::message::RegionBytes;
use crate::{Error, pattern_word};

/// Bytes of a page of the dirty log, whatever the host's pages are.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// Parameters of a region.
#[derive(Debug, Clone, Copy)]
pub struct RegionOptions {
    /// Guest-physical address.
    pub guest_addr: u64,
    /// Length in bytes, a multiple of the page size.
    pub len_bytes: u64,
    /// True if the memfd is sealed against shrinking.
    pub sealed: bool,
}

impl RegionOptions {
    /// Describes an ordinary region, which can be truncated later.
    pub fn new(guest_addr: u64, len_bytes: u64) -> RegionOptions {
        RegionOptions {
            guest_addr,
            len_bytes,
            sealed: false,
        }
    }
}

#[derive(Debug)]
struct Region {
    guest_addr: u64,
    len_bytes: u64,
    host: NonNull<u8>,
    file: OwnedFd,
}

/// Guest RAM made of regions, each a memfd of its own: regions that are adjacent in the guest are not adjacent on the
/// host.
#[derive(Debug)]
pub struct GuestMemory {
    regions: Vec<Region>,
    /// Next free byte of each region.
    next: Mutex<Vec<u64>>,
}

// SAFETY: the mappings are shared memory that other processes write at any time; all accesses go
// through raw copies or atomics, so moving or sharing the owner between threads adds nothing new.
unsafe impl Send for GuestMemory {}
// SAFETY: as above.
unsafe impl Sync for GuestMemory {}

impl GuestMemory {
    /// Creates and maps regions.
    pub fn new(plans: &[RegionOptions]) -> Result<Arc<GuestMemory>, Error> {
        let regions = plans
            .iter()
            .map(Region::new)
            .collect::<Result<Vec<_>, _>>()?;
        let next = Mutex::new(vec![0; regions.len()]);
        Ok(Arc::new(GuestMemory { regions, next }))
    }

    /// Returns the number of regions.
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Returns true if there are no regions.
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Returns a region as messages describe it to the daemon; its user address is our own mapping.
    pub fn region(&self, index: usize) -> RegionBytes {
        let region = &self.regions[index];
        RegionBytes {
            guest_addr: region.guest_addr,
            len_bytes: region.len_bytes,
            user_addr: region.host.as_ptr() as u64,
            file_offset: 0,
        }
    }

    /// Returns the file of a region.
    pub fn fd(&self, index: usize) -> BorrowedFd<'_> {
        self.regions[index].file.as_fd()
    }

    /// Allocates `len` bytes in region 0 and returns their guest address; they are never freed.
    pub fn alloc(&self, len: u64, align: u64) -> Result<u64, Error> {
        self.alloc_in(0, len, align)
    }

    /// Allocates `len` bytes in a region and returns their guest address.
    pub fn alloc_in(&self, index: usize, len: u64, align: u64) -> Result<u64, Error> {
        let region = &self.regions[index];
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let from = (region.guest_addr + next[index]).next_multiple_of(align.max(1));
        let end = from
            .checked_add(len)
            .ok_or_else(|| Error::Memory("too large".into()))?;
        if end > region.guest_addr + region.len_bytes {
            return Err(Error::Memory(format!(
                "no {len} bytes left in region {index}"
            )));
        }
        next[index] = end - region.guest_addr;
        Ok(from)
    }

    /// Returns our virtual address of a guest range inside one region.
    pub fn user_addr(&self, addr: u64) -> Option<u64> {
        self.host(addr, 1).map(|host| host.as_ptr() as u64)
    }

    /// Returns a pointer to `len` bytes inside one region, valid while this memory lives.
    pub(crate) fn host(&self, addr: u64, len: u64) -> Option<NonNull<u8>> {
        let region = self.regions.iter().find(|region| region.contains(addr))?;
        let offset = addr - region.guest_addr;
        if len > region.len_bytes - offset {
            return None;
        }
        // SAFETY: `offset` lies inside the region's mapping.
        Some(unsafe { region.host.add(offset as usize) })
    }

    /// Copies bytes out, across regions that are adjacent in the guest.
    ///
    /// # Panics
    /// Panics if the range is not guest memory: a mistake in the test.
    pub fn read(&self, addr: u64, out: &mut [u8]) {
        self.pieces(addr, out.len(), |host, from, len| {
            // SAFETY: `pieces` gives ranges inside one mapping; `out` is ours and cannot overlap it.
            // The daemon may write meanwhile; the guest would see a torn value too.
            unsafe { host.copy_to_nonoverlapping(NonNull::from(&mut out[from]), len) };
        });
    }

    /// Copies bytes in, across regions that are adjacent in the guest.
    ///
    /// # Panics
    /// Panics if the range is not guest memory.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        self.pieces(addr, bytes.len(), |host, from, len| {
            // SAFETY: as in `read`, in the other direction.
            unsafe { host.copy_from_nonoverlapping(NonNull::from(&bytes[from]), len) };
        });
    }

    /// Fills a range with one byte.
    ///
    /// # Panics
    /// Panics if the range is not guest memory.
    pub fn fill(&self, addr: u64, len: usize, byte: u8) {
        self.pieces(addr, len, |host, _, len| {
            // SAFETY: the range lies inside one mapping.
            unsafe { host.write_bytes(byte, len) };
        });
    }

    /// Returns a copy of some bytes.
    pub fn bytes(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.read(addr, &mut out);
        out
    }

    /// Returns some bytes and replaces them by zeroes, each in a single access.
    pub(crate) fn take_bytes(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len);
        self.pieces(addr, len, |host, _, len| {
            for at in 0..len {
                // SAFETY: the range lies inside one mapping; the daemon's accesses are atomic as well.
                let byte = unsafe { AtomicU8::from_ptr(host.add(at).as_ptr()) };
                out.push(byte.swap(0, Ordering::SeqCst));
            }
        });
        out
    }

    /// Returns the address after the last region.
    pub fn end(&self) -> u64 {
        let ends = self
            .regions
            .iter()
            .map(|region| region.guest_addr + region.len_bytes);
        ends.max().unwrap_or(0)
    }

    /// Returns a copy of all regions.
    pub fn copy(&self) -> Vec<Vec<u8>> {
        let regions = self.regions.iter();
        regions
            .map(|region| self.bytes(region.guest_addr, region.len_bytes as usize))
            .collect()
    }

    /// Returns the pages, as the dirty log numbers them, that differ from a copy.
    pub fn changed_pages(&self, before: &[Vec<u8>]) -> BTreeSet<u64> {
        let mut changed = BTreeSet::new();
        for ((region, old), new) in self.regions.iter().zip(before).zip(self.copy()) {
            let pages = old.chunks(PAGE_BYTES as usize);
            let pages = pages.zip(new.chunks(PAGE_BYTES as usize));
            let differing = (0..).zip(pages).filter(|(_, (old, new))| old != new);
            changed.extend(differing.map(|(page, _)| region.guest_addr / PAGE_BYTES + page));
        }
        changed
    }

    /// Truncates a region's file to `keep` bytes, rounded up to the host's pages. Private memory replaces the lost part of our
    /// own mapping first, so that only the daemon meets the hole.
    pub fn truncate(&self, index: usize, keep: u64) -> Result<(), Error> {
        let region = &self.regions[index];
        let keep = keep
            .next_multiple_of(page_size() as u64)
            .min(region.len_bytes);
        let cut = (region.len_bytes - keep) as usize;
        if cut > 0 {
            let flags = MapFlags::PRIVATE | MapFlags::FIXED;
            // SAFETY: the range is the tail of our own mapping, which stays mapped at the same
            // address; nothing but `Region::drop` unmaps it.
            let replaced = unsafe {
                let at = region.host.add(keep as usize).as_ptr().cast();
                mmap_anonymous(at, cut, ProtFlags::READ | ProtFlags::WRITE, flags)
            };
            replaced.map_err(|error| Error::Memory(error.to_string()))?;
        }
        ftruncate(&region.file, keep).map_err(|error| Error::Memory(error.to_string()))
    }

    /// Returns a range inside one region, for code that accesses it in every request.
    pub(crate) fn span(self: &Arc<Self>, addr: u64, len: u64) -> Result<Span, Error> {
        let host = self.host(addr, len);
        let host = host.ok_or_else(|| Error::Memory(format!("no {len} bytes at {addr:#x}")))?;
        Ok(Span {
            host,
            len: len as usize,
            _memory: Arc::clone(self),
        })
    }

    fn pieces(&self, addr: u64, len: usize, mut each: impl FnMut(NonNull<u8>, usize, usize)) {
        let mut done = 0;
        while done < len {
            let at = addr + done as u64;
            let Some(region) = self.regions.iter().find(|region| region.contains(at)) else {
                not_guest_memory(at);
            };
            let offset = at - region.guest_addr;
            let part = (len - done).min((region.len_bytes - offset) as usize);
            // SAFETY: `offset` lies inside the region's mapping.
            each(unsafe { region.host.add(offset as usize) }, done, part);
            done += part;
        }
    }
}

/// A range of guest memory whose address was looked up in advance.
#[derive(Debug)]
pub(crate) struct Span {
    host: NonNull<u8>,
    len: usize,
    _memory: Arc<GuestMemory>,
}

impl Span {
    /// Stores bytes.
    #[inline]
    pub(crate) fn store<const N: usize>(&self, at: usize, bytes: [u8; N]) {
        assert!(at <= self.len && N <= self.len - at, "outside of the span");
        // SAFETY: inside the span, which `_memory` keeps mapped.
        unsafe { self.host.add(at).cast::<[u8; N]>().write_unaligned(bytes) };
    }

    /// Loads bytes.
    #[inline]
    pub(crate) fn load<const N: usize>(&self, at: usize) -> [u8; N] {
        assert!(at <= self.len && N <= self.len - at, "outside of the span");
        // SAFETY: as in `store`. Volatile: the daemon may have written since the last load.
        unsafe { self.host.add(at).cast::<[u8; N]>().read_volatile() }
    }

    /// Stores so many words of the pattern, from word `first` of it on. Not generic, as `wrong_word`: so it is optimised
    /// with this crate, even for tests that are not.
    pub(crate) fn store_pattern(&self, at: usize, words: usize, seed: u64, first: u64) {
        for word in 0..words {
            let value = pattern_word(seed, first + word as u64);
            self.store(at + 8 * word, value.to_le_bytes());
        }
    }

    /// Returns the first word that differs from the pattern: its place, its value, and the pattern's.
    pub(crate) fn wrong_word(
        &self,
        at: usize,
        words: usize,
        seed: u64,
        first: u64,
    ) -> Option<(usize, u64, u64)> {
        let mut both = (0..words).map(|word| {
            let found = u64::from_le_bytes(self.load(at + 8 * word));
            (word, found, pattern_word(seed, first + word as u64))
        });
        both.find(|(_, found, wanted)| found != wanted)
    }

    /// Prefetches a cache line.
    #[inline]
    pub(crate) fn prefetch(&self, at: usize) {
        #[cfg(target_arch = "x86_64")]
        if at < self.len {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: the address lies inside the span; a prefetch touches nothing visible.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.host.add(at).as_ptr().cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }
}

#[allow(clippy::panic)] // only a mistake in the test leads here
fn not_guest_memory(addr: u64) -> ! {
    panic!("{addr:#x} is not guest memory");
}

impl Region {
    fn new(plan: &RegionOptions) -> Result<Region, Error> {
        let made = || -> rustix::io::Result<Region> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = memfd_create("cleave-client-guest", flags)?;
            ftruncate(&file, plan.len_bytes)?;
            if plan.sealed {
                rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)?;
            }
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let len = plan.len_bytes as usize;
            // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
            let host = unsafe {
                mmap(
                    std::ptr::null_mut(),
                    len,
                    access,
                    MapFlags::SHARED,
                    &file,
                    0,
                )?
            };
            let host = NonNull::new(host.cast()).ok_or(rustix::io::Errno::NOMEM)?;
            Ok(Region {
                guest_addr: plan.guest_addr,
                len_bytes: plan.len_bytes,
                host,
                file,
            })
        };
        made().map_err(|error| Error::Memory(error.to_string()))
    }

    fn contains(&self, addr: u64) -> bool {
        addr.wrapping_sub(self.guest_addr) < self.len_bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: made by `new` with this length; every holder of a pointer held the memory by `Arc`.
        let _ = unsafe { munmap(self.host.as_ptr().cast(), self.len_bytes as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_that_touch_in_the_guest_are_read_and_written_as_one() {
        let plans = [
            RegionOptions::new(0x10000, 0x1000),
            RegionOptions::new(0x11000, 0x1000),
        ];
        let memory = GuestMemory::new(&plans).unwrap();
        let bytes: Vec<u8> = (0..200).collect();
        memory.write(0x11000 - 100, &bytes);
        assert_eq!(memory.bytes(0x11000 - 100, 200), bytes);
        assert_eq!(memory.bytes(0x11000, 1), [100]);
        assert!(
            memory.host(0x11000 - 100, 200).is_none(),
            "not one range on the host"
        );
    }

    #[test]
    fn allocation_aligns_and_ends() {
        let memory = GuestMemory::new(&[RegionOptions::new(0x10000, 0x1000)]).unwrap();
        assert_eq!(memory.alloc(1, 1).unwrap(), 0x10000);
        assert_eq!(memory.alloc(1, 64).unwrap(), 0x10040);
        assert!(memory.alloc(0x1000, 1).is_err());
    }

    #[test]
    fn a_cut_region_stays_readable_here_and_is_short_for_others() {
        let page = page_size() as u64;
        let memory = GuestMemory::new(&[RegionOptions::new(0, 4 * page)]).unwrap();
        memory.fill(0, 4 * page as usize, 7);
        memory.truncate(0, 1).unwrap();
        assert_eq!(memory.bytes(page - 1, 2), [7, 0]);
        assert_eq!(
            rustix::fs::fstat(memory.fd(0)).unwrap().st_size,
            page as i64
        );
    }

    #[test]
    fn a_sealed_region_cannot_be_cut() {
        let plan = RegionOptions {
            sealed: true,
            ..RegionOptions::new(0, 4 * page_size() as u64)
        };
        assert!(GuestMemory::new(&[plan]).unwrap().truncate(0, 1).is_err());
    }
}
