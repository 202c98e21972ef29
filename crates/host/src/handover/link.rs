//! The socket between the process that gives its disk away and the one that takes it.
//!
//! ```text
//!  giver                                        taker
//!    │ ◄────────────────────── hello ─────────── │
//!    │ ─ files (a parcel without sessions) ────► │  prepares everything that may fail
//!    │ ◄────────────────────── ready ─────────── │
//!    │ drains, stops                             │
//!    │ ─ parcel ───────────────────────────────► │
//!    │ ◄────────────────────── taken ─────────── │  from here on the taker alone serves
//! ```
//!
//! Each side uses it on a thread of its own and may wait on it until a deadline that it names. After an error, or when the deadline
//! has passed, the giver keeps the disk, and says so with `kept` and the reason. One that is dropped says it as well. So a link that ends
//! without it tells that the giver has died, or ended.
//!
//! A taker that serves alone keeps its end open as long as it runs. So a giver that still runs sees if it dies.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, recv, recvmsg, send, sendmsg, shutdown,
};
use rustix::process::geteuid;

use super::parcel::Packed;
use crate::failure::Failure;

/// Version of the exchange. The giver refuses a taker of another one.
const VERSION: u32 = 1;
/// Descriptors that go with one byte. The kernel carries at most 253.
const CHUNK: usize = 64;
/// Most descriptors and most bytes of a frame.
const FDS_MAX: usize = 20_000;
const BYTES_MAX: usize = 4 << 20;
/// Size of a frame's kind, number of bytes and number of descriptors: three 32-bit numbers, little-endian. The bytes follow, and
/// then one byte for each chunk of descriptors.
const HEADER_BYTES: usize = 12;
/// Longest wait for the end of a giver. It waits for its manager, for 5 s at most.
const END_TIME: Duration = Duration::from_secs(6);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FrameKind {
    Hello = 1,
    Files = 2,
    Ready = 3,
    Parcel = 4,
    Taken = 5,
    Kept = 6,
}

/// The process that asks a giver.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    /// Its number; 0 if it has none in our PID namespace.
    pub(crate) pid: i32,
    link: Arc<UnixStream>,
}

impl Peer {
    /// Refuses to end in order for a process that has taken everything over and has ended since. The manager starts the service again
    /// if this process fails.
    pub(crate) fn check_alive(&self) -> Result<(), Failure> {
        let mut ends = [PollFd::new(&self.link, PollFlags::empty())];
        let _ = retry_on_intr(|| poll(&mut ends, Some(&Timespec::default())));
        let [end] = ends;
        match end.revents().contains(PollFlags::HUP) {
            false => Ok(()),
            true => Err(Failure::run(format!(
                "process {} has taken over and has ended: its guests hang until this daemon is started again",
                self.pid
            ))),
        }
    }
}

/// The end of the process that has the disk. If it is dropped, this process keeps the disk, and the other is told.
#[derive(Debug)]
pub(crate) struct Giver {
    socket: FrameSocket,
    /// True if the disk is given, or the other process was told that it is kept.
    is_over: bool,
}

/// The end of the process that wants the disk. If it is dropped, the giver keeps the disk at once.
#[derive(Debug)]
pub(crate) struct Taker(FrameSocket);

impl Giver {
    /// Waits for the greeting of a process that has connected. Refuses one of another user, unless that is root.
    pub(crate) fn accept(stream: UnixStream, deadline: Instant) -> io::Result<(Giver, Peer)> {
        let pid = trusted_process(&stream)?;
        let socket = FrameSocket::new(stream);
        let (hello, _) = socket.receive(FrameKind::Hello, deadline)?;
        if hello != VERSION.to_le_bytes() {
            return Err(broken("it speaks another version of the hand-over"));
        }
        let giver = Giver {
            socket,
            is_over: false,
        };
        let link = giver.socket.0.clone();
        Ok((giver, Peer { pid, link }))
    }

    /// Sends what the other process prepares itself with: a parcel without sessions.
    pub(crate) fn send_files(&self, files: &Packed, deadline: Instant) -> io::Result<()> {
        self.socket.send_packed(FrameKind::Files, files, deadline)
    }

    /// Waits until the other process needs nothing but the sessions.
    pub(crate) fn await_ready(&self, deadline: Instant) -> io::Result<()> {
        self.socket.receive(FrameKind::Ready, deadline).map(drop)
    }

