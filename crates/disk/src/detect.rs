//! Finds out what a store can do: sizes, alignments, and whether O_DIRECT works.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use cleave_blk::Limits;
use rustix::fs::{AtFlags, IFlags, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use crate::format::image_format;
use crate::{Direct, FileKind, OpenError, OpenOptions};

/// Smallest block and unit of every size (virtio 1.3 §5.2.4: sectors are 512 bytes).
const BLOCK_BYTES_MIN: u32 = 512;
/// Largest logical block for a guest.
const BLOCK_BYTES_MAX: u32 = 65536;
/// The block of devices that have large ones.
const LARGE_BLOCK_BYTES: u32 = 4096;
/// The kernel and virtio count the bytes of a file in an `i64`.
const CAPACITY_MAX: u64 = i64::MAX as u64;
/// FUSE_SUPER_MAGIC (linux/magic.h): FUSE, and virtiofs, which shares its file operations.
const FUSE_MAGIC: u32 = 0x6573_5546;
/// EXT4_SUPER_MAGIC (linux/magic.h): ext4, ext3 and ext2.
const EXT4_MAGIC: u32 = 0xef53;
/// FS_EXTENT_FL (linux/fs.h).
const EXTENTS: IFlags = IFlags::from_bits_retain(0x0008_0000);
/// FS_ENCRYPT_FL, FS_VERITY_FL, FS_INLINE_DATA_FL and FS_JOURNAL_DATA_FL.
const NEVER_DIRECT: IFlags = IFlags::from_bits_retain(0x1010_4800);

/// The properties of a store before the operator's options are applied.
struct Geometry {
    size_bytes: u64,
    /// Logical block of a device; 512 for anything else.
    logical_bytes: u32,
    align: Align,
    can_discard: bool,
    rotational: bool,
    /// The kernel lets us open the device for writing but refuses every write.
    write_protected: bool,
}

impl Geometry {
    /// Describes a file or memory.
    fn plain(size_bytes: u64) -> Geometry {
        Geometry {
            size_bytes,
            logical_bytes: BLOCK_BYTES_MIN,
            align: Align::NONE,
            can_discard: true,
            rotational: false,
            write_protected: false,
        }
    }
}

/// The alignment that I/O needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Align {
    offset_bytes: u32,
    memory_bytes: u32,
}

impl Align {
    /// The page cache and memory accept any alignment.
    const NONE: Align = Align {
        offset_bytes: 1,
        memory_bytes: 1,
    };
}

/// Returns the current size of a file or block device.
pub(crate) fn size_bytes(file: &File, kind: FileKind) -> io::Result<u64> {
    Ok(match kind {
        FileKind::Regular => file.metadata()?.len(),
        // stat reports 0 for a device. Nothing uses the file offset that this moves: all I/O is positioned.
        FileKind::BlockDevice => rustix::fs::seek(file, SeekFrom::End(0))?,
    })
}

/// Returns true if a program serves this file ([`crate::Backing::File`]). A file system whose server does not know the question
/// is certainly served by one.
pub(crate) fn has_server(file: &File) -> bool {
    rustix::fs::fstatfs(file).map_or(true, |found| found.f_type as u32 == FUSE_MAGIC)
}

/// Returns true if O_DIRECT keeps every write to this file out of the page cache. Not all file systems do, and none says so. By the
/// sources of Linux 6, XFS writes through it what is not whole blocks if the file shares blocks, Btrfs all of a file with checksums,
/// tmpfs and some servers of FUSE everything. So only a file system whose source was read is trusted.
pub(crate) fn keeps_writes_direct(file: &File) -> bool {
    let Ok(found) = rustix::fs::fstatfs(file) else {
        return false;
    };
    // An ioctl only where it is known to mean this.
    found.f_type as u32 == EXT4_MAGIC
        && rustix::fs::ioctl_getflags(file).is_ok_and(is_direct_on_ext4)
}

/// ext4 fills the holes of a file without extents through the page cache, and writes files of these kinds through it. Two cases are
/// left that the flags do not show. Where all data goes to the journal (`data=journal`), Linux 6.1 and later report that there is no
/// O_DIRECT; before, a durable write ends with a commit of the journal, and after one that failed all others fail. And ext4 cannot drop
/// a page that another program changes at the same moment, which the locks of an image are to prevent.
fn is_direct_on_ext4(flags: IFlags) -> bool {
    flags.contains(EXTENTS) && !flags.intersects(NEVER_DIRECT)
}

/// Returns the number of a block device, or of the file system of a file.
pub(crate) fn device(file: &File, kind: FileKind) -> io::Result<u64> {
    let found = file.metadata()?;
    Ok(match kind {
        FileKind::Regular => found.dev(),
        FileKind::BlockDevice => found.rdev(),
    })
}

