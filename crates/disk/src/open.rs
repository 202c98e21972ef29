//! Opening and locking: from a path to a descriptor that no other program writes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use cleave_nbd::NbdError;
use cleave_rbd::RbdError;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::{StripeError, qemu_lock};

/// Use of the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direct {
    /// Use O_DIRECT, or refuse the disk.
    On,
    /// Through the page cache.
    Off,
    /// O_DIRECT if it works.
    Auto,
}

/// The kind of file at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file; space is deallocated by punching holes.
    Regular,
    /// A block device, with its own discard and zero-out commands.
    BlockDevice,
}

/// How a disk is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenOptions {
    /// Opened without write permission; the lock is shared.
    pub read_only: bool,
    /// Use of the page cache.
    pub direct: Direct,
    /// Logical block size for the guest.
    pub block_bytes: u32,
    /// Discards and unmapping write-zeroes give space back if the store supports them.
    pub discard: bool,
    /// Most workers that will serve it at the same time.
    pub workers: u16,
    /// Origin of what it holds.
    pub content: ContentOrigin,
    /// When its locks are taken.
    pub locking: Locking,
}

/// When the locks of a disk are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locking {
    /// When it is opened. A disk that another program has is refused.
    AtOpen,
    /// By [`Disk::acquire`](crate::Disk::acquire). Another program may have the disk until then, and nothing is written to it.
    Later,
    /// By the process that has given its files and serves the disk until it is taken. They are not locked here: that process may
    /// release them meanwhile, and nobody would release them a second time. Files that were not given are locked when the disk is
    /// opened.
    Given,
}

/// Origin of what a disk holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentOrigin {
    /// Unknown. An image of another format and a leg of a stripe are refused, because the guest would see them as they are
    /// and overwrite them.
    Unknown,
    /// The disk was served before, so whatever looks like another format was written by its guest. A refusal would let a guest
    /// lock its own disk out.
    Guest,
}

impl Default for OpenOptions {
    /// Returns the defaults of `cleave serve`, but for one worker.
    fn default() -> OpenOptions {
        OpenOptions {
            read_only: false,
            direct: Direct::Auto,
            block_bytes: 512,
            discard: true,
            workers: 1,
            content: ContentOrigin::Unknown,
            locking: Locking::AtOpen,
        }
    }
}

