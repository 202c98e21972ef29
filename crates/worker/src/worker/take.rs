//! Takes requests from the vrings, as many as the store has room for.

use cleave_engine::Store;
use cleave_guest::VringFault;

use super::accept::{Acceptance, Accepted, Begun, InlineRun};
use super::meters::Meters;
use super::{ActiveTuning, Taking, Worker};
use crate::CompletionPolicy;
use crate::lane::Lane;

/// Maximum number of chains that go from one vring to the disk before the other vrings are served. Bounds how
/// long a completion waits for acceptance.
pub(super) const TAKE_MAX: usize = 64;
/// `TAKE_MAX` while nothing is in flight: an idle disk gets its first requests early and works on them while
/// the rest of the batch is prepared. Costs one more system call after idleness, and saves a tenth of the
/// response time where guest and disk alternate at depth 32.
const TAKE_MAX_IDLE: usize = 8;
/// Maximum number of descriptors that are read in one lap from all vrings together: a fifth of a millisecond.
/// One chain may have half as many, and 64 of those on each of 256 vrings would delay commands and completions
/// for seconds.
pub(crate) const DESCRIPTORS_MAX: u32 = 1 << 16;

/// Why no more chains were taken.
enum Stop {
    /// The ring is empty, or the store is full. A kick or a completion ends the sleep.
    Drained,
    /// A bound of the batch was reached. Nothing would end a sleep, so the worker must not sleep.
    Budget,
    /// The disk's limits; the lane knows until when.
    OverLimit,
    /// Boxed, because each batch asks if there is one, and that is cheaper then.
    Breach(Box<Breach>),
}

impl Stop {
    #[cold]
    fn breach(breach: Breach) -> Stop {
        Stop::Breach(Box::new(breach))
    }
}

/// A guest's violation that retires its vring.
#[derive(Debug, thiserror::Error)]
enum Breach {
    #[error("head {0} is in flight already")]
    Head(u16),
    #[error(transparent)]
    Vring(VringFault),
}

impl<S: Store> Worker<S> {
    /// Takes available chains while the store has room for whole requests.
    pub(super) fn accept(&mut self) -> Accepted {
        let mut accepted = Accepted::default();
        let count = self.lanes.len();
        let first = if self.taking.first < count {
            self.taking.first
        } else {
            0
        };
        let mut has_room = self.has_room();
        for slot in (first..count).chain(0..first) {
            let had_room = has_room;
            let more = self.accept_lane(slot);
            has_room = self.has_room();
            if let Some(Some(lane)) = self.lanes.get_mut(slot) {
                self.meters.ring_checked(lane, more, has_room);
            }
            accepted.chains += more.chains;
            accepted.ended += more.ended;
            if self.is_awaited(slot) {
                accepted.awaited += more.chains;
            }
            accepted.more |= more.more;
            if had_room && !has_room {
                self.taking.first = slot + 1;
            }
            if self.taking.allowance.was_used_up() || self.store().is_sated() {
                (self.taking.first, accepted.more) = (slot + 1, true);
                break;
            }
        }
        if self.active.is_limited {
            self.note_throttled();
        }
        accepted
    }

    /// Has the next sleep end when the first request may go that waits for the disk's limits.
    #[cold]
    fn note_throttled(&mut self) {
        let lanes = self.lanes.iter().flatten().filter(|lane| lane.takes());
        let due = lanes.filter_map(|lane| Some(lane.throttled?.due_ns));
        let due_ns = due.min();
        self.waiting.throttled = due_ns.is_some();
        self.waiting.due_ns = self.waiting.due_ns.into_iter().chain(due_ns).min();
    }

    fn is_awaited(&self, slot: usize) -> bool {
        let lane = self.lanes.get(slot).and_then(Option::as_ref);
        lane.is_some_and(|lane| lane.completion != CompletionPolicy::Interrupt)
    }

    pub(crate) fn has_room(&self) -> bool {
        self.store().room() >= self.active.ops_max
    }

    fn accept_lane(&mut self, slot: usize) -> Accepted {
        let Worker {
            lanes,
            reactor,
            store: [store],
            device,
            epoch,
            taking,
            splitting,
            active,
            meters: Meters { laps, .. },
            ..
        } = self;
        let Some(Some(lane)) = lanes.get_mut(slot) else {
            return Accepted::default();
        };
        if !lane.takes() {
            return Accepted::default();
        }
        if active.is_limited && lane.is_throttled(device) {
            return Accepted::default();
        }
        let watched = laps.is_timed() || lane.record.watches();
        let mut acceptance = Acceptance {
            reactor,
            store,
            device,
            epoch,
            lane_number: slot as u16,
            splitting,
            ended: 0,
            watched,
            noted: watched || lane.vring.is_logged(),
            run: InlineRun::NONE,
            is_limited: active.is_limited && !lane.hurries,
            laps,
        };
        let (chains, stop) = take_batch(&mut acceptance, lane, taking, active);
        let ended = acceptance.ended;
        acceptance.run.count(&mut lane.record);
        if active.is_limited && !matches!(stop, Stop::OverLimit) {
            // Its ring may be empty, and then only a kick announces the next request.
            lane.throttled = None;
        }
        let more = matches!(stop, Stop::Budget);
        // Zeroes read from a lost page are not the guest's fault. The end of the lap retires all vrings for the loss.
        if let Stop::Breach(breach) = stop
            && !self.epoch.is_lost()
        {
            self.retire(slot, &breach);
        }
        Accepted {
            chains,
            awaited: 0,
            ended,
            more,
        }
    }
}

/// Takes chains until the ring is empty, the store is full or a bound is reached. Returns how many were taken
/// and why it stopped.
#[inline]
fn take_batch<S: Store>(
    acceptance: &mut Acceptance<'_, S>,
    lane: &mut Lane,
    taking: &mut Taking,
    active: &ActiveTuning,
) -> (usize, Stop) {
    let Taking {
        chain, allowance, ..
    } = taking;
    let mut chains = 0;
    let at_once_max = lane.at_once_max();
    let take_max = match acceptance.store.in_flight() {
        0 => TAKE_MAX_IDLE,
        _ => TAKE_MAX,
    };
    // The disk does not wait for requests that complete inline, so those have a bound of their own.
    let within = |chains: usize, ended| chains - ended < take_max && ended < at_once_max;
    while within(chains, acceptance.ended) && acceptance.store.room() >= active.ops_max {
        match lane.vring.take(chain) {
            Ok(None) => return (chains, Stop::Drained),
            Ok(Some(taken)) if lane.slots.is_taken(taken.head) => {
                return (chains, Stop::breach(Breach::Head(taken.head)));
            }
            Ok(Some(taken)) => {
                // Also if the chain is given back: what costs time is to read it.
                allowance.spend(chain.descriptors());
                match acceptance.begin(lane, taken, chain) {
                    Begun::Yes => {}
                    Begun::OverLimit => {
                        lane.vring.untake(taken.head);
                        return (chains, Stop::OverLimit);
                    }
                    Begun::Lost => {
                        lane.leave(taken.head);
                        return (chains, Stop::Drained);
                    }
                }
            }
            Err(fault) => return (chains, Stop::breach(Breach::Vring(fault))),
        }
        chains += 1;
        if allowance.is_used_up() || acceptance.store.is_sated() {
            return (chains, Stop::Budget);
        }
    }
    match within(chains, acceptance.ended) {
        true => (chains, Stop::Drained),
        false => (chains, Stop::Budget),
    }
}
