//! Reads whole messages and writes answers, with a bound on every wait for the frontend.
//!
//! The `vhost` crate can read a socket itself, but a hostile frontend can make it hang: it spins or blocks if a
//! message stops half-way, if more descriptors arrive than it has room for, or if its answers are not read. It
//! also leaves descriptors open across `exec`. So only this module reads the connection, and the crate gets
//! complete messages (see `relay`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_oobinline;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, send, sendmsg,
};

use crate::MessageRefusal;
use crate::fd::{is_readable, wait};
use crate::foreign::Foreign;
use crate::message::{FDS_MAX, HEADER_BYTES, Header, Message};
use crate::offload::Offload;

/// Maximum time from the first byte of a message to its last; after that the connection ends. Frontends write a
/// message in one or two calls, so only a broken or hostile one comes near the limit.
pub(crate) const MESSAGE_WITHIN: Duration = Duration::from_secs(5);
/// Maximum time until there is room for an answer. A frontend that sends requests and never reads is
/// disconnected.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Pause between two looks for the end of a session that waits for room and has another wake-up pending.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Maximum number of descriptors in one control message of Linux (SCM_MAX_FD).
const SCM_FDS_MAX: usize = 253;

/// Result of reading.
#[derive(Debug)]
pub(crate) enum Intake {
    /// A whole message.
    Message(Message),
    /// The message is not complete yet.
    Wanting,
    /// The frontend closed the connection.
    Gone,
}

/// The connection, and the message that is arriving on it.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Arc<UnixStream>,
    offload: Offload,
    bytes: Vec<u8>,
    fds: Foreign,
    header: Option<Header>,
    begun: Option<Instant>,
}

impl Connection {
    /// The caller has another descriptor of the socket, so that a failure closes nothing that is queued in it.
    pub(crate) fn new(socket: UnixStream, offload: Offload) -> io::Result<Connection> {
        // The kernel discards an out-of-band byte otherwise, and closes the descriptors that came with it on the thread that receives.
        set_socket_oobinline(&socket, true)?;
        Ok(Connection {
            socket: Arc::new(socket),
            bytes: Vec::new(),
            fds: Foreign::none(offload.clone()),
            offload,
            header: None,
            begun: None,
        })
    }

    /// Returns the socket, to see whether the frontend has left. It must be dropped before the connection is closed.
    pub(crate) fn socket(&self) -> Arc<UnixStream> {
        self.socket.clone()
    }

