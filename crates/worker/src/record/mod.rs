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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use histogram::Distribution;
pub(crate) use histogram::{Coarse, Fine};
pub use kind::{ErrorKind, Kind, Way};
pub(crate) use laps::Laps;
pub(crate) use recorder::{Look, Looked, Recorder};
pub(crate) use vring::VringEvent;
pub use vring::{Stage, Stalled, VringRecord};

use crate::Totals;

/// The records of a device's vrings. A vring that once started keeps its record, so that totals survive
/// sessions; the lock is taken when one starts, and by readers.
#[derive(Debug)]
pub struct Records {
    on: bool,
    vrings: Mutex<BTreeMap<u16, Arc<VringRecord>>>,
}

impl Records {
    /// None yet.
    pub(crate) fn new(recording: Recording) -> Records {
        Records {
            on: recording == Recording::On,
            vrings: Mutex::default(),
        }
    }

    /// Whether more than counts is recorded, and [`Records::all`] shows it.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Of all vrings that ever started, by index; none where only counts are kept.
    pub fn all(&self) -> Vec<Arc<VringRecord>> {
        let vrings = self.lock();
        vrings.values().filter(|_| self.on).cloned().collect()
    }

    /// Adds what all vrings did, whatever else is recorded.
    pub(crate) fn add_to(&self, totals: &mut Totals) {
        self.lock()
            .values()
            .for_each(|record| record.add_to(totals));
    }

    /// The requests of each vring that the disk failed and that wait. Recorded also where nothing else is.
    pub fn stalled(&self) -> Vec<(u16, Stalled)> {
        let vrings = self.lock();
        let each = vrings.iter();
        each.filter_map(|(index, record)| Some((*index, record.stalled()?)))
            .collect()
    }

    /// How many requests are held.
    pub(crate) fn held(&self) -> u64 {
        let stalled = self.stalled();
        stalled
            .iter()
            .map(|(_, stalled)| u64::from(stalled.held))
            .sum()
    }

    /// The writer for a vring of this size that starts.
    pub(crate) fn recorder(&self, index: u16, vring_size: u16) -> Recorder {
        let mut vrings = self.lock();
        let record = vrings
            .entry(index)
            .or_insert_with(|| Arc::new(VringRecord::new(index)));
        Recorder::new(record.clone(), self.on.then_some(vring_size))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u16, Arc<VringRecord>>> {
        self.vrings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether workers record what [`Records`] shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Recording {
    /// They do.
    #[default]
    On,
    /// They count, and measure no times.
    Off,
}