    /// Waits for so long. An error says that the other process has left, which has nothing to say now.
    pub(crate) fn stays_for(&self, time: Duration) -> io::Result<()> {
        match wait(&self.socket.0, PollFlags::IN, Instant::now() + time) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(()),
            Err(error) => Err(error),
            Ok(()) => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Gives the disk away. After an error this process still has it, and the other knows that it must not serve: the parcel can be
    /// unpacked and resumed here. Otherwise the other process alone may serve.
    pub(crate) fn give(mut self, parcel: &Packed, deadline: Instant) -> io::Result<()> {
        // The other process cannot take what it does not have whole.
        let sent = self.socket.send_packed(FrameKind::Parcel, parcel, deadline);
        sent.inspect_err(|error| self.say_kept(&error.to_string()))?;
        self.end(deadline)
    }

    /// Gives what is left to a process that serves everything by now. This one ends, whatever the other answers.
    pub(crate) fn leave(mut self, parcel: &Packed, deadline: Instant) {
        self.is_over = true;
        let sent = self.socket.send_packed(FrameKind::Parcel, parcel, deadline);
        let _ = sent.and_then(|()| wait(&self.socket.0, PollFlags::IN, deadline));
    }

    /// Tells the other process that this one keeps the disk, for this reason, before anything of it goes on here.
    pub(crate) fn keep(mut self, why: &str) {
        self.say_kept(why);
    }

    /// Says once that this process keeps the disk, unless it is given.
    fn say_kept(&mut self, why: &str) {
        if mem::replace(&mut self.is_over, true) {
            return;
        }
        let now = Instant::now();
        let said = self.socket.send(FrameKind::Kept, why.as_bytes(), &[], now);
        if said.is_err_and(|error| !has_ended(&error)) {
            // The other process has stopped reading and there is no room. It would take the end of the link for the death of this
            // process, so this end stays open until that comes.
            mem::forget(self.socket.0.clone());
        }
    }

    /// Waits until the other process has taken the disk or cannot take it any more.
    ///
    /// This end of the socket is shut down before it is read. When the kernel queues a message, it checks for that under the same lock, so
    /// the other's message is in the queue by then, or its `take` fails.
    fn end(mut self, deadline: Instant) -> io::Result<()> {
        let socket = &self.socket.0;
        let waited = wait(socket, PollFlags::IN, deadline);
        if shutdown(socket, Shutdown::Read).is_err() {
            // Its message may still come. A disk that nobody serves is better than one that two do.
            self.is_over = true;
            return Ok(());
        }
        // Whatever ended the wait, the queue says how it ended.
        let mut found = [[0; 4]; 3];
        let buffer = found.as_flattened_mut();
        let read = retry_on_intr(|| recv(socket, &mut *buffer, RecvFlags::DONTWAIT));
        let is_whole = read.is_ok_and(|(_, count)| count == HEADER_BYTES);
        if is_whole && found == header(FrameKind::Taken, 0, 0) {
            self.is_over = true;
            return Ok(());
        }
        let error = waited.err();
        let error = error.unwrap_or_else(|| broken("it did not take the disk"));
        self.keep(&error.to_string());
        Err(error)
    }
}

impl Drop for Giver {
    fn drop(&mut self) {
        self.say_kept("it does not wait any longer");
    }
}

/// How an attempt to take a disk ends.
#[derive(Debug)]
pub(crate) enum TakeOutcome {
    /// This process alone may serve it.
    Taken(TakenLink),
    /// The giver serves it.
    Kept(io::Error),
    /// The giver has ended, and has not gone on with the disk before.
    Ended(io::Error),
}

/// The link of a process that serves alone. If it is dropped while the giver still runs, the giver takes this process for dead.
#[derive(Debug)]
pub(crate) struct TakenLink {
    end: FrameSocket,
}

impl TakenLink {
    /// Waits until the giver has ended, which is mostly long ago. A process that has given the disk to the next one waits, so that the
    /// giver does not take it for dead.
    pub(crate) fn outlive_giver(self) {
        let _ = wait(&self.end.0, PollFlags::empty(), Instant::now() + END_TIME);
    }
}

impl Taker {
    /// Greets the process at the other end. Refuses one of another user, unless that is root.
    pub(crate) fn greet(stream: UnixStream, deadline: Instant) -> io::Result<Taker> {
        trusted_process(&stream)?;
        let socket = FrameSocket::new(stream);
        socket.send(FrameKind::Hello, &VERSION.to_le_bytes(), &[], deadline)?;
        Ok(Taker(socket))
    }

