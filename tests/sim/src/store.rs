//! The bytes of a simulated engine, and those of them that survive a power cut.

use std::collections::VecDeque;
use std::ops::Range;

use cleave_states::{Log, Number, SECTOR};

/// Most writes that wait to become durable. With more, the oldest one becomes durable.
pub(super) const UNSYNCED_MAX: usize = 256;

/// The bytes of a `Sim`: `durable` is what would survive a power cut. A write becomes durable at the latest with
/// a sync that was pushed after its completion, and sometimes earlier.
#[derive(Debug, Default)]
pub struct SimStore {
    /// Contents that reads see.
    pub now: Vec<u8>,
    /// Contents as of the last sync, plus writes that became durable since.
    pub durable: Vec<u8>,
    /// Writes since then, for the engines only: starts as `Unsynced::default()`.
    pub unsynced: Unsynced,
    /// Bytes of each leg; the legs lie one after the other in `now`. 0: there is one leg.
    pub leg_bytes: usize,
    /// Each op on this leg fails with EIO.
    pub failing_leg: Option<u16>,
    /// Reads, writes, discards and write-zeroes that touch these bytes fail with this errno.
    pub failing: Option<(Range<usize>, i32)>,
    /// The way to the storage is there again, and the worker has not been told.
    pub came_back: bool,
    /// A failed op moves whole sectors, like a disk that keeps its power.
    pub whole_sectors: bool,
    /// After so many pushes the next one panics, as a bug of ours would.
    pub panic_in: Option<u32>,
    /// There is no room for another op.
    pub is_full: bool,
    /// So many ops are enough for a lap.
    pub sated_after: Option<u32>,
    /// Offsets of ops in the order of their pushes, until the test empties the list.
    pub pushed: Option<Vec<u64>>,
    /// How often the owner waited: with a time limit, and without.
    pub waits: [u64; 2],
    /// How often it waited without a limit while nothing was in flight.
    pub idle_waits: u64,
    /// Ops on this leg take this many times as long.
    pub slow_leg: Option<(u16, u32)>,
    /// If set, records what reaches the disk. All I/O must then consist of whole sectors.
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
    /// How many pushes were left before a panic.
    pub(super) fn count_push(&mut self) -> Option<u32> {
        let left = self.panic_in?;
        self.panic_in = left.checked_sub(1);
        Some(left)
    }

    /// The byte range of a leg; empty if there is no such leg.
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

    /// Records that a change has just been stored at these bytes.
    pub(super) fn record_change(
        &mut self,
        range: Range<usize>,
        is_discard: bool,
        fua: bool,
    ) -> Option<Number> {
        let (log, sector) = (self.log.as_mut()?, (range.start / SECTOR) as u64);
        let bytes = self.now.get(range)?;
        let io = match is_discard {
            true => log.start_discard(sector, (bytes.len() / SECTOR) as u64),
            false => log.start_write(sector, bytes, fua),
        };
        log.apply(io);
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

    /// Makes the chosen writes durable, and also older writes that overlap a chosen one: they would otherwise be
    /// applied later and bring old bytes back.
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
