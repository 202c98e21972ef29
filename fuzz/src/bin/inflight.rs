//! A vring that starts with an in-flight region of which the input says every byte, and the indices of its rings. It ends, no
//! request comes twice, and what was answered is not done again by the next.
#![no_main]

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use cleave_guest::{Chain, Inflight, InflightLayout, Memory, RegionSpec, Vring, VringLayout};
use libfuzzer_sys::fuzz_target;
use rustix::fs::{MemfdFlags, memfd_create};

const SIZE: u16 = 16;
const MEMORY: u64 = 4096;
const AVAIL: u64 = 0x400;
const USED: u64 = 0x800;
const LAYOUT: VringLayout = VringLayout {
    size: SIZE,
    desc_addr: 0,
    avail_addr: AVAIL,
    used_addr: USED,
};

struct Bench {
    guest: File,
    memory: Arc<Memory>,
    region: File,
    inflight: Inflight,
    chain: Chain,
}

thread_local! {
    static BENCH: RefCell<Bench> = RefCell::new(Bench::new());
}

impl Bench {
    fn new() -> Bench {
        let guest = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        guest.set_len(MEMORY).unwrap();
        let spec = RegionSpec {
            guest_addr: 0,
            user_addr: 0x7000_0000_0000,
            len_bytes: MEMORY,
            file_offset: 0,
            file: guest.try_clone().unwrap(),
        };
        let layout = InflightLayout::new(1, SIZE);
        let region = Inflight::create(layout).unwrap();
        let inflight = Inflight::map(region.try_clone().unwrap(), layout).unwrap();
        Bench {
            guest,
            memory: Memory::new(vec![spec]).unwrap(),
            region,
            inflight,
            chain: Chain::new(),
        }
    }

    fn vring(&self, base: u16) -> Vring {
        let mut vring = Vring::new(self.memory.clone(), LAYOUT, 1 << 32, base).unwrap();
        vring.keep(self.inflight.journal(0).unwrap());
        vring
    }

    /// Available index, used index, heads that are available, and the region.
    fn run(&mut self, input: &[u8]) {
        let Some((indices, rest)) = input.split_first_chunk::<4>() else {
            return;
        };
        let heads = &rest[..rest.len().min(usize::from(SIZE))];
        let mut entries = [0; 2 * SIZE as usize];
        for (place, head) in entries.chunks_exact_mut(2).zip(heads) {
            place[0] = head % SIZE as u8;
        }
        let part = &rest[heads.len()..];
        let len = InflightLayout::new(1, SIZE).len_bytes as usize;
        let mut region = vec![0; len];
        let cut = part.len().min(len);
        region[..cut].copy_from_slice(&part[..cut]);
        self.region.write_all_at(&region, 0).unwrap();
        self.guest.write_all_at(&indices[..2], AVAIL + 2).unwrap();
        self.guest.write_all_at(&entries, AVAIL + 4).unwrap();
        self.guest.write_all_at(&indices[2..], USED + 2).unwrap();

        let mut vring = self.vring(4711);
        let again = vring.again();
        let mut taken = Vec::new();
        let mut broke = false;
        while taken.len() <= 2 * usize::from(SIZE) {
            match vring.take(&mut self.chain) {
                Ok(Some(one)) => taken.push(one.head),
                Ok(None) => break,
                Err(_) => {
                    broke = true;
                    break;
                }
            }
        }
        assert!(taken.len() <= usize::from(SIZE), "{taken:?}");
        let mut first = taken[..again.min(taken.len())].to_vec();
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), again, "a request comes twice");
        for head in &taken {
            assert!(*head < SIZE);
            vring.push_used(*head, 0);
        }
        vring.publish();
        // A guest that offers a head twice at a time has its own requests repeated.
        taken.sort_unstable();
        let distinct = taken.windows(2).all(|pair| pair[0] != pair[1]);
        if !broke && distinct {
            assert_eq!(self.vring(0).again(), 0, "an answered request comes again");
        }
    }
}

fuzz_target!(|input: &[u8]| BENCH.with_borrow_mut(|bench| bench.run(input)));
