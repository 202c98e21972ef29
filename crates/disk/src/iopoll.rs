//! Polled queues: whether the device beneath a disk can complete reads and writes without interrupts
//! (`--iopoll`). Only an actual read proves that polling works; an engine does that.

use std::fs::{self, File};
use std::io;

use crate::detect::{queue_number, sysfs_number};
use crate::leg::Polling;
use crate::{Backing, Disk, FileKind, Leg};

/// Longest read or write that is polled; beyond it, the cost of an interrupt is negligible beside the transfer.
const BYTES_MAX: u64 = 128 << 10;
/// Pages of guests, and blocks of most file systems. Where this host has larger pages, the limits are lower than they need be.
const PAGE_BYTES: u64 = 4096;
const SECTOR_BYTES: u64 = 512;

/// Why a disk's I/O cannot be polled: a message that names the disk (or the leg) and the remedy.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct IopollError(String);

impl Disk {
    /// Enables polling for reads and writes of the disk. Every leg must support it.
    pub fn with_iopoll(mut self) -> Result<Disk, IopollError> {
        for leg in self.legs_mut() {
            let polling = check_leg(leg)?;
            leg.poll(polling);
        }
        Ok(self)
    }

    /// Acts as if every leg supported polling, for tests of engines on machines without polled queues.
    #[doc(hidden)]
    #[must_use]
    pub fn with_iopoll_unproven(mut self) -> Disk {
        let polling = Polling {
            bytes_max: BYTES_MAX,
            chunk_bytes: 0,
            start_bytes: 0,
        };
        self.legs_mut().iter_mut().for_each(|leg| leg.poll(polling));
        self
    }

    /// Returns true if reads and writes of any leg are polled.
    pub fn is_polled(&self) -> bool {
        self.legs().iter().any(Leg::is_polled)
    }
}

fn check_leg(leg: &Leg) -> Result<Polling, IopollError> {
    let name = leg.name();
    let refused = |why: String| Err(IopollError(why));
    let Backing::File {
        file, kind, direct, ..
    } = leg.backing()
    else {
        return refused(format!(
            "disk {name} has no queue on this host to poll; remove --iopoll, which is for files and devices"
        ));
    };
    if !direct {
        return refused(format!(
            "disk {name} is served through the page cache, which cannot be polled; add --direct on, whose \
             error says what prevents it, or remove --iopoll"
        ));
    }
    let device = match device(file, *kind) {
        Ok(device) => device,
        Err(error) => {
            return refused(format!("cannot find the device of disk {name}: {error}"));
        }
    };
    match queue_number(device, "io_poll") {
        Some(1) => Ok(polling(device, *kind)),
        Some(_) => {
            let device = device_name(device);
            refused(format!(
                "disk {name} cannot be polled: {device} has no polled queues; give its driver some by the kernel \
                 parameter {}, or remove --iopoll",
                parameter(&device)
            ))
        }
        // An overlay, a network file system or several devices.
        None => refused(format!(
            "disk {name} is on a file system whose device is unknown, so it cannot be polled; \
             name a file on another, or the device itself, or remove --iopoll"
        )),
    }
}

/// Returns the I/O that the device takes in one piece according to its queue limits. Any page may be a segment of its own.
fn polling(device: u64, kind: FileKind) -> Polling {
    let number = |name| queue_number(device, name);
    let at_once = number("max_sectors_kb").map(|kib| kib << 10);
    let segments = number("max_segments").map(|count| count.saturating_sub(1) * PAGE_BYTES);
    let bytes_max = [at_once, segments].into_iter().flatten().min();
    let chunk_bytes = number("chunk_sectors").unwrap_or(0) * SECTOR_BYTES;
    let (chunk_bytes, start_bytes) = match kind {
        FileKind::BlockDevice => {
            let sectors = sysfs_number(device, "start").unwrap_or(0);
            (chunk_bytes, sectors * SECTOR_BYTES)
        }
        // The location of a file's pages on the device is unknown; a page is never split.
        FileKind::Regular => (chunk_bytes.min(PAGE_BYTES), 0),
    };
    Polling {
        bytes_max: bytes_max.unwrap_or(PAGE_BYTES).min(BYTES_MAX),
        chunk_bytes,
        start_bytes,
    }
}

