//! The workers of a session. Each is started when a vring first needs it, and kept until the session ends or gives the
//! disk up.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use cleave_guest::Memory;
use cleave_worker::{Device, Handle, Pending};

use crate::MessageRefusal;

#[derive(Debug)]
pub(crate) struct Workers {
    /// Vring `i` is served by `handles[i % handles.len()]`.
    handles: Vec<Option<Handle>>,
    /// Written by a worker that cannot continue or has retired a vring.
    alarm: Arc<OwnedFd>,
}

impl Workers {
    pub(crate) fn new(workers_max: u16, alarm: Arc<OwnedFd>) -> Workers {
        Workers {
            handles: (0..workers_max.max(1)).map(|_| None).collect(),
            alarm,
        }
    }

    fn place(&self, vring: u16) -> usize {
        usize::from(vring) % self.handles.len().max(1)
    }

    /// Returns the worker of a running vring.
    pub(crate) fn get(&self, vring: u16) -> Result<&Handle, MessageRefusal> {
        let handle = self.handles.get(self.place(vring));
        let handle = handle.and_then(Option::as_ref);
        handle.ok_or_else(MessageRefusal::worker_gone)
    }

    /// Returns the worker of a vring. It is started with `memory` if it does not run yet.
    pub(crate) fn start(
        &mut self,
        vring: u16,
        device: &Arc<Device>,
        memory: &Arc<Memory>,
    ) -> Result<&Handle, MessageRefusal> {
        let place = self.place(vring);
        let cpus = &device.config.cpus;
        let alarm = self.alarm.clone();
        let slot = self
            .handles
            .get_mut(place)
            .ok_or_else(MessageRefusal::worker_gone)?;
        if let Some(handle) = slot {
            return Ok(handle);
        }
        let cpu = place
            .checked_rem(cpus.len())
            .and_then(|at| cpus.get(at))
            .copied();
        let handle =
            Handle::spawn(place, cpu, device.clone(), memory.clone(), alarm).map_err(|error| {
                MessageRefusal::lost(format!("no worker for vring {vring}: {error}"))
            })?;
        Ok(slot.insert(handle))
    }

    /// Returns true if there is a worker.
    pub(crate) fn have_started(&self) -> bool {
        self.handles.iter().any(Option::is_some)
    }

    /// Returns true if a worker has failed.
    pub(crate) fn have_failed(&self) -> bool {
        self.handles.iter().flatten().any(Handle::has_ended)
    }

    /// Ends all workers. They serve no vring.
    pub(crate) fn end(&mut self) {
        self.handles.iter_mut().for_each(|handle| *handle = None);
    }

    /// Puts a memory table in force in all workers. Returns when all of them take requests in it.
    pub(crate) fn bind(&self, memory: &Arc<Memory>) -> Result<(), MessageRefusal> {
        self.all(|worker| worker.bind(memory.clone()))
    }

    /// Returns when each worker has ended its current lap and published the completions of that lap.
    pub(crate) fn pass(&self) -> Result<(), MessageRefusal> {
        self.all(|worker| worker.pass())
    }

    /// Sends a command to all workers, then waits for all answers.
    fn all(&self, ask: impl Fn(&Handle) -> Pending<()>) -> Result<(), MessageRefusal> {
        let workers = self.handles.iter().flatten();
        let answers: Vec<_> = workers.map(ask).collect();
        answers.into_iter().try_for_each(answer)
    }
}

/// Waits for a worker's answer.
pub(crate) fn answer<T>(pending: Pending<T>) -> Result<T, MessageRefusal> {
    pending.wait().ok_or_else(MessageRefusal::worker_gone)
}
