//! The stalled requests of a vring, and the events that they wait for.

use std::collections::{BTreeMap, BTreeSet};

use cleave_blk::{Outcome, Request, Verb};
use cleave_guest::Epoch;

use crate::ErrorAction;
use crate::record::StalledRequests;
use crate::settings::on_error::is_unsent;
use crate::slots::{Ended, Slots};

/// Pause before a request is repeated for the first time. It doubles with each try, up to `PAUSE_MAX_NS`.
const PAUSE_FIRST_NS: u64 = 10_000_000;
const PAUSE_MAX_NS: u64 = 1_000_000_000;
const SECOND_NS: u64 = 1_000_000_000;
/// Repeated requests that are looked through at once are at least so many, and twice those that were left the last time. So each
/// costs a bounded number of looks.
const LOOK_MIN: usize = 64;

/// The event that a stalled request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StallPhase {
    /// The operator, or for a request that could not be sent to its storage, the way there.
    Held,
    /// The end of its vring's rest, when it fails. The operator ordered that while there was no ring for the answer.
    Failing,
    /// A time. `closes`: the request was held, so its vring does not take new requests until it is in flight.
    Due { at_ns: u64, closes: bool },
}

impl StallPhase {
    fn is_held(self) -> bool {
        matches!(self, StallPhase::Held | StallPhase::Failing)
    }

    fn closes(self) -> bool {
        match self {
            StallPhase::Held | StallPhase::Failing => true,
            StallPhase::Due { closes, .. } => closes,
        }
    }
}

/// A request that failed and was not reported.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stall {
    pub(crate) head: u16,
    pub(crate) order: u64,
    request: Request,
    status_addr: u64,
    errno: i32,
    /// When it failed for the first time.
    first_ns: u64,
    /// How often it was repeated.
    tries: u32,
    phase: StallPhase,
}

impl Stall {
    /// Returns the request as one that fails now.
    pub(crate) fn ended(&self, epoch: &Epoch) -> Ended {
        let Request {
            verb,
            offset_bytes,
            len_bytes,
        } = self.request;
        Ended {
            verb,
            offset_bytes,
            len_bytes,
            status_addr: self.status_addr,
            epoch: epoch.clone(),
            outcome: Outcome::ended(&self.request, Err(self.errno)),
            timing: None,
            errno: Some(self.errno),
            order: self.order,
        }
    }
}

/// Stalled requests of a vring. A vring may have 32768 of them, so what is done for one does not look at the others.
#[derive(Debug, Default)]
pub(crate) struct Stalls {
    /// Those that wait, by their place in the order in which they were taken.
    waiting: BTreeMap<u64, Stall>,
    /// Those of them that wait for a time: the time, and their place.
    due: BTreeSet<(u64, u64)>,
    /// Those that were repeated, by their place. They are in flight, or have completed since.
    repeated: BTreeMap<u64, Stall>,
    /// How many of those were left when they were last looked through.
    left: usize,
    /// Numbers of requests that are held, and that close the vring.
    held: u32,
    closing: u32,
}

impl Stalls {
    /// Decides how a failed request waits, and enters it. `None`: it does not wait and is reported.
    pub(crate) fn failed(
        &mut self,
        head: u16,
        ended: &Ended,
        errno: i32,
        action: ErrorAction,
        now_ns: u64,
    ) -> Option<StallPhase> {
        let before = self.repeated.remove(&ended.order);
        let (first_ns, tries) = before.map_or((now_ns, 0), |stall| (stall.first_ns, stall.tries));
        let phase = next_phase(action, first_ns, tries, now_ns)?;
        self.insert(Stall {
            head,
            order: ended.order,
            request: Request {
                verb: ended.verb,
                offset_bytes: ended.offset_bytes,
                len_bytes: ended.len_bytes,
            },
            status_addr: ended.status_addr,
            errno,
            first_ns,
            tries,
            phase,
        });
        Some(phase)
    }

    fn insert(&mut self, stall: Stall) {
        self.held += u32::from(stall.phase.is_held());
        self.closing += u32::from(stall.phase.closes());
        if let StallPhase::Due { at_ns, .. } = stall.phase {
            self.due.insert((at_ns, stall.order));
        }
        self.waiting.insert(stall.order, stall);
    }

    fn remove(&mut self, order: u64) -> Option<Stall> {
        let stall = self.waiting.remove(&order)?;
        self.held -= u32::from(stall.phase.is_held());
        self.closing -= u32::from(stall.phase.closes());
        if let StallPhase::Due { at_ns, .. } = stall.phase {
            self.due.remove(&(at_ns, order));
        }
        Some(stall)
    }

    /// Puts the first request in flight that is due by now.
    pub(crate) fn repeat_due(&mut self, now_ns: u64) -> Option<Stall> {
        let (at_ns, order) = *self.due.first()?;
        if at_ns > now_ns {
            return None;
        }
        let mut stall = self.remove(order)?;
        stall.tries = stall.tries.saturating_add(1);
        self.repeated.insert(order, stall);
        Some(stall)
    }

