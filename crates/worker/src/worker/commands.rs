//! Commands from control. They are handled between laps, and answered when they have taken effect.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;

use cleave_engine::Store;
use cleave_guest::{Memory, Vring, VringError, VringLog};

use super::complete::OPERATOR;
use super::inbox::{CommandInbox, SYNC_WAITERS_MAX};
use super::{LANES_MAX, Lap, Worker, call_bell, err_bell};
use crate::command::{Command, Handed, StopWaiter, Stopped, VringDescriptor};
use crate::counter::add;
use crate::lane::{Lane, LaneIntake, LaneState};

/// Answers a command. If the waiter is gone, the answer is dropped.
fn reply<T>(waiter: &SyncSender<T>, answer: T) {
    let _ = waiter.try_send(answer);
}

impl<S: Store> Worker<S> {
    /// Returns true if control waits for something that a later lap completes.
    pub(crate) fn has_waiters(&self) -> bool {
        let CommandInbox {
            stopping,
            exiting,
            holds_old_memory,
            draining,
            ..
        } = self.inbox;
        stopping > 0 || exiting || holds_old_memory || draining || self.wants_sync()
    }

    /// Returns true if a flush for the operator waits for room in the store. A store that is to be closed is not given one.
    fn wants_sync(&self) -> bool {
        !self.inbox.sync_next.is_empty() && self.inbox.syncing.is_empty() && !self.inbox.exiting
    }

    /// Returns true if control waits for answers to be published, and they are.
    fn has_passed(&self) -> bool {
        !self.inbox.passing.is_empty() && !self.lanes.iter().flatten().any(Lane::owes)
    }

    /// Answers those that wait for this.
    fn answer_passes(&mut self) {
        if self.has_passed() {
            let passing = std::mem::take(&mut self.inbox.passing);
            self.inbox.stopping -= passing.len();
            passing.iter().for_each(|done| reply(done, ()));
        }
    }

    /// Begins a flush for the operator as soon as there is room.
    fn begin_sync(&mut self) {
        if self.wants_sync() && self.store().room() > 0 {
            std::mem::swap(&mut self.inbox.syncing, &mut self.inbox.sync_next);
            self.push_sync(0, OPERATOR);
        }
    }

    /// Answers those that wait for a flush, which has ended.
    #[cold]
    pub(crate) fn sync_ended(&mut self, result: Result<(), i32>) {
        for waiter in self.inbox.syncing.drain(..) {
            reply(&waiter, result);
        }
    }

    /// Returns true if something that control waits for has completed.
    #[inline]
    pub(crate) fn can_reply(&self) -> bool {
        self.has_waiters() && self.has_completed()
    }

    /// Returns true if something that control may wait for has completed.
    #[cold]
    fn has_completed(&self) -> bool {
        let mut lanes = self.lanes.iter().flatten();
        self.inbox.exiting && self.is_at_rest()
            || self.wants_sync() && self.store().room() > 0
            || self.inbox.draining && self.is_at_rest()
            || self.has_passed()
            || lanes.any(|lane| lane.is_drained() || lane.can_release_memory())
    }

    /// Has the store begin its last work as soon as nothing is in flight. Returns true if the store can be closed without waiting for
    /// its disk.
    pub(crate) fn prepare_close(&mut self) -> bool {
        let [store] = &mut self.store;
        if store.in_flight() == 0 {
            store.prepare_close();
        }
        store.in_flight() == 0
    }

    /// Returns true if the disk has nothing to do for this worker, and its guests have been shown every answer.
    fn is_at_rest(&self) -> bool {
        self.store().in_flight() == 0 && self.lanes.iter().flatten().all(|lane| !lane.dirty)
    }

    /// Handles commands, and answers those that have taken effect.
    pub(crate) fn handle_commands(&mut self) -> Lap {
        self.inbox.is_pending = false;
        self.adopt_tuning();
        self.adopt_quiet();
        while let Ok(command) = self.inbox.commands.queue.try_recv() {
            self.handle_command(command);
        }
        self.answer_passes();
        self.begin_sync();
        self.release_old_memory();
        self.fail_rested();
        if self.inbox.draining && self.is_at_rest() {
            self.inbox.draining = false;
            let quiet = self.inbox.quiet.map_or(0, NonZeroU64::get);
            // Release: what the requests did is done when control sees it.
            self.meters.stats.still.store(quiet, Ordering::Release);
        }
        // A vring that rested may now be served again, and its stalled requests with it.
        self.schedule_stalls();
        self.release_drained_lanes();
        self.update_wait_mode();
        match self.inbox.exiting && self.is_at_rest() && self.prepare_close() {
            true => Lap::Ended,
            false => Lap::Again,
        }
    }

