//! Parts of a frontend that only tests need: messages that setting up a device never sends, the backend channel, and
//! checks of a connection and a listening socket from outside.

use std::io::Read as _;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use cleave_client::message::{
    self, FLAG_NEED_REPLY, FLAG_REPLY, RegionBytes, VERSION, message, request,
};
use cleave_client::{Error, Frontend, Socket};

use crate::TIMEOUT;

/// A message of the backend channel (vhost-user "Back-end message types").
const CONFIG_CHANGE: u32 = 2;

/// Messages that only tests send through a [`Frontend`].
pub trait Messages {
    /// RESET_OWNER.
    fn reset_owner(&self) -> Result<(), Error>;
    /// RESET_DEVICE.
    fn reset_device(&self) -> Result<(), Error>;
    /// GET_STATUS.
    fn status(&self) -> Result<u64, Error>;
    /// GET_QUEUE_NUM.
    fn queue_num(&self) -> Result<u64, Error>;
    /// SET_CONFIG.
    fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<(), Error>;
    /// SET_BACKEND_REQ_FD with a new socket pair.
    fn open_backend_channel(&self) -> Result<BackendChannel, Error>;
    /// REM_MEM_REG, with or without a descriptor (both are allowed).
    fn rem_mem_reg(&self, region: RegionBytes, fd: Option<BorrowedFd<'_>>) -> Result<(), Error>;
    /// GET_MAX_MEM_SLOTS.
    fn max_mem_slots(&self) -> Result<u64, Error>;
    /// GET_INFLIGHT_FD: the payload and descriptor of the reply.
    fn inflight_fd(&self, vrings: u16, size: u16) -> Result<(Vec<u8>, Option<OwnedFd>), Error>;
}

impl Messages for Frontend {
    fn reset_owner(&self) -> Result<(), Error> {
        self.send(request::RESET_OWNER, &[], &[])
    }

    fn reset_device(&self) -> Result<(), Error> {
        self.send(request::RESET_DEVICE, &[], &[])
    }

    fn status(&self) -> Result<u64, Error> {
        self.ask_word(request::GET_STATUS)
    }

    fn queue_num(&self) -> Result<u64, Error> {
        self.ask_word(request::GET_QUEUE_NUM)
    }

    fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        let payload = message::config_space(offset, bytes.len() as u32, 0, bytes);
        self.send(request::SET_CONFIG, &payload, &[])
    }

    fn open_backend_channel(&self) -> Result<BackendChannel, Error> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.send(request::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()])?;
        Ok(BackendChannel {
            socket: Socket::new(ours, TIMEOUT)?,
        })
    }

    fn rem_mem_reg(&self, region: RegionBytes, fd: Option<BorrowedFd<'_>>) -> Result<(), Error> {
        self.send(
            request::REM_MEM_REG,
            &message::mem_reg(region),
            fd.as_slice(),
        )
    }

    fn max_mem_slots(&self) -> Result<u64, Error> {
        self.ask_word(request::GET_MAX_MEM_SLOTS)
    }

    fn inflight_fd(&self, vrings: u16, size: u16) -> Result<(Vec<u8>, Option<OwnedFd>), Error> {
        // mmap size, mmap offset, vrings, vring size, padding
        let mut asked = [0; 24];
        asked[16..18].copy_from_slice(&vrings.to_le_bytes());
        asked[18..20].copy_from_slice(&size.to_le_bytes());
        let mut got = self.request(request::GET_INFLIGHT_FD, &asked, &[])?;
        Ok((got.payload, got.fds.pop()))
    }
}

/// The frontend's end of the backend channel.
#[derive(Debug)]
pub struct BackendChannel {
    socket: Socket,
}

impl BackendChannel {
    /// Waits for a CONFIG_CHANGE and acknowledges it if requested; `false`: none arrived in time.
    pub fn config_change(&self, time: Duration) -> Result<bool, Error> {
        self.socket.stream().set_read_timeout(Some(time)).unwrap();
        let got = match self.socket.recv() {
            Err(Error::TimedOut { .. }) => return Ok(false),
            got => got?,
        };
        if got.flags & FLAG_NEED_REPLY != 0 {
            let ack = message(got.request, VERSION | FLAG_REPLY, &0u64.to_le_bytes());
            self.socket.send_raw(&ack, &[])?;
        }
        match got.request {
            CONFIG_CHANGE => Ok(true),
            other => Err(Error::Protocol(format!("backend message {other}"))),
        }
    }
}

/// Returns true if the peer closes the connection within the time limit. Any data that it still sends is discarded.
pub fn closes_within(socket: &Socket, time: Duration) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, Interrupted};
    let deadline = Instant::now() + time;
    let mut stream = socket.stream();
    let timeout = stream.read_timeout().unwrap();
    let closes = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // The kernel rejects a time-out of zero.
        if stream.set_read_timeout(Some(left)).is_err() {
            break false;
        }
        match stream.read(&mut [0; 4096]) {
            Ok(0) => break true,
            Ok(_) => {}
            Err(error) if error.kind() == Interrupted => {}
            Err(error) => break matches!(error.kind(), BrokenPipe | ConnectionReset),
        }
    };
    stream.set_read_timeout(timeout).unwrap();
    closes
}

/// Returns true if a process listens on a socket of this path. Does not connect, because the daemon would see a frontend. The
/// socket's file exists a moment before the daemon listens.
pub fn has_listener(path: &Path) -> bool {
    // Num RefCount Protocol Flags Type State Inode Path; the flag is __SO_ACCEPTCON.
    const ACCEPTS: &str = "00010000";
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let path = path.to_string_lossy();
    sockets.lines().any(|line| {
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some(ACCEPTS) && fields.nth(3) == Some(&path)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_file_alone_is_not_a_listener() {
        let name = format!("cleave-listens-{}.sock", std::process::id());
        let path = std::env::temp_dir().join(name);
        assert!(!has_listener(&path));
        let listener = UnixListener::bind(&path).unwrap();
        assert!(has_listener(&path));
        drop(listener);
        assert!(path.exists() && !has_listener(&path));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_close_is_noticed_and_silence_is_not_taken_for_one() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let socket = Socket::new(ours, TIMEOUT).unwrap();
        assert!(!closes_within(&socket, Duration::from_millis(20)));
        assert_eq!(socket.stream().read_timeout().unwrap(), Some(TIMEOUT));
        std::io::Write::write_all(&mut &theirs, b"farewell").unwrap();
        drop(theirs);
        assert!(closes_within(&socket, TIMEOUT));
    }
}
