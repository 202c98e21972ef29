//! Sessions driven over a socket with hand-made messages: all that a frontend can write, including what no
//! frontend library would.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use cleave_disk::{Direct, Disk, DiskSpec, OpenOptions};
use cleave_worker::{CompletionPolicy, Split, Tuning, WorkerConfig};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost::vhost_user::message::FrontendReq as Req;

use super::*;
use cleave_blk::Face;
use cleave_blk::spec::feature;

mod cache;
mod dirty;
mod features;
mod handover;
mod inflight;
mod memory;
mod messages;
mod owner;
mod portable;
mod possession;
mod running;
mod storm;
mod vrings;

const MEM_BYTES: u64 = 1 << 20;
/// The frontend's own address of the memory. Guest addresses begin at 0.
const USER: u64 = 0x7f00_0000_0000;
const PROTOCOL: u64 =
    1 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15 | 1 << 16 | 1 << 19;
const FEATURES: u64 = feature::VERSION_1 | feature::CONFIG_WCE | feature::VHOST_USER_PROTOCOL;
const CAPACITY: u64 = 8 << 20;
const CONFIG: SessionConfig = SessionConfig {
    face: Face::V1,
    vrings_max: 4,
    vring_size_max: 256,
    workers_max: 2,
};
/// Maximum wait for an expected event: longer than the machine may stall, and than any wait of a session.
const PATIENCE: Duration = Duration::from_secs(60);

/// Result of a message.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Ack,
    Nack,
    Closed,
}
use Answer::{Ack, Closed, Nack};

struct Frontend {
    stream: UnixStream,
    remote: SessionHandle,
    device: Arc<Device>,
    owners: Arc<Owners>,
    thread: JoinHandle<Ending>,
    memory: File,
}

fn memory_file(bytes: u64) -> File {
    let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd.into()
}

fn bell() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn device() -> Arc<Device> {
    device_of(&DiskSpec::Null(CAPACITY))
}

fn device_of(spec: &DiskSpec) -> Arc<Device> {
    device_on(open(spec))
}

/// A device whose operator chose `--cache writethrough`.
fn write_through() -> Arc<Device> {
    device_with(open(&DiskSpec::Null(CAPACITY)), false)
}

fn open(spec: &DiskSpec) -> Disk {
    let options = OpenOptions {
        direct: Direct::Off,
        ..OpenOptions::default()
    };
    Disk::open(spec, &options).unwrap()
}

fn device_on(disk: Disk) -> Arc<Device> {
    device_with(disk, true)
}

/// `writeback`: what its operator chose.
fn device_with(disk: Disk, writeback: bool) -> Arc<Device> {
    let config = WorkerConfig {
        cpus: Vec::new(),
        ops: 64,
    };
    let tuning = Tuning {
        completion: CompletionPolicy::Interrupt,
        ..Tuning::new(Split::Off)
    };
    Arc::new(Device::new(
        Arc::new(disk),
        [0; 20],
        writeback,
        config,
        tuning,
    ))
}

fn longs(numbers: &[u64]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_ne_bytes())
        .collect()
}

fn words(numbers: &[u32]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_ne_bytes())
        .collect()
}

impl Frontend {
    /// Connects a frontend that has sent nothing.
    fn connect() -> Frontend {
        Frontend::connect_to(device(), Arc::default())
    }

    /// Connects to a device that may have other frontends.
    fn connect_to(device: Arc<Device>, owners: Arc<Owners>) -> Frontend {
        let (stream, theirs) = UnixStream::pair().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let offload = Offload::default();
        let (session, remote) =
            Session::new(theirs, device.clone(), offload, owners.clone(), CONFIG).unwrap();
        Frontend {
            stream,
            remote,
            device,
            owners,
            thread: std::thread::spawn(move || {
                let ending = session.run();
                println!("a session ended: {ending:?}");
                ending
            }),
            memory: memory_file(MEM_BYTES),
        }
    }

    /// Connects a frontend with all protocol features and the usual features acknowledged.
    fn negotiated() -> Frontend {
        Frontend::connect().negotiate()
    }

    fn negotiate(mut self) -> Frontend {
        self.ask_number(Req::GET_FEATURES);
        self.send(Req::SET_PROTOCOL_FEATURES, &longs(&[PROTOCOL]), &[]);
        assert_eq!(self.request(Req::SET_FEATURES, &longs(&[FEATURES])), Ack);
        self
    }

