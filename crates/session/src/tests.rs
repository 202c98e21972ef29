//! Sessions driven over a socket by hand-built messages: whatever a frontend can write, also what no
//! frontend library would.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread::JoinHandle;

use cleave_disk::{Direct, Disk, DiskSpec, OpenOptions};
use cleave_worker::{Completion, WorkerConfig};
use rustix::event::eventfd;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost::vhost_user::message::FrontendReq as Req;

use super::*;
use cleave_blk::spec::feature;

mod running;
mod storm;

const MEM_BYTES: u64 = 1 << 20;
/// Where the frontend claims to have the memory; guest addresses begin at 0.
const USER: u64 = 0x7f00_0000_0000;
const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 13 | 1 << 15 | 1 << 16;
const FEATURES: u64 = feature::VERSION_1 | feature::CONFIG_WCE | feature::VHOST_USER_PROTOCOL;
const CAPACITY: u64 = 8 << 20;

/// What came of a message.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Ack,
    Nack,
    Closed,
}
use Answer::{Ack, Closed, Nack};

struct Frontend {
    stream: UnixStream,
    remote: Remote,
    device: Arc<Device>,
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
    /// Connected, and nothing said.
    fn connect() -> Frontend {
        let options = OpenOptions {
            read_only: false,
            direct: Direct::Off,
            block_bytes: None,
            discard: true,
        };
        let device = Arc::new(Device {
            disk: Arc::new(Disk::open(&DiskSpec::Null(CAPACITY), &options).unwrap()),
            serial: [0; 20],
            writeback: AtomicBool::new(true),
            config: WorkerConfig {
                completion: Completion::Interrupt,
                cpus: Vec::new(),
                ops: 64,
                split: cleave_worker::Split::Off,
            },
            served: cleave_worker::Served::default(),
            learnt: cleave_worker::Learnt::default(),
        });
        let config = SessionConfig {
            vrings_max: 4,
            vring_size_max: 256,
            workers_max: 2,
        };
        let (stream, theirs) = UnixStream::pair().unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let (session, remote) = Session::new(theirs, device.clone(), config).unwrap();
        Frontend {
            stream,
            remote,
            device,
            thread: std::thread::spawn(move || session.run()),
            memory: memory_file(MEM_BYTES),
        }
    }

    /// Connected, all protocol features and the usual features taken.
    fn negotiated() -> Frontend {
        let mut frontend = Frontend::connect();
        frontend.ask_number(Req::GET_FEATURES);
        frontend.send(Req::SET_PROTOCOL_FEATURES, &longs(&[PROTOCOL]), &[]);
        assert_eq!(frontend.tell(Req::SET_FEATURES, &longs(&[FEATURES])), Ack);
        frontend
    }

    /// With one region of memory, too.
    fn with_memory() -> Frontend {
        let mut frontend = Frontend::negotiated();
        assert_eq!(frontend.add_memory(0, MEM_BYTES, USER), Ack);
        frontend
    }

