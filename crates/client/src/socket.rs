//! Bytes and file descriptors over a UNIX socket, with a time limit for every operation.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::Error;
use crate::message::{self, HEADER_BYTES};

/// Most file descriptors that the kernel carries in one message.
const FDS_MAX: usize = 253;
/// Longest payload that is accepted: every reply of a block device is far shorter.
const PAYLOAD_MAX: usize = 1 << 16;

/// A received message.
#[derive(Debug)]
pub struct ReceivedMessage {
    /// Message type.
    pub request: u32,
    /// Header flags.
    pub flags: u32,
    /// Payload.
    pub payload: Vec<u8>,
    /// File descriptors attached to it.
    pub fds: Vec<OwnedFd>,
}

/// A connected socket that carries whole messages, or any bytes for hostile tests.
#[derive(Debug)]
pub struct Socket {
    stream: UnixStream,
    timeout: Duration,
}

impl Socket {
    /// Connects to a listening daemon.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Socket, Error> {
        let stream = UnixStream::connect(path).map_err(Error::io("connect"))?;
        Socket::new(stream, timeout)
    }

    /// Wraps a connected stream.
    pub fn new(stream: UnixStream, timeout: Duration) -> Result<Socket, Error> {
        let setup = |stream: &UnixStream| {
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))
        };
        setup(&stream).map_err(Error::io("set up the socket"))?;
        Ok(Socket { stream, timeout })
    }

    /// Returns the stream itself, to shut it down or read peer credentials.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends bytes unchanged, with file descriptors attached to the first of them.
    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Error::Protocol(format!(
                "cannot attach {} descriptors",
                fds.len()
            )));
        }
        let mut sent = 0;
        while sent < bytes.len() {
            let part = [IoSlice::new(&bytes[sent..])];
            match rustix::net::sendmsg(&self.stream, &part, &mut control, SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(self.failed("send", error)),
            }
            control.clear();
        }
        Ok(())
    }

    /// Receives exactly `out.len()` bytes and the file descriptors that arrive with them.
    pub fn recv_raw(&self, out: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<(), Error> {
        let mut filled = 0;
        while filled < out.len() {
            let count = self.recv_some(&mut out[filled..], fds)?;
            if count == 0 {
                return Err(Error::Closed);
            }
            filled += count;
        }
        Ok(())
    }

    /// Receives one message.
    pub fn recv(&self) -> Result<ReceivedMessage, Error> {
        let mut header = [0; HEADER_BYTES];
        let mut fds = Vec::new();
        self.recv_raw(&mut header, &mut fds)?;
        let [request, flags, size] =
            [0, 4, 8].map(|at| message::u32_at(&header, at).unwrap_or_default());
        let size = size as usize;
        if size > PAYLOAD_MAX {
            return Err(Error::Protocol(format!("a payload of {size} bytes")));
        }
        let mut payload = vec![0; size];
        self.recv_raw(&mut payload, &mut fds)?;
        Ok(ReceivedMessage {
            request,
            flags,
            payload,
            fds,
        })
    }

    fn recv_some(&self, out: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize, Error> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut part = [IoSliceMut::new(out)];
        let got = loop {
            let flags = RecvFlags::CMSG_CLOEXEC;
            match rustix::net::recvmsg(&self.stream, &mut part, &mut control, flags) {
                Ok(got) => break got,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(self.failed("receive", error)),
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        Ok(got.bytes)
    }

    fn failed(&self, what: &'static str, error: rustix::io::Errno) -> Error {
        use rustix::io::Errno;
        match error {
            Errno::AGAIN => Error::TimedOut {
                what,
                after: self.timeout,
            },
            Errno::PIPE | Errno::CONNRESET => Error::Closed,
            other => Error::Io {
                doing: what,
                source: io::Error::from(other),
            },
        }
    }
}

/// Returns true if a descriptor becomes readable (or is hung up) in time.
pub(crate) fn readable(fd: BorrowedFd<'_>, time: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let time = Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: time.subsec_nanos().into(),
    };
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    loop {
        match poll(&mut fds, Some(&time)) {
            Ok(count) => return count > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}
