//! The ends of two legs hold what the input says: they are one stripe whose layout fits them, or are refused.
#![no_main]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use cleave_disk::{Disk, DiskSpec, OpenOptions, StripeKind, show_stripe};
use libfuzzer_sys::fuzz_target;
use rustix::fs::{MemfdFlags, memfd_create};

const BLOCK: u64 = 4096;
const LEGS: [u64; 2] = [64 << 10, 68 << 10];
/// Fields of a superblock in front of its sum.
const SUMMED: usize = 56;

static FILES: LazyLock<[File; 2]> = LazyLock::new(|| {
    LEGS.map(|bytes| {
        let file = File::from(memfd_create("leg", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        file
    })
});

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !crc
}

/// The first byte says whose sums are put right and what else is likely: `CLVSTRIP`, version 1.
fn run(input: &[u8]) {
    let Some((flags, input)) = input.split_first() else {
        return;
    };
    let (first, second) = input.split_at(input.len().min(60));
    for (nth, fields) in [first, second].into_iter().enumerate() {
        let mut block = [0; BLOCK as usize];
        let len = fields.len().min(block.len());
        block[..len].copy_from_slice(&fields[..len]);
        if flags >> nth & 1 == 1 {
            block[..12].copy_from_slice(b"CLVSTRIP\x01\0\0\0");
        }
        if flags >> (2 + nth) & 1 == 1 {
            let sum = crc32c(&block[..SUMMED]);
            block[SUMMED..][..4].copy_from_slice(&sum.to_le_bytes());
        }
        FILES[nth].write_all_at(&block, LEGS[nth] - BLOCK).unwrap();
    }
    let path = |file: &File| DiskSpec::Path(format!("/proc/self/fd/{}", file.as_raw_fd()).into());
    let specs: Vec<_> = FILES.iter().map(path).collect();
    let shown = show_stripe(&specs).unwrap();
    assert_eq!(shown.lines.len(), 2);
    let chunk = shown
        .whole
        .as_ref()
        .map_or(4096, |whole| whole.stripe.chunk_bytes());
    let options = OpenOptions::default();
    let opened = Disk::open_stripe(&specs, chunk, StripeKind::Superblocks, &options);
    match (shown.whole, opened) {
        (Ok(whole), Ok(disk)) => {
            assert_eq!(whole.stripe.legs(), 2);
            assert!(whole.data_bytes <= LEGS[0] - BLOCK, "{whole:?}");
            assert!(whole.data_bytes.is_multiple_of(u64::from(chunk)));
            assert_eq!(disk.capacity_bytes(), 2 * whole.data_bytes);
        }
        (Err(_), Ok(disk)) => panic!("{disk:?} is not a stripe and was opened"),
        (_, Err(_)) => {}
    }
}

fuzz_target!(|input: &[u8]| run(input));