    fn add_memory(&mut self, guest: u64, bytes: u64, user: u64) -> Answer {
        let memory = self.memory.try_clone().unwrap();
        let payload = longs(&[0, guest, bytes, user, 0]);
        self.tell_fds(Req::ADD_MEM_REG, &payload, &[memory.as_fd()])
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
        // The session may have closed already, which the answer shows.
        let _ = sendmsg(
            &self.stream,
            &[IoSlice::new(&bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
    }

    /// A reply's request and payload; `None` where the connection ended.
    fn reply(&mut self) -> Option<(u32, Vec<u8>)> {
        let mut header = [0; 12];
        match self.stream.read_exact(&mut header) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => panic!("no answer"),
            Err(_) => return None,
        }
        assert_eq!(wire::word(&header, 4), 0x5, "flags of a reply");
        let mut payload = vec![0; wire::word(&header, 8) as usize];
        self.stream.read_exact(&mut payload).unwrap();
        Some((wire::word(&header, 0), payload))
    }

    fn answer(&mut self, request: u32) -> Answer {
        match self.reply() {
            None => Closed,
            Some((replied, payload)) => {
                assert_eq!(replied, request);
                assert_eq!(payload.len(), 8);
                if wire::long(&payload, 0) == 0 {
                    Ack
                } else {
                    Nack
                }
            }
        }
    }

    /// Sends a message that asks for an acknowledgement.
    fn tell(&mut self, request: Req, payload: &[u8]) -> Answer {
        self.tell_fds(request, payload, &[])
    }

    fn tell_fds(&mut self, request: Req, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Answer {
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
        wire::long(&payload, 0)
    }

    fn is_alive(&mut self) -> bool {
        self.ask(Req::GET_FEATURES, &[]).is_some()
    }

    /// Lays vring `index` of 8 entries out and starts it.
    fn start(&mut self, index: u32) -> Answer {
        self.configure(index);
        let kick = bell();
        self.tell_fds(
            Req::SET_VRING_KICK,
            &longs(&[index.into()]),
            &[kick.as_fd()],
        )
    }

    fn configure(&mut self, index: u32) {
        assert_eq!(self.tell(Req::SET_VRING_NUM, &words(&[index, 8])), Ack);
        assert_eq!(self.tell(Req::SET_VRING_BASE, &words(&[index, 0])), Ack);
        assert_eq!(self.tell(Req::SET_VRING_ADDR, &addrs(index, 0)), Ack);
    }

    fn base(&mut self, index: u32) -> Option<(u32, u32)> {
        let payload = self.ask(Req::GET_VRING_BASE, &words(&[index, 0]))?;
        Some((wire::word(&payload, 0), wire::word(&payload, 4)))
    }

    fn config(&mut self, offset: u32, bytes: u32) -> Option<Vec<u8>> {
        let mut payload = words(&[offset, bytes, 0]);
        payload.resize(12 + bytes.min(4096 - 12) as usize, 0);
        self.ask(Req::GET_CONFIG, &payload)
    }

    fn end(self) -> Ending {
        drop(self.stream);
        self.thread.join().unwrap()
    }
}

/// SET_VRING_ADDR of a ring at 16 KiB a vring, moved by `shift`.
fn addrs(index: u32, shift: u64) -> Vec<u8> {
    let at = USER + u64::from(index) * 0x4000 + shift;
    let mut payload = words(&[index, 0]);
    payload.extend(longs(&[at, at + 0x1000, at + 0x2000, 0]));
    payload
}

/// Runs a test again in a process of its own, where no other test opens descriptors meanwhile; `true`
/// in that process.
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

/// Descriptors that a program started by this process would get.
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

#[test]
fn the_handshake_works_in_both_orders() {
    for protocol_first in [true, false] {
        let mut frontend = Frontend::connect();
        let offered = frontend.ask_number(Req::GET_FEATURES);
        assert_eq!(offered & FEATURES, FEATURES);
        if !protocol_first {
            frontend.send(Req::SET_FEATURES, &longs(&[FEATURES]), &[]);
        }
        assert_eq!(frontend.ask_number(Req::GET_PROTOCOL_FEATURES), PROTOCOL);
        frontend.send(Req::SET_PROTOCOL_FEATURES, &longs(&[PROTOCOL]), &[]);
        if protocol_first {
            assert_eq!(frontend.tell(Req::SET_FEATURES, &longs(&[FEATURES])), Ack);
        }
        for _ in 0..2 {
            assert_eq!(frontend.tell(Req::SET_OWNER, &[]), Ack);
        }
        assert_eq!(frontend.ask_number(Req::GET_QUEUE_NUM), 4);
        assert_eq!(frontend.ask_number(Req::GET_MAX_MEM_SLOTS), 509);
        assert!(matches!(frontend.end(), Ending::HungUp));
    }
}

/// Hostile case 34.
#[test]
fn features_that_were_not_offered_are_refused() {
    let mut frontend = Frontend::negotiated();
    let rows = [
        (FEATURES, Ack),
        (0, Ack),
        (feature::VHOST_USER_PROTOCOL, Ack),
        (FEATURES & !feature::VERSION_1, Nack),
        (feature::CONFIG_WCE, Nack),
        (FEATURES | 1 << 26, Nack), // LOG_ALL
        (FEATURES | 1 << 34, Nack), // packed
        (u64::MAX, Nack),
    ];
    for (features, answer) in rows {
        assert_eq!(
            frontend.tell(Req::SET_FEATURES, &longs(&[features])),
            answer,
            "{features:#x}"
        );
    }
    // What was refused has changed nothing, also not what the `vhost` crate thinks.
    assert_eq!(frontend.tell(Req::SET_FEATURES, &longs(&[FEATURES])), Ack);
    assert_eq!(frontend.tell(Req::SET_FEATURES, &longs(&[1 << 34])), Nack);
    assert_eq!(frontend.tell(Req::SET_VRING_ENABLE, &words(&[0, 1])), Ack);
    // Without an acknowledgement the frontend could not know.
    frontend.send(Req::SET_FEATURES, &longs(&[u64::MAX]), &[]);
    assert!(!frontend.is_alive());
    assert!(matches!(frontend.end(), Ending::Refused(_)));
}

#[test]
fn protocol_features_that_were_not_offered_end_the_connection() {
    for bit in [1, 2, 4, 8, 12, 14, 18, 19, 20, 22, 40] {
        let mut frontend = Frontend::connect();
        frontend.ask_number(Req::GET_FEATURES);
        frontend.send(
            Req::SET_PROTOCOL_FEATURES,
            &longs(&[PROTOCOL | 1 << bit]),
            &[],
        );
        assert!(!frontend.is_alive(), "{bit}");
    }
}

/// Hostile case 35.
#[test]
fn misshapen_messages_end_the_connection() {
    // (request, flags, size, payload bytes sent)
    let rows = [
        (1, 0x0, 0, 0),
        (1, 0x2, 0, 0),
        (1, 0x5, 0, 0),
        (1, 0x11, 0, 0),
        (1, 0x1, 8, 8),
        (1, 0x1, 4097, 0),
        (1, 0x1, u32::MAX, 0),
        (2, 0x1, 0, 0),
        (2, 0x1, 7, 7),
        (2, 0x1, 9, 9),
        (5, 0x1, 0, 0),
        (5, 0x1, 7, 7),
        (8, 0x1, 4, 4),
        (11, 0x1, 12, 12),
        (12, 0x1, 0, 0),
        (13, 0x1, 16, 16),
        (24, 0x1, 0, 0),
        (24, 0x1, 11, 11),
        (25, 0x1, 11, 11),
        (37, 0x1, 40, 40),
        (38, 0x1, 39, 39),
        (39, 0x1, 4, 4),
        (40, 0x1, 8, 8),
        (0, 0x1, 0, 0),
        (7, 0x1, 8, 8),
        (23, 0x1, 8, 8),
        (31, 0x1, 24, 24),
        (45, 0x1, 0, 0),
        (255, 0x1, 0, 0),
        (1 << 31, 0x1, 0, 0),
        (u32::MAX, 0x1, 0, 0),
    ];
    for (request, flags, size, sent) in rows {
        let mut frontend = Frontend::negotiated();
        frontend.send_raw(request, flags, size, &vec![0; sent], &[]);
        assert_eq!(
            frontend.answer(request),
            Closed,
            "request {request} flags {flags:#x} size {size}"
        );
        assert!(
            matches!(frontend.end(), Ending::Refused(_)),
            "{request} {flags:#x}"
        );
    }
}

#[test]
fn messages_that_are_not_served_are_refused_one_by_one() {
    let mut frontend = Frontend::negotiated();
    for request in [
        0,
        6,
        7,
        19,
        20,
        22,
        23,
        26,
        28,
        31,
        32,
        33,
        35,
        41,
        42,
        43,
        44,
        45,
        255,
        1 << 31,
    ] {
        let file = memory_file(4096);
        for fds in [&[][..], &[file.as_fd()][..]] {
            if !fds.is_empty() && !matches!(request, 0 | 45 | 255 | 0x8000_0000) {
                continue;
            }
            frontend.send_raw(request, 0x9, 24, &[0; 24], fds);
            assert_eq!(frontend.answer(request), Nack, "{request}");
        }
    }
    assert!(frontend.is_alive());
}

/// Hostile case 36.
#[test]
fn descriptors_that_a_message_does_not_take_end_the_connection() {
    let file = memory_file(4096);
    let number = longs(&[0]);
    let region = longs(&[0, 0, MEM_BYTES, USER, 0]);
    // (request, payload, descriptors)
    let rows: [(Req, &[u8], usize); 18] = [
        (Req::GET_FEATURES, &[], 1),
        (Req::SET_FEATURES, &number, 1),
        (Req::SET_OWNER, &[], 8),
        (Req::SET_VRING_NUM, &number, 1),
        (Req::SET_VRING_ENABLE, &number, 253),
        (Req::GET_VRING_BASE, &number, 1),
        (Req::SET_STATUS, &number, 1),
        (Req::GET_STATUS, &[], 1),
        (Req::RESET_DEVICE, &[], 1),
        (Req::ADD_MEM_REG, &region, 0),
        (Req::ADD_MEM_REG, &region, 2),
        (Req::ADD_MEM_REG, &region, 33),
        (Req::ADD_MEM_REG, &region, 253),
        (Req::SET_VRING_KICK, &number, 0),
        (Req::SET_VRING_KICK, &number, 2),
        (Req::SET_VRING_CALL, &number, 253),
        (Req::SET_BACKEND_REQ_FD, &[], 0),
        (Req::SET_BACKEND_REQ_FD, &[], 2),
    ];
    for (request, payload, count) in rows {
        let mut frontend = Frontend::negotiated();
        let fds = vec![file.as_fd(); count];
        assert_eq!(
            frontend.tell_fds(request, payload, &fds),
            Closed,
            "{request:?} with {count}"
        );
        assert!(matches!(frontend.end(), Ending::Refused(_)));
    }
    // Not even a message that nobody knows brings more than can be held, at once or bit by bit.
    let fds = [file.as_fd(); 33];
    for pieces in [1, 3] {
        let mut frontend = Frontend::negotiated();
        for piece in words(&[255, 9, 0]).chunks(12 / pieces) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(33))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(
                &fds[..33usize.div_ceil(pieces)]
            )));
            let bytes = [IoSlice::new(piece)];
            let _ = sendmsg(&frontend.stream, &bytes, &mut control, SendFlags::NOSIGNAL);
        }
        assert_eq!(frontend.answer(255), Closed);
    }
}

