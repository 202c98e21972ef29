//! A guest to measure with: memory that is mapped twice, once by the crate under test and once by `vm-memory`, so
//! that our vring and `virtio_queue`'s use the same bytes.

use std::fs::File;
use std::sync::Arc;

use cleave_guest::{Memory, RegionSpec, VringLayout};
use rustix::fs::{MemfdFlags, memfd_create};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::{AvailRing, DescriptorTable, UsedRing};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

/// Length of each region.
pub const REGION_BYTES: u64 = 1 << 20;
/// Entries of the vring; a multiple of [`BATCH`], so that its entries are written only once.
pub const VRING_SIZE: u16 = 256;
/// Default number of chains in a batch.
pub const BATCH: u16 = 16;

// One page for each part. (`MockSplitQueue` could choose addresses, but it confuses entries of the available ring
// with bytes and places the used ring inside it.)
const DESC_ADDR: u64 = 0x1000;
const AVAIL_ADDR: u64 = 0x2000;
const USED_ADDR: u64 = 0x3000;
const TABLES_ADDR: u64 = 0x4_0000;
const DATA_ADDR: u64 = 0x8_0000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Guest memory in both mappings.
#[derive(Debug)]
pub struct Guest {
    /// As the daemon maps it.
    pub memory: Arc<Memory>,
    /// As `vm-memory` maps it.
    pub mmap: GuestMemoryMmap<()>,
}

impl Guest {
    /// Makes `regions` regions with holes between them, so that adjacent ones cannot be joined.
    pub fn new(regions: u64) -> Guest {
        let fd = memfd_create("bench", MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(regions * REGION_BYTES).unwrap();
        let specs = (0..regions)
            .map(|n| RegionSpec {
                guest_addr: region_addr(n),
                user_addr: (1 << 40) + region_addr(n),
                len_bytes: REGION_BYTES,
                file_offset: n * REGION_BYTES,
                file: file.try_clone().unwrap(),
            })
            .collect();
        let shared = Arc::new(file);
        let ranges = (0..regions).map(|n| {
            let offset = FileOffset::from_arc(Arc::clone(&shared), n * REGION_BYTES);
            (
                GuestAddress(region_addr(n)),
                REGION_BYTES as usize,
                Some(offset),
            )
        });
        Guest {
            memory: Memory::new(specs).unwrap(),
            mmap: GuestMemoryMmap::from_ranges_with_files(ranges).unwrap(),
        }
    }
}

/// Guest-physical address of a region.
pub fn region_addr(region: u64) -> u64 {
    region * 2 * REGION_BYTES
}

/// Placement of a chain's descriptors.
#[derive(Debug, Clone, Copy)]
pub enum Place {
    /// In the vring's own table.
    Direct,
    /// In an indirect table.
    Indirect,
}

/// The driver's side of a vring whose entries are written once and made available repeatedly.
pub struct Driver<'a> {
    mem: &'a GuestMemoryMmap<()>,
    avail: AvailRing<'a, GuestMemoryMmap<()>>,
    used: UsedRing<'a, GuestMemoryMmap<()>>,
    batch: u16,
    next: u16,
}

impl<'a> Driver<'a> {
    /// Writes [`BATCH`] chains of so many descriptors, and the whole available ring. A chain of three reads the first
    /// 4 KiB of the disk.
    pub fn new(guest: &'a Guest, descriptors: u16, place: Place) -> Driver<'a> {
        Driver::with_batch(guest, descriptors, place, BATCH)
    }

    /// As `new`, with this many chains in a batch: a power of two, at most the size of the vring.
    pub fn with_batch(guest: &'a Guest, descriptors: u16, place: Place, batch: u16) -> Driver<'a> {
        let mem = &guest.mmap;
        let table = |addr, len| DescriptorTable::new(mem, GuestAddress(addr), len);
        let direct = table(DESC_ADDR, VRING_SIZE);
        let avail = AvailRing::new(mem, GuestAddress(AVAIL_ADDR), VRING_SIZE);
        let used = UsedRing::new(mem, GuestAddress(USED_ADDR), VRING_SIZE);
        for chain in 0..batch {
            let head = match place {
                Place::Direct => {
                    let head = chain * descriptors;
                    write_chain(&direct, head, descriptors);
                    head
                }
                Place::Indirect => {
                    let bytes = 16 * u32::from(descriptors);
                    let addr = TABLES_ADDR + u64::from(chain) * u64::from(bytes);
                    write_chain(&table(addr, descriptors), 0, descriptors);
                    let outer = Descriptor::new(addr, bytes, INDIRECT, 0);
                    direct.store(chain, outer.into()).unwrap();
                    chain
                }
            };
            for entry in (chain..VRING_SIZE).step_by(usize::from(batch)) {
                let entry = avail.ring().ref_at(usize::from(entry)).unwrap();
                entry.store(head.to_le());
            }
        }
        Driver {
            mem,
            avail,
            used,
            batch,
            next: 0,
        }
    }

    /// Makes the next batch available: one store, whose cost all candidates share.
    pub fn offer(&mut self) {
        self.next = self.next.wrapping_add(self.batch);
        self.avail.idx().store(self.next.to_le());
    }

    /// Requests a call for the last chain of the next batch.
    pub fn want_call(&self) {
        let last = self.next.wrapping_add(self.batch).wrapping_sub(1);
        let at = AVAIL_ADDR + 4 + 2 * u64::from(VRING_SIZE);
        self.mem.write_obj(last.to_le(), GuestAddress(at)).unwrap();
    }

    /// Returns true if the device has used the whole batch.
    pub fn is_done(&self) -> bool {
        u16::from_le(self.used.idx().load()) == self.next
    }

    /// Panics if the device has not used the whole batch.
    pub fn check(&self) {
        assert_eq!(u16::from_le(self.used.idx().load()), self.next);
    }

    /// For our vring.
    pub fn layout(&self) -> VringLayout {
        VringLayout {
            size: VRING_SIZE,
            desc_addr: DESC_ADDR,
            avail_addr: AVAIL_ADDR,
            used_addr: USED_ADDR,
        }
    }

    /// Makes a `virtio_queue` queue of the guest's vring.
    pub fn queue(&self) -> Queue {
        let mut queue = Queue::new(VRING_SIZE).unwrap();
        let addrs = [DESC_ADDR, AVAIL_ADDR, USED_ADDR].map(GuestAddress);
        queue.try_set_desc_table_address(addrs[0]).unwrap();
        queue.try_set_avail_ring_address(addrs[1]).unwrap();
        queue.try_set_used_ring_address(addrs[2]).unwrap();
        queue.set_event_idx(true);
        queue.set_ready(true);
        queue
    }
}

fn write_chain(table: &DescriptorTable<'_, GuestMemoryMmap<()>>, head: u16, descriptors: u16) {
    for n in 0..descriptors {
        let descriptor = descriptor(head, n, descriptors);
        table.store(head + n, descriptor).unwrap();
    }
}

/// Layout of a read request: header readable, everything else writable.
fn descriptor(first: u16, n: u16, of: u16) -> RawDescriptor {
    let is_last = n + 1 == of;
    let flags = if is_last { 0 } else { NEXT } | if n == 0 && of > 1 { 0 } else { WRITE };
    let len = match (n, is_last) {
        (0, false) => 16,
        (_, true) => 1,
        _ => 4096,
    };
    let next = if is_last { 0 } else { first + n + 1 };
    Descriptor::new(DATA_ADDR + u64::from(n) * 4096, len, flags, next).into()
}
