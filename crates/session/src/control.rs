//! Messages that configure, start and stop vrings.

use std::fs::File;
use std::os::fd::OwnedFd;

use cleave_blk::spec::feature;
use cleave_worker::VringStart;

use crate::MessageRefusal;
use crate::foreign::{Foreign, signal};
use crate::forward::Forwarder;
use crate::state::SessionState;
use crate::vrings::{Kick, SignalFd, UserAddrs};
use crate::workers::answer;

impl SessionState {
    pub(crate) fn set_vring_size(&mut self, index: u64, size: u64) -> Result<(), MessageRefusal> {
        let size_max = self.vring_size_max;
        let (index, entry) = self.vrings.get(index)?;
        entry.must_be_stopped(index, "SET_VRING_NUM")?;
        let size = u16::try_from(size)
            .ok()
            .filter(|size| size.is_power_of_two() && *size <= size_max)
            .ok_or_else(|| {
                MessageRefusal::message(match size > u64::from(size_max) {
                    true => format!(
                        "vring {index} has {size} entries and --queue-size allows {size_max}: raise that option, or lower \
                         the VMM's queue-size"
                    ),
                    false => format!("vring {index} of size {size}: not a power of two"),
                })
            })?;
        let before = entry.settings.size.replace(size);
        self.start_if_complete(index)
            .inspect_err(|_| self.settings(index, |settings| settings.size = before))
    }

    pub(crate) fn set_vring_base(&mut self, index: u64, base: u64) -> Result<(), MessageRefusal> {
        let (index, entry) = self.vrings.get(index)?;
        entry.must_be_stopped(index, "SET_VRING_BASE")?;
        let base = u16::try_from(base).map_err(|_| {
            MessageRefusal::message(format!("vring {index} cannot start at {base}"))
        })?;
        entry.settings.set_base(base);
        Ok(())
    }

    /// Stores the addresses of a vring. May be repeated for a running vring with the addresses that it has; only that of the dirty
    /// log may change.
    pub(crate) fn set_vring_addrs(
        &mut self,
        index: u64,
        addrs: UserAddrs,
    ) -> Result<(), MessageRefusal> {
        let (index, entry) = self.vrings.get(index)?;
        if let Some(layout) = entry.running {
            if addrs.layout(layout.size, &self.memory) == Ok(layout) {
                entry.settings.addrs = Some(addrs);
                let log = self.log.of_vring(addrs);
                return answer(self.workers.get(index)?.set_log(index, log));
            }
            return Err(MessageRefusal::message(format!(
                "vring {index} cannot move while it runs"
            )));
        }
        let before = entry.settings.addrs.replace(addrs);
        self.start_if_complete(index)
            .inspect_err(|_| self.settings(index, |settings| settings.addrs = before))
    }

    /// Sets the kick, which starts the vring. Without a descriptor the vring is polled.
    pub(crate) fn set_vring_kick(
        &mut self,
        index: u64,
        fd: Option<Foreign>,
    ) -> Result<(), MessageRefusal> {
        let fd = fd.map(Foreign::into_eventfd).transpose();
        let fd =
            fd.map_err(|_| MessageRefusal::message("the descriptor for kicks is not an eventfd"))?;
        let (index, entry) = self.vrings.get(index)?;
        if entry.running.is_some() {
            entry.kick = Kick::new(copy_of(fd.as_ref())?);
            return answer(self.workers.get(index)?.set_kick(index, fd));
        }
        entry.settings.kick = Kick::new(fd);
        self.start_if_complete(index)
            .inspect_err(|_| self.settings(index, |settings| settings.kick = Kick::Unset))
    }

    pub(crate) fn set_vring_signal(
        &mut self,
        index: u64,
        signal: SignalFd,
        fd: Option<Foreign>,
    ) -> Result<(), MessageRefusal> {
        let (number, _) = self.vrings.get(index)?;
        let fd = self.bell((number, signal), fd)?;
        let copy = copy_of(fd.as_ref())?;
        let (index, entry) = self.vrings.get(index)?;
        match signal {
            SignalFd::Call => entry.settings.call = fd,
            SignalFd::Err => entry.settings.err = fd,
        }
        if entry.running.is_none() {
            return Ok(());
        }
        let worker = self.workers.get(index)?;
        answer(match signal {
            SignalFd::Call => worker.set_call(index, copy),
            SignalFd::Err => worker.set_err(index, copy),
        })
    }

