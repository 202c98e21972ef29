//! A whole vhost-user session, from its socket on: messages with payloads and descriptors of the input's choice. It
//! ends when the input does, and nothing that came keeps it from ending.
#![no_main]

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, LazyLock};

use cleave_blk::Face;
use cleave_disk::{Disk, DiskSpec, OpenOptions};
use cleave_session::{Offload, Session, SessionConfig};
use cleave_worker::{CompletionPolicy, Device, Split, Tuning, WorkerConfig};
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::pipe::{PipeFlags, pipe_with};

const MEMORY: u64 = 1 << 20;
/// Messages of an input: what they are answered with fits the socket.
const MESSAGES_MAX: usize = 64;

struct Things {
    device: Arc<Device>,
    memory: File,
    small: File,
    event: OwnedFd,
    /// Both ends: without a reader, a write raises SIGPIPE, which the program ignores and which ends libFuzzer.
    pipe: (OwnedFd, OwnedFd),
}

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

/// A message: number, flags, descriptors, length of what is said of its payload, then that. Flags: want an answer; a size
/// that is not the payload's; half a message. Payloads are filled up to the length with what makes addresses likely.
fn run(input: &[u8]) {
    let things = &*THINGS;
    let (ours, theirs) = UnixStream::pair().unwrap();
    let config = SessionConfig {
        face: Face::V1,
        vrings_max: 4,
        vring_size_max: 256,
        workers_max: 2,
    };
    let (device, offload) = (things.device.clone(), Offload::default());
    let (session, _) = Session::new(theirs, device, offload, Arc::default(), config).unwrap();
    let mut rest = input;
    for _ in 0..MESSAGES_MAX {
        let Some(([number, flags, fds, len], behind)) = rest.split_first_chunk() else {
            break;
        };
        let (said, behind) = behind.split_at(behind.len().min(usize::from(*len)));
        rest = behind;
        let size = match flags & 4 {
            0 => said.len() as u32,
            _ => u32::from_le_bytes([*len, *fds, flags & 0xf0, 0]),
        };
        // Version 1, and the bit that wants an answer.
        let word = 1 | u32::from(flags & 1) << 3 | u32::from(flags & 2) << 1;
        let mut message = [u32::from(*number), word, size]
            .map(u32::to_ne_bytes)
            .concat();
        message.extend(said);
        if flags & 8 != 0 {
            message.truncate(message.len() / 2);
        }
        send(&ours, &message, &descriptors(things, *fds));
    }
    let _ = ours.shutdown(std::net::Shutdown::Write);
    session.run();
    // The workers of this session wrote it.
    let _ = rustix::io::read(&things.event, &mut [0; 8]);
    while rustix::io::read(&things.pipe.0, &mut [0; 4096]).is_ok_and(|count| count > 0) {}
    drop(ours);
}

fuzz_target!(|input: &[u8]| run(input));
