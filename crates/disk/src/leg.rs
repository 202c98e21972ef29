//! One member of a disk: what ops go to.

use std::fs::File;
use std::sync::{Arc, Mutex};

use vm_memory::MmapRegion;

use crate::RangeLocks;
use crate::model::Shared;

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
    Null {
        /// Reads are zeroes; else their memory is left as it is.
        zeroes: bool,
    },
    /// Anonymous memory behind a drive that is only modelled.
    Model {
        /// The bytes.
        ram: MmapRegion,
        /// When commands finish; one drive for all workers of the disk. Held for moments, never
        /// across a sleep or an I/O.
        drive: Arc<Mutex<Shared>>,
    },
}

/// A leg of a disk. Most disks have one.
#[derive(Debug)]
pub struct Leg {
    name: String,
    store: Store,
    locks: RangeLocks,
    unused_bytes: u64,
}

impl Leg {
    pub(crate) fn new(name: String, store: Store) -> Leg {
        Leg {
            name,
            store,
            locks: RangeLocks::default(),
            unused_bytes: 0,
        }
    }

    pub(crate) fn with_unused(mut self, bytes: u64) -> Leg {
        self.unused_bytes = bytes;
        self
    }

    /// Bytes at its end that the disk does not use.
    pub fn unused_bytes(&self) -> u64 {
        self.unused_bytes
    }

    /// What an operator calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where its bytes are.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Locks of read-modify-write, in the leg's own offsets.
    pub fn locks(&self) -> &RangeLocks {
        &self.locks
    }
}