/// Why a disk cannot be opened. Each message names the disk, by its path or spec, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The system call failed.
    #[error("cannot open disk {0}: {1}")]
    Io(String, #[source] io::Error),
    /// There is no such file.
    #[error("disk {path} does not exist; check the path, {how}", path = .0, how = how_to_make(.0))]
    Missing(String),
    /// The mode of the file or of a folder above it does not allow reading.
    #[error("no permission to open disk {0} for reading; give this user access")]
    NoRead(String),
    /// The mode does not allow reading and writing.
    #[error(
        "no permission to open disk {0} for reading and writing; give this user access, or serve it with --read-only"
    )]
    NoWrite(String),
    /// A write-protected block device.
    #[error("disk {0} is a write-protected device; serve it with --read-only")]
    WriteProtected(String),
    /// EROFS.
    #[error("disk {0} is on a read-only file system; serve it with --read-only")]
    ReadOnlyFileSystem(String),
    /// The path is another kind of file, named here with its article.
    #[error("disk {0} is {1}; name a regular file or a block device")]
    WrongKind(String, &'static str),
    /// A size of zero, and the remedy.
    #[error("disk {0} has no bytes; give it a size: {1}")]
    Empty(String, String),
    /// A size that is not a multiple of the block, or beyond the largest offset.
    #[error("disk {name} has {size_bytes} bytes, which is not {wanted}; {remedy}")]
    Size {
        /// The disk.
        name: String,
        /// Its size.
        size_bytes: u64,
        /// The requirement on a size.
        wanted: String,
        /// How to fix it.
        remedy: String,
    },
    /// An impossible logical block.
    #[error("block size {0} is not possible; use a power of two from 512 to 65536")]
    BlockSize(u32),
    /// O_DIRECT was required and does not work, for this reason.
    #[error("disk {0} cannot be read past the page cache ({1}); use --direct auto or --direct off")]
    NoDirect(String, String),
    /// O_DIRECT was required for a disk that is not a file.
    #[error(
        "disk {0} has no page cache to bypass; remove --direct, which is for files and devices"
    )]
    NoCache(String),
    /// The advisory lock is held.
    #[error("disk {0} is in use by another cleave; stop that one, or serve both with --read-only")]
    InUse(String),
    /// QEMU's locks are held.
    #[error(
        "disk {0} is in use by QEMU or one of its tools; stop that one, or make both read-only \
         (--read-only here, read-only=on there)"
    )]
    InUseByQemu(String),
    /// An image of this format instead of a raw one.
    #[error(
        "disk {0} is a {1} image, and the guest would see that file as it is; convert it \
         (qemu-img convert -O raw), or use --disk raw:{0} to give the guest the file itself"
    )]
    Format(String, &'static str),
    /// Its partitions are counted in other blocks than those that the guest is to see.
    #[error(
        "disk {0} has partitions in blocks of {1} bytes, and a guest with blocks of {2} would not find them; serve it with \
         --block-size {1}"
    )]
    Partitions(String, u32, u32),
    /// One leg of a stripe, to be written to without the others.
    #[error(
        "disk {name} is leg {leg} of {legs} of a stripe; serve all of them (--stripe {chunk} and a --disk for each leg), or \
         give --disk {raw} to write to this leg alone, which damages the stripe"
    )]
    Leg {
        /// The disk.
        name: String,
        /// Its place, counted from 1.
        leg: u32,
        /// How many there are.
        legs: u16,
        /// Chunk of the stripe.
        chunk: String,
        /// The word for `--disk` that writes to it nevertheless.
        raw: String,
    },
    /// The host has claimed the block device.
    #[error(
        "disk {0} is in use by this host (mounted, swap, or part of another device); \
         release it there, or serve it with --read-only"
    )]
    Claimed(String),
    /// Another process has given its open files of the disk to this one, which cannot use them, for this reason.
    #[error("disk {0} cannot be taken over: {1}; stop that one first, then start this one")]
    TakeOver(String, &'static str),
    /// The file system refuses locks.
    #[error("cannot lock disk {0}: {1}; put it on a file system that supports locks")]
    Lock(String, #[source] io::Error),
    /// The legs do not form a stripe.
    #[error(transparent)]
    Stripe(#[from] StripeError),
    /// There is no connection to its server.
    #[error("cannot connect disk {0}: {1}")]
    Nbd(String, #[source] NbdError),
    /// The server exports it for reading only.
    #[error("disk {0} is exported read-only; serve it with --read-only")]
    ReadOnlyExport(String),
    /// The server cannot do I/O in blocks as small as those of the guest.
    #[error(
        "disk {0} has blocks of {1} bytes, and a guest with smaller ones could not use it; serve it with --block-size {1}"
    )]
    LargeBlock(String, u32),
    /// The image of a Ceph cluster cannot be opened.
    #[error("cannot open disk {0}: {1}")]
    Rbd(String, #[source] Box<RbdError>),
    /// A snapshot can only be read.
    #[error("disk {0} is a snapshot; serve it with --read-only")]
    Snapshot(String),
    /// There is no memory for a RAM disk.
    #[error("cannot create disk {0}: {1}; use a smaller size")]
    Ram(String, #[source] io::Error),
}

/// Returns how the missing file can be had. What `truncate` made below /dev would be a file in the memory of the host.
fn how_to_make(name: &str) -> String {
    match name.starts_with("/dev/") {
        true => "and whether the device is attached".to_owned(),
        false => format!("or create it: truncate -s 10G {name}"),
    }
}

impl OpenError {
    /// Returns true if the same attempt may succeed later, though nobody changes the disk or the options: the file system, the device or
    /// the server is not there or does not answer, another program has the disk, or the host lacks memory or open files.
    pub fn may_pass(&self) -> bool {
        match self {
            OpenError::Missing(_)
            | OpenError::Io(..)
            | OpenError::Lock(..)
            | OpenError::Ram(..)
            | OpenError::Claimed(_)
            | OpenError::InUse(_)
            | OpenError::InUseByQemu(_) => true,
            OpenError::Nbd(_, error) => error.may_pass(),
            OpenError::Rbd(_, error) => error.may_pass(),
            OpenError::NoRead(_)
            | OpenError::NoWrite(_)
            | OpenError::WriteProtected(_)
            | OpenError::ReadOnlyFileSystem(_)
            | OpenError::WrongKind(..)
            | OpenError::Empty(..)
            | OpenError::Size { .. }
            | OpenError::BlockSize(_)
            | OpenError::NoDirect(..)
            | OpenError::NoCache(_)
            | OpenError::Format(..)
            | OpenError::Partitions(..)
            | OpenError::Leg { .. }
            | OpenError::TakeOver(..)
            | OpenError::Stripe(_)
            | OpenError::ReadOnlyExport(_)
            | OpenError::LargeBlock(..)
            | OpenError::Snapshot(_) => false,
        }
    }

    /// Returns the program that has the disk, as far as it is known, if it is locked. It may be unlocked later.
    pub fn holder(&self) -> Option<&str> {
        match self {
            OpenError::InUse(_) => Some("another cleave"),
            OpenError::InUseByQemu(_) => Some("QEMU or one of its tools"),
            OpenError::Rbd(_, error) => error.owner(),
            _ => None,
        }
    }

    /// Returns true if a disk that is open and cannot be acquired for this reason has to be opened anew: its legs do not form the
    /// stripe any more, or its cluster refuses this client for good.
    pub fn needs_reopening(&self) -> bool {
        match self {
            OpenError::Stripe(_) => true,
            OpenError::Rbd(_, error) => error.is_fenced(),
            _ => false,
        }
    }

    /// Returns the error for a failed system call.
    pub(crate) fn io(path: &Path, source: impl Into<io::Error>) -> OpenError {
        OpenError::Io(path.display().to_string(), source.into())
    }
}

/// Attempts to get the claim or the lock, and the pause between them. Other holders may be brief: udev's
/// helpers hold a block device for moments after a change; the rings of a killed daemon hold its files until
/// the kernel has cancelled its I/O; and a process that forks holds its open files twice until the child
/// calls exec. A daemon that is started at such a moment must not fail.
const TRIES: u32 = 80;
const PAUSE: Duration = Duration::from_millis(25);

/// Opens an existing file or device, and locks it if that is due; nothing is created. The descriptor lives as long as the
/// disk, so a file that is replaced or deleted is still served.
pub(crate) fn open_path(
    path: &Path,
    read_only: bool,
    locking: Locking,
) -> Result<(File, FileKind), OpenError> {
    let (file, kind) = open_unlocked(path, read_only)?;
    if locking != Locking::Later {
        lock(&file, &path.display().to_string(), read_only, TRIES)?;
    }
    Ok((file, kind))
}

/// Opens a file like `open_path`, but does not disturb a program that serves it.
pub(crate) fn open_unlocked(path: &Path, read_only: bool) -> Result<(File, FileKind), OpenError> {
    // Checked before it is opened, because opening alone moves a tape or waits for the other end of a fifo.
    let found = rustix::fs::stat(path).map_err(|errno| open_error(path, read_only, errno))?;
    let kind = file_kind(path, found.st_mode)?;
    let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    flags |= if read_only {
        OFlags::RDONLY
    } else {
        OFlags::RDWR
    };
    if kind == FileKind::BlockDevice && !read_only {
        // Without O_CREAT this claims a block device in the kernel: it fails if the device is mounted, and
        // nobody can mount it while a guest writes it.
        flags |= OFlags::EXCL;
    }
    let open = || rustix::fs::open(path, flags, Mode::empty());
    let fd = retry_while(Errno::BUSY, TRIES, open)
        .map_err(|errno| open_error(path, read_only, errno))?;
    let file = File::from(fd);
    // The path may have been replaced since the check; O_NONBLOCK kept even a fifo from blocking us.
    let opened = rustix::fs::fstat(&file).map_err(|errno| open_error(path, read_only, errno))?;
    if file_kind(path, opened.st_mode)? != kind {
        let replaced = io::Error::other("it was replaced while it was being opened; try again");
        return Err(OpenError::io(path, replaced));
    }
    Ok((file, kind))
}

/// Opens the same file again: a new open file description with the access mode and the O_DIRECT of `file`.
/// The lock and a block device's claim stay with `file`.
pub(crate) fn reopen(file: &File) -> io::Result<File> {
    let flags = rustix::fs::fcntl_getfl(file)? & (OFlags::ACCMODE | OFlags::DIRECT);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty())?))
}

