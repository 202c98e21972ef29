//! A daemon that is killed, and the way to its successor.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cleave_client::message::protocol;
use cleave_client::{DeviceOptions, Error};

use crate::TIMEOUT;

/// A daemon that only SIGKILL may end.
#[derive(Debug)]
pub struct Killed(pub Child);

impl Killed {
    /// Starts it.
    pub fn start(command: &mut Command) -> Killed {
        Killed(command.stdin(Stdio::null()).spawn().unwrap())
    }

    /// Kills it. It must have run until now.
    pub fn kill(&mut self) {
        if let Some(status) = self.0.try_wait().unwrap() {
            panic!("the daemon exited by itself: {status}");
        }
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Retries until the daemon listens.
pub fn connect<T>(mut attempt: impl FnMut() -> Result<T, Error>) -> T {
    let end = Instant::now() + TIMEOUT;
    loop {
        match attempt() {
            Ok(connected) => return connected,
            // A dead daemon's socket takes connections until the kernel has closed it.
            Err(Error::Io { .. } | Error::Closed) if Instant::now() < end => {
                std::thread::sleep(Duration::from_micros(200));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A guest whose requests outlive the daemon.
pub fn outliving() -> DeviceOptions {
    DeviceOptions {
        queues: 1,
        queue_size: 256,
        data_bytes: 16 << 20,
        timeout: TIMEOUT,
        protocol_features: protocol::INFLIGHT_SHMFD | DeviceOptions::default().protocol_features,
        ..DeviceOptions::default()
    }
}