/// Hostile case 36: what is no eventfd is refused, and the connection goes on.
#[test]
fn only_eventfds_become_kick_call_and_err() {
    let mut frontend = Frontend::negotiated();
    let null = File::open("/dev/null").unwrap();
    let folder = File::open("/").unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let memory = memory_file(4096);
    let good = bell();
    for request in [Req::SET_VRING_KICK, Req::SET_VRING_CALL, Req::SET_VRING_ERR] {
        for fd in [null.as_fd(), folder.as_fd(), socket.as_fd(), memory.as_fd()] {
            assert_eq!(
                frontend.tell_fds(request, &longs(&[0]), &[fd]),
                Nack,
                "{request:?}"
            );
        }
        assert_eq!(
            frontend.tell_fds(request, &longs(&[0]), &[good.as_fd()]),
            Ack
        );
        assert_eq!(
            frontend.tell(request, &longs(&[0x100])),
            Ack,
            "no descriptor"
        );
    }
    assert!(frontend.is_alive());
}

/// Hostile case 37: all bits of an index count.
#[test]
fn vrings_that_do_not_exist_are_refused() {
    let mut frontend = Frontend::with_memory();
    let fd = bell();
    for index in [4u32, 255, 256, 257, 65536, 65537, u32::MAX] {
        for request in [Req::SET_VRING_NUM, Req::SET_VRING_BASE] {
            assert_eq!(
                frontend.tell(request, &words(&[index, 8])),
                Nack,
                "{request:?} {index}"
            );
        }
        assert_eq!(
            frontend.tell(Req::SET_VRING_ENABLE, &words(&[index, 1])),
            Nack,
            "{index}"
        );
        let mut payload = words(&[index, 0]);
        payload.extend(longs(&[USER, USER + 0x1000, USER + 0x2000, 0]));
        assert_eq!(
            frontend.tell(Req::SET_VRING_ADDR, &payload),
            Nack,
            "{index}"
        );
    }
    for number in [4, 255, 65536, 0x200, 1 << 32, 1 << 63, 0x1_0000_0000_0100] {
        for request in [Req::SET_VRING_KICK, Req::SET_VRING_CALL, Req::SET_VRING_ERR] {
            let answer = frontend.tell_fds(request, &longs(&[number]), &[fd.as_fd()]);
            assert_eq!(answer, Nack, "{request:?} {number:#x}");
        }
    }
    for index in [4u32, 256, 65536, u32::MAX] {
        let mut frontend = Frontend::negotiated();
        assert_eq!(frontend.base(index), None, "{index}");
    }
}