/// Returns the limits of a disk in memory or of a null disk.
pub(crate) fn probe_memory(
    name: &str,
    size_bytes: u64,
    options: &OpenOptions,
) -> Result<Limits, OpenError> {
    if options.direct == Direct::On {
        return Err(OpenError::NoCache(name.to_owned()));
    }
    let geometry = Geometry::plain(size_bytes);
    let remedy = |_: u64| "write another size".to_owned();
    limits(name, &geometry, options, remedy)
}

/// The properties of a remote disk, as its server gives them.
pub(crate) struct RemoteProperties {
    pub(crate) size_bytes: u64,
    pub(crate) can_discard: bool,
    pub(crate) rotational: bool,
    /// The way to give it another size.
    pub(crate) remedy: &'static str,
}

/// Returns the limits of a disk of a server.
pub(crate) fn probe_remote(
    name: &str,
    remote: &RemoteProperties,
    options: &OpenOptions,
) -> Result<Limits, OpenError> {
    if options.direct == Direct::On {
        return Err(OpenError::NoCache(name.to_owned()));
    }
    let geometry = Geometry {
        can_discard: remote.can_discard,
        rotational: remote.rotational,
        ..Geometry::plain(remote.size_bytes)
    };
    let remedy = |multiple: u64| format!("{} a multiple of {multiple}", remote.remedy);
    limits(name, &geometry, options, remedy)
}

/// Returns the limits of an opened file or device. Sets O_DIRECT on `file` if it is to bypass the page cache.
pub(crate) fn probe_file(
    path: &Path,
    file: &File,
    kind: FileKind,
    options: &OpenOptions,
) -> Result<(Limits, bool), OpenError> {
    let name = path.display().to_string();
    let remedy = |multiple: u64| match kind {
        // A raw file reads on as zeroes. Of another format, opened by `raw:`, the end may mean something.
        FileKind::Regular => match image_format(file) {
            Ok(None) => format!("round it up: truncate -s %{multiple} {name}"),
            _ => "convert it: qemu-img convert -O raw makes an image that can be served".to_owned(),
        },
        FileKind::BlockDevice => "use a smaller --block-size".to_owned(),
    };
    let mut geometry = geometry(file, kind).map_err(|error| OpenError::io(path, error))?;
    if geometry.write_protected && !options.read_only {
        return Err(OpenError::WriteProtected(name));
    }
    // Refused before it is probed: a size of zero or of half a sector would look like a broken O_DIRECT.
    limits(&name, &geometry, options, remedy)?;
    let direct = choose_direct(path, file, &mut geometry, options)?;
    Ok((limits(&name, &geometry, options, remedy)?, direct))
}

/// Applies the operator's options. Sizes and blocks are refused only here.
fn limits(
    name: &str,
    geometry: &Geometry,
    options: &OpenOptions,
    remedy: impl Fn(u64) -> String,
) -> Result<Limits, OpenError> {
    let size_bytes = geometry.size_bytes;
    let block_bytes = options.block_bytes;
    if !block_bytes.is_power_of_two() || !(BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&block_bytes)
    {
        return Err(OpenError::BlockSize(block_bytes));
    }
    if size_bytes == 0 {
        let remedy = match name.split_once(':') {
            Some((kind @ ("ram" | "null"), _)) => format!("{kind}:1G"),
            Some(("rbd", _)) => "rbd resize --size 10G".to_owned(),
            Some(("nbd" | "nbd+unix", _)) => "let the server export more".to_owned(),
            _ if name.starts_with("/dev/") => "attach what it is to show".to_owned(),
            _ => format!("truncate -s 10G {name}"),
        };
        return Err(OpenError::Empty(name.to_owned(), remedy));
    }
    let multiple = u64::from(granule(block_bytes, geometry.align.offset_bytes));
    let wanted = match (size_bytes % multiple, size_bytes <= CAPACITY_MAX) {
        (0, true) => None,
        (0, false) => Some("below 2^63".to_owned()),
        _ => Some(format!("a multiple of {multiple}")),
    };
    if let Some(wanted) = wanted {
        return Err(OpenError::Size {
            name: name.to_owned(),
            size_bytes,
            wanted,
            remedy: remedy(multiple),
        });
    }
    Ok(Limits {
        capacity_bytes: size_bytes,
        block_bytes,
        offset_align_bytes: geometry.align.offset_bytes,
        memory_align_bytes: geometry.align.memory_bytes,
        read_only: options.read_only,
        discard: options.discard && geometry.can_discard && !options.read_only,
        // The device's own block, even if the page cache hides it.
        discard_align_bytes: geometry.logical_bytes.max(geometry.align.offset_bytes),
        rotational: geometry.rotational,
    })
}

