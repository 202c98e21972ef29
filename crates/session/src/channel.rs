//! The backend channel: the socket on which the daemon may send requests of its own (vhost-user "Back-end /
//! communication").

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use vhost::vhost_user::message::BackendReq;

use crate::MessageRefusal;
use crate::foreign::Foreign;
use crate::message::notice;

#[derive(Debug)]
pub(crate) struct Channel(Foreign);

/// Result of notifying the frontend.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Notified {
    Sent,
    /// The frontend has not read the previous requests yet, so try again later.
    Later,
    /// The channel is unusable.
    Never,
}

impl Channel {
    pub(crate) fn fd(&self) -> Option<&OwnedFd> {
        self.0.fd()
    }

    /// Takes a local stream socket and nothing else.
    pub(crate) fn new(socket: Foreign) -> Result<Channel, MessageRefusal> {
        match socket.close_for_reading() {
            true => Ok(Channel(socket)),
            false => Err(MessageRefusal::message(
                "the backend channel is not a stream socket",
            )),
        }
    }

    /// Notifies the frontend that the configuration space has changed. Never waits, neither for room nor for an
    /// answer.
    pub(crate) fn config_changed(&self) -> Notified {
        let notice = notice(BackendReq::CONFIG_CHANGE_MSG.into());
        let Some(socket) = self.0.fd() else {
            return Notified::Never;
        };
        match send(socket, &notice, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) if count == notice.len() => Notified::Sent,
            Err(Errno::AGAIN | Errno::INTR) => Notified::Later,
            // A partly sent message would put every later one out of step.
            Ok(_) | Err(_) => Notified::Never,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{Shutdown, TcpListener};
    use std::os::unix::net::{UnixDatagram, UnixStream};

    #[test]
    fn only_local_stream_sockets_are_taken() {
        let (stream, _other) = UnixStream::pair().unwrap();
        assert!(Channel::new(stream.into()).is_ok());
        let (datagram, _other) = UnixDatagram::pair().unwrap();
        assert!(Channel::new(datagram.into()).is_err());
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(Channel::new(tcp.into()).is_err());
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(Channel::new(file.into()).is_err());
    }

    #[test]
    fn a_full_or_closed_channel_does_not_block() {
        let (stream, mut other) = UnixStream::pair().unwrap();
        let channel = Channel::new(stream.into()).unwrap();
        assert_eq!(channel.config_changed(), Notified::Sent);
        let mut bytes = [0; 12];
        other.read_exact(&mut bytes).unwrap();
        // Request 2, version 1, no payload and no answer wanted.
        let words = [2u32, 1, 0].map(u32::to_ne_bytes).concat();
        assert_eq!(bytes.as_slice(), words);
        while channel.config_changed() == Notified::Sent {}
        assert_eq!(channel.config_changed(), Notified::Later);
        // By a shutdown: a child of another test may hold a copy of the descriptor for a moment.
        other.shutdown(Shutdown::Both).unwrap();
        assert_eq!(channel.config_changed(), Notified::Never);
    }
}
