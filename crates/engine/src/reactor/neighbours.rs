//! Tells whether all disks of some threads are in one place, which is a file system or a device.
//!
//! A thread that submits a request to a file may have to wait for a free tag of the device below the file system. Where all disks are
//! on that device, each of them would wait for it anyway. Where one of them is elsewhere, it must not.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleave_disk::{Disk, Leg};

/// The number of a file system or device; `None`: memory, or a server elsewhere.
type Place = Option<u64>;

/// The disks of threads that they share.
#[derive(Debug, Default)]
pub struct Neighbours {
    /// The number of their legs in each place.
    places: Mutex<HashMap<Place, usize>>,
    are_apart: AtomicBool,
}

impl Neighbours {
    /// Returns true if they are in several places.
    #[inline]
    pub(crate) fn are_apart(&self) -> bool {
        self.are_apart.load(Ordering::Relaxed)
    }

    fn change(&self, change: impl FnOnce(&mut HashMap<Place, usize>)) {
        let mut places = self.lock();
        change(&mut places);
        self.are_apart.store(places.len() > 1, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Place, usize>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A disk among its neighbours, until this is dropped.
#[derive(Debug)]
pub(crate) struct Neighbour {
    places: Vec<Place>,
    all: Arc<Neighbours>,
}

impl Neighbour {
    pub(crate) fn join(all: &Arc<Neighbours>, disks: &[&Disk]) -> Neighbour {
        let legs = disks.iter().flat_map(|disk| disk.legs());
        Neighbour::at(all, legs.map(Leg::device).collect())
    }

    fn at(all: &Arc<Neighbours>, places: Vec<Place>) -> Neighbour {
        all.change(|counts| {
            for place in &places {
                *counts.entry(*place).or_default() += 1;
            }
        });
        let all = Arc::clone(all);
        Neighbour { places, all }
    }

    pub(crate) fn all(&self) -> &Arc<Neighbours> {
        &self.all
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.all.change(|counts| {
            for place in &self.places {
                if let Some(count) = counts.get_mut(place) {
                    *count -= 1;
                }
            }
            counts.retain(|_, count| *count > 0);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_apart_while_they_are_in_several_places() {
        let all = Arc::new(Neighbours::default());
        let join = |places: &[Place]| Neighbour::at(&all, places.to_vec());
        let one = join(&[Some(7)]);
        let same = join(&[Some(7), Some(7)]);
        assert!(!all.are_apart());
        let memory = join(&[None]);
        assert!(all.are_apart());
        drop(one);
        assert!(all.are_apart());
        drop(same);
        assert!(!all.are_apart());
        let other = join(&[Some(8)]);
        assert!(all.are_apart());
        drop(memory);
        assert!(!all.are_apart());
        drop(other);
        let _striped = join(&[Some(7), Some(8)]);
        assert!(all.are_apart());
    }
}
