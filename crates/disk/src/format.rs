//! Image formats that are not raw, recognised by their first bytes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// Name, offset of its magic, and the magic.
const FORMATS: [(&str, usize, &[u8]); 8] = [
    ("qcow2", 0, b"QFI\xfb"),
    ("QED", 0, b"QED\0"),
    ("VMDK", 0, b"KDMV"),
    ("VMDK", 0, b"COWD"),
    ("VMDK", 0, b"# Disk DescriptorFile"),
    ("VHDX", 0, b"vhdxfile"),
    ("VHD", 0, b"conectix"),
    ("VDI", 64, b"\x7f\x10\xda\xbe"),
];

/// Blocks in which partitions are counted.
const PARTITION_BLOCKS: [u32; 2] = [512, 4096];
/// The beginning of the header of a GPT, in block 1 (UEFI 2.10 §5.3.2).
const PARTITIONS: &[u8] = b"EFI PART";

/// Returns the block in which the partitions of a disk are counted, if it has any and `block_bytes` is another one.
pub fn other_partition_block(file: &File, block_bytes: u32) -> io::Result<Option<u32>> {
    let has_partitions = |block_bytes: u32| {
        let mut head = [0; PARTITIONS.len()];
        file.read_at(&mut head, block_bytes.into())?;
        Ok::<_, io::Error>(head == *PARTITIONS)
    };
    if has_partitions(block_bytes)? {
        return Ok(None);
    }
    for other in PARTITION_BLOCKS {
        if has_partitions(other)? {
            return Ok(Some(other));
        }
    }
    Ok(None)
}

/// Returns the image format of a file, unless it is raw. Read through the page cache.
pub(crate) fn image_format(file: &File) -> io::Result<Option<&'static str>> {
    let mut head = [0; 128];
    // A shorter file leaves zeroes, which match no magic.
    file.read_at(&mut head, 0)?;
    let is = |at: usize, magic: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(magic));
    let found = FORMATS.iter().find(|(_, at, magic)| is(*at, magic));
    Ok(found.map(|(name, _, _)| *name))
}
