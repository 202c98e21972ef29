//! Copies of the changes that a server answered and has not flushed since.
//!
//! A server may hold what it answered in memory of its own, and loses that when its process or its machine ends: qemu-nbd keeps the
//! tables of a qcow2 image there. The guest believes in those writes, and a flush on the next connection would not tell that they
//! are gone. So they are written again before anything else is sent on a new connection (`replay.rs`).

use std::collections::VecDeque;
use std::mem;

use crate::wire::request;

/// Least length of copies whose memory is used again. The C library has smaller ones at hand, and gives the memory of larger ones back
/// to the kernel, whose next copy then costs a page fault for every 4 KiB.
const SPARE_BYTES_MIN: usize = 128 << 10;

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
    /// Memory of the large changes that the last flush covered, and that no later one has needed.
    spares: Vec<Box<[u8]>>,
    spare_bytes: u64,
}

/// Changes and memory that nobody needs. Freed by the caller, without the lock.
pub(crate) type Unneeded = (VecDeque<Change>, Vec<Box<[u8]>>);

impl Unflushed {
    /// Returns memory of this length for a change, with any content, if some is at hand.
    pub(crate) fn spare(&mut self, len: usize) -> Option<Box<[u8]>> {
        if len < SPARE_BYTES_MIN {
            return None;
        }
        let fitting = self.spares.iter().rposition(|spare| spare.len() == len)?;
        self.spare_bytes -= len as u64;
        Some(self.spares.swap_remove(fitting))
    }

    /// Returns true if memory is at hand for changes to come.
    pub(crate) fn has_spares(&self) -> bool {
        !self.spares.is_empty()
    }

    /// Gives up the memory for changes to come.
    pub(crate) fn forget_spares(&mut self) -> Unneeded {
        self.spare_bytes = 0;
        (VecDeque::new(), mem::take(&mut self.spares))
    }

    /// Adds a change that was answered. A durable one is needed only while it must follow another that is not. What is at hand for
    /// others gives way: with it, at most `bytes_max` are in use.
    pub(crate) fn add(&mut self, change: Change, bytes_max: u64) -> Unneeded {
        let mut unneeded = Unneeded::default();
        if change.flags & request::FUA != 0 && self.changes.is_empty() {
            return unneeded;
        }
        self.bytes += change.bytes();
        self.changes.push_back(change);
        while self.bytes + self.spare_bytes > bytes_max
            && let Some(spare) = self.spares.pop()
        {
            self.spare_bytes -= spare.len() as u64;
            unneeded.1.push(spare);
        }
        unneeded
    }

    /// Returns the number of the first change; those before it are durable.
    pub(crate) fn start(&self) -> u64 {
        self.first
    }

    /// Returns the number of the next change. A flush that is sent now covers those before it.
    pub(crate) fn end(&self) -> u64 {
        self.first + self.changes.len() as u64
    }

    /// Drops the changes before number `end`, which are durable.
    pub(crate) fn flushed(&mut self, end: u64) -> Unneeded {
        let count = (end.saturating_sub(self.first) as usize).min(self.changes.len());
        let rest = self.changes.split_off(count);
        let mut durable = mem::replace(&mut self.changes, rest);
        self.first += count as u64;
        self.bytes -= durable.iter().map(Change::bytes).sum::<u64>();
        let large = durable
            .iter_mut()
            .filter(|change| change.data.len() >= SPARE_BYTES_MIN)
            .map(|change| mem::take(&mut change.data));
        let before = mem::replace(&mut self.spares, large.collect());
        self.spare_bytes = self.spares.iter().map(|spare| spare.len() as u64).sum();
        (durable, before)
    }

    /// Lends the changes, to be sent again. They are still owed, and what they occupy counts, but nobody may add one or flush.
    pub(crate) fn lend(&mut self) -> VecDeque<Change> {
        mem::take(&mut self.changes)
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
        (0..3).for_each(|number| drop(log.add(write(number * 512, 0), u64::MAX)));
        let end = log.end();
        log.add(write(4096, 0), u64::MAX);
        assert_eq!(log.flushed(end).0.len(), 3);
        assert_eq!(log.bytes(), 512 + CHANGE_BYTES);
        // An older flush that is answered later covers nothing more.
        assert_eq!(log.flushed(end - 1).0.len(), 0);
        assert_eq!(
            log.changes
                .iter()
                .map(|change| change.offset)
                .collect::<Vec<_>>(),
            [4096]
        );
        assert_eq!(log.flushed(log.end()).0.len(), 1);
        assert_eq!((log.bytes(), log.end()), (0, 4));
    }

    #[test]
    fn the_memory_of_large_changes_serves_changes_of_the_same_length_until_the_next_flush() {
        let large = |len: usize| Change {
            data: vec![1; len].into(),
            len: len as u64,
            ..write(0, 0)
        };
        let mut log = Unflushed::default();
        log.add(large(SPARE_BYTES_MIN), u64::MAX);
        log.add(large(2 * SPARE_BYTES_MIN), u64::MAX);
        log.add(large(2 * SPARE_BYTES_MIN), u64::MAX);
        log.add(large(SPARE_BYTES_MIN - 1), u64::MAX);
        drop(log.flushed(log.end()));
        assert_eq!(log.spare(SPARE_BYTES_MIN - 1), None);
        assert_eq!(log.spare(SPARE_BYTES_MIN + 1), None);
        let found = log.spare(2 * SPARE_BYTES_MIN).unwrap();
        assert_eq!(found.len(), 2 * SPARE_BYTES_MIN);
        assert_eq!(log.spares.len(), 2);
        log.add(large(SPARE_BYTES_MIN), u64::MAX);
        assert_eq!(log.flushed(log.end()).1.len(), 2);
        assert_eq!(
            (log.spares.len(), log.spare_bytes),
            (1, SPARE_BYTES_MIN as u64)
        );
        // Two of 512 bytes leave no room for it.
        let bytes_max = SPARE_BYTES_MIN as u64 + 512 + CHANGE_BYTES;
        assert_eq!(log.add(write(0, 0), bytes_max).1.len(), 0);
        assert_eq!(log.add(write(0, 0), bytes_max).1.len(), 1);
        assert_eq!((log.spares.len(), log.spare_bytes), (0, 0));
    }

    /// Otherwise the older write, done again, would replace the newer one.
    #[test]
    fn a_durable_write_is_kept_while_an_older_one_is_not_flushed() {
        let mut log = Unflushed::default();
        log.add(write(0, request::FUA), u64::MAX);
        assert_eq!(log.bytes(), 0);
        log.add(write(0, 0), u64::MAX);
        log.add(write(0, request::FUA), u64::MAX);
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
