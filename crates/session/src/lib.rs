//! One vhost-user connection: features, memory table, vring life cycle, configuration, backend
//! channel. This crate forbids data-path calls, tokio and unsafe code.
#![forbid(unsafe_code)]

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use cleave_worker::Device;

/// How a device is offered.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// Most vrings offered.
    pub vrings_max: u16,
    /// Largest vring size accepted.
    pub vring_size_max: u16,
    /// Most workers; vring `i` goes to worker `i % workers_max`.
    pub workers_max: u16,
}

/// How a session ended.
#[derive(Debug)]
pub enum Ending {
    /// The frontend went, or `Remote::hang_up` was called.
    HungUp,
    /// The frontend broke the protocol: what it did.
    Refused(String),
    /// Guest memory was cut, or a worker failed.
    Lost(String),
}

/// A connection to one frontend; `run` serves it on the calling thread.
#[derive(Debug)]
pub struct Session {}

/// Reaches into a running session from another thread.
#[derive(Debug, Clone)]
pub struct Remote {}

impl Session {
    /// Takes a connected socket (blocking or not).
    pub fn new(
        stream: UnixStream,
        device: Arc<Device>,
        config: SessionConfig,
    ) -> io::Result<(Session, Remote)> {
        let _ = (stream, device, config);
        todo!()
    }

    /// Serves until the frontend goes, then drains all vrings and lets go of everything.
    pub fn run(self) -> Ending {
        todo!()
    }
}

impl Remote {
    /// Ends the session: `run` drains and returns.
    pub fn hang_up(&self) {
        todo!()
    }

    /// Tells the guest that the configuration (its size) changed, where the frontend gave a backend
    /// channel and the device is not suspended; never waits for an answer.
    pub fn config_changed(&self) {
        todo!()
    }
}