    /// Receives a parcel without sessions.
    pub(crate) fn receive_files(&self, deadline: Instant) -> io::Result<Packed> {
        self.0.receive_packed(FrameKind::Files, deadline)
    }

    /// Asks for the sessions: nothing else can keep this process from serving. The guest waits from here on.
    pub(crate) fn send_ready(&self, deadline: Instant) -> io::Result<()> {
        let sent = self.0.send(FrameKind::Ready, &[], &[], deadline);
        sent.map_err(|_| self.last_word(deadline))
    }

    /// Receives the whole parcel.
    pub(crate) fn receive_parcel(&self, deadline: Instant) -> io::Result<Packed> {
        self.0.receive_packed(FrameKind::Parcel, deadline)
    }

    /// Takes the disk, when this process has the whole parcel.
    pub(crate) fn take(self, deadline: Instant) -> TakeOutcome {
        let taken = header(FrameKind::Taken, 0, 0);
        // In one call that does not wait: a message is queued whole or not at all.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = retry_on_intr(|| send(&self.0.0, taken.as_flattened(), flags));
        if sent == Ok(HEADER_BYTES) {
            return TakeOutcome::Taken(TakenLink { end: self.0 });
        }
        let why = self.last_word(deadline);
        match has_ended(&why) {
            true => TakeOutcome::Ended(why),
            false => TakeOutcome::Kept(why),
        }
    }

