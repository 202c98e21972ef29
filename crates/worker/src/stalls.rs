//! The stalled requests of a vring, and the events that they wait for.

use cleave_blk::{Outcome, Request, Verb};
use cleave_guest::Epoch;

use crate::ErrorAction;
use crate::record::StalledRequests;
use crate::settings::on_error::is_unsent;
use crate::slots::{Ended, Slots};

/// Pause before a request is repeated for the first time. It doubles with each try, up to `PAUSE_MAX_NS`.
const PAUSE_FIRST_NS: u64 = 10_000_000;
const PAUSE_MAX_NS: u64 = 1_000_000_000;
/// Pause if the store has no room for a request that is due.
const PAUSE_FULL_NS: u64 = 1_000_000;
const SECOND_NS: u64 = 1_000_000_000;

/// The event that a stalled request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StallPhase {
    /// The operator, or for a request that could not be sent to its storage, the way there.
    Held,
    /// The end of its vring's rest, when it fails. The operator ordered that while there was no ring for the answer.
    Failing,
    /// A time. `closes`: the request was held, so its vring does not take new requests until it is in flight.
    Due { at_ns: u64, closes: bool },
    /// Nothing: it is in flight again, or has completed since.
    UnderWay,
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
    fn is_waiting(&self) -> bool {
        self.phase != StallPhase::UnderWay
    }

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

/// Stalled requests of a vring in the order in which they were taken. Some of them may be in flight again.
#[derive(Debug, Default)]
pub(crate) struct Stalls {
    pub(crate) list: Vec<Stall>,
    /// Numbers of requests that are held, that wait for a time, and that close the vring.
    held: u32,
    retrying: u32,
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
        let place = self
            .list
            .binary_search_by_key(&ended.order, |stall| stall.order);
        let before = place.ok().and_then(|at| self.list.get(at));
        let (first_ns, tries) = before.map_or((now_ns, 0), |stall| (stall.first_ns, stall.tries));
        // If the request is reported, an entry that it already has stays in flight and is removed by the next
        // `tidy`.
        let phase = next_phase(action, first_ns, tries, now_ns)?;
        let stall = Stall {
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
        };
        self.count(phase);
        match place {
            Ok(at) => self.list[at] = stall,
            Err(at) => self.list.insert(at, stall),
        }
        Some(phase)
    }

    fn count(&mut self, phase: StallPhase) {
        let closes = match phase {
            StallPhase::UnderWay => return,
            StallPhase::Held | StallPhase::Failing => true,
            StallPhase::Due { closes, .. } => closes,
        };
        self.closing += u32::from(closes);
        match phase {
            StallPhase::Held | StallPhase::Failing => self.held += 1,
            _ => self.retrying += 1,
        }
    }

    /// Removes entries of completed requests, and counts the others.
    pub(crate) fn tidy(&mut self, slots: &Slots) {
        self.list
            .retain(|stall| stall.is_waiting() || slots.has(stall.head, stall.order));
        (self.held, self.retrying, self.closing) = (0, 0, 0);
        for at in 0..self.list.len() {
            self.count(self.list[at].phase);
        }
    }

    /// Puts the request at this place in flight, if it waits for an event that has occurred.
    pub(crate) fn start(
        &mut self,
        at: usize,
        has_come: impl Fn(StallPhase) -> bool,
    ) -> Option<Stall> {
        let stall = self.list.get_mut(at)?;
        if !stall.is_waiting() || !has_come(stall.phase) {
            return None;
        }
        stall.phase = StallPhase::UnderWay;
        stall.tries = stall.tries.saturating_add(1);
        Some(*stall)
    }

    /// Postpones a request that is due, because the store has no room for it.
    pub(crate) fn put_off(&mut self, at: usize, now_ns: u64) {
        if let Some(Stall {
            phase: StallPhase::Due { at_ns, .. },
            ..
        }) = self.list.get_mut(at)
        {
            *at_ns = (*at_ns).max(now_ns + PAUSE_FULL_NS);
        }
    }

    /// Makes all held requests due.
    pub(crate) fn resume(&mut self, now_ns: u64) {
        for stall in &mut self.list {
            if stall.phase == StallPhase::Held {
                stall.phase = StallPhase::Due {
                    at_ns: now_ns,
                    closes: true,
                };
            }
        }
    }

    /// Makes the held requests due that could not be sent. The first time they are due at once, later after a pause, because a
    /// server may return and leave again with each attempt. Returns how many there are.
    pub(crate) fn resume_unsent(&mut self, now_ns: u64) -> u32 {
        let mut resumed = 0;
        for stall in &mut self.list {
            if stall.phase == StallPhase::Held && is_unsent(stall.errno) {
                let pause_ns = match stall.tries {
                    0 => 0,
                    tries => pause_ns(tries),
                };
                stall.phase = StallPhase::Due {
                    at_ns: now_ns.saturating_add(pause_ns),
                    closes: true,
                };
                resumed += 1;
            }
        }
        resumed
    }

    /// Has all held requests fail when the vring's rest ends.
    pub(crate) fn fail_later(&mut self) {
        for stall in &mut self.list {
            if stall.phase == StallPhase::Held {
                stall.phase = StallPhase::Failing;
            }
        }
    }

    /// Returns true if a request waits for the end of a rest to fail.
    pub(crate) fn any_failing(&self) -> bool {
        self.list
            .iter()
            .any(|stall| stall.phase == StallPhase::Failing)
    }

    /// Returns when the first request is due.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        let due = self.list.iter().filter_map(|stall| match stall.phase {
            StallPhase::Due { at_ns, .. } => Some(at_ns),
            StallPhase::Held | StallPhase::Failing | StallPhase::UnderWay => None,
        });
        due.min()
    }

    /// Returns true if one of them keeps its vring from taking new requests.
    pub(crate) fn closes(&self) -> bool {
        self.closing > 0
    }

    /// Returns the number of requests that wait.
    pub(crate) fn waiting(&self) -> u32 {
        self.held + self.retrying
    }

    /// Forgets the requests that wait.
    pub(crate) fn leave(&mut self) {
        self.list.retain(|stall| !stall.is_waiting());
        (self.held, self.retrying, self.closing) = (0, 0, 0);
    }

    /// Returns a summary for display: counts, and the oldest request that waits (the oldest held one, if there is any).
    pub(crate) fn shown(&self) -> Option<StalledRequests> {
        let mut waiting = self.list.iter().filter(|stall| stall.is_waiting());
        let shown = match self.held {
            0 => waiting.next(),
            _ => {
                waiting.find(|stall| matches!(stall.phase, StallPhase::Held | StallPhase::Failing))
            }
        }?;
        Some(StalledRequests {
            held: self.held,
            retrying: self.retrying,
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
