//! Checks the states in which a power cut can leave a disk. A test records in a [`Log`] what its guest asked for and was
//! told, and what reached the disk meanwhile; [`check`] replays the log, builds the states that the disk may be found in
//! after a crash at any moment, and compares each sector with what the guest was promised. The log can be kept as a
//! file in the format of dm-log-writes, for `replay-log` of xfstests. This crate forbids I/O, clocks, threads and any
//! code of the daemon: the layout of a stripe is computed here a second time.
//!
//! # What a disk may lose
//!
//! The disk has a volatile cache. It keeps for certain what a completed flush of the same leg covers (all I/O that it had
//! answered before that flush began) and each write through the cache (FUA) that it has answered. Of everything else
//! that has reached it, a crash leaves any subset of the sectors. Two writes of one sector keep their order.
//!
//! # What a guest is promised
//!
//! A write is *safe* once a flush has succeeded that was asked for after the write was answered; with the write cache
//! switched off, as soon as it is answered. A sector holds a value that was written to it, and none that is older than a
//! safe write of it. A request that is in flight or has failed may have left its value or not.
#![forbid(unsafe_code)]

mod format;
mod log;
mod model;
mod replay;

pub use log::{Ask, Log, Number};
pub use replay::{Checked, Extent, check};

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// Where the sectors of the guest's disk lie on its legs, which are recorded as if they lay one behind the other.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Members of the stripe; 1: there is none.
    pub legs: u64,
    /// Sectors of each leg.
    pub leg_sectors: u64,
    /// Sectors of the stripe's chunk.
    pub chunk_sectors: u64,
    /// Sectors of the guest's disk: at most all of the legs'.
    pub sectors: u64,
}

impl Layout {
    /// A disk of one leg.
    pub fn plain(sectors: u64) -> Layout {
        Layout {
            legs: 1,
            leg_sectors: sectors,
            chunk_sectors: sectors,
            sectors,
        }
    }

    /// Where a sector of the guest's is recorded.
    fn place(&self, sector: u64) -> u64 {
        let (chunk, inside) = (sector / self.chunk_sectors, sector % self.chunk_sectors);
        let (leg, row) = (chunk % self.legs, chunk / self.legs);
        leg * self.leg_sectors + row * self.chunk_sectors + inside
    }
}

#[cfg(test)]
mod tests;
