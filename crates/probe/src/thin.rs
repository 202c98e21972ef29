//! Thin areas: reads of areas that were never written do not reach the device, which falsifies a measurement.

use std::fs::File;

use cleave_disk::{Backing, Disk, FileKind};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// Maximum number of holes and data ranges that are examined.
const PIECES_MAX: u32 = 100_000;

/// Share of a disk that is backed by storage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Extent {
    /// The share according to the file system's map.
    Share(f64),
    /// Not known: a block device, or a file system without a map.
    Unknown,
}

/// Examines a disk. Memory has no relevant thin areas. A stripe has the share of its emptiest leg, and is
/// unknown if one of its legs is.
pub fn stored(disk: &Disk) -> Extent {
    let legs = disk.legs();
    let leg_bytes = disk.capacity_bytes() / legs.len().max(1) as u64;
    let extents = legs.iter().map(|leg| match leg.backing() {
        Backing::File {
            file,
            kind: FileKind::Regular,
            ..
        } => map(file, leg_bytes),
        Backing::File { .. } | Backing::Nbd(_) | Backing::Rbd(_) => Extent::Unknown,
        Backing::Ram(_) | Backing::Null { .. } | Backing::Model { .. } => Extent::Share(1.0),
    });
    extents.fold(Extent::Share(1.0), |all, one| match (all, one) {
        (Extent::Share(a), Extent::Share(b)) => Extent::Share(a.min(b)),
        _ => Extent::Unknown,
    })
}

/// Returns true if random writes could destroy data. A file that is one hole has none; for a block device this is not known.
pub fn holds_data(disk: &Disk) -> bool {
    disk.legs().iter().any(|leg| match leg.backing() {
        Backing::File {
            file,
            kind: FileKind::Regular,
            ..
        } => !matches!(rustix::fs::seek(file, SeekFrom::Data(0)), Err(Errno::NXIO)),
        Backing::File { .. } | Backing::Nbd(_) | Backing::Rbd(_) => true,
        Backing::Ram(_) | Backing::Null { .. } | Backing::Model { .. } => false,
    })
}

/// Moves the file's own offset, which nothing uses: all I/O is positioned.
fn map(file: &File, capacity_bytes: u64) -> Extent {
    let (mut at, mut data_bytes) = (0, 0_u64);
    for _ in 0..PIECES_MAX {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) if start < capacity_bytes => start,
            Ok(_) | Err(Errno::NXIO) => return share(data_bytes, capacity_bytes),
            Err(_) => return Extent::Unknown,
        };
        let Ok(end) = rustix::fs::seek(file, SeekFrom::Hole(start)) else {
            return Extent::Unknown;
        };
        let end = end.min(capacity_bytes);
        data_bytes += end.saturating_sub(start);
        if end >= capacity_bytes || end <= start {
            return share(data_bytes, capacity_bytes);
        }
        at = end;
    }
    // There are too many ranges, so those seen so far represent the rest.
    share(data_bytes, at)
}

fn share(data_bytes: u64, of_bytes: u64) -> Extent {
    Extent::Share(data_bytes as f64 / of_bytes.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    #[test]
    fn holes_and_data_are_distinguished() {
        let file = tempfile::tempfile().unwrap();
        let size = 8 << 20;
        file.set_len(size).unwrap();
        assert_eq!(map(&file, size), Extent::Share(0.0));
        file.write_all_at(&vec![1; 1 << 20], 2 << 20).unwrap();
        file.write_all_at(&vec![1; 1 << 20], 6 << 20).unwrap();
        match map(&file, size) {
            Extent::Share(share) => assert!((0.24..0.27).contains(&share), "{share}"),
            Extent::Unknown => panic!("no map here"),
        }
        file.write_all_at(&vec![1; size as usize], 0).unwrap();
        assert_eq!(map(&file, size), Extent::Share(1.0));
    }
}