    /// Connects a frontend that has shared one region of memory.
    fn with_memory() -> Frontend {
        Frontend::negotiated().share_memory()
    }

    fn share_memory(mut self) -> Frontend {
        assert_eq!(self.add_memory(0, MEM_BYTES, USER), Ack);
        self
    }

    fn add_memory(&mut self, guest: u64, bytes: u64, user: u64) -> Answer {
        let memory = self.memory.try_clone().unwrap();
        let payload = longs(&[0, guest, bytes, user, 0]);
        self.request_fds(Req::ADD_MEM_REG, &payload, &[memory.as_fd()])
    }

    fn send(&mut self, request: Req, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send_raw(request.into(), 0x1, payload.len() as u32, payload, fds);
    }

    fn send_raw(
        &mut self,
        request: u32,
        flags: u32,
        size: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) {
        let mut bytes = words(&[request, flags, size]);
        bytes.extend_from_slice(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        // Fails if the session has ended, which the answer shows.
        let _ = sendmsg(
            &self.stream,
            &[IoSlice::new(&bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
    }

    /// Receives a reply's request and payload. `None`: the connection has ended.
    fn reply(&mut self) -> Option<(u32, Vec<u8>)> {
        let mut header = [0; 12];
        match self.stream.read_exact(&mut header) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => panic!("no answer"),
            Err(_) => return None,
        }
        assert_eq!(message::word(&header, 4), 0x5, "flags of a reply");
        let mut payload = vec![0; message::word(&header, 8) as usize];
        self.stream.read_exact(&mut payload).unwrap();
        Some((message::word(&header, 0), payload))
    }

    fn answer(&mut self, request: u32) -> Answer {
        match self.reply() {
            None => Closed,
            Some((replied, payload)) => {
                assert_eq!(replied, request);
                assert_eq!(payload.len(), 8);
                if message::long(&payload, 0) == 0 {
                    Ack
                } else {
                    Nack
                }
            }
        }
    }

    /// Sends a message that asks for an acknowledgement.
    fn request(&mut self, request: Req, payload: &[u8]) -> Answer {
        self.request_fds(request, payload, &[])
    }

    fn request_fds(&mut self, request: Req, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Answer {
        self.send_raw(request.into(), 0x9, payload.len() as u32, payload, fds);
        self.answer(request.into())
    }

    fn ask(&mut self, request: Req, payload: &[u8]) -> Option<Vec<u8>> {
        self.send(request, payload, &[]);
        let (replied, payload) = self.reply()?;
        assert_eq!(replied, u32::from(request));
        Some(payload)
    }

    fn ask_number(&mut self, request: Req) -> u64 {
        let payload = self.ask(request, &[]).unwrap();
        assert_eq!(payload.len(), 8);
        message::long(&payload, 0)
    }

    fn is_alive(&mut self) -> bool {
        self.ask(Req::GET_FEATURES, &[]).is_some()
    }

    /// Configures vring `index` with 8 entries and starts it.
    fn start(&mut self, index: u32) -> Answer {
        self.configure(index);
        let kick = bell();
        self.request_fds(
            Req::SET_VRING_KICK,
            &longs(&[index.into()]),
            &[kick.as_fd()],
        )
    }

    fn configure(&mut self, index: u32) {
        assert_eq!(self.request(Req::SET_VRING_NUM, &words(&[index, 8])), Ack);
        assert_eq!(self.request(Req::SET_VRING_BASE, &words(&[index, 0])), Ack);
        assert_eq!(self.request(Req::SET_VRING_ADDR, &addrs(index, 0)), Ack);
    }

    fn base(&mut self, index: u32) -> Option<(u32, u32)> {
        let payload = self.ask(Req::GET_VRING_BASE, &words(&[index, 0]))?;
        Some((message::word(&payload, 0), message::word(&payload, 4)))
    }

    fn config(&mut self, offset: u32, bytes: u32) -> Option<Vec<u8>> {
        let mut payload = words(&[offset, bytes, 0]);
        payload.resize(12 + bytes.min(4096 - 12) as usize, 0);
        self.ask(Req::GET_CONFIG, &payload)
    }

    /// Sends requests without reading, until the session waits for room for its answers.
    fn ask_until_full(&mut self) {
        self.stream.set_nonblocking(true).unwrap();
        let asks = words(&[1, 1, 0]).repeat(100);
        let (mut at, mut last) = (0, Instant::now());
        while last.elapsed() < Duration::from_millis(200) {
            match self.stream.write(&asks[at..]) {
                Ok(count) => (at, last) = ((at + count) % asks.len(), Instant::now()),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn end(self) -> Ending {
        drop(self.stream);
        self.thread.join().unwrap()
    }
}

/// Returns the payload of SET_VRING_ADDR for a ring at `index` times 16 KiB, moved by `shift`.
fn addrs(index: u32, shift: u64) -> Vec<u8> {
    let at = USER + u64::from(index) * 0x4000 + shift;
    let mut payload = words(&[index, 0]);
    payload.extend(longs(&[at, at + 0x1000, at + 0x2000, 0]));
    payload
}

/// Runs a test again in its own process, where no other test opens descriptors meanwhile. Returns `true` in
/// that process.
fn in_a_process_of_its_own(name: &str) -> bool {
    const MARK: &str = "CLEAVE_ALONE";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let test = std::env::current_exe().unwrap();
    let status = std::process::Command::new(test)
        .args(["--exact", &format!("tests::{name}"), "--nocapture"])
        .env(MARK, "1")
        .status()
        .unwrap();
    assert!(status.success());
    false
}

/// Returns the number of descriptors that a child of this process would inherit.
fn fds_inherited() -> usize {
    let is_inherited = |info: &String| {
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.map_or(0, |flags| u32::from_str_radix(flags.trim(), 8).unwrap());
        flags & rustix::fs::OFlags::CLOEXEC.bits() == 0
    };
    std::fs::read_dir("/proc/self/fdinfo")
        .unwrap()
        .filter_map(|fd| std::fs::read_to_string(fd.ok()?.path()).ok())
        .filter(is_inherited)
        .count()
}

fn fds_open() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Waits for another thread to close descriptors.
fn fds_settle_at(count: usize) {
    let until = Instant::now() + PATIENCE;
    while fds_open() > count && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(fds_open() <= count);
}

/// Hostile cases 36, 40 and 46: all received descriptors are closed again.
#[test]
fn no_descriptor_is_leaked() {
    if !in_a_process_of_its_own("no_descriptor_is_leaked") {
        return;
    }
    let inherited = fds_inherited();
    let file = memory_file(MEM_BYTES);
    let mut table = words(&[1, 0]);
    table.extend(longs(&[0, MEM_BYTES, USER, 0]));
    let kick = bell();
    let mut frontend = Frontend::with_memory();
    let mut round = || {
        assert_eq!(
            frontend.request_fds(Req::SET_MEM_TABLE, &table, &[file.as_fd()]),
            Ack
        );
        for request in [Req::SET_VRING_KICK, Req::SET_VRING_CALL, Req::SET_VRING_ERR] {
            assert_eq!(
                frontend.request_fds(request, &longs(&[3]), &[kick.as_fd()]),
                Ack
            );
            assert_eq!(
                frontend.request_fds(request, &longs(&[3]), &[file.as_fd()]),
                Nack
            );
            assert_eq!(
                frontend.request_fds(request, &longs(&[9]), &[kick.as_fd()]),
                Nack
            );
        }
        let (channel, _other) = UnixStream::pair().unwrap();
        assert_eq!(
            frontend.request_fds(Req::SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]),
            Ack
        );
        assert_eq!(
            frontend.request_fds(Req::SET_BACKEND_REQ_FD, &[], &[file.as_fd()]),
            Nack
        );
        frontend.send_raw(255, 0x9, 0, &[], &[file.as_fd(); 32]);
        assert_eq!(frontend.answer(255), Nack);
    };
    round();
    assert_eq!(
        fds_inherited(),
        inherited,
        "received descriptors are closed on exec"
    );
    let before = fds_open();
    (0..1000).for_each(|_| round());
    fds_settle_at(before);
    frontend.end();
    let before = fds_open();
    for _ in 0..100 {
        let mut frontend = Frontend::with_memory();
        assert_eq!(
            frontend.request_fds(Req::SET_OWNER, &[], &[file.as_fd(); 32]),
            Closed
        );
        frontend.end();
        let mut frontend = Frontend::with_memory();
        frontend.send_raw(5, 0x1, 40, &[0; 20], &[file.as_fd(); 8]);
        frontend.end();
    }
    fds_settle_at(before);
}
