//! The connection of a client. Nobody wants the descriptors that it may send along, but somebody has to close them, and that can take as
//! long as the client likes: a TCP socket may linger until data is read that nobody reads. All disks depend on this thread, so it never
//! takes a descriptor out of a connection: it looks before it receives, and has another thread close a connection in which one waits.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsFd;
use std::os::unix::net;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use cleave_session::Offload;
use rustix::io::retry_on_intr;
use rustix::net::sockopt::set_socket_oobinline;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, Shutdown, recv, recvmsg, shutdown};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

/// A connection that ends when its client sends a descriptor, and of which other threads close what is unread.
pub(super) struct ClientStream {
    /// `None`: it goes on with another protocol.
    stream: Option<UnixStream>,
    offload: Offload,
}

impl ClientStream {
    pub(super) fn new(stream: UnixStream, offload: &Offload) -> io::Result<ClientStream> {
        // An out-of-band byte is otherwise discarded by the next receive, and its descriptors are closed by that.
        if let Err(error) = set_socket_oobinline(&stream, true) {
            offload.close(stream);
            return Err(error.into());
        }
        Ok(ClientStream {
            stream: Some(stream),
            offload: offload.clone(),
        })
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

/// Receives without waiting, up to the first byte that came with a descriptor. Fails if that is the next one.
fn receive(stream: impl AsFd, room: &mut [u8]) -> io::Result<usize> {
    let count = count_harmless(&stream, room)?;
    // Nobody else receives, so these are the bytes that were looked at, and not those that came since.
    let room = room.get_mut(..count).unwrap_or_default();
    match room.is_empty() {
        true => Ok(0),
        false => Ok(retry_on_intr(|| recv(&stream, &mut *room, RecvFlags::DONTWAIT))?.0),
    }
}

/// Returns how many bytes can be received before any descriptor.
fn count_harmless(stream: impl AsFd, room: &mut [u8]) -> io::Result<usize> {
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let seen = retry_on_intr(|| {
        // The kernel says that there is no room for a descriptor, and keeps it: it stays where it is.
        let mut control = RecvAncillaryBuffer::default();
        recvmsg(&stream, &mut [IoSliceMut::new(room)], &mut control, flags)
    })?;
    match seen.flags.contains(ReturnFlags::CTRUNC) {
        false => Ok(seen.bytes),
        true => Err(io::ErrorKind::InvalidData.into()),
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream = self.open()?;
        loop {
            ready!(stream.poll_read_ready(context))?;
            let room = into.initialize_unfilled();
            match stream.try_io(Interest::READABLE, || receive(&*stream, room)) {
                Ok(bytes) => {
                    into.advance(bytes);
                    return Poll::Ready(Ok(()));
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
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        match retry_on_intr(|| recv(&stream, &mut [0], flags)) {
            Ok((_, 0)) => {}
            Ok(_) | Err(_) => self.offload.close(stream),
        }
    }
}
