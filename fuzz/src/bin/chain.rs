//! A vring whose memory holds what the input says: rings, tables and headers at once. Each chain is taken, parsed,
//! planned and given back, as a worker does.
#![no_main]

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use cleave_blk::spec::HEADER_BYTES;
use cleave_blk::{Cut, Gate, Limits, Plan, Request, Segment, Verb};
use cleave_guest::{Chain, Memory, RegionSpec, Vring, VringLayout};
use libfuzzer_sys::fuzz_target;
use rustix::fs::{MemfdFlags, memfd_create};

/// Two regions with a gap, so that ranges can begin in one and end in the gap or in the other.
const REGION: u64 = 16 << 10;
const GAP_AT: u64 = REGION;
const SECOND: u64 = 2 * REGION;
const SIZE: u16 = 16;
const DESC: u64 = 0;
const AVAIL: u64 = 0x400;
const USED: u64 = 0x800;
const CAPACITY: u64 = 1 << 20;

struct Bench {
    files: [File; 2],
    memory: Arc<Memory>,
    chain: Chain,
}

thread_local! {
    static BENCH: RefCell<Bench> = RefCell::new(Bench::new());
}

impl Bench {
    fn new() -> Bench {
        let file = || {
            let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
            file.set_len(REGION).unwrap();
            file
        };
        let files = [file(), file()];
        let region = |guest_addr: u64, file: &File| RegionSpec {
            guest_addr,
            user_addr: 0x7000_0000_0000 + guest_addr,
            len_bytes: REGION,
            file_offset: 0,
            file: file.try_clone().unwrap(),
        };
        let regions = vec![region(0, &files[0]), region(SECOND, &files[1])];
        Bench {
            memory: Memory::new(regions).unwrap(),
            files,
            chain: Chain::new(),
        }
    }

    /// The first bytes of the input choose features and position, the others are the first region's from its beginning, and
    /// the second's where more are left.
    fn run(&mut self, input: &[u8]) {
        let Some(([features, base_low, base_high], bytes)) = input.split_first_chunk() else {
            return;
        };
        let (mut first, mut second) = ([0; REGION as usize], [0; REGION as usize]);
        let cut = bytes.len().min(0xc00);
        first[..cut].copy_from_slice(&bytes[..cut]);
        let rest = &bytes[cut..][..(bytes.len() - cut).min(REGION as usize)];
        second[..rest.len()].copy_from_slice(rest);
        self.files[0].write_all_at(&first, 0).unwrap();
        self.files[1].write_all_at(&second, 0).unwrap();
        let layout = VringLayout {
            size: SIZE,
            desc_addr: DESC,
            avail_addr: AVAIL,
            used_addr: USED,
        };
        let features = u64::from(*features) << 24 | 1 << 32;
        let base = u16::from_le_bytes([*base_low, *base_high]);
        let mut vring = Vring::new(self.memory.clone(), layout, features, base).unwrap();
        // A guest without an end would need more entries than the ring has.
        for _ in 0..2 * SIZE {
            let taken = match vring.take(&mut self.chain) {
                Ok(Some(taken)) => taken,
                Ok(None) | Err(_) => break,
            };
            assert!(taken.head < SIZE, "{taken:?}");
            if taken.fault.is_none() {
                self.judge(features);
            }
            vring.push_used(taken.head, 1);
            vring.publish();
        }
        vring.arm();
        vring.disarm();
    }

    fn judge(&mut self, features: u64) {
        let Bench { chain, memory, .. } = self;
        let shape = chain.shape();
        assert_eq!(bytes(chain.readable()), shape.readable_bytes);
        assert_eq!(bytes(chain.writable()), shape.writable_bytes);
        // One whose address is beyond 2^64 is none.
        let last = chain.writable().last();
        let status_addr = last.and_then(|last| last.addr.checked_add(u64::from(last.len) - 1));
        assert_eq!(chain.status_addr(), status_addr);
        let mut head = [0; 32];
        let Ok(copied) = memory.copy_in(chain.readable(), &mut head) else {
            return;
        };
        let limits = limits();
        let gate = Gate {
            limits: &limits,
            capacity_bytes: CAPACITY,
            features,
        };
        let Ok(request) = Request::parse(&head[..copied], shape, gate) else {
            return;
        };
        let data = match request.verb {
            Verb::Read => chain.data_in(),
            Verb::Write => chain.data_out(HEADER_BYTES as u64),
            _ => &[],
        };
        assert!(
            matches!(request.verb, Verb::Read | Verb::Write) <= (bytes(data) >= request.len_bytes)
        );
        let cut = Cut {
            durable: false,
            chunk_bytes: None,
            stripe: None,
        };
        if request.verb != Verb::GetId {
            assert!(Plan::new(&request, data, &cut).count() <= cut.ops_max());
        }
        // Translated or refused, but never outside the regions.
        for segment in data {
            let end = segment.addr.checked_add(segment.len.into());
            let is_mapped = memory.covers(*segment);
            let inside =
                |from: u64, to: u64| segment.addr >= from && end.is_some_and(|end| end <= to);
            assert_eq!(
                is_mapped,
                inside(0, GAP_AT) || inside(SECOND, SECOND + REGION),
                "{segment:?}"
            );
        }
    }
}

fn bytes(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

fn limits() -> Limits {
    Limits {
        capacity_bytes: CAPACITY,
        block_bytes: 512,
        offset_align_bytes: 512,
        memory_align_bytes: 512,
        read_only: false,
        discard: true,
        discard_align_bytes: 512,
        rotational: false,
    }
}

fuzz_target!(|input: &[u8]| BENCH.with_borrow_mut(|bench| bench.run(input)));
