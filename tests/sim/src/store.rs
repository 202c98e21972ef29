//! The bytes behind a simulated engine, and which of them a power cut would leave.

use std::collections::VecDeque;
use std::ops::Range;

use cleave_states::{Log, Number, SECTOR};

/// Most writes that wait to become durable; beyond, the oldest does so by itself.
pub(super) const UNSYNCED_MAX: usize = 256;

/// The bytes behind a `Sim`: `durable` is what would survive a power cut. A write becomes durable at
/// the latest with a sync that was pushed after its end; by chance earlier.
#[derive(Debug, Default)]
pub struct SimStore {
    /// Contents as reads see them.
    pub now: Vec<u8>,
    /// Contents as of the last sync, plus durable writes.
    pub durable: Vec<u8>,
    /// Writes in between, for the engines alone: starts as `Unsynced::default()`.
    pub unsynced: Unsynced,
    /// Bytes of each leg, which lie one behind the other in `now`; 0: there is one leg.
    pub leg_bytes: usize,
    /// Every op on this leg fails with EIO.
    pub failing_leg: Option<u16>,
    /// Reads and writes that touch these bytes fail with this errno, and so do discards and write-zeroes.
    pub failing: Option<(Range<usize>, i32)>,
    /// A failed op moves whole sectors, as with a disk that keeps its power.
    pub whole_sectors: bool,
    /// Offsets of ops in the order in which they were pushed, for whoever empties it.
    pub pushed: Option<Vec<u64>>,
    /// Waits of the owner: those with an end, and those without.
    pub waits: [u64; 2],
    /// Ops on this leg take this many times as long.
    pub slow_leg: Option<(u16, u32)>,
    /// Records what reaches the disk, where there is one. All I/O is of whole sectors then.
    pub log: Option<Log>,
}

/// Writes that a power cut may lose, oldest first.
#[derive(Debug, Default)]
pub struct Unsynced {
    /// Number of the next write.
    pub(super) next: u64,
    pub(super) writes: VecDeque<Change>,
}

#[derive(Debug)]
pub(super) struct Change {
    pub(super) number: u64,
    pub(super) range: Range<usize>,
    bytes: Vec<u8>,
}

impl Change {
    fn overlaps(&self, other: &Change) -> bool {
        self.range.start < other.range.end && other.range.start < self.range.end
    }
}

impl SimStore {
    /// Where a leg's bytes lie; empty where there is no such leg.
    pub(super) fn leg(&self, leg: u16) -> Range<usize> {
        match self.leg_bytes {
            0 if leg == 0 => 0..self.now.len(),
            0 => 0..0,
            bytes => {
                let start = bytes.saturating_mul(leg.into());
                let end = start.saturating_add(bytes);
                start..if end <= self.now.len() { end } else { start }
            }
        }
    }

    /// Notes that a change has just been put at these bytes.
    pub(super) fn record_change(
        &mut self,
        range: Range<usize>,
        is_discard: bool,
        fua: bool,
    ) -> Option<Number> {
        let (log, sector) = (self.log.as_mut()?, (range.start / SECTOR) as u64);
        let bytes = self.now.get(range)?;
        let io = match is_discard {
            true => log.discard_begins(sector, (bytes.len() / SECTOR) as u64),
            false => log.write_begins(sector, bytes, fua),
        };
        log.applied(io);
        Some(io)
    }

    pub(super) fn put(&mut self, offset: usize, bytes: Vec<u8>, durable: bool) {
        if bytes.is_empty() {
            return;
        }
        let range = offset..offset.saturating_add(bytes.len());
        let Some(window) = self.now.get_mut(range.clone()) else {
            return;
        };
        window.copy_from_slice(&bytes);
        let number = self.unsynced.next;
        self.unsynced.next += 1;
        self.unsynced.writes.push_back(Change {
            number,
            range,
            bytes,
        });
        if durable {
            self.harden(|change| change.number == number);
        } else if self.unsynced.writes.len() > UNSYNCED_MAX {
            let oldest = number - UNSYNCED_MAX as u64;
            self.harden(|change| change.number <= oldest);
        }
    }

    /// Makes the chosen writes durable, and of the others those that an overlapping chosen one would
    /// be older than: else they would come over it later and bring old bytes back.
    pub(super) fn harden(&mut self, wanted: impl Fn(&Change) -> bool) {
        let mut chosen: Vec<Change> = Vec::new();
        let mut left = VecDeque::new();
        for change in self.unsynced.writes.drain(..).rev() {
            if wanted(&change) || chosen.iter().any(|later| later.overlaps(&change)) {
                chosen.push(change);
            } else {
                left.push_front(change);
            }
        }
        self.unsynced.writes = left;
        let len = self.durable.len().max(self.now.len());
        self.durable.resize(len, 0);
        for change in chosen.into_iter().rev() {
            if let Some(window) = self.durable.get_mut(change.range) {
                window.copy_from_slice(&change.bytes);
            }
        }
    }
}