    fn handle_command(&mut self, command: Command) {
        match command {
            Command::Start(start, done) => {
                let started = self.start(*start);
                reply(&done, started);
            }
            Command::Stop(index, waiter) => self.stop(index, waiter),
            Command::Enable(index, enabled, done) => {
                self.enable(index, enabled);
                reply(&done, ());
            }
            Command::Signal(index, signal, done) => {
                self.set_signal(index, signal);
                reply(&done, ());
            }
            Command::Log(index, log, done) => {
                self.set_log(index, log);
                reply(&done, ());
            }
            Command::Bind(memory, done) => {
                self.bind(memory);
                reply(&done, ());
            }
            Command::Pass(done) => {
                self.lanes.iter_mut().flatten().for_each(Lane::owe);
                self.inbox.stopping += 1;
                self.inbox.passing.push(done);
            }
            Command::Sync(waiter) => {
                if self.inbox.sync_next.len() < SYNC_WAITERS_MAX {
                    self.inbox.sync_next.push(waiter);
                }
            }
            Command::Resume => self.resume_held(),
            Command::Fail => self.fail_held(),
            Command::Exit => {
                self.inbox.exiting = true;
                for lane in self.lanes.iter_mut().flatten() {
                    lane.leave_limits(&self.device);
                    lane.enable(false);
                    lane.finishes = false;
                }
                for number in 0..self.lanes.len() {
                    self.abandon(number);
                }
            }
        }
    }

    /// Closes or opens all vrings if the disk has been quiesced or resumed.
    fn adopt_quiet(&mut self) {
        let quiet = self.device.registry.quiet();
        let before = std::mem::replace(&mut self.inbox.quiet, quiet);
        if quiet != before {
            self.inbox.draining = quiet.is_some();
            for lane in self.lanes.iter_mut().flatten() {
                lane.set_intake(quiet);
            }
        }
    }

    /// Adopts the tuning that control has put in force, if it is another one.
    pub(crate) fn adopt_tuning(&mut self) {
        if self.active.generation != self.device.registry.generation() {
            self.retune();
        }
    }

    fn retune(&mut self) {
        add(&self.meters.stats.switches_tuned, 1);
        // Read the generation first: if the tuning changes after that, the next check sees a newer generation.
        self.active.generation = self.device.registry.generation();
        let tuning = self.device.tuning();
        for lane in self.lanes.iter_mut().flatten() {
            lane.completion = tuning.completion_of(lane.index);
            // The limits may be others now, or none: it asks at once.
            lane.throttled = lane.throttled.filter(|_| tuning.limits.any());
            if let Some(throttled) = &mut lane.throttled {
                throttled.due_ns = 0;
            }
        }
        self.waiting.pacer.retuned();
        self.active.is_limited = tuning.limits.any();
        self.waiting.throttled &= self.active.is_limited;
        self.active.tuning = tuning;
        let splitter = self.device.splitter();
        if Arc::ptr_eq(&splitter, &self.splitting.splitter) {
            return;
        }
        for lane in self.lanes.iter_mut().flatten() {
            lane.slots.forget_choices();
        }
        self.active.ops_max = self.device.ops_max(splitter.split());
        let before = std::mem::replace(&mut self.splitting.splitter, splitter);
        before.forget(std::mem::take(&mut self.splitting.large));
    }