pub(crate) fn file_kind(path: &Path, mode: rustix::fs::RawMode) -> Result<FileKind, OpenError> {
    let kind = match FileType::from_raw_mode(mode) {
        FileType::RegularFile => return Ok(FileKind::Regular),
        FileType::BlockDevice => return Ok(FileKind::BlockDevice),
        FileType::Directory => "a directory",
        FileType::CharacterDevice => "a character device",
        FileType::Socket => "a socket",
        FileType::Fifo => "a fifo",
        FileType::Symlink | FileType::Unknown => "no file",
    };
    Err(OpenError::WrongKind(path.display().to_string(), kind))
}

pub(crate) fn open_error(path: &Path, read_only: bool, errno: Errno) -> OpenError {
    let name = path.display().to_string();
    match errno {
        Errno::NOENT | Errno::NOTDIR => OpenError::Missing(name),
        Errno::ACCESS | Errno::PERM if read_only => OpenError::NoRead(name),
        Errno::ACCESS | Errno::PERM => OpenError::NoWrite(name),
        Errno::ROFS => OpenError::ReadOnlyFileSystem(name),
        Errno::BUSY => OpenError::Claimed(name),
        errno => OpenError::Io(name, errno.into()),
    }
}

/// Takes both kinds of locks. If one is refused, the caller closes the file, or releases the other. With one try, it does not
/// wait.
pub(crate) fn lock(file: &File, name: &str, read_only: bool, tries: u32) -> Result<(), OpenError> {
    lock_by(qemu_lock::lock, file, name, read_only, tries)
}

