//! Sockets whose close waits.

use std::fmt::Display;
use std::io::{IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::Duration;

use cleave_client::Socket;
use cleave_client::message::{self, VERSION, request};
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::timing::time_limit;

/// A TCP socket whose last close waits ten minutes for unread data, while the other end stays open.
pub struct Lingering {
    // Dropped first: without it the close does not wait.
    unread: TcpStream,
    /// The socket.
    pub socket: OwnedFd,
}

impl Lingering {
    /// Makes one.
    pub fn new() -> Result<Lingering, String> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(failed("listen"))?;
        let address = listener.local_addr().map_err(failed("address"))?;
        let mut stream = TcpStream::connect(address).map_err(failed("connect"))?;
        let (unread, _) = listener.accept().map_err(failed("accept"))?;
        set_socket_linger(&stream, Some(Duration::from_secs(600))).map_err(failed("linger"))?;
        stream
            .set_nonblocking(true)
            .map_err(failed("non-blocking"))?;
        // Fill it until it stays full: the kernel still moves some data to the other end meanwhile.
        let mut full = 0;
        while full < 5 {
            full = match stream.write(&[0; 1 << 16]) {
                Ok(_) => 0,
                Err(_) => full + 1,
            };
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(Lingering {
            socket: stream.into(),
            unread,
        })
    }

    /// Closes our copy; the copy that was sent is then the last one.
    pub fn give_up(self) -> TcpStream {
        self.unread
    }

    /// Sends it with an out-of-band byte, which the kernel discards with it for a receiver that has not asked for such bytes. Closes our
    /// copy.
    pub fn send_out_of_band(self, over: &Socket) -> Result<TcpStream, String> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [self.socket.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let bytes = [IoSlice::new(b"x")];
        let sent = sendmsg(over.stream(), &bytes, &mut control, SendFlags::OOB);
        sent.map_err(failed("send out of band"))?;
        Ok(self.give_up())
    }

    /// Connects to the socket of a disk and sends a message with it, without waiting for anybody to read that.
    pub fn queue(self, socket: &Path) -> Result<TcpStream, String> {
        let connection = Socket::connect(socket, time_limit()).map_err(failed("connect"))?;
        let bytes = message::message(request::GET_FEATURES, VERSION, &[]);
        let sent = connection.send_raw(&bytes, &[self.socket.as_fd()]);
        sent.map_err(failed("send"))?;
        Ok(self.give_up())
    }
}

fn failed<E: Display>(what: &'static str) -> impl FnOnce(E) -> String {
    move |error| format!("{what}: {error}")
}
