//! One member of a disk: what ops go to.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use vm_memory::MmapRegion;

use crate::RangeLocks;
use crate::model::Shared;
use crate::open::reopen;

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
pub enum Backing {
    /// A file or block device, opened (with O_DIRECT where `direct`).
    File {
        /// The first worker's open file description, which holds the locks.
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
    backing: Backing,
    /// Open file descriptions of the second and further workers.
    more_files: Box<[File]>,
    locks: RangeLocks,
    unused_bytes: u64,
    polling: Option<Polling>,
    /// `polling` is made use of.
    is_polled: AtomicBool,
}

/// Which reads and writes of a leg can be polled for: those that the kernel hands to the device in one
/// piece. One that it has to cut cannot be, and on Linux 6.1 was seen never to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Polling {
    /// Longest.
    pub(crate) bytes_max: u64,
    /// The device cuts at multiples of this; 0: nowhere.
    pub(crate) chunk_bytes: u64,
    /// Where the leg begins on the device, as far as that matters for the chunk.
    pub(crate) start_bytes: u64,
}

impl Polling {
    #[inline]
    fn takes(&self, offset: u64, len: u64) -> bool {
        let is_whole = || match self.chunk_bytes {
            0 => true,
            chunk => (self.start_bytes.wrapping_add(offset)) % chunk + len <= chunk,
        };
        len <= self.bytes_max && is_whole()
    }
}

impl Leg {
    pub(crate) fn new(name: String, backing: Backing) -> Leg {
        Leg {
            name,
            backing,
            more_files: Box::default(),
            locks: RangeLocks::default(),
            unused_bytes: 0,
            polling: None,
            is_polled: AtomicBool::new(false),
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
    pub fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Opens the file once more for each further worker. Nothing changes where that fails.
    pub(crate) fn open_for(&mut self, workers: u16) -> io::Result<()> {
        if let Backing::File { file, .. } = &self.backing {
            self.more_files = (1..workers)
                .map(|_| reopen(file))
                .collect::<Result<_, _>>()?;
        }
        Ok(())
    }

    pub(crate) fn workers_max(&self) -> usize {
        match self.backing {
            Backing::File { .. } => 1 + self.more_files.len(),
            Backing::Ram(_) | Backing::Null { .. } | Backing::Model { .. } => usize::MAX,
        }
    }

    pub(crate) fn close_more_files(&mut self) {
        self.more_files = Box::default();
    }

    /// The open file description that this worker's ops go to, counted from 0. The kernel reports a failed
    /// write-back once to each description, so workers that shared one would miss failures. `None` for a
    /// backing that is no file, and for a worker beyond [`workers_max`](crate::Disk::workers_max).
    pub fn file_for(&self, worker: usize) -> Option<BorrowedFd<'_>> {
        let Backing::File { file, .. } = &self.backing else {
            return None;
        };
        match worker.checked_sub(1) {
            None => Some(file.as_fd()),
            Some(further) => self.more_files.get(further).map(|file| file.as_fd()),
        }
    }

    /// Its reads and writes may be polled for: asked for, and not given up since.
    #[inline]
    pub fn is_polled(&self) -> bool {
        self.is_polled.load(Ordering::Relaxed)
    }

    /// Whether a read or write there may be.
    #[inline]
    pub fn polls(&self, offset: u64, len: u64) -> bool {
        self.is_polled()
            && self
                .polling
                .is_some_and(|polling| polling.takes(offset, len))
    }

    pub(crate) fn poll(&mut self, polling: Polling) {
        self.polling = Some(polling);
        self.is_polled = AtomicBool::new(true);
    }

    /// From now on they are not, for any engine. `true` for the caller that ended it.
    pub fn leave_polling(&self) -> bool {
        self.is_polled.swap(false, Ordering::Relaxed)
    }

    /// Locks of read-modify-write, in the leg's own offsets.
    pub fn locks(&self) -> &RangeLocks {
        &self.locks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_would_cut_is_not_polled_for() {
        let polling = Polling {
            bytes_max: 64 << 10,
            chunk_bytes: 0,
            start_bytes: 0,
        };
        let chunked = Polling {
            chunk_bytes: 128 << 10,
            ..polling
        };
        let moved = Polling {
            start_bytes: 4096,
            ..chunked
        };
        for (offset, len, wanted) in [
            (0, 4096, [true, true, true]),
            (0, 64 << 10, [true, true, true]),
            (0, (64 << 10) + 512, [false, false, false]),
            ((128 << 10) - 4096, 4096, [true, true, true]),
            ((128 << 10) - 4096, 8192, [true, false, true]),
            ((128 << 10) - 8192, 8192, [true, true, false]),
        ] {
            let found = [polling, chunked, moved].map(|polling| polling.takes(offset, len));
            assert_eq!(found, wanted, "{len} at {offset}");
        }
    }
}
