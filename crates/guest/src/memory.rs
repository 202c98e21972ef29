//! The guest's memory as an immutable snapshot.

use std::marker::PhantomData;
use std::ops::{ControlFlow, Deref};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering, compiler_fence, fence};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use cleave_blk::Segment;
use vm_memory::VolatileSlice;

use crate::mapping::{LostWith, MappedPages, Mapping, Origin};
use crate::room::{Allowance, Taken};
use crate::{MapError, RegionSpec, racy, sigbus};

/// A guest range that no region covers, or any range of memory that is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("guest memory is not mapped there")]
pub struct Unmapped;

/// One mapped byte of guest memory, to be written later.
#[derive(Debug, Clone, Copy)]
pub struct Spot<'a> {
    host: *mut u8,
    /// Keeps it mapped.
    _memory: PhantomData<&'a Memory>,
}

impl Spot<'_> {
    /// Stores the byte. Release: all earlier writes are visible before it.
    #[inline]
    pub fn store(self, byte: u8) {
        // SAFETY: one mapped byte while the memory is borrowed. A byte is always aligned, and the guest's
        // accesses to it are outside the Rust memory model.
        unsafe { AtomicU8::from_ptr(self.host) }.store(byte, Ordering::Release);
    }
}

/// A worker's counted reference to one memory table. Everything that refers to guest memory has a clone (a vring, a
/// request in flight, an op), and the table stays mapped until the last clone is dropped. Clones are counted
/// without an atomic, so an epoch stays on its thread.
#[derive(Debug, Clone)]
#[expect(
    clippy::redundant_allocation,
    reason = "the outer count belongs to one thread and needs no atomics; the inner one is shared"
)]
pub struct Epoch(Rc<Arc<Memory>>);

/// Two holds are equal if they are clones of one epoch.
impl PartialEq for Epoch {
    fn eq(&self, other: &Epoch) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Epoch {}

impl From<Arc<Memory>> for Epoch {
    fn from(memory: Arc<Memory>) -> Epoch {
        Epoch(Rc::new(memory))
    }
}

impl Deref for Epoch {
    type Target = Memory;

    #[inline]
    fn deref(&self) -> &Memory {
        &self.0
    }
}

/// Waits for regions that have left a table, and unmaps them. See [`Memory::departing`].
#[derive(Debug)]
pub struct Departure(Receiver<MappedPages>);

impl Departure {
    /// Waits for at most `time` until nothing refers to them. Returns whether all are unmapped.
    pub fn is_over_within(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        loop {
            // Each mapping holds a sender, so the channel closes with the last one.
            let left = until.saturating_duration_since(Instant::now());
            match self.0.recv_timeout(left) {
                Ok(pages) => drop(pages),
                Err(ended) => return ended == RecvTimeoutError::Disconnected,
            }
        }
    }
}

/// One region, mapped.
#[derive(Debug, Clone)]
struct Region {
    guest_addr: u64,
    len_bytes: u64,
    /// Its start on the host; stored here to avoid a look-up in `mapping`.
    host: *mut u8,
    user_addr: u64,
    /// Keeps `host` valid. Shared with earlier and later tables.
    mapping: Arc<Mapping>,
}

// SAFETY: `host` points into `mapping`, which is Send and Sync and lives as long as the region.
unsafe impl Send for Region {}
// SAFETY: as above; a region never changes.
unsafe impl Sync for Region {}

impl Region {
    /// Maps a region of a table whose other mappings take the room `own`.
    fn map(spec: &RegionSpec, own: Taken, allowance: Allowance) -> Result<Region, MapError> {
        let (guest_addr, len_bytes) = (spec.guest_addr, spec.len_bytes);
        let fits = |addr: u64| len_bytes > 0 && addr.checked_add(len_bytes - 1).is_some();
        if !fits(guest_addr) || !fits(spec.user_addr) {
            return Err(MapError::Length {
                guest_addr,
                len_bytes,
            });
        }
        let mapping = Arc::new(Mapping::new(spec, own, allowance, LostWith::Page)?);
        Ok(Region {
            guest_addr,
            len_bytes,
            host: mapping.start(),
            user_addr: spec.user_addr,
            mapping,
        })
    }

