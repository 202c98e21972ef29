//! Times of kills and recoveries.

use std::time::Duration;

/// Latest moment of a kill, after the first request.
pub(super) const LIFE_MAX_US: u64 = 6000;

/// Times from a kill to the first completion.
#[derive(Default)]
pub(super) struct Recovered(pub(super) Vec<Duration>);

impl Recovered {
    pub(super) fn at(&mut self, share: f64) -> f64 {
        self.0.sort_unstable();
        let last = self.0.len().saturating_sub(1);
        let found = self.0.get((share * last as f64) as usize);
        found.map_or(0.0, |time| time.as_secs_f64() * 1e3)
    }
}
