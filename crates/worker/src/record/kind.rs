//! Kinds of requests and of errors, for counters.

use cleave_blk::{Status, Verb};

/// Size classes: up to 4 KiB, 16 KiB, 64 KiB, 256 KiB, and larger.
const CLASSES: usize = 5;
/// The last classes, which contain requests that may be split: those of 32 KiB and more.
const SPLIT_CLASSES: usize = 3;

/// Direction of a request's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Category {
    /// To the guest.
    Read,
    /// From the guest.
    Write,
    /// A flush, which has none.
    Flush,
    /// Discard, write-zeroes, get-id, and requests for no bytes.
    Other,
}

impl Category {
    /// Returns its name in output.
    pub fn name(self) -> &'static str {
        match self {
            Category::Read => "read",
            Category::Write => "write",
            Category::Flush => "flush",
            Category::Other => "other",
        }
    }
}

/// A direction, and for reads and writes a size class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind(u8);

impl Kind {
    /// Number of kinds.
    pub const COUNT: usize = 2 * CLASSES + 2;
    /// Number of kinds whose requests may be split.
    pub(crate) const SPLIT_COUNT: usize = 2 * SPLIT_CLASSES;
    const FLUSH: Kind = Kind(2 * CLASSES as u8);
    const OTHER: Kind = Kind(2 * CLASSES as u8 + 1);

    /// Returns all kinds, in order.
    pub fn all() -> impl Iterator<Item = Kind> {
        (0..Kind::COUNT as u8).map(Kind)
    }

    #[inline]
    pub(crate) fn of(verb: Verb, len_bytes: u64) -> Kind {
        match verb {
            Verb::Read if len_bytes > 0 => Kind(class_of(len_bytes)),
            Verb::Write if len_bytes > 0 => Kind(CLASSES as u8 + class_of(len_bytes)),
            Verb::Flush => Kind::FLUSH,
            _ => Kind::OTHER,
        }
    }

    /// Returns its direction.
    pub fn way(self) -> Category {
        match self {
            Kind::FLUSH => Category::Flush,
            Kind::OTHER => Category::Other,
            Kind(at) if usize::from(at) < CLASSES => Category::Read,
            Kind(_) => Category::Write,
        }
    }

    /// Returns the name of its size class: the largest size in it.
    pub fn size(self) -> &'static str {
        const NAMES: [&str; CLASSES] = ["4K", "16K", "64K", "256K", "larger"];
        match self.way() {
            Category::Read | Category::Write => {
                NAMES.get(self.class()).copied().unwrap_or("larger")
            }
            Category::Flush | Category::Other => "none",
        }
    }

    fn class(self) -> usize {
        usize::from(self.0) % CLASSES
    }

    #[inline]
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }

    /// Returns its index among the kinds whose requests may be split.
    #[inline]
    pub(crate) fn split_index(self) -> Option<usize> {
        let above = self.class().checked_sub(CLASSES - SPLIT_CLASSES)?;
        match self.way() {
            Category::Read => Some(above),
            Category::Write => Some(above + SPLIT_CLASSES),
            Category::Flush | Category::Other => None,
        }
    }
}

/// Returns the size class. The classes are powers of four: the class is how often four divides the length in 4 KiB blocks.
#[inline]
fn class_of(len_bytes: u64) -> u8 {
    match (len_bytes.saturating_sub(1) >> 12).checked_ilog2() {
        None => 0,
        Some(log) => (log / 2 + 1).min(CLASSES as u32 - 1) as u8,
    }
}

/// Why a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The store failed it.
    Store,
    /// The disk had no space left.
    Space,
    /// Its data was outside guest memory.
    Memory,
    /// The request was not valid for this disk: out of range, of a wrong length, or a write to a read-only disk.
    Invalid,
    /// The request's type is not supported by this disk, or was found to be unsupported by its store.
    Unsupported,
    /// The chain was too broken to carry a status.
    Broken,
}