    /// Removes the selected requests, and returns them in their order.
    pub(crate) fn take(&mut self, which: impl Fn(StallPhase) -> bool) -> Vec<Stall> {
        let selected = self.waiting.values().filter(|stall| which(stall.phase));
        let selected: Vec<Stall> = selected.copied().collect();
        for stall in &selected {
            self.remove(stall.order);
        }
        selected
    }

    /// Forgets repeated requests that have completed, once there are many.
    pub(crate) fn tidy(&mut self, slots: &Slots) {
        if self.repeated.len() < LOOK_MIN.max(2 * self.left) {
            return;
        }
        self.repeated
            .retain(|order, stall| slots.has(stall.head, *order));
        self.left = self.repeated.len();
    }

    /// Has held requests wait for something else. Returns for how many of them `next` chose that.
    fn release(&mut self, next: impl Fn(&Stall) -> Option<StallPhase>) -> u32 {
        let (mut released, mut due) = (0, Vec::new());
        for stall in self.waiting.values_mut() {
            if stall.phase != StallPhase::Held {
                continue;
            }
            let Some(phase) = next(stall) else { continue };
            stall.phase = phase;
            released += 1;
            self.held -= u32::from(!phase.is_held());
            self.closing -= u32::from(!phase.closes());
            if let StallPhase::Due { at_ns, .. } = phase {
                due.push((at_ns, stall.order));
            }
        }
        // Merged in one pass, because they may be all of the vring.
        self.due.append(&mut due.into_iter().collect());
        released
    }

    /// Makes all held requests due.
    pub(crate) fn resume(&mut self, now_ns: u64) {
        self.release(|_| {
            Some(StallPhase::Due {
                at_ns: now_ns,
                closes: true,
            })
        });
    }

    /// Makes the held requests due that could not be sent. The first time they are due at once, later after a pause, because a
    /// server may return and leave again with each attempt. Returns how many there are.
    pub(crate) fn resume_unsent(&mut self, now_ns: u64) -> u32 {
        self.release(|stall| {
            let pause_ns = match stall.tries {
                0 => 0,
                tries => pause_ns(tries),
            };
            is_unsent(stall.errno).then_some(StallPhase::Due {
                at_ns: now_ns.saturating_add(pause_ns),
                closes: true,
            })
        })
    }

    /// Has all held requests fail when the vring's rest ends.
    pub(crate) fn fail_later(&mut self) {
        self.release(|_| Some(StallPhase::Failing));
    }

    /// Returns true if a request waits for the end of a rest to fail.
    pub(crate) fn any_failing(&self) -> bool {
        let mut waiting = self.waiting.values();
        self.held > 0 && waiting.any(|stall| stall.phase == StallPhase::Failing)
    }

    /// Returns when the first request is due.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        self.due.first().map(|(at_ns, _)| *at_ns)
    }

    /// Returns true if one of them keeps its vring from taking new requests.
    pub(crate) fn closes(&self) -> bool {
        self.closing > 0
    }

    /// Returns the number of requests that wait.
    pub(crate) fn waiting(&self) -> u32 {
        // At most the size of the vring.
        self.waiting.len() as u32
    }

    /// Forgets the requests that wait.
    pub(crate) fn leave(&mut self) {
        self.waiting.clear();
        self.due.clear();
        (self.held, self.closing) = (0, 0);
    }

    /// Returns a summary for display: counts, and the oldest request that waits (the oldest held one, if there is any).
    pub(crate) fn shown(&self) -> Option<StalledRequests> {
        let mut waiting = self.waiting.values();
        let shown = match self.held {
            0 => waiting.next(),
            _ => waiting.find(|stall| stall.phase.is_held()),
        }?;
        Some(StalledRequests {
            held: self.held,
            retrying: self.waiting() - self.held,
            verb: verb_of(shown.request.verb),
            sector: shown.request.offset_bytes / 512,
            errno: shown.errno,
            since_ns: shown.first_ns,
        })
    }
}

/// Returns how a request waits that has just failed, that first failed at `first_ns` and that was repeated `tries` times. `None`:
/// it is reported.
fn next_phase(action: ErrorAction, first_ns: u64, tries: u32, now_ns: u64) -> Option<StallPhase> {
    let (seconds, hold) = match action {
        ErrorAction::Report => return None,
        ErrorAction::Hold => return Some(StallPhase::Held),
        ErrorAction::Retry { seconds, hold } => (seconds, hold),
    };
    let end_ns = first_ns.saturating_add(u64::from(seconds) * SECOND_NS);
    if now_ns >= end_ns {
        return hold.then_some(StallPhase::Held);
    }
    Some(StallPhase::Due {
        // The last try is at the end of the period, not before.
        at_ns: now_ns.saturating_add(pause_ns(tries)).min(end_ns),
        closes: false,
    })
}

