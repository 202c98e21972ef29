//! Compares the vring with an independent device side: `virtio_queue::Queue` serves a copy of the same
//! memory, and both must see the same chains, leave the same used ring and agree on calls.

#![allow(clippy::unwrap_used)] // helper functions of tests are outside of test functions here

use std::fs::File;
use std::sync::Arc;

use cleave_blk::Segment;
use cleave_blk::spec::feature;
use cleave_guest::{Chain, Memory, RegionSpec, TakenChain, Vring, VringLayout};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

const MEMORY_BYTES: usize = 1 << 20;
/// Behind the largest rings of these tests.
const TABLES: u64 = 0x2_0000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// One memory file that both sides map.
struct Both {
    ours: Arc<Memory>,
    theirs: GuestMemoryMmap,
}

fn both() -> Both {
    let file = tempfile::tempfile().unwrap();
    file.set_len(MEMORY_BYTES as u64).unwrap();
    let start = GuestAddress(0);
    let shared = |file: &File| Some(FileOffset::new(file.try_clone().unwrap(), 0));
    let theirs =
        GuestMemoryMmap::from_ranges_with_files([(start, MEMORY_BYTES, shared(&file))]).unwrap();
    let spec = RegionSpec {
        guest_addr: 0,
        user_addr: 0,
        len_bytes: MEMORY_BYTES as u64,
        file_offset: 0,
        file,
    };
    Both {
        ours: Memory::new(vec![spec]).unwrap(),
        theirs,
    }
}

fn layout(size: u16) -> VringLayout {
    VringLayout {
        size,
        desc_addr: 0,
        avail_addr: 0x8000,
        used_addr: 0xc000,
    }
}

fn oracle(layout: VringLayout, base: u16, event_idx: bool) -> Queue {
    let mut queue = Queue::new(layout.size).unwrap();
    queue.set_size(layout.size);
    queue.set_desc_table_address(Some(layout.desc_addr as u32), Some(0));
    queue.set_avail_ring_address(Some(layout.avail_addr as u32), Some(0));
    queue.set_used_ring_address(Some(layout.used_addr as u32), Some(0));
    queue.set_next_avail(base);
    queue.set_next_used(base);
    queue.set_event_idx(event_idx);
    queue.set_ready(true);
    queue
}

/// The shape of a chain: readable and writable lengths, and whether it is an indirect table.
#[derive(Debug, Clone)]
struct Shape {
    readable: Vec<u32>,
    writable: Vec<u32>,
    indirect: bool,
    used_bytes: u32,
}

fn shape() -> impl Strategy<Value = Shape> {
    // The oracle ends a chain at 4 GiB: 8 of these stay below.
    let len = prop_oneof![Just(1u32), Just(16), 1..70_000u32, Just(u32::MAX / 8)];
    (
        prop::collection::vec(len.clone(), 1..4),
        prop::collection::vec(len, 0..4),
        any::<bool>(),
        any::<u32>(),
    )
        .prop_map(|(readable, writable, indirect, used_bytes)| Shape {
            readable,
            writable,
            indirect,
            used_bytes,
        })
}

/// Driver side: hands out descriptors in an order that depends on `seed`.
struct Driver<'a> {
    memory: &'a GuestMemoryMmap,
    layout: VringLayout,
    free: Vec<u16>,
    avail: u16,
    seed: u64,
}

impl Driver<'_> {
    fn random(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }

    fn take_free(&mut self) -> u16 {
        let at = self.random() as usize % self.free.len();
        self.free.swap_remove(at)
    }

    fn store(&self, at: u64, addr: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.memory.write_slice(&bytes, GuestAddress(at)).unwrap();
    }

    /// Makes one chain available and returns its descriptors, or `None` if too few are free.
    fn offer(&mut self, shape: &Shape) -> Option<Vec<u16>> {
        let lens: Vec<(u32, u16)> = shape
            .readable
            .iter()
            .map(|&len| (len, 0))
            .chain(shape.writable.iter().map(|&len| (len, WRITE)))
            .collect();
        let wanted = if shape.indirect { 1 } else { lens.len() };
        if self.free.len() < wanted {
            return None;
        }
        let taken: Vec<u16> = (0..wanted).map(|_| self.take_free()).collect();
        let head = taken[0];
        let table = TABLES + 0x400 * u64::from(head);
        for (at, &(len, flags)) in lens.iter().enumerate() {
            let (place, next) = if shape.indirect {
                (table + 16 * at as u64, at as u16 + 1)
            } else {
                let next = taken.get(at + 1).copied().unwrap_or(0);
                (16 * u64::from(taken[at]), next)
            };
            let more = if at + 1 < lens.len() { NEXT } else { 0 };
            let addr = self.random() >> 1;
            self.store(place, addr, len, flags | more, next);
        }
        if shape.indirect {
            let bytes = 16 * lens.len() as u32;
            self.store(16 * u64::from(head), table, bytes, INDIRECT, 0);
        }
        let slot = u64::from(self.avail % self.layout.size);
        let place = GuestAddress(self.layout.avail_addr + 4 + 2 * slot);
        self.memory.write_obj(head, place).unwrap();
        self.avail = self.avail.wrapping_add(1);
        let index = GuestAddress(self.layout.avail_addr + 2);
        self.memory.write_obj(self.avail, index).unwrap();
        Some(taken)
    }
}

fn used_ring(memory: &GuestMemoryMmap, layout: VringLayout) -> Vec<u8> {
    let mut bytes = vec![0; 4 + 8 * usize::from(layout.size)];
    let place = GuestAddress(layout.used_addr);
    memory.read_slice(&mut bytes, place).unwrap();
    bytes
}

