//! Whether the next lap spins or sleeps: arithmetic on what the last lap saw.

use crate::Completion;

/// What a lap found, as far as pacing cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Completions or control work are waiting already.
    pub(crate) ready: bool,
    /// A vring is served whose guest never kicks, or `poll` was asked for and a vring is served.
    pub(crate) serving: bool,
    /// One of them has no kick.
    pub(crate) kickless: bool,
}

/// What to do until the next lap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Look again at once.
    Spin,
    /// Ask for kicks, look once more, sleep.
    Sleep,
}

/// Decides the pace of one worker.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pacer {
    completion: Completion,
}

impl Pacer {
    pub(crate) fn new(completion: Completion) -> Pacer {
        Pacer { completion }
    }

    #[inline]
    pub(crate) fn next(self, seen: Seen) -> Pace {
        let polls = self.completion == Completion::Poll || seen.kickless;
        if seen.ready || (polls && seen.serving) {
            Pace::Spin
        } else {
            Pace::Sleep
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_for_every_state() {
        use Completion::{Interrupt, Poll};
        let mut table = String::new();
        for completion in [Interrupt, Poll] {
            for bits in 0..8u8 {
                let seen = Seen {
                    ready: bits & 1 != 0,
                    serving: bits & 2 != 0,
                    kickless: bits & 4 != 0,
                };
                let pace = Pacer::new(completion).next(seen);
                table.push_str(&format!(
                    "{completion:?} {} {} {} {pace:?}\n",
                    seen.ready, seen.serving, seen.kickless
                ));
            }
        }
        let expected = "\
Interrupt false false false Sleep
Interrupt true false false Spin
Interrupt false true false Sleep
Interrupt true true false Spin
Interrupt false false true Sleep
Interrupt true false true Spin
Interrupt false true true Spin
Interrupt true true true Spin
Poll false false false Sleep
Poll true false false Spin
Poll false true false Spin
Poll true true false Spin
Poll false false true Sleep
Poll true false true Spin
Poll false true true Spin
Poll true true true Spin
";
        assert_eq!(table, expected);
    }
}
