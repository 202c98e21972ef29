//! What goes on with a session if this process is killed.

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use crate::recorded::Handover;

/// Pause after the first attempt to keep a session that fails. Each further pause is twice as long, up to the longest. The keeper may be
/// busy for a moment, e.g. while many sessions begin at once.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Most attempts in one pause between messages: an idle session does not wake up without end. They take two minutes.
const ATTEMPTS_MAX: u32 = 12;

/// Keeps a session for the next process, outside of this one.
///
/// A session is kept while it waits for its frontend, and only then: a message that was read and has not had its effect on what is kept
/// would be lost.
pub trait Keeper: fmt::Debug + Send {
    /// Keeps the session as it is now. After an error nothing of it is kept.
    fn keep(&mut self, session: Handover) -> io::Result<()>;

    /// Forgets it. Returns when nothing can bring it back.
    fn forget(&mut self);
}

/// What is kept of a session that waits for its frontend.
///
/// ```text
///   message ─► Due ── kept ─► Kept ─► message
///               └── fails ─► Again ─► … ─► GivenUp ─► message
/// ```
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeping {
    /// The next attempt is the first one since the last message.
    #[default]
    Due,
    /// The keeper has the session.
    Kept,
    /// So many attempts have failed, and the next one is at this time.
    Again { failed: u32, at: Instant },
    /// Nothing is tried before the next message.
    GivenUp,
}

impl Keeping {
    /// Returns true if an attempt is due.
    pub(crate) fn is_due(self, now: Instant) -> bool {
        match self {
            Keeping::Due => true,
            Keeping::Again { at, .. } => now >= at,
            Keeping::Kept | Keeping::GivenUp => false,
        }
    }

    /// Returns when the session has to wake up for an attempt.
    pub(crate) fn again_at(self) -> Option<Instant> {
        match self {
            Keeping::Again { at, .. } => Some(at),
            Keeping::Due | Keeping::Kept | Keeping::GivenUp => None,
        }
    }

    /// Returns what follows an attempt that has failed.
    pub(crate) fn failed(self, now: Instant) -> Keeping {
        let before = match self {
            Keeping::Again { failed, .. } => failed,
            _ => 0,
        };
        match before + 1 {
            ATTEMPTS_MAX.. => Keeping::GivenUp,
            failed => Keeping::Again {
                failed,
                at: now + PAUSE_MAX.min(PAUSE_MIN * (1 << before)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_ever_rarer_and_end() {
        let start = Instant::now();
        let (mut keeping, mut now, mut pauses) = (Keeping::Due, start, Vec::new());
        while keeping.is_due(now) {
            keeping = keeping.failed(now);
            if let Some(at) = keeping.again_at() {
                assert!(!keeping.is_due(now));
                pauses.push((at - now).as_millis());
                now = at;
            }
        }
        let expected = [
            100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000,
        ];
        assert_eq!((keeping, &*pauses), (Keeping::GivenUp, &expected[..]));
        assert!(!keeping.is_due(now + 100 * PAUSE_MAX));
    }
}
