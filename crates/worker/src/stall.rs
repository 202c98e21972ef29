//! Requests that the disk failed and that `--on-error` does not report. They stall: they wait until they are
//! repeated after a pause, on the operator's order, or because the way to the storage is there again. A stalled request keeps its head but no memory. Its chain
//! is read again from guest memory when it is repeated, so a stall does not delay a change of the memory table.

use std::io;

use cleave_blk::{Outcome, Request, Verb};
use cleave_engine::Store;
use cleave_guest::Epoch;

use crate::Action;
use crate::accept::{Acceptance, InlineRun, write_status};
use crate::incident::Incident;
use crate::lane::{Lane, State};
use crate::on_error::is_unsent;
use crate::record::{Stalled, VringEvent};
use crate::slots::{Ended, Slots};
use crate::token::Token;
use crate::worker::{DESCRIPTORS_MAX, Worker};

/// Pause before a request is repeated for the first time. It doubles with each try, up to `PAUSE_MAX_NS`.
const PAUSE_FIRST_NS: u64 = 10_000_000;
const PAUSE_MAX_NS: u64 = 1_000_000_000;
/// Pause if the store has no room for a request that is due.
const PAUSE_FULL_NS: u64 = 1_000_000;
const SECOND_NS: u64 = 1_000_000_000;

/// The event that a stalled request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The operator, or for a request that could not be sent to its storage, the way there.
    Held,
    /// The end of its vring's rest, when it fails. The operator ordered that while there was no ring for the answer.
    Failing,
    /// A time. `closes`: the request was held, so its vring takes no new requests until it is in flight.
    Due { at_ns: u64, closes: bool },
    /// Nothing: it is in flight again, or has completed since.
    UnderWay,
}

/// A request that failed and was not reported.
#[derive(Debug, Clone, Copy)]
struct Stall {
    head: u16,
    order: u64,
    request: Request,
    status_addr: u64,
    errno: i32,
    /// When it failed for the first time.
    first_ns: u64,
    /// How often it was repeated.
    tries: u32,
    phase: Phase,
}

impl Stall {
    fn is_waiting(&self) -> bool {
        self.phase != Phase::UnderWay
    }