/// Hostile case 38.
#[test]
fn vring_sizes_are_powers_of_two_up_to_the_largest() {
    let mut frontend = Frontend::negotiated();
    for size in [1, 2, 128, 256] {
        assert_eq!(
            frontend.tell(Req::SET_VRING_NUM, &words(&[0, size])),
            Ack,
            "{size}"
        );
    }
    for size in [
        0,
        3,
        255,
        512,
        1023,
        32768,
        65535,
        65536,
        65536 + 8,
        u32::MAX,
    ] {
        assert_eq!(
            frontend.tell(Req::SET_VRING_NUM, &words(&[0, size])),
            Nack,
            "{size}"
        );
    }
}

/// Hostile case 39.
#[test]
fn vring_bases_fit_sixteen_bits() {
    let mut frontend = Frontend::negotiated();
    for (base, answer) in [(0, Ack), (65535, Ack), (65536, Nack), (u32::MAX, Nack)] {
        assert_eq!(
            frontend.tell(Req::SET_VRING_BASE, &words(&[1, base])),
            answer,
            "{base}"
        );
    }
    assert_eq!(frontend.base(1), Some((1, 65535)));
    assert_eq!(frontend.base(1), Some((1, 65535)));
}

/// Hostile case 39: a vring that cannot start costs itself only, and says so on its err descriptor.
#[test]
fn a_vring_outside_memory_does_not_start() {
    let mut frontend = Frontend::with_memory();
    let (kick, err) = (bell(), bell());
    assert_eq!(
        frontend.tell_fds(Req::SET_VRING_ERR, &longs(&[0]), &[err.as_fd()]),
        Ack
    );
    assert_eq!(frontend.tell(Req::SET_VRING_NUM, &words(&[0, 8])), Ack);
    // Outside, and over the end.
    for (shift, tries) in [(MEM_BYTES, 1), (MEM_BYTES - 0x2000, 2)] {
        assert_eq!(frontend.tell(Req::SET_VRING_ADDR, &addrs(0, shift)), Ack);
        let answer = frontend.tell_fds(Req::SET_VRING_KICK, &longs(&[0]), &[kick.as_fd()]);
        assert_eq!(answer, Nack, "{shift:#x}");
        let mut count = [0; 8];
        rustix::io::read(&err, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1, "try {tries}");
    }
    // Not even where no acknowledgement is asked for does the connection end.
    frontend.send(Req::SET_VRING_KICK, &longs(&[0]), &[kick.as_fd()]);
    assert!(frontend.is_alive());
    assert_eq!(frontend.base(0), Some((0, 0)));
}