/// Readable and writable segments of the next chain, as the oracle sees it.
fn next_of(queue: &mut Queue, memory: &GuestMemoryMmap) -> (u16, Vec<Segment>, Vec<Segment>) {
    let chain = queue.iter(memory).unwrap().next().unwrap();
    let head = chain.head_index();
    let (writable, readable): (Vec<_>, Vec<_>) = chain.partition(|desc| desc.is_write_only());
    let segments = |descs: Vec<Descriptor>| {
        descs
            .iter()
            .map(|desc| Segment {
                addr: desc.addr().0,
                len: desc.len(),
            })
            .collect()
    };
    (head, segments(readable), segments(writable))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        // A failing seed is printed and kept here, where the next run repeats it.
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/oracle.proptest-regressions"
        )))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_vring_agrees_with_the_oracle(
        size_log in 0u32..8,
        base in prop_oneof![Just(0u16), 65_500..=65_535u16, any::<u16>()],
        event_idx in any::<bool>(),
        rounds in prop::collection::vec((prop::collection::vec(shape(), 1..6), any::<u16>()), 1..40),
        seed in 1..u64::MAX,
    ) {
        let layout = layout(1 << size_log);
        let (a, b) = (both(), both());
        for memory in [&a.theirs, &b.theirs] {
            memory.write_obj(base, GuestAddress(layout.avail_addr + 2)).unwrap();
            memory.write_obj(base, GuestAddress(layout.used_addr + 2)).unwrap();
        }
        let features = if event_idx { feature::EVENT_IDX } else { 0 };
        let mut vring = Vring::new(a.ours.clone(), layout, features, base).unwrap();
        let mut queue = oracle(layout, base, event_idx);
        let mut chain = Chain::new();
        let driver = |memory| Driver {
            memory,
            layout,
            free: (0..layout.size).collect(),
            avail: base,
            seed,
        };
        let (mut to_us, mut to_them) = (driver(&a.theirs), driver(&b.theirs));
        let mut first = true;
        for (shapes, used_event) in rounds {
            let event_addr = layout.avail_addr + 4 + 2 * u64::from(layout.size);
            // Mostly near the index, which is where it matters.
            let used_event = to_us.avail.wrapping_sub(4).wrapping_add(used_event % 8);
            for memory in [&a.theirs, &b.theirs] {
                memory.write_obj(used_event, GuestAddress(event_addr)).unwrap();
            }
            let mut offered = Vec::new();
            for shape in &shapes {
                let taken = to_us.offer(shape);
                prop_assert_eq!(&taken, &to_them.offer(shape));
                offered.extend(taken.map(|taken| (taken, shape)));
            }
            for (taken, shape) in offered {
                let found = vring.take(&mut chain).unwrap();
                let (head, readable, writable) = next_of(&mut queue, &b.theirs);
                prop_assert_eq!(found, Some(TakenChain { head, fault: None }));
                prop_assert_eq!(chain.readable(), readable);
                prop_assert_eq!(chain.writable(), writable);
                vring.push_used(head, shape.used_bytes);
                queue.add_used(&b.theirs, head, shape.used_bytes).unwrap();
                to_us.free.extend(&taken);
                to_them.free.extend(&taken);
            }
            prop_assert_eq!(vring.take(&mut chain).unwrap(), None);
            let added = vring.base() != queue.next_avail() || queue.next_used() != base || !first;
            let call = vring.publish();
            prop_assert_eq!(used_ring(&a.theirs, layout), used_ring(&b.theirs, layout));
            prop_assert_eq!(vring.base(), queue.next_avail());
            let theirs = queue.needs_notification(&b.theirs).unwrap();
            // Our vring always calls for the first batch; the oracle has no empty batch without events.
            if event_idx && !first {
                prop_assert_eq!(call, theirs);
            }
            first &= !added;
        }
    }
}

#[test]
fn both_sides_see_the_same_chains_of_the_mock_driver() {
    let both = both();
    let mock = MockSplitQueue::new(&both.theirs, 64);
    let mut offset = 0;
    for len in [1, 3, 7, 2] {
        let descs: Vec<RawDescriptor> = (0..len)
            .map(|at| {
                let next = if at + 1 < len { NEXT } else { 0 };
                let addr = 0x10_0000 + 0x100 * u64::from(offset + at);
                Descriptor::new(addr, 0x80, next, offset + at + 1).into()
            })
            .collect();
        mock.add_desc_chains(&descs, offset).unwrap();
        offset += len;
    }
    let layout = VringLayout {
        size: 64,
        desc_addr: mock.desc_table_addr().0,
        avail_addr: mock.avail_addr().0,
        used_addr: mock.used_addr().0,
    };
    let mut queue: Queue = mock.create_queue().unwrap();
    let mut vring = Vring::new(both.ours.clone(), layout, 0, 0).unwrap();
    let mut chain = Chain::new();
    for len in [1u16, 3, 7, 2] {
        let (head, readable, writable) = next_of(&mut queue, &both.theirs);
        let taken = vring.take(&mut chain).unwrap();
        assert_eq!(taken, Some(TakenChain { head, fault: None }));
        assert_eq!(chain.readable(), readable);
        assert_eq!(chain.writable(), writable);
        assert_eq!(chain.readable().len(), usize::from(len));
    }
    assert_eq!(vring.take(&mut chain), Ok(None));
}
