//! One member of a disk: the target of ops.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cleave_blk::Limits;
use cleave_nbd::NbdClient;
use cleave_rbd::{Closing, Image};
use rustix::fs::{Advice, OFlags};
use vm_memory::MmapRegion;

use crate::detect::{self, probe_file, size_bytes};
use crate::model::SharedDrive;
use crate::open::{lock, reopen, unlock};
use crate::{FileKind, OpenError, OpenOptions, RangeLocks, rbd};

/// The storage of a leg.
#[derive(Debug)]
pub enum Backing {
    /// A file or block device, opened with O_DIRECT if `direct` is set.
    File {
        /// The first worker's open file description, which holds the locks.
        file: File,
        /// File or device.
        kind: FileKind,
        /// The page cache is bypassed.
        direct: bool,
        /// Writes may go through the page cache: all of them, or some in spite of O_DIRECT. The kernel reports a failure to write such
        /// pages back only once, to one of those that wait for it.
        caches_writes: bool,
        /// A program serves the file. While a read or write is submitted the kernel waits for that program, even if it
        /// was asked not to wait.
        has_server: bool,
        /// The number of the block device, or of the file system of the file.
        device: u64,
    },
    /// Anonymous memory.
    Ram(MmapRegion),
    /// Nothing.
    Null {
        /// True if reads store zeroes; otherwise they leave their memory unchanged.
        zeroes: bool,
    },
    /// Anonymous memory with the timing of a modelled drive.
    Model {
        /// The bytes.
        ram: MmapRegion,
        /// The drive's timing, one for all workers of the disk. The lock is held briefly, never across a
        /// sleep or an I/O.
        drive: Arc<Mutex<SharedDrive>>,
    },
    /// An export of an NBD server.
    Nbd(Box<NbdClient>),
    /// An image of a Ceph cluster.
    Rbd(Box<Image>),
}

impl Backing {
    /// Wraps an opened file or device that has not been probed.
    pub(crate) fn file(file: File, kind: FileKind) -> Backing {
        Backing::File {
            file,
            kind,
            direct: false,
            caches_writes: true,
            has_server: false,
            device: 0,
        }
    }

    /// Returns the size now; `None` for memory. An image's cluster is asked, which takes as long as the cluster is away.
    pub(crate) fn size_bytes(&self) -> io::Result<Option<u64>> {
        Ok(match self {
            Backing::File { file, kind, .. } => Some(size_bytes(file, *kind)?),
            Backing::Nbd(nbd) => Some(nbd.size_bytes()),
            Backing::Rbd(image) => Some(image.ask_size_bytes()?),
            Backing::Ram(_) | Backing::Null { .. } | Backing::Model { .. } => None,
        })
    }

    /// Finds the limits of what can be a leg of a stripe. Sets O_DIRECT on a file if it is to bypass the page cache.
    pub(crate) fn probe(&mut self, name: &str, options: &OpenOptions) -> Result<Limits, OpenError> {
        match self {
            Backing::File {
                file,
                kind,
                direct,
                caches_writes,
                has_server,
                device,
            } => {
                let (limits, is_direct) = probe_file(Path::new(name), file, *kind, options)?;
                *direct = is_direct;
                let is_file = *kind == FileKind::Regular;
                *caches_writes = !is_direct || is_file && !detect::keeps_writes_direct(file);
                *has_server = is_file && detect::has_server(file);
                *device = detect::device(file, *kind)
                    .map_err(|error| OpenError::Io(name.to_owned(), error))?;
                Ok(limits)
            }
            Backing::Rbd(image) => rbd::probe(image, name, options),
            _ => Err(OpenError::Io(name.to_owned(), no_bytes())),
        }
    }

    /// Reads exactly these bytes and waits for them. Of what can be a leg of a stripe.
    pub(crate) fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Backing::File { file, .. } => file.read_exact_at(bytes, offset),
            Backing::Rbd(image) => image.read_exact_at(bytes, offset),
            _ => Err(no_bytes()),
        }
    }

    /// Reads these bytes, or those of them that there are, and waits for them. Of what can be a leg of a stripe.
    pub(crate) fn read_at<'a>(&self, bytes: &'a mut [u8], offset: u64) -> io::Result<&'a [u8]> {
        let len = match self {
            Backing::File { file, .. } => file.read_at(bytes, offset)?,
            Backing::Rbd(image) => image.read_at(bytes, offset)?,
            _ => return Err(no_bytes()),
        };
        Ok(bytes.get(..len).unwrap_or_default())
    }

    /// Writes these bytes and waits until they are durable. Of what can be a leg of a stripe.
    pub(crate) fn write_durably_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        match self {
            Backing::File { file, .. } => {
                file.write_all_at(bytes, offset)?;
                Ok(rustix::fs::fsync(file)?)
            }
            Backing::Rbd(image) => {
                image.write_all_at(bytes, offset)?;
                image.sync_all()
            }
            _ => Err(no_bytes()),
        }
    }
}