#[test]
fn a_misaligned_vring_is_refused() {
    let mut frontend = Frontend::with_memory();
    frontend.send(Req::SET_VRING_ADDR, &addrs(0, 1), &[]);
    assert!(!frontend.is_alive());
}

/// Hostile case 40, as far as it is not `Memory`'s.
#[test]
fn memory_tables_are_taken_or_refused_whole() {
    let file = memory_file(MEM_BYTES);
    let region = |guest, bytes, user, offset| longs(&[guest, bytes, user, offset]);
    let table = |regions: &[Vec<u8>]| {
        let mut payload = words(&[regions.len() as u32, 0]);
        payload.extend(regions.concat());
        payload
    };
    let page = 0x1000;
    let good: Vec<_> = (0..32)
        .map(|at| region(at * page, page, USER + at * page, at * page))
        .collect();
    let rows = [
        (table(&[]), Ack),
        (table(&good[..1]), Ack),
        (table(&good[..8]), Ack),
        (table(&good[..9]), Ack),
        (table(&good), Ack),
        (table(&[region(0, 0, USER, 0)]), Nack),
        (table(&[region(0, 1 << 63, USER, 0)]), Nack),
        (table(&[region(u64::MAX, page, USER, 0)]), Nack),
        (table(&[region(0, page, u64::MAX, 0)]), Nack),
        (table(&[region(0, page, USER, u64::MAX)]), Nack),
        (table(&[region(0, MEM_BYTES + page, USER, 0)]), Nack),
        (table(&[region(0, MEM_BYTES, USER, page)]), Nack),
        (table(&[good[0].clone(), good[0].clone()]), Nack),
    ];
    let mut frontend = Frontend::negotiated();
    for (row, (payload, answer)) in rows.iter().enumerate() {
        let fds = vec![file.as_fd(); payload.len() / 32];
        assert_eq!(
            frontend.tell_fds(Req::SET_MEM_TABLE, payload, &fds),
            *answer,
            "row {row}"
        );
    }
    // Not as many descriptors as regions; more than are carried.
    for (regions, fds) in [(1, 0), (1, 2), (2, 1), (0, 1), (8, 9)] {
        let mut frontend = Frontend::negotiated();
        let fds = vec![file.as_fd(); fds];
        let answer = frontend.tell_fds(Req::SET_MEM_TABLE, &table(&good[..regions]), &fds);
        assert_eq!(answer, Closed, "{regions} regions");
    }
}