/// Returns the number of which a size must be a multiple: of the guest's block and of the store's unit, because the last piece of
/// a read-modify-write would otherwise reach beyond the end. Both are powers of two.
pub(crate) fn granule(block_bytes: u32, offset_align_bytes: u32) -> u32 {
    block_bytes.max(offset_align_bytes)
}

fn geometry(file: &File, kind: FileKind) -> io::Result<Geometry> {
    let stat = rustix::fs::fstat(file)?;
    let size_bytes = size_bytes(file, kind)?;
    if kind == FileKind::Regular {
        return Ok(Geometry {
            rotational: queue_number(stat.st_dev, "rotational") == Some(1),
            // Support for punching holes is known only after one was punched; the engine handles a refusal.
            ..Geometry::plain(size_bytes)
        });
    }
    let logical = rustix::fs::ioctl_blksszget(file)?;
    let number = |name| queue_number(stat.st_rdev, name);
    Ok(Geometry {
        size_bytes,
        logical_bytes: match plausible_block(logical) {
            true => logical,
            false => BLOCK_BYTES_MIN,
        },
        align: Align::NONE,
        can_discard: number("discard_max_bytes").is_some_and(|bytes| bytes > 0),
        rotational: number("rotational") == Some(1),
        write_protected: sysfs_number(stat.st_rdev, "ro") == Some(1),
    })
}

fn plausible_block(bytes: u32) -> bool {
    bytes.is_power_of_two() && (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&bytes)
}

/// Returns a number from the device's request queue; a partition has that of its whole device. `..` is resolved after the link to
/// the partition's folder was followed, so it is the whole device.
pub(crate) fn queue_number(device: u64, name: &str) -> Option<u64> {
    sysfs_number(device, &format!("queue/{name}"))
        .or_else(|| sysfs_number(device, &format!("../queue/{name}")))
}

/// Reads a number of a device in sysfs. `None` if there is no such device (tmpfs, overlay) or no sysfs.
pub(crate) fn sysfs_number(device: u64, name: &str) -> Option<u64> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let text = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{name}")).ok()?;
    text.trim().parse().ok()
}

/// Sets or clears O_DIRECT as requested and possible, and stores its requirements in `geometry`.
fn choose_direct(
    path: &Path,
    file: &File,
    geometry: &mut Geometry,
    options: &OpenOptions,
) -> Result<bool, OpenError> {
    let failed = |errno: Errno| OpenError::io(path, errno);
    let buffered = |why: &str| match options.direct {
        Direct::On => {
            let name = path.display().to_string();
            Err(OpenError::NoDirect(name, why.to_owned()))
        }
        Direct::Off | Direct::Auto => set_direct(file, false).map(|()| false).map_err(failed),
    };
    if options.direct == Direct::Off {
        return buffered("");
    }
    match set_direct(file, true) {
        Ok(()) => {}
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return buffered("no O_DIRECT there"),
        Err(errno) => return Err(failed(errno)),
    }
    let Some(align) = probe_align(file, geometry).map_err(failed)? else {
        return buffered("no alignment was accepted");
    };
    let multiple = granule(options.block_bytes, align.offset_bytes);
    if !geometry.size_bytes.is_multiple_of(u64::from(multiple)) {
        // The last piece can be read and written only through the page cache.
        return buffered(&format!(
            "its {} bytes are not a multiple of {multiple}, which O_DIRECT needs here",
            geometry.size_bytes
        ));
    }
    geometry.align = align;
    Ok(true)
}

/// Sets or clears O_DIRECT. This also clears O_NONBLOCK, which was only for opening.
pub(crate) fn set_direct(file: &File, on: bool) -> Result<(), Errno> {
    let mut flags = rustix::fs::fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, on);
    flags.remove(OFlags::NONBLOCK);
    rustix::fs::fcntl_setfl(file, flags)
}

/// Returns the requirements of O_DIRECT: those that the kernel reports (statx(2) STATX_DIOALIGN, since 6.1), or the device's
/// block, or the first of two common ones (`guesses`). Each is verified by a read. `None`: O_DIRECT does not work.
fn probe_align(file: &File, geometry: &Geometry) -> Result<Option<Align>, Errno> {
    let stated = match rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(stat) if StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::DIOALIGN) => {
            if stat.stx_dio_offset_align == 0 || stat.stx_dio_mem_align == 0 {
                return Ok(None);
            }
            Some(Align {
                offset_bytes: stat.stx_dio_offset_align,
                memory_bytes: stat.stx_dio_mem_align,
            })
        }
        // An old kernel, or a file system that does not report it.
        Ok(_) | Err(_) => None,
    };
    for align in stated.into_iter().chain(guesses(file, geometry)) {
        if !plausible_align(align) {
            continue;
        }
        if direct_read_works(file, align)? {
            return Ok(Some(align));
        }
    }
    Ok(None)
}