/// Makes the error of a leg without a file: memory and exports are read and written by requests only.
fn no_bytes() -> io::Error {
    io::ErrorKind::Unsupported.into()
}

/// A leg of a disk. Most disks have one.
#[derive(Debug)]
pub struct Leg {
    name: String,
    backing: Backing,
    /// Open file descriptions of the second and further workers.
    more_files: Box<[File]>,
    /// The open file description for everything but workers.
    sync_file: Option<File>,
    locks: RangeLocks,
    served_bytes: AtomicU64,
    unused_bytes: u64,
    polling: Option<Polling>,
    /// True if `polling` is used.
    is_polled: AtomicBool,
}

/// The reads and writes of a leg that can be polled: those that the kernel passes to the device in one piece. On Linux 6.1, a
/// polled read that the kernel had to split never completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Polling {
    /// Longest I/O.
    pub(crate) bytes_max: u64,
    /// The device splits I/O at multiples of this; 0: nowhere.
    pub(crate) chunk_bytes: u64,
    /// Start of the leg on the device, as far as it matters for the chunk.
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
            sync_file: None,
            locks: RangeLocks::default(),
            served_bytes: AtomicU64::new(0),
            unused_bytes: 0,
            polling: None,
            is_polled: AtomicBool::new(false),
        }
    }

    pub(crate) fn with_unused(mut self, bytes: u64) -> Leg {
        self.unused_bytes = bytes;
        self
    }

    /// Replaces the description of its file by `given`, which another process uses as well, so its flags must not change.
    pub(crate) fn replace_file(&mut self, given: File) -> Result<(), OpenError> {
        let Backing::File { file, direct, .. } = &mut self.backing else {
            return Ok(());
        };
        let name = || self.name.clone();
        let flags = rustix::fs::fcntl_getfl(&given);
        let flags = flags.map_err(|errno| OpenError::Io(name(), errno.into()))?;
        let why = match (flags.contains(OFlags::DIRECT), *direct) {
            (true, false) => "the running daemon serves it without the page cache",
            (false, true) => "the running daemon serves it with the page cache",
            _ => {
                *file = given;
                return Ok(());
            }
        };
        Err(OpenError::TakeOver(name(), why))
    }

    /// Takes its locks without waiting for their holder, and drops what this host has cached of it. On failure, it may have some.
    pub(crate) fn acquire(&self, read_only: bool) -> Result<(), OpenError> {
        let failed = |error: io::Error| OpenError::Io(self.name.clone(), error);
        match &self.backing {
            Backing::File { file, direct, .. } => {
                lock(file, &self.name, read_only, 1)?;
                match direct {
                    true => Ok(()),
                    false => self.drop_cache(file).map_err(failed),
                }
            }
            Backing::Rbd(image) if !read_only => {
                let refused = |error| OpenError::Rbd(self.name.clone(), Box::new(error));
                image.lock().map_err(refused)
            }
            Backing::Ram(_)
            | Backing::Null { .. }
            | Backing::Model { .. }
            | Backing::Nbd(_)
            | Backing::Rbd(_) => Ok(()),
        }
    }

    /// Drops the pages of the file that are in this host's page cache: another host may have written since they were read. Only
    /// clean pages can be dropped, and only those that the kernel does not use at that moment. A block device has a command for it
    /// as well (BLKFLSBUF), which drops the same pages and needs a privilege that a confined daemon has given up.
    fn drop_cache(&self, file: &File) -> io::Result<()> {
        self.sync()?;
        Ok(rustix::fs::fadvise(file, 0, None, Advice::DontNeed)?)
    }

    /// Releases its locks. It may be acquired again.
    pub(crate) fn release(&self) -> io::Result<()> {
        match &self.backing {
            Backing::File { file, .. } => unlock(file),
            Backing::Rbd(image) => image.unlock().map_err(io::Error::other),
            Backing::Ram(_) | Backing::Null { .. } | Backing::Model { .. } | Backing::Nbd(_) => {
                Ok(())
            }
        }
    }

    /// Returns the bytes from its beginning that may be read and written: those that belong to the disk, minus those that
    /// [`refresh`](crate::Disk::refresh) found cut off. A write beyond the end of a file would make the file grow again, and the
    /// lost bytes before it would then read as zeroes instead of failing.
    #[inline]
    pub fn served_bytes(&self) -> u64 {
        // Relaxed: the kernel knows that a file was cut, and no data depends on this value.
        self.served_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn serve_bytes(&self, bytes: u64) {
        self.served_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes at its end that the disk does not use.
    pub fn unused_bytes(&self) -> u64 {
        self.unused_bytes
    }

    /// Returns the name that an operator uses.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its storage.
    pub fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Closes it, or begins to if that may take long.
    pub(crate) fn start_closing(self) -> Option<Closing> {
        match self.backing {
            Backing::Rbd(image) => image.start_closing(),
            _ => None,
        }
    }

    /// Opens the file again for each further worker, and for `sync`. On failure nothing changes. If only the file for `sync`
    /// cannot be opened, `sync` uses the first worker's.
    pub(crate) fn open_for(&mut self, workers: u16) -> io::Result<()> {
        if let Backing::File { file, .. } = &self.backing {
            let sync_file = reopen(file).ok();
            self.more_files = (1..workers)
                .map(|_| reopen(file))
                .collect::<Result<_, _>>()?;
            self.sync_file = sync_file;
        }
        Ok(())
    }

    /// Makes everything durable that was written so far, for a caller that is not a worker. It has an open file description of its
    /// own, because the kernel reports a failed write-back once to each description. If a worker's were used, this call could
    /// take the report, and the guest's flush would succeed. It is not called again after EINTR, as `File::sync_data` is: that may be
    /// the report.
    pub(crate) fn sync(&self) -> io::Result<()> {
        match (&self.sync_file, &self.backing) {
            (Some(file), _) | (None, Backing::File { file, .. }) => {
                Ok(rustix::fs::fdatasync(file)?)
            }
            // A cluster has every write that was completed; an NBD server is asked by the thread that has its connections.
            _ => Ok(()),
        }
    }

    pub(crate) fn workers_max(&self) -> usize {
        match self.backing {
            Backing::File { .. } => 1 + self.more_files.len(),
            Backing::Nbd(ref nbd) => nbd.workers_max().into(),
            Backing::Ram(_) | Backing::Null { .. } | Backing::Model { .. } | Backing::Rbd(_) => {
                usize::MAX
            }
        }
    }

    pub(crate) fn close_more_files(&mut self) {
        self.more_files = Box::default();
        self.sync_file = None;
    }

    /// Returns the open file description for this worker's ops; workers count from 0. The kernel reports a failed write-back once
    /// to each description, so workers that shared one would miss failures. `None` for a backing that is not a file, and for a
    /// worker beyond [`workers_max`](crate::Disk::workers_max).
    pub fn file_for(&self, worker: usize) -> Option<BorrowedFd<'_>> {
        let Backing::File { file, .. } = &self.backing else {
            return None;
        };
        match worker.checked_sub(1) {
            None => Some(file.as_fd()),
            Some(further) => self.more_files.get(further).map(|file| file.as_fd()),
        }
    }

    /// Returns true if it is a file or device that is read and written through the page cache.
    pub fn is_cached(&self) -> bool {
        matches!(self.backing, Backing::File { direct: false, .. })
    }

    /// Returns true if writes may go through the page cache; see [`Backing::File`].
    pub fn caches_writes(&self) -> bool {
        matches!(self.backing, Backing::File { caches_writes, .. } if caches_writes)
    }

    pub(crate) fn set_caches_writes(&mut self) {
        if let Backing::File { caches_writes, .. } = &mut self.backing {
            *caches_writes = true;
        }
    }

    /// Returns true if a program serves its file; see [`Backing::File`].
    pub fn has_server(&self) -> bool {
        matches!(self.backing, Backing::File { has_server, .. } if has_server)
    }

    /// Returns the number of the device or file system that it is on. `None`: neither a file nor a device.
    pub fn device(&self) -> Option<u64> {
        match self.backing {
            Backing::File { device, .. } => Some(device),
            _ => None,
        }
    }

    /// Returns true if its reads and writes may be polled: this was requested and has not been given up.
    #[inline]
    pub fn is_polled(&self) -> bool {
        self.is_polled.load(Ordering::Relaxed)
    }

    /// Returns true if a read or write at this range may be polled.
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

    /// Stops polling for all engines. Returns `true` to the first caller.
    pub fn stop_polling(&self) -> bool {
        self.is_polled.swap(false, Ordering::Relaxed)
    }

    /// Returns the range locks for read-modify-write, in the leg's own offsets.
    pub fn locks(&self) -> &RangeLocks {
        &self.locks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_that_a_device_would_split_is_not_polled() {
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
