//! Polled queues: whether the device beneath a disk completes reads and writes without interrupts
//! (`--iopoll`). That it truly does, shows only when something is read so; that is an engine's work.

use std::fs::{self, File};
use std::io;

use crate::leg::Polling;
use crate::probe::{queue_number, sysfs_number};
use crate::{Backing, Disk, FileKind, Leg};

/// Longest read or write that is polled for: beyond it an interrupt is nothing beside the transfer.
const BYTES_MAX: u64 = 128 << 10;
const PAGE_BYTES: u64 = 4096;
const SECTOR_BYTES: u64 = 512;

/// Why a disk's I/O cannot be polled for: a line that names the disk (of a stripe the leg) and the remedy.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct IopollError(String);

impl Disk {
    /// The same disk, its reads and writes polled for; every leg has to be able.
    pub fn with_iopoll(mut self) -> Result<Disk, IopollError> {
        for leg in self.legs_mut() {
            let polling = judge(leg)?;
            leg.poll(polling);
        }
        Ok(self)
    }

    /// For tests of engines, on machines without polled queues: as if every leg were able.
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

    /// The reads and writes of some leg are polled for.
    pub fn is_polled(&self) -> bool {
        self.legs().iter().any(Leg::is_polled)
    }
}

fn judge(leg: &Leg) -> Result<Polling, IopollError> {
    let name = leg.name();
    let refused = |why: String| Err(IopollError(why));
    let Backing::File { file, kind, direct } = leg.backing() else {
        return refused(format!(
            "disk {name} is memory and has no queue to poll; leave --iopoll away, it is for files and devices"
        ));
    };
    if !direct {
        return refused(format!(
            "disk {name} is served through the page cache, which cannot be polled; add --direct on, which \
             says what is in the way of it, or leave --iopoll away"
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
                 parameter {}, or leave --iopoll away",
                parameter(&device)
            ))
        }
        // An overlay, a network or several devices.
        None => refused(format!(
            "disk {name} is on a file system whose device is not known, so that nothing can be polled; \
             name a file on another, or the device itself, or leave --iopoll away"
        )),
    }
}

/// What the device takes in one piece, as its queue says. Any page may be a segment of its own.
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
        // Where a file's pages lie on the device nobody says; a page is never cut.
        FileKind::Regular => (chunk_bytes.min(PAGE_BYTES), 0),
    };
    Polling {
        bytes_max: bytes_max.unwrap_or(PAGE_BYTES).min(BYTES_MAX),
        chunk_bytes,
        start_bytes,
    }
}

/// The device itself, or the one that a file's file system is on.
fn device(file: &File, kind: FileKind) -> io::Result<u64> {
    let stat = rustix::fs::fstat(file)?;
    Ok(match kind {
        FileKind::Regular => stat.st_dev,
        FileKind::BlockDevice => stat.st_rdev,
    })
}

/// As /sys/block has it; its number where there is no more.
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
                why.contains(spec) && why.contains("leave --iopoll away"),
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
        // Beside the test's program: a real file system even where /tmp is memory.
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
    fn polling_is_left_once_for_all() {
        let disk = Disk::open(&"ram:1M".parse().unwrap(), &OpenOptions::default()).unwrap();
        let disk = disk.with_iopoll_unproven();
        assert!(disk.is_polled());
        let left: Vec<_> = (0..2).map(|_| disk.legs()[0].leave_polling()).collect();
        assert_eq!((left, disk.is_polled()), (vec![true, false], false));
    }
}