    /// Returns the time by which the current message must be complete. `None` between messages, where there is no limit.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.begun.map(|begun| begun + MESSAGE_WITHIN)
    }

    /// Reads available bytes up to the end of one message. Never waits.
    pub(crate) fn read(&mut self) -> Result<Intake, MessageRefusal> {
        loop {
            if self.header.is_none()
                && let Some(bytes) = self.bytes.first_chunk::<HEADER_BYTES>()
            {
                self.header = Some(Header::parse(bytes)?);
            }
            let missing = self.missing();
            if missing == 0 {
                return Ok(self.take());
            }
            match self.receive(missing)? {
                Received::Bytes => {}
                Received::Nothing => return Ok(Intake::Wanting),
                Received::End if self.bytes.is_empty() => return Ok(Intake::Gone),
                Received::End => return Err(MessageRefusal::Gone),
            }
        }
    }

    /// Returns the number of bytes up to the next border of a header or message. Reads never cross it: the descriptors of one
    /// message must not become those of the next.
    fn missing(&self) -> usize {
        let whole = HEADER_BYTES + self.header.map_or(0, |header| header.payload_bytes);
        whole.saturating_sub(self.bytes.len())
    }

    fn take(&mut self) -> Intake {
        self.begun = None;
        let mut payload = std::mem::take(&mut self.bytes);
        payload.drain(..HEADER_BYTES.min(payload.len()));
        match self.header.take() {
            Some(header) => Intake::Message(Message {
                header,
                payload,
                fds: self.fds.take(),
            }),
            None => Intake::Wanting,
        }
    }

    fn receive(&mut self, most: usize) -> Result<Received, MessageRefusal> {
        let mut piece = [0u8; 512];
        let room = most.min(piece.len());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut piece[..room])],
            &mut control,
            RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
        );
        let (count, flags) = match received {
            Ok(received) => (received.bytes, received.flags),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
            Err(Errno::CONNRESET | Errno::PIPE) => return Ok(Received::End),
            Err(error) => {
                return Err(MessageRefusal::lost(format!(
                    "cannot read the socket: {error}"
                )));
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        if flags.contains(ReturnFlags::CTRUNC) {
            // Some descriptors are missing, so this message and later ones cannot be trusted.
            return Err(MessageRefusal::lost(
                "descriptors of a message were lost: raise the limit of open files (LimitNOFILE)",
            ));
        }
        if self.fds.len() > 0 && self.offload.stays_full() {
            return Err(MessageRefusal::lost(
                "descriptors of its frontends that cannot be closed block all threads that close them",
            ));
        }
        if self.fds.len() > FDS_MAX {
            return Err(MessageRefusal::connection(format!(
                "a message with more than {FDS_MAX} descriptors"
            )));
        }
        if count == 0 {
            return Ok(Received::End);
        }
        self.bytes.extend_from_slice(&piece[..count]);
        self.begun.get_or_insert_with(Instant::now);
        Ok(Received::Bytes)
    }

    /// Checks that the connection can be written. It cannot if the frontend's end was shut down, as it is if
    /// the frontend sent that end as its backend channel.
    pub(crate) fn probe(&self) -> Result<(), MessageRefusal> {
        match send(&self.socket, &[], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Err(Errno::PIPE | Errno::CONNRESET) => Err(MessageRefusal::Gone),
            _ => Ok(()),
        }
    }

    /// Returns a descriptor of the connection for another process. Between messages nothing is lost with this value.
    pub(crate) fn hand_over(&self) -> io::Result<UnixStream> {
        self.socket.try_clone()
    }

    /// Ends the connection for both sides, even if another process has a descriptor of it. Descriptors may be queued in it,
    /// which are closed with it.
    pub(crate) fn close(self) {
        self.offload.hang_up(self.socket);
    }

    /// Writes an answer. Waits for room for at most [`ANSWER_WITHIN`], and stops waiting when `wake` is
    /// readable and `is_over` is true. `fd` is sent with the first byte.
    pub(crate) fn write(
        &self,
        mut bytes: &[u8],
        mut fd: Option<OwnedFd>,
        wake: impl AsFd,
        is_over: impl Fn() -> bool,
    ) -> Result<(), MessageRefusal> {
        let until = Instant::now() + ANSWER_WITHIN;
        while !bytes.is_empty() {
            match self.send(bytes, fd.as_ref()) {
                Ok(count) => {
                    bytes = bytes.get(count..).unwrap_or_default();
                    fd = None;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.await_room(until, wake.as_fd(), &is_over)?,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(MessageRefusal::Gone),
                Err(error) => {
                    return Err(MessageRefusal::lost(format!(
                        "cannot write the socket: {error}"
                    )));
                }
            }
        }
        Ok(())
    }

    fn send(&self, bytes: &[u8], fd: Option<&OwnedFd>) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = fd.map(OwnedFd::as_fd);
        if let Some(fd) = &fds {
            control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags)
    }

    fn await_room(
        &self,
        until: Instant,
        wake: BorrowedFd<'_>,
        is_over: &impl Fn() -> bool,
    ) -> Result<(), MessageRefusal> {
        if is_over() {
            return Err(MessageRefusal::Gone);
        }
        if Instant::now() >= until {
            return Err(MessageRefusal::connection(
                "the frontend does not read its answers",
            ));
        }
        // A wake-up for another reason stays readable until the session handles it, and polling it would spin.
        // So `wake` is polled only if no other wake-up is pending; otherwise the end is looked for now and then.
        let mut fds = vec![PollFd::new(&self.socket, PollFlags::OUT)];
        let until = match is_readable(wake) {
            false => {
                fds.push(PollFd::from_borrowed_fd(wake, PollFlags::IN));
                until
            }
            true => until.min(Instant::now() + LOOK_AGAIN),
        };
        wait(&mut fds, Some(until)).map_err(|error| MessageRefusal::lost(error.to_string()))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

enum Received {
    Bytes,
    Nothing,
    End,
}
