//! Whole vhost-user sessions, from their sockets on: messages with payloads and descriptors of the input's choice. A second
//! frontend connects when the input has a message of it, another host has the disk when the input says so, and a session is
//! handed over as the input has changed it. The sessions end when the input does, nothing that came keeps them from ending, and
//! no descriptor is left.
#![no_main]

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, LazyLock, OnceLock};
use std::thread::JoinHandle;

use cleave_blk::Face;
use cleave_disk::{Disk, DiskSpec, OpenOptions};
use cleave_session::{
    Ending, Handover, Offload, Owners, Possession, RecordedMessage, Session, SessionConfig,
    SessionHandle,
};
use cleave_worker::{CompletionPolicy, Device, Split, Tuning, WorkerConfig};
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use rustix::pipe::{PipeFlags, pipe_with};

const MEMORY: u64 = 1 << 20;
/// Messages of an input: what they are answered with fits the socket.
const MESSAGES_MAX: usize = 64;

const CONFIG: SessionConfig = SessionConfig {
    face: Face::V1,
    vrings_max: 4,
    vring_size_max: 256,
    workers_max: 2,
};

/// Bits of a message's flags.
const WANTS_ANSWER: u8 = 1;
const OTHER_FLAG: u8 = 2;
const OTHER_SIZE: u8 = 4;
const HALF: u8 = 8;
const OF_SECOND: u8 = 0x10;
const REFUSES: u8 = 0x20;
const FAILS: u8 = 0x40;
const WAITS: u8 = 0x80;

/// Number of a message that no frontend sends: its session is handed over. What it says comes in, in two bytes, and a message.
const HAND_OVER: u8 = 0xf0;
/// Descriptors that are open beside those of the first input: what sessions close later, on another thread.
const OPEN_MAX: usize = 256;

/// Longest wait for an answer, which a frontend that waits for the disk does not get.
const ANSWER_TIME: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 2_000_000,
};

struct Things {
    device: Arc<Device>,
    memory: File,
    small: File,
    event: OwnedFd,
    /// Both ends: without a reader, a write raises SIGPIPE, which the program ignores and which ends libFuzzer.
    pipe: (OwnedFd, OwnedFd),
}

/// Descriptors that were open after the first input.
static OPEN: OnceLock<usize> = OnceLock::new();

static THINGS: LazyLock<Things> = LazyLock::new(|| {
    let disk = Disk::open(&DiskSpec::Null(8 << 20), &OpenOptions::default()).unwrap();
    let config = WorkerConfig {
        cpus: Vec::new(),
        ops: 64,
    };
    let tuning = Tuning {
        completion: CompletionPolicy::Interrupt,
        ..Tuning::new(Split::Off)
    };
    let file = |bytes| {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        file
    };
    Things {
        device: Arc::new(Device::new(Arc::new(disk), [0; 20], true, config, tuning)),
        memory: file(MEMORY),
        small: file(4096),
        event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap(),
        pipe: pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap(),
    }
});

/// Descriptors that go with a message: two bits each say which, and whether there is another.
fn descriptors(things: &Things, mut word: u8) -> Vec<BorrowedFd<'_>> {
    let mut fds = Vec::new();
    while word & 1 != 0 && fds.len() < 9 {
        fds.push(match word >> 1 & 3 {
            0 => things.memory.as_fd(),
            1 => things.event.as_fd(),
            2 => things.small.as_fd(),
            _ => things.pipe.1.as_fd(),
        });
        word >>= 3;
    }
    fds
}

fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    // A session that has ended does not take more.
    let _ = sendmsg(
        stream,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    );
}

/// The right to the disk, which begins inactive.
#[derive(Debug, Default)]
struct Hosts {
    is_here: AtomicBool,
    /// How often another host still has the disk when it is asked for.
    refusals: AtomicUsize,
    /// The disk can never be had.
    fails: AtomicBool,
}

impl Possession for Hosts {
    fn is_here(&self) -> bool {
        self.is_here.load(Ordering::SeqCst)
    }

    fn hand_over(&self) {
        assert!(
            self.is_here.swap(false, Ordering::SeqCst),
            "handed over twice"
        );
    }

    fn hand_over_failed(&self) {
        assert!(self.is_here(), "it was another host's");
    }

    fn take(&self) -> Result<bool, String> {
        if self.is_here() {
            return Ok(true);
        }
        if self.fails.load(Ordering::SeqCst) {
            return Err("it is another disk".to_owned());
        }
        let left = |refusals: usize| refusals.checked_sub(1);
        let order = Ordering::SeqCst;
        let is_refused = self.refusals.fetch_update(order, order, left).is_ok();
        self.is_here.store(!is_refused, order);
        Ok(!is_refused)
    }

    fn look(&self) -> Option<Receiver<()>> {
        // It has ended.
        Some(sync_channel(0).1)
    }
}

/// A connection with its session, until that has ended.
struct Frontend<'a> {
    stream: UnixStream,
    session: Option<(JoinHandle<Ending>, SessionHandle)>,
    host: &'a Host,
    /// A part of a message was sent, for the rest of which a session waits that is to be handed over.
    sends: bool,
}

/// What all sessions have in common.
struct Host {
    device: Arc<Device>,
    offload: Offload,
    owners: Arc<Owners>,
}