    /// Returns the bytes from `addr`, which must be inside, to the region's end.
    #[inline]
    fn left_at(&self, addr: u64) -> Option<u64> {
        let offset_bytes = addr.wrapping_sub(self.guest_addr);
        (offset_bytes < self.len_bytes).then(|| self.len_bytes - offset_bytes)
    }

    /// Returns the host address of `addr`, which must be inside.
    #[inline]
    fn host_at(&self, addr: u64) -> *mut u8 {
        self.host
            .wrapping_add(addr.wrapping_sub(self.guest_addr) as usize)
    }

    /// Returns the file and offset that back `addr`, which must be inside.
    fn origin_of(&self, addr: u64) -> Origin {
        let origin = self.mapping.origin;
        let offset_bytes = addr.wrapping_sub(self.guest_addr);
        Origin {
            file_offset: origin.file_offset.wrapping_add(offset_bytes),
            ..origin
        }
    }

    /// Returns the file and offset that would back user address 0 if the region reached so far. It is equal for regions that map
    /// each user address to the same byte of the same file.
    fn user_origin(&self) -> Origin {
        let origin = self.mapping.origin;
        Origin {
            file_offset: origin.file_offset.wrapping_sub(self.user_addr),
            ..origin
        }
    }
}

/// The guest's memory: immutable, shared by `Arc`, and unmapped when the last holder drops it. A changed
/// table is a new `Memory` that shares the mappings of the regions that stay.
///
/// Once a page of it is lost (the frontend cut the file, see [`Memory::is_lost`]), every access is refused as
/// [`Unmapped`], so that zeroes that the guest never wrote do not reach a disk.
#[derive(Debug)]
pub struct Memory {
    /// Sorted by guest address.
    regions: Box<[Region]>,
    /// The largest region, which is searched first because in a large guest nearly every buffer is there. (A
    /// hint that followed the requests would be a cache line that all workers write.)
    largest: usize,
    /// The number of marks with which no region was lost.
    sound_at: AtomicUsize,
}

impl Memory {
    /// Most regions of a table; the frontend gets it as the number of memory slots.
    pub const REGIONS_MAX: usize = 509;

    /// Maps a whole table (SET_MEM_TABLE), in any order. A table without regions is legal.
    pub fn new(regions: Vec<RegionSpec>) -> Result<Arc<Memory>, MapError> {
        Self::new_in(regions, Allowance::Share)
    }

    /// Does what [`Memory::new`] does, for a table that may have so much room.
    pub fn new_in(regions: Vec<RegionSpec>, allowance: Allowance) -> Result<Arc<Memory>, MapError> {
        if regions.len() > Self::REGIONS_MAX {
            return Err(MapError::TooMany(Self::REGIONS_MAX));
        }
        let mut own = Taken::default();
        let mut mapped = Vec::with_capacity(regions.len());
        for spec in &regions {
            let region = Region::map(spec, own, allowance)?;
            own = own.and(region.mapping.taken());
            mapped.push(region);
        }
        Self::assemble(mapped)
    }

    /// Makes a copy of this table with one more region (ADD_MEM_REG).
    pub fn with(&self, region: RegionSpec) -> Result<Arc<Memory>, MapError> {
        self.with_in(region, Allowance::Share)
    }

    /// Does what [`Memory::with`] does, for a table that may have so much room.
    pub fn with_in(
        &self,
        region: RegionSpec,
        allowance: Allowance,
    ) -> Result<Arc<Memory>, MapError> {
        if self.regions.len() >= Self::REGIONS_MAX {
            return Err(MapError::TooMany(Self::REGIONS_MAX));
        }
        let mut regions = self.regions.to_vec();
        let own = regions.iter().map(|region| region.mapping.taken());
        let own = own.fold(Taken::default(), Taken::and);
        regions.push(Region::map(&region, own, allowance)?);
        Self::assemble(regions)
    }

