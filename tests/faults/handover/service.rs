//! A service under a manager that keeps descriptors.

use std::path::PathBuf;
use std::time::Duration;

use cleave_client::{Client, DeviceOptions};
use cleave_tests::{Killed, Scratch, ServiceManager, connect, has_listener, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// Between two looks at processes.
const PAUSE: Duration = Duration::from_micros(100);

/// Sends SIGTERM.
pub(super) fn terminate(daemon: &mut Killed) {
    let pid = Pid::from_raw(daemon.0.id().cast_signed()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
}

/// A daemon with its manager, and its arguments.
pub(super) struct Service {
    pub(super) daemon: Killed,
    pub(super) manager: ServiceManager,
    pub(super) args: Vec<String>,
    pub(super) scratch: Scratch,
}

impl Service {
    /// Starts `cleave node`, with one pool.
    pub(super) fn node() -> Service {
        Service::node_in(Scratch::new())
    }

    /// Starts it with its files in this folder.
    pub(super) fn node_in(scratch: Scratch) -> Service {
        let [state, run] = ["state", "run"].map(|name| scratch.join(name).display().to_string());
        let args = [
            "node", "--state", &state, "--run", &run, "--pool", "shared=0",
        ];
        let args = args.map(str::to_owned).to_vec();
        let manager = ServiceManager::empty();
        let node = Service {
            daemon: manager.start(&args),
            manager,
            args,
            scratch,
        };
        assert!(wait_until(|| has_listener(&node.control())));
        node
    }

    /// Starts `cleave serve` with a disk.
    pub(super) fn serve(disk: &str, options: &[&str]) -> Service {
        Service::serve_in(Scratch::new(), disk, options)
    }

    /// Starts it with its sockets in this folder.
    pub(super) fn serve_in(scratch: Scratch, disk: &str, options: &[&str]) -> Service {
        let paths = ["socket", "run/control.sock"].map(|name| scratch.join(name));
        std::fs::create_dir(scratch.join("run")).unwrap();
        let [socket, control] = paths.map(|path| path.display().to_string());
        let args = [
            "serve",
            "--socket-path",
            &socket,
            "--control",
            &control,
            "--disk",
            disk,
        ];
        // A write or a flush may take seconds where other tests fill the disk.
        let patient: &[&str] = match options.contains(&"--stop-deadline") {
            true => &[],
            false => &["--stop-deadline", "60"],
        };
        let args: Vec<String> = [&args[..], options, patient]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .collect();
        let mut manager = ServiceManager::empty();
        let daemon = manager.start(&args);
        manager.hears("READY=1");
        Service {
            daemon,
            manager,
            args,
            scratch,
        }
    }

    /// The control socket.
    pub(super) fn control(&self) -> PathBuf {
        self.scratch.join("run/control.sock")
    }

    /// The socket of the frontends of `cleave serve`.
    pub(super) fn socket(&self) -> PathBuf {
        self.scratch.join("socket")
    }

    /// Connects to it.
    pub(super) fn open(&self, options: &DeviceOptions) -> Client {
        connect(|| Client::open(&self.socket(), options))
    }

    /// Ends it.
    pub(super) fn stop(&mut self) {
        terminate(&mut self.daemon);
        assert_eq!(self.manager.awaits(&mut self.daemon).code(), Some(0));
    }

    /// Starts the next one, and waits until it has taken what it was left.
    pub(super) fn start_again(&mut self) {
        self.daemon = self.manager.start(&self.args);
        self.manager.hears("READY=1");
        self.manager.settle();
        assert_eq!(self.manager.disks(), 0, "a connection outlives it");
    }

    /// Starts one that takes over from the one that runs, and waits until it has.
    pub(super) fn take_over(&mut self) {
        let mut next = self.start_taking();
        while self.daemon.0.try_wait().unwrap().is_none() {
            self.manager.settle();
            // A disk that takes longer than a guest may wait stays, and is asked for again.
            if next.0.try_wait().unwrap().is_some() {
                next = self.start_taking();
            }
            std::thread::sleep(PAUSE);
        }
        let mut before = std::mem::replace(&mut self.daemon, next);
        assert_eq!(self.manager.awaits(&mut before).code(), Some(0));
        assert_eq!(self.manager.main_pid, Some(self.daemon.0.id()));
    }

    /// Starts one that takes over from the one that runs.
    pub(super) fn start_taking(&mut self) -> Killed {
        self.manager
            .start(&[&self.args[..], &["--take-over".to_owned()]].concat())
    }

    /// Starts one that is to take over and must not. It ends with code 1, because a restart would not help: code 3 is for obstacles that
    /// last. Returns what it says.
    pub(super) fn is_refused(&mut self) -> String {
        let told = self.manager.log().len();
        let mut next = self.start_taking();
        let code = self.manager.awaits(&mut next).code();
        let said = self.manager.log()[told..].to_owned();
        assert_eq!(code, Some(1), "{said}");
        said
    }

    /// Ends it and starts the next one.
    pub(super) fn restart(&mut self) {
        self.stop();
        self.start_again();
    }
}