    /// The same request as one that fails now.
    fn ended(&self, epoch: &Epoch) -> Ended {
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
    list: Vec<Stall>,
    /// Numbers of requests that are held, that wait for a time, and that close the vring.
    held: u32,
    retrying: u32,
    closing: u32,
}

impl Stalls {
    /// Decides how a failed request waits, and enters it. `None`: it does not wait and is reported.
    fn failed(
        &mut self,
        head: u16,
        ended: &Ended,
        errno: i32,
        action: Action,
        now_ns: u64,
    ) -> Option<Phase> {
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

    fn count(&mut self, phase: Phase) {
        let closes = match phase {
            Phase::UnderWay => return,
            Phase::Held | Phase::Failing => true,
            Phase::Due { closes, .. } => closes,
        };
        self.closing += u32::from(closes);
        match phase {
            Phase::Held | Phase::Failing => self.held += 1,
            _ => self.retrying += 1,
        }
    }

    /// Removes entries of completed requests, and counts the others.
    fn tidy(&mut self, slots: &Slots) {
        self.list
            .retain(|stall| stall.is_waiting() || slots.has(stall.head, stall.order));
        (self.held, self.retrying, self.closing) = (0, 0, 0);
        for at in 0..self.list.len() {
            self.count(self.list[at].phase);
        }
    }

    /// Puts the request at this place in flight, if it waits for an event that has occurred.
    fn start(&mut self, at: usize, has_come: impl Fn(Phase) -> bool) -> Option<Stall> {
        let stall = self.list.get_mut(at)?;
        if !stall.is_waiting() || !has_come(stall.phase) {
            return None;
        }
        stall.phase = Phase::UnderWay;
        stall.tries = stall.tries.saturating_add(1);
        Some(*stall)
    }

    /// Postpones a request that is due, because there is no room for it.
    fn put_off(&mut self, at: usize, now_ns: u64) {
        if let Some(Stall {
            phase: Phase::Due { at_ns, .. },
            ..
        }) = self.list.get_mut(at)
        {
            *at_ns = (*at_ns).max(now_ns + PAUSE_FULL_NS);
        }
    }

    /// Makes all held requests due.
    fn resume(&mut self, now_ns: u64) {
        for stall in &mut self.list {
            if stall.phase == Phase::Held {
                stall.phase = Phase::Due {
                    at_ns: now_ns,
                    closes: true,
                };
            }
        }
    }

    /// Makes the held requests due that could not be sent. The first time they are due at once, later after a pause, because a
    /// server may come back and go again with each attempt. Returns how many there are.
    fn resume_unsent(&mut self, now_ns: u64) -> u32 {
        let mut resumed = 0;
        for stall in &mut self.list {
            if stall.phase == Phase::Held && is_unsent(stall.errno) {
                let pause_ns = match stall.tries {
                    0 => 0,
                    tries => pause_ns(tries),
                };
                stall.phase = Phase::Due {
                    at_ns: now_ns.saturating_add(pause_ns),
                    closes: true,
                };
                resumed += 1;
            }
        }
        resumed
    }

    /// Has all held requests fail when the vring's rest ends.
    fn fail_later(&mut self) {
        for stall in &mut self.list {
            if stall.phase == Phase::Held {
                stall.phase = Phase::Failing;
            }
        }
    }

    /// Whether a request waits for the end of a rest to fail.
    fn any_failing(&self) -> bool {
        self.list.iter().any(|stall| stall.phase == Phase::Failing)
    }

    /// When the first request is due.
    fn due_ns(&self) -> Option<u64> {
        let due = self.list.iter().filter_map(|stall| match stall.phase {
            Phase::Due { at_ns, .. } => Some(at_ns),
            Phase::Held | Phase::Failing | Phase::UnderWay => None,
        });
        due.min()
    }

    /// Whether one of them keeps its vring from taking new requests.
    pub(crate) fn closes(&self) -> bool {
        self.closing > 0
    }

    /// Number of requests that wait.
    pub(crate) fn waiting(&self) -> u32 {
        self.held + self.retrying
    }

    /// Forgets the requests that wait.
    fn leave(&mut self) {
        self.list.retain(|stall| !stall.is_waiting());
        (self.held, self.retrying, self.closing) = (0, 0, 0);
    }

    /// Summary for display: counts, and the oldest request that waits (the oldest held one, if there is any).
    fn shown(&self) -> Option<Stalled> {
        let mut waiting = self.list.iter().filter(|stall| stall.is_waiting());
        let shown = match self.held {
            0 => waiting.next(),
            _ => waiting.find(|stall| matches!(stall.phase, Phase::Held | Phase::Failing)),
        }?;
        Some(Stalled {
            held: self.held,
            retrying: self.retrying,
            verb: verb_of(shown.request.verb),
            sector: shown.request.offset_bytes / 512,
            errno: shown.errno,
            since_ns: shown.first_ns,
        })
    }
}

/// How a request waits that has just failed, that first failed at `first_ns` and that was repeated `tries`
/// times. `None`: it is reported.
fn next_phase(action: Action, first_ns: u64, tries: u32, now_ns: u64) -> Option<Phase> {
    let (seconds, hold) = match action {
        Action::Report => return None,
        Action::Hold => return Some(Phase::Held),
        Action::Retry { seconds, hold } => (seconds, hold),
    };
    let end_ns = first_ns.saturating_add(u64::from(seconds) * SECOND_NS);
    if now_ns >= end_ns {
        return hold.then_some(Phase::Held);
    }
    Some(Phase::Due {
        // The last try is at the end of the period, not before.
        at_ns: now_ns.saturating_add(pause_ns(tries)).min(end_ns),
        closes: false,
    })
}

/// Pause before a request is repeated that was repeated `tries` times.
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

impl<S: Store> Worker<S> {
    /// Called when the last op of a request has completed and the disk failed it.
    #[cold]
    pub(crate) fn request_failed(&mut self, token: Token, ended: &Ended, errno: i32) {
        // Whoever changed the policy may have sent this request before the bell was looked at.
        self.adopt_tuning();
        let now_ns = self.now_ns();
        let action = self.action(ended.verb, errno);
        let number = usize::from(token.lane);
        let Some(Some(lane)) = self.lanes.get_mut(number) else {
            return;
        };
        let phase = lane.stalls.failed(token.head, ended, errno, action, now_ns);
        let Some(phase) = phase else {
            return self.end_failed(number, token.head, ended);
        };
        if phase == Phase::Held {
            lane.record.count(VringEvent::Held);
        }
        lane.slots.stall(token.head);
        // The others were scheduled when they failed. To look at all of them for each that fails would be 10^9 steps for a ring of
        // 32768 that fails as a whole.
        if let Phase::Due { at_ns, .. } = phase
            && lane.can_retry()
        {
            let due_ns = &mut self.waiting.due_ns;
            *due_ns = Some(due_ns.map_or(at_ns, |due_ns| due_ns.min(at_ns)));
        }
        self.show_stalls(number);
        if self.is_ending(number) {
            self.abandon(number);
        }
    }