impl ErrorKind {
    /// All kinds of errors, in order.
    pub const ALL: [ErrorKind; 6] = [
        ErrorKind::Store,
        ErrorKind::Space,
        ErrorKind::Memory,
        ErrorKind::Invalid,
        ErrorKind::Unsupported,
        ErrorKind::Broken,
    ];

    /// Returns its name in output.
    pub fn name(self) -> &'static str {
        match self {
            ErrorKind::Store => "store",
            ErrorKind::Space => "space",
            ErrorKind::Memory => "memory",
            ErrorKind::Invalid => "invalid",
            ErrorKind::Unsupported => "unsupported",
            ErrorKind::Broken => "broken",
        }
    }

    /// Returns the kind for an op that failed.
    pub(crate) fn of_errno(errno: i32) -> ErrorKind {
        use rustix::io::Errno;
        match Errno::from_raw_os_error(errno) {
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => ErrorKind::Space,
            Errno::FAULT => ErrorKind::Memory,
            Errno::OPNOTSUPP => ErrorKind::Unsupported,
            _ => ErrorKind::Store,
        }
    }

    /// Returns the kind for a request that was refused.
    pub(crate) fn of_status(status: Status) -> ErrorKind {
        match status {
            Status::Unsupp => ErrorKind::Unsupported,
            Status::IoErr | Status::Ok => ErrorKind::Invalid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_requests() {
        let rows = [
            (Verb::Read, 512, "read 4K"),
            (Verb::Read, 4096, "read 4K"),
            (Verb::Read, 4097, "read 16K"),
            (Verb::Read, 8192, "read 16K"),
            (Verb::Write, 16384, "write 16K"),
            (Verb::Write, 16896, "write 64K"),
            (Verb::Read, 65536, "read 64K"),
            (Verb::Read, 66048, "read 256K"),
            (Verb::Write, 262_144, "write 256K"),
            (Verb::Write, 262_656, "write larger"),
            (Verb::Read, 1 << 30, "read larger"),
            (Verb::Read, u64::MAX, "read larger"),
            (Verb::Read, 0, "other none"),
            (Verb::Write, 0, "other none"),
            (Verb::Flush, 0, "flush none"),
            (Verb::Discard, 4096, "other none"),
            (Verb::GetId, 20, "other none"),
        ];
        for (verb, len_bytes, expected) in rows {
            let kind = Kind::of(verb, len_bytes);
            let name = format!("{} {}", kind.way().name(), kind.size());
            assert_eq!(name, expected, "{verb:?} of {len_bytes}");
            assert!(kind.index() < Kind::COUNT);
        }
        let mut names: Vec<_> = Kind::all().map(|kind| (kind.way(), kind.size())).collect();
        names.dedup();
        assert_eq!(names.len(), Kind::COUNT);
    }

    #[test]
    fn large_reads_and_writes_may_be_split() {
        let places: Vec<_> = Kind::all().filter_map(Kind::split_index).collect();
        assert_eq!(places, (0..Kind::SPLIT_COUNT).collect::<Vec<_>>());
        let least = crate::splitter::SPLIT_MIN_BYTES;
        assert!(Kind::of(Verb::Write, least).split_index().is_some());
        assert_eq!(Kind::of(Verb::Read, least / 2).split_index(), None);
    }

    #[test]
    fn kinds_of_errors() {
        let rows = [
            (5, "store"),
            (28, "space"),
            (122, "space"),
            (27, "space"),
            (14, "memory"),
            (95, "unsupported"),
            (125, "store"),
        ];
        for (errno, expected) in rows {
            assert_eq!(ErrorKind::of_errno(errno).name(), expected, "{errno}");
        }
        assert_eq!(ErrorKind::of_status(Status::Unsupp).name(), "unsupported");
        assert_eq!(ErrorKind::of_status(Status::IoErr).name(), "invalid");
        for (at, kind) in ErrorKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, at);
        }
    }
}
