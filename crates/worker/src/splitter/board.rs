//! What a splitter does now, where others may read it.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use super::state::{Reason, SplitState};

/// Written by the worker whose splitter it shows, a cell when it learns; read by anyone. A reader may see
/// fields of a cell from before and after a change.
#[derive(Debug, Default)]
pub(crate) struct Board(Box<[Place]>);

#[derive(Debug, Default)]
struct Place {
    seen: AtomicU64,
    explored: AtomicU64,
    gain: AtomicU64,
    chunk_bytes: AtomicU32,
    reason: AtomicU8,
}

impl Board {
    pub(super) fn new(cells: usize) -> Board {
        Board((0..cells).map(|_| Place::default()).collect())
    }

    pub(super) fn write(&self, cell: usize, state: &SplitState) {
        let Some(place) = self.0.get(cell) else {
            return;
        };
        place
            .chunk_bytes
            .store(state.chunk_bytes, Ordering::Relaxed);
        place.reason.store(state.reason as u8, Ordering::Relaxed);
        place.gain.store(state.gain.to_bits(), Ordering::Relaxed);
        let explored = state.explored.to_bits();
        place.explored.store(explored, Ordering::Relaxed);
        place.seen.store(state.seen, Ordering::Relaxed);
    }

    /// One entry for every cell that has seen requests.
    pub(crate) fn read(&self) -> Vec<SplitState> {
        let places = self.0.iter().enumerate();
        places
            .filter_map(|(cell, place)| {
                let seen = place.seen.load(Ordering::Relaxed);
                (seen > 0).then(|| place.state(cell, seen))
            })
            .collect()
    }
}

impl Place {
    fn state(&self, cell: usize, seen: u64) -> SplitState {
        let (direction, class, load) = super::cell_of(cell);
        let code = self.reason.load(Ordering::Relaxed);
        let reason = Reason::ALL.into_iter().find(|reason| *reason as u8 == code);
        SplitState {
            direction,
            class_bytes: super::SPLIT_MIN_BYTES << class,
            requests_min: 1 << load,
            chunk_bytes: self.chunk_bytes.load(Ordering::Relaxed),
            reason: reason.unwrap_or(Reason::Start),
            gain: f64::from_bits(self.gain.load(Ordering::Relaxed)),
            explored: f64::from_bits(self.explored.load(Ordering::Relaxed)),
            seen,
        }
    }
}
