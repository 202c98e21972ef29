//! Rate limit for log messages that a frontend can cause at will: a few at once, then one per second.

use std::sync::{Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Time after which one more message is allowed.
const REFILL: Duration = Duration::from_secs(1);

/// Rate limit for messages of one kind.
#[derive(Debug)]
pub struct Quota {
    burst: u32,
    left: u32,
    refilled: Option<Instant>,
    kept_back: u64,
}

impl Quota {
    /// Allows `burst` messages at once, then one per second.
    pub fn new(burst: u32) -> Quota {
        Quota {
            burst,
            left: burst,
            refilled: None,
            kept_back: 0,
        }
    }

    /// Calls `line`, or suppresses it. Its argument is a suffix for the message: how many were suppressed since
    /// the last one, if any.
    pub fn log(&mut self, line: impl FnOnce(&str)) {
        say(self.admit(Instant::now()), line);
    }

    fn admit(&mut self, now: Instant) -> Option<u64> {
        self.refill(now);
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                Some(std::mem::take(&mut self.kept_back))
            }
            None => {
                self.kept_back = self.kept_back.saturating_add(1);
                None
            }
        }
    }

    fn refill(&mut self, now: Instant) {
        let since = *self.refilled.get_or_insert(now);
        let whole = now.saturating_duration_since(since).as_secs() / REFILL.as_secs();
        if whole > 0 {
            let more = u32::try_from(whole).unwrap_or(u32::MAX);
            self.left = self.left.saturating_add(more).min(self.burst);
            self.refilled = Some(now);
        }
    }
}

/// Calls `line` unless it is suppressed. Returns whether it did.
fn say(admitted: Option<u64>, line: impl FnOnce(&str)) -> bool {
    match admitted {
        Some(0) => line(""),
        Some(kept_back) => line(&format!(" ({kept_back} earlier messages suppressed)")),
        None => return false,
    }
    true
}

/// A quota that several threads share, and none waits for.
#[derive(Debug)]
pub struct SharedQuota(Mutex<Quota>);

impl SharedQuota {
    pub(crate) fn new(burst: u32) -> SharedQuota {
        SharedQuota(Mutex::new(Quota::new(burst)))
    }

    /// Calls `line`, or suppresses it, as [`Quota::log`] does. Returns whether it called it. A line is suppressed, and not
    /// counted, if another thread asks at the same moment.
    pub fn log(&self, line: impl FnOnce(&str)) -> bool {
        let admitted = match self.0.try_lock() {
            Ok(mut quota) => quota.admit(Instant::now()),
            Err(TryLockError::Poisoned(quota)) => {
                PoisonError::into_inner(quota).admit(Instant::now())
            }
            Err(TryLockError::WouldBlock) => None,
        };
        say(admitted, line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_at_once_and_then_one_a_second() {
        let start = Instant::now();
        let admitted = |burst, at_ms: &[u64]| -> Vec<Option<u64>> {
            let mut quota = Quota::new(burst);
            let at = |ms: &u64| start + Duration::from_millis(*ms);
            at_ms.iter().map(|ms| quota.admit(at(ms))).collect()
        };
        let one = admitted(1, &[0, 1, 999, 1000, 1001, 5000]);
        assert_eq!(one, [Some(0), None, None, Some(2), None, Some(1)]);
        let three = admitted(3, &[0, 0, 0, 0, 1000, 1000, 90_000, 90_000, 90_000, 90_000]);
        let expected = [
            Some(0),
            Some(0),
            Some(0),
            None,
            Some(1),
            None,
            Some(1),
            Some(0),
            Some(0),
            None,
        ];
        assert_eq!(three, expected);
    }
}