    /// Returns the eventfd to write for this descriptor: the frontend's own, or one of ours that is forwarded to its pipe or
    /// socket.
    fn bell(
        &mut self,
        key: (u16, SignalFd),
        fd: Option<Foreign>,
    ) -> Result<Option<OwnedFd>, MessageRefusal> {
        let stream = match fd.map(Foreign::into_eventfd).transpose() {
            Ok(fd) => {
                self.forwarder.iter().for_each(|known| known.remove(key));
                return Ok(fd);
            }
            Err(other) if other.is_stream() => other,
            Err(_) => {
                return Err(MessageRefusal::message(
                    "the descriptor for call or err is not an eventfd, a pipe or a local stream socket",
                ));
            }
        };
        let forwarder = match &mut self.forwarder {
            Some(started) => started,
            none => none.insert(Forwarder::start(&self.offload)?),
        };
        forwarder.add(key, stream).map(Some)
    }

    /// Enables or disables a vring. Acknowledged only when the worker has done so: the frontend kicks right afterwards, and that
    /// kick must not be lost.
    pub(crate) fn enable_vring(&mut self, index: u64, enabled: bool) -> Result<(), MessageRefusal> {
        let (index, entry) = self.vrings.get(index)?;
        entry.settings.enabled = enabled;
        if entry.running.is_none() {
            return Ok(());
        }
        answer(self.workers.get(index)?.enable(index, enabled))
    }

    /// Drains and stops a vring. Returns its position, also if it never ran (vhost-user "GET_VRING_BASE").
    pub(crate) fn stop_vring(&mut self, index: u64) -> Result<(u16, u16), MessageRefusal> {
        let (index, entry) = self.vrings.get(index)?;
        let was_running = entry.running.is_some();
        self.stop_some(|other| other == index, self.moves())?;
        let (_, entry) = self.vrings.get(index.into())?;
        // A position would claim that nothing is in flight.
        if entry.settings.has_left {
            if was_running && self.moves() {
                self.settle_unlocked()?;
            }
            return Err(MessageRefusal::connection(format!(
                "vring {index} was stopped while requests are held: no position says where it continues"
            )));
        }
        let position = entry.settings.position;
        if was_running {
            self.after_stop()?;
        }
        Ok((index, position))
    }

    /// Stops all vrings.
    pub(crate) fn stop_all(&mut self) -> Result<(), MessageRefusal> {
        if !self.vrings.any_running() {
            return Ok(());
        }
        self.stop_some(|_| true, self.moves())?;
        self.after_stop()
    }

    /// Stops all vrings and keeps the disk. Stalled requests are left behind.
    pub(crate) fn drain(&mut self) -> Result<(), MessageRefusal> {
        self.stop_some(|_| true, false)
    }

    /// Returns true if a vring that stops now may start on another host.
    fn moves(&self) -> bool {
        self.is_leaving || self.is_logged()
    }

    /// Stops these vrings. All are asked before the first is waited for, so that they drain in parallel. `finishes`: stalled requests
    /// end first. One counts as running until it has stopped, so that a session that ends before stops it once more.
    fn stop_some(
        &mut self,
        is_meant: impl Fn(u16) -> bool,
        finishes: bool,
    ) -> Result<(), MessageRefusal> {
        let mut answers = Vec::new();
        let vrings = self.vrings.iter_mut().filter(|(index, _)| is_meant(*index));
        for (index, entry) in vrings {
            entry.settings.kick = Kick::Unset;
            entry.kick = Kick::Unset;
            if entry.running.is_none() {
                continue;
            }
            let worker = self.workers.get(index)?;
            let pending = match finishes {
                true => worker.finish(index, self.claimant.bell()),
                false => worker.stop(index),
            };
            answers.push((index, pending));
        }
        for (index, pending) in answers {
            let stopped = match finishes {
                true => self.await_stop(pending)?,
                false => answer(pending)?,
            };
            let (_, entry) = self.vrings.get(index.into())?;
            entry.running = None;
            entry.settings.stopped(stopped);
        }
        Ok(())
    }

