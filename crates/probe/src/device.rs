//! Which disk was measured: what a profile is compared with.

use std::fmt;

use cleave_disk::{Backing, Disk, FileKind, Leg};
use serde::{Deserialize, Serialize};

/// What tells a disk from another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// As the operator called it. Not compared: the same disk has many paths.
    pub name: String,
    /// The disk's own serial, which is made from its path with links followed.
    pub serial: String,
    /// file, device, ram, null, model or stripe.
    pub kind: String,
    /// Size when it was measured.
    pub size_bytes: u64,
    /// Smallest op that the store takes as it is, at least 512.
    pub block_bytes: u32,
    /// The page cache was bypassed.
    pub direct: bool,
}

impl Identity {
    /// That of an opened disk.
    pub fn of(disk: &Disk) -> Identity {
        let kind = match disk.legs().len() {
            1 => kind(disk.backing()),
            _ => "stripe",
        };
        let serial = disk.serial();
        let serial = match disk.backing() {
            // A model is all that its name says, its parameters included.
            Backing::Model { .. } => disk.name().as_bytes(),
            _ => serial.split(|byte| *byte == 0).next().unwrap_or_default(),
        };
        Identity {
            name: disk.name().to_owned(),
            serial: String::from_utf8_lossy(serial).into_owned(),
            kind: kind.to_owned(),
            size_bytes: disk.capacity_bytes(),
            block_bytes: smallest_op(disk),
            direct: disk.legs().iter().all(is_direct),
        }
    }

    /// The first thing in which `now` is another disk, or is reached in another way. A disk that grew
    /// is still the same: it may grow while it is served, and must be served again after that.
    pub(crate) fn difference(&self, now: &Identity) -> Option<String> {
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

/// Smallest op that is run as it is; what is smaller is read-modify-write and no measure of the disk.
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
    }
}

fn is_direct(leg: &Leg) -> bool {
    !matches!(leg.backing(), Backing::File { direct: false, .. })
}
