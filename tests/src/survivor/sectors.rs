//! A model of the disk: the contents that each sector may have.

/// Size of the disk.
pub(super) const DISK_BYTES: u64 = 32 << 20;
/// Bytes of a sector.
pub(super) const SECTOR: usize = 512;
const SECTORS: usize = DISK_BYTES as usize / SECTOR;

/// Contents of a sector: the write that they come from; 0: zeroes.
type Stamp = u32;

/// The known state of a sector.
#[derive(Debug, Clone, Copy)]
struct Sector {
    stamp: Stamp,
    /// True if it was discarded, so it may also read as zeroes.
    or_zeroes: bool,
    /// True if a request that changes or reads it is in flight.
    busy: bool,
}

/// The disk as the guest knows it.
#[derive(Debug)]
pub(super) struct Sectors {
    sectors: Vec<Sector>,
    stamps: Stamp,
}

/// A change of some sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Write(Stamp),
    Zero,
    Discard,
    /// Read only.
    Nothing,
}

/// Sectors from one to before another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: usize,
    pub(super) count: usize,
}

impl Sectors {
    pub(super) fn new() -> Sectors {
        let sector = Sector {
            stamp: 0,
            or_zeroes: false,
            busy: false,
        };
        Sectors {
            sectors: vec![sector; SECTORS],
            stamps: 0,
        }
    }

    /// Reserves sectors for a request near a position; `None`: they are in use.
    pub(super) fn take(&mut self, near: usize, count: usize) -> Option<Range> {
        let first = near.min(SECTORS - count);
        let range = Range { first, count };
        let sectors = self.of(range);
        if sectors.iter().any(|sector| sector.busy) {
            return None;
        }
        sectors.iter_mut().for_each(|sector| sector.busy = true);
        Some(range)
    }

    /// Number of the next write.
    pub(super) fn stamp(&mut self) -> Change {
        self.stamps += 1;
        Change::Write(self.stamps)
    }

    /// Records the completion of a request.
    pub(super) fn ended(&mut self, range: Range, change: Change) {
        for sector in self.of(range) {
            sector.busy = false;
            match change {
                Change::Write(stamp) => (sector.stamp, sector.or_zeroes) = (stamp, false),
                Change::Zero => (sector.stamp, sector.or_zeroes) = (0, false),
                Change::Discard => sector.or_zeroes = true,
                Change::Nothing => {}
            }
        }
    }

    /// Checks whether these bytes are permitted; the error names the wrong sector and the difference.
    pub(super) fn check(&self, range: Range, bytes: &[u8]) -> Result<(), String> {
        for (at, found) in (range.first..).zip(bytes.chunks_exact(SECTOR)) {
            let known = self.sectors[at];
            let is = |stamp| found == content(stamp, at);
            if is(known.stamp) || known.or_zeroes && is(0) {
                continue;
            }
            let found = u64::from_le_bytes(*found.first_chunk().unwrap());
            return Err(format!("sector {at}: found {found:#x}, expected {known:?}"));
        }
        Ok(())
    }

    fn of(&mut self, range: Range) -> &mut [Sector] {
        &mut self.sectors[range.first..range.first + range.count]
    }
}

/// Contents of a sector: each word encodes the write, the sector and its own index.
fn content(stamp: Stamp, sector: usize) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if stamp > 0 {
        for (word, place) in bytes.chunks_exact_mut(8).enumerate() {
            let value = u64::from(stamp) << 32 | (sector as u64) << 8 | word as u64;
            place.copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}

/// The bytes that a write of these sectors writes.
pub(super) fn contents(change: Change, range: Range) -> Vec<u8> {
    let Change::Write(stamp) = change else {
        return Vec::new();
    };
    (range.first..range.first + range.count)
        .flat_map(|sector| content(stamp, sector))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the model rejects each of these: otherwise the tests would prove nothing.
    #[test]
    fn old_torn_and_foreign_sectors_are_found() {
        let mut disk = Sectors::new();
        let range = disk.take(8, 8).unwrap();
        assert!(disk.take(15, 8).is_none(), "no two requests on one sector");
        let old = disk.stamp();
        disk.ended(range, old);
        let range = disk.take(8, 8).unwrap();
        let new = disk.stamp();
        let (before, after) = (contents(old, range), contents(new, range));
        assert!(disk.check(range, &before).is_ok(), "not completed yet");
        disk.ended(range, new);
        assert!(disk.check(range, &after).is_ok());
        assert!(disk.check(range, &before).is_err(), "a lost write");
        for wrong in [0, 3 * SECTOR, after.len() - 8] {
            let mut torn = after.clone();
            torn[wrong..wrong + 8].copy_from_slice(&before[wrong..wrong + 8]);
            assert!(disk.check(range, &torn).is_err(), "old bytes at {wrong}");
        }
        let zeroes = vec![0; after.len()];
        assert!(disk.check(range, &zeroes).is_err());
        disk.ended(range, Change::Discard);
        assert!(disk.check(range, &zeroes).is_ok() && disk.check(range, &after).is_ok());
        disk.ended(range, Change::Zero);
        assert!(disk.check(range, &after).is_err(), "it was zeroed");
        let elsewhere = contents(
            new,
            Range {
                first: 16,
                count: 8,
            },
        );
        disk.ended(range, new);
        assert!(disk.check(range, &elsewhere).is_err(), "of another sector");
    }
}
