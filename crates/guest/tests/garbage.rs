//! A guest that writes anything anywhere: whatever is in its memory, taking chains ends, nothing panics, and
//! the results keep their promises.

use std::sync::Arc;

use cleave_blk::Segment;
use cleave_guest::{Chain, ChainFault, Memory, RegionSpec, Vring, VringLayout};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

const MEMORY_BYTES: u64 = 0x4000;
const SIZE: u16 = 16;
const LAYOUT: VringLayout = VringLayout {
    size: SIZE,
    desc_addr: 0,
    avail_addr: 0x100,
    used_addr: 0x200,
};

/// Two regions that are adjacent in the guest; in the file, the second one comes first.
fn memory() -> std::io::Result<Arc<Memory>> {
    let file = tempfile::tempfile()?;
    file.set_len(MEMORY_BYTES)?;
    let half = MEMORY_BYTES / 2;
    let spec = |at: u64| -> std::io::Result<RegionSpec> {
        Ok(RegionSpec {
            guest_addr: at,
            user_addr: at,
            len_bytes: half,
            file_offset: half - at,
            file: file.try_clone()?,
        })
    };
    let table = vec![spec(0)?, spec(half)?];
    Memory::new(table).map_err(std::io::Error::other)
}

/// A descriptor that probably leads somewhere: small addresses, lengths and indices, all flags.
fn descriptor() -> impl Strategy<Value = [u8; 16]> {
    let addr = prop_oneof![8 => 0..MEMORY_BYTES + 64, 1 => any::<u64>()];
    let len = prop_oneof![4 => (0u32..20).prop_map(|n| 16 * n), 2 => 0u32..600, 1 => any::<u32>()];
    let flags = prop_oneof![4 => Just(1u16), 8 => 0u16..8, 1 => any::<u16>()];
    let next = prop_oneof![8 => 0..SIZE, 1 => any::<u16>()];
    (addr, len, flags, next).prop_map(|(addr, len, flags, next)| {
        let words = [addr.to_le_bytes(), {
            let rest = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
            rest.to_le_bytes()
        }];
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&words[0]);
        bytes[8..].copy_from_slice(&words[1]);
        bytes
    })
}

fn bytes_of(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.len)).sum()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        // A failing seed is printed and kept here, where the next run repeats it.
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/garbage.proptest-regressions"
        )))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_memory_contents_are_survived(
        descriptors in prop::collection::vec(descriptor(), 1024),
        heads in prop::collection::vec(prop_oneof![20 => 0..SIZE, 1 => any::<u16>()], 16),
        index in prop_oneof![4 => 0..=SIZE, 1 => any::<u16>()],
        features in any::<u64>(),
    ) {
        let memory = memory().unwrap();
        let all = descriptors.concat();
        let whole = [Segment { addr: 0, len: all.len() as u32 }];
        prop_assert_eq!(memory.copy_out(&whole, &all), Ok(all.len()));
        let mut rings = vec![0, 0];
        rings.extend(index.to_le_bytes());
        rings.extend(heads.iter().flat_map(|head| head.to_le_bytes()));
        let place = [Segment { addr: LAYOUT.avail_addr, len: rings.len() as u32 }];
        prop_assert_eq!(memory.copy_out(&place, &rings), Ok(rings.len()));

        let mut vring = Vring::new(memory.clone(), LAYOUT, features, 0).unwrap();
        let mut chain = Chain::new();
        let mut taken_count = 0;
        // The guest's index does not change, so the vring runs empty or faults.
        while let Ok(Some(taken)) = vring.take(&mut chain) {
            taken_count += 1;
            prop_assert!(taken_count <= SIZE);
            prop_assert!(taken.head < SIZE);
            let shape = chain.shape();
            let held = (bytes_of(chain.readable()), bytes_of(chain.writable()));
            match taken.fault {
                None => prop_assert_eq!(held, (shape.readable_bytes, shape.writable_bytes)),
                Some(ChainFault::Order | ChainFault::TooMany) => {
                    prop_assert!(held.0 <= shape.readable_bytes);
                    prop_assert!(held.1 <= shape.writable_bytes);
                }
                Some(_) => {
                    prop_assert_eq!(held, (0, 0));
                    prop_assert_eq!(chain.status_addr(), None);
                }
            }
            let mut head = [0; 32];
            let _ = memory.copy_in(chain.readable(), &mut head);
            let data_out = bytes_of(chain.data_out(16));
            prop_assert_eq!(data_out, held.0.saturating_sub(16));
            let data_in = bytes_of(chain.data_in());
            prop_assert_eq!(data_in, held.1.saturating_sub(1));
            for &segment in chain.readable().iter().chain(chain.writable()) {
                let mut served = 0;
                let found = memory.resolve(segment, |_, len| served += len as u64);
                prop_assert_eq!(served == u64::from(segment.len), found.is_ok());
            }
            vring.push_used(taken.head, 1);
        }
        vring.publish();
        vring.arm();
        vring.disarm();
    }
}
