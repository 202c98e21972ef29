//! The device that a guest sees if no option changes it.

use crate::{Daemon, small};

/// Features of the transport, not of the device: F_LOG_ALL and F_PROTOCOL_FEATURES.
const OF_THE_TRANSPORT: u64 = 1 << 26 | 1 << 30;

/// Checks that the guest of a disk sees face v1, whatever holds the bytes: every feature, and every byte of the configuration space but
/// those of the capacity.
pub fn assert_face_v1(daemon: &Daemon, name: &str) {
    let mut client = daemon.open(&small(1));
    assert_eq!(
        client.offered() & !OF_THE_TRANSPORT,
        0x1_3000_7e44,
        "{name}"
    );
    let space = client.frontend().config(0, 256).unwrap();
    let mut wanted = [0; 256];
    wanted[..8].copy_from_slice(&space[..8]);
    // virtio 1.3 §5.2.4: seg_max, blk_size, physical_block_exp and min_io_size, writeback and num_queues, then the discards' and the
    // write-zeroes' most sectors, most ranges and last the discards' alignment and may_unmap.
    let fields: [(usize, u32); 10] = [
        (12, 126),
        (20, 512),
        (24, 3 | 8 << 16),
        (32, 1 | 64 << 16),
        (36, 1 << 21),
        (40, 1),
        (44, 8),
        (48, 1 << 18),
        (52, 1),
        (56, 1),
    ];
    for (at, field) in fields {
        wanted[at..at + 4].copy_from_slice(&field.to_le_bytes());
    }
    assert_eq!(space, wanted, "{name}");
}
