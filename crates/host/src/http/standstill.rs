//! How long a node waits for another one that takes none of the disks that are left.

use std::time::{Duration, Instant};

/// Longest time without a disk that is taken. A disk that the other node cannot take is asked for after 0, 1, 3, 7 and 15 s, and one
/// that hangs keeps the others for 10 s.
const STANDSTILL_MAX: Duration = Duration::from_secs(30);

/// The disks that are left, and since when.
#[derive(Debug)]
pub(super) struct Standstill {
    left: usize,
    since: Instant,
}

impl Standstill {
    /// Begins to wait.
    pub(super) fn new(now: Instant) -> Standstill {
        Standstill {
            left: usize::MAX,
            since: now,
        }
    }

    /// Returns true if no disk was taken for too long, and begins to wait anew. `left`: the disks that are not taken yet.
    pub(super) fn is_over(&mut self, left: usize, now: Instant) -> bool {
        let is_over = left >= self.left && now.duration_since(self.since) >= STANDSTILL_MAX;
        if left < self.left || is_over {
            (self.left, self.since) = (left, now);
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_disk_that_is_taken_begins_the_wait_anew() {
        let begin = Instant::now();
        let mut standstill = Standstill::new(begin);
        let mut is_over = |left, seconds| {
            let now = begin + Duration::from_secs(seconds);
            standstill.is_over(left, now)
        };
        let seen = [
            (9, 0),
            (9, 29),
            (8, 29),
            (8, 58),
            (8, 59),
            (8, 60),
            (8, 88),
            (8, 89),
            (1, 100),
            (1, 130),
        ];
        let over = seen.map(|(left, seconds)| is_over(left, seconds));
        let expected = [
            false, false, false, false, true, false, false, true, false, true,
        ];
        assert_eq!(over, expected);
    }
}