    /// Starts a vring once all its settings are known. The messages arrive in any order.
    fn start_if_complete(&mut self, index: u16) -> Result<(), MessageRefusal> {
        let (_, entry) = self.vrings.get(u64::from(index))?;
        let Some((size, addrs)) = entry.settings.complete() else {
            return Ok(());
        };
        let features = self.features.unwrap_or(0);
        if features & feature::VERSION_1 == 0 {
            return Err(MessageRefusal::message(format!(
                "vring {index} cannot start: the driver did not take VIRTIO_F_VERSION_1"
            )));
        }
        self.start(index, size, addrs, features)
    }

    fn start(
        &mut self,
        index: u16,
        size: u16,
        addrs: UserAddrs,
        features: u64,
    ) -> Result<(), MessageRefusal> {
        let starts_enabled = self.starts_enabled();
        let (_, entry) = self.vrings.get(u64::from(index))?;
        let settings = &mut entry.settings;
        let found = addrs.layout(size, &self.memory).and_then(|layout| {
            let checked = layout.check(&self.memory);
            checked.map(|()| layout).map_err(|error| error.to_string())
        });
        let cannot = |why| MessageRefusal::Vring(format!("vring {index} cannot start: {why}"));
        let layout = match found {
            Ok(layout) => layout,
            Err(why) => {
                let err = copy_of(settings.err.as_ref())?;
                err.into_iter().for_each(|err| signal(&self.offload, err));
                return Err(cannot(why));
            }
        };
        let journal = match &self.inflight {
            None => None,
            Some(region) => Some(
                region
                    .journal(index)
                    .ok_or_else(|| cannot("the in-flight region has no part for it".to_owned()))?,
            ),
        };
        let is_recorded = journal
            .as_ref()
            .is_some_and(|journal| journal.has_room_for(size));
        let call = copy_of(settings.call.as_ref())?;
        let err = copy_of(settings.err.as_ref())?;
        let kick = settings
            .kick
            .try_clone()
            .map_err(|error| MessageRefusal::not_copied(&error))?;
        // Last, because a session that owns the disk must have a vring.
        self.own()?;
        self.workers.start(index, &self.device, &self.memory)?;
        self.flush_cache()?;
        let worker = self.workers.get(index)?;
        let (_, entry) = self.vrings.get(u64::from(index))?;
        let settings = &mut entry.settings;
        let started = worker.start(VringStart {
            index,
            layout,
            base: settings.base,
            journal,
            log: self.log.of_vring(addrs),
            features,
            kick: std::mem::take(&mut settings.kick).into_fd(),
            call,
            err,
            enabled: settings.enabled || starts_enabled,
        });
        settings.has_left = false;
        // The guest runs, so nobody waits for its state any more.
        self.transfer = None;
        entry.kick = kick;
        (entry.running, entry.is_recorded) = (Some(layout), is_recorded);
        answer(started)?.map_err(|error| cannot(error.to_string()))
    }

    fn settings(&mut self, index: u16, change: impl FnOnce(&mut crate::vrings::VringSettings)) {
        if let Ok((_, entry)) = self.vrings.get(u64::from(index)) {
            change(&mut entry.settings);
        }
    }
}

/// The dirty log.
impl SessionState {
    /// Puts a log in force. Returns when no vring writes to the one before it any more.
    pub(crate) fn set_log(
        &mut self,
        file: File,
        file_offset: u64,
        len_bytes: u64,
    ) -> Result<(), MessageRefusal> {
        let was_logged = self.is_logged();
        let log = &mut self.log;
        let before = log.replace(file, file_offset, len_bytes, &self.memory, self.allowance)?;
        if self.is_logged() && !was_logged {
            self.begin_move()?;
        }
        self.mark_in_log()?;
        before.check_kept()
    }

    /// Has the running vrings mark what the log and the features say. They are asked before the first is waited for.
    pub(crate) fn mark_in_log(&mut self) -> Result<(), MessageRefusal> {
        let mut answers = Vec::new();
        for (index, entry) in self.vrings.iter_mut() {
            if let (Some(_), Some(addrs)) = (entry.running, entry.settings.addrs) {
                let log = self.log.of_vring(addrs);
                answers.push(self.workers.get(index)?.set_log(index, log));
            }
        }
        answers.into_iter().try_for_each(answer)
    }
}

fn copy_of(fd: Option<&OwnedFd>) -> Result<Option<OwnedFd>, MessageRefusal> {
    fd.map(OwnedFd::try_clone)
        .transpose()
        .map_err(|error| MessageRefusal::not_copied(&error))
}