    /// After a failed sync no request that changes the disk is repeated. Behind the page cache a durable write
    /// cannot succeed any more, and every flush fails, until the disk is opened again.
    fn action(&self, verb: Verb, errno: i32) -> Action {
        match verb {
            // It waits in the frontend's list for the next daemon, if the frontend keeps one.
            _ if self.device.disk.is_abandoned() => return Action::Hold,
            Verb::Read => {}
            _ if self.device.disk.sync_failed() => return Action::Report,
            _ => {}
        }
        self.active.tuning.on_error.action(verb, errno)
    }

    /// Completes a request with an error.
    fn end_failed(&mut self, number: usize, head: u16, ended: &Ended) {
        let Some(Some(lane)) = self.lanes.get_mut(number) else {
            return;
        };
        let laps = &mut self.meters.laps;
        lane.record.ended(head, ended, None, &ended.epoch, laps);
        let used_bytes = write_status(&ended.epoch, ended.status_addr, ended.outcome);
        lane.push_used(head, used_bytes);
        let disk = &self.device.disk;
        let is_flush = ended.verb == Verb::Flush || self.device.is_write_through(lane.features);
        if is_flush && ended.verb != Verb::Read && disk.sync_failed() {
            disk.mark_loss_told();
        }
        self.report(ended);
    }

    /// Whether control or the guest has ended this vring.
    fn is_ending(&self, number: usize) -> bool {
        let lane = self.lanes.get(number).and_then(Option::as_ref);
        let is_ending = |lane: &Lane| matches!(lane.state, State::Stopping(_) | State::Retired);
        self.inbox.exiting || lane.is_some_and(is_ending)
    }

    /// Decides about the stalled requests of a vring that ends (it was stopped or retired, or its worker
    /// exits). Called when it ends, and whenever another request stalls later. Control must not wait for them.
    /// If the frontend keeps the requests in flight, they stay there unanswered for the next daemon or
    /// connection. Otherwise nobody could repeat them, so they fail with I/O errors. So do those of a vring
    /// that its guest broke. If the ring is not in memory there is no place for an answer: they stay open, so that nobody takes
    /// them for answered.
    pub(crate) fn abandon(&mut self, number: usize) {
        let Some(Some(lane)) = self.lanes.get_mut(number) else {
            return;
        };
        let (index, waiting) = (lane.index, lane.stalls.waiting());
        if waiting > 0 && lane.vring.is_kept() && !matches!(lane.state, State::Retired) {
            lane.left = true;
            lane.stalls.leave();
            lane.record.show_stalled(None);
            self.log_rarely(|name| {
                tracing::warn!(
                    "{name}: vring {index} was stopped while the disk failed: {waiting} requests that \
                     were held or waited for a retry are left to the next daemon or connection"
                );
            });
        } else if waiting > 0 && lane.vring.is_detached() && !matches!(lane.state, State::Retired) {
            lane.left = true;
            lane.stalls.leave();
            lane.record.show_stalled(None);
            self.log_rarely(|name| {
                tracing::warn!(
                    "{name}: vring {index} was stopped while the disk failed and its ring was not in memory: its guest never gets \
                     an answer to {waiting} requests that were held or waited for a retry; reset it"
                );
            });
        } else if waiting > 0 {
            self.log_rarely(|name| {
                tracing::warn!(
                    "{name}: vring {index} was stopped while the disk failed: its guest gets I/O errors for {waiting} requests \
                     that were held or waited for a retry"
                );
            });
            self.end_stalled(number, |_| true);
        }
    }

