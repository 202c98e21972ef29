//! Control's side of a worker.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use cleave_engine::EngineError;
use cleave_guest::{Memory, Vring};

use crate::Device;

/// A vring handed to a worker.
#[derive(Debug)]
pub struct VringStart {
    /// Index in the device.
    pub index: u16,
    /// The ring, bound to the memory that the worker has.
    pub vring: Vring,
    /// Feature bits that the guest acknowledged.
    pub features: u64,
    /// Kick; `None`: the guest is polled.
    pub kick: Option<OwnedFd>,
    /// Call; `None`: the guest polls. Written once when the vring starts.
    pub call: Option<OwnedFd>,
    /// Written when the vring is retired.
    pub err: Option<OwnedFd>,
    /// Disabled vrings are kept and not served.
    pub enabled: bool,
}

/// Why a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// No engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// No thread.
    #[error("cannot start a worker thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// The answer to a command, once it is carried out.
#[derive(Debug)]
pub struct Pending<T>(Receiver<T>);

impl<T> Pending<T> {
    /// Waits for it; `None` when the worker is gone.
    pub fn wait(self) -> Option<T> {
        self.0.recv().ok()
    }

    /// Waits for it at most so long; `Err(self)` to wait on, `Ok(None)` when the worker is gone.
    pub fn wait_for(self, time: Duration) -> Result<Option<T>, Pending<T>> {
        let _ = time;
        todo!()
    }
}

/// A running worker. Dropping it drains what is in flight, then ends the thread.
#[derive(Debug)]
pub struct Handle {}

impl Handle {
    /// Starts a worker thread and makes its engine there. `alarm` (an eventfd) is written when the
    /// worker cannot go on: guest memory was lost, or the worker itself failed.
    pub fn spawn(
        name: String,
        cpu: Option<usize>,
        device: Arc<Device>,
        memory: Arc<Memory>,
        alarm: Arc<OwnedFd>,
    ) -> Result<Handle, SpawnError> {
        let _ = (name, cpu, device, memory, alarm);
        todo!()
    }

    /// Hands a vring over; answered when it is served.
    pub fn start(&self, start: VringStart) -> Pending<()> {
        let _ = start;
        todo!()
    }

    /// Drains a vring and takes it back; answers its position when nothing of it is in flight
    /// (`None`: no such vring).
    pub fn stop(&self, index: u16) -> Pending<Option<u16>> {
        let _ = index;
        todo!()
    }

    /// Serves or keeps a vring; answered when the worker has seen it, and looked at the ring once.
    pub fn enable(&self, index: u16, enabled: bool) -> Pending<()> {
        let _ = (index, enabled);
        todo!()
    }

    /// Changes the kick of a running vring.
    pub fn set_kick(&self, index: u16, kick: Option<OwnedFd>) -> Pending<()> {
        let _ = (index, kick);
        todo!()
    }

    /// Changes the call of a running vring, and writes it once.
    pub fn set_call(&self, index: u16, call: Option<OwnedFd>) -> Pending<()> {
        let _ = (index, call);
        todo!()
    }

    /// Changes the err descriptor of a running vring.
    pub fn set_err(&self, index: u16, err: Option<OwnedFd>) -> Pending<()> {
        let _ = (index, err);
        todo!()
    }

    /// A new memory table: live at once, answered when no op refers to the old one. A vring that the
    /// new table does not cover is retired.
    pub fn bind(&self, memory: Arc<Memory>) -> Pending<()> {
        let _ = memory;
        todo!()
    }
}
