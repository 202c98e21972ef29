//! Checks the states in which a power cut can leave a disk. A test records in a [`Log`] the requests and completions
//! of its guest and the I/O that reached the disk. [`check`] replays the log, builds the states that the disk may be
//! in after a crash at any moment, and compares each sector with the promises to the guest. The log can be stored as
//! a file in the format of dm-log-writes, for `replay-log` of xfstests. This crate forbids I/O, clocks, threads and
//! any code of the daemon: it computes the layout of a stripe independently.
//!
//! # What a disk may lose
//!
//! The disk has a volatile cache. Two kinds of I/O are certain to survive: those that a completed flush of the same
//! leg covers (all I/O that the disk had completed before the flush started), and completed writes through the cache
//! (FUA). Of all other I/O that has reached the disk, a crash leaves any subset of the sectors. Two writes of one
//! sector keep their order.
//!
//! # What a guest is promised
//!
//! A write is *safe* once a flush has succeeded that was submitted after the write completed; with the write cache
//! off, as soon as it completes. A sector holds a value that was written to it, and none older than a safe write of
//! it. A request that is in flight or has failed may or may not have left its value.
#![forbid(unsafe_code)]

mod format;
mod log;
mod model;
mod random;
mod replay;

pub use log::{Log, Number, Submission};
pub use random::Random;
pub use replay::{Checked, Extent, check};

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// How the sectors of the guest's disk map to its legs, which are recorded as if they were concatenated.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Members of the stripe; 1: no stripe.
    pub legs: u64,
    /// Sectors of each leg.
    pub leg_sectors: u64,
    /// Sectors of a chunk.
    pub chunk_sectors: u64,
    /// Sectors of the guest's disk: at most the sum of the legs.
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

    /// The recorded position of a sector of the guest's disk.
    fn place(&self, sector: u64) -> u64 {
        let (chunk, inside) = (sector / self.chunk_sectors, sector % self.chunk_sectors);
        let (leg, row) = (chunk % self.legs, chunk / self.legs);
        leg * self.leg_sectors + row * self.chunk_sectors + inside
    }
}

#[cfg(test)]
mod tests;