    /// Fails the selected requests with I/O errors. The next lap publishes them.
    fn end_stalled(&mut self, number: usize, which: impl Fn(Phase) -> bool) {
        let mut at = 0;
        while let Some(Some(lane)) = self.lanes.get_mut(number)
            && at < lane.stalls.list.len()
        {
            if let Some(stall) = lane.stalls.start(at, &which) {
                lane.slots.unstall(stall.head);
                self.end_failed(number, stall.head, &stall.ended(&self.epoch));
            }
            at += 1;
        }
        self.tidy_stalls(number);
        self.waiting.due_ns = Some(0);
    }

    /// Repeats the requests that are due.
    pub(crate) fn redo_due(&mut self, now_ns: u64) {
        let mut descriptors_left = DESCRIPTORS_MAX;
        for number in 0..self.lanes.len() {
            self.redo_lane(number, now_ns, &mut descriptors_left);
        }
        self.schedule_stalls();
    }

    fn redo_lane(&mut self, number: usize, now_ns: u64, descriptors_left: &mut u32) {
        let Worker {
            lanes,
            reactor,
            store: [store],
            device,
            epoch,
            taking,
            splitting,
            active,
            meters,
            ..
        } = self;
        let Some(Some(lane)) = lanes.get_mut(number) else {
            return;
        };
        if !lane.can_retry() {
            return;
        }
        let mut acceptance = Acceptance {
            reactor,
            store,
            device,
            epoch,
            lane_number: number as u16,
            splitting,
            ended: 0,
            laps: &mut meters.laps,
            watched: false,
            run: InlineRun::NONE,
            // They were counted when they came.
            is_limited: false,
        };
        let is_due = |phase| matches!(phase, Phase::Due { at_ns, .. } if at_ns <= now_ns);
        let mut fault = None;
        for at in 0..lane.stalls.list.len() {
            if acceptance.store.room() < active.ops_max || *descriptors_left == 0 {
                lane.stalls.put_off(at, now_ns);
                continue;
            }
            let Some(stall) = lane.stalls.start(at, is_due) else {
                continue;
            };
            lane.slots.unstall(stall.head);
            lane.record.redone(stall.head);
            match lane.vring.retake(stall.head, &mut taking.chain) {
                // Never over a limit.
                Ok(taken) => drop(acceptance.begin(lane, taken, &mut taking.chain)),
                Err(error) => {
                    fault = Some(error);
                    break;
                }
            }
            lane.slots.keep_order(stall.head, stall.order);
            *descriptors_left = descriptors_left.saturating_sub(taking.chain.descriptors());
        }
        acceptance.run.count(&mut lane.record);
        lane.record.forget_taken();
        self.tidy_stalls(number);
        if let Some(fault) = fault {
            self.retire(number, &fault);
        }
    }

    /// Repeats the held requests, on the operator's order.
    pub(crate) fn resume_held(&mut self) {
        let now_ns = self.now_ns();
        for number in 0..self.lanes.len() {
            if let Some(Some(lane)) = self.lanes.get_mut(number) {
                lane.stalls.resume(now_ns);
            }
            self.tidy_stalls(number);
        }
    }