    /// Makes a copy of this table without one region (REM_MEM_REG), matched by guest address, user address and length.
    pub fn without(
        &self,
        guest_addr: u64,
        user_addr: u64,
        len_bytes: u64,
    ) -> Result<Arc<Memory>, MapError> {
        let named = |region: &Region| {
            (region.guest_addr, region.user_addr, region.len_bytes)
                == (guest_addr, user_addr, len_bytes)
        };
        let mut regions = self.regions.to_vec();
        regions.retain(|region| !named(region));
        if regions.len() == self.regions.len() {
            return Err(MapError::Unknown {
                guest_addr,
                len_bytes,
            });
        }
        Self::assemble(regions)
    }

    fn assemble(mut regions: Vec<Region>) -> Result<Arc<Memory>, MapError> {
        regions.sort_by_key(|region| region.guest_addr);
        check_overlap(&regions, |region| region.guest_addr, |_, _| false)?;
        let mut by_user: Vec<Region> = regions.clone();
        by_user.sort_by_key(|region| region.user_addr);
        check_overlap(
            &by_user,
            |region| region.user_addr,
            |a, b| a.user_origin() == b.user_origin(),
        )?;
        let largest = (0..regions.len())
            .max_by_key(|&index| regions[index].len_bytes)
            .unwrap_or(0);
        Ok(Arc::new(Memory {
            regions: regions.into(),
            largest,
            // Not looked at yet.
            sound_at: AtomicUsize::new(usize::MAX),
        }))
    }

    /// Waits for the regions of this table that `next` does not share: until the last epoch, vring, request or op that refers to them
    /// has released them. Then the thread that waits unmaps them, because the one that released them may serve other guests.
    pub fn departing(&self, next: &Memory) -> Departure {
        let (heir, pages) = channel();
        for region in &self.regions {
            let stays = |other: &Region| Arc::ptr_eq(&region.mapping, &other.mapping);
            if !next.regions.iter().any(stays) {
                region.mapping.leave_to(heir.clone());
            }
        }
        Departure(pages)
    }

    /// Returns true if both tables map the same bytes of the same files at this range, even if twice. `false` unless each table
    /// covers it by one region.
    pub(crate) fn has_same_bytes(&self, other: &Memory, addr: u64, len_bytes: u64) -> bool {
        let origin = |memory: &Memory| {
            let region = memory.region_at(addr)?;
            (region.left_at(addr)? >= len_bytes).then(|| region.origin_of(addr))
        };
        let origin_here = origin(self);
        origin_here.is_some() && origin_here == origin(other)
    }