/// Returns the pause before a request is repeated that was repeated `tries` times.
fn pause_ns(tries: u32) -> u64 {
    (PAUSE_FIRST_NS << tries.min(10)).min(PAUSE_MAX_NS)
}

fn verb_of(verb: Verb) -> &'static str {
    match verb {
        Verb::Read => "read",
        Verb::Write => "write",
        Verb::Discard => "discard",
        Verb::WriteZeroes { .. } => "write-zeroes",
        Verb::Flush => "flush",
        Verb::GetId => "other",
    }
}

#[cfg(test)]
mod tests {
    use cleave_guest::Memory;

    use super::*;

    const MS: u64 = 1_000_000;
    const RETRY: ErrorAction = ErrorAction::Retry {
        seconds: 60,
        hold: false,
    };

    fn ended(order: u64) -> Ended {
        let request = Request {
            verb: Verb::Write,
            offset_bytes: order * 512,
            len_bytes: 512,
        };
        Ended {
            verb: request.verb,
            offset_bytes: request.offset_bytes,
            len_bytes: request.len_bytes,
            status_addr: 0,
            epoch: Epoch::from(Memory::new(Vec::new()).unwrap()),
            outcome: Outcome::ended(&request, Err(5)),
            timing: None,
            errno: Some(5),
            order,
        }
    }

    fn repeated(stalls: &mut Stalls, now_ns: u64) -> Vec<u64> {
        let all = std::iter::from_fn(|| stalls.repeat_due(now_ns));
        all.map(|stall| stall.order).collect()
    }

    #[test]
    fn requests_are_repeated_when_they_are_due_with_longer_and_longer_pauses() {
        let mut stalls = Stalls::default();
        for (order, now_ns) in [(7, 0), (3, MS), (5, 2 * MS)] {
            let phase = stalls.failed(order as u16, &ended(order), 5, RETRY, now_ns);
            let at_ns = now_ns + 10 * MS;
            let closes = false;
            assert_eq!(phase, Some(StallPhase::Due { at_ns, closes }));
        }
        assert_eq!((stalls.due_ns(), stalls.waiting()), (Some(10 * MS), 3));
        assert!(stalls.repeat_due(10 * MS - 1).is_none());
        assert_eq!(repeated(&mut stalls, 11 * MS), [7, 3]);
        assert_eq!((stalls.due_ns(), stalls.waiting()), (Some(12 * MS), 1));
        stalls.failed(3, &ended(3), 5, RETRY, 20 * MS);
        assert_eq!(stalls.shown().map(|shown| shown.since_ns), Some(MS));
        assert_eq!(repeated(&mut stalls, 39 * MS), [5]);
        assert_eq!(repeated(&mut stalls, 40 * MS), [3]);
        assert_eq!((stalls.due_ns(), stalls.waiting()), (None, 0));
        assert!(stalls.shown().is_none());
    }

    #[test]
    fn held_requests_are_counted_whatever_they_wait_for_next() {
        let mut stalls = Stalls::default();
        for order in [4, 1, 2, 3] {
            let action = if order == 1 { RETRY } else { ErrorAction::Hold };
            stalls.failed(order as u16, &ended(order), 5, action, 0);
        }
        let shown = |stalls: &Stalls| {
            let shown = stalls
                .shown()
                .map(|shown| (shown.held, shown.retrying, shown.sector));
            (shown, stalls.closes(), stalls.waiting())
        };
        assert_eq!(shown(&stalls), (Some((3, 1, 2)), true, 4));
        stalls.resume(20 * MS);
        assert_eq!(shown(&stalls), (Some((0, 4, 1)), true, 4));
        assert_eq!(repeated(&mut stalls, 20 * MS), [1, 2, 3, 4]);
        assert_eq!(shown(&stalls), (None, false, 0));
        stalls.failed(2, &ended(2), 5, ErrorAction::Hold, 30 * MS);
        stalls.failed(4, &ended(4), 5, ErrorAction::Hold, 30 * MS);
        stalls.fail_later();
        assert!(stalls.any_failing() && stalls.due_ns().is_none());
        let failing = stalls.take(|phase| phase == StallPhase::Failing);
        let orders: Vec<u64> = failing.iter().map(|stall| stall.order).collect();
        assert_eq!(orders, [2, 4]);
        assert_eq!(shown(&stalls), (None, false, 0));
    }

    #[test]
    fn what_was_repeated_and_has_completed_is_forgotten() {
        let (mut stalls, slots) = (Stalls::default(), Slots::new(256));
        for order in 0..10_000 {
            stalls.failed(0, &ended(order), 5, RETRY, 0);
            assert!(stalls.repeat_due(10 * MS).is_some());
            stalls.tidy(&slots);
            assert!(stalls.repeated.len() <= LOOK_MIN, "{order}");
        }
    }
}
