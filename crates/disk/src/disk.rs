//! An opened disk.

use std::fs::File;
use std::io;

use cleave_blk::Limits;
use vm_memory::MmapRegion;

use crate::{DiskSpec, OpenError, OpenOptions, RangeLocks};

/// What is behind a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file: space is given back by punching holes.
    Regular,
    /// A block device: its own discard and zero-out commands.
    BlockDevice,
}

/// Where the bytes are.
#[derive(Debug)]
pub enum Store {
    /// A file or block device, opened (with O_DIRECT where `direct`).
    File {
        /// The descriptor that ops go to.
        file: File,
        /// File or device.
        kind: FileKind,
        /// The page cache is bypassed.
        direct: bool,
    },
    /// Anonymous memory.
    Ram(MmapRegion),
    /// Nothing.
    Null,
}

/// An opened, locked and probed disk; shared by the engines of all its workers.
#[derive(Debug)]
pub struct Disk {}

impl Disk {
    /// Opens, locks (advisory: exclusive, or shared when read-only) and probes.
    pub fn open(spec: &DiskSpec, options: &OpenOptions) -> Result<Disk, OpenError> {
        let _ = (spec, options);
        todo!()
    }

    /// What an operator calls it: the path or the spec.
    pub fn name(&self) -> &str {
        todo!()
    }

    /// What it can do. `limits().capacity_bytes` is the size when opened; see `capacity_bytes`.
    pub fn limits(&self) -> &Limits {
        todo!()
    }

    /// Size now: one relaxed load.
    pub fn capacity_bytes(&self) -> u64 {
        todo!()
    }

    /// Looks at the size of the file or device again. `Some(new)` when it grew, and `capacity_bytes`
    /// follows; a disk that shrank keeps its advertised size (I/O beyond fails) and is `None`.
    pub fn refresh(&self) -> io::Result<Option<u64>> {
        todo!()
    }

    /// Where the bytes are.
    pub fn store(&self) -> &Store {
        todo!()
    }

    /// Locks of read-modify-write.
    pub fn locks(&self) -> &RangeLocks {
        todo!()
    }

    /// An fsync failed: the kernel may have dropped dirty pages, so no later fsync can vouch for them.
    /// Sticks until the disk is reopened.
    pub fn mark_sync_failed(&self) {
        todo!()
    }

    /// Whether an fsync ever failed.
    pub fn sync_failed(&self) -> bool {
        todo!()
    }
}
