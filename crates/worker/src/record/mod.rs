//! What a disk did and how long it took: counters and histograms that a worker writes and anyone reads.
//!
//! A `Lane` writes its vring's [`VringRecord`] through a `Recorder`, with plain loads
//! and stores: it is the only writer. Readers load each number for itself, so that sums over several may be
//! a request apart. The clock is read at most once in a lap, and seldom where a lap is only a few hundred
//! nanoseconds long (see `Laps`).

mod histogram;
mod kind;
mod laps;
mod recorder;
mod vring;
mod zeroes;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

pub use histogram::Distribution;
pub(crate) use histogram::{Coarse, Fine};
pub use kind::{ErrorKind, Kind, Way};
pub(crate) use laps::Laps;
pub(crate) use recorder::{Look, Looked, Recorder};
pub use vring::{Stage, VringRecord};

/// The records of a device's vrings. A vring that once started keeps its record, so that totals survive
/// sessions; the lock is taken when one starts, and by readers.
#[derive(Debug)]
pub struct Records {
    on: bool,
    vrings: Mutex<BTreeMap<u16, Arc<VringRecord>>>,
}

impl Records {
    /// None yet. `Recording::Off`: there never will be.
    pub(crate) fn new(recording: Recording) -> Records {
        Records {
            on: recording == Recording::On,
            vrings: Mutex::default(),
        }
    }

    /// Whether anything is recorded.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Of all vrings that ever started, by index.
    pub fn all(&self) -> Vec<Arc<VringRecord>> {
        let vrings = self.vrings.lock().unwrap_or_else(PoisonError::into_inner);
        vrings.values().cloned().collect()
    }

    /// The record of a vring that starts; `None`: nothing is recorded.
    pub(crate) fn of(&self, index: u16) -> Option<Arc<VringRecord>> {
        if !self.on {
            return None;
        }
        let mut vrings = self.vrings.lock().unwrap_or_else(PoisonError::into_inner);
        let record = vrings
            .entry(index)
            .or_insert_with(|| Arc::new(VringRecord::new(index)));
        Some(record.clone())
    }
}

/// Whether workers record what [`Records`] shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Recording {
    /// They do.
    #[default]
    On,
    /// They keep to the few counters of [`Stats`](crate::Stats).
    Off,
}
