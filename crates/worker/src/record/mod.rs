//! Counters and times of a disk: written by its workers, readable by any thread.
//!
//! A `Lane` writes its vring's [`VringRecord`] through a `Recorder` with plain loads and stores, as the only
//! writer. Readers load each number separately, so sums over several numbers can differ by a request. The clock
//! is read at most once per lap, and rarely where a lap lasts only a few hundred nanoseconds (see `Laps`).

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
pub use kind::{Category, ErrorKind, Kind};
pub(crate) use laps::Laps;
pub(crate) use recorder::{Recorder, RingCheck, RingState};
pub(crate) use vring::VringEvent;
pub use vring::{Stage, StalledRequests, VringRecord};

use crate::Totals;

/// The records of a device's vrings. A record is kept once its vring has started, so that totals survive
/// sessions. The lock is taken by readers and when a vring starts.
#[derive(Debug)]
pub struct Records {
    on: bool,
    vrings: Mutex<BTreeMap<u16, Arc<VringRecord>>>,
}

impl Records {
    /// Makes an empty set.
    pub(crate) fn new(recording: Recording) -> Records {
        Records {
            on: recording == Recording::On,
            vrings: Mutex::default(),
        }
    }

    /// Returns true if times are recorded, and [`Records::all`] shows them.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Records of all vrings that ever started, by index. Empty if only counts are kept.
    pub fn all(&self) -> Vec<Arc<VringRecord>> {
        let vrings = self.lock();
        vrings.values().filter(|_| self.on).cloned().collect()
    }

    /// Adds the counters of all vrings, which are kept even if times are not.
    pub(crate) fn add_to(&self, totals: &mut Totals) {
        self.lock()
            .values()
            .for_each(|record| record.add_to(totals));
    }

    /// Returns the stalled requests of each vring. Recorded even if times are not.
    pub fn stalled(&self) -> Vec<(u16, StalledRequests)> {
        let vrings = self.lock();
        let each = vrings.iter();
        each.filter_map(|(index, record)| Some((*index, record.stalled()?)))
            .collect()
    }

    /// Returns the number of held requests.
    pub(crate) fn held(&self) -> u64 {
        let stalled = self.stalled();
        stalled
            .iter()
            .map(|(_, stalled)| u64::from(stalled.held))
            .sum()
    }

    /// Makes a writer for a vring of this size that starts.
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

/// What workers record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Recording {
    /// Counts and times.
    #[default]
    On,
    /// Only counts.
    Off,
}