    /// Translates one of the frontend's virtual addresses to a guest-physical one.
    pub fn guest_addr(&self, user_addr: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset_bytes = user_addr.wrapping_sub(region.user_addr);
            (offset_bytes < region.len_bytes).then(|| region.guest_addr.wrapping_add(offset_bytes))
        })
    }

    /// Returns the highest address of the table.
    pub(crate) fn last_addr(&self) -> Option<u64> {
        let last = self.regions.last()?;
        Some(last.guest_addr + (last.len_bytes - 1))
    }

    /// Returns true if a memory file was cut while mapped and a page of it was replaced by zeroes: this connection cannot
    /// continue. It covers everything that this thread has read before. Costs one load as long as no connection has lost memory.
    #[inline]
    pub fn is_lost(&self) -> bool {
        // If another thread replaced a page, this one reads the zeroes without a fault. The other one set the mark first, but a
        // processor that loads out of order (ARM) could have read the mark here before the zeroes.
        fence(Ordering::Acquire);
        self.is_known_lost()
    }

    /// Returns true if any memory of the process is lost, so that it is worth asking which. Costs one load.
    #[inline]
    pub fn any_is_lost() -> bool {
        // As in `is_lost`.
        fence(Ordering::Acquire);
        sigbus::any_lost()
    }

    /// Does what `is_lost` does, before the memory is accessed: it covers no earlier read.
    #[inline]
    fn is_known_lost(&self) -> bool {
        sigbus::any_lost() && self.any_region_lost()
    }

    /// Looks at each region only if some mapping was marked since the last time: one that stays lost, which a frontend may keep, must
    /// not have every access of every disk look at up to 509 of them.
    #[cold]
    fn any_region_lost(&self) -> bool {
        let marks = sigbus::marks();
        if self.sound_at.load(Ordering::Acquire) == marks {
            return false;
        }
        let is_lost = self.regions.iter().any(|region| region.mapping.is_lost());
        if !is_lost {
            self.sound_at.store(marks, Ordering::Release);
        }
        is_lost
    }

    /// Copies the first `out.len()` bytes of the stream `segments`, or fewer if the stream is shorter. After
    /// `Unmapped` the contents of `out` are meaningless.
    pub fn copy_in(&self, segments: &[Segment], out: &mut [u8]) -> Result<usize, Unmapped> {
        let mut done = 0;
        for segment in clip(segments, out.len()) {
            self.resolve(segment, |host, len| {
                if let Some(piece) = out.get_mut(done..done + len) {
                    // SAFETY: `resolve` checked that `len` bytes are mapped while `self` lives; the slice
                    // does not outlive this call and is not a reference to guest memory.
                    unsafe { VolatileSlice::new(host, len) }.copy_to(piece);
                }
                done += len;
            })?;
        }
        // The caller checks the copy, so it must not be read from guest memory a second time.
        compiler_fence(Ordering::SeqCst);
        if self.is_lost() {
            return Err(Unmapped);
        }
        Ok(done)
    }

    /// Copies `bytes` to the beginning of the stream `segments`. Returns how many fitted. After `Unmapped`
    /// nothing was written.
    pub fn copy_out(&self, segments: &[Segment], bytes: &[u8]) -> Result<usize, Unmapped> {
        if !clip(segments, bytes.len()).all(|segment| self.covers(segment)) {
            return Err(Unmapped);
        }
        let mut done = 0;
        for segment in clip(segments, bytes.len()) {
            self.resolve(segment, |host, len| {
                if let Some(piece) = bytes.get(done..done + len) {
                    // SAFETY: as in `copy_in`.
                    unsafe { VolatileSlice::new(host, len) }.copy_from(piece);
                }
                done += len;
            })?;
        }
        Ok(done)
    }

    /// Returns the byte at `addr`; `None` if it is not mapped.
    #[inline]
    pub fn spot(&self, addr: u64) -> Option<Spot<'_>> {
        let host = self.host_range(addr, 1)?;
        Some(Spot {
            host,
            _memory: PhantomData,
        })
    }

    /// Copies the first 16 bytes of the stream `segments` once; `None` if they are not contiguous. A fast
    /// path of `copy_in`.
    #[inline]
    pub fn copy_16(&self, segments: &[Segment]) -> Option<[u8; 16]> {
        let first = segments.first().filter(|first| first.len >= 16)?;
        let host = self.host_range(first.addr, 16)?;
        // SAFETY: `host_range` checked that 16 bytes are mapped while `self` lives.
        let copy = unsafe { racy::bytes_16(host) };
        // As in `copy_in`, the copy is checked.
        compiler_fence(Ordering::SeqCst);
        (!self.is_lost()).then_some(copy)
    }

    /// Returns true if all bytes of the segment are mapped. An empty segment always is.
    pub fn covers(&self, segment: Segment) -> bool {
        self.resolve(segment, |_, _| ()).is_ok()
    }

    /// Passes the host ranges of a guest range to `piece` in order: one, or several if the range crosses
    /// regions that are adjacent in the guest. `Err`: a byte is not mapped, and `piece` got the ranges before it; or the memory is
    /// lost, and it got none. An empty segment is legal at any address and has no host range. Only for engines:
    /// the pointers are valid while this `Memory` lives, and accesses race with the guest's.
    #[inline]
    pub fn resolve(
        &self,
        segment: Segment,
        mut piece: impl FnMut(*mut u8, usize),
    ) -> Result<(), Unmapped> {
        self.resolve_until(segment, |host, len| {
            piece(host, len);
            ControlFlow::Continue(())
        })
    }

    /// Does what [`Memory::resolve`] does, until `piece` breaks off. That is an `Err` too. A guest chooses how many ranges there
    /// are: its segments may lie on top of each other, each across all regions of the table.
    #[inline]
    pub fn resolve_until(
        &self,
        segment: Segment,
        mut piece: impl FnMut(*mut u8, usize) -> ControlFlow<()>,
    ) -> Result<(), Unmapped> {
        if segment.len == 0 {
            return Ok(());
        }
        if let Some(host) = self.host_range(segment.addr, u64::from(segment.len)) {
            return match piece(host, segment.len as usize) {
                ControlFlow::Continue(()) => Ok(()),
                ControlFlow::Break(()) => Err(Unmapped),
            };
        }
        self.resolve_scattered(segment, &mut piece)
    }

    #[cold]
    fn resolve_scattered(
        &self,
        segment: Segment,
        piece: &mut dyn FnMut(*mut u8, usize) -> ControlFlow<()>,
    ) -> Result<(), Unmapped> {
        // Memory that is lost from here on is treated as lost after this call.
        if self.is_known_lost() {
            return Err(Unmapped);
        }
        let mut left_bytes = u64::from(segment.len);
        let mut next = Some(segment.addr);
        let first = self.last_region_from(segment.addr).ok_or(Unmapped)?;
        // They are sorted, so the next byte is in the next one or in none.
        for region in self.regions.iter().skip(first) {
            let addr = next.ok_or(Unmapped)?;
            let here = region.left_at(addr).ok_or(Unmapped)?.min(left_bytes);
            if piece(region.host_at(addr), here as usize).is_break() {
                return Err(Unmapped);
            }
            left_bytes -= here;
            if left_bytes == 0 {
                return Ok(());
            }
            // A region may end at 2^64; nothing follows there.
            next = addr.checked_add(here);
        }
        Err(Unmapped)
    }

    /// Returns the host address of `len_bytes` bytes that lie in one region. Only for engines, as [`Memory::resolve`].
    #[inline]
    pub fn host_range(&self, addr: u64, len_bytes: u64) -> Option<*mut u8> {
        let region = self.region_at(addr)?;
        let fits = region.left_at(addr)? >= len_bytes;
        (fits && !self.is_known_lost()).then(|| region.host_at(addr))
    }

    #[inline]
    fn region_at(&self, addr: u64) -> Option<&Region> {
        let largest = self.regions.get(self.largest)?;
        if largest.left_at(addr).is_some() {
            return Some(largest);
        }
        let region = self.regions.get(self.last_region_from(addr)?)?;
        region.left_at(addr).is_some().then_some(region)
    }

    /// Returns the index of the last region that begins at `addr` or below.
    #[inline]
    fn last_region_from(&self, addr: u64) -> Option<usize> {
        let begins = |region: &Region| region.guest_addr <= addr;
        self.regions.partition_point(begins).checked_sub(1)
    }
}

/// Returns the first `len` bytes of a stream, as segments.
#[inline]
fn clip(segments: &[Segment], len: usize) -> impl Iterator<Item = Segment> {
    let mut left = len;
    segments.iter().map_while(move |segment| {
        let take = left.min(segment.len as usize);
        let wanted = left > 0;
        left -= take;
        // `take` is at most a u32.
        wanted.then_some(Segment {
            addr: segment.addr,
            len: take as u32,
        })
    })
}

/// Refuses adjacent list entries (sorted by `start`) that share addresses, unless `same` allows it.
fn check_overlap(
    sorted: &[Region],
    start: impl Fn(&Region) -> u64,
    same: impl Fn(&Region, &Region) -> bool,
) -> Result<(), MapError> {
    // The region with the highest end so far. If overlaps are allowed, it need not be the previous one.
    let mut reaching: Option<&Region> = None;
    let last = |region: &Region| start(region).saturating_add(region.len_bytes - 1);
    for region in sorted {
        if let Some(before) = reaching
            && start(region) <= last(before)
            && !same(before, region)
        {
            return Err(MapError::Overlap {
                guest_addr: region.guest_addr,
            });
        }
        if reaching.is_none_or(|before| last(before) < last(region)) {
            reaching = Some(region);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