    fn start(&mut self, handed: Handed) -> Result<(), VringError> {
        let Handed {
            mut start,
            call,
            err,
        } = handed;
        let epoch = self.epoch.clone();
        let mut vring = Vring::new(epoch, start.layout, start.features, start.base)?;
        if let Some(journal) = start.journal.take() {
            let lost = vring.keep(journal);
            self.warn_of_unrecorded(start.index, &vring, lost);
        }
        vring.set_log(start.log.take());
        vring.log_ring();
        if vring.base() != 0 || vring.again() > 0 {
            self.device.has_shown.store(true, Ordering::Relaxed);
        }
        let settled_ns = self.settled_ns(start.index, vring.again());
        let free = self.lanes.iter().position(Option::is_none);
        let number = free.unwrap_or(self.lanes.len());
        if number >= usize::from(LANES_MAX) {
            tracing::error!(
                "{}: vring {} exceeds the limit of vrings per worker",
                self.device.disk.name(),
                start.index
            );
            return Ok(());
        }
        let kick = start.kick.take();
        let completion = self.active.tuning.completion_of(start.index);
        let record = self.device.records.recorder(start.index, vring.size());
        let mut lane = Lane::new(start, vring, completion, record);
        if let Some(until_ns) = settled_ns {
            lane.intake = LaneIntake::Unsettled { until_ns };
        }
        lane.set_intake(self.inbox.quiet);
        self.waiting.due_ns = self.waiting.due_ns.into_iter().chain(settled_ns).min();
        if free.is_none() {
            self.lanes.push(None);
        }
        self.lanes[number] = Some(lane);
        // A new vring is armed.
        self.waiting.armed = true;
        self.apply(number as u16, VringDescriptor::Kick(kick));
        self.apply(number as u16, VringDescriptor::Err(err));
        self.apply(number as u16, VringDescriptor::Call(call));
        Ok(())
    }

    /// Warns of a vring whose requests in flight are not recorded, and of those that an earlier daemon lost for this reason.
    fn warn_of_unrecorded(&self, index: u16, vring: &Vring, lost: u16) {
        let Some(entries) = vring.unrecorded() else {
            return;
        };
        let size = vring.size();
        self.device.logs.unrecorded.log(|more| {
            tracing::warn!(
                "{}: vring {index} is served without crash recovery: the guest made it {size} entries large, and the VMM's \
                 in-flight region has room for {entries}. If this daemon is killed, the requests in flight are never \
                 answered, and the guest has to be reset. Stop the guest and start it with queue-size={size}{more}",
                self.device.disk.name()
            );
        });
        if lost > 0 {
            self.device.logs.lost.log(|more| {
                tracing::error!(
                    "{}: vring {index}: {lost} requests that an earlier daemon left in flight are lost, because it served the \
                 vring without crash recovery: the guest never gets an answer to them: reset it{more}",
                    self.device.disk.name()
                );
            });
        }
    }

    /// Logs the requests that an earlier daemon left in flight. Returns when the vring may be served; `None`: at once. A guest that was
    /// reset brings no list of them, and its new requests must not be overtaken by them either.
    fn settled_ns(&self, index: u16, count: usize) -> Option<u64> {
        let disk = &self.device.disk;
        let name = disk.name();
        if count > 0 {
            self.device.has_leftovers.store(true, Ordering::Relaxed);
        }
        let waits = count > 0 || disk.predecessor_died();
        match self.device.unsettled_for().filter(|_| waits) {
            None if count == 0 => None,
            None => {
                self.device.logs.repeated.log(|more| {
                    tracing::info!(
                        "{name}: vring {index}: {count} requests that an earlier daemon left in flight are done again{more}"
                    );
                });
                None
            }
            Some(left) => {
                let seconds = left.as_secs() + 1;
                self.device.logs.repeated.log(|more| match count {
                    0 => tracing::warn!(
                        "{name}: vring {index} is served in {seconds} s: the daemon before this one did not end in order, and \
                         until then the server may still do what that daemon sent{more}"
                    ),
                    _ => tracing::warn!(
                        "{name}: vring {index}: {count} requests that an earlier daemon left in flight are done again in \
                         {seconds} s: until then the server may still do what that daemon sent{more}"
                    ),
                });
                Some(self.now_ns() + u64::try_from(left.as_nanos()).unwrap_or(u64::MAX / 2))
            }
        }
    }

    /// Opens the vrings whose disk is settled now.
    pub(crate) fn open_settled(&mut self, now_ns: u64) {
        let mut is_any_settled = false;
        for lane in self.lanes.iter_mut().flatten() {
            let LaneIntake::Unsettled { until_ns } = lane.intake else {
                continue;
            };
            if now_ns < until_ns {
                self.waiting.due_ns = self.waiting.due_ns.into_iter().chain([until_ns]).min();
            } else {
                lane.intake = LaneIntake::Open;
                lane.set_intake(self.inbox.quiet);
                is_any_settled = true;
            }
        }
        if is_any_settled {
            self.update_wait_mode();
        }
    }

