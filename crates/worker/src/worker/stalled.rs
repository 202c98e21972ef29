//! Requests that the disk failed and that `--on-error` does not report. They stall: they wait until they are
//! repeated after a pause, on the operator's order, or because the way to the storage is there again. A stalled request keeps its head but no memory. Its chain
//! is read again from guest memory when it is repeated, so a stall does not delay a change of the memory table.

use std::io;

use cleave_blk::Verb;
use cleave_engine::Store;

use super::Worker;
use super::accept::{Acceptance, Begun, InlineRun};
use super::status::write_status;
use super::take::{DESCRIPTORS_MAX, TAKE_MAX};
use crate::ErrorAction;
use crate::device::incident::Incident;
use crate::lane::{Lane, LaneState};
use crate::record::{StalledRequests, VringEvent};
use crate::settings::on_error::is_unsent;
use crate::slots::Ended;
use crate::stalls::StallPhase;
use crate::token::Token;

impl<S: Store> Worker<S> {
    /// Decides about a request that the disk failed. Called when its last op has completed.
    #[cold]
    pub(crate) fn request_failed(&mut self, token: Token, ended: &Ended, errno: i32) {
        // The request may have been sent after the policy changed, and before this worker looked at its bell.
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
        if phase == StallPhase::Held {
            lane.record.count(VringEvent::Held);
        }
        lane.slots.stall(token.head);
        // The others were scheduled when they failed. To look at all of them for each that fails would be 10^9 steps for a ring of
        // 32768 that fails as a whole.
        if let StallPhase::Due { at_ns, .. } = phase
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

    /// Returns the action for a failed request. After a failed sync no request that changes the disk is repeated. Through the page
    /// cache a durable write cannot succeed any more, and every flush fails, until the disk is opened again.
    fn action(&self, verb: Verb, errno: i32) -> ErrorAction {
        match verb {
            // It waits in the frontend's list for the next daemon, if the frontend keeps one.
            _ if self.device.disk.is_abandoned() => return ErrorAction::Hold,
            Verb::Read => {}
            _ if self.device.disk.sync_failed() => return ErrorAction::Report,
            _ => {}
        }
        self.active.tuning.on_error.action(verb, errno)
    }

    /// Completes a request with an error.
    fn end_failed(&mut self, number: usize, head: u16, ended: &Ended) {
        let Some(Some(lane)) = self.lanes.get_mut(number) else {
            return;
        };
        let features = lane.features;
        let laps = &mut self.meters.laps;
        lane.record.ended(head, ended, None, &ended.epoch, laps);
        match write_status(&ended.epoch, ended.status_addr, ended.outcome) {
            Some(used_bytes) => {
                lane.vring.log_answer(&ended.epoch);
                lane.push_used(head, used_bytes);
            }
            None => {
                lane.left = true;
                if ended.epoch.is_lost() {
                    // The table in force may have other memory, which is not lost.
                    self.lose_memory();
                }
            }
        }
        let disk = &self.device.disk;
        let is_flush = ended.verb == Verb::Flush || self.device.is_write_through(features);
        if is_flush && ended.verb != Verb::Read && disk.sync_failed() {
            disk.mark_loss_told();
            self.device.owe_no_flush();
        }
        self.report(ended);
    }

    /// Returns true if control or the guest has ended this vring.
    fn is_ending(&self, number: usize) -> bool {
        let lane = self.lanes.get(number).and_then(Option::as_ref);
        let is_ending =
            |lane: &Lane| matches!(lane.state, LaneState::Stopping(_) | LaneState::Retired);
        self.inbox.exiting || lane.is_some_and(is_ending)
    }

    /// Decides about the stalled requests of a vring that ends (it was stopped or retired, or its worker
    /// exits). Called when it ends, and whenever another request stalls later. Control must not wait for them, unless it said that it
    /// does: then they go on to stall until they are repeated or fail.
    /// If the frontend keeps the requests in flight, they stay there unanswered for the next daemon or
    /// connection. Otherwise nobody could repeat them, so they fail with I/O errors. So do those of a vring
    /// that its guest broke. If the ring is not in memory, or memory is lost, there is no place for an answer: they stay open, so that
    /// nobody takes them for answered.
    pub(crate) fn abandon(&mut self, number: usize) {
        let Some(Some(lane)) = self.lanes.get_mut(number) else {
            return;
        };
        if lane.finishes {
            return;
        }
        let (index, waiting) = (lane.index, lane.stalls.waiting());
        let is_broken = matches!(lane.state, LaneState::Retired) && !self.lost;
        if waiting > 0 && lane.vring.is_kept() && !is_broken {
            lane.left = true;
            lane.stalls.leave();
            lane.record.show_stalled(None);
            self.log_rarely(|name| {
                tracing::warn!(
                    "{name}: vring {index} was stopped while the disk failed: {waiting} requests that \
                     were held or waited for a retry are left to the next daemon or connection"
                );
            });
        } else if waiting > 0 && (lane.vring.is_detached() || self.lost) && !is_broken {
            lane.left = true;
            lane.stalls.leave();
            lane.record.show_stalled(None);
            self.log_rarely(|name| {
                tracing::warn!(
                    "{name}: vring {index} was stopped while the disk failed and there was no memory for answers: its guest never \
                     gets one to {waiting} requests that were held or waited for a retry; reset it"
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
    fn end_stalled(&mut self, number: usize, which: impl Fn(StallPhase) -> bool) {
        let Some(Some(lane)) = self.lanes.get_mut(number) else {
            return;
        };
        let ended = lane.stalls.take(which);
        ended
            .iter()
            .for_each(|stall| lane.slots.unstall(stall.head));
        for stall in ended {
            self.end_failed(number, stall.head, &stall.ended(&self.epoch));
        }
        self.tidy_stalls(number);
        self.waiting.due_ns = Some(0);
    }

    /// Repeats the requests that are due, as many as a lap takes new ones. The others are due in the next lap.
    pub(crate) fn redo_due(&mut self, now_ns: u64) {
        let mut descriptors_left = DESCRIPTORS_MAX;
        let lanes = self.lanes.len();
        let first = self.taking.first_again % lanes.max(1);
        for number in (first..lanes).chain(0..first) {
            let begun = self.redo_lane(number, now_ns, &mut descriptors_left);
            let is_full = descriptors_left == 0 || self.store().is_sated() || !self.has_room();
            if begun > 0 && is_full {
                self.taking.first_again = number + 1;
                break;
            }
        }
        let mut lanes = self.lanes.iter().flatten();
        self.waiting.for_room = !self.has_room() && lanes.any(|lane| lane.is_due(now_ns));
        self.schedule_stalls();
    }

    /// Has the requests repeated that were due while the store had no room for them, if it has now. Only the end of other requests
    /// makes room, so until then no timer is needed.
    #[cold]
    pub(crate) fn look_for_room(&mut self) {
        if self.has_room() {
            self.waiting.for_room = false;
            self.waiting.due_ns = Some(0);
        }
    }

    /// Repeats those of a vring. Returns how many.
    fn redo_lane(&mut self, number: usize, now_ns: u64, descriptors_left: &mut u32) -> usize {
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
            return 0;
        };
        if !lane.is_due(now_ns) {
            return 0;
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
            noted: false,
            run: InlineRun::NONE,
            // They were counted when they came.
            is_limited: false,
        };
        let (mut begun, mut fault) = (0, None);
        while begun < TAKE_MAX && acceptance.store.room() >= active.ops_max {
            let Some(stall) = lane.stalls.repeat_due(now_ns) else {
                break;
            };
            begun += 1;
            lane.slots.unstall(stall.head);
            lane.record.redone(stall.head);
            match lane.vring.retake(stall.head, &mut taking.chain) {
                // Never over a limit.
                Ok(taken) => {
                    let is_left = acceptance.begin(lane, taken, &mut taking.chain) == Begun::Lost;
                    lane.left |= is_left;
                }
                Err(error) => {
                    fault = Some(error);
                    break;
                }
            }
            lane.slots.keep_order(stall.head, stall.order);
            *descriptors_left = descriptors_left.saturating_sub(taking.chain.descriptors());
            if *descriptors_left == 0 || acceptance.store.is_sated() {
                break;
            }
        }
        acceptance.run.count(&mut lane.record);
        lane.record.forget_taken();
        if begun > 0 {
            self.tidy_stalls(number);
        }
        if let Some(fault) = fault {
            self.retire(number, &fault);
        }
        begun
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

    /// Repeats the held requests that could not be sent to their storage: the storage can be reached again. Those that failed for another
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
                _ => self.end_stalled(number, |phase| phase == StallPhase::Held),
            }
        }
    }

    /// Fails the requests that waited for the end of their vring's rest to do so.
    pub(crate) fn fail_rested(&mut self) {
        for number in 0..self.lanes.len() {
            let lane = self.lanes.get(number).and_then(Option::as_ref);
            if lane.is_some_and(|lane| !lane.rests() && lane.stalls.any_failing()) {
                self.end_stalled(number, |phase| phase == StallPhase::Failing);
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
        let is_first = self.lanes.iter().flatten().all(Lane::is_open);
        let Some(Some(lane)) = self.lanes.get_mut(number) else {
            return;
        };
        let shown = lane.stalls.shown();
        lane.record.show_stalled(shown);
        if !lane.set_intake(self.inbox.quiet) {
            return;
        }
        let is_closed = !lane.is_open();
        let index = lane.index;
        self.update_wait_mode();
        if let Some(shown) = shown.filter(|_| is_closed && is_first) {
            self.tell_held(index, shown);
        }
    }

    /// Logs a vring that is held, and tells the operator.
    fn tell_held(&self, vring: u16, shown: StalledRequests) {
        let StalledRequests {
            verb,
            sector,
            errno,
            ..
        } = shown;
        let disk = &self.device.disk;
        let remedy = match is_unsent(errno) && disk.reconnects() {
            true => "It continues by itself when the server is back",
            false => "When the disk works again, run `cleave disk resume --held`",
        };
        let is_told = self.device.logs.held.log(|more| {
            let (name, error) = (disk.name(), io::Error::from_raw_os_error(errno));
            tracing::warn!(
                "{name}: vring {vring} is held: a {verb} at sector {sector} failed: {error}. The guest waits. {remedy}; to pass \
                 the error on to the guest, `cleave disk fail`{more}"
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
    /// command that ends the rest calls this again. While those that are due wait for room, so do all others.
    pub(crate) fn schedule_stalls(&mut self) {
        if self.waiting.for_room {
            return;
        }
        let lanes = self.lanes.iter().flatten().filter(|lane| lane.can_retry());
        let due_ns = lanes.filter_map(|lane| lane.stalls.due_ns()).min();
        self.waiting.due_ns = self.waiting.due_ns.into_iter().chain(due_ns).min();
    }
}