impl Frontend<'_> {
    fn connect(host: &Host) -> Frontend<'_> {
        let (stream, theirs) = UnixStream::pair().unwrap();
        let (device, owners) = (host.device.clone(), host.owners.clone());
        let made = Session::new(theirs, device, host.offload.clone(), owners, CONFIG);
        Frontend {
            stream,
            session: Some(spawn(made.unwrap())),
            host,
            sends: false,
        }
    }

    /// Has another session go on with what this one is handed over as, and with what the input makes of it.
    fn hand_over(&mut self, said: &[u8], fds: &[BorrowedFd<'_>]) {
        let Some((session, handle)) = self.session.take_if(|_| !self.sends) else {
            return;
        };
        handle.hand_over();
        let Ending::HandedOver(mut handover) = session.join().unwrap() else {
            return;
        };
        change(&mut handover, said, fds);
        let (device, owners) = (self.host.device.clone(), self.host.owners.clone());
        let offload = self.host.offload.clone();
        let made = Session::resume(*handover, device, offload, owners, CONFIG, || ());
        self.session = Some(spawn(made.unwrap()));
    }

    /// Waits for an answer, so that the next message finds its effect.
    fn wait(&self) {
        let _ = poll(
            &mut [PollFd::new(&self.stream, PollFlags::IN)],
            Some(&ANSWER_TIME),
        );
        self.forget_answers();
    }

    fn forget_answers(&self) {
        while recv(&self.stream, &mut [0; 4096], RecvFlags::DONTWAIT)
            .is_ok_and(|(count, _)| count > 0)
        {}
    }
}

fn spawn((session, handle): (Session, SessionHandle)) -> (JoinHandle<Ending>, SessionHandle) {
    (std::thread::spawn(move || session.run()), handle)
}

/// Changes what a session is handed over as. The first byte flips what no message says, the second is the place of a message,
/// and the third its number.
fn change(handover: &mut Handover, said: &[u8], fds: &[BorrowedFd<'_>]) {
    let [flags, place, number, payload @ ..] = said else {
        return;
    };
    let has = |flag: u8| flags & flag != 0;
    handover.owns ^= has(1);
    handover.has_owned ^= has(2);
    handover.needs_reset ^= has(4);
    if has(8) {
        handover.writeback = Some(has(0x10));
    }
    if has(0x20) {
        handover.device.clone_from(&payload.to_vec());
    }
    let place = usize::from(*place) % (handover.messages.len() + 1);
    if has(0x40) {
        handover.messages.truncate(place);
    }
    if has(0x80) {
        let fds = fds.iter().map(|fd| fd.try_clone_to_owned().unwrap());
        let message = RecordedMessage {
            request: u32::from(*number),
            payload: payload.to_vec(),
            fds: fds.collect(),
        };
        handover.messages.insert(place, message);
    }
}

/// Returns the number of open descriptors.
fn open() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A message: number, flags, descriptors, length of what is said of its payload, then that. Flags: want an answer; the flag of
/// an answer; a size that is not the payload's; half a message; of the second frontend; another host has the disk once more when
/// it is asked for; the disk can never be had; the next message waits for the answer.
/// The number `HAND_OVER` does not stand for a message.
fn run(input: &[u8]) {
    let things = &*THINGS;
    let hosts = Arc::new(Hosts::default());
    let host = Host {
        device: things.device.clone(),
        offload: Offload::default(),
        owners: Arc::new(Owners::of(hosts.clone())),
    };
    let connect = || Frontend::connect(&host);
    let mut first = connect();
    let mut second = None;
    let mut rest = input;
    for _ in 0..MESSAGES_MAX {
        let Some(([number, flags, fds, len], behind)) = rest.split_first_chunk() else {
            break;
        };
        let has = |flag: u8| flags & flag != 0;
        let (said, behind) = behind.split_at(behind.len().min(usize::from(*len)));
        rest = behind;
        let size = match has(OTHER_SIZE) {
            false => said.len() as u32,
            true => u32::from_le_bytes([*len, *fds, flags & 0xf0, 0]),
        };
        // Version 1, and the bits that want an answer and are one.
        let word = 1 | u32::from(has(WANTS_ANSWER)) << 3 | u32::from(has(OTHER_FLAG)) << 2;
        let mut message = [u32::from(*number), word, size]
            .map(u32::to_ne_bytes)
            .concat();
        message.extend(said);
        if has(HALF) {
            message.truncate(message.len() / 2);
        }
        let refused = usize::from(has(REFUSES));
        hosts.refusals.fetch_add(refused, Ordering::SeqCst);
        hosts.fails.fetch_or(has(FAILS), Ordering::SeqCst);
        let frontend = match has(OF_SECOND) {
            false => &mut first,
            true => second.get_or_insert_with(connect),
        };
        if *number == HAND_OVER {
            frontend.hand_over(said, &descriptors(things, *fds));
            continue;
        }
        frontend.sends |= has(HALF) || has(OTHER_SIZE);
        frontend.forget_answers();
        send(&frontend.stream, &message, &descriptors(things, *fds));
        if has(WAITS) {
            frontend.wait();
        }
    }
    let frontends: Vec<_> = std::iter::once(first).chain(second).collect();
    for frontend in &frontends {
        let _ = frontend.stream.shutdown(std::net::Shutdown::Write);
    }
    for frontend in frontends {
        let ended = frontend.session.map(|(session, _)| session.join().unwrap());
        drop(ended);
    }
    drop(host);
    let most = OPEN_MAX + *OPEN.get_or_init(open);
    assert!(open() <= most, "descriptors are left");
    // The workers of these sessions wrote it.
    let _ = rustix::io::read(&things.event, &mut [0; 8]);
    while rustix::io::read(&things.pipe.0, &mut [0; 4096]).is_ok_and(|count| count > 0) {}
}

fuzz_target!(|input: &[u8]| run(input));