    fn number_of(&self, index: u16) -> Option<usize> {
        self.lanes
            .iter()
            .position(|lane| lane.as_ref().is_some_and(|lane| lane.index == index))
    }

    fn stop(&mut self, index: u16, waiter: StopWaiter) {
        let Some(number) = self.number_of(index) else {
            return waiter.reply(Stopped::Unknown);
        };
        if let Some(lane) = self.lanes[number].as_mut() {
            // A second stop of the same vring replaces the first.
            self.inbox.stopping += usize::from(!matches!(lane.state, LaneState::Stopping(_)));
            lane.stop(&self.device, waiter);
        }
        self.abandon(number);
    }

    fn enable(&mut self, index: u16, enabled: bool) {
        let Some(lane) = self
            .number_of(index)
            .and_then(|number| self.lanes[number].as_mut())
        else {
            return;
        };
        if !enabled {
            lane.leave_limits(&self.device);
        }
        lane.enable(enabled);
    }

    fn set_log(&mut self, index: u16, log: Option<Box<VringLog>>) {
        if let Some(number) = self.number_of(index)
            && let Some(lane) = &mut self.lanes[number]
        {
            lane.vring.set_log(log);
        }
    }

    fn set_signal(&mut self, index: u16, signal: VringDescriptor) {
        if let Some(number) = self.number_of(index) {
            self.apply(number as u16, signal);
        }
    }

    fn apply(&mut self, number: u16, signal: VringDescriptor) {
        match signal {
            VringDescriptor::Kick(kick) => {
                if let Some(lane) = self.lanes[usize::from(number)].as_mut() {
                    lane.has_kick = kick.is_some();
                }
                match kick {
                    Some(fd) => self.reactor.watch(number, fd),
                    None => self.reactor.unwatch(number),
                }
            }
            VringDescriptor::Call(call) => {
                if let Some(lane) = self.lanes[usize::from(number)].as_mut() {
                    lane.has_call = call.is_some();
                }
                self.reactor.set_bell(call_bell(number), call);
                // The guest may have waited through a reconnect for a call that was never sent.
                self.reactor.ring(call_bell(number));
            }
            VringDescriptor::Err(err) => self.reactor.set_bell(err_bell(number), err),
        }
    }

    /// Puts a memory table in force.
    fn bind(&mut self, memory: Arc<Memory>) {
        self.epoch = memory.into();
        self.inbox.holds_old_memory = true;
        for number in 0..self.lanes.len() {
            let Some(lane) = self.lanes[number].as_mut() else {
                continue;
            };
            // A frontend that moves the border of a memory region removes it for a moment and adds it again.
            if let Err(error) = lane.rebind(&self.epoch) {
                let index = lane.index;
                self.reactor.ring(err_bell(number as u16));
                self.log_rarely(|name| {
                    tracing::warn!(
                        "{name}: vring {index} is not served until its memory is back: {error}"
                    );
                });
            }
        }
    }

    /// Releases memory that vrings which are not served no longer need.
    fn release_old_memory(&mut self) {
        if !self.inbox.holds_old_memory {
            return;
        }
        self.inbox.holds_old_memory = false;
        for lane in self.lanes.iter_mut().flatten() {
            lane.release_memory(&self.epoch);
            self.inbox.holds_old_memory |= lane.holds_unused_memory();
        }
    }

    /// Gives back the vrings that control waits for. The preceding `enter` sent their last call.
    fn release_drained_lanes(&mut self) {
        for number in 0..self.lanes.len() {
            let Some(mut lane) = self.lanes[number].take_if(|lane| lane.is_drained()) else {
                continue;
            };
            let slot = number as u16;
            self.inbox.stopping -= 1;
            lane.leave_limits(&self.device);
            self.reactor.unwatch(slot);
            self.reactor.set_bell(call_bell(slot), None);
            self.reactor.set_bell(err_bell(slot), None);
            let leaves_requests = lane.leaves_requests();
            if !leaves_requests {
                lane.vring.end();
            }
            if let LaneState::Stopping(waiter) = lane.state {
                waiter.reply(match leaves_requests {
                    true => Stopped::Left,
                    false => Stopped::At(lane.vring.base()),
                });
            }
        }
    }
}
