//! Log lines that a frontend can cause at will.

use std::time::{Duration, Instant};

/// One line at most in this time.
const EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Complaints {
    said: Option<Instant>,
    kept: u64,
}

impl Complaints {
    /// Says what was refused, or counts it for the next line.
    pub(crate) fn say(&mut self, why: &str) {
        let now = Instant::now();
        if let Some(kept) = self.due(now) {
            match kept {
                0 => tracing::warn!("refused: {why}"),
                kept => tracing::warn!("refused: {why} (and {kept} messages before it)"),
            }
        }
    }

    /// How many were kept back since the last line, where another is due.
    fn due(&mut self, now: Instant) -> Option<u64> {
        if self
            .said
            .is_some_and(|said| now.duration_since(said) < EVERY)
        {
            self.kept += 1;
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.kept))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_counts_the_rest() {
        let mut complaints = Complaints::default();
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        // (when, what `due` answers)
        let rows = [
            (0, Some(0)),
            (1, None),
            (999, None),
            (1000, Some(2)),
            (1500, None),
            (2000, Some(1)),
        ];
        for (millis, answer) in rows {
            assert_eq!(complaints.due(at(millis)), answer, "{millis} ms");
        }
    }
}
