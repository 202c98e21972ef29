//! Copies of the changes that a server answered and has not flushed since.
//!
//! A server may hold what it answered in memory of its own, and loses that when its process or its machine ends: qemu-nbd keeps the
//! tables of a qcow2 image there. The guest believes in those writes, and a flush on the next connection would not tell that they
//! are gone. So they are written again before anything else is sent on a new connection (`replay.rs`).

use std::collections::VecDeque;

use crate::wire::request;

/// What a change costs besides its data.
pub(crate) const CHANGE_BYTES: u64 = 64;

/// A write, a trim or a write-zeroes that the server answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Type of the request (`wire::request`).
    pub kind: u16,
    /// Its flags.
    pub flags: u16,
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub len: u64,
    /// The bytes of a write; otherwise empty.
    pub data: Box<[u8]>,
}

impl Change {
    fn bytes(&self) -> u64 {
        self.data.len() as u64 + CHANGE_BYTES
    }

    /// Returns true if both touch the same byte.
    pub(crate) fn overlaps(&self, other: &Change) -> bool {
        self.offset < other.offset + other.len && other.offset < self.offset + self.len
    }
}

/// The changes since the last flush, in the order in which they were answered. A change that a guest sent after the answer to
/// another one therefore follows it, whichever connections they went through.
#[derive(Debug, Default)]
pub(crate) struct Unflushed {
    changes: VecDeque<Change>,
    /// Number of the first of them.
    first: u64,
    bytes: u64,
}

impl Unflushed {
    /// Adds a change that was answered. A durable one is needed only while it must follow another that is not.
    pub(crate) fn add(&mut self, change: Change) {
        if change.flags & request::FUA != 0 && self.changes.is_empty() {
            return;
        }
        self.bytes += change.bytes();
        self.changes.push_back(change);
    }

    /// Returns the number of the first change; those before it are durable.
    pub(crate) fn start(&self) -> u64 {
        self.first
    }

    /// Returns the number of the next change. A flush that is sent now covers those before it.
    pub(crate) fn end(&self) -> u64 {
        self.first + self.changes.len() as u64
    }

    /// Gives back the changes before number `end`, which are durable, so that the caller can free them without the lock.
    pub(crate) fn flushed(&mut self, end: u64) -> VecDeque<Change> {
        let count = (end.saturating_sub(self.first) as usize).min(self.changes.len());
        let rest = self.changes.split_off(count);
        let durable = std::mem::replace(&mut self.changes, rest);
        self.first += count as u64;
        self.bytes -= durable.iter().map(Change::bytes).sum::<u64>();
        durable
    }

    /// Lends the changes, to be sent again. They are still owed, and what they occupy counts, but nobody may add one or flush.
    pub(crate) fn lend(&mut self) -> VecDeque<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Takes the lent changes back.
    pub(crate) fn give_back(&mut self, lent: VecDeque<Change>) {
        debug_assert!(self.changes.is_empty());
        self.changes = lent;
    }

    /// Returns what the changes occupy.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(offset: u64, flags: u16) -> Change {
        Change {
            kind: request::WRITE,
            flags,
            offset,
            len: 512,
            data: vec![1; 512].into(),
        }
    }

    #[test]
    fn a_flush_covers_what_was_answered_before_it_was_sent() {
        let mut log = Unflushed::default();
        (0..3).for_each(|number| log.add(write(number * 512, 0)));
        let end = log.end();
        log.add(write(4096, 0));
        assert_eq!(log.flushed(end).len(), 3);
        assert_eq!(log.bytes(), 512 + CHANGE_BYTES);
        // An older flush that is answered later covers nothing more.
        assert_eq!(log.flushed(end - 1).len(), 0);
        assert_eq!(
            log.changes
                .iter()
                .map(|change| change.offset)
                .collect::<Vec<_>>(),
            [4096]
        );
        assert_eq!(log.flushed(log.end()).len(), 1);
        assert_eq!((log.bytes(), log.end()), (0, 4));
    }

    /// Otherwise the older write, done again, would replace the newer one.
    #[test]
    fn a_durable_write_is_kept_while_an_older_one_is_not_flushed() {
        let mut log = Unflushed::default();
        log.add(write(0, request::FUA));
        assert_eq!(log.bytes(), 0);
        log.add(write(0, 0));
        log.add(write(0, request::FUA));
        assert_eq!(log.changes.len(), 2);
    }

    #[test]
    fn changes_overlap_in_a_byte() {
        for (other, expected) in [
            (0, false),
            (1, true),
            (512, true),
            (1023, true),
            (1024, false),
        ] {
            assert_eq!(
                write(512, 0).overlaps(&write(other, 0)),
                expected,
                "{other}"
            );
        }
    }
}
