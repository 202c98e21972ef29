//! The connection of a client. Nobody wants the descriptors that it may send along, but somebody has to close them, and that can take as
//! long as the client likes: a TCP socket may linger until data is read that nobody reads. A plain `read` has the kernel close them on this
//! thread, on which all disks depend.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use cleave_session::Offload;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, Shutdown, recvmsg, shutdown,
};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

/// Most descriptors that the kernel carries with a message.
const FDS_MAX: usize = 253;

/// A connection that ends when its client sends a descriptor, and of which other threads close what is unread.
pub(super) struct ClientStream {
    /// `None`: it goes on with another protocol.
    stream: Option<UnixStream>,
    offload: Offload,
}

impl ClientStream {
    pub(super) fn new(stream: UnixStream, offload: &Offload) -> ClientStream {
        ClientStream {
            stream: Some(stream),
            offload: offload.clone(),
        }
    }

    /// Returns the connection, for another protocol.
    pub(super) fn into_socket(mut self) -> Option<net::UnixStream> {
        self.stream.take()?.into_std().ok()
    }

    fn open(self: Pin<&mut Self>) -> io::Result<Pin<&mut UnixStream>> {
        let stream = self.get_mut().stream.as_mut();
        stream
            .map(Pin::new)
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

/// Receives without waiting: how many bytes, and the descriptors that came with them.
fn receive(stream: impl AsFd, room: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    loop {
        match recvmsg(&stream, &mut [IoSliceMut::new(room)], &mut control, flags) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(received) => {
                let mut fds = Vec::new();
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(more) = message {
                        fds.extend(more);
                    }
                }
                return Ok((received.bytes, fds));
            }
        }
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let offload = self.offload.clone();
        let stream = self.open()?;
        loop {
            ready!(stream.poll_read_ready(context))?;
            let room = into.initialize_unfilled();
            match stream.try_io(Interest::READABLE, || receive(&*stream, room)) {
                Ok((bytes, fds)) if fds.is_empty() => {
                    into.advance(bytes);
                    return Poll::Ready(Ok(()));
                }
                Ok((_, fds)) => {
                    offload.close(fds);
                    return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.open()?.poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.open()?.poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.open()?.poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.open()?.poll_shutdown(context)
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        let stream = self.stream.take();
        let Some(stream) = stream.and_then(|stream| stream.into_std().ok()) else {
            return;
        };
        // From now on the client can send nothing more. If nothing is left to read, closing it closes nothing else.
        let _ = shutdown(&stream, Shutdown::Both);
        match receive(&stream, &mut [0]) {
            Ok((0, fds)) if fds.is_empty() => {}
            unread => self.offload.close((stream, unread)),
        }
    }
}