/// Returns the requirements to try where the kernel states none, the weakest first. A file that begins with a hole
/// gets only the safe one: a kernel answers a read of a hole whatever its alignment, so the read verifies nothing.
fn guesses(file: &File, geometry: &Geometry) -> impl Iterator<Item = Align> {
    let weak = (!begins_with_hole(file)).then_some(geometry.logical_bytes);
    weak.into_iter()
        .chain([LARGE_BLOCK_BYTES])
        .map(|bytes| Align {
            offset_bytes: bytes,
            memory_bytes: bytes,
        })
}

/// Returns false also for a device, which knows no holes. Space that is allocated and was never written counts as a
/// hole here and in the kernel's reads.
fn begins_with_hole(file: &File) -> bool {
    match rustix::fs::seek(file, SeekFrom::Data(0)) {
        Ok(offset_bytes) => offset_bytes > 0,
        Err(errno) => errno == Errno::NXIO,
    }
}

fn plausible_align(align: Align) -> bool {
    let fine = |bytes: u32| bytes.is_power_of_two() && bytes <= BLOCK_BYTES_MAX;
    fine(align.offset_bytes) && fine(align.memory_bytes)
}

/// Reads one unit at the beginning into memory with exactly this alignment, to detect one that is too weak.
fn direct_read_works(file: &File, align: Align) -> Result<bool, Errno> {
    let (len, memory) = (align.offset_bytes as usize, align.memory_bytes as usize);
    let mut buffer = vec![0_u8; len + 3 * memory];
    // An odd multiple of the alignment, so that it has no larger alignment.
    let start = buffer
        .as_ptr()
        .align_offset(2 * memory)
        .saturating_add(memory);
    let Some(window) = buffer.get_mut(start..start.saturating_add(len)) else {
        return Ok(false);
    };
    loop {
        match rustix::io::pread(file, &mut *window, 0) {
            Ok(_) => return Ok(true),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(false),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For example an image of 512-byte sectors on a file system of 4096-byte blocks. The test uses a block
    /// size instead, because such a file system is rarely available.
    #[test]
    fn a_tail_that_direct_cannot_reach_is_read_through_the_page_cache() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(9 * 512).unwrap();
        let path = Path::new("image");
        for (direct, block_bytes, wanted) in [
            (Direct::Auto, 4096, Some(false)),
            (Direct::On, 4096, None),
            (Direct::Off, 4096, Some(false)),
        ] {
            let options = OpenOptions {
                direct,
                block_bytes,
                ..OpenOptions::default()
            };
            let mut geometry = geometry(&file, FileKind::Regular).unwrap();
            match choose_direct(path, &file, &mut geometry, &options) {
                Ok(found) => assert_eq!(Some(found), wanted, "{direct:?}"),
                Err(OpenError::NoDirect { .. }) => assert_eq!(wanted, None, "{direct:?}"),
                Err(other) => panic!("{direct:?}: {other}"),
            }
            let flags = rustix::fs::fcntl_getfl(&file).unwrap();
            assert!(wanted.is_none() || !flags.contains(OFlags::DIRECT));
            assert_eq!(geometry.align, Align::NONE);
        }
    }

    #[test]
    fn a_file_of_ext4_is_written_directly_unless_it_is_of_a_special_kind() {
        for (flags, wanted) in [
            (0x0008_0000, true),
            // Without copy on write, without a time of access.
            (0x0088_0080, true),
            // As of ext3.
            (0, false),
            (0x0008_0800, false),
            (0x0018_0000, false),
            (0x1008_0000, false),
            (0x0008_4000, false),
        ] {
            let flags = IFlags::from_bits_retain(flags);
            assert_eq!(is_direct_on_ext4(flags), wanted, "{flags:?}");
        }
    }

    /// In memory there is nothing but the page cache, whatever O_DIRECT is said to do there.
    #[test]
    fn a_file_in_memory_is_not_written_directly() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        assert!(!keeps_writes_direct(&file));
    }

    #[test]
    fn the_small_block_is_tried_only_where_there_is_data_to_read() {
        use std::os::unix::fs::FileExt as _;
        for (data_at, wanted) in [
            (None, &[4096][..]),
            (Some(1 << 20), &[4096]),
            (Some(0), &[512, 4096]),
        ] {
            let file = tempfile::tempfile().unwrap();
            file.set_len(2 << 20).unwrap();
            if let Some(at) = data_at {
                file.write_all_at(&[1; 4096], at).unwrap();
            }
            let geometry = geometry(&file, FileKind::Regular).unwrap();
            let tried: Vec<u32> = guesses(&file, &geometry).map(|a| a.offset_bytes).collect();
            assert_eq!(tried, wanted, "{data_at:?}");
        }
    }
}