/// Takes both kinds of locks of a file whose description may have them already. A refusal releases none of them.
pub(crate) fn lock_given(file: &File, name: &str, read_only: bool) -> Result<(), OpenError> {
    lock_by(qemu_lock::lock_given, file, name, read_only, TRIES)
}

fn lock_by(
    lock_qemu: fn(&File, bool) -> Result<(), Errno>,
    file: &File,
    name: &str,
    read_only: bool,
    tries: u32,
) -> Result<(), OpenError> {
    let operation = if read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    let refused = |in_use: fn(String) -> OpenError| {
        move |errno| match errno {
            Errno::WOULDBLOCK => in_use(name.to_owned()),
            errno => OpenError::Lock(name.to_owned(), errno.into()),
        }
    };
    let flock = || rustix::fs::flock(file, operation);
    retry_while(Errno::WOULDBLOCK, tries, flock).map_err(refused(OpenError::InUse))?;
    let qemu = || lock_qemu(file, read_only);
    retry_while(Errno::WOULDBLOCK, tries, qemu).map_err(refused(OpenError::InUseByQemu))
}

/// Releases both kinds of locks.
pub(crate) fn unlock(file: &File) -> io::Result<()> {
    let qemu = qemu_lock::unlock(file);
    rustix::fs::flock(file, FlockOperation::Unlock)?;
    Ok(qemu?)
}

