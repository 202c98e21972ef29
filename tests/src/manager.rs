//! A service manager with a store of descriptors, as systemd is one (sd_notify(3), FDSTORE=1; sd_listen_fds(3)).

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt as _, FdMapping};
use rustix::io::ioctl_fionread;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recv, recvmsg};

use crate::{Killed, Scratch, TIMEOUT, program_path, wait_until};

/// Pause between two looks at a service.
const PAUSE: Duration = Duration::from_micros(100);

/// How the names of sessions begin that are kept for the case that the service is killed.
const SESSION: &str = "cleave-session-";

/// A manager and what it keeps.
pub struct ServiceManager {
    messages: UnixDatagram,
    address: PathBuf,
    log: PathBuf,
    /// Where its files never wait for a disk: a service that ends waits two seconds for its last lines to be written.
    _place: Scratch,
    /// The program that it starts.
    pub program: PathBuf,
    /// Shell commands before a service is started, such as `ulimit -n 64`.
    pub prelude: String,
    /// The main process, if one has named another.
    pub main_pid: Option<u32>,
    /// Descriptors that a service has stored, with their names.
    pub kept: Vec<(String, OwnedFd)>,
}

impl ServiceManager {
    /// Makes one that keeps nothing yet.
    pub fn empty() -> ServiceManager {
        let place = Scratch::in_memory();
        let address = place.join("notify");
        let messages = UnixDatagram::bind(&address).unwrap();
        messages.set_read_timeout(Some(TIMEOUT)).unwrap();
        ServiceManager {
            messages,
            address,
            log: place.join("journal"),
            _place: place,
            program: program_path().to_owned(),
            prelude: ":".to_owned(),
            main_pid: None,
            kept: Vec::new(),
        }
    }

    /// Returns how many descriptors are kept, apart from those for the case that the service is killed.
    pub fn disks(&self) -> usize {
        let is_disk = |(name, _): &&(String, OwnedFd)| !name.starts_with(SESSION);
        self.kept.iter().filter(is_disk).count()
    }

    /// Waits until one session is kept for the case that the service is killed, and nothing else. It is not while it handles a
    /// message, so its frontend has to have the answer to its last one.
    pub fn keeps_one(&mut self) -> bool {
        wait_until(|| {
            self.settle();
            matches!(&self.kept[..], [(name, parcel)] if name.starts_with(SESSION) && is_whole(parcel))
        })
    }

    /// Returns how many sessions are kept for the case that this process is killed.
    pub fn sessions_of(&mut self, pid: u32) -> usize {
        self.settle();
        let name = format!("{SESSION}{pid}-");
        let is_its =
            |(kept, parcel): &&(String, OwnedFd)| kept.starts_with(&name) && is_whole(parcel);
        self.kept.iter().filter(is_its).count()
    }

    /// Fills its queue, as if it were busy: a service that does not wait cannot send it anything until it settles.
    pub fn fill(&self) {
        let sent = || {
            let sender = UnixDatagram::unbound().unwrap();
            sender.set_nonblocking(true).unwrap();
            let send = || sender.send_to(b"STATUS=busy", &self.address);
            std::iter::repeat_with(send)
                .take_while(Result::is_ok)
                .count()
        };
        // A sender may reach its own limit first.
        while sent() > 0 {}
    }

    /// Starts `cleave ARGS` with what is kept.
    pub fn start<A: AsRef<OsStr>>(&self, args: &[A]) -> Killed {
        let log = File::options().create(true).append(true).open(&self.log);
        let mut command = Command::new("sh");
        let line = format!("{}; export LISTEN_PID=$$; exec \"$@\"", self.prelude);
        command
            .args(["-c", &line, "sh"])
            .arg(&self.program)
            .args(args)
            .stderr(log.unwrap())
            .env("NOTIFY_SOCKET", &self.address)
            .env("FDSTORE", "128");
        if !self.kept.is_empty() {
            let names: Vec<_> = self.kept.iter().map(|(name, _)| name.as_str()).collect();
            command
                .env("LISTEN_FDS", self.kept.len().to_string())
                .env("LISTEN_FDNAMES", names.join(":"));
        }
        let mappings = (3..)
            .zip(&self.kept)
            .map(|(child_fd, (_, kept))| FdMapping {
                parent_fd: kept.try_clone().unwrap(),
                child_fd,
            });
        command.fd_mappings(mappings.collect()).unwrap();
        Killed(command.stdin(Stdio::null()).spawn().unwrap())
    }

    /// The log of all processes.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Handles messages until the service has exited, and those that are left.
    pub fn awaits(&mut self, service: &mut Killed) -> ExitStatus {
        let begun = Instant::now();
        loop {
            let exited = service.0.try_wait().unwrap();
            self.settle();
            match exited {
                Some(status) => return status,
                None => thread::sleep(PAUSE),
            }
            // Some have a minute to end.
            let took = begun.elapsed();
            assert!(took < TIMEOUT, "it does not end: {}", self.log());
        }
    }

    /// Handles messages until one says this.
    pub fn hears(&mut self, line: &str) {
        while !self
            .receive(RecvFlags::empty())
            .expect("a message")
            .lines()
            .any(|one| one == line)
        {}
    }

    /// Handles the messages that have come.
    pub fn settle(&mut self) {
        while self.receive(RecvFlags::DONTWAIT).is_some() {}
    }

    /// Handles a message.
    fn receive(&mut self, flags: RecvFlags) -> Option<String> {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut pieces = [IoSliceMut::new(&mut bytes)];
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.messages, &mut pieces, &mut control, flags).ok()?;
        let text = String::from_utf8(bytes[..received.bytes].to_vec()).unwrap();
        let says = |wanted: &str| text.lines().any(|line| line == wanted);
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
        let main = text.lines().find_map(|line| line.strip_prefix("MAINPID="));
        self.main_pid = main.map(|pid| pid.parse().unwrap()).or(self.main_pid);
        if says("FDSTORE=1") {
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    let name = name.unwrap_or("stored");
                    self.kept.extend(fds.map(|fd| (name.to_owned(), fd)));
                }
            }
        }
        if says("FDSTOREREMOVE=1") {
            self.kept.retain(|(kept, _)| Some(&**kept) != name);
        }
        Some(text)
    }
}

/// Returns true if a parcel waits in this socket: its kind, its length and the number of its descriptors, as much text, and a byte
/// with the descriptors, of which a session has fewer than go with one.
fn is_whole(parcel: &OwnedFd) -> bool {
    let mut header = [[0; 4]; 3];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let read = recv(parcel, header.as_flattened_mut(), flags);
    let [_, length, _] = header.map(|number| u64::from(u32::from_le_bytes(number)));
    read.is_ok_and(|(_, bytes)| bytes == 12) && ioctl_fionread(parcel).unwrap() == 12 + length + 1
}

impl Drop for ServiceManager {
    fn drop(&mut self) {
        if thread::panicking() {
            let log = self.log();
            let from = log.len().saturating_sub(60000);
            println!(
                "--- end of the log ---\n{}",
                &log[log.ceil_char_boundary(from)..]
            );
        }
    }
}
