//! The identity of a measured disk, which a profile is compared with.

use std::fmt;

use cleave_disk::{Backing, Disk, FileKind, Leg};
use serde::{Deserialize, Serialize};

/// Properties by which a disk is recognised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskIdentity {
    /// The path as given by the operator. Not compared, because a disk can have many paths.
    pub name: String,
    /// The disk's serial, which is derived from its canonical path.
    pub serial: String,
    /// file, device, ram, null, model or stripe.
    pub kind: String,
    /// Size at the time of the measurement.
    pub size_bytes: u64,
    /// Smallest op that the store runs without read-modify-write, at least 512.
    pub block_bytes: u32,
    /// True if the page cache was bypassed.
    pub direct: bool,
}

impl DiskIdentity {
    /// Returns the identity of an opened disk.
    pub fn of(disk: &Disk) -> DiskIdentity {
        let kind = match disk.legs().len() {
            1 => kind(disk.backing()),
            _ => "stripe",
        };
        let serial = disk.serial();
        let serial = match disk.backing() {
            // A model is defined by its name, parameters included.
            Backing::Model { .. } => disk.name().as_bytes(),
            _ => serial.split(|byte| *byte == 0).next().unwrap_or_default(),
        };
        DiskIdentity {
            name: disk.name().to_owned(),
            serial: String::from_utf8_lossy(serial).into_owned(),
            kind: kind.to_owned(),
            size_bytes: disk.capacity_bytes(),
            block_bytes: smallest_op(disk),
            direct: disk.legs().iter().all(is_direct),
        }
    }

    /// Returns the first property in which `now` differs. A larger size does not count, because a disk may grow while
    /// it is served and must be served again afterwards.
    pub(crate) fn difference(&self, now: &DiskIdentity) -> Option<String> {
        let said = |what: &str, then: &dyn fmt::Display, now: &dyn fmt::Display| {
            Some(format!("{what} was {then} and is {now}"))
        };
        if self.kind != now.kind {
            return said("its kind", &self.kind, &now.kind);
        }
        if self.serial != now.serial {
            return said("the disk", &self.name, &now.name);
        }
        if now.size_bytes < self.size_bytes {
            return said("its size in bytes", &self.size_bytes, &now.size_bytes);
        }
        if self.block_bytes != now.block_bytes {
            return said(
                "its smallest op in bytes",
                &self.block_bytes,
                &now.block_bytes,
            );
        }
        if self.direct != now.direct {
            let how = |direct| if direct { "bypassed" } else { "used" };
            return said("its page cache", &how(self.direct), &how(now.direct));
        }
        None
    }
}

/// Returns the smallest op that is run as it is. Smaller ones are read-modify-write, which does not measure the disk.
pub(crate) fn smallest_op(disk: &Disk) -> u32 {
    disk.limits().offset_align_bytes.max(512)
}

fn kind(store: &Backing) -> &'static str {
    match store {
        Backing::File { kind, .. } => match kind {
            FileKind::Regular => "file",
            FileKind::BlockDevice => "device",
        },
        Backing::Ram(_) => "ram",
        Backing::Null { .. } => "null",
        Backing::Model { .. } => "model",
        Backing::Nbd(_) => "nbd",
        Backing::Rbd(_) => "rbd",
    }
}

fn is_direct(leg: &Leg) -> bool {
    !matches!(leg.backing(), Backing::File { direct: false, .. })
}