#[test]
fn regions_come_and_go() {
    let mut frontend = Frontend::with_memory();
    let region = |user| longs(&[0, 0, MEM_BYTES, user, 0]);
    assert_eq!(frontend.add_memory(0, MEM_BYTES, USER), Nack, "twice");
    assert_eq!(
        frontend.tell(Req::REM_MEM_REG, &region(USER + 1)),
        Nack,
        "another"
    );
    // With a descriptor: legal, and seen in the field.
    let file = memory_file(4096);
    assert_eq!(
        frontend.tell_fds(Req::REM_MEM_REG, &region(USER), &[file.as_fd()]),
        Ack
    );
    assert_eq!(frontend.tell(Req::REM_MEM_REG, &region(USER)), Nack, "gone");
    assert_eq!(frontend.add_memory(0, MEM_BYTES, USER), Ack);
    assert_eq!(frontend.tell(Req::REM_MEM_REG, &region(USER)), Ack);
}

/// Hostile case 40: 509 regions and not one more.
#[test]
fn there_are_as_many_memory_slots_as_were_told() {
    let mut frontend = Frontend::negotiated();
    for at in 0..509 {
        let start = at * 0x10_0000;
        assert_eq!(
            frontend.add_memory(start, 0x1000, USER + start),
            Ack,
            "{at}"
        );
    }
    assert_eq!(frontend.add_memory(1 << 40, 0x1000, USER + (1 << 40)), Nack);
    assert!(frontend.is_alive());
}

/// Hostile cases 31 and 32.
#[test]
fn the_configuration_space_is_read_within_its_bounds() {
    let mut frontend = Frontend::negotiated();
    let whole = frontend.config(0, 96).unwrap();
    assert_eq!(whole.len(), 12 + 96);
    assert_eq!(wire::long(&whole, 12), CAPACITY / 512);
    for (offset, bytes) in [(0, 8), (34, 2), (95, 1), (0, 60)] {
        let part = frontend.config(offset, bytes).unwrap();
        assert_eq!(wire::word(&part, 0), offset);
        assert_eq!(wire::word(&part, 4), bytes);
        let range = 12 + offset as usize..12 + (offset + bytes) as usize;
        assert_eq!(part[12..], whole[range], "{offset} {bytes}");
    }
    let beyond = [
        (0, 0),
        (0, 97),
        (95, 2),
        (96, 1),
        (96, 0),
        (4095, 1),
        (4096, 1),
        (u32::MAX, 1),
        (1, u32::MAX),
        (u32::MAX, u32::MAX),
    ];
    for (offset, bytes) in beyond {
        let payload = frontend.config(offset, bytes).unwrap();
        assert_eq!(payload, words(&[offset, 0, 0]), "{offset} {bytes}");
    }
    assert!(frontend.is_alive());
}

#[test]
fn only_the_cache_mode_is_written() {
    let mut frontend = Frontend::negotiated();
    let device = frontend.device.clone();
    let writeback = || device.writeback.load(Ordering::Relaxed);
    let message = |offset, flags, bytes: &[u8]| {
        let mut payload = words(&[offset, bytes.len() as u32, flags]);
        payload.extend_from_slice(bytes);
        payload
    };
    // (offset, flags, bytes, answer, write-back afterwards)
    let rows: [(u32, u32, &[u8], Answer, bool); 9] = [
        (32, 0, &[0], Ack, false),
        (32, 0, &[1], Ack, true),
        (32, 1, &[0], Ack, false),
        (32, 0, &[7], Ack, true),
        (31, 0, &[0], Nack, true),
        (32, 0, &[0, 0], Nack, true),
        (33, 0, &[0], Nack, true),
        (0, 0, &[0; 96], Nack, true),
        (4000, 0, &[0], Nack, true),
    ];
    for (offset, flags, bytes, answer, after) in rows {
        let payload = message(offset, flags, bytes);
        assert_eq!(
            frontend.tell(Req::SET_CONFIG, &payload),
            answer,
            "{offset} {bytes:?}"
        );
        assert_eq!(writeback(), after, "{offset} {bytes:?}");
        let read = frontend.config(32, 1).unwrap();
        assert_eq!(read[12], u8::from(after));
    }
    // A driver that did not take CONFIG_WCE has no such byte.
    let features = FEATURES & !feature::CONFIG_WCE;
    assert_eq!(frontend.tell(Req::SET_FEATURES, &longs(&[features])), Ack);
    assert_eq!(frontend.tell(Req::SET_CONFIG, &message(32, 0, &[0])), Nack);
    assert!(writeback());
}

