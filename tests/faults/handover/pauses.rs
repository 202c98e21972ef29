//! Pauses of guests.

use std::fmt;
use std::time::Duration;

use cleave_tests::wait_until;

/// How long guests waited.
#[derive(Default)]
pub(super) struct Pauses(pub(super) Vec<Duration>);

impl Pauses {
    /// Those that a log tells of.
    fn told(log: &str) -> Pauses {
        let pause = |line: &str| {
            let (_, rest) = line.split_once("was taken over after a pause of ")?;
            let ms: f64 = rest.split(' ').next()?.parse().ok()?;
            Some(Duration::from_secs_f64(ms / 1e3))
        };
        Pauses(log.lines().filter_map(pause).collect())
    }

    /// Those that a log tells of, when there are so many: a daemon may write its log later than it serves.
    pub(super) fn told_of(count: usize, log: impl Fn() -> String) -> Pauses {
        wait_until(|| Pauses::told(&log()).0.len() >= count);
        let pauses = Pauses::told(&log());
        assert_eq!(pauses.0.len(), count, "{}", log());
        pauses
    }
}

impl fmt::Display for Pauses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = |part: f64| {
            let last = sorted.len().saturating_sub(1) as f64;
            let found = sorted.get((last * part) as usize);
            found.map_or(0.0, |pause| pause.as_secs_f64() * 1e3)
        };
        let [median, most, worst] = [0.5, 0.99, 1.0].map(at);
        write!(
            f,
            "{median:.1} ms (median), {most:.1} (99 of 100), {worst:.1} (worst)"
        )
    }
}