    /// Repeats the held requests that could not be sent to their storage: the way there is back. Those that failed for another
    /// reason wait for the operator.
    #[cold]
    pub(crate) fn resume_unsent(&mut self) {
        let now_ns = self.now_ns();
        let mut requests = 0;
        for number in 0..self.lanes.len() {
            if let Some(Some(lane)) = self.lanes.get_mut(number) {
                requests += lane.stalls.resume_unsent(now_ns);
            }
            self.tidy_stalls(number);
        }
        self.schedule_stalls();
        if requests == 0 {
            return;
        }
        let is_told = self.device.logs.held.log(|more| {
            let name = self.device.disk.name();
            tracing::info!(
                "{name}: the server is back: {requests} held requests are done again{more}"
            );
        });
        if is_told {
            self.device.incidents.call(Incident::Released { requests });
        }
    }

    /// Fails the held requests, on the operator's order. Those of a resting vring fail when its ring is back, because
    /// until then the guest cannot be given an answer.
    pub(crate) fn fail_held(&mut self) {
        for number in 0..self.lanes.len() {
            match self.lanes.get_mut(number) {
                Some(Some(lane)) if lane.rests() => lane.stalls.fail_later(),
                _ => self.end_stalled(number, |phase| phase == Phase::Held),
            }
        }
    }

    /// Fails the requests that waited for the end of their vring's rest to do so.
    pub(crate) fn fail_rested(&mut self) {
        for number in 0..self.lanes.len() {
            let lane = self.lanes.get(number).and_then(Option::as_ref);
            if lane.is_some_and(|lane| !lane.rests() && lane.stalls.any_failing()) {
                self.end_stalled(number, |phase| phase == Phase::Failing);
            }
        }
    }

    fn tidy_stalls(&mut self, number: usize) {
        if let Some(Some(lane)) = self.lanes.get_mut(number) {
            lane.stalls.tidy(&lane.slots);
            self.show_stalls(number);
        }
    }

    /// Updates the vring's record, and closes or opens the vring.
    fn show_stalls(&mut self, number: usize) {
        let is_first = self.lanes.iter().flatten().all(|lane| !lane.is_closed);
        let Some(Some(lane)) = self.lanes.get_mut(number) else {
            return;
        };
        let shown = lane.stalls.shown();
        lane.record.show_stalled(shown);
        if !lane.close() {
            return;
        }
        let is_closed = lane.is_closed;
        let index = lane.index;
        self.update_wait_mode();
        if let Some(shown) = shown.filter(|_| is_closed && is_first) {
            self.tell_held(index, shown);
        }
    }

    /// Logs a vring that is held, and tells the operator.
    fn tell_held(&self, vring: u16, shown: Stalled) {
        let Stalled {
            verb,
            sector,
            errno,
            ..
        } = shown;
        let disk = &self.device.disk;
        let remedy = match is_unsent(errno) && disk.reconnects() {
            true => "It goes on by itself when the server is back",
            false => "When the disk works again, run `cleave resume`",
        };
        let is_told = self.device.logs.held.log(|more| {
            let (name, error) = (disk.name(), io::Error::from_raw_os_error(errno));
            tracing::warn!(
                "{name}: vring {vring} is held: a {verb} at sector {sector} failed: {error}. The guest waits. {remedy}; to pass \
                 the error on to the guest, `cleave fail`{more}"
            );
        });
        if is_told {
            self.device.incidents.call(Incident::Held {
                vring,
                verb,
                sector,
                errno,
            });
        }
    }

    /// Wakes the worker when the first stalled request is due. Those of a resting vring are skipped; the
    /// command that ends the rest calls this again.
    pub(crate) fn schedule_stalls(&mut self) {
        let lanes = self.lanes.iter().flatten().filter(|lane| lane.can_retry());
        let due_ns = lanes.filter_map(|lane| lane.stalls.due_ns()).min();
        self.waiting.due_ns = self.waiting.due_ns.into_iter().chain(due_ns).min();
    }
}