#[test]
fn the_status_is_kept_and_zero_resets() {
    let mut frontend = Frontend::negotiated();
    assert_eq!(frontend.ask_number(Req::GET_STATUS), 0);
    for status in [1, 3, 11, 15, 0x8f, 0] {
        assert_eq!(frontend.tell(Req::SET_STATUS, &longs(&[status])), Ack);
        assert_eq!(frontend.ask_number(Req::GET_STATUS), status);
    }
    assert_eq!(frontend.tell(Req::SET_STATUS, &longs(&[256])), Nack);
    for (request, payload) in [
        (Req::SET_STATUS, longs(&[0])),
        (Req::RESET_DEVICE, vec![]),
        (Req::RESET_OWNER, vec![]),
    ] {
        assert_eq!(frontend.tell(Req::SET_VRING_BASE, &words(&[0, 77])), Ack);
        assert_eq!(frontend.base(0), Some((0, 77)));
        assert_eq!(frontend.tell(request, &payload), Ack);
        assert_eq!(frontend.base(0), Some((0, 77)), "{request:?}");
    }
}

#[test]
fn messages_of_features_that_were_not_taken_end_the_connection() {
    let rows = [
        (Req::GET_STATUS, vec![]),
        (Req::SET_STATUS, longs(&[1])),
        (Req::GET_QUEUE_NUM, vec![]),
        (Req::GET_MAX_MEM_SLOTS, vec![]),
        (Req::RESET_DEVICE, vec![]),
        (Req::GET_CONFIG, words(&[0, 8, 0, 0, 0])),
        (Req::GET_CONFIG, words(&[0, 0, 0])),
        (Req::SET_CONFIG, words(&[32, 1, 0])),
        (Req::SET_VRING_ENABLE, words(&[0, 1])),
    ];
    for (request, payload) in rows {
        let mut frontend = Frontend::connect();
        frontend.send(request, &payload, &[]);
        assert_eq!(frontend.reply(), None, "{request:?}");
        assert!(matches!(frontend.end(), Ending::Refused(_)));
    }
}

/// Hostile case 43.
#[test]
fn half_a_message_is_not_waited_for() {
    let whole = {
        let mut bytes = words(&[2, 1, 8]);
        bytes.extend(longs(&[FEATURES]));
        bytes
    };
    let started = Instant::now();
    let waiting: Vec<_> = [1, 11, 12, 19]
        .into_iter()
        .map(|count| {
            let mut frontend = Frontend::connect();
            frontend.stream.write_all(&whole[..count]).unwrap();
            frontend
        })
        .collect();
    for mut frontend in waiting {
        assert_eq!(frontend.reply(), None);
        assert!(matches!(frontend.end(), Ending::Refused(_)));
    }
    let took = started.elapsed();
    assert!(
        took >= intake::MESSAGE_WITHIN && took < 2 * intake::MESSAGE_WITHIN,
        "{took:?}"
    );
}

/// A message in single bytes, and messages one behind the other, are messages all the same.
#[test]
fn messages_are_cut_where_they_end() {
    let mut frontend = Frontend::negotiated();
    let ask = words(&[1, 1, 0]);
    for byte in words(&[u32::from(Req::GET_STATUS), 1, 0]) {
        frontend.stream.write_all(&[byte]).unwrap();
        std::thread::yield_now();
    }
    assert_eq!(frontend.reply().unwrap().0, 40);
    frontend
        .stream
        .write_all(&[ask.clone(), ask.clone(), ask].concat())
        .unwrap();
    for _ in 0..3 {
        assert_eq!(frontend.reply().unwrap().0, 1);
    }
}

