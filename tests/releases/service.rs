//! A disk that one program serves after the other.

use std::path::PathBuf;

use cleave_client::{Base, Client, DeviceOptions};
use cleave_tests::{
    Killed, SURVIVOR_DISK_BYTES, Scratch, ServiceManager, TIMEOUT, closes_within, connect,
    earlier_program, has_listener, outliving, program_path, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};

/// Longest time in which a guest works before its daemon ends.
pub(super) const LIFE_MAX_US: u64 = 20_000;

/// A program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Release {
    Earlier,
    This,
}

/// A service with its manager.
pub(super) struct Service {
    pub(super) manager: ServiceManager,
    pub(super) socket: PathBuf,
    args: Vec<String>,
    daemon: Option<Killed>,
    _scratch: Scratch,
}

impl Service {
    /// Makes a disk of zeroes. Nothing serves it yet.
    pub(super) fn new() -> Service {
        let scratch = Scratch::new();
        let image = scratch.image("disk", SURVIVOR_DISK_BYTES);
        let socket = scratch.join("socket");
        let [at, disk] = [&socket, &image].map(|path| path.display().to_string());
        let args = [
            "serve",
            "--socket-path",
            &at,
            "--disk",
            &disk,
            "--queues",
            "4",
            "--stop-deadline",
            "60",
        ];
        Service {
            manager: ServiceManager::empty(),
            socket,
            args: args.map(str::to_owned).to_vec(),
            daemon: None,
            _scratch: scratch,
        }
    }

    /// Starts a program with what the manager keeps.
    pub(super) fn start(&mut self, release: Release) {
        self.manager.program = match release {
            Release::Earlier => earlier_program().unwrap(),
            Release::This => program_path().to_owned(),
        };
        self.daemon = Some(self.manager.start(&self.args));
    }

    /// Waits until it listens.
    pub(super) fn is_up(&mut self) {
        assert!(wait_until(|| has_listener(&self.socket)));
        self.manager.settle();
    }

    /// Ends the process with SIGTERM. The manager keeps what it leaves, for the next one.
    pub(super) fn terminate(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        let pid = Pid::from_raw(daemon.0.id().cast_signed()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        assert_eq!(self.manager.awaits(&mut daemon).code(), Some(0));
    }

    /// Kills the process. The manager keeps what it had left.
    pub(super) fn kill(&mut self) {
        self.daemon.take().unwrap().kill();
        self.manager.settle();
    }

    /// Waits until the process has exited by itself, and returns its code. `None`: it has taken the frontend over.
    pub(super) fn refuses(&mut self) -> Option<i32> {
        let daemon = self.daemon.as_mut().unwrap();
        let mut exited = None;
        wait_until(|| {
            exited = daemon.0.try_wait().unwrap();
            exited.is_some() || self.manager.log().contains("was taken over")
        });
        let code = exited?.code();
        self.daemon = None;
        Some(code.unwrap())
    }

    /// Opens the disk as a VMM that connects again, and keeps the list of its requests in flight.
    pub(super) fn open(&self, options: &DeviceOptions) -> Client {
        connect(|| Client::open(&self.socket, options))
    }

    /// Has the frontend connect again, unless a daemon serves its connection. Returns true if it had to.
    pub(super) fn follow(&self, client: &mut Client, options: &DeviceOptions, base: Base) -> bool {
        let is_served = client.frontend().features().is_ok();
        if !is_served {
            connect(|| client.reconnect(&self.socket, options, base));
        }
        !is_served
    }

    /// Ends the service as `systemctl stop` does: the manager closes what it keeps, and the frontend notices.
    pub(super) fn stop(&mut self, client: &mut Client) {
        self.terminate();
        self.forget(client);
    }

    /// Has the manager close what it keeps, as for a service that has failed.
    pub(super) fn forget(&mut self, client: &mut Client) {
        self.manager.kept.clear();
        assert!(closes_within(client.frontend().socket(), TIMEOUT));
    }
}

/// Options of the guest's device.
pub(super) fn device(queues: u16, queue_size: u16) -> DeviceOptions {
    DeviceOptions {
        queues,
        queue_size,
        ..outliving()
    }
}