/// Returns the device itself, or the device of the file's file system.
fn device(file: &File, kind: FileKind) -> io::Result<u64> {
    let stat = rustix::fs::fstat(file)?;
    Ok(match kind {
        FileKind::Regular => stat.st_dev,
        FileKind::BlockDevice => stat.st_rdev,
    })
}

/// Returns the name in /sys/block, or the device's number if it has none.
fn device_name(device: u64) -> String {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let number = format!("{major}:{minor}");
    let link = fs::read_link(format!("/sys/dev/block/{number}"));
    let name = link.ok().and_then(|link| {
        let name = link.file_name()?;
        Some(name.to_string_lossy().into_owned())
    });
    name.unwrap_or(number)
}

fn parameter(device: &str) -> &'static str {
    match device {
        _ if device.starts_with("nvme") => "nvme.poll_queues=N",
        _ if device.starts_with("vd") => "virtio_blk.poll_queues=N",
        _ => "nvme.poll_queues=N or virtio_blk.poll_queues=N (other drivers have few or none)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Direct, DiskSpec, OpenOptions, StripeKind};

    fn refusal(disk: Disk) -> String {
        let why = disk.with_iopoll().unwrap_err().to_string();
        assert!(!why.contains('\n'), "one line: {why}");
        why
    }

    #[test]
    fn memory_and_the_page_cache_are_refused_by_name() {
        for spec in ["ram:1M", "null:1M", "model:p3700,size=1M"] {
            let disk = Disk::open(&spec.parse().unwrap(), &OpenOptions::default()).unwrap();
            let why = refusal(disk);
            assert!(
                why.contains(spec) && why.contains("remove --iopoll"),
                "{why}"
            );
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let direct = Direct::Off;
        let options = OpenOptions {
            direct,
            ..OpenOptions::default()
        };
        let spec = DiskSpec::Path(file.path().to_owned());
        let why = refusal(Disk::open(&spec, &options).unwrap());
        let path = file.path().to_string_lossy();
        assert!(why.contains(&*path) && why.contains("--direct on"), "{why}");
    }

    #[test]
    fn a_device_without_polled_queues_is_refused_with_its_drivers_parameter() {
        // Beside the test's program, which is on a real file system even if /tmp is in memory.
        let exe = std::env::current_exe().unwrap();
        let folder = tempfile::tempdir_in(exe.parent().unwrap()).unwrap();
        let legs: Vec<_> = ["first", "second"]
            .iter()
            .map(|name| {
                let path = folder.path().join(name);
                File::create(&path).unwrap().set_len(1 << 20).unwrap();
                DiskSpec::Path(path)
            })
            .collect();
        let disk =
            Disk::open_stripe(&legs, 65536, StripeKind::Raw, &OpenOptions::default()).unwrap();
        let is_direct = |leg: &Leg| matches!(leg.backing(), Backing::File { direct: true, .. });
        let Backing::File { file, kind, .. } = disk.backing() else {
            panic!("a file")
        };
        let queues = queue_number(device(file, *kind).unwrap(), "io_poll");
        assert!(!disk.is_polled());
        match (disk.legs().iter().all(is_direct), queues) {
            (true, Some(1)) => assert!(disk.with_iopoll().unwrap().is_polled()),
            (is_direct, queues) => {
                let why = refusal(disk);
                assert!(why.contains("first"), "it names the leg: {why}");
                let remedy = match (is_direct, queues) {
                    (false, _) => "--direct on",
                    (true, None) => "name a file on another",
                    (true, Some(_)) => ".poll_queues=N",
                };
                assert!(why.contains(remedy), "{why}");
            }
        }
    }

    #[test]
    fn the_parameter_is_the_drivers() {
        assert_eq!(parameter("nvme0n1p2"), "nvme.poll_queues=N");
        assert_eq!(parameter("vdb"), "virtio_blk.poll_queues=N");
        assert!(parameter("dm-0").contains("other drivers"));
    }

    #[test]
    fn polling_is_stopped_once_for_all_engines() {
        let disk = Disk::open(&"ram:1M".parse().unwrap(), &OpenOptions::default()).unwrap();
        let disk = disk.with_iopoll_unproven();
        assert!(disk.is_polled());
        let left: Vec<_> = (0..2).map(|_| disk.legs()[0].stop_polling()).collect();
        assert_eq!((left, disk.is_polled()), (vec![true, false], false));
    }
}