/// Hostile case 44.
#[test]
fn a_frontend_that_never_reads_is_dropped() {
    let mut frontend = Frontend::connect();
    frontend
        .stream
        .set_write_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let asks = words(&[1, 1, 0]).repeat(100);
    let started = Instant::now();
    while frontend.stream.write_all(&asks).is_ok() {}
    let took = started.elapsed();
    assert!(
        took < intake::ANSWER_WITHIN + Duration::from_secs(4),
        "{took:?}"
    );
    let ending = frontend.thread.join().unwrap();
    assert!(matches!(ending, Ending::Refused(_)), "{ending:?}");
}

#[test]
fn a_remote_hangs_up() {
    let frontend = Frontend::negotiated();
    frontend.remote.hang_up();
    let ending = frontend.thread.join().unwrap();
    assert!(matches!(ending, Ending::HungUp));
    // Also a frontend that is not reading.
    let mut frontend = Frontend::connect();
    frontend
        .stream
        .set_write_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    let asks = words(&[1, 1, 0]).repeat(100);
    while frontend.stream.write_all(&asks).is_ok() {}
    let started = Instant::now();
    frontend.remote.hang_up();
    let ending = frontend.thread.join().unwrap();
    assert!(matches!(ending, Ending::HungUp), "{ending:?}");
    assert!(started.elapsed() < Duration::from_secs(1));
}

/// Hostile cases 36, 40 and 46: what comes is closed again.
#[test]
fn descriptors_stay_as_many_as_before() {
    if !in_a_process_of_its_own("descriptors_stay_as_many_as_before") {
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
            frontend.tell_fds(Req::SET_MEM_TABLE, &table, &[file.as_fd()]),
            Ack
        );
        for request in [Req::SET_VRING_KICK, Req::SET_VRING_CALL, Req::SET_VRING_ERR] {
            assert_eq!(
                frontend.tell_fds(request, &longs(&[3]), &[kick.as_fd()]),
                Ack
            );
            assert_eq!(
                frontend.tell_fds(request, &longs(&[3]), &[file.as_fd()]),
                Nack
            );
            assert_eq!(
                frontend.tell_fds(request, &longs(&[9]), &[kick.as_fd()]),
                Nack
            );
        }
        let (channel, _other) = UnixStream::pair().unwrap();
        assert_eq!(
            frontend.tell_fds(Req::SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]),
            Ack
        );
        assert_eq!(
            frontend.tell_fds(Req::SET_BACKEND_REQ_FD, &[], &[file.as_fd()]),
            Nack
        );
        frontend.send_raw(255, 0x9, 0, &[], &[file.as_fd(); 32]);
        assert_eq!(frontend.answer(255), Nack);
    };
    round();
    assert_eq!(fds_inherited(), inherited, "what comes is closed on exec");
    let before = fds_open();
    (0..1000).for_each(|_| round());
    assert_eq!(fds_open(), before);
    frontend.end();
    let before = fds_open();
    for _ in 0..100 {
        let mut frontend = Frontend::with_memory();
        assert_eq!(
            frontend.tell_fds(Req::SET_OWNER, &[], &[file.as_fd(); 32]),
            Closed
        );
        frontend.end();
        let mut frontend = Frontend::with_memory();
        frontend.send_raw(5, 0x1, 40, &[0; 20], &[file.as_fd(); 8]);
        frontend.end();
    }
    assert_eq!(fds_open(), before);
}

/// A daemon that holds the frontend's end of the connection never sees it leave, and its only seat
/// stays taken for ever.
#[test]
fn a_frontend_cannot_keep_its_own_end_alive_through_the_backend_channel() {
    for queued in [false, true] {
        let mut frontend = Frontend::negotiated();
        let own = frontend.stream.try_clone().unwrap();
        let answer = if queued {
            let (channel, other) = UnixStream::pair().unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [own.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            sendmsg(
                &other,
                &[IoSlice::new(b"x")],
                &mut control,
                SendFlags::empty(),
            )
            .unwrap();
            frontend.tell_fds(Req::SET_BACKEND_REQ_FD, &[], &[channel.as_fd()])
        } else {
            frontend.tell_fds(Req::SET_BACKEND_REQ_FD, &[], &[own.as_fd()])
        };
        assert_eq!(answer, if queued { Ack } else { Closed });
        drop(own);
        drop(frontend.stream);
        let until = Instant::now() + Duration::from_secs(5);
        while !frontend.thread.is_finished() {
            assert!(
                Instant::now() < until,
                "the session never ends (queued: {queued})"
            );
            std::thread::yield_now();
        }
    }
}