/// Retries while `attempt` fails with `taken`, because the holder may be brief.
fn retry_while<T>(
    taken: Errno,
    mut tries: u32,
    mut attempt: impl FnMut() -> Result<T, Errno>,
) -> Result<T, Errno> {
    loop {
        match attempt() {
            Err(Errno::INTR) => {}
            Err(errno) if errno == taken && tries > 1 => {
                tries -= 1;
                thread::sleep(PAUSE);
            }
            ended => return ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_brief_lock_is_waited_for_and_a_lasting_one_is_refused() {
        let outcomes = [Err(Errno::BUSY), Err(Errno::INTR), Err(Errno::BUSY), Ok(7)];
        let mut left = outcomes.into_iter();
        assert_eq!(
            retry_while(Errno::BUSY, TRIES, || left.next().unwrap()),
            Ok(7)
        );

        let mut tried = 0;
        let refused: Result<(), _> = retry_while(Errno::BUSY, TRIES, || {
            tried += 1;
            Err(Errno::BUSY)
        });
        assert_eq!((refused, tried), (Err(Errno::BUSY), TRIES));

        let other: Result<(), _> = retry_while(Errno::BUSY, TRIES, || Err(Errno::ACCESS));
        assert_eq!(other, Err(Errno::ACCESS));
    }

    #[test]
    fn errnos_become_a_line_with_a_remedy() {
        for (errno, read_only, wanted) in [
            (Errno::NOENT, false, "truncate -s 10G"),
            (Errno::NOTDIR, false, "does not exist"),
            (Errno::ACCESS, false, "or serve it with --read-only"),
            (Errno::PERM, true, "for reading; give this user access"),
            (
                Errno::ROFS,
                false,
                "read-only file system; serve it with --read-only",
            ),
            (Errno::BUSY, false, "mounted"),
            (Errno::MFILE, false, "Too many open files"),
            (Errno::NXIO, true, "No such device"),
        ] {
            let line = open_error(Path::new("/a/b.img"), read_only, errno).to_string();
            assert!(line.contains(wanted) && line.contains("/a/b.img"), "{line}");
            assert!(!line.contains('\n'), "{line}");
        }
        // It would be a file in the memory of the host.
        let device = open_error(Path::new("/dev/mapper/a"), false, Errno::NOENT).to_string();
        assert!(
            device.ends_with("check the path, and whether the device is attached"),
            "{device}"
        );
    }

    /// A service manager gives a service up for an error that does not pass.
    #[test]
    fn what_may_be_otherwise_in_a_moment_may_pass() {
        let passes = |errno| open_error(Path::new("/a"), false, errno).may_pass();
        for errno in [
            Errno::NOENT,
            Errno::NOTDIR,
            Errno::NXIO,
            Errno::NODEV,
            Errno::STALE,
            Errno::IO,
            Errno::NOTCONN,
            Errno::TIMEDOUT,
            Errno::HOSTDOWN,
            Errno::REMOTEIO,
            Errno::NOMEM,
            Errno::MFILE,
            Errno::NFILE,
            Errno::BUSY,
        ] {
            assert!(passes(errno), "{errno}");
        }
        for errno in [Errno::ACCESS, Errno::PERM, Errno::ROFS] {
            assert!(!passes(errno), "{errno}");
        }
        for error in [OpenError::InUse, OpenError::InUseByQemu] {
            assert!(error("/a".to_owned()).may_pass());
        }
        assert!(!OpenError::WrongKind("/a".to_owned(), "a directory").may_pass());
    }
}