    /// Returns why nothing can be sent any more. What the giver said before it closed its end is still in the queue.
    fn last_word(&self, deadline: Instant) -> io::Error {
        match self.0.receive(FrameKind::Kept, deadline) {
            Ok((why, _)) => kept(&why),
            Err(error) => error,
        }
    }
}

/// Returns true if the process at the other end has closed the link without a word. One that has closed it within a message may have
/// had no time for the rest of it, and have kept the disk.
pub(crate) fn has_ended(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// The reason for which a giver keeps its disk.
fn kept(why: &[u8]) -> io::Error {
    io::Error::other(String::from_utf8_lossy(why).into_owned())
}

/// Puts a parcel into a socket, where it waits for whoever reads the other end.
pub(super) fn send_parcel(into: UnixStream, parcel: &Packed, deadline: Instant) -> io::Result<()> {
    FrameSocket::new(into).send_packed(FrameKind::Parcel, parcel, deadline)
}

/// Takes out of a socket all that waits in it, and closes it. Its descriptors are closed by the kernel, because there is no room for them.
pub(super) fn discard(from: &UnixStream) {
    let mut piece = [0; 4096];
    loop {
        match recv(from, &mut piece, RecvFlags::DONTWAIT) {
            Ok((1.., _)) | Err(Errno::INTR) => {}
            Ok(_) | Err(_) => return,
        }
    }
}

/// Takes a parcel out of a socket.
pub(super) fn receive_parcel(from: UnixStream, deadline: Instant) -> io::Result<Packed> {
    FrameSocket::new(from).receive_packed(FrameKind::Parcel, deadline)
}

/// A connected socket, blocking or not, that carries frames.
#[derive(Debug)]
struct FrameSocket(Arc<UnixStream>);

impl FrameSocket {
    fn new(stream: UnixStream) -> FrameSocket {
        FrameSocket(Arc::new(stream))
    }

    fn send_packed(&self, kind: FrameKind, packed: &Packed, deadline: Instant) -> io::Result<()> {
        let (names, fds): (Vec<_>, Vec<_>) = packed.fds().map(|(name, fd)| (name, fd)).unzip();
        let fds = std::iter::once(&packed.document).chain(fds);
        let fds: Vec<_> = fds.map(OwnedFd::as_fd).collect();
        self.send(kind, &serde_json::to_vec(&names)?, &fds, deadline)
    }

    fn receive_packed(&self, kind: FrameKind, deadline: Instant) -> io::Result<Packed> {
        let (names, fds) = self.receive(kind, deadline)?;
        let names: Vec<String> = serde_json::from_slice(&names)?;
        let mut fds = fds.into_iter();
        match fds.next() {
            Some(document) if fds.len() == names.len() => {
                let fds = names.into_iter().zip(fds).collect();
                Ok(Packed::received(document, fds))
            }
            _ => Err(broken("it sent descriptors without names")),
        }
    }

    fn send(
        &self,
        kind: FrameKind,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> io::Result<()> {
        if bytes.len() > BYTES_MAX || fds.len() > FDS_MAX {
            return Err(io::Error::other("the parcel is too large to be sent"));
        }
        let header = header(kind, bytes.len() as u32, fds.len() as u32);
        self.write(header.as_flattened(), &[], deadline)?;
        self.write(bytes, &[], deadline)?;
        let mut chunks = fds.chunks(CHUNK);
        chunks.try_for_each(|chunk| self.write(&[0], chunk, deadline))
    }

    /// Receives a frame that has to be of this kind.
    fn receive(&self, kind: FrameKind, deadline: Instant) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let (mut header, mut fds) = ([[0; 4]; 3], Vec::new());
        self.read(header.as_flattened_mut(), &mut fds, 0, deadline)?;
        let [found, length, count] = header.map(|number| u32::from_le_bytes(number) as usize);
        let is_kept = found == FrameKind::Kept as usize;
        let is_meant = found == kind as usize || is_kept;
        if !is_meant || length > BYTES_MAX || count > FDS_MAX {
            return Err(broken(&format!(
                "it sent message {found} with {length} bytes and {count} descriptors instead of {kind:?}"
            )));
        }
        let mut bytes = vec![0; length];
        self.read(&mut bytes, &mut fds, 0, deadline)
            .map_err(cut_off)?;
        while fds.len() < count {
            let whole = count.min(fds.len() + CHUNK);
            self.read(&mut [0], &mut fds, whole, deadline)
                .map_err(cut_off)?;
            if fds.len() < whole {
                return Err(broken("it sent fewer descriptors than it announced"));
            }
        }
        match is_kept && kind != FrameKind::Kept {
            true => Err(kept(&bytes)),
            false => Ok((bytes, fds)),
        }
    }

    /// Writes all bytes. The descriptors go with the first of them.
    fn write(
        &self,
        mut bytes: &[u8],
        mut fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(CHUNK))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(fds));
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(count) => (bytes, fds) = (bytes.get(count..).unwrap_or_default(), &[]),
                Err(Errno::AGAIN) => wait(&self.0, PollFlags::OUT, deadline)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Fills the buffer. Refuses more than `most` descriptors.
    fn read(
        &self,
        mut buffer: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        most: usize,
        deadline: Instant,
    ) -> io::Result<()> {
        while !buffer.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(CHUNK))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let mut room = [IoSliceMut::new(buffer)];
            let received = match recvmsg(&self.0, &mut room, &mut control, flags) {
                Ok(received) => received,
                Err(Errno::AGAIN) => {
                    wait(&self.0, PollFlags::IN, deadline)?;
                    continue;
                }
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    fds.extend(more);
                }
            }
            if received.flags.contains(ReturnFlags::CTRUNC) {
                return Err(broken(
                    "its descriptors were lost: raise the limit of open files (LimitNOFILE)",
                ));
            }
            if fds.len() > most {
                return Err(broken("it sent more descriptors than it announced"));
            }
            if received.bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            buffer = buffer.get_mut(received.bytes..).unwrap_or_default();
        }
        Ok(())
    }
}

fn header(kind: FrameKind, length: u32, count: u32) -> [[u8; 4]; 3] {
    [kind as u32, length, count].map(u32::to_le_bytes)
}

/// Sleeps until the socket is ready, at the latest until the deadline, which is an error.
fn wait(socket: &UnixStream, flags: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(socket, flags)], left.as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns the number of the process at the other end, if it may have our disks or give us its own.
fn trusted_process(stream: &UnixStream) -> io::Result<i32> {
    let found = getsockopt(stream, PeerCredentials)?;
    let (pid, uid) = (found.pid(), found.uid());
    match is_trusted(uid, geteuid().as_raw()) {
        true => Ok(pid),
        false => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("process {pid} is of user {uid}: take disks over as the same user, or as root"),
        )),
    }
}

fn is_trusted(uid: u32, own: u32) -> bool {
    uid == own || uid == 0
}

/// Makes of the end of a link within a message an error that is not [`has_ended`].
fn cut_off(error: io::Error) -> io::Error {
    match has_ended(&error) {
        true => broken("it ended within a message"),
        false => error,
    }
}

fn broken(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests;
